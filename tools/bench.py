"""Measures conversion and loading beside their peers and the drive's own limit, as ratios within one run."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from bench_peer import PEERS
from checkpoints import write_llama
from rich import box
from rich.console import Console
from rich.table import Table

import relayout

TP = 8
LAYER_NBYTES = 436_224_000
EMBEDDING_NBYTES = 2_101_355_000

_WITHOUT_DIGESTS = """
import xxhash
class Nothing:
    def update(self, view): pass
    def hexdigest(self): return 32 * "0"
xxhash.xxh3_128 = Nothing
from relayout.cli import main
main()
"""
"""The command line of relayout, which hashes nothing that it copies."""

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
console = Console(highlight=False, width=120)

DirOption = Annotated[Path | None, typer.Option("--dir", help="Where to make the checkpoints; a temporary folder.")]
SizeOption = Annotated[float, typer.Option("--size", help="GB of the checkpoint (Llama-3.1-8B shapes, fewer layers).")]
RunsOption = Annotated[int, typer.Option("--runs", help="Runs of everything, interleaved; medians are reported.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Write the results here, as JSON.")]


@app.command()
def convert(folder: DirOption = None, size: SizeOption = 5.6, runs: RunsOption = 5, out: OutOption = None) -> None:
    """Time `relayout convert --tp 8`, `verify` and `restore` beside `cp -r` with `sync`, from a cold cache."""
    with tempfile.TemporaryDirectory(prefix="relayout-bench-", dir=folder) as scratch:
        source = _make_source(Path(scratch), size)
        target, other = Path(scratch) / "target", Path(scratch) / "other"
        nbytes = _total_nbytes(source)
        command = [sys.executable, "-m", "relayout"]
        conversion = ["convert", str(source), "--tp", "8", "--json", "-o"]
        ways: dict[str, list[list[str]]] = {
            "relayout convert --tp 8": [[*command, *conversion, str(target)]],
            "relayout verify": [[*command, "verify", str(target), "--json"]],
            "relayout restore": [[*command, "restore", str(target), "-o", str(other), "--json"]],
            "convert without digests": [[sys.executable, "-c", _WITHOUT_DIGESTS, *conversion, str(other)]],
            "cp -r, sync": [["cp", "-r", str(source), str(other)], ["sync"]],
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        limits: list[dict[str, float]] = []
        peaks = []
        for _ in range(runs):
            limits.append({"mixed": _fio_mixed(Path(scratch)), "read": _fio_read(list(source.glob("*.safetensors")))})
            for way, commands in ways.items():
                for leftover in [other, target] if way.startswith("relayout convert") else [other]:
                    shutil.rmtree(leftover, ignore_errors=True)
                os.sync()
                _forget([source, target] if target.exists() else [source])
                if way.startswith("cp"):  # The page cache takes as much again; the others take next to nothing.
                    _touch_memory(2 * nbytes)
                started = time.monotonic()
                peak = max(_run(command) for command in commands)
                seconds[way].append(time.monotonic() - started)
                if way.startswith("relayout convert"):
                    peaks.append(peak)
        limit = {name: statistics.median(one[name] for one in limits) for name in limits[0]}
        medians = {way: statistics.median(values) for way, values in seconds.items()}
        copied = medians["cp -r, sync"]
        digests = 1 - medians["convert without digests"] / medians["relayout convert --tp 8"]
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
    table = Table(box=box.SIMPLE_HEAD, title=f"{nbytes / 1e9:.1f} GB, cold cache, median of {runs}")
    for heading in ("", "s", "GB/s", "of cp -r + sync", "of the drive's limit (fio)"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for way, row in rows.items():
        table.add_row(
            way, f"{row['seconds']:.2f}", f"{row['gb_per_s']:.2f}", f"{row['of_cp']:.2f}", f"{row['of_drive']:.2f}"
        )
    console.print(table)
    console.print(f"peak memory of the conversion: {statistics.median(peaks) / 1e6:.0f} MB")
    console.print(f"share of digests in its time: {100 * digests:.1f} %")
    results = {
        "ways": rows,
        "digests_share": digests,
        "peak_nbytes": peaks,
        "drive_gb_per_s": limit,
        "source_nbytes": nbytes,
        "runs": runs,
    }
    _write(out, results)


@app.command()
def load(
    folder: DirOption = None,
    size: SizeOption = 5.6,
    runs: RunsOption = 5,
    out: OutOption = None,
    peers: Annotated[str, typer.Option(help="Comma-separated; default: all.")] = ",".join(PEERS),
    warm: Annotated[bool, typer.Option("--warm", help="Also with everything in the page cache.")] = False,
) -> None:
    """Time loading one rank of 8, all 8 at once, and the whole model (TP 1): relayout and its peers."""
    with tempfile.TemporaryDirectory(prefix="relayout-bench-", dir=folder) as scratch:
        source = _make_source(Path(scratch), size)
        converted = {}
        for tp in (1, TP):
            converted[tp] = Path(scratch) / f"tp{tp}"
            relayout.convert(source, converted[tp], tp=tp)
        scenarios = {"one rank of 8": (TP, [3]), "all 8 ranks at once": (TP, list(range(TP))), "whole model": (1, [0])}
        results: dict[str, Any] = {}
        for cold in (True, False) if warm else (True,):
            for scenario, (tp, ranks) in scenarios.items():
                heading = f"{scenario}, {'cold' if cold else 'warm'}"
                results[heading] = _load_scenario(source, converted[tp], tp, ranks, peers.split(","), runs, cold)
                _print_load(heading, results[heading])
    _write(out, {"scenarios": results, "size_gb": size, "runs": runs})


def _load_scenario(
    source: Path, converted: Path, tp: int, ranks: list[int], peers: list[str], runs: int, cold: bool
) -> dict[str, Any]:
    files = [converted / f"model-rank-{rank}-part-0.safetensors" for rank in ranks]
    measured: dict[str, list[dict[str, float]]] = {peer: [] for peer in peers}
    limits = []
    for _ in range(runs):
        limits.append(_fio_read(files))
        for peer in peers:
            if cold:
                _forget([source, converted])
            else:
                _remember([converted if peer == "relayout" else source])
            answers = _run_peers(peer, source, converted, tp, ranks)
            if answers is None:
                continue
            measured[peer].append(
                {
                    "seconds": max(one["ended"] for one in answers) - min(one["started"] for one in answers),
                    "cpu_seconds": sum(one["cpu_seconds"] for one in answers),
                    "peak_over_needed": max(one["peak_nbytes"] / one["nbytes"] for one in answers),
                    "drive_over_needed": sum(one["drive_nbytes"] for one in answers)
                    / sum(one["nbytes"] for one in answers),
                    "gb": sum(one["nbytes"] for one in answers) / 1e9,
                }
            )
    rows = {
        peer: {key: statistics.median(one[key] for one in values) for key in values[0]}
        | {"all_seconds": [one["seconds"] for one in values]}
        for peer, values in measured.items()
        if values
    }
    return {"peers": rows, "drive_gb_per_s": statistics.median(limits), "failed": sorted(set(peers) - set(rows))}


def _run_peers(peer: str, source: Path, converted: Path, tp: int, ranks: list[int]) -> list[dict[str, Any]] | None:
    """One process for each rank, started together; None if one died (of memory, say)."""
    program = Path(__file__).with_name("bench_peer.py")
    processes = []
    for rank in ranks:
        job = {"peer": peer, "source": str(source), "converted": str(converted), "tp": tp, "rank": rank}
        processes.append(
            subprocess.Popen(
                [sys.executable, str(program), json.dumps(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
    for process in processes:
        assert process.stdout
        process.stdout.readline()
    _touch_memory(3 * _total_nbytes(source) // tp * len(ranks))
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate()[0] for process in processes]
    if not all(answers) or any(process.returncode for process in processes):
        console.print(f"{peer}: died ({[process.returncode for process in processes]})")
        return None
    parsed = [json.loads(answer) for answer in answers]
    if not all(one["equal"] for one in parsed):
        raise SystemExit(f"{peer}: loaded wrong bytes")
    return parsed


def _print_load(heading: str, result: dict[str, Any]) -> None:
    rows = result["peers"]
    limit = result["drive_gb_per_s"]
    table = Table(box=box.SIMPLE_HEAD, title=f"{heading} (drive: {limit:.2f} GB/s by fio)", title_justify="left")
    for name in ("", "s", "GB/s", "relayout is", "CPU s", "peak / needed", "read / needed"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    mine = rows.get("relayout", {}).get("seconds")
    for peer, row in sorted(rows.items(), key=lambda item: item[1]["seconds"]):
        table.add_row(
            peer,
            f"{row['seconds']:.2f}",
            f"{row['gb'] / row['seconds']:.2f}",
            "" if mine is None or peer == "relayout" else f"{row['seconds'] / mine:.1f}x faster",
            f"{row['cpu_seconds']:.1f}",
            f"{row['peak_over_needed']:.2f}",
            f"{row['drive_over_needed']:.3f}",
        )
    console.print(table)
    for peer in result["failed"]:
        console.print(f"{peer}: did not come through")


def _make_source(folder: Path, size: float) -> Path:
    layers = max(1, round((size * 1e9 - EMBEDDING_NBYTES) / LAYER_NBYTES))
    console.print(f"making a checkpoint of Llama-3.1-8B shapes with {layers} layers")
    write_llama(folder / "source", layers, shard_nbytes=10**9)
    os.sync()
    return folder / "source"


def _run(command: list[str]) -> int:
    """Run a command; its peak resident memory in bytes, to within what it grows in its last 20 ms."""
    peak = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        # Not ru_maxrss, which begins with the size of the process that forks.
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            found = re.search(r"VmHWM:\s*(\d+)", status.read_text())
            peak = max(peak, int(found[1]) * 1024) if found else peak
            time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return peak


def _total_nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _touch_memory(nbytes: int) -> None:
    """Write to memory and free it, so that it is the machine's when the measured process asks for it.

    A virtual machine that gives free memory back to its host pays for getting it again, in host page faults, as much
    as for reading a drive. Whoever runs after a process that has just freed memory would win.
    """
    free = re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())
    nbytes = min(nbytes, int(free[1]) * 1024 * 7 // 10) if free else nbytes
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        pages = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
        pages[:] = 1
        del pages


def _files(folders: Iterable[Path]) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.iterdir())]


def _forget(folders: Iterable[Path]) -> None:
    """Drop the folders' pages from the cache, and make sure that they are gone."""
    os.sync()
    for path in _files(folders):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        left = _resident_share(path)
        if left > 0.001:
            raise SystemExit(f"{path}: {100 * left:.1f} % still in the page cache")


