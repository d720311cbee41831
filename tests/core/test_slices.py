"""relayout.core.slices against numpy indexing, at the level of elements and, below 8 bits, of single bits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.bits import pattern
from support.planning import slice_nbytes

from relayout.core.extents import Transfer
from relayout.core.slices import BITS, NOT_HELD, WHOLE, Cut, Slice, joined, num_bytes, number_cuts, slice_transfers
from relayout.errors import PlanError

Array = npt.NDArray[Any]
ByAxis = dict[int, tuple[tuple[int, int], ...]]

WHOLE_BYTE_DTYPES = sorted(dtype for dtype, bits in BITS.items() if bits % 8 == 0)
SUB_BYTE_DTYPES = sorted(dtype for dtype, bits in BITS.items() if bits % 8)


def moved(source: Array, transfers: Sequence[Transfer], nbytes: int) -> Array:
    """The bytes that transfers put together, copied one at a time; each must be written just once."""
    target = np.zeros(nbytes, np.uint8)
    times = np.zeros(nbytes, int)
    for one in transfers:
        for run in range(one.count):
            for i in range(one.nbytes):
                at = one.target + run * one.target_stride + i
                target[at] = source[one.source + run * one.source_stride + i]
                times[at] += 1
    assert (times == 1).all()
    return target


def cut(elements: Array, by_axis: ByAxis) -> Array:
    """What numpy says a slice is; axes behind the tensor's own (bytes or bits of an element) go along."""
    for axis, ranges in by_axis.items():
        places = [np.arange(0), *(np.arange(start, start + length) for start, length in ranges)]
        elements = np.take(elements, np.concatenate(places), axis)
    return elements


@st.composite
def cuts(draw: st.DrawFn, *, min_dim: int = 0) -> tuple[tuple[int, ...], ByAxis]:
    """A shape, and ranges along one or several axes of it, in any order: overlaps, repeats and empty ones included."""
    shape = tuple(draw(st.lists(st.integers(min_dim, 6), min_size=1, max_size=4)))
    by_axis = {}
    for axis in draw(st.permutations(range(len(shape))))[: draw(st.sampled_from([1, 1, 2, 3, 4]))]:
        ranges = []
        for _ in range(draw(st.integers(0, 3))):
            start = draw(st.integers(0, shape[axis]))
            ranges.append((start, draw(st.integers(0, shape[axis] - start))))
        by_axis[axis] = tuple(ranges)
    return shape, by_axis


@given(dtype=st.sampled_from(WHOLE_BYTE_DTYPES), case=cuts())
@example(dtype="BF16", case=((4, 6), {0: ((2, 2),)}))
@example(dtype="BF16", case=((4, 6), {1: ((3, 3), (0, 1))}))
@example(dtype="F32", case=((2, 3, 4), {1: ((2, 1), (0, 2))}))
@example(dtype="I8", case=((5,), {0: ((5, 0),)}))
@example(dtype="I8", case=((5, 4), {1: ((2, 1), (0, 2)), 0: ((3, 2), (1, 1))}))
@example(dtype="BF16", case=((3, 2, 4), {2: ((1, 2),), 0: ((0, 1), (2, 1))}))
def test_a_slice_holds_the_bytes_that_numpy_indexing_gives(dtype: str, case: tuple[tuple[int, ...], ByAxis]) -> None:
    shape, by_axis = case
    itemsize = BITS[dtype] // 8
    source = pattern(prod(shape) * itemsize)
    expected = cut(source.reshape(*shape, itemsize), by_axis)
    part = Slice.of(by_axis)
    assert part.is_inside(shape)
    assert part.shape(shape) == expected.shape[:-1]
    assert slice_nbytes(dtype, shape, part) == expected.nbytes
    transfers = slice_transfers(dtype, shape, part)
    np.testing.assert_array_equal(moved(source, transfers, expected.nbytes), expected.reshape(-1))
    if len(by_axis) == 1:
        assert len(transfers) <= len(*by_axis.values())
    assert all(one.nbytes for one in transfers)
    assert [one.target for one in transfers] == sorted(one.target for one in transfers)


