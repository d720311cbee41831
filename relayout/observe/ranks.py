"""Loads probes in the ranks of an engine; a program that `observation.py` starts.

`python -m relayout.observe.ranks JOBS.json`: JOBS.json is a list of objects with the fields of `ObservationJob`. The
results are written to JOBS.json.result. Jobs run one after another, and each job and each rank runs in its own fork, so
that state of one rank cannot affect another rank. `vllm.py` and `sglang.py` start an engine, and build and load one
rank. Needs an engine and torch.
"""

from __future__ import annotations

import json
import linecache
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from relayout.core.slices import Slice
from relayout.format.fields import dump_slice
from relayout.observe.observation import JsonObject
from relayout.plans.family import ENGINES

_MAX_PROCESSES = 4
"""Largest number of concurrent ranks. Each needs about 0.5 GB, which is the cost of importing an engine."""


@dataclass(frozen=True, slots=True)
class ObservationJob:
    """An engine, a checkpoint and a degree to observe."""

    engine: str
    """The engine's package, a key of `ENGINES`."""
    folder: str
    """A folder with config.json, the files next to it, and headers of weight files."""
    tensors: Sequence[tuple[str, str, Sequence[int]]]
    """(name, dtype, shape) of each tensor, in the order in which the loader receives them."""
    tp: int
    expert_parallel: bool = False
    trust_remote_code: bool = False


class ObservedEngine(Protocol):
    """The interface of the module `relayout.observe.PACKAGE` for an engine."""

    INSTALL: str
    """Advice on installation, for the error if the engine cannot be imported."""

    def start(self) -> str:
        """Import the engine, and return its version.

        Raises:
            ImportError: the engine cannot be imported.
        """

    def configuration(self, job: ObservationJob) -> Any:
        """Return the engine's configuration for a job, after replacing unavailable packages and devices by stubs."""

    def observe_rank(self, job: ObservationJob, config: Any, rank: int) -> JsonObject:
        """Return the result of `rank_result` for one rank, or `error`. Turns this process into that rank."""


def main() -> None:
    """Carry out the jobs in the file on the command line."""
    file = Path(sys.argv[1])
    Path(f"{file}.result").write_text(json.dumps(run_here(json.loads(file.read_text()))))


def run_here(jobs: Sequence[JsonObject]) -> list[JsonObject]:
    """Carry out jobs of one engine, each given by the fields of an `ObservationJob`, in forks of this process."""
    package = jobs[0]["engine"]
    module: Any = import_module(f"relayout.observe.{package}")
    engine: ObservedEngine = module
    try:
        version = engine.start()
    except ImportError as error:
        return [{"error": f"{ENGINES[package]} cannot be imported ({error}): {engine.INSTALL}"}] * len(jobs)
    import torch.distributed.tensor  # Otherwise torch imports it in each fork at the first probe: half a second.

    print(f"{ENGINES[package]} {version} is imported", flush=True)
    torch.set_num_threads(1)  # A fork of a process with several threads may wait for these threads forever.

    def observe(number: int) -> JsonObject:
        return carry_out(engine, version, ObservationJob(**jobs[number]))

    return _in_forks(observe, len(jobs), 1, "degree")


def carry_out(engine: ObservedEngine, version: str, job: ObservationJob) -> JsonObject:
    """Return the slices that each rank loads, in JSON, or `error`. Configures this process for the job."""
    try:
        config = engine.configuration(job)
    except Exception as error:
        return failure(error, f"{ENGINES[job.engine]} refuses its config.json", job.engine)
    at_once = min(_MAX_PROCESSES, os.cpu_count() or 1)
    ranks = _in_forks(partial(engine.observe_rank, job, config), job.tp, at_once, "rank")
    for rank in ranks:
        if "error" in rank:
            return rank
    return {
        "version": version,
        "model_class": ranks[0]["model_class"],
        "ranks": [rank["loaded"] for rank in ranks],
    }


def _in_forks(observe: Callable[[int], JsonObject], count: int, step: int, what: str) -> list[JsonObject]:
    """Call a function for each number below `count`, each in its own process, and return the results.

    Args:
        observe: the function.
        count: number of calls.
        step: number of concurrent processes.
        what: a word for the numbers, for messages.
    """
    context = multiprocessing.get_context("fork")
    results: list[JsonObject] = []

    def child(number: int, connection: Any) -> None:
        connection.send_bytes(json.dumps(observe(number)).encode())
        connection.close()
        os._exit(0)

    for first in range(0, count, step):
        running = []
        for number in range(first, min(first + step, count)):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=child, args=(number, theirs))
            process.start()
            theirs.close()
            running.append((number, ours, process))
        for number, ours, process in running:
            try:
                results.append(json.loads(ours.recv_bytes()))
            except EOFError:
                results.append({"error": f"{what} {number}: the process ended"})
            process.join()
            print(f"{what} {number} of {count} is done", flush=True)
    return results


def rank_result(job: ObservationJob, loaded: dict[str, Slice], model_class: str) -> JsonObject:
    """Return the slices that a rank loads, in JSON."""
    return {"loaded": [dump_slice(loaded[name]) for name, *_ in job.tensors], "model_class": model_class}


def failure(error: Exception, what: str, engine: str) -> JsonObject:
    """Return an error with the location in the engine's code."""
    text = f"{type(error).__name__}: {error}".strip().replace("\n", " ")
    return {"error": f"{what}: {text[:600]}{_place(error, engine)}"}


def _place(error: Exception, engine: str) -> str:
    """Return class, function, file and line of the innermost frame in the engine's code, in brackets."""
    for frame, line_number in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_globals.get("__name__", "")
        if module.startswith(f"{engine}."):
            owner, code = frame.f_locals.get("self"), frame.f_code
            name = code.co_name if owner is None else f"{type(owner).__name__}.{code.co_name}"
            line = linecache.getline(code.co_filename, line_number).strip()
            return f" ({module}, {name}, line {line_number}: {line})"
    return ""


if __name__ == "__main__":
    main()
