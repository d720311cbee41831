"""`load(into=model)`: each process has of a model of transformers what its own `from_pretrained` gives it, sharded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support import prestarted
from support.checkpoints import write_family
from support.conversions import reference_tensors
from support.families import FAMILIES
from support.profile import sample
from support.sharded_worker import MODELS

import relayout
from relayout.errors import PlanError

pytestmark = pytest.mark.xdist_group("transformers")

SCRIPT = "from support.sharded_worker import of_models; of_models()"
NAMES = sample(("llama", "qwen2_tied", "qwen3_moe", "mixtral", "phi3"), ("qwen2_tied", "qwen3_moe"))
"""Dense; one tensor for embedding and head; experts, which the checkpoint has one by one; fused projections."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    for name in NAMES:
        write_family(FAMILIES[name], place / name)
        relayout.convert(place / name, place / f"{name}-out", tp=2)
    return place


@pytest.mark.parametrize("num_members", sample(MODELS, [4]))
def test_each_process_has_what_from_pretrained_gives_it(place: Path, num_members: int) -> None:
    (place / f"of-{num_members}").mkdir()
    done = prestarted.run(
        *(place, num_members, *NAMES), script=SCRIPT, imports=prestarted.TRANSFORMERS, env=prestarted.ONE_THREAD
    )
    assert done.returncode == 0, done.stderr
    for number in range(num_members):
        found = json.loads((place / f"member-{number}-of-{num_members}.json").read_text())
        assert [found.pop(f"{name}, made without memory") for name in NAMES] == [False] * len(NAMES)
        assert len(found) == len(NAMES) * 2 * len(MODELS[num_members])
        assert all(case["different"] == [] and case["sharded"] >= 10 for case in found.values())


def a_model(place: Path, name: str) -> torch.nn.Module:
    """With other values than its checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place / name))
    return model.to(torch.bfloat16)


def test_a_second_name_of_a_tied_tensor_must_have_the_same_values(place: Path, tmp_path: Path) -> None:
    """As some checkpoints of the hub have it."""
    tensors = reference_tensors(place / "qwen2_tied")
    embedding = tensors["model.embed_tokens.weight"]
    for is_same in (True, False):
        tensors["lm_head.weight"] = embedding.clone() if is_same else embedding + 1
        save_file(tensors, tmp_path / "model.safetensors")
        model = a_model(place, "qwen2_tied")
        if is_same:
            relayout.load(tmp_path, into=model)
            assert torch.equal(model.get_parameter("lm_head.weight"), embedding)
        else:
            with pytest.raises(
                PlanError, match=r"embed_tokens\.weight': the model has another tensor in the same memory"
            ):
                relayout.load(tmp_path, into=model)


def test_what_transformers_ignores_is_ignored(place: Path, tmp_path: Path) -> None:
    tensors = reference_tensors(place / "qwen3_moe")
    model = a_model(place, "qwen3_moe")
    for name, is_ignored in (("model.rotary_emb.inv_freq", True), ("model.layers.0.other.weight", False)):
        save_file({**tensors, name: torch.ones(2)}, tmp_path / "model.safetensors")
        if is_ignored:
            relayout.load(tmp_path, into=model)
        else:
            with pytest.raises(
                PlanError, match=r"the checkpoint has 'model\.layers\.0\.other\.weight', which the model lacks"
            ):
                relayout.load(tmp_path, into=model)


def test_a_model_lacks_nothing_that_it_does_not_share(place: Path, tmp_path: Path) -> None:
    tensors = reference_tensors(place / "qwen3_moe")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(PlanError, match=r"the checkpoint has no 'model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight'"):
        relayout.load(tmp_path, into=a_model(place, "qwen3_moe"))
