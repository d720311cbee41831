"""Host memory to read into: the arena, one allocation that a rank's tensors are views of, or tensors that exist."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relayout.core.extents import BLOCK, align_up
from relayout.loader.tensors import check_mode
from relayout.storage.libc import map_file

if TYPE_CHECKING:
    import torch

HUGE_PAGE = 2 * 2**20
"""Bytes of a huge page on x86-64 and, mostly, arm64."""


MAP_FIXED = 0x10
"""In place of what is mapped there; the value on Linux and macOS."""


@dataclass(frozen=True, slots=True)
class HostArena:
    """Anonymous memory that starts on a page border, a huge one if it is so large. Freed when nothing refers to it."""

    memory: mmap.mmap
    start: int
    """Where in `memory` the arena begins, in bytes."""
    nbytes: int

    def span(self, offset: int, nbytes: int) -> memoryview:
        """See `Memory.span`."""
        return memoryview(self.memory)[self.start + offset : self.start + offset + nbytes]

    @property
    def whole(self) -> memoryview:
        """See `Memory.whole`."""
        return self.span(0, self.nbytes)

    @property
    def address(self) -> int:
        """Of the arena's first byte."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) + self.start

    def tensor(self, on_free: Callable[[HostArena], None] | None = None) -> torch.Tensor:
        """See `Arena.tensor`; `on_free` is called when no view of it is left.

        Raises:
            PlanError: as `tensors.check_mode`.
        """
        import torch

        check_mode()
        nbytes = max(self.nbytes, 1)
        memory = (ctypes.c_char * nbytes).from_buffer(self.memory, self.start)
        if on_free is not None:
            weakref.finalize(memory, on_free, self).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)

    def discard(self) -> None:
        """See `Arena.discard`: pages are given back at once, addresses when nothing refers to them."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANON | MAP_FIXED
        with suppress(OSError):
            map_file(-1, 0, len(self.memory), flags=flags, writable=True, address=self.address - self.start)
        with suppress(BufferError):  # A traceback has views of it.
            self.memory.close()


def allocate(nbytes: int) -> HostArena:
    """Reserve `nbytes` of memory; pages come into being when they are first written.

    Raises:
        MemoryError: the address space is exhausted.
    """
    if nbytes < HUGE_PAGE:
        return HostArena(_reserve(align_up(max(nbytes, 1), mmap.PAGESIZE)), 0, nbytes)
    memory = _reserve(align_up(nbytes, HUGE_PAGE) + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Without huge pages, a direct read first has the kernel map and clear each 4 KiB page.
        with suppress(OSError):  # Of a kernel that has none.
            memory.madvise(mmap.MADV_HUGEPAGE)
    return HostArena(memory, -HostArena(memory, 0, 0).address % HUGE_PAGE, nbytes)


def _reserve(nbytes: int) -> mmap.mmap:
    try:
        # Private: memory that processes share takes huge pages on few systems, and is shared with a forked child.
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "more than there are addresses"
        raise MemoryError(f"cannot reserve {nbytes} bytes for a rank: {reason}") from None


class ArenaPool:
    """Arenas that are used again when nobody refers to their tensors any more: pages that exist cost nothing."""

    def __init__(self, nbytes: int) -> None:
        """Keep arenas of at least `nbytes`, which is what most of them are asked to have."""
        self._nbytes = nbytes
        self._free: list[HostArena] = []
        self._is_open = True

    def take(self, nbytes: int) -> tuple[HostArena, torch.Tensor]:
        """See `Pool.take`."""
        if nbytes <= self._nbytes and self._free:
            arena = self._free.pop()
        else:
            self._free.clear()  # What is idle must not lie beside what is larger.
            arena = allocate(max(nbytes, self._nbytes))
        return arena, arena.tensor(self._give)

    def _give(self, arena: HostArena) -> None:
        """Take back an arena that nobody uses any more."""
        if self._is_open and arena.nbytes == self._nbytes:
            self._free.append(arena)

    def close(self) -> None:
        """See `Pool.close`."""
        self._is_open = False
        self._free.clear()


class Scattered:
    """Memory that exists already, in pieces: each at the first free offset that is congruent with its address."""

    def __init__(self, pieces: Sequence[tuple[int, int]]) -> None:
        """Take (address, nbytes) of each piece; the caller keeps them alive."""
        self.offsets = scatter(pieces)
        """Of the pieces."""
        self._addresses = [address for address, _ in pieces]

    def span(self, offset: int, nbytes: int) -> memoryview:
        """See `Memory.span`."""
        which = bisect_right(self.offsets, offset) - 1
        address = self._addresses[which] + offset - self.offsets[which]
        return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")

    @property
    def whole(self) -> None:
        """See `Memory.whole`."""
        return None


def scatter(pieces: Sequence[tuple[int, int]]) -> list[int]:
    """Offsets for pieces of memory, given as (address, nbytes), in an address space that starts at 0."""
    offsets = []
    end = 0
    for address, nbytes in pieces:
        offsets.append(align_up(end, BLOCK) + address % BLOCK)
        end = offsets[-1] + max(nbytes, 1)  # No two pieces at one offset.
    return offsets
