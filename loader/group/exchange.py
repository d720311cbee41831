"""Loads of different slices of the same tensors by the members of a group, which together read each byte once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from relayout.checkpoint.source import identity_of
from relayout.core.digests import xxh3_hex
from relayout.core.extents import Bytes, copy_runs
from relayout.core.slices import CutTensor, number_cuts
from relayout.core.workers import Stop, Stopped
from relayout.errors import PlanError
from relayout.format.index import Read
from relayout.loader.backends.base import Allocation, Backend, Memory, Options, ReadJob, RunningJob
from relayout.loader.backends.files import ReadableFiles
from relayout.loader.backends.host import ThreadedJob, reserve
from relayout.loader.group.all_to_all import AllToAll, pack, unpack
from relayout.loader.group.collectives import Group
from relayout.loader.group.plan import DividedTensor, Division, ExchangedRange, ExchangeRound, plan_exchange
from relayout.loader.requests import Budget
from relayout.loader.sources.rank import (
    ArenaPlan,
    Names,
    RankSource,
    StoredFile,
    cost_of,
    select,
)
from relayout.loader.sources.reshard import UnconvertedRank
from relayout.loader.tensors import make_views
from relayout.reporting import reporting
from relayout.storage.stores import Access
from relayout.storage.system import Buffer

if TYPE_CHECKING:
    import torch

_NUM_BUFFERS = 4
"""Number of ranges that a member is reading or has read and not sent yet."""


@dataclass(frozen=True, slots=True)
class ExchangePlan:
    """The plan by which a member of a group fills its slices of tensors that are divided among the members."""

    member: int
    files: tuple[StoredFile, ...]
    """The files to read."""
    tensors: Sequence[DividedTensor]
    rounds: Sequence[ExchangeRound]
    """The exchange rounds, which are equal in all members."""

    @staticmethod
    def of(group: Group, files: tuple[StoredFile, ...], tensors: Sequence[DividedTensor]) -> ExchangePlan:
        """Plan an exchange; the slices of `tensors` are those of all members, in member order."""
        return ExchangePlan(group.index, files, tensors, plan_exchange(tensors, group.num_members))

    def alone(self, offsets: Sequence[int]) -> tuple[Read, ...]:
        """Return the reads of this member for itself only, into memory that has the slices at these offsets."""
        return tuple(
            Read(tensor.file, transfer.shifted(source=tensor.offset, target=offset))
            for tensor, offset in zip(self.tensors, offsets, strict=True)
            if not tensor.division.exchanged
            for transfer in tensor.division.slices[self.member]
        )

    def ahead(self) -> list[ExchangedRange]:
        """Return the ranges that this member reads for all, in order."""
        return [piece for each in self.rounds for piece in each.ranges if piece.member == self.member]


class RunningExchange:
    """An exchange after its reads have started. All members make the calls in the order of these methods."""

    def __init__(
        self,
        group: Group,
        plan: ExchangePlan,
        backend: Backend[Any],
        budget: Budget,
        memory: Memory[Any],
        offsets: Sequence[int],
        slices: Sequence[Bytes],
    ) -> None:
        """Start to read, in a block of `Group.collective`.

        Args:
            memory: holds this member's slices, at these offsets.
            slices: the bytes of each slice; any bytes for a slice that this member does not hold.
        """
        self._plan, self._slices, self._messages = plan, slices, AllToAll(group)
        self._done = 0
        self._jobs: list[RunningJob] = []
        try:
            files, alone = _needed(plan.files, plan.alone(offsets))
            self._jobs.append(backend.start(memory, ReadJob(files, alone, budget)))
            files, ranges = _needed(plan.files, plan.ahead())
            self._ahead = ReadAhead(files, ranges, backend.access, budget)
            self._jobs.append(self._ahead.job)
        except BaseException:
            self.cancel()
            raise

    def run(self, report: Callable[[int], None]) -> None:
        """Carry out all rounds, outside of a block of `Group.collective`."""
        me = self._plan.member
        for each in self._plan.rounds:
            messages = self._messages.exchange(each.sent(me), each.received(me), partial(self._fill, each))
            for piece in each.ranges:
                if piece.member != me:
                    parts = piece.kept(self._plan.tensors, me)
                    unpack(messages[piece.member], ((self._slices[row], part) for row, part in parts))
            del messages  # A larger buffer may replace theirs.
            self._done += sum(piece.sizes[me] for piece in each.ranges)
            report(self._done)

    def _fill(self, each: ExchangeRound, messages: Sequence[Bytes]) -> None:
        """Write this member's messages of a round, and its own slices, from the range that it has read."""
        me, tensors = self._plan.member, self._plan.tensors
        for piece in each.ranges:
            if piece.member == me:
                view = self._ahead.take()
                for member, message in enumerate(messages):
                    if member != me:
                        pack(message, ((partial(copy_runs, view), part) for _, part in piece.kept(tensors, member)))
                for row, part in piece.kept(tensors, me):
                    copy_runs(view, self._slices[row], part)
                self._ahead.release()

    def finish(self, report: Callable[[int], None]) -> None:
        """Wait for all bytes, in a block of `Group.collective`."""
        alone, ahead = self._jobs
        ahead.join()
        alone.join(lambda nbytes: report(self._done + nbytes))

    def cancel(self) -> None:
        """Stop reading; the threads have ended on return."""
        for job in self._jobs:
            job.cancel()


Item = TypeVar("Item", Read, ExchangedRange)


def _needed(files: Sequence[StoredFile], items: Sequence[Item]) -> tuple[tuple[StoredFile, ...], tuple[Item, ...]]:
    """Return only the needed files, and the items with their new file numbers: opening a file may be a request."""
    needed = sorted({item.file for item in items})
    position = {file: index for index, file in enumerate(needed)}
    return tuple(files[file] for file in needed), tuple(replace(item, file=position[item.file]) for item in items)


