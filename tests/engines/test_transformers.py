"""relayout.transformers: its models are those that transformers loads from the source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support import prestarted
from support.checkpoints import write_family
from support.families import FAMILIES

import relayout
from relayout.errors import PlanError

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


@pytest.mark.xdist_group("transformers")
def test_each_process_has_the_parameters_and_the_logits_of_transformers_own_load(folder: Path) -> None:
    done = prestarted.run(
        *(RANKS, folder, *MODELS),
        script="from support import transformers_worker; transformers_worker.main()",
        imports=prestarted.TRANSFORMERS,
        env=prestarted.ONE_THREAD,
    )
    assert done.returncode == 0, done.stderr
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


def test_a_weight_that_the_checkpoint_lacks_is_an_error_where_transformers_only_warns(folder: Path) -> None:
    from transformers import LlamaForSequenceClassification

    with pytest.raises(PlanError, match=r"nothing was loaded into score\.weight: .* transformers' LlamaForSequenceCl"):
        relayout.transformers.from_pretrained(folder / "llama-tp2", model_class=LlamaForSequenceClassification)


def test_what_transformers_cannot_use_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="llama: was not converted; `relayout convert SRC --tp N`"):
        relayout.transformers.from_pretrained(folder / "llama")
    relayout.convert(folder / "qwen3_moe", tmp_path / "owned", tp=2, expert_parallel=True)
    with pytest.raises(PlanError, match="owned: was converted with --expert-parallel"):
        relayout.transformers.from_pretrained(tmp_path / "owned")
    with pytest.raises(PlanError, match="is not a folder"):
        relayout.transformers.from_pretrained(tmp_path / "nothing")
