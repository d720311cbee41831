"""The first start of an engine on a plain checkpoint: what comes into the cache, and that it never fails."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import fake_sglang, fake_vllm, hub_server
from support.conversions import reference_tensors
from support.fake_sglang import AnyEngine
from support.fake_vllm import Engine, Model
from support.store_contract import ground

import relayout
from relayout.cache.conversions import CachedConversion, cached_conversion
from relayout.commands.cache import add
from relayout.conversion import planning
from relayout.core.workers import PIPE, Child, start_child
from relayout.engines.first_start import ConversionRequest, DeferredConversion, first_start
from relayout.engines.rank_weights import EngineOptions
from relayout.errors import PlanError
from relayout.plans.plan import Plan
from relayout.plans.planner import plan_for
from relayout.storage.local.descriptors import FileLock
from relayout.storage.stores import find_input


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RELAYOUT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(folders: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders / "llama", tmp_path / "model"))


def rename_its_type(_cache: Path, model: Path) -> None:
    """Let it be of a type without a built-in plan."""
    config = model / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"unheard_of"'))


@pytest.fixture
def unheard_of(model: Path) -> Path:
    rename_its_type(Path(), model)
    return model


def start(engine: AnyEngine, folder: Path | str, whole: Path, tp: int = 2) -> None:
    """All ranks, one after the other."""
    tensors = reference_tensors(whole)
    for rank in range(tp):
        model = Model(tensors, rank, tp)
        engine.load(folder, model)
        model.assert_holds_what_it_cuts_of(tensors)


def said(caplog: pytest.LogCaptureFixture, text: str) -> int:
    """In how many lines; then nothing was said."""
    count = sum(text in message for message in caplog.messages)
    caplog.clear()
    return count


def wait_until(is_so: Callable[[], object]) -> None:
    for _ in range(600):
        if is_so():
            return
        time.sleep(0.1)
    raise AssertionError


def wait_until_filled(caplog: pytest.LogCaptureFixture, end: str = "is in the cache") -> str:
    """Wait for what a start has begun behind it, and return what is said of it; then nothing was said."""
    wait_until(lambda: end in caplog.text)
    [done] = [message for message in caplog.messages if end in message]
    assert said(caplog, "is being converted into the cache") == 1
    return done


@pytest.mark.parametrize(
    ("engine", "name", "tp"), [(fake_sglang, "llama", 2), (fake_vllm, "moe", 4)], indirect=["engine"]
)
def test_the_engine_loads_at_the_first_start_and_the_second_is_from_the_cache(
    folders: Path, engine: AnyEngine, cache: Path, caplog: pytest.LogCaptureFixture, name: str, tp: int
) -> None:
    start(engine, folders / name, folders / name, tp)
    wait_until_filled(caplog)
    start(engine, folders / name, folders / name, tp)
    assert said(caplog, f"of {tp}: ") == tp
    (entry,) = relayout.Cache(cache).entries()
    assert not relayout.verify(cache / "relayout-cache-v1" / entry.name / "model", source=folders / name).differences


def ignored() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def blocked() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])


@pytest.mark.parametrize("engine", [ignored, blocked])
def test_a_conversion_ends_with_the_engine_and_the_next_start_continues(
    engine: Callable[[], None], model: Path, cache: Path
) -> None:
    """The engine is killed: what it has started sees the end of its stdin, whatever the engine did with signals."""
    relayout.Cache(cache).entries()
    held = relayout.Cache(cache).try_filling()
    assert held is not None
    assert relayout.Cache(cache).try_filling() is None
    arguments = ["add", str(model), "--folder", str(cache), "--tp", "2", "--background"]
    streams = {"stdin": PIPE, "stderr": PIPE, "preexec_fn": engine}
    child = start_child("relayout", "cache", *arguments, pass_fds=(passed := os.dup(held.fd),), **streams)
    os.close(passed)
    held.after_fork()  # As the engine's death closes it, without unlocking.
    assert relayout.Cache(cache).try_filling() is None  # The child has it.
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(60) == 128 + signal.SIGTERM
    free = relayout.Cache(cache).try_filling()
    assert free is not None
    free.close()
    assert not relayout.verify(cached_conversion(find_input(model), 2, relayout.Cache(cache)).folder).differences


LOADING = """
import sys
from relayout import Cache
held = Cache(sys.argv[1]).register_load()
print("loading", flush=True)
sys.stdin.read()
"""
"""A rank that loads until its stdin is closed."""


@pytest.fixture
def loading(cache: Path, tmp_path: Path) -> Iterator[Child]:
    """Another process of the machine, which loads."""
    (tmp_path / "packages").mkdir(exist_ok=True)
    (tmp_path / "packages" / "a_rank.py").write_text(LOADING)
    paths = os.pathsep.join([str(tmp_path / "packages"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    child = start_child("a_rank", str(cache), environment=environment, stdin=PIPE, stdout=PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"loading\n"
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


def written(cache: Path) -> list[Path]:
    return list(cache.rglob("*.safetensors*"))


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_conversion_begins_when_the_last_process_has_loaded_or_was_killed(
    model: Path, cache: Path, loading: Child, is_killed: bool
) -> None:
    arguments = ["add", str(model), "--folder", str(cache), "--tp", "2", "--background"]
    child = start_child("relayout", "cache", *arguments, stdin=PIPE)
    wait_until(lambda: list(cache.glob("*/.coming-*")))  # It has reserved room, and converts next.
    time.sleep(0.5)
    assert not written(cache)
    assert child.poll() is None
    assert loading.stdin is not None
    loading.kill() if is_killed else loading.stdin.close()
    assert child.wait(60) == 0
    assert written(cache)
    assert child.stdin is not None
    child.stdin.close()


def test_a_process_that_loads_forever_delays_a_conversion_for_a_limited_time(
    model: Path, cache: Path, loading: Child, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relayout.cache.conversions._LOADS_LIMIT_SECONDS", 0.3)
    add(model, 2, behind_loads=True)
    assert relayout.Cache(cache).is_loading()
    assert loading.poll() is None
    assert written(cache)


def test_a_conversion_pauses_while_another_engine_loads_in_the_same_cache(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[FileLock] = []
    was_loading: list[bool] = []
    converting = importlib.import_module("relayout.cache.conversions")
    convert_unit = converting.convert_unit

    def convert(*arguments: Any, **options: Any) -> None:
        was_loading.append(relayout.Cache(cache).is_loading())
        convert_unit(*arguments, **options)
        if not held:
            lock = relayout.Cache(cache).register_load()
            assert lock is not None
            held.append(lock)
            threading.Timer(0.3, lock.close).start()

    monkeypatch.setattr(converting, "convert_unit", convert)
    monkeypatch.setattr(converting, "_MIN_PART_NBYTES", 2**16)
    add(model, 2, behind_loads=True)
    assert len(was_loading) > 1
    assert not any(was_loading)


def test_what_each_rank_of_a_start_holds_ends_with_its_load(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    given = (ConversionRequest(str(model), 2), EngineOptions(), "vLLM loads it itself", logging.getLogger())
    first, second = first_start(*given), first_start(*given)
    assert isinstance(first, DeferredConversion)
    assert isinstance(second, DeferredConversion)
    first.start()
    assert relayout.Cache(cache).is_loading()
    del second  # Its load has failed.
    assert not relayout.Cache(cache).is_loading()
    wait_until_filled(caplog)


OBSERVED = """
import os, sys, time
__version__ = "1"
if "relayout.observe.ranks" in sys.orig_argv:
    with open(os.environ["PIDS"] + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, os.environ["PIDS"])
    time.sleep(600)
