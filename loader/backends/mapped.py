"""The `mapped` backend: the page cache's own pages as the arena, read when they are first touched."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from relayout.core.extents import Transfer, align_down, align_up
from relayout.core.workers import Stop, Workers
from relayout.errors import FormatError, PlanError
from relayout.format.index import Read
from relayout.loader.backends.arena import HostArena, HostMemory
from relayout.loader.backends.base import Fill, Filling
from relayout.loader.backends.files import Access, Sources
from relayout.loader.backends.host import Placing, ThreadedFilling, reserve
from relayout.loader.budgets import Budget
from relayout.loader.read_plan import Chunk, plan_chunks
from relayout.storage.files import Buffer
from relayout.storage.libc import map_file

_FLAGS = mmap.MAP_PRIVATE | 0x10
"""With MAP_FIXED, which has this value on Linux and macOS: in place of the arena's own pages. Private: who writes to a
tensor gets a copy of the page."""

_STRETCH_NBYTES = 2**20
"""What is looked at is read in pieces that a processor's cache holds."""


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
            edges = replace(fill, reads=copied, checks=None, arrived=None, stop=Stop())
            return _MappedFilling(memory, fill, edges, sources)
        except BaseException:
            sources.close()
            raise


class _MappedFilling(ThreadedFilling[Buffer]):
    """Waits for the bytes that had to be copied, and looks at all of them if digests are to be checked."""

    def __init__(self, memory: HostArena, fill: Fill, edges: Fill, sources: Sources) -> None:
        """`edges`: what is to be copied of the `fill`."""
        self._memory = memory
        self._whole = fill
        chunks = plan_chunks(edges.reads, sources.alignment, bounce_nbytes=edges.budget.buffer_nbytes)
        super().__init__(edges, sources, Buffer, Placing(memory, sources, edges).read, list(chunks))

    def join(self, on_progress: Callable[[int], None] | None = None) -> None:
        """See `Filling.join`."""
        fill = self._whole
        try:
            self._workers.join()
            if fill.checks is not None:
                Workers(fill.budget.threads, self._stretches(), Buffer, self._check, fill.stop).run(on_progress)
                fill.checks.finish()
            for number, file in enumerate(fill.files):
                length = os.fstat(self.sources.fd(number)).st_size
                if length < file.nbytes:
                    raise FormatError(f"{file.path}: ends at byte {length}, expected {file.nbytes} bytes")
        finally:
            self.sources.close()
        if on_progress is not None:
            on_progress(sum(read.transfer.total_nbytes for read in fill.reads))
        for read in fill.reads:
            fill.tell(read.transfer.target, read.transfer.total_nbytes)

    def _stretches(self) -> Iterator[Read]:
        for read in self._whole.reads:
            if read.transfer.count > 1:
                yield read
                continue
            for start in range(read.transfer.source, read.transfer.source_end, _STRETCH_NBYTES):
                for part in read.transfer.clipped(start, start + _STRETCH_NBYTES):
                    yield Read(read.file, part)

    def _check(self, buffer: Buffer, read: Read) -> int:
        # Not through the mapping: there, what cannot be read kills the process.
        checks, one = self._whole.checks, read.transfer
        assert checks is not None
        if one.count > 1:
            checks.update(one.target, self._memory.span(one.target, one.target_end - one.target))
        else:
            view = reserve(buffer, one.nbytes)
            self.sources.read(read.file, one.source, view)
            checks.update(one.target, view)
        return one.total_nbytes


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
