"""The layout `whole`: an ordinary checkpoint, of which each rank reads just its bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.conversions import Conversions, dcp_tensors, grouped, reference_tensors
from support.interruptions import interrupted_before_the_end
from support.loader_fixtures import assert_equal
from support.profile import sample
from support.trees import content
from transformers.utils.hub import get_checkpoint_shard_files

import relayout
from relayout.errors import FormatError, PlanError

NAMES = sample(
    ["llama", "qwen2_tied", "gpt2", "bloom", "phi3", "mixtral", "deepseek_v3", "gpt_oss_mxfp4"],
    ["qwen2_tied", "gpt2", "phi3", "gpt_oss_mxfp4"],
)


def stock(folder: Path) -> dict[str, torch.Tensor]:
    """What a stock loader finds that goes by the index, as transformers reads it."""
    files, _ = get_checkpoint_shard_files(folder, str(folder / "model.safetensors.index.json"), local_files_only=True)
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", grouped(NAMES))
def test_every_rank_loads_what_it_loads_of_the_other_layout(name: str, conversions: Conversions) -> None:
    tp = conversions.largest(name)
    out, ranks = conversions.whole(name, tp), conversions.at(name, tp)
    for rank in range(tp):
        assert_equal(relayout.load(out, rank, verify=True), relayout.load(ranks, rank))
    for rank in {0, tp - 1}:
        expected = relayout.load(ranks, rank)
        assert_equal(dict(relayout.iter_load(out, rank, verify=True)), expected)
        with relayout.open(out, rank) as view:
            assert_equal({key: view.get_tensor(key) for key in view.keys()}, expected)  # noqa: SIM118 (it is no mapping)
        told = relayout.explain(out, rank)
        assert told.nbytes == sum(tensor.nbytes for tensor in expected.values())
    for degree in (1, 2):
        if not isinstance(conversions.outcome(name, degree), PlanError):
            assert_equal(relayout.load(out, 0, tp=degree, verify=True), relayout.load(ranks, 0, tp=degree))


@pytest.mark.parametrize("name", grouped(NAMES))
def test_it_is_an_ordinary_checkpoint_and_gives_back_its_source(
    name: str, conversions: Conversions, tmp_path: Path
) -> None:
    out, source = conversions.whole(name, conversions.largest(name)), conversions.source(name)
    expected = reference_tensors(source)
    assert_equal(stock(out), expected)
    with relayout.safe_open(out) as view:
        assert_equal({key: view.get_tensor(key) for key in view.keys()}, expected)  # noqa: SIM118 (it is no mapping)
    if name != "gpt_oss_mxfp4":  # Its reader has no E8M0.
        assert_equal(dcp_tensors(out), expected)
    assert relayout.verify(out).ok
    assert relayout.verify(out, source=source).ok
    relayout.restore(out, tmp_path / "back")
    assert content(tmp_path / "back") == content(source)


def test_a_rank_has_files_of_its_own_for_what_is_not_contiguous_alone(conversions: Conversions) -> None:
    out = conversions.whole("llama", 2)
    held = set()
    for path in out.glob("relayout-rank-*.slices"):
        with safe_open(path, framework="np") as file:
            held |= set(file.keys())
    assert {name.rsplit(".", 2)[-2] for name in held} == {"o_proj", "down_proj"}
    source = sum(tensor.nbytes for tensor in reference_tensors(conversions.source("llama")).values())
    files = [*out.glob("*.safetensors"), *out.glob("*.slices")]
    stored = sum(path.stat().st_size for path in files)
    by_columns = sum(tensor.nbytes for name, tensor in stock(out).items() if name in held)
    assert source + by_columns <= stored <= source + by_columns + 4096 * 2 * len(files)


def test_at_one_rank_it_is_the_source_in_another_order(conversions: Conversions) -> None:
    out = conversions.whole("llama", 1)
    assert not list(out.glob("relayout-rank-*.slices"))
    assert_equal(relayout.load(out, 0), reference_tensors(conversions.source("llama")))


def test_an_interrupted_conversion_is_gone_on_with(conversions: Conversions, tmp_path: Path) -> None:
    source = conversions.source("llama")
    with interrupted_before_the_end():
        relayout.convert(source, tmp_path / "out", tp=2, layout="whole")
    with pytest.raises(PlanError, match="with other options"):
        relayout.convert(source, tmp_path / "out", tp=2)
    summary = relayout.convert(source, tmp_path / "out", tp=2, layout="whole")
    assert summary.resumed_nbytes == summary.source_nbytes
    assert content(tmp_path / "out") == content(conversions.whole("llama", 2))


@pytest.mark.parametrize("pattern", ["model-*.safetensors", "relayout-rank-1-part-0.slices"])
def test_a_flipped_bit_is_found(conversions: Conversions, tmp_path: Path, pattern: str) -> None:
    out = shutil.copytree(conversions.whole("llama", 2), tmp_path / "out")
    [path] = out.glob(pattern)
    blob = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(blob[:8], "little")
    blob[start + (len(blob) - start) // 3] ^= 4
    path.write_bytes(blob)
    found = relayout.verify(out).differences
    assert {one.file for one in found} == {path.name}
    assert any(one.tensor for one in found)
    with pytest.raises(FormatError, match="damaged"):
        [relayout.load(out, rank, verify=True) for rank in range(2)]


def test_all_ranks_share_the_files_of_the_whole_tensors(conversions: Conversions) -> None:
    out = conversions.whole("llama", 2)
    manifest = json.loads((out / "relayout.json").read_text())
    assert manifest["whole"]["table"] == "relayout.whole.json.zst"
    shared = set(manifest["whole"]["files"])
    for entry in manifest["ranks"]:
        assert shared < set(entry["files"])
    assert np.sum([read["nbytes"] for read in manifest["whole"]["reads"]]) == manifest["source"]["nbytes"]


def test_another_layout_is_refused(conversions: Conversions, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="layout: 'columns', expected 'ranks' or 'whole'"):
        relayout.convert(conversions.source("llama"), tmp_path / "out", tp=2, layout="columns")