"""
"""A vLLM that is never done."""


ENGINE = """
import os, sys, time
from relayout.core.workers import PIPE, start_child
child = start_child("relayout", "cache", *sys.argv[1:], stdin=PIPE)
os.fork()
time.sleep(600)
"""
"""Its fork keeps the pipe open."""


def test_what_observes_a_plan_ends_with_the_engine_too(unheard_of: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "packages" / "vllm").mkdir(parents=True)
    (tmp_path / "packages" / "vllm" / "__init__.py").write_text(OBSERVED)
    (scratch := tmp_path / "scratch").mkdir()
    paths = os.pathsep.join([str(tmp_path / "packages"), *filter(None, [os.environ.get("PYTHONPATH")])])
    pids = tmp_path / "pids"
    environment = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(scratch), "PIDS": str(pids)}
    arguments = ["add", str(unheard_of), "--folder", str(cache), "--tp", "2", "--background", "--observe", "vllm"]
    (tmp_path / "packages" / "engine.py").write_text(ENGINE)
    child = start_child("engine", *arguments, environment=environment)
    wait_until(pids.exists)
    child.kill()
    child.wait()
    observing = Path("/proc", pids.read_text(), "cmdline")
    wait_until(lambda: not observing.exists() or not observing.read_bytes())  # It has none when it has ended.
    wait_until(lambda: not list(scratch.iterdir()))
    os.killpg(child.pid, signal.SIGKILL)


def without_a_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", None)  # As where Python is embedded.


def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("wrong", [without_a_python, without_threads])
def test_a_conversion_that_cannot_be_started_is_one_line(
    wrong: Callable[[pytest.MonkeyPatch], None],
    model: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    deferred = first_start(
        ConversionRequest(str(model), 2), EngineOptions(), "vLLM loads it itself", logging.getLogger()
    )
    assert isinstance(deferred, DeferredConversion)
    with monkeypatch.context() as patch:
        wrong(patch)
        deferred.start()
    assert said(caplog, "is not converted into the cache") == 1


def test_without_a_cache_the_engine_loads_and_one_line_says_what_a_cache_would_give(
    folders: Path, engine: AnyEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RELAYOUT_CACHE", raising=False)
    start(engine, folders / "llama", folders / "llama")
    assert said(caplog, "loads it itself. With a cache (RELAYOUT_CACHE=FOLDER) the first start converts it") == 2


def foreign(cache: Path, model: Path) -> None:
    (cache / "relayout-cache-v1").mkdir(parents=True)
    (cache / "relayout-cache-v1" / "thesis.tex").write_text("theirs")


def file_in_its_place(cache: Path, model: Path) -> None:
    cache.write_text("theirs")


def unreadable_index(cache: Path, model: Path) -> None:
    (model / "model.safetensors.index.json").write_text("{")


@pytest.mark.parametrize("wrong", [foreign, file_in_its_place, unreadable_index, rename_its_type])
def test_whatever_is_wrong_the_engine_loads_by_itself_and_says_why(
    model: Path, engine: AnyEngine, cache: Path, caplog: pytest.LogCaptureFixture, wrong: Any
) -> None:
    wrong(cache, model)
    before = {path: path.read_bytes() for path in [cache, *cache.rglob("*")] if path.is_file()}
    start(engine, model, model)
    assert said(caplog, "loads it itself") == 2
    assert {path: path.read_bytes() for path in [cache, *cache.rglob("*")] if path.is_file()} == before


def test_a_conversion_that_fails_behind_a_start_is_one_line(
    model: Path, vllm: Engine, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAYOUT_CACHE_LIMIT", "1KB")
    start(vllm, model, model)
    assert "no room" in wait_until_filled(caplog, "was not converted into the cache")
    assert not list(cache.rglob("*.safetensors"))


def test_an_entry_that_is_damaged_is_loaded_by_the_engine_and_made_again_behind_it(
    model: Path, engine: AnyEngine, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add(model, 2)
    os.truncate(next(cache.rglob("model-rank-1-*.safetensors")), 100)
    caplog.clear()
    start(engine, model, model)
    assert said(caplog, "rebuilt in the cache") == 1
    wait_until(lambda: "is in the cache" in caplog.text)
    caplog.clear()
    start(engine, model, model)
    assert said(caplog, "of 2: ") == 2


def test_an_entry_whose_damage_is_found_while_it_is_loaded_is_made_again_by_the_next_start(
    model: Path, engine: AnyEngine, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add(model, 2)
    path = next(cache.rglob("model-rank-1-*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    tensors = reference_tensors(model)

    def load(rank: int) -> None:
        mine = Model(tensors, rank, 2)
        engine.load(model, mine, verify=True)
        mine.assert_holds_what_it_cuts_of(tensors)

    caplog.clear()
    load(1)
    assert said(caplog, "cannot load from the cache") == 1
    load(1)
    assert said(caplog, "rebuilt in the cache") == 1
    wait_until(lambda: "is in the cache" in caplog.text)
    caplog.clear()
    load(1)
    assert said(caplog, "of 2: ") == 1


def test_with_expert_parallelism_the_second_start_is_from_the_cache(
    folders: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = ConversionRequest(str(folders / "moe"), 2, expert_parallel=True)
    given = (wanted, EngineOptions(), "vLLM loads it itself", logging.getLogger())
    caplog.set_level(logging.INFO)
    deferred = first_start(*given)
    assert isinstance(deferred, DeferredConversion)
    deferred.start()
    wait_until_filled(caplog)
    assert isinstance(first_start(*given), CachedConversion)


def test_a_cache_inside_the_model_stops_a_start(model: Path, engine: AnyEngine) -> None:
    for location in (model, model / "cache"):
        with pytest.raises(PlanError, match="the option cache: is inside the model's folder"):
            first_start(
                ConversionRequest(str(model), 2), EngineOptions(cache=str(location)), "otherwise", logging.getLogger()
            )
    assert not (model / "cache").exists()


@pytest.mark.parametrize("engine", [fake_vllm, fake_sglang], indirect=True)
def test_a_model_without_a_built_in_plan_is_observed_once(
    unheard_of: Path, cache: Path, engine: AnyEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    observed = []

    def observe(checkpoint: Any, num_ranks: int) -> Plan:
        observed.append(num_ranks)
        return plan_for(checkpoint, num_ranks, "llama")

    monkeypatch.setattr(planning, "observer", lambda engine: (f"{engine} 1", observe))
    wanted = ConversionRequest(str(unheard_of), 2, observe=engine.name.lower())
    deferred = first_start(wanted, EngineOptions(), "vLLM loads it itself", logging.getLogger())
    assert isinstance(deferred, DeferredConversion)
    assert deferred.arguments[-2:] == ("--observe", engine.name.lower())
    assert observed == []
    with pytest.raises(PlanError, match="no built-in plan"):
        add(unheard_of, 2)
    with pytest.raises(PlanError, match="no built-in plan"):  # Which expert is whose is not observed.
        add(unheard_of, 2, observe="vllm", expert_parallel=True)
    with pytest.raises(PlanError, match="observe: 'ours', expected vllm or sglang"):
        add(unheard_of, 2, observe="ours")
    for _ in range(2):
        add(unheard_of, 2, observe=engine.name.lower())
    start(engine, unheard_of, unheard_of)
    assert observed == [2]
    assert said(caplog, "of 2: ") == 2


def test_a_model_on_the_hub_is_streamed_into_the_cache(
    folders: Path,
    engine: AnyEngine,
    cache: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("huggingface_hub", reason="the hub's own library")
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    with hub_server.running() as hub:
        hub_server.point_to(hub.hub.url, monkeypatch, tmp_path)
        hub.repos["org/model"] = {file.name: file.read_bytes() for file in (folders / "llama").iterdir()}
        start(engine, "org/model", folders / "llama")
        assert said(caplog, "relayout: converting hf://org/model") == 1
        start(engine, "org/model", folders / "llama")
        assert said(caplog, "relayout: converting") == 0
    assert not list(tmp_path.glob("hub/**/*.safetensors"))


@pytest.mark.parametrize(("nodes", "kept"), [((0, 1, 0, 1), ["0,2", "1,3"]), ((1, 1, 1, 1), [""])])
def test_a_node_of_several_converts_only_its_own_ranks(
    model: Path,
    tmp_path: Path,
    vllm: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    nodes: tuple[int, ...],
    kept: list[str],
) -> None:
    """Each has a drive of its own. In the last case another node has other replicas of this group."""
    vllm.num_nodes, vllm.nodes = len(set(nodes)) + 1, nodes
    tensors, found = reference_tensors(model), []
    for node in sorted(set(nodes)):
        monkeypatch.setenv("RELAYOUT_CACHE", str(tmp_path / f"node-{node}"))
        for stage in ("first", "second"):
            for rank in (rank for rank in range(4) if nodes[rank] == node):
                mine = Model(tensors, rank, 4)
                vllm.load(model, mine)
                mine.assert_holds_what_it_cuts_of(tensors)
            if stage == "first":
                wait_until_filled(caplog)
        assert said(caplog, "of 4: ") == nodes.count(node)
        found += [entry.ranks for entry in relayout.Cache(tmp_path / f"node-{node}").entries()]
    assert found == kept


@pytest.mark.parametrize("is_converted", [False, True])
def test_weights_in_a_store_are_named_by_an_option(
    folders: Path,
    cache: Path,
    tmp_path: Path,
    vllm: Engine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    is_converted: bool,
) -> None:
    """The engine's model is a folder without weights."""
    whole, model = folders / "llama", tmp_path / "configuration"
    model.mkdir()
    shutil.copy(whole / "config.json", model)
    if is_converted:
        relayout.convert(whole, tmp_path / "out", tp=2)
    with ground("toy", tmp_path, monkeypatch) as location:
        for file in (tmp_path / "out" if is_converted else whole).iterdir():
            location.kind.write(location.store("weights"), file.name, file.read_bytes())
        tensors = reference_tensors(whole)
        for rank in range(2):
            mine = Model(tensors, rank, 2)
            vllm.load(model, mine, source=location.url("weights"))
            mine.assert_holds_what_it_cuts_of(tensors)
    assert said(caplog, "relayout: converting") == (0 if is_converted else 1)
    for source in (str(whole), "hf://org/model"):
        with pytest.raises(PlanError, match=r"source is '.*', expected a URL such as s3://BUCKET/PREFIX"):
            EngineOptions.parse({"source": source}, "options")


