"""`tools/run fleet`: how a fleet of nodes gets one model, calculated: when ranks are ready, what leaves the storage.

Prints the tables that `tools/run documents` writes into ESTIMATES.md. Bandwidths are shared fairly, and nothing else is
in the way: no engine, no latency of collectives, no congestion inside the network, no processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

PIECE_NBYTES = 32 * 2**20
"""What one member of a group reads before the others get it; as `relayout.loader.group.assign`."""
DETECTION = 10.0
"""Seconds until a group knows that a member is gone, and has begun anew without it."""


@dataclass(frozen=True)
class Fleet:
    """Nodes that start to load one model. Bandwidths are bytes per second."""

    num_nodes: int
    model_nbytes: float
    storage: float
    """What the storage gives to all nodes together."""
    nic: float
    """Of one node, in each direction."""
    num_ranks: int = 8
    """Of each node; together they have one copy of the model."""
    reader: float = 3e9
    """What one process takes in: of its processor."""
    latency: float = 0.0
    """Seconds from a request to its first byte."""
    connection: float = math.inf
    """Of one connection to the storage."""
    concurrency: int = 16
    """Requests in flight, of one process."""
    request_nbytes: float = 32 * 2**20
    max_requests: float = math.inf
    """Requests per second above which the storage answers 503; clients wait, and ask again."""
    local: float = 20e9
    """From a node's own drive to its ranks."""
    stagger: float = 0.0
    """Seconds between the starts of two nodes."""
    slow: float = 1.0
    """The NIC of the first node is so many times slower."""
    dead_at: float | None = None
    """When the last node dies; seconds."""

    @property
    def rank_rate(self) -> float:
        """What one process gets from a storage that has nothing else to do."""
        seconds = self.latency + self.request_nbytes / self.connection
        return min(self.reader, self.concurrency * self.request_nbytes / seconds if seconds else math.inf)

    @property
    def storage_rate(self) -> float:
        """What the storage gives, its limit of requests included."""
        return min(self.storage, self.max_requests * self.request_nbytes)

    def nics(self) -> list[tuple[float, float]]:
        """Start and NIC of each node that lives."""
        alive = self.num_nodes - (self.dead_at is not None)
        return [(number * self.stagger, self.nic / (1 if number else self.slow)) for number in range(alive)]


@dataclass(frozen=True)
class Outcome:
    """What a start takes."""

    ready: list[float]
    """Seconds until the ranks of each node have their tensors."""
    storage_nbytes: float

    @property
    def last(self) -> float:
        """Seconds until the last rank is ready."""
        return max(self.ready)


def _apart(fleet: Fleet, nbytes: float) -> Outcome:
    """Each node gets its bytes from the storage, whatever the others do."""
    share = min(fleet.num_ranks * fleet.rank_rate, fleet.storage_rate / fleet.num_nodes)
    ready = [start + fleet.latency + nbytes / min(nic, share) for start, nic in fleet.nics()]
    return Outcome(ready, fleet.num_nodes * nbytes)


def every_rank(fleet: Fleet) -> Outcome:
    """Every rank reads all of the model."""
    return _apart(fleet, fleet.num_ranks * fleet.model_nbytes)


def ranges(fleet: Fleet) -> Outcome:
    """Each rank reads its own bytes; as fast: one reader a node, and a broadcast inside the node."""
    return _apart(fleet, fleet.model_nbytes)


def group(fleet: Fleet) -> Outcome:
    """The nodes read different parts and bring them to all others, in rounds; the next is read meanwhile.

    Either reading is the limit, after which the last round is exchanged; or the NIC is, after the first round is read.
    """
    if fleet.dead_at is not None:
        again = group(replace(fleet, num_nodes=fleet.num_nodes - 1, dead_at=None))
        return replace(again, ready=[fleet.dead_at + DETECTION + one for one in again.ready])
    nodes, model = fleet.num_nodes, fleet.model_nbytes
    start, nic = fleet.nics()[-1][0], min(nic for _, nic in fleet.nics())
    reading = min(nic, fleet.num_ranks * fleet.rank_rate, fleet.storage_rate / nodes)
    part = model / nodes
    piece = part / math.ceil(part / fleet.num_ranks / PIECE_NBYTES)
    seconds = max(part / reading + (nodes - 1) * piece / nic, piece / reading + (model - piece) / nic)
    return Outcome([start + fleet.latency + seconds] * nodes, model)


def p2p_cache(fleet: Fleet) -> Outcome:
    """A seed fetches the files once; nodes get pieces from it and each other onto their drives; then ranks load."""
    model = fleet.model_nbytes
    seeded = fleet.latency + model / min(fleet.nic, fleet.num_ranks * fleet.rank_rate, fleet.storage_rate)
    hops = math.ceil(math.log2(fleet.num_nodes + 1))  # The last piece passes from node to node.
    return Outcome(
        [
            max(max(start, fleet.latency) + model / min(nic, fleet.local), seeded)
            + hops * PIECE_NBYTES / nic
            + model / fleet.local
            for start, nic in fleet.nics()
        ],
        model,
    )


