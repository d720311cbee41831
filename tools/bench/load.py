"""`tools/run bench load`: the scenarios, measured by the means of `relayout bench`, and what is kept of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from bench.drive import direct_read, limit_by, num_gpus, total_nbytes
from bench.peers import LOADERS
from relayout.benchmark.loaders import Loader
from relayout.benchmark.measure import expected_digests
from relayout.benchmark.run import Folders, RankGroup
from relayout.benchmark.verdict import RankLoads, Timing

TP = 8
SCENARIOS = {"one": (TP, [3]), "all": (TP, list(range(TP))), "whole": (1, [0])}
"""The degree and the ranks of each."""
IDLE_SECONDS = {"touched": 0.0, "idle": 6.0}
"""Before each load, by the state of free memory: touched and freed just before, or left to the host for so long."""
_KEYS = ("seconds", "cpu_seconds", "peak_minus_needed_nbytes", "nbytes")
"""What is kept of a load, as medians."""


def select_peers(names: list[str] | None, device: str) -> dict[str, Loader]:
    """The peers of these names, or all of a device.

    Raises:
        SystemExit: there is no such peer.
    """
    unknown = set(names or ()) - set(LOADERS)
    if unknown:
        raise SystemExit(f"no peer {min(unknown)!r}, there are: {', '.join(LOADERS)}")
    return {name: peer for name, peer in LOADERS.items() if (name in names if names else device in peer.devices)}


def measure(
    source: Path,
    converted: Path,
    scenario: str,
    peers: dict[str, Loader],
    *,
    cold: bool,
    memory: str = "touched",
    runs: int,
    device: str,
    limit: float,
    log_line: Callable[[str], None],
) -> tuple[RankLoads, dict[str, Any]]:
    """Run each peer that is installed so many times, in turns: the loads, and what is kept of them."""
    tp, ranks = SCENARIOS[scenario]
    absent = {name: [why] for name, peer in peers.items() if (why := peer.absence()) is not None}
    group = RankGroup(
        folders=Folders(source, converted, tp),
        loaders={name: peer for name, peer in peers.items() if name not in absent},
        ranks=ranks,
        state="cold" if cold else "warm",
        expected=expected_digests(converted),
        registry="bench.peers",
        devices=["cpu"] if device == "cpu" else [f"cuda:{number}" for number in range(num_gpus())],
        limit=limit,
        idle_seconds=IDLE_SECONDS[memory],
        # As much as a peer may take that keeps all of the model, a copy of it, and pages of the cache.
        touched_nbytes=3 * total_nbytes(source),
    )
    files = group.folders.rank_files(ranks)
    limits = [direct_read(files) for _ in range(runs)] if cold else []
    found: list[RankLoads] = []
    group.measure(runs, log_line, found.append)
    [loads] = found
    return loads, {
        "title": loads.title,
        "state": loads.state,
        "memory": memory,
        "nbytes": sum(path.stat().st_size for path in files),
        "drive_gb_per_s": median(limits) if limits else None,
        "all_drive_gb_per_s": limits,
        "drive_by": limit_by(),
        "peers": {one.loader: _row(one) for one in loads.done},
        "failures": absent | {one.loader: [one.failure] for one in loads.timings if one.failure is not None},
    }


def kept_of(group: RankLoads, one: Timing) -> dict[str, Any]:
    """What is kept of one loader of a group."""
    return {"loader": one.title, "what": group.title, "state": group.state, **_row(one)}


def _row(one: Timing) -> dict[str, Any]:
    medians = {key: one.median(key) for key in _KEYS}
    drive = median(run.drive_nbytes / run.nbytes for run in one.runs)
    return medians | {"drive_over_needed": drive, "all_seconds": one.seconds}


def missing(peers: Iterable[Loader]) -> list[str]:
    """A line for each peer that cannot be measured."""
    return [f"not measured: {peer.title}: {why}" for peer in peers if (why := peer.absence()) is not None]