@given(dtype=st.sampled_from(SUB_BYTE_DTYPES), case=cuts(min_dim=1), last=st.sampled_from([1, 2, 4, 8]))
@example(dtype="F4", case=((3,), {0: ((1, 1),)}), last=2)
@example(dtype="F6_E2M3", case=((2,), {0: ((1, 1),)}), last=4)
@example(dtype="F4", case=((2, 4), {1: ((2, 2),)}), last=1)
@example(dtype="F4", case=((4, 3), {0: ((2, 2),), 1: ((0, 3),)}), last=1)
def test_a_cut_inside_a_byte_is_refused_and_any_other_is_right(
    dtype: str, case: tuple[tuple[int, ...], ByAxis], last: int
) -> None:
    shape, by_axis = case
    shape = (*shape, last)
    nbytes = num_bytes(dtype, shape)
    if nbytes is None:  # No file can hold it.
        return
    source = pattern(nbytes)
    bits = np.unpackbits(source).reshape(*shape, BITS[dtype])
    part = Slice.of(by_axis)

    # Where each run of bits begins and ends: the ranges of the last axis that is cut, in each row that is held.
    axis = max(by_axis)
    inner_bits = prod(shape[axis + 1 :]) * BITS[dtype]
    rows = np.arange(prod(shape[:axis])).reshape(shape[:axis])
    borders = [
        int(row) * shape[axis] * inner_bits + inner_bits * place
        for row in cut(rows, {one: ranges for one, ranges in by_axis.items() if one < axis}).reshape(-1)
        for start, length in by_axis[axis]
        for place in (start, start + length)
        if length
    ]
    if any(border % 8 for border in borders):
        dims = ", ".join(map(str, sorted(by_axis)))
        with pytest.raises(PlanError, match=rf"a cut of {dtype} .* along dim {dims} falls inside a byte"):
            slice_transfers(dtype, shape, part)
    else:
        expected = np.packbits(cut(bits, by_axis).reshape(-1))
        assert slice_nbytes(dtype, shape, part) == expected.nbytes
        found = moved(source, slice_transfers(dtype, shape, part), expected.nbytes)
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", sorted(BITS))
@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4), (0, 4), (4, 0)])
def test_a_whole_tensor_is_one_run_or_none(dtype: str, shape: tuple[int, ...]) -> None:
    nbytes = num_bytes(dtype, shape)
    if nbytes is None:
        assert shape == ()
        assert dtype in SUB_BYTE_DTYPES
        return
    assert slice_transfers(dtype, shape, WHOLE) == ((Transfer(0, 0, nbytes),) if nbytes else ())
    assert slice_nbytes(dtype, shape, WHOLE) == nbytes
    assert WHOLE.shape(shape) == shape


def test_rows_are_one_run_and_columns_one_run_for_each_row() -> None:
    assert slice_transfers("BF16", (8, 6), Slice.along(0, ((4, 2),))) == (Transfer(48, 0, 24),)
    assert slice_transfers("BF16", (8, 6), Slice.along(1, ((4, 2),))) == (Transfer(8, 0, 4, 8, 12, 4),)
    # Columns of every row, all of them: nothing is cut after all.
    assert slice_transfers("BF16", (8, 6), Slice.along(1, ((0, 6),))) == (Transfer(0, 0, 96),)


@pytest.mark.parametrize("dtype", ["F4", "F32"])
@pytest.mark.parametrize("bad", [(0, 9), (8, 2), (9, 1), (-2, 2), (4, -2)])
def test_elements_that_the_axis_does_not_have_are_refused(dtype: str, bad: tuple[int, int]) -> None:
    with pytest.raises(PlanError, match=rf"ranges .*, {re.escape(str(bad))}\) are outside dim 1 of \[2, 8, 2\]$"):
        slice_transfers(dtype, (2, 8, 2), Slice.along(1, ((0, 2), bad)))


