"""relayout.plans.planner: which rules a checkpoint gets, who holds what by them, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.families import FP8_BLOCKS
from support.planning import Shapes, all_slices, make_source, plan_of, ranges_of, shapes_of, slices_of

from relayout.conversion.planning import find_plan
from relayout.core.slices import WHOLE, Slice
from relayout.errors import FormatError, PlanError
from relayout.plans import planner
from relayout.plans.family import builtin_families, find_family, parse_family
from relayout.plans.plan import Plan
from relayout.plans.planner import matching_plans, plan_by, plan_for

UP = "model.layers.0.mlp.up_proj.weight"
SMALL: dict[str, tuple[int, ...]] = {UP: (18944, 3584)}
ATTENTION = "model.layers.0.self_attn."
Q_PROJ, K_PROJ, O_PROJ = (f"{ATTENTION}{name}_proj.weight" for name in "qko")

# Which rules.


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"model_type": "qwen2"}, "llama"),
        ({"model_type": "qwen3"}, "qwen3"),
        ({"model_type": "gpt_oss"}, "gpt_oss"),
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, "gpt_oss_mxfp4"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}, "llama"),
        # A wrapper is not taken for the text model inside.
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}, "gemma3"),
    ],
)
def test_the_plan_is_chosen_by_model_type_and_quantization(config: dict[str, Any], name: str) -> None:
    [family] = [one for one in builtin_families() if one.name == name]
    plan = plan_for(make_source({"model.norm.weight": (8,)}, **config), 2)
    assert plan == plan_of(f"builtin:{name}", 2, ((WHOLE, WHOLE),), family=family.resolved(config))


LLAMA = {
    "model.layers.0.mlp.up_proj.weight": (16, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 16),
    "model.norm.weight": (8,),
}


@pytest.mark.parametrize(
    ("shapes", "config", "says"),
    [
        (LLAMA, {}, "config.json is missing or empty, expected one with .*--tp 1, which needs no"),
        (LLAMA, {"model_type": None}, "config.json has no model_type; --plan llama matches all 3 tensors: "),
        (LLAMA, {"model_type": ["llama"]}, "config.json has no model_type; --plan llama matches all 3 tensors: "),
        (LLAMA, {"model_type": "mine"}, "no built-in plan for model type 'mine'; --plan llama matches all 3 tensors: "),
        (dict(list(LLAMA.items())[:1]), {"model_type": "mine"}, "--plan llama matches the only tensor: "),
        (
            {"x.y.weight": (8, 8)},
            {"model_type": "mine"},
            "'mine'; no built-in plan matches all tensors: supply your own with --plan FILE.*--tp 1",
        ),
        (
            {"x.y.weight": (8, 8)},
            {"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.35.0"},
            r"a component of a diffusers pipeline \('FluxTransformer2DModel'\), .*: use --tp 1$",
        ),
        ({"model.norm.weight": (8,)}, {"model_type": "mine"}, "; no built-in plan matches"),  # All would hold it whole.
    ],
)
def test_without_a_plan_the_reason_and_the_plans_that_match_are_named(
    shapes: Shapes, config: dict[str, Any], says: str
) -> None:
    with pytest.raises(PlanError, match=says) as caught:
        plan_for(make_source(shapes, **config), 2)
    assert caught.value.code == "no_plan"


@pytest.mark.parametrize("num_ranks", [3, 16])
def test_the_plan_that_is_named_is_that_of_the_structure_though_the_degree_does_not_fit_it(num_ranks: int) -> None:
    """A looser plan, which would cut within heads, is not."""
    with pytest.raises(PlanError, match=r"; --plan llama matches all 3 tensors: "):
        plan_for(make_source(LLAMA, model_type="mine"), num_ranks)


@pytest.mark.parametrize("model_type", ["llama", "mine"])
def test_a_degree_beyond_the_limit_is_refused_before_plans_are_tried(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "matching_plans", lambda *_: pytest.fail("plans were tried"))
    with pytest.raises(PlanError, match="tp: 1000000, expected 1 to 1024"):
        plan_for(make_source(LLAMA, model_type=model_type), 1_000_000)


def test_a_plan_that_is_named_as_matching_cuts_the_checkpoint() -> None:
    source = make_source(LLAMA, model_type="mine")
    first, *others = matching_plans(source)
    assert first == "llama"
    plans = [plan_for(source, 2, name) for name in (first, *others)]
    assert len({all_slices(plan) for plan in plans}) == len(plans)


def test_a_plan_file_is_used_in_place_of_the_built_in_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        [sizes]
        heads = "n_head"
        [cut]
        "h.*.attn.{q,k}" = { dim = 1, by = "heads" }
        "h.0.**" = "whole"
        "**" = { dim = 0, by = "even" }
        """
    )
    shapes = {"h.0.attn.q": (3, 8), "h.0.mlp.up": (3, 3), "wte": (6, 2), "h.1.attn.k": (1, 8), "h.1.mlp.up": (4, 3)}
    source = make_source(shapes, model_type="llama", n_head=2)
    for plan in (plan_for(source, 2, path), plan_for(source, 2, str(path))):
        assert plan.name == "file:mine.toml"
        assert slices_of(plan, shapes) == {
            "h.0.attn.q": (Slice.along(1, ((0, 4),)), Slice.along(1, ((4, 4),))),
            "h.0.mlp.up": (WHOLE, WHOLE),
            "wte": (Slice.along(0, ((0, 3),)), Slice.along(0, ((3, 3),))),
            "h.1.attn.k": (Slice.along(1, ((0, 4),)), Slice.along(1, ((4, 4),))),
            "h.1.mlp.up": (Slice.along(0, ((0, 2),)), Slice.along(0, ((2, 2),))),
        }


