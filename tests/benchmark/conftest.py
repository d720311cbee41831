"""Fixtures of the benchmark's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.benchmarks import QUIET, timing

import relayout
from relayout.benchmark import measure
from relayout.benchmark.machine import DriveLimit
from relayout.benchmark.run import Folders, RankGroup


@pytest.fixture(scope="session")
def folders(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A plain folder, and its conversion beside it."""
    source = tmp_path_factory.mktemp("bench") / "llama"
    source.symlink_to(llama)
    relayout.convert(source, tp=4)
    return Folders(source, source.with_name("llama-tp4"), 4)


@pytest.fixture
def not_measured(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Loads take a second each and are not made. Whether each run may drop caches."""
    allowed: list[bool] = []
    run: Callable[..., Any] = measure.BenchPlan.run

    def with_fakes(plan: measure.BenchPlan, *, drop_caches: bool, **more: Any) -> Any:
        allowed.append(drop_caches)
        return run(plan, drop_caches=drop_caches, **more)

    [second] = timing("relayout", [1.0]).runs
    monkeypatch.setattr(measure.BenchPlan, "run", with_fakes)
    monkeypatch.setattr(measure, "expected_digests", lambda converted: None)
    monkeypatch.setattr(RankGroup, "_load", lambda group, name: second)
    monkeypatch.setattr(measure, "drive_limit", lambda files: DriveLimit(2.0, "fio"))
    monkeypatch.setattr(measure, "describe", lambda folder: QUIET)
    return allowed
