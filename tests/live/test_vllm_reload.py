"""How vLLM loads some modules again, and what it would leave out: on stubs of what it calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import fake_layerwise
from support.fake_layerwise import LAYERWISE, Attention, Layer
from support.fake_vllm import put_modules

from relayout.engines.unwritten import Sentinels
from relayout.errors import FormatError, PlanError
from relayout.live.vllm_reload import check_padding, note_defaults, pack_tied, rehearse, reload


@pytest.mark.parametrize("padded", [False, True])
def test_experts_that_vllm_pads_once_are_refused_before_anything_changes(
    monkeypatch: pytest.MonkeyPatch, padded: bool
) -> None:
    model = torch.nn.ModuleDict({"experts": torch.nn.Module(), "linear": torch.nn.Linear(4, 4)})
    as_loaded = {"w2": torch.empty(8, 16, 96, device="meta")}
    model["experts"].w2 = torch.nn.Parameter(torch.empty(8, 16, 128 if padded else 96))
    model["linear"].weight = torch.nn.Parameter(torch.empty(0))  # Packed elsewhere.
    model["linear"].qweight = torch.nn.Parameter(torch.empty(2, 2, 5))  # In blocks, with their scales.
    linear = {"weight": torch.empty(4, 4, device="meta"), "qweight": torch.empty(4, 4, device="meta")}
    layers = {"experts": as_loaded, "linear": linear}
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
    layerwise = ("initialize_layerwise_reload", "finalize_layerwise_reload", "get_layerwise_info", "materialize_layer")
    attention = {"is_deferred_attention_layer": lambda layer: False}
    modules = {LAYERWISE: dict.fromkeys(layerwise, nothing), "vllm.model_executor.layers.attention": attention}
    put_modules(monkeypatch, modules)
    model = Experts(request.param)
    torch.use_deterministic_algorithms(True)
    try:
        reload(model, CONFIG, None, iter([("w", torch.tensor([[1.0, 2], [3, 4], [5, 6]]))]))
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


ROWS = {f"qkv.weight#{row}": torch.arange(4.0) + 10 * row for row in range(3)}
WEIGHTS = {
    **ROWS,
    "qkv.scale": torch.tensor([5.0]),
    "out.weight": torch.arange(6.0).reshape(2, 3) + 1,
    "out.bias": torch.tensor([7.0, 8]),
    "kv_b.weight": torch.arange(12.0).reshape(3, 4) + 1,
}
"""A fused weight; a layer with a bias; and what attention is made of."""
Tensors = dict[str, torch.Tensor]
CONFIG = SimpleNamespace(dtype=torch.float32)


def started(monkeypatch: pytest.MonkeyPatch, factor: float = 1, *, releases: bool = False) -> fake_layerwise.Model:
    """A model with these weights, times a factor, that is ready to compute."""
    fake_layerwise.install(monkeypatch)
    kv_b = Layer(weight=(3, 4))
    kv_b.process = lambda: None  # type: ignore[method-assign]
    layers = {"qkv": Layer(weight=(3, 4), scale=(1,)), "out": Layer(weight=(2, 3), bias=(2,)), "kv_b": kv_b}
    model = fake_layerwise.Model(**layers, attention=Attention(kv_b, releases=releases))
    model.start((name, tensor * factor) for name, tensor in WEIGHTS.items())
    return model


def new(factor: float = 2, tensors: Tensors = WEIGHTS) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor * factor) for name, tensor in tensors.items())


def held(model: torch.nn.Module) -> list[tuple[str, int, object]]:
    """Each parameter of each module, its identity, and its values; and all other attributes."""
    tensors = [
        (f"{path}.{name}", id(one), one.tolist() + sorted(vars(one)))
        for path, module in model.named_modules()
        for name, one in module._parameters.items()
        if one is not None
    ]
    others = [
        (f"{path}.{name}", id(value), None)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules")
    ]
    return [*tensors, *others, *((path, id(module), None) for path, module in model.named_modules())]


@pytest.mark.parametrize("chosen", [None, ("qkv", "kv_b", "attention"), ("out",)])
def test_a_rehearsal_leaves_everything_and_then_the_reload_is_as_a_fresh_start(
    monkeypatch: pytest.MonkeyPatch, chosen: tuple[str, ...] | None
) -> None:
    """Attention that is made of another layer's weight is not loaded by itself."""
    model, fresh = started(monkeypatch), started(monkeypatch, 2)
    modules = None if chosen is None else [model.get_submodule(name) for name in chosen]
    tensors = {name: one for name, one in WEIGHTS.items() if chosen is None or name.startswith(chosen)}
    before = held(model)
    for _ in range(2):
        rehearse(model, modules, new(tensors=tensors))
        assert held(model) == before
    reload(model, CONFIG, modules, new(tensors=tensors))
    of_fresh = dict(fresh.named_parameters())
    for name, one in model.named_parameters():
        is_new = (chosen is None or name.startswith(chosen)) and name != "attention.scale"
        assert is_new == (one.tolist() == of_fresh[name].tolist() != [0]), name