@dataclass(frozen=True, slots=True)
class ExchangedLoad:
    """A load of this member's rank of a plain checkpoint. See `sharing.SharedLoad`."""

    group: Group
    source: UnconvertedRank
    plan: ArenaPlan
    names: Names
    options: Options

    @staticmethod
    def of(group: Group, source: RankSource, plan: ArenaPlan, names: Names, options: Options) -> ExchangedLoad:
        """Return the load of `plan`, of a plain checkpoint, with these options."""
        assert isinstance(source, UnconvertedRank)
        if options.kind != "cpu":
            raise PlanError(
                f"group: members load a plain checkpoint to the CPU only, not to {options.device}; convert it",
                path=str(source.store),
                code="unsupported",
            )
        return ExchangedLoad(group, source, plan, names, options)

    def identity(self) -> tuple[str, str]:
        source, names = self.source, self.names
        patterns = [names] if isinstance(names, str) else names and list(names)
        content, max_gap_nbytes = identity_of(source.checkpoint).content, cost_of(source.files).max_gap_nbytes
        what = repr((content, number_cuts(source.cuts), patterns, max_gap_nbytes))
        return f"a rank of {source.num_ranks} of {source.store}", xxh3_hex(what.encode())

    def load(self) -> dict[str, torch.Tensor]:
        group, plan, ranks = self.group, self.plan, self.group.all_gather(self.source.rank)
        arena: Allocation[Any] | None = None
        running: RunningExchange | None = None
        try:
            with reporting(self.options.progress, "loading", plan.nbytes) as report:
                with group.collective():
                    backend, budget = self.options.choose(plan.files)
                    tensors = plan.tensors()
                    chosen, divided = _divided(self.source, ranks, self.names)
                    arena = backend.allocate(plan.arena_nbytes)
                    base, offset_of = arena.tensor(), dict(zip(tensors.names, tensors.offsets, strict=True))
                    offsets = [offset_of.get(name, 0) for name in chosen]
                    slices = [base.numpy()[offset:] for offset in offsets]
                    exchange = ExchangePlan.of(group, self.source.files, divided)
                    running = RunningExchange(group, exchange, backend, budget, arena, offsets, slices)
                running.run(report)
                with group.collective(is_last=True):
                    running.finish(report)
                    return make_views(base, tensors)
        except BaseException as error:
            if running is not None:
                running.cancel()
            group.fail(error)
            if arena is not None:
                arena.discard()
            raise


def _divided(source: UnconvertedRank, ranks: Sequence[int], names: Names) -> tuple[list[str], list[DividedTensor]]:
    """Return the names of the tensors that match, and how each is divided among members that load these ranks."""
    checkpoint = source.checkpoint
    all_names = [tensor.name for tensor in checkpoint.tensors]
    rows = range(len(all_names)) if names is None else select(all_names, names)
    max_gap_nbytes = cost_of(source.files).max_gap_nbytes
    divisions: dict[CutTensor, Division] = {}
    divided = []
    for row in rows:
        tensor = checkpoint.tensors[row]
        kind = source.cuts[row].tensor(tensor.dtype, tensor.shape)
        if kind not in divisions:
            divisions[kind] = Division.of(tuple(map(kind.rank_transfers, ranks)), max_gap_nbytes)
        divided.append(DividedTensor(tensor.file, tensor.extent.offset, divisions[kind]))
    return [all_names[row] for row in rows], divided


class ReadAhead:
    """Threads that read a member's ranges ahead of their use."""

    def __init__(
        self, files: tuple[StoredFile, ...], ranges: Sequence[ExchangedRange], access: Access, budget: Budget
    ) -> None:
        """Start the threads."""
        self._ranges = ranges
        self._buffers = [Buffer() for _ in range(_NUM_BUFFERS)]
        self._arrived: dict[int, memoryview] = {}
        self._next = 0
        self._stop = Stop()
        threads = min(budget.threads, _NUM_BUFFERS)
        job = ReadJob(files, (), replace(budget, threads=threads), stop=self._stop)
        self._opened = ReadableFiles(files, access)
        numbers, count = range(len(ranges)), len(ranges)
        self.job = ThreadedJob(job, self._opened, lambda: None, self._read, numbers, count, self._discard)

    def take(self) -> memoryview:
        """Wait for the bytes of the next range, and return them; they are valid until `release`."""
        with self._stop.condition:
            self._stop.condition.wait_for(lambda: self._next in self._arrived or self._stop.requested)
            if self._next in self._arrived:
                return self._arrived[self._next]
        self.job.join()  # Raises the job's error.
        raise Stopped("the work was canceled before it was complete")

    def release(self) -> None:
        """Release the bytes that `take` returned."""
        with self._stop.condition:
            del self._arrived[self._next]
            self._next += 1
            self._stop.condition.notify_all()

    def _read(self, _: None, index: int) -> int:
        with self._stop.condition:
            self._stop.condition.wait_for(lambda: index < self._next + _NUM_BUFFERS or self._stop.requested)
            if self._stop.requested:
                raise Stopped("the work was canceled")
        file, extent = self._ranges[index].file, self._ranges[index].extent
        aligned = extent.aligned(self._opened.alignment)
        view = reserve(self._buffers[index % _NUM_BUFFERS], aligned.nbytes)
        self._opened.read(file, aligned.offset, view)
        with self._stop.condition:
            self._arrived[index] = view[extent.offset - aligned.offset : extent.end - aligned.offset]
            self._stop.condition.notify_all()
        return extent.nbytes

    def _discard(self) -> None:
        self._arrived.clear()
        for buffer in self._buffers:
            buffer.discard()
