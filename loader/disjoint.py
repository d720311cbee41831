"""Finds strided tensors that share memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

MAX_STEPS = 100_000
"""Of one comparison; tensors that need more steps count as sharing memory."""

Axis: TypeAlias = tuple[int, int]
"""(stride in bytes, size); the size is at least 2."""


@dataclass(frozen=True, slots=True)
class Strided:
    """The bytes of a tensor: those at `address` plus, for each axis, a multiple of its stride below its size."""

    address: int
    axes: tuple[Axis, ...]
    """Innermost first; the first one is of single bytes."""

    @property
    def end(self) -> int:
        """Address after the last byte."""
        return self.address + sum(stride * (size - 1) for stride, size in self.axes) + 1


def strided(address: int, item_nbytes: int, strides: Sequence[int], shape: Sequence[int]) -> Strided:
    """The bytes of a tensor of one element or more; strides are in elements."""
    axes: list[Axis] = [(1, item_nbytes)]
    for stride, size in sorted((stride * item_nbytes, size) for stride, size in zip(strides, shape, strict=True)):
        inner, count = axes[-1]
        if size > 1 and stride == inner * count:
            axes[-1] = (inner, count * size)
        elif size > 1:
            axes.append((stride, size))
    return Strided(address, tuple(axes))


def is_simple(tensor: Strided) -> bool:
    """Whether each stride is larger than all that the inner axes span, as in every view of a dense tensor.

    Then no byte belongs to two elements.
    """
    reach = 1
    for stride, size in tensor.axes:
        if stride < reach:
            return False
        reach += stride * (size - 1)
    return True


def sharing(tensors: Sequence[Strided]) -> Iterator[tuple[int, int]]:
    """The positions of all pairs that share a byte.

    Only pairs whose address ranges overlap are compared: as a rule none, or the parts of one fused parameter.
    """
    order = sorted(range(len(tensors)), key=lambda index: tensors[index].address)
    reaching: list[int] = []
    for index in order:
        reaching = [other for other in reaching if tensors[other].end > tensors[index].address]
        for other in reaching:
            if share(tensors[other], tensors[index]):
                yield min(other, index), max(other, index)
        reaching.append(index)


def share(first: Strided, second: Strided) -> bool:
    """Whether two tensors have a byte in common; also True where that takes too long to find out.

    They have one if the distance of their addresses is a sum of multiples of strides, positive ones for the indices of
    `first`, negative ones for the indices of `second`. Axes of equal stride are joined into one range of multiples.
    """
    bounds: dict[int, tuple[int, int]] = {}
    for stride, size in first.axes:
        low, high = bounds.get(stride, (0, 0))
        bounds[stride] = low, high + size - 1
    for stride, size in second.axes:
        low, high = bounds.get(stride, (0, 0))
        bounds[stride] = low - size + 1, high
    bounds.pop(0, None)  # A stride of 0 adds nothing.
    terms: list[_Term] = []
    least = most = 0
    for stride in sorted(bounds):
        low, high = bounds[stride]
        terms.insert(0, (stride, low, high, least, most))
        least, most = least + stride * low, most + stride * high
    return _is_sum(second.address - first.address, terms, iter(range(MAX_STEPS)))


_Term: TypeAlias = tuple[int, int, int, int, int]
"""(stride, its lowest and highest multiple, lowest and highest sum of all terms of smaller strides)."""


def _is_sum(total: int, terms: Sequence[_Term], steps: Iterator[int]) -> bool:
    """Whether `total` is the sum of a multiple of each stride, the last of which is 1; True if the steps run out."""
    (stride, low, high, least, most), *others = terms
    low, high = max(low, -((most - total) // stride)), min(high, (total - least) // stride)
    if not others:
        return low <= high
    return any(
        next(steps, None) is None or _is_sum(total - stride * multiple, others, steps)
        for multiple in range(low, high + 1)
    )
