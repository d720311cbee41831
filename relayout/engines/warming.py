"""`RELAYOUT_WARM=FOLDER`: files come into the page cache while an engine still imports and prepares.

The first process of an engine starts `relayout warm` beside it, and takes the variable out of the environment, so that
its children do not. The first rank that loads ends it: what has come is used, and nothing is read twice.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_PATH, _PID = "RELAYOUT_WARM", "RELAYOUT_WARM_PID"
_COMMAND = ["-m", "relayout", "warm"]
_started: list[subprocess.Popen[bytes]] = []
"""Kept, so that Python does not complain of a child that is left to itself."""


def start() -> None:
    """Start `relayout warm`, if the environment asks for it."""
    path = os.environ.pop(_PATH, None)
    if path:
        quiet = subprocess.DEVNULL
        command = [sys.executable, *_COMMAND, path]
        _started.append(subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True))
        os.environ[_PID] = str(_started[-1].pid)


def end() -> None:
    """End what an ancestor, or this process, has started, if it still runs."""
    pid = os.environ.pop(_PID, None)
    with suppress(OSError, ValueError):
        # The number may be another process's by now.
        words = Path(f"/proc/{int(pid or '')}/cmdline").read_bytes().split(b"\0")
        if words[1:4] == [word.encode() for word in _COMMAND]:
            os.kill(int(pid or ""), signal.SIGTERM)
