"""`tools/run bench convert`: conversion, verification and restoration beside a plain copy and the drive's own limit."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.drive import direct_read, files_of, fio_mixed, total_nbytes
from relayout.benchmark.machine import prepare
from relayout.storage.system import proc_nbytes


def measure(scratch: Path, source: Path, runs: int, idle: float = 0.0) -> dict[str, Any]:
    """Run everything so many times, in turns, each after so many seconds without work; medians."""
    target, other, cache = scratch / "target", scratch / "other", scratch / "cache"
    nbytes = total_nbytes(source)
    command = [sys.executable, "-m", "relayout"]
    ways: dict[str, list[list[str]]] = {
        "relayout convert --tp 8": [[*command, "convert", str(source), "--tp", "8", "--json", "-o", str(target)]],
        "relayout verify": [[*command, "verify", str(target), "--json"]],
        "relayout restore": [[*command, "restore", str(target), "-o", str(other), "--json"]],
        # What a first start leaves to a process of low priority.
        "relayout cache add": [[*command, "cache", "add", str(source), "--folder", str(cache), "--tp", "8"]],
        "cp -r, sync": [["cp", "-r", str(source), str(other)], ["sync"]],
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    limits: list[dict[str, float]] = []
    peaks = []
    for _ in range(runs):
        limits.append({"mixed": fio_mixed(scratch), "read": direct_read(list(source.glob("*.safetensors")))})
        for way, commands in ways.items():
            for leftover in [other, cache, *([target] if way.startswith("relayout convert") else [])]:
                shutil.rmtree(leftover, ignore_errors=True)
            os.sync()
            files = files_of([source, target] if target.exists() else [source])
            # A copy fills the page cache with as much again; the others need next to no memory.
            prepare([], files, cold=True, needed_nbytes=2 * nbytes if way.startswith("cp") else 0)
            time.sleep(idle)
            started = time.monotonic()
            peak = max(run_command(command) for command in commands)
            seconds[way].append(time.monotonic() - started)
            if way.startswith("relayout convert"):
                peaks.append(peak)
    limit = {name: statistics.median(one[name] for one in limits) for name in limits[0]}
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    copied = medians["cp -r, sync"]
    rows = {
        way: {
            "seconds": median,
            "all_seconds": seconds[way],
            "gb_per_s": nbytes / median / 1e9,
            "of_cp": median / copied,
            # Both directions at once when writing: the limit is that of half reads, half writes.
            "of_drive": nbytes / median / 1e9 / limit["read" if "verify" in way else "mixed"],
        }
        for way, median in medians.items()
    }
    return {
        "ways": rows,
        "peak_nbytes": peaks,
        "drive_gb_per_s": limit,
        "source_nbytes": nbytes,
        "runs": runs,
        "idle_seconds": idle,
    }


def print_table(console: Console, results: dict[str, Any]) -> None:
    """What `measure` found."""
    nbytes, runs, rows = results["source_nbytes"], results["runs"], results["ways"]
    table = Table(box=box.SIMPLE_HEAD, title=f"{nbytes / 1e9:.1f} GB, cold cache, median of {runs}")
    for heading in ("", "s", "GB/s", "of cp -r + sync", "of the drive's limit (fio)"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for way, row in rows.items():
        table.add_row(
            way, f"{row['seconds']:.2f}", f"{row['gb_per_s']:.2f}", f"{row['of_cp']:.2f}", f"{row['of_drive']:.2f}"
        )
    console.print(table)
    console.print(f"peak memory of the conversion: {statistics.median(results['peak_nbytes']) / 1e6:.0f} MB")


def run_command(command: list[str]) -> int:
    """Run a command; its peak resident memory in bytes, to within what it grows in its last 20 ms."""
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        # Not ru_maxrss, which begins with the size of the process that forks.
        while process.poll() is None:
            peak = max(peak, proc_nbytes(f"{process.pid}/status", "VmHWM") or 0)
            time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return peak
