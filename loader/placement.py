"""Assigns arena offsets to tensors, and plans the reads that fill them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from relayout.core.coalesce import coalesce
from relayout.core.extents import BLOCK, Transfer, align_up
from relayout.format.index import ARENA_ALIGNMENT, Read
from relayout.loader.sources.contents import Contents, StoredFile

_DIRECT_NBYTES = 2**20
"""Contiguous reads of at least so many bytes get a target that direct I/O can read into; that may waste a block."""


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


@dataclass(frozen=True, slots=True)
class Placement:
    """An arena for some tensors."""

    nbytes: int
    """Bytes of the arena, a multiple of the block."""
    offsets: tuple[int, ...]
    """Arena offset of each tensor, a multiple of `ARENA_ALIGNMENT`."""
    reads: tuple[Read, ...]
    """They do not overlap in the arena."""


def place(tensors: Sequence[tuple[Read, ...]], sizes: Sequence[int], start: int = 0) -> Placement:
    """Place tensors one after the other, from the arena offset `start` (a multiple of the block).

    Each is given by its reads, whose targets are relative to its first byte. Tensors that are also adjacent in a file
    share one read.
    """
    offsets: list[int] = []
    reads: list[Read] = []
    end = start
    for first, last in _runs(tensors, sizes):
        base = _start(end, tensors[first], tensors[last])
        if first < last:
            source = tensors[first][0].transfer.source
            reads.append(
                Read(tensors[first][0].file, Transfer(source, base, tensors[last][0].transfer.source_end - source))
            )
            offsets += [base + tensors[row][0].transfer.source - source for row in range(first, last + 1)]
        else:
            reads += [Read(one.file, one.transfer.shifted(target=base)) for one in tensors[first]]
            offsets.append(base)
        end = offsets[-1] + sizes[last]
    return Placement(align_up(end, BLOCK) - start, tuple(offsets), tuple(reads))


def _start(end: int, first: tuple[Read, ...], last: tuple[Read, ...]) -> int:
    """The first offset from `end` on at which the largest of these reads can go directly into the arena."""
    start = align_up(end, ARENA_ALIGNMENT)
    contiguous = [one.transfer for one in first if one.transfer.count == 1]
    if not contiguous:
        return start
    largest = max(contiguous, key=lambda one: one.nbytes)
    # Adjacent tensors share one read.
    nbytes = last[0].transfer.source_end - largest.source if last is not first else largest.nbytes
    phase = (largest.source - largest.target) % BLOCK
    return align_up(end, BLOCK) + phase if nbytes >= _DIRECT_NBYTES and phase % ARENA_ALIGNMENT == 0 else start


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


def _runs(tensors: Sequence[tuple[Read, ...]], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last row of each group of tensors that can share one read, each at a multiple of 16 bytes."""
    # Offsets if all tensors were packed. Tensors can share a read where file offset minus packed offset is constant.
    positions = accumulate((align_up(nbytes, ARENA_ALIGNMENT) for nbytes in sizes), initial=0)

    def where(item: tuple[int, int]) -> tuple[tuple[int, ...], int, int]:
        row, position = item
        reads = tensors[row]
        if len(reads) != 1 or reads[0].transfer.count > 1:
            return (row,), 0, 0  # A group of its own.
        source = reads[0].transfer.source
        return (reads[0].file, source - position), source, source + sizes[row]

    for group in coalesce(zip(range(len(tensors)), positions, strict=False), where):
        yield group.items[0][0], group.items[-1][0]
