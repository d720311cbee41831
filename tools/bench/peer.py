"""One peer loads one rank once, in this process: started by `tools/run bench`, spoken to by lines on stdin and stdout.

It says "ready", is told to go, answers with what it measured, is told to verify, and answers whether all bytes are
right.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import sys
import time
from pathlib import Path

import torch
import xxhash

from bench.job import Job
from bench.peers import BASELINE, PEERS
from bench.peers_remote import REMOTE_PEERS


def _status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def _drive_nbytes() -> int:
    """Bytes that this process has had read from drives."""
    found = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def _expected_digests(job: Job) -> dict[str, str]:
    from relayout.checkpoint.converted import read_manifest, read_table
    from relayout.storage.stores import find_store

    folder = find_store(job.converted)
    table = read_table(folder, read_manifest(folder), job.rank)
    return dict(zip(table.names, table.digests, strict=True))


def _digest(tensor: torch.Tensor) -> str:
    assert tensor.is_contiguous()
    return xxhash.xxh3_128_hexdigest(tensor.flatten().view(torch.uint8).cpu().numpy())


def main() -> None:
    """See the module."""
    with contextlib.suppress(OSError):  # Should memory run out, this process has to go, and no other on the machine.
        Path("/proc/self/oom_score_adj").write_text("1000")
    # What libraries print must not come between the lines that the benchmark reads.
    speaking = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = Job(**json.loads(sys.argv[1]))
    peer = (PEERS | REMOTE_PEERS).get(job.peer, BASELINE)
    for module in peer.modules:
        importlib.import_module(module)
    if job.device.startswith("cuda"):
        torch.cuda.set_device(job.device)
        torch.empty(1, device=job.device)  # The device's context is there before the clock starts.
    if peer.group:
        torch.distributed.init_process_group("gloo")
    expected = _expected_digests(job) if job.verify else {}
    speaking.write("ready\n")
    sys.stdin.readline()
    Path("/proc/self/clear_refs").write_text("5")  # The peak of resident memory is counted from here.
    rss, drive, cpu = _status("VmRSS"), _drive_nbytes(), time.process_time()
    started = time.monotonic()
    tensors = peer.load(job)
    if job.device.startswith("cuda"):
        torch.cuda.synchronize()
    ended = time.monotonic()
    measured = {
        "started": started,
        "ended": ended,
        "cpu_seconds": time.process_time() - cpu,
        "peak_nbytes": _status("VmHWM") - rss,
        "drive_nbytes": _drive_nbytes() - drive,
        "nbytes": sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
    }
    speaking.write(json.dumps(measured) + "\n")
    sys.stdin.readline()
    equal = not job.verify or {name: _digest(tensor) for name, tensor in tensors.items()} == expected
    speaking.write(json.dumps(equal) + "\n")
    speaking.flush()
    os._exit(0)  # Whatever a library does at its end is not measured, and shall not fail the run.


if __name__ == "__main__":
    main()
