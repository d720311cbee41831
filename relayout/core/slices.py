"""Dtypes, slices and cuts: the elements of a tensor that each rank holds, and their bytes. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from relayout.core.extents import Extent, Transfer, align_down, align_up, coalesce
from relayout.errors import PlanError, shown


class _Bits(dict[str, int]):
    def __missing__(self, dtype: str) -> int:
        raise PlanError(f"dtype {shown(dtype)} is unknown to this relayout: use a newer one", code="unsupported")


BITS: Mapping[str, int] = _Bits(
    {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "U8": 8,
        "I8": 8,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "C64": 64,
        "F64": 64,
        "I64": 64,
        "U64": 64,
    }
)
"""Bits of one element, by the name used in file headers."""

TORCH_NAMES: Mapping[str, str] = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
"""The name in torch of each dtype of safetensors, as that package maps them; torch has no 6-bit types."""


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Return the bytes of a dense tensor; None if its bits are not a multiple of 8 (possible for small dtypes)."""
    bits = prod(shape) * BITS[dtype]
    return bits // 8 if bits % 8 == 0 else None


@dataclass(frozen=True, slots=True)
class TensorHead:
    """A tensor's entry in a header, without its position."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        nbytes = num_bytes(self.dtype, self.shape)
        assert nbytes is not None
        return nbytes


Range = tuple[int, int]
"""(start, length) in elements along one dimension."""


_MAX_NAMED = 4
"""Number of ranges that the text of a slice lists."""
_MAX_TRANSFERS = 2**20
"""Limit of the runs of one slice. Built-in plans do not come near it; a table of another program may."""


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a tensor that one rank holds: the product of ranges of elements along some of its axes.

    The ranges of an axis are concatenated in their order. Several ranges occur in fused tensors, such as q, k and v in
    one: the rank holds a range of each part.
    """

    by_axis: tuple[tuple[int, tuple[Range, ...]], ...] | None = ()
    """(axis, ranges) of each axis that is cut, by ascending axis. No range has length 0; an axis without ranges has 0
    elements. (): the rank holds the full tensor; None: it does not hold the tensor. Created by `of` or `along`."""

    @classmethod
    def of(cls, ranges: Mapping[int, Iterable[Range]]) -> Slice:
        """Return the slice with these ranges along these axes; ranges of length 0 are dropped."""
        return cls(tuple((axis, tuple(part for part in ranges[axis] if part[1])) for axis in sorted(ranges)))

    @classmethod
    def along(cls, axis: int, ranges: Iterable[Range]) -> Slice:
        """Return a slice that is cut along one axis."""
        return cls.of({axis: ranges})

    @property
    def is_whole(self) -> bool:
        """True if the rank holds every element, as stored."""
        return self.by_axis == ()

    @property
    def is_held(self) -> bool:
        """True if the rank has the tensor, even with zero elements."""
        return self.by_axis is not None

    @property
    def is_box(self) -> bool:
        """True if the slice is at most one contiguous index range along each axis."""
        return all(len(ranges) <= 1 for _, ranges in self.by_axis or ())

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes that are cut."""
        return tuple(axis for axis, _ in self.by_axis or ())

    def in_words(self, shape: tuple[int, ...]) -> str:
        """Return a description of the slice of a tensor of this shape, such as "dim 1: 0 to 96 of 384"."""
        if not self.is_held:
            return "not held"
        axes = []
        for axis, ranges in self.by_axis or ():
            named = ", ".join(f"{start} to {start + length}" for start, length in ranges[:_MAX_NAMED]) or "nothing"
            more = f" and {len(ranges) - _MAX_NAMED} more ranges" if len(ranges) > _MAX_NAMED else ""
            axes.append(f"dim {axis}: {named}{more} of {shape[axis]}")
        return "; ".join(axes) or "whole"

    @property
    def axis(self) -> int:
        """The only axis that is cut, for code that supports one; 0 if none is. Raises PlanError if several are."""
        return self._one_axis()[0]

    @property
    def ranges(self) -> tuple[Range, ...] | None:
        """The ranges along `axis`, for code that supports one; None if the rank holds the full tensor."""
        return self._one_axis()[1]

    def _one_axis(self) -> tuple[int, tuple[Range, ...] | None]:
        if self.by_axis is None:
            return 0, ()
        if len(self.by_axis) > 1:
            raise PlanError(f"is cut along dims {list(self.axes)}, expected at most one", code="unsupported")
        return self.by_axis[0] if self.by_axis else (0, None)

    def ranges_along(self, axis: int) -> tuple[Range, ...] | None:
        """Return the ranges along an axis; None if it is not cut."""
        for cut_axis, ranges in self.by_axis or ():
            if cut_axis == axis:
                return ranges
        return None

    def is_inside(self, shape: tuple[int, ...]) -> bool:
        """Return True if a tensor of that shape has all elements of the slice."""
        return all(
            axis < len(shape) and all(start >= 0 and start + length <= shape[axis] for start, length in ranges)
            for axis, ranges in self.by_axis or ()
        )

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the slice's shape, from the tensor's shape."""
        if self.by_axis is None:
            return (0, *shape[1:])
        sizes = list(shape)
        for axis, ranges in self.by_axis:
            sizes[axis] = sum(length for _, length in ranges)
        return tuple(sizes)

    def canonical(self, shape: tuple[int, ...]) -> Slice:
        """Return the slice in the form of FORMAT.md, with the same elements in the same order.

        Ranges that follow each other are joined, and an axis that is held completely is omitted. The slice must be
        inside the tensor.
        """
        joined = ((axis, merged(ranges)) for axis, ranges in self.by_axis or ())
        axes = tuple((axis, ranges) for axis, ranges in joined if ranges != ((0, shape[axis]),) and shape[axis])
        return Slice(axes) if self.is_held else self

    def starts(self, num_axes: int) -> list[int]:
        """Return the start of the box along each axis, in elements (the `saved_offsets` of PyTorch DCP)."""
        starts = [0] * num_axes
        for axis, ranges in self.by_axis or ():
            starts[axis] = ranges[0][0] if ranges else 0
        return starts


