"""Which experts an engine will use is learned from those that it has used; nothing is wrong where that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import write_family
from support.conversions import reference_tensors
from support.fake_sglang import AnyEngine
from support.fake_vllm import Model, Tensors, expert_of
from support.families import FAMILIES

import relayout
from relayout.engines.placing import (
    expected,
    first_layers,
    is_expert,
    is_of_feed_forward,
    is_shared_expert,
    layers_of,
)
from relayout.engines.rank_weights import EngineOptions, RankWeights

NUM_LAYERS = 5


def test_experts_are_told_by_their_names() -> None:
    layer = "model.layers.3.mlp"
    names = {
        f"{layer}.experts.17.gate_proj.weight": "routed",
        f"{layer}.experts.gate_up_proj": "routed",
        "experts.0.w1": "routed",
        f"{layer}.shared_experts.gate_proj.weight": "shared",
        f"{layer}.shared_expert.down_proj.weight": "shared",
        f"{layer}.shared_expert_gate.weight": "other",
        f"{layer}.gate.weight": "other",
        "model.layers.0.mlp.gate_proj.weight": "other",
        "lm_head.weight": "other",
        "model.layers.0.self_attn.o_proj.weight": "attention",
        "model.my_experts.weight": "attention",
        "model.embed_tokens.weight": "attention",
    }
    found = {
        name: "routed" if is_expert(name) else "shared" if is_shared_expert(name) else
        "other" if is_of_feed_forward(name) else "attention"
        for name in names
    }  # fmt: skip
    assert found == names
    assert all(is_of_feed_forward(name) for name, kind in names.items() if kind in ("routed", "shared"))


def named(layers: Collection[int], experts: Collection[int], what: str = "weight") -> list[str]:
    return [f"m.layers.{layer}.experts.{expert}.up.{what}" for layer in layers for expert in experts]


def test_of_layers_of_a_kind_two_are_learned_from_and_the_others_expected() -> None:
    layers = layers_of([*named(range(4), range(4)), *named(range(1), range(2), "scale"), "m.layers.1.mlp.gate.weight"])
    assert {name for layer in first_layers(layers) for name in layer.names.values()} == {
        *named((0, 1), range(4)), *named((0,), (0, 1), "scale"), "m.layers.1.mlp.gate.weight",
    }  # fmt: skip
    whole = {*named((0, 1), (1, 3)), *named((0,), (1,), "scale"), "m.layers.1.mlp.gate.weight"}
    assert expected(layers, whole) == named((2, 3), (1, 3))


def test_where_two_layers_differ_nothing_is_expected() -> None:
    layers = layers_of(named(range(4), range(4)))
    assert expected(layers, {*named((0,), (0, 1)), *named((1,), (1, 2))}) == []
    assert expected(layers, named((0,), range(4))) == []
    assert expected(layers_of(named((7,), range(4))), named((7,), range(4))) == []


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of 8 experts in 5 layers, as it is published and converted in each way."""
    root = tmp_path_factory.mktemp("mixture")
    (root / "plain").mkdir()
    write_family(replace(FAMILIES["qwen3_moe"], sizes={"L": NUM_LAYERS}), root / "plain")
    for tp in (1, 2):
        relayout.convert(root / "plain", root / f"tp{tp}", tp=tp)
    for tp in (2, 4):
        relayout.convert(root / "plain", root / f"ep{tp}", tp=tp, expert_parallel=True)
    return root


@pytest.fixture(scope="module")
def tensors(mixture: Path) -> Tensors:
    found = reference_tensors(mixture / "plain")
    assert {expert_of(name) for name in found} == {*range(-1, 8)}
    return found


PLACEMENTS: dict[str, tuple[int, ...]] = {
    "linear, the first of 4": (0, 1),
    "linear, the last of 8": (7,),
    "round robin, the second of 4": (1, 5),
    "linear with 4 more, the third of 4": (6, 7, 0),
    "none": (),
}


