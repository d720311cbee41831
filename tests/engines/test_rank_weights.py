"""The tensors of one rank that an engine is given, without an engine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.conversions import reference_tensors
from support.toy_store import shelf

import relayout
from relayout.engines.placing import is_expert
from relayout.engines.rank_weights import EngineOptions, RankWeights, speculative


@pytest.mark.parametrize(("folder", "reads"), [("llama", "reshard.read_source"), ("llama-tp4", "reshard.read_record")])
def test_a_load_that_needs_a_plan_reads_what_is_stored_and_plans_once(
    folders: Path, monkeypatch: pytest.MonkeyPatch, folder: str, reads: str
) -> None:
    calls: list[str] = []
    plans = f"relayout.plans.planner.{'plan_for' if folder == 'llama' else 'plan_by'}"
    for one in (f"relayout.loader.sources.{reads}", plans):
        module, _, name = one.rpartition(".")
        original = getattr(import_module(module), name)
        monkeypatch.setattr(
            import_module(module), name, lambda *a, _f=original, _n=name, **k: calls.append(_n) or _f(*a, **k)
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert dict(RankWeights(str(folders / folder), 0, 2, EngineOptions()).deliver())
    # At another degree, the conversion's own is planned too, to see that the rules are the same.
    assert sorted(calls) == (
        ["plan_for", "read_source"] if folder == "llama" else ["plan_by", "plan_by", "read_record"]
    )


def test_a_pipeline_stage_is_given_no_experts_of_other_stages(folders: Path) -> None:
    """Nor where it is given all experts, those of other ranks unread."""
    weights = RankWeights(
        str(folders / "moe-ep2"),
        0,
        2,
        EngineOptions(),
        is_placed=is_expert,
        is_skipped=lambda name: ".layers.1." in name,
    )
    given = dict(weights.deliver())
    assert given.keys() == {name for name in reference_tensors(folders / "moe") if ".layers.1." not in name}


def test_a_load_opens_each_file_once(folders: Path) -> None:
    opened = shelf("engine")
    for file in (folders / "llama-tp2").iterdir():
        opened.write(f"llama-tp2/{file.name}", file.read_bytes())
    relayout.load("toy://engine/llama-tp2", 0)
    needed = dict(opened.requests)
    opened.log.clear()
    assert dict(RankWeights("toy://engine/llama-tp2", 0, 2, EngineOptions()).deliver())
    assert opened.requests == needed


@pytest.fixture
def marked_memory() -> Iterator[None]:
    """Memory that torch hands out without setting it is 255, or NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("marked_memory")
def test_slices_without_values_are_like_those_that_are_read_and_zero_if_small(folders: Path) -> None:
    loaded = relayout.load(folders / "llama-tp2", 0)
    made = dict(RankWeights(str(folders / "llama-tp2"), 0, 2, EngineOptions()).without_values())
    assert {name: (one.dtype, one.shape) for name, one in made.items()} == {
        name: (one.dtype, one.shape) for name, one in loaded.items()
    }
    is_small = {name: one.nbytes < 4096 for name, one in made.items()}
    assert set(is_small.values()) == {False, True}
    for name, one in made.items():
        assert bool((one.view(torch.uint8) == (0 if is_small[name] else 255)).all()), name


@pytest.mark.parametrize("prefix", ["vision_tower.transformer.", "audio_tower.", "model.visual."])
def test_layers_of_other_parts_of_a_model_have_numbers_of_their_own(prefix: str) -> None:
    is_speculative = speculative(SimpleNamespace(num_hidden_layers=28, num_nextn_predict_layers=1))
    assert not any(is_speculative(f"{prefix}layers.{number}.fc1.weight") for number in range(32))
    for text in ("model.", "", "language_model.model.", "model.language_model."):
        assert [n for n in range(32) if is_speculative(f"{text}layers.{n}.fc1.weight")] == [28, 29, 30, 31]


def test_small_slices_come_before_all_others_if_that_is_asked_for(folders: Path) -> None:
    weights = RankWeights(str(folders / "llama-tp2"), 0, 2, EngineOptions())
    usual = [(name, tensor.nbytes < 4096) for name, tensor in weights.stream()]
    assert [is_small for _, is_small in usual] != sorted((is_small for _, is_small in usual), reverse=True)
    first = [name for name, _ in replace(weights, small_first=True).stream()]
    assert first == [name for name, is_small in sorted(usual, key=lambda one: not one[1])]
