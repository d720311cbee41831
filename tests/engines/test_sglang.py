"""The SGLang plugin, with SGLang's interfaces and none of SGLang: a real one is proven by tools/engines."""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.conversions import stock_tensors
from support.fake_sglang import Engine, ModelConfig, install, source_of
from support.fake_vllm import Model, Tensors
from support.signing import make_keys

from relayout import plugins
from relayout.commands.cache import add
from relayout.engines.first_start import Filling
from relayout.engines.rank_weights import EngineOptions
from relayout.engines.sglang import _ExtraConfig, choose_loader, weights_iterator
from relayout.engines.sglang_rank import of_other_stages
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
    is_skipped = of_other_stages(engine.parallel, 40)
    assert [n for n in range(40) if is_skipped(f"language_model.model.layers.{n}.mlp.weight")] == [*range(20, 40)]
    assert not is_skipped("model.layers.40.mlp.weight"), "layers for speculation are of no stage"
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


def test_a_loader_that_is_not_as_expected_is_an_error_only_where_relayout_is_asked_for_or_a_policy_is(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(engine.loader, "_get_weights_iterator")
    engine.load_config("auto", {}, None)
    assert "this SGLang does not recognize converted folders and" in caplog.text
    with pytest.raises(AttributeError, match="_get_weights_iterator"):
        engine.load_config("relayout", {}, None)
    monkeypatch.setenv("RELAYOUT_TRUST", str(make_keys(tmp_path).policy))
    with pytest.raises(AttributeError, match="_get_weights_iterator"):
        engine.load_config("auto", {}, None)


@pytest.mark.parametrize(
    ("kind", "quantize", "is_quantized", "is_let_in"),
    [
        ("DefaultModelLoader", None, False, True),
        ("DefaultModelLoader", "fp8", False, False),
        ("ModelOptModelLoader", None, True, True),
        ("ModelOptModelLoader", None, False, False),
        ("ModelOptModelLoader", "fp8", True, False),
    ],
)
def test_under_a_policy_no_loader_reads_weights_in_a_way_of_its_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    quantize: str | None,
    is_quantized: bool,
    is_let_in: bool,
) -> None:
    monkeypatch.setenv("RELAYOUT_TRUST", str(make_keys(tmp_path).policy))
    loader = type(kind, (), {})()
    model = SimpleNamespace(modelopt_quant=quantize, _is_already_quantized=lambda: is_quantized)
    given: tuple[Any, ...] = (lambda *_: loader, SimpleNamespace(load_format="auto"), model)
    if is_let_in:
        assert choose_loader(*given) is loader
    else:
        with pytest.raises(PlanError, match=rf"\({kind}\) is not loaded by relayout"):
            choose_loader(*given)


def test_a_copy_of_the_configuration_has_the_options_too_and_sglang_sees_none_of_them(
    folders: Path, engine: Engine, whole: Tensors
) -> None:
    """SGLang's own loaders refuse what they do not know."""
    config = engine.load_config("relayout", {"relayout": {"strict": True}, "num_threads": 4}, None)
    assert config.model_loader_extra_config == {"num_threads": 4}
    again = engine.load_config(config.load_format, copy.copy(config.model_loader_extra_config), None)
    for one in (config, again):
        assert vars(one).keys() == {"load_format", "model_loader_extra_config", "draft_model_idx"}
        loader = SimpleNamespace(load_config=one)
        source = source_of(ModelConfig.of(folders / "llama"))
        vars(engine.parallel).update(tp_rank=1, tp_size=2, attn_tp_size=2)
        # Asked for: what it reads is said, and comes from SGLang's own loader.
        assert dict(weights_iterator(lambda *_: iter(whole.items()), loader, source)).keys() == whole.keys()
        assert _ExtraConfig.of(one).options == EngineOptions(strict=True)
        assert _ExtraConfig.of(one).is_asked_for


@pytest.mark.parametrize("name", ["llama", "llama-tp2"])
def test_a_prefix_is_put_before_names_once(folders: Path, engine: Engine, whole: Tensors, name: str) -> None:
    def of_sglang(loader: Any, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return ((source.prefix + name, tensor) for name, tensor in whole.items())

    loader = SimpleNamespace(load_config=engine.load_config("relayout", {}, None))
    config = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=3))
    source = SimpleNamespace(model_or_path=str(folders / name), prefix="part.", model_config=config)
    assert {name for name, _ in weights_iterator(of_sglang, loader, source)} == {f"part.{name}" for name in whole}


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


@pytest.mark.parametrize(("name", "ranks"), [("llama-tp2", [1]), ("llama-tp4", [0, 1, 2, 3]), ("llama", None)])
def test_sglang_finds_the_files_that_the_rank_reads(
    folders: Path, engine: Engine, name: str, ranks: list[int] | None
) -> None:
    """Which the index of a folder with slices only hides from other loaders."""
    vars(engine.parallel).update(tp_rank=1, tp_size=2)
    loader = engine.loader(engine.load_config("auto", {}, None))
    folder, files, is_safetensors = loader._prepare_weights(str(folders / name), None)
    pattern = "model-*" if ranks is None else f"model-rank-[{''.join(map(str, ranks))}]-*"
    assert files == sorted(map(str, (folders / name).glob(f"{pattern}.safetensors")))
    assert (folder, is_safetensors) == (str(folders / name), True)


def test_a_class_without_pipeline_parallelism_is_called_that(folders: Path, engine: Engine, whole: Tensors) -> None:
    vars(engine.parallel).update(pp_rank=1, pp_size=3)
    with pytest.raises(PlanError, match=r"Model makes the layers of all stages .*layers\.0\..*: it has no pipeline p"):
        engine.load(folders / "llama-tp2", Model(whole, 1, 2))
    staged = Model(whole, 1, 2, stage=lambda name: ".layers." not in name or ".layers.1." in name, score=3)
    with pytest.raises(PlanError, match=r"nothing was loaded into score\.weight: the checkpoint lacks"):
        engine.load(folders / "llama-tp2", staged)


def test_experts_of_another_placement_are_not_converted(
    folders: Path, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two groups of two ranks each own half of them: no conversion is so."""
    monkeypatch.setenv("RELAYOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Filling, "start", lambda filling: pytest.fail("is converted"))
    engine.parallel.moe_ep_size = 2
    assert (
        dict(engine.weights(folders / "moe", 0, 4, load_format="relayout")).keys()
        == stock_tensors(folders / "moe").keys()
    )
