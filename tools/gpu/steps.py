"""Steps of a long run: what each needs, how it ended, and which are left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu.results import Results

GRACE_S = 10.0
"""Between the signal that asks a step to end and the one that ends it."""


@dataclass(frozen=True)
class Step:
    """A command that can be run alone. What it has written when it is interrupted, it does not do again."""

    name: str
    command: tuple[str, ...]
    seconds: float
    """That it takes at most: with less time left, it is not begun."""
    disk_gb: float = 0
    """That it writes."""


@dataclass(frozen=True)
class Outcome:
    """How a step ended."""

    key: str
    """Name of the step."""
    code: int | None
    """Exit code; None: it was stopped for lack of time, and will be begun again."""
    seconds: float
    why: str = ""
    """Why it was not begun, or what it said last."""


class Run:
    """The outcomes in a folder, one file for all steps; a log of each beside it."""

    def __init__(self, out: Path) -> None:
        """Read what is there."""
        out.mkdir(parents=True, exist_ok=True)
        self._out = out
        self._results = Results(out / "steps.jsonl")
        self.outcomes = {name: Outcome(**row) for name, row in self._results.rows.items()}

    def carry_out(
        self,
        steps: Sequence[Step],
        deadline: float,
        *,
        free_gb: Callable[[], float],
        environment: Mapping[str, str],
        tell: Callable[[str], None],
    ) -> bool:
        """Do the steps that are left, while there is time; True: none is left.

        Args:
            deadline: of `time.monotonic`.
            free_gb: what the drive has left.
        """
        for step in steps:
            if step.name in self.outcomes and self.outcomes[step.name].code is not None:
                continue
            outcome = self._refusal(step, deadline, free_gb()) or self._do(step, deadline, environment)
            self.outcomes[step.name] = outcome
            self._results.add(step.name, asdict(outcome))
            ended = "stopped, to be continued" if outcome.code is None else f"exit code {outcome.code}"
            tell(f"{step.name}: {ended} after {outcome.seconds:.0f} s {outcome.why}".rstrip())
        return all(self.outcomes[step.name].code is not None for step in steps)

    def _refusal(self, step: Step, deadline: float, free_gb: float) -> Outcome | None:
        left = deadline - time.monotonic()
        if left < min(step.seconds, 60):
            return Outcome(step.name, None, 0, f"not begun: {max(0, left):.0f} s left")
        if free_gb < step.disk_gb:
            return Outcome(step.name, None, 0, f"not begun: {free_gb:.1f} GB free, needs {step.disk_gb:.1f} GB")
        return None

    def _do(self, step: Step, deadline: float, environment: Mapping[str, str]) -> Outcome:
        started, log = time.monotonic(), self._out / f"{step.name}.log"
        with log.open("ab") as file:
            running = subprocess.Popen(
                step.command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment, "OUT": str(self._out)},
                start_new_session=True,
            )
            code: int | None
            try:
                code = running.wait(max(1.0, deadline - time.monotonic() - GRACE_S))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(running)
        said = log.read_text(errors="replace").strip().splitlines()
        seconds = round(time.monotonic() - started, 1)
        return Outcome(step.name, code, seconds, said[-1][:200] if code and said else "")


def _end(running: subprocess.Popen[bytes]) -> None:
    """End a step and all that it has started."""
    for signal_number, patience in ((signal.SIGTERM, GRACE_S / 2), (signal.SIGKILL, GRACE_S / 2)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(running.pid, signal_number)
        with suppress(subprocess.TimeoutExpired):
            running.wait(patience)
