"""Rules are found for what engines cut, which is written down in numpy: engine_oracle.py knows nothing of rules."""

from __future__ import annotations

import numpy as np
import pytest
from support.engine_oracle import IndivisibleError, expected, split_cut
from support.families import FAMILIES
from support.planning import make_source

from relayout.checkpoint.source import SourceCheckpoint
from relayout.core.slices import WHOLE, Slice
from relayout.observe.elements import joined, same_elements
from relayout.observe.fitting import Example, Fitted, fit
from relayout.plans.family import parse_family
from relayout.plans.planner import plan_by

Slices = list[tuple[Slice, ...]]

FITTED = [
    *("llama", "phi3", "gpt2", "bloom", "falcon_40b", "falcon_mq", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next"),
    *("llama4_text", "glm4_moe"),
]


def observed_of(name: str) -> tuple[SourceCheckpoint, dict[int, Slices]]:
    """A family's small checkpoint, and what engines take of it at each degree that they accept."""
    family = FAMILIES[name]
    sizes = family.all_sizes()
    entries = family.entries(sizes)
    source = make_source({entry.name: entry.shape for entry in entries}, **family.config(sizes))
    observed = {}
    for degree in (2, 4, 8, 16):
        try:
            observed[degree] = [_cut(entry.shape, entry.cut, degree, sizes) for entry in entries]
        except IndivisibleError:
            continue
    return source, observed


def _cut(shape: tuple[int, ...], cut: str, degree: int, sizes: dict[str, int]) -> tuple[Slice, ...]:
    kind, axis = split_cut(cut)
    if kind == "whole":
        return (WHOLE,) * degree
    numbers = np.arange(shape[axis]).reshape([-1 if other == axis else 1 for other in range(len(shape))])
    line = np.broadcast_to(numbers, [size if other == axis else 1 for other, size in enumerate(shape)])
    held = (part.ravel() for part in expected(cut, line, degree, sizes))
    return tuple(Slice.along(axis, joined((int(i), 1) for i in part)) for part in held)


def agrees(fitted: Fitted, source: SourceCheckpoint, observed: dict[int, Slices]) -> bool:
    """Whether the plan file gives what was observed."""
    family = parse_family(fitted.as_toml("observed"), "plan.toml", "plan")
    return all(
        same_elements(plan_by(source, degree, family).cut(t).slices, slices[t], tensor.shape)
        for degree, slices in observed.items()
        for t, tensor in enumerate(source.tensors)
    )


@pytest.mark.parametrize("name", FITTED)
def test_rules_are_found_for_a_family_and_hold_at_a_degree_that_they_were_not_found_with(name: str) -> None:
    source, observed = observed_of(name)
    assert len(observed) > 1
    fitted = fit([Example(source, observed)], [max(observed)])
    assert not fitted.unmatched
    assert any(rule.dim is not None for rule in fitted.family.rules)
    assert agrees(fitted, source, observed)


def test_a_plan_is_short_and_has_the_words_that_a_person_would_use() -> None:
    source, observed = observed_of("mixtral")
    text = fit([Example(source, observed)]).as_toml("observed")
    assert '"model.layers.*.self_attn.{k,v}_proj.weight" = { dim = 0, by = "kv_heads" }' in text
    assert '"model.layers.*.self_attn.o_proj.weight" = { dim = 1, by = "heads" }' in text
    assert '"model.embed_tokens.weight" = { dim = 0, by = "vocabulary" }' in text
    assert '"model.layers.*.block_sparse_moe.experts.*.w2.weight" = { dim = 1, by = "even" }' in text
    assert 'each = "model.layers.*.block_sparse_moe.experts.#.**"' in text
    assert len(text.splitlines()) < 30


def test_what_is_otherwise_at_the_degree_that_was_held_out_is_no_rule_but_listed() -> None:
    source, observed = observed_of("llama")
    [t] = [t for t, tensor in enumerate(source.tensors) if tensor.name.endswith("layers.0.mlp.up_proj.weight")]
    wrong = {degree: list(slices) for degree, slices in observed.items()}
    wrong[8][t] = (*wrong[8][t][1:], wrong[8][t][0])
    fitted = fit([Example(source, wrong)], [8])
    assert fitted.unmatched == {"model.layers.*.mlp.up_proj.weight": "dim 0 by even does not hold at 8 ranks"}
    assert agrees(fitted, source, wrong)
    assert not agrees(fitted, source, observed)


def test_a_flipped_axis_a_shifted_range_and_a_missing_expert_are_seen() -> None:
    source, observed = observed_of("mixtral")
    fitted = fit([Example(source, observed)])
    names = [tensor.name for tensor in source.tensors]
    changes = {
        "model.layers.1.self_attn.o_proj.weight": lambda part: Slice.along(0, part.ranges_along(1)),
        "model.layers.0.block_sparse_moe.experts.3.w1.weight": lambda part: Slice.along(
            0, tuple((max(0, start - 1), length) for start, length in part.ranges_along(0))
        ),
        "model.layers.0.block_sparse_moe.experts.7.w2.weight": lambda part: Slice.along(1, ()),
    }
    assert agrees(fitted, source, observed)
    for name, change in changes.items():
        t = names.index(name)
        changed = {degree: list(slices) for degree, slices in observed.items()}
        changed[4][t] = tuple(map(change, changed[4][t]))
        assert not agrees(fitted, source, changed), name


def test_slices_that_no_rule_gives_are_kept_as_they_are() -> None:
    source = make_source({"w": (8, 4), "v": (8, 4)}, model_type="odd")
    odd = {0: ((0, 5),)}, {0: ((5, 3),), 1: ((0, 4),)}
    observed = {2: [tuple(map(Slice.of, odd)), (WHOLE, WHOLE)]}
    fitted = fit([Example(source, observed)])
    assert list(fitted.unmatched) == ["w"]
    assert "w: it is cut along dims [0, 1]" in fitted.as_toml("observed")
    assert agrees(fitted, source, observed)


def test_the_last_rank_of_slices_that_no_rule_gives_holds_what_no_rank_takes() -> None:
    source = make_source({"w": (8, 4)}, model_type="odd")
    loaded, held = ([Slice.along(0, (part,)) for part in ranges] for ranges in (((0, 3), (5, 2)), ((0, 3), (3, 5))))
    fitted = fit([Example(source, {2: [tuple(loaded)]})])
    assert agrees(fitted, source, {2: [tuple(held)]})


def test_what_fits_one_checkpoint_by_chance_is_refuted_by_another() -> None:
    """With as many groups as heads, a tensor that is cut by the one seems to be cut by the other."""

    def held(groups: int, degree: int, rank: int) -> Slice:
        """Of 32 elements for each group: its groups, or the one that it shares."""
        count = max(1, groups // degree)
        return Slice.along(0, ((32 * (rank * groups // degree), 32 * count),))

    examples = []
    for heads, groups in ((8, 8), (8, 4)):
        source = make_source({"layers.0.attn.w": (32 * groups, 4)}, num_attention_heads=heads, n_groups=groups)
        observed = {degree: [tuple(held(groups, degree, rank) for rank in range(degree))] for degree in (2, 8)}
        examples.append(Example(source, observed))
    [first] = fit(examples[:1]).family.rules
    [both] = fit(examples).family.rules
    assert (first.units, both.units) == (("heads",), ("state_groups",))
    assert not fit(examples).unmatched


def test_parts_beside_the_language_model_are_cut_evenly_or_held_whole() -> None:
    name = "visual.blocks.0.attn.qkv.weight"
    source = make_source({name: (48, 4)}, num_attention_heads=8, num_key_value_heads=4)
    thirds = [tuple(Slice.along(0, ((8 * r, 8), (16 + 8 * r, 8), (32 + 8 * r, 8))) for r in range(2))]
    text = fit([Example(source, {2: thirds})]).as_toml("observed")
    assert '= { dim = 0, by = ["even", "even", "even"], or = "whole" }' in text


def test_a_long_list_has_lines_of_its_own() -> None:
    names = [f"model.layers.0.{word}.weight" for word in ("a_long_name_of_a_norm", "b_long_name_of_a_norm")]
    sizes = {"mamba_n_heads": 8, "mamba_d_head": 4, "mamba_n_groups": 2, "mamba_d_state": 16}
    source = make_source({**dict.fromkeys(names, (4,)), "layers.0.mamba.in_proj.weight": (136, 4)}, **sizes)
    parts = [(0, 16), (32, 16), (64, 16), (96, 16), (128, 4)]
    cut = tuple(Slice.along(0, [(start + length * r, length) for start, length in parts]) for r in range(2))
    fitted = fit([Example(source, {2: [(WHOLE, WHOLE)] * 2 + [cut]})])
    text = fitted.as_toml("observed " * 40)
    assert max(map(len, text.splitlines())) <= 120
    assert '    "state_heads * one",\n] }' in text
    assert parse_family(text, "plan.toml", "plan").rules == fitted.family.rules
    assert '"model.layers.*.{a,b}_long_name_of_a_norm.weight" = "whole"' in text
