"""Runs of the command on a small model: in this process or in one of its own, and what it prints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file
from support import prestarted
from support.terminals import ENVIRONMENT, VARIABLES
from support.tools import built_command
from support.trees import tree

import relayout
from relayout.cli.app import main

Array = npt.NDArray[Any]
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 128,
}
SHAPES = {
    "lm_head.weight": (128, 64),
    "model.embed_tokens.weight": (128, 64),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.layers.0.mlp.down_proj.weight": (64, 100),
    "model.layers.0.mlp.gate_proj.weight": (100, 64),
    "model.layers.0.mlp.up_proj.weight": (100, 64),
    "model.layers.0.post_attention_layernorm.weight": (64,),
    "model.layers.0.self_attn.k_proj.weight": (32, 64),
    "model.layers.0.self_attn.o_proj.weight": (64, 64),
    "model.layers.0.self_attn.q_proj.weight": (64, 64),
    "model.layers.0.self_attn.v_proj.weight": (32, 64),
    "model.norm.weight": (64,),
}
NORMS = [name for name in SHAPES if "norm" in name]
RANK_NBYTES = sum(2 * int(np.prod(shape)) // (1 if name in NORMS else 2) for name, shape in SHAPES.items())
"""Of two ranks."""


def weights() -> dict[str, Array]:
    """A small Llama; every byte depends on its place."""
    rng = np.random.default_rng(7)
    return {name: rng.integers(1, 2**16, shape).astype(np.uint16).view(np.float16) for name, shape in SHAPES.items()}


class Run(Protocol):
    """Runs the command to its end, its output in pipes."""

    def __call__(self, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]: ...


def write_model(folder: Path, config: Mapping[str, Any] = CONFIG) -> Path:
    folder.mkdir()
    save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"a": 1}')
    return folder


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder to work in, with a model in it and nothing else."""
    place = tmp_path / "work"
    place.mkdir()
    write_model(place / "model")
    return place


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its conversion for two ranks, to be read only."""
    place = tmp_path_factory.mktemp("converted")
    relayout.convert(write_model(place / "model"), place / "out", tp=2)
    return place


run: Run = partial(prestarted.run, env=ENVIRONMENT)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """As `run`, but in this process: most of what a run takes is the start of Python."""

    def run_here(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["relayout", *args])
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        stdout, stderr = capfd.readouterr()
        assert end.value.code is None or isinstance(end.value.code, int)
        return subprocess.CompletedProcess(sys.argv, end.value.code or 0, stdout, stderr)

    monkeypatch.setattr("relayout.cli.app.app", built_command())
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return run_here


def assert_one_line(done: subprocess.CompletedProcess[str], code: int, says: str) -> None:
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.endswith("\n")
    error, following = done.stderr.splitlines()
    assert error.startswith("relayout: error: ")
    assert re.search(says, error), done.stderr
    assert following.startswith("relayout: next: ")
    assert error.isprintable()
    assert following.isprintable()


def assert_refused(run: Run, work: Path, args: list[str], says: str, code: int = 2) -> None:
    """One line with the error and one with the next command on stderr, the exit code, and nothing changed."""
    before = tree(work)
    assert_one_line(run(*args, cwd=work), code, says)
    assert tree(work) == before


def one_object(done: subprocess.CompletedProcess[str], code: int = 0) -> dict[str, Any]:
    """The one JSON object that is on stdout; on stderr is only progress, which is told each second."""
    assert done.returncode == code, done.stderr
    assert all(line.startswith('{"event": ') for line in done.stderr.splitlines()), done.stderr
    assert done.stdout.count("\n") == 1
    parsed = json.loads(done.stdout)
    assert isinstance(parsed, dict)
    return parsed
