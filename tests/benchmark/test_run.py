"""`bench`: loaders load the same bytes, the page cache is in the state that is said, and the verdict is honest."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench import peers
from support.models import as_integers, expected_slice, read_tensors
from support.page_cache import drop, write_cold
from typer.testing import CliRunner

import relayout
from relayout.benchmark import machine, measure, run
from relayout.benchmark.commands import may_drop_caches
from relayout.benchmark.loaders import LOADERS, Loader, LoadJob
from relayout.benchmark.machine import direct_gb_per_s
from relayout.benchmark.measure import expected_digests, plan_bench
from relayout.benchmark.run import Folders, RankGroup, digest_of, digest_of_tensors
from relayout.benchmark.verdict import Measured, RankLoads, Timing, verdict, warnings_of
from relayout.checkpoint.converted import read_manifest, read_table
from relayout.cli import signals
from relayout.cli.app import app
from relayout.errors import PlanError
from relayout.storage.stores import find_store

REGISTRY = "relayout.benchmark.loaders"
PEERS = LOADERS | {name: peers.LOADERS[name] for name in ("load_file_pread", "threads", "map_populate")}
IN_PROCESS = [
    name for name, loader in PEERS.items() if loader.package not in ("fastsafetensors", "runai-model-streamer")
]


@pytest.fixture(scope="module")
def folders(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A plain folder, and its conversion beside it."""
    source = tmp_path_factory.mktemp("bench") / "llama"
    source.symlink_to(llama)
    relayout.convert(source, tp=4)
    return Folders(source, source.with_name("llama-tp4"), 4)


@pytest.mark.parametrize(("rank", "tp"), [(3, 4), (0, 1)])
@pytest.mark.parametrize("name", IN_PROCESS)
def test_a_loader_gives_the_slices_of_a_rank_in_memory_of_their_own(
    folders: Folders, llama: Path, name: str, rank: int, tp: int
) -> None:
    whole = read_tensors(llama)
    tensors = PEERS[name].load(LoadJob(REGISTRY, name, str(folders.source), str(folders.converted), tp, rank, 1, 2**30))
    assert tensors.keys() == whole.keys()
    for tensor_name, tensor in tensors.items():
        assert tensor.is_contiguous()
        expected = expected_slice(tensor_name, whole[tensor_name], rank, tp)
        np.testing.assert_array_equal(as_integers(tensor), expected, err_msg=tensor_name)


@pytest.mark.parametrize("name", ["get_slice", "load_file"])
def test_slices_of_several_ranges_are_joined_in_their_order(name: str, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    fused = torch.arange(24 * 8, dtype=torch.int16).reshape(24, 8)
    folder = tmp_path / "phi3"
    folder.mkdir()
    save_file({"model.layers.0.self_attn.qkv_proj.weight": fused}, folder / "model.safetensors")
    config = {"model_type": "phi3", "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 4}
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 64}))
    [tensor] = LOADERS[name].load(LoadJob(REGISTRY, name, str(folder), "", 2, 1, 1, 2**30)).values()
    # q, k and v of 8 rows each; of each the second half.
    rows = [*range(4, 8), *range(12, 16), *range(20, 24)]
    np.testing.assert_array_equal(tensor.numpy(), fused.numpy()[rows])


def test_the_digest_of_tensors_is_that_of_the_tables(folders: Folders) -> None:
    assert folders.converted is not None
    store = find_store(folders.converted)
    table = read_table(store, read_manifest(store), 2)
    tensors = relayout.load(folders.converted, 2)
    assert digest_of_tensors(tensors) == digest_of(zip(table.names, table.shapes, table.digests, strict=True))
    tensors["lm_head.weight"] = tensors["lm_head.weight"].clone()
    tensors["lm_head.weight"][0, 0] += 1
    assert digest_of_tensors(tensors) != digest_of(zip(table.names, table.shapes, table.digests, strict=True))


