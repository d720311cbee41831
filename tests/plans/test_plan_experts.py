"""relayout.plans.planner with experts owned whole: which rank holds which, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from support.planning import make_source

from relayout.checkpoint.source import SourceCheckpoint
from relayout.core.slices import Slice
from relayout.errors import PlanError
from relayout.plans.planner import plan_for

W1 = "model.layers.0.block_sparse_moe.experts.{}.w1.weight"


def mixtral(num_experts: int, **config: Any) -> SourceCheckpoint:
    return make_source({W1.format(number): (6, 4) for number in range(num_experts)}, model_type="mixtral", **config)


@pytest.mark.parametrize("count", [None, 0, "4"])
def test_without_the_number_of_experts_none_is_owned(count: Any) -> None:
    message = (
        rf"^checkpoint: tensor '{W1.format(0)}': "
        r"size 'experts' is unknown.* no positive integer num_experts or num_local_experts$"
    )
    with pytest.raises(PlanError, match=message):
        plan_for(mixtral(2, num_local_experts=count), 2, expert_parallel=True)


def test_an_expert_that_config_json_does_not_count_is_refused() -> None:
    message = rf"^checkpoint: tensor '{W1.format(4)}': expert 4, but config.json declares 4 experts$"
    with pytest.raises(PlanError, match=message):
        plan_for(mixtral(5, num_local_experts=4), 2, expert_parallel=True)


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_a_checkpoint_without_experts_is_not_cut_as_if_it_had(model_type: str) -> None:
    message = (
        f"^checkpoint: no tensor matches the experts of plan 'builtin:{model_type}', which --expert-parallel needs$"
    )
    with pytest.raises(PlanError, match=message):
        plan_for(
            make_source(
                {"model.layers.0.mlp.up_proj.weight": (4, 4), "model.norm.weight": (4,)}, model_type=model_type
            ),
            2,
            expert_parallel=True,
        )


def test_stacked_experts_of_granite_are_owned_under_both_of_their_names() -> None:
    shapes = {"experts.gate_up_proj": (8, 64, 32), "experts.down_proj": (8, 32, 32)}
    for named in (shapes, {"input_linear.weight": (8, 64, 32), "output_linear.weight": (8, 32, 32)}):
        given = {f"model.layers.0.block_sparse_moe.{name}": shape for name, shape in named.items()}
        plan = plan_for(make_source(given, model_type="granitemoe", num_local_experts=8), 2, expert_parallel=True)
        for t, shape in enumerate(given.values()):
            assert [part.ranges_along(0) for part in plan.cut(t).slices] == [((0, 4),), ((4, 4),)], shape


def test_stacked_experts_of_step_are_owned_and_their_shared_expert_is_cut() -> None:
    """Their names do not have the word experts, by which the tables of families know them."""
    shapes = {
        "model.layers.1.moe.gate_proj.weight": (8, 6, 4),
        "model.layers.1.moe.down_proj.weight": (8, 4, 6),
        "model.layers.1.moe.router_bias": (8,),
        "model.layers.1.share_expert.up_proj.weight": (6, 4),
    }
    config = {"num_attention_heads": 6, "num_attention_groups": 2, "moe_num_experts": 8}
    plan = plan_for(make_source(shapes, model_type="step3p5", **config), 3, expert_parallel=True)
    owned = [Slice.along(0, (part,)) for part in ((0, 3), (3, 3), (6, 2))]
    assert [list(plan.cut(t).slices) for t in (0, 1)] == [owned, owned]
    assert plan.cut(2).is_whole
    assert plan.cut(3).slices[1] == Slice.along(0, ((2, 2),))


@pytest.mark.parametrize("packed", ["w13_weight", "w13_weight.weight_packed"])
def test_stacked_experts_of_inkling_in_four_bits_take_their_scales_along(packed: str) -> None:
    method = "modelopt" if packed == "w13_weight" else "compressed-tensors"
    place = "model.llm.layers.1.mlp.experts."
    names = ["scale", "scale2"] if method == "modelopt" else ["weight_scale", "weight_global_scale"]
    shapes = {
        f"{place}{packed}": (4, 64, 32),
        f"{place}w13_weight.{names[0]}": (4, 64, 4),
        f"{place}{packed.replace('w13', 'w2')}": (4, 64, 16),
        f"{place}w2_weight.{names[0]}": (4, 64, 2),
        f"{place}w2_weight.{names[1]}": (4,),
    }
    quantization: dict[str, Any] = {"quant_method": method, "quant_algo": "NVFP4"}
    if method == "compressed-tensors":
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        quantization["config_groups"] = {"group_0": {"weights": weights, "format": "nvfp4-pack-quantized"}}
    config = {"model_type": "inkling_model", "n_routed_experts": 4, "quantization_config": quantization}
    source = make_source(shapes, stored_as="U8", **config)
    plan = plan_for(source, 2)
    halves = [(1, 32), (1, 32), (2, 8), (2, 1)]
    assert [plan.cut(t).slices[1] for t in range(4)] == [Slice.along(dim, ((half, half),)) for dim, half in halves]
    assert plan.cut(4).is_whole
    owned = plan_for(source, 2, expert_parallel=True)
    assert {owned.cut(t).slices[1] for t in range(5)} == {Slice.along(0, ((2, 2),))}
