"""A cache removes entries of its own, and nothing else; what its processes reserve is never more than its limit."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.patience import PATIENCE

from relayout.errors import PlanError
from relayout.storage.cache_folder import Cache

OWN = "relayout-cache-v1"
OLD, NEW, OTHER = "a" * 32, "b" * 32, "c" * 32

RANK = """
import sys
from relayout.storage.cache_folder import Cache
cache = Cache(sys.argv[1], 1000)
lease = cache.lease("a" * 32)
room = cache.reserve(lease, {f"rank-{sys.argv[2]}": 900})
print(room is not None, flush=True)
sys.stdin.read()
"""


def fill(cache: Cache, entry: str, nbytes: int) -> Path:
    """An entry that nobody uses."""
    with cache.lease(entry) as lease:
        (lease.folder / "sub").mkdir()
        (lease.folder / "sub" / "weights").write_bytes(bytes(nbytes))
        return lease.folder


def has_room(cache: Cache, nbytes: int) -> bool:
    with cache.lease(NEW) as lease:
        reservation = cache.reserve(lease, {"weights": nbytes})
        if reservation is not None:
            reservation.close()
        return reservation is not None


def content(folder: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }


def test_folders_beside_the_entries_are_neither_removed_nor_counted(tmp_path: Path) -> None:
    """A cache on a drive that has other things, all under names that might be entries."""
    for name in ("models/llama/weights", f"{OLD}/weights", ".gone-0123456789abcdef/weights"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"x" * 5000)
    before = content(tmp_path)
    cache = Cache(tmp_path, 2500)
    entry = fill(cache, OLD, 2000)
    assert has_room(cache, 2400)
    assert not entry.exists()
    assert not has_room(cache, 2600)
    shutil.rmtree(tmp_path / OWN)
    assert content(tmp_path) == before


CHANGES: dict[str, Callable[[Path, Path], object]] = {
    "without a lease": lambda entry, elsewhere: (entry / ".lease").unlink(),
    "of another name": lambda entry, elsewhere: entry.rename(entry.with_name("my-model")),
    "of a longer name": lambda entry, elsewhere: entry.rename(entry.with_name(OLD + "0")),
    "a link": lambda entry, elsewhere: entry.rename(elsewhere) and entry.symlink_to(elsewhere),
    "a link for a lease": lambda entry, elsewhere: (
        (entry / ".lease").rename(elsewhere) and (entry / ".lease").symlink_to("sub/weights")
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_no_entry_is_not_touched_also_below_our_tag(tmp_path: Path, change: str) -> None:
    cache = Cache(tmp_path / "cache", 2500)
    entry = fill(cache, OLD, 2000)
    CHANGES[change](entry, tmp_path / "elsewhere")
    before = content(tmp_path)
    assert has_room(cache, 2400)
    after = content(tmp_path)
    assert {name: after.get(name, "gone") for name in before} == before


def test_an_entry_of_another_user_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path, 2500)
    entry = fill(cache, OLD, 2000)
    true_lstat = Path.lstat

    def lstat(path: Path) -> os.stat_result:
        status = true_lstat(path)
        return os.stat_result((*status[:4], status.st_uid + 1, *status[5:])) if path == entry else status

    monkeypatch.setattr(Path, "lstat", lstat)
    assert has_room(cache, 2400)
    assert entry.exists()


@pytest.mark.parametrize("kind", ["a folder with files", "a foreign tag", "a link", "a file", "another user's"])
def test_a_subfolder_of_our_name_that_is_not_ours_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    own = tmp_path / OWN
    if kind == "a link":
        (tmp_path / "elsewhere").mkdir()
        own.symlink_to("elsewhere")
    elif kind == "a file":
        own.write_text("mine")
    else:
        (own / OLD).mkdir(parents=True)
        (own / OLD / ".lease").write_text("mine")
        if kind == "a foreign tag":
            (own / "CACHEDIR.TAG").write_text("Signature: 8a477f597d28d172789f06886806bc55\n# of cargo\n")
        if kind == "another user's":
            user = os.geteuid() + 1
            monkeypatch.setattr(os, "geteuid", lambda: user)
    before = content(tmp_path)
    with pytest.raises(PlanError, match=f"{OWN}: (is not a folder of this user|not created by relayout)"):
        Cache(tmp_path, 10).lease(NEW)
    assert content(tmp_path) == before


def test_backups_leave_the_entries_out_and_the_tag_is_written_once(tmp_path: Path) -> None:
    Cache(tmp_path).lease(OLD).close()
    tag = tmp_path / OWN / "CACHEDIR.TAG"
    assert tag.read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")
    written = tag.stat()
    Cache(tmp_path).lease(NEW).close()
    assert (tag.stat().st_ino, tag.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


def test_processes_that_start_at_once_keep_the_limit_together(tmp_path: Path) -> None:
    """And what one has reserved is free when it is killed."""
    command = [sys.executable, "-c", RANK, str(tmp_path)]

    def start(ranks: range) -> list[subprocess.Popen[str]]:
        pipe = subprocess.PIPE
        return [subprocess.Popen([*command, str(rank)], stdin=pipe, stdout=pipe, text=True) for rank in ranks]

    processes = start(range(4))
    answers = [process.stdout.readline() for process in processes]  # type: ignore[union-attr]
    assert sorted(answers) == ["False\n"] * 3 + ["True\n"]
    for process in processes:
        process.kill()
        process.communicate(timeout=PATIENCE)
    [last] = start(range(9, 10))
    assert last.communicate("", timeout=PATIENCE)[0] == "True\n"


def test_room_is_counted_once_for_a_file_and_until_it_is_there(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1000)
    lease = cache.lease(OLD)
    first = cache.reserve(lease, {"weights": 900})
    second = cache.reserve(lease, {"weights": 900})
    assert first is not None
    assert second is not None, "two ranks want one file"
    (lease.folder / ".weights.partial").write_bytes(bytes(900))
    assert cache.reserve(lease, {"other": 101}) is None
    (lease.folder / ".weights.partial").rename(lease.folder / "weights")
    assert cache.reserve(lease, {"other": 101}) is None
    for one in (first, second):
        one.close()
    assert cache.reserve(lease, {"other": 100}) is not None


def test_a_full_drive_has_no_room_whatever_the_limit_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path, "1TB")
    first, second = fill(cache, OLD, 1000), fill(cache, OTHER, 1000)
    os.utime(first / ".lease", (1, 1))
    left = {first: 1000, second: 1000}

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=3000 - sum(nbytes for entry, nbytes in left.items() if entry.exists()))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert has_room(cache, 2000)
    assert not first.exists(), "used first"
    assert second.exists()
    assert not has_room(cache, 3001)
    assert not second.exists()


def test_what_can_never_fit_removes_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 2500)
    entry = fill(cache, OLD, 2000)
    assert not has_room(cache, 2501)
    assert entry.exists()


def test_a_lease_on_an_entry_that_was_just_removed_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path)
    entry = tmp_path / OWN / OLD
    true_flock = fcntl.flock
    removed: list[Path] = []

    def flock(fd: int, operation: int) -> None:
        if not removed:
            removed.append(entry.rename(tmp_path / "removed"))
        true_flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with cache.lease(OLD) as lease:
        assert (lease.folder / ".lease").exists(), "of the new entry"
        assert removed
        monkeypatch.undo()
        assert not cache._remove(tmp_path / OWN, entry), "it is in use"
    assert cache._remove(tmp_path / OWN, entry)
