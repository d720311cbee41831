"""`tools/run bench costs`: the cost of a fleet's first load by bytes, tensors and files.

Each checkpoint is converted, verified, copied, and loaded rank after rank, each in a process of its own and from a cold
page cache. Checkpoints of one axis differ in one number: bytes, tensors (of the same bytes), or files (of the same
bytes). The source is deleted once it is converted, so that the drive needs room for two copies.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import relayout
from bench.convert import run_command
from bench.drive import direct_read, files_of, total_nbytes
from bench.peers import LOADERS
from relayout.benchmark.loaders import LoadJob
from relayout.benchmark.machine import prepare
from relayout.benchmark.measure import (
    EMBEDDING_NBYTES,
    LAYER_NBYTES,
    POOL_NBYTES,
    expected_digests,
    layers_of,
    write_checkpoint,
    write_llama,
)
from relayout.benchmark.run import load_together
from relayout.storage.system import available_nbytes

TP = 8
STEPS = ("convert", "verify", "copy", "load")
_KEYS = ("all_seconds", "all_cpu_seconds", "all_peak_nbytes")
_EXPERTS, _HIDDEN, _TENSORS_OF_EXPERT = 256, 256, ("gate_proj", "up_proj", "down_proj")
_MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": _HIDDEN,
    "num_attention_heads": TP,
    "num_key_value_heads": TP,
    "head_dim": 32,
    "vocab_size": 1024,
    "num_experts": _EXPERTS,
    "num_experts_per_tok": 8,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Case:
    """A checkpoint to measure."""

    axis: str
    """The number in which it differs from others: "bytes", "tensors" or "files"."""
    write: Callable[[Path], object]
    """Writes the checkpoint to a folder that does not exist."""
    nbytes: float
    """About how large the checkpoint is."""
    options: tuple[str, ...] = ()
    """Options of `relayout convert`, beside the degree."""


def cases(sizes: list[float], tensors: list[int], files: list[int]) -> Iterator[Case]:
    """Yield the checkpoints: one for each size in GB, each number of tensors, and each number of files."""
    for size in sizes:
        yield Case("bytes", partial(write_llama, num_layers=layers_of(size * 1e9), shard_nbytes=10**9), size * 1e9)
    for count in tensors:
        layers = max(1, round(count / _EXPERTS / len(_TENSORS_OF_EXPERT)))
        yield Case("tensors", partial(_write_mixture, layers=layers, most=max(tensors)), 2e9)
    for count in files:
        nbytes = EMBEDDING_NBYTES + LAYER_NBYTES
        part = str(-(-nbytes // count))
        yield Case("files", partial(write_llama, num_layers=1, shard_nbytes=10**9), nbytes, ("--max-part-size", part))


def _write_mixture(folder: Path, layers: int, most: int) -> int:
    """Write a mixture of small experts: about 1.6 GB for any number of layers."""
    width = max(TP, 8 * round(most / (layers * _EXPERTS * len(_TENSORS_OF_EXPERT)) * 4))

    def tensors() -> Iterator[tuple[str, str, tuple[int, ...]]]:
        yield "model.embed_tokens.weight", "BF16", (1024, _HIDDEN)
        for layer in range(layers):
            for expert in range(_EXPERTS):
                for part in _TENSORS_OF_EXPERT:
                    shape = (_HIDDEN, width) if part == "down_proj" else (width, _HIDDEN)
                    yield f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight", "BF16", shape
        yield "lm_head.weight", "BF16", (1024, _HIDDEN)

    config = _MIXTURE | {"num_hidden_layers": layers, "moe_intermediate_size": width}
    return write_checkpoint(folder, tensors(), config, 10**9, np.random.default_rng(0).bytes(POOL_NBYTES))


def measure(scratch: Path, case: Case, runs: int, log_line: Callable[[str], None]) -> dict[str, Any]:
    """Run each step of a case as often as `runs` says: seconds of all, peak memory, and the numbers of the case.

    Raises:
        SystemExit: a command failed, or a load has wrong bytes.
    """
    source, target, other = scratch / "source", scratch / "target", scratch / "other"
    if (free := shutil.disk_usage(scratch).free) < 2.1 * case.nbytes:
        raise SystemExit(f"{scratch}: {free / 1e9:.1f} GB are free, expected {2.1 * case.nbytes / 1e9:.1f}")
    case.write(source)
    os.sync()
    nbytes = total_nbytes(source)
    command = [sys.executable, "-m", "relayout"]
    convert = [*command, "convert", str(source), "--tp", str(TP), "-o", str(target), "--quiet", *case.options]
    ways = {
        "verify": [*command, "verify", str(target), "--quiet"],
        "copy": [*command, "copy", str(target), str(other), "--quiet"],
    }
    steps: dict[str, dict[str, list[float]]] = {step: {key: [] for key in _KEYS} for step in STEPS}

    def note(step: str, seconds: float, cpu_seconds: float, peak: int) -> None:
        for key, value in zip(_KEYS, (round(seconds, 3), round(cpu_seconds, 3), peak), strict=True):
            steps[step][key].append(value)
        log_line(
            f"{case.axis}, {nbytes / 1e9:.2f} GB, {step}: {seconds:.2f} s, CPU {cpu_seconds:.2f} s, {peak / 1e6:.0f} MB"
        )

    def timed(step: str, words: list[str], read: Path) -> None:
        prepare([], files_of([read]), cold=True, needed_nbytes=2 * 10**9)
        started, before = time.monotonic(), _cpu_seconds_of_children()
        peak = run_command(words)
        note(step, time.monotonic() - started, _cpu_seconds_of_children() - before, peak)

    try:
        for _ in range(runs):
            shutil.rmtree(target, ignore_errors=True)
            timed("convert", convert, source)
        shutil.rmtree(source)
        expected, files = expected_digests(target), sorted(target.glob("*.safetensors"))
        limits = []
        for _ in range(runs):
            limits.append(round(direct_read(files), 3))
            for step, words in ways.items():
                timed(step, words, target)
            shutil.rmtree(other)
            note("load", *_load(target, expected))
        manifest = relayout.inspect(target)
    finally:
        for folder in (source, target, other):
            shutil.rmtree(folder, ignore_errors=True)
    return {
        "axis": case.axis,
        "nbytes": nbytes,
        "tensors": manifest.num_tensors,
        "files": len(files),
        "drive_gb_per_s": limits,
        "steps": steps,
    }


def _cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _load(target: Path, expected: list[str]) -> tuple[float, float, int]:
    """Load all ranks, one after another, each in a new process.

    Returns:
        The seconds and the processor time of all loads, and the highest peak of memory beyond the tensors.
    """
    seconds, cpu_seconds, peak = 0.0, 0.0, 0
    for rank in range(TP):
        job = LoadJob("bench.peers", "relayout", "", str(target), TP, rank, 1, available_nbytes() // 2)
        measured = load_together(
            [job],
            LOADERS["relayout"],
            lambda: prepare([], files_of([target]), cold=True, needed_nbytes=2 * 10**9),
            limit=600,
        )
        if measured.digests != (expected[rank],):
            raise SystemExit(f"rank {rank} was loaded with wrong bytes")
        seconds += measured.seconds
        cpu_seconds += measured.cpu_seconds
        peak = max(peak, measured.peak_minus_needed_nbytes)
    return seconds, cpu_seconds, peak


def print_table(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print a line for each checkpoint: the best run of each step, and the highest peak."""
    table = Table("axis", "GB", "tensors", "files", "drive GB/s", *(f"{step}: s, GB/s, MB" for step in STEPS))
    for row in rows:
        cells = []
        for step in STEPS:
            seconds, peak = best(row, step)
            cells.append(f"{seconds:.2f}, {row['nbytes'] / seconds / 1e9:.2f}, {peak / 1e6:.0f}")
        numbers = (f"{row['nbytes'] / 1e9:.2f}", f"{row['tensors']:,}", str(row["files"]))
        table.add_row(row["axis"], *numbers, f"{max(row['drive_gb_per_s']):.1f}", *cells)
    console.print(table)


def best(row: dict[str, Any], step: str) -> tuple[float, int]:
    """Return the seconds of the fastest run of a step, and the highest peak of all runs."""
    found = row["steps"][step]
    return min(found["all_seconds"]), max(found["all_peak_nbytes"])
