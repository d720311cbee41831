"""Stock PyTorch reads a folder of any degree as one model, but where a rank's slice of a fused tensor is no box."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.conversions import (
    EXPERT_CASES,
    OF_EACH_KIND,
    Conversions,
    assert_same,
    dcp_tensors,
    grouped,
    reference_tensors,
)
from support.local_stores import read_manifest, read_table
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.api import CheckpointException

from relayout.core.arguments import collapse_numbers

QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"
FUSED = {
    "phi3": [QKV, GATE_UP],
    "gpt2": ["attn.c_attn"],
    "falcon_40b": ["self_attention.query_key_value"],
    "llama4": ["feed_forward.experts.gate_up_proj"],
    "qwen3_next": ["linear_attn.conv1d"],
    "qwen4_exp": ["linear_attn.conv1d", "linear_attn.in_proj_qkv"],
    "gptq_4bit_biases_fused": [QKV, GATE_UP],
}
"""Fused tensors, of which a rank holds a piece of each part."""


def assert_whole(folder: Path, source: Path) -> None:
    found, expected = dcp_tensors(folder, one_of_each_kind=True), reference_tensors(source)
    assert {collapse_numbers(name) for name in found} == {collapse_numbers(name) for name in expected}
    assert_same(found, {name: expected[name] for name in found}, folder)


def fused_slices(folder: Path) -> set[str]:
    """Tensors of which some rank's slice is no box: by its table."""
    manifest = read_manifest(folder)
    tables = [read_table(folder, manifest, rank) for rank in range(manifest.num_ranks)]
    return {name for one in tables for name, part in zip(one.names, one.slices, strict=True) if not part.is_box}


def has_dcp(folder: Path) -> bool:
    result: bool = json.loads((folder / "relayout.json").read_text())["dcp"]
    return result


@pytest.mark.parametrize("name", grouped(OF_EACH_KIND))
def test_whole_tensors_are_the_sources_or_a_fused_slice_is_no_box(name: str, conversions: Conversions) -> None:
    folder = conversions.at(name, conversions.largest(name))
    fused = fused_slices(folder)
    assert (not fused) == (name not in FUSED)
    # At one rank tensors are whole, and nothing need be said of their parts.
    assert has_dcp(folder) == (not fused and conversions.largest(name) > 1)
    if not fused:
        assert_whole(folder, conversions.source(name))
    for module in FUSED.get(name, []):
        assert [key for key in fused if module in key]
    assert all(any(module in key for module in FUSED[name]) for key in fused)


@pytest.mark.parametrize("name", grouped(EXPERT_CASES))
def test_experts_that_ranks_own_whole_are_found(name: str, conversions: Conversions) -> None:
    folder = conversions.at(name, 2, experts=True)
    assert has_dcp(folder) == (not fused_slices(folder))
    if has_dcp(folder):
        assert_whole(folder, conversions.source(name))
    assert has_dcp(folder) or name == "qwen3_next"


@pytest.mark.parametrize(("name", "module"), [("bloom", "query_key_value"), ("falcon_rw", "query_key_value")])
def test_interleaved_heads_are_a_box_where_a_rank_has_one_only(
    name: str, module: str, conversions: Conversions
) -> None:
    assert has_dcp(conversions.at(name, 8))
    assert not has_dcp(conversions.at(name, 2))
    assert all(module in key for key in fused_slices(conversions.at(name, 2)))


@pytest.mark.parametrize("tp", [2, 8])
def test_what_it_cannot_read_it_does_not_take_for_dcp_tensors(tp: int, conversions: Conversions) -> None:
    """Such files say nothing of their places in the whole: it finds one rank's slices, of other shapes."""
    source = reference_tensors(conversions.source("phi3"))
    reader = HuggingFaceStorageReader(str(conversions.at("phi3", tp)))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load({name: torch.zeros_like(one) for name, one in source.items()}, storage_reader=reader, no_dist=True)
