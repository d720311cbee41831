"""Budgets: how many threads and how much buffer memory one load may use; ranks of a node divide them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from relayout.core.extents import BLOCK, align_down
from relayout.errors import PlanError
from relayout.storage.protocols import LOCAL_COST, RequestCost

MAX_THREADS = 8
"""Of one rank: so many requests of 8 MiB keep any one drive busy."""

MAX_CONNECTIONS = 16
"""Of one rank to a remote store, at first; each takes some 2 MiB."""

MAX_REQUESTS = 32
"""Most requests of one rank in flight, where measuring shows that they help."""

NODE_BUFFERS = 2**30
"""Default bytes of bounce buffers, pinned or not, of all ranks of a node together."""

MAX_BUFFERS = 128 * 2**20
"""Default bytes of pinned buffers of one rank."""

HOST_BUFFERS = 32 * 2**20
"""Default bytes of host bounce buffers of one rank; most bytes do not pass through them."""

MAX_IN_FLIGHT = 512 * 2**20
"""Default bytes that `iter_load` reads ahead, of one rank."""

NODE_IN_FLIGHT = 2 * 2**30
"""The same, of all ranks of a node together."""

MIN_BUFFER = 2**20
"""Least bytes of one thread's buffer. A smaller budget means fewer threads, not smaller requests."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a load may use."""

    threads: int
    """Requests in flight at first."""
    memory: int
    """Bytes of bounce buffers, of all threads together."""
    cost: RequestCost = LOCAL_COST
    """What requests should look like."""
    max_threads: int = 0
    """Most requests in flight, where measuring shows that more than `threads` help."""

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of one thread's buffers, a multiple of the block."""
        return align_down(self.memory // self.threads, BLOCK)


def local_world_size() -> int:
    """Ranks on this node, from torchrun's LOCAL_WORLD_SIZE; 1 if it is not set."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(text)) if text.isdecimal() and len(text) < 10 else 1


def plan_budget(threads: int | None, memory: int | None, most: int, cost: RequestCost = LOCAL_COST) -> Budget:
    """The budget that was asked for; by default a share of the node's, `most` bytes at most.

    `threads` that were asked for are not changed by measuring.

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
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
