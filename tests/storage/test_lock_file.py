"""Locks are given back whatever was forked, and no wait for one goes on for ever."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from support.patience import PATIENCE

from relayout.cache.folder import Cache
from relayout.errors import PlanError
from relayout.storage.local import descriptors
from relayout.storage.local.descriptors import FileLock, LockWait, locked_file, open_ours, take_lock

ENTRY = "a" * 32

HOLDS = """
import os, sys, time
from contextlib import ExitStack
from pathlib import Path
from relayout.cache.folder import Cache
from relayout.storage.local.descriptors import locked, locked_file
from relayout.storage.local.descriptors import OpenFolder

folder, how = Path(sys.argv[1]), sys.argv[2]
cache = Cache(folder)
with ExitStack() as held:
    entry = held.enter_context(cache.hold("a" * 32))
    held.enter_context(cache.reserve(entry, {"weights": 1000}))
    held.enter_context(cache.try_filling())
    assert held.enter_context(entry.try_lock("unit-0"))
    held.enter_context(locked_file(entry.lock_file("weights")))
    held.enter_context(locked(OpenFolder(folder), ".out.lock", folder / "out"))
    child = os.fork()
    if not child and how == "lives on":
        os.setsid()
        print(os.getpid(), flush=True)
        time.sleep(600)
        os._exit(0)
    if not child:
        sys.exit(0)  # Leaves all blocks, and collects all objects.
    if how == "ends":
        os.waitpid(child, 0)
        print(child, flush=True)
    time.sleep(600)