def test_a_layer_behind_a_wrapper_is_rehearsed_and_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for LoRA: the module that was recorded is found, whatever its name is now."""
    model, fresh = started(monkeypatch), started(monkeypatch, 2)
    layer = model.out
    model.out = torch.nn.ModuleDict({"base_layer": layer})
    tensors = {name.replace("out", "out.base_layer"): one for name, one in WEIGHTS.items() if name.startswith("out")}
    rehearse(model, [layer], new(tensors=tensors))
    reload(model, CONFIG, [layer], new(tensors=tensors))
    assert layer.weight.tolist() == fresh.out.weight.tolist()
    assert layer.bias.tolist() == fresh.out.bias.tolist()


def test_a_module_without_anything_to_load_is_no_obstacle_where_all_are_loaded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as a table of positions, which vLLM leaves."""
    fake_layerwise.install(monkeypatch)
    model = fake_layerwise.Model(layer=Layer(weight=(2, 3)), positions=Layer(table=(2,)))
    model.start([("layer.weight", torch.ones(2, 3))])
    rehearse(model, None, iter([("layer.weight", torch.ones(2, 3))]))
    with pytest.raises(PlanError, match=r"'positions': .* loads nothing into it"):
        rehearse(model, list(model.children()), iter([("layer.weight", torch.ones(2, 3))]))


def without(*names: str) -> Tensors:
    return {name: one for name, one in WEIGHTS.items() if not name.startswith(names)}


