"""relayout.plans.planner with experts owned whole: which rank holds which, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from support.planning import all_slices, make_source, plan_of, ranges_of

from relayout.checkpoint.source import SourceCheckpoint
from relayout.core.slices import NOT_HELD, WHOLE, Slice
from relayout.errors import PlanError
from relayout.plans.family import find_family
from relayout.plans.planner import plan_for

W1 = "model.layers.0.block_sparse_moe.experts.{}.w1.weight"


def mixtral(num_experts: int, *suffixes: str, **config: Any) -> SourceCheckpoint:
    shapes = {
        W1.format(number).replace("weight", suffix): (6, 4) if suffix == "weight" else ()
        for number in range(num_experts)
        for suffix in suffixes or ("weight",)
    }
    return make_source(shapes, model_type="mixtral", **{"num_local_experts": num_experts, **config})


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "owners"),
    [
        (4, 2, [0, 0, 1, 1]),
        (5, 2, [0, 0, 0, 1, 1]),
        (8, 3, [0, 0, 0, 1, 1, 1, 2, 2]),
        (3, 4, [0, 1, 2]),
        # 6 rows do not divide by 4, and need not.
        (10, 4, [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]),
        (11, 1024, list(range(11))),
    ],
)
def test_an_expert_is_held_whole_by_its_owner_alone_and_the_first_ranks_own_one_more(
    num_experts: int, num_ranks: int, owners: list[int]
) -> None:
    plan = plan_for(mixtral(num_experts), num_ranks, expert_parallel=True)
    expected = (tuple(WHOLE if rank == owner else NOT_HELD for rank in range(num_ranks)) for owner in owners)
    assert plan == plan_of(
        "builtin:mixtral", num_ranks, tuple(expected), expert_parallel=True, family=find_family("mixtral")
    )


def test_experts_in_one_tensor_are_cut_along_their_number() -> None:
    shapes = {f"model.layers.0.mlp.experts.{name}_proj": (5, 8, 6) for name in ("gate_up", "down")}
    source = make_source(shapes, model_type="mixtral")
    plan = plan_for(source, 3, expert_parallel=True)
    assert all_slices(plan) == ((Slice.along(0, ((0, 2),)), Slice.along(0, ((2, 2),)), Slice.along(0, ((4, 1),))),) * 2
    more_ranks = plan_for(source, 6, expert_parallel=True)
    assert ranges_of(more_ranks) == [((0, 1),), ((1, 1),), ((2, 1),), ((3, 1),), ((4, 1),), ()]


def test_all_but_experts_is_cut_as_without() -> None:
    shapes = {
        W1.format(0): (6, 4),
        "model.layers.0.self_attn.q_proj.weight": (8, 4),
        "model.layers.0.block_sparse_moe.gate.weight": (2, 4),
    }
    source = make_source(shapes, model_type="mixtral", num_attention_heads=2, num_local_experts=2)
    with_experts, without = (plan_for(source, 2, expert_parallel=parallel) for parallel in (True, False))
    assert (with_experts.expert_parallel, without.expert_parallel) == (True, False)
    assert all_slices(with_experts)[1:] == all_slices(without)[1:]
    assert all_slices(without)[0] == (Slice.along(0, ((0, 3),)), Slice.along(0, ((3, 3),)))


@pytest.mark.parametrize("scale", ["input_scale", "input_global_scale"])
def test_input_scales_of_all_experts_are_in_every_rank(scale: str) -> None:
    source = mixtral(2, "weight", "weight_scale", scale, quantization_config={"quant_method": "fp8"})
    plan = plan_for(source, 2, expert_parallel=True)
    mine, theirs, all_ranks = (WHOLE, NOT_HELD), (NOT_HELD, WHOLE), (WHOLE, WHOLE)
    assert all_slices(plan) == (mine, mine, all_ranks, theirs, theirs, all_ranks)
    assert plan.unmatched == ()


@pytest.mark.parametrize("count", [None, 0, "4"])
def test_without_the_number_of_experts_none_is_owned(count: Any) -> None:
    message = (
        rf"^checkpoint: tensor '{W1.format(0)}': "
        r"size 'experts' is unknown.* no positive integer num_local_experts or num_experts$"
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


def test_experts_of_a_model_inside_another_are_owned_too() -> None:
    """The prefix is taken off, and the number of experts is that of the text model."""
    names = [f"language_model.model.layers.1.feed_forward.experts.{name}_proj" for name in ("gate_up", "down")]
    source = make_source(dict.fromkeys(names, (3, 4, 4)), model_type="llama4", text_config={"num_local_experts": 3})
    plan = plan_for(source, 2, expert_parallel=True)
    assert all_slices(plan) == ((Slice.along(0, ((0, 2),)), Slice.along(0, ((2, 1),))),) * 2


def test_stacked_experts_of_granite_are_owned_under_both_of_their_names() -> None:
    shapes = {"experts.gate_up_proj": (8, 64, 32), "experts.down_proj": (8, 32, 32)}
    for named in (shapes, {"input_linear.weight": (8, 64, 32), "output_linear.weight": (8, 32, 32)}):
        given = {f"model.layers.0.block_sparse_moe.{name}": shape for name, shape in named.items()}
        plan = plan_for(make_source(given, model_type="granitemoe", num_local_experts=8), 2, expert_parallel=True)
        for t, shape in enumerate(given.values()):
            assert [part.ranges_along(0) for part in plan.cut(t).slices] == [((0, 4),), ((4, 4),)], shape
