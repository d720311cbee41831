"""Loads of chosen experts: each is whole, all else is the rank's, and nothing of other experts is read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import s3_server
from support.bits import flip
from support.checkpoints import write_family
from support.conversions import Conversions, Tensors, assert_same, reference_tensors, stored_in
from support.fake_vllm import expert_of
from support.families import FAMILIES
from support.s3_server import Server

import relayout
from relayout.errors import FormatError, PlanError
from relayout.storage.cloud import connect

NUM_EXPERTS = 8
LAYOUTS = [(1, 4), (2, 2), (2, 4), (1, 8)]
"""Launches: the ranks that attention is cut for, and the replicas."""
PLACEMENTS = ["linear", "round robin"]
NODE = 4
"""Processes of a node."""


def experts_of(process: int, num_processes: int, placement: str) -> list[int]:
    """The experts that a process has, as numpy divides them."""
    numbers = np.arange(NUM_EXPERTS)
    if placement == "linear":
        return list(np.array_split(numbers, num_processes)[process])
    return list(numbers[numbers % num_processes == process])


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose experts have 1.5 MiB in each layer: more than the gaps that requests to stores read over."""
    root = tmp_path_factory.mktemp("mixture")
    (root / "plain").mkdir()
    write_family(replace(FAMILIES["qwen3_moe"], sizes={"H": 512, "M": 512, "V": 512}), root / "plain")
    relayout.convert(root / "plain", root / "tp1", tp=1)
    relayout.convert(root / "plain", root / "tp2", tp=2)
    relayout.convert(root / "plain", root / "ep2", tp=2, expert_parallel=True, max_part_nbytes="8MiB")
    assert len(list((root / "ep2").glob("model-rank-0-*"))) > 1
    return root


@pytest.fixture(scope="module")
def source(mixture: Path) -> Tensors:
    return reference_tensors(mixture / "plain")


def wanted(mixture: Path, source: Tensors, rank: int, tp: int, experts: list[int]) -> Tensors:
    """The rank's slices of all but experts, by the stock reader, and these experts as the source has them."""
    held = source if tp == 1 else stored_in(mixture / "tp2", rank)
    rest = {name: tensor for name, tensor in held.items() if expert_of(name) < 0}
    return rest | {name: tensor for name, tensor in source.items() if expert_of(name) in experts}


