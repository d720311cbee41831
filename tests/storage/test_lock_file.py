"""Locks are given back whatever was forked, and no wait for one goes on for ever."""

from __future__ import annotations

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

import pytest
from support.patience import PATIENCE

from relayout.cache.folder import Cache
from relayout.errors import PlanError
from relayout.storage.local import descriptors
from relayout.storage.local.descriptors import HeldLock, Waiting, locked_file, open_ours

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
    with HeldLock(open_ours(path)) as lock:
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
    with HeldLock(open_ours(tmp_path / "lock", os.O_CREAT)) as lock:
        assert lock.try_lock()
        copy = os.dup(lock.fd)
    assert is_free(tmp_path / "lock")
    os.close(copy)


def test_a_lock_that_two_threads_close_is_closed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = HeldLock(open_ours(tmp_path / "lock", os.O_CREAT))
    assert lock.try_lock(what="testing")
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
    waiting = Waiting(Path("lock"), growth=lambda: min(next(counter), 20))
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
