"""Every model family: what ranks hold is what engines cut out, and all ranks together give the source back.

Plans are compared at all degrees for families that are cut in each way, bytes for those of `OF_EACH_KIND`. All plans
are compared with what vLLM's own classes load, of checkpoints of several sizes, in test_observed_families.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.conversions import OF_EACH_KIND, Conversions, grouped
from support.engine_oracle import Array, IndivisibleError, expected, owners, split_cut
from support.families import (
    BESIDE_THE_LANGUAGE_MODEL,
    EXPERT_FAMILIES,
    FAMILIES,
    MULTIMODAL,
    NOT_OBSERVED,
    Entry,
    Sizes,
)
from support.hub_models import MODELS
from support.local_stores import read_source
from support.models import read_tensors
from support.planning import all_slices, make_source, try_plan
from support.profile import sample
from support.rebuilding import assert_ranks_give_back, indices
from typer.testing import CliRunner

from relayout.checkpoint.source import SourceCheckpoint
from relayout.cli.app import app
from relayout.core.slices import Slice
from relayout.errors import PlanError
from relayout.plans.plan import Plan
from relayout.plans.planner import plan_for

DEGREES = range(2, 17)
EACH_WAY = [
    *(name for name in OF_EACH_KIND if name in FAMILIES),
    *("gemma", "deepseek_v2", "qwen3_next", "gpt_oss", "falcon_7b", "bloom", "llava", "gemma4", "mimo_v2"),
    *sorted(NOT_OBSERVED),
]
"""Families that are cut in all ways that there are, and those that no engine was observed to cut.

All others are compared with what vLLM's own classes took (test_observed_families.py)."""


def source_of(name: str, entries: list[Entry], sizes: Sizes, **more: tuple[int, ...]) -> SourceCheckpoint:
    """A checkpoint of these tensors, none of which is stored anywhere."""
    return make_source({entry.name: entry.shape for entry in entries} | more, **FAMILIES[name].config(sizes))


def fits(entries: list[Entry], sizes: Sizes, num_ranks: int) -> bool:
    """Whether engines can divide every one of the tensors."""
    try:
        for cut, shape in {(entry.cut, entry.shape) for entry in entries}:
            expected(cut, numbered_along(split_cut(cut)[1], shape), num_ranks, sizes)
    except IndivisibleError:
        return False
    return True


def assert_cut_as_expected(source: SourceCheckpoint, plan: Plan, entries: list[Entry], sizes: Sizes, what: str) -> None:
    cut_of = {tensor.name: cut for tensor, cut in zip(source.tensors, plan.cut_of, strict=True)}
    for entry in {(entry.cut, entry.shape, cut_of[entry.name]): entry for entry in entries}.values():
        numbered = numbered_along(split_cut(entry.cut)[1], entry.shape)
        slices = plan.cuts[cut_of[entry.name]].slices
        for rank, wanted in enumerate(expected(entry.cut, numbered, plan.num_ranks, sizes)):
            held = part_of(numbered, slices[rank])
            np.testing.assert_array_equal(held, wanted, err_msg=f"{what}: {entry.name} ({entry.cut}), rank {rank}")
        is_held = np.zeros(numbered.size, bool)
        for part in slices:
            is_held[part_of(numbered, part)] = True
        assert is_held.all(), entry.name


def numbered_along(axis: int, shape: tuple[int, ...]) -> Array:
    """Numbers that tell the places along an axis of that shape, of size 1 along the others."""
    return np.arange(shape[axis] if shape else 1).reshape([-1 if i == axis else 1 for i in range(len(shape))])


def part_of(whole: Array, part: Slice) -> Array:
    return whole if part.ranges is None else whole.take(indices(part), part.axis)


# The checkpoints themselves.


@pytest.mark.parametrize("name", grouped([*FAMILIES]))
def test_a_checkpoint_is_what_its_table_says_and_each_byte_depends_on_its_position(
    name: str, conversions: Conversions
) -> None:
    family = FAMILIES[name]
    tensors = read_tensors(conversions.source(name))
    language = {key: array.shape for key, array in tensors.items() if not BESIDE_THE_LANGUAGE_MODEL.match(key)}
    table = {entry.name: entry.shape for entry in family.entries(family.all_sizes())}
    assert language == {key: shape for key, shape in table.items() if not BESIDE_THE_LANGUAGE_MODEL.match(key)}
    assert (language.keys() < tensors.keys()) == (name in MULTIMODAL)
    assert len(list(conversions.source(name).glob("*.safetensors"))) == family.num_shards
    for key, array in tensors.items():
        if array.size > 4:
            assert len(np.unique(array)) > (array.size**0.5 / 2 if array.dtype != np.uint8 else 1), key
    # Of the tensors beside the language model, too, each has a rule.
    assert isinstance(try_plan(read_source(conversions.source(name)), 2), Plan) or name == "falcon_7b"


# What each rank holds.


