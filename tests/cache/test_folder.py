"""A cache removes entries of its own, and nothing else; what its processes reserve is never more than its limit."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.patience import PATIENCE

from relayout.cache import folder
from relayout.cache.folder import Cache, HeldEntry
from relayout.commands.cache import cache as clear
from relayout.errors import FormatError, PlanError
from relayout.storage.local import descriptors
from relayout.storage.local.descriptors import FileLock, locked_file, open_ours

OWN = "relayout-cache-v1"
OLD, NEW, OTHER = "a" * 32, "b" * 32, "c" * 32

RANK = """
import sys
from relayout.cache.folder import Cache, HeldEntry
cache = Cache(sys.argv[1], 1000)
held = cache.hold("a" * 32)
room = cache.reserve(held, {f"rank-{sys.argv[2]}": 900})
print(room is not None, flush=True)
sys.stdin.read()
"""


def fill(cache: Cache, entry: str, nbytes: int) -> Path:
    """An entry that nobody uses."""
    with cache.hold(entry) as held:
        (held.folder / "sub").mkdir()
        (held.folder / "sub" / "weights").write_bytes(bytes(nbytes))
        return held.folder


def has_room(cache: Cache, nbytes: int) -> bool:
    with cache.hold(NEW) as held:
        reservation = cache.reserve(held, {"weights": nbytes})
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
    "without a lock": lambda entry, elsewhere: (entry / ".held").unlink(),
    "of another name": lambda entry, elsewhere: entry.rename(entry.with_name("my-model")),
    "of a longer name": lambda entry, elsewhere: entry.rename(entry.with_name(OLD + "0")),
    "a link": lambda entry, elsewhere: entry.rename(elsewhere) and entry.symlink_to(elsewhere),
    "a link for a lock": lambda entry, elsewhere: (
        (entry / ".held").rename(elsewhere) and (entry / ".held").symlink_to("sub/weights")
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_no_entryis_not_touched_also_below_our_tag(tmp_path: Path, change: str) -> None:
    cache = Cache(tmp_path / "cache", 2500)
    entry = fill(cache, OLD, 2000)
    CHANGES[change](entry, tmp_path / "elsewhere")
    before = content(tmp_path)
    assert has_room(cache, 2400)
    after = content(tmp_path)
    assert {name: after.get(name, "gone") for name in before} == before


def test_an_entryof_another_user_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        (own / OLD / ".held").write_text("mine")
        if kind == "a foreign tag":
            (own / "CACHEDIR.TAG").write_text("Signature: 8a477f597d28d172789f06886806bc55\n# of cargo\n")
        if kind == "another user's":
            user = os.geteuid() + 1
            monkeypatch.setattr(os, "geteuid", lambda: user)
    before = content(tmp_path)
    with pytest.raises(PlanError, match=f"{OWN}: (is not a folder of this user|not created by relayout)"):
        Cache(tmp_path, 10).hold(NEW)
    assert content(tmp_path) == before


def test_backups_leave_the_entries_out_and_the_tag_is_written_once(tmp_path: Path) -> None:
    Cache(tmp_path).hold(OLD).close()
    tag = tmp_path / OWN / "CACHEDIR.TAG"
    assert tag.read_bytes().startswith(b"Signature: 8a477f597d28d172789f06886806bc55")
    written = tag.stat()
    Cache(tmp_path).hold(NEW).close()
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
    held = cache.hold(OLD)
    first = cache.reserve(held, {"weights": 900})
    second = cache.reserve(held, {"weights": 900})
    assert first is not None
    assert second is not None, "two ranks want one file"
    (held.folder / ".weights.partial").write_bytes(bytes(900))
    assert cache.reserve(held, {"other": 101}) is None
    with cache.reserve(held, {"other": 100}) or pytest.fail("what is written counts as reserved, not once more"):
        pass
    (held.folder / ".weights.partial").rename(held.folder / "weights")
    assert cache.reserve(held, {"other": 101}) is None
    for one in (first, second):
        one.close()
    assert cache.reserve(held, {"other": 100}) is not None


def test_a_full_drive_has_no_room_whatever_the_limit_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path, "1TB")
    first, second = fill(cache, OLD, 1000), fill(cache, OTHER, 1000)
    os.utime(first / ".held", (1, 1))
    left = {first: 1000, second: 1000}

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=3000 - sum(nbytes for entry, nbytes in left.items() if entry.exists()))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert has_room(cache, 2000)
    assert not first.exists(), "used first"
    assert second.exists()
    assert not has_room(cache, 3001)
    assert not second.exists()
    with cache.hold(NEW) as held:
        partial = held.folder / ".weights.partial"
        partial.touch()
        os.truncate(partial, 2000)
        assert cache.reserve(held, {"weights": 3001}) is None, "a file with holes has no room of its own"


def test_who_holds_an_entry_uses_it(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1500)
    for number, name in enumerate((OLD, OTHER)):
        os.utime(fill(cache, name, 500) / ".held", (number, number))
    cache.hold(OLD).close()
    assert [entry.name for entry in cache.entries()] == [OTHER, OLD]


def test_a_fork_does_not_give_back_the_room_of_its_parent(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 1000)
    held = cache.hold(OLD)
    with cache.reserve(held, {"weights": 900}) or pytest.fail("no room") as room:
        if (child := os.fork()) == 0:
            room.close()
            os._exit(0)
        assert os.waitpid(child, 0) == (child, 0)
        assert cache.reserve(held, {"other": 101}) is None


def test_what_can_never_fit_removes_nothing(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 2500)
    entry = fill(cache, OLD, 2000)
    assert not has_room(cache, 2501)
    assert entry.exists()


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_lease_on_an_entrythat_was_just_removed_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_made_again: bool
) -> None:
    cache = Cache(tmp_path)
    entry = tmp_path / OWN / OLD
    true_flock = fcntl.flock
    removed: list[Path] = []

    def flock(fd: int, operation: int) -> None:
        if not removed:
            removed.append(entry.rename(tmp_path / "removed"))
            if is_made_again:
                entry.mkdir()
                (entry / ".held").touch()
        true_flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with cache.hold(OLD) as held:
        assert (held.folder / ".held").exists(), "of the new entry"
        assert removed
        monkeypatch.undo()
        assert not cache._remove(tmp_path / OWN, entry), "it is in use"
    assert cache._remove(tmp_path / OWN, entry)


def test_nobody_else_may_enter_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        entry = fill(Cache(tmp_path), OLD, 1)
    finally:
        os.umask(before)
    assert (entry.stat().st_mode & 0o777, entry.parent.stat().st_mode & 0o777) == (0o700, 0o700)


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_where_others_may_write_nothing_is_believed(tmp_path: Path, mode: int) -> None:
    """The folder of all entries is refused; an entry is made again."""
    cache = Cache(tmp_path)
    entry = fill(cache, OLD, 2000)
    entry.chmod(mode)
    with cache.hold(OLD) as held:
        assert not list(held.folder.glob("sub/*"))
        held.folder.chmod(mode)
        with pytest.raises(PlanError, match="others may write to it, and another process uses it"):
            cache.hold(OLD)
    entry.parent.chmod(mode)
    for use in (lambda: cache.hold(OLD), cache.entries, cache.try_filling, lambda: cache.remove(OLD)):
        with pytest.raises(PlanError, match="other users may write to it, so its entries are not used"):
            use()


@pytest.mark.parametrize("kind", ["a file", "a link", "another user's"])
def test_an_entrythat_is_not_ours_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    cache = Cache(tmp_path)
    entry = fill(cache, OLD, 2000)
    if kind == "another user's":
        true_lstat = Path.lstat

        def lstat(path: Path) -> os.stat_result:
            status = true_lstat(path)
            return os.stat_result((*status[:4], status.st_uid + 1, *status[5:])) if path == entry else status

        monkeypatch.setattr(Path, "lstat", lstat)
    else:
        entry.rename(tmp_path / "elsewhere")
        entry.write_text("mine") if kind == "a file" else entry.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PlanError, match="is not a folder of this user, and no entry"):
        cache.hold(OLD)


def full(fd: int, note: bytes) -> int:
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_a_reservation_that_cannot_be_noted_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path, 1500)
    held = cache.hold(OLD)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="quota"):
            cache.reserve(held, {"weights": 1000})
    assert not list((tmp_path / OWN).glob(".coming-*"))
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    true_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, note: true_write(fd, note[:7]))
    with cache.reserve(held, {"weights": 1000}) or pytest.fail("no room"):
        assert not has_room(cache, 1000), "it was noted whole"


GARBAGE = [
    b"",
    b"[",
    b"[" * 10**5,
    b"\xff",
    b"[]",
    b'{"entry": 1, "files": {}}',
    b'{"entry": "../../etc", "files": {"x": 1}}',
    b'{"entry": "%s", "files": {"../../../x": 1}}' % OLD.encode(),
    b'{"entry": "%s", "files": {"/x": 1}}' % OLD.encode(),
    b'{"entry": "%s", "files": {"x": -1}}' % OLD.encode(),
    b'{"entry": "%s", "files": {"x": Infinity}}' % OLD.encode(),
]


@pytest.mark.parametrize("note", GARBAGE)
def test_garbage_in_the_place_of_a_reservation_is_nothing(tmp_path: Path, note: bytes) -> None:
    """Also as long as a process holds it."""
    cache = Cache(tmp_path, 2000)
    fill(cache, OLD, 1)
    path = tmp_path / OWN / f".coming-{'0' * 16}"
    path.write_bytes(note)
    with FileLock(open_ours(path)) as lock:
        assert lock.try_lock()
        assert has_room(cache, 1000)
        assert path.exists()
    assert has_room(cache, 1000)
    assert not path.exists()


@pytest.mark.parametrize("name", [f".coming-{'0' * 16}", f".gone-{'0' * 16}", OTHER, f"{OLD}/.about.json"])
def test_a_fifo_holds_nobody_up(tmp_path: Path, name: str) -> None:
    cache = Cache(tmp_path, 2000)
    fill(cache, OLD, 1)
    os.mkfifo(tmp_path / OWN / name)
    assert [entry.source for entry in cache.entries()] == [""]
    assert has_room(cache, 1000)


def test_two_that_reserve_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with those that remove: else each would count what the other takes as free."""
    monkeypatch.setattr(descriptors, "LIMIT_SECONDS", 0.0)
    monkeypatch.setattr(descriptors, "_LOOK_SECONDS", 0.0)
    cache = Cache(tmp_path, 2000)
    with cache.hold(NEW) as held, locked_file(tmp_path / OWN / ".lock"):
        for use in (lambda: cache.reserve(held, {"weights": 1}), lambda: cache.remove(NEW)):
            with pytest.raises(TimeoutError):
                use()


