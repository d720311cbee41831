"""The requests of a load: how reads are cut into requests, how many are in flight, and the memory of their buffers.

A read goes directly into the arena if its target is congruent with its file offset, modulo the alignment, except for
the edges that do not fill a block. Everything else goes through a bounce buffer: edges, reads whose target is not
congruent, and strided reads, which are requested with their gaps if the gaps are small. Small pieces that share
blocks of a file, or are in neighboring blocks, become one request. In a file that is verified, requests cover whole
chunks, so that no chunk is read and hashed twice.

Ranks of a node divide a budget. A load begins with the number of requests that suits most storage. While it reads, it
tries a step up: twice the requests or, at the limit of requests, requests of twice the size. A step that reads faster
is kept, and the next one tried. Otherwise the load returns to the step before, and stays there. More in flight than the
storage needs would only take memory and disturb other processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from relayout.core.extents import BLOCK, Extent, Grid, Transfer, align_down, coalesce, split
from relayout.errors import PlanError
from relayout.format.index import Read
from relayout.storage.stores import LOCAL_COST, RequestCost

MAX_THREADS = 8
"""Initial limit of the requests of one rank in flight: with 8 MiB each, they keep any single drive busy."""

MAX_CONNECTIONS = 16
"""Initial limit of the connections of one rank to a remote store; each takes some 2 MiB."""

MAX_REQUESTS = 32
"""Limit of the requests of one rank in flight, if measuring shows that more requests help."""

NODE_BUFFERS = 2**30
"""Default bytes of bounce buffers, pinned or not, of all ranks of a node together."""

DEVICE_BUFFERS = 128 * 2**20
"""Default bytes of pinned buffers of one rank that loads to a device. `tools/run bench budget` measures others."""

HOST_BUFFERS = 32 * 2**20
"""Default bytes of host bounce buffers of one rank; most bytes do not pass through them."""

MAX_IN_FLIGHT = 512 * 2**20
"""Default bytes that `iter_load` reads ahead for one rank."""

NODE_IN_FLIGHT = 2 * 2**30
"""Bytes in flight of all ranks of a node together."""

MIN_BUFFER = 2**20
"""Lower bound of one thread's buffer, in bytes. A smaller budget means fewer threads, not smaller requests."""

_MIN_GAIN = 1.05
"""Least ratio of speeds that keeps a step up: a step that reads less than 5 % faster is undone."""

_MIN_SECONDS = 0.1
"""Least seconds for which a step is measured. Short loads end before any step is tried."""