@pytest.mark.parametrize("name", sample(FAMILIES, EACH_WAY))
def test_each_degree_is_accepted_and_cut_as_engines_do_or_refused_as_they_do(name: str) -> None:
    family = FAMILIES[name]
    sizes = family.all_sizes()
    entries = family.entries(sizes)
    source = source_of(name, entries, sizes)
    fitting = [num_ranks for num_ranks in DEGREES if fits(entries, sizes, num_ranks)]
    assert set(fitting) >= ({2, 4, 8} if name != "falcon_7b" else set())
    for num_ranks in fitting:
        assert_cut_as_expected(source, plan_for(source, num_ranks), entries, sizes, f"{name}, {num_ranks} ranks")
    refused = next(num_ranks for num_ranks in (3, 16) if num_ranks not in fitting)
    with pytest.raises(PlanError) as caught:
        plan_for(source, refused)
    message = str(caught.value)
    parts = re.search(
        r"tensor '([^']+)': dim (\d) of (\[[\d, ]+\])(.*) \(this checkpoint can be divided among ([\d, ]+) ranks?\)$",
        message,
    )
    assert parts, message
    [shape] = [entry.shape for entry in entries if entry.name == parts[1]]
    assert str(list(shape)) == parts[3]
    size = re.search(r"^: (\d+) elements", parts[4])
    assert not size or int(size[1]) == shape[int(parts[2])], message
    assert re.search(rf"\b{refused}\b", parts[4]), message
    assert {int(degree) for degree in parts[5].split(", ") if int(degree) <= 16} == {1, *fitting}


@pytest.mark.parametrize("tp", [2, 8])
@pytest.mark.parametrize("name", grouped([name for name in OF_EACH_KIND if name in FAMILIES]))
def test_all_ranks_together_give_back_every_byte_of_the_source(name: str, tp: int, conversions: Conversions) -> None:
    assert_ranks_give_back(conversions.at(name, tp), read_tensors(conversions.source(name)), tp)


# Published sizes.


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if not model.form])
def test_published_checkpoints_are_cut_as_engines_do(name: str) -> None:
    """With all that their config.json says."""
    model = MODELS[name]
    family = FAMILIES[model.family]
    sizes = family.sizes_of(model.config)
    entries = [entry for entry in family.entries(sizes) if not entry.expert]
    source = make_source({entry.name: entry.shape for entry in entries}, **model.config)
    for num_ranks in (model.tp, 16):
        if num_ranks == 16 and not fits(entries, sizes, 16):
            continue
        assert_cut_as_expected(source, plan_for(source, num_ranks), entries, sizes, f"{name}, {num_ranks} ranks")


# Expert parallel.


@pytest.mark.parametrize("num_ranks", [3, 8])
@pytest.mark.parametrize("name", EXPERT_FAMILIES)
def test_with_expert_parallel_each_expert_has_one_owner_and_the_rest_is_as_without(name: str, num_ranks: int) -> None:
    family = FAMILIES[name]
    sizes = family.all_sizes()
    if num_ranks == 3:
        # Sizes of which 3 ranks can hold their shares, too. Experts are whole, so theirs may be any, unless a shared
        # expert is as large.
        more = {"A": 15, "K": 15, "H": 15 * 32, "I": 480, "S": 480, "D": 32, "G": 15, "W": 30}
        each = (family.all_sizes(**more, M=m) for m in (17, 60))
        sizes = next(one for one in each if fits([e for e in family.entries(one) if ".experts." not in e.name], one, 3))
    entries = family.entries(sizes)
    source = source_of(name, entries, sizes)
    plan = plan_for(source, num_ranks, expert_parallel=True)
    of_experts = [entry for entry in entries if ".experts." in entry.name]
    rest = [entry for entry in entries if ".experts." not in entry.name]
    owner = owners(sizes["E"], num_ranks)
    assert of_experts
    slices = {tensor.name: parts for tensor, parts in zip(source.tensors, all_slices(plan), strict=True)}
    for entry in of_experts:
        for rank, part in enumerate(slices[entry.name]):
            if entry.stacked:
                assert part.axis == 0
                assert indices(part).tolist() == [n for n in range(entry.shape[0]) if owner[n] == rank], entry.name
            else:
                assert entry.expert is not None
                assert (part.is_whole, part.is_held) == (owner[entry.expert] == rank,) * 2, entry.name
    assert_cut_as_expected(source, plan, rest, sizes, f"{name}, {num_ranks} ranks")
    without = source_of(name, rest, sizes)
    assert all_slices(plan_for(without, num_ranks)) == tuple(slices[tensor.name] for tensor in without.tensors)


# Tensors that no rule names.


def test_a_tensor_held_whole_on_request_is_in_every_rank_and_the_summary_lists_it(tmp_path: Path) -> None:
    strange = np.arange(35, dtype=np.int32).reshape(5, 7)
    (tmp_path / "source").mkdir()
    save_file({"model.strange": strange}, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text('{"model_type": "llama"}')
    words = ["convert", str(tmp_path / "source"), "-o", str(tmp_path / "out"), "--tp", "2", "--unmatched", "replicate"]
    run = CliRunner().invoke(app, words)
    assert run.exit_code == 0, run.output
    assert "model.strange" in run.output
    assert_ranks_give_back(tmp_path / "out", {"model.strange": strange}, 2)