def test_a_slice_is_a_box_unless_it_has_several_ranges() -> None:
    assert [part.is_box for part in (WHOLE, Slice.along(1, ((2, 2),)), Slice.along(1, ((2, 2), (6, 2))))] == [
        True,
        True,
        False,
    ]
    assert [part.is_whole for part in (WHOLE, Slice.along(1, ((0, 2),)))] == [True, False]


def test_a_box_starts_where_its_ranges_do() -> None:
    assert WHOLE.starts(3) == [0, 0, 0]
    assert WHOLE.starts(0) == []
    assert Slice.along(1, ((6, 2),)).starts(3) == [0, 6, 0]
    assert Slice.of({2: ((1, 1),), 0: ((4, 2),)}).starts(3) == [4, 0, 1]
    assert Slice.of({2: ((1, 1),), 0: ((4, 0),)}).starts(3) == [0, 0, 1]


def test_a_block_of_two_axes_is_a_run_for_each_row() -> None:
    assert slice_transfers("U8", (4, 6), Slice.of({0: ((1, 2),), 1: ((2, 3),)})) == (Transfer(8, 0, 3, 2, 6, 3),)
    # An axis between them that is not cut: its rows follow each other.
    block = Slice.of({0: ((1, 2),), 2: ((2, 3),)})
    assert slice_transfers("U8", (4, 5, 6), block) == (Transfer(32, 0, 3, 10, 6, 3),)
    # Nothing is cut along the last axis after all.
    assert slice_transfers("U8", (4, 6), Slice.of({0: ((1, 2),), 1: ((0, 6),)})) == (Transfer(6, 0, 12),)


def test_slices_of_equal_ranges_are_equal_however_they_were_given() -> None:
    part = Slice.of({1: [(2, 2), (5, 0)], 0: ((0, 4),)})
    assert part == Slice.of({0: ((0, 4),), 1: ((2, 2),)}) == Slice(((0, ((0, 4),)), (1, ((2, 2),))))
    assert (part.axes, part.ranges_along(1), part.ranges_along(2)) == ((0, 1), ((2, 2),), None)
    assert Slice.along(0, ((3, 0),)) == Slice.along(0, ()) != NOT_HELD != WHOLE


def test_what_serves_one_axis_refuses_a_slice_along_two() -> None:
    assert [(part.axis, part.ranges) for part in (WHOLE, NOT_HELD, Slice.along(1, ((2, 2),)), Slice.along(2, ()))] == [
        (0, None),
        (0, ()),
        (1, ((2, 2),)),
        (2, ()),
    ]
    part = Slice.of({0: ((0, 4),), 2: ()})
    with pytest.raises(PlanError, match=r"^is cut along dims \[0, 2\], expected at most one$") as error:
        _ = part.ranges
    assert error.value.code == "unsupported"
    with pytest.raises(PlanError, match="is cut along dims"):
        _ = part.axis


def test_a_slice_of_more_runs_than_memory_should_hold_is_refused() -> None:
    rows = tuple((2 * row, 1) for row in range(2**10))
    for part in (Slice.of({0: rows, 1: (*rows, (2**11, 1))}), Slice.of({0: ((0, 2**11),), 1: rows, 2: ((0, 1),)})):
        with pytest.raises(PlanError, match=r"^a slice along dims \[0, 1.*\] of \d+ runs, limit 1048576$"):
            slice_transfers("U8", (2**11, 2**12, 2), part)
    assert slice_transfers("U8", (2**40, 2**20, 2), Slice.of({0: ((0, 2**40),), 1: (), 2: ((0, 1),)})) == ()


def test_the_slices_of_ranks_that_hold_the_same_are_one() -> None:
    first, second = Slice.along(0, ((0, 4),)), Slice.along(0, ((4, 4),))

    def found(*slices: Slice) -> tuple[object, ...]:
        cut = Cut(slices)
        return cut.distinct, cut.which, cut.holders, cut.is_whole

    assert found(first, first, second, second) == ((first, second), (0, 0, 1, 1), ((0, 1), (2, 3)), False)
    assert found(second, first, second) == ((second, first), (0, 1, 0), ((0, 2), (1,)), False)
    assert found(WHOLE, WHOLE) == ((WHOLE,), (0, 0), ((0, 1),), True)
    assert found(WHOLE, NOT_HELD) == ((WHOLE, NOT_HELD), (0, 1), ((0,), (1,)), False)


