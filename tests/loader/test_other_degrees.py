"""A folder loaded at another degree than its own: each rank gets what a direct conversion would have written."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import add_tensor, write_family
from support.conversions import (
    DEGREES,
    WIDE,
    Conversions,
    assert_same,
    grouped,
    stored_in,
)
from support.families import FAMILIES
from support.profile import sample
from support.quantized import QUANTIZED
from support.rebuilding import edit_table, rebuild

import relayout
from relayout.errors import FormatError, PlanError
from relayout.plans import family as families
from relayout.plans import planner

# As a direct conversion.


@pytest.fixture
def without_plans(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on no built-in plan can be read, and transformers cannot be imported."""

    def nothing(*_: object) -> Any:
        raise AssertionError("a plan of the program was read")

    def take_away() -> None:
        families._builtin.cache_clear()
        for name in ("_builtin_texts", "_builtin", "builtin_text", "find_family", "read_family"):
            monkeypatch.setattr(families, name, nothing)
        monkeypatch.setattr(planner, "find_family", nothing)
        monkeypatch.setitem(sys.modules, "transformers", None)
        monkeypatch.setitem(sys.modules, "relayout.plans.transformers", None)

    return take_away


CASES = sample(
    [*FAMILIES, *QUANTIZED, *WIDE],
    [
        "llama",  # Dense; heads that several ranks share.
        "phi3",  # Fused.
        "falcon_40b",  # Interleaved.
        "qwen3_next",  # Linear attention.
        "gpt_oss_mxfp4_wide",  # Blocks, at 16 ranks too.
        "fp8_blocks_deepseek",
        "int4_groups_asymmetric",
    ],
)
"""That the rules of all plans survive in a record is shown by test_recorded_rules, and any slices by test_reshard."""


