"""The TokenSpeed plugin, with its interfaces and none of TokenSpeed: a real one is proven by tools/engines."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.conversions import reference_tensors
from support.engine_checks import PLACES, assert_only_this_may_be_missing, assert_placed_experts_are_read
from support.fake_tokenspeed import LOADER, Engine, install
from support.fake_vllm import Model, Tensors
from support.signing import make_keys

import relayout
from relayout import plugins
from relayout.engines.tokenspeed import engine_rank
from relayout.errors import FormatError, PlanError


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda loader: setattr(loader, "_initialize_model", lambda config: None), "takes ['config'], expected"),
        (lambda loader: delattr(loader, "require_unit_kv_scales"), "AttributeError"),
    ],
)
def test_a_tokenspeed_that_is_not_as_expected_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: Callable[[Any], None], said: str
) -> None:
    loader = install(monkeypatch, with_plugin=False).loader
    wrong(loader)
    before = dict(vars(loader))
    plugins.tokenspeed()
    assert vars(loader) == before
    [line] = caplog.messages
    assert line.startswith("relayout: not available in this tokenspeed")
    assert said in line


@pytest.mark.parametrize("text", ["[1]", "{", '{"live": true}', '{"source": "s3://bucket/model"}'])
def test_wrong_options_stop_a_start(
    folders: Path, tokenspeed: Engine, monkeypatch: pytest.MonkeyPatch, whole: Tensors, text: str
) -> None:
    monkeypatch.setenv(tokenspeed.option, text)
    config = tokenspeed.model_config(folders / "llama-tp2", Model(whole, 0, 2))
    with pytest.raises(PlanError, match=r"^RELAYOUT_TOKENSPEED: "):
        tokenspeed.loader._initialize_model(config, SimpleNamespace(load_format="auto"))


def test_later_loads_of_a_model_are_those_of_tokenspeed(folders: Path, tokenspeed: Engine, whole: Tensors) -> None:
    """A live update calls the same method with tensors that TokenSpeed has received."""
    model = Model(whole, 1, 2)
    tokenspeed.load(folders / "llama-tp2", model)
    assert "load_weights" not in vars(model)
    model.load_weights((name, torch.zeros_like(tensor)) for name, tensor in whole.items())
    assert not any(one.any() for one in model.memory.values())


def test_tokenspeeds_own_check_of_scales_is_made(folders: Path, tokenspeed: Engine, tmp_path: Path) -> None:
    scales = {"model.layers.0.self_attn.k_scale": torch.tensor(2.0)}
    tensors = reference_tensors(folders / "llama") | scales
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    (tmp_path / "model" / "config.json").write_bytes((folders / "llama" / "config.json").read_bytes())
    relayout.convert(tmp_path / "model", tmp_path / "out", tp=2, unmatched="replicate")
    with pytest.raises(ValueError, match="only unit KV-cache scales"):
        tokenspeed.load(tmp_path / "out", Model(tensors, 0, 2))


def test_a_draft_model_is_given_what_it_names_and_may_leave_memory_as_it_was_made(
    folders: Path, tokenspeed: Engine, whole: Tensors
) -> None:
    def is_named(name: str) -> bool:
        return ".layers.1." in name

    given: list[str] = []
    model = Model(whole, 0, 2, stage=is_named, score=3)
    model.checkpoint_weight_name_filter = is_named
    load = model.load_weights
    model.load_weights = lambda weights: load((given.append(name) or (name, one)) for name, one in weights)  # type: ignore
    tokenspeed.load(folders / "llama-tp2", model, draft=True)
    assert sorted(given) == sorted(filter(is_named, whole))


@pytest.mark.parametrize("name", ["bind_checkpoint_dir", "secondary_weights"])
def test_a_model_that_reads_weights_itself_is_tokenspeeds_and_refused_where_it_would_find_none(
    folders: Path, tokenspeed: Engine, whole: Tensors, name: str
) -> None:
    model = Model(whole, 0, 2)
    setattr(model, name, [object()])
    with pytest.raises(PlanError, match=r"TokenSpeed's Model reads some of its weights by itself.*: serve the source"):
        tokenspeed.load(folders / "llama-tp2", model)
    tokenspeed.load(folders / "llama", model)
    model.assert_holds_what_it_cuts_of(whole)


def test_a_model_of_another_hub_is_tokenspeeds_to_find(
    folders: Path, tokenspeed: Engine, monkeypatch: pytest.MonkeyPatch, whole: Tensors
) -> None:
    monkeypatch.setenv("TOKENSPEED_USE_MODELSCOPE", "1")
    monkeypatch.setattr(sys.modules["support.fake_tokenspeed"], "Path", lambda _: folders / "llama")
    model = Model(whole, 0, 2)
    tokenspeed.load("org/model", model)
    model.assert_holds_what_it_cuts_of(whole)


def test_a_policy_is_kept_where_the_loader_is_chosen(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Tensors
) -> None:
    """A loader of a program's own makes models without the function that is replaced."""
    monkeypatch.setenv("RELAYOUT_TRUST", str(make_keys(tmp_path).policy))
    engine = install(monkeypatch)
    with pytest.raises(PlanError, match=r"--load-format dummy \(DummyModelLoader\) is not loaded by relayout"):
        sys.modules[LOADER.rpartition(".")[0]].get_model_loader(SimpleNamespace(load_format="dummy"))
    with pytest.raises(FormatError, match="is not signed"):
        engine.load(folders / "llama", Model(whole, 0, 2), load_format="auto")


