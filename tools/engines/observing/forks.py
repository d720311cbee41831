"""Runs functions in forks of this process, each within a limit of time."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Result = dict[str, Any]
Report = Callable[[Result], None]


def write_results(file: Path, works: Iterable[tuple[Result, Callable[[Report], Result], Path]], seconds: float) -> None:
    """Write a line of JSON for each: what is known of it, and what the function returns in a fork.

    Args:
        works: what is known; the function; a folder that is removed after it.
        seconds: for each.
    """
    with file.open("a") as output:
        for known, work, folder in works:
            result = in_a_fork(work, seconds)
            shutil.rmtree(folder, ignore_errors=True)
            print(json.dumps({**known, **result}), file=output, flush=True)
            print(*known.values(), result.get("error", "done"), flush=True)


def in_a_fork(work: Callable[[Report], Result], seconds: float) -> Result:
    """What the function returns; if it does not, what it has reported last, with an error. Its output is dropped."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def child() -> None:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        theirs.send({**work(theirs.send), "is_done": True})
        theirs.close()
        os._exit(0)

    process = context.Process(target=child)
    process.start()
    theirs.close()
    deadline = time.monotonic() + seconds
    result: Result = {}
    why = f"took longer than {seconds} s"
    try:
        while ours.poll(max(0.0, deadline - time.monotonic())):
            result = ours.recv()
            if result.pop("is_done", False):
                return result
    except EOFError:
        why = "the process ended"
    finally:
        process.kill()
        process.join()
    return {**result, "error": why}