def test_ranks_are_loaded_cold_in_fresh_processes_and_bytes_are_compared(folders: Folders, tmp_path: Path) -> None:
    write_cold(tmp_path / "probe", 1 << 20)  # Skips where that cannot be had.
    two = relayout.convert(folders.source or "", tmp_path / "two", tp=2)
    planned = plan_bench(folders.source or "", tp=2, against=two.output, runs=1)
    assert {"relayout", "relayout_plain", "get_slice"} <= planned.loaders.keys()
    told: list[str] = []
    measured: list[RankLoads] = []
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
    assert [line.partition(", cold: ")[0] for line in told] == ["one rank of 2", "all 2 ranks at once"]


def test_files_are_made_cold_and_warm_and_that_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, other = tmp_path / "a", tmp_path / "b"
    write_cold(file, 1 << 20)
    write_cold(other, 1 << 20)
    machine.prepare([file], [file, other], cold=False, needed_nbytes=0)
    assert machine.resident_share([file]) == 1
    assert machine.resident_share([other]) == 0, "files that are not read were brought in"
    machine.prepare([other], [file, other], cold=True, needed_nbytes=0)
    assert machine.resident_share([file, other]) == 0
    monkeypatch.setattr(machine, "forget", lambda files: None)
    machine.remember([file])
    with pytest.raises(machine.NotPrepared, match=r"50\.0 % of the files are in the page cache after three attempts"):
        machine.prepare([file], [file, other], cold=True, needed_nbytes=0)
    monkeypatch.setattr(machine, "resident_nbytes", lambda fd, offset, nbytes: None)
    with pytest.raises(machine.NotPrepared, match="does not report"):
        machine.prepare([file], [file, other], cold=True, needed_nbytes=0)


def test_the_drive_is_read_directly_and_the_page_cache_stays_as_it_is(tmp_path: Path) -> None:
    write_cold(tmp_path / "file", 5 << 20)
    drop(tmp_path / "file")
    speed = direct_gb_per_s([tmp_path / "file"])
    assert speed is None or speed > 0
    if speed is not None:
        assert machine.resident_share([tmp_path / "file"]) == 0


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
    runs = tuple(Measured(seconds=one, **(values | more)) for one in seconds)
    return Timing(name, loader.title, loader.family, runs, None)


QUIET = machine.Machine(
    cpu="", num_cpus=2, memory_nbytes=0, kernel="", python="", file_system="", drive=None, load_average=0.1
)


def loads(ours: list[float], other: list[float], state: str = "cold", **more: Any) -> RankLoads:
    timings = timing("relayout", ours), timing("get_slice", other, **more)
    return RankLoads("one rank of 4", 1, state, timings, ("a",))


@pytest.mark.parametrize(
    ("measured", "drive", "said"),
    [
        (
            [loads([1.0, 1.1], [3.0, 3.3])],
            2.0,
            "Compared with safetensors get_slice, the only other loader measured, from a cold page cache relayout is"
            " 3.0x faster for one rank of 4.",
        ),
        (
            [loads([2.2, 3.1], [3.0, 3.3])],
            2.0,
            "No clear gain here: .* 1.2x faster for one rank of 4 .within the spread",
        ),
        ([loads([2.0, 2.1], [1.0, 1.1])], 9.0, "No clear gain here: .* is 2.0x slower"),
        ([loads([1.0, 1.0], [1.0, 1.0])], 1.1, "No clear gain here, as the other loader reaches the drive's limit too"),
        ([loads([1.0, 1.0], [1.0, 1.0], "warm")], 1.1, "No clear gain here, where nothing was read from the drive"),
        (
            [loads([0.009, 0.01], [0.003, 0.004])],
            2.0,
            "No verdict: loads took less than 0.05 s, too little to compare loaders. Measure a larger model",
        ),
        ([loads([0.009, 0.009], [0.08, 0.08])], 2.0, "No verdict: loads took less than 0.05 s"),
        ([loads([0.06, 0.07, 0.08], [0.3, 0.04, 0.3])], 2.0, "No verdict: loads took less than 0.05 s"),
        (
            [loads([0.009, 0.009], [0.003, 0.003], "warm"), loads([1.0, 1.0], [2.0, 2.0])],
            2.0,
            "Compared with .*, from a cold page cache relayout is 2.0x faster for one rank of 4; no ratio for one rank"
            " of 4, warm: a load took less than 0.05 s.$",
        ),
        (
            [loads([1.0, 1.0], [2.0, 2.0]), replace(loads([2.0, 2.0], [1.0, 1.0]), title="all 4 ranks at once")],
            2.0,
            "Faster in some cases and slower in others: compared with .* is 2.0x faster for one rank of 4 and 2.0x"
            " slower for all 4 ranks at once.$",
        ),
        ([loads([1.0], [3.0])], 2.0, "No verdict: one rank of 4, cold: one run shows no spread.$"),
        (
            [loads([1.0, 1.6], [3.0, 3.0])],
            2.0,
            "No verdict: one rank of 4, cold: runs of the same load differ too much.$",
        ),
        (
            [loads([1.0, 1.0], [3.0, 3.0], other_load=0.4)],
            2.0,
            "No verdict: one rank of 4, cold: other processes were busy.$",
        ),
        (
            [loads([1.0, 1.0], [3.0, 3.0], digests=("b",))],
            2.0,
            "No verdict: one rank of 4, cold: loaders loaded different bytes.$",
        ),
        ([replace(loads([1.0], []), timings=(timing("relayout", [1.0]),))], 2.0, "No other loader was measured"),
        ([], None, "Nothing could be measured"),
    ],
)
def test_the_verdict_is_one_honest_sentence(measured: list[RankLoads], drive: float | None, said: str) -> None:
    text = verdict(QUIET, measured, 4, drive, is_converted=True)
    assert re.match(said, text), text


