"""Terminals that tests look at."""

from __future__ import annotations

import os


def read_terminal(ours: int) -> bytes:
    """All that is written to a terminal until nobody has it open any more; `ours` is its controlling end."""
    seen = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux's way to say that nobody has the terminal open any more.
            break
        if not chunk:
            break
        seen += chunk
    return seen
