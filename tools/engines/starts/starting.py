"""Starts of a real vLLM on a folder: what it says, when, and what its processes have read."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.environments import Environment

TIMEOUT_S = 900


@dataclass(frozen=True)
class Process:
    """One of an engine's processes, as it was when the start ended."""

    read_nbytes: int
    """From the drive."""
    peak_nbytes: int
    """Memory that was resident at most."""


@dataclass(frozen=True)
class Start:
    """A vLLM that was started, and has ended or was ended."""

    lines: tuple[str, ...]
    seconds: float
    """From the start of the process to its end, or to the line that was waited for."""
    processes: tuple[Process, ...]
    """When that line came; those that have read most first."""
    code: int | None
    """That the process ended with; None if it was ended."""

    @property
    def result(self) -> dict[str, Any]:
        """The tokens and their log-probabilities, or the first exception, which others are consequences of."""
        for line in self.lines:
            if "RESULT " in line:
                result: dict[str, Any] = json.loads(line.partition("RESULT ")[2])
                return result
        where = r"(?:\(.*?\) )?(?:ERROR [\d: -]+\[.*?\] )?"
        for line in self.lines:
            if raised := re.match(rf"{where}((?:\w+\.)*\w*(?:Error|Exception): .+|Worker proc .+ died .*?\))", line):
                return {"error": raised[1]}
        return {"error": f"ended with {self.code}: " + " ".join(self.lines[-3:])}


def start(
    environment: Environment,
    folder: Path,
    settings: dict[str, Any],
    log: Path,
    *,
    until: str | None = None,
    inside: Sequence[str | Path] = (),
) -> Start:
    """Start vLLM on a folder, and let it generate tokens.

    Args:
        settings: of `vllm.LLM`.
        log: a file for all that it says.
        until: end it as soon as it says so.
        inside: a command that runs it, such as `unshare`.
    """
    ranks = settings.get("tensor_parallel_size", 1) * settings.get("pipeline_parallel_size", 1)
    ranks //= settings.get("nnodes", 1)
    if ranks > 1:  # vLLM wants to be told which cores are whose.
        environment = environment.with_variables(VLLM_CPU_OMP_THREADS_BIND="|".join(map(str, range(ranks))))
    started = time.perf_counter()
    running = subprocess.Popen(
        [*inside, *environment.command("starts.vllm_tokens", folder, json.dumps(settings))],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment.variables,
        cwd=log.parent,
        start_new_session=True,
    )
    lines: list[str] = []
    processes: tuple[Process, ...] = ()
    seconds, code = 0.0, None
    timer = threading.Timer(TIMEOUT_S, end, [running.pid])
    timer.start()
    assert running.stdout is not None
    try:
        for line in running.stdout:
            lines.append(line.rstrip("\n"))
            if until is not None and re.search(until, line):
                seconds, processes = time.perf_counter() - started, _processes(running.pid)
                break
        else:
            code = running.wait()
            seconds = time.perf_counter() - started
    finally:
        timer.cancel()
        end(running.pid)
        running.wait()
        log.write_text("\n".join(lines) + "\n")
    return Start(tuple(lines), seconds, processes, code)


def _processes(session: int) -> tuple[Process, ...]:
    """Those of a session."""
    processes = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, StopIteration):
            if entry.name.isdigit() and os.getsid(int(entry.name)) == session:
                processes.append(
                    Process(_number(entry / "io", "read_bytes:"), _number(entry / "status", "VmHWM:") * 1024)
                )
    return tuple(sorted(processes, key=lambda process: -process.read_nbytes))


def _number(file: Path, field: str) -> int:
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(field))


def end(session: int) -> None:
    """End all processes of a session that this module has begun."""
    with suppress(ProcessLookupError):
        os.killpg(session, signal.SIGKILL)
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if entry.name.isdigit() and os.getsid(int(entry.name)) == session:
                os.kill(int(entry.name), signal.SIGKILL)
