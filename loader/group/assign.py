"""Assigns the reads of a rank to the members of a group. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relayout.core.extents import BLOCK, Grid, Transfer, align_up
from relayout.format.index import Read

if TYPE_CHECKING:
    import torch

PORTION_NBYTES = 32 * 2**20
"""The most bytes of the arena that one member reads before the others get them, about."""


@dataclass(frozen=True, slots=True)
class Portion:
    """A part of the arena, `[start, end)`, that one member reads."""

    member: int
    start: int
    end: int
    reads: tuple[Read, ...]
    """All that fill it. Bytes between them are in no tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return sum(read.transfer.total_nbytes for read in self.reads)


@dataclass(frozen=True, slots=True)
class Round:
    """Portions that are read by all members at the same time; then each sends its own to the others."""

    member: int
    """This one."""
    portions: tuple[Portion, ...]

    @property
    def reads(self) -> tuple[Read, ...]:
        """What this member reads."""
        return tuple(read for portion in self.portions if portion.member == self.member for read in portion.reads)

    @property
    def nbytes(self) -> int:
        """Bytes that this member reads."""
        return sum(portion.nbytes for portion in self.portions if portion.member == self.member)

    def within(self, memory: torch.Tensor, start: int = 0) -> list[tuple[int, torch.Tensor]]:
        """The member that reads each portion, and the portion of memory that begins at the arena's offset `start`."""
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
        grids: of each file. A long read is cut there, so that no two members read the same block or chunk.
        start: the arena's offset, a multiple of the block, from which on the reads fill it.

    Returns:
        Disjoint portions in rising order; together they have each byte of the reads once.
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
    """Where portions begin: the wanted offsets, but inside a read of one run the place of its file's grid before it."""
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