def test_a_busy_machine_gets_no_verdict() -> None:
    text = verdict(replace(QUIET, load_average=8.0), [loads([1.0, 1.0], [3.0, 3.0])], 4, None, is_converted=True)
    assert text == "No verdict: other work was running before the first load. Repeat on a quiet machine."


def test_slicing_a_plain_folder_is_not_taken_for_a_gain_of_a_conversion() -> None:
    alone = RankLoads(
        "one rank of 4", 1, "cold", (timing("relayout_plain", [1.0] * 2), timing("get_slice", [3.0] * 2)), None
    )
    said = verdict(QUIET, [alone], 4, None, is_converted=False)
    assert "relayout, slicing the plain folder, is 3.0x faster" in said
    assert "after relayout convert --tp 4 measure again" in said


def test_where_the_system_has_no_call_for_it_pages_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"x" * 4096)
    for name in ("posix_fadvise", "fdatasync"):  # As on macOS.
        monkeypatch.delattr(os, name, raising=False)
    machine.forget([tmp_path / "file"])
    assert machine.resident_share([tmp_path / "file"]) in (1, None)


def test_a_busy_machine_and_runs_that_differ_are_warned_of(tmp_path: Path) -> None:
    about = replace(machine.describe(tmp_path), num_cpus=2, load_average=0.1)
    assert warnings_of(about, [loads([1.0, 1.1], [3.0])]) == ()
    [busy] = warnings_of(replace(about, load_average=8.0), [loads([1.0], [3.0])])
    assert "load average 8.0 on 2 processors" in busy
    assert "do not trust" in busy
    [others] = warnings_of(about, [loads([1.0], [3.0], other_load=0.4)])
    assert "other processes used up to 40 % of the processors" in others
    [spread] = warnings_of(about, [loads([1.0], [3.0, 9.0])])
    assert "differ by up to 3.0x (one rank of 4, cold, safetensors get_slice)" in spread


def test_other_bytes_are_told_with_their_loader() -> None:
    what = "one rank of 4, cold: safetensors get_slice loaded different bytes from"
    assert loads([1.0], [3.0], digests=("b",)).wrong() == [f"{what} the tables of the converted folder"]
    without = replace(loads([1.0], [3.0], digests=("b",)), expected=None)
    assert without.wrong() == [f"{what} relayout, converted"]


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


