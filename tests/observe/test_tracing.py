"""What reaches a model's memory, by whatever way, is what was loaded; expected are elements of tensors of numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tensor_operations import copies, views

from relayout.core.slices import NOT_HELD, WHOLE, Slice
from relayout.errors import PlanError
from relayout.observe.stubs import WithoutMemory
from relayout.observe.tracing import NOTHING, Box, LoadRecorder, Probe, box_of, slice_of


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(8, 6))
        self.register_buffer("table", torch.empty(100))
        self.beside = torch.empty(100)


def recorder_of(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[Model, LoadRecorder, list[Probe]]:
    """A model, and probes `a`, `b` ... of these shapes."""
    model = Model()
    recorder = LoadRecorder(model)
    return model, recorder, [recorder.probe(name, shape, dtype) for name, shape in zip("abc", shapes, strict=False)]


@given(st.data())
def test_views_and_rearrangements_are_followed_element_by_element(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    _, recorder, [_, probe] = recorder_of((5,), shape, dtype=torch.int64)
    numbers = torch.arange(5, 5 + prod(shape)).view(shape)
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
    assert torch.equal(recorder.numbers(probe), numbers)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda t: t.float(), [0, 1, 2, 3]),
        (lambda t: -torch.exp(t.float()), [0, 1, 2, 3]),
        (lambda t: t * torch.ones(2, 1), [0, 1, 2, 3]),
        (lambda t: torch.nn.functional.pad(t, (0, 1)), [0, 1, NOTHING, 2, 3, NOTHING]),
        (lambda t: torch.cat([t, torch.zeros(1, 2, dtype=torch.float16)]), [0, 1, 2, 3, NOTHING, NOTHING]),
        (lambda t: t.view(torch.int16).view(torch.float16), [0, 1, 2, 3]),
        (lambda t: t[1].zero_(), [NOTHING, NOTHING]),
        (lambda t: t.mul_(2), [0, 1, 2, 3]),
        (lambda t: t.copy_(t.flip(0).clone()), [2, 3, 0, 1]),
        (lambda t: [t.mul_(1), t * 2, t.zero_()][1], [0, 1, 2, 3]),
    ],
)
def test_what_treats_each_element_by_itself_is_followed(
    function: Callable[[torch.Tensor], torch.Tensor], expected: list[int]
) -> None:
    _, recorder, [probe] = recorder_of((2, 2), dtype=torch.float16)
    made = function(probe)
    assert isinstance(made, Probe)
    assert recorder.numbers(made).flatten().tolist() == expected


@pytest.mark.parametrize(
    ("function", "operation"),
    [
        (lambda t: float(t[0, 0]), "_local_scalar_dense"),
        (lambda t: t[0, 0].item(), "item"),
        (lambda t: t[0, 0].clone().item(), "item"),
        (lambda t: t.tolist(), "tolist"),
        (lambda t: t.numpy(), "numpy"),
        (lambda t: t.data_ptr(), "data_ptr"),
        (lambda t: t.sum(), "sum"),
        (lambda t: t + t, "add"),
        (lambda t: t @ torch.ones(2, 2), "mm"),
        (lambda t: torch.zeros(2, 2).add_(t), "add_"),
    ],
)
def test_what_needs_values_is_an_error_that_names_the_tensor(
    function: Callable[[torch.Tensor], object], operation: str
) -> None:
    _, _, [probe] = recorder_of((2, 2))
    with pytest.raises(PlanError, match=f"'a'.*{operation} needs its values"):
        function(probe)


def test_elements_of_another_size_cannot_be_numbered() -> None:
    _, recorder, [probe] = recorder_of((2, 2), dtype=torch.float16)
    bytes_of = probe.view(torch.uint8)
    assert isinstance(bytes_of, Probe)
    with pytest.raises(PlanError, match=r"is used as torch.uint8, stored as torch.float16"):
        recorder.numbers(bytes_of)


def test_a_copy_into_memory_that_is_not_the_models_is_an_error() -> None:
    _, _, [probe] = recorder_of((16, 6))
    with pytest.raises(PlanError, match=r"'a'.*memory that is not the model's"):
        torch.empty(16, 6).copy_(probe)  # It might come from there into the model, unseen.


ROWS, TWO, OTHER = (Slice.along(0, ranges) for ranges in (((4, 8),), ((2, 4), (10, 4)), ((0, 4), (8, 4))))


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (lambda model, w: model.weight.copy_(w.narrow(0, 4, 8)), ROWS),
        (lambda model, w: model.weight.data.copy_(w[4:12].float()), ROWS),
        (lambda model, w: model.table[:12].copy_(w[0:2].reshape(-1)), Slice.along(0, ((0, 2),))),
        (lambda model, w: model.beside[:6].copy_(w[3]), Slice.along(0, ((3, 1),))),
        (lambda model, w: [model.weight[:4].copy_(w[2:6]), model.weight[4:].copy_(w[10:14])], TWO),
        (lambda model, w: model.weight.copy_(w.view(4, 4, 6).flip(1)[::2].reshape(8, 6)), OTHER),
        (lambda model, w: model.weight.copy_(torch.cat([w[12:], torch.zeros(4, 6)])), Slice.along(0, ((12, 4),))),
        (lambda model, w: model.weight[:2].copy_(w.t()[1:3, 6:12]), Slice.of({0: ((6, 6),), 1: ((1, 2),)})),
        (lambda model, w: setattr(model, "weight", torch.nn.Parameter(w[4:12], requires_grad=False)), ROWS),
        (lambda model, w: model.weight[:0].copy_(w[16:]), Slice.along(0, ())),
        (lambda model, w: None, NOT_HELD),
        (lambda model, w: model.weight.copy_(w.zero_()[:8]), WHOLE),
        (lambda model, w: model.weight.copy_(torch.cat([w, w.new_zeros(8, 6)])[16:]), Slice.along(0, ())),
        (lambda model, w: model.weight.copy_(torch.cat([w, w.new_zeros(8, 6)]).float()[16:]), Slice.along(0, ())),
        (lambda model, w: model.weight.copy_(torch.cat([w, w.new_zeros(8, 6)]).zero_()[16:]), WHOLE),
        (lambda model, w: [model.weight.copy_(w[4:12]), w.zero_()], ROWS),
    ],
)  # fmt: skip
def test_what_is_copied_into_the_model_is_loaded(
    load: Callable[[Model, torch.Tensor], object], expected: Slice
) -> None:
    model, recorder, [probe] = recorder_of((16, 6))
    with torch.no_grad():
        load(model, probe)
    recorder.finish()
    assert recorder.loaded("a") == expected


@pytest.mark.parametrize(
    "load",
    [
        lambda model, w, one, many: model.table[7].fill_(one.item()),
        lambda model, w, one, many: model.table.fill_(one.view(1).double().item()),
        lambda model, w, one, many: model.table.__setitem__(3, one),
        lambda model, w, one, many: model.weight.__setitem__((2, 1), many[3]),
        lambda model, w, one, many: model.weight.__setitem__(slice(2, 4), many.view(2, 2)[1, 0]),
        lambda model, w, one, many: [model.beside[i].fill_(many[i]) for i in (0, 2)],
        lambda model, w, one, many: [model.beside[0].fill_(many[1]), model.beside[1].fill_(2.0)],
        lambda model, w, one, many: [w[0, :3].fill_(many[2]), w[1:3].fill_(one.view(())), model.weight.copy_(w)],
        lambda model, w, one, many: [w[0].fill_(5.0), model.weight.copy_(w)],
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape_of_one", [(), (1,), (1, 1)])
def test_what_memory_is_filled_with_is_loaded(load: Callable[..., object], shape_of_one: tuple[int, ...]) -> None:
    """Tensors of numbers are loaded by the same operations; what then lies in the model is what was loaded."""
    shapes = ((8, 6), shape_of_one, (4,))
    model, recorder, probes = recorder_of(*shapes)
    plain, end = Model(), 1000
    numbered = []
    for shape in shapes:
        numbered.append(torch.arange(end, end + prod(shape), dtype=torch.float32).view(shape))
        end += prod(shape)
    with torch.no_grad():
        for tensor in (plain.weight, plain.table, plain.beside):
            tensor.fill_(-1)
        numbers_of = [tensor.flatten().tolist() for tensor in numbered]
        load(plain, *numbered)
        load(model, *probes)
    there = {*plain.weight.flatten().tolist(), *plain.table.tolist(), *plain.beside.tolist()}
    assert len(there) > 1
    for name, shape, numbers in zip("abc", shapes, numbers_of, strict=True):
        expected = {_box_of_element(shape, place) for place, number in enumerate(numbers) if number in there}
        assert recorder.loaded(name) == slice_of(shape, frozenset(expected)), name


def _box_of_element(shape: tuple[int, ...], place: int) -> Box:
    along = (place // prod(shape[axis + 1 :]) % size for axis, size in enumerate(shape))
    return tuple(((index, 1),) for index in along)


def test_a_mean_needs_all_elements_that_it_is_of() -> None:
    model, recorder, [a, b] = recorder_of((8, 6), (8, 6))
    model.weight.data[:2].copy_((a - a.mean())[:2])
    model.weight.data[2:4].copy_(b[2:4] - b[2:4].mean())
    assert (recorder.loaded("a"), recorder.loaded("b")) == (WHOLE, Slice.along(0, ((2, 2),)))


def test_tensors_that_are_joined_are_told_apart_and_a_rank_may_want_to_see_one_of_which_it_takes_nothing() -> None:
    model, recorder, [first, other, last] = recorder_of((4, 6), (9, 6), (3, 6))
    with torch.no_grad():
        model.weight.copy_(torch.cat([other[3:8], first[1:], last])[:8])
    loaded = [recorder.loaded(name) for name in "abc"]
    assert loaded == [Slice.along(0, ((1, 3),)), Slice.along(0, ((3, 5),)), Slice.along(0, ())]


def test_large_tensors_have_no_memory_and_small_ones_have_values() -> None:
    with WithoutMemory():
        large = [
            torch.empty(1 << 40),
            torch.zeros((1 << 20, 1 << 20)),
            torch.full((1 << 40,), 1.0),
            torch.ones(99, 1000),
        ]
        layer = torch.nn.Linear(1 << 20, 1 << 20)
        small = torch.ones(3, pin_memory=True)  # Nothing here could.
    assert all(tensor.is_meta for tensor in [*large, layer.weight])
    assert small.tolist() == [1, 1, 1]


def elements(shape: tuple[int, ...], box: Box) -> list[int]:
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    along = [[i for start, length in ranges for i in range(start, start + length)] for ranges in box]
    return sorted(sum(i * s for i, s in zip(place, strides, strict=True)) for place in itertools.product(*along))


@given(st.data())
def test_a_view_has_the_elements_of_its_box(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
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
    def product(*boxes: Box) -> Slice:
        return slice_of((8, 4), frozenset(boxes))

    rows = lambda *ranges: (ranges, ((0, 4),))  # noqa: E731
    assert product() == NOT_HELD
    assert product(rows((0, 8))) == WHOLE
    assert product(rows((6, 1)), rows((1, 2)), rows((3, 1))) == Slice.along(0, ((1, 3), (6, 1)))
    assert product(rows()) == Slice.along(0, ())
    both = product((((0, 2),), ((0, 2),)), (((4, 2),), ((2, 1),)))
    assert both == Slice.of({0: ((0, 2), (4, 2)), 1: ((0, 3),)})
