"""relayout.transformers: its models are those that transformers loads from the source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support import prestarted

import relayout
from relayout.errors import PlanError

RANKS = 2
MODELS = {"qwen2": "Qwen2ForCausalLM", "moe": "Qwen3MoeForCausalLM"}
"""Dense, tied and with biases; experts."""


@pytest.mark.xdist_group("transformers")
def test_each_process_has_the_parameters_and_the_logits_of_transformers_own_load(folders: Path) -> None:
    done = prestarted.run(
        *(RANKS, folders, *MODELS),
        script="from support import transformers_worker; transformers_worker.main()",
        imports=prestarted.TRANSFORMERS,
        env=prestarted.ONE_THREAD,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(RANKS):
        found = json.loads((folders / f"found-{rank}.json").read_text())
        assert found.keys() == MODELS.keys()
        for family, name in MODELS.items():
            assert found[family].pop("sharded") > 10
            assert found[family] == {"different": [], "same_logits": True, "class": name}


def test_one_process_has_the_whole_model(folders: Path) -> None:
    from transformers import AutoModelForCausalLM

    own = AutoModelForCausalLM.from_pretrained(folders / "llama", dtype=torch.bfloat16)
    ours = relayout.transformers.from_pretrained(folders / "llama-tp2", threads=1)
    assert ours.dtype == torch.bfloat16
    assert own.state_dict().keys() == ours.state_dict().keys()
    for name, tensor in own.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name


def test_a_weight_that_the_checkpoint_lacks_is_an_error_where_transformers_only_warns(folders: Path) -> None:
    from transformers import LlamaForSequenceClassification

    with pytest.raises(PlanError, match=r"nothing was loaded into score\.weight: .* transformers' LlamaForSequenceCl"):
        relayout.transformers.from_pretrained(folders / "llama-tp2", model_class=LlamaForSequenceClassification)


def test_what_transformers_cannot_use_is_refused(folders: Path) -> None:
    with pytest.raises(PlanError, match="llama: was not converted; `relayout convert SRC --tp N`"):
        relayout.transformers.from_pretrained(folders / "llama")
    with pytest.raises(PlanError, match="moe-ep2: was converted with --expert-parallel"):
        relayout.transformers.from_pretrained(folders / "moe-ep2")
    with pytest.raises(PlanError, match="is not a folder"):
        relayout.transformers.from_pretrained(folders / "nothing")
