"""`--plan transformers`: what that package's plans leave out, and what they say of text models inside of others.

What ranks hold by them is compared with transformers' own shards in test_transformers_tp.py.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import pytest
from support.planning import Shapes, all_slices, make_source, shapes_of, slices_of

from relayout.core.slices import NOT_HELD, WHOLE
from relayout.errors import PlanError
from relayout.plans.family import builtin_families
from relayout.plans.planner import plan_for
from relayout.plans.transformers import transformers_family

SIZES = {
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 1000,
}
MODELS: dict[str, dict[str, Any]] = {
    "helium": {"attention_bias": True},
    "ernie4_5": {"use_bias": True},
    "exaone4": {},
    "seed_oss": {"attention_out_bias": True},
    "dots1": {"n_routed_experts": 4, "moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 1},
}
WITHOUT_OURS = MODELS.keys() - {"ernie4_5", "exaone4", "seed_oss"}
"""Types for which there is no built-in plan."""


@cache
def model(model_type: str) -> tuple[dict[str, Any], Shapes]:
    """config.json, and what there is of each layer."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[model_type](**SIZES, **MODELS[model_type])
    with torch.device("meta"):
        tensors = AutoModelForCausalLM.from_config(config).state_dict()
    return config.to_dict(), {name: tuple(one.shape) for name, one in tensors.items()}


def test_these_types_have_no_plan_of_ours() -> None:
    assert not WITHOUT_OURS & {kind for family in builtin_families() for kind in family.model_types}
    for model_type in WITHOUT_OURS:
        config, shapes = model(model_type)
        with pytest.raises(PlanError, match=f"'{model_type}'.*--plan transformers"):
            plan_for(make_source(shapes, **config), 2)


@pytest.mark.parametrize("model_type", MODELS)
def test_what_the_plan_of_transformers_leaves_out_is_held_whole_and_listed(model_type: str) -> None:
    config, shapes = model(model_type)
    plan = plan_for(make_source(shapes, **config), 2, "transformers")
    assert plan.name == f"transformers:{model_type}"
    whole = {name for name, parts in slices_of(plan, shapes).items() if parts[0] == WHOLE}
    biases = {name for name in whole if name.endswith(("o_proj.bias", "down_proj.bias"))}
    assert plan.unmatched == tuple(name for name in shapes if name in whole - biases)
    assert any("norm" in name for name in plan.unmatched)
    assert len(shapes) - len(whole) >= 2 + 2 * 7
    assert bool(biases) == (model_type in ("ernie4_5", "seed_oss"))


def test_experts_that_a_checkpoint_stores_one_by_one_are_cut_as_those_in_one_tensor() -> None:
    experts = "model.layers.1.mlp.experts"
    shapes = {
        f"{experts}.{number}.{name}_proj.weight": (128, 64) if name == "down" else (64, 128)
        for number in range(4)
        for name in ("gate", "up", "down")
    }
    config, in_memory = model("dots1")
    assert (in_memory[f"{experts}.gate_up_proj"], in_memory[f"{experts}.down_proj"]) == ((4, 128, 128), (4, 128, 64))
    plan = plan_for(make_source(shapes, **config), 2, "transformers")
    for rank in range(2):
        assert shapes_of(plan, shapes, rank) == {
            name: (128, 32) if "down" in name else (32, 128) for name in shapes
        }  # fmt: skip
    assert plan.unmatched == ()


def test_with_expert_parallel_the_experts_of_transformers_plan_are_owned() -> None:
    config, in_memory = model("dots1")
    single = {f"model.layers.1.mlp.experts.{number}.up_proj.weight": (64, 128) for number in range(4)}
    shapes = {**in_memory, **single}
    plan = plan_for(make_source(shapes, **config), 4, "transformers", expert_parallel=True)
    slices = slices_of(plan, shapes)
    for name in ("gate_up_proj", "down_proj"):
        parts = slices[f"model.layers.1.mlp.experts.{name}"]
        assert [(part.axis, part.ranges) for part in parts] == [(0, ((rank, 1),)) for rank in range(4)]
    for number, name in enumerate(single):
        assert slices[name] == tuple(WHOLE if rank == number else NOT_HELD for rank in range(4))