def test_slices_of_other_axes_or_orders_are_not_the_same() -> None:
    parts = (
        Slice.along(0, ((0, 4),)),
        Slice.along(1, ((0, 4),)),
        Slice.along(0, ((0, 2), (2, 2))),
        Slice.along(0, ((2, 2), (0, 2))),
        WHOLE,
    )
    assert (Cut(parts).distinct, Cut(parts).which) == (parts, (0, 1, 2, 3, 4))


def test_a_cut_is_of_boxes_if_no_slice_has_two_ranges() -> None:
    box, fused = Slice.along(0, ((0, 4),)), Slice.along(0, ((0, 2), (4, 2)))
    assert [Cut(one).is_box for one in ((box, WHOLE, NOT_HELD), (box, fused), (fused, fused))] == [True, False, False]


def test_equal_cuts_are_one() -> None:
    def halves() -> Cut:
        return Cut((Slice.along(0, ((0, 4),)), Slice.along(0, ((4, 4),))))

    whole = Cut((WHOLE, WHOLE))
    assert (halves() == halves(), halves() == whole, hash(halves()) == hash(halves())) == (True, False, True)
    assert number_cuts([whole, halves(), Cut((WHOLE, WHOLE)), halves()]) == ((whole, halves()), (0, 1, 0, 1))
    assert number_cuts([]) == ((), ())


@pytest.mark.parametrize("shape", [(), (4, 2)])
def test_of_a_tensor_that_is_not_held_there_are_no_bytes(shape: tuple[int, ...]) -> None:
    assert slice_transfers("F32", shape, NOT_HELD) == ()
    assert slice_nbytes("F32", shape, NOT_HELD) == 0


@given(dtype=st.sampled_from(WHOLE_BYTE_DTYPES), case=cuts())
def test_a_cut_tensor_says_what_each_rank_holds(dtype: str, case: tuple[tuple[int, ...], ByAxis]) -> None:
    shape, by_axis = case
    slices = (WHOLE, Slice.of(by_axis), WHOLE)
    of_ranks = Cut(slices)
    tensor = of_ranks.tensor(dtype, shape)
    assert of_ranks.tensor(dtype, shape) is tensor
    assert of_ranks.tensor(dtype, (*shape, 1)) is not tensor
    for rank, one in enumerate(slices):
        assert tensor.rank_shape(rank) == one.shape(shape)
        assert tensor.rank_nbytes(rank) == slice_nbytes(dtype, shape, one)
        assert tensor.rank_transfers(rank) == slice_transfers(dtype, shape, one)


@given(size=st.integers(0, 4), pairs=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=4))
def test_a_slice_has_one_canonical_form(size: int, pairs: list[tuple[int, int]]) -> None:
    """That of its elements in their order, one range for each."""
    ranges = [(start, min(length, size - start)) for start, length in pairs if start < size]
    elements = [int(i) for start, length in ranges for i in np.arange(size)[start : start + length]]
    canonical = Slice.along(1, ranges).canonical((3, size))
    assert canonical == Slice.along(1, [(i, 1) for i in elements]).canonical((3, size))
    assert canonical.is_whole == (elements == list(range(size)))
    held = [i for start, length in canonical.ranges_along(1) or () for i in range(start, start + length)]
    assert canonical.is_whole or held == elements
    assert NOT_HELD.canonical((3, size)) == NOT_HELD


def test_ranges_that_touch_or_overlap_are_one_and_order_does_not_count() -> None:
    assert joined([(4, 2), (0, 2), (2, 1), (5, 4), (12, 0)]) == ((0, 3), (4, 5))
