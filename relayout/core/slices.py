"""Slices: which elements of a tensor one rank holds, and which bytes these are. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod

from relayout.core.dtypes import BITS
from relayout.core.extents import Transfer
from relayout.errors import PlanError

Range = tuple[int, int]
"""(start, length) in elements along an axis."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a tensor that one rank holds: ranges of elements along one axis, concatenated in this order.

    More than one range means a fused tensor (q, k and v in one, say), of which the rank holds a part of each.
    """

    axis: int = 0
    """The axis that is cut."""
    ranges: tuple[Range, ...] | None = None
    """(start, length) in elements along `axis`; None: the tensor is held whole; (): the rank does not hold it."""

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds every element, as stored."""
        return self.ranges is None

    @property
    def is_held(self) -> bool:
        """Whether the tensor is among the rank's tensors at all, if perhaps with no elements."""
        return self.ranges != ()

    @property
    def is_box(self) -> bool:
        """Whether the slice is one contiguous index range along each axis, or nothing."""
        return self.ranges is None or len(self.ranges) <= 1

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The slice's shape, given the tensor's."""
        if self.ranges is None:
            return shape
        length = sum(length for _, length in self.ranges)
        return (*shape[: self.axis], length, *shape[self.axis + 1 :])

    def starts(self, num_axes: int) -> list[int]:
        """Where the box begins along each axis, in elements (the `saved_offsets` of PyTorch DCP)."""
        starts = [0] * num_axes
        if self.ranges is not None:
            starts[self.axis] = self.ranges[0][0]
        return starts


WHOLE = Slice()
"""The slice of a replicated tensor."""

NOT_HELD = Slice(0, ())
"""The slice of a tensor that is not among the rank's tensors: another rank owns it."""


@lru_cache(maxsize=65536)
def slice_transfers(dtype: str, shape: tuple[int, ...], part: Slice) -> tuple[Transfer, ...]:
    """The bytes of a slice: from the tensor (source, relative to its first byte) to the slice's own dense bytes.

    Raises:
        PlanError: the cut falls inside a byte (types below 8 bits), or outside the tensor.
    """
    if part.ranges is None:
        return _dense(prod(shape) * BITS[dtype] // 8)
    inner_bits = prod(shape[part.axis + 1 :]) * BITS[dtype]
    length_bits = [inner_bits * length for _, length in part.ranges]
    start_bits = [inner_bits * start for start, _ in part.ranges]
    axis_bits = inner_bits * shape[part.axis]
    if any(bits % 8 for bits in (*length_bits, *start_bits, axis_bits)):
        raise PlanError(f"a cut of {dtype} {list(shape)} along axis {part.axis} falls inside a byte: {part.ranges}")
    if any(start < 0 or length < 0 or start + length > shape[part.axis] for start, length in part.ranges):
        raise PlanError(f"axis {part.axis} of {list(shape)} has no elements {part.ranges}")
    count = prod(shape[: part.axis])
    held = sum(length_bits) // 8
    targets = accumulate((bits // 8 for bits in length_bits[:-1]), initial=0)
    if held == 0 or count == 0:
        return ()
    return tuple(
        Transfer(
            source=start // 8,
            target=target,
            nbytes=bits // 8,
            count=count,
            source_stride=axis_bits // 8 if count > 1 else 0,
            target_stride=held if count > 1 else 0,
        ).normalised()
        for start, bits, target in zip(start_bits, length_bits, targets, strict=True)
        if bits
    )


@lru_cache(maxsize=65536)
def slice_nbytes(dtype: str, shape: tuple[int, ...], part: Slice) -> int:
    """Stored bytes of a slice."""
    return prod(part.shape(shape)) * BITS[dtype] // 8


def _dense(nbytes: int) -> tuple[Transfer, ...]:
    return (Transfer(0, 0, nbytes),) if nbytes else ()


@lru_cache(maxsize=4096)
def distinct_slices(slices: tuple[Slice, ...]) -> tuple[tuple[Slice, ...], tuple[int, ...]]:
    """The different slices among the ranks' slices of a tensor, and for each rank which of them it holds."""
    distinct = tuple(dict.fromkeys(slices))
    return distinct, tuple(distinct.index(part) for part in slices)
