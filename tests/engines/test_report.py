"""What an operator sees of loads: the line of the log, and the counters that an engine's /metrics adds up."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector
from support import fake_sglang, fake_vllm, prestarted
from support.conversions import reference_tensors
from support.fake_vllm import LoadConfig, Model, Tensors, install, model_config
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
        engine.load(f"toy://metrics/{name}", Model(reference_tensors(folders / "llama"), 0, 2), **options)
        said += [line.partition(" cache ")[2].partition(",")[0] for line in caplog.messages if " GB/s)" in line]
    assert said == ["none", "miss", "hit"]


def _load_by_vllm(vllm: fake_vllm.Engine, folder: Path, model: Model, *, use_tqdm: bool = True) -> None:
    vllm.rank, vllm.tp = model.rank, model.tp
    loader = vllm.formats["auto"](LoadConfig("auto", use_tqdm_on_load=use_tqdm))
    config = model_config(folder)
    loader.load_weights(loader.create_model(SimpleNamespace(model=model), config), config)


def _load_by_sglang(sglang: fake_sglang.Engine, folder: Path, model: Model) -> None:
    sglang.load(folder, model)


@pytest.mark.parametrize(("engine", "load"), [("vllm", _load_by_vllm), ("sglang", _load_by_sglang)])
@pytest.mark.parametrize("rank", [0, 1, None])
def test_one_process_of_an_engine_shows_progress_and_its_rate(
    request: pytest.FixtureRequest, folders: Path, whole: Tensors, engine: str, load: Callable[..., None],
    rank: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The rank is that of torch.distributed: the second process of a pipeline or a replica has tensor rank 0, too."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: rank is not None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    load(request.getfixturevalue(engine), folders / "llama-tp2", Model(whole, 0, 2))
    shown = re.fullmatch(r"loading: \S+ of \S+ MB in 0 s, \d+\.\d\d GB/s\n", capsys.readouterr().err)
    assert (shown is None) is (rank == 1)


def test_vllms_own_option_turns_progress_off(
    vllm: fake_vllm.Engine, folders: Path, whole: Tensors, capsys: pytest.CaptureFixture[str]
) -> None:
    _load_by_vllm(vllm, folders / "llama-tp2", Model(whole, 0, 2), use_tqdm=False)
    assert capsys.readouterr().err == ""