@pytest.mark.parametrize(("tp", "ranks", "kept"), [(2, (1,), "1"), (1, None, "")])
def test_what_is_in_a_store_is_kept_for_the_ranks_of_this_node(
    folders: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tp: int,
    ranks: tuple[int, ...] | None,
    kept: str,
) -> None:
    """Also for one rank alone, which would have to download it again."""
    with ground("toy", tmp_path, monkeypatch) as location:
        for file in (folders / "llama").iterdir():
            location.kind.write(location.store("weights"), file.name, file.read_bytes())
        wanted = ConversionRequest(location.url("weights"), tp, ranks=ranks)
        found = first_start(wanted, EngineOptions(), "vLLM loads it itself", logging.getLogger())
        assert isinstance(found, CachedConversion)
    assert [entry.ranks for entry in relayout.Cache(cache).entries()] == [kept]


def test_what_converts_behind_a_start_holds_the_right_to_fill_the_cache_too(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no second one begins where the engine was killed and this one has not ended yet."""
    copies: list[int] = []

    def started(*arguments: str, pass_fds: tuple[int, ...] = (), **streams: Any) -> Any:
        copies.extend(map(os.dup, pass_fds))
        raise OSError("no more processes")

    monkeypatch.setattr("relayout.engines.first_start.start_child", started)
    deferred = first_start(
        ConversionRequest(str(model), 2), EngineOptions(), "vLLM loads it itself", logging.getLogger()
    )
    assert isinstance(deferred, DeferredConversion)
    deferred.start()
    assert [Path(f"/proc/self/fd/{one}").readlink().is_relative_to(cache) for one in copies] == [True]
    list(map(os.close, copies))
