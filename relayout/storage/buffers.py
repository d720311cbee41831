"""A page-aligned buffer for reads and writes."""

from __future__ import annotations

import mmap
from contextlib import suppress

from relayout.core.extents import BLOCK, align_up

HUGE_PAGE = 2 * 2**20
"""Bytes of a huge page on x86-64 and, mostly, arm64."""


def with_huge_pages(memory: mmap.mmap) -> None:
    """Ask for huge pages where the system has them: direct reads into them are up to three times as fast."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # The kernel has none.
            memory.madvise(mmap.MADV_HUGEPAGE)


class Buffer:
    """Page-aligned memory that grows on demand. Not thread-safe."""

    def __init__(self) -> None:
        self._memory: memoryview | None = None

    def reserve(self, nbytes: int) -> memoryview:
        """The first `nbytes` of the memory. Growing it discards its content."""
        if self._memory is None or self._memory.nbytes < nbytes:
            memory = mmap.mmap(-1, align_up(max(nbytes, 1), BLOCK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
            if nbytes >= HUGE_PAGE:
                with_huge_pages(memory)
            self._memory = memoryview(memory)
        return self._memory[:nbytes]

    def discard(self) -> None:
        """Give the pages back now, whatever still refers to the memory; its content is lost."""
        if self._memory is not None and hasattr(mmap, "MADV_DONTNEED"):
            mapping = self._memory.obj
            assert isinstance(mapping, mmap.mmap)
            mapping.madvise(mmap.MADV_DONTNEED)
