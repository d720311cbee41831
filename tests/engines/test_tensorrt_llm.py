"""The checkpoint loader of TensorRT-LLM, with its interfaces: it needs a GPU to run, which nothing here has."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import write_family
from support.fake_vllm import put_modules
from support.families import FAMILIES

import relayout
from relayout.engines.tensorrt_llm import checkpoint_loader
from relayout.errors import PlanError

CHECKPOINTS = "tensorrt_llm._torch.models.checkpoints"


class HfCheckpointLoader:
    """TensorRT-LLM's own, as far as ours inherits from it."""

    def __init__(self, *, weight_loader: Any = None, weight_mapper: Any = None, config_loader: Any = None) -> None:
        self.weight_loader = weight_loader


class BaseWeightLoader:
    """TensorRT-LLM's own."""


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {
        f"{CHECKPOINTS}.base_weight_loader": {"BaseWeightLoader": BaseWeightLoader},
        f"{CHECKPOINTS}.hf.checkpoint_loader": {"HfCheckpointLoader": HfCheckpointLoader},
    }
    put_modules(monkeypatch, contents)


def shard(weight: torch.Tensor, tp_size: int, tp_rank: int, axis: int) -> torch.Tensor:
    """What its `load_weight_shard` does with a tensor."""
    assert weight.device.type == "cpu"
    width = -(-weight.shape[axis] // tp_size)
    index = [slice(length) for length in weight.shape]
    index[axis] = slice(tp_rank * width, min((tp_rank + 1) * width, weight.shape[axis]))
    return weight[tuple(index)].to(torch.device("cpu"))


def test_each_rank_gets_what_it_would_cut_out_of_the_source(llama: Path, tmp_path: Path) -> None:
    relayout.convert(llama, tmp_path / "model", tp=2)
    whole: dict[str, torch.Tensor] = {}
    for file in llama.glob("*.safetensors"):
        whole |= load_file(file)
    cut = {name for name in whole if name.endswith("_proj.weight")}
    assert len(cut) == 21
    for rank in range(2):
        with pytest.warns(UserWarning, match="experimental"):
            sent = pickle.loads(pickle.dumps(checkpoint_loader(strict=True)))
        assert isinstance(sent.weight_loader, BaseWeightLoader)
        mapping = SimpleNamespace(tp_rank=rank, tp_size=2, moe_ep_size=1)
        found = sent.weight_loader.load_weights(str(tmp_path / "model"), mapping=mapping, model=None)
        assert {name: tensor.shape for name, tensor in found.items()} == {
            name: tensor.shape for name, tensor in whole.items()
        }
        for name in cut:
            axis = int(name.endswith(("o_proj.weight", "down_proj.weight")))
            assert torch.equal(shard(found[name], 2, rank, axis), shard(whole[name], 2, rank, axis)), name


def test_what_it_cannot_use_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="checkpoint_loader: relayout has no option 'thread'"):
        checkpoint_loader(thread=1)
    (tmp_path / "moe").mkdir()
    write_family(FAMILIES["qwen3_moe"], tmp_path / "moe")
    relayout.convert(tmp_path / "moe", tmp_path / "owned", tp=2, expert_parallel=True)
    mapping = SimpleNamespace(tp_rank=0, tp_size=2, moe_ep_size=2)
    with pytest.raises(PlanError, match="owned: was converted with --expert-parallel"):
        checkpoint_loader().weight_loader.load_weights(str(tmp_path / "owned"), mapping=mapping)
