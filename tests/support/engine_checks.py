"""Checks of loads that are the same for SGLang and TokenSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.conversions import reference_tensors
from support.fake_vllm import Model, Tensors

from relayout.errors import PlanError

PLACES = [[[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]] * 2, [[7, 6, 5, 4, 3, 2, 1, 0]] * 2]
"""Experts by layer and slot: some are twice, or a map places them."""


def assert_placed_experts_are_read(engine: Any, folders: Path, places: list[list[int]]) -> None:
    """Each of two ranks holds the experts of its slots, and a folder with two owners has others in its blocks."""
    whole = reference_tensors(folders / "moe")
    engine.own_experts()
    engine.places = places
    per_rank = len(places[0]) // 2
    for rank in range(2):
        model = Model(whole, rank, 2, experts=places[0][rank * per_rank :][:per_rank])
        engine.load(folders / "moe-ep2", model, strict=True)
        model.assert_holds_what_it_cuts_of(whole)


def assert_only_this_may_be_missing(engine: Any, folders: Path, whole: Tensors, name: str) -> None:
    """A parameter of experts of this name needs nothing from the checkpoint, and `w13_weight_scale` does."""
    for missing in (name, "w13_weight_scale"):
        model = Model(whole, 0, 2)
        model.memory[f"model.layers.1.mlp.experts.{missing}"] = torch.zeros(64, 8)
        if missing == name:
            engine.load(folders / "llama-tp2", model)
            model.assert_holds_what_it_cuts_of(whole)
        else:
            with pytest.raises(PlanError, match=r"nothing was loaded into model\.layers\.1\..*w13_weight_scale"):
                engine.load(folders / "llama-tp2", model)
