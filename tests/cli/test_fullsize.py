"""Full-size models, as sparse files: true headers, holes for data. What a dry run says of them, and what it takes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fullsize import dry_run, row
from support.hub_models import MODELS, Model, tensor_nbytes

import relayout
from relayout.conversion.planning import preview

pytestmark = pytest.mark.documents

MAX_PEAK_NBYTES = 1_500_000_000


LARGEST = max(MODELS.values(), key=lambda model: model.num_tensors)
FEW_TENSORS = [model for model in MODELS.values() if model.num_tensors < 20_000]


def assert_repeats_what_must_be(planned: Mapping[str, Any], model: Model) -> None:
    assert (planned["num_tensors"], planned["source_nbytes"]) == (model.num_tensors, model.nbytes)
    # Whole tensors in every rank are all that is stored more than once, but for shared KV heads.
    whole = sum(
        group["count"] * tensor_nbytes(("", group["dtype"], group["shape"]))
        for group in planned["groups"]
        if group["cut"] == "whole"
    )
    shared = sum(
        group["count"] * tensor_nbytes(("", group["dtype"], group["shape"]))
        for group in planned["groups"]
        if group["cut"] == "dim 0, each part in 2 ranks"
    )
    assert planned["replicated_nbytes"] == (model.tp - 1) * whole + shared
    assert sum(planned["rank_nbytes"]) == model.nbytes + planned["replicated_nbytes"]


@pytest.mark.parametrize("model", FEW_TENSORS, ids=lambda model: model.name)
def test_a_full_size_model_repeats_what_is_whole_and_shared_kv_heads_only(model: Model, tmp_path: Path) -> None:
    assert model.write(tmp_path / "model") == model.nbytes
    assert_repeats_what_must_be(preview(relayout.plan_conversion(tmp_path / "model", tp=model.tp)).as_json(), model)


def test_so_does_the_model_with_most_tensors_and_its_dry_run_takes_little_memory(tmp_path: Path) -> None:
    assert LARGEST.num_tensors > 100_000
    assert LARGEST.write(tmp_path / "model") == LARGEST.nbytes
    planned, seconds, peak = dry_run(tmp_path / "model", LARGEST.tp)
    assert_repeats_what_must_be(planned, LARGEST)
    assert peak < MAX_PEAK_NBYTES
    assert LARGEST.name in row(LARGEST, planned, seconds, peak)


def test_experts_of_a_full_size_model_are_owned_by_one_rank_each(tmp_path: Path) -> None:
    MODELS["Qwen3-30B-A3B"].write(tmp_path / "model")
    planned = preview(relayout.plan_conversion(tmp_path / "model", tp=8, expert_parallel=True))
    owned = [group for group in planned.groups if group.cut == "whole, in one rank"]
    # 128 experts of 3 tensors in each of 48 layers: 16 of them in each of 8 ranks.
    assert sum(group.count for group in owned) == 48 * 128 * 3
    assert planned.rank_tensors == (18_867 - 48 * (128 - 16) * 3,) * 8
    assert planned.balance == 1.0
