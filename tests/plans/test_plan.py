"""relayout.plans.plan: what no slice has, by numpy."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relayout.core.slices import WHOLE, Slice
from relayout.errors import PlanError
from relayout.plans.plan import missing_element


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Slice]]:
    """Slices that hold about all of a tensor."""
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    slices = []
    for _ in range(draw(st.integers(1, 6))):
        by_axis = {}
        for axis in draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)):
            pairs = st.tuples(*[st.integers(0, shape[axis])] * 2)
            pairs = st.one_of(pairs, st.just((0, shape[axis])), st.just((0, shape[axis] // 2)))
            ends = draw(st.lists(pairs, max_size=2))
            by_axis[axis] = tuple((min(pair), abs(pair[0] - pair[1])) for pair in ends)
        slices.append(Slice.of(by_axis))
    return shape, slices


@given(case=cases())
@example(case=((2, 2), [Slice.along(0, ((0, 1),)), Slice.of({0: ((1, 1),), 1: ((0, 1),)})]))
@example(case=((2, 2), [Slice.along(0, ((0, 1),)), Slice.of({0: ((1, 1),), 1: ((1, 1), (0, 1))})]))
def test_the_first_element_that_no_slice_has_is_found(case: tuple[tuple[int, ...], list[Slice]]) -> None:
    shape, slices = case
    is_held = np.zeros(shape, bool)
    for part in slices:
        places = [np.zeros(size, bool) for size in shape]
        for axis, line in enumerate(places):
            for start, length in ((0, shape[axis]),) if axis not in part.axes else part.ranges_along(axis) or ():
                line[start : start + length] = True
        is_held |= np.logical_and.reduce(np.meshgrid(*places, indexing="ij"))
    missing = np.argwhere(~is_held)
    assert missing_element(shape, slices) == (tuple(missing[0].tolist()) if len(missing) else None)


def test_what_is_in_one_place_only_is_found_in_a_tensor_of_any_size() -> None:
    size = 2**40
    hole = Slice.along(0, ((0, size - 1),)), Slice.of({0: ((size - 1, 1),), 1: ((1, size - 1),)})
    assert prod((size, size)) > 2**63
    assert missing_element((size, size), hole) == (size - 1, 0)
    assert missing_element((size, size), (*hole, WHOLE)) is None


def test_more_borders_than_can_be_compared_are_refused() -> None:
    lines = tuple((2 * place, 1) for place in range(2**13))
    with pytest.raises(
        PlanError, match=r"^1 slices along dims \[0, 1\] with 268435456 cells .* are too many to compare$"
    ):
        missing_element((2**14, 2**14), [Slice.of({0: lines, 1: lines})])
