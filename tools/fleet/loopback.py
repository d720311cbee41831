"""Real transfers over loopback sockets, with the bandwidths and delays of a small fleet: the simulation must agree.

Every byte is sent and received by TCP; the storage and each node's NIC let only so many bytes per second pass.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from fleet.simulation import EVERY_RANK, GROUP, RANGES, Fleet

_STEP_NBYTES = 16 * 2**10


@dataclass
class _Pacer:
    """Lets so many bytes per second pass."""

    bandwidth: float
    free_at: float = 0.0
    nbytes: int = 0

    async def wait(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self.free_at = max(time.monotonic(), self.free_at) + nbytes / self.bandwidth
        await asyncio.sleep(self.free_at - time.monotonic())


@dataclass
class _Server:
    """Sends as many bytes as a request asks for, when they are there."""

    pacer: _Pacer
    latency: float = 0.0
    there: Callable[[int], Awaitable[object]] | None = None
    """Waits for what a request names."""
    port: int = 0
    _server: asyncio.Server | None = field(default=None, repr=False)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            name, nbytes = map(int, line.split())
            await asyncio.sleep(self.latency)
            if self.there is not None:
                await self.there(name)
            while nbytes:
                step = min(nbytes, _STEP_NBYTES)
                await self.pacer.wait(step)
                writer.write(bytes(step))
                await writer.drain()
                nbytes -= step
        writer.close()

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


async def _fetch(port: int, name: int, nbytes: int, nic: _Pacer, request_nbytes: int) -> None:
    """Receive bytes by requests, one after the other, as fast as the node's NIC lets them in."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_STEP_NBYTES)
    while nbytes:
        wanted = min(nbytes, request_nbytes)
        nbytes -= wanted
        writer.write(b"%d %d\n" % (name, wanted))
        while wanted:
            wanted -= (got := len(await reader.read(min(wanted, _STEP_NBYTES))))
            await nic.wait(got)
    writer.close()


@dataclass
class _Group:
    """A node whose ranks share their reads with those of other nodes."""

    fleet: Fleet
    number: int
    nic: _Pacer
    storage: _Server
    piece_nbytes: int
    num_rounds: int

    def __post_init__(self) -> None:
        self.read = [asyncio.Event() for _ in range(self.num_rounds)]
        # What goes out does not share the bandwidth of what comes in.
        self.server = _Server(_Pacer(self.fleet.nic), there=lambda name: self.read[name].wait())

    async def run(self, nodes: list[_Group]) -> None:
        reading = asyncio.create_task(self._read())
        for number in range(self.num_rounds):
            others = (node for node in nodes if node is not self)
            await self.read[number].wait()
            await asyncio.gather(
                *(_fetch(node.server.port, number, self.piece_nbytes, self.nic, self.piece_nbytes) for node in others)
            )
        await reading

    async def _read(self) -> None:
        for event in self.read:
            await _fetch(self.storage.port, 0, self.piece_nbytes, self.nic, self.piece_nbytes)
            event.set()


async def _run(way: str, fleet: Fleet, num_rounds: int) -> tuple[float, int]:
    storage = _Server(_Pacer(fleet.storage), fleet.latency)
    nics = [_Pacer(fleet.nic) for _ in range(fleet.num_nodes)]
    model, request = int(fleet.model_nbytes), int(fleet.request_nbytes)
    await storage.start()
    groups: list[_Group] = []
    if way == GROUP:
        piece = model // fleet.num_nodes // num_rounds
        groups = [_Group(fleet, number, nic, storage, piece, num_rounds) for number, nic in enumerate(nics)]
        for node in groups:
            await node.server.start()
    started = time.monotonic()
    if way == GROUP:
        await asyncio.gather(*(node.run(groups) for node in groups))
    else:
        nbytes = {EVERY_RANK: model, RANGES: model // fleet.num_ranks}[way]
        await asyncio.gather(
            *(_fetch(storage.port, 0, nbytes, nic, request) for nic in nics for _ in range(fleet.num_ranks))
        )
    seconds = time.monotonic() - started
    for server in (storage, *(node.server for node in groups)):
        server.close()
    return seconds, storage.pacer.nbytes


def measure(way: str, fleet: Fleet, num_rounds: int = 1) -> tuple[float, int]:
    """Seconds of a real start over loopback, and bytes that left the storage. Of some ways only."""
    return asyncio.run(_run(way, fleet, num_rounds))


def rounds_of(fleet: Fleet, piece_nbytes: float) -> int:
    """In how many rounds a group of this fleet shares its reads."""
    return math.ceil(fleet.model_nbytes / fleet.num_ranks / fleet.num_nodes / piece_nbytes)
