"""How vLLM loads some modules again, and what it would leave out: on stand-ins of what it calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.fake_vllm import put_modules

from relayout.engines.vllm_reload import check_padding, pack_tied, reload
from relayout.errors import PlanError

LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"


@pytest.mark.parametrize("padded", [False, True])
def test_experts_that_vllm_pads_once_are_refused_before_anything_changes(
    monkeypatch: pytest.MonkeyPatch, padded: bool
) -> None:
    model = torch.nn.ModuleDict({"experts": torch.nn.Module(), "linear": torch.nn.Linear(4, 4)})
    as_loaded = {"w2": torch.empty(8, 16, 96, device="meta")}
    model["experts"].w2 = torch.nn.Parameter(torch.empty(8, 16, 128 if padded else 96))
    model["linear"].weight = torch.nn.Parameter(torch.empty(0))  # Packed elsewhere.
    layers = {"experts": as_loaded, "linear": {"weight": torch.empty(4, 4, device="meta")}}
    of = {id(model[key]): tensors for key, tensors in layers.items()}
    put_modules(
        monkeypatch,
        {LAYERWISE: {"get_layerwise_info": lambda one: SimpleNamespace(restore_metadata=(of.get(id(one), {}), {}))}},
    )
    if padded:
        with pytest.raises(PlanError, match=r"experts\.w2.*was \[8, 16, 96\] and is padded to \[8, 16, 128\]"):
            check_padding(model, None)
    else:
        check_padding(model, None)


def test_weights_that_two_layers_share_are_packed_again_for_both() -> None:
    packed = []

    class Layer(torch.nn.Module):
        def __init__(self, weight: torch.nn.Parameter) -> None:
            super().__init__()
            self.weight, self.cpu_linear = weight, object()
            self.quant_method = SimpleNamespace(process_weights_after_loading=packed.append)

    embedding = Layer(torch.nn.Parameter(torch.ones(2, 2)))
    head, other = Layer(embedding.weight), Layer(torch.nn.Parameter(torch.ones(2, 2)))
    pack_tied(torch.nn.ModuleList([head, other, embedding, torch.nn.Linear(2, 2)]))
    assert packed == [head, embedding]


class Experts(torch.nn.Module):
    """Three experts, which the first load has packed for a CPU, with room for one more."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.zeros(4, 2), requires_grad=False)
        packing = {"process_weights_after_loading": lambda _, layer: layer.w13_weight.data.neg_()}
        experts = type(kernel, (), packing)()
        self.quant_method = SimpleNamespace(moe_kernel=SimpleNamespace(fused_experts=experts))

    def load_weights(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """As vLLM does when it reloads: into memory that is made again, in which nobody writes to the padding."""
        for _, tensor in tensors:
            made = torch.empty_strided((4, 2), (2, 1), dtype=tensor.dtype)
            made[:3].copy_(tensor)
            self.w13_weight.data.copy_(made)


@pytest.fixture
def reloaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The weight of experts of a kernel that vLLM has loaded again."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # With NaN.
    nothing: Any = lambda *_: None  # noqa: E731
    layerwise = ("initialize_layerwise_reload", "finalize_layerwise_reload", "get_layerwise_info")
    attention = {"is_deferred_attention_layer": lambda layer: False}
    modules = {LAYERWISE: dict.fromkeys(layerwise, nothing), "vllm.model_executor.layers.attention": attention}
    put_modules(monkeypatch, modules)
    model = Experts(request.param)
    torch.use_deterministic_algorithms(True)
    try:
        reload(model, None, None, iter([("w", torch.tensor([[1.0, 2], [3, 4], [5, 6]]))]))
    finally:
        torch.use_deterministic_algorithms(False)
    return model.w13_weight.data


@pytest.mark.parametrize(
    ("reloaded", "sign"), [("CPUUnquantizedExperts", -1), ("TritonExperts", 1)], indirect=["reloaded"]
)
def test_experts_for_a_cpu_are_packed_again_and_no_others(reloaded: torch.Tensor, sign: int) -> None:
    assert reloaded[:3].tolist() == [[sign * 1, sign * 2], [sign * 3, sign * 4], [sign * 5, sign * 6]]


@pytest.mark.parametrize("reloaded", ["TritonExperts"], indirect=True)
def test_padding_of_what_is_loaded_again_is_zero_as_at_the_start(reloaded: torch.Tensor) -> None:
    assert reloaded[3].tolist() == [0, 0]


@pytest.mark.parametrize("tied", [False, True])
def test_what_nothing_was_loaded_into_is_an_error_unless_it_is_tied(
    monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    model = torch.nn.ModuleDict({"embedding": Experts(""), "head": Experts("")})
    if tied:
        model["head"].w13_weight = model["embedding"].w13_weight
    nothing: Any = lambda *_: None  # noqa: E731
    layerwise = {"initialize_layerwise_reload": nothing, "finalize_layerwise_reload": nothing}
    layerwise["get_layerwise_info"] = lambda layer: SimpleNamespace(
        load_numel_total=8, load_numel=0 if layer is model["head"] else 8
    )
    attention = {"is_deferred_attention_layer": lambda layer: False}
    put_modules(monkeypatch, {LAYERWISE: layerwise, "vllm.model_executor.layers.attention": attention})
    vars(model)["load_weights"] = lambda tensors: list(tensors)
    with nullcontext() if tied else pytest.raises(PlanError, match="has loaded nothing into head"):
        reload(model, None, frozenset({"embedding", "head"}), iter(()))
