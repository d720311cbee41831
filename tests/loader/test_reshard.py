"""relayout.loader.sources.reshard: what `gather` reads is the wanted slice, by numpy, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reads import carried_out

from relayout.core.extents import Transfer
from relayout.core.slices import BITS, WHOLE, Range, Slice
from relayout.errors import PlanError
from relayout.format.index import Read
from relayout.loader.sources.reshard import StoredSlice, gather

Array = npt.NDArray[Any]
Ranges = tuple[Range, ...]

PER_BYTES = {4: 2, 6: 4}
"""Elements that fill whole bytes together, of dtypes of so many bits."""


@dataclass(frozen=True)
class Case:
    """A tensor whose slices lie in files, and what is wanted of it."""

    dtype: str
    shape: tuple[int, ...]
    wanted: Slice
    holders: tuple[StoredSlice, ...]
    files: tuple[Array, ...]
    expected: Array
    """The bytes of the wanted piece."""


def bits_of(dtype: str, shape: tuple[int, ...], seed: int) -> Array:
    """A tensor of random bits, with the bits of each element along one axis more."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2, (*shape, BITS[dtype]), np.uint8)


def piece_of(bits: Array, part: Slice) -> Array:
    """A slice, by numpy."""
    for axis, ranges in part.by_axis or ():
        places = [np.arange(0), *(np.arange(start, start + length) for start, length in ranges)]
        bits = bits.take(np.concatenate(places), axis)
    return bits


def stored(bits: Array) -> Array:
    """The bytes of a tensor."""
    assert bits.size % 8 == 0
    return np.packbits(bits.reshape(-1), bitorder="little")


