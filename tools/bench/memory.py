"""`tools/run bench memory`: what works in a cgroup of a rank's tensors and 256 MiB, and what stays cached.

Needs a memory controller of cgroups, version 1 or 2, that this user may write to.
"""

from __future__ import annotations

import subprocess
import sys
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
from relayout.benchmark.machine import forget
from relayout.benchmark.measure import expected_digests
from relayout.benchmark.run import Died, load_together

TP, RANK = 8, 3
BEYOND_NBYTES = 256 * 2**20
PEERS = (
    *("relayout", "relayout_direct", "relayout_buffered", "relayout_plain"),
    *("get_slice", "load_file", "load_file_pread", "threads", "map_populate", "runai", "fastsafetensors"),
)


def measure(source: Path, limit: float, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Rows of the table: loaders of one rank, then commands."""
    converted, restored = source.with_name(f"tp{TP}"), source.with_name("restored")
    relayout.convert(source, converted, tp=TP)
    files = [path for folder in (source, converted) for path in folder.glob("*.safetensors")]
    tensors_nbytes = total_nbytes(source) // TP
    expected = expected_digests(converted)[RANK]
    rows = []

    def run(name: str, work: Callable[[], str | None]) -> None:
        forget(files)
        with new_group() as group:
            with group.limited(tensors_nbytes + BEYOND_NBYTES):
                failed = work()
            known = sum(_resident(path) for path in files)
            rows.append(
                {
                    "path": name,
                    "failed": failed,
                    "own_nbytes": group.peak_nbytes,
                    "tensors_nbytes": tensors_nbytes,
                    "cached_nbytes": known,
                }
            )
        tell(str(rows[-1]))

    for name in PEERS:
        if LOADERS[name].absence() is None:
            job = LoadJob("bench.peers", name, str(source), str(converted), TP, RANK, 1, BEYOND_NBYTES)
            run(LOADERS[name].title, lambda job=job: _load(job, expected, limit))
    again = source.with_name("again")
    for words in (
        ("convert", source, "--tp", TP, "--output", again),
        ("verify", converted, "--source", source),
        ("restore", converted, "--output", restored),
    ):
        run(f"relayout {words[0]}", lambda words=words: _command(words, limit))
    return rows


def _resident(path: Path) -> int:
    from relayout.storage.system import resident_nbytes

    with path.open("rb") as file:
        return resident_nbytes(file.fileno(), 0, path.stat().st_size) or 0


def _load(job: LoadJob, expected: str, limit: float) -> str | None:
    try:
        measured = load_together([job], LOADERS[job.loader], lambda: None, limit=limit)
    except Died as died:
        return str(died)
    return None if measured.digests == (expected,) else "loaded wrong bytes"


def _command(words: tuple[object, ...], limit: float) -> str | None:
    command = [sys.executable, "-m", "relayout", *map(str, words), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    return None if not done.returncode else f"exit status {done.returncode}: {done.stderr.strip()[-200:]}"


def print_table(console: Console, rows: list[dict[str, Any]]) -> None:
    """The rows."""
    nbytes = rows[0]["tensors_nbytes"]
    table = Table(title=f"one rank of {nbytes / 1e6:.0f} MB in a cgroup of {(nbytes + BEYOND_NBYTES) / 1e6:.0f} MB")
    for heading in ("", "result", "own memory, MiB", "left in the page cache, MiB"):
        table.add_column(heading, justify="right" if "MiB" in heading else "left")
    for row in rows:
        sizes = (f"{row[key] / 2**20:.0f}" for key in ("own_nbytes", "cached_nbytes"))
        table.add_row(row["path"], row["failed"] or "works", *sizes)
    console.print(table)
