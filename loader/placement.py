"""Assigns arena offsets to tensors, and plans the reads that fill them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from relayout.core.extents import align_up
from relayout.format.arena import place
from relayout.format.index import ARENA_ALIGNMENT, Read
from relayout.loader.sources.contents import Contents, StoredFile


@dataclass(frozen=True, slots=True)
class PlacedTensors:
    """Tensors in an arena, in columns of equal length."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    """In elements."""
    offsets: Sequence[int]
    """Of their first bytes in the arena, multiples of `ARENA_ALIGNMENT`."""
    digests: Sequence[str] | None
    """None if there are no digests."""


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """One allocation for tensors, and how it is filled."""

    files: tuple[StoredFile, ...]
    reads: tuple[Read, ...]
    """They do not overlap in the arena."""
    arena_nbytes: int
    nbytes: int
    """Of the tensors."""
    tensors: Callable[[], PlacedTensors]
    """Returns the tensors. This may parse a rank table; call it while bytes arrive."""


def placed(contents: Contents, offsets: Sequence[int]) -> PlacedTensors:
    """The tensors, at these arena offsets."""
    return PlacedTensors(contents.names, contents.dtypes, contents.shapes, offsets, contents.digests)


def pack(contents: Contents) -> ArenaPlan:
    """The plan for an arena that holds just these tensors."""
    sizes = contents.sizes()
    placement = place(contents.reads, sizes)
    tensors = placed(contents, placement.offsets)
    return ArenaPlan(contents.files, placement.reads, placement.nbytes, sum(sizes), lambda: tensors)


def place_at(tensors: Sequence[tuple[Read, ...]], offsets: Sequence[int]) -> tuple[Read, ...]:
    """The reads of tensors that are at given arena offsets."""
    return tuple(
        Read(one.file, one.transfer.shifted(target=offset))
        for reads, offset in zip(tensors, offsets, strict=True)
        for one in reads
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
