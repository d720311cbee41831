"""Tells, with an error of the system, what to do about it."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from relayout.storage.file_pool import advice_on_limit

_NO_ANSWER = {errno.ENOTCONN, errno.ETIMEDOUT, getattr(errno, "EREMOTEIO", errno.ETIMEDOUT)}
"""macOS has no EREMOTEIO."""


@contextmanager
def advised() -> Iterator[None]:
    """Let an error of the system say what to do about it, where there is something to do.

    Whoever keeps the error does not keep the memory of what has failed.
    """
    try:
        yield
    except BaseException as error:
        _forget(error)
        better = _with_advice(error)
        if better is None:
            raise
        raise better from error


def _with_advice(error: BaseException) -> Exception | None:
    if isinstance(error, MemoryError) and not str(error):
        return MemoryError(f"no memory is left for what a load takes beside tensors and buffers{_limit()}")
    if not isinstance(error, OSError):
        return None
    advice = _advice(error.errno)
    if advice is None or str(error.strerror).endswith(advice):
        return None
    return OSError(error.errno, f"{error.strerror}; {advice}", error.filename)


def _forget(error: BaseException) -> None:
    """Clear the loader's frames that an error knows: they refer to arenas, buffers and pinned memory."""
    found: BaseException | None = error
    seen = set()  # Errors may be in a ring.
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        trace = found.__traceback__
        while trace is not None:
            if str(trace.tb_frame.f_globals.get("__name__")).startswith("relayout."):
                with suppress(RuntimeError):  # It still runs.
                    trace.tb_frame.clear()
            trace = trace.tb_next
        found = found.__context__


def _advice(code: int | None) -> str | None:
    match code:
        case errno.EMFILE:
            return advice_on_limit()
        case errno.ENFILE:
            return "the system has too many files open: see fs.file-max"
        case errno.EACCES | errno.EPERM:
            return f"look at the permissions of file and folders (user {os.geteuid()})"
        case errno.EIO:
            return "the drive or file system failed: see dmesg, then restore the file and check with relayout verify"
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
