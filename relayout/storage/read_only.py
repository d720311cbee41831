"""What stores of one folder that are no place on a drive have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from relayout.storage.protocols import Kind


class ReadOnlyStore:
    """A folder that shows no path."""

    __slots__ = ()

    def path(self, name: str) -> Path | None:
        return None

    def kind(self) -> Kind:
        return Kind.FOLDER

    def snapshot(self) -> Self:
        return self
