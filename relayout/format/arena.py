"""Lays out arenas: where in one allocation the tensors of a rank lie, and by which reads they get there. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from relayout.core.extents import BLOCK, Transfer, align_up, coalesce
from relayout.format.index import ARENA_ALIGNMENT, Read

_DIRECT_NBYTES = 2**20
"""Contiguous reads of at least so many bytes get a target that direct I/O can read into; that may waste a block."""


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """The layout of an arena: which read puts which bytes of a rank where in memory."""

    nbytes: int
    reads: tuple[Read, ...]
    offsets: tuple[tuple[int, ...], ...]
    """For each file: the arena offset of each of its slices, in file order."""


def plan_arena(files: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> ArenaLayout:
    """Lay out the arena for files given as (data start, offsets, sizes) of their slices in file order.

    The bulk of a file is one read, congruent with its file offset modulo a block, so that it can go directly to its
    place, with whole blocks of the arena to itself. Slices whose size is not a multiple of 16 bytes, which would lie
    at odd addresses, are spread out to multiples of 16, one strided read for each run of equal sizes.
    """
    reads: list[Read] = []
    columns = []
    end = 0
    for index, (data_start, offsets, sizes) in enumerate(files):
        bulk = align_up(end, BLOCK) + data_start % BLOCK
        num_even = next((i for i, nbytes in enumerate(sizes) if nbytes % ARENA_ALIGNMENT), len(sizes))
        column = [bulk + offset - data_start for offset in offsets[:num_even]]
        if column:
            end = column[-1] + sizes[num_even - 1]
            if end > bulk:
                reads.append(Read(index, Transfer(data_start, bulk, end - bulk)))
        end = align_up(end, BLOCK)
        position = num_even
        for nbytes, group in groupby(sizes[num_even:]):
            count = sum(1 for _ in group)
            pitch = align_up(nbytes, ARENA_ALIGNMENT)
            strides = (nbytes, pitch) if count > 1 else (0, 0)
            if nbytes:
                reads.append(Read(index, Transfer(offsets[position], end, nbytes, count, *strides)))
            column.extend(end + i * pitch for i in range(count))
            end += count * pitch
            position += count
        columns.append(tuple(column))
    return ArenaLayout(align_up(end, BLOCK), tuple(reads), tuple(columns))


@dataclass(frozen=True, slots=True)
class Placement:
    """An arena for some tensors, and where in it each lies."""

    nbytes: int
    """Bytes of the arena, a multiple of the block."""
    offsets: tuple[int, ...]
    """Arena offset of each tensor, a multiple of `ARENA_ALIGNMENT`."""
    reads: tuple[Read, ...]
    """What fills the arena. Targets do not overlap."""


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
            reads += [Read(read.file, read.transfer.shifted(target=base)) for read in tensors[first]]
            offsets.append(base)
        end = offsets[-1] + sizes[last]
    return Placement(align_up(end, BLOCK) - start, tuple(offsets), tuple(reads))


def _start(end: int, first: tuple[Read, ...], last: tuple[Read, ...]) -> int:
    """The first offset from `end` on at which the largest of these reads can go directly into the arena."""
    start = align_up(end, ARENA_ALIGNMENT)
    contiguous = [read.transfer for read in first if read.transfer.count == 1]
    if not contiguous:
        return start
    largest = max(contiguous, key=lambda transfer: transfer.nbytes)
    # Adjacent tensors share one read.
    nbytes = last[0].transfer.source_end - largest.source if last is not first else largest.nbytes
    phase = (largest.source - largest.target) % BLOCK
    return align_up(end, BLOCK) + phase if nbytes >= _DIRECT_NBYTES and phase % ARENA_ALIGNMENT == 0 else start


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
