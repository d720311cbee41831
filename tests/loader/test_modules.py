"""`load(into=module)` fills the memory that a torch module computes with, or is an error that names the tensor."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import relayout
from relayout.errors import PlanError

WANTED = torch.arange(6.0).reshape(2, 3)
Made = tuple[torch.nn.Module, Callable[[], torch.Tensor]]
"""A module, and what returns the weight that it computes with."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with one tensor, `weight`."""
    save_file({"weight": WANTED}, tmp_path / "model.safetensors")
    return tmp_path


def a_linear() -> torch.nn.Linear:
    return torch.nn.Linear(3, 2, bias=False)


def with_hook(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Made]:
    """Make a module that changes what its state dict has of each tensor."""

    def made() -> Made:
        model = a_linear()

        def hook(module: torch.nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: object) -> None:
            state[f"{prefix}weight"] = change(state[f"{prefix}weight"])

        model.register_state_dict_post_hook(hook)
        return model, lambda: model.weight

    return made


class Packed(torch.nn.Module):
    """Keeps its weight transposed, and has it in the state dict as checkpoints have it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("packed", torch.zeros(3, 2), persistent=False)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.get_buffer("packed").t().contiguous()


class Seen(Packed):
    """The same, with a view of its memory in the state dict."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.get_buffer("packed").t()


class Whole(torch.nn.Module):
    """Gives a state dict that has nothing to do with its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 3))

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {"weight": torch.zeros(2, 3)}


class Loads(torch.nn.Linear):
    """Computes with a copy that it makes when a state dict is loaded."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.copy = self.weight.detach().clone()


class LoadsAll(torch.nn.Linear):
    def load_state_dict(self, *arguments: Any, **options: Any) -> Any:
        return super().load_state_dict(*arguments, **options)


def after_loads() -> Made:
    model = a_linear()
    model.register_load_state_dict_post_hook(lambda module, keys: None)
    return model, lambda: model.weight


def of(kind: Callable[..., Any], *sizes: int, **options: bool) -> Callable[[], Made]:
    def made() -> Made:
        model = kind(*sizes, **options)
        return model, lambda: model.packed.t() if isinstance(model, Packed) else model.weight

    return made


BIASED = {"bias": False}


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (with_hook(torch.clone), "tensor 'weight': into: state_dict() has a copy, and not the memory of the model"),
        (with_hook(lambda tensor: tensor * 1), "tensor 'weight': into: state_dict() has a copy"),
        (of(Packed), "tensor 'weight': into: state_dict() has a copy"),
        (of(Whole), "tensor 'weight': into: state_dict() has a copy"),
        (of(Loads, 3, 2, **BIASED), "into: a Loads runs code of its own in load_state_dict"),
        (of(LoadsAll, 3, 2, **BIASED), "into: a LoadsAll runs code of its own in load_state_dict"),
        (after_loads, "into: a Linear runs code of its own in load_state_dict"),
    ],
)
def test_a_module_that_computes_with_other_memory_is_refused(folder: Path, make: Callable[[], Made], what: str) -> None:
    model, weight = make()
    before = weight().detach().clone()
    with pytest.raises(PlanError, match=re.escape(what)) as caught:
        relayout.load(folder, into=model)
    assert "model.load_state_dict()" in str(caught.value)
    assert torch.equal(weight(), before)


def test_the_module_that_is_refused_is_named(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.ReLU(), Loads(3, 2, bias=False))
    save_file({"1.weight": WANTED}, tmp_path / "model.safetensors")
    with pytest.raises(PlanError, match=r"the Loads '1' runs code of its own in load_state_dict"):
        relayout.load(tmp_path, into=model)


@pytest.mark.parametrize("make", [with_hook(lambda tensor: tensor[:, :]), of(Seen)])
def test_views_of_the_memory_of_a_module_are_filled(folder: Path, make: Callable[[], Made]) -> None:
    model, weight = make()
    relayout.load(folder, into=model)
    assert torch.equal(weight(), WANTED)


def test_what_names_leave_out_is_not_judged(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"plain": a_linear(), "copied": with_hook(torch.clone)()[0]})
    save_file({"plain.weight": WANTED, "copied.weight": WANTED.clone()}, tmp_path / "model.safetensors")
    relayout.load(tmp_path, into=model, names="plain.*")
    assert torch.equal(model.get_parameter("plain.weight"), WANTED)
    with pytest.raises(PlanError, match=r"tensor 'copied\.weight': into: state_dict\(\) has a copy"):
        relayout.load(tmp_path, into=model)


def test_a_module_shared_by_two_names_is_filled_from_both(tmp_path: Path) -> None:
    one = a_linear()
    model = torch.nn.ModuleDict({"one": one, "other": one})
    save_file({"one.weight": WANTED, "other.weight": WANTED.clone()}, tmp_path / "model.safetensors")
    relayout.load(tmp_path, into=model)
    assert torch.equal(one.weight, WANTED)


class WithState(torch.nn.Linear):
    """Has extra state that is no tensor, as quantizing layers have."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: object) -> None:
        raise AssertionError


def test_extra_state_that_is_no_tensor_is_in_no_checkpoint(folder: Path) -> None:
    model = WithState(3, 2, bias=False)
    relayout.load(folder, into=model)
    assert torch.equal(model.weight, WANTED)


@pytest.mark.parametrize("normed", [torch.nn.utils.weight_norm, torch.nn.utils.parametrizations.weight_norm])
def test_a_weight_that_is_computed_from_parameters_is_filled_through_them(tmp_path: Path, normed: Any) -> None:
    source, model = normed(a_linear()), normed(a_linear())
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    relayout.load(tmp_path, into=model)
    ones = torch.ones(3)
    assert torch.equal(model(ones), source(ones))


def test_a_scripted_module_is_filled(folder: Path) -> None:
    model = torch.jit.trace(a_linear(), torch.ones(3))
    relayout.load(folder, into=model)
    assert torch.equal(model(torch.ones(3)), WANTED.sum(1))


def test_buffers_that_are_in_no_state_dict_are_left(folder: Path) -> None:
    model = a_linear()
    model.register_buffer("frequencies", torch.ones(4), persistent=False)
    relayout.load(folder, into=model)
    assert torch.equal(model.get_buffer("frequencies"), torch.ones(4))


def test_an_optimizer_is_no_module(folder: Path) -> None:
    optimizer: Any = torch.optim.SGD(a_linear().parameters(), lr=0.1)
    with pytest.raises(PlanError, match=r"into is a SGD, expected tensors by name, or a torch\.nn\.Module"):
        relayout.load(folder, into=optimizer)


def test_wrapped_modules_have_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    save_file({"0.weight": WANTED, "1.weight": WANTED + 6, "2.weight": WANTED + 12}, tmp_path / "model.safetensors")
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        for wrap in (torch.nn.Identity, DistributedDataParallel, DataParallel, torch.compile):
            layers = [a_linear() for _ in range(3)]
            model = torch.nn.Sequential(layers[0], torch.compile(layers[1]), checkpoint_wrapper(layers[2]))
            found = relayout.load(tmp_path, into=model if wrap is torch.nn.Identity else wrap(model))
            assert list(found) == ["0.weight", "1.weight", "2.weight"]
            for number, layer in enumerate(layers):
                assert torch.equal(layer.weight, WANTED + 6 * number)
    finally:
        torch.distributed.destroy_process_group()
