"""What the documents show does work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import as_integers
from typer.testing import CliRunner

import relayout
from relayout.cli.app import app
from relayout.plans.division import Sizes, divide
from relayout.plans.family import parse_family

COMMANDS = ("convert", "inspect", "verify", "restore", "plans")
ROOT = Path(__file__).parents[2]
FORMAT = (ROOT / "relayout" / "FORMAT.md").read_text()
README = (ROOT / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert found
    return found


def test_the_reader_in_the_format_document_reads_a_rank(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relayout.convert(llama, tmp_path / "model-tp4", tp=4)
    monkeypatch.chdir(tmp_path)
    [code] = blocks(FORMAT, "python")
    names: dict[str, Any] = {}
    exec(code, names)
    expected = relayout.load("model-tp4", 3)
    assert names["tensors"].keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(names["tensors"][name].view(np.int16), as_integers(tensor), err_msg=name)


def test_the_plan_in_the_format_document_is_one() -> None:
    [text] = blocks(FORMAT, "toml")
    family = parse_family(text, "my-plan.toml", "mine")
    cuts = {
        "model.layers.11.attn.qkv_proj.bias": (0, ("heads", "kv_heads", "kv_heads")),
        "model.layers.0.mlp.experts.7.down_proj.weight": (1, ("even",)),
        "model.layers.0.attn.q_norm.weight": (None, ()),
        "model.norm.weight": (None, ()),
    }
    for name, cut in cuts.items():
        rule = family.rule(name)
        assert rule is not None
        assert (rule.dim, rule.units) == cut
    assert family.rule("model.layers.0.mlp.gate_proj.weight") is None
    assert family.expert("model.layers.0.mlp.experts.7.down_proj.weight") == 7


def test_the_worked_example_in_the_format_document_is_right() -> None:
    [text] = blocks(FORMAT, "toml")
    rule = parse_family(text, "my-plan.toml", "mine").rule("model.layers.0.attn.qkv_proj.weight")
    assert rule is not None
    config = {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 64}
    sizes = Sizes(parse_family(text, "my-plan.toml", "mine").sizes, config)
    ranges = divide(rule, 1280, sizes, 4)[1]
    [said] = re.findall(r"`slice` is `\[0, (\[\[.*?\]\])\]`", FORMAT)
    assert [list(part) for part in ranges] == json.loads(said)


def test_the_manifest_has_the_fields_that_the_format_document_names_and_no_others(llama: Path, tmp_path: Path) -> None:
    relayout.convert(llama, tmp_path / "out", tp=2)
    manifest = json.loads((tmp_path / "out" / "relayout.json").read_text())
    section = FORMAT.split("## 4.")[1].split("## 5.")[0]
    top, of_rank = section.split("Of each rank:")
    cells = (re.findall(r"^\| (.*?) \|", part, re.MULTILINE) for part in (top, of_rank))
    named = [{name for cell in column for name in re.findall(r"`(\w+)`", cell)} for column in cells]
    assert set(manifest) == named[0]
    assert set(manifest["ranks"][0]) == named[1]


def test_everyday_use_in_the_readme_runs(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama-3.1-8b").symlink_to(llama)
    monkeypatch.chdir(tmp_path)
    section = README.split("## Everyday use")[1]
    commands = [
        line.split("#")[0].split() for line in blocks(section, "")[0].splitlines() if line.startswith("relayout")
    ]
    assert [command[1] for command in commands] == ["inspect", "convert", "verify"]
    for command in commands:
        result = CliRunner().invoke(app, command[1:])
        assert result.exit_code == 0, result.output
    names: dict[str, Any] = {}
    exec(blocks(section, "python")[0], names)
    assert names["tensors"]["model.norm.weight"].shape == (128,)


def test_every_option_that_the_readme_names_exists() -> None:
    helps = "".join(CliRunner().invoke(app, [name, "--help"]).output for name in (*COMMANDS, "doctor", "warm"))
    named = set(re.findall(r"`(--[a-z-]+)", README.split("## Everyday use")[1].split("### In Python")[0]))
    assert len(named) >= 8
    assert {option for option in named if option not in helps} == set()


def test_the_readme_lists_every_built_in_plan() -> None:
    from relayout.plans.family import builtin_families

    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", README, re.MULTILINE))
    assert rows == {family.name: ", ".join(family.model_types) for family in builtin_families()}
