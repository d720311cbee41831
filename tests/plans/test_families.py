"""Every model family: what ranks hold is what engines cut out, and all ranks together give the source back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import add_tensor
from support.conversions import Conversions, grouped
from support.engine_oracle import Array, IndivisibleError, expected, owners, split_cut
from support.families import BESIDE_THE_LANGUAGE_MODEL, EXPERT_FAMILIES, FAMILIES, MULTIMODAL, Entry, Sizes
from support.local_stores import read_source
from support.models import read_tensors
from support.planning import all_slices
from support.rebuilding import assert_ranks_give_back, indices, ranks_of

import relayout
from relayout.checkpoint.source import SourceCheckpoint, SourceTensor
from relayout.core.extents import Extent
from relayout.core.slices import Slice
from relayout.errors import PlanError
from relayout.plans import planner
from relayout.plans.plan import Plan
from relayout.plans.planner import plan_for

DEGREES = range(2, 17)


def make_source(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> SourceCheckpoint:
    """A checkpoint of BF16 tensors, none of which is stored anywhere."""
    tensors = (SourceTensor(name, "BF16", shape, 0, Extent(0, 0)) for name, shape in shapes.items())
    return SourceCheckpoint(Path("checkpoint"), (), tuple(tensors), {}, dict(config), None, (), ())


def fits(entries: list[Entry], sizes: Sizes, num_ranks: int) -> bool:
    """Whether engines can divide every one of the tensors."""
    try:
        for cut, shape in {(entry.cut, entry.shape) for entry in entries}:
            expected(cut, numbered_along(split_cut(cut)[1], shape), num_ranks, sizes)
    except IndivisibleError:
        return False
    return True


def assert_cut_as_expected(source: SourceCheckpoint, plan: Plan, entries: list[Entry], sizes: Sizes, what: str) -> None:
    slices = {tensor.name: parts for tensor, parts in zip(source.tensors, all_slices(plan), strict=True)}
    assert {entry.name for entry in entries} <= slices.keys()
    cut_of = {tensor.name: cut for tensor, cut in zip(source.tensors, plan.cut_of, strict=True)}
    for entry in {(entry.cut, entry.shape, cut_of[entry.name]): entry for entry in entries}.values():
        parts = slices[entry.name]
        numbered = numbered_along(split_cut(entry.cut)[1], entry.shape)
        for rank, wanted in enumerate(expected(entry.cut, numbered, plan.num_ranks, sizes)):
            found = taken(numbered, parts[rank])
            np.testing.assert_array_equal(found, wanted, err_msg=f"{what}: {entry.name} ({entry.cut}), rank {rank}")


def numbered_along(axis: int, shape: tuple[int, ...]) -> Array:
    """Numbers that tell the places along an axis of that shape, of size 1 along the others."""
    return np.arange(shape[axis] if shape else 1).reshape([-1 if i == axis else 1 for i in range(len(shape))])


def taken(whole: Array, part: Slice) -> Array:
    return whole if part.ranges is None else whole.take(indices(part), part.axis)


# The checkpoints themselves.


@pytest.mark.parametrize("name", grouped([*FAMILIES]))
def test_a_checkpoint_is_what_its_table_says_and_each_byte_depends_on_its_position(
    name: str, conversions: Conversions
) -> None:
    family = FAMILIES[name]
    tensors = read_tensors(conversions.source(name))
    language = {key: array.shape for key, array in tensors.items() if not BESIDE_THE_LANGUAGE_MODEL.match(key)}
    assert language == {entry.name: entry.shape for entry in family.entries(family.all_sizes())}
    assert (language.keys() < tensors.keys()) == (name in MULTIMODAL)
    assert len(list(conversions.source(name).glob("*.safetensors"))) == family.num_shards
    for key, array in tensors.items():
        if array.size > 4 and array.dtype != np.uint8:
            assert len(np.unique(array)) > array.size**0.5 / 2, key
        elif array.size > 4:
            assert len(np.unique(array)) > 1, key


# What each rank holds.


@pytest.mark.parametrize("name", grouped([*FAMILIES]))
def test_each_degree_up_to_16_at_which_engines_can_divide_is_accepted_and_ranks_hold_what_they_cut(
    name: str, conversions: Conversions
) -> None:
    family = FAMILIES[name]
    sizes = family.all_sizes()
    entries = family.entries(sizes)
    source = read_source(conversions.source(name))
    fitting = [num_ranks for num_ranks in DEGREES if fits(entries, sizes, num_ranks)]
    assert set(fitting) >= ({2, 4, 8} if name != "falcon_7b" else set())
    for num_ranks in fitting:
        plan = conversions.planned(name, num_ranks)
        assert isinstance(plan, Plan), plan
        assert_cut_as_expected(source, plan, entries, sizes, f"{name}, {num_ranks} ranks")


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("name", grouped([*FAMILIES]))
def test_all_ranks_together_give_back_every_byte_of_the_source(name: str, tp: int, conversions: Conversions) -> None:
    if name == "falcon_7b":  # 71 heads.
        with pytest.raises(PlanError, match=r"self_attention.dense.weight.* 71 "):
            conversions.at(name, tp)
        tp = 1
    assert_ranks_give_back(conversions.at(name, tp), read_tensors(conversions.source(name)), tp)


@pytest.mark.parametrize("name", grouped(["bloom", "falcon_mq", "falcon_40b", "falcon_rw"]))
@pytest.mark.parametrize("tp", [2, 8])
def test_fused_heads_of_a_rank_are_its_queries_its_keys_its_values(
    name: str, tp: int, conversions: Conversions
) -> None:
    """By the views that vLLM's loaders take (bloom.py, falcon.py), then the heads of QKVParallelLinear."""
    sizes = FAMILIES[name].all_sizes()
    heads, kv_heads, head_dim, hidden = sizes["A"], sizes["K"], sizes["D"], sizes["H"]
    whole, held = read_tensors(conversions.source(name)), [*ranks_of(conversions.at(name, tp))]
    fused = [key for key in whole if key.endswith("query_key_value.weight")]
    assert len(fused) == sizes["L"]
    for key in fused:
        groups = whole[key].reshape(kv_heads, heads // kv_heads + 2, head_dim, hidden)
        query = groups[:, :-2].reshape(heads, head_dim, hidden)
        for rank, tensors in held:
            first = rank * kv_heads // tp
            mine = slice(first, first + max(1, kv_heads // tp))
            wanted = [np.split(query, tp)[rank], groups[mine, -2], groups[mine, -1]]
            _, found = tensors[key]
            np.testing.assert_array_equal(found, np.concatenate(wanted).reshape(-1, hidden), err_msg=key)


# Other sizes.


@st.composite
def drawn_sizes(draw: st.DrawFn, name: str) -> Sizes:
    """Sizes of the same architecture."""
    base = FAMILIES[name].all_sizes()
    kv_heads = 1 if name in ("falcon_7b", "falcon_mq") else draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    per_group = draw(st.sampled_from([1, 2, 3, 4, 7]))
    if base["K"] == base["A"] or "N" in base:
        per_group, kv_heads = 1, kv_heads * per_group
    head_dim = draw(st.sampled_from([2, 4, 8]))
    heads = kv_heads * per_group
    sizes = {
        "K": kv_heads,
        "A": heads,
        "D": head_dim,
        "H": heads * head_dim,
        "I": draw(st.sampled_from([32, 48, 56, 96, 120, 256])),
        "V": draw(st.integers(1, 400)),
        "M": draw(st.sampled_from([8, 24, 56])),
        "S": draw(st.sampled_from([8, 16, 48])),
        "E": draw(st.sampled_from([2, 3, 8])),
        "P": 4,
    }
    if name == "gpt_oss_mxfp4":
        sizes |= {"I": 32 * draw(st.integers(1, 12)), "H": 32 * draw(st.integers(1, 3))}
    if name == "qwen3_next":
        key_heads = draw(st.sampled_from([2, 4, 6, 16]))
        sizes |= {"G": key_heads, "W": key_heads * draw(st.sampled_from([1, 2, 3])), "B": 4, "U": head_dim}
    return FAMILIES[name].all_sizes(**sizes)


@pytest.mark.parametrize("name", grouped([*FAMILIES]))
def test_at_other_sizes_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_DEGREES_TO_TRY", ())  # Of a refusal, how it goes on takes longer than all the rest.
    family = FAMILIES[name]
    outcomes = []

    @given(sizes=drawn_sizes(name), num_ranks=st.sampled_from([2, 3, 4, 6, 7, 8, 12, 16]))
    @settings(max_examples=settings().max_examples // 4)
    def check(sizes: Sizes, num_ranks: int) -> None:
        entries = [entry for entry in family.entries(sizes) if not entry.expert]
        source = make_source({entry.name: entry.shape for entry in entries}, family.config(sizes))
        outcomes.append(fits(entries, sizes, num_ranks))
        if not outcomes[-1]:
            with pytest.raises(PlanError, match=r"^checkpoint: tensor '"):
                plan_for(source, num_ranks)
            return
        plan = plan_for(source, num_ranks)
        assert_cut_as_expected(source, plan, entries, sizes, f"{name}, {num_ranks} ranks")
        for tensor, parts in zip(source.tensors, all_slices(plan), strict=True):
            numbered = numbered_along(parts[0].axis, tensor.shape)
            held = np.concatenate([taken(numbered, part).ravel() for part in parts])
            assert np.array_equal(np.unique(held), numbered.ravel()), tensor.name

    check()
    assert name == "falcon_7b" or set(outcomes) == {True, False}


# Refusals.


@pytest.mark.parametrize("name", grouped([*FAMILIES]))
def test_a_refusal_names_tensor_axis_size_and_just_the_degrees_at_which_engines_can_divide(
    name: str, conversions: Conversions
) -> None:
    shapes = {tensor.name: tensor.shape for tensor in read_source(conversions.source(name)).tensors}
    sizes = FAMILIES[name].all_sizes()
    entries = FAMILIES[name].entries(sizes)
    fitting = {num_ranks for num_ranks in DEGREES if fits(entries, sizes, num_ranks)}
    refused = {3, 16} - fitting
    assert refused
    for num_ranks in refused:
        message = str(conversions.planned(name, num_ranks))
        told = re.search(
            r"tensor '([^']+)': dim (\d) of (\[[\d, ]+\]).* \(this checkpoint can be cut for --tp ([\d, ]+)\)$",
            message,
        )
        assert told, message
        assert str(list(shapes[told[1]])) == told[3]
        size = re.search(r"\]: (\d+) elements", message)
        assert not size or int(size[1]) == shapes[told[1]][int(told[2])], message
        assert re.search(rf"\b{num_ranks}\b", message.partition("]")[2].partition(" (this")[0]), message
        assert {int(degree) for degree in told[4].split(", ") if int(degree) <= 16} == fitting | {1}


# Expert parallel.


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("name", grouped(EXPERT_FAMILIES))
def test_with_expert_parallel_each_expert_has_one_owner_and_the_rest_is_as_without(name: str, num_ranks: int) -> None:
    family = FAMILIES[name]
    # Sizes of which 3 and 5 ranks can hold their shares too.
    more = {"A": 15, "K": 15, "H": 15 * 32, "I": 480, "S": 480, "M": 17, "D": 32} if num_ranks in (3, 5) else {}
    if more and name == "qwen3_next":
        more |= {"G": 15, "W": 30}
    if more and name == "glm4_moe":  # Its shared expert is as large as the others.
        more |= {"M": 60}
    sizes = family.all_sizes(**more)
    entries = family.entries(sizes)
    source = make_source({entry.name: entry.shape for entry in entries}, family.config(sizes))
    plan = plan_for(source, num_ranks, expert_parallel=True)
    of_experts = [entry for entry in entries if ".experts." in entry.name]
    rest = [entry for entry in entries if ".experts." not in entry.name]
    owner = owners(sizes["E"], num_ranks)
    assert sorted(owner) == owner
    assert of_experts
    slices = {tensor.name: parts for tensor, parts in zip(source.tensors, all_slices(plan), strict=True)}
    for entry in of_experts:
        numbered = np.arange(entry.shape[0])
        for rank, part in enumerate(slices[entry.name]):
            if entry.stacked:
                assert part.axis == 0
                assert indices(part).tolist() == [n for n in numbered if owner[n] == rank], entry.name
            else:
                assert entry.expert is not None
                assert (part.is_whole, part.is_held) == (owner[entry.expert] == rank,) * 2, entry.name
    assert_cut_as_expected(source, plan, rest, sizes, f"{name}, {num_ranks} ranks")
    without = make_source({entry.name: entry.shape for entry in rest}, family.config(sizes))
    assert all_slices(plan_for(without, num_ranks)) == tuple(slices[tensor.name] for tensor in without.tensors)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", grouped(EXPERT_FAMILIES))
def test_ranks_with_experts_of_their_own_give_back_every_byte_and_hold_no_others(
    name: str, tp: int, conversions: Conversions
) -> None:
    family = FAMILIES[name]
    out = conversions.at(name, tp, experts=True)
    whole = read_tensors(conversions.source(name))
    assert_ranks_give_back(out, whole, tp)
    owner = owners(family.all_sizes()["E"], tp)
    experts = [entry for entry in family.entries(family.all_sizes()) if ".experts." in entry.name]
    for rank, tensors in ranks_of(out):
        held = {key: array for key, (_, array) in tensors.items()}
        for entry in experts:
            if entry.stacked:
                mine = [number for number, of in enumerate(owner) if of == rank]
                np.testing.assert_array_equal(held[entry.name], whole[entry.name][mine], err_msg=entry.name)
            elif owner[entry.expert or 0] == rank:
                np.testing.assert_array_equal(held[entry.name], whole[entry.name], err_msg=entry.name)
            else:
                assert entry.name not in held
    assert relayout.verify(out, source=conversions.source(name)).ok


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2"])
def test_a_model_without_experts_is_not_converted_as_if_it_had(name: str, conversions: Conversions) -> None:
    with pytest.raises(PlanError, match="experts"):
        plan_for(read_source(conversions.source(name)), 2, expert_parallel=True)


# Tensors that no rule names.


@pytest.mark.parametrize("name", grouped([*FAMILIES]))
def test_a_tensor_that_no_rule_names_is_an_error_that_names_it_or_held_whole_on_request(
    name: str, conversions: Conversions
) -> None:
    source = read_source(conversions.source(name))
    extra = "model.layers.1.self_attn.strange_proj.weight"
    more = replace(source, tensors=(*source.tensors, SourceTensor(extra, "BF16", (24, 8), 0, Extent(0, 384))))
    tp = 71 if name == "falcon_7b" else 2
    with pytest.raises(PlanError, match=rf"tensor '{extra}': .*--unmatched replicate"):
        plan_for(more, tp)
    plan = plan_for(more, tp, unmatched="replicate")
    assert plan.unmatched == (extra,)
    assert all(part.is_whole for part in all_slices(plan)[-1])
    assert all_slices(plan)[:-1] == all_slices(plan_for(source, tp))


def test_a_tensor_held_whole_on_request_is_in_every_rank_and_the_summary_lists_it(
    conversions: Conversions, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from relayout.cli.app import app

    source = add_tensor(
        conversions.source("llama"), tmp_path / "source", "model.strange", np.arange(35, dtype=np.int32).reshape(5, 7)
    )
    with pytest.raises(PlanError, match=r"tensor 'model.strange': no rule"):
        relayout.convert(source, tmp_path / "out", tp=2)
    run = CliRunner().invoke(
        app, ["convert", str(source), "-o", str(tmp_path / "out"), "--tp", "2", "--unmatched", "replicate"]
    )
    assert run.exit_code == 0, run.output
    assert "model.strange" in run.output
    whole = read_tensors(source)
    assert_ranks_give_back(tmp_path / "out", whole, 2)
    for _, held in ranks_of(tmp_path / "out"):
        np.testing.assert_array_equal(held["model.strange"][1], whole["model.strange"])
