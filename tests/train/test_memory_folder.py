"""The folder that a save converts without writing it, and names that no checkpoint has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import relayout
from relayout.checkpoint.shards import in_stored_order, lay_out_shards, model_order, share_out
from relayout.checkpoint.source import read_source
from relayout.errors import FormatError, PlanError
from relayout.format.index import HUB_INDEX_NAME
from relayout.loader.held import HeldTensor
from relayout.train.memory_folder import MemoryFolder, checkpoint_of

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8, torch.float16]
NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).filter(
    lambda name: name != "__metadata__"
)


@given(
    st.dictionaries(NAMES, st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), min_size=1),
    st.integers(1, 40),
)
def test_the_checkpoint_of_a_folder_is_what_its_headers_say(
    kinds: dict[str, tuple[torch.dtype, list[int]]], limit: int
) -> None:
    tensors = [torch.zeros(shape, dtype=dtype) for dtype, shape in kinds.values()]
    heads = [HeldTensor.of(name, tensor).head for name, tensor in zip(kinds, tensors, strict=True)]
    heads.sort(key=lambda head: (model_order(head.name), head.name))
    groups = [in_stored_order(heads, group) for group in share_out([head.nbytes for head in heads], limit)]
    shards, index = lay_out_shards(heads, groups, {})
    config = {"config.json": b'{"model_type": "llama"}'}
    files = config if index is None else config | {HUB_INDEX_NAME: index}
    folder = MemoryFolder(files, {shard.name: shard for shard in shards}, lambda *_: None, "a version")
    assert checkpoint_of(folder, heads) == read_source(folder)


def test_the_name_that_safetensors_keeps_for_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises((PlanError, FormatError), match="__metadata__"):
        relayout.save({"__metadata__": torch.ones(2), "x": torch.ones(2)}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def merged_experts(folder: Path) -> dict[str, Any]:
    """The options of a save of a state dict with merged experts; its checkpoint is in `folder`."""
    import transformers as hf

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**sizes, **experts, vocab_size=64, num_hidden_layers=1))
    model.save_pretrained(folder, max_shard_size="10KB")
    return {"tensors": model.state_dict(), "config": folder, "tp": 2}


MERGED = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.xdist_group("transformers")
def test_merged_experts_of_a_checkpoint_that_names_each_are_refused(tmp_path: Path) -> None:
    options = merged_experts(tmp_path / "stock")
    config = json.loads((tmp_path / "stock" / "config.json").read_text())
    nested = {"model_type": "a-new-one", "text_config": config}
    for given_config in (options["config"], config, nested):
        with pytest.raises(PlanError, match=r"experts.*one by one.*transformers.save_pretrained") as refused:
            relayout.save(**{**options, "config": given_config}, output=tmp_path / "out")
        assert refused.value.code == "unsupported"
    assert not (tmp_path / "out").exists()


@pytest.mark.xdist_group("transformers")
def test_merged_experts_that_the_checkpoint_has_are_saved(tmp_path: Path) -> None:
    options = merged_experts(tmp_path / "stock")
    index = {"weight_map": dict.fromkeys(options["tensors"], "model.safetensors")}
    (tmp_path / "stock" / "model.safetensors.index.json").write_text(json.dumps(index))
    relayout.save(**options, output=tmp_path / "out")
    assert MERGED in relayout.load(tmp_path / "out", 0)
