"""`tools/run bench clients`: nodes that load from one file system over a network, and what its server had to send.

Server and nodes are hosts of `support.networks`, with a rate for each link, and the file system is a real one
(`support.shared_filesystems`). Each load has new mounts, with empty caches; what the server sends is in the page cache
of its machine. Nodes either divide the ranks of one model among them, or each needs all of a model, as a replica does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median_low
from typing import Any

from rich.console import Console
from rich.table import Table
from support.networks import INTERFACE, Host, absence, network
from support.shared_filesystems import FILE_SYSTEMS, Served, mounted

import relayout
from bench.peers import LOADERS
from relayout.benchmark.loaders import Loader, LoadJob
from relayout.benchmark.machine import num_cpus, prepare, remember
from relayout.benchmark.measure import LAYER_NBYTES, expected_digests, write_llama
from relayout.benchmark.run import LoaderDied, load_together
from relayout.storage.system import available_nbytes

TP = 8
SHARINGS: dict[str, tuple[str, ...]] = {
    "ranks": ("relayout", "relayout_plain_group", "relayout_plain", "get_slice", "load_file", "runai"),
    "replicas": ("relayout_group", "relayout", "load_file", "runai"),
}
"""How the nodes share a model, and the loaders of each."""
_IF_NAMED = {"ranks": ("relayout_1", "relayout_4", "relayout_16"), "replicas": ()}
"""Loaders that are only measured if they are named."""
VOCAB_SIZE = 8016
"""Tokens of the model, fewer than Llama has: else the two tensors that have a row for each were most of it."""
_SHARD_NBYTES = 200 * 10**6
LogLine = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Links:
    """The rates of the links, in bytes per second."""

    client: float
    """Of each node."""
    server: float
    """Of the server."""

    def least_seconds(self, sharing: str, num_clients: int, nbytes: int) -> float:
        """What no load can be faster than, if each byte of the model is sent once by the server.

        Nodes that need all of it then get the rest from each other, over the same links.
        """
        share = nbytes if sharing == "replicas" else nbytes / num_clients
        return max(nbytes / self.server, share / self.client)


@dataclass(frozen=True, slots=True)
class Place:
    """Models that hosts can mount."""

    server: Host
    clients: Sequence[Host]
    served: Served
    models: Path
    """The folder that is served, with the checkpoint, and its conversions to TP and to 1."""
    mount_point: Path
    """The same on each host."""

    @property
    def source(self) -> Path:
        return self.models / "plain"

    def converted(self, tp: int) -> Path:
        """The conversion to a degree, on this machine."""
        return self.models / f"tp{tp}"

    def jobs(self, sharing: str, num_clients: int, name: str) -> list[LoadJob]:
        """What the processes of the first so many hosts load."""
        tp, per_client = (1, 1) if sharing == "replicas" else (TP, TP // num_clients)
        memory = available_nbytes() // 2 // (num_clients * per_client)
        folders = [str(self.mount_point / path.name) for path in (self.source, self.converted(tp))]
        return [
            LoadJob("bench.peers", name, *folders, tp, rank % tp, per_client, memory, within=client.within)
            for rank, client in enumerate(one for one in self.clients[:num_clients] for _ in range(per_client))
        ]


def make_models(models: Path, size: float, log_line: LogLine) -> int:
    """Make a checkpoint of about so many GB, and convert it; returns the bytes of its tensors."""
    embedding_nbytes = 2 * 2 * 4096 * VOCAB_SIZE
    layers = max(1, round((size * 1e9 - embedding_nbytes) / LAYER_NBYTES))
    log_line(f"making a checkpoint of Llama-3.1-8B shapes with {layers} layers and {VOCAB_SIZE} tokens")
    nbytes = write_llama(models / "plain", layers, _SHARD_NBYTES, VOCAB_SIZE)
    for tp in (TP, 1):
        relayout.convert(models / "plain", models / f"tp{tp}", tp=tp)
    return nbytes


@contextmanager
def place_of(storage: str, scratch: Path, most_clients: int, links: Links) -> Iterator[Place]:
    """A server of a file system, and hosts that can mount `scratch/models`."""
    if (why := absence() or FILE_SYSTEMS[storage].absence()) is not None:
        raise SystemExit(why)
    served_from, mount_point = scratch / "server", scratch / "mount"
    served_from.mkdir()
    mount_point.mkdir()
    with ExitStack() as stack:
        server, *clients = stack.enter_context(network([links.server, *[links.client] * most_clients]))
        served = stack.enter_context(FILE_SYSTEMS[storage].serve(server, served_from, scratch / "models"))
        yield Place(server, clients, served, scratch / "models", mount_point)


def measure(
    place: Place,
    nbytes: int,
    links: Links,
    numbers: Sequence[int],
    sharings: Sequence[str],
    names: Sequence[str],
    runs: int,
    limit: float,
    log_line: LogLine,
) -> Iterator[list[dict[str, Any]]]:
    """Rows of the table, after each turn of all cases."""
    cases = [
        (sharing, number, name)
        for sharing, number in product(sharings, numbers)
        for name in (*SHARINGS[sharing], *_IF_NAMED[sharing])
        if (name in (names or SHARINGS[sharing])) and LOADERS[name].absence() is None
        if number > 1 or sharing == "ranks" or not LOADERS[name].group
    ]
    done: dict[tuple[str, int, str], list[dict[str, Any]]] = {case: [] for case in cases}
    for _ in range(runs):
        for case in cases:
            if not any("failed" in one for one in done[case]):
                done[case].append(_run(place, nbytes, *case, limit))
                log_line(f"{', '.join(map(str, case))}: {done[case][-1]}")
        yield [
            {
                "sharing": sharing,
                "clients": number,
                "loader": name,
                "title": LOADERS[name].title.removesuffix(", O_DIRECT"),
                "least_seconds": round(links.least_seconds(sharing, number, nbytes), 3),
            }
            | summary(done[sharing, number, name])
            for sharing, number, name in cases
        ]


def _run(place: Place, nbytes: int, sharing: str, num_clients: int, name: str, limit: float) -> dict[str, Any]:
    """One load by all processes of some hosts: seconds, bytes over links, processor time."""
    jobs, hosts = place.jobs(sharing, num_clients, name), place.clients[:num_clients]
    watched = [place.server, *hosts]
    before: list[_Counters] = []

    def ready() -> None:
        remember(path for path in place.served.kept.rglob("*") if path.is_file())
        folders = [
            host.root / Path(path).relative_to("/") for host in hosts for path in (jobs[0].source, jobs[0].converted)
        ]
        weights = [path for folder in folders for path in folder.glob("*.safetensors")]
        prepare([], weights, cold=True, needed_nbytes=2 * nbytes)
        before.extend(map(_Counters.of, watched))

    with ExitStack() as stack:
        for host in hosts:
            stack.enter_context(mounted(place.served, host, place.mount_point))
        try:
            measured = load_together(jobs, _on_network(LOADERS[name], hosts[0], jobs[0]), ready, limit=limit)
        except LoaderDied as died:
            return {"failed": str(died)}
        server, *clients = (_Counters.of(host).since(was) for host, was in zip(watched, before, strict=True))
    expected = expected_digests(place.converted(jobs[0].tp))
    if measured.digests != tuple(expected[job.rank] for job in jobs):
        return {"failed": "loaded wrong bytes"}
    received = [one.received_nbytes for one in clients]
    return {
        "seconds": round(measured.seconds, 3),
        "sent_over_model": round(server.sent_nbytes / nbytes, 3),
        "received_over_model": [round(one / nbytes, 3) for one in received],
        "between_clients_over_model": round(max(0, sum(received) - server.sent_nbytes) / nbytes, 3),
        "loader_cpu_seconds": round(measured.cpu_seconds, 2),
        "mount_cpu_seconds": round(sum(one.cpu_seconds for one in clients), 2),
        "server_cpu_seconds": round(server.cpu_seconds, 2),
        "busy": round(measured.other_load + measured.cpu_seconds / measured.seconds / num_cpus(), 2),
        "peak_minus_needed_nbytes": measured.peak_minus_needed_nbytes,
    }


def _on_network(loader: Loader, first: Host, job: LoadJob) -> Loader:
    """The loader, whose processes find each other over the network, and know how many are on their host."""
    here = {"MASTER_ADDR": first.address, "LOCAL_WORLD_SIZE": str(job.num_processes)}
    return replace(loader, environment={**loader.environment, **here, "GLOO_SOCKET_IFNAME": INTERFACE})


@dataclass(frozen=True, slots=True)
class _Counters:
    """What a host has done so far."""

    sent_nbytes: int
    received_nbytes: int
    by_process: dict[int, float]

    @staticmethod
    def of(host: Host) -> _Counters:
        return _Counters(host.sent_nbytes(), host.received_nbytes(), host.cpu_seconds())

    @property
    def cpu_seconds(self) -> float:
        return sum(self.by_process.values())

    def since(self, was: _Counters) -> _Counters:
        """The difference; processor time of processes that were there before, and are still there."""
        both = self.by_process.keys() & was.by_process.keys()
        seconds = {pid: self.by_process[pid] - was.by_process[pid] for pid in both}
        return _Counters(self.sent_nbytes - was.sent_nbytes, self.received_nbytes - was.received_nbytes, seconds)


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The lower median of each figure, or of each client's; of runs of which one failed, that one."""
    failed = next((one for one in runs if "failed" in one), None)
    if failed is not None:
        return failed
    each = {key: [one[key] for one in runs] for key in runs[0]}
    medians = {
        key: [median_low(client) for client in zip(*values, strict=True)]
        if isinstance(values[0], list)
        else median_low(values)
        for key, values in each.items()
    }
    return medians | {"all_seconds": each["seconds"], "all_sent_over_model": each["sent_over_model"]}


_COLUMNS: dict[str, Callable[[dict[str, Any]], float]] = {
    "s": lambda row: row["seconds"],
    "least": lambda row: row["least_seconds"],
    "sent": lambda row: row["sent_over_model"],
    "most received": lambda row: max(row["received_over_model"]),
    "between nodes": lambda row: row["between_clients_over_model"],
    "CPU s": lambda row: row["loader_cpu_seconds"],
    "mounts": lambda row: row["mount_cpu_seconds"],
    "server": lambda row: row["server_cpu_seconds"],
    "busy": lambda row: row["busy"],
}


def print_table(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """The rows, with a line between settings."""
    table = Table()
    for heading in ("nodes share", "nodes", "loader", *_COLUMNS):
        table.add_column(heading, justify="right" if heading in _COLUMNS else "left")
    before: Any = None
    for row in rows:
        setting = (row["sharing"], row["clients"])
        if before not in (None, setting):
            table.add_section()
        before = setting
        figures = [row["failed"]] if "failed" in row else [f"{figure(row):.2f}" for figure in _COLUMNS.values()]
        table.add_row(row["sharing"], str(row["clients"]), row["title"], *figures)
    console.print(table)
