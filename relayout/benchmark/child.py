"""One loader loads one rank once, in this process, which `run.load_together` starts: python -m THIS JOB.

It says "ready", waits for a line, loads, answers with what it measured, waits for a line, and answers with the digest
of all bytes. No process computes a digest while another still loads.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from relayout.benchmark.job import Job, Loader, prepare
from relayout.core.digests import digest_hex
from relayout.storage.memory import peak_nbytes, proc_nbytes

if TYPE_CHECKING:
    import torch


def serve(job: Job, loader: Loader) -> None:
    """Speak the protocol on stdin and stdout, and end the process."""
    with contextlib.suppress(OSError):  # If memory runs out, this process must end, and no other.
        Path("/proc/self/oom_score_adj").write_text("1000")
    # What libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for module in ("torch", *loader.modules):
        importlib.import_module(module)
    import torch

    if job.device.startswith("cuda"):
        torch.cuda.set_device(job.device)
        torch.empty(1, device=job.device)  # The device's context exists before the clock starts.
    if loader.group:
        torch.distributed.init_process_group("gloo")
    if not loader.reads_converted:
        prepare(job)
    answers.write("ready\n")
    _wait()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # The peak of resident memory is counted from here.
    resident, drive, cpu = proc_nbytes("self/status", "VmRSS") or 0, _drive_nbytes(), time.process_time()
    started = time.monotonic()
    tensors = loader.load(job)
    if job.device.startswith("cuda"):
        torch.cuda.synchronize()
    ended = time.monotonic()
    measured = {
        "started": started,
        "ended": ended,
        "cpu_seconds": time.process_time() - cpu,
        "peak_nbytes": peak_nbytes() - resident,
        "drive_nbytes": _drive_nbytes() - drive,
        "nbytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
    }
    answers.write(json.dumps(measured) + "\n")
    _wait()
    answers.write(json.dumps(digest_of_tensors(tensors)) + "\n")
    answers.flush()
    os._exit(0)  # What a library does at its end is not measured, and must not fail the run.


def digest_of(rows: Iterable[tuple[str, tuple[int, ...], str]]) -> str:
    """One digest of a rank's tensors, given as (name, shape, digest of the bytes) in any order."""
    return digest_hex(json.dumps(sorted((name, list(shape), digest) for name, shape, digest in rows)).encode())


def digest_of_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """`digest_of` of tensors in memory."""
    return digest_of((name, tuple(tensor.shape), _digest(name, tensor)) for name, tensor in tensors.items())


def _digest(name: str, tensor: torch.Tensor) -> str:
    import torch

    if not tensor.is_contiguous():
        raise SystemExit(f"{name} was loaded as a view that is not contiguous")
    return digest_hex(tensor.flatten().view(torch.uint8).cpu().numpy().data)


def _wait() -> None:
    if not sys.stdin.readline():
        raise SystemExit("the benchmark has ended")


def _drive_nbytes() -> int:
    """Bytes that drives have read for this process; 0 if the kernel does not count them."""
    with contextlib.suppress(OSError):
        found = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def main() -> None:
    """Run the job in the arguments."""
    job = Job(**json.loads(sys.argv[1]))
    serve(job, importlib.import_module(job.registry).LOADERS[job.loader])


if __name__ == "__main__":
    main()
