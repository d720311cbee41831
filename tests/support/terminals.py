"""Terminals that tests look at."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager

VARIABLES = ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES", "TERM", "LC_ALL")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in VARIABLES} | {"TERM": "xterm"}
"""Whatever terminal the tests run in says nothing about the one that they imitate."""


@contextmanager
def terminal(width: int = 80) -> Iterator[tuple[int, Callable[[], str]]]:
    """A terminal for a process, and what returns all that was written to it, when nobody else has it open any more."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))

    def read() -> str:
        os.close(theirs)
        seen = b""
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:  # Linux's way to say that nobody has the terminal open any more.
                chunk = b""
            if not chunk:
                return seen.decode().replace("\r\n", "\n")
            seen += chunk

    yield theirs, read
    os.close(ours)
