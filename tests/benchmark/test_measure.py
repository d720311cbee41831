"""`plan_bench`: which folders and loaders are measured, what is refused, and what is left out when time is over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from relayout.benchmark import measure
from relayout.benchmark.loaders import LOADERS
from relayout.benchmark.measure import plan_bench
from relayout.benchmark.run import Folders, RankGroup
from relayout.benchmark.verdict import Measurement
from relayout.errors import PlanError


def test_the_other_folder_is_found_beside(folders: Folders) -> None:
    assert folders.source is not None
    assert folders.converted is not None
    assert plan_bench(folders.source).folders == folders
    assert plan_bench(folders.source, tp=4).folders == folders
    found = plan_bench(folders.converted).folders
    assert (found.source, found.tp) == (folders.source, 4)
    alone = plan_bench(folders.source, tp=2)
    assert alone.folders.converted is None
    assert "relayout, converted: there is no converted folder" in alone.left_out


def test_what_cannot_be_measured_is_refused(folders: Folders, qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folders.source is not None
    with pytest.raises(PlanError, match=r"llama-tp4: was converted from \d+ bytes of tensors, .*qwen2 has \d+"):
        plan_bench(qwen2, against=folders.converted)
    with pytest.raises(PlanError, match="set --tp N"):
        plan_bench(qwen2)
    with pytest.raises(PlanError, match=r"(cannot share evenly|not a multiple of 16)"):
        plan_bench(folders.source, tp=16)
    with pytest.raises(PlanError, match="not on a local file system"):
        plan_bench("toy://bucket/model")
    with pytest.raises(PlanError, match="no such file or folder"):
        plan_bench(qwen2.with_name("nothing"), tp=2)
    with (
        pytest.raises(PlanError, match="expected a folder on the drive to measure"),
        measure.made_checkpoint(folders.source, "4GB"),
    ):
        pass
    monkeypatch.setattr(measure.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match=r"pip install '\.\[torch\]'"):
        plan_bench(folders.source)


def test_a_made_checkpoint_is_deleted_after(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(folder: Path, layers: int, shard_nbytes: int) -> None:
        assert layers == 4
        folder.symlink_to(llama)

    monkeypatch.setattr(measure, "write_llama", copy)
    with measure.made_checkpoint(tmp_path, "4GB", tp=2) as made:
        assert plan_bench(made).folders.converted == made.with_name("made-tp2")
    assert list(tmp_path.iterdir()) == []


def test_without_a_number_of_runs_the_last_loads_are_left_out_when_time_is_over(
    folders: Folders, not_measured: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, now = RankGroup._load, [0.0]

    def slow(group: RankGroup, name: str) -> Measurement:
        now[0] += 24 / len(plan.loaders)  # Peers that are not installed are no loaders.
        return load(group, name)

    monkeypatch.setattr(RankGroup, "_load", slow)
    monkeypatch.setattr(measure.time, "monotonic", lambda: now[0])
    plan = plan_bench(folders.source or "")
    plan = replace(plan, loaders=dict(list(plan.loaders.items())[:3]))
    some = plan.run(drop_caches=True)
    assert [len(one.timings[0].runs) for one in some.loads] == [2, 2, 2]
    assert some.left_out[-1] == "all 4 ranks at once, warm: the time is over (--runs 3 measures everything)"
    every = replace(plan, budget=None).run(drop_caches=True)
    assert [len(one.timings[0].runs) for one in every.loads] == [3] * 4


def test_loaders_that_cannot_load_to_a_device_are_named(folders: Folders) -> None:
    plan = plan_bench(folders.source or "", device="cpu")
    assert plan.devices == ("cpu",)
    assert "InstantTensor: it cannot load to cpu" in plan.left_out
    assert {"relayout", "get_slice"} <= plan.loaders.keys()


def test_a_plan_for_cuda_has_the_loaders_that_load_there(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "devices_of", lambda device: (device,))
    plan = plan_bench(folders.source or "", device="cuda:0")
    peers = {"relayout", "relayout_plain", "get_slice", "fastsafetensors", "runai", "instanttensor"}
    assert plan.loaders.keys() <= peers
    absent = {loader.title for name, loader in LOADERS.items() if name in peers - plan.loaders.keys()}
    assert {line.partition(": not installed (pip install")[0] for line in plan.left_out} == absent
    assert {group.devices for group in plan._groups(["cold"])} == {("cuda:0",)}
