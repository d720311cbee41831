"""What the machine can do at most, and what of it relayout would use: the step `limits`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from bench.drive import direct_read, files_of, limit_by, machine

from gpu.loads import converted_of
from gpu.results import Arguments
from relayout.benchmark.machine import forget

_SIZES = (2**20, 8 * 2**20, 64 * 2**20, 2**30)
"""Of copies from pinned memory."""


def main() -> None:
    arguments = Arguments.parse()
    results, device = arguments.results, arguments.device
    folder = converted_of(arguments.work, arguments.num_layers, 1)
    results.measure("machine", lambda: machine(arguments.work))
    results.measure("doctor", lambda: _doctor(folder, device))
    for turn in range(3):
        results.measure(f"drive {turn}", lambda: _drive(folder))
    if device.startswith("cuda"):
        results.measure("nvidia-smi", _smi)
        for nbytes in _SIZES:
            results.measure(f"pinned to device, {nbytes}", lambda nbytes=nbytes: _copies(nbytes))  # type: ignore[misc]


def _doctor(folder: Path, device: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "relayout", "doctor", str(folder), "--device", device, "--json"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return {"doctor": json.loads(run.stdout)} if run.stdout.strip() else {"error": run.stderr[-500:]}


def _drive(folder: Path) -> dict[str, Any]:
    forget(files_of([folder]))
    return {"gb_per_s": direct_read(sorted(folder.glob("*.safetensors"))), "by": limit_by()}


def _smi() -> dict[str, Any]:
    if shutil.which("nvidia-smi") is None:
        return {"error": "no nvidia-smi"}
    query = ["--query-gpu=name,memory.total,driver_version,pcie.link.gen.current,pcie.link.width.current"]
    run = subprocess.run(["nvidia-smi", *query, "--format=csv"], capture_output=True, text=True, timeout=60)
    topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60)
    return {"gpus": run.stdout.splitlines(), "topology": topology.stdout.splitlines()[:8]}


def _copies(nbytes: int) -> dict[str, Any]:
    """Copies of pinned memory to the device, one after the other on one stream: what no load can exceed."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    rounds = max(4, 8 * 2**30 // nbytes // 4)
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    target.copy_(source, non_blocking=True)
    begun.record()
    for _ in range(rounds):
        target.copy_(source, non_blocking=True)
    ended.record()
    torch.cuda.synchronize()
    return {"gb_per_s": round(rounds * nbytes / begun.elapsed_time(ended) / 1e6, 2)}


if __name__ == "__main__":
    main()
