"""The `mapped` backend: the page cache's own pages as the arena, read when they are first touched."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from relayout.core.extents import Transfer, align_down, align_up
from relayout.core.workers import Stop, Workers
from relayout.errors import FormatError
from relayout.format.index import Read
from relayout.loader.backends.arena import HostArena, allocate
from relayout.loader.backends.base import Choice, FreshArenas, Memory, ReadJob, Refusal, Request, RunningJob
from relayout.loader.backends.files import Sources
from relayout.loader.backends.host import Copier, ThreadedJob, chunks_of, reserve
from relayout.loader.budgets import HOST_BUFFERS, Budget
from relayout.loader.read_plan import Chunk
from relayout.storage.buffers import Buffer
from relayout.storage.libc import map_file
from relayout.storage.protocols import Access

if TYPE_CHECKING:
    import torch

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

    name: ClassVar[str] = "mapped"
    device: ClassVar[str] = "cpu"
    access: ClassVar[Access] = Access.BUFFERED
    max_buffer_nbytes: ClassVar[int] = HOST_BUFFERS
    reads_when_used: ClassVar[bool] = True
    is_zero_copy: ClassVar[bool] = True

    def name_for(self, ways: Sequence[Access]) -> str:
        """See `Backend.name_for`."""
        return self.name

    def chunks(self, reads: Sequence[Read], alignment: int, budget: Budget) -> list[Chunk]:
        """See `Backend.chunks`: what is mapped is not requested."""
        return []

    def allocate(self, nbytes: int) -> HostArena:
        """See `Backend.allocate`: pages of the files take the place of the arena's own."""
        return allocate(nbytes)

    def pool(self, nbytes: int) -> FreshArenas[memoryview]:
        """See `Backend.pool`."""
        return FreshArenas(allocate)

    def wrap(self, tensors: Sequence[torch.Tensor]) -> Refusal:
        """See `Backend.wrap`."""
        return Refusal("backend 'mapped' makes the memory of its tensors itself: it cannot fill given ones")

    def start(self, memory: Memory[memoryview], job: ReadJob) -> RunningJob:
        """See `Backend.start`."""
        sources = Sources(job.files, self.access)
        try:
            copied = tuple(rest for read in job.reads for rest in _map(memory, sources, read))
            edges = replace(job, reads=copied, checks=None, arrived=None, stop=Stop())
            return _MappedJob(memory, job, edges, sources)
        except BaseException:
            sources.close()
            raise


class _MappedJob(ThreadedJob[Buffer]):
    """Waits for the bytes that had to be copied, and looks at all of them if digests are to be checked."""

    def __init__(self, memory: Memory[memoryview], job: ReadJob, edges: ReadJob, sources: Sources) -> None:
        """`edges`: what is to be copied of the `job`."""
        self._memory = memory
        self._whole = job
        chunks = chunks_of(edges.reads, sources.alignment, edges.budget)
        super().__init__(edges, sources, Buffer, Copier(memory, sources, edges).read, list(chunks))

    def join(self, on_progress: Callable[[int], None] | None = None) -> None:
        """See `RunningJob.join`."""
        job = self._whole
        try:
            self._workers.join()
            if job.checks is not None:
                Workers(job.budget.threads, self._stretches(), Buffer, self._check, job.stop).run(on_progress)
                job.checks.finish()
            for number, file in enumerate(job.files):
                length = os.fstat(self.sources.fd(number)).st_size
                if length < file.nbytes:
                    raise FormatError(f"{file.where}: ends at byte {length}, expected {file.nbytes} bytes")
        finally:
            self.sources.close()
        if on_progress is not None:
            on_progress(sum(read.transfer.total_nbytes for read in job.reads))
        for read in job.reads:
            job.tell(read.transfer.target, read.transfer.total_nbytes)

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


def offer(request: Request) -> Choice | Refusal:
    """See `choice.REGISTRY`."""
    if request.kind != "cpu":
        return Refusal(f"backend 'mapped' has tensors in host memory, not on {str(request.device)!r}")
    if refused := request.refusal_without_descriptors("mapped"):
        return refused
    return Choice(MappedBackend(), request.reason("pages of the files are read when a tensor is first used"))


def _map(memory: Memory[memoryview], sources: Sources, read: Read) -> Iterator[Read]:
    """Map what can be mapped of a read; the rest, to be copied."""
    one = read.transfer
    shift = one.target - one.source
    low, high = align_up(one.source, mmap.PAGESIZE), align_down(one.source_end, mmap.PAGESIZE)
    if one.count > 1 or shift % mmap.PAGESIZE or low >= high:
        yield read
        return
    span = memory.span(low + shift, high - low)
    address = ctypes.addressof(ctypes.c_char.from_buffer(span))
    map_file(sources.fd(read.file), low, high - low, flags=_FLAGS, writable=True, address=address)
    for start, end in ((one.source, low), (high, one.source_end)):
        if start < end:
            yield Read(read.file, Transfer(start, start + shift, end - start))
