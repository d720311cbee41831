"""What stores above other stores have in common: they only read, and know the first bytes of some files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Self

from relayout.storage.protocols import Closable, FileStat, Kind


class ReadOnlyStore:
    """A folder that shows no path."""

    __slots__ = ()

    def path(self, name: str) -> Path | None:
        return None

    def kind(self) -> Kind:
        return Kind.FOLDER

    def snapshot(self) -> Self:
        return self


class HeadFile(Closable):
    """A `protocols.ReadableFile`. It holds nothing to close."""

    alignment: ClassVar[int] = 1

    def __init__(self, head: bytes, stat: FileStat, fill: Callable[[int, memoryview], None] | None = None) -> None:
        """`fill` fills memory with the bytes at an offset behind the head; None: all of the file is in the head."""
        self.stat = stat
        self.nbytes = stat.nbytes
        self.version = stat.version
        self._head = head
        self._fill = fill

    def fileno(self) -> None:
        return

    def read(self, offset: int, view: memoryview) -> None:
        view = view[: max(0, self.nbytes - offset)]
        known = memoryview(self._head)[offset : offset + view.nbytes]
        view[: known.nbytes] = known
        if self._fill is not None and known.nbytes < view.nbytes:
            self._fill(offset + known.nbytes, view[known.nbytes :])

    def close(self) -> None:
        """Do nothing."""
