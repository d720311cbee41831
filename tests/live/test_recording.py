"""What a recording says of random loads: a change by its views makes the memory that a load of the change makes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tensor_operations import Operation, copies, views
from torch import nn

from relayout.core.slices import Slice
from relayout.engines.global_tensor import GlobalTensor, Usage
from relayout.live.recording import Recording, SliceLocations

Tensors = dict[str, torch.Tensor]
Steps = list[Operation]
After = Callable[[nn.Module], object]


def _scale(layer: nn.Module) -> None:
    layer.weight.data.mul_(2)


def _pack(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(layer.weight.data.flatten().flip(0).clone(), requires_grad=False)


def _derive(layer: nn.Module) -> None:
    layer.register_buffer("derived", layer.weight.data.double() + 1)


def _wrap_again(layer: nn.Module) -> None:
    layer.weight = nn.Parameter(layer.weight.data, requires_grad=False)


def _compute_outside(layer: nn.Module) -> None:
    layer.register_buffer("outside", torch.from_numpy(layer.weight.data.numpy().copy()))


@torch.compile(backend="eager")
def _doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def _compute_compiled(layer: nn.Module) -> None:
    layer.register_buffer("compiled", _doubled(layer.weight.data))


LIBRARY = torch.library.Library("relayout_recording", "DEF")
LIBRARY.define("bytes_of(Tensor tensor) -> int[]")


def _bytes_of(tensor: torch.Tensor) -> list[int]:
    memory = tensor.untyped_storage()
    return list(ctypes.string_at(memory.data_ptr(), memory.nbytes()))


# To torch a composition of other operations, as those of vLLM that have one implementation for all devices.
LIBRARY.impl("bytes_of", _bytes_of, "CompositeImplicitAutograd")


def _compute_in_an_operation(layer: nn.Module) -> None:
    layer.register_buffer("bytes", torch.tensor(torch.ops.relayout_recording.bytes_of(layer.weight.data)))


AFTER: list[After] = [
    *(lambda layer: None, _wrap_again, _scale, _pack, _derive, _compute_outside),
    _compute_compiled,
    _compute_in_an_operation,
]


def run(operations: Steps, tensor: torch.Tensor) -> torch.Tensor:
    for _, operation in operations:
        tensor = operation(tensor)
    return tensor


@st.composite
def slices(draw: st.DrawFn) -> tuple[list[int], Steps, bool]:
    """The shape of a slice, what a loader does with it, and whether it is cut for two ranks."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    is_cut = draw(st.booleans())
    tensor, steps = torch.zeros(shape), []
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from([views, views, views, copies]))
        step = draw(kind(tuple(tensor.shape)))
        with suppress(IndexError, RuntimeError):  # No operation on this tensor.
            tensor = step[1](tensor)
            steps.append(step)
    return shape, steps, is_cut


class Model(nn.Module):
    """A layer for each slice, or one for two, with room for what the loader makes of it."""

    def __init__(self, plan: Any) -> None:
        super().__init__()
        self.plan = plan
        for number, (_, layer, shape) in enumerate(plan.indices):
            if not hasattr(self, layer):
                same = [size for _, other, size in plan.indices if other == layer]
                rows = sum(size.numel() for size in same)
                made = nn.Module()
                made.weight = nn.Parameter(torch.full((rows + 3,), -1, dtype=torch.int32), requires_grad=False)
                setattr(self, layer, made)
            assert shape is not None, number

    def load_weights(self, given: Iterator[tuple[str, torch.Tensor]]) -> None:
        offsets: dict[str, int] = {}
        starts = {}
        for name, layer, shape in self.plan.indices:
            starts[name] = offsets.setdefault(layer, 0)
            offsets[layer] += shape.numel()
        for name, tensor in given:
            steps, layer, shape = self.plan.of(name)
            made = run(steps, tensor)
            part = getattr(self, layer).weight.data[starts[name] : starts[name] + shape.numel()]
            part.view(shape).copy_(made)
        for layer in offsets:
            getattr(self, layer).weight.data[offsets[layer] :].fill_(0)

    def process(self) -> None:
        for layer, after in self.plan.after.items():
            AFTER[after](getattr(self, layer))


