"""A checkpoint of tens of gigabytes: its conversion, and loads of it with several budgets: the part `size`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.drive import direct_read, files_of, limit_by

import relayout
from gpu.loads import measure, prepare
from gpu.results import Results
from relayout.benchmark.machine import num_cpus
from relayout.benchmark.measure import write_llama

TP, RANK = 8, 3
LAYERS = 50
"""Of Llama-3.1-8B's shapes: 24 GB, twice of which fits onto a drive of 64 GiB."""
SMALL = {"num_layers": 2, "vocab_size": 16_000}
"""1.0 GB, to rehearse."""
MEMORY_MIB = (128, 256, 512)
THREADS = (8, 16, 32)
_CHUNK_NBYTES = 64 * 2**20
_SHARD_NBYTES = 10**9
_SPARE_NBYTES = 4 * 10**9


def measure_all(results: Results, work: Path, device: str) -> None:
    """Measure everything that is not in `results` yet."""
    source, folder = work / "large", work / f"large-tp{TP}"
    sizes = SMALL if device == "cpu" else {"num_layers": LAYERS}
    results.measure("made", lambda: made(source, **sizes))
    results.measure("converted", lambda: converted(source, folder))
    if not folder.exists():
        raise SystemExit("nothing to load: see the rows before")
    files = files_of([folder])
    expected = relayout.load(folder, RANK, backend="buffered")
    rank_nbytes = sum(tensor.nbytes for tensor in expected.values())
    whole_nbytes = relayout.inspect(folder).nbytes

    def drive() -> dict[str, Any]:
        prepare([folder], cold=True)
        return {"gb_per_s": direct_read([file for file in files if file.suffix == ".safetensors"]), "by": limit_by()}

    def once(load: Callable[[], Any], nbytes: int, *, cold: bool) -> dict[str, Any]:
        prepare([folder], cold=cold)
        return measure(load, device, nbytes)

    results.measure("drive", drive)
    parameters = {name: torch.empty_like(tensor, device=device) for name, tensor in expected.items()}
    loads: dict[str, tuple[Callable[..., Any], int]] = {
        f"rank {RANK} of {TP}": (partial(relayout.load, folder, RANK, device=device), rank_nbytes),
        f"rank {RANK} of {TP}, into": (
            partial(relayout.load, folder, RANK, device=device, into=parameters),
            rank_nbytes,
        ),
        "whole": (partial(relayout.load, folder, device=device), whole_nbytes),
    }
    for cold in (True, False):
        for name, (load, nbytes) in loads.items():
            key = f"{name}, {'cold' if cold else 'warm'}"
            results.measure(key, partial(once, load, nbytes, cold=cold))
    wrong = [name for name, tensor in parameters.items() if not _same(tensor, expected[name])]
    results.measure("verdict: bytes of a rank", lambda: {"equal": not wrong, "wrong": wrong})
    load, nbytes = loads["whole"]
    for cold in (False, True):
        for memory, threads in [(memory, None) for memory in MEMORY_MIB] + [(512, count) for count in THREADS]:
            key = f"whole, {'cold' if cold else 'warm'}, {memory} MiB, {threads or 'default'} threads"
            options = {"memory": memory * 2**20, "threads": threads}
            results.measure(key, partial(once, partial(load, **options), nbytes, cold=cold))


def made(folder: Path, **sizes: int) -> dict[str, Any]:
    """Write a plain checkpoint of random bytes; all processors fill its shards at once."""
    started = time.monotonic()
    fresh = folder.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    nbytes = write_llama(fresh, shard_nbytes=_SHARD_NBYTES, holes=True, **sizes)
    if shutil.disk_usage(fresh).free < 2 * nbytes + _SPARE_NBYTES:
        shutil.rmtree(fresh)
        raise OSError(f"{fresh.parent} has no room for twice {nbytes} bytes")
    pieces = []
    for file in sorted(fresh.glob("*.safetensors")):
        with file.open("rb") as stream:
            start = 8 + int.from_bytes(stream.read(8), "little")
        pieces += [(file, at) for at in range(start, file.stat().st_size, _CHUNK_NBYTES)]
    with ThreadPoolExecutor(num_cpus()) as pool:
        list(pool.map(lambda numbered: fill(numbered[0], *numbered[1]), enumerate(pieces)))
    os.sync()
    fresh.rename(folder)
    seconds = time.monotonic() - started
    return {"nbytes": nbytes, "seconds": round(seconds, 2), "gb_per_s": round(nbytes / seconds / 1e9, 2)}


def fill(number: int, file: Path, offset: int) -> None:
    """Overwrite a chunk of a shard with random bytes, which depend on its number."""
    nbytes = min(_CHUNK_NBYTES, file.stat().st_size - offset)
    numbers = np.random.Generator(np.random.SFC64(number)).integers(0, 2**64, -(-nbytes // 8), np.uint64)
    memory, fd = memoryview(numbers).cast("B")[:nbytes], os.open(file, os.O_WRONLY)
    try:
        while memory:
            count = os.pwrite(fd, memory, offset)
            offset, memory = offset + count, memory[count:]
    finally:
        os.close(fd)


def converted(source: Path, folder: Path) -> dict[str, Any]:
    """Convert the checkpoint, and return the throughput."""
    prepare([source], cold=True)
    started = time.monotonic()
    relayout.convert(source, folder, tp=TP)
    seconds, nbytes = time.monotonic() - started, relayout.inspect(folder).nbytes
    return {"nbytes": nbytes, "seconds": round(seconds, 2), "gb_per_s": round(nbytes / seconds / 1e9, 2)}


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.cpu().reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