def test_a_bias_that_no_rule_names_goes_with_the_rows_of_its_quantized_weight(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        '[cut]\n"{a,c}.weight" = { dim = 0, by = "even" }\n"b.weight" = { dim = 1, by = "even" }'
    )
    shapes = {"a.weight": (4, 2), "a.weight_scale": (4, 1), "a.bias": (4,)}
    shapes |= {"b.weight": (4, 2), "b.weight_scale": (4, 1), "b.bias": (4,)}
    config = {"quant_method": "fbgemm_fp8"}
    plan = plan_for(make_source(shapes, quantization_config=config), 2, tmp_path / "mine.toml")
    assert shapes_of(plan, shapes, 1) == {
        **{"a.weight": (2, 2), "a.weight_scale": (2, 1), "a.bias": (2,)},
        **{"b.weight": (4, 1), "b.weight_scale": (4, 1), "b.bias": (4,)},
    }
    assert plan.unmatched == ()
    shapes |= {"c.weight": (4, 2), "c.bias": (4,)}  # Not quantized.
    with pytest.raises(PlanError, match=r"tensor 'c.bias': no rule of plan 'file:mine.toml' matches it: "):
        plan_for(make_source(shapes, quantization_config=config), 2, tmp_path / "mine.toml")


@pytest.mark.parametrize("own", [True, False])
def test_weights_that_cannot_be_cut_are_refused_by_any_plan(own: bool, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[cut]\n"**" = { dim = 0, by = "even" }')
    source = make_source({UP: (4, 2)}, model_type="llama", quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(PlanError, match=r"^checkpoint: weights are quantized by bitsandbytes, .*--tp 1"):
        plan_for(source, 2, tmp_path / "mine.toml" if own else None)


@pytest.mark.parametrize("config", [{}, {"model_type": "rwkv"}, {"quantization_config": {"quant_method": "gguf"}}])
def test_one_rank_needs_no_plan_and_holds_everything(config: dict[str, Any]) -> None:
    source = make_source({"whatever": (3, 5), "scalar": ()}, **config)
    for plan in (None, "transformers"):
        for expert_parallel in (False, True):
            found = plan_for(source, 1, plan, expert_parallel=expert_parallel)
            assert found == plan_of("none", 1, ((WHOLE,), (WHOLE,)))


@pytest.mark.parametrize("plan", [None, "transformers", "mine.toml"])
def test_one_rank_gets_the_rules_for_other_degrees_where_there_are_some(plan: str | None, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('[cut]\n"**.up_proj.weight" = { dim = 1, by = "even" }')
    source = make_source(SMALL, model_type="llama")
    found = plan_for(source, 1, tmp_path / "mine.toml" if plan == "mine.toml" else plan)
    name = {None: "builtin:llama", "transformers": "transformers:llama", "mine.toml": "file:mine.toml"}[plan]
    assert found == plan_of(name, 1, ((WHOLE,),), family=found.family)
    [slices] = all_slices(plan_by(source, 2, found.family))
    assert slices[1] == (Slice.along(1, ((1792, 1792),)) if plan == "mine.toml" else Slice.along(0, ((9472, 9472),)))


def test_one_rank_needs_no_rules_but_a_plan_file_that_is_named_must_be_one(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('model_types = "mine"\n[cut]\n"**" = "whole"')
    with pytest.raises(PlanError, match=r"mine.toml: the plan is for model_types mine, config.json has 'llama'"):
        plan_for(make_source(SMALL, model_type="llama"), 1, tmp_path / "mine.toml")
    with pytest.raises(FormatError, match=r"absent\.toml: "):
        plan_for(make_source(SMALL, model_type="llama"), 1, tmp_path / "absent.toml")


def test_the_name_of_a_plan_file_need_not_be_unicode(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"m\xff.toml")
    path.write_text('[cut]\n"**" = "whole"')
    assert plan_for(make_source(SMALL), 2, path).name == "file:m\\udcff.toml"


def test_errors_carry_the_path_of_the_checkpoint() -> None:
    source = make_source({"model.layers.0.mlp.down_proj.weight": (4, 9)}, model_type="llama")
    for tensors, num_ranks, code in ((source, 2, "indivisible"), (make_source(SMALL, model_type="none"), 2, "no_plan")):
        with pytest.raises(PlanError) as raised:
            plan_for(tensors, num_ranks)
        assert (raised.value.path, raised.value.code) == ("checkpoint", code)


@pytest.mark.parametrize("num_ranks", [-1, 0, 1025])
def test_a_degree_out_of_bounds_is_refused(num_ranks: int) -> None:
    with pytest.raises(PlanError, match=f"^checkpoint: tp: {num_ranks}, expected 1 to 1024$"):
        plan_for(make_source(SMALL, model_type="llama"), num_ranks)


def test_1024_ranks_are_allowed() -> None:
    plan = plan_for(make_source({UP: (2048, 1)}, model_type="llama"), 1024)
    assert ranges_of(plan) == [((2 * rank, 2),) for rank in range(1024)]


# Tensors that no rule names.


@pytest.mark.parametrize(
    "name",
    ["model.layers.0.mlp.gate.weight", "h.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight_scale"],
)
def test_a_tensor_that_no_rule_names_is_refused_or_held_whole_on_request(name: str) -> None:
    source = make_source({**SMALL, name: (7, 8)}, model_type="llama")
    with pytest.raises(PlanError) as caught:
        plan_for(source, 2)
    assert str(caught.value) == (
        f"checkpoint: tensor '{name}': no rule of plan 'builtin:llama' matches it: add a rule (--plan FILE;"
        " `relayout plans check SRC` lists all of these), or hold such tensors whole on every rank"
        " (--unmatched replicate)"
    )
    plan = plan_for(source, 2, unmatched="replicate")
    halves = (Slice.along(0, ((0, 9472),)), Slice.along(0, ((9472, 9472),)))
    family = find_family("llama").resolved(source.config)
    assert plan == plan_of("builtin:llama", 2, (halves, (WHOLE, WHOLE)), unmatched=(name,), family=family)


def test_the_first_tensor_that_no_rule_names_is_told_and_how_many_more() -> None:
    shapes = {"a": (7, 8), **SMALL, "b": (3,), "c": ()}
    with pytest.raises(
        PlanError, match=r"tensor 'a': no rule of plan 'builtin:llama' matches it \(nor 2 others\): add"
    ):
        plan_for(make_source(shapes, model_type="llama"), 2)
    assert plan_for(make_source(shapes, model_type="llama"), 2, unmatched="replicate").unmatched == ("a", "b", "c")


def test_what_a_rule_leaves_whole_is_not_unmatched() -> None:
    source = make_source({"model.norm.weight": (8,)}, model_type="llama")
    assert plan_for(source, 2, unmatched="replicate").unmatched == ()


def test_unmatched_is_one_of_two_words() -> None:
    with pytest.raises(PlanError, match=r"^checkpoint: unmatched: 'ignore', expected 'error' or 'replicate'$"):
        plan_for(make_source(SMALL, model_type="llama"), 2, unmatched="ignore")  # type: ignore[arg-type]


# Requests that cannot be carried out.


def test_the_degrees_that_are_named_are_those_at_which_all_tensors_divide() -> None:
    """12 heads: 1 2 3 4 6 12; 4 KV heads: 1 2 4 8 12 16 and so on; 24 columns: 1 2 3 4 6 8 12 24."""
    shapes = {
        Q_PROJ: (48, 8),
        K_PROJ: (16, 8),
        "model.layers.0.mlp.down_proj.weight": (8, 24),
        "lm_head.weight": (7, 8),
    }
    source = make_source(shapes, model_type="llama", num_attention_heads=12, num_key_value_heads=4, head_dim=4)
    fitting = [1, 2, 4, 12]
    for num_ranks in range(1, 65):
        if num_ranks in fitting:
            assert plan_for(source, num_ranks).num_ranks == num_ranks
            continue
        with pytest.raises(PlanError, match=r"\(this checkpoint can be divided among 1, 2, 4, 12 ranks\)$"):
            plan_for(source, num_ranks)


STACKED = """
[sizes]
experts = 8
[cut]
"experts.up.weight" = { dim = 1, by = "even" }
"experts.down.weight" = { dim = 2, by = "even" }
"experts.odd.weight" = { dim = 0, by = "even" }
[experts]
stacked = "experts.*.*"
"""


def stacked_of(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    """Eight weights in FP8 blocks in one tensor, their scales in another."""
    return {
        f"experts.{name}.weight": (8, rows, columns),
        f"experts.{name}.weight_scale_inv": (8, -(-rows // 128), -(-columns // 128)),
    }


def test_quantized_experts_in_one_tensor_are_cut_as_one_expert_is() -> None:
    shapes = stacked_of("up", 640, 256) | stacked_of("down", 256, 640)
    source = make_source(shapes, stored_as="F8_E4M3", quantization_config=FP8_BLOCKS.config)
    family = parse_family(STACKED, "mine.toml", "mine")
    up, up_scale, down, down_scale = (slices[1] for slices in all_slices(plan_by(source, 5, family)))
    assert (up, up_scale) == (Slice.along(1, ((128, 128),)), Slice.along(1, ((1, 1),)))
    assert (down, down_scale) == (Slice.along(2, ((128, 128),)), Slice.along(2, ((1, 1),)))
    # Inside a block: as of one expert, every rank holds all scales.
    up, up_scale, down, down_scale = (slices[1] for slices in all_slices(plan_by(source, 2, family)))
    assert (up, down) == (Slice.along(1, ((320, 320),)), Slice.along(2, ((320, 320),)))
    assert up_scale == down_scale == Slice()
    owned = plan_by(source, 3, family, expert_parallel=True)
    assert {slices[0] for slices in all_slices(owned)} == {Slice.along(0, ((0, 3),))}
    odd = make_source(stacked_of("odd", 256, 256), stored_as="F8_E4M3", quantization_config=FP8_BLOCKS.config)
    with pytest.raises(PlanError, match=r"dim 0 of a quantized weight .*: a stack of quantized weights"):
        plan_by(odd, 2, family)


def test_a_tensor_without_the_axis_that_its_rule_cuts_is_refused() -> None:
    source = make_source({O_PROJ: (64,)}, model_type="llama", num_attention_heads=8)
    with pytest.raises(
        PlanError, match=rf"^checkpoint: tensor '{O_PROJ}': dim 1 of \[64\]: the dimension does not exist, but rule '"
    ):
        plan_for(source, 2)


@pytest.mark.parametrize(("shape", "axis"), [((8,), 0), ((1, 1, 8, 1), 2)])
def test_axes_of_one_element_do_not_count_where_a_rule_says_so(shape: tuple[int, ...], axis: int) -> None:
    family = parse_family("[cut]\nx = { dim = 0, by = 'even', squeeze = true }", "mine.toml", "mine")
    plan = plan_by(make_source({"x": shape}), 2, family)
    assert plan.cut(0).slices == (Slice.along(axis, ((0, 4),)), Slice.along(axis, ((4, 4),)))
    with pytest.raises(PlanError, match="the dimension does not exist, but rule 'x' divides it"):
        plan_by(make_source({"x": (1, 1)}), 2, family)


def test_a_tensor_is_whole_at_degrees_that_do_not_divide_the_size_that_its_rule_names() -> None:
    rule = "x = { dim = 0, by = 'even', whole_unless = 'towers' }"
    family = parse_family(f"[sizes]\ntowers = 'vision.heads'\n[cut]\n{rule}", "mine.toml", "mine")
    source = make_source({"x": (24,)}, vision={"heads": 6})
    assert plan_by(source, 3, family).cut(0).slices[1] == Slice.along(0, ((8, 8),))
    assert plan_by(source, 4, family).cut(0).slices == (WHOLE,) * 4
    with pytest.raises(PlanError, match=r"size 'towers' is unknown: config.json has no positive integer vision\.heads"):
        plan_by(make_source({"x": (24,)}), 3, family)


def test_a_cut_inside_a_byte_is_refused_with_the_tensors_name() -> None:
    """Rows of 3 elements of 4 bits; 2 of them fill 3 bytes."""
    family = parse_family('[cut]\nw = { dim = 0, by = "even" }', "mine.toml", "mine")
    assert ranges_of(plan_by(make_source({"w": (4, 3)}, stored_as="F4"), 2, family)) == [((0, 2),), ((2, 2),)]
    with pytest.raises(
        PlanError, match=r"^checkpoint: tensor 'w': .*\[2, 3\].* inside a byte.* \(this .* among 1 rank\)$"
    ):
        plan_by(make_source({"w": (2, 3)}, stored_as="F4"), 2, family)


def test_without_kv_heads_every_head_has_its_own() -> None:
    source = make_source({K_PROJ: (64, 8)}, model_type="llama", num_attention_heads=4, head_dim=16)
    assert ranges_of(plan_for(source, 4)) == [((0, 16),), ((16, 16),), ((32, 16),), ((48, 16),)]


@pytest.mark.parametrize(
    ("dim", "config", "message"),
    [
        (60, {"num_attention_heads": 8}, "60 elements, but config.json declares 8 heads"),
        (
            64,
            {"num_attention_heads": 8, "head_dim": 16},
            "64 elements, but config.json declares 8 heads of 16 elements",
        ),
        (64, {"num_attention_heads": 4, "head_dim": 8}, "64 elements, but config.json declares 4 heads of 8 elements"),
        # The text model inside counts.
        (
            64,
            {"num_attention_heads": 8, "text_config": {"num_attention_heads": 7}},
            "64 elements, but config.json declares 7 heads",
        ),
    ],
)
def test_a_shape_that_contradicts_the_configuration_is_refused(dim: int, config: dict[str, int], message: str) -> None:
    with pytest.raises(PlanError, match=rf"^checkpoint: tensor '{Q_PROJ}': dim 0 of \[{dim}, 8\]: {message}"):
        plan_for(make_source({Q_PROJ: (dim, 8)}, model_type="llama", **config), 2)


# As JSON.


def test_a_plan_is_the_same_after_it_was_sent_as_json() -> None:
    plan = plan_for(make_source({**SMALL, "other": (8,)}, model_type="llama"), 2, unmatched="replicate")
    assert plan.unmatched == ("other",)
    assert Plan.from_json(json.loads(json.dumps(plan.as_json()))) == plan


@pytest.mark.parametrize(
    "damage",
    [
        {"name": 5},
        {"cuts": [[{"0": "x"}]]},
        {"cut_of": [99]},
        {"cut_of": [True]},
        {"cut_of": None},
        {"rules": {"cut": {}}},
        {"rules": {"cut": {"x": {"dim": -1}}}},
        {"unmatched": 1},
    ],
)
def test_json_that_is_no_plan_is_refused(damage: dict[str, Any]) -> None:
    good = plan_for(make_source(SMALL, model_type="llama"), 2).as_json()
    with pytest.raises(FormatError):
        Plan.from_json({**good, **damage})
    with pytest.raises(FormatError, match="is not the JSON of a plan: KeyError"):
        Plan.from_json({name: value for name, value in good.items() if name not in damage})


def test_a_plan_of_another_checkpoint_or_degree_is_refused() -> None:
    source = make_source(SMALL, model_type="llama")
    plan = plan_for(source, 2)
    with pytest.raises(PlanError, match="the plan is for 2 ranks and"):
        find_plan(source, 4, plan)
    with pytest.raises(PlanError, match="the plan is for 2 ranks and"):
        find_plan(make_source({**SMALL, "more": (2,)}, model_type="llama"), 2, plan)
