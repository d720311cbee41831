"""The `mapped` backend: the page cache's own pages as the arena, read when they are first touched."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from relayout.errors import PlanError
from relayout.extents import Transfer, align_down, align_up
from relayout.index import Read
from relayout.loader.arena import HostArena, HostMemory
from relayout.loader.backends import Fill, Filling
from relayout.loader.budgets import Budget
from relayout.loader.host import HostBackend
from relayout.loader.mapping import map_file
from relayout.loader.readplan import CHUNK_NBYTES, Chunk
from relayout.loader.sources import Access, Sources
from relayout.workers import Stop, Workers

_FLAGS = mmap.MAP_PRIVATE | 0x10
"""With MAP_FIXED, which has this value on Linux and macOS: in place of the arena's own pages. Private: who writes to a
tensor gets a copy of the page."""


@dataclass(frozen=True, slots=True)
class MappedBackend:
    """Maps whole pages of the files over the arena, where both lie alike, and copies the rest.

    A tensor costs nothing until it is used. As with every mapping, the process is killed (SIGBUS) that then touches
    what a drive cannot read, or what was cut off a file.
    """

    @property
    def name(self) -> str:
        """See `Backend.name`."""
        return "mapped"

    @property
    def access(self) -> Access:
        """How files are read: through the page cache."""
        return Access.BUFFERED

    def chunks(self, reads: Sequence[Read], alignment: int, budget: Budget) -> list[Chunk]:
        """See `Backend.chunks`: what is mapped is not requested."""
        return []

    def start(self, memory: HostMemory, fill: Fill) -> Filling:
        """See `Backend.start`.

        Raises:
            PlanError: the memory is not an arena.
        """
        if not isinstance(memory, HostArena):
            raise PlanError("backend 'mapped' makes the memory of its tensors itself: it cannot fill given ones")
        sources = Sources(fill.files, self.access)
        try:
            copied = tuple(rest for read in fill.reads for rest in _map(memory, sources, read))
        finally:
            sources.close()
        edges = replace(fill, reads=copied, checks=None, arrived=None, stop=Stop())
        return _MappedFilling(memory, fill, HostBackend(self.access).start(memory, edges))


class _MappedFilling:
    """Waits for the bytes that had to be copied, and looks at all of them if digests are to be checked."""

    def __init__(self, memory: HostArena, fill: Fill, copying: Filling) -> None:
        self._memory = memory
        self._fill = fill
        self._copying = copying

    def join(self, on_progress: Callable[[int], None] | None = None) -> None:
        """See `Filling.join`."""
        self._copying.join()
        checks = self._fill.checks
        if checks is not None:
            Workers(self._fill.budget.threads, self._stretches(), object, self._check, self._fill.stop).run(on_progress)
            checks.finish()
        if on_progress is not None:
            on_progress(sum(read.transfer.total_nbytes for read in self._fill.reads))
        for read in self._fill.reads:
            self._fill.tell(read.transfer.target, read.transfer.total_nbytes)

    def _stretches(self) -> Iterator[tuple[int, int]]:
        for read in self._fill.reads:
            for offset in range(read.transfer.target, read.transfer.target_end, CHUNK_NBYTES):
                yield offset, min(CHUNK_NBYTES, read.transfer.target_end - offset)

    def _check(self, state: object, stretch: tuple[int, int]) -> int:
        assert self._fill.checks is not None
        self._fill.checks.update(stretch[0], self._memory.span(*stretch))
        return stretch[1]

    def settle(self) -> None:
        """See `Filling.settle`."""

    def cancel(self) -> None:
        """See `Filling.cancel`."""
        self._copying.cancel()


def _map(arena: HostArena, sources: Sources, read: Read) -> Iterator[Read]:
    """Map what can be mapped of a read; the rest, to be copied."""
    one = read.transfer
    shift = one.target - one.source
    low, high = align_up(one.source, mmap.PAGESIZE), align_down(one.source_end, mmap.PAGESIZE)
    if one.count > 1 or (arena.address + shift) % mmap.PAGESIZE or low >= high:
        yield read
        return
    map_file(sources.fd(read.file), low, high - low, flags=_FLAGS, writable=True, address=arena.address + low + shift)
    for start, end in ((one.source, low), (high, one.source_end)):
        if start < end:
            yield Read(read.file, Transfer(start, start + shift, end - start))
