"""Assigns the reads and the messages of a load to the members of a group. Pure; all members compute the same plan.

Members that load the same rank each read portions of it, which all others receive. Members that load different ranks of
a plain checkpoint hold different slices. If slices consist of long, disjoint runs, each member reads its own. All other
bytes are exchanged: rows that are split among the members, and bytes that several members hold. They are cut into
ranges. In a round, each member reads one range, and sends each member the bytes in that member's slices.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from relayout.core.extents import BLOCK, Extent, Grid, Transfer, align_down, align_up, coalesce
from relayout.format.index import Read

if TYPE_CHECKING:
    import torch

PORTION_NBYTES = 32 * 2**20
"""Approximate limit of the arena bytes that one member reads before the others receive them."""


@dataclass(frozen=True, slots=True)
class Portion:
    """A part of the arena, `[start, end)`, that one member reads."""

    member: int
    start: int
    end: int
    reads: tuple[Read, ...]
    """All reads that fill the portion. Bytes between them are in no tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(read.transfer.total_nbytes for read in self.reads)


@dataclass(frozen=True, slots=True)
class PortionRound:
    """Portions that all members read at the same time; then each member sends its own to the others."""

    member: int
    """The number of this member."""
    portions: tuple[Portion, ...]

    @property
    def reads(self) -> tuple[Read, ...]:
        """The reads of this member."""
        return tuple(read for portion in self.portions if portion.member == self.member for read in portion.reads)

    @property
    def nbytes(self) -> int:
        """Bytes that this member reads."""
        return sum(portion.nbytes for portion in self.portions if portion.member == self.member)

    def within(self, memory: torch.Tensor, start: int = 0) -> list[tuple[int, torch.Tensor]]:
        """Return the reading member and the memory of each portion; `memory` begins at the arena's offset `start`."""
        return [(portion.member, memory[portion.start - start : portion.end - start]) for portion in self.portions]


