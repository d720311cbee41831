"""Files without descriptors, whose first bytes, or all of them, are known when they are opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from relayout.storage.protocols import Closable, FileStat


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
