"""Conversions that a cache keeps: made once, by whoever loads, complete or not there at all."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import prestarted
from support.bits import flip
from support.loader_fixtures import assert_equal, whole_tensors
from support.patience import in_time

import relayout
from relayout.cache import conversions
from relayout.cache.folder import Cache, HeldEntry
from relayout.checkpoint.source import SourceCheckpoint, read_source
from relayout.conversion import planning
from relayout.errors import PlanError
from relayout.plans.plan import Plan
from relayout.plans.planner import plan_by, plan_for
from relayout.storage.local import descriptors
from relayout.storage.stores import find_input

TP = 4
NUM_KILLS = int(os.environ.get("RELAYOUT_KILLS", "2"))

INTERRUPTED = """
import os, random, signal, sys, threading, time
from pathlib import Path
import relayout
from relayout.cache import conversions
from support.patience import PATIENCE

conversions._MIN_PART_NBYTES = 50_000
model, cache, pids, how, seed = sys.argv[1:]
chance = random.Random(int(seed))
moments = [chance.uniform(0, 0.1) for _ in range(4)]

def forked(moment):
    time.sleep(moment)
    if not os.fork():
        Path(pids, str(os.getpid())).touch()
        time.sleep(600)
        os._exit(0)

loads = []
for rank in range(2):
    loads.append(os.fork())
    if not loads[-1]:
        for descriptor in (1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
        if how == "forked":
            threading.Thread(target=forked, args=(moments.pop(),), daemon=True).start()
        relayout.load(model, rank, tp=4, cache=cache)
        os._exit(0)
deadline = time.monotonic() + PATIENCE
while not list(Path(cache).glob("relayout-cache-v1/" + 32 * "[0-9a-f]")) and time.monotonic() < deadline:
    time.sleep(0.001)
for load in chance.sample(loads, len(loads)):
    time.sleep(moments.pop())
    os.kill(load, signal.SIGKILL if how in ("killed", "forked") else signal.SIGSTOP)
if how == "stopped":
    for load in loads:
        Path(pids, str(load)).touch()
    sys.exit()
if how == "held up":
    time.sleep(moments.pop())
    for load in loads:
        os.kill(load, signal.SIGCONT)
codes = [os.waitstatus_to_exitcode(os.waitpid(load, 0)[1]) for load in loads]
assert how != "held up" or codes == [0, 0], codes
"""
"""Interrupts two processes that convert together: `MODEL CACHE PIDS HOW SEED`. PIDS is a folder for those that stay."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversions, "_MIN_PART_NBYTES", 50_000)


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def entries_of(cache: Path) -> list[Path]:
    return sorted((cache / "relayout-cache-v1").glob("[0-9a-f]" * 32))


def expect(cache: Path, source: Path, *, num_entries: int = 1) -> None:
    """All entries are complete, and the newest is a conversion of the source; nothing is half made."""
    entries = [entry for entry in entries_of(cache) if (entry / ".about.json").exists()]
    assert len(entries) == num_entries
    for entry in entries:
        # A process that is killed while it asks for a lock may leave an empty file.
        left = [path.name for path in entry.iterdir() if path.name.startswith(".model")]
        assert not [name for name in left if not name.startswith(".model.relayout-lock")]
    newest = max(entries, key=lambda entry: (entry / "model" / "relayout.json").stat().st_mtime_ns)
    assert not relayout.verify(newest / "model", source=source).differences


@pytest.fixture
def by_itself(model: Path, tmp_path: Path) -> Path:
    """What an ordinary conversion makes."""
    relayout.convert(model, tmp_path / "out", tp=TP)
    return tmp_path / "out"


def test_the_first_load_leaves_what_the_second_reads(
    model: Path, by_itself: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(TP):
        found = relayout.load(model, rank, tp=TP, cache=cache)
        assert_equal(found, whole_tensors(by_itself, f"model-rank-{rank}-*"))
    expect(cache, model)
    monkeypatch.delattr(conversions, "convert_unit")
    assert_equal(dict(relayout.iter_load(model, 1, tp=TP, cache=cache)), whole_tensors(by_itself, "model-rank-1-*"))


@pytest.mark.parametrize("change", ["time", "bytes", "degree"])
def test_an_entryis_of_one_source_and_degree(model: Path, cache: Path, change: str) -> None:
    relayout.load(model, 0, tp=TP, cache=cache)
    shard = min(model.glob("*.safetensors"))
    if change == "time":
        os.utime(shard)
    elif change == "bytes":
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    tp = 2 if change == "degree" else TP
    expected = relayout.convert(model, cache.with_name("out"), tp=tp).output
    assert_equal(relayout.load(model, 1, tp=tp, cache=cache), whole_tensors(Path(expected), "model-rank-1-*"))
    expect(cache, model, num_entries=2)


@pytest.mark.parametrize("where", ["the same path", "another path"])
def test_fine_tunes_of_equal_names_lengths_and_times_have_entries_of_their_own(
    model: Path, cache: Path, where: str
) -> None:
    other = model if where == "the same path" else Path(shutil.copytree(model, model.with_name("other")))
    for folder in (model, other):
        for path in folder.iterdir():
            os.utime(path, (1, 1))
    relayout.load(model, 0, tp=TP, cache=cache)
    for shard in other.glob("*.safetensors"):
        flip(shard, -1)
        os.utime(shard, (1, 1))
    assert_equal(relayout.load(other, 0, tp=TP, cache=cache), relayout.load(other, 0, tp=TP, cache=""))
    expect(cache, other, num_entries=2)


def observed_by(observe: conversions.FindPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a function observe plans in the place of an engine."""
    monkeypatch.setattr(planning, "observer", lambda engine: (f"{engine} 1", observe))


def test_an_observed_plan_is_of_one_list_of_tensors_and_degree(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors of a checkpoint decide, not its config alone; and only a missing plan is observed."""
    config = model / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"unheard_of"'))
    seen = []

    def observe(checkpoint: SourceCheckpoint, num_ranks: int) -> Plan:
        seen.append(len(checkpoint.tensors))
        return plan_by(checkpoint, 1, None)

    observed_by(observe, monkeypatch)

    def plan_of(folder: Path, tp: int = 2) -> Plan:
        source = read_source(find_input(folder))
        return conversions.plan_in(Cache(cache), source, tp, expert_parallel=False, observe="vllm")

    other = Path(shutil.copytree(model, model.with_name("other")))
    save_file({"one.more": np.ones(2, np.float32)}, other / "model-of-one-more.safetensors")
    index = other / "model.safetensors.index.json"
    named = json.loads(index.read_text())
    named["weight_map"]["one.more"] = "model-of-one-more.safetensors"
    index.write_text(json.dumps(named))
    plans = [plan_of(folder) for folder in (model, other, model)]
    assert len(seen) == 2
    assert len(plans[1].cut_of) == len(plans[0].cut_of) + 1
    assert plans[0] == plans[2]
    plan_of(model, 4)
    assert len(seen) == 3


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1"])
def test_a_kept_plan_that_is_damaged_is_observed_again(
    model: Path, cache: Path, damage: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = model / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"unheard_of"'))
    seen = []

    def observe(checkpoint: SourceCheckpoint, num_ranks: int) -> Plan:
        seen.append(num_ranks)
        return plan_by(checkpoint, 1, None)

    observed_by(observe, monkeypatch)

    def plan() -> Plan:
        source = read_source(find_input(model))
        return conversions.plan_in(Cache(cache), source, 2, expert_parallel=False, observe="vllm")

    first = plan()
    [kept] = cache.rglob("plan.json")
    kept.write_bytes(damage)
    assert [plan(), plan()] == [first, first]
    assert len(seen) == 2


@pytest.mark.parametrize("lacks", ["a rule for a tensor", "rules for a quantized form"])
def test_what_the_built_in_rules_do_not_cut_is_observed(
    model: Path, cache: Path, lacks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((model / "config.json").read_text())
    if lacks == "a rule for a tensor":
        config["model_type"] = "gpt2"
    else:
        config["quantization_config"] = {"quant_method": "vptq"}
    (model / "config.json").write_text(json.dumps(config))
    source = read_source(find_input(model))
    observed = replace(plan_by(source, 1, None), name="vllm:engine")
    observed_by(lambda checkpoint, num_ranks: observed, monkeypatch)
    with pytest.raises(PlanError, match="no rule"):
        conversions.plan_in(Cache(cache), source, 2, expert_parallel=False, observe=None)
    found = conversions.plan_in(Cache(cache), source, 2, expert_parallel=False, observe="vllm")
    assert found.name == "vllm:engine"


def test_only_a_missing_plan_is_observed(llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def observe(checkpoint: SourceCheckpoint, num_ranks: int) -> Plan:
        raise AssertionError("a family that cannot be cut so is known")

    observed_by(observe, monkeypatch)
    with pytest.raises(PlanError) as caught:
        conversions.plan_in(Cache(cache), read_source(find_input(llama)), 7, expert_parallel=False, observe="vllm")
    assert caught.value.code != "no_plan"


def test_experts_that_each_rank_owns_whole_are_not_observed(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = model / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"unheard_of"'))

    def observe(checkpoint: SourceCheckpoint, num_ranks: int) -> Plan:
        raise AssertionError("it would see them cut")

    observed_by(observe, monkeypatch)
    with pytest.raises(PlanError) as caught:
        conversions.plan_in(Cache(cache), read_source(find_input(model)), 2, expert_parallel=True, observe="vllm")
    assert caught.value.code == "no_plan"


def test_those_that_load_at_once_convert_together(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every unit is converted once; every byte of the source is read once."""
    converted: Counter[int] = Counter()
    threads: set[int] = set()
    convert_unit = conversions.convert_unit

    def counted(planned: conversions.Conversion, unit: int, **options: int) -> None:
        time.sleep(0.05)
        record = convert_unit(planned, unit, **options)
        converted[unit] += record.read_nbytes > 0
        threads.add(threading.get_ident())

    monkeypatch.setattr(conversions, "convert_unit", counted)
    with ThreadPoolExecutor(TP) as pool:
        loads = [pool.submit(relayout.load, model, rank, tp=TP, cache=cache) for rank in range(TP)]
        for rank, load in enumerate(loads):
            assert_equal(load.result(), relayout.load(model, rank, tp=TP, cache=""))
    assert len(converted) > TP
    assert set(converted.values()) == {1}
    assert len(threads) > 1
    expect(cache, model)


@pytest.mark.parametrize("seed", range(NUM_KILLS))
@pytest.mark.parametrize("how", ["killed", "forked", "held up", "stopped"])
def test_processes_that_are_interrupted_leave_nothing_half_made_and_hold_nobody_up(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, seed: int
) -> None:
    """Killed; killed when they had forked; stopped for a while; stopped for ever."""
    monkeypatch.setattr(descriptors, "LIMIT_SECONDS", 1.0)
    (pids := tmp_path / "pids").mkdir()
    truth = relayout.load(model, 3, tp=TP, cache="")
    done = prestarted.run(model, cache, pids, how, seed, script=INTERRUPTED, imports=prestarted.LOADER)
    assert done.returncode == 0, done.stderr
    try:
        for entry in entries_of(cache):
            if (entry / "model" / "relayout.json").exists():
                assert not relayout.verify(entry / "model", source=model).differences
        assert_equal(in_time(lambda: relayout.load(model, 3, tp=TP, cache=cache)), truth)
        if how != "stopped":
            expect(cache, model)
    finally:
        for pid in pids.iterdir():
            with suppress(ProcessLookupError):
                os.kill(int(pid.name), signal.SIGKILL)
    assert_equal(in_time(lambda: relayout.load(model, 3, tp=TP, cache=cache)), truth)
    expect(cache, model)


def of_one(entry: Path, pattern: str) -> Path:
    return min((entry / "model").glob(pattern))


RANK = "model-rank-2-part-*"
DAMAGES: dict[str, Callable[[Path], object]] = {
    "a weight file is gone": lambda entry: of_one(entry, RANK).unlink(),
    "a weight file is shorter": lambda entry: os.truncate(of_one(entry, RANK), 4096),
    "a weight file is longer": lambda entry: os.truncate(of_one(entry, RANK), 2**24),
    "a weight file is empty": lambda entry: os.truncate(of_one(entry, RANK), 0),
    "a weight file is another": lambda entry: shutil.copy(of_one(entry, "model-rank-1-*"), of_one(entry, RANK)),
    "a weight file is a link": lambda entry: (path := of_one(entry, RANK)).unlink() or path.symlink_to("/dev/zero"),
    "a weight file is a FIFO": lambda entry: (path := of_one(entry, RANK)).unlink() or os.mkfifo(path),
    "a weight file is a folder": lambda entry: (path := of_one(entry, RANK)).unlink() or path.mkdir(),
    "a table is damaged": lambda entry: flip(of_one(entry, "relayout.rank-2*"), 50),
    "the record is damaged": lambda entry: flip(of_one(entry, "relayout.source*"), 50),
    "the record is gone": lambda entry: of_one(entry, "relayout.source*").unlink(),
    "the chunks are shorter": lambda entry: os.truncate(of_one(entry, "relayout.chunks"), 16),
    "the manifest is damaged": lambda entry: flip(of_one(entry, "relayout.json"), 50),
    "the manifest is gone": lambda entry: of_one(entry, "relayout.json").unlink(),
    "all is gone": lambda entry: [path.unlink() for path in (entry / "model").iterdir()],
    "its folder is a file": lambda entry: shutil.rmtree(entry / "model") or (entry / "model").touch(),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_entrythat_is_damaged_is_made_again(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """By loads of any rank, and by a start that only looks whether it is there."""
    truth = relayout.load(model, 0, tp=TP, cache="")
    relayout.load(model, 0, tp=TP, cache=cache)
    source = relayout.storage.stores.find_input(model)
    for mends in (True, False):
        [entry] = entries_of(cache)
        DAMAGES[damage](entry)
        caplog.clear()
        if mends:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert_equal(relayout.load(model, 0, tp=TP, cache=cache), truth)
            expect(cache, model)
        else:
            assert conversions.find_conversion(source, TP, Cache(cache)) is None
            assert not list(entry.rglob("*.safetensors"))
        [said] = caplog.messages
        assert "rebuilt in the cache" in said


def test_an_entry_in_use_stays_though_it_is_damaged_and_the_source_is_read(model: Path, cache: Path) -> None:
    source = relayout.storage.stores.find_input(model)
    truth = relayout.load(model, 0, tp=TP, cache="")
    with conversions.cached_conversion(source, TP, Cache(cache)).entry:
        [entry] = entries_of(cache)
        of_one(entry, RANK).unlink()
        left = sorted(entry.rglob("*"))
        with pytest.warns(UserWarning, match="is missing, and another process uses it; `relayout cache remove"):
            assert_equal(relayout.load(model, 0, tp=TP, cache=cache), truth)
        assert sorted(entry.rglob("*")) == left
    assert_equal(relayout.load(model, 0, tp=TP, cache=cache), truth)
    expect(cache, model)


def test_what_a_load_has_found_damaged_is_made_again_at_once(model: Path, cache: Path) -> None:
    """A byte in the middle of the weights, which only `verify` sees."""
    truth = relayout.load(model, 2, tp=TP, cache=cache)
    [entry] = entries_of(cache)
    flip(of_one(entry, RANK), -1)
    with pytest.warns(UserWarning, match=r"digest.*`relayout cache list` lists them\): loading again"):
        assert_equal(relayout.load(model, 2, tp=TP, cache=cache, verify=True), truth)
    expect(cache, model)


STOPPED = """
import os, signal, sys, time
import relayout
from relayout.cache import conversions

model, cache, how = sys.argv[1:]
convert_unit, commit_units = conversions.convert_unit, conversions.commit_units

def stop(*_, **__):
    os.kill(os.getpid(), signal.SIGSTOP)

conversions._MIN_PART_NBYTES = 50_000
if how == "unit":
    conversions.convert_unit = stop
else:
    conversions.commit_units = stop
relayout.load(model, 0, tp=4, cache=cache)
"""


@pytest.mark.parametrize("how", ["unit", "publish"])
def test_a_stopped_process_stops_nobody(
    model: Path, cache: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(descriptors, "LIMIT_SECONDS", 1.0)
    monkeypatch.setattr(descriptors, "_QUIET_SECONDS", 0.1)
    monkeypatch.setattr(descriptors, "_LOOK_SECONDS", 0.1)
    truth = relayout.load(model, 1, tp=TP, cache="")
    with subprocess.Popen([sys.executable, "-c", STOPPED, model, cache, how]) as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        doing = "converting unit 0" if how == "unit" else "publishing the conversion"
        holder = f"process {process.pid}, {doing} since "
        try:
            with pytest.warns(UserWarning, match=f"waited [0-9]+ s for {holder}.*, which does not go on"):
                assert_equal(relayout.load(model, 1, tp=TP, cache=cache), truth)
        finally:
            process.kill()
        assert [holder in message for message in caplog.messages] == [True]
    assert_equal(relayout.load(model, 1, tp=TP, cache=cache), truth)
    expect(cache, model)


@pytest.fixture
def planned(model: Path, cache: Path) -> tuple[conversions.Conversion, HeldEntry]:
    return conversions._entry(relayout.storage.stores.find_input(model), TP, Cache(cache), plan_for, None)


def never(*_: object, **__: object) -> None:
    raise AssertionError


def test_nobody_publishes_before_all_units_are_converted(
    planned: tuple[conversions.Conversion, HeldEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here another process holds the last unit, and is killed just after this one has found that out."""
    plan, held = planned
    left = set(range(len(plan.layout.units)))
    while len(left) > 1:
        assert conversions._step(plan, held, left)
    monkeypatch.setattr(conversions, "commit_units", never)
    with held.try_lock(f"unit-{min(left)}"):
        assert not conversions._step(plan, held, left)
    monkeypatch.undo()
    assert conversions._step(plan, held, left)
    assert conversions._step(plan, held, left)
    assert (held.folder / "model" / "relayout.json").exists()


def test_nobody_converts_what_is_published(
    planned: tuple[conversions.Conversion, HeldEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here another process publishes just before this one takes a unit."""
    plan, held = planned
    left = set(range(len(plan.layout.units)))
    others = set(left)
    while not conversions._is_published(plan):
        conversions._step(plan, held, others)
    for name in ("convert_unit", "commit_units"):
        monkeypatch.setattr(conversions, name, never)
    assert not conversions._step(plan, held, left)
    assert not conversions._step(plan, held, set())


def test_a_cache_without_room_is_said_and_the_source_is_read(model: Path, cache: Path) -> None:
    with pytest.warns(UserWarning, match="is not kept in the cache .*the cache has no room for [0-9.]+ GB"):
        found = relayout.load(model, 0, tp=TP, cache=Cache(cache, 1000))
    assert_equal(found, relayout.load(model, 0, tp=TP, cache=""))
    assert not list(cache.rglob("*.safetensors"))


def test_an_entry_in_use_stays_and_the_least_used_goes(model: Path, llama: Path, cache: Path, tmp_path: Path) -> None:
    limited = Cache(cache, int(1.5 * sum(file.stat().st_size for file in model.iterdir())) + 2**20)
    relayout.load(model, 0, tp=TP, cache=limited)
    held = conversions.cached_conversion(relayout.storage.stores.find_input(model), TP, limited)
    other = shutil.copytree(llama, tmp_path / "other")
    os.utime(min(other.glob("*.safetensors")))
    with pytest.warns(UserWarning, match="no room"):
        relayout.load(other, 0, tp=TP, cache=limited)
    expect(cache, model)
    del held
    relayout.load(other, 0, tp=TP, cache=limited)
    assert [entry for entry in entries_of(cache) if (entry / "model").exists()]
    assert_equal(relayout.load(other, 2, tp=TP, cache=limited), relayout.load(other, 2, tp=TP, cache=""))


def test_a_folder_of_somebody_else_is_not_touched(model: Path, cache: Path) -> None:
    own = cache / "relayout-cache-v1"
    own.mkdir(parents=True)
    (own / "thesis.tex").write_text("theirs")
    with pytest.warns(UserWarning, match="is not kept in the cache .*: not created by relayout"):
        found = relayout.load(model, 0, tp=TP, cache=cache)
    assert_equal(found, relayout.load(model, 0, tp=TP, cache=""))
    assert [path.name for path in own.iterdir()] == ["thesis.tex"]


def test_a_model_without_a_plan_is_an_error_as_without_a_cache(model: Path, cache: Path) -> None:
    config = model / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"unheard_of"'))
    with pytest.warns(UserWarning, match="is not kept"), pytest.raises(PlanError, match="unheard_of"):
        relayout.load(model, 0, tp=TP, cache=cache)


def test_one_rank_of_a_local_checkpoint_is_read_where_it_is(model: Path, cache: Path) -> None:
    assert_equal(relayout.load(model, 0, tp=1, cache=cache), whole_tensors(model))
    assert not cache.exists()


def test_a_node_keeps_only_its_own_ranks(model: Path, by_itself: Path, tmp_path: Path) -> None:
    """Two nodes with a drive each; the processes of one convert together."""
    for node, ranks in enumerate([(0, 1), (2, 3)]):
        cache = tmp_path / f"node-{node}"
        source = relayout.storage.stores.find_input(model)
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(conversions.cached_conversion, source, TP, Cache(cache), ranks=ranks) for _ in ranks]
            [folder] = {call.result().folder for call in calls}
        for rank in ranks:
            assert_equal(relayout.load(folder, rank, verify=True), whole_tensors(by_itself, f"model-rank-{rank}-*"))
        with pytest.raises(PlanError, match=f"of 4 ranks it has only {ranks[0]}-{ranks[1]}, and lacks {ranks[0] ^ 2}"):
            relayout.load(folder, ranks[0] ^ 2)
        names = {path.name.split("-part-")[0] for path in folder.glob("*.safetensors")}
        assert names == {f"model-rank-{rank}" for rank in ranks}
        expect(cache, model)
        [entry] = Cache(cache).entries()
        assert (entry.num_ranks, entry.ranks) == (TP, f"{ranks[0]}-{ranks[1]}")
    relayout.load(model, 0, tp=TP, cache=cache)  # All ranks are another entry.
    assert {entry.ranks for entry in Cache(cache).entries()} == {"", "2-3"}
