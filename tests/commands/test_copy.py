"""`copy` and `files`: what some ranks need, between folders and stores; proven, resumed, all or nothing."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import prestarted, s3_server, toy_store
from support.bits import flip
from support.faults import environment
from support.holes import never_write
from support.models import as_integers, expected_slice, llama_files, read_tensors
from support.mounts import mounted_tmpfs, mounted_xfs
from support.profile import IS_LONG
from support.trees import content
from typer.testing import CliRunner

import relayout
from relayout.checkpoint.converted import read_manifest
from relayout.cli.app import app
from relayout.commands.copy import differences_from_copy
from relayout.errors import FormatError, PlanError
from relayout.loader.diagnose import diagnose
from relayout.storage.cloud import connect, part_copies
from relayout.storage.cloud.store import CLOUD_COST
from relayout.storage.stores import find_input

TP = 4
PARTIAL = ".out.relayout-partial"
Files = dict[str, bytes]


def hidden(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir() if path.name.startswith("."))


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 13 MB, and a side file in a folder; beside it what becomes of it, in two parts."""
    place = tmp_path_factory.mktemp("copied")
    (place / "model" / "sub").mkdir(parents=True)
    files = llama_files(512, head_dim=64, mlp=768, layers=3, vocabulary=1024)
    for name, blob in (files | {"sub/notes.txt": "Grüße".encode()}).items():
        (place / "model" / name).write_bytes(blob)
    for layout in ("ranks", "whole"):
        relayout.convert(place / "model", place / layout, tp=TP, layout=layout, max_part_nbytes=2 * 10**6)
    assert (place / "ranks" / "model-rank-3-part-1.safetensors").exists()
    return place


def staged_in(place: Path) -> Path:
    """The folder in which an output in `place` is assembled."""
    [staged] = (place / PARTIAL).glob("work-*/output")
    return staged


OWN = {"relayout.json", "relayout.chunks", "relayout.digests"}
"""The files of a copy of some ranks that say which these are."""


def expected(source: Path, ranks: str) -> Files:
    """What a copy of some ranks has of the folder, but for what says which ranks these are."""
    everything = content(source / "ranks")
    others = [f"rank-{rank}" for rank in range(TP) if str(rank) not in ranks]
    return {name: blob for name, blob in everything.items() if not any(o in name for o in others) and name not in OWN}


def assert_copied(source: Path, out: Path, ranks: str = "12") -> None:
    """A folder of these ranks, complete and proven."""
    found = content(out)
    assert {name: found[name] for name in found.keys() - OWN} == expected(source, ranks)
    report = relayout.verify(out, source=source / "model")
    assert not report.differences
    assert report.compared_with_source
    assert report.ranks == tuple(map(int, ranks))


# What a copy is.


def test_each_rank_loads_its_slices_of_the_source(llama: Path, tmp_path: Path) -> None:
    relayout.convert(llama, tmp_path / "all", tp=TP)
    done = relayout.copy(tmp_path / "all", tmp_path / "out", ranks="1,3")
    assert (done.ranks, done.num_ranks, done.num_files) == ((1, 3), TP, 2)
    whole = read_tensors(llama)
    for rank in done.ranks:
        found = relayout.load(tmp_path / "out", rank, verify=True)
        assert found.keys() == whole.keys()
        for name, tensor in whole.items():
            assert np.array_equal(as_integers(found[name]), expected_slice(name, tensor, rank, TP)), name
    with pytest.raises(PlanError, match=r"out: of 4 ranks it has only 1,3, and lacks 2: `relayout copy FROM TO --ran"):
        relayout.load(tmp_path / "out", 2)


def test_the_files_are_the_same_and_the_manifest_says_which_ranks(source: Path, tmp_path: Path) -> None:
    relayout.copy(source / "ranks", tmp_path / "out", ranks=range(1, 3))
    assert_copied(source, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "relayout.json").read_text())
    assert [entry is not None for entry in manifest["ranks"]] == [False, True, True, False]
    whole = json.loads((source / "ranks" / "relayout.json").read_text())
    assert manifest["conversion"] == whole["conversion"]
    named = {file["name"]: file for file in whole["files"]}
    assert manifest["files"] == [named[file["name"]] for file in manifest["files"]]
    assert hidden(tmp_path) == []


def test_a_copy_of_all_ranks_is_the_same_folder(source: Path, tmp_path: Path) -> None:
    for layout in ("ranks", "whole"):
        relayout.copy(source / layout, tmp_path / layout)
        assert content(tmp_path / layout) == content(source / layout)


def test_a_copy_of_a_copy_has_fewer_ranks(source: Path, tmp_path: Path) -> None:
    relayout.copy(source / "ranks", tmp_path / "three", ranks="0-2")
    relayout.copy(tmp_path / "three", tmp_path / "out", ranks="1-2")
    assert_copied(source, tmp_path / "out")
    with pytest.raises(PlanError, match=r"three: of 4 ranks it has only 0-2, and lacks 3"):
        relayout.copy(tmp_path / "three", tmp_path / "other", ranks="2-3")
    relayout.copy(source / "ranks", tmp_path / "directly", ranks="1-2")
    assert content(tmp_path / "directly") == content(tmp_path / "out")


@pytest.mark.parametrize("ranks", ["", "4", "-1", "2-1", "0-99999999999", "x", [], [-1], [True], range(5)])
def test_ranks_that_do_not_exist_are_refused(source: Path, tmp_path: Path, ranks: Any) -> None:
    with pytest.raises(PlanError, match="ranks: "):
        relayout.copy(source / "ranks", tmp_path / "out", ranks=ranks)
    with pytest.raises(PlanError, match="ranks: "):
        relayout.files(source / "ranks", ranks=ranks)
    assert list(tmp_path.iterdir()) == []


