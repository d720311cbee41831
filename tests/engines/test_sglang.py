"""The SGLang plugin, with SGLang's interfaces and none of SGLang: a real one is proven by tools/engines."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.conversions import reference_tensors
from support.engine_checks import assert_only_this_may_be_missing
from support.fake_sglang import Engine, ModelConfig, source_of
from support.fake_vllm import Model, Tensors
from support.signing import make_keys

from relayout.commands.cache import add
from relayout.engines.first_start import DeferredConversion
from relayout.engines.rank_weights import EngineOptions
from relayout.engines.sglang import _ExtraConfig, choose_loader, weights_iterator
from relayout.errors import PlanError


def test_draft_layers_are_renamed_by_sglang(folders: Path, sglang: Engine) -> None:
    given = dict(sglang.weights(folders / "llama-tp2", 0, 2, draft=3))
    assert given.keys() == {f"draft-3.{name}" for name in reference_tensors(folders / "llama")}


def test_other_formats_are_sglangs_to_check(sglang: Engine) -> None:
    with pytest.raises(ValueError, match="'tensorizer' is not a valid LoadFormat"):
        sglang.load_config("tensorizer", {}, None)


def test_a_loader_that_is_not_as_expected_is_an_error_only_where_relayout_is_asked_for_or_a_policy_is(
    sglang: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(sglang.loader, "_get_weights_iterator")
    sglang.load_config("auto", {}, None)
    assert "this SGLang does not recognize converted folders and" in caplog.text
    with pytest.raises(AttributeError, match="_get_weights_iterator"):
        sglang.load_config("relayout", {}, None)
    monkeypatch.setenv("RELAYOUT_TRUST", str(make_keys(tmp_path).policy))
    with pytest.raises(AttributeError, match="_get_weights_iterator"):
        sglang.load_config("auto", {}, None)


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
    folders: Path, sglang: Engine, whole: Tensors
) -> None:
    """SGLang's own loaders refuse what they do not know."""
    config = sglang.load_config("relayout", {"relayout": {"strict": True}, "num_threads": 4}, None)
    assert config.model_loader_extra_config == {"num_threads": 4}
    again = sglang.load_config(config.load_format, copy.copy(config.model_loader_extra_config), None)
    for one in (config, again):
        assert vars(one).keys() == {"load_format", "model_loader_extra_config", "draft_model_idx"}
        loader = SimpleNamespace(load_config=one)
        source = source_of(ModelConfig.of(folders / "llama"))
        vars(sglang.parallel).update(tp_rank=1, tp_size=2, attn_tp_size=2)
        # Asked for: what it reads is said, and comes from SGLang's own loader.
        assert dict(weights_iterator(lambda *_: iter(whole.items()), loader, source)).keys() == whole.keys()
        assert _ExtraConfig.of(one).options == EngineOptions(strict=True)
        assert _ExtraConfig.of(one).is_explicit


@pytest.mark.parametrize("name", ["llama", "llama-tp2"])
def test_a_prefix_is_put_before_names_once(folders: Path, sglang: Engine, whole: Tensors, name: str) -> None:
    def of_sglang(loader: Any, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return ((source.prefix + name, tensor) for name, tensor in whole.items())

    loader = SimpleNamespace(load_config=sglang.load_config("relayout", {}, None))
    config = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=3))
    source = SimpleNamespace(model_or_path=str(folders / name), prefix="part.", model_config=config)
    assert {name for name, _ in weights_iterator(of_sglang, loader, source)} == {f"part.{name}" for name in whole}


def test_what_sglang_computes_after_the_load_needs_nothing_from_the_checkpoint(
    folders: Path, sglang: Engine, whole: Tensors
) -> None:
    """Its NVFP4 keeps swizzled scales of experts in parameters of their own."""
    assert_only_this_may_be_missing(sglang, folders, whole, "w13_blockscale_swizzled")


def test_what_the_engine_has_loaded_itself_is_looked_at_when_it_comes_from_the_cache(
    folders: Path, sglang: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Tensors
) -> None:
    monkeypatch.setenv("RELAYOUT_CACHE", str(tmp_path / "cache"))
    folder = shutil.copytree(folders / "llama", tmp_path / "model")
    monkeypatch.setattr(DeferredConversion, "start", lambda deferred: None)
    sglang.load(folder, Model(whole, 0, 2, score=3))
    add(folder, 2)
    with pytest.raises(PlanError, match=r"nothing was loaded into score\.weight"):
        sglang.load(folder, Model(whole, 0, 2, score=3))


@pytest.mark.parametrize(("name", "ranks"), [("llama-tp2", [1]), ("llama-tp4", [0, 1, 2, 3]), ("llama", None)])
def test_sglang_finds_the_files_that_the_rank_reads(
    folders: Path, sglang: Engine, name: str, ranks: list[int] | None
) -> None:
    """Which the index of a folder with slices only hides from other loaders."""
    sglang.start(1, 2)
    loader = sglang.loader(sglang.load_config("auto", {}, None))
    folder, files, is_safetensors = loader._prepare_weights(str(folders / name), None)
    pattern = "model-*" if ranks is None else f"model-rank-[{''.join(map(str, ranks))}]-*"
    assert files == sorted(map(str, (folders / name).glob(f"{pattern}.safetensors")))
    assert (folder, is_safetensors) == (str(folders / name), True)
