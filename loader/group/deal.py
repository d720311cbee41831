"""Deals the reads of a rank out to the members of a group. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relayout.core.extents import BLOCK, Transfer, align_down, align_up
from relayout.format.index import Read

if TYPE_CHECKING:
    import torch

PIECE_NBYTES = 32 * 2**20
"""The most bytes of the arena that one member reads before the others get them, about."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Where a file is best cut: at `origin` and every `step` bytes from there on."""

    origin: int = 0
    step: int = BLOCK


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the arena, `[start, end)`, that one member reads."""

    member: int
    start: int
    end: int
    reads: tuple[Read, ...]
    """All that fill it. Bytes between them are in no tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(one.transfer.total_nbytes for one in self.reads)


@dataclass(frozen=True, slots=True)
class Round:
    """Pieces that are read by all members at the same time; then each sends its own to the others."""

    member: int
    """This one."""
    pieces: tuple[Piece, ...]

    @property
    def reads(self) -> tuple[Read, ...]:
        """What this member reads."""
        return tuple(read for piece in self.pieces if piece.member == self.member for read in piece.reads)

    @property
    def nbytes(self) -> int:
        """Bytes that this member reads."""
        return sum(piece.nbytes for piece in self.pieces if piece.member == self.member)

    def within(self, memory: torch.Tensor, start: int = 0) -> list[tuple[int, torch.Tensor]]:
        """The member that reads each piece, and the piece of memory that begins at the arena's offset `start`."""
        return [(piece.member, memory[piece.start - start : piece.end - start]) for piece in self.pieces]


def deal(
    reads: Sequence[Read],
    num_members: int,
    grids: Sequence[Grid],
    *,
    start: int = 0,
    most_nbytes: int = PIECE_NBYTES,
) -> tuple[Piece, ...]:
    """Cut the arena into pieces of about equal size, at most `most_nbytes`, and deal them out in turn.

    Args:
        reads: they do not overlap in the arena.
        grids: of each file. A long read is cut there, so that no two members read the same block or chunk.
        start: the arena's offset, a multiple of the block, from which on the reads fill it.

    Returns:
        Disjoint pieces in rising order; together they have each byte of the reads once.
    """
    end = max((one.transfer.target_end for one in reads), default=start)
    if end == start:
        return ()
    num_rounds = -(-(end - start) // (num_members * most_nbytes))
    size = align_up(-(-(end - start) // (num_members * num_rounds)), BLOCK)
    starts = _starts(reads, grids, range(start, end, size))
    parts: list[list[Read]] = [[] for _ in starts]
    for read in reads:
        one = read.transfer.inverted()
        for number in range(bisect_right(starts, one.source) - 1, bisect_left(starts, one.source_end)):
            until = starts[number + 1] if number + 1 < len(starts) else end
            parts[number] += [Read(read.file, part.inverted()) for part in one.clipped(starts[number], until)]
    held = [tuple(part) for part in parts if part]
    return tuple(
        Piece(
            number % num_members,
            min(one.transfer.target for one in part),
            max(one.transfer.target_end for one in part),
            part,
        )
        for number, part in enumerate(held)
    )


def _starts(reads: Sequence[Read], grids: Sequence[Grid], wanted: Sequence[int]) -> list[int]:
    """Where pieces begin: the wanted offsets, but inside a read of one run the place of its file's grid before it."""
    runs = sorted((one for one in reads if one.transfer.count == 1), key=lambda one: one.transfer.target)
    targets = [one.transfer.target for one in runs]
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
    return max(run.target, grid.origin + align_down(offset - shift - grid.origin, grid.step) + shift)
