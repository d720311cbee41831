"""Budgets: how many threads and how much buffer memory one load may use, alone or beside other ranks of its node."""

from __future__ import annotations

import os
from dataclasses import dataclass

from relayout.core.extents import BLOCK, align_down
from relayout.errors import PlanError
from relayout.storage.protocols import LOCAL_COST, RequestCost

MAX_THREADS = 8
"""Of one rank. Requests of 8 MiB: so many keep any one drive busy."""

NODE_BUFFERS = 2**30
"""Bytes of pinned or bounce memory that all ranks of a node together take by default."""

MAX_BUFFERS = 128 * 2**20
"""Bytes of pinned memory of one rank."""

HOST_BUFFERS = 32 * 2**20
"""Bytes of bounce memory of one rank, where most bytes need none."""

MAX_IN_FLIGHT = 512 * 2**20
"""Bytes of tensors that are read ahead of whoever iterates."""

NODE_IN_FLIGHT = 2 * 2**30

MIN_BUFFER = 2**20
"""Bytes of one thread's buffer, at least: fewer threads rather than smaller requests."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a load may use."""

    threads: int
    """Requests in flight."""
    memory: int
    """Bytes of buffers between drive and destination, all threads together."""
    cost: RequestCost = LOCAL_COST
    """What requests should look like."""

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of one thread's buffers, a multiple of the block."""
        return align_down(self.memory // self.threads, BLOCK)


def local_world_size() -> int:
    """Ranks on this node, as torchrun tells them in LOCAL_WORLD_SIZE; 1 where nobody does."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() and len(text) < 10 else 1


def plan_budget(threads: int | None, memory: int | None, most: int, cost: RequestCost = LOCAL_COST) -> Budget:
    """What was asked for, or by default a share of what the node's ranks may use together, `most` bytes at most.

    Raises:
        PlanError: what was asked for is too little to read anything.
    """
    ranks = local_world_size()
    if threads is None:
        wanted = min(MAX_THREADS, 2 * num_cpus() // ranks) if cost.concurrency is None else cost.concurrency // ranks
        threads = max(1, wanted)
    if memory is None:
        memory = max(MIN_BUFFER, min(most, NODE_BUFFERS // ranks))
    if threads < 1:
        raise PlanError(f"{threads} threads, expected 1 or more", code="option")
    if memory < MIN_BUFFER:
        raise PlanError(f"{memory} bytes of memory, expected {MIN_BUFFER} or more", code="option")
    return Budget(min(threads, memory // MIN_BUFFER), memory, cost)


def num_cpus() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
