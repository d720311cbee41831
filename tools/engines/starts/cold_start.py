"""How long a real vLLM takes from the start of its process to loaded weights, with a checkpoint that no cache holds."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from bench.drive import files_of, machine, total_nbytes

from engines.cases import Run, converted_of
from engines.environments import Environment
from engines.starts.starting import Start, start
from relayout.benchmark.machine import prepare
from relayout.benchmark.measure import write_llama

NUM_LAYERS = 2
"""Of Llama-3.1-8B's shapes: 3 GB."""
NUM_TURNS = 5
NUM_FIRST = 3
Step = TypeVar("Step")
CONVERTED, DAY_S = "is in the cache", 24 * 3600
LOADED = r"Loading weights took ([\d.]+) seconds"


def measure(environment: Environment, work: Path, _only: str) -> Iterator[tuple[str, Any]]:
    """Starts of every way, in turns."""
    folder = _source(work)
    converted = converted_of(folder, 1)
    environment = environment.with_variables(VLLM_LOGGING_LEVEL="INFO")
    ways: dict[str, tuple[Path, dict[str, Any]]] = {
        "vLLM, source": (folder, {}),
        "relayout": (converted, {"load_format": "relayout"}),
    }
    starts: dict[str, list[Start]] = {name: [] for name in ways}
    for name, (path, settings) in _cold([folder, converted], [*ways.items()] * NUM_TURNS):
        log = work / f"cold start, {name}.log"
        starts[name].append(start(environment, path, settings, log, until=LOADED))
    yield "machine", machine(work)
    yield "nbytes", total_nbytes(folder)
    yield "ways", {name: dict(_summary(runs)) for name, runs in starts.items()}


def first_loads(environment: Environment, work: Path, _only: str) -> Iterator[tuple[str, Any]]:
    """What a first start costs: two ranks that load by vLLM's own loader and convert behind it, beside vLLM alone."""
    folder, cache = _source(work), work / "first-start-cache"
    verbose = environment.with_variables(VLLM_LOGGING_LEVEL="INFO")
    cached = verbose.with_variables(RELAYOUT_CACHE=str(cache))
    ways = {"vLLM": (verbose, {}), "relayout, first start": (cached, {"load_format": "relayout"})}
    starts: dict[str, list[Start]] = {name: [] for name in ways}
    for name in _cold([folder], [*ways] * NUM_FIRST):
        shutil.rmtree(cache, ignore_errors=True)
        where, settings = ways[name]
        settings = settings | {"tensor_parallel_size": 2}
        starts[name].append(start(where, folder, settings, work / f"first, {name}.log", until="init engine"))
    settings = {"load_format": "relayout", "tensor_parallel_size": 2}
    converted = []
    for _ in _cold([folder], [None] * NUM_FIRST):
        shutil.rmtree(cache, ignore_errors=True)
        run = start(cached, folder, settings, work / "first, converted.log", until=CONVERTED)
        loaded, done = ([_clock(line) for line in run.lines if re.search(what, line)] for what in (LOADED, CONVERTED))
        converted.append((done[-1] - loaded[-1]) % DAY_S)
    yield "converted_after_last_load_s", converted
    yield "machine", machine(work)
    yield "nbytes", total_nbytes(folder)
    for name, runs in starts.items():
        loads = [max(float(match[1]) for line in run.lines if (match := re.search(LOADED, line))) for run in runs]
        yield (
            name,
            {
                "load_s": loads,
                "load_median_s": median(loads),
                "start_to_ready_s": [round(run.seconds, 2) for run in runs],
            },
        )


def _clock(line: str) -> int:
    """The second of the day at which vLLM has logged a line."""
    found = re.search(r"INFO [\d-]+ (\d+):(\d+):(\d+) ", line)
    assert found, line
    hours, minutes, seconds = map(int, found.groups())
    return 3600 * hours + 60 * minutes + seconds


def reads(environment: Environment, work: Path, only: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the processes of ranks and of stages have read from the drive when the engine is ready."""
    for run in (run for run in (Run("llama", tp=2), Run("llama", tp=1, stages=2)) if fnmatch(run.name, only)):
        folder = converted_of(_source(work), run.tp)
        next(_cold([folder], [run]))
        settings = run.settings | {"load_format": "relayout", "model_loader_extra_config": {"strict": True}}
        verbose = environment.with_variables(VLLM_LOGGING_LEVEL="INFO")
        done = start(verbose, folder, settings, work / f"reads, {run.name}.log", until="init engine")
        matches = [re.search(r"relayout: rank \d+ of \d+: ([\d.]+) GB", line) for line in done.lines]
        needed = sorted((float(match[1]) for match in matches if match), reverse=True)
        read = [round(process.read_nbytes / 1e9, 3) for process in done.processes[: len(needed)]]
        yield run.name, {"needed_gb": needed, "read_gb": read, "checkpoint_gb": round(total_nbytes(folder) / 1e9, 3)}


def _cold(folders: list[Path], steps: list[Step]) -> Iterator[Step]:
    """The steps, each when no cache has any of the folders."""
    for step in steps:
        os.sync()
        prepare([], files_of(folders), cold=True, needed_nbytes=0)
        yield step


def _source(work: Path) -> Path:
    folder = work / "cold-start"
    if not folder.exists():
        write_llama(folder, NUM_LAYERS)
    return folder


def _summary(starts: list[Start]) -> Iterator[tuple[str, Any]]:
    loads = [re.search(LOADED, each.lines[-1]) for each in starts]
    yield "start_to_loaded_s", [round(each.seconds, 2) for each in starts]
    yield "start_to_loaded_median_s", round(median(each.seconds for each in starts), 2)
    yield "load_s", [float(match[1]) if match else None for match in loads]
    yield "load_median_s", median(float(match[1]) for match in loads if match)
    yield "read_nbytes", [each.processes[0].read_nbytes for each in starts]
    yield "peak_nbytes", [max(process.peak_nbytes for process in each.processes) for each in starts]
