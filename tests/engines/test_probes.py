"""A probe shows which elements of a tensor are copied to where: expected are the elements of a tensor of numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tensor_operations import copies, views

from relayout.engines.probes import NOTHING, Probe, Tracer
from relayout.errors import PlanError


def taken(tracer: Tracer, probe: torch.Tensor) -> torch.Tensor:
    """The numbers of the elements that a copy of the probe has."""
    target = torch.empty(probe.shape, dtype=probe.dtype)
    target.copy_(probe)
    assert tracer.copies[-1].target is target
    return tracer.numbers(tracer.copies[-1].source)


@given(st.data())
def test_views_and_rearrangements_are_followed_element_by_element(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    tracer = Tracer()
    tracer.probe("before", [5], torch.int64)
    numbers = torch.arange(5, 5 + math.prod(shape)).view(shape)
    probe: torch.Tensor = tracer.probe("w", shape, torch.int64)
    for _ in range(data.draw(st.integers(1, 4))):
        name, function = data.draw(st.one_of(views(probe.shape), copies(probe.shape)))
        try:
            expected = function(numbers)
        except (RuntimeError, IndexError):
            continue
        if expected.numel() > 5000:
            break
        numbers, probe = expected, function(probe)
        assert isinstance(probe, Probe), name
        assert (probe.shape, probe.dtype) == (numbers.shape, numbers.dtype), name
    assert torch.equal(taken(tracer, probe), numbers)


def test_a_view_that_is_copied_has_the_strides_of_the_whole_tensor() -> None:
    tracer = Tracer()
    probe = tracer.probe("w", (8, 6), torch.bfloat16)
    target = torch.empty(9, 3, dtype=torch.bfloat16)
    target[1:5] = probe.narrow(0, 4, 4)[:, 3:]
    (copy,) = tracer.copies
    assert copy.is_view
    assert (copy.source.memory.name, copy.source.stride(), copy.source.storage_offset()) == ("w", (6, 1), 27)
    assert copy.target.data_ptr() == target[1].data_ptr()


def test_tensors_that_are_joined_keep_their_numbers() -> None:
    tracer = Tracer()
    first, second = tracer.probe("a", (2, 3), torch.float16), tracer.probe("b", (1, 3), torch.float16)
    joined = torch.cat([second, first, torch.zeros(1, 3, dtype=torch.float16)])
    assert tracer.first("b") == 6
    assert taken(tracer, joined).tolist() == [[6, 7, 8], [0, 1, 2], [3, 4, 5], [NOTHING] * 3]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda t: t.float(), [0, 1, 2, 3]),
        (lambda t: -torch.exp(t.float()), [0, 1, 2, 3]),
        (lambda t: t * torch.ones(2, 1), [0, 1, 2, 3]),
        (lambda t: torch.nn.functional.pad(t, (0, 1)), [0, 1, NOTHING, 2, 3, NOTHING]),
        (lambda t: t.view(torch.int16).view(torch.float16), [0, 1, 2, 3]),
        (lambda t: t[1].zero_(), [NOTHING, NOTHING]),
        (lambda t: t.mul_(2), [0, 1, 2, 3]),
        (lambda t: t.copy_(t.flip(0).clone()), [2, 3, 0, 1]),
    ],
)
def test_what_treats_each_element_by_itself_is_followed(
    function: Callable[[torch.Tensor], torch.Tensor], expected: list[int]
) -> None:
    tracer = Tracer()
    made = function(tracer.probe("w", (2, 2), torch.float16))
    assert taken(tracer, made).flatten().tolist() == expected


def test_what_is_written_later_is_not_part_of_a_copy() -> None:
    tracer = Tracer()
    probe = tracer.probe("w", (2, 2), torch.float16)
    before = taken(tracer, probe[1]).tolist()
    probe.zero_()
    assert before == tracer.numbers(tracer.copies[0].source).tolist() == [2, 3]
    assert taken(tracer, probe[1]).tolist() == [NOTHING, NOTHING]
    probe.copy_(tracer.probe("v", (2, 2), torch.float16))
    assert tracer.numbers(tracer.copies[1].source).tolist() == [NOTHING, NOTHING]


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (lambda t: float(t[0, 0]), "_local_scalar_dense"),
        (lambda t: t.tolist(), "tolist"),
        (lambda t: t.numpy(), "numpy"),
        (lambda t: t.data_ptr(), "data_ptr"),
        (lambda t: t.sum(), "sum"),
        (lambda t: t + t, "add"),
        (lambda t: torch.zeros(2, 2).add_(t), "add_"),
    ],
)
def test_what_needs_values_is_an_error_that_names_the_tensor(
    function: Callable[[torch.Tensor], object], operation: str
) -> None:
    probe = Tracer().probe("w", (2, 2), torch.float32)
    with pytest.raises(PlanError, match=f"'w'.*{operation} needs its values"):
        function(probe)


def test_elements_of_another_size_cannot_be_numbered() -> None:
    tracer = Tracer()
    with pytest.raises(PlanError, match=r"is used as torch.uint8, stored as torch.float16"):
        taken(tracer, tracer.probe("w", (2, 2), torch.float16).view(torch.uint8))
