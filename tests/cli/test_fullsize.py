"""Full-size models, as sparse files: true headers, holes for data. What a dry run says of them, and what it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from fullsize import dry_run, row
from models import MODELS, tensor_nbytes

import relayout
from relayout.conversion.preview import preview

PUBLISHED = {
    # Number of tensors, and bytes of all of them: total_size of the model's index.json, or parameters times item size.
    "Llama-3.1-8B": (291, 16_060_522_496),
    "Llama-3.1-70B": (723, 141_107_412_992),
    "Llama-3.1-405B": (1137, 811_706_777_600),
    "Mistral-7B-v0.3": (291, 14_496_047_104),
    "Qwen2.5-0.5B": (290, 988_065_536),
    "Qwen2.5-7B": (339, 15_231_233_024),
    "Qwen2.5-72B": (963, 145_412_407_296),
    "Qwen3-8B": (399, 16_381_470_720),
    "Qwen3-30B-A3B": (18_867, 61_064_245_248),
    "Qwen3-235B-A22B": (36_945, 470_187_269_120),
    "Mixtral-8x7B-v0.1": (995, 93_405_585_408),
    "DeepSeek-V3": (91_991, 688_574_839_360),
    "Kimi-K2-Instruct": (139_583, 1_029_173_249_888),
    "gpt-oss-20b": (459, 13_761_264_768),
    "gpt-oss-120b": (687, 65_248_815_744),
    "gpt2": (160, 548_090_880),
    "bloom-560m": (293, 1_118_429_184),
    "bloom": (845, 352_494_542_848),
    "falcon-40b": (484, 83_671_941_120),
    "falcon-180B": (644, 359_045_130_240),
}

MAX_PEAK_NBYTES = 1_500_000_000


def test_the_table_has_every_published_model() -> None:
    assert [model.name for model in MODELS] == list(dict.fromkeys(model.name for model in MODELS))
    assert {model.name for model in MODELS} == PUBLISHED.keys()


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_full_size_model_is_planned_in_little_memory(model, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    num_tensors, nbytes = PUBLISHED[model.name]
    assert model.write(tmp_path / "model") == nbytes
    planned, _, peak = dry_run(tmp_path / "model", model.tp)
    assert (planned["num_tensors"], planned["source_nbytes"]) == (num_tensors, nbytes)
    assert peak < MAX_PEAK_NBYTES
    # Whole tensors in every rank are all that is stored more than once, but for shared KV heads.
    whole = sum(
        group["count"] * tensor_nbytes(("", group["dtype"], group["shape"]))
        for group in planned["groups"]
        if group["cut"] == "whole"
    )
    shared = sum(
        group["count"] * tensor_nbytes(("", group["dtype"], group["shape"]))
        for group in planned["groups"]
        if group["cut"] == "rows, each part in 2 ranks"
    )
    assert planned["replicated_nbytes"] == (model.tp - 1) * whole + shared
    assert sum(planned["rank_nbytes"]) == nbytes + planned["replicated_nbytes"]
    assert model.name in row(model, planned, 0.0, peak)


def test_experts_of_a_full_size_model_are_owned_by_one_rank_each(tmp_path: Path) -> None:
    model = next(model for model in MODELS if model.name == "DeepSeek-V3")
    model.write(tmp_path / "model")
    planned = preview(relayout.plan_conversion(tmp_path / "model", tp=8, expert_parallel=True))
    owned = [group for group in planned.groups if group.cut == "whole, in one rank"]
    # 256 experts of 6 tensors in each of 59 layers: 32 of them in each of 8 ranks.
    assert sum(group.count for group in owned) == 59 * 256 * 6
    assert planned.rank_tensors == (91_991 - 59 * (256 - 32) * 6,) * 8
    assert planned.balance == 1.0
