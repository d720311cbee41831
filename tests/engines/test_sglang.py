"""The SGLang plugin, with SGLang's interfaces and none of SGLang: a real one is proven by tools/engines."""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.conversions import stock_tensors
from support.fake_sglang import Engine, install
from support.fake_vllm import Model, expert_of

from relayout import plugins
from relayout.engines.sglang import _not_wanted
from relayout.errors import FormatError, PlanError


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Engine:
    caplog.set_level(logging.INFO, "sglang.relayout")
    fake = install(monkeypatch)
    plugins.sglang()
    plugins.sglang()
    sys.modules["sglang.srt.plugins.hook_registry"].HookRegistry.apply_hooks()
    assert fake.formats == ["auto", "safetensors", "relayout"]
    return fake


@pytest.mark.parametrize("load_format", ["auto", "relayout"])
@pytest.mark.parametrize("name", ["llama", "moe"])
def test_a_converted_folder_is_recognized_and_each_rank_gets_its_part(
    folders: Path, engine: Engine, name: str, load_format: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = stock_tensors(folders / name)
    for rank in range(2):
        model = Model(whole, rank, 2)
        options = {"relayout": {"strict": True, "threads": 2}}
        model.load_weights(engine.weights(folders / f"{name}-tp2", rank, 2, load_format=load_format, extra=options))
        model.assert_holds_what_it_cuts_of(whole)
        assert f"relayout: rank {rank} of 2: " in caplog.text
        assert "0 whole tensors read" in caplog.text


def test_other_folders_are_left_to_sglang(folders: Path, engine: Engine) -> None:
    whole = stock_tensors(folders / "llama")
    own = dict(engine.weights(folders / "llama", 0, 2))
    assert own.keys() == whole.keys()
    assert all(type(tensor) is torch.Tensor for tensor in own.values())
    with pytest.raises(PlanError, match="is not a folder"):
        next(engine.weights(folders / "nothing", 0, 2, load_format="relayout"))


def test_experts_that_are_owned_are_given_to_their_owner(folders: Path, engine: Engine) -> None:
    whole = stock_tensors(folders / "moe")
    engine.parallel.moe_ep_size = 2
    for rank in range(2):
        model = Model(whole, rank, 2, experts_by_rank=True)
        model.load_weights(engine.weights(folders / "moe-ep2", rank, 2, extra={"relayout": {"strict": True}}))
        model.assert_holds_what_it_cuts_of(whole)
    engine.parallel.moe_ep_size = 1
    with pytest.raises(PlanError, match=r"moe-ep2: was converted with --expert-parallel for 2 ranks: run SGLang with"):
        next(engine.weights(folders / "moe-ep2", 0, 2))


def test_what_is_cut_otherwise_is_said_and_right(
    folders: Path, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    whole = stock_tensors(folders / "moe")
    engine.parallel.moe_ep_size = 2
    model = Model(whole, 1, 2, experts_by_rank=True)
    with pytest.warns(UserWarning, match="whole tensors are read"):
        model.load_weights(engine.weights(folders / "moe-tp2", 1, 2))
    model.assert_holds_what_it_cuts_of(whole)
    assert "has experts cut for 2 ranks, and SGLang gives each of them to one rank" in caplog.text
    assert f"{sum(expert_of(name) >= 4 for name in whole)} whole tensors read" in caplog.text
    engine.attention = 1
    dict(engine.weights(folders / "llama-tp2", 0, 2))
    assert "has attention cut for 2 ranks, and SGLang cuts it for 1" in caplog.text
    engine.attention = None
    dict(engine.weights(folders / "llama-tp2", 0, 1))
    assert "was converted for 2 ranks and is resharded for 1" in caplog.text


@pytest.mark.parametrize("load_format", ["auto", "relayout"])
def test_memory_that_nobody_writes_is_an_error(folders: Path, engine: Engine, load_format: str) -> None:
    whole = stock_tensors(folders / "llama")
    model = Model(whole, 0, 2)
    engine.load(folders / "llama-tp2", model, load_format=load_format)
    model.assert_holds_what_it_cuts_of(whole)
    with pytest.raises(
        PlanError, match=r"llama-tp2: nothing was loaded into score.weight: .* what SGLang's Model needs"
    ):
        engine.load(folders / "llama-tp2", Model(whole, 0, 2, score=3), load_format=load_format)
    engine.load(folders / "llama", Model(whole, 0, 2, score=3))  # SGLang's own load.


def test_layers_of_the_vision_part_are_in_each_stage(folders: Path, engine: Engine) -> None:
    vars(engine.parallel).update(pp_rank=0, pp_size=2)
    config = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=40, num_nextn_predict_layers=None))
    is_skipped, _ = _not_wanted(engine.parallel, config)
    assert is_skipped is not None
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


def test_options_are_checked(folders: Path, engine: Engine) -> None:
    with pytest.raises(PlanError, match="--model-loader-extra-config, 'relayout': relayout has no option 'thread'"):
        engine.weights(folders / "llama-tp2", 0, 2, extra={"relayout": {"thread": 2}})
    with pytest.raises(ValueError, match="'tensorizer' is not a valid LoadFormat"):
        engine.weights(folders / "llama-tp2", 0, 2, load_format="tensorizer")


def test_a_folder_that_is_half_there_is_refused(folders: Path, engine: Engine, tmp_path: Path) -> None:
    shutil.copytree(folders / "llama-tp2", tmp_path / "half")
    (tmp_path / "half" / "model-rank-1-part-0.safetensors").unlink()
    assert dict(engine.weights(tmp_path / "half", 0, 2))
    with pytest.raises(FormatError, match=r"model-rank-1-part-0\.safetensors: is missing"):
        next(engine.weights(tmp_path / "half", 1, 2))


def test_an_sglang_that_is_not_as_expected_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake = install(monkeypatch)
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
