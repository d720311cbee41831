"""`iter_load`: yields a rank's tensors one by one, with a limit of the bytes that are read ahead."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic

from relayout.core.extents import BLOCK
from relayout.core.workers import Stop, Stopped
from relayout.errors import PlanError
from relayout.format.index import Placement, place
from relayout.loader.backends.base import Allocation, Backend, Options, Pool, ReadJob, RunningJob, Span
from relayout.loader.backends.files import error_hints
from relayout.loader.requests import MAX_IN_FLIGHT, MIN_BUFFER, NODE_IN_FLIGHT, Budget, local_world_size, plan_budget
from relayout.loader.sources.rank import TensorColumns, batches, cost_of
from relayout.loader.tensors import make_views, to_device
from relayout.reporting import reporting

if TYPE_CHECKING:
    import torch

    from relayout.format.index import Read

_NUM_BATCHES = 4
"""Number of batches that the bytes in flight are divided into: one is used while the others are read."""

_SLACK = 2 * BLOCK
"""Bytes that aligning a tensor may waste."""


@dataclass(frozen=True, slots=True)
class TensorBatch:
    """Consecutive tensors that share an arena."""

    start: int
    """Offset of the arena in the address space of all batches."""
    layout: Placement
    tensors: TensorColumns
    """The tensors, at offsets relative to the arena."""
    nbytes: int
    """Bytes of the tensors."""


class Reader:
    """This process's share of the reads of a stream: all reads if it is alone; the members of a group divide them."""

    def least(self, nbytes: int) -> int:
        """Return the smallest limit of read-ahead, in bytes, among all processes.

        All processes need the same batches, even on machines with different limits.
        """
        return nbytes

    def reads_of(self, batch: TensorBatch) -> Sequence[Read]:
        """Return the reads of a batch that this process carries out."""
        return batch.layout.reads

    def collective(self, *, is_last: bool = False) -> AbstractContextManager[None]:
        """Run a block that all processes carry out: an error of one fails all. The last block ends the operation."""
        return nullcontext()

    def fill(self, batch: TensorBatch, memory: torch.Tensor) -> None:
        """Fill in the bytes of a batch that other processes have read, at the end of a block.

        The bytes that this process reads must have arrived before.
        """

    def verify(self, batch: TensorBatch, memory: torch.Tensor, num_threads: int) -> None:
        """Verify the bytes of a batch that other processes have read."""

    @property
    def may_discard(self) -> bool:
        """True if no other process writes to this process's memory any more."""
        return True


