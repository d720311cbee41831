"""A load of different ranks of one plain checkpoint by the members of a group, who read its bytes once together."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from relayout.checkpoint.source import identity_of
from relayout.core.digests import digest_hex
from relayout.core.extents import Bytes, copy_runs
from relayout.core.slices import CutTensor, number_cuts
from relayout.core.workers import Stop, Stopped
from relayout.errors import PlanError
from relayout.format.index import Read
from relayout.loader.backends.base import Allocation, Options, ReadJob, RunningJob
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
    TensorColumns,
    cost_of,
    place_at,
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
        running: list[RunningJob] = []
        try:
            with reporting(self.options.progress, "loading", plan.nbytes) as report:
                with group.collective():
                    backend, budget = self.options.choose(plan.files)
                    tensors = plan.tensors()
                    chosen, divided = _divided(self.source, ranks, self.names)
                    rounds = plan_exchange(divided, group.num_members)
                    exchanged = {name for name, one in zip(chosen, divided, strict=True) if one.division.exchanged}
                    arena = backend.allocate(plan.arena_nbytes)
                    reads = _reads_alone(tensors, exchanged)
                    running.append(backend.start(arena, ReadJob(plan.files, reads, budget)))
                    mine = [piece for each in rounds for piece in each.ranges if piece.member == group.index]
                    ahead = ReadAhead(self.source.files, mine, backend.access, budget)
                    running.append(ahead.job)
                    base, offset_of = arena.tensor(), dict(zip(tensors.names, tensors.offsets, strict=True))
                    mail = _Mail(group, divided, [offset_of.get(name, 0) for name in chosen], base.numpy(), rounds)
                done = mail.exchange_all(ahead, report)
                with group.collective():
                    done += mail.unpack(rounds[-1] if rounds else None)
                    ahead.job.join()
                    running[0].join(report.after(done))
                    return make_views(base, tensors)
        except BaseException as error:
            for job in running:
                job.cancel()
            group.fail(error)
            if arena is not None:
                arena.discard()
            raise


def _reads_alone(tensors: TensorColumns, exchanged: Container[str]) -> tuple[Read, ...]:
    """The reads of tensors that are not exchanged, which a member reads for itself."""
    alone = [row for row, name in enumerate(tensors.names) if name not in exchanged]
    return place_at([tensors.reads[row] for row in alone], [tensors.offsets[row] for row in alone])


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
    """Messages between this member and the others. The last byte of each says whether its sender failed."""

    def __init__(
        self,
        group: Group,
        tensors: Sequence[Divided],
        offsets: Sequence[int],
        arena: Bytes,
        rounds: Sequence[ExchangeRound],
    ) -> None:
        """`offsets` are those of this member's slices in its arena."""
        import torch

        self._group = group
        self._tensors = tensors
        self._offsets = offsets
        self._arena = arena
        self._rounds = rounds
        most_sent = max((sum(each.sent(group.index)) for each in rounds), default=0)
        most_received = max((sum(each.received(group.index)) for each in rounds), default=0)
        self._sent, self._received = (torch.empty(most, dtype=torch.uint8) for most in (most_sent, most_received))

    def exchange_all(self, ahead: ReadAhead, report: Callable[[int], None]) -> int:
        """Carry out all rounds; the messages of the last one are still to be unpacked. Returns the bytes that arrived.

        Raises:
            the errors of `exchange`.
        """
        done = 0
        for before, each in zip([None, *self._rounds], self._rounds, strict=False):
            with self.exchange(each):
                done += self.unpack(before)
                report(done)
                self.pack(each, ahead)
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
                    copy_runs(view, self._arena, part, 0, self._offsets[row])
                ahead.release()

    @contextmanager
    def exchange(self, each: ExchangeRound) -> Iterator[None]:
        """A block that all members carry out, and that packs a round. At its end, the messages are exchanged.

        Raises:
            the error of the block; or another member's, with its number.
            OSError: a member is gone.
        """
        failed: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failed = error
        try:
            me = self._group.index
            sent_sizes, received_sizes = each.sent(me), each.received(me)
            sent, received = self._sent[: sum(sent_sizes)], self._received[: sum(received_sizes)]
            sent.numpy()[_last(sent_sizes)] = failed is not None
            try:
                self._group.exchange(sent, sent_sizes, received, received_sizes)
            except OSError as gone:
                raise failed or gone from None
            if failed is not None or received.numpy()[_last(received_sizes)].any():
                with self._group.collective():
                    if failed is not None:
                        raise failed
        finally:
            del failed  # Breaks the cycle of error, traceback and this frame.

    def unpack(self, each: ExchangeRound | None) -> int:
        """Copy from the messages of a round to the arena; returns the bytes that the round put there."""
        if each is None:
            return 0
        me, received = self._group.index, self._received.numpy()
        starts = _starts(each.received(me))
        for piece in each.ranges:
            if piece.member != me:
                for row, _, unpacked in piece.packed(self._tensors, me):
                    copy_runs(received, self._arena, unpacked, starts[piece.member], self._offsets[row])
        return sum(piece.sizes[me] for piece in each.ranges)


def _starts(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))[:-1]


def _last(sizes: Sequence[int]) -> list[int]:
    """The positions of the messages' last bytes."""
    return [end - 1 for end, size in zip(accumulate(sizes), sizes, strict=True) if size]
