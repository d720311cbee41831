"""The examples in tools/examples, run as their docstrings say: the tokens are those of the original checkpoint."""

from __future__ import annotations

import ast
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import SIZES, as_integers, read_tensors
from support.patience import PATIENCE
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

import relayout

EXAMPLES = Path(__file__).parents[2] / "tools" / "examples"
PROMPT = [17, 300, 5]
OPTIONS = ["--prompt", *map(str, PROMPT), "--new-tokens", "12"]

# All in one process of pytest-xdist, which then makes the checkpoint once.
pytestmark = pytest.mark.xdist_group("examples")


def write_checkpoint(folder: Path, config: PretrainedConfig) -> Path:
    """A model of random BF16 weights, large enough that it does not repeat itself."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder, max_shard_size="300KB")
    return folder


def generated(model: Any) -> list[int]:
    """What a model goes on with, greedily."""
    tokens = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)
    result: list[int] = tokens[0].tolist()
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and conversions of it by their degrees."""
    folder = tmp_path_factory.mktemp("examples")
    sizes = SIZES | {"vocab_size": 1024, "eos_token_id": None}
    write_checkpoint(folder / "source", LlamaConfig(**sizes))
    for tp in (1, 2, 8):
        relayout.convert(folder / "source", folder / f"tp{tp}", tp=tp)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    """The tokens of the original checkpoint, by stock transformers."""
    tokens = generated(AutoModelForCausalLM.from_pretrained(folder / "source", dtype=torch.float32))
    assert tokens[:3] == PROMPT
    assert len(set(tokens)) > 10
    return tokens


def run(*command: object) -> list[int]:
    """The tokens that a command prints, last of all."""
    done = subprocess.run(
        [*map(str, command), *OPTIONS],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return [int(token) for token in done.stdout.splitlines()[-1].split()]


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("example", ["transformers_single.py", "torch_dcp.py", "plain_numpy.py"])
def test_the_tokens_are_those_of_the_original(
    example: str,
    tp: int,
    folder: Path,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process, which has imported all that they need."""
    monkeypatch.setattr(sys, "argv", [example, str(folder / f"tp{tp}"), *OPTIONS])
    runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    assert [int(token) for token in capsys.readouterr().out.splitlines()[-1].split()] == expected


PARALLEL = """
import runpy, sys
import transformers.integrations.accelerate
# What from_pretrained needs accelerate for is more than one device in a process.
transformers.integrations.accelerate.is_accelerate_available = lambda *_: True
sys.modules["relayout"] = None  # Cannot be imported.
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_tokens_of_tensor_parallel_processes_are_those_of_the_original(
    folder: Path, expected: list[int], tmp_path: Path
) -> None:
    script = tmp_path / "parallel.py"
    script.write_text(PARALLEL)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2]
    assert run(*torchrun, script, EXAMPLES / "transformers_tp.py", folder / "tp2") == expected


def test_every_example_is_run_here() -> None:
    named = {"transformers_single.py", "torch_dcp.py", "plain_numpy.py", "transformers_tp.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == named


def test_tied_embeddings_are_stored_once_and_found_in_both_places(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", Qwen2Config(**SIZES, tie_word_embeddings=True, eos_token_id=None))
    relayout.convert(source, tmp_path / "out", tp=4)
    load_whole_tensors = runpy.run_path(str(EXAMPLES / "transformers_single.py"))["load_whole_tensors"]
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert generated(load_whole_tensors(tmp_path / "out")) == generated(original)


# Without torch.

ALONE = """
import runpy, sys
for name in ("torch", "relayout", "safetensors", "transformers"):
    sys.modules[name] = None  # Cannot be imported.
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_plain_numpy_needs_no_torch_and_no_relayout(folder: Path, expected: list[int]) -> None:
    assert run(sys.executable, "-c", ALONE, EXAMPLES / "plain_numpy.py", folder / "tp2") == expected


def test_plain_numpy_imports_numpy_and_zstandard_only() -> None:
    tree = ast.parse((EXAMPLES / "plain_numpy.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "argparse", "json", "pathlib", "typing", "numpy", "zstandard"}


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_plain_numpy_joins_the_sources_tensors(tp: int, folder: Path) -> None:
    joined = runpy.run_path(str(EXAMPLES / "plain_numpy.py"))["join"](folder / f"tp{tp}")
    source = read_tensors(folder / "source")
    assert joined.keys() == source.keys()
    for name, array in joined.items():
        assert (as_integers(torch.from_numpy(array).bfloat16()) == source[name]).all(), name
