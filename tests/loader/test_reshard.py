"""relayout.loader.sources.reshard: what `gather` reads is the wanted slice, by numpy, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relayout.core.dtypes import BITS
from relayout.core.extents import Transfer
from relayout.core.slices import WHOLE, Range, Slice
from relayout.errors import PlanError
from relayout.format.index import Read
from relayout.loader.sources.reshard import Holder, gather

Array = npt.NDArray[Any]
Ranges = tuple[Range, ...]

PER_BYTES = {4: 2, 6: 4}
"""Elements that fill whole bytes together, of dtypes of so many bits."""


@dataclass(frozen=True)
class Case:
    """A tensor whose slices lie in files, and what is wanted of it."""

    dtype: str
    shape: tuple[int, ...]
    axis: int
    """Along which all is cut."""
    wanted: Slice
    rows: Range | None
    holders: tuple[Holder, ...]
    files: tuple[Array, ...]
    expected: Array
    """The bytes of the wanted piece."""


def bits_of(dtype: str, shape: tuple[int, ...], seed: int) -> Array:
    """A tensor of random bits, with the bits of each element along one axis more."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2, (*shape, BITS[dtype]), np.uint8)


def piece_of(bits: Array, part: Slice) -> Array:
    """A slice, by numpy."""
    if part.ranges is None:
        return bits
    return np.concatenate(
        [bits.take(range(start, start + length), part.axis) for start, length in part.ranges], part.axis
    )


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


