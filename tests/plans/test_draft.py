"""`plans --check`: tensors without a rule are told by kind, and the draft is a plan that gives each of them one."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.families import FAMILIES
from support.planning import make_source
from typer.testing import CliRunner

import relayout
from relayout.checkpoint.source import read_source
from relayout.cli.app import app
from relayout.commands.plan_check import check_plan
from relayout.core.slices import WHOLE
from relayout.errors import PlanError
from relayout.plans import draft as drafting
from relayout.plans.planner import plan_by, plan_for
from relayout.storage.stores import find_store

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "vocab_size": 128}
LAYER: dict[str, tuple[int, ...]] = {
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.k_proj.weight": (32, 64),
    "self_attn.v_proj.weight": (32, 64),
    "self_attn.o_proj.weight": (64, 64),
    "mlp.gate_proj.weight": (128, 64),
    "mlp.up_proj.weight": (128, 64),
    "mlp.down_proj.weight": (64, 128),
    "input_layernorm.weight": (64,),
    "post_attention_layernorm.weight": (64,),
}
Shapes = dict[str, tuple[int, ...]]


def write(folder: Path, shapes: Shapes, **config: Any) -> Path:
    folder.mkdir()
    tensors = {name: np.zeros(shape, np.uint8) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def decoder(prefix: str = "model.layers", more: Shapes | None = None) -> Shapes:
    layers = {f"{prefix}.{n}.{name}": shape for n in range(2) for name, shape in (LAYER | (more or {})).items()}
    return {"model.embed_tokens.weight": (128, 64), "lm_head.weight": (128, 64), "model.norm.weight": (64,)} | layers


def cuts(folder: Path, plan: Path | None, tp: int) -> dict[str, Any]:
    """The slice of each rank, by the name of the tensor."""
    checkpoint = read_source(find_store(folder))
    made = plan_for(checkpoint, tp, plan)
    return {tensor.name: made.cut(t).slices for t, tensor in enumerate(checkpoint.tensors)}


def saved(tmp_path: Path, text: str | None) -> Path:
    assert text is not None
    (tmp_path / "draft.toml").write_text(text)
    return tmp_path / "draft.toml"


def test_a_checkpoint_whose_tensors_have_rules_needs_no_draft(llama: Path) -> None:
    found = check_plan(llama)
    assert (found.ok, found.kinds, found.draft, found.plan) == (True, (), None, "builtin:llama")
    assert found.degrees[2] is None
    assert "not a multiple of 16" in (found.degrees[16] or "")


def test_tensors_without_a_rule_are_counted_by_kind_and_the_draft_extends_the_plan(tmp_path: Path) -> None:
    more: Shapes = {"self_attn.q_norm.weight": (16,), "extra.thing": (8, 8)}
    folder = write(tmp_path / "m", decoder(more=more), model_type="llama", **CONFIG)
    found = check_plan(folder)
    told = {(kind.pattern, kind.count, kind.shape) for kind in found.kinds}
    assert told == {
        ("model.layers.*.self_attn.q_norm.weight", 2, (16,)),
        ("model.layers.*.extra.thing", 2, (8, 8)),
    }
    unknown = next(kind for kind in found.kinds if kind.pattern.endswith("thing"))
    assert unknown.rule == '"whole"'
    assert unknown.origin.startswith("UNKNOWN")
    assert found.draft is not None
    assert tomllib.loads(found.draft)["extends"] == "llama"
    made = cuts(folder, saved(tmp_path, found.draft), 2)
    assert made["model.layers.1.extra.thing"] == (WHOLE, WHOLE)
    for name, slices in cuts(write(tmp_path / "known", decoder(), model_type="llama", **CONFIG), None, 2).items():
        assert made[name] == slices, name


@pytest.mark.parametrize("prefix", ["model.layers", "backbone.blocks"])
def test_a_model_type_that_nobody_knows_is_cut_like_its_names(prefix: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", decoder(prefix), model_type="unheard", **CONFIG)
    found = check_plan(folder)
    assert found.plan is None
    assert found.degrees[2] is None
    assert found.degrees[4] is None
    made = cuts(folder, saved(tmp_path, found.draft), 4)
    like = cuts(write(tmp_path / "known", decoder(), model_type="llama", **CONFIG), None, 4)
    assert len(made) == len(like) == 21
    for name, slices in like.items():
        assert made[name.replace("model.layers", prefix)] == slices, name
    again = check_plan(folder, plan=tmp_path / "draft.toml")
    assert (again.ok, again.plan) == (True, "file:draft.toml")


def test_the_plan_of_transformers_counts_before_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "m", decoder(), model_type="arcee", **CONFIG)
    found = check_plan(folder)
    origins = {kind.pattern.rpartition(".layers.*.")[2]: kind.origin for kind in found.kinds}
    if found.plan is None and "extends" not in tomllib.loads(found.draft or ""):
        assert origins["self_attn.q_proj.weight"] == "transformers"
    rules = drafting._transformers(read_source(find_store(folder)))
    assert rules is not None
    monkeypatch.setattr(drafting, "_most_similar", lambda checkpoint: None)
    by_kind = {kind.pattern: kind for kind in check_plan(folder).kinds}
    assert by_kind["model.layers.*.self_attn.o_proj.weight"].origin == "transformers"
    assert by_kind["model.layers.*.self_attn.o_proj.weight"].rule == '{ dim = 1, by = "heads" }'
    assert by_kind["model.layers.*.input_layernorm.weight"].origin.startswith("*.input_layernorm.weight as in")


def test_every_family_is_cut_as_its_own_plan_does_when_only_its_model_type_is_unknown() -> None:
    different = set()
    for name, family in FAMILIES.items():
        sizes = family.all_sizes()
        shapes = {entry.name: entry.shape for entry in family.entries(sizes)}
        known = family.config(sizes)
        unheard = known | {"model_type": "unheard"}
        if "text_config" in known:
            unheard["text_config"] = known["text_config"] | {"model_type": "unheard"}
        try:
            real = plan_for(make_source(shapes, **known), 2)
        except PlanError:  # An odd number of heads.
            assert name == "falcon_7b"
            continue
        source = make_source(shapes, **unheard)
        made = drafting.draft_plan(source, None)
        assert made is not None
        cut = plan_by(source, 2, made.family)
        different |= {name for t in range(len(shapes)) if real.cut(t).slices != cut.cut(t).slices}
    # Its norms of q and k are matrices, which it cuts; no other family does.
    assert different == {"cohere"}


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def renamed(names: tuple[str, ...]) -> Shapes:
    """A decoder whose attention block is `attn`, with other names of its four weights."""
    shapes = decoder()
    for old, new in zip(ATTENTION, names, strict=True):
        for n in range(2):
            shapes[f"model.layers.{n}.attn.{new}.weight"] = shapes.pop(f"model.layers.{n}.self_attn.{old}.weight")
    return shapes


def test_an_attention_block_is_cut_as_in_plans_that_know_all_of_it(tmp_path: Path) -> None:
    # Some plans know attn.k_proj of a vision part, which is cut evenly; none knows this block by three parts of names.
    shapes = {name.replace("mlp.", "ffn."): shape for name, shape in renamed(ATTENTION).items()}
    folder = write(tmp_path / "m", shapes, model_type="unheard", **CONFIG)
    found = check_plan(folder)
    rules = {kind.pattern.rpartition(".attn.")[2]: kind.rule for kind in found.kinds if ".attn." in kind.pattern}
    assert rules == {
        "q_proj.weight": '{ dim = 0, by = "heads" }',
        "k_proj.weight": '{ dim = 0, by = "kv_heads" }',
        "v_proj.weight": '{ dim = 0, by = "kv_heads" }',
        "o_proj.weight": '{ dim = 1, by = "heads" }',
    }
    assert {kind.num_heads for kind in found.kinds} == {None}
    made = cuts(folder, saved(tmp_path, found.draft), 4)  # Of 2 heads, each for two ranks.
    like = cuts(write(tmp_path / "known", decoder(), model_type="llama", **CONFIG), None, 4)
    for name in ATTENTION:
        assert made[f"model.layers.1.attn.{name}.weight"] == like[f"model.layers.1.self_attn.{name}.weight"]


def test_keys_and_values_that_are_cut_through_heads_are_warned_of(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", renamed(("q", "k", "v", "out_proj")), model_type="unheard", **CONFIG)
    found = check_plan(folder)
    assert {kind.pattern[-8:]: kind.rule for kind in found.kinds if kind.num_heads == 2} == {
        "k.weight": '{ dim = 0, by = "even" }',
        "v.weight": '{ dim = 0, by = "even" }',
    }
    assert found.degrees[2] is None
    assert "attn.k.weight': an even cut would divide 2 heads unevenly" in (found.degrees[4] or "")
    done = CliRunner().invoke(app, ["plans", "--check", str(folder)])
    assert "config.json has 2 key and value heads" in " ".join(done.stdout.replace("#", "").split())


@pytest.mark.parametrize("plan", ["llama", "builtin:llama"])
def test_a_built_in_plan_is_used_by_its_name(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "m", decoder(), model_type="unheard", **CONFIG)
    known = write(tmp_path / "known", decoder(), model_type="llama", **CONFIG)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()  # A checkpoint's folder, say.
    assert cuts(folder, Path(plan), 2) == cuts(known, None, 2)
    relayout.convert(folder, tmp_path / "out", tp=2, plan=plan)
    assert relayout.inspect(tmp_path / "out").plan == "builtin:llama"
    assert check_plan(folder, plan=plan).ok


def test_a_file_with_the_name_of_a_built_in_plan_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "m", decoder(), model_type="unheard", **CONFIG)
    monkeypatch.chdir(tmp_path)
    Path("llama").write_text('[cut]\n"**" = "whole"\n')
    assert set(cuts(folder, Path("llama"), 2).values()) == {(WHOLE, WHOLE)}
    assert cuts(folder, Path("builtin:llama"), 2)["lm_head.weight"] != (WHOLE, WHOLE)


def test_a_rule_that_cannot_be_applied_is_replaced_and_says_so(tmp_path: Path) -> None:
    shapes = decoder(more={"mlp.down_proj.weight": (64, 127)})
    found = check_plan(write(tmp_path / "m", shapes, model_type="unheard", **CONFIG))
    assert found.draft is not None
    line = next(line for line in found.draft.splitlines() if "down_proj" in line)
    assert line.startswith('"model.layers.*.mlp.down_proj.weight" = "whole"  # whole, as it cannot be cut at 2 ranks')
    assert "127 elements, not a multiple of 2" in line
    assert found.degrees[2] is None


def test_without_sizes_in_config_json_heads_are_not_guessed(tmp_path: Path) -> None:
    found = check_plan(write(tmp_path / "m", decoder()))
    assert found.model_type is None
    assert found.draft is not None
    rules = {kind.pattern.rpartition(".layers.*.")[2]: kind.rule for kind in found.kinds}
    assert rules["self_attn.q_proj.weight"] == '"whole"'
    assert rules["mlp.up_proj.weight"] == '{ dim = 0, by = "even" }'


def test_a_quantized_weight_gets_one_rule_for_all_that_it_is_stored_as(tmp_path: Path) -> None:
    shapes = decoder()
    shapes |= {
        name.replace(".weight", ".weight_scale"): (shape[0], 1)
        for name, shape in shapes.items()
        if "self_attn" in name or "mlp" in name
    }
    config = {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}
    folder = write(tmp_path / "m", shapes, model_type="unheard", **CONFIG, **config)
    found = check_plan(folder)
    assert found.draft is not None
    assert "weight_scale" not in found.draft
    made = cuts(folder, saved(tmp_path, found.draft), 2)
    name = "model.layers.0.self_attn.q_proj"
    assert [part.ranges for part in made[f"{name}.weight"]] == [((0, 32),), ((32, 32),)]
    assert made[f"{name}.weight_scale"] == made[f"{name}.weight"]


def test_what_cannot_be_drafted_is_said(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "gguf"}}
    found = check_plan(write(tmp_path / "m", decoder(), model_type="unheard", **CONFIG, **config))
    assert not found.ok
    assert CliRunner().invoke(app, ["plans", "--check", str(tmp_path / "m")]).exit_code == 1
    assert found.draft is None
    assert "its blocks are not stored as tensors" in (found.draft_error or "")


@pytest.mark.parametrize(
    "name",
    [
        *("a{b}.weight", "x#1.weight", 'quote".weight', "new\nline.weight", "\x7f.weight", "é.w", "🦙.w"),
        pytest.param(f"x[y].{'long' * 30}.weight", id="longer than a line"),
    ],
)
def test_strange_names_give_a_draft_that_can_be_read(name: str, tmp_path: Path) -> None:
    found = check_plan(write(tmp_path / "m", decoder() | {name: (4, 4)}, model_type="unheard", **CONFIG))
    made = cuts(tmp_path / "m", saved(tmp_path, found.draft), 2)
    assert made[name] == (WHOLE, WHOLE)


def test_a_general_pattern_does_not_hide_a_particular_one(tmp_path: Path) -> None:
    shapes = decoder() | {
        "tower.0.up_proj.weight": (4, 4),
        "tower.mlp.up_proj.weight": (128, 64),
    }
    found = check_plan(write(tmp_path / "m", shapes, model_type="unheard", **CONFIG))
    made = cuts(tmp_path / "m", saved(tmp_path, found.draft), 2)
    assert [part.ranges for part in made["tower.mlp.up_proj.weight"]] == [((0, 64),), ((64, 64),)]


def test_all_that_the_command_prints_is_a_plan(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", decoder(), model_type="unheard", **CONFIG)
    done = CliRunner().invoke(app, ["plans", "--check", str(folder)])
    assert done.exit_code == 0
    assert "# 21 tensors of 12 kinds have no rule:" in done.stdout
    assert "--plan vllm" in done.stdout
    assert "plans --observe" in done.stdout
    plan = saved(tmp_path, done.stdout)
    relayout.convert(folder, tmp_path / "out", tp=2, plan=plan)
    assert relayout.verify(tmp_path / "out", source=folder).ok
    again = CliRunner().invoke(app, ["plans", "--check", str(folder), "--plan", str(plan)])
    assert again.exit_code == 0
    assert "every tensor has a rule" in again.stdout
    assert all(len(line) <= 80 or str(tmp_path) in line for line in again.stdout.splitlines())


def test_the_command_prints_one_json_object(tmp_path: Path, llama: Path) -> None:
    folder = write(tmp_path / "m", decoder(), model_type="unheard", **CONFIG)
    found = json.loads(CliRunner().invoke(app, ["plans", "--check", str(folder), "--json"]).stdout)
    assert sum(kind["count"] for kind in found["kinds"]) == 21
    done = CliRunner().invoke(app, ["plans", "--check", str(llama)])
    assert done.exit_code == 0
    assert "every tensor has a rule" in done.stdout.splitlines()


def test_what_vllm_cuts_has_no_rules_to_check(llama: Path) -> None:
    with pytest.raises(PlanError, match="a plan observed from vLLM has no rules to check"):
        check_plan(llama, plan="vllm")
