"""What stores of one folder that are no place on a drive, and cannot be written to, have in common."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn, Self

from relayout.errors import PlanError
from relayout.storage.protocols import Kind, Modes, Replaceable, Staging, Store


class ReadOnlyStore:
    """A folder that shows no path, and refuses to be an output."""

    __slots__ = ()

    def path(self, name: str) -> Path | None:
        return None

    def kind(self) -> Kind:
        return Kind.FOLDER

    def snapshot(self) -> Self:
        return self

    def add(self, name: str, content: bytes) -> NoReturn:
        raise self._read_only()

    def check_output(self, source: Store, older: Replaceable, *, force: bool) -> NoReturn:
        raise self._read_only()

    def stage(
        self, older: Replaceable, *, replace: bool, modes: Modes, shared: str | None = None
    ) -> AbstractContextManager[Staging]:
        raise self._read_only()

    def stage_part(
        self, older: Replaceable, shared: str, part: str, *, replace: bool, modes: Modes
    ) -> AbstractContextManager[Staging]:
        raise self._read_only()

    def _read_only(self) -> PlanError:
        return PlanError("can only be read", path=str(self), code="unsupported")