@pytest.mark.parametrize("name", grouped(CASES))
def test_every_rank_at_every_other_degree_gets_what_a_direct_conversion_writes(
    name: str, conversions: Conversions, without_plans: Callable[[], None]
) -> None:
    """By the rules in the folder, and by no plan of the program."""
    largest = conversions.largest(name)
    folder, whole = conversions.at(name, largest), conversions.at(name, 1)
    degrees = DEGREES if name in (*WIDE, "llama", "phi3", "qwen3_moe") else DEGREES[:-1]
    outcomes = {tp: conversions.outcome(name, tp) for tp in degrees}
    without_plans()
    for tp, direct in outcomes.items():
        if isinstance(direct, PlanError):
            with pytest.raises(PlanError) as caught:
                relayout.load(folder, 0, tp=tp)
            assert str(caught.value).partition("tensor ")[2] == str(direct).partition("tensor ")[2] != ""
            continue
        for rank in range(tp):
            expected = stored_in(direct, rank)
            if tp != largest:
                assert_same(relayout.load(folder, rank, tp=tp, threads=1), expected, (tp, rank))
            if tp == largest != 1 and rank in (0, tp // 2, tp - 1):
                assert_same(relayout.load(whole, rank, tp=tp, threads=1), expected, ("from one rank", tp, rank))
    accepted = {tp for tp, direct in outcomes.items() if not isinstance(direct, PlanError)}
    assert accepted >= {1, 2} or name == "falcon_7b"  # 71 heads.
    assert (16 in accepted) == (name in WIDE)


def test_a_degree_that_is_a_prime(conversions: Conversions) -> None:
    one, prime = conversions.at("falcon_7b", 1), conversions.at("falcon_7b", 71)
    for rank in (0, 35, 70):
        assert_same(relayout.load(one, rank, tp=71), stored_in(prime, rank), rank)
    assert_same(relayout.load(prime, 0, tp=1), stored_in(one, 0), "whole")


def test_degrees_of_which_none_is_a_multiple_of_the_other(tmp_path: Path) -> None:
    sizes = {"A": 24, "D": 4, "H": 96, "I": 288, "K": 24}
    source = write_family(replace(FAMILIES["llama"], sizes=sizes), tmp_path / "source")
    for pair in ((2, 3), (8, 12)):
        for tp in pair:
            relayout.convert(source, tmp_path / str(tp), tp=tp)
        for stored, wanted in (pair, pair[::-1]):
            for rank in range(wanted):
                found = relayout.load(tmp_path / str(stored), rank, tp=wanted)
                assert_same(found, stored_in(tmp_path / str(wanted), rank), (stored, wanted, rank))


EXPERTS = sample(["qwen3_moe", "gpt_oss_mxfp4", "deepseek_v3", "gptq_4bit_moe"], ["qwen3_moe", "gpt_oss_mxfp4"])
"""Every day one with tensors for each expert, and one that stacks them."""


@pytest.mark.parametrize("name", grouped(EXPERTS))
def test_experts_that_ranks_own_whole_find_their_owners_at_another_degree(
    name: str, conversions: Conversions, without_plans: Callable[[], None]
) -> None:
    num_owned = []
    folder = conversions.at(name, 2, experts=True)
    outcomes = {tp: conversions.outcome(name, tp, experts=True) for tp in (1, 4, 8)}
    without_plans()
    for tp, direct in outcomes.items():
        if isinstance(direct, PlanError):
            with pytest.raises(PlanError):
                relayout.load(folder, 0, tp=tp)
            continue
        held = [relayout.load(folder, rank, tp=tp) for rank in range(tp)]
        for rank, found in enumerate(held):
            assert_same(found, stored_in(direct, rank), (tp, rank))
        num_owned.append(sum(any(key not in other for other in held) for key in held[0]))
    stacked = not any(".experts.0." in key for key in stored_in(folder, 0))
    assert len(num_owned) > 1
    assert num_owned[0] == 0
    assert stacked or all(num_owned[1:])


# The ways to load.


def test_by_every_way_to_memory_at_once_or_one_after_the_other(way: str, conversions: Conversions) -> None:
    folder = conversions.at("phi3", 4)
    for rank, tp in ((0, 2), (7, 8)):
        expected = stored_in(conversions.at("phi3", tp), rank)
        assert_same(relayout.load(folder, rank, tp=tp, backend=way), expected, rank)
        assert_same(dict(relayout.iter_load(folder, rank, tp=tp, backend=way)), expected, rank)


def test_out_of_several_files_of_each_rank(conversions: Conversions, tmp_path: Path) -> None:
    relayout.convert(conversions.source("phi3"), tmp_path / "parts", tp=4, max_part_nbytes=30_000)
    assert len(list((tmp_path / "parts").glob("model-rank-3-part-*.safetensors"))) > 3
    for tp in (1, 2, 8):
        for rank in range(tp):
            expected = stored_in(conversions.at("phi3", tp), rank)
            assert_same(relayout.load(tmp_path / "parts", rank, tp=tp), expected, (tp, rank))


def test_what_no_rule_names_is_held_by_all(conversions: Conversions, tmp_path: Path) -> None:
    extra = np.arange(77, dtype=np.float32)
    source = add_tensor(conversions.source("mistral"), tmp_path / "source", "model.extra", extra)
    for tp in (2, 8):
        relayout.convert(source, tmp_path / str(tp), tp=tp, unmatched="replicate")
    for stored, wanted in ((2, 8), (8, 2)):
        found = relayout.load(tmp_path / str(stored), 1, tp=wanted)
        assert_same(found, stored_in(tmp_path / str(wanted), 1), wanted)
        assert found["model.extra"].tolist() == extra.tolist()


@pytest.mark.parametrize("tp", [1, 2])
def test_some_names(tp: int, conversions: Conversions) -> None:
    folder, direct = conversions.at("llama_wide", 8), conversions.at("llama_wide", tp)
    for patterns in (["**.1.self_attn.k_proj**", "lm_head.weight"], "**.o_proj.**", ["model.norm.weight"]):
        expected = relayout.load(direct, tp - 1, names=patterns)
        assert 0 < len(expected) <= 2
        assert_same(relayout.load(folder, tp - 1, names=patterns, tp=tp), expected, patterns)
        assert_same(dict(relayout.iter_load(folder, tp - 1, names=patterns, tp=tp)), expected, patterns)
    with pytest.raises(PlanError, match=r"^names: no tensor matches '\*\*\.nothing' \(there are 21\)$"):
        relayout.load(folder, 0, names=["**.nothing"], tp=tp)


# Refusals.


@pytest.mark.parametrize(
    ("rank", "tp", "message"),
    [
        (2, 2, r"llama-tp4: rank 2, expected 0 to 1 \(tensor-parallel degree 2\)"),
        (
            0,
            3,
            r"dim 1 of \[128, 256\]: 256 elements, not a multiple of 3 \(.* among 1, 2, 4, 8 ranks\)$",
        ),
        (0, 2000, r"llama-tp4: tp: 2000, expected 1 to 1024$"),
    ],
)
def test_ranks_and_degrees_that_do_not_exist(rank: int, tp: int, message: str, conversions: Conversions) -> None:
    with pytest.raises(PlanError, match=message):
        relayout.load(conversions.at("llama", 4), rank, tp=tp)


def test_without_a_plan_for_the_model_only_all_of_it_can_be_had(conversions: Conversions, tmp_path: Path) -> None:
    source = shutil.copytree(conversions.source("llama"), tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"model_type": "nobodys"}))
    relayout.convert(source, tmp_path / "out")
    assert relayout.inspect(tmp_path / "out").plan == "none"
    assert_same(relayout.load(tmp_path / "out", 0, tp=1), stored_in(conversions.at("llama", 1), 0), "whole")
    with pytest.raises(PlanError, match=r"out: converted without a plan, .*convert it again, with --plan FILE$"):
        relayout.load(tmp_path / "out", 0, tp=2)


