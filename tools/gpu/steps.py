"""Steps of a long run: how each ended, and which are left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

GRACE_S = 10.0
"""Between the signal that asks a step to end and the one that ends it."""
LEAST_S = 60.0
"""With less time left, no step is begun."""


@dataclass(frozen=True)
class Step:
    """A command that can be run alone. What it has written when it is interrupted, it does not do again."""

    name: str
    command: tuple[str, ...]
    seconds: float = inf
    """Its longest time, after which it is stopped and counts as ended."""


def carry_out(out: Path, steps: Sequence[Step], deadline: float, environment: Mapping[str, str]) -> bool:
    """Do the steps that have not ended yet, while there is time, and print how each ends; True: none is left.

    Args:
        out: `NAME.log` has what a step said, `NAME.code` its exit code, once it has ended.
        deadline: of `time.monotonic`.
    """
    out.mkdir(parents=True, exist_ok=True)
    for step in steps:
        ended = out / f"{step.name}.code"
        if ended.exists():
            continue
        left = deadline - time.monotonic()
        if left < LEAST_S:
            print(f"{step.name}: not begun, {max(0, left):.0f} s left", flush=True)
            return False
        log = out / f"{step.name}.log"
        is_short = step.seconds < left - GRACE_S
        seconds = min(step.seconds, left - GRACE_S)
        code: int | str | None = _run(step, log, seconds, {**os.environ, **environment, "OUT": str(out)})
        if code is None and not is_short:
            print(f"{step.name}: stopped, to be continued", flush=True)
            return False
        code = f"none, stopped after {seconds:.0f} s" if code is None else code
        ended.write_text(f"{code}\n")
        said = log.read_text(errors="replace").strip().splitlines()
        why = said[-1][:200] if code and said else ""
        print(f"{step.name}: exit code {code} {why}".rstrip(), flush=True)
    return True


def _run(step: Step, log: Path, seconds: float, environment: Mapping[str, str]) -> int | None:
    """The exit code; None: the step was ended for lack of time, with all that it had started."""
    with log.open("ab") as file:
        running = subprocess.Popen(
            step.command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=log.parent,  # Children of the product import nothing from the working folder, where sources may lie.
            start_new_session=True,
        )
    try:
        return running.wait(max(1.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(running.pid, signal_number)
            with suppress(subprocess.TimeoutExpired):
                running.wait(GRACE_S / 2)
