"""`tools/run bench rows`: rows of a table of n-grams by number, beside a mapped file; and what a start does with it.

The table is stored as 64 shards and converted for two ranks. Each run is a fresh process, which reads rows of rank 0 at
random numbers, in batches. All of a run read the same rows, from the same file, and their digest is compared outside of
the timed section.

A start of SGLang with the table in a file writes all of it (`ple_offload_backend` "file", 0.5.23: `torch.from_file` of
a sparse file, shared, and a copy of each shard); relayout's plugin maps the rank's run instead.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

import relayout
from relayout.benchmark.machine import forget, remember

ROW_NBYTES, NUM_SHARDS, TP = 160, 64, 2
BATCH = 1024
"""Rows of a batch: 64 tokens of 16 n-grams."""
_LAYER = "model.layers.1.ple.ple_embedding.ngram_embedding"
TABLE = f"{_LAYER}.shard_#.weight"
READERS = ("relayout.open_rows", "numpy.memmap", "numpy.memmap, MADV_RANDOM")
STARTS = ("mapped in place (relayout)", "written to a file (SGLang)")


def make(folder: Path, nbytes: int) -> Path:
    """Write a checkpoint with a table of about so many bytes, and convert it."""
    source = folder / "source"
    source.mkdir()
    rows = nbytes // ROW_NBYTES // NUM_SHARDS // 128 * 128
    generator = np.random.default_rng(1)
    for shard in range(NUM_SHARDS):
        part = torch.from_numpy(generator.integers(0, 256, (rows, ROW_NBYTES), np.uint8)).view(torch.float8_e4m3fn)
        save_file({f"{_LAYER}.shard_{shard}.weight": part}, source / f"model-{shard:05}.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "qwen4_exp_text"}))
    relayout.convert(source, folder / "converted", tp=TP)
    return folder / "converted"


def measure(converted: Path, num_rows: int, runs: int, log_line: Callable[[str], None]) -> list[dict[str, Any]]:
    """Results of all readers, cold and warm, and of all starts, in turns."""
    found: list[dict[str, Any]] = []
    files = sorted(converted.glob("*.safetensors"))
    for _ in range(runs):
        for is_cold in (True, False):
            same = set()
            for name in READERS:
                forget(files)
                if not is_cold:
                    remember(files)
                found.append(_run("rows", name, converted, num_rows) | {"cold": is_cold})
                same.add(found[-1].pop("digest"))
                log_line(str(found[-1]))
            assert len(same) == 1, "readers differ"
        for name in STARTS:
            forget(files)
            found.append(_run("start", name, converted, num_rows))
            log_line(str(found[-1]))
    return found


def _run(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.rows", *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, check=True, text=True)
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def print_table(console: Console, rows: list[dict[str, Any]]) -> None:
    """One line for each reader and start: medians."""
    table = Table("what", "page cache", "rows/s", "ratio", "MiB of the process", "MiB in the page cache", "MB written")
    for line in summary(rows):
        table.add_row(*line)
    console.print(table)


def summary(rows: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The lines of the table: medians of all runs, and rates beside that of the mapped file."""
    lines = []
    for state in (True, False):
        base = _median(rows, READERS[1], "rows_per_s", state)
        for name in READERS:
            rate = _median(rows, name, "rows_per_s", state)
            memory, cached = (_median(rows, name, what, state) / 2**20 for what in ("own_nbytes", "cached_nbytes"))
            cache = "cold" if state else "warm"
            lines.append((name, cache, f"{rate:,.0f}", f"{rate / base:.2f}", f"{memory:.0f}", f"{cached:.0f}", ""))
    for name in STARTS:
        memory, written = (_median(rows, name, what, None) for what in ("own_nbytes", "written_nbytes"))
        lines.append((name, "", "", "", f"{memory / 2**20:.0f}", "", f"{written / 1e6:.1f}"))
    return lines


def _median(rows: list[dict[str, Any]], name: str, what: str, is_cold: bool | None) -> float:
    return float(np.median([row[what] for row in rows if row["name"] == name and row.get("cold") == is_cold]))