def test_kv_heads_are_not_cut_apart_at_degrees_that_transformers_does_not_know() -> None:
    """It would give 8 ranks half a KV head each; engines let two ranks share one."""
    config, shapes = model("helium")
    plan = plan_for(make_source(shapes, **config), 8, "transformers")
    parts = slices_of(plan, shapes)["model.layers.1.self_attn.k_proj.weight"]
    assert [part.ranges for part in parts] == [((rank // 2 * 16, 16),) for rank in range(8)]


# Where there is none.


@pytest.mark.parametrize("model_type", ["no_such_type", "mamba", "gpt2", "bert", None])
def test_a_type_that_transformers_does_not_know_or_has_no_plan_for_is_refused(model_type: str | None) -> None:
    message = (
        f"^checkpoint: --plan transformers: the package has no tensor-parallel plan for model type {model_type!r}$"
    )
    for config in ({}, {"text_config": {"model_type": "no_such_type"}}, {"text_config": {}}):
        with pytest.raises(PlanError, match=message):
            plan_for(make_source({"w": (8, 8)}, model_type=model_type, **config), 2, "transformers")


def test_for_a_wrapper_it_is_the_plan_of_the_text_model_inside() -> None:
    name = "language_model.model.layers.0.mlp.down_proj.weight"
    for model_type, text in (("gemma3", "gemma3_text"), ("no_such_type", "helium")):
        source = make_source({name: (4, 8)}, model_type=model_type, text_config={"model_type": text})
        [parts] = all_slices(plan_for(source, 2, "transformers"))
        assert [(part.axis, part.ranges) for part in parts] == [(1, ((0, 4),)), (1, ((4, 4),))]


@pytest.mark.parametrize("module", ["transformers", "transformers.models.auto.configuration_auto"])
def test_without_transformers_it_is_refused_with_what_to_install(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    if module == "transformers":
        for name in [name for name in sys.modules if name.startswith("transformers.")]:
            monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        PlanError, match=r"^checkpoint: --plan transformers: .* cannot be imported .*: pip install transformers$"
    ):
        plan_for(make_source({"w": (8, 8)}, model_type="helium"), 2, "transformers")


@pytest.mark.parametrize(("model_type", "config"), [("helium", {}), ("x", {"text_config": {"model_type": "helium"}})])
def test_sizes_that_a_config_leaves_out_are_those_of_its_class(model_type: str, config: dict[str, Any]) -> None:
    from transformers import HeliumConfig

    row = {key: getattr(HeliumConfig(), key) for key in ("num_attention_heads", "num_key_value_heads")}
    config = {"model_type": model_type, **config}
    assert transformers_family(model_type, config).defaults == {"helium": row}


def test_a_plan_that_leaves_most_of_the_bytes_whole_is_refused_unless_that_is_wanted() -> None:
    shapes = {"model.layers.0.self_attn.q_proj.weight": (64, 64), "model.layers.0.special.weight": (64, 32)}
    source = make_source(shapes, model_type="llama")
    what = r"has no rule for 33 % of the bytes, such as model\.layers\.0\.special\.weight: .*--unmatched replicate"
    with pytest.raises(PlanError, match=what):
        plan_for(source, 2, "transformers")
    plan = plan_for(source, 2, "transformers", unmatched="replicate")
    assert plan.unmatched == ("model.layers.0.special.weight",)
    small = make_source({**shapes, "model.layers.0.special.weight": (4, 32)}, model_type="llama")
    assert plan_for(small, 2, "transformers").unmatched == ("model.layers.0.special.weight",)
