"""What an operator sees of loads: the line of the log, and the counters that an engine's /metrics adds up."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from support.conversions import stock_tensors
from support.fake_vllm import Model, install
from support.patience import PATIENCE
from support.toy_store import shelf

from relayout.storage.cloud.client import CLOUD_COST

COUNT = """
import logging, sys
logging.basicConfig(level="INFO")
from relayout.engines.metrics import publish
from relayout.engines.rank_weights import Report
rank = int(sys.argv[1])
for cache in ("miss", "hit"):
    report = Report(rank, 2, 9, 1000 + rank, 0.5, "direct", cache, 0, 0, 0, 1, ())
    publish(report, logging.getLogger("vllm.relayout"))
"""


def counted(rank: int, folder: str, before: str = "") -> str:
    """What a process that loads a rank says."""
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": folder}
    command = [sys.executable, "-c", before + COUNT, str(rank)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("relayout: rank") == 2
    return done.stderr


def test_what_processes_count_is_added_up_as_engines_do(tmp_path: Path) -> None:
    for rank in range(2):
        assert "not counted" not in counted(rank, str(tmp_path))
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))

    def value(name: str, cache: str) -> float | None:
        return registry.get_sample_value(name, {"backend": "direct", "cache": cache})

    for cache in ("hit", "miss"):
        assert value("relayout_loads_total", cache) == 2
        assert value("relayout_loaded_bytes_total", cache) == 2001
        assert value("relayout_load_seconds_total", cache) == 1


def test_a_load_does_not_fail_for_its_counters() -> None:
    assert "is not counted by Prometheus" in counted(0, "/dev/null/folder")
    assert "WARNING" not in counted(0, "/dev/null/folder", "import sys; sys.modules['prometheus_client'] = None")


@pytest.mark.parametrize("name", ["llama", "llama-tp2"])
def test_the_log_says_whether_a_cache_had_the_rank(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    caplog.set_level(logging.INFO, "vllm.relayout")
    engine = install(monkeypatch)
    monkeypatch.setattr(shelf("metrics"), "cost", CLOUD_COST)
    for file in (folders / name).iterdir():
        shelf("metrics").write(f"{name}/{file.name}", file.read_bytes())
    said = []
    for options in ({}, {"cache": str(tmp_path)}, {"cache": str(tmp_path)}):
        caplog.clear()
        engine.load(f"toy://metrics/{name}", Model(stock_tensors(folders / "llama"), 0, 2), **options)
        said += [line.partition(" cache ")[2].partition(",")[0] for line in caplog.messages if " GB/s)" in line]
    assert said == ["none", "miss", "hit"]