def test_memory_that_does_not_suffice_leaves_a_load_out(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    group = RankGroup(folders, {"relayout": LOADERS["relayout"]}, [0], "cold", None)
    assert group.too_large() is None
    monkeypatch.setattr(run, "available_nbytes", lambda: 10**8)
    assert "one rank of 4, cold: needs 0.4 GB of memory, 0.1 GB are available" in (group.too_large() or "")


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
    monkeypatch.setattr(measure, "direct_gb_per_s", lambda files: 2.0)
    monkeypatch.setattr(measure, "describe", lambda folder: QUIET)
    return allowed


def test_the_command_drops_no_cache_unasked_and_fits_80_columns(
    folders: Folders, not_measured: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(app, ["bench", str(folders.source)])
    assert done.exit_code == 0, done.output
    assert not_measured == [False]
    # One rank and all ranks, warm, by three loaders or more.
    loads = re.findall(r"(\d+) loads, each in fresh processes: ", done.stderr)[0]
    assert int(loads) % (2 * 3) == 0
    assert int(loads) >= 18
    assert f"\n{loads}/{loads} all 4 ranks at once, warm: " in done.stderr
    assert "not measured: cold loads: dropping the files" in done.stdout
    assert done.stdout.startswith("No clear gain here")
    allowed = CliRunner().invoke(app, ["bench", str(folders.source), "--yes", "--runs", "2"])
    assert not_measured == [False, True]
    assert "one rank of 4, cold" in allowed.stdout
    assert "drive: 2.00 GB/s" in allowed.stdout
    assert all(len(line) <= 80 for line in (done.stdout + allowed.stdout).splitlines())
    monkeypatch.setattr("relayout.benchmark.commands.may_drop_caches", lambda *about: pytest.fail("was asked"))
    assert CliRunner().invoke(app, ["bench", str(folders.source), "--no"]).exit_code == 0
    assert not_measured == [False, True, False]


@pytest.mark.parametrize("done", [1, 7])
def test_what_was_measured_before_a_signal_is_printed(
    folders: Folders, not_measured: list[bool], monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    load, left = RankGroup._load, [None] * done

    def stopped(group: RankGroup, name: str) -> Measured:
        if not left:
            raise signals.Signalled(signal.SIGTERM)
        left.pop()
        return load(group, name)

    monkeypatch.setattr(RankGroup, "_load", stopped)
    ended = CliRunner().invoke(app, ["bench", str(folders.source), "--yes"])
    assert ended.exit_code == 128 + signal.SIGTERM
    assert f"not measured: stopped after {done} of " in ended.stdout
    assert "one rank of 4, cold" in ended.stdout
    assert "  relayout, converted" in ended.stdout


def test_without_a_number_of_runs_the_last_loads_are_left_out_when_time_is_over(
    folders: Folders, not_measured: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    load, now = RankGroup._load, [0.0]

    def slow(group: RankGroup, name: str) -> Measured:
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


def test_a_person_is_asked_before_caches_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def confirm(question: str, *, err: bool) -> bool:
        asked.append(question)
        assert err, "the question must not come into what is piped"
        return len(asked) > 1

    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert not may_drop_caches(3, 10**9)
    assert asked == []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("typer.confirm", confirm)
    assert not may_drop_caches(3, 10**9)
    assert may_drop_caches(3, 10**9)
    assert "3 files (1.0 GB) are dropped" in " ".join(asked[0].split())


def test_the_command_prints_one_json_object(folders: Folders, not_measured: list[bool]) -> None:
    done = CliRunner().invoke(app, ["bench", str(folders.source), "--yes", "--json"])
    found = json.loads(done.stdout)
    assert found["tp"] == 4
    assert [(one["title"], one["state"]) for one in found["loads"]] == [
        ("one rank of 4", "cold"),
        ("all 4 ranks at once", "cold"),
        ("one rank of 4", "warm"),
        ("all 4 ranks at once", "warm"),
    ]


def test_other_bytes_end_the_command_with_a_difference(
    folders: Folders, not_measured: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankLoads, "wrong", lambda one: ["rank 1 differs"])
    done = CliRunner().invoke(app, ["bench", str(folders.source)])
    assert done.exit_code == 1
    assert "WRONG BYTES: rank 1 differs" in done.stdout
    quiet = CliRunner().invoke(app, ["bench", str(folders.source), "-q"])
    assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (1, "", "")


def test_a_loader_that_is_not_installed_is_named_with_what_installs_it() -> None:
    absent = Loader(lambda job: {}, "x", "x", "a-package", ("no_such_module_of_any_kind",))
    assert absent.absence() == "not installed (pip install a-package)"
    assert replace(absent, modules=(), needs=lambda: False).absence() == "not in the installed version"
