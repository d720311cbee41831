"""Errors of the operating system, provoked for real: they keep their kind, name the file, and say what to do."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import prestarted

import relayout
from relayout.errors import FormatError
from relayout.loader.backends.files import error_hints

NUM_PARTS = 6


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    """One rank, in parts."""
    (tmp_path / "plain").mkdir()
    tensors = {f"x{number}": np.arange(25_000, dtype=np.int32) + number for number in range(NUM_PARTS)}
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    relayout.convert(tmp_path / "plain", tmp_path / "out", max_part_nbytes=120_000)
    assert len(list((tmp_path / "out").glob("model-rank-0-part-*"))) == NUM_PARTS
    return tmp_path / "out"


CALL = """
import json, os, sys

def open_files():
    return len(os.listdir("/proc/self/fd"))

def outcome(call):
    before = open_files()
    try:
        call()
    except Exception as error:
        return {
            "type": type(error).__name__,
            "errno": getattr(error, "errno", None),
            "filename": getattr(error, "filename", None),
            "message": str(error),
            "leaked": open_files() - before,
        }
    return {"type": None}
"""


def run(code: str, *args: object, folder: Path) -> Any:
    """What a fresh process prints, as JSON."""
    if not sys.platform.startswith("linux"):
        pytest.skip("takes /proc")
    done = prestarted.run(*args, script=CALL + code, imports=prestarted.LOADER, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("threads", [1, 16])
def test_too_many_open_files_is_told_wherever_it_happens_and_leaves_none_behind(
    converted: Path, tmp_path: Path, threads: int
) -> None:
    """Also of files that are opened while others are read."""
    code = """
import resource, torch, relayout
def read_one(folder, rank):
    with relayout.safe_open(folder) as opened:
        return opened.get_tensor("x4")

threads = int(sys.argv[2])
calls = [
    lambda *args: relayout.load(*args, threads=threads),
    lambda *args: relayout.load(*args, threads=threads, names="**"),
    lambda *args: relayout.load(*args, threads=threads, verify=True),
    lambda *args: list(relayout.iter_load(*args, threads=threads)),
    read_one,
    relayout.explain,
]
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
told = []
for call in calls:
    call(sys.argv[1], 0)  # All code is there.
    top = max(map(int, os.listdir("/proc/self/fd")))
    for spare in range(20):  # With 0 not even the manifest can be opened.
        def limited():
            resource.setrlimit(resource.RLIMIT_NOFILE, (top + spare, hard))
            try:
                call(sys.argv[1], 0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
        told.append(outcome(limited))
print(json.dumps(told))
"""
    told = run(code, converted, threads, folder=tmp_path)
    for number in range(6):
        by_limit = told[20 * number : 20 * (number + 1)]
        failed = [one for one in by_limit if one["type"]]
        assert by_limit[0]["type"]
        assert not any(one["type"] for one in by_limit[2 * NUM_PARTS :]), "all files may be open, and some of the way"
        if threads == 1:  # By more, it depends on how many files happen to be open at the same time.
            assert len(failed) < NUM_PARTS, "not all files need be open at once"
        for one in failed:
            assert (one["type"], one["errno"], one["leaked"]) == ("OSError", errno.EMFILE, 0)
            assert "Too many open files; this process may open" in one["message"]
            assert "files: raise that with ulimit -n: " in one["message"]
            assert str(converted) in one["message"]


def test_a_file_that_may_not_be_read_is_told_with_who_wanted_it(converted: Path, tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("becoming another user takes a superuser")
    code = """
import relayout, relayout.loader
calls = [relayout.explain, relayout.load, lambda *args: next(relayout.iter_load(*args))]
for call in calls:
    call(sys.argv[1], 0)  # All code is there: the other user may not be able to enter this checkout.
os.setgroups([4, 20])
os.setgid(65534)
os.setuid(65534)
print(json.dumps([outcome(lambda: call(sys.argv[1], 0)) for call in calls]))
"""
    tmp_path.chmod(0o755)
    for path in converted.iterdir():
        path.chmod(0o600 if path.name == "model-rank-0-part-3.safetensors" else 0o644)
    told = run(code, converted.name, folder=tmp_path)  # By a relative path: pytest's folders are closed.
    file = "out/model-rank-0-part-3.safetensors"
    expected = {
        "type": "PermissionError",
        "errno": errno.EACCES,
        "filename": file,
        "message": f"[Errno {errno.EACCES}] Permission denied; check the permissions of file and folders"
        f" (user 65534): '{file}'",
        "leaked": 0,
    }
    assert told == [expected] * 3


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (errno.EACCES, PermissionError, "check the permissions of file and folders (user "),
        (errno.EPERM, PermissionError, "check the permissions of file and folders (user "),
        (errno.EMFILE, OSError, "raise that with ulimit -n"),
        (errno.ENFILE, OSError, "see fs.file-max"),
        (errno.EIO, OSError, "see dmesg, then restore the file and run relayout verify"),
        (errno.ESTALE, OSError, "mount it again, or load again"),
        (errno.ENOMEM, OSError, "use fewer threads"),
        (errno.EAGAIN, BlockingIOError, "use fewer threads"),
        (errno.ENOTCONN, OSError, "the network file system does not answer"),
        (errno.ETIMEDOUT, TimeoutError, "the network file system does not answer"),
        (getattr(errno, "EREMOTEIO", errno.ENOTCONN), OSError, "the network file system does not answer"),
    ],
)
@pytest.mark.parametrize("path", ["/models/rank 0", None])
def test_advice_is_added_and_nothing_is_lost(code: int, kind: type[OSError], says: str, path: str | None) -> None:
    original = OSError(code, os.strerror(code), path)
    with pytest.raises(OSError, match="; ") as caught, error_hints():
        raise original
    error = caught.value
    assert type(error) is kind is type(original)
    assert (error.errno, error.filename) == (code, path)
    assert error.__cause__ is original
    assert error.strerror.startswith(f"{os.strerror(code)}; ")
    assert says in error.strerror
    assert str(error) == f"[Errno {code}] {error.strerror}" + (f": {path!r}" if path else "")


@pytest.mark.parametrize(
    "original",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory", "there"),
        OSError(errno.ENOSPC, "No space left on device", "there"),
        OSError(errno.EOPNOTSUPP, "the file system refuses direct I/O; use backend 'buffered'", "there"),
        OSError("without a number"),
        FormatError("there: damaged"),
        MemoryError("none"),
        KeyboardInterrupt(),
    ],
)
def test_where_there_is_nothing_to_do_the_error_is_the_same(original: BaseException) -> None:
    with pytest.raises(type(original)) as caught, error_hints():
        raise original
    assert caught.value is original
    assert caught.value.__cause__ is None
