"""The `mapped` backend: the arena consists of mapped pages of the files, read when they are first used."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from relayout.core.coalesce import split
from relayout.core.extents import Extent, Transfer, align_down, align_up
from relayout.errors import FormatError
from relayout.format.index import Read
from relayout.loader.backends.arena import MAP_FIXED, HostArena, allocate
from relayout.loader.backends.base import Backend, Choice, Memory, ReadJob, Request, RunningJob
from relayout.loader.backends.files import Sources, closed_on_error
from relayout.loader.backends.host import Buffers, Copier, ThreadedJob, reserve
from relayout.loader.budgets import Budget
from relayout.loader.read_plan import Chunk, plan_chunks
from relayout.storage.buffers import Buffer
from relayout.storage.libc import map_file
from relayout.storage.protocols import Refusal

if TYPE_CHECKING:
    import torch

_FLAGS = mmap.MAP_PRIVATE | MAP_FIXED
"""Replace the arena's own pages. Private: a write to a tensor copies the page."""

_STRETCH_NBYTES = 2**20
"""Bytes to hash are read in pieces that fit a processor's cache."""


class MappedBackend(Backend[memoryview]):
    """Maps whole pages of the files over the arena, where offset and address are congruent, and copies the rest.

    A tensor costs nothing until it is used. As with every mapping, using a page that the drive cannot read, or that was
    truncated, kills the process (SIGBUS).
    """

    name = "mapped"
    reads_when_used = True

    def chunks(self, reads: Sequence[Read], alignment: int, budget: Budget) -> list[Chunk]:
        return []  # Mapped pages need no requests.

    def allocate(self, nbytes: int) -> HostArena:
        return allocate(nbytes)  # Pages of the files replace the arena's own.

    def wrap(self, tensors: Sequence[torch.Tensor]) -> Refusal:
        return Refusal("backend 'mapped' maps new memory: it cannot fill given tensors")

    def start(self, memory: Memory[memoryview], job: ReadJob) -> RunningJob:
        with closed_on_error(Sources(job.files, self.access)) as sources:
            mapped: list[Transfer] = []
            return _MappedJob(memory, job, sources, list(_items(memory, sources, job, mapped)), mapped)


class _MappedJob(ThreadedJob[Buffer, "Chunk | Read"]):
    """Copies bytes that cannot be mapped, and hashes the mapped ones if digests are checked."""

    def __init__(
        self,
        memory: Memory[memoryview],
        job: ReadJob,
        sources: Sources,
        work: Sequence[Chunk | Read],
        mapped: Sequence[Transfer],
    ) -> None:
        """Start `work`, in which the bytes of each tensor are in order; `mapped` bytes need no work.

        `work` has chunks to copy, and reads of mapped bytes to hash. Those are read from the file: a read error in the
        mapping would kill the process.
        """
        self._copier = Copier(memory, sources, job)
        self._mapped = mapped
        buffers = Buffers()
        super().__init__(job, sources, buffers.make, self._work, work, buffers.discard)

    def join(self, on_progress: Callable[[int], None] | None = None) -> None:
        mapped = sum(transfer.nbytes for transfer in self._mapped)
        super().join(None if on_progress is None else lambda done: on_progress(mapped + done))

    def finish(self) -> None:
        # Using pages of a file that was truncated meanwhile would kill the process.
        for index, file in enumerate(self.job.files):
            length = os.fstat(self.sources.fd(index)).st_size
            if length < file.nbytes:
                raise FormatError(
                    f"ends at byte {length}, expected {file.nbytes} bytes",
                    path=file.where,
                    offset=length,
                    code="truncated",
                )
        for transfer in self._mapped:
            self.job.on_arrival(transfer.target, transfer.nbytes)

    def _work(self, buffer: Buffer, item: Chunk | Read) -> int:
        if isinstance(item, Chunk):
            return self._copier.read(buffer, item)
        assert self.job.checks is not None
        transfer = item.transfer
        view = reserve(buffer, transfer.nbytes)
        self.sources.read(item.file, transfer.source, view)
        self.job.checks.update(transfer.target, view)
        self.job.on_arrival(transfer.target, transfer.nbytes)
        return transfer.nbytes


def _items(
    memory: Memory[memoryview], sources: Sources, job: ReadJob, mapped: list[Transfer]
) -> Iterator[Chunk | Read]:
    """Map what can be mapped, append it to `mapped`, and yield the remaining work in the order of the reads."""
    copied: list[Read] = []
    for part, is_mapped in (part for read in job.reads for part in _map(memory, sources, read)):
        if not is_mapped:
            copied.append(part)
        elif job.checks is None:
            mapped.append(part.transfer)
        else:
            yield from plan_chunks(copied, sources.alignment, job.budget.cost, job.budget.buffer_nbytes)
            copied.clear()
            shift = part.transfer.target - part.transfer.source
            for piece in split(Extent(part.transfer.source, part.transfer.nbytes), _STRETCH_NBYTES):
                yield Read(part.file, Transfer(piece.offset, piece.offset + shift, piece.nbytes))
    yield from plan_chunks(copied, sources.alignment, job.budget.cost, job.budget.buffer_nbytes)


def offer(request: Request) -> Choice | Refusal:
    """The backend, for loads to the CPU."""
    if request.kind != "cpu":
        return Refusal(f"backend 'mapped' loads to the CPU, not to {str(request.device)!r}")
    if refused := request.refusal_without_descriptors("mapped"):
        return refused
    return Choice(MappedBackend(), request.reason("pages of the files are read when a tensor is first used"))


def _map(memory: Memory[memoryview], sources: Sources, read: Read) -> Iterator[tuple[Read, bool]]:
    """Map what can be mapped of a read, and yield its parts in order, with whether each is mapped."""
    transfer = read.transfer
    shift = transfer.target - transfer.source
    low, high = align_up(transfer.source, mmap.PAGESIZE), align_down(transfer.source_end, mmap.PAGESIZE)
    if transfer.count > 1 or shift % mmap.PAGESIZE or low >= high:
        yield read, False
        return
    span = memory.span(low + shift, high - low)
    address = ctypes.addressof(ctypes.c_char.from_buffer(span))
    map_file(sources.fd(read.file), low, high - low, flags=_FLAGS, writable=True, address=address)
    for start, end in ((transfer.source, low), (low, high), (high, transfer.source_end)):
        if start < end:
            yield Read(read.file, Transfer(start, start + shift, end - start)), start == low
