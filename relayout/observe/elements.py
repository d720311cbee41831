"""Which elements of a tensor a rank loads, as ranges along its axes, from the views of it that are copied. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from relayout.core.slices import NOT_HELD, WHOLE, Range, Slice

View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, strides and offset, in elements of a dense row-major tensor."""

Box = tuple[tuple[Range, ...], ...]
"""The ranges of a product along each axis, ascending and not adjacent."""

_MAX_RANGES = 2**16


def slice_of(shape: Sequence[int], boxes: Iterable[Box]) -> Slice:
    """The smallest product of ranges that contains all boxes, ascending along each axis.

    Boxes that differ along several axes may leave elements between them; these belong to it too.
    """
    boxes = list(boxes)
    if not boxes:
        return NOT_HELD
    axes = {axis: joined(part for box in boxes for part in box[axis]) for axis in range(len(shape))}
    empty = [axis for axis, ranges in axes.items() if not ranges and shape[axis]]
    return Slice.along(empty[0], ()) if empty else Slice.of(axes).canonical(tuple(shape))


def box_of(shape: Sequence[int], view: View) -> Box | None:
    """The elements that a view of a tensor has; None if they are no product of ranges, or it takes long to tell."""
    size, strides, offset = view
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if 0 in size:  # No elements: along the axis whose step the empty dimension has, or else along the first.
        empty = steps.index(strides[size.index(0)]) if strides[size.index(0)] in steps else 0
        return tuple(() if axis == empty else ((0, length),) for axis, length in enumerate(shape))
    starts = [offset // step % length for step, length in zip(steps, shape, strict=True)]
    along: list[list[tuple[int, int]]] = [[] for _ in shape]
    pending = [(stride, length) for length, stride in zip(size, strides, strict=True) if length > 1 and stride]
    while pending:
        stride, length = pending.pop()
        axis = next((a for a, step in enumerate(steps) if step <= stride and shape[a] > 1), None)
        if axis is None or stride % steps[axis]:
            return None
        step = stride // steps[axis]
        if starts[axis] + (length - 1) * step >= shape[axis]:
            # It goes on along the axis before.
            count, rest = divmod(shape[axis], step)
            if rest or length % count or starts[axis] >= step:
                return None
            pending.append((stride * count, length // count))
            length = count
        along[axis].append((step, length))
    box = []
    for start, dims, bound in zip(starts, along, shape, strict=True):
        ranges = _sums(start, dims)
        if ranges is None or sum(ranges[-1]) > bound:
            return None
        box.append(ranges)
    return tuple(box)


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Ranges in ascending order; those that touch or overlap are made one."""
    result: list[Range] = []
    for start, length in sorted(ranges):
        if result and start <= sum(result[-1]):
            before, count = result[-1]
            result[-1] = (before, max(count, start + length - before))
        elif length:
            result.append((start, length))
    return tuple(result)


def elements_along(part: Slice, axis: int, size: int) -> tuple[Range, ...]:
    """The ranges that a slice has along an axis of this size, in whatever order it has them."""
    ranges = part.ranges_along(axis)
    return joined(((0, size),) if ranges is None else ranges)


def completed(slices: Sequence[Slice], shape: tuple[int, ...]) -> tuple[Slice, ...]:
    """The slices; what no rank loads of a tensor, such as rows beyond the vocabulary, is held by the last rank too."""
    slices = tuple(slices)
    if not any(part.is_held for part in slices):
        return (WHOLE,) * len(slices)
    if any(part.is_whole for part in slices) or not all(shape):
        return slices
    axes = {axis for part in slices for axis in part.axes}
    if len(axes) > 1:
        # Along several axes, if each rank has a cell of a grid, there are as many elements as the tensor has.
        held = {part for part in slices if part.is_held}
        return slices if sum(prod(part.shape(shape)) for part in held) == prod(shape) else (*slices[:-1], WHOLE)
    [axis] = axes
    missing, end = [], 0
    for start, length in (*joined(part for held in slices for part in held.ranges_along(axis) or ()), (shape[axis], 0)):
        missing.append((end, start - end))
        end = start + length
    if not any(length for _, length in missing):
        return slices
    return (*slices[:-1], Slice.along(axis, joined((*(slices[-1].ranges_along(axis) or ()), *missing))))


def same_elements(slices: Sequence[Slice], others: Sequence[Slice], shape: Sequence[int]) -> bool:
    """Whether the slices have the same elements of a tensor, in whatever order."""
    return all(
        part.is_held == other.is_held
        and all(
            elements_along(part, axis, size) == elements_along(other, axis, size) for axis, size in enumerate(shape)
        )
        for part, other in zip(slices, others, strict=True)
    )


def _sums(start: int, dims: list[tuple[int, int]]) -> tuple[Range, ...] | None:
    """The numbers `start + sum(i * step)`, for `i < length` of each (step, length)."""
    ranges: tuple[Range, ...] = ((start, 1),)
    for step, length in sorted(dims):
        if len(ranges) == 1 and step <= ranges[0][1]:
            ranges = ((ranges[0][0], ranges[0][1] + (length - 1) * step),)
        elif len(ranges) * length > _MAX_RANGES:
            return None
        else:
            ranges = joined((first + i * step, count) for first, count in ranges for i in range(length))
    return ranges
