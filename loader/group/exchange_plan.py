"""Which member of a group reads what of a plain checkpoint, and what it sends to whom. Pure.

Members hold different slices. Where these are long runs of their own, each member reads its own. All other bytes are
exchanged: rows of which each member needs a part, and what several members hold. They are cut into chunks; in a round,
each member reads one and sends every member what is in that member's slices. All members compute the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from relayout.core.extents import BLOCK, Extent, Transfer, align_down, coalesce

CHUNK_NBYTES = 4 * 2**20
"""The most bytes that a member reads in a round, and the most that it sends. One block may be sent to all, though."""

RECEIVED_NBYTES = 16 * 2**20
"""The most bytes that a member receives in a round."""


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """How the members' slices divide a tensor. Equal tensors share it."""

    slices: tuple[tuple[Transfer, ...], ...]
    """Of each member, from the tensor's bytes to the slice's; empty if it does not hold the tensor."""
    exchanged: tuple[Extent, ...]
    """Bytes of the tensor to exchange, rising and apart; empty: each member reads its own slice."""

    @staticmethod
    def of(slices: tuple[tuple[Transfer, ...], ...], max_gap_nbytes: int) -> Division:
        """Exchange the tensor if members that read on their own would read the same bytes.

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
    """What a read of it alone requests: see `reads`."""
    gap = transfer.source_stride - transfer.nbytes
    if transfer.count > 1 and transfer.nbytes < max_gap_nbytes and gap <= max_gap_nbytes:
        yield Extent(transfer.source, transfer.source_end - transfer.source)
    else:
        yield from (Extent(run.source, run.nbytes) for run in transfer.runs())


@dataclass(frozen=True, slots=True)
class Divided:
    """A tensor of which members load slices."""

    file: int
    offset: int
    """Absolute file offset of its first byte."""
    division: Division

    def sent(self, extent: Extent, member: int) -> Iterator[Transfer]:
        """What is in a member's slice of some bytes of the file: from the file to the slice."""
        start, end = extent.offset - self.offset, extent.end - self.offset
        for transfer in self.division.slices[member]:
            for part in transfer.clipped(start, end):
                yield part.shifted(source=self.offset)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes of a file that one member reads at once."""

    file: int
    extent: Extent
    rows: tuple[int, ...]
    """Of the tensors that have bytes in it, in file order."""
    sizes: tuple[int, ...]
    """Bytes of each member's slices in it."""
    member: int = 0
    """That reads it."""

    def kept(self, tensors: Sequence[Divided], member: int) -> Iterator[tuple[int, Transfer]]:
        """What is in a member's slices, as (row, from the chunk's bytes to the slice's)."""
        for row in self.rows:
            for part in tensors[row].sent(self.extent, member):
                yield row, part.shifted(source=-self.extent.offset)

    def packed(self, tensors: Sequence[Divided], member: int) -> Iterator[tuple[int, Transfer, Transfer]]:
        """The same by way of a message without gaps, as (row, from the chunk to the message, from there to the slice).

        The message has `sizes[member]` bytes.
        """
        position = 0
        for row, part in self.kept(tensors, member):
            stride = part.nbytes if part.count > 1 else 0
            yield (
                row,
                replace(part, target=position, target_stride=stride),
                replace(part, source=position, source_stride=stride),
            )
            position += part.total_nbytes


@dataclass(frozen=True, slots=True)
class Round:
    """Chunks that are read at the same time, at most one by each member. A message goes from each member to each."""

    chunks: tuple[Chunk, ...]
    num_members: int

    def sent(self, member: int) -> list[int]:
        """Bytes of its messages to the members, each with one more at the end; none goes to itself."""
        sizes = next((chunk.sizes for chunk in self.chunks if chunk.member == member), (0,) * self.num_members)
        return [size + 1 if other != member else 0 for other, size in enumerate(sizes)]

    def received(self, member: int) -> list[int]:
        """The same of the messages to it."""
        sizes = {chunk.member: chunk.sizes[member] for chunk in self.chunks}
        return [sizes.get(other, 0) + 1 if other != member else 0 for other in range(self.num_members)]


def plan_exchange(
    tensors: Sequence[Divided],
    num_members: int,
    *,
    most_nbytes: int = CHUNK_NBYTES,
    most_received: int = RECEIVED_NBYTES,
) -> list[Round]:
    """Rounds whose chunks have every byte that is exchanged once.

    Args:
        tensors: they do not overlap in a file.
        most_nbytes: see `CHUNK_NBYTES`; a block or more. Chunks are cut between blocks.
    """
    rounds: list[list[Chunk]] = []
    free: set[int] = set()
    received, read = [0] * num_members, [0] * num_members
    for chunk in _joined(_pieces(tensors, num_members, most_nbytes), most_nbytes):
        received = [old + new for old, new in zip(received, chunk.sizes, strict=True)]
        if not free or max(received) > most_received:
            rounds.append([])
            free, received = set(range(num_members)), list(chunk.sizes)
        member = min(free, key=lambda one: (read[one], one))  # That has read the least until now.
        free.remove(member)
        read[member] += chunk.extent.nbytes
        rounds[-1].append(replace(chunk, member=member))
    return [Round(tuple(chunks), num_members) for chunks in rounds]


def _pieces(tensors: Sequence[Divided], num_members: int, most_nbytes: int) -> Iterator[Chunk]:
    """Chunks of single tensors, in file order."""
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


def _piece(tensor: Divided, row: int, start: int, end: int, num_members: int) -> Chunk:
    extent = Extent(start, end - start)
    sizes = (sum(part.total_nbytes for part in tensor.sent(extent, member)) for member in range(num_members))
    return Chunk(tensor.file, extent, (row,), tuple(sizes))


def _joined(pieces: Iterator[Chunk], most_nbytes: int) -> Iterator[Chunk]:
    """The pieces; small ones that touch are joined."""
    last: Chunk | None = None
    for piece in pieces:
        if (
            last is not None
            and (last.file, last.extent.end) == (piece.file, piece.extent.offset)
            and last.extent.nbytes + piece.extent.nbytes <= most_nbytes
            and sum(last.sizes) + sum(piece.sizes) <= most_nbytes
        ):
            extent = Extent(last.extent.offset, last.extent.nbytes + piece.extent.nbytes)
            sizes = tuple(old + new for old, new in zip(last.sizes, piece.sizes, strict=True))
            # One tensor may have two pieces in it.
            last = Chunk(last.file, extent, tuple(dict.fromkeys((*last.rows, *piece.rows))), sizes)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last