@dataclass(frozen=True, slots=True)
class Request:
    """Bytes of a file that are read at once."""

    file: int
    extent: Extent
    """The bytes to read; both ends are multiples of the alignment, so it may end beyond the end of the file."""
    arena_offset: int | None
    """Arena offset of the whole extent; None: the request goes through a bounce buffer."""
    transfers: tuple[Transfer, ...] = ()
    """Copies from the bounce buffer to the arena, in the order of the reads."""

    @property
    def is_sparse(self) -> bool:
        """True if most of its bytes are gaps between runs."""
        return any(transfer.count > 1 for transfer in self.transfers) and 2 * self.nbytes < self.extent.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes that the request writes to the arena."""
        return self.extent.nbytes if self.arena_offset is not None else sum(t.total_nbytes for t in self.transfers)


def plan_requests(
    reads: Iterable[Read],
    alignment: int,
    cost: RequestCost,
    bounce_nbytes: int,
    grids: Sequence[Grid | None] = (),
) -> list[Request]:
    """Cut reads into edges and requests of at most `cost.request_nbytes` (a multiple of `alignment`).

    Requests through a bounce buffer take at most `bounce_nbytes`, which must be four blocks or more. A strided read
    includes the gaps between its runs if each run is shorter than `cost.max_gap_nbytes` and no gap is longer than that.

    Args:
        grids: the chunk borders of each file that is verified, at multiples of `alignment`. A chunk that is larger than
            a bounce buffer is requested in parts.
    """
    planner = _Planner(alignment, cost, bounce_nbytes, grids)
    return list(planner.merged(request for read in reads for request in planner.cut(read)))


class _Planner:
    """Cuts the reads of a load into requests."""

    def __init__(self, alignment: int, cost: RequestCost, bounce_nbytes: int, grids: Sequence[Grid | None]) -> None:
        """Take the arguments of `plan_requests`."""
        self._alignment = alignment
        self._cost = cost
        self._bounce_nbytes = bounce_nbytes
        # A request grows by up to two blocks when its ends are moved to block borders, so it starts two blocks smaller.
        self._most_nbytes = min(cost.request_nbytes, align_down(bounce_nbytes, alignment) - 2 * alignment)
        self._blocks = Grid(0, alignment), Grid(0, self._most_nbytes)
        self._grids = {
            file: (grid, Grid(grid.origin, align_down(bounce_nbytes, grid.step)))
            for file, grid in enumerate(grids)
            if grid is not None and grid.step <= bounce_nbytes
        }
        """For each verified file, its chunk borders, and the borders that no bounced request crosses."""

    def cut(self, read: Read) -> Iterator[Request]:
        """Yield the requests for a read, in the order of the file."""
        transfer, is_verified = read.transfer, read.file in self._grids
        most = self._bounce_nbytes if is_verified else self._most_nbytes
        if transfer.count == 1:
            yield from self._contiguous(read.file, transfer)
        elif (
            transfer.nbytes >= self._cost.max_gap_nbytes
            or transfer.source_stride - transfer.nbytes > self._cost.max_gap_nbytes
            or transfer.source_stride > most
        ):
            for run in transfer.runs():
                yield from self._contiguous(read.file, run)
        elif is_verified:
            yield from self._bounced(read.file, transfer)
        else:
            rows = most // transfer.source_stride
            for first in range(0, transfer.count, rows):
                start = transfer.source + first * transfer.source_stride
                yield self._request(read.file, transfer.clipped(start, start + rows * transfer.source_stride))

    def _contiguous(self, file: int, transfer: Transfer) -> Iterator[Request]:
        grid, _ = self._grids.get(file, self._blocks)
        start, end = transfer.source, transfer.source_end
        shift = transfer.target - transfer.source
        low, high = grid.up(start), grid.down(end)
        if shift % self._alignment or low >= high:
            yield from self._bounced(file, transfer)
            return
        if start < low:
            yield from self._bounced(file, Transfer(start, start + shift, low - start))
        for extent in split(Extent(low, high - low), max(grid.step, align_down(self._cost.request_nbytes, grid.step))):
            yield Request(file, extent, extent.offset + shift)
        if high < end:
            yield from self._bounced(file, Transfer(high, high + shift, end - high))

    def _bounced(self, file: int, transfer: Transfer) -> Iterator[Request]:
        _, window = self._grids.get(file, self._blocks)
        for offset in range(window.down(transfer.source), transfer.source_end, window.step):
            if parts := transfer.clipped(offset, offset + window.step):
                yield self._request(file, parts)

    def _request(self, file: int, parts: Sequence[Transfer]) -> Request:
        """Return the request for parts of a file, in ascending order, through a bounce buffer."""
        grid, _ = self._grids.get(file, self._blocks)
        start, end = grid.down(parts[0].source), grid.up(parts[-1].source_end)
        return Request(file, Extent(start, end - start), None, tuple(part.shifted(source=-start) for part in parts))

    def merged(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Join consecutive bounced requests if their extents touch, up to the size of a buffer."""
        for group in coalesce(requests, self._where, max_nbytes=self._bounce_nbytes):
            if len(group.items) == 1:
                yield group.items[0]
                continue
            transfers = (
                part.shifted(source=request.extent.offset - group.extent.offset)
                for request in group.items
                for part in request.transfers
            )
            yield Request(group.items[0].file, group.extent, None, tuple(transfers))

    def _where(self, request: Request) -> tuple[tuple[int, int | None, int], int, int]:
        # Arena offsets differ, so a request that has one is never joined.
        cut = self._grids.get(request.file)
        window = 0 if cut is None else cut[1].down(request.extent.offset)
        return (request.file, request.arena_offset, window), request.extent.offset, request.extent.end


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of a load's requests and buffers."""

    threads: int
    """Requests in flight at first."""
    memory: int
    """Bytes of bounce buffers, of all threads together."""
    cost: RequestCost = LOCAL_COST
    """The cost of requests to the store, which determines their size."""
    max_threads: int = 0
    """Limit of the requests in flight, if measuring shows that more than `threads` help."""

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of one thread's buffers, a multiple of the block."""
        return align_down(self.memory // self.threads, BLOCK)


def local_world_size() -> int:
    """Return the number of ranks on this node, from torchrun's LOCAL_WORLD_SIZE; 1 if it is not set."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() and len(text) < 10 else 1


def plan_budget(threads: int | None, memory: int | None, most: int, cost: RequestCost = LOCAL_COST) -> Budget:
    """Return the requested budget; by default a share of the node's, with at most `most` bytes.

    If `threads` is given, measuring does not change it.

    Raises:
        PlanError: `threads` or `memory` is too small.
    """
    ranks, max_threads = local_world_size(), 0
    if threads is None:
        if cost.concurrency is None:
            wanted = min(MAX_THREADS, 2 * num_cpus() // ranks)
        else:
            wanted = min(MAX_CONNECTIONS, cost.concurrency // ranks)
        threads = max(1, wanted)
        max_threads = min(MAX_REQUESTS, (cost.concurrency or MAX_REQUESTS) // ranks)
    if memory is None:
        memory = max(MIN_BUFFER, min(most, NODE_BUFFERS // ranks))
    if threads < 1:
        raise PlanError(f"threads: {threads}, expected 1 or more", code="option")
    if memory < MIN_BUFFER:
        raise PlanError(f"memory: {memory} bytes, expected {MIN_BUFFER} or more", code="option")
    limit = memory // MIN_BUFFER
    return Budget(min(threads, limit), memory, cost, min(max_threads, limit))


def num_cpus() -> int:
    """Return the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class InFlight:
    """The number and size of requests in flight."""

    threads: int
    """Requests in flight."""
    request_nbytes: int
    """Size of the largest request."""


def steps(threads: int, max_threads: int, request_nbytes: int, max_request_nbytes: int) -> list[InFlight]:
    """Return the steps from the first pair to the second, each with at most twice the bytes of the one before."""
    found = [InFlight(threads, request_nbytes)]
    while (step := found[-1]).threads < max_threads:
        found.append(InFlight(min(2 * step.threads, max_threads), request_nbytes))
    while (step := found[-1]).request_nbytes < max_request_nbytes:
        found.append(InFlight(step.threads, min(2 * step.request_nbytes, max_request_nbytes)))
    return found


class Pace:
    """Chooses the step of one load. Not thread-safe; reads no clock."""

    def __init__(self, ladder: list[InFlight]) -> None:
        """Begin with the first step; `ladder` has the steps to try, in order."""
        self._ladder = ladder
        self._place = 0
        self._rate_below = 0.0
        self._is_settled = len(ladder) == 1
        self._begin()

    def _begin(self) -> None:
        self._num_done, self._nbytes, self._seconds = 0, 0, 0.0

    @property
    def step(self) -> InFlight:
        """The number and size of requests that should be in flight now."""
        return self._ladder[self._place]

    def limit(self, threads: int) -> bool:
        """Limit the requests in flight, and return True; return False if more are in flight already."""
        if self.step.threads > threads:
            return False
        self._ladder = [step for step in self._ladder if step.threads <= threads]
        self._is_settled = self._is_settled or self._place + 1 == len(self._ladder)
        return True

    def finished(self, step: InFlight, nbytes: int, seconds: float) -> None:
        """Record that a request for `nbytes`, begun at `step`, has taken `seconds`."""
        if self._is_settled or step != self.step:
            return
        self._num_done += 1
        self._nbytes += nbytes
        self._seconds += seconds
        if self._num_done < step.threads or self._seconds < _MIN_SECONDS * step.threads:
            return
        # By Little's law: bursts of arrivals, which a clock would see, do not change it.
        rate = step.threads * self._nbytes / self._seconds
        if rate < _MIN_GAIN * self._rate_below:
            self._place -= 1
            self._is_settled = True
        elif self._place + 1 == len(self._ladder):
            self._is_settled = True
        else:
            self._rate_below = rate
            self._place += 1
        self._begin()
