"""A save by a group: its members exchange tensors in rounds, each writes the files of some ranks, one publishes.

In each round, every member announces the bytes of shards that it needs next; then each member sends a message to each
other member. Members that hold a part of a tensor as replicas share the work.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from relayout.checkpoint.shards import MemoryShard
from relayout.checkpoint.source import identity_of
from relayout.conversion.copy_plan import CopyPlan, CopyStep, TensorDigests, WrittenDigests
from relayout.conversion.jobs import complete_parts
from relayout.conversion.layout import Conversion
from relayout.conversion.resume import fingerprint_of
from relayout.conversion.run import Summary, merged, needed_for, output_spec_of, run_unit, summary_of
from relayout.conversion.sidecar import HeaderWriter, digests_of_all
from relayout.core.arguments import ranks_text
from relayout.core.digests import EMPTY_DIGEST, Hash, new_xxh3
from relayout.core.extents import Bytes, Extent, Transfer, split
from relayout.core.slices import CutTensor, Range, TensorHead
from relayout.core.workers import each
from relayout.errors import FormatError, PlanError
from relayout.loader.group.all_to_all import AllToAll
from relayout.loader.group.collectives import Group
from relayout.loader.held import HeldTensor
from relayout.publish.output import Output, OutputSpec
from relayout.publish.publishers import Destination
from relayout.reporting import Progress, reporting

Item = TypeVar("Item")
ShardRange = tuple[str, Extent]
"""The range that one read covers: shard name, and extent in it."""
Wanted = Callable[[int, int], Sequence[Transfer]]
"""Returns the transfers from a tensor's bytes that a member needs, given (member, position). Their targets are ignored.
"""


class TensorRange(NamedTuple):
    """Consecutive bytes of a tensor."""

    tensor: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class MemberParts:
    """The part of each tensor that each member holds."""

    heads: Sequence[TensorHead]
    parts: Sequence[CutTensor]
    """The cut of each tensor, with the members in place of ranks."""

    def check(self) -> None:
        """Check that the members have every element.

        Raises:
            PlanError: elements are missing, or different parts overlap.
        """
        overlapping = {parts for parts in set(self.parts) if are_overlapping(parts)}
        for head, parts in zip(self.heads, self.parts, strict=True):
            if parts in overlapping:
                raise PlanError("the members hold parts that overlap", tensor=head.name, code="unsupported")
            if sum(parts.sizes) != head.nbytes:
                what = f"{sum(parts.sizes)} of {head.nbytes} bytes were given"
                advice = "all processes that hold a part of it must save together, in one `group`"
                raise PlanError(f"{what}: {advice}", tensor=head.name, code="missing")

    def digests(self, member: int, held: Mapping[int, HeldTensor], threads: int) -> list[bytes]:
        """Return a digest of each part that a member shares with other members, in ascending order of tensors."""
        shared = [t for t in range(len(self.parts)) if any(member in members for members in self._shared(t))]
        return each(lambda t: held[t].digest(), shared, threads)

    def check_replicas(self, digests: Sequence[Sequence[bytes]]) -> None:
        """Check that the members that hold the same part of a tensor have the same bytes of it.

        Different parts have no elements in common, see `check`.

        Args:
            digests: `digests` of each member.
        """
        of_member = [iter(column) for column in digests]
        for t, head in enumerate(self.heads):
            for members in self._shared(t):
                versions: dict[bytes, list[int]] = {}
                for member in members:
                    versions.setdefault(next(of_member[member]), []).append(member)
                if len(versions) > 1:
                    who = " and ".join(map(ranks_text, versions.values()))
                    what = f"the members {who} hold different values of the same elements, expected equal ones"
                    raise PlanError(what, tensor=head.name, code="mismatch")

    def _shared(self, t: int) -> list[tuple[int, ...]]:
        """Return the members of each part of a tensor that several members hold and that has elements."""
        parts = self.parts[t]
        by_part = zip(parts.cut.holders, parts.sizes, strict=True)
        return [members for members, nbytes in by_part if nbytes and len(members) > 1]

    def sent(self, piece: TensorRange, wanted: Sequence[Transfer], sender: int, receiver: int) -> Iterator[Transfer]:
        """Yield the transfers of a piece to a receiver: from the part that the sender holds to the tensor."""
        parts = self.parts[piece.tensor]
        which = parts.cut.which[sender]
        if self.sender(piece.tensor, which, receiver) == sender:
            for held in parts.transfers[which]:
                for part in wanted:
                    for clipped in part.clipped(piece.start, piece.end):
                        yield from (one.inverted() for one in held.within(clipped))

    def senders(self, t: int, receiver: int) -> list[int]:
        """Return the members that together send a tensor to the receiver, each its part."""
        return [self.sender(t, which, receiver) for which, nbytes in enumerate(self.parts[t].sizes) if nbytes]

    def sender(self, t: int, which: int, receiver: int) -> int:
        """Return the member that sends a part, chosen from those that hold it."""
        replicas = self.parts[t].cut.holders[which]
        return receiver if receiver in replicas else replicas[t % len(replicas)]


class Exchange:
    """This member's side of the rounds. A pass delivers copy steps to any number of threads, one round at a time."""

    def __init__(
        self,
        group: Group,
        holders: MemberParts,
        held: Mapping[int, HeldTensor],
        shards: Mapping[str, MemoryShard],
        nbytes: int,
    ) -> None:
        """Create the exchange. `held`: this member's parts of tensors, by position. A round delivers about `nbytes`."""
        self._group = group
        self._messages = AllToAll(group)
        self._holders = holders
        self._held = held
        self._shards = shards
        self._nbytes = nbytes
        self._delivered: dict[ShardRange, list[Bytes]] = {}
        self._lock = threading.Lock()

    def fill(self, file: str, extent: Extent, view: memoryview) -> None:
        """Fill memory with a delivered range. Each delivery serves one call; see `memory_folder.Fill`."""
        with self._lock:
            found = self._delivered[file, extent].pop()
            if not self._delivered[file, extent]:
                del self._delivered[file, extent]
        head = max(0, len(self._shards[file].header) - extent.offset)
        np.frombuffer(view, np.uint8)[head:] = found[head:]

    def deliver(
        self, steps: Iterable[Item], ranges_of: Callable[[Item], Sequence[ShardRange]], wanted: Wanted
    ) -> Iterator[Item]:
        """Yield each copy step when its ranges have arrived. All members go through a pass at the same time.

        Ends when all members have received all of their steps. An error in a pass must be raised in
        `Group.sharing_errors`.
        """
        batch: list[Item] = []
        ranges: list[ShardRange] = []
        total = 0
        for step in steps:
            batch.append(step)
            ranges += ranges_of(step)
            total += sum(extent.nbytes for _, extent in ranges_of(step))
            if total >= self._nbytes:
                self._round(ranges, wanted, is_last=False)
                yield from batch
                batch, ranges, total = [], [], 0
        if batch:
            self._round(ranges, wanted, is_last=False)
            yield from batch
        while not self._round([], wanted, is_last=True):
            pass

    def _round(self, ranges: Sequence[ShardRange], wanted: Wanted, *, is_last: bool) -> bool:
        """Exchange the ranges that the members need next. Return True if this was the last round of all members."""
        me, holders, num_members = self._group.index, self._holders, self._group.num_members
        buffers = [np.empty(extent.nbytes, np.uint8) for _, extent in ranges]
        mine = list[TensorRange]()
        received: list[list[tuple[Bytes, Transfer]]] = [[] for _ in range(num_members)]
        for (file, extent), buffer in zip(ranges, buffers, strict=True):
            for t, part, position in self._shards[file].parts(extent):
                mine.append(TensorRange(t, part.offset, part.end))
                for sender in holders.senders(t, me):
                    for one in holders.sent(mine[-1], wanted(me, t), sender, me):
                        moved = one.shifted(target=position - part.offset)
                        if sender == me:
                            self._held[t].copy(buffer, moved)
                        else:
                            received[sender].append((buffer, moved))
        asked: list[tuple[list[TensorRange], bool]] = self._group.all_gather((mine, is_last))
        sent = [
            [
                (self._held[piece.tensor].copy, part)
                for piece in (pieces if other != me else ())
                for part in holders.sent(piece, wanted(other, piece.tensor), me, other)
            ]
            for other, (pieces, _) in enumerate(asked)
        ]
        self._messages.transfer(sent, received)
        with self._lock:
            for covered, buffer in zip(ranges, buffers, strict=True):
                self._delivered.setdefault(covered, []).append(buffer)
        return all(last for _, last in asked)


