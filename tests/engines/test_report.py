"""What an operator sees of loads: the line of the log, and the counters that an engine's /metrics adds up."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from support import prestarted
from support.conversions import stock_tensors
from support.fake_vllm import Model, install
from support.loader_fixtures import mlp_model
from support.page_cache import drop, write_cold
from support.toy_store import shelf

import relayout
from relayout.engines.rank_weights import EngineOptions, RankWeights
from relayout.storage.cloud.store import CLOUD_COST

COUNT = """
import logging, os, sys
rank, os.environ["PROMETHEUS_MULTIPROC_DIR"] = int(sys.argv[1]), sys.argv[2]
logging.basicConfig(level="INFO")
from relayout.engines.rank_weights import LoadReport, publish
for cache in ("miss", "hit"):
    report = LoadReport(rank, 2, 9, 1000 + rank, 0.5, "direct", cache, memory=2**20, page_cache_nbytes=0)
    publish(report, logging.getLogger("vllm.relayout"))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted folder."""
    root = tmp_path_factory.mktemp("large")
    mlp_model(root / "model", width=2048)
    relayout.convert(root / "model", root / "out", tp=2)
    return root / "out"


@pytest.fixture
def cold(large: Path, tmp_path: Path) -> Path:
    """The folder, of which nothing is in the page cache."""
    write_cold(tmp_path / "probe", 2**16)  # Skips where that cannot be had.
    for file in large.glob("*.safetensors"):
        drop(file)
    return large


def counted(rank: int, folder: str, before: str = "") -> str:
    """What a process that loads a rank says."""
    done = prestarted.run(rank, folder, script=before + COUNT)
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


@pytest.mark.parametrize(
    ("backend", "memory", "allowed", "keeps"),
    [
        ("auto", None, 2**29, False),
        ("auto", "64MiB", 2**26, False),
        ("buffered", None, 2**29, True),
    ],
)
def test_a_load_says_what_memory_it_was_allowed_and_what_it_left_in_the_page_cache(
    cold: Path, backend: str, memory: str | None, allowed: int, keeps: bool
) -> None:
    delivery = RankWeights(str(cold), 1, 2, EngineOptions(backend=backend, memory=memory)).deliver()
    for _, tensor in delivery:
        tensor.sum()
    report = delivery.report()
    assert report.memory == allowed
    nbytes = sum(file.stat().st_size for file in cold.glob("model-rank-1-*.safetensors"))
    assert report.page_cache_nbytes is not None
    assert 0.9 * nbytes * keeps <= report.page_cache_nbytes <= nbytes * keeps
    gained = report.page_cache_nbytes / 1e9
    assert f"at most {allowed // 2**20} MiB in addition to the tensors, page cache {gained:+.3f} GB" in str(report)


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
