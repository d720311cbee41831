"""Backends that read into host memory with threads: `direct`, `buffered`, and `auto`, which is both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from relayout.core.strided import copy_runs
from relayout.core.workers import Workers
from relayout.format.index import Read
from relayout.loader.backends.arena import HostMemory
from relayout.loader.backends.base import Fill
from relayout.loader.backends.files import Access, Sources
from relayout.loader.budgets import Budget
from relayout.loader.read_plan import Chunk, plan_chunks
from relayout.storage.files import Buffer

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class HostBackend:
    """Threads that read straight to where bytes belong, and through bounce buffers what cannot be read so."""

    access: Access

    @property
    def name(self) -> str:
        """See `Backend.name`."""
        return self.access.value

    def chunks(self, reads: Sequence[Read], alignment: int, budget: Budget) -> list[Chunk]:
        """See `Backend.chunks`."""
        return list(plan_chunks(reads, alignment, bounce_nbytes=budget.buffer_nbytes))

    def start(self, memory: HostMemory, fill: Fill) -> ThreadedFilling[Buffer]:
        """See `Backend.start`."""
        sources = Sources(fill.files, self.access)
        try:
            chunks = self.chunks(fill.reads, sources.alignment, fill.budget)
            return ThreadedFilling(fill, sources, Buffer, Placing(memory, sources, fill).read, chunks)
        except BaseException:
            sources.close()
            raise


@dataclass(frozen=True, slots=True)
class Placing:
    """Brings chunks to where they belong. Not a closure, which an error's frames would keep, and with it the memory."""

    memory: HostMemory
    sources: Sources
    fill: Fill

    def read(self, bounce: Buffer, chunk: Chunk) -> int:
        """Read a chunk, perhaps through a buffer; the bytes that it brought."""
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
        if self.fill.checks is not None:
            self.fill.checks.update(offset, span)
        self.fill.tell(offset, nbytes)


def reserve(buffer: Buffer, nbytes: int) -> memoryview:
    """The first `nbytes` of a buffer.

    Raises:
        MemoryError: it had to grow, and cannot.
    """
    try:
        return buffer.reserve(nbytes)
    except OSError as error:
        raise MemoryError(f"cannot reserve {nbytes} bytes for a buffer: {error.strerror}") from None


class ThreadedFilling(Generic[State]):
    """Threads that deal with the chunks of a fill, each with a state of its own."""

    def __init__(
        self,
        fill: Fill,
        sources: Sources,
        make_state: Callable[[], State],
        work: Callable[[State, Chunk], int],
        chunks: list[Chunk],
    ) -> None:
        """Start them; `work` returns the bytes that it brought. Closes the sources in the end."""
        self.fill = fill
        self.sources = sources
        try:
            self._workers = Workers(min(fill.budget.threads, len(chunks)), chunks, make_state, work, fill.stop)
            self._workers.start()
        except BaseException:
            sources.close()
            raise

    def join(self, on_progress: Callable[[int], None] | None = None) -> None:
        """See `Filling.join`."""
        try:
            self._workers.join(on_progress)
        finally:
            self.sources.close()
        if self.fill.checks is not None:
            self.fill.checks.finish()
        self.settle()

    def settle(self) -> None:
        """See `Filling.settle`: host memory is what everybody sees."""

    def cancel(self) -> None:
        """See `Filling.cancel`."""
        self._workers.cancel()
        self.sources.close()