def assign_reads(
    reads: Sequence[Read],
    num_members: int,
    grids: Sequence[Grid],
    *,
    start: int = 0,
    most_nbytes: int = PORTION_NBYTES,
) -> tuple[Portion, ...]:
    """Cut the arena into portions of about equal size, at most `most_nbytes`, and assign them in turn.

    Args:
        reads: they do not overlap in the arena.
        grids: of each file. A long read is cut on the grid, so that no two members read the same block or chunk.
        start: the arena's offset, a multiple of the block, at which the reads begin to fill it.

    Returns:
        Disjoint portions in ascending order; together they contain each byte of the reads once.
    """
    end = max((read.transfer.target_end for read in reads), default=start)
    if end == start:
        return ()
    num_rounds = -(-(end - start) // (num_members * most_nbytes))
    size = align_up(-(-(end - start) // (num_members * num_rounds)), BLOCK)
    starts = _starts(reads, grids, range(start, end, size))
    parts: list[list[Read]] = [[] for _ in starts]
    for read in reads:
        transfer = read.transfer.inverted()
        for index in range(bisect_right(starts, transfer.source) - 1, bisect_left(starts, transfer.source_end)):
            until = starts[index + 1] if index + 1 < len(starts) else end
            parts[index] += [Read(read.file, part.inverted()) for part in transfer.clipped(starts[index], until)]
    held = [tuple(part) for part in parts if part]
    return tuple(
        Portion(
            index % num_members,
            min(read.transfer.target for read in part),
            max(read.transfer.target_end for read in part),
            part,
        )
        for index, part in enumerate(held)
    )


def _starts(reads: Sequence[Read], grids: Sequence[Grid], wanted: Sequence[int]) -> list[int]:
    """Return the offsets where portions begin: the given ones, some of them moved down.

    An offset inside a read of one run is moved down to the grid of the read's file.
    """
    runs = sorted((read for read in reads if read.transfer.count == 1), key=lambda read: read.transfer.target)
    targets = [read.transfer.target for read in runs]
    starts = [wanted[0]]
    for offset in wanted[1:]:
        which = bisect_right(targets, offset) - 1
        start = _on_grid(offset, runs[which].transfer, grids[runs[which].file]) if which >= 0 else offset
        if start > starts[-1]:
            starts.append(start)
    return starts


def _on_grid(offset: int, run: Transfer, grid: Grid) -> int:
    if offset >= run.target_end:
        return offset
    shift = run.target - run.source
    return max(run.target, grid.down(offset - shift) + shift)


EXCHANGED_NBYTES = 4 * 2**20
"""Limit of the bytes that a member reads in a round, and of those that it sends.

Only a single block may exceed it, as it may be sent to all members.
"""

RECEIVED_NBYTES = 16 * 2**20
"""Limit of the bytes that a member receives in a round."""


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """The division of a tensor into the members' slices. Equal tensors share one instance."""

    slices: tuple[tuple[Transfer, ...], ...]
    """Each member's transfers from the tensor's bytes to the slice's; empty if it does not hold the tensor."""
    exchanged: tuple[Extent, ...]
    """Bytes of the tensor to exchange, ascending and disjoint; empty: each member reads its own slice."""

    @staticmethod
    def of(slices: tuple[tuple[Transfer, ...], ...], max_gap_nbytes: int) -> Division:
        """Return the division; it exchanges the tensor if members would otherwise read bytes more than once.

        Args:
            max_gap_nbytes: the largest gap that is read together with the shorter runs around it.
        """
        wanted = sorted(
            extent for transfers in slices for transfer in transfers for extent in _extents(transfer, max_gap_nbytes)
        )
        if all(one.end <= other.offset for one, other in pairwise(wanted)):
            return Division(slices, ())
        groups = coalesce(wanted, lambda one: (None, one.offset, one.end), max_gap_nbytes=max_gap_nbytes)
        return Division(slices, tuple(group.extent for group in groups))


def _extents(transfer: Transfer, max_gap_nbytes: int) -> Iterator[Extent]:
    """Yield the ranges that a separate read of this transfer requests: see `reads`."""
    gap = transfer.source_stride - transfer.nbytes
    if transfer.count > 1 and transfer.nbytes < max_gap_nbytes and gap <= max_gap_nbytes:
        yield Extent(transfer.source, transfer.source_end - transfer.source)
    else:
        yield from (Extent(run.source, run.nbytes) for run in transfer.runs())


@dataclass(frozen=True, slots=True)
class DividedTensor:
    """A tensor that members load slices of."""

    file: int
    offset: int
    """Absolute file offset of the tensor's first byte."""
    division: Division

    def sent(self, extent: Extent, member: int) -> Iterator[Transfer]:
        """Yield the transfers from a range of the file to a member's slice."""
        start, end = extent.offset - self.offset, extent.end - self.offset
        for transfer in self.division.slices[member]:
            for part in transfer.clipped(start, end):
                yield part.shifted(source=self.offset)


@dataclass(frozen=True, slots=True)
class ExchangedRange:
    """Bytes of a file that one member reads at once."""

    file: int
    extent: Extent
    rows: tuple[int, ...]
    """The tensors that have bytes in the range, in file order."""
    sizes: tuple[int, ...]
    """Bytes of each member's slices in the range."""
    member: int = 0
    """The member that reads the range."""

    def kept(self, tensors: Sequence[DividedTensor], member: int) -> Iterator[tuple[int, Transfer]]:
        """Yield the parts of a member's slices in the range, as (row, transfer from the range's bytes to the slice's).

        Together they are `sizes[member]` bytes.
        """
        for row in self.rows:
            for part in tensors[row].sent(self.extent, member):
                yield row, part.shifted(source=-self.extent.offset)


@dataclass(frozen=True, slots=True)
class ExchangeRound:
    """Ranges that are read at the same time, at most one by each member. Each member sends a message to all others."""

    ranges: tuple[ExchangedRange, ...]
    num_members: int

    def sent(self, member: int) -> list[int]:
        """Return the sizes in bytes of a member's messages to each member; it sends none to itself."""
        sizes = next((piece.sizes for piece in self.ranges if piece.member == member), (0,) * self.num_members)
        return [size if other != member else 0 for other, size in enumerate(sizes)]

    def received(self, member: int) -> list[int]:
        """Return the sizes in bytes of the messages that a member receives from each member."""
        sizes = {piece.member: piece.sizes[member] for piece in self.ranges}
        return [sizes.get(other, 0) if other != member else 0 for other in range(self.num_members)]


def plan_exchange(
    tensors: Sequence[DividedTensor],
    num_members: int,
    *,
    most_nbytes: int = EXCHANGED_NBYTES,
    most_received: int = RECEIVED_NBYTES,
) -> list[ExchangeRound]:
    """Return rounds with ranges that together contain every exchanged byte once.

    Args:
        tensors: they do not overlap in a file.
        most_nbytes: see `EXCHANGED_NBYTES`; a block or more. Ranges are cut between blocks.
    """
    rounds: list[list[ExchangedRange]] = []
    free: set[int] = set()
    received, read = [0] * num_members, [0] * num_members
    for piece in _joined(_pieces(tensors, num_members, most_nbytes), most_nbytes):
        received = [old + new for old, new in zip(received, piece.sizes, strict=True)]
        if not free or max(received) > most_received:
            rounds.append([])
            free, received = set(range(num_members)), list(piece.sizes)
        member = min(free, key=lambda one: (read[one], one))  # The one that has read the least until now.
        free.remove(member)
        read[member] += piece.extent.nbytes
        rounds[-1].append(replace(piece, member=member))
    return [ExchangeRound(tuple(ranges), num_members) for ranges in rounds]


def _pieces(tensors: Sequence[DividedTensor], num_members: int, most_nbytes: int) -> Iterator[ExchangedRange]:
    """Yield ranges of single tensors, in file order."""
    for row in sorted(range(len(tensors)), key=lambda row: (tensors[row].file, tensors[row].offset)):
        tensor = tensors[row]
        for extent in tensor.division.exchanged:
            start, end = tensor.offset + extent.offset, tensor.offset + extent.end
            while start < end:
                width = most_nbytes
                piece = _piece(tensor, row, start, min(end, align_down(start + width, BLOCK)), num_members)
                while sum(piece.sizes) > most_nbytes and width > BLOCK:
                    width = max(BLOCK, width // 2)
                    piece = _piece(tensor, row, start, min(end, align_down(start + width, BLOCK)), num_members)
                yield piece
                start = piece.extent.end


def _piece(tensor: DividedTensor, row: int, start: int, end: int, num_members: int) -> ExchangedRange:
    extent = Extent(start, end - start)
    sizes = (sum(part.total_nbytes for part in tensor.sent(extent, member)) for member in range(num_members))
    return ExchangedRange(tensor.file, extent, (row,), tuple(sizes))


def _joined(pieces: Iterator[ExchangedRange], most_nbytes: int) -> Iterator[ExchangedRange]:
    """Yield the pieces; small ones that touch are joined."""
    last: ExchangedRange | None = None
    for piece in pieces:
        if (
            last is not None
            and (last.file, last.extent.end) == (piece.file, piece.extent.offset)
            and last.extent.nbytes + piece.extent.nbytes <= most_nbytes
            and sum(last.sizes) + sum(piece.sizes) <= most_nbytes
        ):
            extent = Extent(last.extent.offset, last.extent.nbytes + piece.extent.nbytes)
            sizes = tuple(old + new for old, new in zip(last.sizes, piece.sizes, strict=True))
            # One tensor may have two pieces in the range.
            last = ExchangedRange(last.file, extent, tuple(dict.fromkeys((*last.rows, *piece.rows))), sizes)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last
