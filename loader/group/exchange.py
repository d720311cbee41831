"""Members of a group that want different slices of the same tensors read their bytes once, together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from relayout.checkpoint.source import identity_of
from relayout.core.digests import digest_hex
from relayout.core.extents import Bytes, copy_runs
from relayout.core.slices import CutTensor, number_cuts
from relayout.core.workers import Stop, Stopped
from relayout.errors import PlanError
from relayout.format.index import Read
from relayout.loader.backends.base import Allocation, Backend, Memory, Options, ReadJob, RunningJob
from relayout.loader.backends.files import ReadableFiles
from relayout.loader.backends.host import ThreadedJob, reserve
from relayout.loader.group.collectives import Group
from relayout.loader.group.plan import Divided, Division, ExchangedRange, ExchangeRound, plan_exchange
from relayout.loader.requests import Budget
from relayout.loader.sources.rank import (
    ArenaPlan,
    Names,
    RankSource,
    StoredFile,
    cost_of,
    select,
)
from relayout.loader.sources.reshard import PlainRank
from relayout.loader.tensors import make_views
from relayout.reporting import reporting
from relayout.storage.stores import Access
from relayout.storage.system import Buffer

if TYPE_CHECKING:
    import torch

_NUM_BUFFERS = 4
"""Ranges that a member has read and not sent yet, or is reading."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """How the members of a group fill slices of tensors that are divided among them. All of them plan the same."""

    group: Group
    files: tuple[StoredFile, ...]
    """The files, as they are read."""
    tensors: Sequence[Divided]
    rounds: Sequence[ExchangeRound]

    @staticmethod
    def of(group: Group, files: tuple[StoredFile, ...], tensors: Sequence[Divided]) -> Exchange:
        """Plan it; the slices of `tensors` are those of all members, in their order."""
        return Exchange(group, files, tensors, plan_exchange(tensors, group.num_members))

    def alone(self, offsets: Sequence[int]) -> tuple[Read, ...]:
        """What this member reads for itself, to memory that has the slices at these offsets."""
        return tuple(
            Read(tensor.file, transfer.shifted(source=tensor.offset, target=offset))
            for tensor, offset in zip(self.tensors, offsets, strict=True)
            if not tensor.division.exchanged
            for transfer in tensor.division.slices[self.group.index]
        )

    def ahead(self) -> list[ExchangedRange]:
        """What this member reads for all, in order."""
        return [piece for each in self.rounds for piece in each.ranges if piece.member == self.group.index]


class RunningExchange:
    """An exchange that has been started: this member reads. The calls come in their order here, by all members."""

    def __init__(
        self,
        exchange: Exchange,
        backend: Backend[Any],
        budget: Budget,
        memory: Memory[Any],
        offsets: Sequence[int],
        slices: Sequence[Bytes],
    ) -> None:
        """Start, in a block of `Group.collective`.

        Args:
            memory: holds this member's slices, at these offsets.
            slices: the bytes of each; of one that this member does not hold, any.

        Raises:
            FormatError, OSError: as `Backend.start`.
        """
        self._exchange = exchange
        self._jobs: list[RunningJob] = []
        try:
            files, alone = _needed(exchange.files, exchange.alone(offsets))
            self._jobs.append(backend.start(memory, ReadJob(files, alone, budget)))
            files, ranges = _needed(exchange.files, exchange.ahead())
            self._ahead = ReadAhead(files, ranges, backend.access, budget)
            self._jobs.append(self._ahead.job)
            self._mail = _Mail(exchange.group, exchange.tensors, slices, exchange.rounds)
        except BaseException:
            self.cancel()
            raise

    def run(self, report: Callable[[int], None]) -> int:
        """Carry out all rounds, outside of such a block; returns the bytes that have arrived so."""
        return self._mail.exchange_all(self._ahead, report)

    def finish(self, done: int, report: Callable[[int], None]) -> None:
        """Wait for all bytes, in such a block; so many had arrived before."""
        rounds = self._exchange.rounds
        done += self._mail.unpack(rounds[-1] if rounds else None)
        alone, ahead = self._jobs
        ahead.join()
        alone.join(lambda nbytes: report(done + nbytes))

    def cancel(self) -> None:
        """Stop reading; the threads have ended on return."""
        for job in self._jobs:
            job.cancel()


Item = TypeVar("Item", Read, ExchangedRange)


def _needed(files: Sequence[StoredFile], items: Sequence[Item]) -> tuple[tuple[StoredFile, ...], tuple[Item, ...]]:
    """Only the files that are read, and what is read of them: each file that is opened may be a request."""
    needed = sorted({item.file for item in items})
    position = {file: index for index, file in enumerate(needed)}
    return tuple(files[file] for file in needed), tuple(replace(item, file=position[item.file]) for item in items)


@dataclass(frozen=True, slots=True)
class ExchangedLoad:
    """A load of this member's rank of a plain checkpoint. See `sharing.SharedLoad`."""

    group: Group
    source: PlainRank
    plan: ArenaPlan
    names: Names
    options: Options

    @staticmethod
    def of(group: Group, source: RankSource, plan: ArenaPlan, names: Names, options: Options) -> ExchangedLoad:
        """A load by these options of what `plan` has of a plain checkpoint.

        Raises:
            PlanError: the device is not the CPU.
        """
        assert isinstance(source, PlainRank)
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
        return f"a rank of {source.num_ranks} of {source.store}", digest_hex(what.encode())

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
                    exchange = Exchange.of(group, self.source.files, divided)
                    running = RunningExchange(exchange, backend, budget, arena, offsets, slices)
                done = running.run(report)
                with group.collective(is_last=True):
                    running.finish(done, report)
                    return make_views(base, tensors)
        except BaseException as error:
            if running is not None:
                running.cancel()
            group.fail(error)
            if arena is not None:
                arena.discard()
            raise


