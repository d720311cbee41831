"""The page cache, emptied and filled by known pages, and the kernel's own count of what drives have read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import relayout

Bytes = npt.NDArray[np.uint8]
_fsync = os.fsync  # Tests have another one: pages that are not written yet cannot be dropped.


@pytest.fixture
def unmarked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that came by `warm` bear no mark at which the kernel would read ahead: each can be used where it is."""
    monkeypatch.setattr("relayout.loader.backends.files.read_ahead_nbytes", lambda fd: 0)


def drive_nbytes() -> int:
    """Bytes that this thread has had drives read so far, by the kernel's account."""
    return _read_nbytes(Path("/proc/thread-self/io"))


def process_drive_nbytes() -> int:
    """The same of all threads of this process."""
    return _read_nbytes(Path("/proc/self/io"))


def _read_nbytes(account: Path) -> int:
    try:
        lines = account.read_text().splitlines()
    except OSError as error:
        pytest.skip(f"the kernel does not count what is read from drives: {error.strerror}")
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor."""
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def drop(path: Path) -> None:
    """Have none of a file in the page cache."""
    with opened(path) as fd:
        _fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def warm(path: Path, offset: int, nbytes: int) -> None:
    """Have the pages of these bytes in the page cache, and no neighbors."""
    with opened(path) as fd:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        assert os.pread(fd, nbytes, offset)


def refuse_to_open(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A file system that does not open files for direct I/O."""
    true_open = os.open

    def refuse(name: Any, flags: int, *rest: int, **options: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(code, os.strerror(code), str(name))
        return true_open(name, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)


def without_residency(told: relayout.Explanation) -> relayout.Explanation:
    """What is told of a load, but for what is in the page cache, which systems may empty at any time."""
    files = tuple(replace(file, resident_nbytes=None) for file in told.files)
    return replace(told, backend="", reason="", resident_nbytes=0, files=files)


def write_cold(path: Path, nbytes: int) -> Bytes:
    """Write a file of random bytes, none of which is in the page cache afterwards; skip where that cannot be had."""
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("this system cannot be told to empty its page cache")
    written = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    path.write_bytes(written.tobytes())
    drop(path)
    before = drive_nbytes()
    warm(path, 0, 1)
    if drive_nbytes() == before:
        pytest.skip(f"files in {path.parent} stay in memory, or lie on no drive of this machine")
    drop(path)
    return written
