"""How long a test waits for what must come: only a failure takes as long, so that a busy machine is no failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

PATIENCE = 300
"""Seconds."""


def in_time(call: Callable[[], Result]) -> Result:
    """Call, in a thread, what might hang; what it raises is raised here."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="caller", daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), f"hangs: {call}"
    if errors:
        raise errors[0].with_traceback(None)
    return results[0]
