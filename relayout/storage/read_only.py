"""What stores of one folder that are no place on a drive, and cannot be written to, have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn, Self

from relayout.errors import PlanError
from relayout.storage.protocols import Kind


class ReadOnlyStore:
    """A folder that shows no path, and refuses to be an output."""

    __slots__ = ()

    def path(self, name: str) -> Path | None:
        return None

    def kind(self) -> Kind:
        return Kind.FOLDER

    def snapshot(self) -> Self:
        return self

    def add(self, *arguments: Any, **options: Any) -> NoReturn:
        raise PlanError("can only be read", path=str(self), code="unsupported")

    check_output = stage = stage_part = add
