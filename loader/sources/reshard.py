"""Finds a slice for one degree in slices that were cut for another. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from relayout.core.dtypes import BITS
from relayout.core.extents import Transfer
from relayout.core.slices import Range, Slice
from relayout.errors import PlanError
from relayout.format.index import Read


@dataclass(frozen=True, slots=True)
class Holder:
    """Where a rank's slice of a tensor is stored."""

    part: Slice
    file: int
    """Position in the list of files."""
    offset: int
    """Absolute offset of its first byte."""


def gather(
    dtype: str, shape: tuple[int, ...], wanted: Slice, holders: Sequence[Holder], rows: Range | None = None
) -> tuple[Read, ...]:
    """The reads that fill a slice of a tensor; their targets are relative to its first byte.

    Where several holders have the next elements, the one with the longest run is read; of equals, the first.

    Args:
        rows: (start, length) of elements along axis 0: only these, where the cut is along another axis.

    Raises:
        PlanError: the holders do not have all of it, were cut along another axis, or the cut falls inside a byte.
    """
    axis = _axis(wanted, holders)
    if not shape or axis is None:
        return _whole(dtype, shape, holders)
    size, item_bits = shape[axis], prod(shape[axis + 1 :]) * BITS[dtype]
    wanted_length = _length(wanted, size)
    held = [(holder, *found) for holder in holders for found in _ranges(holder.part, size)]
    skipped, count = 0, prod(shape[:axis])
    if rows is not None and axis > 0:
        skipped, count = (number * prod(shape[1:axis]) for number in rows)
    reads = []
    for start, length, target in _ranges(wanted, size):
        end, shift = start + length, target - start
        while start < end:
            holder, first, span, position = max(
                (one for one in held if one[1] <= start < one[1] + one[2]),
                key=lambda one: min(one[1] + one[2], end),
                default=(None, 0, 0, 0),
            )
            if holder is None:
                raise PlanError(f"element {start} of dim {axis} of {list(shape)} is in no rank's slice", code="missing")
            taken = min(first + span, end) - start
            elements = (position + start - first, start + shift, taken, _length(holder.part, size), wanted_length)
            if any(number * item_bits % 8 for number in elements):
                raise PlanError(
                    f"a cut of {dtype} {list(shape)} along dim {axis} falls inside a byte", code="indivisible"
                )
            source, place, nbytes, *strides = (number * item_bits // 8 for number in elements)
            if nbytes and count:
                offset = holder.offset + skipped * strides[0] + source
                transfer = Transfer(offset, place, nbytes, count, *(strides if count > 1 else (0, 0)))
                reads.append(Read(holder.file, transfer.normalized()))
            start += taken
    return tuple(reads)


def _axis(wanted: Slice, holders: Sequence[Holder]) -> int | None:
    """The axis along which wanted and held slices are cut; None if none of them is."""
    axes = {part.axis for part in (wanted, *(holder.part for holder in holders)) if part.ranges is not None}
    if len(axes) > 1:
        raise PlanError(f"slices are cut along different dims: {sorted(axes)}", code="unsupported")
    return next(iter(axes), None)


def _ranges(part: Slice, size: int) -> Iterator[tuple[int, int, int]]:
    """(start, length, position in the slice) of each range of a slice along an axis of `size` elements."""
    position = 0
    for start, length in ((0, size),) if part.ranges is None else part.ranges:
        yield start, length, position
        position += length


def _length(part: Slice, size: int) -> int:
    return size if part.ranges is None else sum(length for _, length in part.ranges)


def _whole(dtype: str, shape: tuple[int, ...], holders: Sequence[Holder]) -> tuple[Read, ...]:
    if not holders:
        raise PlanError("no rank holds the tensor", code="missing")
    nbytes = prod(shape) * BITS[dtype] // 8
    return (Read(holders[0].file, Transfer(holders[0].offset, 0, nbytes)),) if nbytes else ()
