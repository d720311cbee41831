"""Backends that read into host memory with threads: `direct`, `buffered`, and `auto`, which combines both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from relayout.core.strided import copy_runs
from relayout.core.workers import Workers
from relayout.format.index import Read
from relayout.loader.backends.arena import ArenaPool, HostArena, Scattered, allocate
from relayout.loader.backends.base import Choice, Factory, Memory, ReadJob, Request
from relayout.loader.backends.files import Sources
from relayout.loader.budgets import HOST_BUFFERS, Budget
from relayout.loader.read_plan import Chunk, plan_chunks
from relayout.storage.buffers import Buffer
from relayout.storage.protocols import Access, Refusal

if TYPE_CHECKING:
    import torch

State = TypeVar("State")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class HostBackend:
    """Threads that read directly into memory, and through bounce buffers where that is not possible."""

    access: Access

    device: ClassVar[str] = "cpu"
    max_buffer_nbytes: ClassVar[int] = HOST_BUFFERS
    reads_when_used: ClassVar[bool] = False
    is_zero_copy: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """See `Backend.name`."""
        return self.access.value

    def name_for(self, ways: Sequence[Access]) -> str:
        """See `Backend.name_for`."""
        return " and ".join(way.value for way in ways) if self.access is Access.AUTO else self.name

    def chunks(self, reads: Sequence[Read], alignment: int, budget: Budget) -> list[Chunk]:
        """See `Backend.chunks`."""
        return list(chunks_of(reads, alignment, budget))

    def allocate(self, nbytes: int) -> HostArena:
        """See `Backend.allocate`."""
        return allocate(nbytes)

    def pool(self, nbytes: int) -> ArenaPool:
        """See `Backend.pool`."""
        return ArenaPool(nbytes)

    def wrap(self, tensors: Sequence[torch.Tensor]) -> Scattered:
        """See `Backend.wrap`."""
        return Scattered([(tensor.data_ptr(), tensor.numel()) for tensor in tensors])

    def start(self, memory: Memory[memoryview], job: ReadJob) -> ThreadedJob[Buffer, Chunk]:
        """See `Backend.start`."""
        sources = Sources(job.files, self.access)
        try:
            chunks = self.chunks(job.reads, sources.alignment, job.budget)
            buffers = Buffers()
            read = Copier(memory, sources, job).read
            return ThreadedJob(job, sources, buffers.make, read, chunks, buffers.discard)
        except BaseException:
            sources.close()
            raise


def chunks_of(reads: Sequence[Read], alignment: int, budget: Budget) -> Iterator[Chunk]:
    """The requests for threads that have one bounce buffer each."""
    return plan_chunks(
        reads,
        alignment,
        chunk_nbytes=budget.cost.chunk_nbytes,
        bounce_nbytes=budget.buffer_nbytes,
        max_gap_nbytes=budget.cost.max_gap_nbytes,
    )


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
            self.sources.read(chunk.file, chunk.extent.offset, span)
            self._arrive(chunk.arena_offset, span, span.nbytes)
        else:
            view = reserve(bounce, chunk.extent.nbytes)
            self.sources.read(chunk.file, chunk.extent.offset, view)
            for transfer in chunk.transfers:
                span = self.memory.span(transfer.target, transfer.target_end - transfer.target)
                copy_runs(view, span, transfer.shifted(target=-transfer.target))
                self._arrive(transfer.target, span, transfer.total_nbytes)
        return chunk.nbytes

    def _arrive(self, offset: int, span: memoryview, nbytes: int) -> None:
        if self.job.checks is not None:
            self.job.checks.update(offset, span)
        self.job.tell(offset, nbytes)


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
        self._made: list[Buffer] = []

    def make(self) -> Buffer:
        """A new buffer. Thread-safe."""
        buffer = Buffer()
        self._made.append(buffer)
        return buffer

    def discard(self) -> None:
        """Free the memory of all buffers now. They must not be used afterwards."""
        while self._made:
            self._made.pop().discard()


class ThreadedJob(Generic[State, Item]):
    """Threads that work on the items of a job, such as chunks. Each thread has its own state."""

    def __init__(
        self,
        job: ReadJob,
        sources: Sources,
        make_state: Callable[[], State],
        work: Callable[[State, Item], int],
        items: Sequence[Item],
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

    def join(self, on_progress: Callable[[int], None] | None = None) -> None:
        """See `RunningJob.join`."""
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
        """See `RunningJob.settle`: host memory needs nothing."""

    @property
    def current_stream(self) -> object:
        """See `RunningJob.current_stream`."""
        return None

    def cancel(self) -> None:
        """See `RunningJob.cancel`."""
        self._workers.cancel()
        self.sources.close()
        self._discard()


def factory(access: Access) -> Factory:
    """See `choice.REGISTRY`: the factory of the backend with this access."""

    def offer(request: Request) -> Choice | Refusal:
        then = "" if request.kind == "cpu" else f"{{}} copied to {request.device} in one piece"
        if access is Access.DIRECT and (refused := request.refusal_without_descriptors("direct")):
            return refused
        if access is Access.AUTO and any(file.folder.cost.is_remote for file in request.files):
            how = "threads request ranges of the files, which go straight into memory"
            return Choice(HostBackend(access), request.reason(how + then.format("; then")))
        if access is Access.AUTO:
            how = (
                "threads read from the page cache what it holds, and all else directly where the file system allows it"
            )
            return Choice(HostBackend(access), request.reason(how + then.format("; then")))
        how = "read past the page cache" if access is Access.DIRECT else "read through the page cache"
        return Choice(HostBackend(access), request.reason(how + then.format(", then")))

    return offer