def pieces_of_an_axis(draw: st.DrawFn, size: int, unit: int) -> list[Range]:
    """An axis cut at random places."""
    borders = {0, size, *draw(st.lists(st.integers(0, size // unit).map(lambda place: place * unit), max_size=5))}
    return [(start, end - start) for start, end in pairwise(sorted(borders))] or [(0, 0)]


def some_ranges(draw: st.DrawFn, size: int, unit: int, max_size: int = 3) -> Ranges:
    """Ranges of an axis: in any order, overlapping perhaps, some of them empty."""
    places = st.integers(0, size // unit)
    pairs = draw(st.lists(st.tuples(places, places), min_size=1, max_size=max_size))
    return tuple((min(pair) * unit, abs(pair[0] - pair[1]) * unit) for pair in pairs)


def dealt(draw: st.DrawFn, units: Mapping[int, tuple[int, int]]) -> list[dict[int, Ranges]]:
    """Ranges along axes of such sizes and units: these hold everything between them, some of it several times."""
    if not units:
        return [{}]
    (axis, (size, unit)), *others = units.items()
    num_groups = draw(st.integers(1, 4))
    groups: list[list[Range]] = [[] for _ in range(num_groups)]
    for piece in draw(st.permutations(pieces_of_an_axis(draw, size, unit))):
        for group in draw(st.sets(st.integers(0, num_groups - 1), min_size=1, max_size=2)):
            groups[group].append(piece)
    # A rank without any is no holder.
    return [{axis: tuple(ranges), **more} for ranges in groups if ranges for more in dealt(draw, dict(others))]


@st.composite
def drawn_slices(draw: st.DrawFn, units: Mapping[int, tuple[int, int]]) -> list[Slice]:
    """Slices that hold all of a tensor between them, some of it several times."""
    if draw(st.integers(0, 5)) == 0:
        return [WHOLE] * draw(st.integers(1, 3))
    slices = [Slice.of(ranges) for ranges in dealt(draw, units)]
    more = [
        Slice.of({axis: some_ranges(draw, *one) for axis, one in units.items() if draw(st.booleans())})
        for _ in range(draw(st.integers(0, 2)))
    ]
    whole = [WHOLE] if draw(st.integers(0, 7)) == 0 else []
    return list(draw(st.permutations([*slices, *more, *whole])))


@st.composite
def cases(draw: st.DrawFn, *, max_axes: int = 3) -> Case:
    dtype = draw(st.sampled_from(["BF16", "U8", "F32", "C64", "F4", "F4", "F6_E3M2", "BOOL"]))
    unit = PER_BYTES.get(BITS[dtype], 1)
    outer = draw(st.lists(st.integers(0, 7), min_size=0, max_size=2))
    shape = (*outer, unit * draw(st.integers(0, 12 // unit)))
    if unit == 1 and draw(st.integers(0, 9)) == 0:
        shape = ()
    # What lies behind another axis than the last fills whole bytes: a cut may then fall anywhere.
    units = {axis: (size, unit if axis == len(shape) - 1 else 1) for axis, size in enumerate(shape)}
    cut = draw(st.permutations(range(len(shape))))[: draw(st.integers(1, max_axes))]
    slices = draw(drawn_slices({axis: units[axis] for axis in cut}))
    wanted = WHOLE
    if shape and draw(st.integers(0, 5)):
        wanted = Slice.of({axis: some_ranges(draw, *units[axis]) for axis in cut})
    bits = bits_of(dtype, shape, draw(st.integers(0, 2**32)))
    contents: list[list[Array]] = [[] for _ in range(draw(st.integers(1, 3)))]
    holders = []
    for part in slices:
        number = draw(st.integers(0, len(contents) - 1))
        contents[number].append(np.full(draw(st.integers(0, 3)), 0xEE, np.uint8))  # Something else in front.
        holders.append(StoredSlice(part, number, sum(one.size for one in contents[number])))
        contents[number].append(stored(piece_of(bits, part)))
    files = tuple(np.concatenate(parts or [np.zeros(0, np.uint8)]) for parts in contents)
    return Case(dtype, shape, wanted, tuple(holders), files, stored(piece_of(bits, wanted)))


@given(cases())
def test_what_is_gathered_is_what_numpy_selects_and_no_byte_more_is_read(case: Case) -> None:
    reads = gather(case.dtype, case.shape, case.wanted, case.holders)
    found, times = carried_out(reads, case.files, case.expected.size)
    np.testing.assert_array_equal(found, case.expected)
    assert (times == 1).all()
    assert all(read.transfer.nbytes > 0 and read.transfer.normalized() == read.transfer for read in reads)


@given(cases(max_axes=1))
def test_from_each_place_on_who_has_most_of_what_follows_is_asked(case: Case) -> None:
    """No other choice needs fewer reads."""
    if not case.expected.size or not case.shape:
        return
    size = case.shape[max(one.axis for one in (case.wanted, *(holder.part for holder in case.holders)))]

    def ranges_of(part: Slice) -> Ranges:
        return ((0, size),) if part.ranges is None else part.ranges

    held = [one for holder in case.holders for one in ranges_of(holder.part)]
    fewest = 0
    for start, length in ranges_of(case.wanted):
        place = start
        while place < start + length:
            place = max(first + count for first, count in held if first <= place < first + count)
            fewest += 1
    assert len(gather(case.dtype, case.shape, case.wanted, case.holders)) == fewest


# Which holder is asked.


def test_of_equal_holders_the_first_is_asked() -> None:
    both = [
        StoredSlice(Slice.along(0, ((0, 4),)), 3, 100),
        StoredSlice(Slice.along(0, ((0, 4),)), 1, 200),
        StoredSlice(WHOLE, 2, 300),
    ]
    assert gather("BF16", (8, 2), Slice.along(0, ((1, 3),)), both) == (Read(3, Transfer(104, 0, 12)),)
    assert gather("BF16", (8, 2), Slice.along(0, ((1, 3),)), both[1:]) == (Read(1, Transfer(204, 0, 12)),)
    assert gather("BF16", (8, 2), WHOLE, [StoredSlice(WHOLE, 5, 7), StoredSlice(WHOLE, 6, 8)]) == (
        Read(5, Transfer(7, 0, 32)),
    )


def test_a_holder_of_all_is_asked_before_several_of_a_part() -> None:
    halves = [StoredSlice(Slice.along(0, ((0, 4),)), 0, 0), StoredSlice(Slice.along(0, ((4, 4),)), 1, 0)]
    assert gather("U8", (8,), WHOLE, halves) == (Read(0, Transfer(0, 0, 4)), Read(1, Transfer(0, 4, 4)))
    assert gather("U8", (8,), WHOLE, [*halves, StoredSlice(WHOLE, 2, 0)]) == (Read(2, Transfer(0, 0, 8)),)


def test_quarters_are_read_row_by_row() -> None:
    quarters = [
        StoredSlice(Slice.of({0: ((3 * down, 3),), 1: ((4 * right, 4),)}), 2 * down + right, 100)
        for down in (0, 1)
        for right in (0, 1)
    ]
    assert gather("U8", (6, 8), WHOLE, quarters) == (
        Read(0, Transfer(100, 0, 4, 3, 4, 8)),
        Read(1, Transfer(100, 4, 4, 3, 4, 8)),
        Read(2, Transfer(100, 24, 4, 3, 4, 8)),
        Read(3, Transfer(100, 28, 4, 3, 4, 8)),
    )
    assert gather("U8", (6, 8), Slice.of({0: ((3, 3),), 1: ((0, 4),)}), quarters) == (Read(2, Transfer(100, 0, 12)),)
    with pytest.raises(PlanError, match=r"^element 4 of dim 1 of \[6, 8\] is in no rank's slice$"):
        gather("U8", (6, 8), WHOLE, quarters[:3])


# Refusals.


@given(st.integers(1, 12), st.data())
def test_a_hole_is_refused_at_its_first_element(size: int, data: st.DataObject) -> None:
    missing = data.draw(st.integers(0, size - 1))
    holders = [StoredSlice(Slice.along(0, ((0, missing), (missing + 1, size - missing - 1))), 0, 0)]
    with pytest.raises(PlanError, match=rf"^element {missing} of dim 0 of \[{size}, 3\] is in no rank's slice$"):
        gather("BF16", (size, 3), WHOLE, holders)
    if missing:
        assert len(gather("BF16", (size, 3), Slice.along(0, ((0, missing),)), holders)) == 1


def test_what_no_rank_holds_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^no rank holds the tensor$"):
        gather("BF16", (8, 3), WHOLE, [])
    with pytest.raises(PlanError, match=r"^no rank holds the tensor$"):
        gather("BF16", (), WHOLE, [])
    with pytest.raises(PlanError, match=r"^element 2 of dim 1 of \[3, 8\] is in no rank's slice$"):
        gather("BF16", (3, 8), Slice.along(1, ((2, 3),)), [])


@pytest.mark.parametrize(
    ("dtype", "shape", "wanted", "parts"),
    [
        ("F4", (16,), Slice.along(0, ((1, 2),)), [Slice.along(0, ((0, 16),))]),
        ("F4", (16,), Slice.along(0, ((0, 3),)), [Slice.along(0, ((0, 16),))]),
        ("F4", (16,), WHOLE, [Slice.along(0, ((0, 7),)), Slice.along(0, ((7, 9),))]),
        ("F4", (4, 16), Slice.along(1, ((2, 5),)), [Slice.along(1, ((0, 8),)), Slice.along(1, ((8, 8),))]),
        ("F4", (4, 16), Slice.along(1, ((0, 2),)), [Slice.along(1, ((0, 7),)), Slice.along(1, ((7, 9),))]),
        ("F4", (4, 3), Slice.along(0, ((1, 2),)), [Slice.along(0, ((0, 4),))]),
        ("F4", (16,), Slice.along(0, ((2, 2),)), [Slice.along(0, ((1, 3), (4, 12)))]),
        ("F6_E2M3", (16,), Slice.along(0, ((2, 4),)), [WHOLE]),
    ],
)
def test_a_cut_inside_a_byte_is_refused(dtype: str, shape: tuple[int, ...], wanted: Slice, parts: list[Slice]) -> None:
    with pytest.raises(PlanError, match=rf"^a cut of {dtype} \[.*\] along dim {wanted.axis} falls inside a byte$"):
        gather(dtype, shape, wanted, [StoredSlice(part, rank, 0) for rank, part in enumerate(parts)])
