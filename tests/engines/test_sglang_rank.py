"""What a load knows of a process of SGLang: its pipeline stage, its attention, and its experts."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch
from support.conversions import reference_tensors
from support.engine_checks import PLACES, assert_placed_experts_are_read
from support.fake_sglang import Engine
from support.fake_vllm import Model, Tensors

import relayout
from relayout.engines.sglang_rank import of_other_stages
from relayout.errors import PlanError


def test_with_replicas_of_attention_a_process_is_a_rank_of_its_replica(
    folders: Path, sglang: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """What follows attention is cut over all processes: of that, each reads its part."""
    whole = reference_tensors(folders / "llama")
    sglang.replicate(2)
    for process in range(4):
        given = dict(sglang.weights(folders / "llama-tp2", process, 4))
        assert given.keys() == whole.keys()
        for name in given:
            if name.endswith(("gate_proj.weight", "lm_head.weight")):
                rows = len(whole[name]) // 4
                start = process * rows
                part = torch.empty_like(whole[name][:rows]).copy_(given[name].narrow(0, start, rows))
                assert torch.equal(part, whole[name].narrow(0, start, rows))
    held = relayout.load(folders / "llama-tp2", 1)
    of_attention = sum(one.nbytes for name, one in held.items() if ".mlp." not in name and "lm_head" not in name)
    others = sum(whole[name].nbytes for name in whole if name.endswith(("gate_proj.weight", "lm_head.weight"))) // 4
    assert f": {(of_attention + others) / 1e9:.3f} GB in " in caplog.messages[-1]


def test_layers_of_the_vision_part_are_in_each_stage(folders: Path, sglang: Engine) -> None:
    vars(sglang.parallel).update(pp_rank=0, pp_size=2)
    is_skipped = of_other_stages(sglang.parallel, 40)
    assert [n for n in range(40) if is_skipped(f"language_model.model.layers.{n}.mlp.weight")] == [*range(20, 40)]
    assert not is_skipped("model.layers.40.mlp.weight"), "layers for speculation are of no stage"
    assert not any(is_skipped(f"vision_tower.transformer.layers.{n}.attention.weight") for n in range(40))


def test_a_pipeline_stage_reads_only_its_layers(folders: Path, sglang: Engine) -> None:
    vars(sglang.parallel).update(pp_rank=1, pp_size=3)
    names = {name for name, _ in sglang.weights(folders / "llama-tp2", 0, 2)}
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"1"}
    assert "model.norm.weight" in names


def test_a_class_without_pipeline_parallelism_is_called_that(folders: Path, sglang: Engine, whole: Tensors) -> None:
    vars(sglang.parallel).update(pp_rank=1, pp_size=3)
    with pytest.raises(PlanError, match=r"Model makes the layers of all stages .*layers\.0\..*: it has no pipeline p"):
        sglang.load(folders / "llama-tp2", Model(whole, 1, 2))
    staged = Model(whole, 1, 2, stage=lambda name: ".layers." not in name or ".layers.1." in name, score=3)
    with pytest.raises(PlanError, match=r"nothing was loaded into score\.weight: the checkpoint lacks"):
        sglang.load(folders / "llama-tp2", staged)


@pytest.mark.parametrize("places", PLACES)
def test_experts_that_are_twice_or_placed_by_a_map_are_read_by_their_names(
    folders: Path, sglang: Engine, places: list[list[int]]
) -> None:
    assert_placed_experts_are_read(sglang, folders, places)


@pytest.mark.parametrize("owners", [2, 4])
def test_a_second_start_is_from_the_cache_whatever_the_placement(
    folders: Path, sglang: Engine, owners: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv("RELAYOUT_CACHE", str(tmp_path / "cache"))
    folder, whole = Path(shutil.copytree(folders / "moe", tmp_path / "model")), reference_tensors(folders / "moe")
    sglang.parallel.moe_ep_size = owners
    sglang.places = [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]] * 2
    for attempt in range(2):
        for rank in range(2):
            model = Model(whole, rank, 2, experts=sglang.places[0][rank * 6 :][:6])
            sglang.load(folder, model)
            model.assert_holds_what_it_cuts_of(whole)
        if not attempt:
            for _ in range(600):
                if "is in the cache" in caplog.text:
                    break
                time.sleep(0.1)
            caplog.clear()
    assert caplog.text.count("cache hit") == 2
