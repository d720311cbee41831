"""`tools/run bench memory`: what works in a cgroup of a rank's tensors and 256 MiB, how long, and what stays cached.

Each runs twice: where the group has no pages of files, and where it is full of them, as a host that has served files:
the kernel must then take memory back for each page that is needed. Needs a memory controller of cgroups, version 1 or
2, that this user may write to.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from support.cgroups import new_group

import relayout
from bench.drive import total_nbytes
from bench.peers import LOADERS
from relayout.benchmark.loaders import LoadJob
from relayout.benchmark.machine import forget, remember
from relayout.benchmark.measure import expected_digests
from relayout.benchmark.run import LoaderDied, load_together

TP, RANK = 8, 3
BEYOND_NBYTES = 256 * 2**20
PEERS = (
    *("relayout", "relayout_direct", "relayout_buffered", "relayout_plain"),
    *("get_slice", "load_file", "load_file_pread", "threads", "map_populate", "runai", "fastsafetensors"),
)


_PRESSURE = Path("/proc/pressure/memory")
_SAVE = """
import sys, relayout
relayout.save(relayout.load(sys.argv[1], 0), sys.argv[2], config=sys.argv[1])
"""
_FIRST_LOAD = """
import sys, relayout
relayout.load(sys.argv[1], int(sys.argv[2]), tp=int(sys.argv[3]), cache=sys.argv[4])
"""


def measure(source: Path, limit: float, log_line: Callable[[str], None]) -> list[dict[str, Any]]:
    """Rows of the table: loaders of one rank, then commands, each without and with pages of files in the group."""
    converted, one, made = source.with_name(f"tp{TP}"), source.with_name("one"), source.with_name("made")
    relayout.convert(source, converted, tp=TP)
    relayout.save(relayout.load(converted, RANK), one, config=source / "config.json")
    other = source.with_name("other")
    tensors_nbytes = total_nbytes(source) // TP
    with other.open("wb") as file:
        for _ in range((tensors_nbytes + BEYOND_NBYTES) // 2**20):
            file.write(bytes(2**20))
    os.sync()
    files = [path for folder in (source, converted, one) for path in folder.glob("*.safetensors")]
    expected = expected_digests(converted)[RANK]
    rows = []

    def run(name: str, work: Callable[[], str | None]) -> None:
        for is_full in (False, True):
            forget([*files, other])
            shutil.rmtree(made, ignore_errors=True)
            with new_group() as group:
                with group.limited(tensors_nbytes + BEYOND_NBYTES):
                    if is_full:
                        remember([*files, other])
                    before, started, stalled = _cached(files), time.monotonic(), _stalled()
                    failed = work()
                    seconds, stalled = time.monotonic() - started, _stalled() - stalled
                known = _cached([*files, *made.rglob("*.safetensors")])
                rows.append(
                    {
                        "path": name,
                        "is_full": is_full,
                        "failed": failed,
                        "seconds": round(seconds, 2),
                        "stalled_seconds": round(stalled, 3),
                        "own_nbytes": group.peak_nbytes,
                        "tensors_nbytes": tensors_nbytes,
                        "cached_nbytes": max(0, known - before),
                    }
                )
            log_line(str(rows[-1]))

    for name in PEERS:
        if LOADERS[name].absence() is None:
            job = LoadJob("bench.peers", name, str(source), str(converted), TP, RANK, 1, BEYOND_NBYTES)
            run(LOADERS[name].title, lambda job=job: _load(job, expected, limit))
    for name, words in {
        "relayout.load, first, into a cache": ("-c", _FIRST_LOAD, source, RANK, TP, made),
        "relayout.save": ("-c", _SAVE, one, made),
        "relayout convert": ("-m", "relayout", "convert", source, "--tp", TP, "--output", made, "--quiet"),
        "relayout copy --ranks": ("-m", "relayout", "copy", converted, made, "--ranks", RANK, "--quiet"),
        "relayout verify": ("-m", "relayout", "verify", converted, "--source", source, "--quiet"),
        "relayout restore": ("-m", "relayout", "restore", converted, "--output", made, "--quiet"),
    }.items():
        run(name, lambda words=words: _command(words, limit))
    return rows


def _stalled() -> float:
    """Seconds in which some task of the machine has waited for memory, since it started."""
    first, _ = _PRESSURE.read_text().splitlines()
    return int(first.rpartition("=")[2]) / 1e6


def _cached(paths: list[Path]) -> int:
    return sum(map(_resident, paths))


def _resident(path: Path) -> int:
    from relayout.storage.system import resident_nbytes

    with path.open("rb") as file:
        return resident_nbytes(file.fileno(), 0, path.stat().st_size) or 0


def _load(job: LoadJob, expected: str, limit: float) -> str | None:
    try:
        measured = load_together([job], LOADERS[job.loader], lambda: None, limit=limit)
    except LoaderDied as died:
        return str(died)
    return None if measured.digests == (expected,) else "loaded wrong bytes"


def _command(words: tuple[object, ...], limit: float) -> str | None:
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    return None if not done.returncode else f"exit status {done.returncode}: {done.stderr.strip()[-200:]}"


def print_table(console: Console, rows: list[dict[str, Any]]) -> None:
    """The rows."""
    nbytes = rows[0]["tensors_nbytes"]
    table = Table(title=f"one rank of {nbytes / 1e6:.0f} MB in a cgroup of {(nbytes + BEYOND_NBYTES) / 1e6:.0f} MB")
    for heading in ("", "page cache", "result", "s", "s without memory", "own, MiB", "left cached, MiB"):
        table.add_column(heading, justify="left" if heading in ("", "page cache", "result") else "right")
    for row in rows:
        sizes = (f"{row[key] / 2**20:.0f}" for key in ("own_nbytes", "cached_nbytes"))
        state, result = "full" if row["is_full"] else "empty", row["failed"] or "works"
        table.add_row(row["path"], state, result, f"{row['seconds']:.2f}", f"{row['stalled_seconds']:.2f}", *sizes)
    console.print(table)
