"""The command `plans observe`: what it writes and prints."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from support.fake_engine_packages import write_source
from typer.testing import CliRunner

from relayout.cli.app import app


@pytest.mark.usefixtures("vllm")
def test_the_command_tells_what_it_wrote_and_for_which_tensors_there_is_no_rule(tmp_path: Path) -> None:
    write_source(tmp_path / "model")
    file = tmp_path / "plan.toml"
    words = ["plans", "observe", str(tmp_path / "model"), "-o", str(file)]
    done = CliRunner(env={"COLUMNS": "500"}).invoke(app, words)
    assert done.exit_code == 0, done.output
    written = file.read_bytes()
    num_rules = len(tomllib.loads(written.decode())["cut"])
    assert num_rules > 3
    assert done.stdout.splitlines() == [
        f"wrote {file}: {num_rules} rules, observed from vLLM 0.0.fake OddForCausalLM at 2, 4 ranks",
        "no rule odd.weight: no rule describes how it is sliced along dim 0",
    ]
    again = CliRunner().invoke(app, [*words, "--json"])
    assert (again.exit_code, again.stdout, json.loads(again.stderr)["code"]) == (2, "", "exists")
    assert file.read_bytes() == written