"""
"""Holds everything that there is to hold, and forks."""

WHAT = (".out.lock", ".filling", ".lock-unit-0", ".lock-weights", ".held", "room")


def held(folder: Path) -> dict[str, bool]:
    """What another process holds."""
    own = folder / "relayout-cache-v1"
    locks = [folder / ".out.lock", own / ".filling", *(own / ENTRY).glob(".lock-*"), own / ENTRY / ".held"]
    found = {path.name: path.exists() and not is_free(path) for path in locks}
    cache = Cache(folder, 1500)
    with cache.hold("b" * 32) as other:
        room = cache.reserve(other, {"weights": 1000})
        if room is not None:
            room.close()
    return {**found, "room": room is None}


def is_free(path: Path) -> bool:
    with FileLock(open_ours(path)) as lock:
        return lock.try_lock()


@pytest.mark.parametrize("how", ["lives on", "ends"])
def test_a_fork_neither_keeps_what_its_parent_holds_nor_gives_it_back(tmp_path: Path, how: str) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert held(tmp_path) == dict.fromkeys(WHAT, True)
            parent.kill()
            parent.wait(PATIENCE)
            assert held(tmp_path) == dict.fromkeys(WHAT, False)
        finally:
            parent.kill()
            if how == "lives on":
                os.kill(child, signal.SIGKILL)


def test_copies_that_were_made_without_our_knowledge_are_unlocked_too(tmp_path: Path) -> None:
    """As of a library that forks."""
    with FileLock(open_ours(tmp_path / "lock", os.O_CREAT)) as lock:
        assert lock.try_lock()
        copy = os.dup(lock.fd)
    assert is_free(tmp_path / "lock")
    os.close(copy)


def test_a_lock_that_two_threads_close_is_closed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FileLock(open_ours(tmp_path / "lock", os.O_CREAT))
    assert lock.try_lock()
    lock.write_holder("testing")
    true = os.ftruncate

    def meanwhile(fd: int, length: int) -> None:
        monkeypatch.undo()
        other = threading.Thread(target=lock.close)
        other.start()
        other.join()
        true(fd, length)

    monkeypatch.setattr(os, "ftruncate", meanwhile)
    lock.close()
    assert lock.fd == -1
    assert not (tmp_path / "lock").read_bytes()
    assert is_free(tmp_path / "lock")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "LIMIT_SECONDS", 0.4)
    monkeypatch.setattr(descriptors, "_QUIET_SECONDS", 0.1)
    monkeypatch.setattr(descriptors, "_LOOK_SECONDS", 0.05)


@pytest.mark.usefixtures("quick")
def test_a_wait_names_who_holds_the_lock_and_ends_when_nothing_moves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lock"
    mine = f"process {os.getpid()}, digging since "
    with (
        locked_file(path, what="digging"),
        pytest.raises(TimeoutError, match=f"waited [0-9]+ s for {mine}") as caught,
        locked_file(path),
    ):
        pass
    assert caught.value.filename == str(path)
    [said] = caplog.messages
    assert f"{path}: waiting for {mine}" in said


@pytest.mark.usefixtures("quick")
def test_a_wait_goes_on_as_long_as_the_work_does() -> None:
    counter = itertools.count()
    waiting = LockWait(Path("lock"), growth=lambda: min(next(counter), 20))
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        any(waiting.pause() for _ in iter(int, 1))
    assert next(counter) > 20, "it was looked at until it stood still"
    assert time.monotonic() - begun > descriptors.LIMIT_SECONDS


@pytest.mark.parametrize(
    "note", [b"", b"\xff\x00\x1b[31m", b"x" * 10**6], ids=["nothing", "control characters", "a lot"]
)
def test_what_a_lock_says_of_its_holder_is_only_shown(tmp_path: Path, note: bytes) -> None:
    (tmp_path / "lock").write_bytes(note)
    said = descriptors.holder_in(tmp_path / "lock")
    assert said.isprintable()
    assert 0 < len(said) < 300


PLANTED: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a folder": Path.mkdir,
    "a link": lambda path: path.symlink_to("theirs"),
    "a link to nothing": lambda path: path.symlink_to("new"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_no_file_of_ours_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    (tmp_path / "theirs").write_text("theirs")
    PLANTED[kind](tmp_path / "lock")
    with pytest.raises((OSError, PlanError)), locked_file(tmp_path / "lock"):
        pass
    assert descriptors.holder_in(tmp_path / "lock")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "theirs"]
    assert (tmp_path / "theirs").read_text() == "theirs"


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lock").touch()
    user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with pytest.raises(PlanError, match="not a regular file of this user"):
        open_ours(tmp_path / "lock")
    assert not descriptors.is_ours((tmp_path / "lock").stat(), stat.S_ISREG)


THEIRS: dict[str, bytes] = {
    "a text": b"what the person has\n" * 20,
    "nearly a note": b"process 7, writing it since 12:00:00\nand something else",
    "a note": b"process 7, writing it since 12:00:00",
    "nothing": b"",
}


@pytest.mark.parametrize("is_linked", [False, True])
@pytest.mark.parametrize("kind", THEIRS)
def test_nothing_is_written_to_a_lock_file_that_is_more_than_a_lock(tmp_path: Path, kind: str, is_linked: bool) -> None:
    """It is locked all the same: `cp -al` of a root or a cache ends no training."""
    theirs = tmp_path / "theirs"
    theirs.write_bytes(THEIRS[kind])
    if is_linked:
        (tmp_path / "lock").hardlink_to(theirs)
    else:
        theirs.rename(tmp_path / "lock")
    is_lock_file = not is_linked and kind in ("a note", "nothing")
    with locked_file(tmp_path / "lock", what="digging"):
        assert take_lock(tmp_path / "lock") is None
        now = (tmp_path / "lock").read_bytes()
        assert now.startswith(f"process {os.getpid()}, digging".encode()) if is_lock_file else now == THEIRS[kind]
    assert (tmp_path / "lock").read_bytes() == (b"" if is_lock_file else THEIRS[kind])


@pytest.mark.parametrize(
    "what",
    ["x" * 10**4, "\U0001f512" * 10**3, "two\nlines", "\udcff"],
    ids=["long", "long in bytes", "two lines", "no character"],
)
def test_whatever_a_holder_says_is_a_note_and_no_obstacle_for_the_next(tmp_path: Path, what: str) -> None:
    with FileLock(open_ours(tmp_path / "lock", os.O_CREAT)) as lock:
        assert lock.try_lock()
        lock.write_holder(what)
        assert lock.is_lock_file
        assert descriptors.holder_in(tmp_path / "lock").startswith(f"process {os.getpid()}, ")


def test_a_lock_that_was_waited_for_is_that_of_the_file_which_then_has_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    first = take_lock(path)
    assert first is not None

    def delete_and_release(seconds: float) -> None:
        if path.exists():
            path.unlink()
            first.close()

    monkeypatch.setattr(time, "sleep", delete_and_release)
    with locked_file(path):
        assert not is_free(path), "it is the file that has the name now"


@pytest.mark.usefixtures("quick")
def test_a_lock_file_that_is_deleted_again_and_again_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_flock = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        (tmp_path / "lock").unlink(missing_ok=True)
        true_flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(PlanError, match="deleted again and again"):
        take_lock(tmp_path / "lock")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors cannot be counted")
@pytest.mark.parametrize(
    ("call", "module", "name"),
    [(take_lock, os, "fstat"), (open_ours, os, "fstat"), (take_lock, fcntl, "flock")],
    ids=["the status of a lock", "the status of a file", "the lock"],
)
@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "stale"), KeyboardInterrupt()], ids=["ESTALE", "Ctrl-C"])
def test_a_file_is_closed_if_what_comes_after_its_opening_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[Path], object],
    module: ModuleType,
    name: str,
    error: BaseException,
) -> None:
    def failing(*arguments: object) -> None:
        raise error

    path = tmp_path / "lock"
    path.touch()
    monkeypatch.setattr(module, name, failing)
    with pytest.raises(type(error)):
        call(path)
    monkeypatch.undo()
    assert str(path) not in {os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()}
