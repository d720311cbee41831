"""Measures what trust costs: loads of a signed folder with and without a policy, and after `model_signing verify`.

In turns, in fresh processes: one rank of 8, and all at once; from the drive and from memory. CPU seconds and GB read
are of all processes. `--before CHECKOUT FOLDER` loads with an earlier commit, too, in the same turns: from a folder
which that commit has converted from the same source and signed, with key.pub and policy.toml beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.drive import machine
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from rich.console import Console
from rich.table import Table

import relayout
from relayout.benchmark.machine import forget, remember
from relayout.benchmark.measure import write_llama

NUM_RANKS = 8
SERVER = """
import json, os, sys, time
import torch, relayout
import relayout.loader.api, relayout.checkpoint.trust
def counted():
    return int(dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())["read_bytes"])
def load(folder, rank, policy, key):
    before, started, used = counted(), time.perf_counter(), time.process_time()
    if key:
        from model_signing import verifying
        verifying.Config().use_elliptic_key_verifier(public_key=key).verify(folder, folder + "/model.sig")
    tensors = relayout.load(folder, rank, trust=policy)
    return time.perf_counter() - started, time.process_time() - used, counted() - before
torch.set_num_threads(1)
for line in sys.stdin:
    folder, num_ranks, policy, key = json.loads(line)
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    ends = []
    for rank in range(num_ranks):
        end, begin = os.pipe()
        ends.append(end)
        if not os.fork():
            os.write(begin, json.dumps(load(folder, rank, policy, key)).encode())
            os._exit(0)
        os.close(begin)
    results = [json.loads(os.read(end, 1000)) for end in ends]
    for end in ends:
        os.close(end)
        os.wait()
    print(json.dumps(results), flush=True)
"""
"""Imports what a load without a policy does, and forks a process for each rank: what a policy imports is counted."""
WAYS = {"load": (False, False), "load(trust=)": (True, False), "model_signing verify, load": (False, True)}
"""Whether there is a policy, and whether the stock verifier runs before."""
EARLIER = " of the commit before"

Loads = list[tuple[float, float, int]]
"""Of each run: seconds of the slowest process, CPU seconds of all, and bytes that all have read from the drive."""


def run(server: subprocess.Popen[str], folder: Path, num_ranks: int, way: str) -> tuple[float, float, int]:
    has_policy, is_verified = WAYS[way.removesuffix(EARLIER)]
    policy, key = (str(folder.parent / name) for name in ("policy.toml", "key.pub"))
    asked = [str(folder), num_ranks, policy if has_policy else None, key if is_verified else None]
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(asked) + "\n")
    server.stdin.flush()
    results = json.loads(server.stdout.readline())
    seconds, used, nbytes = zip(*results, strict=True)
    return max(seconds), sum(used), sum(nbytes)


def serve(checkout: str | None) -> subprocess.Popen[str]:
    """A process that answers `run`."""
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", SERVER], cwd=checkout, **how)  # type: ignore[call-overload,no-any-return]


def make_signed(source: Path, place: Path) -> Path:
    """Convert and sign, with the key and a policy beside the folder."""
    key = ec.generate_private_key(ec.SECP256R1())
    (place / "key").write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
    public = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    (place / "key.pub").write_bytes(public)
    (place / "policy.toml").write_text('[[signer]]\npublic_key = "key.pub"\n')
    relayout.convert(source, folder := place / "model", tp=NUM_RANKS)
    relayout.sign(folder, key=place / "key")
    return folder


def measure(folders: dict[str, Path], servers: dict[str, subprocess.Popen[str]], runs: int) -> list[dict[str, Any]]:
    """Rows of the table, with all runs."""
    rows = []
    for state in ("drive", "memory"):
        for num_ranks in (1, NUM_RANKS):
            found: dict[str, Loads] = {way: [] for way in folders}
            for _ in range(runs):
                for way, folder in folders.items():  # In turns: what the machine does meanwhile concerns all alike.
                    (forget if state == "drive" else remember)(folder.iterdir())
                    found[way].append(run(servers[way], folder, num_ranks, way))
            for way, loads in found.items():
                seconds, used, nbytes = zip(*loads, strict=True)
                row = {"from": state, "ranks": num_ranks, "way": way, "all_seconds": seconds}
                rows.append(row | {"cpu_seconds": statistics.median(used), "read_nbytes": statistics.median(nbytes)})
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    table = Table("from", "ranks", "way", "seconds", "times load", "CPU seconds", "GB read")
    for row in rows:
        own = next(one for one in rows if (one["from"], one["ranks"]) == (row["from"], row["ranks"]))
        seconds, plain = (statistics.median(one["all_seconds"]) for one in (row, own))
        cells = [f"{seconds:.3f}", f"{seconds / plain:.2f}", f"{row['cpu_seconds']:.2f}"]
        table.add_row(row["from"], str(row["ranks"]), row["way"], *cells, f"{row['read_nbytes'] / 1e9:.2f}")
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", nargs="?", help="a checkpoint (default: made, 2 layers of a Llama-3.1-8B, 3.0 GB)")
    parser.add_argument("--runs", type=int, default=3, help="of each way (default 3)")
    parser.add_argument("--folder", help="where the checkpoint is made (default: the folder for temporary files)")
    parser.add_argument("--before", nargs=2, metavar=("CHECKOUT", "FOLDER"), help="an earlier commit, and its folder")
    parser.add_argument("--out", help="write the results here, as JSON")
    given = parser.parse_args()
    with TemporaryDirectory(dir=given.folder) as name:
        source = Path(given.source or Path(name) / "source")
        if given.source is None:
            write_llama(source, 2)
        folders = dict.fromkeys(WAYS, make_signed(source, Path(name)))
        if given.before is not None:
            folders |= dict.fromkeys([way + EARLIER for way in list(WAYS)[:2]], Path(given.before[1]))
        servers = {way: serve(given.before[0] if way.endswith(EARLIER) else None) for way in folders}
        rows = measure(folders, servers, given.runs)
        for server in servers.values():
            server.communicate()
        print_table(rows)
        if given.out is not None:
            nbytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
            top = {"machine": machine(Path(name)), "nbytes": nbytes, "runs": given.runs, "rows": rows}
            Path(given.out).write_text(json.dumps(top, indent=1) + "\n")


if __name__ == "__main__":
    main()
