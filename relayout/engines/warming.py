"""`RELAYOUT_WARM=FOLDER`: files come into the page cache while an engine still imports and prepares.

The first process of an engine starts `relayout warm` beside it, and takes the variable out of the environment, so that
its children do not. The first rank that loads ends it: what has come is used, and nothing is read twice.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from relayout.core.children import QUIET, Child, start_child

_PATH, _PID = "RELAYOUT_WARM", "RELAYOUT_WARM_PID"
_COMMAND = [b"-m", b"relayout", b"warm"]
_started: list[Child] = []
"""Kept, so that Python does not complain of a child that is left to itself."""


def start() -> None:
    """Start `relayout warm`, if the environment asks for it."""
    path = os.environ.pop(_PATH, None)
    if path:
        _started.append(start_child("relayout", "warm", path, stdin=QUIET, stdout=QUIET, stderr=QUIET))
        os.environ[_PID] = str(_started[-1].pid)


def end() -> None:
    """End what an ancestor, or this process, has started, if it still runs."""
    pid = os.environ.pop(_PID, None)
    with suppress(OSError, ValueError):
        # The number may be another process's by now.
        words = Path(f"/proc/{int(pid or '')}/cmdline").read_bytes().split(b"\0")
        if words[words.index(_COMMAND[0]) :][:3] == _COMMAND:
            os.kill(int(pid or ""), signal.SIGTERM)