@pytest.mark.parametrize("folder", ["plain", "tp1", "tp2", "ep2", "ep4"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_experts_are_read_whole_once_by_whom_uses_them(
    mixture: Path, tensors: Tensors, engine: AnyEngine, placement: str, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the placement, and however the folder has them: parameters are equal, and no other expert is read."""
    tp = {"plain": 1, "tp1": 1}.get(folder, 2)
    engine.own_experts()
    engine.replicate(2)
    for rank in range(tp):
        model = Model(tensors, rank, tp, experts=PLACEMENTS[placement])
        engine.load(mixture / folder, model, strict=True)
        model.assert_holds_what_it_cuts_of(tensors)
        held = relayout.load(mixture / "tp2", rank) if tp == 2 else tensors
        needed = sum(held[name].nbytes for name in tensors if expert_of(name) < 0)
        needed += sum(one.nbytes for name, one in tensors.items() if expert_of(name) in PLACEMENTS[placement])
        line = caplog.messages[-1]
        assert f": {needed / 1e9:.3f} GB in " in line
        assert ", 0 whole tensors read" in line
        assert f", {len(tensors)} tensors," in line


def used_by(mixture: Path, tensors: Tensors, uses: Callable[[str], bool], **more: Any) -> tuple[int, int]:
    """Let a process use some experts; return bytes of what it used, and of what was read."""
    weights = RankWeights(str(mixture / "tp1"), 0, 1, EngineOptions(), is_placed=is_expert, **more)
    delivery, used = weights.deliver(), 0
    for name, tensor in delivery:
        if not is_expert(name) or uses(name):
            assert torch.equal(torch.empty_like(tensors[name]).copy_(tensor), tensors[name]), name
            used += tensors[name].nbytes
    return used, delivery.report().nbytes


def layer_of(name: str) -> int:
    return int(name.split(".")[2])


def test_what_is_used_is_what_is_read(mixture: Path, tensors: Tensors) -> None:
    """Also where each layer has a placement of its own, or only the first two agree."""
    used, read = used_by(mixture, tensors, lambda name: expert_of(name) in (2, 5))
    assert used == read
    used, read = used_by(mixture, tensors, lambda name: (expert_of(name) + layer_of(name)) % 4 == 0)
    assert used == read
    used, read = used_by(mixture, tensors, lambda name: expert_of(name) == max(layer_of(name), 1))
    one = next(tensor.nbytes for name, tensor in tensors.items() if expert_of(name) == 0)
    assert read - used == 3 * 3 * one  # Of three layers, the three matrices of the expert that was expected.


def test_layers_for_speculation_are_not_read_ahead(mixture: Path, tensors: Tensors) -> None:
    used, read = used_by(mixture, tensors, lambda name: layer_of(name) < 4, is_unused=lambda name: ".layers.4." in name)
    of_last = sum(one.nbytes for name, one in tensors.items() if ".layers.4." in name and not is_expert(name))
    assert used - of_last == read


def test_a_damaged_expert_is_found(mixture: Path, tensors: Tensors, tmp_path: Path, engine: AnyEngine) -> None:
    """Whether it is read when it is used, or was expected."""
    for layer in (0, NUM_LAYERS - 1):
        folder = tmp_path / f"damaged-{layer}"
        relayout.convert(mixture / "plain", folder, tp=1)
        name = f"model.layers.{layer}.mlp.experts.3.up_proj.weight"
        with (folder / "model-rank-0-part-0.safetensors").open("r+b") as file:
            length = int.from_bytes(file.read(8), "little")
            start = json.loads(file.read(length))[name]["data_offsets"][0]
            file.seek(8 + length + start)
            byte = file.read(1)[0]
            file.seek(8 + length + start)
            file.write(bytes([byte ^ 1]))
        engine.own_experts()
        engine.replicate(2)
        with pytest.raises(relayout.FormatError, match="do not match digest"):
            engine.load(folder, Model(tensors, 0, 1, experts=(3, 4)), verify=True)
