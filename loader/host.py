"""Backends that read into host memory with threads: `direct`, `buffered`, and `auto`, which is both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from relayout.files import Buffer
from relayout.index import Read
from relayout.loader.arena import HostMemory
from relayout.loader.backends import Fill
from relayout.loader.budgets import Budget
from relayout.loader.readplan import Chunk, plan_chunks
from relayout.loader.sources import Access, Sources
from relayout.strided import copy_runs
from relayout.workers import Workers

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

        def read(bounce: Buffer, chunk: Chunk) -> int:
            if chunk.arena_offset is not None:
                span = memory.span(chunk.arena_offset, chunk.extent.nbytes)
                sources.read(chunk.file, chunk.extent.offset, span)
                arrive(chunk.arena_offset, span, span.nbytes)
            else:
                view = bounce.reserve(chunk.extent.nbytes)
                sources.read(chunk.file, chunk.extent.offset, view)
                for transfer in chunk.transfers:
                    span = memory.span(transfer.target, transfer.target_end - transfer.target)
                    copy_runs(view, span, transfer.shifted(target=-transfer.target))
                    arrive(transfer.target, span, transfer.total_nbytes)
            return chunk.nbytes

        def arrive(offset: int, span: memoryview, nbytes: int) -> None:
            if fill.checks is not None:
                fill.checks.update(offset, span)
            fill.tell(offset, nbytes)

        return ThreadedFilling(fill, sources, Buffer, read, self.chunks(fill.reads, sources.alignment, fill.budget))


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
