"""How long a real vLLM takes from the start of its process to loaded weights, with a checkpoint that no cache holds."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatch
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from bench.drive import files_of, machine, total_nbytes
from support.slow_storage import Link, absence, slow_folder

from engines.cases import Run, converted_of
from engines.environments import Environment
from engines.starts.starting import Start, start
from relayout.benchmark.machine import prepare, remember
from relayout.benchmark.measure import write_llama

NUM_LAYERS = 2
"""Of Llama-3.1-8B's shapes: 3 GB."""
NUM_TURNS = 5
NUM_FIRST = 3
Step = TypeVar("Step")
CONVERTED, DAY_S = "is in the cache", 24 * 3600
LOADED, READY = r"Loading weights took ([\d.]+) seconds", "init engine"
LINKS = {"local": None, "20 ms, 1 Gbit/s": Link(0.02, 1e9 / 8)}
"""Between first starts and their checkpoint."""


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


def first_loads(environment: Environment, work: Path, only: str) -> Iterator[tuple[str, Any]]:
    """What a first start costs: two ranks that load by vLLM's own loader and convert behind it, beside vLLM alone."""
    folder = _source(work)
    yield "machine", machine(work)
    yield "nbytes", total_nbytes(folder)
    for name, link in LINKS.items():
        if fnmatch(name, only):
            with nullcontext(folder) if link is None else _behind(link, folder, work / "mount") as source:
                yield name, _first_loads(environment, source, work, [] if link is None else [folder])


def _first_loads(environment: Environment, source: Path, work: Path, in_memory: list[Path]) -> dict[str, Any]:
    """Seconds of starts in turns. `in_memory`: what the storage reads, which costs it no time."""
    cache, settings = work / "first-start-cache", {"load_format": "relayout", "tensor_parallel_size": 2}
    verbose = environment.with_variables(VLLM_LOGGING_LEVEL="INFO")
    cached = verbose.with_variables(RELAYOUT_CACHE=str(cache))
    ways = {"vLLM": (verbose, {"tensor_parallel_size": 2}), "relayout, first start": (cached, settings)}
    starts: dict[str, list[Start]] = {name: [] for name in ways}
    for name in _cold([source], [*ways] * NUM_FIRST, in_memory):
        shutil.rmtree(cache, ignore_errors=True)
        starts[name].append(start(ways[name][0], source, ways[name][1], work / f"first, {name}.log", until=READY))
    found: dict[str, Any] = {name: _loads(runs) for name, runs in starts.items()}
    converted = []
    for _ in _cold([source], [None] * NUM_FIRST, in_memory):
        shutil.rmtree(cache, ignore_errors=True)
        run = start(cached, source, settings, work / "first, converted.log", until=CONVERTED)
        loaded, done = ([_clock(line) for line in run.lines if re.search(what, line)] for what in (LOADED, CONVERTED))
        converted.append((done[-1] - loaded[-1]) % DAY_S)
    return found | {"converted_after_last_load_s": converted}


def _loads(runs: list[Start]) -> dict[str, Any]:
    loads = [max(float(match[1]) for line in run.lines if (match := re.search(LOADED, line))) for run in runs]
    ready = [round(run.seconds, 2) for run in runs]
    return {"load_s": loads, "load_median_s": median(loads), "start_to_ready_s": ready}


@contextmanager
def _behind(link: Link, folder: Path, mount_point: Path) -> Iterator[Path]:
    """The folder as a slow file system shows it."""
    if (why := absence()) is not None:
        raise SystemExit(why)
    with slow_folder(folder, mount_point, link) as slow:
        yield Path(slow.where)


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
        done = start(verbose, folder, settings, work / f"reads, {run.name}.log", until=READY)
        matches = [re.search(r"relayout: rank \d+ of \d+: ([\d.]+) GB", line) for line in done.lines]
        needed = sorted((float(match[1]) for match in matches if match), reverse=True)
        read = [round(process.read_nbytes / 1e9, 3) for process in done.processes[: len(needed)]]
        yield run.name, {"needed_gb": needed, "read_gb": read, "checkpoint_gb": round(total_nbytes(folder) / 1e9, 3)}


def _cold(folders: list[Path], steps: list[Step], in_memory: Sequence[Path] = ()) -> Iterator[Step]:
    """The steps, each when no cache has any of the folders, and the page cache has those in memory."""
    for step in steps:
        os.sync()
        remember(path for folder in in_memory for path in folder.glob("*.safetensors"))
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
