"""The vLLM plugin, with vLLM's interfaces and none of vLLM: a real one is proven by tools/engines."""

from __future__ import annotations

import logging
import shutil
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.bits import flip
from support.conversions import reference_tensors
from support.fake_vllm import (
    DefaultModelLoader,
    Engine,
    LoadConfig,
    Model,
    PPMissingLayer,
    Tensors,
    install,
    model_config,
)
from support.signing import make_keys

import relayout
from relayout import plugins
from relayout.engines.load import BuiltinLoad
from relayout.engines.rank_weights import Delivery
from relayout.errors import FormatError, PlanError


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Engine:
    caplog.set_level(logging.INFO, "vllm.relayout")
    fake = install(monkeypatch)
    assert list(fake.formats) == ["auto", "safetensors", "relayout"]
    return fake


@pytest.mark.parametrize("name", ["llama-tp2", "llama-tp4"])
def test_a_draft_model_is_read_to_the_cpu_whatever_backend_its_target_has(
    folders: Path, engine: Engine, whole: Tensors, name: str
) -> None:
    """Mapped, after its digests were compared; or joined from slices, which cannot be mapped."""
    model = Model(whole, 1, 2, stage=lambda name: ".layers.2." in name)
    loader = engine.load(folders / name, model, draft=True, backend="pinned", verify=True)
    model.assert_holds_what_it_cuts_of(whole)
    assert loader.load.delivery.report().memory > 0


def test_damage_of_a_draft_model_is_an_error_if_digests_are_compared(
    folders: Path, engine: Engine, whole: Tensors, tmp_path: Path
) -> None:
    folder = shutil.copytree(folders / "llama-tp2", tmp_path / "out")
    file = folder / "model-rank-1-part-0.safetensors"
    flip(file, file.stat().st_size - 9)
    with pytest.raises(FormatError, match=rf"{file.name}.* digest"):
        engine.load(folder, Model(whole, 1, 2), draft=True, verify=True)


def test_a_draft_model_is_read_as_it_is_used(folders: Path, engine: Engine, whole: Tensors) -> None:
    model = Model(whole, 1, 2, stage=lambda name: ".layers.2." in name)
    loader = engine.load(folders / "llama-tp2", model, draft=True, strict=True)
    model.assert_holds_what_it_cuts_of(whole)
    report = loader.load.delivery.report()
    assert (report.backend, report.memory) == ("mapped", 0)


def test_a_reload_reads_all_again(folders: Path, engine: Engine, whole: Tensors) -> None:
    model = Model(whole, 1, 2)
    loader = engine.load(folders / "llama-tp2", model)
    for one in model.memory.values():
        one.zero_()
    model.load_weights(loader.get_all_weights(model_config(folders / "llama-tp2"), model))
    model.assert_holds_what_it_cuts_of(whole)


def test_a_reload_is_given_small_tensors_first(folders: Path, engine: Engine, whole: Tensors) -> None:
    """vLLM counts some of them too often, and would take a layer for complete before its last tensor."""
    model = Model(whole, 1, 2)
    loader = engine.load(folders / "llama-tp2", model)
    given = loader.get_all_weights(model_config(folders / "llama-tp2"), model)
    is_small = [model.cut(name, tensor).numel() * tensor.itemsize < 4096 for name, tensor in given]
    assert {*is_small} == {True, False}
    assert is_small == sorted(is_small, reverse=True)


@pytest.mark.parametrize("other", ["moe-tp2", "qwen2-tp2", "moe", "nothing"])
def test_a_reload_from_what_is_not_for_the_model_is_refused_before_anything_changes(
    folders: Path, engine: Engine, whole: Tensors, other: str
) -> None:
    model = Model(whole, 1, 2)
    engine.load(folders / "llama-tp2", model)
    config = model_config(folders / "llama-tp2")
    config.model = str(folders / other)
    with pytest.raises(PlanError, match=r"is not for the model that the engine has|no such file or folder"):
        engine.formats["auto"](LoadConfig("auto")).get_all_weights(config, model)
    assert config.model == str(folders / "llama-tp2")
    config.model = str(folders / "llama")
    model.load_weights(engine.formats["relayout"](LoadConfig()).get_all_weights(config, model))
    model.assert_holds_what_it_cuts_of(whole)


