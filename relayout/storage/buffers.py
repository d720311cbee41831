"""A page-aligned buffer for reads and writes."""

from __future__ import annotations

import mmap

from relayout.core.extents import BLOCK, align_up
from relayout.storage.pages import HUGE_PAGE, in_huge_pages


class Buffer:
    """Page-aligned memory that grows on demand. Not thread-safe."""

    def __init__(self) -> None:
        self._memory: memoryview | None = None

    def reserve(self, nbytes: int) -> memoryview:
        """The first `nbytes` of the memory. Growing it discards its content."""
        if self._memory is None or self._memory.nbytes < nbytes:
            if nbytes < HUGE_PAGE:
                memory = mmap.mmap(-1, align_up(max(nbytes, 1), BLOCK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
                self._memory = memoryview(memory)
            else:
                self._memory = in_huge_pages(nbytes)
        return self._memory[:nbytes]

    def discard(self) -> None:
        """Give the pages back now, whatever still refers to the memory; its content is lost."""
        if self._memory is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapping = self._memory.obj
            assert isinstance(mapping, mmap.mmap)
            mapping.madvise(mmap.MADV_DONTNEED)
