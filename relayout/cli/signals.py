"""External events while a command runs: Ctrl-C, kill, a closed terminal, or a stream without a reader."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn, TextIO

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SECONDS_BETWEEN_LOOKS = 1.0
_BURST_SECONDS = 1.0
"""Signals within this time count as one request, because timeout(1) sends two."""


class SignalReceived(BaseException):
    """Raised when a signal requests the end of the process."""

    def __init__(self, signum: int) -> None:
        super().__init__(_word(signum))
        self.exit_code = 128 + signum


def exit_on_signal() -> None:
    """Let a signal end the process at once with one line on stderr; for startup, when nothing needs cleanup."""
    _install(_leave)


def raise_on_signal() -> None:
    """Let a signal raise `SignalReceived`, so that unfinished work is cleaned up; call it after `exit_on_signal`."""
    if any(signal.getsignal(signum) is _leave for signum in _ENDING):
        _install(_Raise())


def end_with_stdin() -> None:
    """Run at low priority, and end as by SIGTERM when stdin is closed or when the parent process has ended.

    The parent is checked because its other children may keep the pipe open. If the parent ignores or blocks SIGTERM,
    this process inherits that, so both are undone here. Call it after `raise_on_signal`.
    """
    os.nice(19)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, _Raise())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            is_ready, _, _ = select.select([0], [], [], _SECONDS_BETWEEN_LOOKS)
            if is_ready and not os.read(0, 4096):
                break
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stdin", daemon=True).start()


def ignore() -> None:
    """Ignore signals from now on, so that an exiting process keeps its exit code."""
    _install(signal.SIG_IGN)


def abandon(stream: TextIO | None) -> None:
    """Redirect the stream to /dev/null, so that later writes, including those at interpreter exit, do not fail."""
    with suppress(OSError):
        if stream is not None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


@contextmanager
def restored() -> Iterator[None]:
    """Restore the signal handlers at the end of the block."""
    before = {signum: signal.getsignal(signum) for signum in (*_ENDING, signal.SIGPIPE)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            if handler is not None:  # None: not installed from Python, so it cannot be restored.
                signal.signal(signum, handler)


def _install(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    for signum in _ENDING:
        # Signals that were ignored at the start are still ignored: a background process, or nohup.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, handler)


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    # Not by an exception: an exception during an import could be swallowed.
    with suppress(OSError):
        if sys.stderr is not None:
            os.write(sys.stderr.fileno(), f"relayout: {_word(signum)}\n".encode())
    os._exit(128 + signum)


class _Raise:
    def __init__(self) -> None:
        self._raised = -_BURST_SECONDS

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._raised >= _BURST_SECONDS:
            self._raised = now
            raise SignalReceived(signum)


def _word(signum: int) -> str:
    return "interrupted" if signum == signal.SIGINT else "terminated"
