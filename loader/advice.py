"""Tells, with an operating system's error, what to do about it."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def advised() -> Iterator[None]:
    """Let an OSError say what to do about it, where there is something to do."""
    try:
        yield
    except OSError as error:
        advice = _advice(error.errno)
        if advice is None or str(error.strerror).endswith(advice):
            raise
        raise OSError(error.errno, f"{error.strerror}; {advice}", error.filename) from error


def _advice(code: int | None) -> str | None:
    match code:
        case errno.EMFILE:
            return f"this process may open {_open_files()} files: raise that with ulimit -n"
        case errno.ENFILE:
            return "the system has too many files open: see fs.file-max"
        case errno.EACCES | errno.EPERM:
            who = f"user {os.geteuid()}, groups {sorted({os.getegid(), *os.getgroups()})}"
            return f"look at the permissions of file and folders ({who})"
        case errno.EIO:
            return "the drive or file system failed: see dmesg, then restore the file and check with relayout verify"
        case errno.ESTALE:
            return "the network file system has replaced the file: mount it again, or load again"
        case errno.ENOMEM | errno.EAGAIN:
            return "the system has no memory for the request: load with fewer threads, or raise ulimit -l"
        case errno.ENOTCONN | errno.ETIMEDOUT | errno.EREMOTEIO:
            return "the network file system does not answer"
    return None


def _open_files() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
