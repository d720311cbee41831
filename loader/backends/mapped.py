"""The `mapped` backend: the arena consists of mapped pages of the files, read when they are first used."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from relayout.core.coalesce import split
from relayout.core.extents import Extent, Transfer, align_down, align_up
from relayout.errors import FormatError
from relayout.format.index import Read
from relayout.loader.backends.arena import MAP_FIXED, HostArena, allocate
from relayout.loader.backends.base import Choice, FreshArenas, Memory, ReadJob, Request, RunningJob
from relayout.loader.backends.files import Sources
from relayout.loader.backends.host import Buffers, Copier, ThreadedJob, chunks_of, reserve
from relayout.loader.budgets import HOST_BUFFERS, Budget
from relayout.loader.read_plan import Chunk
from relayout.storage.buffers import Buffer
from relayout.storage.libc import map_file
from relayout.storage.protocols import Access, Refusal

if TYPE_CHECKING:
    import torch

_FLAGS = mmap.MAP_PRIVATE | MAP_FIXED
"""Replace the arena's own pages. Private: a write to a tensor copies the page."""

_STRETCH_NBYTES = 2**20
"""Bytes to hash are read in pieces that fit a processor's cache."""


@dataclass(frozen=True, slots=True)
class MappedBackend:
    """Maps whole pages of the files over the arena, where offset and address are congruent, and copies the rest.

    A tensor costs nothing until it is used. As with every mapping, using a page that the drive cannot read, or that was
    truncated, kills the process (SIGBUS).
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
        """See `Backend.chunks`: mapped pages need no requests."""
        return []

    def allocate(self, nbytes: int) -> HostArena:
        """See `Backend.allocate`: pages of the files replace the arena's own."""
        return allocate(nbytes)

    def pool(self, nbytes: int) -> FreshArenas[memoryview]:
        """See `Backend.pool`."""
        return FreshArenas(allocate)

    def wrap(self, tensors: Sequence[torch.Tensor]) -> Refusal:
        """See `Backend.wrap`."""
        return Refusal("backend 'mapped' maps new memory: it cannot fill given tensors")

    def start(self, memory: Memory[memoryview], job: ReadJob) -> RunningJob:
        """See `Backend.start`."""
        sources = Sources(job.files, self.access)
        try:
            mapped: list[Transfer] = []
            return _MappedJob(memory, job, sources, list(_items(memory, sources, job, mapped)), mapped)
        except BaseException:
            sources.close()
            raise


@dataclass(frozen=True, slots=True)
class _Check:
    """Mapped bytes to hash. They are read from the file: a read error in the mapping would kill the process."""

    read: Read


class _MappedJob(ThreadedJob[Buffer, "Chunk | _Check"]):
    """Copies bytes that cannot be mapped, and hashes the mapped ones if digests are checked."""

    def __init__(
        self,
        memory: Memory[memoryview],
        job: ReadJob,
        sources: Sources,
        work: Sequence[Chunk | _Check],
        mapped: Sequence[Transfer],
    ) -> None:
        """Start `work`, in which the bytes of each tensor are in order; `mapped` bytes need no work."""
        self._copier = Copier(memory, sources, job)
        self._mapped = mapped
        buffers = Buffers()
        super().__init__(job, sources, buffers.make, self._work, work, buffers.discard)

    def join(self, on_progress: Callable[[int], None] | None = None) -> None:
        """See `RunningJob.join`."""
        mapped = sum(one.nbytes for one in self._mapped)
        super().join(None if on_progress is None else lambda done: on_progress(mapped + done))

    def finish(self) -> None:
        """See `ThreadedJob.finish`: using pages of a file that was truncated meanwhile would kill the process."""
        for number, file in enumerate(self.job.files):
            length = os.fstat(self.sources.fd(number)).st_size
            if length < file.nbytes:
                raise FormatError(
                    f"ends at byte {length}, expected {file.nbytes} bytes",
                    path=file.where,
                    offset=length,
                    code="truncated",
                )
        for one in self._mapped:
            self.job.tell(one.target, one.nbytes)

    def _work(self, buffer: Buffer, item: Chunk | _Check) -> int:
        if isinstance(item, Chunk):
            return self._copier.read(buffer, item)
        assert self.job.checks is not None
        one = item.read.transfer
        view = reserve(buffer, one.nbytes)
        self.sources.read(item.read.file, one.source, view)
        self.job.checks.update(one.target, view)
        self.job.tell(one.target, one.nbytes)
        return one.nbytes


def _items(
    memory: Memory[memoryview], sources: Sources, job: ReadJob, mapped: list[Transfer]
) -> Iterator[Chunk | _Check]:
    """Map what can be mapped, append it to `mapped`, and yield the remaining work in the order of the reads."""
    copied: list[Read] = []
    for part, is_mapped in (found for read in job.reads for found in _map(memory, sources, read)):
        if not is_mapped:
            copied.append(part)
        elif job.checks is None:
            mapped.append(part.transfer)
        else:
            yield from chunks_of(copied, sources.alignment, job.budget)
            copied.clear()
            shift = part.transfer.target - part.transfer.source
            for piece in split(Extent(part.transfer.source, part.transfer.nbytes), _STRETCH_NBYTES):
                yield _Check(Read(part.file, Transfer(piece.offset, piece.offset + shift, piece.nbytes)))
    yield from chunks_of(copied, sources.alignment, job.budget)


def offer(request: Request) -> Choice | Refusal:
    """See `choice.REGISTRY`."""
    if request.kind != "cpu":
        return Refusal(f"backend 'mapped' loads to the CPU, not to {str(request.device)!r}")
    if refused := request.refusal_without_descriptors("mapped"):
        return refused
    return Choice(MappedBackend(), request.reason("pages of the files are read when a tensor is first used"))


def _map(memory: Memory[memoryview], sources: Sources, read: Read) -> Iterator[tuple[Read, bool]]:
    """Map what can be mapped of a read, and yield its parts in order, with whether each is mapped."""
    one = read.transfer
    shift = one.target - one.source
    low, high = align_up(one.source, mmap.PAGESIZE), align_down(one.source_end, mmap.PAGESIZE)
    if one.count > 1 or shift % mmap.PAGESIZE or low >= high:
        yield read, False
        return
    span = memory.span(low + shift, high - low)
    address = ctypes.addressof(ctypes.c_char.from_buffer(span))
    map_file(sources.fd(read.file), low, high - low, flags=_FLAGS, writable=True, address=address)
    for start, end in ((one.source, low), (low, high), (high, one.source_end)):
        if start < end:
            yield Read(read.file, Transfer(start, start + shift, end - start)), start == low
