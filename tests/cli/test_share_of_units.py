"""`relayout convert --unit K/N` and `--commit`, as the jobs of an array use them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.loader_fixtures import mlp_model
from typer.testing import CliRunner

import relayout
from relayout.cli.app import app


def cli(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_units_are_converted_apart_and_published_by_commit(tmp_path: Path) -> None:
    source = mlp_model(tmp_path / "source")
    words = ["convert", str(source), "--tp", "2", "--max-part-size", "1MiB", "-o", str(tmp_path / "out")]
    preview = json.loads(cli(*words, "--dry-run", "--json").stdout)
    assert preview["num_units"] == 3
    done = json.loads(cli(*words, "--unit", "0/2", "--json").stdout)
    assert ([one["unit"] for one in done["units"]], done["num_units"]) == ([0, 2], 3)
    refused = cli(*words, "--commit")
    assert (refused.exit_code, "1 of 3 units are not done: 1" in refused.stderr) == (2, True)
    assert "done unit 1 of 3" in cli(*words, "--unit", "1/2").stdout
    assert "nothing to do" in cli(*words, "--unit", "3/4").stdout
    assert cli(*words, "--commit").stdout.startswith("published ")
    assert relayout.verify(tmp_path / "out", source=source).ok


def test_a_share_of_units_is_k_of_n_and_is_not_published(tmp_path: Path) -> None:
    words = ["convert", str(mlp_model(tmp_path / "source")), "--tp", "2", "--unit"]
    for share in ("7", "7/7", "8/7", "-1/7", "a/b", "1/2/3", "", "1/0"):
        refused = cli(*words, share)
        assert (refused.exit_code, "expected K/N with K from 0 to N - 1" in refused.stderr) == (2, True), share
    refused = cli(*words, "0/1", "--commit")
    assert (refused.exit_code, "run --commit separately" in refused.stderr) == (2, True)