def are_overlapping(parts: CutTensor) -> bool:
    """Return True if two of the distinct parts share elements: their ranges intersect along every axis."""
    which = [part for part, nbytes in zip(parts.cut.distinct, parts.sizes, strict=True) if nbytes]
    if len(which) < 2:  # A tensor without elements has no ranges.
        return False
    meet = np.ones((len(which), len(which)), bool)
    for axis, size in enumerate(parts.shape):
        by_part = [part.ranges_along(axis) or ((0, size),) for part in which]
        meet &= _meetings(by_part)
    return int(meet.sum()) > len(which)  # Each meets itself.


def _meetings(by_part: Sequence[Sequence[Range]]) -> npt.NDArray[np.bool_]:
    """Return which parts intersect which along an axis, from their ascending ranges."""
    distinct = {ranges: number for number, ranges in enumerate(dict.fromkeys(map(tuple, by_part)))}
    owners = np.repeat(np.arange(len(distinct)), [len(ranges) for ranges in distinct])
    starts, ends = np.array([(start, start + length) for ranges in distinct for start, length in ranges]).T
    meet = np.zeros((len(distinct), len(distinct)), bool)
    for number in range(len(distinct)):
        mine = owners == number
        behind = np.searchsorted(ends[mine], starts, side="right")
        meets = np.append(starts[mine], np.iinfo(np.int64).max)[behind] < ends
        meet[number, owners[meets]] = True
    numbers = [distinct[tuple(ranges)] for ranges in by_part]
    return meet[np.ix_(numbers, numbers)]


