"""`tools/run bench budget`: loads with buffers of various sizes, from which the default is chosen.

The default for a device is `DEVICE_BUFFERS` of loader/requests.py. Each size is measured as a loader of
`relayout bench`, so that page cache, bytes and other work are checked alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from relayout.benchmark import loaders
from relayout.benchmark.loaders import Loader
from relayout.benchmark.verdict import RankLoads
from relayout.loader.requests import DEVICE_BUFFERS, HOST_BUFFERS

MIB = 2**20
SIZES = (32, 64, 128, 256, 512, 1024)
"""MiB of a rank's buffers."""
ENOUGH = 0.97
"""The share of the highest speed that is enough: beyond it, more buffers only take memory."""


def _loader(size: int) -> Loader:
    load = partial(loaders.relayout, memory=size * MIB)
    return replace(loaders.LOADERS["relayout"], load=load, title=f"{size} MiB", family=f"{size} MiB")


LOADERS: dict[str, Loader] = {str(size): _loader(size) for size in SIZES}
"""The registry for processes that load."""


def least_enough(groups: Sequence[RankLoads]) -> int | None:
    """The smallest size, in MiB, that is fast enough in every group of loads; None: none is, or nothing was measured.

    The median time counts. A size that failed in a group is not enough.
    """
    enough = [_enough(group) for group in groups]
    sizes = set.intersection(*enough) if enough else set()
    return min(sizes, default=None)


def _enough(group: RankLoads) -> set[int]:
    speeds = {int(timing.loader): timing.gb_per_s for timing in group.done if timing.failure is None}
    return {size for size, speed in speeds.items() if speed >= ENOUGH * max(speeds.values())}


def conclusion(groups: Sequence[RankLoads], device: str) -> dict[str, Any]:
    """What the default is, and what these loads say that it should be."""
    default = (HOST_BUFFERS if device == "cpu" else DEVICE_BUFFERS) // MIB
    return {"default_mib": default, "least_enough_mib": least_enough(groups), "enough": ENOUGH}
