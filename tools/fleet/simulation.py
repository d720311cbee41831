"""The fleet, and the ways to get a model to all of its ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import median

import simpy

from fleet.network import Link, Network

Process = Iterator[simpy.Event]
PIECE_NBYTES = 32 * 2**20
"""What one member of a group reads before the others get it; as `relayout.loader.group.deal`."""


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
    replicated: float = 0.0002
    """Part of the model that every rank has."""
    reader: float = 3e9
    """What one process takes in: of its processor."""
    latency: float = 0.0
    """Seconds from a request to its first byte."""
    connection: float = math.inf
    """Of one connection to the storage."""
    concurrency: int = 8
    """Requests in flight, of one process."""
    request_nbytes: float = 8 * 2**20
    max_requests: float = math.inf
    """Requests per second above which the storage answers 503; clients wait, and ask again."""
    fabric: float = 300e9
    """Of a GPU, inside its node."""
    local: float = 20e9
    """From a node's own page cache or drive to its ranks."""
    has_page_cache: bool = False
    """Whether ranks of a node share what one of them has read: on a shared file system, not from an object store."""
    stagger: float = 0.0
    """Seconds between the starts of two nodes."""
    slow: float = 1.0
    """The NIC of the first node is so many times slower."""
    dead_at: float | None = None
    """When the last node dies; seconds."""
    detection: float = 10.0
    """Seconds until a group knows that a member is gone, and has begun anew without it."""

    @property
    def rank_rate(self) -> float:
        """What one process gets from a storage that has nothing else to do."""
        seconds = self.latency + self.request_nbytes / self.connection
        by_requests = self.concurrency * self.request_nbytes / seconds if seconds else math.inf
        return min(self.reader, by_requests)


@dataclass(frozen=True)
class Outcome:
    """What a start took."""

    storage_nbytes: float
    peak_requests: float
    """Requests per second at the storage, at most."""
    first: float
    """Seconds until the first rank had its tensors; then the median and the last one, all from the first start."""
    median: float
    last: float


@dataclass(frozen=True)
class Nodes:
    """Nodes that are alike."""

    count: int
    start: float
    nic: float
    dies: bool


@dataclass
class Run:
    """A simulation that runs."""

    fleet: Fleet
    env: simpy.Environment = field(default_factory=simpy.Environment)
    ready: list[tuple[float, int]] = field(default_factory=list)
    """When how many nodes were ready."""

    def __post_init__(self) -> None:
        self.network = Network(self.env)
        self.storage = Link(min(self.fleet.storage, self.fleet.max_requests * self.fleet.request_nbytes))

    def nodes(self, in_step: bool = False) -> list[Nodes]:
        """The fleet, like nodes together. Those that go in step begin when the last one has started."""
        fleet = self.fleet
        every = [
            (
                (fleet.num_nodes - 1 if in_step else number) * fleet.stagger,
                fleet.nic / (fleet.slow if number == 0 else 1),
                fleet.dead_at is not None and number == fleet.num_nodes - 1,
            )
            for number in range(fleet.num_nodes)
        ]
        return [Nodes(len(list(alike)), *key) for key, alike in groupby(every)]

    def outcome(self) -> Outcome:
        """What has happened."""
        times = sorted(self.ready)
        every = [time for time, count in times for _ in range(count)]
        return Outcome(
            self.storage.carried_nbytes,
            self.storage.peak / self.fleet.request_nbytes,
            every[0],
            median(every),
            every[-1],
        )


Way = Callable[[Run], None]


def _alone(nbytes: Callable[[Fleet], float], processes: Callable[[Fleet], int]) -> Way:
    """Each node gets its bytes from the storage, whatever the others do."""

    def begin(run: Run) -> None:
        for nodes in run.nodes():
            run.env.process(_node(run, nodes, nbytes(run.fleet), processes(run.fleet)))

    return begin


def _node(run: Run, nodes: Nodes, nbytes: float, processes: int) -> Process:
    yield run.env.timeout(nodes.start + run.fleet.latency)
    most = min(nodes.nic, processes * run.fleet.rank_rate)
    transfer = run.network.transfer(nbytes, {run.storage: nodes.count}, most)
    if nodes.dies:
        yield transfer.done | run.env.timeout(max(0.0, (run.fleet.dead_at or 0) - run.env.now))
        if not transfer.done.triggered:
            run.network.cancel(transfer)
            return
    yield transfer.done
    run.ready.append((run.env.now, nodes.count))


def _in_step(fabric: bool) -> Way:
    """All nodes read different parts, and bring them to all others in rounds; a rank may read ahead."""

    def begin(run: Run) -> None:
        run.env.process(_group(run, fabric))

    return begin


