"""The examples in tools/examples, run as their docstrings say: the tokens are those of the original checkpoint."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import prestarted
from support.models import SIZES
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

import relayout

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "tools" / "examples"
PROMPT = [17, 300, 5]
OPTIONS = ["--prompt", *map(str, PROMPT), "--new-tokens", "12"]

# All in one process of pytest-xdist, which then makes the checkpoint once.
pytestmark = [pytest.mark.documents, pytest.mark.xdist_group("transformers")]


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
    relayout.convert(folder / "source", folder / "whole", tp=2, layout="whole")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    """The tokens of the original checkpoint, by stock transformers."""
    tokens = generated(AutoModelForCausalLM.from_pretrained(folder / "source", dtype=torch.float32))
    assert tokens[:3] == PROMPT
    assert len(set(tokens)) > 10
    return tokens


def tokens_of(printed: str) -> list[int]:
    """Those that an example prints, last of all."""
    return [int(token) for token in printed.splitlines()[-1].split()]


@pytest.mark.parametrize(
    ("example", "name"),
    [
        *(("transformers_single.py", name) for name in ("tp1", "tp8", "whole")),
        *(("torch_dcp.py", name) for name in ("tp8", "whole")),
    ],
)
def test_the_tokens_are_those_of_the_original(
    example: str,
    name: str,
    folder: Path,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process, which has imported all that they need."""
    monkeypatch.setattr(sys, "argv", [example, str(folder / name), *OPTIONS])
    runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    assert tokens_of(capsys.readouterr().out) == expected


AS_TORCHRUN = """
import os, runpy, sys
import torch.distributed, torch.multiprocessing
import transformers.integrations.accelerate

# What from_pretrained needs accelerate for is more than one device in a process.
transformers.integrations.accelerate.is_accelerate_available = lambda *_: True
sys.modules["relayout"] = None  # Cannot be imported.
num_ranks = int(sys.argv.pop(1))
sys.argv = sys.argv[1:]
store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}

def run(rank):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    runpy.run_path(sys.argv[0], run_name="__main__")

torch.multiprocessing.start_processes(run, nprocs=num_ranks, start_method="fork")
"""


def test_the_tokens_of_tensor_parallel_processes_are_those_of_the_original(folder: Path, expected: list[int]) -> None:
    done = prestarted.run(
        *(2, EXAMPLES / "transformers_tp.py", folder / "tp2", *OPTIONS),
        script=AS_TORCHRUN,
        imports=prestarted.TRANSFORMERS,
        env=prestarted.ONE_THREAD,
    )
    assert done.returncode == 0, done.stderr
    assert tokens_of(done.stdout) == expected


def test_processes_of_an_engine_of_ones_own_hold_their_ranks(folder: Path) -> None:
    script = AS_TORCHRUN.replace('sys.modules["relayout"] = None', "")
    done = prestarted.run(
        *(2, EXAMPLES / "own_engine.py", folder / "tp8"),
        script=script,
        imports=prestarted.TRANSFORMERS,
        env=prestarted.ONE_THREAD,
    )
    assert done.returncode == 0, done.stderr
    expected = []
    for rank in range(2):
        tensors = relayout.load(folder / "tp2", rank).values()
        total = sum(tensor.double().sum().item() for tensor in tensors)
        said = f"{len(tensors)} tensors, {sum(tensor.nbytes for tensor in tensors)} bytes"
        expected.append((f"rank {rank} of 2: {said}", f"sum {total:.6f}"))
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    assert [(line.partition(" in ")[0], line.rpartition(", ")[2]) for line in lines] == expected


def test_every_example_is_run_here() -> None:
    named = {"transformers_single.py", "torch_dcp.py", "transformers_tp.py", "own_engine.py"}
    by_conformance = {"own_store.py", "own_backend.py"}  # In tests/testing.
    by_their_hosts = {path.name.removeprefix("test_") for path in (ROOT / "tests" / "examples").glob("test_*.py")}
    assert len(by_their_hosts) == 4
    assert {path.name for path in EXAMPLES.glob("*.py")} == named | by_conformance | by_their_hosts


def test_tied_embeddings_are_stored_once_and_found_in_both_places(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", Qwen2Config(**SIZES, tie_word_embeddings=True, eos_token_id=None))
    relayout.convert(source, tmp_path / "out", tp=4)
    load_whole_tensors = runpy.run_path(str(EXAMPLES / "transformers_single.py"))["load_whole_tensors"]
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert generated(load_whole_tensors(tmp_path / "out")) == generated(original)
