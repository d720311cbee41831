"""`plans check`: tensors without a rule are told by kind, and the ways on are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

import relayout
from relayout.cli.app import app
from relayout.conversion.planning import KindWithoutRule, check_plan
from relayout.errors import PlanError

Shapes = dict[str, tuple[int, ...]]
KNOWN: Shapes = {
    "lm_head.weight": (128, 64),
    **{f"model.layers.{n}.mlp.up_proj.weight": (128, 64) for n in range(2)},
}
UNKNOWN: Shapes = {**{f"model.layers.{n}.extra.thing": (8, 8) for n in range(2)}, "scale{#}": ()}
KINDS = (
    KindWithoutRule("model.layers.*.extra.thing", 2, (8, 8), "model.layers.0.extra.thing"),
    KindWithoutRule("scale***", 1, (), "scale{#}"),
)


def write(folder: Path, shapes: Shapes, **config: Any) -> Path:
    folder.mkdir()
    save_file({name: np.zeros(shape, np.uint8) for name, shape in shapes.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_tensors_without_a_rule_are_counted_by_kind(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", KNOWN | UNKNOWN, model_type="llama")
    found = check_plan(folder)
    assert (found.ok, found.plan, found.num_tensors, found.kinds) == (False, "builtin:llama", 6, KINDS)
    # Rules for the patterns that are named are all that is missing.
    rules = "".join(f'"{kind.pattern}" = "whole"\n' for kind in found.kinds)
    (tmp_path / "mine.toml").write_text(f'extends = "llama"\n[cut]\n{rules}')
    again = check_plan(folder, plan=tmp_path / "mine.toml")
    assert (again.ok, again.plan, again.kinds) == (True, "file:mine.toml", ())
    relayout.convert(folder, tmp_path / "out", tp=2, plan=tmp_path / "mine.toml")


def test_without_a_plan_no_tensor_has_a_rule(tmp_path: Path) -> None:
    found = check_plan(write(tmp_path / "m", KNOWN, model_type="unheard"))
    assert (found.ok, found.plan) == (False, None)
    assert {kind.pattern: kind.count for kind in found.kinds} == {
        "lm_head.weight": 1,
        "model.layers.*.mlp.up_proj.weight": 2,
    }


def test_the_scales_of_a_quantized_weight_need_the_rule_of_the_weight(tmp_path: Path) -> None:
    shapes: Shapes = {"m.weight": (64, 64), "m.weight_scale": (64, 1)}
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    found = check_plan(write(tmp_path / "m", shapes, model_type="llama", quantization_config=quantization))
    assert found.kinds == (KindWithoutRule("m.weight", 2, (64, 64), "m.weight"),)


def test_what_cannot_be_cut_by_any_rule_is_an_error(tmp_path: Path, llama: Path) -> None:
    folder = write(tmp_path / "m", KNOWN, model_type="llama", quantization_config={"quant_method": "gguf"})
    with pytest.raises(PlanError, match="gguf, which no rule can divide: its blocks are not stored as tensors"):
        check_plan(folder)
    with pytest.raises(PlanError, match="a plan observed from vLLM has no rules to check"):
        check_plan(llama, plan="vllm")


def test_the_command_lists_kinds_and_ways_on_and_exits_with_1(tmp_path: Path, llama: Path) -> None:
    folder = write(tmp_path / "m", KNOWN | UNKNOWN, model_type="llama")
    done = CliRunner().invoke(app, ["plans", "check", str(folder)])
    assert done.exit_code == 1
    assert "3 tensors without a rule" in done.stdout
    for word in ("--plan vllm ", "--plan transformers ", "--plan FILE ", "model.layers.*.extra.thing ", "8x8"):
        assert sum(word in line for line in done.stdout.splitlines()) == 1, done.stdout
    as_json = json.loads(CliRunner().invoke(app, ["plans", "check", str(folder), "--json"]).stdout)
    assert [kind["count"] for kind in as_json["kinds"]] == [2, 1]
    ok = CliRunner().invoke(app, ["plans", "check", str(llama)])
    assert (ok.exit_code, ok.stdout.splitlines()[-1]) == (0, "every tensor has a rule")