@pytest.mark.parametrize(
    ("setting", "tp", "experts"),
    [
        ({"enable_eplb": True}, 2, (4, 5, 6, 7, 0, 1)),
        ({"expert_placement_strategy": "round_robin"}, 2, (1, 3, 5, 7)),
        ({"data_parallel_size": 2}, 2, (6, 7)),
        ({"data_parallel_size": 2}, 1, (4, 5, 6, 7)),
    ],
)
def test_experts_that_the_engine_places_otherwise_are_read_by_their_names(
    folders: Path, engine: Engine, setting: dict[str, object], tp: int, experts: tuple[int, ...]
) -> None:
    whole = reference_tensors(folders / "moe")
    engine.own_experts()
    vars(engine.parallel).update(setting)
    model = Model(whole, tp - 1, tp, experts=experts)
    engine.load(folders / "moe-ep2", model, strict=True)
    model.assert_holds_what_it_cuts_of(whole)


@pytest.mark.parametrize("tied", [False, True])
def test_a_pipeline_stage_reads_only_what_it_has(folders: Path, engine: Engine, tied: bool, whole: Tensors) -> None:
    elsewhere = ("model.layers.1.", "lm_head.")
    model = Model(whole, 0, 2, stage=lambda name: not name.startswith(elsewhere))
    model.missing = {name.rstrip("."): PPMissingLayer() for name in elsewhere}
    engine.parallel.pipeline_parallel_size = 2
    loader = engine.load(folders / "llama-tp2", model, tied=tied)
    report = loader.load.delivery.report()
    model.assert_holds_what_it_cuts_of(whole)
    held = dict(relayout.iter_load(folders / "llama-tp2", 0))
    not_read = elsewhere[:1] if tied else elsewhere
    assert report.nbytes == sum(one.nbytes for name, one in held.items() if not name.startswith(not_read))
    assert report.num_tensors == sum(not name.startswith(elsewhere[0]) for name in whole)


def test_layers_for_speculation_are_given_unread(folders: Path, engine: Engine, whole: Tensors) -> None:
    engine.rank, engine.tp = 0, 2
    loader = engine.formats["relayout"](LoadConfig())
    config = model_config(folders / "llama-tp2")
    config.hf_text_config = SimpleNamespace(num_hidden_layers=2, num_nextn_predict_layers=1)
    given = dict(loader.get_all_weights(config, Model(whole, 0, 2)))
    assert given.keys() == whole.keys()
    held = dict(relayout.iter_load(folders / "llama-tp2", 0))
    report = loader.load.delivery.report()
    assert report.nbytes == sum(one.nbytes for name, one in held.items() if ".layers.2." not in name)
    for name in (name for name in whole if ".layers.2." in name):
        with warnings.catch_warnings(action="ignore"):  # An engine that does use it gets all of it, slowly.
            assert torch.equal(given[name].clone(), whole[name])


def test_memory_that_nobody_writes_is_only_said_where_vllms_own_option_says_so(
    folders: Path, engine: Engine, caplog: pytest.LogCaptureFixture, whole: Tensors
) -> None:
    engine.load(folders / "llama-tp2", Model(whole, 0, 2, score=3), enable_weights_track=False)
    assert "relayout: " + str(folders / "llama-tp2: nothing was loaded into score.weight") in caplog.text


def test_a_draft_model_gets_its_embedding_later(folders: Path, engine: Engine, whole: Tensors) -> None:
    model = Model(whole, 1, 2, stage=lambda name: ".layers.2." in name)
    model.memory["draft.lm_head.weight"] = torch.empty(8, 8)
    engine.load(folders / "llama-tp2", model, draft=True)
    model.memory["draft.other.weight"] = torch.empty(8, 8)
    with pytest.raises(PlanError, match=r"nothing was loaded into draft\.other\.weight:"):
        engine.load(folders / "llama-tp2", model, draft=True)


