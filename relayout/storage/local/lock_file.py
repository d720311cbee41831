"""The lock file beside an output, which admits one writing process at a time and belongs to its user."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from relayout.errors import PlanError
from relayout.storage.local.open_folder import OpenFolder, with_path

_CONTENT = re.compile(rb"[0-9]*\n?")
_MAX_NBYTES = 32
"""More than a process id."""


def check_owner_is(path: Path, status: os.stat_result, user: int) -> None:
    """Raise PlanError unless a file or folder belongs to this user."""
    if status.st_uid != user:
        raise PlanError(
            f"belongs to another user (id {status.st_uid}, not {user}); have it removed, or choose another folder",
            path=path,
            code="exists",
        )


@contextmanager
def locked(parent: OpenFolder, name: str, output: Path) -> Iterator[int]:
    """Hold the lock of an output. Yield this user's id as that file system reports it.

    Raises:
        PlanError: another process holds the lock, or it belongs to another user, or is no lock.
        OSError: there can be no lock file. The error names `output`.
    """
    with with_path(output):
        lock, user = _acquire(parent, name, output)
    try:
        yield user
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent.fd)
        os.close(lock)


def _acquire(parent: OpenFolder, name: str, output: Path) -> tuple[int, int]:
    """Open and lock the lock file. Retry if its name refers to another file by then."""
    while True:
        fd, user = _open_lock(parent, name)
        try:
            _check_is_lock(parent.path / name, os.fstat(fd), user)
            _flock(fd, output)
            if not _CONTENT.fullmatch(os.pread(fd, _MAX_NBYTES, 0)):
                raise PlanError(
                    "exists and is not relayout's lock; move it away", path=parent.path / name, code="exists"
                )
            status = parent.status(name)
            if status is not None and os.path.samestat(status, os.fstat(fd)):
                with suppress(OSError):  # The process id is only informative; the drive may be full.
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd, user
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _open_lock(parent: OpenFolder, name: str) -> tuple[int, int]:
    """The lock file's descriptor, and the id of the owner of files created here.

    It may differ from the process's user id, because the server of a network file system may map ids.
    """
    while True:
        try:
            fd = parent.open(name, os.O_RDWR | os.O_CREAT, 0o600)
            return fd, os.fstat(fd).st_uid
        except FileExistsError:
            user = user_of_new_files(parent, name)
        try:
            status = parent.status(name)
            if status is not None:
                _check_is_lock(parent.path / name, status, user)
                return parent.open(name, os.O_RDWR), user
        except FileNotFoundError:
            continue  # Its holder has just removed it.


def _check_is_lock(path: Path, status: os.stat_result, user: int) -> None:
    """Raise PlanError unless a file may be truncated: this user's, regular, and without other names (hard links)."""
    check_owner_is(path, status, user)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:  # 0: its holder has just removed it.
        what = "is not a regular file, or has several hard links, and blocks the lock; remove it"
        raise PlanError(what, path=path, code="exists")


def user_of_new_files(parent: OpenFolder, name: str) -> int:
    """The id of the owner of files that this process makes in a folder; `name` begins that of a file made to see."""
    probe = f"{name}-{os.urandom(8).hex()}"
    fd = parent.open(probe, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        return os.fstat(fd).st_uid
    finally:
        os.unlink(probe, dir_fd=parent.fd)
        os.close(fd)


def _flock(fd: int, output: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, _MAX_NBYTES, 0).decode("ascii", "replace").strip()
        raise PlanError(f"is being written by another relayout (process {holder})", path=output, code="busy") from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        # Some network mounts do not support locks: continue without.
