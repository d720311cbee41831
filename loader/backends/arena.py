"""Host memory to read into: the arena, one allocation for all of a rank's tensors; and existing tensors."""

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
from relayout.loader.backends.base import Pool
from relayout.loader.tensors import check_mode
from relayout.storage.libc import map_file
from relayout.storage.pages import HUGE_PAGE, FreshMemory, address_of

if TYPE_CHECKING:
    import torch

MAP_FIXED = 0x10
"""Flag of mmap(2): replace what is mapped at the address. The value on Linux and macOS."""


@dataclass(frozen=True, slots=True)
class HostArena:
    """Anonymous memory, aligned to a page, or to a huge page if it is that large. Freed when nothing refers to it."""

    memory: mmap.mmap
    start: int
    """Offset of the arena in `memory`, in bytes."""
    nbytes: int
    fresh: FreshMemory | None = None
    """Chooses pages for what has not been touched; None: the kernel does."""

    def span(self, offset: int, nbytes: int) -> memoryview:
        if self.fresh is not None:  # Here, by the thread that fills it: other threads read meanwhile.
            self.fresh.touch(offset, nbytes)
        return memoryview(self.memory)[self.start + offset : self.start + offset + nbytes]

    @property
    def address(self) -> int:
        """Address of the arena's first byte."""
        return address_of(self.memory) + self.start

    def tensor(self, on_free: Callable[[HostArena], None] | None = None) -> torch.Tensor:
        """All of it; `on_free` is called when the last view of it is gone.

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
        # Frees pages now, and the address range when nothing refers to it.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANON | MAP_FIXED
        with suppress(OSError):
            map_file(-1, 0, len(self.memory), flags=flags, writable=True, address=self.address - self.start)
        with suppress(BufferError):  # A traceback refers to views of it.
            self.memory.close()


def allocate(nbytes: int) -> HostArena:
    """Reserve `nbytes` of memory; pages are allocated when `span` is first asked for them.

    Raises:
        MemoryError: the address space is exhausted.
    """
    if nbytes < HUGE_PAGE:
        return HostArena(_reserve(align_up(max(nbytes, 1), mmap.PAGESIZE)), 0, nbytes)
    memory = _reserve(align_up(nbytes, HUGE_PAGE) + HUGE_PAGE)
    start = -address_of(memory) % HUGE_PAGE
    return HostArena(memory, start, nbytes, FreshMemory(memory, start, nbytes))


def _reserve(nbytes: int) -> mmap.mmap:
    try:
        # Private: shared memory has huge pages on few systems, and a forked child would write to it, too.
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else "more than there are addresses"
        raise MemoryError(f"cannot reserve {nbytes} bytes for a rank: {reason}") from None


class ArenaPool(Pool[memoryview]):
    """Reuses an arena when the last reference to its tensor is gone, which saves allocating its pages again."""

    def __init__(self, nbytes: int) -> None:
        """Arenas have at least `nbytes`, and only those of exactly `nbytes` are reused."""
        self._nbytes = nbytes
        self._free: list[HostArena] = []
        self._is_open = True

    def take(self, nbytes: int) -> tuple[HostArena, torch.Tensor]:
        if nbytes <= self._nbytes and self._free:
            arena = self._free.pop()
        else:
            self._free.clear()  # Free idle arenas before a larger one is allocated.
            arena = allocate(max(nbytes, self._nbytes))
        return arena, arena.tensor(self._give)

    def _give(self, arena: HostArena) -> None:
        """Take back an arena that is no longer used."""
        if self._is_open and arena.nbytes == self._nbytes:
            self._free.append(arena)

    def close(self) -> None:
        self._is_open = False
        self._free.clear()


class Scattered:
    """Existing memory in pieces, each at the first free offset that is congruent with its address."""

    def __init__(self, pieces: Sequence[tuple[int, int]]) -> None:
        """Take (address, nbytes) of each piece; the caller keeps them alive."""
        self.offsets = scatter(pieces)
        """Offset of each piece."""
        self._addresses = [address for address, _ in pieces]

    def span(self, offset: int, nbytes: int) -> memoryview:
        which = bisect_right(self.offsets, offset) - 1
        address = self._addresses[which] + offset - self.offsets[which]
        return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")


def scatter(pieces: Sequence[tuple[int, int]]) -> list[int]:
    """Offsets for pieces of memory, given as (address, nbytes), in an address space that starts at 0."""
    offsets = []
    end = 0
    for address, nbytes in pieces:
        offsets.append(align_up(end, BLOCK) + address % BLOCK)
        end = offsets[-1] + max(nbytes, 1)  # No two pieces at one offset.
    return offsets