def test_rows_of_padding_that_vllm_never_loads_are_no_error(folders: Path, engine: Engine, whole: Tensors) -> None:
    model = Model(whole, 0, 2)
    model.memory["layers.0.input_mix_weight_down_block_inject.weight"] = torch.empty(8, 8)
    engine.load(folders / "llama-tp2", model)
    model.memory["layers.0.input_mix_weight_up.weight"] = torch.empty(8, 8)
    with pytest.raises(PlanError, match=r"nothing was loaded into layers\.0\.input_mix_weight_up\.weight:"):
        engine.load(folders / "llama-tp2", model)


@pytest.mark.parametrize(
    ("width", "says"), [(256, None), (64, r"nothing was loaded into layers\.0\.experts\.w13_weight:")]
)
def test_padding_of_experts_that_are_wider_than_the_checkpoint_has_them_is_no_error(
    folders: Path, engine: Engine, whole: Tensors, width: int, says: str | None
) -> None:
    model, experts = Model(whole, 0, 2), torch.nn.Module()
    experts.w13_weight = torch.nn.Parameter(torch.zeros(2))
    experts.moe_config = SimpleNamespace(  # type: ignore[assignment]
        intermediate_size_per_partition=width, intermediate_size_per_partition_unpadded=64
    )
    model.missing = {"layers.0.experts": experts}
    model.memory["layers.0.experts.w13_weight"] = torch.empty(8, 8)
    with nullcontext() if says is None else pytest.raises(PlanError, match=says):
        engine.load(folders / "llama-tp2", model)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_a_tensor_that_is_read_and_not_given_is_an_error(
    folders: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    original = Delivery._slices
    monkeypatch.setattr(
        Delivery, "_slices", lambda self, *given: (one for one in original(self, *given) if one[0] != name)
    )
    model = Model(reference_tensors(folders / "llama"), 0, 2, stage=lambda one: one != name)  # Which does not miss it.
    with pytest.raises(FormatError, match=f"llama-tp2: {name}: read, but not passed to the engine"):
        engine.load(folders / "llama-tp2", model)


def test_placeholders_that_a_loader_replaces_are_no_reason_to_leave_anything_out(
    folders: Path, engine: Engine, whole: Tensors
) -> None:
    for num_stages in (1, 2):
        model = Model(whole, 0, 2)
        model.missing = {"lm_head": torch.nn.Identity()}  # Such as vLLM's StageMissingLayer, in rerankers.
        engine.parallel.pipeline_parallel_size = num_stages
        engine.load(folders / "llama-tp2", model, strict=True)
        model.assert_holds_what_it_cuts_of(whole)


def test_what_is_no_converted_folder_is_left_to_vllm(folders: Path, engine: Engine) -> None:
    model = Model(reference_tensors(folders / "llama"), 1, 2)
    loader = engine.load(folders / "llama", model, load_format="auto")
    with pytest.raises(AssertionError, match="nothing is downloaded"):  # vLLM's own says so.
        loader.download_model(model_config(folders / "llama"))
    with pytest.raises(PlanError, match=r"llama: --model-loader-extra-config: threads: only for folders that relayout"):
        engine.load(folders / "llama", model, load_format="auto", threads=2)
    with pytest.raises(ValueError, match=r"Unexpected extra config keys for load format auto: \{'thread'\}"):
        engine.load(folders / "llama-tp2", model, load_format="auto", thread=2)


def test_options_of_vllms_own_loader_are_left_to_it(folders: Path, engine: Engine, whole: Tensors) -> None:
    model = Model(whole, 0, 2)
    loader = engine.load(folders / "llama-tp2", model, enable_multithread_load=True, num_threads=4, threads=2)
    model.assert_holds_what_it_cuts_of(whole)
    assert loader.load_config.model_loader_extra_config == {"enable_multithread_load": True, "num_threads": 4}


def test_side_weights_that_a_model_names_are_loaded_by_vllm(
    folders: Path, engine: Engine, tmp_path: Path, whole: Tensors
) -> None:
    head = torch.arange(24.0).view(3, 8)
    torch.save({"weight": head}, tmp_path / "score.pt")
    model = Model(whole, 0, 2, score=3)
    model.secondary_weights = [SimpleNamespace(model_or_path="other", prefix="score.", file=tmp_path / "score.pt")]
    engine.load(folders / "llama-tp2", model)
    assert torch.equal(model.memory["score.weight"], head)


def test_a_draft_model_that_was_not_converted_is_left_to_vllm(folders: Path, engine: Engine, whole: Tensors) -> None:
    model = Model(whole, 0, 2)
    loader = engine.load(folders / "llama", model, draft=True)
    model.assert_holds_what_it_cuts_of(whole)
    assert isinstance(loader.load, BuiltinLoad)


def test_an_engine_that_stops_early_is_an_error(folders: Path, engine: Engine) -> None:
    class Impatient(Model):
        def load_weights(self, weights):  # type: ignore[no-untyped-def]
            self.kept = dict([next(iter(weights))])
            self.expected = set(self.kept)
            return self.expected

    with pytest.raises(PlanError, match="rank 0: the engine stopped after 1 tensors"):
        engine.load(folders / "llama-tp2", Impatient(reference_tensors(folders / "llama"), 0, 2))


def test_slices_that_are_not_used_are_named(
    folders: Path, engine: Engine, caplog: pytest.LogCaptureFixture, whole: Tensors
) -> None:
    model = Model(whole, 0, 2, stage=lambda name: name != "lm_head.weight")
    engine.load(folders / "llama-tp2", model)
    assert "relayout: rank 0: vLLM did not use lm_head.weight" in caplog.text


def test_a_vllm_that_has_the_format_itself_gets_the_same_loader(folders: Path, engine: Engine, whole: Tensors) -> None:
    engine.formats["relayout"] = lambda load_config: plugins.vllm_loader(load_config)
    model = Model(whole, 1, 2)
    loader = engine.load(folders / "llama-tp2", model, strict=True)
    model.assert_holds_what_it_cuts_of(whole)
    plugins.vllm()
    assert engine.formats["relayout"].__qualname__ == type(loader).__qualname__


def test_the_option_source_names_the_weights_of_the_model_and_not_those_of_its_draft(engine: Engine) -> None:
    options = {"source": "s3://bucket/model"}
    loader = engine.formats["relayout"](LoadConfig(model_loader_extra_config=options))
    assert loader.source_of(model_config("model")) == "s3://bucket/model"
    assert loader.source_of(model_config("draft", draft=True)) == "draft"


@pytest.mark.parametrize("load_format", ["auto", "relayout"])
@pytest.mark.parametrize("name", ["llama-tp2", "llama-tp4"])
def test_who_asks_vllms_default_loader_for_tensors_gets_whole_ones(
    folders: Path, vllm: Engine, whole: Tensors, load_format: str, name: str
) -> None:
    """So do prime-rl's workers, after they have checked that it is the default loader."""
    vllm.rank, vllm.tp = 1, 2
    loader = vllm.formats[load_format](LoadConfig(load_format))
    assert isinstance(loader, DefaultModelLoader)
    source = SimpleNamespace(model_or_path=str(folders / name), revision=None, prefix="part.")
    given = dict(loader._get_weights_iterator(source))
    assert given.keys() == {f"part.{one}" for one in whole}
    for one, tensor in whole.items():
        assert type(given[f"part.{one}"]) is torch.Tensor
        assert torch.equal(given[f"part.{one}"], tensor)


def test_tensors_of_a_plain_source_are_vllms_own(vllm: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"weight": torch.ones(3)}, tmp_path / "score.pt")
    source = SimpleNamespace(model_or_path="other", revision=None, prefix="score.", file=tmp_path / "score.pt")
    loader = vllm.formats["auto"](LoadConfig("auto"))
    assert [name for name, _ in loader._get_weights_iterator(source)] == ["score.weight"]
    monkeypatch.setenv("RELAYOUT_TRUST", str(make_keys(tmp_path).policy))
    with pytest.raises(FormatError, match="is not signed"):
        dict(loader._get_weights_iterator(source))