@st.composite
def drawn_slices(draw: st.DrawFn, axis: int, size: int, unit: int) -> list[Slice]:
    """Slices that hold all of an axis between them, some of it several times."""
    if draw(st.integers(0, 5)) == 0:
        return [WHOLE] * draw(st.integers(1, 3))
    pieces = draw(st.permutations(pieces_of_an_axis(draw, size, unit)))
    num_ranks = draw(st.integers(1, 5))
    dealt: list[list[Range]] = [[] for _ in range(num_ranks)]
    for piece in pieces:
        for rank in draw(st.sets(st.integers(0, num_ranks - 1), min_size=1, max_size=2)):
            dealt[rank].append(piece)
    slices = [Slice(axis, tuple(ranges)) for ranges in dealt if ranges]  # A rank without any is no holder.
    more = [Slice(axis, some_ranges(draw, size, unit)) for _ in range(draw(st.integers(0, 2)))]
    whole = [WHOLE] if draw(st.integers(0, 7)) == 0 else []
    return list(draw(st.permutations([*slices, *more, *whole])))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dtype = draw(st.sampled_from(["BF16", "U8", "F32", "C64", "F4", "F4", "F6_E3M2", "BOOL"]))
    unit = PER_BYTES.get(BITS[dtype], 1)
    outer = draw(st.lists(st.integers(0, 7), min_size=0, max_size=2))
    shape = (*outer, unit * draw(st.integers(0, 12 // unit)))
    if unit == 1 and draw(st.integers(0, 9)) == 0:
        shape = ()
    axis = draw(st.integers(0, max(0, len(shape) - 1)))
    # What lies behind the axis fills whole bytes: a cut may then fall anywhere.
    unit = unit if axis == len(shape) - 1 else 1
    size = shape[axis] if shape else 0
    slices = draw(drawn_slices(axis, size, unit)) if shape else [WHOLE] * draw(st.integers(1, 3))
    wanted, rows = WHOLE, None
    if shape and draw(st.integers(0, 5)):
        wanted = Slice(axis, some_ranges(draw, size, unit))
        if draw(st.booleans()):
            first = draw(st.integers(0, shape[0]))
            rows = first, draw(st.integers(0, shape[0] - first))
    bits = bits_of(dtype, shape, draw(st.integers(0, 2**32)))
    contents: list[list[Array]] = [[] for _ in range(draw(st.integers(1, 3)))]
    holders = []
    for part in slices:
        number = draw(st.integers(0, len(contents) - 1))
        contents[number].append(np.full(draw(st.integers(0, 3)), 0xEE, np.uint8))  # Something else in front.
        holders.append(Holder(part, number, sum(one.size for one in contents[number])))
        contents[number].append(stored(piece_of(bits, part)))
    expected = piece_of(bits, wanted)
    if rows is not None and axis > 0:
        expected = expected[rows[0] : sum(rows)]
    files = tuple(np.concatenate(parts or [np.zeros(0, np.uint8)]) for parts in contents)
    return Case(dtype, shape, axis, wanted, rows, tuple(holders), files, stored(expected))


def executed(reads: tuple[Read, ...], files: tuple[Array, ...], nbytes: int) -> Array:
    """What reads bring; every byte is brought once, and none from outside a file."""
    result, times = np.zeros(nbytes, np.uint8), np.zeros(nbytes, int)
    for read in reads:
        assert read.transfer.nbytes > 0
        assert read.transfer.normalized() == read.transfer
        for run in read.transfer.runs():
            assert 0 <= run.source <= run.source_end <= files[read.file].size
            assert 0 <= run.target <= run.target_end <= nbytes
            result[run.target : run.target_end] = files[read.file][run.source : run.source_end]
            times[run.target : run.target_end] += 1
    assert (times == 1).all()
    return result


@given(cases())
@settings(max_examples=300, deadline=None, database=None)
def test_what_is_gathered_is_what_numpy_selects_and_no_byte_more_is_read(case: Case) -> None:
    reads = gather(case.dtype, case.shape, case.wanted, case.holders, case.rows)
    found = executed(reads, case.files, case.expected.size)
    np.testing.assert_array_equal(found, case.expected)
    assert sum(read.transfer.total_nbytes for read in reads) == case.expected.size


@given(cases())
@settings(max_examples=150, deadline=None, database=None)
def test_from_each_place_on_who_has_most_of_what_follows_is_asked(case: Case) -> None:
    """No other choice needs fewer reads."""
    if not case.expected.size or not case.shape:
        return
    size = case.shape[case.axis]
    held = [one for holder in case.holders for one in holder.part.ranges or ((0, size),)]
    fewest = 0
    for start, length in case.wanted.ranges or ((0, size),):
        place = start
        while place < start + length:
            place = max(first + count for first, count in held if first <= place < first + count)
            fewest += 1
    assert len(gather(case.dtype, case.shape, case.wanted, case.holders, case.rows)) == fewest


# Which holder is asked.


def test_of_equal_holders_the_first_is_asked() -> None:
    both = [Holder(Slice(0, ((0, 4),)), 3, 100), Holder(Slice(0, ((0, 4),)), 1, 200), Holder(WHOLE, 2, 300)]
    assert gather("BF16", (8, 2), Slice(0, ((1, 3),)), both) == (Read(3, Transfer(104, 0, 12)),)
    assert gather("BF16", (8, 2), Slice(0, ((1, 3),)), both[1:]) == (Read(1, Transfer(204, 0, 12)),)
    assert gather("BF16", (8, 2), WHOLE, [Holder(WHOLE, 5, 7), Holder(WHOLE, 6, 8)]) == (Read(5, Transfer(7, 0, 32)),)


def test_a_holder_of_all_is_asked_before_several_of_a_part() -> None:
    halves = [Holder(Slice(0, ((0, 4),)), 0, 0), Holder(Slice(0, ((4, 4),)), 1, 0)]
    assert gather("U8", (8,), WHOLE, halves) == (Read(0, Transfer(0, 0, 4)), Read(1, Transfer(0, 4, 4)))
    assert gather("U8", (8,), WHOLE, [*halves, Holder(WHOLE, 2, 0)]) == (Read(2, Transfer(0, 0, 8)),)


def test_columns_are_strided_reads_of_the_rows_that_are_wanted() -> None:
    halves = [Holder(Slice(1, ((0, 4),)), 0, 1000), Holder(Slice(1, ((4, 4),)), 1, 2000)]
    wanted = Slice(1, ((2, 4),))
    assert gather("BF16", (6, 8), wanted, halves) == (
        Read(0, Transfer(1004, 0, 4, 6, 8, 8)),
        Read(1, Transfer(2000, 4, 4, 6, 8, 8)),
    )
    assert gather("BF16", (6, 8), wanted, halves, rows=(3, 2)) == (
        Read(0, Transfer(1004 + 24, 0, 4, 2, 8, 8)),
        Read(1, Transfer(2000 + 24, 4, 4, 2, 8, 8)),
    )
    assert gather("BF16", (6, 8), wanted, halves, rows=(5, 1)) == (
        Read(0, Transfer(1004 + 40, 0, 4)),
        Read(1, Transfer(2000 + 40, 4, 4)),
    )
    assert gather("BF16", (6, 8), Slice(1, ((0, 4),)), halves, rows=(1, 5)) == (Read(0, Transfer(1008, 0, 40)),)


def test_rows_are_of_axis_0_also_where_the_cut_is_two_axes_on() -> None:
    halves = [Holder(Slice(2, ((0, 1),)), 0, 0), Holder(Slice(2, ((1, 1),)), 1, 0)]
    reads = gather("U8", (3, 5, 2), Slice(2, ((1, 1),)), halves, rows=(2, 1))
    assert reads == (Read(1, Transfer(10, 0, 5)),)


def test_nothing_is_read_of_what_has_no_bytes() -> None:
    assert gather("BF16", (0, 4), WHOLE, [Holder(WHOLE, 0, 0)]) == ()
    assert gather("BF16", (4, 0), Slice(0, ((1, 2),)), [Holder(Slice(0, ((0, 4),)), 0, 0)]) == ()
    assert gather("BF16", (8, 4), Slice(0, ((3, 0),)), [Holder(Slice(0, ((0, 8),)), 0, 0)]) == ()
    assert gather("BF16", (8, 4), Slice(1, ((0, 2),)), [Holder(Slice(1, ((0, 4),)), 0, 0)], rows=(3, 0)) == ()


# Refusals.


@given(st.integers(1, 12), st.data())
def test_a_hole_is_refused_at_its_first_element(size: int, data: st.DataObject) -> None:
    missing = data.draw(st.integers(0, size - 1))
    holders = [Holder(Slice(0, ((0, missing), (missing + 1, size - missing - 1))), 0, 0)]
    with pytest.raises(PlanError, match=rf"^element {missing} of dim 0 of \[{size}, 3\] is in no rank's slice$"):
        gather("BF16", (size, 3), WHOLE, holders)
    if missing:
        assert len(gather("BF16", (size, 3), Slice(0, ((0, missing),)), holders)) == 1


def test_what_no_rank_holds_is_refused() -> None:
    with pytest.raises(PlanError, match=r"^no rank holds the tensor$"):
        gather("BF16", (8, 3), WHOLE, [])
    with pytest.raises(PlanError, match=r"^no rank holds the tensor$"):
        gather("BF16", (), WHOLE, [])
    with pytest.raises(PlanError, match=r"^element 2 of dim 1 of \[3, 8\] is in no rank's slice$"):
        gather("BF16", (3, 8), Slice(1, ((2, 3),)), [])


@pytest.mark.parametrize(
    ("wanted", "parts"),
    [
        (Slice(0, ((0, 2),)), [Slice(1, ((0, 4),)), Slice(1, ((4, 4),))]),
        (WHOLE, [Slice(0, ((0, 4),)), Slice(1, ((4, 4),))]),
        (Slice(1, ((0, 2),)), [WHOLE, Slice(0, ((0, 8),))]),
    ],
)
def test_slices_along_two_axes_are_refused(wanted: Slice, parts: list[Slice]) -> None:
    with pytest.raises(PlanError, match=r"^slices are cut along different dims: \[0, 1\]$"):
        gather("BF16", (8, 8), wanted, [Holder(part, rank, 0) for rank, part in enumerate(parts)])


@pytest.mark.parametrize(
    ("dtype", "shape", "wanted", "parts"),
    [
        ("F4", (16,), Slice(0, ((1, 2),)), [Slice(0, ((0, 16),))]),
        ("F4", (16,), Slice(0, ((0, 3),)), [Slice(0, ((0, 16),))]),
        ("F4", (16,), WHOLE, [Slice(0, ((0, 7),)), Slice(0, ((7, 9),))]),
        ("F4", (4, 16), Slice(1, ((2, 5),)), [Slice(1, ((0, 8),)), Slice(1, ((8, 8),))]),
        ("F4", (4, 16), Slice(1, ((0, 2),)), [Slice(1, ((0, 7),)), Slice(1, ((7, 9),))]),
        ("F4", (4, 3), Slice(0, ((1, 2),)), [Slice(0, ((0, 4),))]),
        ("F4", (16,), Slice(0, ((2, 2),)), [Slice(0, ((1, 3), (4, 12)))]),
        ("F6_E2M3", (16,), Slice(0, ((2, 4),)), [WHOLE]),
    ],
)
def test_a_cut_inside_a_byte_is_refused(dtype: str, shape: tuple[int, ...], wanted: Slice, parts: list[Slice]) -> None:
    with pytest.raises(PlanError, match=rf"^a cut of {dtype} \[.*\] along dim {wanted.axis} falls inside a byte$"):
        gather(dtype, shape, wanted, [Holder(part, rank, 0) for rank, part in enumerate(parts)])
