"""Scratch: a private folder for files on their way to a bucket."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from relayout.errors import PlanError

_PREFIX = "relayout-scratch-"
_LOCK = "relayout.lock"


@contextmanager
def scratch_folder(place: str | Path | None) -> Iterator[Path]:
    """Yield a new private folder, which is deleted at the end. What killed processes left there is deleted, too.

    Args:
        place: where; None: the system's folder of temporary files (TMPDIR).

    Raises:
        PlanError: the place is no folder.
    """
    parent = Path(tempfile.gettempdir() if place is None else place).resolve()
    if not parent.is_dir():
        raise PlanError("no such folder, for files on their way to a bucket", path=parent, code="missing")
    _remove_left(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        lock = os.open(folder / f"{_LOCK}.new", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / f"{_LOCK}.new").rename(folder / _LOCK)
            (folder / "files").mkdir(stat.S_IRWXU)
            yield folder / "files"
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left(parent: Path) -> None:
    """Delete the folders that processes of this user left when they were killed.

    The proof: the folder has our name and is this user's own, and nobody holds its lock, which a process holds from
    before the lock has its name until it ends.
    """
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