class Plan:
    """A random load."""

    def __init__(self, drawn: list[tuple[list[int], Steps, bool]], shared: bool, after: list[int]) -> None:
        self.drawn = {f"s{number}": one for number, one in enumerate(drawn)}
        self.indices = []
        for number, (name, (shape, steps, _)) in enumerate(self.drawn.items()):
            made = run(steps, torch.zeros(shape))
            layer = f"layer{0 if shared and number == 1 else number}"
            self.indices.append((name, layer, made.shape))
        layers = dict.fromkeys(layer for _, layer, _ in self.indices)
        self.after = dict(zip(layers, after, strict=False))

    def of(self, name: str) -> tuple[Steps, str, torch.Size]:
        [(layer, shape)] = [(layer, shape) for one, layer, shape in self.indices if one == name]
        return self.drawn[name][1], layer, shape


def copied(whole: torch.Tensor, index: Any) -> torch.Tensor:
    return whole[index].clone()


def given_to_engine(plan: Plan, values: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Global tensors of what holds everything but the last part, or whole tensors."""
    for name, (shape, _, is_cut) in plan.drawn.items():
        whole = values[name]
        if is_cut and shape[0] > 1:
            held = Slice.along(0, ((0, shape[0] - 1),))
            usage = Usage()
            read = partial(copied, whole)
            yield name, GlobalTensor.of(name, whole[:-1].clone(), shape, 0, held.ranges or (), read, usage)
        else:
            yield name, whole.clone()


def loaded(plan: Plan, values: Tensors) -> tuple[Model, SliceLocations]:
    model = Model(plan)
    recording = Recording(model)
    with recording:
        model.load_weights(recording.given(given_to_engine(plan, values)))
        model.process()
    return model, recording.finish()


def memory_of(model: nn.Module, number: int) -> torch.Tensor:
    for tensor in (*model.parameters(), *model.buffers()):
        storage = tensor.untyped_storage()
        if storage._cdata == number:
            flat = torch.empty(0, dtype=torch.int32)
            return flat.set_(storage, 0, (storage.nbytes() // 4,), (1,))
    raise AssertionError("the model has no such memory")


@pytest.mark.filterwarnings("ignore:tensor .* needs elements")
@settings(max_examples=300)
@given(
    drawn=st.lists(slices(), min_size=1, max_size=3),
    shared=st.booleans(),
    after=st.lists(st.integers(0, len(AFTER) - 1), min_size=3, max_size=3),
    chosen=st.sets(st.integers(0, 2), min_size=1),
)
def test_what_is_not_loaded_again_is_what_a_load_would_make_of_it(
    drawn: Any, shared: bool, after: list[int], chosen: set[int]
) -> None:
    plan = Plan(drawn, shared, after)
    old = {name: torch.randint(0, 2**30, one[0], dtype=torch.int32) for name, one in plan.drawn.items()}
    model, recorded = loaded(plan, old)
    changed = {f"s{number}" for number in chosen} & set(old)
    new = {name: value ^ (7 if name in changed else 0) for name, value in old.items()}
    expected, _ = loaded(plan, new)
    for name in changed & set(recorded.views):
        held = dict(given_to_engine(plan, new))[name]
        local = held._memory.local if isinstance(held, GlobalTensor) else held
        for view in recorded.views[name]:
            memory_of(model, view.memory).as_strided(*view.of_memory).copy_(local.view(-1).as_strided(*view.of_slice))
    again = recorded.modules_of(changed)
    for name, layer in model.named_children():
        if again is not None and name not in again:
            other = getattr(expected, name)
            for key, value in layer.state_dict().items():
                assert torch.equal(value, other.state_dict()[key]), (name, key)


def simple(after: int = 0, *operations: Operation, shape: tuple[int, ...] = (4, 3)) -> SliceLocations:
    plan = Plan([(list(shape), list(operations), False)], False, [after])
    return loaded(plan, {"s0": torch.arange(24, dtype=torch.int32)[: 4 * 3].view(shape)})[1]


@pytest.mark.parametrize("after", [0, 1])
def test_what_is_copied_and_left_as_it_is_has_views(after: int) -> None:
    recorded = simple(after, ("rows", lambda t: t[1:3]), ("t", lambda t: t.t()))
    assert set(recorded.views) == {"s0"}
    assert not recorded.reloaded
    assert recorded.modules_of(["s0"]) == frozenset()


@pytest.mark.parametrize(
    "after",
    [2, 3, 4, 5, 6, 7],
    ids=["scaled", "packed", "derived", "computed outside of torch", "compiled", "computed in an operation"],
)
def test_what_the_engine_makes_something_of_is_loaded_again_with_its_layer(after: int) -> None:
    recorded = simple(after)
    assert not recorded.views
    assert recorded.reloaded == {"s0": frozenset({"layer0"})}
    assert recorded.modules_of(["s0"]) == {"layer0"}
    assert recorded.slices_of(frozenset({"layer0"})) == {"s0"}


@pytest.mark.parametrize(
    "operation",
    [("flip", lambda t: t.flip(0)), ("float", lambda t: t.float()), ("expand", lambda t: t.expand(2, *t.shape))],
    ids=lambda one: one[0],
)
def test_what_is_no_copy_of_elements_is_loaded_again(operation: Operation) -> None:
    assert simple(0, operation).reloaded == {"s0": frozenset({"layer0"})}


def test_what_is_filled_by_other_code_than_in_a_reload_is_fixed() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("by_loader", "directly")})

    def loader(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        parameter.data.copy_(tensor)

    recording = Recording(model, lambda parameter: loader.__code__)
    with recording:
        for name, tensor in recording.given((name, torch.ones(2, 2)) for name in model):
            if name == "by_loader":
                loader(model[name].weight, tensor)
            else:
                model[name].weight.data.copy_(tensor)
    recorded = recording.finish()
    assert set(recorded.views) == {"by_loader", "directly"}
    assert recorded.fixed == {"directly"}


def test_what_another_thread_does_with_memory_meanwhile_is_its_own_affair() -> None:
    model = nn.Linear(2, 2, bias=False)
    before = {name: getattr(torch.Tensor, name) for name in ("data_ptr", "numpy", "__dlpack__", "__array__")}
    recording = Recording(model)
    with recording:
        for _, tensor in recording.given([("w", torch.ones(2, 2))]):
            model.weight.data.copy_(tensor)
        other = Thread(target=model.weight.data.numpy, daemon=True)
        other.start()
        other.join()
        assert set(recording.finish().views) == {"w"}
        model.weight.data.numpy()
    assert set(recording.finish().reloaded) == {"w"}
    assert {name: getattr(torch.Tensor, name) for name in before} == before
    assert "data_ptr" not in vars(torch.Tensor)


def test_a_copy_from_the_same_place_changes_nothing() -> None:
    model = nn.Linear(2, 2, bias=False)
    recording = Recording(model)
    with recording:
        for _, tensor in recording.given([("w", torch.ones(2, 2))]):
            model.weight.data.copy_(tensor)
        model.weight.data.copy_(model.weight.data)
        assert set(recording.finish().views) == {"w"}
        model.weight.data[0].copy_(model.weight.data[1])
    assert set(recording.finish().reloaded) == {"w"}


def test_what_is_given_to_a_pool_of_threads_is_recorded() -> None:
    """As SGLang's loaders of experts do; work that fails still fails where its result is asked for."""
    model = nn.Linear(4, 2, bias=False)
    before = vars(ThreadPoolExecutor)["submit"]

    def load(row: int, tensor: torch.Tensor) -> None:
        model.weight.data[row].copy_(tensor)

    recording = Recording(model)
    with recording, ThreadPoolExecutor(2) as pool:
        rows = [torch.full((4,), row) * 1.0 for row in range(2)]
        jobs = [pool.submit(load, int(name), tensor) for name, tensor in recording.given(zip("01", rows, strict=True))]
        jobs.append(pool.submit(load, 5, rows[0]))
    assert [job.exception() is None for job in jobs] == [True, True, False]
    assert [view.target for view in (*recording.finish().views["0"], *recording.finish().views["1"])] == [0, 4]
    assert vars(ThreadPoolExecutor)["submit"] is before


def test_a_thread_that_may_write_weights_leaves_nothing_known() -> None:
    model = nn.Linear(2, 2, bias=False)
    recording = Recording(model)
    with recording:
        for _, tensor in recording.given([("w", torch.ones(2, 2))]):
            other = Thread(target=model.weight.data.copy_, args=(tensor,))
            other.start()
            other.join()
    found = recording.finish()
    assert (dict(found.views), dict(found.reloaded)) == ({}, {"w": frozenset()})
    assert found.modules_of(["w"]) is None


def test_a_parameter_that_is_loaded_with_what_is_made_of_others_lets_everything_be_loaded_again() -> None:
    """As the score of a reranker, which vLLM makes of rows of a head that it removes again."""
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("other", "score")})

    def loader(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
        parameter.data.copy_(tensor)

    recording = Recording(model, lambda parameter: loader.__code__)
    with recording:
        for name, tensor in recording.given((name, torch.ones(2, 2)) for name in ("other", "head")):
            head = torch.empty(2, 2)
            loader(model["other"].weight if name == "other" else head, tensor)
        loader(model["score"].weight, head[[0]] - head[[1]])
    found = recording.finish()
    assert (dict(found.views), dict(found.reloaded)) == ({}, {"other": frozenset(), "head": frozenset()})
