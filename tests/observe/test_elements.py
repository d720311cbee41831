"""What a view of a tensor has, as ranges along its axes: expected are the elements of a tensor of numbers."""

from __future__ import annotations

import itertools
from contextlib import suppress
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tensor_operations import views

from relayout.core.slices import NOT_HELD, WHOLE, Slice
from relayout.observe.elements import Box, box_of, joined, same_elements, slice_of


def elements(shape: list[int], box: Box) -> list[int]:
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    along = [[i for start, length in ranges for i in range(start, start + length)] for ranges in box]
    return sorted(sum(i * s for i, s in zip(place, strides, strict=True)) for place in itertools.product(*along))


@given(st.data())
def test_a_view_has_the_elements_of_its_box(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    view = torch.arange(prod(shape)).view(shape)
    for _ in range(data.draw(st.integers(0, 4))):
        with suppress(RuntimeError, IndexError):  # torch refuses some.
            view = data.draw(views(view.shape))[1](view)
    box = box_of(shape, (tuple(view.shape), view.stride(), int(view.storage_offset())))
    if box is not None:
        assert elements(shape, box) == sorted(set(view.flatten().tolist()))


def test_what_loaders_do_is_told_without_looking_at_elements() -> None:
    whole = torch.arange(8 * 6 * 4).view(8, 6, 4)
    views = {
        "rows": (whole.narrow(0, 2, 4), (((2, 4),), ((0, 6),), ((0, 4),))),
        "columns": (whole[:, :, 1:3].transpose(1, 2), (((0, 8),), ((0, 6),), ((1, 2),))),
        "all, as one": (whole.view(-1), (((0, 8),), ((0, 6),), ((0, 4),))),
        "every second": (whole[::2], (((0, 1), (2, 1), (4, 1), (6, 1)), ((0, 6),), ((0, 4),))),
        "heads": (whole.view(4, 2, 6, 4)[1:3, 0], (((2, 1), (4, 1)), ((0, 6),), ((0, 4),))),
    }
    for name, (view, expected) in views.items():
        assert box_of((8, 6, 4), (tuple(view.shape), view.stride(), int(view.storage_offset()))) == expected, name


def test_a_slice_is_the_product_of_what_boxes_have() -> None:
    rows = lambda *ranges: (ranges, ((0, 4),))  # noqa: E731
    assert slice_of((8, 4), []) == NOT_HELD
    assert slice_of((8, 4), [rows((0, 8))]) == WHOLE
    assert slice_of((8, 4), [rows((6, 1)), rows((1, 2)), rows((3, 1))]) == Slice.along(0, ((1, 3), (6, 1)))
    assert slice_of((8, 4), [rows()]) == Slice.along(0, ())
    both = slice_of((8, 4), [(((0, 2),), ((0, 2),)), (((4, 2),), ((2, 1),))])
    assert both == Slice.of({0: ((0, 2), (4, 2)), 1: ((0, 3),)})


def test_ranges_that_touch_are_one_and_order_does_not_count() -> None:
    assert joined([(4, 2), (0, 2), (2, 1), (5, 4), (12, 0)]) == ((0, 3), (4, 5))
    part, other = Slice.along(0, ((4, 2), (0, 4))), Slice.along(0, ((0, 6),))
    assert same_elements([part], [other], (8, 4))
    assert same_elements([WHOLE], [Slice.along(1, ((0, 4),))], (8, 4))
    assert not same_elements([part], [Slice.along(1, ((0, 6),))], (8, 6))
    assert not same_elements([part], [NOT_HELD], (8, 4))
