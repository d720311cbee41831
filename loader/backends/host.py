"""Backends that read into host memory with threads: `direct`, `buffered`, and `auto`, which combines both."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from relayout.core.extents import BLOCK, Extent, Transfer, align_up, copy_runs, split
from relayout.core.workers import Workers
from relayout.loader.backends.arena import ArenaPool, HostArena, Scattered, allocate
from relayout.loader.backends.base import Backend, Choice, Factory, Memory, ReadJob, Request
from relayout.loader.backends.files import Sources, closed_on_error
from relayout.loader.budgets import MIN_BUFFER, Budget
from relayout.loader.pace import Pace, steps
from relayout.loader.read_plan import Chunk
from relayout.storage.buffers import Buffer
from relayout.storage.pages import HUGE_PAGE, are_small
from relayout.storage.protocols import Access, Refusal

if TYPE_CHECKING:
    import torch

_FIRST_NBYTES = 8 * 2**20
"""The largest request before anything is measured."""

State = TypeVar("State")
Item = TypeVar("Item")


class HostBackend(Backend[memoryview]):
    """Threads that read directly into memory, and through bounce buffers where that is not possible."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.name = access.value

    def allocate(self, nbytes: int) -> HostArena:
        return allocate(nbytes)

    def pool(self, nbytes: int) -> ArenaPool:
        return ArenaPool(nbytes)

    def wrap(self, tensors: Sequence[torch.Tensor]) -> Scattered:
        return Scattered([(tensor.data_ptr(), tensor.numel()) for tensor in tensors])

    def start(self, memory: Memory[memoryview], job: ReadJob) -> _PacedJob:
        with closed_on_error(Sources(job.files, self.access)) as sources:
            chunks = self.chunks(job.reads, sources.alignment, job.budget)
            return _PacedJob(memory, job, sources, chunks)


@dataclass(frozen=True, slots=True)
class Copier:
    """Reads chunks into memory."""

    memory: Memory[memoryview]
    sources: Sources
    job: ReadJob

    def read(self, bounce: Buffer, chunk: Chunk) -> int:
        """Read a chunk, through the bounce buffer if needed, and return the number of bytes that it filled."""
        if chunk.arena_offset is not None:
            span = self.memory.span(chunk.arena_offset, chunk.extent.nbytes)
            if self.sources.alignment > 1 and are_small():
                self._read_and_copy(bounce, chunk, span)
            else:
                self.sources.read(chunk.file, chunk.extent.offset, span)
            self._arrive(chunk.arena_offset, span, span.nbytes)
        elif chunk.is_sparse:
            with self.sources.mapped(chunk.file, chunk.extent.offset, chunk.extent.nbytes) as view:
                self._scatter(chunk, self._bounced(bounce, chunk) if view is None else view)
        else:
            self._scatter(chunk, self._bounced(bounce, chunk))
        return chunk.nbytes

    def _read_and_copy(self, bounce: Buffer, chunk: Chunk, span: memoryview) -> None:
        """Read into huge pages, and copy to small ones: few of them fit into one request of a drive.

        Direct reads into small pages were seen at less than half of the drive's speed.
        """
        whole = chunk.extent
        # Memory beyond the end of the file stays as it is.
        end = min(whole.end, self.job.files[chunk.file].nbytes)
        most = min(HUGE_PAGE, self.job.budget.buffer_nbytes)
        for part in split(Extent(whole.offset, end - whole.offset), most):
            view = reserve(bounce, align_up(part.nbytes, BLOCK))
            self.sources.read(chunk.file, part.offset, view)
            copy_runs(view, span, Transfer(0, part.offset - whole.offset, part.nbytes))

    def _bounced(self, bounce: Buffer, chunk: Chunk) -> memoryview:
        view = reserve(bounce, chunk.extent.nbytes)
        self.sources.read(chunk.file, chunk.extent.offset, view)
        return view

    def _scatter(self, chunk: Chunk, view: memoryview) -> None:
        for transfer in chunk.transfers:
            span = self.memory.span(transfer.target, transfer.target_end - transfer.target)
            copy_runs(view, span, transfer.shifted(target=-transfer.target))
            self._arrive(transfer.target, span, transfer.total_nbytes)

    def _arrive(self, offset: int, span: memoryview, nbytes: int) -> None:
        if self.job.checks is not None:
            self.job.checks.update(offset, span)
        self.job.on_arrival(offset, nbytes)


