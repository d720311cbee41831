"""Assigns arena offsets to tensors, and plans the reads that fill them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from relayout.core.extents import align_up
from relayout.format.arena import place
from relayout.format.index import ARENA_ALIGNMENT, Read
from relayout.loader.sources.columns import TensorColumns
from relayout.loader.sources.stored import StoredFile


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """One allocation for tensors, and how it is filled."""

    files: tuple[StoredFile, ...]
    reads: tuple[Read, ...]
    """What fills the arena. Targets do not overlap."""
    arena_nbytes: int
    nbytes: int
    """Of the tensors."""
    tensors: Callable[[], TensorColumns]
    """Returns the tensors and their offsets. This may parse a rank table; call it while bytes arrive."""


def pack(tensors: TensorColumns) -> ArenaPlan:
    """The plan for an arena that holds just these tensors."""
    sizes = tensors.sizes()
    layout = place(tensors.reads, sizes)
    return ArenaPlan(tensors.files, layout.reads, layout.nbytes, sum(sizes), lambda: tensors.at(layout.offsets))


def place_at(tensors: Sequence[tuple[Read, ...]], offsets: Sequence[int]) -> tuple[Read, ...]:
    """The reads of tensors that are at given arena offsets."""
    return tuple(
        Read(read.file, read.transfer.shifted(target=offset))
        for reads, offset in zip(tensors, offsets, strict=True)
        for read in reads
    )


def batches(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Divide tensors, in order, into batches of at most `limit` bytes; a larger tensor is a batch of its own."""
    first = total = 0
    for row, nbytes in enumerate(sizes):
        padded = align_up(nbytes, ARENA_ALIGNMENT)
        if row > first and total + padded > limit:
            yield range(first, row)
            first, total = row, 0
        total += padded
    if first < len(sizes):
        yield range(first, len(sizes))