def test_whole_tensors_come_along_and_give_everything(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    relayout.copy(source / "whole", out, ranks="0")
    assert {path.name.split("-part-")[0] for path in out.glob("*.slices")} == {"relayout-rank-0"}
    whole = read_tensors(source / "model")
    found = {}
    for file in json.loads((out / "model.safetensors.index.json").read_text())["weight_map"].values():
        found |= read_tensors(out, file)
    assert found.keys() == whole.keys()
    assert all(np.array_equal(found[name], whole[name]) for name in whole)
    assert not relayout.verify(out, source=source / "model").differences
    assert relayout.restore(out, tmp_path / "back").num_tensors == len(whole)
    assert content(tmp_path / "back") == content(source / "model")
    with relayout.safe_open(out) as view:
        assert all(np.array_equal(as_integers(view.get_tensor(name)), whole[name]) for name in whole)
    for rank in range(2):  # Of which the folder has no slices.
        loaded = relayout.load(out, rank, tp=2)
        for name, tensor in whole.items():
            mine = expected_slice(name, tensor, rank, 2, kv_heads=4)
            assert np.array_equal(as_integers(loaded[name]), mine), name
    with pytest.raises(PlanError, match="of 4 ranks it has only 0, and lacks 1"):
        relayout.load(out, 1)


def test_what_needs_all_ranks_says_which_are_missing(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    relayout.copy(source / "ranks", out, ranks="0,2-3")
    lacks = "out: of 4 ranks it has only 0,2-3, and lacks 1"
    for call in (
        lambda: relayout.restore(out, tmp_path / "back"),
        lambda: relayout.safe_open(out),
        lambda: relayout.report(out, tmp_path / "page.html"),
        lambda: relayout.plan_bench(out),
        lambda: relayout.warm(out, rank=1),
        lambda: relayout.inspect(out, rank=1),
        lambda: dict(relayout.iter_load(out, 1)),
        lambda: relayout.explain(out, 1),
    ):
        with pytest.raises(PlanError, match=lacks) as raised:
            call()
        assert raised.value.code == "missing"
    with pytest.raises(PlanError, match=r"is in no rank's slice: of 4 ranks the folder has only 0,2-3"):
        relayout.load(out, 0, tp=2)
    assert len(relayout.load(out, 1, tp=2)) == len(read_tensors(source / "model"))
    assert [rank.rank for rank in relayout.inspect(out).ranks] == [0, 2, 3]
    assert [rank.rank for rank in diagnose(out).ranks] == [0, 2, 3]
    assert len(relayout.warm(out).files) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("layout", "ranks"), [("ranks", None), ("ranks", "3"), ("whole", [0, 3])])
def test_damage_of_other_ranks_is_not_looked_for(source: Path, tmp_path: Path, layout: str, ranks: Any) -> None:
    damaged = Path(shutil.copytree(source / layout, tmp_path / "damaged"))
    last = max(damaged.glob("*-rank-3-*"))
    flip(last, -1)
    assert relayout.verify(damaged, ranks="1-2", source=source / "model").ok
    assert {one.file for one in relayout.verify(damaged, ranks=ranks).differences} == {last.name}
    with pytest.raises(PlanError, match="ranks: "):
        relayout.verify(damaged, ranks="4")


def test_a_lost_file_of_a_rank_that_should_be_there_is_found(source: Path, tmp_path: Path) -> None:
    relayout.copy(source / "ranks", tmp_path / "out", ranks="1-2")
    (tmp_path / "out" / "model-rank-2-part-1.safetensors").unlink()
    assert "model-rank-2-part-1.safetensors" in {one.file for one in relayout.verify(tmp_path / "out").differences}


# Damage.


DAMAGE = {
    "model-rank-1-part-0.safetensors": [-1, 5000, 100],
    "relayout.rank-2.json.zst": [-1],
    "relayout.chunks": [0],
    "relayout.digests": [0, -1],
    "relayout.source.json.zst": [-1],
    "relayout.json": [50],
    "config.json": [3],
}


@pytest.mark.parametrize(("name", "place"), [(name, place) for name in DAMAGE for place in DAMAGE[name]])
def test_damage_is_found_and_nothing_is_published(source: Path, tmp_path: Path, name: str, place: int) -> None:
    damaged = Path(shutil.copytree(source / "ranks", tmp_path / "damaged"))
    flip(damaged / name, place)
    if place == 0:  # Of rank 0, of which nothing is copied; then of rank 1.
        relayout.copy(damaged, tmp_path / "out", ranks="1-2")
        assert_copied(source, tmp_path / "out")
        with pytest.raises(FormatError, match=rf"damaged/{name}: its part for (model-rank-0-part-0|relayout.rank-0)"):
            relayout.copy(damaged, tmp_path / "other", ranks="0")
        return
    with pytest.raises(FormatError, match=f"damaged/{name}"):
        relayout.copy(damaged, tmp_path / "out", ranks="1-2")
    assert not (tmp_path / "out").exists()
    if name == "config.json":  # The last that is read: all else is there.
        flip(damaged / name, place)
        assert relayout.copy(damaged, tmp_path / "out", ranks="1-2").resumed_nbytes > 2**20
        assert_copied(source, tmp_path / "out")
        assert hidden(tmp_path) == []


def test_files_that_an_attempt_left_are_copied_again_if_they_have_changed(source: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(source / "ranks", tmp_path / "damaged"))
    flip(damaged / "model-rank-2-part-1.safetensors", -1)
    with pytest.raises(FormatError, match="damaged") as raised:
        relayout.copy(damaged, tmp_path / "out", ranks="1-2", threads=1)
    assert any("finished work is kept in" in note for note in raised.value.__notes__)
    staged = staged_in(tmp_path)
    flip(staged / "model-rank-1-part-0.safetensors", -1)
    with (staged / "model-rank-1-part-1.safetensors").open("ab") as longer:
        longer.write(b"x")
    done = relayout.copy(source / "ranks", tmp_path / "out", ranks="1-2")
    assert 0 < done.resumed_nbytes < (source / "ranks" / "model-rank-2-part-0.safetensors").stat().st_size
    assert_copied(source, tmp_path / "out")


# What stands in the way.


def test_a_strangers_folder_is_not_replaced(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "theirs").write_text("x")
    for force in (False, True):
        with pytest.raises(PlanError, match=r"is not empty: holds 'theirs', and no relayout\.json"):
            relayout.copy(source / "ranks", out, ranks="0", force=force)
    (out / "theirs").unlink()
    relayout.copy(source / "ranks", out, ranks="0")
    with pytest.raises(
        PlanError,
        match=r"holds a complete conversion of model type llama, [\d,]+ bytes, at TP 4 \(ranks 0\); it .* --force",
    ):
        relayout.copy(source / "ranks", out, ranks="1-2")
    (out / "theirs").write_text("x")
    with pytest.raises(PlanError, match=r"holds files that relayout did not write, so --force does not .*'theirs'"):
        relayout.copy(source / "ranks", out, ranks="1-2", force=True)
    (out / "theirs").unlink()
    relayout.copy(source / "ranks", out, ranks="1-2", force=True)
    assert_copied(source, out)
    assert hidden(tmp_path) == []


def note_of(error: BaseException) -> str:
    [note] = error.__notes__
    return note


def test_what_was_copied_is_resumed_once_what_the_error_names_is_done(source: Path, tmp_path: Path) -> None:
    """Of a damaged source, the same command alone would fail in the same way again."""
    kept = f"finished work is kept in {tmp_path / PARTIAL}; "
    damaged = Path(shutil.copytree(source / "ranks", tmp_path / "damaged"))
    flip(damaged / "model-rank-2-part-1.safetensors", -1)
    for _ in range(2):
        with pytest.raises(FormatError, match="damaged") as raised:
            relayout.copy(damaged, tmp_path / "out")
        assert (
            note_of(raised.value) == f"{kept}once that is repaired, the same command resumes it, or says why it cannot"
        )
    flip(damaged / "model-rank-2-part-1.safetensors", -1)
    theirs = tmp_path / "out" / "thesis.tex"

    def put_there(done: int, total: int) -> None:
        theirs.parent.mkdir(exist_ok=True)
        theirs.touch()

    with pytest.raises(OSError, match="not empty") as met:
        relayout.copy(damaged, tmp_path / "out", progress=put_there)
    assert note_of(met.value) == f"{kept}once nothing is in the way of the output, the same command resumes it"
    with pytest.raises(PlanError, match=r"is not empty: holds 'thesis\.tex'"):
        relayout.copy(damaged, tmp_path / "out")
    theirs.unlink()
    done = relayout.copy(damaged, tmp_path / "out")
    assert done.resumed_nbytes == done.nbytes - sum(
        file.data_start for file in read_manifest(find_input(damaged)).files
    )


def test_what_is_unfinished_is_called_so_whatever_is_to_be_done_with_it(source: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(source / "ranks", tmp_path / "damaged"))
    flip(damaged / "model-rank-2-part-1.safetensors", -1)
    with pytest.raises(FormatError):
        relayout.copy(damaged, tmp_path / "out")
    before = content(tmp_path / PARTIAL)
    calls: list[Callable[[Path], object]] = [
        lambda folder: relayout.copy(folder, tmp_path / "other"),
        lambda folder: relayout.convert(folder, tmp_path / "other", tp=2),
        lambda folder: relayout.load(folder, 0),
        lambda folder: relayout.load(folder, 0, tp=2),
        relayout.verify,
    ]
    for folder in (tmp_path / PARTIAL, staged_in(tmp_path)):
        says = rf"^{folder}: is unfinished: relayout was making {tmp_path / 'out'} there, or still is; .* delete"
        for call in calls:
            with pytest.raises(PlanError, match=says):
                call(folder)
    assert content(tmp_path / PARTIAL) == before
    assert not (tmp_path / "other").exists()


def test_attempts_at_something_else_are_not_mixed_or_discarded(source: Path, tmp_path: Path) -> None:
    """A copy, one of other ranks, and a conversion, to the same folder."""
    damaged = Path(shutil.copytree(source / "ranks", tmp_path / "damaged"))
    (damaged / "config.json").write_text("{}")
    with pytest.raises(FormatError, match=r"config\.json: differs"):
        relayout.copy(damaged, tmp_path / "out", ranks="1-2")
    says = (
        "relayout-partial: holds an interrupted attempt, with other options or of another source; --force discards it"
    )
    for attempt in (
        lambda **options: relayout.copy(source / "ranks", tmp_path / "out", ranks="1", **options),
        lambda **options: relayout.convert(source / "model", tmp_path / "out", tp=TP, **options),
    ):
        with pytest.raises(PlanError, match=says):
            attempt()
    with pytest.raises(PlanError, match=says):
        relayout.restore(source / "ranks", tmp_path / "out")
    relayout.copy(source / "ranks", tmp_path / "out", ranks="3", force=True)
    assert_copied(source, tmp_path / "out", "3")


def test_the_source_is_no_place_for_its_copy(source: Path) -> None:
    for out in (source / "ranks", source / "ranks" / "sub", source):
        with pytest.raises(PlanError):
            relayout.copy(source / "ranks", out, ranks="0", force=True)


# Kills and full drives.


def copying(source: Path, place: Path, shim: Path, faults: list[str], log: Path | None = None, threads: int = 4) -> Any:
    words = ["copy", "ranks", str(place / "out"), "--ranks", "1-2", "--threads", str(threads), "--memory", "8MiB"]
    return prestarted.run(*words, cwd=source, env=environment(shim, faults, log))


@pytest.fixture(scope="session")
def num_calls(source: Path, shim: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many calls an undisturbed copy makes that name a file of its source or output."""
    place = tmp_path_factory.mktemp("calls")
    assert copying(source, place, shim, [], place / "log").returncode == 0
    common = os.path.commonpath([source, place])
    return sum(common in line for line in (place / "log").read_text().splitlines())


NUM_KILLS = 60 if IS_LONG else 6


@pytest.mark.parametrize("number", range(NUM_KILLS))
def test_after_a_kill_the_same_command_goes_on(
    source: Path, shim: Path, tmp_path: Path, num_calls: int, number: int
) -> None:
    low, high = num_calls * number // NUM_KILLS, num_calls * (number + 1) // NUM_KILLS
    moment, how = random.Random(number).randrange(low, high) + 1, ("kill", "tear", "after")[number % 3]
    common = os.path.commonpath([source, tmp_path])
    done = copying(source, tmp_path, shim, [f"any|{common}/|{moment}|{how}"])
    assert done.returncode == -signal.SIGKILL
    if (tmp_path / "out").exists():
        assert_copied(source, tmp_path / "out")
        return
    again = relayout.copy(source / "ranks", tmp_path / "out", ranks="1-2")
    assert again.resumed_nbytes <= again.nbytes
    assert_copied(source, tmp_path / "out")
    assert hidden(tmp_path) == []


def test_a_kill_in_the_middle_of_a_file_keeps_the_files_before_it(source: Path, shim: Path, tmp_path: Path) -> None:
    place = "output/model-rank-2-part-0"
    assert copying(source, tmp_path, shim, [f"write|{place}|2|kill"], threads=1).returncode == -signal.SIGKILL
    done = relayout.copy(source / "ranks", tmp_path / "out", ranks="1-2")
    assert 2**20 <= done.resumed_nbytes < done.nbytes
    assert_copied(source, tmp_path / "out")


@pytest.mark.parametrize("fault", ["allocate|rank-2-part-1|1|enospc", "write|relayout.chunks|1|enospc"])
def test_a_drive_that_fills_is_told_and_the_copy_goes_on(source: Path, shim: Path, tmp_path: Path, fault: str) -> None:
    done = copying(source, tmp_path, shim, [fault])
    assert done.returncode == 3
    assert "No space left on device" in done.stderr
    assert f"finished work is kept in {tmp_path / PARTIAL}" in done.stderr
    assert not (tmp_path / "out").exists()
    assert relayout.copy(source / "ranks", tmp_path / "out", ranks="1-2").resumed_nbytes > 0
    assert_copied(source, tmp_path / "out")


def test_a_drive_without_room_is_told_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "small", "4m") as small:
        with pytest.raises(PlanError, match=r"out: needs [\d.]+ MB, [\d.]+ MB are free there"):
            relayout.copy(source / "ranks", small / "out", ranks="1-2")
        assert list(small.iterdir()) == []
        relayout.copy(source / "ranks", small / "out", ranks="1")
        assert_copied(source, small / "out", "1")


# Stores.


@pytest.fixture
def shelf() -> Iterator[toy_store.Shelf]:
    found = toy_store.shelf("copies")
    found.clear()
    yield found
    found.clear()


def test_from_a_store_only_what_the_ranks_need_is_fetched(source: Path, shelf: toy_store.Shelf, tmp_path: Path) -> None:
    relayout.copy(source / "ranks", "toy://copies/all")
    assert {name.removeprefix("all/"): shelf.objects[name][0] for name in shelf.names("all/")} == content(
        source / "ranks"
    )
    shelf.log.clear()
    relayout.copy("toy://copies/all", tmp_path / "out", ranks="1-2")
    assert_copied(source, tmp_path / "out")
    assert not [name for _, name, _ in shelf.log if "rank-0" in name or "rank-3" in name]


def test_a_store_that_fails_halfway_is_asked_only_for_the_rest(
    source: Path, shelf: toy_store.Shelf, tmp_path: Path
) -> None:
    relayout.copy(source / "ranks", "toy://copies/all")
    shelf.faults.append(
        toy_store.Fault(
            "read", "all/model-rank-2-part-1*", after=1, times=None, error=lambda: OSError(errno.EIO, "gone")
        )
    )
    with pytest.raises(OSError, match="gone") as raised:
        relayout.copy("toy://copies/all", tmp_path / "out", ranks="1-2")
    assert any("finished work is kept in" in note for note in raised.value.__notes__)
    shelf.faults.clear()
    shelf.log.clear()
    done = relayout.copy("toy://copies/all", tmp_path / "out", ranks="1-2")
    assert done.resumed_nbytes > 2**20
    assert shelf.read_nbytes < done.nbytes - done.resumed_nbytes + 2**20
    assert_copied(source, tmp_path / "out")


def test_an_upload_that_fails_shows_no_manifest_and_complete_files_are_kept(
    source: Path, shelf: toy_store.Shelf, tmp_path: Path
) -> None:
    shelf.faults.append(
        toy_store.Fault("write", "out/model-rank-2-part-1*", times=None, error=lambda: OSError(errno.EIO, "refused"))
    )
    with pytest.raises(OSError, match="refused"):
        relayout.copy(source / "ranks", "toy://copies/out", ranks="1-2", threads=1)
    assert "out/relayout.json" not in shelf.names("out/")
    shelf.faults.clear()
    done = relayout.copy(source / "ranks", "toy://copies/out", ranks="1-2", threads=1)
    assert 0 < done.resumed_nbytes < done.nbytes
    assert not shelf.names("out/.")
    for name in shelf.names("out/"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(shelf.objects[name][0])
    assert_copied(source, tmp_path / "out")


def test_an_object_that_changes_while_it_is_copied_is_an_error(
    source: Path, shelf: toy_store.Shelf, tmp_path: Path
) -> None:
    relayout.copy(source / "ranks", "toy://copies/all")
    name = "all/model-rank-1-part-0.safetensors"
    blob = bytes(len(shelf.objects[name][0]))
    shelf.faults.append(toy_store.Fault("read", name, after=1, act=lambda: shelf.write(name, blob)))
    with pytest.raises(FormatError, match=r"model-rank-1-part-0\.safetensors: (was replaced|bytes .* damaged)"):
        relayout.copy("toy://copies/all", tmp_path / "out", ranks="1-2")
    assert not (tmp_path / "out").exists()


# An older version, of which bytes are reused.


@pytest.fixture(scope="session")
def tuned(source: Path) -> Path:
    """The same model with other weights in its second layer, converted alike; nothing else differs."""
    place = source / "tuned"
    shutil.copytree(source / "model", place / "model")
    for path in (place / "model").glob("*.safetensors"):
        tensors = load_file(path)
        save_file({name: -t if ".1." in name else t for name, t in tensors.items()}, path, {"format": "pt"})
    relayout.convert(place / "model", place / "ranks", tp=TP, max_part_nbytes=2 * 10**6)
    return place


@pytest.fixture
def remote(tuned: Path, shelf: toy_store.Shelf) -> str:
    """The tuned model in a store, which counts what is read."""
    relayout.copy(tuned / "ranks", "toy://copies/new")
    shelf.log.clear()
    return "toy://copies/new"


def tuned_nbytes(tuned: Path) -> int:
    """Bytes of the tensors that changed, of all ranks together."""
    tensors = read_tensors(tuned / "model")
    return sum(tensor.nbytes * (1 if tensor.ndim > 1 else TP) for name, tensor in tensors.items() if ".1." in name)


def test_what_an_older_version_has_is_not_read_from_the_source(
    source: Path, tuned: Path, remote: str, shelf: toy_store.Shelf, tmp_path: Path
) -> None:
    old = Path(shutil.copytree(source / "ranks", tmp_path / "old"))
    done = relayout.copy(remote, tmp_path / "out", reuse=old)
    assert content(tmp_path / "out") == content(tuned / "ranks")
    assert content(old) == content(source / "ranks")
    data_nbytes = sum(file.nbytes for file in read_manifest(find_input(tuned / "ranks")).files)
    assert 0 <= data_nbytes - done.reused_nbytes - tuned_nbytes(tuned) < data_nbytes // 50
    assert shelf.read_nbytes < data_nbytes - done.reused_nbytes + 2**16
    assert hidden(tmp_path) == []


def test_the_output_that_is_replaced_is_reused_and_another_only_if_it_is_named(
    source: Path, tuned: Path, remote: str, shelf: toy_store.Shelf, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert relayout.copy(source / "ranks", out).reused_nbytes == 0
    done = json.loads(CliRunner().invoke(app, ["copy", remote, str(out), "--force", "--json", "--quiet"]).stdout)
    assert content(out) == content(tuned / "ranks")
    assert 0.5 * done["nbytes"] < done["reused_nbytes"] < done["nbytes"]
    shelf.log.clear()
    done = relayout.copy(remote, out, ranks="1-2", force=True)
    assert done.reused_nbytes == done.nbytes  # Of the same version, all.
    assert shelf.read_nbytes < done.nbytes // 100
    printed = CliRunner().invoke(app, ["copy", remote, str(tmp_path / "other"), "--reuse", str(tuned / "ranks")])
    assert "came from an older version" in " ".join(printed.stdout.split())
    assert content(tmp_path / "other") == content(tuned / "ranks")


def test_an_older_version_that_changes_meanwhile_gives_no_wrong_byte(
    source: Path, tuned: Path, remote: str, shelf: toy_store.Shelf, tmp_path: Path
) -> None:
    """Once its index is read: other weights of the same lengths, under each name in turn."""
    relayout.copy(source / "ranks", "toy://copies/old")
    for name in [name for name in shelf.names("old/") if name.endswith(".safetensors")]:
        blob = bytes(byte ^ 0xFF for byte in shelf.objects[name][0])
        shelf.faults.append(toy_store.Fault("read", name, after=1, act=partial(shelf.write, name, blob)))
    done = relayout.copy(remote, tmp_path / "out", reuse="toy://copies/old")
    assert content(tmp_path / "out") == content(tuned / "ranks")
    assert sum(fault.num_struck for fault in shelf.faults) == 2 * TP
    shelf.faults.clear()
    old = Path(shutil.copytree(source / "ranks", tmp_path / "old"))
    undisturbed = relayout.copy(remote, tmp_path / "other", reuse=old)
    assert done.reused_nbytes < undisturbed.reused_nbytes

    def write_over() -> None:
        for path in old.glob("*.safetensors"):
            with path.open("r+b") as stream:
                stream.write(bytes(byte ^ 0xFF for byte in (source / "ranks" / path.name).read_bytes()))

    in_place = toy_store.Fault("read", "new/model-rank-1-*", after=3, act=write_over)
    shelf.faults.append(in_place)
    done = relayout.copy(remote, tmp_path / "again", reuse=old, threads=2)
    assert content(tmp_path / "again") == content(tuned / "ranks")
    assert in_place.num_struck == 1
    assert 0 < done.reused_nbytes < undisturbed.reused_nbytes


def test_an_older_version_whose_index_lies_gives_no_wrong_byte(
    tuned: Path, remote: str, shelf: toy_store.Shelf, tmp_path: Path
) -> None:
    """Its index is that of the new version itself: all is promised, and each chunk has one wrong bit."""
    old = Path(shutil.copytree(tuned / "ranks", tmp_path / "old"))
    for path in old.glob("*.safetensors"):
        for offset in range(0, path.stat().st_size, 2**20):
            flip(path, min(offset + 12_345, path.stat().st_size - 1))
        flip(path, 600)
        flip(path, -1)
    done = relayout.copy(remote, tmp_path / "out", reuse=old)
    assert content(tmp_path / "out") == content(tuned / "ranks")
    assert done.reused_nbytes == 0
    assert shelf.read_nbytes > done.nbytes


def test_what_stands_in_the_place_of_an_older_file_is_not_taken(
    source: Path, tuned: Path, remote: str, tmp_path: Path
) -> None:
    old, theirs = Path(shutil.copytree(source / "ranks", tmp_path / "old")), tmp_path / "theirs"
    theirs.write_bytes((old / "model-rank-1-part-0.safetensors").read_bytes())
    for rank in range(TP):
        (old / f"model-rank-{rank}-part-0.safetensors").unlink()
    os.mkfifo(old / "model-rank-0-part-0.safetensors")
    (old / "model-rank-1-part-0.safetensors").symlink_to(theirs)
    (old / "model-rank-2-part-0.safetensors").mkdir()
    done = relayout.copy(remote, tmp_path / "out", reuse=old)
    assert content(tmp_path / "out") == content(tuned / "ranks")
    assert 0 < done.reused_nbytes < 0.5 * done.nbytes


def test_what_is_no_older_version_is_refused_before_anything_is_made(source: Path, remote: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    damaged = Path(shutil.copytree(source / "ranks", tmp_path / "damaged"))
    flip(damaged / "relayout.chunks", 0)
    for old, what in ((source / "model", "not a converted folder"), (tmp_path / "empty", "not a converted folder")):
        with pytest.raises(FormatError, match=what):
            relayout.copy(remote, tmp_path / "out", reuse=old)
    with pytest.raises(FormatError, match=r"relayout\.chunks: its part for"):
        relayout.copy(remote, tmp_path / "out", reuse=damaged)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "empty"]
    relayout.copy(remote, damaged, force=True)  # Nobody has named it: it is replaced.
    assert not relayout.verify(damaged).differences


def test_damage_of_the_source_is_found_where_its_bytes_are_needed(source: Path, tuned: Path, tmp_path: Path) -> None:
    """In a chunk of which an older version has a part, too; what that has whole is not read."""
    damaged = Path(shutil.copytree(tuned / "ranks", tmp_path / "damaged"))
    file = read_manifest(find_input(damaged)).files[0]
    before, after = (
        np.fromfile(folder / file.name, np.uint8)[file.data_start :] for folder in (source / "ranks", damaged)
    )
    changed = file.data_start + np.flatnonzero(before != after)
    flip(damaged / file.name, int(changed[len(changed) // 2]))
    with pytest.raises(FormatError, match=f"{file.name}: bytes .* damaged"):
        relayout.copy(damaged, tmp_path / "out", reuse=source / "ranks")
    assert not (tmp_path / "out").exists()
    flip(damaged / file.name, int(changed[len(changed) // 2]))
    flip(damaged / file.name, file.data_start)
    assert after[0] == before[0]
    relayout.copy(damaged, tmp_path / "out", reuse=source / "ranks")
    assert content(tmp_path / "out") == content(tuned / "ranks")


def space(folder: Path) -> int:
    """Bytes in use on a file system."""
    os.sync()
    status = os.statvfs(folder)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def test_on_a_file_system_with_reflinks_equal_chunks_take_no_space(source: Path, tuned: Path, tmp_path: Path) -> None:
    with mounted_xfs(tmp_path / "xfs") as place:
        old = Path(shutil.copytree(source / "ranks", place / "old"))
        before = space(place)
        done = relayout.copy(tuned / "ranks", place / "out", reuse=old)
        assert content(place / "out") == content(tuned / "ranks")
        assert 0.2 * done.nbytes < done.shared_nbytes <= done.reused_nbytes
        assert space(place) - before < done.nbytes - done.shared_nbytes + 2**20
        for path in old.glob("*.safetensors"):  # Written to later: the copy keeps its bytes.
            path.write_bytes(b"")
            with path.open("r+b") as stream:
                stream.write((~np.frombuffer((source / "ranks" / path.name).read_bytes(), np.uint8)).tobytes())
        assert content(place / "out") == content(tuned / "ranks")
        lying = Path(shutil.copytree(tuned / "ranks", place / "lying"))
        for path in lying.glob("*.safetensors"):
            for offset in range(0, path.stat().st_size, 2**20):
                flip(path, min(offset + 12_345, path.stat().st_size - 1))
        done = relayout.copy(tuned / "ranks", place / "again", reuse=lying)
        assert content(place / "again") == content(tuned / "ranks")
        assert done.shared_nbytes == 0


# An older version in the bucket, of which the server copies parts.


@pytest.fixture
def server(source: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3_server.Server]:
    """A server of S3 with the older version; parts are small, as the files are."""
    monkeypatch.setattr(part_copies, "_MIN_NBYTES", 2**17)
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.0)
    with s3_server.running() as server:
        for name, value in s3_server.environment(server).items():
            monkeypatch.setenv(name, value)
        for name, blob in content(source / "ranks").items():
            server.put("models", f"old/{name}", blob)
        yield server


def stored(server: s3_server.Server, prefix: str) -> Files:
    return {
        name.removeprefix(prefix): server.objects["models", name].content for name in server.names("models", prefix)
    }


def is_copied(request: s3_server.Request) -> bool:
    return "x-amz-copy-source" in request.headers


def test_what_the_bucket_has_is_copied_by_its_server_and_neither_read_nor_sent(
    source: Path, tuned: Path, server: s3_server.Server
) -> None:
    printed = CliRunner().invoke(
        app, ["copy", str(tuned / "ranks"), "s3://models/new", "--reuse", "s3://models/old", "--json", "--quiet"]
    )
    done = json.loads(printed.stdout)
    assert stored(server, "new/") == content(tuned / "ranks")
    assert stored(server, "old/") == content(source / "ranks")
    assert done["copied_nbytes"] == server.copied_nbytes > 0.4 * done["nbytes"]
    assert done["reused_nbytes"] == 0
    sent_nbytes = sum(len(one.body) for one in server.requests if one.method == "PUT")
    assert done["nbytes"] <= sent_nbytes + server.copied_nbytes < 1.02 * done["nbytes"]
    assert server.sent_nbytes < 0.02 * done["nbytes"]


def test_of_the_same_version_the_weights_are_not_sent(source: Path, server: s3_server.Server) -> None:
    done = relayout.copy(source / "ranks", "s3://models/again", reuse="s3://models/old")
    assert stored(server, "again/") == content(source / "ranks")
    assert done.copied_nbytes == done.nbytes
    assert sum(len(one.body) for one in server.requests if one.method == "PUT") < 0.02 * done.nbytes


def test_from_far_away_bytes_are_read_in_the_bucket_and_copied_there(
    tuned: Path, remote: str, shelf: toy_store.Shelf, server: s3_server.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toy_store.Shelf, "cost", CLOUD_COST)
    done = relayout.copy(remote, "s3://models/new", reuse="s3://models/old")
    assert stored(server, "new/") == content(tuned / "ranks")
    assert 0.4 * done.nbytes < done.copied_nbytes <= done.reused_nbytes
    assert shelf.read_nbytes < done.nbytes - done.reused_nbytes + 2**16


def test_the_version_that_is_replaced_in_a_bucket_is_copied_from_itself(tuned: Path, server: s3_server.Server) -> None:
    printed = CliRunner().invoke(app, ["copy", str(tuned / "ranks"), "s3://models/old", "--force"])
    assert printed.exit_code == 0, printed.stderr
    assert "was copied by the server from an older version" in " ".join(printed.stdout.split())
    assert stored(server, "old/") == content(tuned / "ranks")
    assert server.copied_nbytes > 0.4 * sum(map(len, content(tuned / "ranks").values()))


def test_an_older_version_in_a_bucket_that_changes_or_lies_gives_no_wrong_byte(
    tuned: Path, server: s3_server.Server
) -> None:
    """Once it is listed: other weights of the same lengths. And with the index of the new version itself."""

    def replace(request: s3_server.Request) -> s3_server.Answer | None:
        if is_copied(request):
            for name, blob in stored(server, "old/").items():
                if name.endswith(".safetensors"):
                    server.put("models", f"old/{name}", (~np.frombuffer(blob, np.uint8)).tobytes())
            server.interfere = lambda request: None
        return None

    for name, blob in content(tuned / "ranks").items():
        damaged = np.frombuffer(blob, np.uint8).copy()
        damaged[:: 2**16] ^= 1  # In each part.
        server.put("models", f"lies/{name}", damaged.tobytes() if name.endswith(".safetensors") else blob)
    server.interfere = replace
    for old in ("old", "lies"):
        done = relayout.copy(tuned / "ranks", f"s3://models/after-{old}", reuse=f"s3://models/{old}")
        assert stored(server, f"after-{old}/") == content(tuned / "ranks")
        assert done.copied_nbytes == 0
        assert any(map(is_copied, server.requests))
        server.requests.clear()


def test_after_a_failure_the_same_command_goes_on_and_an_upload_of_somebody_else_stays(
    tuned: Path, server: s3_server.Server
) -> None:
    server.uploads["theirs"] = "models", "new/model-rank-3-part-0.safetensors", {}

    def refuse(request: s3_server.Request) -> s3_server.Answer | None:
        is_last = "rank-3" in request.key and request.method in ("POST", "PUT") and "partNumber" not in request.query
        return s3_server.error(403, "AccessDenied") if is_last else None

    server.interfere = refuse
    with pytest.raises(OSError, match="access denied"):
        relayout.copy(tuned / "ranks", "s3://models/new", reuse="s3://models/old")
    assert "relayout.json" not in stored(server, "new/")
    server.interfere = lambda request: None
    done = relayout.copy(tuned / "ranks", "s3://models/new", reuse="s3://models/old")
    assert 0 < done.resumed_nbytes < done.nbytes
    assert 0 < done.copied_nbytes < done.nbytes
    assert stored(server, "new/") == content(tuned / "ranks")
    assert "theirs" in server.uploads


# Names for other tools.


def test_the_files_of_ranks_are_what_other_tools_copy(source: Path, tmp_path: Path) -> None:
    """The folder has the whole manifest then: its ranks load, and the others' files are missing."""
    (out := tmp_path / "out").mkdir()
    names = CliRunner().invoke(app, ["files", str(source / "ranks"), "--ranks", "1-2", "--null"]).stdout
    command = ["xargs", "-0", "cp", "--parents", "-t", str(out)]
    subprocess.run(command, input=names.encode(), cwd=source / "ranks", check=True)
    needed = relayout.files(source / "ranks", ranks="1-2")
    assert content(out) == {file.name: (source / "ranks" / file.name).read_bytes() for file in needed.files}
    assert needed.nbytes == sum(map(len, content(out).values()))
    assert content(out).keys() == {*expected(source, "12"), *OWN}
    for rank in (1, 2):
        found = relayout.load(out, rank, verify=True)
        assert all(found[name].equal(tensor) for name, tensor in relayout.load(source / "ranks", rank).items())
    with pytest.raises(
        FormatError, match=r"model-rank-0-part-0\.safetensors: is missing; of 4 ranks these are complete here: 1-2"
    ):
        relayout.load(out, 0)
    (found,) = relayout.verify(out).differences
    assert (found.file, found.what) == ("relayout.json", "lists ranks 0-3, but there is no file of 0,3")
    report = relayout.verify(out, ranks="1-2", source=source / "model")
    assert (report.differences, report.ranks, report.compared_with_source) == ([], (1, 2), True)
    relayout.copy(out, tmp_path / "again", ranks="1-2")  # It says so then.
    assert_copied(source, tmp_path / "again")


def test_a_name_is_no_option_of_another_tool(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source / "model", tmp_path / "model")
    for name in ("-s", "--remove-destination"):
        (tmp_path / "model" / name).write_text(name)
    relayout.convert(tmp_path / "model", tmp_path / "converted", tp=1, threads=1)
    names = CliRunner().invoke(app, ["files", str(tmp_path / "converted"), "--null"]).stdout
    (out := tmp_path / "out").mkdir()
    command = ["xargs", "-0", "cp", "--parents", "-t", str(out)]
    subprocess.run(command, input=names.encode(), cwd=tmp_path / "converted", check=True)
    assert content(out) == content(tmp_path / "converted")


def test_the_names_are_printed_in_three_forms(source: Path) -> None:
    def printed(*words: str) -> str:
        done = CliRunner().invoke(app, ["files", str(source / "ranks"), "--ranks", "0", *words])
        assert (done.exit_code, done.stderr) == (0, "")
        return done.stdout

    needed = relayout.files(source / "ranks", ranks="0")
    names = [file.name for file in needed.files]
    assert names[-1] == "relayout.json"
    assert printed("--json") == f"{json.dumps(needed.as_json())}\n"
    assert printed() == "".join(f"{name}\n" for name in names)
    assert printed("-0") == "".join(f"{name}\0" for name in names)
    sizes = {file.name: file.nbytes for file in needed.files}
    assert sizes == {name: (source / "ranks" / name).stat().st_size for name in names}


def test_a_plain_checkpoint_has_no_ranks_to_copy(source: Path, tmp_path: Path) -> None:
    calls: list[Callable[[], object]] = [
        lambda: relayout.copy(source / "model", tmp_path / "out", ranks="0"),
        lambda: relayout.files(source / "model", ranks="0"),
    ]
    for call in calls:
        with pytest.raises(FormatError, match=r"model: not a converted folder \(relayout\.json is missing\)"):
            call()


def test_a_copy_is_known_by_its_manifest_and_files(source: Path, tmp_path: Path) -> None:
    out, ranks = tmp_path / "out", "1-2"
    assert differences_from_copy(source / "ranks", out, ranks=ranks) is None
    relayout.copy(source / "ranks", out, ranks=ranks)
    assert differences_from_copy(source / "ranks", out, ranks=ranks) == []
    for file in [path for path in sorted(out.rglob("*")) if path.is_file()]:
        stored = file.read_bytes()
        for damage in (os.unlink, lambda path: os.truncate(path, path.stat().st_size // 2)):
            damage(file)
            assert differences_from_copy(source / "ranks", out, ranks=ranks) != [], file.name
            file.write_bytes(stored)
    assert differences_from_copy(source / "ranks", out, ranks=ranks) == []


def test_how_another_copy_differs_is_told_what_a_person_decides_first(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    relayout.copy(source / "ranks", out)
    others = sorted(path.name for rank in (0, 3) for path in out.glob(f"model-rank-{rank}-*"))
    first, *rest = differences_from_copy(source / "ranks", out, ranks="1-2") or []
    assert (first, sorted(rest)) == ("it has ranks 0-3, expected ranks 1-2", [f"it has {name}" for name in others])
    shutil.copytree(source / "model", tmp_path / "model")
    [shard, *_] = sorted((tmp_path / "model").glob("*.safetensors"))
    header_nbytes = int.from_bytes(shard.read_bytes()[:8], "little")
    flip(shard, 8 + header_nbytes)  # In a tensor that is cut by rows: of rank 0.
    relayout.convert(tmp_path / "model", tmp_path / "tuned", tp=TP, max_part_nbytes=2 * 10**6)
    [tuned] = differences_from_copy(tmp_path / "tuned", out) or []
    assert re.fullmatch(r"model-rank-0-part-\d\.safetensors has other tensors", tuned)
    relayout.convert(source / "model", tmp_path / "two", tp=2, max_part_nbytes=10**9)
    done = CliRunner().invoke(app, ["copy", str(tmp_path / "two"), str(out), "--if-missing"])
    assert done.exit_code == 2
    assert re.search(rf"error: {out}: is not what this command makes: TP is 4, expected 2, and \d+ more; ", done.stderr)
    with (out / "config.json").open("ab") as config:
        config.write(b"\n")
    assert differences_from_copy(source / "ranks", out) == [f"{out}/config.json: differs from the source's"]


def test_a_copy_whose_end_was_never_written_is_damaged_and_not_there(source: Path, tmp_path: Path) -> None:
    """As of a tool that reserved the length of the file, and was killed."""
    out = tmp_path / "out"
    relayout.copy(source / "ranks", out)
    file = out / "model-rank-3-part-1.safetensors"
    never_write(file, file.stat().st_size // 2)
    done = CliRunner().invoke(app, ["copy", str(source / "ranks"), str(out), "--if-missing"])
    assert done.exit_code == 2
    assert re.search(rf"a damaged conversion .*\({file}: bytes \d+ to \d+ were never written", done.stderr)


def test_what_a_killed_replacement_left_is_deleted_also_where_nothing_is_to_be_done(
    source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    relayout.copy(source / "ranks", out)
    child = os.fork()
    if not child:

        def killed(path: Any, *args: Any, **options: Any) -> None:
            if "model-rank" in os.fspath(path):
                os.kill(os.getpid(), signal.SIGKILL)
            unlink(path, *args, **options)

        unlink, os.unlink = os.unlink, killed
        with suppress(BaseException):
            relayout.copy(source / "ranks", out, force=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    theirs = tmp_path / ".theirs.relayout-partial"
    theirs.mkdir()
    assert list(tmp_path.glob(".out.*/**/*.safetensors")), "it has replaced the folder, and deletes the older one"
    done = CliRunner().invoke(app, ["copy", str(source / "ranks"), str(out), "--if-missing", "--force"])
    assert "already there" in " ".join(done.stdout.split())  # Lines are wrapped.
    assert set(tmp_path.iterdir()) == {out, theirs}
