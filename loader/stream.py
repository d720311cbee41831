"""`iter_load`: a rank's tensors one after the other, with a bound on what is read ahead."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from relayout.core.extents import BLOCK
from relayout.core.workers import Stop, Stopped
from relayout.errors import PlanError
from relayout.loader.backends.arena import ArenaPool, HostArena
from relayout.loader.backends.base import Fill, Filling, fill_of
from relayout.loader.backends.choice import Choice, choose
from relayout.loader.backends.cuda import DeviceArena, DeviceBackend, allocate_on, moved
from relayout.loader.backends.host import HostBackend
from relayout.loader.budgets import MAX_IN_FLIGHT, MIN_BUFFER, NODE_IN_FLIGHT, Budget, local_world_size, plan_budget
from relayout.loader.diagnose.hints import advised
from relayout.loader.loading import Options, load_contents
from relayout.loader.placement import Placement, batches, place
from relayout.loader.sources.contents import Contents
from relayout.loader.tensors import arena_tensor, make_views
from relayout.progress import reporting

if TYPE_CHECKING:
    import torch

_NUM_BATCHES = 4
"""Into so many parts the bytes in flight are cut: one is used, the others are read."""

_SLACK = 2 * BLOCK
"""Bytes that the place of a tensor may waste."""

Arena = TypeVar("Arena")


def stream(contents: Contents, options: Options) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in order; at most `options.memory` bytes are read and not yet yielded, or buffers.

    Raises:
        PlanError: that is less than what a tensor takes.
    """
    if options.backend == "mapped":
        return _advised(_mapped(contents, options))
    sizes = contents.sizes()
    choice = choose(options.backend, options.device, contents.files)
    largest = max(range(len(sizes)), key=sizes.__getitem__, default=None)
    needed = 0 if largest is None else sizes[largest] + _SLACK
    if options.memory is None:
        budget = plan_budget(options.threads, None, choice.max_buffers)
        bound = max(needed, min(MAX_IN_FLIGHT, NODE_IN_FLIGHT // local_world_size()) - budget.memory)
    else:
        if options.memory < 2 * MIN_BUFFER:
            raise PlanError(f"{options.memory} bytes of memory, expected {2 * MIN_BUFFER} or more")
        budget = plan_budget(
            options.threads,
            max(MIN_BUFFER, min(options.memory // _NUM_BATCHES, choice.max_buffers)),
            choice.max_buffers,
        )
        bound = options.memory - budget.memory
        if largest is not None and bound < needed:
            raise PlanError(
                f"tensor {contents.names[largest]!r} has {sizes[largest]} bytes: at most {options.memory} in flight"
                f" are too few, {needed + max(MIN_BUFFER, needed // (_NUM_BATCHES - 1))} would do"
            )
    return _advised(_stream(contents, sizes, choice, budget, bound, options))


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


class _Window(Generic[Arena]):
    """All batches in one address space, of which some have memory; whoever wants another's waits for it."""

    def __init__(self, starts: Sequence[int], stop: Stop) -> None:
        self._starts = starts
        self._stop = stop
        self._arenas: dict[int, Arena] = {}

    def open(self, number: int, arena: Arena) -> None:
        """Give a batch its memory."""
        with self._stop.condition:
            self._arenas[number] = arena
            self._stop.condition.notify_all()

    def close(self, number: int) -> None:
        """Forget a batch's memory."""
        del self._arenas[number]

    def find(self, offset: int) -> tuple[Arena, int]:
        """The arena that has this offset, and the offset there.

        Raises:
            Stopped: the load was given up.
        """
        number = bisect_right(self._starts, offset) - 1
        with self._stop.condition:
            while number not in self._arenas:
                if self._stop.requested:
                    raise Stopped
                self._stop.condition.wait()
            return self._arenas[number], offset - self._starts[number]


class _HostBatches(_Window[HostArena]):
    """Batches in host memory, which is used again when a batch's tensors are gone."""

    def __init__(self, backend: HostBackend, starts: Sequence[int], stop: Stop, arena_nbytes: int) -> None:
        super().__init__(starts, stop)
        self._backend = backend
        self._pool = ArenaPool(arena_nbytes)

    def start(self, fill: Fill) -> Filling:
        return self._backend.start(self, fill)

    def make(self, number: int, nbytes: int) -> torch.Tensor:
        """Give a batch memory: all of it, as a tensor."""
        arena = self._pool.take(nbytes)
        self.open(number, arena)
        return arena_tensor(arena, self._pool.give)

    def span(self, offset: int, nbytes: int) -> memoryview:
        """See `HostMemory.span`."""
        arena, start = self.find(offset)
        return arena.span(start, nbytes)

    @property
    def stream(self) -> None:
        """There are no streams in host memory."""
        return None

    def end(self) -> None:
        """Keep no memory."""
        self._pool.close()


class _DeviceBatches(_Window[DeviceArena]):
    """Batches in the memory of a device, whose allocator uses it again."""

    def __init__(self, backend: DeviceBackend, starts: Sequence[int], stop: Stop, device: str | torch.device) -> None:
        super().__init__(starts, stop)
        self._backend = backend
        self._device = device

    def start(self, fill: Fill) -> Filling:
        return self._backend.start(self, fill)

    def make(self, number: int, nbytes: int) -> torch.Tensor:
        """Give a batch memory: all of it, as a tensor."""
        arena = allocate_on(self._device, nbytes)
        self.open(number, arena)
        return arena.tensor

    def span(self, offset: int, nbytes: int) -> torch.Tensor:
        """See `DeviceMemory.span`."""
        arena, start = self.find(offset)
        return arena.span(start, nbytes)

    @property
    def whole(self) -> None:
        """See `DeviceMemory.whole`."""
        return None

    @property
    def stream(self) -> object:
        """What the caller's work on the device goes into now."""
        import torch

        device = torch.device(self._device)
        return torch.cuda.current_stream(device) if device.type == "cuda" else None

    def end(self) -> None:
        """Nothing is kept."""


def _stream(
    contents: Contents, sizes: Sequence[int], choice: Choice, budget: Budget, bound: int, options: Options
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
    fill = fill_of(contents, offsets, reads, budget, verify=options.verify, arrived=arrived, stop=stop)
    memory: _HostBatches | _DeviceBatches
    if isinstance(choice.backend, DeviceBackend):
        memory = _DeviceBatches(choice.backend, starts, stop, options.device)
    else:
        assert isinstance(choice.backend, HostBackend)
        memory = _HostBatches(choice.backend, starts, stop, arena_nbytes)
    with reporting(options.progress, "loading", sum(sizes)) as report:
        filling = memory.start(fill)
        try:
            bases: dict[int, torch.Tensor] = {}
            in_flight = done = 0
            for number, part in enumerate(parts):
                while len(bases) + number < len(parts):
                    following = parts[number + len(bases)].placement.nbytes
                    if bases and in_flight + max(following, arena_nbytes) > bound:
                        break
                    bases[number + len(bases)] = memory.make(number + len(bases), following)
                    in_flight += max(following, arena_nbytes)
                with stop.condition:
                    while left[number] and not stop.requested:
                        stop.condition.wait()
                if left[number]:
                    filling.join()  # Raises what has gone wrong.
                filling.settle()
                memory.close(number)
                views = _views(contents, part, bases.pop(number), options)
                done += sum(sizes[row] for row in part.rows)
                if report is not None:
                    report(done)
                stream = memory.stream
                for name in list(views):
                    if memory.stream != stream:  # Another thread's, perhaps, which has not been told to wait.
                        stream = memory.stream
                        filling.settle()
                    yield name, views.pop(name)
                    stop.check_process()
                in_flight -= max(part.placement.nbytes, arena_nbytes)
            filling.join()
        finally:
            filling.cancel()
            memory.end()


def _mapped(contents: Contents, options: Options) -> Iterator[tuple[str, torch.Tensor]]:
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
    if base.device.type == "cpu" and not options.on_host:
        base = moved(base, options.device)
    rows = slice(part.rows.start, part.rows.stop)
    offsets = [offset - part.start for offset in part.placement.offsets]
    return make_views(base, contents.names[rows], contents.dtypes[rows], contents.shapes[rows], offsets)
