"""Loads for `bench` that nobody makes: times of a loader, and a machine where nothing else runs."""

from __future__ import annotations

from typing import Any

from relayout.benchmark import machine
from relayout.benchmark.loaders import LOADERS
from relayout.benchmark.verdict import Measurement, RankLoads, Timing


def timing(name: str, seconds: list[float], **more: Any) -> Timing:
    loader = LOADERS[name]
    values: dict[str, Any] = {
        "cpu_seconds": 1.0,
        "nbytes": 10**9,
        "drive_nbytes": 0,
        "peak_minus_needed_nbytes": 0,
        "other_load": 0.0,
        "digests": ("a",),
    }
    runs = tuple(Measurement(seconds=one, **(values | more)) for one in seconds)
    return Timing(name, loader.title, loader.family, runs, None)


QUIET = machine.Machine(
    cpu="", num_cpus=2, memory_nbytes=0, kernel="", python="", file_system="", drive=None, load_average=0.1
)


def loads(ours: list[float], other: list[float], state: str = "cold", **more: Any) -> RankLoads:
    timings = timing("relayout", ours), timing("get_slice", other, **more)
    return RankLoads("one rank of 4", 1, state, timings, ("a",))