def _memory() -> int:
    """Bytes of this process alone: without mapped pages of files."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(fields["RssAnon"].split()[0]) * 1024


def _read(name: str, converted: Path, num_rows: int) -> dict[str, Any]:
    from relayout.storage.system import resident_nbytes

    with relayout.open_rows(converted, 0, TABLE) as table:
        [(start, end)], run = table.held, table.run
        assert run is not None
        path, offset, nbytes = run.file.path, run.offset, run.nbytes
        assert path is not None
        wanted = np.random.default_rng(2).integers(start, end, num_rows).reshape(-1, BATCH)
        mapped = np.memmap(path, np.uint8, "r", offset, (end - start, ROW_NBYTES))
        if name == READERS[2]:
            mapped._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
        out = torch.empty((BATCH, ROW_NBYTES), dtype=torch.float8_e4m3fn)
        digest, seconds, most = hashlib.sha256(), 0.0, 0
        before, cached = _memory(), _cached(path, offset, nbytes, resident_nbytes)
        for ids in wanted:
            began = time.perf_counter()
            is_ours = name == READERS[0]
            found = table.rows(ids, out=out).view(torch.uint8).numpy() if is_ours else mapped[ids - start]
            seconds += time.perf_counter() - began
            digest.update(found.tobytes())
            most = max(most, _memory() - before)
        after = _cached(path, offset, nbytes, resident_nbytes)
    return {
        "rows_per_s": num_rows / seconds,
        "own_nbytes": most,
        "cached_nbytes": after - cached,
        "table_nbytes": nbytes,
        "digest": digest.hexdigest(),
    }


def _cached(path: Path, offset: int, nbytes: int, resident: Callable[[int, int, int], int | None]) -> int:
    with path.open("rb") as file:
        return resident(file.fileno(), offset, nbytes) or 0


def _start(name: str, converted: Path) -> dict[str, Any]:
    """Have the table of rank 0 in memory as a start does, and count what is written to the drive."""
    from logging import getLogger
    from types import SimpleNamespace

    from relayout.engines.sglang_tables import MappedTables

    with relayout.open_rows(converted, 0, TABLE) as table:
        [(start, end)] = table.held
    shape, path = (end - start, ROW_NBYTES), converted.with_name("ple_table.bin")

    def allocate(*_: Any, **__: Any) -> torch.Tensor:
        with path.open("wb") as file:
            file.truncate(shape[0] * shape[1])
        storage = torch.from_file(str(path), shared=True, size=shape[0] * shape[1], dtype=torch.uint8)
        return storage.view(torch.float8_e4m3fn).view(shape)

    before, written = _memory(), _written()
    began = time.perf_counter()
    qwen = SimpleNamespace(allocate_ple_host_table=allocate, make_ple_file_prefetcher=lambda table: None)
    tables = MappedTables(str(converted), 0, TP, getLogger())
    if name == STARTS[0]:
        with tables.replacing(qwen):
            memory = qwen.allocate_ple_host_table(shape, torch.float8_e4m3fn, tag=f"rows{start}-{end}")
        assert tables.names, "the table was not mapped"
    else:
        memory = allocate()
    first = 0
    for shard, tensor in relayout.iter_load(converted, 0):
        if shard not in tables.names:
            memory[first : first + len(tensor)].copy_(tensor)
            first += len(tensor)
        elif first == 0:  # Nothing else is in this checkpoint: a start would not be given these.
            break
    os.sync()
    seconds = time.perf_counter() - began
    result = {"seconds": seconds, "own_nbytes": _memory() - before, "written_nbytes": _written() - written}
    path.unlink(missing_ok=True)
    return result


def _written() -> int:
    """Bytes that this process has caused to be written to a drive."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("write_bytes")).split()[1])


if __name__ == "__main__":
    kind, which, folder, count = sys.argv[1:]
    work = _read(which, Path(folder), int(count)) if kind == "rows" else _start(which, Path(folder))
    print(json.dumps({"name": which, **work}))
