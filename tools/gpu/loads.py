"""Loads on a device: checkpoints of Llama-3.1-8B shapes, made once, and what one load takes of time and memory."""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench.drive import files_of

import relayout
from relayout.benchmark.machine import forget, remember
from relayout.benchmark.measure import write_llama


def source_of(work: Path, num_layers: int) -> Path:
    """The plain checkpoint."""
    folder = work / f"llama-{num_layers}"
    if not folder.exists():
        fresh = folder.with_suffix(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        write_llama(fresh, num_layers, shard_nbytes=10**9)
        os.sync()
        fresh.rename(folder)
    return folder


def converted_of(work: Path, num_layers: int, tp: int) -> Path:
    """The converted one; interrupted conversions go on."""
    folder = work / f"llama-{num_layers}-tp{tp}"
    if not folder.exists():
        relayout.convert(source_of(work, num_layers), folder, tp=tp)
    return folder


def prepare(folders: list[Path], *, cold: bool) -> None:
    """Make the page cache cold or warm."""
    (forget if cold else remember)(files_of(folders))


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """What work returns, and the seconds until the device has done it, too."""
    cpu, started = time.process_time(), time.monotonic()
    made = work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu
    return made, {"seconds": round(seconds, 4), "cpu_seconds": round(cpu_seconds, 4)}


def measure(load: Callable[[], Any], device: str, nbytes: int) -> dict[str, Any]:
    """Run a load once.

    Args:
        load: what it returns is kept until the memory has been read off.
        nbytes: of the tensors.
    """
    is_cuda = device.startswith("cuda")
    gc.collect()
    before = 0
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_host_memory_stats()
    kept, result = timed(load)
    result["gb_per_s"] = round(nbytes / result["seconds"] / 1e9, 3)
    if is_cuda:
        result["device_peak_minus_tensors"] = torch.cuda.max_memory_allocated() - before - nbytes
        result["pinned_peak"] = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
    del kept
    return result
