"""Conversions on Ray on a cluster of three simulated nodes of this machine: a head without work, and two workers.

In a folder, and from bucket to bucket of a SeaweedFS. Each output is the local one, byte for byte, and nothing is left
beside it. RELAYOUT_TEST_GB is the size of the checkpoint, 0.2 if it is not set; `pytest -s` shows what it took.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import relayout_on_ray as on_ray
from support import seaweedfs
from support.loader_fixtures import mlp_model
from support.patience import PATIENCE
from support.traps import caught_in, set_traps

import relayout
from relayout.conversion.jobs import run_job, unit_jobs
from relayout.storage.cloud.bucket import BucketClient
from relayout.storage.cloud.store import CloudStore
from relayout.storage.stores import find_store

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

ADDRESS = "127.0.0.2"
"""Not 127.0.0.1, in whose place ray puts this machine's own."""
DRIVER = """
import json, relayout, sys, ray
sys.path.append(sys.argv[5])
import relayout_on_ray as on_ray
ray.init(address=sys.argv[1], _node_ip_address="127.0.0.2", log_to_driver=False)
done = lambda done, total: print(f"done: {done} of {total}", flush=True)
planned = relayout.plan_conversion(sys.argv[2], sys.argv[3], **json.loads(sys.argv[4]))
on_ray.convert(planned, threads=2, memory="128MiB", progress=done)
"""
MIB = 2**20
LAYER_NBYTES = 32 * 10**6
NUM_LAYERS = int(float(os.environ.get("RELAYOUT_TEST_GB", "0.2")) * 10**9) // LAYER_NBYTES
MAX_FETCHED = 1.03
"""Of the source's bytes, at most, where nothing is lost. Whoever publishes reads the largest tensor once more."""
MAX_WORKER_NBYTES = 600 * 10**6
RAY_OPTIONS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
SMALL: dict[str, Any] = {"threads": 2, "memory": "128MiB"}
OPTIONS: dict[str, Any] = {"tp": 8, "max_part_nbytes": NUM_LAYERS * LAYER_NBYTES // 8 // 12}
"""A dozen units."""


class Nodes:
    """A cluster of a head without processors, and of two nodes with one each; this process is connected to it."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._alike = {"node_ip_address": ADDRESS, "object_store_memory": 100 * MIB, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **self._alike})
        self.workers: list[Any] = []
        self.add()
        self.add()
        self.address: str = self.cluster.address
        ray.init(address=self.address, _node_ip_address=ADDRESS, log_to_driver=False)

    def add(self) -> None:
        """One more node, which converts one unit at a time."""
        self.workers.append(self.cluster.add_node(num_cpus=1, resources={on_ray.IO_RESOURCE: 1}, **self._alike))

    def kill(self) -> None:
        """Let the first worker go away, without a word."""
        self.cluster.remove_node(self.workers.pop(0), allow_graceful=False)

    def end(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()


@dataclass
class Folder:
    """Source and output in a folder."""

    source: str
    output: str
    expected: dict[str, str]
    """Digests of the files of a local conversion."""
    largest_nbytes: int
    """The source's largest tensor."""

    nodes: Nodes = field(init=False)

    def fetched_nbytes(self) -> int:
        """Bytes of the source that were read until now; nobody counts them here."""
        return 0

    def take(self) -> dict[str, str]:
        """The digests of the output's files, which is then removed; nothing else may have been left."""
        found = digests_of(Path(self.output))
        assert [path.name for path in Path(self.output).parent.iterdir() if path.name.startswith(".")] == []
        shutil.rmtree(self.output)
        return found

    def convert(self, **more: Any) -> relayout.Summary:
        """On the cluster."""
        planned = relayout.plan_conversion(self.source, self.output, **OPTIONS)
        return on_ray.convert(planned, **SMALL, **more)

    def check(self, what: str, done: relayout.Summary, before: int) -> float:
        """The output is the local one. Bytes that were fetched since, over those of the source."""
        fetched = (self.fetched_nbytes() - before) / done.source_nbytes
        print(f"{type(self).__name__}, {what}: {done.seconds:.1f} s, {done.peak_nbytes / 1e6:.0f} MB, {fetched:.3f}")
        assert self.take() == self.expected
        assert done.peak_nbytes <= MAX_WORKER_NBYTES
        return fetched


@dataclass
class Buckets(Folder):
    """From one bucket of a server to another."""

    server: seaweedfs.SeaweedFS

    def fetched_nbytes(self) -> int:
        return self.server.sent_nbytes("source")

    def take(self) -> dict[str, str]:
        client = bucket(self.output)
        found = {
            name.removeprefix("model/"): hashlib.sha256(bytes(client.store.get(name).bytes())).hexdigest()
            for name, _ in client.list_objects("")
        }
        assert "Uploads" not in seaweedfs_client().list_multipart_uploads(Bucket="converted")
        self.server.remove_bucket("converted")  # With its volumes: what is only deleted keeps its space.
        self.server.make_bucket("converted")
        return found


def seaweedfs_client() -> Any:
    """The provider's own client, by the environment."""
    return pytest.importorskip("boto3").client("s3")


def bucket(url: str) -> BucketClient:
    """The client of a URL's bucket."""
    store = find_store(url)
    assert isinstance(store, CloudStore)
    assert isinstance(store.client, BucketClient)
    return store.client


def largest_nbytes(shard: Path) -> int:
    """The length of the largest tensor of a shard, by its header."""
    with shard.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    offsets = [tensor["data_offsets"] for name, tensor in header.items() if name != "__metadata__"]
    return max(int(end - start) for start, end in offsets)


def digests_of(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture
def ray_environment() -> Iterator[dict[str, str]]:
    """The environment of a driver that starts Ray on this machine; its sockets are in a folder with a short path."""
    pytest.importorskip("ray", reason="ray is not installed")
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as folder:
        yield {**os.environ, **RAY_OPTIONS, "RAY_TMPDIR": folder}


def test_tasks_import_nothing_of_the_folder_in_which_the_driver_is_started(
    tmp_path: Path, ray_environment: dict[str, str]
) -> None:
    source = mlp_model(tmp_path / "source")
    relayout.convert(source, tmp_path / "expected", tp=2)
    here = tmp_path / "here"
    here.mkdir()
    set_traps(here, tmp_path / "caught")
    words = ["../source", "-o", "../out", "--tp", "2", "--address", "local"]
    done = subprocess.run(
        [sys.executable, on_ray.__file__, *words],
        cwd=here,
        env=ray_environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert caught_in(tmp_path / "caught") == []
    assert done.returncode == 0, done.stderr
    assert digests_of(tmp_path / "out") == digests_of(tmp_path / "expected")


@pytest.fixture(scope="module", params=[Folder, Buckets])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folder]:
    """A source, what becomes of it locally, and a cluster, whose sockets are in a folder with a short path."""
    pytest.importorskip("ray", reason="ray is not installed")
    if request.param is Buckets and (why := seaweedfs.absence()) is not None:
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("ray")
    source = mlp_model(folder / "source", NUM_LAYERS, width=24576)
    relayout.convert(source, folder / "local", **OPTIONS, **SMALL)
    expected, largest = digests_of(folder / "local"), largest_nbytes(source / "model.safetensors")
    shutil.rmtree(folder / "local")
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("RAY_TMPDIR", stack.enter_context(tempfile.TemporaryDirectory(prefix="r", dir="/tmp")))
        for name, value in RAY_OPTIONS.items():
            patch.setenv(name, value)
        if request.param is Folder:
            place = Folder(str(source), str(folder / "out"), expected, largest)
        else:
            server = stack.enter_context(seaweedfs.running(folder / "server"))
            for name, value in server.environment.items():
                patch.setenv(name, value)  # Workers inherit it.
            for name in ("source", "converted"):
                server.make_bucket(name)
            for file in source.iterdir():
                bucket("s3://source").store.put(f"model/{file.name}", file, chunk_size=8 * MIB, max_concurrency=4)
            place = Buckets("s3://source/model", "s3://converted/model", expected, largest, server)
        place.nodes = Nodes()
        stack.callback(place.nodes.end)
        yield place


def test_a_cluster_writes_what_one_process_writes(place: Folder) -> None:
    before = place.fetched_nbytes()
    done = place.convert()
    assert place.check("undisturbed", done, before) <= MAX_FETCHED + place.largest_nbytes / done.source_nbytes


def test_a_worker_that_is_killed_costs_its_units_only(place: Folder) -> None:
    killed = threading.Event()

    def kill(nbytes: int, total: int) -> None:
        if nbytes > total / 3 and not killed.is_set():
            killed.set()
            place.nodes.kill()

    before = place.fetched_nbytes()
    done = place.convert(progress=kill)
    assert killed.is_set()
    place.check("a worker killed after a third", done, before)
    place.nodes.add()


def test_after_its_driver_is_killed_a_conversion_goes_on(place: Folder) -> None:
    words = [sys.executable, "-c", DRIVER, place.nodes.address, place.source, place.output, json.dumps(OPTIONS)]
    words.append(str(Path(on_ray.__file__).parent))
    before = place.fetched_nbytes()
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            told, _, total = line.removeprefix("done: ").partition(" of ")
            if line.startswith("done: ") and int(told) > int(total) / 3:
                driver.send_signal(signal.SIGKILL)
                break
    assert driver.returncode == -signal.SIGKILL
    assert find_store(place.output).stat("relayout.json") is None
    done = place.convert()
    assert done.resumed_nbytes > 0
    place.check("the driver killed after a third, and run again", done, before)


def test_units_may_be_converted_twice_at_once(place: Folder) -> None:
    jobs = unit_jobs(relayout.plan_conversion(place.source, place.output, **OPTIONS))
    before = place.fetched_nbytes()
    double = threading.Thread(target=lambda: [run_job(job, **SMALL) for job in jobs[:2]])
    double.start()
    done = place.convert()
    double.join()
    place.check("two units converted twice at once", done, before)
