"""The arena: one allocation that a rank's tensors are views of."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass

from relayout.extents import align_up

HUGE_PAGE = 2 * 2**20
"""Bytes of a huge page on x86-64 and, mostly, arm64."""


@dataclass(frozen=True, slots=True)
class HostArena:
    """Anonymous memory that starts on a huge-page border. Freed when nothing refers to it any more."""

    memory: mmap.mmap
    start: int
    """Where in `memory` the arena begins, in bytes."""
    nbytes: int

    @property
    def view(self) -> memoryview:
        """The arena's bytes."""
        return memoryview(self.memory)[self.start : self.start + self.nbytes]


def allocate(nbytes: int) -> HostArena:
    """Reserve `nbytes` of memory; pages come into being when they are first written.

    Raises:
        MemoryError: the address space is exhausted.
    """
    try:
        # Private: memory that processes share takes huge pages on few systems, and is shared with a forked child.
        memory = mmap.mmap(-1, align_up(max(nbytes, 1), HUGE_PAGE) + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    except OSError as error:
        raise MemoryError(f"cannot reserve {nbytes} bytes for a rank: {error.strerror}") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Without huge pages, a direct read first has the kernel map and clear each 4 KiB page.
        memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return HostArena(memory, -address % HUGE_PAGE, nbytes)
