"""`tools/run bench budget`: the size of buffers that measurements say is enough."""

from __future__ import annotations

import pytest
from bench import budget
from bench.budget import LOADERS, conclusion, least_enough
from support.benchmarks import timing

import relayout
from relayout.benchmark.loaders import LoadJob
from relayout.benchmark.run import Folders
from relayout.benchmark.verdict import RankLoads, Timing
from relayout.loader.requests import DEVICE_BUFFERS, HOST_BUFFERS


def group(state: str, seconds: dict[int, list[float]]) -> RankLoads:
    made = [Timing(str(size), "", "", timing("relayout", of_size).runs, None) for size, of_size in seconds.items()]
    return RankLoads("whole model", 1, state, tuple(made), None)


def test_the_smallest_size_that_is_fast_enough_everywhere_is_enough() -> None:
    cold = group("cold", {32: [1.0], 128: [0.99], 512: [1.0]})
    warm = group("warm", {32: [1.0, 1.0, 1.0], 128: [0.6, 0.5, 9.0], 512: [0.49, 0.5, 0.5]})
    assert least_enough([cold]) == 32
    assert least_enough([cold, warm]) == 512
    assert least_enough([cold, group("warm", {32: [1.0], 128: [0.5], 512: [0.49]})]) == 128
    assert least_enough([]) is None
    assert least_enough([group("cold", {32: [1.0]}), group("warm", {64: [1.0]})]) is None


def test_a_size_that_failed_is_not_enough() -> None:
    [failed] = group("warm", {32: [0.1]}).timings
    found = group("warm", {64: [1.0]})
    timings = (Timing("32", "", "", failed.runs, "killed"), *found.timings)
    assert least_enough([RankLoads("whole model", 1, "warm", timings, None)]) == 64


def test_the_default_of_the_device_is_beside_it() -> None:
    assert conclusion([], "cuda:1")["default_mib"] * 2**20 == DEVICE_BUFFERS
    assert conclusion([], "cpu")["default_mib"] * 2**20 == HOST_BUFFERS


def test_each_size_is_what_a_load_may_use(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr("relayout.loader.api.load", lambda *path, memory, **more: asked.append(memory) or {})
    job = LoadJob("bench.budget", "32", "", str(folders.converted), 4, 0, 1, 0)
    for loader in LOADERS.values():
        loader.load(job)
    assert asked == [size * 2**20 for size in budget.SIZES]
    monkeypatch.undo()
    loaded = LOADERS["32"].load(job)
    assert loaded.keys() == relayout.load(job.converted, 0).keys()