def test_a_pipeline_stage_reads_only_its_layers(folders: Path, tokenspeed: Engine, whole: Tensors) -> None:
    vars(tokenspeed.mapping).update(pp_rank=1, pp_size=3)
    model = Model(whole, 0, 2, stage=lambda name: ".layers." not in name or ".layers.1." in name)
    tokenspeed.load(folders / "llama-tp2", model, strict=True)
    model.assert_holds_what_it_cuts_of(whole)
    config = tokenspeed.model_config("", model)
    is_skipped = engine_rank(model, config).is_skipped
    assert [name for name in whole if not is_skipped(name)] == [name for name in whole if model.stage(name)]


@pytest.mark.parametrize("places", PLACES)
def test_experts_that_are_twice_or_placed_by_a_map_are_read_by_their_names(
    folders: Path, tokenspeed: Engine, places: list[list[int]]
) -> None:
    assert_placed_experts_are_read(tokenspeed, folders, places)


def test_parts_with_other_degrees_than_attention_are_read_by_what_is_used(
    folders: Path, tokenspeed: Engine, whole: Tensors, caplog: pytest.LogCaptureFixture
) -> None:
    """As with data-parallel attention: the output head is whole on each rank."""
    tokenspeed.replicate(2)
    model = Model(whole, 1, 2)
    model.cut = lambda name, one, cut=model.cut: one if name == "lm_head.weight" else cut(name, one)  # type: ignore
    model.memory = {name: model.cut(name, one) * 0 for name, one in whole.items()}
    tokenspeed.load(folders / "llama-tp2", model, strict=True)
    model.assert_holds_what_it_cuts_of(whole)
    assert ", 0 whole tensors read" in caplog.messages[-1]


def test_an_embedding_that_is_whole_on_each_rank_is_read_whole_once(
    folders: Path, tokenspeed: Engine, whole: Tensors, caplog: pytest.LogCaptureFixture
) -> None:
    """As DeepSeek's class makes it."""
    name, model = "model.embed_tokens.weight", Model(whole, 1, 2)
    model.missing = {name.removesuffix(".weight"): (embedding := torch.nn.Module())}
    embedding.tp_size = 1
    model.cut = lambda of, one, cut=model.cut: one if of == name else cut(of, one)  # type: ignore
    model.memory = {of: model.cut(of, one) * 0 for of, one in whole.items()}
    tokenspeed.load(folders / "llama-tp2", model, strict=True)
    model.assert_holds_what_it_cuts_of(whole)
    held = sum(one.nbytes for of, one in relayout.load(folders / "llama-tp2", 1).items() if of != name)
    assert f": {(held + whole[name].nbytes) / 1e9:.3f} GB in " in caplog.messages[-1]
    assert ", 0 whole tensors read" in caplog.messages[-1]


def test_shapes_that_tokenspeed_ignores_need_nothing_from_the_checkpoint(
    folders: Path, tokenspeed: Engine, whole: Tensors
) -> None:
    assert_only_this_may_be_missing(tokenspeed, folders, whole, "w13_weight_shape")
