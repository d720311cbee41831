"""Measures conversions of a folder that PyTorch DCP wrote: `relayout convert` on it, and on an export by PyTorch.

Four processes save a Llama as FSDP does, a quarter of the rows of each tensor in each. The export is PyTorch's own
(`format_utils.dcp_to_torch_save`), written again by the stock safetensors. All in turns, each a process of its own from
its start to its end, from the drive. The two outputs must be equal, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.drive import machine
from rich.console import Console
from rich.table import Table
from support.group_worker import forked, join

from relayout.benchmark.machine import forget
from relayout.benchmark.measure import write_llama

NUM_MEMBERS = 4
EXPORT = """
import sys, torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from safetensors.torch import save_file
folder, out = sys.argv[1:]
dcp_to_torch_save(folder, out + "/model.pt")
model = torch.load(out + "/model.pt", mmap=True, weights_only=True)["model"]
save_file(model, out + "/model.safetensors", {"format": "pt"})
"""
CONVERT = (sys.executable, "-m", "relayout", "convert", "--tp", "8", "-o")


def save_shards(source: Path, folder: Path, number: int) -> None:
    """Save this member's rows of all tensors."""
    import torch.distributed.checkpoint as dcp
    from safetensors import safe_open
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    join(folder.parent, number, NUM_MEMBERS)
    mesh, model = init_device_mesh("cpu", (NUM_MEMBERS,)), {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stock:
            for name in stock.keys():  # noqa: SIM118 (it is no mapping)
                rows = stock.get_slice(name)
                size = -(-rows.get_shape()[0] // NUM_MEMBERS)
                local = rows[number * size : (number + 1) * size]
                model[name] = DTensor.from_local(local, mesh, [Shard(0)])
    dcp.save({"model": model}, checkpoint_id=folder)


def run(*command: str) -> tuple[float, float, int]:
    """Run a command; return seconds, CPU seconds, and the most resident bytes of the process."""
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        text = process.stderr.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, text
    return time.perf_counter() - started, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def equal(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    return all(subprocess.run(["cmp", "-s", one / name, other / name], check=False).returncode == 0 for name in names)


def measure(folder: Path, root: Path, runs: int) -> list[dict[str, Any]]:
    """Rows of the table, with all runs."""
    export, direct, other = root / "export", root / "direct", root / "other"
    found: dict[str, list[list[tuple[float, float, int]]]] = {"direct": [], "export": []}
    for number in range(runs):
        export.mkdir()
        shutil.copy(folder / "config.json", export)
        forget(sorted(folder.iterdir()))
        found["direct"].append([run(*CONVERT, str(direct), str(folder))])
        forget(sorted(folder.iterdir()))
        steps = [run(sys.executable, "-c", EXPORT, str(folder), str(export))]
        (export / "model.pt").unlink()
        found["export"].append([*steps, run(*CONVERT, str(other), str(export))])
        if number == 0:
            assert equal(direct, other)
        for made in (export, direct, other):
            shutil.rmtree(made)
    return [
        {
            "way": way,
            "all_seconds": [round(sum(step[0] for step in steps), 3) for steps in all_runs],
            "cpu_seconds": round(statistics.median(sum(step[1] for step in steps) for steps in all_runs), 2),
            "peak_nbytes": max(step[2] for steps in all_runs for step in steps),
        }
        for way, all_runs in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=2, help="of a Llama-3.1-8B (default 2: 3.0 GB)")
    parser.add_argument("--runs", type=int, default=3, help="of each way (default 3)")
    parser.add_argument("--folder", help="where the checkpoint is made (default: the folder for temporary files)")
    parser.add_argument("--out", help="write the results here, as JSON")
    given = parser.parse_args()
    with TemporaryDirectory(dir=given.folder) as name:
        root = Path(name)
        nbytes = write_llama(root / "source", given.layers, 10**9)
        assert forked(partial(save_shards, root / "source", root / "dcp"), NUM_MEMBERS) == [0] * NUM_MEMBERS
        shutil.copy(root / "source" / "config.json", root / "dcp")
        shutil.rmtree(root / "source")
        rows = measure(root / "dcp", root, given.runs)
        table = Table("way", "seconds", "CPU seconds", "peak, MB")
        for row in rows:
            seconds = statistics.median(row["all_seconds"])
            table.add_row(row["way"], f"{seconds:.2f}", f"{row['cpu_seconds']:.2f}", f"{row['peak_nbytes'] / 1e6:.0f}")
        Console(width=120).print(table)
        if given.out is not None:
            top = {"machine": machine(root), "nbytes": nbytes, "members": NUM_MEMBERS, "runs": given.runs, "rows": rows}
            Path(given.out).write_text(json.dumps(top, indent=1) + "\n")


if __name__ == "__main__":
    main()