def _group(run: Run, fabric: bool) -> Process:
    fleet, kinds = run.fleet, run.nodes(in_step=True)
    yield run.env.timeout(kinds[0].start + fleet.latency)
    model = fleet.model_nbytes * (1 + fleet.replicated)
    num_rounds = math.ceil(model / fleet.num_ranks / fleet.num_nodes / PIECE_NBYTES)
    piece = model / fleet.num_nodes / num_rounds
    """Of all ranks of a node together."""
    nics = [Link(nodes.nic) for nodes in kinds]
    read = [[run.env.event() for _ in range(num_rounds)] for _ in kinds]
    for nodes, nic, events in zip(kinds, nics, read, strict=True):
        run.env.process(_reader(run, {run.storage: nodes.count, nic: 1}, piece, events))
    for number in range(num_rounds):
        yield run.env.all_of([events[number] for events in read])
        most = fleet.fabric if fabric else math.inf
        if fleet.num_nodes > 1:
            yield run.network.transfer(piece * (fleet.num_nodes - 1), dict.fromkeys(nics, 1.0), most).done
        elif fabric:
            yield run.env.timeout(piece / most)
    run.ready.append((run.env.now, fleet.num_nodes))


def _reader(run: Run, links: dict[Link, float], piece: float, events: Sequence[simpy.Event]) -> Process:
    for event in events:
        yield run.network.transfer(piece, links, run.fleet.num_ranks * run.fleet.rank_rate).done
        event.succeed()


def _swarm(run: Run) -> None:
    """A seed fetches the files once; nodes get pieces from it and each other onto their drives; then ranks load."""
    kinds, fleet = run.nodes(), run.fleet
    uploads = Link(fleet.nic + sum(nodes.count * nodes.nic for nodes in kinds))
    begun = run.env.event()
    seeded = run.env.event()
    run.env.process(_seed(run, begun, seeded))
    for nodes in kinds:
        run.env.process(_peer(run, nodes, uploads, begun, seeded))


def _seed(run: Run, begun: simpy.Event, seeded: simpy.Event) -> Process:
    yield run.env.timeout(run.fleet.latency)
    begun.succeed()
    most = min(run.fleet.nic, run.fleet.num_ranks * run.fleet.rank_rate)
    yield run.network.transfer(run.fleet.model_nbytes, {run.storage: 1}, most).done
    seeded.succeed()


def _peer(run: Run, nodes: Nodes, uploads: Link, begun: simpy.Event, seeded: simpy.Event) -> Process:
    fleet = run.fleet
    yield run.env.timeout(nodes.start)
    yield begun
    transfer = run.network.transfer(fleet.model_nbytes, {uploads: nodes.count}, min(nodes.nic, fleet.local))
    if nodes.dies:
        yield transfer.done | run.env.timeout(max(0.0, (fleet.dead_at or 0) - run.env.now))
        if not transfer.done.triggered:
            run.network.cancel(transfer)
            return
    yield transfer.done & seeded
    # The last piece passes from node to node.
    yield run.env.timeout(math.ceil(math.log2(fleet.num_nodes + 1)) * PIECE_NBYTES / nodes.nic)
    yield run.env.timeout(fleet.model_nbytes / fleet.local)
    run.ready.append((run.env.now, nodes.count))


EVERY_RANK, ONE_READER = "every rank reads all", "one read a node + broadcast"
RANGES, GROUP = "relayout ranges", "relayout ranges + group"
GLOBAL, SWARM = "global broadcast", "P2P cache of files"

WAYS: dict[str, Way] = {
    EVERY_RANK: _alone(
        lambda fleet: fleet.model_nbytes * (1 if fleet.has_page_cache else fleet.num_ranks),
        lambda fleet: fleet.num_ranks,
    ),
    ONE_READER: _alone(lambda fleet: fleet.model_nbytes, lambda fleet: fleet.num_ranks),
    RANGES: _alone(lambda fleet: fleet.model_nbytes * (1 + fleet.replicated), lambda fleet: fleet.num_ranks),
    GROUP: _in_step(fabric=False),
    GLOBAL: _in_step(fabric=True),
    SWARM: _swarm,
}
IN_STEP = (GROUP, GLOBAL)
"""Where one node that is gone fails all: they begin anew without it."""


def simulate(way: str, fleet: Fleet) -> Outcome:
    """One start of a fleet."""
    run = Run(fleet)
    WAYS[way](run)
    if way not in IN_STEP or fleet.dead_at is None:
        run.env.run()
        return run.outcome()
    run.env.run(until=fleet.dead_at)
    run.network.account()
    if run.ready:
        return run.outcome()
    again = simulate(way, replace(fleet, num_nodes=fleet.num_nodes - 1, dead_at=None, stagger=0.0))
    before = fleet.dead_at + fleet.detection
    return Outcome(
        run.storage.carried_nbytes + again.storage_nbytes,
        max(again.peak_requests, run.storage.peak / fleet.request_nbytes),
        before + again.first,
        before + again.median,
        before + again.last,
    )