@pytest.fixture
def server(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """An object store with both folders."""
    pytest.importorskip("obstore", reason="the client of object stores")
    monkeypatch.setattr(connect, "RETRY_SECONDS", 1.0)
    with s3_server.running() as server:
        for name, value in s3_server.environment(server).items():
            monkeypatch.setenv(name, value)
        for folder in ("tp1", "ep2"):
            for file in (mixture / folder).iterdir():
                server.put("models", f"{folder}/{file.name}", file.read_bytes())
        yield server


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(("tp", "replicas"), LAYOUTS)
def test_the_processes_of_a_node_fetch_what_they_use(
    mixture: Path, source: Tensors, server: Server, tp: int, replicas: int, placement: str
) -> None:
    """Process d * T + t has the slices of rank t, and the experts that its placement gives it."""
    folder = "ep2" if tp == 2 else "tp1"
    for first in range(0, tp * replicas, NODE):
        needed, before = 0, len(server.requests)
        for process in range(first, first + NODE):
            experts = experts_of(process, tp * replicas, placement)
            found = relayout.load(f"s3://models/{folder}", process % tp, experts=experts)
            assert_same(found, wanted(mixture, source, process % tp, tp, experts), process)
            needed += sum(tensor.nbytes for tensor in found.values())
        sent = [one for one in server.requests[before:] if one.key.endswith(".safetensors")]
        fetched = sum(one.sent_nbytes for one in sent)
        # Heads of files, and the gaps that requests read over.
        assert needed <= fetched < 1.05 * needed, (first, fetched, needed)


@pytest.mark.parametrize("folder", ["ep2", "tp2", "tp1"])
@pytest.mark.parametrize("tp", [None, 1, 2, 4])
def test_any_folder_gives_whole_experts_at_any_degree(
    mixture: Path, source: Tensors, folder: str, tp: int | None, conversions: Conversions
) -> None:
    degree = tp or int(folder[-1])
    for rank in range(degree):
        found = relayout.load(mixture / folder, rank, tp=tp, experts="6,1-2", verify=True)
        if degree == 4:
            assert {expert_of(name) for name in found} == {-1, 1, 2, 6}
            assert_same(
                {name: found[name] for name in found if expert_of(name) >= 0},
                {name: source[name] for name in source if expert_of(name) in (1, 2, 6)},
                rank,
            )
        else:
            assert_same(found, wanted(mixture, source, rank, degree, [1, 2, 6]), rank)


def test_without_a_rank_all_else_is_whole(mixture: Path, source: Tensors) -> None:
    found = relayout.load(mixture / "ep2", experts=[7])
    assert_same(found, {name: source[name] for name in source if expert_of(name) in (-1, 7)}, "whole")


def test_names_select_among_what_the_experts_leave(mixture: Path, source: Tensors) -> None:
    found = relayout.load(mixture / "ep2", 1, experts=range(2), names="**.experts.**")
    assert_same(found, {name: source[name] for name in source if expert_of(name) in (0, 1)}, "experts alone")
    with pytest.raises(PlanError, match=r"names: no tensor matches"):
        relayout.load(mixture / "ep2", 1, experts=range(2), names="**.experts.2.**")


def test_they_are_streamed_and_filled_in_place(mixture: Path, source: Tensors) -> None:
    expected = wanted(mixture, source, 1, 2, [0, 5])
    assert_same(dict(relayout.iter_load(mixture / "ep2", 1, experts=[0, 5])), expected, "iter_load")
    into = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    relayout.load(mixture / "ep2", 1, experts=[0, 5], into=into)
    assert_same(into, expected, "into")


@pytest.mark.parametrize("name", ["gpt_oss_mxfp4", "llama4"])
def test_of_stacked_experts_the_rows_are_loaded(name: str, conversions: Conversions) -> None:
    whole = reference_tensors(conversions.source(name))
    stacked = {key for key in whole if ".experts." in key}
    count = {whole[key].shape[0] for key in stacked}
    assert count == {NUM_EXPERTS}
    for experts in (False, True):
        found = relayout.load(conversions.at(name, 2, experts=experts), 1, experts=[0, 3, 4])
        held = stored_in(conversions.at(name, 2), 1)
        assert found.keys() == whole.keys()
        rows = {key: torch.from_numpy(whole[key].view(torch.uint8).numpy()[[0, 3, 4]]) for key in stacked}
        assert_same({key: found[key].view(torch.uint8) for key in stacked}, rows, name)
        others = whole.keys() - stacked
        assert_same({key: found[key] for key in others}, {key: held[key] for key in others}, name)


def test_scales_of_inputs_are_those_of_all_experts(conversions: Conversions) -> None:
    """vLLM 0.33's filter of experts (`ep_weight_filter.py`) leaves out no scale."""
    whole = reference_tensors(conversions.source("nvfp4_modelopt_moe"))
    found = relayout.load(conversions.at("nvfp4_modelopt_moe", 2, experts=True), 0, experts=[3])
    scales = {name for name in whole if ".experts." in name and name.endswith(".input_scale")}
    assert {expert_of(name) for name in scales} == {0, 1, 2, 3}
    assert scales <= found.keys()
    assert {expert_of(name) for name in found.keys() - scales} == {-1, 3}


def test_deltas_change_experts_too(mixture: Path, source: Tensors, tmp_path: Path) -> None:
    changed = shutil.copytree(mixture / "plain", tmp_path / "changed")
    [file] = changed.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    relayout.convert(changed, tmp_path / "next", tp=2, expert_parallel=True, max_part_nbytes="8MiB")
    relayout.delta(mixture / "ep2", tmp_path / "next", tmp_path / "delta")
    after = reference_tensors(changed)
    differing = {expert_of(name) for name in after if not torch.equal(after[name], source[name])}
    experts = sorted((differing | {1}) - {-1})
    assert differing - {-1}
    found = relayout.load(mixture / "ep2", 0, experts=experts, deltas=tmp_path / "delta")
    chosen = {name: after[name] for name in after if expert_of(name) in experts}
    assert_same({name: found[name] for name in chosen}, chosen, "delta")


def test_a_folder_of_some_ranks_has_their_experts(mixture: Path, source: Tensors, tmp_path: Path) -> None:
    relayout.copy(mixture / "ep2", tmp_path / "some", ranks=[0])
    assert_same(
        relayout.load(tmp_path / "some", 0, experts=[3]), wanted(mixture, source, 0, 2, [3]), "of the rank's block"
    )
    with pytest.raises(PlanError, match=r"no rank holds the tensor: of 2 ranks the folder has only 0$"):
        relayout.load(tmp_path / "some", 0, experts=[4])
    with pytest.raises(PlanError, match=r"has only 0, and lacks 1"):
        relayout.load(tmp_path / "some", 1, experts=[0])


def test_a_damaged_expert_is_found_by_who_loads_it(mixture: Path, source: Tensors, tmp_path: Path) -> None:
    folder = shutil.copytree(mixture / "tp1", tmp_path / "damaged")
    [file] = folder.glob("model-rank-0-*")
    content, name = file.read_bytes(), "model.layers.1.mlp.experts.6.up_proj.weight"
    place = content.find(source[name].view(torch.uint8).numpy().tobytes())
    assert place > 0
    flip(file, place + 12345)
    with pytest.raises(FormatError, match="do not match digest"):
        relayout.load(folder, 0, experts=[6], verify=True)
    assert_same(relayout.load(folder, 0, experts=[2], verify=True), wanted(mixture, source, 0, 1, [2]), "another one")


@pytest.mark.parametrize("experts", ["8", "0-8", [-1], [8], [], "", "a", "3-1", 3, [1.5]])
def test_experts_that_do_not_exist_are_refused(mixture: Path, experts: Any) -> None:
    with pytest.raises(PlanError, match=r"ep2: experts: ") as caught:
        relayout.load(mixture / "ep2", 0, experts=experts)
    assert "expected" in str(caught.value) or "is not an integer" in str(caught.value)


def test_models_without_experts_are_refused(mixture: Path, conversions: Conversions, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"experts: no tensor matches the experts of plan 'builtin:llama'$"):
        relayout.load(conversions.at("llama", 2), 0, experts=[0])
    source = shutil.copytree(conversions.source("llama"), tmp_path / "source")
    (source / "config.json").write_text('{"model_type": "nobodys"}')
    relayout.convert(source, tmp_path / "out")
    with pytest.raises(PlanError, match=r"converted without a plan, .* with all experts: convert it again"):
        relayout.load(tmp_path / "out", 0, experts=[0])


def test_plain_checkpoints_and_models_that_say_what_they_hold_are_refused(mixture: Path) -> None:
    with pytest.raises(PlanError, match=r"plain: experts cannot be selected: not converted"):
        relayout.load(mixture / "plain", 0, tp=2, experts=[0])
    with pytest.raises(PlanError, match=r"^experts cannot be combined with into and no rank"):
        relayout.load(mixture / "ep2", into={"x": torch.empty(1)}, experts=[0])
