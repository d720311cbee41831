"""One load on a device: seconds, CPU, memory of the device and pinned memory of the host."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench.drive import files_of, forget

from relayout.benchmark.machine import remember


def prepare(folders: list[Path], *, cold: bool) -> None:
    """Make the page cache cold or warm."""
    forget(folders) if cold else remember(files_of(folders))


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
    cpu, started = time.process_time(), time.monotonic()
    kept = load()
    if is_cuda:
        torch.cuda.synchronize()
    seconds, cpu_seconds = time.monotonic() - started, time.process_time() - cpu
    found = {
        "seconds": round(seconds, 4),
        "cpu_seconds": round(cpu_seconds, 4),
        "gb_per_s": round(nbytes / seconds / 1e9, 3),
    }
    if is_cuda:
        found["device_peak_minus_tensors"] = torch.cuda.max_memory_allocated() - before - nbytes
        found["pinned_peak"] = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
    del kept
    return found
