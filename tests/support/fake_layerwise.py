"""Fakes of vLLM's `model_loader.reload.layerwise`, and of layers that it loads again: what relayout relies on there.

Parameters move to the meta device; loaders are wrapped, and count elements on it; a layer whose count is full, or at
the end, is put into memory, loaded, made ready, and copied to where it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from support.fake_vllm import put_modules

LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"
_Loader = Callable[..., int]


@dataclass
class Given:
    """What a loader was called with: `inspect.BoundArguments`."""

    arguments: dict[str, Any]


@dataclass
class Info:
    """`LayerReloadingInfo`."""

    restore_metadata: tuple[dict[str, Any], dict[str, Any]] = field(default_factory=lambda: ({}, {}))
    load_numel: int = 0
    load_numel_total: int | None = None
    loaded_weights: list[tuple[str, Given]] = field(default_factory=list)
    kernel: dict[str, Any] | None = None

    def reset(self) -> None:
        self.__init__(self.restore_metadata)  # type: ignore[misc]


def to_meta(tensor: torch.Tensor) -> torch.nn.Parameter:
    moved = torch.nn.Parameter(tensor.data.to("meta"), requires_grad=False)
    vars(moved).update(vars(tensor))
    return moved


def load_row(parameter: torch.Tensor, tensor: torch.Tensor, row: int | None = None) -> int:
    """A loader: a row of a parameter, or all of it. Returns the number of elements."""
    target = parameter.data if row is None else parameter.data[row]
    assert target.shape == tensor.shape, (target.shape, tensor.shape)
    target.copy_(tensor)
    return tensor.numel()


class Layer(torch.nn.Module):
    """A layer whose weight is negated and turned when it is made ready; its bias is in memory from the start."""

    is_attention = False

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))
            self._parameters[name].weight_loader = load_row  # type: ignore[union-attr]

    def process(self) -> None:
        if "weight" in self._parameters:
            self.weight = torch.nn.Parameter(-self.weight.data.t().contiguous(), requires_grad=False)


class Attention(Layer):
    """Latent attention, which computes with what it makes of another layer's weight. No checkpoint has its scale."""

    is_attention = True

    def __init__(self, kv_b_proj: torch.nn.Module, *, releases: bool) -> None:
        super().__init__(scale=(1,))
        self.kv_b_proj, self.releases = kv_b_proj, releases

    def process_weights_after_loading(self) -> None:
        made = self.kv_b_proj.weight.data * 2
        if "made" in self._parameters:
            self.made.data.copy_(made)
        else:
            self.made = torch.nn.Parameter(made, requires_grad=False)
        if self.releases:
            self.kv_b_proj.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)
            vars(self.kv_b_proj)["cpu_linear"] = torch.nn.functional.linear  # vLLM leaves it unpacked.


class Model(torch.nn.Module):
    """Loads NAME, or NAME#ROW for a part of a parameter."""

    def __init__(self, **layers: torch.nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            path, _, row = name.partition("#")
            parameter = self.get_parameter(path)
            parameter.weight_loader(parameter, tensor, *([int(row)] if row else []))  # type: ignore[operator]

    def start(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load as at the start of an engine."""
        for layer in self.modules():
            info(layer).restore_metadata = (
                {name: to_meta(one) for name, one in layer._parameters.items() if one is not None and name != "bias"},
                {},
            )
        self.load_weights(tensors)
        for process in ("process", "process_weights_after_loading"):
            for layer in self.modules():
                getattr(layer, process, lambda: None)()


def info(layer: torch.nn.Module) -> Info:
    """`get_layerwise_info`."""
    found: Info = vars(layer).setdefault("fake_info", Info())
    return found


def initialize(chosen: Any) -> None:
    for layer in chosen.modules():
        noted = info(layer)
        noted.kernel = dict(layer._parameters)
        for name in [name for name in layer._parameters if name != "bias"]:
            del layer._parameters[name]
        layer._parameters.update(noted.restore_metadata[0])
        noted.load_numel_total = sum(one.numel() for one in layer._parameters.values())
        for name, one in layer._parameters.items():
            if not isinstance(one.weight_loader, partial):
                one.weight_loader = partial(_wrapped, layer, name, one.weight_loader)


def _wrapped(layer: torch.nn.Module, name: str, loader: _Loader, *arguments: Any) -> None:
    noted = info(layer)
    if noted.load_numel_total is None:
        return
    parameter, tensor, *row = arguments
    noted.load_numel += loader(parameter, tensor, *row)
    noted.loaded_weights.append((name, Given({"param": parameter, "tensor": tensor, "row": row})))
    if noted.load_numel >= noted.load_numel_total and not getattr(layer, "is_attention", False):
        vars(sys.modules[LAYERWISE])["_layerwise_process"](layer, noted)


def materialize(layer: torch.nn.Module, noted: Info) -> None:
    for name, one in layer._parameters.items():
        if one is not None and one.is_meta:
            layer._parameters[name] = torch.nn.Parameter(torch.zeros(one.shape), requires_grad=False)
            vars(layer._parameters[name]).update(vars(one))


def process(layer: torch.nn.Module, noted: Info) -> None:
    vars(sys.modules[LAYERWISE])["materialize_layer"](layer, noted)
    for one in layer._parameters.values():
        one.weight_loader = one.weight_loader.args[2]  # type: ignore[union-attr]
    for name, given in noted.loaded_weights:
        parameter = layer._parameters[name]
        parameter.weight_loader(parameter, given.arguments["tensor"], *given.arguments["row"])  # type: ignore[union-attr]
    layer.process()  # type: ignore[operator]
    for name, one in (noted.kernel or {}).items():
        one.data.copy_(layer._parameters[name])
    _location(layer, noted)
    noted.reset()


def _location(layer: torch.nn.Module, noted: Info) -> None:
    layer._parameters.clear()
    layer._parameters.update(noted.kernel or {})


def finalize(chosen: Any, model_config: object) -> None:
    for layer in chosen.modules():
        noted = info(layer)
        if noted.load_numel_total is None:
            continue
        if noted.load_numel and not getattr(layer, "is_attention", False):
            process(layer, noted)
        else:
            _location(layer, noted)
            noted.reset()
    for layer in chosen.modules():
        getattr(layer, "process_weights_after_loading", lambda: None)()


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let relayout import these in the place of vLLM's."""
    modules = {
        LAYERWISE: {
            "get_layerwise_info": info,
            "initialize_layerwise_reload": initialize,
            "finalize_layerwise_reload": finalize,
            "_layerwise_process": process,
            "materialize_layer": materialize,
        },
        "vllm.model_executor.model_loader.reload.meta": {"to_meta_tensor": to_meta},
        "vllm.model_executor.layers.attention": {
            "is_deferred_attention_layer": lambda layer: getattr(layer, "is_attention", False)
        },
    }
    put_modules(monkeypatch, modules)
