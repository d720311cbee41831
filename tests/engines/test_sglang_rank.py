"""What a load knows of a process of SGLang: its pipeline stage, its attention, and its experts."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.conversions import stock_tensors
from support.fake_sglang import Engine
from support.fake_vllm import Model, Tensors

from relayout.engines.first_start import Filling
from relayout.engines.sglang_rank import of_other_stages
from relayout.errors import PlanError


def test_attention_that_is_cut_otherwise_is_said(
    folders: Path, sglang: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    sglang.attention = 1
    assert dict(sglang.weights(folders / "llama-tp2", 0, 2))
    assert "has attention cut for 2 ranks, and SGLang cuts it for 1" in caplog.text


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


def test_experts_of_another_placement_are_not_converted(
    folders: Path, sglang: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two groups of two ranks each own half of them: no conversion is so."""
    monkeypatch.setenv("RELAYOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Filling, "start", lambda filling: pytest.fail("is converted"))
    sglang.parallel.moe_ep_size = 2
    assert (
        dict(sglang.weights(folders / "moe", 0, 4, load_format="relayout")).keys()
        == stock_tensors(folders / "moe").keys()
    )
