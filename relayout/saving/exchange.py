"""What the processes of a training send each other, so that each gets the bytes of the files that it writes.

In each round, every member says which bytes of shards it wants next; then a message goes from each to each. The members
that hold a part of a tensor as replicas share the work.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from relayout.core.arguments import ranks_text
from relayout.core.extents import Extent, Transfer
from relayout.core.slices import CutTensor
from relayout.core.slices import Range as AxisRange
from relayout.core.strided import Bytes, copy_runs
from relayout.core.workers import each
from relayout.errors import PlanError
from relayout.loader.group.collectives import Group
from relayout.saving.held import HeldTensor
from relayout.saving.shards import Shard, TensorHead

Step = TypeVar("Step")
Range = tuple[str, Extent]
"""What one read covers: of a shard, by name."""
Wanted = Callable[[int, int], Sequence[Transfer]]
"""What a member wants of a tensor, (member, position): transfers from the tensor's bytes, of which the targets do not
matter."""


class Piece(NamedTuple):
    """Consecutive bytes of a tensor."""

    tensor: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Holders:
    """Which part of each tensor the members hold."""

    heads: Sequence[TensorHead]
    parts: Sequence[CutTensor]
    """Of each tensor, with the members in place of ranks."""

    def check(self) -> None:
        """Check that the members have every element.

        Raises:
            PlanError: elements are missing, or parts that differ overlap.
        """
        overlapping = {parts for parts in set(self.parts) if _overlap(parts)}
        for head, parts in zip(self.heads, self.parts, strict=True):
            if parts in overlapping:
                raise PlanError("the members hold parts that overlap", tensor=head.name, code="unsupported")
            if sum(parts.sizes) != head.nbytes:
                what = f"{sum(parts.sizes)} of {head.nbytes} bytes were given"
                advice = "all processes that hold a part of it must save together, in one `group`"
                raise PlanError(f"{what}: {advice}", tensor=head.name, code="missing")

    def digests(self, member: int, held: Mapping[int, HeldTensor], threads: int) -> list[bytes]:
        """A digest of each part that a member shares with others, by rising tensor."""
        shared = [t for t in range(len(self.parts)) if any(member in members for members in self._shared(t))]
        return each(lambda t: held[t].digest(), shared, threads)

    def check_replicas(self, digests: Sequence[Sequence[bytes]]) -> None:
        """Check that the members that hold the same part of a tensor have the same bytes of it.

        Parts that are not the same have no elements in common, see `check`.

        Args:
            digests: `digests` of each member.

        Raises:
            PlanError: they have not.
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
        """The members that hold the same part of a tensor, of each part that several hold and that has elements."""
        parts = self.parts[t]
        by_part = zip(parts.cut.holders, parts.sizes, strict=True)
        return [members for members, nbytes in by_part if nbytes and len(members) > 1]

    def sent(self, piece: Piece, wanted: Sequence[Transfer], sender: int, receiver: int) -> Iterator[Transfer]:
        """What a member sends of bytes that another wants: transfers from the tensor to what the sender holds."""
        parts = self.parts[piece.tensor]
        which = parts.cut.which[sender]
        if self._sender(piece.tensor, which, receiver) == sender:
            for held in parts.transfers[which]:
                for part in wanted:
                    for clipped in part.clipped(piece.start, piece.end):
                        yield from held.within(clipped)

    def senders(self, t: int, receiver: int) -> list[int]:
        """The members that together send a tensor to the receiver, each its part."""
        return [self._sender(t, which, receiver) for which, nbytes in enumerate(self.parts[t].sizes) if nbytes]

    def _sender(self, t: int, which: int, receiver: int) -> int:
        """Of the members with equal parts."""
        replicas = self.parts[t].cut.holders[which]
        return receiver if receiver in replicas else replicas[(t + receiver) % len(replicas)]