def test_what_a_process_left_that_was_killed_before_it_held_its_entry_is_deleted(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 2000)
    fill(cache, OLD, 1)
    (tmp_path / OWN / OTHER).mkdir()
    assert has_room(cache, 1000)
    assert not (tmp_path / OWN / OTHER).exists()


def test_a_drive_without_locks_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(descriptors.fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks"):
        Cache(tmp_path).hold(NEW)
    gc.collect()
    opened = []  # Of this test: threads of others open and close files meanwhile.
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            opened.append(str(file.readlink()))
    assert len(opened) > 2
    assert not [path for path in opened if path.startswith(str(tmp_path))]


def test_what_another_process_has_made_anew_is_not_deleted(tmp_path: Path) -> None:
    with Cache(tmp_path).hold(NEW) as held:
        file = held.folder / "file"
        file.write_bytes(b"damaged")

        def check() -> None:
            found = file.read_bytes()
            file.write_bytes(b"made anew")
            if found == b"damaged":
                raise FormatError("is damaged")

        held.forget_damaged("file", check)
        assert file.read_bytes() == b"made anew"


def test_an_entryis_put_aside_when_no_process_uses_it_and_only_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = Cache(tmp_path)
    entry = fill(cache, OLD, 2000)
    first, second, other = cache.hold(OLD), cache.hold(OLD), cache.hold(OLD)
    with pytest.raises(PlanError, match="is torn, and another process uses it; `relayout cache remove aa"):
        cache._put_aside(first, "is torn")
    assert (entry / "sub" / "weights").exists()
    other.close()
    cache._put_aside(second, "is torn")
    assert not entry.exists()
    assert caplog.text.count("is torn: rebuilt in the cache") == 1
    with cache.hold(OLD) as old:
        entry.rename(tmp_path / "elsewhere")
        fill(cache, OLD, 2000)
        cache._put_aside(old, "is torn")
        assert (entry / "sub" / "weights").exists(), "another process has made it again meanwhile"
    assert caplog.text.count("is torn: rebuilt in the cache") == 1


def test_an_entry_in_which_something_is_wrong_is_made_again(tmp_path: Path) -> None:
    """By a check, or because a load has found damage; and once only."""
    cache = Cache(tmp_path)

    def check(held: HeldEntry) -> None:
        if (held.folder / "sub").exists():
            raise FormatError("is torn")

    def never_right(held: HeldEntry) -> None:
        raise FormatError("is torn")

    entry = fill(cache, OLD, 2000)
    with cache.hold(OLD, check):
        assert not (entry / "sub").exists()
    fill(cache, OTHER, 2000)
    cache.hold(OTHER).invalidate()
    with cache.hold(OTHER) as held:
        assert not (held.folder / "sub").exists()
    with pytest.raises(PlanError, match="is torn, although it was rebuilt"):
        cache.hold(NEW, never_right)


@pytest.mark.parametrize("kind", ["a folder in the place of its lock", "its files cannot be deleted"])
def test_an_entry_that_cannot_be_removed_keeps_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Neither when room is made, nor when all are to be removed."""
    cache = Cache(tmp_path, 2500)
    bad, good = fill(cache, OLD, 1000), fill(cache, OTHER, 1000)
    os.utime(bad / ".held", (1, 1))
    true_take_lock = folder.take_lock

    def take_lock(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == bad / ".held":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return true_take_lock(path, *arguments, **options)

    true_rmtree = shutil.rmtree

    def rmtree(path: Path, **options: Any) -> None:
        if list(path.glob("**/bad")):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        true_rmtree(path, **options)

    if kind.startswith("its files"):
        (bad / "bad").touch()
        monkeypatch.setattr(shutil, "rmtree", rmtree)
    else:
        monkeypatch.setattr(folder, "take_lock", take_lock)
    assert has_room(cache, 1000)
    assert not good.exists()
    assert "cannot be removed to make room" in caplog.text
    last = fill(cache, OTHER, 10)
    if kind.startswith("its files"):
        bad = fill(cache, OLD, 10)
        (bad / "bad").touch()
    with pytest.raises(PermissionError):
        clear(tmp_path, clear=True)
    assert not last.exists()
    monkeypatch.undo()
    clear(tmp_path, clear=True)
    assert cache.entries() == []