def _divided(source: PlainRank, ranks: Sequence[int], names: Names) -> tuple[list[str], list[Divided]]:
    """The checkpoint's tensors whose names match, and how they are divided among members that load these ranks."""
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
        divided.append(Divided(tensor.file, tensor.extent.offset, divisions[kind]))
    return [all_names[row] for row in rows], divided


class ReadAhead:
    """Reads a member's ranges with threads, the next ones before they are needed."""

    def __init__(
        self, files: tuple[StoredFile, ...], ranges: Sequence[ExchangedRange], access: Access, budget: Budget
    ) -> None:
        """Start; for errors see `ReadableFiles`."""
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
        """The bytes of the next range, until `release`."""
        with self._stop.condition:
            self._stop.condition.wait_for(lambda: self._next in self._arrived or self._stop.requested)
            if self._next in self._arrived:
                return self._arrived[self._next]
        self.job.join()  # Raises the job's error.
        raise Stopped("the work was canceled before it was complete")

    def release(self) -> None:
        """The bytes that were taken are no longer used."""
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


class _Mail:
    """Messages between this member and the others."""

    def __init__(
        self,
        group: Group,
        tensors: Sequence[Divided],
        slices: Sequence[Bytes],
        rounds: Sequence[ExchangeRound],
    ) -> None:
        """`slices` are the bytes of this member's slices."""
        import torch

        self._group = group
        self._tensors = tensors
        self._slices = slices
        self._rounds = rounds
        most_sent = max((sum(each.sent(group.index)) for each in rounds), default=0)
        most_received = max((sum(each.received(group.index)) for each in rounds), default=0)
        self._sent, self._received = (torch.empty(most, dtype=torch.uint8) for most in (most_sent, most_received))

    def exchange_all(self, ahead: ReadAhead, report: Callable[[int], None]) -> int:
        """Carry out all rounds; the messages of the last one are still to be unpacked. Returns the bytes that arrived.

        Raises:
            the errors of `Group.collective`.
        """
        done, me = 0, self._group.index
        for before, each in zip([None, *self._rounds], self._rounds, strict=False):
            sent_sizes, received_sizes = each.sent(me), each.received(me)
            sent, received = self._sent[: sum(sent_sizes)], self._received[: sum(received_sizes)]
            with self._group.collective():
                done += self.unpack(before)
                report(done)
                self.pack(each, ahead)
                self._group.exchange(sent, sent_sizes, received, received_sizes)
        return done

    def pack(self, each: ExchangeRound, ahead: ReadAhead) -> None:
        """Read this member's range of a round, and write the messages to the others.

        Raises:
            what `ReadAhead.take` raises.
        """
        me, sent = self._group.index, self._sent.numpy()
        for piece in each.ranges:
            if piece.member == me:
                view = ahead.take()
                for member, start in enumerate(_starts(each.sent(me))):
                    if member != me:
                        for _, packed, _ in piece.packed(self._tensors, member):
                            copy_runs(view, sent, packed, 0, start)
                for row, part in piece.kept(self._tensors, me):
                    copy_runs(view, self._slices[row], part)
                ahead.release()

    def unpack(self, each: ExchangeRound | None) -> int:
        """Copy from the messages of a round to the arena; returns the bytes that the round put there."""
        if each is None:
            return 0
        me, received = self._group.index, self._received.numpy()
        starts = _starts(each.received(me))
        for piece in each.ranges:
            if piece.member != me:
                for row, _, unpacked in piece.packed(self._tensors, me):
                    copy_runs(received, self._slices[row], unpacked, starts[piece.member])
        return sum(piece.sizes[me] for piece in each.ranges)


def _starts(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))[:-1]
