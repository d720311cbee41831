"""What reaches a model's memory is what was loaded, by whatever way it came there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from relayout.core.slices import NOT_HELD, WHOLE, Slice
from relayout.errors import PlanError
from relayout.observe.stand_ins import WithoutMemory
from relayout.observe.tracing import Observer


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(8, 6))
        self.register_buffer("table", torch.empty(100))
        self.beside = torch.empty(100)


def loaded(load: Callable[[Model, torch.Tensor], object], shape: tuple[int, ...] = (16, 6)) -> Slice:
    model = Model()
    observer = Observer(model)
    with torch.no_grad():
        load(model, observer.probe("w", shape, torch.float32))
    observer.finish()
    return observer.loaded("w")


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
    ],
)  # fmt: skip
def test_what_is_copied_into_the_model_is_loaded(
    load: Callable[[Model, torch.Tensor], object], expected: Slice
) -> None:
    assert loaded(load) == expected


def test_tensors_that_are_joined_are_told_apart() -> None:
    model = Model()
    observer = Observer(model)
    first, other = observer.probe("a", (4, 6), torch.float32), observer.probe("b", (9, 6), torch.float32)
    with torch.no_grad():
        model.weight.copy_(torch.cat([other[3:8], first[1:]]))
    assert (observer.loaded("a"), observer.loaded("b")) == (Slice.along(0, ((1, 3),)), Slice.along(0, ((3, 5),)))


def test_of_what_is_joined_to_others_a_rank_may_take_nothing_and_yet_want_to_see_it() -> None:
    model = Model()
    observer = Observer(model)
    first, other = observer.probe("a", (8, 6), torch.float32), observer.probe("b", (9, 6), torch.float32)
    with torch.no_grad():
        model.weight.copy_(torch.cat([first, other])[:8])
    assert (observer.loaded("a"), observer.loaded("b")) == (WHOLE, Slice.along(0, ()))


@pytest.mark.parametrize(
    "load",
    [
        lambda model, w: torch.empty(16, 6).copy_(w),  # It might come from there into the model, unseen.
        lambda model, w: w.sum().item(),
        lambda model, w: model.weight.copy_(w[:8] @ torch.ones(6, 6)),
    ],
)
def test_what_cannot_be_followed_is_an_error(load: Callable[[Model, torch.Tensor], object]) -> None:
    with pytest.raises(PlanError, match="w"):
        loaded(load)


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
