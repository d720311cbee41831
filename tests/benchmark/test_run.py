"""Loads run in fresh processes, from the page cache that is said, and their bytes are compared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.page_cache import write_cold

import relayout
from relayout.benchmark import run
from relayout.benchmark.loaders import LOADERS
from relayout.benchmark.measure import expected_digests, plan_bench
from relayout.benchmark.run import Folders, RankGroup, digest_of, digest_of_tensors
from relayout.benchmark.samples import drive_number, sampling
from relayout.benchmark.verdict import RankLoads
from relayout.checkpoint.converted import read_digests, read_manifest, read_table
from relayout.storage.stores import find_store


def test_the_digest_of_tensors_is_that_of_the_tables(folders: Folders) -> None:
    assert folders.converted is not None
    store = find_store(folders.converted)
    manifest = read_manifest(store)
    table, digests = read_table(store, manifest, 2), read_digests(store, manifest, 2)
    tensors = relayout.load(folders.converted, 2)
    assert digest_of_tensors(tensors) == digest_of(zip(table.names, table.shapes, digests, strict=True))
    tensors["lm_head.weight"] = tensors["lm_head.weight"].clone()
    tensors["lm_head.weight"][0, 0] += 1
    assert digest_of_tensors(tensors) != digest_of(zip(table.names, table.shapes, digests, strict=True))


def test_ranks_are_loaded_cold_in_fresh_processes_and_bytes_are_compared(folders: Folders, tmp_path: Path) -> None:
    write_cold(tmp_path / "probe", 1 << 20)  # Skips where that cannot be had.
    two = relayout.convert(folders.source or "", tmp_path / "two", tp=2)
    planned = plan_bench(folders.source or "", tp=2, against=two.output, runs=1)
    assert {"relayout", "relayout_plain", "get_slice"} <= planned.loaders.keys()
    told: list[str] = []
    measured: list[RankLoads] = []
    with sampling(drive_number(tmp_path)) as sampled:  # Nothing, if the file system is on no single drive.
        pass
    for name, ranks in (("relayout", [0]), ("get_slice", [0, 1])):
        group = RankGroup(planned.folders, {name: planned.loaders[name]}, ranks, "cold", expected_digests(two.output))
        group.measure(1, told.append, measured.append)
        found = measured.pop()
        assert found.wrong() == []
        [timing] = found.timings
        assert (timing.failure, [len(run.digests) for run in timing.runs]) == (None, [len(ranks)])
        nbytes = sum(tensor.nbytes for rank in ranks for tensor in relayout.load(two.output, rank).values())
        assert [run.nbytes for run in timing.runs] == [nbytes]
        assert timing.median("drive_nbytes") > 0.9 * nbytes, "the page cache was not cold"
        counted = sum(sample.nbytes for run in timing.runs for sample in run.drive)
        assert counted > 0.9 * nbytes or not sampled, "the drive's own counters saw less"
    assert [line.partition(", cold: ")[0] for line in told] == ["one rank of 2", "all 2 ranks at once"]


def test_memory_that_does_not_suffice_leaves_a_load_out(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    group = RankGroup(folders, {"relayout": LOADERS["relayout"]}, [0], "cold", None)
    assert group.too_large() is None
    monkeypatch.setattr(run, "available_nbytes", lambda: 10**8)
    assert "one rank of 4, cold: needs 0.4 GB of memory, 0.1 GB are available" in (group.too_large() or "")


def test_a_device_that_is_too_small_leaves_a_load_out(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "device_nbytes", lambda device: 10**5)
    group = RankGroup(folders, {"relayout": LOADERS["relayout"]}, [0, 1, 2], "cold", None, devices=("cuda:0", "cuda:1"))
    found = re.fullmatch(
        r"all 4 ranks at once, cold: needs (\S+) GB of the memory of cuda:0, which has 0\.0 GB", group.too_large() or ""
    )
    assert found is not None
    monkeypatch.setattr(run, "device_nbytes", lambda device: 10**12)
    assert group.too_large() is None