Way = Callable[[Fleet], Outcome]
WAYS: dict[str, Way] = {
    "every rank reads all": every_rank,
    "relayout ranges; one reader a node + broadcast": ranges,
    "relayout ranges + group; global broadcast": group,
    "P2P cache of files": p2p_cache,
}
_LLAMA = 141.1e9
"""Llama-3.1-70B in BF16."""
STORAGES = {
    "Shared file system": Fleet(1, _LLAMA, storage=40e9, nic=50e9),
    "Object store": Fleet(1, _LLAMA, storage=1e12, nic=12.5e9, latency=0.1, connection=0.625e9),
    "One link": Fleet(1, _LLAMA, storage=12.5e9, nic=12.5e9, latency=0.1),
}
NUM_NODES = (1, 16, 128, 1024)
INCIDENTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "starts 1 s apart": {"stagger": 1.0},
    "one node with a tenth of the NIC": {"slow": 10.0},
    "one node dies after 2 s": {"dead_at": 2.0},
    "503 above 500 requests/s": {"max_requests": 500.0},
}


PUBLISHED = (
    (
        "run:ai streamer, Llama-3-8B (15 GB) from S3, concurrency 32, one GPU",
        4.88,
        Fleet(1, 15e9, 1e12, 5e9, 1, 5e9, latency=0.1, connection=0.625e9, concurrency=32, request_nbytes=8 * 2**20),
        "NIC 40 Gb/s, 0.1 s latency, 5 Gb/s a connection, requests of 8 MiB",
    ),
    (
        "run:ai streamer in vLLM, Kimi-K2.5 (620 GB), storage where fio reads 40 GB/s",
        40.0,
        Fleet(1, 620e9, storage=40e9, nic=50e9, reader=1.7 * 2**30),
        "nothing: 1.7 GiB/s a rank is published, too",
    ),
    (
        "ModelExpress, DeepSeek-V3 (681 GB) from GPU to GPU, 8 x 112 Gb/s",
        15.0,
        Fleet(1, 681e9, storage=112e9, nic=112e9, reader=14e9),
        "that the NICs are the limit",
    ),
    (
        "checkpoint-engine, Kimi-K2 (1,030 GB) to 256 H20, broadcast",
        16.0,
        Fleet(32, 1030e9, storage=1e15, nic=100e9, reader=1e12),
        "NICs of 8 x 100 Gb/s; the model is in host memory",
    ),
    (
        "relayout, one rank of TP 8 (372 MB) from a store on loopback",
        0.65,
        Fleet(1, 371.8e6, storage=1.2e9, nic=1e12, num_ranks=1, reader=0.72e9),
        "nothing: client and server were measured apart",
    ),
)
"""Seconds that others have measured until the last rank was ready, and what is not published.

Several nodes read the model once together.
"""


def tables() -> str:
    """The tables, in Markdown."""
    return "\n".join([*_over_nodes(), *_incidents(), *_published()])


def _over_nodes() -> Iterator[str]:
    for title, fleet in STORAGES.items():
        yield f"**{title}**, {_assumed(fleet)}:\n"
        yield _row("way", *(f"{number} node{'s' * (number > 1)}" for number in NUM_NODES))
        yield _row("---", *["---:"] * len(NUM_NODES))
        for way, outcome in WAYS.items():
            outcomes = (outcome(replace(fleet, num_nodes=number)) for number in NUM_NODES)
            yield _row(way, *(f"{_seconds(each.last)} ({each.storage_nbytes / 1e12:,.2f})" for each in outcomes))
        yield ""


def _assumed(fleet: Fleet) -> str:
    text = f"{fleet.storage / 1e9:.4g} GB/s in all; NICs of {8 * fleet.nic / 1e9:.0f} Gb/s"
    if fleet.latency:
        text += f"; {fleet.latency} s from a request to its first byte"
    return text + ("" if math.isinf(fleet.connection) else f"; {8 * fleet.connection / 1e9:.0f} Gb/s a connection")


def _incidents() -> Iterator[str]:
    yield "**What may happen** (the object store, 16 nodes): seconds until the first / median / last node is ready:\n"
    yield _row("way", *INCIDENTS)
    yield _row("---", *["---:"] * len(INCIDENTS))
    fleet = replace(STORAGES["Object store"], num_nodes=16)
    for way, outcome in WAYS.items():
        times = (outcome(replace(fleet, **change)).ready for change in INCIDENTS.values())
        yield _row(way, *(" / ".join(map(_seconds, (min(ready), median(ready), max(ready)))) for ready in times))
    yield ""


def _published() -> Iterator[str]:
    yield "**Published, and calculated**\n"
    yield _row("what", "published, s", "calculated, s", "factor", "assumed")
    yield _row("---", "---:", "---:", "---:", "---")
    for what, seconds, fleet, assumed in PUBLISHED:
        calculated = group(fleet).last
        yield _row(
            what, seconds, f"{calculated:.2f}", f"{max(calculated / seconds, seconds / calculated):.1f}", assumed
        )


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


if __name__ == "__main__":
    print(tables())
