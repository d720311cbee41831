"""`iter_load`: a rank's tensors one after the other, with a bound on what is read ahead."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from relayout.core.extents import BLOCK
from relayout.core.workers import Stop, Stopped
from relayout.errors import PlanError
from relayout.loader.backends.base import Arena, Backend, Pool, Span, read_job
from relayout.loader.backends.choice import choose
from relayout.loader.budgets import MAX_IN_FLIGHT, MIN_BUFFER, NODE_IN_FLIGHT, Budget, local_world_size, plan_budget
from relayout.loader.diagnose.hints import advised
from relayout.loader.loading import Options, load_contents
from relayout.loader.placement import Placement, batches, place
from relayout.loader.sources.contents import Contents
from relayout.loader.tensors import make_views, to_device
from relayout.progress import reporting

if TYPE_CHECKING:
    import torch

_NUM_BATCHES = 4
"""Into so many parts the bytes in flight are cut: one is used, the others are read."""

_SLACK = 2 * BLOCK
"""Bytes that the place of a tensor may waste."""


def stream(contents: Contents, options: Options) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in order; at most `options.memory` bytes are read and not yet yielded, or buffers.

    Raises:
        PlanError: that is less than what a tensor takes.
    """
    choice = choose(options.backend, options.device, contents.files)
    backend = choice.backend
    if backend.reads_when_used:
        return _advised(_all_at_once(contents, options))
    sizes = contents.sizes()
    largest = max(range(len(sizes)), key=sizes.__getitem__, default=None)
    needed = 0 if largest is None else sizes[largest] + _SLACK
    if options.memory is None:
        budget = plan_budget(options.threads, None, backend.max_buffer_nbytes)
        bound = max(needed, min(MAX_IN_FLIGHT, NODE_IN_FLIGHT // local_world_size()) - budget.memory)
    else:
        if options.memory < 2 * MIN_BUFFER:
            raise PlanError(f"{options.memory} bytes of memory, expected {2 * MIN_BUFFER} or more")
        budget = plan_budget(
            options.threads,
            max(MIN_BUFFER, min(options.memory // _NUM_BATCHES, backend.max_buffer_nbytes)),
            backend.max_buffer_nbytes,
        )
        bound = options.memory - budget.memory
        if largest is not None and bound < needed:
            raise PlanError(
                f"tensor {contents.names[largest]!r} has {sizes[largest]} bytes: at most {options.memory} in flight"
                f" are too few, {needed + max(MIN_BUFFER, needed // (_NUM_BATCHES - 1))} would do"
            )
    return _advised(_stream(contents, sizes, backend, budget, bound, options))


def _advised(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors, and errors that say what to do about them."""
    with advised():
        yield from tensors


@dataclass(frozen=True, slots=True)
class _Batch:
    """Tensors that share an arena."""

    rows: range
    start: int
    """Where the arena begins in the address space of all batches."""
    placement: Placement


class _Window(Generic[Span]):
    """All batches in one address space, of which some have memory; whoever wants another's waits for it."""

    def __init__(self, pool: Pool[Span], starts: Sequence[int], stop: Stop) -> None:
        self._pool = pool
        self._starts = starts
        self._stop = stop
        self._arenas: dict[int, Arena[Span]] = {}

    def open(self, number: int, nbytes: int) -> torch.Tensor:
        """Give a batch memory: all of it, as a tensor."""
        arena, tensor = self._pool.take(nbytes)
        with self._stop.condition:
            self._arenas[number] = arena
            self._stop.condition.notify_all()
        return tensor

    def close(self, number: int) -> None:
        """Forget a batch's memory."""
        del self._arenas[number]

    def span(self, offset: int, nbytes: int) -> Span:
        """See `Memory.span`.

        Raises:
            Stopped: the load was given up.
        """
        number = bisect_right(self._starts, offset) - 1
        with self._stop.condition:
            while number not in self._arenas:
                if self._stop.requested:
                    raise Stopped
                self._stop.condition.wait()
            arena = self._arenas[number]
        return arena.span(offset - self._starts[number], nbytes)

    @property
    def whole(self) -> None:
        """See `Memory.whole`."""
        return None


def _stream(
    contents: Contents, sizes: Sequence[int], backend: Backend[Any], budget: Budget, bound: int, options: Options
) -> Iterator[tuple[str, torch.Tensor]]:
    arena_nbytes = bound // _NUM_BATCHES
    limit = arena_nbytes * 3 // 4  # Placement wastes some.
    parts = list(_plan_batches(contents, sizes, limit))
    left = [sum(sizes[row] for row in part.rows) for part in parts]
    starts = [part.start for part in parts]
    stop = Stop()

    def arrived(offset: int, nbytes: int) -> None:
        number = bisect_right(starts, offset) - 1
        with stop.condition:
            left[number] -= nbytes
            if not left[number]:
                stop.condition.notify_all()

    reads = tuple(read for part in parts for read in part.placement.reads)
    offsets = [offset for part in parts for offset in part.placement.offsets]
    job = read_job(contents, offsets, reads, budget, verify=options.verify, arrived=arrived, stop=stop)
    pool = backend.pool(arena_nbytes)
    window = _Window(pool, starts, stop)
    with reporting(options.progress, "loading", sum(sizes)) as report:
        running = backend.start(window, job)
        try:
            bases: dict[int, torch.Tensor] = {}
            in_flight = done = 0
            for number, part in enumerate(parts):
                while len(bases) + number < len(parts):
                    following = parts[number + len(bases)].placement.nbytes
                    if bases and in_flight + max(following, arena_nbytes) > bound:
                        break
                    bases[number + len(bases)] = window.open(number + len(bases), following)
                    in_flight += max(following, arena_nbytes)
                with stop.condition:
                    while left[number] and not stop.requested:
                        stop.condition.wait()
                if left[number]:
                    running.join()  # Raises what has gone wrong.
                running.settle()
                window.close(number)
                views = _views(contents, part, bases.pop(number), options)
                done += sum(sizes[row] for row in part.rows)
                if report is not None:
                    report(done)
                stream = running.current_stream
                for name in list(views):
                    if running.current_stream != stream:  # Another thread's, perhaps, not told to wait yet.
                        stream = running.current_stream
                        running.settle()
                    yield name, views.pop(name)
                    stop.check_process()
                in_flight -= max(part.placement.nbytes, arena_nbytes)
            running.join()
        finally:
            running.cancel()
            pool.close()


def _all_at_once(contents: Contents, options: Options) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = load_contents(contents, options)
    for name in list(tensors):
        yield name, tensors.pop(name)


def _plan_batches(contents: Contents, sizes: Sequence[int], limit: int) -> Iterator[_Batch]:
    start = 0
    for rows in batches(sizes, limit):
        placement = place(contents.reads[rows.start : rows.stop], sizes[rows.start : rows.stop], start)
        yield _Batch(rows, start, placement)
        start += max(placement.nbytes, BLOCK)  # No two batches at one offset.


def _views(contents: Contents, part: _Batch, base: torch.Tensor, options: Options) -> dict[str, torch.Tensor]:
    rows = slice(part.rows.start, part.rows.stop)
    offsets = [offset - part.start for offset in part.placement.offsets]
    return make_views(
        to_device(base, options.device), contents.names[rows], contents.dtypes[rows], contents.shapes[rows], offsets
    )
