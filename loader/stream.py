"""`iter_load`: yields a rank's tensors one by one and bounds how much is read ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from relayout.core.extents import BLOCK
from relayout.core.workers import Stop, Stopped
from relayout.errors import PlanError
from relayout.format.arena import Placement, place
from relayout.loader.backends.arrivals import Arrivals
from relayout.loader.backends.base import Arena, Backend, Pool, ReadJob, RunningJob, Span, checks_of
from relayout.loader.backends.choice import choose
from relayout.loader.budgets import MAX_IN_FLIGHT, MIN_BUFFER, NODE_IN_FLIGHT, Budget, local_world_size, plan_budget
from relayout.loader.diagnose.hints import error_hints
from relayout.loader.loading import Options, load_arena
from relayout.loader.placement import PlacedTensors, batches, pack, placed
from relayout.loader.sources.contents import Contents, cost_of
from relayout.loader.tensors import make_views, to_device
from relayout.progress import reporting

if TYPE_CHECKING:
    import torch

    from relayout.loader.group.sharing import Sharing

_NUM_BATCHES = 4
"""The bytes in flight are divided into so many batches: one is used while the others are read."""

_SLACK = 2 * BLOCK
"""Bytes that aligning a tensor may waste."""


def stream(contents: Contents, options: Options, sharing: Sharing | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in order; bytes that wait to be yielded and buffers take `options.memory` at most.

    Args:
        sharing: with the members of a group, who all stream the same; each reads a part.

    Raises:
        PlanError: the largest tensor needs more; or the backend reads when tensors are used, which no group can share.
    """
    backend = choose(options.backend, options.device, contents.files).backend
    if backend.reads_when_used:
        if sharing is not None:
            raise not_shared(backend)
        return _with_hints(_all_at_once(contents, options))
    budget, bound = _bounds(contents, backend, options)
    return _with_hints(_stream(contents, backend, budget, bound, options, sharing))


def not_shared(backend: Backend[Any]) -> PlanError:
    """The error for a group's load by a backend that makes no requests."""
    return PlanError(f"backend {backend.name!r} reads when tensors are used, which a group cannot share", code="option")