def shares_of(num_ranks: int, num_members: int) -> list[list[int]]:
    """Return the ranks that each member writes files for.

    If there are few ranks, members that are far apart write them. If there are many, neighboring ranks have one writer:
    if both ranks and members cut the first axis, that writer holds most bytes of its ranks itself.
    """
    shares: list[list[int]] = [[] for _ in range(num_members)]
    for rank in range(num_ranks):
        shares[rank * num_members // num_ranks].append(rank)
    return shares


Shares = Sequence[Conversion | None]
"""The conversion of each member's ranks; None: the member writes no rank."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedSave:
    """A save for which all members have made the same plan."""

    planned: Conversion
    group: Group
    holders: MemberParts
    held: Mapping[int, HeldTensor]
    """The tensors that this member holds, by position."""

    def hashers(self) -> dict[int, int]:
        """Return the hasher of each tensor that no rank's files hold whole: if possible, a member that holds it whole.

        The members digest about equal numbers of bytes.
        """
        sizes = [tensor.extent.nbytes for tensor in self.planned.source.tensors]
        unknown = [t for t, cut in enumerate(self.planned.cut) if sizes[t] and _holder_of_whole(cut) is None]
        loads = [0] * self.group.num_members
        found = {}
        for t in sorted(unknown, key=lambda t: -sizes[t]):
            parts = self.holders.parts[t]
            whole = [member for member, which in enumerate(parts.cut.which) if parts.cut.distinct[which].is_whole]
            member = min(whole or range(len(loads)), key=lambda member: loads[member])
            loads[member] += sizes[t]
            found[t] = member
        return found


class FileMaker(Protocol):
    """A way for a member to write its files: the methods are called in this order, by all members at the same time."""

    def unit(self, unit: int) -> WrittenDigests:
        """Write the data sections of this member's files of a unit, and return the digests of the written bytes."""

    def source_digests(self) -> dict[int, str]:
        """Return the digests of the tensors that this member is the hasher of."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupSave:
    """Carries out a planned save: each member writes the files of some ranks, and the first publishes."""

    save: PlannedSave
    destination: Destination
    make: Callable[[Shares, Output], FileMaker]
    """Starts writing this member's files, given the conversion of each member, and the output."""
    is_last: bool = True
    """True if the members send no message after the save."""

    def carry_out(self, progress: Progress) -> Summary:
        """Write and publish, together with the other members."""
        started = time.monotonic()
        planned, group = self.save.planned, self.save.group
        if planned.has_whole or not planned.has_all:
            raise PlanError("a group writes all ranks, and layout='ranks': choose these", code="unsupported")
        # The other members are notified before the files that they write are deleted.
        with ExitStack() as publishing, group.sharing_errors():
            fingerprint = fingerprint_of(planned, identity_of(planned.source).content)
            work = output_spec_of(planned, fingerprint, is_resumable=False)
            with group.collective():
                output = self._begin(work, publishing) if group.index == 0 else None
            shares, written, digests = self._write_own(work, progress)
            hashed = group.all_gather(digests)
            parts = group.all_gather(written)
            with group.collective(is_last=self.is_last):
                if output is not None:
                    self._complete(output, shares, parts, hashed)
                    publishing.close()
        return summary_of(planned, work, 0, time.monotonic() - started)

    def _begin(self, work: OutputSpec, publishing: ExitStack) -> Output:
        """Begin the output, on the first member; it is published when `publishing` is closed."""
        planned = self.save.planned
        self.destination.check(planned.source.root)
        output = publishing.enter_context(self.destination.begin(work, gathers=True))
        output.check_space(needed_for(planned)[0], 0)
        return output

    def _write_own(self, work: OutputSpec, progress: Progress) -> tuple[Shares, WrittenDigests, dict[int, str]]:
        """Write this member's files as parts of the output.

        Returns:
            The conversion of each member, the result of this member's own, and the digests of tensors that it has
            computed.
        """
        planned, group = self.save.planned, self.save.group
        ranks_of_members = shares_of(planned.plan.num_ranks, group.num_members)
        with ExitStack() as adding:
            own = adding.enter_context(self.destination.begin_part(work))
            shares = [planned.only(ranks).with_suffix(own.suffix) if ranks else None for ranks in ranks_of_members]
            making = self.make(shares, own)
            with reporting(progress if group.index == 0 else None, "saving", planned.layout.nbytes) as report:
                written = self._write_units(making, shares[group.index], own, report)
            # If this fails, the first member deletes all parts: when all have been added.
            with group.collective(), adding.pop_all():
                pass
        return shares, written, making.source_digests()

    def _write_units(
        self, making: FileMaker, own: Conversion | None, output: Output, report: Callable[[int], None]
    ) -> WrittenDigests:
        """Write this member's files, and serve the other members."""
        group, layout = self.save.group, self.save.planned.layout
        headers = None if own is None else HeaderWriter(output, own)
        written, num_units = WrittenDigests(), len(layout.units)
        if own is not None:
            output.check_space(*needed_for(own))
        for unit in range(num_units):
            done = making.unit(unit)
            if headers is not None:
                headers.write(unit, done)
                written = merged([written, done])
            with group.collective():  # If this fails, the first member deletes all parts: when all have kept theirs.
                if own is not None:
                    output.keep(_part_name(group.index, unit), b"saved")
            report(layout.nbytes * (unit + 1) // num_units)
        return written

    def _complete(
        self, output: Output, shares: Shares, parts: Sequence[WrittenDigests], hashed: Sequence[Mapping[int, str]]
    ) -> None:
        """Collect the files of all members, and write the files next to the weights."""
        for member, share in enumerate(shares):
            for unit in range(0 if share is None else len(share.layout.units)):
                if output.kept(_part_name(member, unit)) is None:
                    raise FormatError(
                        "a part was deleted while it was saved", path=str(self.save.planned.output), code="missing"
                    )
        conversion = self.save.planned.with_suffix(output.suffix)
        complete_parts(output, conversion, _merged(conversion, shares, parts, hashed))


class CopyMaker:
    """Writes files by the steps of a conversion, with reads from the members' exchange; see `FileMaker`."""

    def __init__(
        self, save: PlannedSave, exchange: Exchange, threads: int, chunk_nbytes: int, shares: Shares, output: Output
    ) -> None:
        """Create the writer. `threads` and `chunk_nbytes` are the arguments of `CopyPlan` and `run_unit`."""
        self._save, self._exchange, self._shares, self._output = save, exchange, shares, output
        self._threads, self._chunk_nbytes = threads, chunk_nbytes
        own = shares[save.group.index]
        self._plan = None if own is None else CopyPlan(own, chunk_nbytes=chunk_nbytes)

    def unit(self, unit: int) -> WrittenDigests:
        files = self._save.planned.source.files

        def ranges_of(step: CopyStep) -> list[ShardRange]:
            return [(files[one.file].name, one.extent) for one in step.ranges]

        deliver = partial(self._exchange.deliver, ranges_of=ranges_of, wanted=self._slices_wanted())
        if self._plan is None:
            deque(deliver(()), 0)
            return WrittenDigests()
        return run_unit(self._plan, unit, self._output, threads=self._threads, deliver=deliver)

    def _slices_wanted(self) -> Wanted:
        """Return a function for the bytes of a tensor that a member needs: the slices of the ranks that it writes."""
        planned = self._save.planned

        @cache
        def wanted(member: int, tensor: CutTensor) -> list[Transfer]:
            share = self._shares[member]
            which = dict.fromkeys(tensor.cut.which[rank] for rank in (() if share is None else share.ranks))
            whole = [one for one in which if tensor.cut.distinct[one].is_whole]
            return [part for one in whole[:1] or which for part in tensor.transfers[one]]

        return lambda member, t: wanted(member, planned.cut[t])

    def source_digests(self) -> dict[int, str]:
        tensors, files = self._save.planned.source.tensors, self._save.planned.source.files

        def wanted(_: int, t: int) -> Sequence[Transfer]:
            return [Transfer(0, 0, tensors[t].extent.nbytes)]

        def range_of(piece: tuple[int, Extent]) -> list[ShardRange]:
            return [(files[tensors[piece[0]].file].name, piece[1])]

        running: dict[int, Hash] = {}
        mine = sorted(t for t, member in self._save.hashers().items() if member == self._save.group.index)
        pieces = ((t, piece) for t in mine for piece in split(tensors[t].extent, self._chunk_nbytes))
        for t, piece in self._exchange.deliver(pieces, range_of, wanted):
            view = memoryview(bytearray(piece.nbytes))
            self._exchange.fill(files[tensors[t].file].name, piece, view)
            running.setdefault(t, new_xxh3()).update(view)
        return {t: digest.hexdigest() for t, digest in running.items()}


def _part_name(member: int, unit: int) -> str:
    return f"member-{member}-unit-{unit}"


def _holder_of_whole(tensor: CutTensor) -> int | None:
    """Return a rank that holds a tensor whole; None if none does."""
    holders = (tensor.cut.holders[which] for which, part in enumerate(tensor.cut.distinct) if part.is_whole)
    return next((ranks[0] for ranks in holders), None)


def _merged(
    planned: Conversion,
    shares: Shares,
    parts: Sequence[WrittenDigests],
    hashed: Sequence[Mapping[int, str]],
) -> WrittenDigests:
    """Return the results of all members, merged as those of one conversion."""
    sources = {t: digest for digests in hashed for t, digest in digests.items()}
    number_of = {file.name: number for number, file in enumerate(planned.layout.files)}
    by_rank: dict[int, tuple[Conversion, Sequence[TensorDigests]]] = {}
    chunks: dict[int, bytes] = {}
    for share, written in zip(shares, parts, strict=True):
        if share is not None:
            by_rank |= dict.fromkeys(share.ranks, (share, digests_of_all(share, written.tensors)))
            names = [file.name for file in share.layout.files]
            chunks |= {number_of[names[number]]: digests for number, digests in written.chunks.items()}

    def slice_digest(t: int, rank: int) -> str:
        share, digests = by_rank[rank]
        return digests[t].slices[share.cut[t].cut.which[rank]]

    tensors = {}
    for t, tensor in enumerate(planned.cut):
        slices = tuple(slice_digest(t, ranks[0]) for ranks in tensor.cut.holders)
        whole = _holder_of_whole(tensor)
        has_bytes = planned.source.tensors[t].extent.nbytes > 0
        source = slice_digest(t, whole) if whole is not None else sources[t] if has_bytes else EMPTY_DIGEST
        tensors[t] = TensorDigests(source, slices)
    return WrittenDigests(tensors, chunks)