def _remember(folders: Iterable[Path]) -> None:
    for path in _files(folders):
        with path.open("rb") as file:
            while file.read(64 * 2**20):
                pass


def _resident_share(path: Path) -> float:
    nbytes = path.stat().st_size
    if nbytes == 0:
        return 0.0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        pages = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
        start = np.frombuffer(mapped, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        result = libc.mincore(ctypes.c_void_p(start.ctypes.data), ctypes.c_size_t(nbytes), pages.ctypes)
        del start
        if result:
            raise OSError(ctypes.get_errno(), "mincore")
        return float((pages & 1).mean())


def _fio(*options: str) -> dict[str, Any]:
    if shutil.which("fio") is None:
        raise SystemExit("fio is needed to know the drive's own limit: install it (apt install fio)")
    command = ["fio", "--name=limit", "--direct=1", "--ioengine=libaio", "--iodepth=8", "--bs=8M", *options]
    run = subprocess.run([*command, "--group_reporting", "--output-format=json"], capture_output=True, check=True)
    job: dict[str, Any] = json.loads(run.stdout[run.stdout.index(b"{") :])["jobs"][0]
    return job


def _fio_read(files: list[Path]) -> float:
    """GB/s of direct reads of these files."""
    result = _fio(f"--filename={':'.join(map(str, files))}", "--rw=read", "--readonly")["read"]
    return float(result["bw_bytes"]) / 1e9


def _fio_mixed(folder: Path) -> float:
    """GB/s of direct reads while as many bytes are written."""
    path = folder / "fio"
    result = _fio(f"--filename={path}", "--rw=rw", "--rwmixread=50", "--size=4G", "--overwrite=1")
    path.unlink()
    return float(result["read"]["bw_bytes"]) / 1e9


def _machine() -> dict[str, object]:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = re.search(r"MemTotal:\s*(\d+)", Path("/proc/meminfo").read_text())
    versions = {}
    for package in ("torch", "safetensors", "fastsafetensors", "runai-model-streamer", "numpy", "xxhash"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "-"
    return {
        "cpu": cpu[1] if cpu else platform.processor(),
        "num_cpus": os.cpu_count(),
        "memory_gb": round(int(memory[1]) / 1e6) if memory else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions | {"relayout": relayout.__version__},
    }


def _write(out: Path | None, results: dict[str, Any]) -> None:
    if out is not None:
        out.write_text(json.dumps({"machine": _machine(), **results}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    app()