def loads_into_memory(model: fake_layerwise.Model) -> None:
    target = model.out.weight.data

    def load_weights(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        fake_layerwise.Model.load_weights(model, tensors)
        target.mul_(3)

    model.load_weights = load_weights  # type: ignore[method-assign, assignment]


def makes_it_of_another_layer(model: fake_layerwise.Model) -> None:
    """As rerankers do whose head is tied to the embedding: it adds a module, too."""

    def load_weights(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        model.add_module("head", torch.nn.Linear(1, 1))
        source = model.qkv.weight
        fake_layerwise.Model.load_weights(model, tensors)
        model.out.weight.weight_loader(model.out.weight, source.data[:2, :3])

    model.load_weights = load_weights  # type: ignore[method-assign, assignment]


def has_no_memory(model: fake_layerwise.Model) -> None:
    model.out.bias = torch.nn.Parameter(torch.empty(2, device="meta"), requires_grad=False)


@pytest.mark.parametrize(
    ("spoil", "tensors", "reason"),
    [
        (None, without("out"), "'out': vLLM cannot load this module again: its own reload loads nothing into it"),
        (None, {**WEIGHTS, "out.weight": torch.ones(4, 4)}, "fails: AssertionError"),
        (None, {**WEIGHTS, "missing.weight": torch.ones(1)}, "fails: AttributeError"),
        (makes_it_of_another_layer, without("out.weight"), "of a parameter of another module, which is empty then"),
        (loads_into_memory, WEIGHTS, "'out.weight': .* its class writes to it past its loader"),
        (has_no_memory, WEIGHTS, "'out': .* it has no memory"),
    ],
    ids=["nothing", "shape", "unknown", "of another", "past its loader", "meta"],
)
def test_what_vllm_cannot_load_again_is_refused_with_everything_as_before(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[fake_layerwise.Model], None] | None, tensors: Tensors, reason: str
) -> None:
    model = started(monkeypatch)
    if spoil is not None:
        spoil(model)
    before = held(model) if spoil is not has_no_memory else []
    modules = [module for name, module in model.named_children() if name != "attention"]
    with pytest.raises(PlanError, match=reason):
        rehearse(model, modules, new(tensors=tensors))
    assert not before or held(model) == before


def test_a_weight_that_attention_has_released_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU with AMX. Attention is made ready again with every module, whichever that is."""
    model = started(monkeypatch, releases=True)
    before = held(model)
    with pytest.raises(PlanError, match=r"'attention': .* it has released the weight of its kv_b_proj"):
        rehearse(model, [model.out], new(tensors=without("qkv", "kv_b")))
    assert held(model) == before


def test_a_layer_that_vllm_counts_as_complete_too_early_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v each have a scale of which there is one: behind the weights two are lost, before them none is."""
    model, fresh = started(monkeypatch), started(monkeypatch, 2)
    scales: Tensors = {f"qkv.scale{' ' * row}": torch.tensor([5.0]) for row in range(3)}
    late, early = {**ROWS, **scales}, {**scales, **ROWS}
    before = held(model)
    with pytest.raises(PlanError, match=r"'qkv': .* counts it as complete before its last tensor"):
        rehearse(model, [model.qkv], ((name.strip(), one) for name, one in new(tensors=late)))
    assert held(model) == before
    rehearse(model, [model.qkv], ((name.strip(), one) for name, one in new(tensors=early)))
    reload(model, CONFIG, [model.qkv], ((name.strip(), one) for name, one in new(tensors=early)))
    assert model.qkv.weight.tolist() == fresh.qkv.weight.tolist()


def test_damage_that_a_rehearsal_reads_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = started(monkeypatch)
    before = held(model)

    def damaged() -> Iterator[tuple[str, torch.Tensor]]:
        yield from ROWS.items()
        raise FormatError("damaged")

    with pytest.raises(FormatError, match="damaged"):
        rehearse(model, None, damaged())
    assert held(model) == before


@pytest.mark.parametrize("tied", [False, True])
def test_what_nothing_is_loaded_into_is_refused_unless_it_is_tied(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    fake_layerwise.install(monkeypatch)
    model = fake_layerwise.Model(embedding=Layer(weight=(2, 2)), head=Layer(weight=(2, 2)))
    for layer in (model.embedding, model.head):
        layer.process = lambda: None
    if tied:
        model.head.weight = model.embedding.weight
    model.start([("embedding.weight", torch.ones(2, 2))])
    with nullcontext() if tied else pytest.raises(PlanError, match=r"'head': .* loads nothing into it"):
        rehearse(model, [model.embedding, model.head], iter([("embedding.weight", torch.ones(2, 2))]))


@pytest.mark.parametrize("is_optional", [False, True])
def test_a_parameter_that_no_tensor_is_loaded_into_begins_with_its_default_again(
    monkeypatch: pytest.MonkeyPatch, is_optional: bool
) -> None:
    fake_layerwise.install(monkeypatch)
    with Sentinels():
        layer = Layer(weight=(2, 3), scale=(1,))
        layer.weight = torch.nn.Parameter(torch.empty(2, 3), requires_grad=False)
        layer.scale.data.fill_(-7)
    vars(layer.weight)["weight_loader"] = fake_layerwise.load_row
    model = fake_layerwise.Model(layer=layer)
    note_defaults(model)
    tensors = {"layer.weight": torch.ones(2, 3)} | ({} if is_optional else {"layer.scale": torch.tensor([3.0])})
    model.start(tensors.items())
    rehearse(model, [layer], new(tensors=tensors))
    reload(model, CONFIG, [layer], new(tensors=tensors))
    assert layer.weight.tolist() == [[-2, -2]] * 3
    assert layer.scale.tolist() == [-7 if is_optional else 6]


def test_what_is_made_without_a_dtype_has_that_of_the_model_as_in_the_first_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as the scales of an attention cache, which vLLM makes again."""
    model = started(monkeypatch)
    made: list[torch.dtype] = []
    process = model.out.process
    model.out.process = lambda: (made.append(torch.tensor(1.0).dtype), process())
    out = {name: one for name, one in WEIGHTS.items() if name.startswith("out")}
    reload(model, SimpleNamespace(dtype=torch.bfloat16), [model.out], new(tensors=out))
    assert (made, torch.get_default_dtype()) == ([torch.bfloat16], torch.float32)
