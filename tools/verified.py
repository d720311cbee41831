"""Measures what it costs to verify a download: `relayout verify` against its peers, and `convert` with and without.

A checkpoint in the form of the cache of the hub: blobs with the names of their hashes, and a snapshot of links. All in
turns, each a process of its own from its start to its end, from the drive and from memory. `hf cache verify` asks the
hub for the hashes; its comparison runs here with these hashes given, without a request.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.drive import machine
from rich.console import Console
from rich.table import Table

from relayout.benchmark.machine import forget, remember
from relayout.benchmark.measure import write_llama

PEER = """
import sys
from pathlib import Path
from types import SimpleNamespace
from huggingface_hub.utils._verification import collect_local_files, verify_maps
root = Path(sys.argv[1])
local = collect_local_files(root)
remote = {}
for name, path in local.items():
    value = (root / name).readlink().name
    is_large = len(value) == 64
    remote[name] = SimpleNamespace(lfs={"sha256": value} if is_large else None, blob_id=value)
found = verify_maps(remote_by_path=remote, local_by_path=local, revision="main", verified_path=root)
assert found.checked_count == len(remote) > 2 and not found.mismatches
"""
RELAYOUT = (sys.executable, "-m", "relayout")


def git_blob(blob: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(blob) + blob, usedforsecurity=False).hexdigest()


def make_cache(source: Path, root: Path) -> Path:
    """Move a checkpoint into the form of the hub's cache, with a SHA256SUMS of its own; return the snapshot."""
    repository = root / "models--org--llama"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    lines = []
    for path in sorted(source.iterdir()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        name = digest if path.suffix == ".safetensors" else git_blob(path.read_bytes())
        path.rename(repository / "blobs" / name)
        (snapshot / path.name).symlink_to(f"../../blobs/{name}")
        lines.append(f"{digest}  {path.name}\n")
    (root / "SHA256SUMS").write_text("".join(lines))
    return snapshot


def make_plain(snapshot: Path, folder: Path) -> Path:
    """The same files without a digest: hard links, which share pages in memory."""
    folder.mkdir()
    for path in snapshot.iterdir():
        os.link(path.resolve(), folder / path.name)
    return folder


def ways(snapshot: Path, plain: Path, out: Path) -> Iterator[tuple[str, list[str], Path]]:
    """Each way: its name, its command, and the folder where that runs."""
    root = snapshot.parents[2]
    yield "relayout verify", [*RELAYOUT, "verify", str(snapshot)], root
    yield "hf cache verify", [sys.executable, "-c", PEER, str(snapshot)], root
    yield "sha256sum --check", ["sha256sum", "--quiet", "--check", str(root / "SHA256SUMS")], snapshot
    yield "convert, no digest known", [*RELAYOUT, "convert", str(plain), "--tp", "8", "-o", str(out)], root
    yield "convert, verified", [*RELAYOUT, "convert", str(snapshot), "--tp", "8", "-o", str(out)], root


def run(command: list[str], folder: Path, files: list[Path], state: str) -> dict[str, float]:
    (forget if state == "drive" else remember)(files)
    started = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        text = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, text
    assert command[2] != "relayout" or ("verified" in text) == ("plain" not in command[4]), text
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "cpu_seconds": used.ru_utime + used.ru_stime}


def measure(snapshot: Path, plain: Path, out: Path, runs: int) -> list[dict[str, Any]]:
    """Rows of the table, with all runs."""
    files, rows = [path.resolve() for path in snapshot.iterdir()], []
    for state in ("drive", "memory"):
        found: dict[str, list[dict[str, float]]] = {}
        for _ in range(runs):
            for way, command, folder in ways(snapshot, plain, out):  # In turns: other work concerns all alike.
                found.setdefault(way, []).append(run(command, folder, files, state))
                shutil.rmtree(out, ignore_errors=True)
        for way, all_runs in found.items():
            used = statistics.median(one["cpu_seconds"] for one in all_runs)
            seconds = [round(one["seconds"], 3) for one in all_runs]
            rows.append({"from": state, "way": way, "all_seconds": seconds, "cpu_seconds": round(used, 2)})
    return rows


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
        snapshot = make_cache(root / "source", root)
        rows = measure(snapshot, make_plain(snapshot, root / "plain"), root / "out", given.runs)
        table = Table("from", "way", "seconds", "GB/s", "CPU seconds")
        for row in rows:
            seconds = statistics.median(row["all_seconds"])
            cells = (f"{seconds:.2f}", f"{nbytes / seconds / 1e9:.2f}", f"{row['cpu_seconds']:.2f}")
            table.add_row(row["from"], row["way"], *cells)
        Console(width=120).print(table)
        if given.out is not None:
            num_shards = sum(path.suffix == ".safetensors" for path in snapshot.iterdir())
            top = {"machine": machine(root), "nbytes": nbytes, "shards": num_shards, "runs": given.runs, "rows": rows}
            Path(given.out).write_text(json.dumps(top, indent=1) + "\n")


if __name__ == "__main__":
    main()
