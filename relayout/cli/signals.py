"""What becomes of the command when it is asked to end: by Ctrl-C, by kill, by a terminal that goes away."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BURST_SECONDS = 1.0
"""Signals that come within it are one request: timeout(1) sends two."""


class Stopped(BaseException):
    """A signal asked the process to end."""

    def __init__(self, signum: int) -> None:
        super().__init__(_word(signum))
        self.exit_code = 128 + signum


def leave_when_asked() -> None:
    """From now on these signals end the process at once, with one line: nothing has to be put in order."""
    _hear(_leave)


def raise_when_asked() -> None:
    """From now on they raise `Stopped`, so that what is begun is put in order, if until now they ended the process."""
    if any(signal.getsignal(number) is _leave for number in _ENDING):
        _hear(_Raise())


def ignore() -> None:
    """From now on they do nothing: the process ends anyway, with the exit code that it has."""
    _hear(signal.SIG_IGN)


@contextmanager
def restored() -> Iterator[None]:
    """Give back the handlers, which the block may change, at its end."""
    before = {number: signal.getsignal(number) for number in (*_ENDING, signal.SIGPIPE)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not from Python, and nobody could give it back.
                signal.signal(number, handler)


def _hear(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    for number in _ENDING:
        # What was ignored when the process began stays so: it is in the background, or under nohup.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _leave(signum: int, frame: FrameType | None) -> NoReturn:
    # Not by an exception, which could come up in the middle of an import, and be lost there.
    with suppress(OSError):
        if sys.stderr is not None:
            os.write(sys.stderr.fileno(), f"relayout: error: {_word(signum)}\n".encode())
    os._exit(128 + signum)


class _Raise:
    def __init__(self) -> None:
        self._raised = -_BURST_SECONDS

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._raised >= _BURST_SECONDS:
            self._raised = now
            raise Stopped(signum)


def _word(signum: int) -> str:
    return "interrupted" if signum == signal.SIGINT else "terminated"