def stream(
    contents: TensorColumns, options: Options, reader: Reader | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in order; waiting tensors and buffers take at most `options.memory` bytes.

    Args:
        reader: of a group in which all members stream the same tensors. Default: this process reads all.
    """
    contents = replace(contents, files=options.verified_files(contents.files))
    backend = options.backend_for(contents.files)
    budget, bound = _bounds(contents, backend, options)
    return _stream(contents, backend, budget, bound, options, reader or Reader())


def _bounds(contents: TensorColumns, backend: Backend[Any], options: Options) -> tuple[Budget, int]:
    """Return the budget for reading, and the number of bytes of tensors that may be read ahead."""
    sizes = contents.sizes()
    largest = max(range(len(sizes)), key=sizes.__getitem__, default=None)
    needed = 0 if largest is None else sizes[largest] + _SLACK
    most, cost = backend.max_buffer_nbytes, cost_of(contents.files)
    if options.memory is None:
        budget = plan_budget(options.threads, None, most, cost)
        return budget, max(needed, min(MAX_IN_FLIGHT, NODE_IN_FLIGHT // local_world_size()) - budget.memory)
    if options.memory < 2 * MIN_BUFFER:
        raise PlanError(f"memory: {options.memory} bytes, expected {2 * MIN_BUFFER} or more", code="option")
    budget = plan_budget(options.threads, max(MIN_BUFFER, min(options.memory // _NUM_BATCHES, most)), most, cost)
    bound = options.memory - budget.memory
    if largest is not None and bound < needed:
        raise PlanError(
            f"memory={options.memory} is too small for tensor {contents.names[largest]!r} of {sizes[largest]} bytes:"
            f" use at least {least_memory(contents)}",
            code="option",
        )
    return budget, bound


def most_memory(contents: TensorColumns, options: Options) -> int:
    """Return the limit of the bytes that `stream` takes for buffers and for tensors that it has not yielded yet."""
    backend = options.backend_for(contents.files)
    if options.memory is not None:
        return options.memory
    budget, bound = _bounds(contents, backend, options)
    return budget.memory + bound


def least_memory(contents: TensorColumns) -> int:
    """Return the least `Options.memory` that any backend needs to stream these tensors, in bytes."""
    needed = max(contents.sizes(), default=0) + _SLACK
    return needed + max(MIN_BUFFER, needed // (_NUM_BATCHES - 1))


class PartCounter:
    """Counts the bytes that have not arrived yet, for each part of an address space. Thread-safe."""

    def __init__(self, starts: Sequence[int], sizes: Sequence[int], stop: Stop) -> None:
        """Take the starts of the parts, ascending, and the bytes that are read of each; `stop` is the job's."""
        self._starts = starts
        self._left = list(sizes)
        self._stop = stop

    def part_at(self, offset: int) -> int:
        """Return the part that contains an offset."""
        return bisect_right(self._starts, offset) - 1

    def count(self, offset: int, nbytes: int) -> None:
        """Record that bytes of one part have arrived."""
        part = self.part_at(offset)
        with self._stop.condition:
            self._left[part] -= nbytes
            if not self._left[part]:
                self._stop.condition.notify_all()

    def wait(self, part: int) -> bool:
        """Wait for a part; return False if the job stopped before it arrived."""
        with self._stop.condition:
            while self._left[part] and not self._stop.requested:
                self._stop.condition.wait()
            return not self._left[part]


def _plan_batches(contents: TensorColumns, limit: int) -> Iterator[TensorBatch]:
    start, sizes = 0, contents.sizes()
    for rows in batches(sizes, limit):
        piece = slice(rows.start, rows.stop)
        layout = place(contents.reads[piece], sizes[piece], start)
        offsets = [offset - start for offset in layout.offsets]
        names, dtypes, shapes = contents.names[piece], contents.dtypes[piece], contents.shapes[piece]
        yield TensorBatch(start, layout, TensorColumns(names, dtypes, shapes, offsets=offsets), sum(sizes[piece]))
        start += max(layout.nbytes, BLOCK)  # No two batches at one offset.


class _Window(Generic[Span]):
    """One address space for all batches. Only open batches have memory; a read into another batch waits."""

    def __init__(
        self,
        pool: Pool[Span],
        parts: Sequence[TensorBatch],
        counter: PartCounter,
        arena_nbytes: int,
        bound: int,
        stop: Stop,
    ) -> None:
        """Limit open batches to `bound` bytes in all, but allow at least one. Most batches take `arena_nbytes`."""
        self._pool = pool
        self._parts = parts
        self._counter = counter
        self._costs = [max(part.layout.nbytes, arena_nbytes) for part in parts]
        self._bound = bound
        self._stop = stop
        self._in_flight = 0
        self._num_opened = 0
        self._arenas: dict[int, Allocation[Span]] = {}
        self._bases: dict[int, torch.Tensor] = {}

    def wait(self, part: int) -> bool:
        """Allocate memory for all batches that fit, and wait for one; return False if the job stopped before that."""
        while self._num_opened < len(self._parts):
            cost = self._costs[self._num_opened]
            if self._bases and self._in_flight + cost > self._bound:
                break
            arena, base = self._pool.take(self._parts[self._num_opened].layout.nbytes)
            self._in_flight += cost
            self._bases[self._num_opened] = base
            with self._stop.condition:
                self._arenas[self._num_opened] = arena
                self._num_opened += 1
                self._stop.condition.notify_all()
        return self._counter.wait(part)

    def take(self, part: int) -> torch.Tensor:
        """Remove a batch that has arrived from the window, and return its memory."""
        del self._arenas[part]
        return self._bases.pop(part)

    def give(self, part: int) -> None:
        """Stop counting a batch's memory as in flight."""
        self._in_flight -= self._costs[part]

    def discard(self) -> None:
        """Free the memory of all batches that were not taken."""
        self._bases.clear()
        for arena in self._arenas.values():
            arena.discard()
        self._arenas.clear()

    def span(self, offset: int, nbytes: int) -> Span:
        """Return memory of an open batch."""
        part = self._counter.part_at(offset)
        with self._stop.condition:
            while part not in self._arenas:
                if self._stop.requested:
                    raise Stopped
                self._stop.condition.wait()
            arena = self._arenas[part]
        return arena.span(offset - self._parts[part].start, nbytes)


class _Arriving:
    """The batches of a stream while they are read. Not thread-safe."""

    def __init__(
        self,
        contents: TensorColumns,
        backend: Backend[Any],
        budget: Budget,
        bound: int,
        options: Options,
        reader: Reader,
    ) -> None:
        """Plan all batches, with at most `bound` bytes in all read ahead."""
        arena_nbytes = bound // _NUM_BATCHES
        self.batches = list(_plan_batches(contents, arena_nbytes * 3 // 4))  # Alignment wastes some.
        self._reader = reader
        self._backend = backend
        self._device = options.device
        self._stop = Stop()
        reads = [reader.reads_of(batch) for batch in self.batches]
        sizes = [sum(read.transfer.total_nbytes for read in part) for part in reads]
        counter = PartCounter([batch.start for batch in self.batches], sizes, self._stop)
        self._pool = backend.pool(min(arena_nbytes, sum(batch.layout.nbytes for batch in self.batches)))
        self._window = _Window(self._pool, self.batches, counter, arena_nbytes, bound, self._stop)
        planned = tuple(chain.from_iterable(reads))
        self._job = ReadJob(contents.files, planned, budget, counter.count, self._stop)
        self._running: RunningJob | None = None
        self._views: dict[str, torch.Tensor] = {}

    def start(self) -> None:
        """Begin to read."""
        with self._reader.collective():
            self._running = self._backend.start(self._window, self._job)

    def tensors(self, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a batch that `wait` has waited for, and keep no reference to them."""
        running = self._running
        assert running is not None
        current = running.current_stream
        for name in list(self._views):
            if running.current_stream != current:  # Another thread may call `next`: its stream must wait, too.
                current = running.current_stream
                running.settle()
            yield name, self._views.pop(name)
            self._stop.check_process()
        self._window.give(index)

    def wait(self, index: int) -> None:
        """Wait for the next batch."""
        running, batch = self._running, self.batches[index]
        assert running is not None
        with self._reader.collective():
            if not self._window.wait(index):
                running.join()  # Raises the job's error.
            running.settle()
            memory = self._window.take(index)
            self._reader.fill(batch, memory)
        self._reader.verify(batch, memory, self._job.budget.threads)
        self._views = make_views(to_device(memory, self._device), batch.tensors)

    def join(self) -> None:
        """End the job, after all of its batches were taken."""
        with self._reader.collective(is_last=True):
            assert self._running is not None
            self._running.join()

    def close(self) -> None:
        """End the job at any time, and free all memory except that of tensors that were yielded."""
        if self._running is not None:
            self._running.cancel()
        self._views.clear()
        self._pool.close()
        if self._reader.may_discard:
            self._window.discard()


def _stream(
    contents: TensorColumns, backend: Backend[Any], budget: Budget, bound: int, options: Options, reader: Reader
) -> Iterator[tuple[str, torch.Tensor]]:
    with error_hints():
        arriving = _Arriving(contents, backend, budget, reader.least(bound), options, reader)
        total, done = sum(batch.nbytes for batch in arriving.batches), 0
        with reporting(options.progress, "loading", total) as report, closing(arriving):
            arriving.start()
            for index, batch in enumerate(arriving.batches):
                arriving.wait(index)
                done += batch.nbytes
                report(done)
                yield from arriving.tensors(index)
            arriving.join()
