"""Slices and cuts: which elements of a tensor each rank holds, and which bytes they are. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod

from relayout.core.dtypes import BITS
from relayout.core.extents import Transfer
from relayout.errors import PlanError

Range = tuple[int, int]
"""(start, length) in elements along one dimension."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a tensor that one rank holds: ranges of elements along one axis, concatenated in this order.

    Several ranges occur in fused tensors, such as q, k and v in one: the rank holds a range of each part.
    """

    axis: int = 0
    """The dimension that is cut."""
    ranges: tuple[Range, ...] | None = None
    """(start, length) in elements along `axis`; None: the tensor is held whole; (): the rank does not hold it."""

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds every element, as stored."""
        return self.ranges is None

    @property
    def is_held(self) -> bool:
        """Whether the rank has the tensor, even with zero elements."""
        return self.ranges != ()

    @property
    def is_box(self) -> bool:
        """Whether the slice is at most one contiguous index range along each axis."""
        return self.ranges is None or len(self.ranges) <= 1

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The slice's shape, from the tensor's shape."""
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
"""The slice of a tensor that the rank does not have, because another rank owns it."""


def slice_transfers(dtype: str, shape: tuple[int, ...], part: Slice) -> tuple[Transfer, ...]:
    """Transfers from the tensor's bytes (source) to the slice's dense bytes (target), each relative to its first byte.

    Raises:
        PlanError: a range starts or ends inside a byte (dtypes below 8 bits), or is outside the tensor.
    """
    if part.ranges is None:
        return _dense(prod(shape) * BITS[dtype] // 8)
    if not part.is_held:
        return ()
    inner_bits = prod(shape[part.axis + 1 :]) * BITS[dtype]
    length_bits = [inner_bits * length for _, length in part.ranges]
    start_bits = [inner_bits * start for start, _ in part.ranges]
    axis_bits = inner_bits * shape[part.axis]
    if any(bits % 8 for bits in (*length_bits, *start_bits, axis_bits)):
        raise PlanError(
            f"a cut of {dtype} {list(shape)} along dim {part.axis} falls inside a byte: {part.ranges}",
            code="indivisible",
        )
    if any(start < 0 or length < 0 or start + length > shape[part.axis] for start, length in part.ranges):
        raise PlanError(f"ranges {part.ranges} are outside dim {part.axis} of {list(shape)}")
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
        ).normalized()
        for start, bits, target in zip(start_bits, length_bits, targets, strict=True)
        if bits
    )


def slice_nbytes(dtype: str, shape: tuple[int, ...], part: Slice) -> int:
    """Stored bytes of a slice."""
    return prod(part.shape(shape)) * BITS[dtype] // 8


def _dense(nbytes: int) -> tuple[Transfer, ...]:
    return (Transfer(0, 0, nbytes),) if nbytes else ()


@dataclass(frozen=True, slots=True, eq=False)
class CutTensor:
    """A cut applied to a dtype and shape: shape, size and transfers of each distinct slice. Shared by equal tensors."""

    cut: Cut
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape of each distinct slice."""
    sizes: tuple[int, ...]
    """Stored bytes of each distinct slice."""
    _transfers: list[tuple[Transfer, ...]] = field(default_factory=list, repr=False)

    @property
    def transfers(self) -> list[tuple[Transfer, ...]]:
        """Transfers of each distinct slice, see `slice_transfers`.

        Raises:
            PlanError: as `slice_transfers` does.
        """
        if not self._transfers:
            # One assignment, so that other threads see all transfers or an empty list.
            self._transfers[:] = [slice_transfers(self.dtype, self.shape, part) for part in self.cut.distinct]
        return self._transfers

    def rank_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the rank's slice."""
        return self.shapes[self.cut.which[rank]]

    def rank_nbytes(self, rank: int) -> int:
        """Stored bytes of the rank's slice."""
        return self.sizes[self.cut.which[rank]]

    def rank_transfers(self, rank: int) -> tuple[Transfer, ...]:
        """Transfers of the rank's slice."""
        return self.transfers[self.cut.which[rank]]


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor is divided: the slice of each rank."""

    slices: tuple[Slice, ...]
    """By rank."""
    distinct: tuple[Slice, ...] = field(init=False, repr=False, compare=False)
    """The distinct slices, in order of the first rank that holds them."""
    which: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """For each rank: position of its slice in `distinct`."""
    holders: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    """For each distinct slice: the ranks that hold it."""
    is_box: bool = field(init=False, repr=False, compare=False)
    """Whether each slice is at most one contiguous index range along each axis."""
    _hash: int = field(init=False, repr=False, compare=False)
    _tensors: dict[tuple[str, tuple[int, ...]], CutTensor] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        positions: dict[Slice, int] = {}
        which = tuple(positions.setdefault(part, len(positions)) for part in self.slices)
        holders: list[list[int]] = [[] for _ in positions]
        for rank, position in enumerate(which):
            holders[position].append(rank)
        derived = {
            "distinct": tuple(positions),
            "which": which,
            "holders": tuple(map(tuple, holders)),
            "is_box": all(part.is_box for part in positions),
            "_hash": hash(self.slices),
            "_tensors": {},
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return self._hash

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds every element."""
        return self.distinct == (WHOLE,)

    def tensor(self, dtype: str, shape: tuple[int, ...]) -> CutTensor:
        """This cut applied to a tensor of the dtype and shape."""
        known = self._tensors.get((dtype, shape))
        if known is None:
            shapes = tuple(part.shape(shape) for part in self.distinct)
            sizes = tuple(prod(one) * BITS[dtype] // 8 for one in shapes)
            known = self._tensors.setdefault((dtype, shape), CutTensor(self, dtype, shape, shapes, sizes))
        return known


def number_cuts(cuts: Iterable[Cut]) -> tuple[tuple[Cut, ...], tuple[int, ...]]:
    """The distinct cuts in order of first occurrence, and for each given cut its position among them."""
    numbers: dict[Cut, int] = {}
    cut_of = tuple(numbers.setdefault(cut, len(numbers)) for cut in cuts)
    return tuple(numbers), cut_of
