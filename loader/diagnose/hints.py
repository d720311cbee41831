"""Adds to errors of the system what to do about them."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from relayout.storage.file_pool import advice_on_limit
from relayout.storage.protocols import RequestError

_NO_ANSWER = {errno.ENOTCONN, errno.ETIMEDOUT, getattr(errno, "EREMOTEIO", errno.ETIMEDOUT)}
"""macOS has no EREMOTEIO."""


@contextmanager
def error_hints() -> Iterator[None]:
    """Add a hint to errors of the system that have one."""
    try:
        yield
    except Exception as error:
        better = _with_hint(error)
        if better is None:
            raise
        raise better from (None if isinstance(error, ModuleNotFoundError) else error)


def no_torch() -> ModuleNotFoundError:
    """The error of a load without torch."""
    return ModuleNotFoundError("torch is not installed, but loading needs it: pip install torch", name="torch")


def _with_hint(error: Exception) -> Exception | None:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return no_torch()
    if isinstance(error, MemoryError) and not str(error):
        return MemoryError(f"no memory is left for a load's own objects, beside tensors and buffers{_limit()}")
    if not isinstance(error, OSError) or isinstance(error, RequestError):  # Which says itself what to do.
        return None
    hint = _hint(error.errno)
    if hint is None or str(error.strerror).endswith(hint):
        return None
    return OSError(error.errno, f"{error.strerror}; {hint}", error.filename)


def _hint(code: int | None) -> str | None:
    match code:
        case errno.EMFILE:
            return advice_on_limit()
        case errno.ENFILE:
            return "the system has too many files open: see fs.file-max"
        case errno.EACCES | errno.EPERM:
            return f"check the permissions of file and folders (user {os.geteuid()})"
        case errno.EIO:
            return "the drive or file system failed: see dmesg, then restore the file and run relayout verify"
        case errno.ESTALE:
            return "the network file system has replaced the file: mount it again, or load again"
        case errno.ENOMEM:
            return "the system has no memory for the request: load with fewer threads, or raise ulimit -l"
        case errno.EAGAIN:
            return "a limit of this process or user is reached: load with fewer threads, or raise ulimit -u or -l"
    return "the network file system does not answer" if code in _NO_ANSWER else None


def _limit() -> str:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return "" if limit == resource.RLIM_INFINITY else f": this process may have {limit} bytes (ulimit -v)"