class Requests(Collection[Chunk]):
    """The chunks of a job, cut to the size that its pace says."""

    def __init__(self, chunks: Sequence[Chunk], budget: Budget) -> None:
        self._chunks = chunks
        nbytes = sum(chunk.extent.nbytes for chunk in chunks)
        # The buffers of all threads fit into the memory of the budget.
        bounced = max((chunk.extent.nbytes for chunk in chunks if chunk.arena_offset is None), default=0)
        most = max(budget.threads, min(budget.max_threads, budget.memory // max(bounced, MIN_BUFFER)))
        largest = budget.cost.chunk_nbytes
        first = min(largest, _FIRST_NBYTES)
        if budget.cost.is_remote:  # A small rank, too, is read by all threads at once.
            first = min(first, max(MIN_BUFFER, align_up(-(-nbytes // budget.threads), BLOCK)))
        self.pace = Pace(steps(budget.threads, most, first, largest))

    def __len__(self) -> int:
        """How many there are at the first size."""
        first = self.pace.step.request_nbytes
        return sum(1 if chunk.arena_offset is None else -(-chunk.extent.nbytes // first) for chunk in self._chunks)

    def __iter__(self) -> Iterator[Chunk]:
        for chunk in self._chunks:
            while chunk.arena_offset is not None and chunk.extent.nbytes > (size := self.pace.step.request_nbytes):
                offset, end = chunk.extent.offset, chunk.extent.end
                yield replace(chunk, extent=Extent(offset, size))
                rest = Extent(offset + size, end - offset - size)
                chunk = replace(chunk, extent=rest, arena_offset=chunk.arena_offset + size)
            yield chunk

    def __contains__(self, item: object) -> bool:
        return item in self._chunks


def reserve(buffer: Buffer, nbytes: int) -> memoryview:
    """The first `nbytes` of a buffer.

    Raises:
        MemoryError: the buffer cannot grow.
    """
    try:
        return buffer.reserve(nbytes)
    except OSError as error:
        raise MemoryError(f"cannot reserve {nbytes} bytes for a buffer: {error.strerror}") from None


class Buffers:
    """The bounce buffers of a job's threads."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []

    def make(self) -> Buffer:
        """A new buffer. Thread-safe."""
        buffer = Buffer()
        self._buffers.append(buffer)
        return buffer

    def discard(self) -> None:
        """Free the memory of all buffers now. They must not be used afterwards."""
        while self._buffers:
            self._buffers.pop().discard()


class ThreadedJob(Generic[State, Item]):
    """Threads that work on the items of a job, such as chunks. Each thread has its own state."""

    def __init__(
        self,
        job: ReadJob,
        sources: Sources,
        make_state: Callable[[], State],
        work: Callable[[State, Item], int],
        items: Collection[Item],
        discard: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the threads; `work` returns the number of bytes that it filled. The job closes `sources`.

        Args:
            discard: frees the memory of all states; called when the job is cancelled.
        """
        self._discard = discard
        self.job = job
        self.sources = sources
        try:
            self._workers = Workers(min(job.budget.threads, len(items)), items, make_state, work, job.stop)
            self._workers.start()
        except BaseException:
            sources.close()
            raise

    def resize(self, num_threads: int) -> None:
        """As `Workers.resize`."""
        self._workers.resize(num_threads)

    def join(self, on_progress: Callable[[int], None] | None = None) -> None:
        try:
            self._workers.join(on_progress)
            if self.job.checks is not None:
                self.job.checks.finish()
            self.finish()
        finally:
            self.sources.close()
        self.settle()

    def finish(self) -> None:
        """Called when all items are done and the files are still open; an exception fails the job."""

    def settle(self) -> None:
        """Host memory needs nothing."""

    @property
    def current_stream(self) -> object:
        return None

    def cancel(self) -> None:
        self._workers.cancel()
        self.sources.close()
        self._discard()


class _PacedJob(ThreadedJob[Buffer, Chunk]):
    """Reads chunks into memory; requests in flight, and their size, follow what is measured meanwhile."""

    def __init__(self, memory: Memory[memoryview], job: ReadJob, sources: Sources, chunks: Sequence[Chunk]) -> None:
        """Start the threads."""
        self._copier = Copier(memory, sources, job)
        self._lock = threading.Lock()
        requests, buffers = Requests(chunks, job.budget), Buffers()
        self._pace = requests.pace
        super().__init__(job, sources, buffers.make, self._read, requests, buffers.discard)

    def _read(self, buffer: Buffer, chunk: Chunk) -> int:
        step, began = self._pace.step, time.perf_counter()
        nbytes = self._copier.read(buffer, chunk)
        with self._lock:
            self._pace.finished(step, chunk.extent.nbytes, time.perf_counter() - began)
            threads = self._pace.step.threads
        if threads != step.threads:
            self.resize(threads)
        return nbytes


def factory(access: Access) -> Factory:
    """The factory of the backend with this access."""

    def offer(request: Request) -> Choice | Refusal:
        separator, how = ", ", "read through the page cache"
        if access is Access.DIRECT:
            if refused := request.refusal_without_descriptors("direct"):
                return refused
            how = "read past the page cache"
        elif access is Access.AUTO:
            separator = "; "
            if any(file.folder.cost.is_remote for file in request.files):
                how = "threads request ranges of the files, which go straight into memory"
            else:
                how = "bytes in the page cache are read there, all others by direct I/O where the file system allows it"
        if request.kind != "cpu":
            how += f"{separator}then copied to {request.device} in one piece"
        return Choice(HostBackend(access), request.reason(how))

    return offer
