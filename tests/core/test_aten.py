"""relayout.core.aten: what torch's operations do to geometry, compared with torch's own tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from relayout.core.aten import (
    BY_INDEX,
    MOVES,
    SHAPED,
    aten,
    call_with,
    geometry_of,
    is_view,
    made_like,
    name_of,
    row_major,
    without_memory,
    written_by,
)


class Called(TorchDispatchMode):
    """Collects the operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operations.append(func)
        return func(*args, **kwargs or {})


def operation_of(call: Callable[[torch.Tensor], object]) -> object:
    """The first operation of a call with a matrix."""
    matrix = torch.arange(12.0).reshape(3, 4)
    with Called() as called:
        call(matrix)
    return called.operations[0]


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: x[1:], True),
        (lambda x: x.t(), True),
        (lambda x: x.view(4, 3), True),
        (lambda x: x.unsqueeze(0), True),
        (lambda x: x.detach(), True),
        (lambda x: x.view(torch.int32), False),
        (lambda x: x.add_(1), False),
        (lambda x: x + 1, False),
        (lambda x: x.clone(), False),
        (lambda x: torch.equal(x, x), False),
    ],
)
def test_views_are_what_shares_the_memory_and_dtype(call: Callable[[torch.Tensor], object], expected: bool) -> None:
    assert is_view(operation_of(call)) == expected


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: x.add_(1), ("self",)),
        (lambda x: x.copy_(x), ("self",)),
        (lambda x: torch.add(x, x, out=x), ("out",)),
        (lambda x: x + 1, ()),
        (lambda x: x[1:], ()),
    ],
)
def test_arguments_that_are_written_to_are_named(call: Callable[[torch.Tensor], object], expected: object) -> None:
    assert written_by(operation_of(call)) == expected


def test_operations_have_the_names_of_torch() -> None:
    assert (name_of(aten.index_select.default), name_of(aten.add_.Tensor)) == ("index_select", "add_")
    assert BY_INDEX <= MOVES
    assert not MOVES & SHAPED


@given(st.lists(st.integers(0, 4), max_size=4))
def test_a_dense_tensor_has_row_major_strides(shape: list[int]) -> None:
    assert row_major(shape) == torch.empty(shape).stride()


def test_views_of_what_has_no_memory_have_the_geometry_of_views() -> None:
    tensor = torch.arange(48.0).reshape(6, 8)[1:, ::2].t()
    empty = without_memory(tensor)
    assert (empty.device.type, empty.dtype, geometry_of(empty)) == ("meta", tensor.dtype, geometry_of(tensor))
    assert geometry_of(empty[1:3, 2:]) == geometry_of(tensor[1:3, 2:])


@pytest.mark.parametrize(
    ("func", "rest"),
    [
        (aten.empty_like.default, ()),
        (aten.zeros_like.default, ()),
        (aten.new_zeros.default, ([2, 2],)),
        (aten.full_like.default, (3.0,)),
    ],
)
def test_what_is_made_like_a_tensor_is_on_its_device(func: object, rest: tuple[object, ...]) -> None:
    tensor = torch.ones(2, 2, dtype=torch.bfloat16)
    found, expected = made_like(tensor, func, rest, {}), func(tensor, *rest)  # type: ignore[operator]
    assert (found.device, found.dtype, found.shape) == (expected.device, expected.dtype, expected.shape)
    assert made_like(tensor, aten.is_pinned.default, (), {}) is False


def test_tensors_of_a_kind_are_replaced_wherever_they_are_among_the_arguments() -> None:
    one = torch.nn.Parameter(torch.ones(2))
    found = call_with(
        torch.nn.Parameter, lambda tensor: tensor.data + 1, aten.cat.default, ([one, torch.zeros(2)],), {"dim": 0}
    )
    assert found.tolist() == [2, 2, 0, 0]
