"""Rules are found for what vLLM's own classes take of small checkpoints; tests/plans/observed.jsonl.xz has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.observed_slices import Checkpoint, Tensor, read
from support.plan_comparing import differences

from relayout.core.slices import WHOLE, Slice
from relayout.observe.fitting import Example, FittedPlan, fit
from relayout.plans.family import parse_family

FITTED = [
    *("llama", "phi3", "gpt2", "bloom", "falcon_40b", "falcon_mq", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next"),
    *("llama4_text", "glm4_moe"),
]
OBSERVED = {
    one.name.removeprefix("family:"): one for one in read(Path(__file__).parents[1] / "plans" / "observed.jsonl.xz")
}


def checkpoint_of(
    shapes: Mapping[str, tuple[int, ...]], observed: Mapping[int, Sequence[Sequence[Slice]]], **config: Any
) -> Checkpoint:
    """One of which ranks take these slices of each tensor."""
    tensors = [Tensor(name, "BF16", shape) for name, shape in shapes.items()]
    slices = {degree: [tuple(cut) for cut in by_tensor] for degree, by_tensor in observed.items()}
    return Checkpoint("odd", "engine", {"model_type": "odd", **config}, tensors, slices)


def fitted_to(*checkpoints: Checkpoint, held_out: Sequence[int] = ()) -> FittedPlan:
    return fit([Example(checkpoint, checkpoint.observed) for checkpoint in checkpoints], held_out)


def agrees(fitted: FittedPlan, checkpoint: Checkpoint) -> bool:
    """Whether the plan file gives what was observed."""
    return not list(differences(parse_family(fitted.as_toml("observed"), "plan.toml", "plan"), checkpoint))


def more_than(fitted: FittedPlan, checkpoint: Checkpoint) -> list[str]:
    """Patterns of what ranks hold more of by the plan file than was observed; there is no other difference."""
    found = list(differences(parse_family(fitted.as_toml("observed"), "plan.toml", "plan"), checkpoint))
    assert {one.what for one in found} == {"more"}
    return [one.pattern for one in found]


@pytest.mark.parametrize("name", FITTED)
def test_rules_are_found_for_a_family_and_hold_at_a_degree_that_they_were_not_found_with(name: str) -> None:
    assert len(OBSERVED[name].observed) > 1
    fitted = fitted_to(OBSERVED[name], held_out=[max(OBSERVED[name].observed)])
    assert not fitted.unmatched
    assert any(rule.dim is not None for rule in fitted.family.rules)
    assert agrees(fitted, OBSERVED[name])


def test_a_plan_is_short_and_has_the_words_that_a_person_would_use() -> None:
    text = fitted_to(OBSERVED["mixtral"]).as_toml("observed")
    assert '"model.layers.*.self_attn.{k,v}_proj.weight" = { dim = 0, by = "kv_heads" }' in text
    assert '"model.layers.*.self_attn.o_proj.weight" = { dim = 1, by = "heads" }' in text
    assert '"model.embed_tokens.weight" = { dim = 0, by = "vocabulary" }' in text
    assert '"model.layers.*.block_sparse_moe.experts.*.w2.weight" = { dim = 1, by = "even" }' in text
    assert 'each = "model.layers.*.block_sparse_moe.experts.#.**"' in text
    assert len(text.splitlines()) < 30


def test_what_is_otherwise_at_the_degree_that_was_held_out_is_no_rule_but_listed() -> None:
    llama = OBSERVED["llama"]
    [t] = [t for t, tensor in enumerate(llama.tensors) if tensor.name.endswith("layers.0.mlp.up_proj.weight")]
    slices = list(llama.observed[8])
    slices[t] = (*slices[t][1:], slices[t][0])
    wrong = replace(llama, observed={**llama.observed, 8: slices})
    fitted = fitted_to(wrong, held_out=[8])
    assert fitted.unmatched == {"model.layers.*.mlp.up_proj.weight": "dim 0 by even does not hold at 8 ranks"}
    assert more_than(fitted, wrong) == list(fitted.unmatched)


def test_what_no_rule_gives_is_held_whole_and_listed() -> None:
    odd = map(Slice.of, ({0: ((0, 5),)}, {0: ((5, 3),), 1: ((0, 4),)}))
    checkpoint = checkpoint_of({"w": (8, 4), "v": (8, 4)}, {2: [list(odd), [WHOLE, WHOLE]]})
    fitted = fitted_to(checkpoint)
    assert list(fitted.unmatched) == ["w"]
    assert "w: it is sliced along dims [0, 1]" in fitted.as_toml("observed")
    assert more_than(fitted, checkpoint) == ["w"]


def test_what_fits_one_checkpoint_by_chance_is_refuted_by_another() -> None:
    """With as many groups as heads, a tensor that is cut by the one seems to be cut by the other."""

    def held(groups: int, degree: int, rank: int) -> Slice:
        """Of 32 elements for each group: its groups, or the one that it shares."""
        count = max(1, groups // degree)
        return Slice.along(0, ((32 * (rank * groups // degree), 32 * count),))

    first, second = (
        checkpoint_of(
            {"layers.0.attn.w": (32 * groups, 4)},
            {degree: [[held(groups, degree, rank) for rank in range(degree)]] for degree in (2, 8)},
            num_attention_heads=8,
            n_groups=groups,
        )
        for groups in (8, 4)
    )
    [by_chance] = fitted_to(first).family.rules
    both = fitted_to(first, second)
    assert (by_chance.units, both.family.rules[0].units) == (("heads",), ("state_groups",))
    assert not both.unmatched


def test_parts_beside_the_language_model_are_cut_evenly_or_held_whole() -> None:
    name = "visual.blocks.0.attn.qkv.weight"
    thirds = [Slice.along(0, ((8 * r, 8), (16 + 8 * r, 8), (32 + 8 * r, 8))) for r in range(2)]
    checkpoint = checkpoint_of({name: (48, 4)}, {2: [thirds]}, num_attention_heads=8, num_key_value_heads=4)
    text = fitted_to(checkpoint).as_toml("observed")
    assert '= { dim = 0, by = ["even", "even", "even"], or = "whole" }' in text


def test_a_long_list_has_lines_of_its_own() -> None:
    names = [f"model.layers.0.{word}.weight" for word in ("a_long_name_of_a_norm", "b_long_name_of_a_norm")]
    sizes = {"mamba_n_heads": 8, "mamba_d_head": 4, "mamba_n_groups": 2, "mamba_d_state": 16}
    parts = [(0, 16), (32, 16), (64, 16), (96, 16), (128, 4)]
    cut = [Slice.along(0, [(start + length * r, length) for start, length in parts]) for r in range(2)]
    shapes = {**dict.fromkeys(names, (4,)), "layers.0.mamba.in_proj.weight": (136, 4)}
    fitted = fitted_to(checkpoint_of(shapes, {2: [*[[WHOLE, WHOLE]] * 2, cut]}, **sizes))
    text = fitted.as_toml("observed " * 40)
    assert max(map(len, text.splitlines())) <= 120
    assert '    "state_heads * one",\n] }' in text
    assert parse_family(text, "plan.toml", "plan").rules == fitted.family.rules
    assert '"model.layers.*.{a,b}_long_name_of_a_norm.weight" = "whole"' in text


def test_strange_names_give_a_plan_file_that_can_be_read() -> None:
    names = [
        "a.weight",
        'quote".weight',
        "new\nline.weight",
        "\x7f.weight",
        "é.w",
        "🦙.w",
        f"x[y].{'long' * 30}.weight",
    ]
    checkpoint = checkpoint_of(
        dict.fromkeys(names, (4, 4)), {2: [[Slice.along(0, ((2 * r, 2),)) for r in range(2)]] * 7}
    )
    fitted = fitted_to(checkpoint)
    family = parse_family(fitted.as_toml("observed"), "plan.toml", "plan")
    assert family.rules == fitted.family.rules
    assert [rule for name in names if (rule := family.rule(name)) is None or rule.dim != 0] == []
