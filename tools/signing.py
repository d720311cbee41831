"""Measures what trust costs: loads of a signed folder with and without a policy, and after `model_signing verify`.

In turns, in fresh processes: one rank of 8, and all at once; from memory and from the drive; with the processor's SHA
instructions and without. GB read are of the drive, by all processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec
from rich.console import Console
from rich.table import Table

import relayout
from relayout.benchmark.machine import forget, remember
from relayout.benchmark.measure import write_llama

NUM_RANKS = 8
WITHOUT_SHA = {"OPENSSL_ia32cap": ":~0x20000000"}
"""OpenSSL then uses AVX2; of other processors than x86-64 it changes nothing."""
SERVER = """
import json, os, sys, time
import torch, relayout
import relayout.loader.api, relayout.checkpoint.trust
from model_signing import verifying
def counted():
    return int(dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())["read_bytes"])
def load(folder, rank, policy, key):
    before, started = counted(), time.perf_counter()
    if key:
        verifying.Config().use_elliptic_key_verifier(public_key=key).verify(folder, folder + "/model.sig")
    tensors = relayout.load(folder, rank, trust=policy)
    return time.perf_counter() - started, counted() - before
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
"""Imports once, and forks a process for each rank."""
WAYS: dict[str, tuple[bool, bool, dict[str, str]]] = {
    "load": (False, False, {}),
    "load(trust=)": (True, False, {}),
    "load(trust=), no SHA instructions": (True, False, WITHOUT_SHA),
    "model_signing verify, load": (False, True, {}),
}
"""Whether there is a policy, whether the stock verifier runs before, and variables."""


def run(server: subprocess.Popen[str], folder: Path, ranks: range, way: str) -> tuple[float, int]:
    """Seconds of the slowest process, and the bytes that all have read from the drive."""
    has_policy, is_verified, _ = WAYS[way]
    policy, key = (str(folder.parent / name) for name in ("policy.toml", "key.pub"))
    asked = [str(folder), len(ranks), policy if has_policy else None, key if is_verified else None]
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(asked) + "\n")
    server.stdin.flush()
    results = json.loads(server.stdout.readline())
    return max(seconds for seconds, _ in results), sum(nbytes for _, nbytes in results)


def serve(variables: dict[str, str]) -> subprocess.Popen[str]:
    """A process that answers `run`."""
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": os.environ | variables}
    return subprocess.Popen([sys.executable, "-c", SERVER], **how)  # type: ignore[call-overload,no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", nargs="?", help="a checkpoint (default: made, 2 layers of a Llama-3.1-8B, 3.0 GB)")
    parser.add_argument("--runs", type=int, default=3, help="of each way (default 3)")
    parser.add_argument("--folder", help="where the checkpoint is made (default: the folder for temporary files)")
    given = parser.parse_args()
    with TemporaryDirectory(dir=given.folder) as name:
        place = Path(name)
        key = ec.generate_private_key(ec.SECP256R1())
        (place / "key").write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()))
        public = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
        (place / "key.pub").write_bytes(public)
        (place / "policy.toml").write_text('[[signer]]\npublic_key = "key.pub"\n')
        source = Path(given.source or place / "source")
        if given.source is None:
            write_llama(source, 2)
        relayout.convert(source, folder := place / "model", tp=NUM_RANKS, digest="sha256")
        relayout.sign(folder, key=place / "key")
        servers = {way: serve(variables) for way, (_, _, variables) in WAYS.items()}
        table = Table("from", "ranks", "way", "seconds", "times load", "GB read")
        for is_cold in (True, False):
            for ranks in (range(1), range(NUM_RANKS)):
                found: dict[str, list[tuple[float, int]]] = {way: [] for way in WAYS}
                for _ in range(given.runs):
                    for way in WAYS:  # In turns: what the machine does meanwhile concerns all alike.
                        (forget if is_cold else remember)(folder.iterdir())
                        found[way].append(run(servers[way], folder, ranks, way))
                seconds = {way: statistics.median(each for each, _ in runs) for way, runs in found.items()}
                for way, runs in found.items():
                    read = statistics.median(nbytes for _, nbytes in runs) / 1e9
                    ratio = seconds[way] / seconds["load"]
                    where = "drive" if is_cold else "memory"
                    table.add_row(where, str(len(ranks)), way, f"{seconds[way]:.3f}", f"{ratio:.2f}", f"{read:.2f}")
        for server in servers.values():
            server.communicate()
        Console(width=110).print(table)


if __name__ == "__main__":
    main()