WHOLE = Slice()
"""The slice of a replicated tensor."""

NOT_HELD = Slice(None)
"""The slice of a tensor that the rank does not have, because another rank owns it."""


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Join ranges that follow each other. The elements and their order are unchanged."""
    joined: list[Range] = []
    for start, length in ranges:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return tuple(joined)


def joined(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return ranges in ascending order; ranges that touch or overlap are joined."""
    result: list[Range] = []
    for start, length in sorted(ranges):
        if result and start <= sum(result[-1]):
            before, count = result[-1]
            result[-1] = (before, max(count, start + length - before))
        elif length:
            result.append((start, length))
    return tuple(result)


def positions(ranges: Iterable[Range]) -> list[tuple[int, int, int]]:
    """Return (start, length, position in the slice) of each range."""
    placed, position = [], 0
    for start, length in ranges:
        placed.append((start, length, position))
        position += length
    return placed


def row_runs(part: Slice, shape: tuple[int, ...], axis: int) -> list[tuple[int, int, int]]:
    """Return the runs of rows of a slice, as (first row, number of rows, row of the slice).

    A row is an index of all axes before `axis`, in row-major order. The runs are in the order of the slice.
    """
    if not part.by_axis or part.by_axis[0][0] >= axis:
        return [(0, prod(shape[:axis]), 0)]
    cut = dict(part.by_axis)
    runs = [(0, 1, 0)]
    for cut_axis, size in enumerate(shape[:axis]):
        pieces = positions(cut.get(cut_axis, ((0, size),)))
        if cut_axis not in cut:
            runs = [(first * size, count * size, row * size) for first, count, row in runs]
            continue
        _check_number(sum(count for _, count, _ in runs) * len(pieces), part)
        held = sum(length for _, length, _ in pieces)
        runs = [
            ((first + i) * size + start, length, (row + i) * held + position)
            for first, count, row in runs
            for i in range(count if pieces else 0)
            for start, length, position in pieces
        ]
    return runs


def _check_number(count: int, part: Slice) -> None:
    if count > _MAX_TRANSFERS:
        raise PlanError(f"a slice along dims {list(part.axes)} of {count} runs, limit {_MAX_TRANSFERS}", code="limit")


