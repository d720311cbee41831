"""Proves conversions on Ray on a cluster of three simulated nodes of this machine: a head without work, two workers.

`tools/run ray_proof --gb 3` makes a checkpoint, converts it in this process, and then on the cluster: undisturbed, with
a worker node killed in the middle, with the driver killed and run again, and with tasks duplicated by hand. Each
output must be the local one, byte for byte, with nothing beside it. Needs the extra `ray`; takes 1 GB of memory and,
on the drive, three times the size.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from safetensors.numpy import save_file
from support import s3_server

import relayout
from relayout.clusters import on_ray
from relayout.conversion.jobs import run_job, unit_jobs

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

        os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_memory_monitor_refresh_ms="0")
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


def assert_same(output: Path, expected: Path) -> None:
    """The same files with the same bytes, and nothing beside the folder; then remove it."""
    names = {file.name for file in expected.iterdir()}
    assert {file.name for file in output.iterdir()} == names
    for name in names:
        assert subprocess.run(["cmp", output / name, expected / name]).returncode == 0, name
    left = [path.name for path in output.parent.iterdir() if path.name.startswith(".")]
    assert not left, left
    shutil.rmtree(output)


def main(
    gb: Annotated[float, typer.Option(help="Size of the checkpoint.")] = 3.0,
    folder: Annotated[Path | None, typer.Option(help="Where there is space. Default: the temporary folder.")] = None,
) -> None:
    """Run all proofs, and print what they took."""
    with tempfile.TemporaryDirectory(dir=folder) as made, s3_server.running() as server:
        os.environ.update(s3_server.environment(server))  # Workers inherit it.
        with connected() as nodes:
            prove(Path(made), int(gb * 1e9), nodes)
            prove_on_objects(Path(made), int(gb * 1e9), server)


def prove_on_objects(place: Path, nbytes: int, server: s3_server.Server) -> None:
    """From an object store to an object store, which is in memory here; uses what `prove` has made."""
    for file in (place / "source").iterdir():
        server.put("models", f"source/{file.name}", file.read_bytes())
    server.requests.clear()
    options: dict[str, Any] = {"tp": 8, "max_part_nbytes": max(MIB, nbytes // 8 // 12)}
    done = on_ray.convert("s3://models/source", "s3://models/out", threads=2, memory="128MiB", **options)
    fetched = server.sent_nbytes / done.source_nbytes
    print(
        f"objects to objects: {done.seconds:.1f} s, {fetched:.3f} of the source fetched,"
        f" peak memory of a worker {done.peak_nbytes / MIB:.0f} MiB",
        flush=True,
    )
    assert fetched <= 1.05
    assert not server.uploads
    expected = place / "local"
    assert set(server.names("models", "out/")) == {f"out/{file.name}" for file in expected.iterdir()}
    for file in expected.glob("model-rank-*"):
        assert server.objects["models", f"out/{file.name}"].content == file.read_bytes(), file.name


def prove(place: Path, nbytes: int, nodes: Nodes) -> None:
    """All of them, in a folder."""
    source = make_source(place / "source", nbytes)
    options: dict[str, Any] = {"tp": 8, "max_part_nbytes": max(MIB, nbytes // 8 // 12)}
    small: dict[str, Any] = {"threads": 2, "memory": "128MiB"}
    started = time.monotonic()
    local = relayout.convert(source, place / "local", **options, **small)
    print(f"local: {local.source_nbytes / 1e9:.2f} GB in {time.monotonic() - started:.1f} s", flush=True)

    done = on_ray.convert(source, place / "out", **options, **small)
    print(f"2 nodes: {done.seconds:.1f} s, peak memory of a worker {done.peak_nbytes / MIB:.0f} MiB", flush=True)
    started = time.monotonic()
    report = on_ray.verify(str(place / "out"), **small)
    assert report.ok
    print(f"verified: {report.nbytes / 1e9:.2f} GB in {time.monotonic() - started:.1f} s", flush=True)
    assert_same(place / "out", place / "local")

    killed = threading.Event()

    def kill(nbytes: int, total: int) -> None:
        if nbytes > total / 3 and not killed.is_set():
            killed.set()
            nodes.kill()

    done = on_ray.convert(source, place / "out", progress=kill, **options, **small)
    assert killed.is_set()
    print(f"a node killed after a third: {done.seconds:.1f} s", flush=True)
    assert_same(place / "out", place / "local")
    nodes.workers.append(nodes.add())

    words = [sys.executable, "-c", DRIVER, nodes.address, str(source), str(place / "out"), json.dumps(options)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            told, _, total = line.removeprefix(_TOLD).partition(" of ")
            if line.startswith(_TOLD) and int(told) > int(total) / 3:
                driver.send_signal(signal.SIGKILL)
                break
    assert not (place / "out").exists()
    done = on_ray.convert(source, place / "out", **options, **small)
    resumed = done.resumed_nbytes / done.source_nbytes
    print(f"the driver killed after a third, and run again: {done.seconds:.1f} s, {resumed:.0%} kept", flush=True)
    assert resumed > 0
    assert_same(place / "out", place / "local")

    jobs = unit_jobs(source, place / "out", **options)
    double = threading.Thread(target=lambda: [run_job(job, **small) for job in jobs[:2]])
    double.start()
    on_ray.convert(source, place / "out", **options, **small)
    double.join()
    print("two units converted twice at once: same bytes", flush=True)
    assert_same(place / "out", place / "local")


if __name__ == "__main__":
    typer.run(main)