def test_with_another_config_the_rules_no_longer_cut_as_recorded(conversions: Conversions, tmp_path: Path) -> None:
    folder = shutil.copytree(conversions.at("llama", 4), tmp_path / "edited")
    config = json.loads((folder / "config.json").read_text())
    assert config["num_key_value_heads"] == 2
    changed = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32}
    (folder / "config.json").write_text(json.dumps(config | changed))
    message = r"edited: plan 'builtin:llama' does not reproduce the stored slices: .* its own degree, 4$"
    with pytest.raises(FormatError, match=message):
        relayout.load(folder, 0, tp=2)
    assert_same(relayout.load(folder, 0, tp=4), stored_in(folder, 0), "as stored")
    assert_same(relayout.load(folder, 0, tp=1), stored_in(conversions.at("llama", 1), 0), "whole")


OWN_PLAN = """
extends = "llama"
[cut]
"**.down_proj.weight" = "whole"
"**.o_proj.weight" = { dim = 0, by = "even" }
"""


@pytest.mark.parametrize(("file", "stored"), [("mine.toml", 1), ("llama", 4), ("transformers", 4)])
def test_by_a_persons_own_plan_which_may_be_gone(
    file: str, stored: int, conversions: Conversions, tmp_path: Path, without_plans: Callable[[], None]
) -> None:
    """Its name, which may be that of another plan, says nothing."""
    (tmp_path / file).write_text(OWN_PLAN)
    for degree in {stored, 2, 8}:
        relayout.convert(conversions.source("llama"), tmp_path / str(degree), tp=degree, plan=tmp_path / file)
    (tmp_path / file).unlink()
    without_plans()
    assert relayout.inspect(tmp_path / str(stored)).plan == f"file:{file}"
    for tp in (2, 8):
        for rank in (0, tp - 1):
            found = relayout.load(tmp_path / str(stored), rank, tp=tp)
            assert_same(found, stored_in(tmp_path / str(tp), rank), (tp, rank))
            assert found["model.layers.0.mlp.down_proj.weight"].shape == (128, 256)
            assert found["model.layers.0.self_attn.o_proj.weight"].shape == (128 // tp, 128)


def test_by_the_plan_that_transformers_had(
    conversions: Conversions, tmp_path: Path, without_plans: Callable[[], None]
) -> None:
    """Also where it had no rule for a tensor, which by any other plan is an error."""
    extra = np.arange(77, dtype=np.float32)
    source = add_tensor(conversions.source("glm4"), tmp_path / "source", "model.extra", extra)
    for degree in (1, 2, 4, 8):
        relayout.convert(source, tmp_path / str(degree), tp=degree, plan="transformers")
    other = relayout.load(conversions.at("glm4", 8), 1)
    without_plans()
    assert relayout.inspect(tmp_path / "4").plan == "transformers:glm4"
    for stored, wanted in ((1, 2), (4, 1), (4, 2), (4, 8)):
        for rank in range(wanted):
            found = relayout.load(tmp_path / str(stored), rank, tp=wanted)
            assert_same(found, stored_in(tmp_path / str(wanted), rank), (stored, wanted, rank))
    found = relayout.load(tmp_path / "4", 1, tp=8)
    differing = [name for name, tensor in other.items() if not torch.equal(tensor, found[name])]
    assert {name.split(".", 3)[3] for name in differing} == {"mlp.gate_up_proj.weight"}


def change_rules(folder: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Change the rules in the source record of a folder, and sign all that hangs on it."""
    rebuild(folder, lambda record: edit(record["plan"]["rules"]) and None)
    return folder


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"cut": {"x": 3}}, "cut 'x': 3, expected"),
        ({"extends": "llama"}, "unknown key 'extends', expected"),
        ({"cut": {"{a,aa}" * 30: "whole"}}, "invalid pattern .*: more than 64 ways"),
    ],
)
def test_rules_of_a_stranger_are_no_more_than_a_plan_may_be(
    rules: dict[str, Any], message: str, conversions: Conversions, tmp_path: Path
) -> None:
    folder = shutil.copytree(conversions.at("llama", 4), tmp_path / "hostile")
    change_rules(folder, lambda found: found.update(rules))
    with pytest.raises(FormatError, match=rf"hostile/relayout\.source\.json\.zst: plan: {message}"):
        relayout.load(folder, 0, tp=2)
    assert_same(relayout.load(folder, 0, tp=1), stored_in(conversions.at("llama", 1), 0), "whole")


@pytest.mark.parametrize(
    "edit",
    [
        lambda rules: rules["cut"].clear() or rules["cut"].update({"**": "whole"}),
        lambda rules: rules["cut"].pop("{model.,}layers.*.mlp.down_proj.weight"),
        lambda rules: rules["cut"].update({"{model.,}layers.*.mlp.down_proj.weight": {"dim": 0, "by": "even"}}),
        lambda rules: rules["sizes"].update({"kv_heads": ["num_attention_heads"]}),
    ],
)
def test_rules_that_cut_otherwise_than_the_folder_is_cut_are_refused(
    edit: Callable[[dict[str, Any]], object], conversions: Conversions, tmp_path: Path
) -> None:
    folder = shutil.copytree(conversions.at("llama", 4), tmp_path / "lying")
    change_rules(folder, lambda rules: None)
    assert_same(relayout.load(folder, 0, tp=2), stored_in(conversions.at("llama", 2), 0), "unchanged")
    change_rules(folder, edit)
    with pytest.raises((FormatError, PlanError), match=r"does not reproduce the stored slices|config.json declares"):
        relayout.load(folder, 0, tp=2)


# Sidecars that lie.


def of_tensor(table: dict[str, Any], name: str) -> int:
    kind: int = table["kind"][table["name"].index(name)]
    return kind


def move_the_slice(table: dict[str, Any]) -> None:
    table["kinds"]["slice"][of_tensor(table, "model.layers.0.mlp.gate_proj.weight")]["0"] = [[0, 64]]


def cut_the_other_axis(table: dict[str, Any]) -> None:
    kind = of_tensor(table, "model.layers.0.mlp.down_proj.weight")
    assert table["kinds"]["shape"][kind] == [128, 64]
    table["kinds"]["slice"][kind] = {"0": [[0, 64]]}
    table["kinds"]["shape"][kind] = [64, 256 // 2]
    table["kinds"]["source_shape"][kind] = [256, 128]


def rename_a_tensor(table: dict[str, Any]) -> None:
    table["name"][table["name"].index("model.layers.1.mlp.up_proj.weight")] = "model.layers.7.mlp.up_proj.weight"


def change_the_dtype(table: dict[str, Any]) -> None:
    table["kinds"]["dtype"][of_tensor(table, "model.layers.0.mlp.gate_proj.weight")] = "F16"


@pytest.mark.parametrize("edit", [move_the_slice, cut_the_other_axis, rename_a_tensor, change_the_dtype])
def test_a_table_that_says_otherwise_than_the_record_is_refused(
    edit: Callable[[dict[str, Any]], None], conversions: Conversions, tmp_path: Path
) -> None:
    folder = shutil.copytree(conversions.at("llama", 4), tmp_path / "lying")
    edit_table(folder, lambda table: None)
    assert_same(relayout.load(folder, 0, tp=2), stored_in(conversions.at("llama", 2), 0), "unchanged")
    edit_table(folder, edit)
    with pytest.raises(
        FormatError, match=r"lying: table of rank 1: tensor 'model\..*': differs from the source record$"
    ):
        relayout.load(folder, 0, tp=2)
    assert relayout.load(folder, 1, tp=2)  # Of ranks 2 and 3.


@pytest.mark.parametrize("file", ["relayout.source.json.zst", "relayout.rank-1.json.zst"])
def test_damaged_sidecars_are_refused(file: str, conversions: Conversions, tmp_path: Path) -> None:
    folder = shutil.copytree(conversions.at("llama", 4), tmp_path / "damaged")
    blob = bytearray((folder / file).read_bytes())
    blob[len(blob) // 2] ^= 1
    (folder / file).write_bytes(blob)
    with pytest.raises(FormatError, match=rf"{file}: .*digest"):
        relayout.load(folder, 0, tp=2)
