"""The SGLang plugin, with SGLang's interfaces and none of SGLang: a real one is proven by tools/engines."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from support.conversions import stock_tensors
from support.fake_sglang import Engine, install
from support.fake_vllm import Model, Tensors

from relayout import plugins
from relayout.commands.cache import add
from relayout.engines.first_start import Filling
from relayout.engines.sglang import _of_other_stages
from relayout.errors import PlanError


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Engine:
    caplog.set_level(logging.INFO, "sglang.relayout")
    fake = install(monkeypatch)
    assert fake.formats == ["auto", "safetensors", "relayout"]
    return fake


def test_attention_that_is_cut_otherwise_is_said(
    folders: Path, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.attention = 1
    assert dict(engine.weights(folders / "llama-tp2", 0, 2))
    assert "has attention cut for 2 ranks, and SGLang cuts it for 1" in caplog.text


def test_layers_of_the_vision_part_are_in_each_stage(folders: Path, engine: Engine) -> None:
    vars(engine.parallel).update(pp_rank=0, pp_size=2)
    is_skipped = _of_other_stages(engine.parallel, 40)
    assert [n for n in range(40) if is_skipped(f"language_model.model.layers.{n}.mlp.weight")] == [*range(20, 40)]
    assert not any(is_skipped(f"vision_tower.transformer.layers.{n}.attention.weight") for n in range(40))


def test_a_pipeline_stage_reads_only_its_layers(folders: Path, engine: Engine) -> None:
    vars(engine.parallel).update(pp_rank=1, pp_size=3)
    names = {name for name, _ in engine.weights(folders / "llama-tp2", 0, 2)}
    assert {name.split(".")[2] for name in names if ".layers." in name} == {"1"}
    assert "model.norm.weight" in names


def test_draft_layers_are_renamed_by_sglang(folders: Path, engine: Engine) -> None:
    given = dict(engine.weights(folders / "llama-tp2", 0, 2, draft=3))
    assert given.keys() == {f"draft-3.{name}" for name in stock_tensors(folders / "llama")}


def test_other_formats_are_sglangs_to_check(engine: Engine) -> None:
    with pytest.raises(ValueError, match="'tensorizer' is not a valid LoadFormat"):
        engine.load_config("tensorizer", {}, None)


def test_an_sglang_that_is_not_as_expected_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = install(monkeypatch, with_plugin=False)
    monkeypatch.setattr(fake.load_config, "_verify_load_format", lambda self, strictly: None)
    monkeypatch.setattr(fake.load_config._verify_load_format, "__code__", (lambda config, strictly: None).__code__)
    plugins.sglang()
    assert fake.formats == ["auto", "safetensors"]
    assert "takes ['config', 'strictly'], expected ['self'] first" in caplog.text


def test_a_loader_that_is_not_as_expected_is_an_error_only_where_relayout_is_asked_for(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(engine.loader, "_get_weights_iterator")
    engine.load_config("auto", {}, None)
    assert "this SGLang does not recognize converted folders and" in caplog.text
    with pytest.raises(AttributeError, match="_get_weights_iterator"):
        engine.load_config("relayout", {}, None)


def test_what_the_engine_has_loaded_itself_is_looked_at_when_it_comes_from_the_cache(
    folders: Path, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Tensors
) -> None:
    monkeypatch.setenv("RELAYOUT_CACHE", str(tmp_path / "cache"))
    folder = shutil.copytree(folders / "llama", tmp_path / "model")
    monkeypatch.setattr(Filling, "start", lambda filling: None)
    engine.load(folder, Model(whole, 0, 2, score=3))
    add(folder, 2)
    with pytest.raises(PlanError, match=r"nothing was loaded into score\.weight"):
        engine.load(folder, Model(whole, 0, 2, score=3))
