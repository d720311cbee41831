"""relayout.transformers: its models are those that transformers loads from the source."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from support.checkpoints import write_family
from support.patience import PATIENCE

import relayout
from relayout.errors import PlanError

WORKER = Path(__file__).parents[1] / "support" / "transformers_worker.py"
RANKS = 2
MODELS = {"llama": "LlamaForCausalLM", "qwen2_tied": "Qwen2ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("transformers")
    for family in MODELS:
        (root / family).mkdir()
        write_family(FAMILIES[family], root / family)
        relayout.convert(root / family, root / f"{family}-tp{RANKS}", tp=RANKS)
    return root


def test_each_process_has_the_parameters_and_the_logits_of_transformers_own_load(folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, WORKER, str(RANKS), folder, *MODELS],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    for rank in range(RANKS):
        found = json.loads((folder / f"found-{rank}.json").read_text())
        assert found.keys() == MODELS.keys()
        for family, name in MODELS.items():
            assert found[family].pop("sharded") > 10
            assert found[family] == {"different": [], "same_logits": True, "class": name}


def test_one_process_has_the_whole_model(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    own = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.bfloat16)
    ours = relayout.transformers.from_pretrained(folder / "llama-tp2", threads=1)
    assert ours.dtype == torch.bfloat16
    assert own.state_dict().keys() == ours.state_dict().keys()
    for name, tensor in own.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name


def test_what_transformers_cannot_use_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="llama: was not converted; `relayout convert SRC --tp N`"):
        relayout.transformers.from_pretrained(folder / "llama")
    relayout.convert(folder / "qwen3_moe", tmp_path / "owned", tp=2, expert_parallel=True)
    with pytest.raises(PlanError, match="owned: was converted with --expert-parallel"):
        relayout.transformers.from_pretrained(tmp_path / "owned")
    with pytest.raises(PlanError, match="is no folder"):
        relayout.transformers.from_pretrained(tmp_path / "nothing")