def _bounds(contents: Contents, backend: Backend[Any], options: Options) -> tuple[Budget, int]:
    """The budget for reading, and how many bytes of tensors may be read ahead."""
    sizes = contents.sizes()
    largest = max(range(len(sizes)), key=sizes.__getitem__, default=None)
    needed = 0 if largest is None else sizes[largest] + _SLACK
    most, cost = backend.max_buffer_nbytes, cost_of(contents.files)
    if options.memory is None:
        budget = plan_budget(options.threads, None, most, cost)
        return budget, max(needed, min(MAX_IN_FLIGHT, NODE_IN_FLIGHT // local_world_size()) - budget.memory)
    if options.memory < 2 * MIN_BUFFER:
        raise PlanError(f"{options.memory} bytes of memory, expected {2 * MIN_BUFFER} or more", code="option")
    budget = plan_budget(options.threads, max(MIN_BUFFER, min(options.memory // _NUM_BATCHES, most)), most, cost)
    bound = options.memory - budget.memory
    if largest is not None and bound < needed:
        raise PlanError(
            f"memory={options.memory} is too small for tensor {contents.names[largest]!r} of {sizes[largest]} bytes:"
            f" use at least {needed + max(MIN_BUFFER, needed // (_NUM_BATCHES - 1))}",
            code="option",
        )
    return budget, bound


def _with_hints(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors; errors get hints."""
    with error_hints():
        yield from tensors


def _all_at_once(contents: Contents, options: Options) -> Iterator[tuple[str, torch.Tensor]]:
    tensors = load_arena(pack(contents), options)
    for name in list(tensors):
        yield name, tensors.pop(name)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Tensors that share an arena."""

    start: int
    """Offset of the arena in the address space of all batches."""
    placement: Placement
    tensors: PlacedTensors
    """Offsets are relative to the arena."""
    nbytes: int
    """Of the tensors."""


def _plan_batches(contents: Contents, limit: int) -> Iterator[_Batch]:
    start, sizes = 0, contents.sizes()
    for rows in batches(sizes, limit):
        piece = slice(rows.start, rows.stop)
        placement = place(contents.reads[piece], sizes[piece], start)
        offsets = [offset - start for offset in placement.offsets]
        tensors = PlacedTensors(contents.names[piece], contents.dtypes[piece], contents.shapes[piece], offsets, None)
        yield _Batch(start, placement, tensors, sum(sizes[piece]))
        start += max(placement.nbytes, BLOCK)  # No two batches at one offset.


class _Window(Generic[Span]):
    """One address space for all batches. Some have memory; a thread that reads into another batch waits."""

    def __init__(
        self, pool: Pool[Span], parts: Sequence[_Batch], arrivals: Arrivals, arena_nbytes: int, bound: int, stop: Stop
    ) -> None:
        """Open batches have at most `bound` bytes in all, but one is always open. Most take `arena_nbytes`."""
        self._pool = pool
        self._parts = parts
        self._arrivals = arrivals
        self._costs = [max(part.placement.nbytes, arena_nbytes) for part in parts]
        self._bound = bound
        self._stop = stop
        self._in_flight = 0
        self._num_opened = 0
        self._arenas: dict[int, Arena[Span]] = {}
        self._bases: dict[int, torch.Tensor] = {}

    def wait(self, number: int) -> bool:
        """Give memory to as many batches as fit, and wait for one; False if the job stopped before it arrived."""
        while self._num_opened < len(self._parts):
            cost = self._costs[self._num_opened]
            if self._bases and self._in_flight + cost > self._bound:
                break
            arena, base = self._pool.take(self._parts[self._num_opened].placement.nbytes)
            self._in_flight += cost
            self._bases[self._num_opened] = base
            with self._stop.condition:
                self._arenas[self._num_opened] = arena
                self._num_opened += 1
                self._stop.condition.notify_all()
        return self._arrivals.wait(number)

    def take(self, number: int) -> torch.Tensor:
        """Remove a batch that has arrived from the window, and return its memory."""
        del self._arenas[number]
        return self._bases.pop(number)

    def give(self, number: int) -> None:
        """Stop counting a batch's memory as in flight."""
        self._in_flight -= self._costs[number]

    def discard(self) -> None:
        """Free the memory of all batches that were not taken."""
        self._bases.clear()
        for arena in self._arenas.values():
            arena.discard()
        self._arenas.clear()

    def span(self, offset: int, nbytes: int) -> Span:
        """See `Memory.span`.

        Raises:
            Stopped: the job was cancelled or has failed.
        """
        number = self._arrivals.part_at(offset)
        with self._stop.condition:
            while number not in self._arenas:
                if self._stop.requested:
                    raise Stopped
                self._stop.condition.wait()
            arena = self._arenas[number]
        return arena.span(offset - self._parts[number].start, nbytes)

    @property
    def whole(self) -> None:
        """See `Memory.whole`."""
        return None


def _stream(
    contents: Contents,
    backend: Backend[Any],
    budget: Budget,
    bound: int,
    options: Options,
    sharing: Sharing | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    members = None if sharing is None else sharing.members
    together = nullcontext if members is None else members.together
    if members is not None:
        bound = min(members.exchange(bound))  # All need the same batches, on machines that are not alike, too.
    arena_nbytes = bound // _NUM_BATCHES
    parts = list(_plan_batches(contents, arena_nbytes * 3 // 4))  # Alignment wastes some.
    rounds = None if sharing is None else [sharing.round(part.placement.reads, part.start) for part in parts]
    reads = [part.placement.reads for part in parts] if rounds is None else [one.reads for one in rounds]
    offsets = [offset for part in parts for offset in part.placement.offsets]
    stop = Stop()
    checks = checks_of(placed(contents, offsets), stop) if options.verify else None
    sizes = [sum(one.transfer.total_nbytes for one in part) for part in reads]
    arrivals = Arrivals([part.start for part in parts], sizes, stop)
    pool = backend.pool(arena_nbytes)
    window = _Window(pool, parts, arrivals, arena_nbytes, bound, stop)
    all_reads = tuple(one for part in reads for one in part)
    job = ReadJob(contents.files, all_reads, budget, checks, arrivals.arrived, stop)
    done = 0
    running: RunningJob | None = None
    views: dict[str, torch.Tensor] = {}
    with reporting(options.progress, "loading", sum(part.nbytes for part in parts)) as report:
        try:
            with together():
                running = backend.start(window, job)
            for number, part in enumerate(parts):
                with together():
                    if not window.wait(number):
                        running.join()  # Raises the job's error.
                    running.settle()
                memory = window.take(number)
                if members is not None and rounds is not None:
                    members.spread(rounds[number].within(memory, part.start))
                views = make_views(to_device(memory, options.device), part.tensors)
                del memory
                done += part.nbytes
                if report is not None:
                    report(done)
                yield from _each(views, running, stop)
                window.give(number)
            with together():
                running.join()
        finally:
            if running is not None:
                running.cancel()
            views.clear()
            pool.close()
            if members is None or not members.is_broken:
                window.discard()


def _each(views: dict[str, torch.Tensor], running: RunningJob, stop: Stop) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors that have arrived, and keep no reference to them."""
    stream = running.current_stream
    for name in list(views):
        if running.current_stream != stream:  # Another thread may call `next`: its stream must wait, too.
            stream = running.current_stream
            running.settle()
        yield name, views.pop(name)
        stop.check_process()