def slice_transfers(dtype: str, shape: tuple[int, ...], part: Slice, bits: int | None = None) -> tuple[Transfer, ...]:
    """Return transfers from a tensor's bytes (source) to a slice's dense bytes (target), relative to their first bytes.

    Args:
        bits: bits of an element; None: those of the dtype, which must be a known one.
    """
    bits_per_element = BITS[dtype] if bits is None else bits
    if not part.by_axis:
        nbytes = prod(shape) * bits_per_element // 8
        return (Transfer(0, 0, nbytes),) if part.is_held and nbytes else ()
    for axis, ranges in part.by_axis:
        if any(start < 0 or length < 0 or start + length > shape[axis] for start, length in ranges):
            raise PlanError(f"ranges {ranges} are outside dim {axis} of {list(shape)}")
    axis, ranges = part.by_axis[-1]
    item_bits = prod(shape[axis + 1 :]) * bits_per_element
    row_bits, held_bits = (item_bits * length for length in (shape[axis], part.shape(shape)[axis]))
    rows = row_runs(part, shape, axis)
    _check_number(len(rows) * len(ranges), part)
    transfers = []
    for first, count, row in rows:
        strides = (row_bits, held_bits) if count > 1 else (0, 0)
        for start, length, position in positions(ranges):
            places = (
                first * row_bits + start * item_bits,
                row * held_bits + position * item_bits,
                length * item_bits,
                *strides,
            )
            if any(offset % 8 for offset in places):
                dims = ", ".join(map(str, part.axes))
                raise PlanError(
                    f"a cut of {dtype} {list(shape)} along dim {dims} falls inside a byte: {ranges}",
                    code="indivisible",
                )
            source, target, nbytes, *byte_strides = (offset // 8 for offset in places)
            if nbytes and count:
                transfers.append(Transfer(source, target, nbytes, count, *byte_strides).normalized())
    return tuple(transfers)


@dataclass(frozen=True, eq=False)
class CutTensor:
    """A cut applied to a dtype and shape: shape, size and transfers of each distinct slice. Shared by equal tensors."""

    cut: Cut
    dtype: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each distinct slice."""
        return tuple(part.shape(self.shape) for part in self.cut.distinct)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Stored bytes of each distinct slice."""
        return tuple(prod(shape) * BITS[self.dtype] // 8 for shape in self.shapes)

    @cached_property
    def transfers(self) -> list[tuple[Transfer, ...]]:
        """Transfers of each distinct slice."""
        return [slice_transfers(self.dtype, self.shape, part) for part in self.cut.distinct]

    @cached_property
    def extents(self) -> tuple[Extent, ...]:
        """Bytes of the whole tensor that any slice needs, ascending and disjoint; whole rows where columns are cut."""
        nbytes = prod(self.shape) * BITS[self.dtype] // 8
        ends = sorted(_rows(transfer, nbytes) for transfers in self.transfers for transfer in transfers)
        return tuple(group.extent for group in coalesce(ends, lambda pair: (None, *pair)))

    def rank_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the rank's slice."""
        return self.shapes[self.cut.which[rank]]

    def rank_nbytes(self, rank: int) -> int:
        """Return the stored bytes of the rank's slice."""
        return self.sizes[self.cut.which[rank]]

    def rank_transfers(self, rank: int) -> tuple[Transfer, ...]:
        """Return the transfers of the rank's slice."""
        return self.transfers[self.cut.which[rank]]


@dataclass(frozen=True, slots=True)
class Cut:
    """The division of a tensor: the slice of each rank."""

    slices: tuple[Slice, ...]
    """The slice of each rank."""
    distinct: tuple[Slice, ...] = field(init=False, repr=False, compare=False)
    """The distinct slices, in order of the first rank that holds them."""
    which: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The position of each rank's slice in `distinct`."""
    holders: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    """The ranks that hold each distinct slice."""
    is_box: bool = field(init=False, repr=False, compare=False)
    """True if each slice is at most one contiguous index range along each axis."""
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
        """True if every rank holds every element."""
        return self.distinct == (WHOLE,)

    def only(self, ranks: Container[int]) -> Cut:
        """Return a cut with the slices of these ranks; all other ranks do not hold the tensor."""
        return Cut(tuple(part if rank in ranks else NOT_HELD for rank, part in enumerate(self.slices)))

    def tensor(self, dtype: str, shape: tuple[int, ...]) -> CutTensor:
        """Return this cut applied to a tensor of the dtype and shape."""
        known = self._tensors.get((dtype, shape))
        return known or self._tensors.setdefault((dtype, shape), CutTensor(self, dtype, shape))


def number_cuts(cuts: Iterable[Cut]) -> tuple[tuple[Cut, ...], tuple[int, ...]]:
    """Return the distinct cuts in order of first occurrence, and for each given cut its position among them."""
    numbers: dict[Cut, int] = {}
    cut_of = tuple(numbers.setdefault(cut, len(numbers)) for cut in cuts)
    return tuple(numbers), cut_of


def _rows(transfer: Transfer, nbytes: int) -> tuple[int, int]:
    """Return start and end of the bytes that a transfer reads of a tensor of `nbytes`; whole rows for several runs."""
    row = transfer.source_stride if transfer.count > 1 else 1
    return align_down(transfer.source, row), min(align_up(transfer.source_end, row), nbytes)