class Exchange:
    """This member's part in rounds. Steps of one pass are delivered to any number of threads, one round at a time."""

    def __init__(
        self, group: Group, holders: Holders, held: Mapping[int, HeldTensor], shards: Mapping[str, Shard], nbytes: int
    ) -> None:
        """`held` are the parts of tensors that this member has, by position. A round delivers about `nbytes`."""
        self._group = group
        self._holders = holders
        self._held = held
        self._shards = shards
        self._nbytes = nbytes
        self._delivered: dict[Range, list[Bytes]] = {}
        self._lock = threading.Lock()

    def fill(self, file: str, extent: Extent, view: memoryview) -> None:
        """See `folder.Fill`; of a range that was delivered, once for each delivery."""
        with self._lock:
            found = self._delivered[file, extent].pop()
            if not self._delivered[file, extent]:
                del self._delivered[file, extent]
        head = max(0, len(self._shards[file].header) - extent.offset)
        np.frombuffer(view, np.uint8)[head:] = found[head:]

    def deliver(
        self, steps: Iterable[Step], ranges_of: Callable[[Step], Sequence[Range]], wanted: Wanted
    ) -> Iterator[Step]:
        """Yield each step when the ranges that it reads are here. All members go through a pass at the same time.

        Ends when all members have all of their steps. A member whose pass fails calls `Group.fail`.

        Raises:
            the error of another member that failed.
            OSError: a member is gone.
        """
        batch: list[Step] = []
        ranges: list[Range] = []
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

    def _round(self, ranges: Sequence[Range], wanted: Wanted, *, is_last: bool) -> bool:
        """Exchange what the members want next. Returns whether all have said that it is their last round."""
        me = self._group.index
        buffers = [np.empty(extent.nbytes, np.uint8) for _, extent in ranges]
        places = [
            (Piece(t, part.offset, part.end), buffer, position - part.offset)
            for (file, extent), buffer in zip(ranges, buffers, strict=True)
            for t, part, position in self._shards[file].parts(extent)
        ]
        received: list[list[tuple[Transfer, Bytes, int]]] = [[] for _ in range(self._group.num_members)]
        for piece, buffer, origin in places:
            for sender in self._holders.senders(piece.tensor, me):
                for part in self._holders.sent(piece, wanted(me, piece.tensor), sender, me):
                    if sender == me:
                        self._held[piece.tensor].copy(part, buffer, origin + part.source, part.source_stride)
                    else:
                        received[sender].append((part, buffer, origin))
        asked: list[tuple[list[Piece], bool]] = self._group.all_gather(([piece for piece, _, _ in places], is_last))
        self._swap([[] if other == me else pieces for other, (pieces, _) in enumerate(asked)], received, wanted)
        with self._lock:
            for one, buffer in zip(ranges, buffers, strict=True):
                self._delivered.setdefault(one, []).append(buffer)
        return all(last for _, last in asked)

    def _swap(
        self,
        asked: Sequence[Sequence[Piece]],
        received: Sequence[Sequence[tuple[Transfer, Bytes, int]]],
        wanted: Wanted,
    ) -> None:
        """Send each other member what it asked for, and put what arrives in its place: (part, memory, origin there)."""
        import torch

        me = self._group.index
        received_sizes = [sum(part.total_nbytes for part, _, _ in parts) for parts in received]
        with self._group.collective():  # Whoever fails here leaves no other waiting in the exchange.
            to_send = [
                [
                    (piece.tensor, part)
                    for piece in pieces
                    for part in self._holders.sent(piece, wanted(other, piece.tensor), me, other)
                ]
                for other, pieces in enumerate(asked)
            ]
            sent_sizes = [sum(part.total_nbytes for _, part in parts) for parts in to_send]
            sent, arrived = (torch.empty(sum(sizes), dtype=torch.uint8) for sizes in (sent_sizes, received_sizes))
            position, memory = 0, sent.numpy()
            for t, part in chain.from_iterable(to_send):
                self._held[t].copy(part, memory, position, _packed(part))
                position += part.total_nbytes
        self._group.exchange(sent, sent_sizes, arrived, received_sizes)
        position, memory = 0, arrived.numpy()
        for part, buffer, origin in chain.from_iterable(received):
            stride = part.source_stride
            moved = Transfer(position, origin + part.source, part.nbytes, part.count, _packed(part), stride)
            copy_runs(memory, buffer, moved)
            position += part.total_nbytes


def _overlap(parts: CutTensor) -> bool:
    """Whether two of the distinct parts have elements in common: their ranges meet along every axis."""
    which = [part for part, nbytes in zip(parts.cut.distinct, parts.sizes, strict=True) if nbytes]
    meet = np.ones((len(which), len(which)), bool)
    for axis, size in enumerate(parts.shape):
        by_part = [part.ranges_along(axis) or ((0, size),) for part in which]
        meet &= _meetings(by_part)
    return int(meet.sum()) > len(which)  # Each meets itself.


def _meetings(by_part: Sequence[Sequence[AxisRange]]) -> npt.NDArray[np.bool_]:
    """Which parts meet which along an axis, from their ranges, which rise."""
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


def _packed(part: Transfer) -> int:
    """The stride of runs that lie one behind the other."""
    return part.nbytes if part.count > 1 else 0
