"""Finds any part of a tensor in the slices that are stored. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from relayout.core.extents import Transfer
from relayout.core.slices import BITS, Slice, positions, row_runs
from relayout.errors import PlanError
from relayout.format.index import Read
from relayout.loader.sources.columns import TensorColumns
from relayout.loader.sources.stored import StoredFile

_MAX_WORK = 2**24
"""Ranges to look at. No plan comes near; what others cut may."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Where a rank's slice of a tensor is stored."""

    part: Slice
    file: int
    """Position in the list of files."""
    offset: int
    """Absolute offset of its first byte."""


def gather(dtype: str, shape: tuple[int, ...], wanted: Slice, holders: Sequence[Holder]) -> tuple[Read, ...]:
    """The reads that fill a slice of a tensor; their targets are relative to its first byte.

    Where several holders have the next elements, the one with the longest run is read; of equals, the first.

    Raises:
        PlanError: the holders do not have all of it, the cut falls inside a byte, or there are too many runs.
    """
    axis = max((axis for part in (wanted, *(holder.part for holder in holders)) for axis in part.axes), default=None)
    if not shape or axis is None:
        return _whole(dtype, shape, holders)
    size, item_bits = shape[axis], prod(shape[axis + 1 :]) * BITS[dtype]
    wanted_columns, wanted_length = _columns(wanted, axis, size)
    stored = [(holder, row_runs(holder.part, shape, axis), *_columns(holder.part, axis, size)) for holder in holders]
    borders = sorted(
        {border for _, runs, _, _ in stored for first, count, _ in runs for border in (first, first + count)}
    )
    pieces = list(_split(row_runs(wanted, shape, axis), borders))
    work = len(pieces) * sum(len(runs) + len(columns) for _, runs, columns, _ in stored)
    if work > _MAX_WORK:
        raise PlanError(
            f"a slice is made of too many pieces: {len(pieces)}, from {len(holders)} stored slices", code="limit"
        )
    reads = []
    for top, count, wanted_row in pieces:
        # Of each holder, rows `top` to `top + count` are all there or all missing.
        held = [
            (holder, length, top - first + row, *column)
            for holder, runs, columns, length in stored
            for first, num_rows, row in runs
            if first <= top < first + num_rows
            for column in columns
        ]
        for start, length, target in wanted_columns:
            end, shift = start + length, target - start
            while start < end:
                holder, held_length, row, first, span, position = max(
                    (column for column in held if column[3] <= start < column[3] + column[4]),
                    key=lambda column: min(column[3] + column[4], end),
                    default=(None, 0, 0, 0, 0, 0),
                )
                if holder is None:
                    raise PlanError(
                        f"element {start} of dim {axis} of {list(shape)} is in no rank's slice", code="missing"
                    )
                num_read = min(first + span, end) - start
                elements = (position + start - first, start + shift, num_read, held_length, wanted_length)
                if any(length * item_bits % 8 for length in elements):
                    raise PlanError(
                        f"a cut of {dtype} {list(shape)} along dim {axis} falls inside a byte", code="indivisible"
                    )
                source, place, nbytes, *strides = (length * item_bits // 8 for length in elements)
                if nbytes:
                    transfer = Transfer(
                        holder.offset + row * strides[0] + source,
                        wanted_row * strides[1] + place,
                        nbytes,
                        count,
                        *(strides if count > 1 else (0, 0)),
                    )
                    reads.append(Read(holder.file, transfer.normalized()))
                start += num_read
    return tuple(reads)


def _columns(part: Slice, axis: int, size: int) -> tuple[list[tuple[int, int, int]], int]:
    """(start, length, position in the slice) of each range along an axis of `size` elements; and their length."""
    ranges = part.ranges_along(axis)
    if ranges is None:
        return [(0, size, 0)], size
    return positions(ranges), sum(length for _, length in ranges)


def _split(runs: Sequence[tuple[int, int, int]], borders: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of rows, as of `row_runs`, cut at the borders."""
    for first, count, row in runs:
        inside = borders[bisect_right(borders, first) : bisect_left(borders, first + count)]
        for start, end in pairwise((first, *inside, first + count) if count else ()):
            yield start, end - start, row + start - first


def _whole(dtype: str, shape: tuple[int, ...], holders: Sequence[Holder]) -> tuple[Read, ...]:
    if not holders:
        raise PlanError("no rank holds the tensor", code="missing")
    nbytes = prod(shape) * BITS[dtype] // 8
    return (Read(holders[0].file, Transfer(holders[0].offset, 0, nbytes)),) if nbytes else ()


@dataclass(frozen=True, slots=True)
class StoredPieces:
    """Tensors that are each stored in one file: those of a rank as stored, or of a plain checkpoint."""

    columns: TensorColumns
    files: tuple[StoredFile, ...]
    holders: Sequence[Holder]
    """Where each tensor is stored, and which slice of it."""
    metadata: Callable[[], Mapping[str, str]]

    def axes(self, row: int) -> set[int]:
        return {*self.columns.parts[row].axes, *self.holders[row].part.axes}

    def piece(self, row: int, wanted: Slice) -> TensorColumns:
        name, dtype, whole = self.columns.names[row], self.columns.dtypes[row], tuple(self.columns.source_shapes[row])
        reads = gather(dtype, whole, wanted, [self.holders[row]])
        return TensorColumns([name], [dtype], [wanted.shape(whole)], self.files, [reads]).rows([0])
