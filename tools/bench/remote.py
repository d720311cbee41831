"""`tools/run bench remote`: loading from an object store, SeaweedFS on loopback, and what the server had to send."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median_low
from typing import Any

from rich.console import Console
from rich.table import Table
from support import seaweedfs

import relayout
from bench.drive import total_nbytes
from bench.peers import LOADERS
from relayout.benchmark.loaders import LoadJob
from relayout.benchmark.machine import touch_memory
from relayout.benchmark.measure import expected_digests
from relayout.benchmark.run import LoaderDied, load_together
from relayout.storage.system import available_nbytes

BUCKET, TP = "models", 8
CONVERTED = f"s3://{BUCKET}/tp{TP}"
SCENARIOS: dict[str, tuple[list[int], tuple[str, ...]]] = {
    "one rank of 8": ([3], ("relayout", "runai", "s3fs")),
    "all 8 ranks": (list(range(TP)), ("relayout", "runai")),
}
"""Ranks and peers; what a rank costs by s3fs, each of them costs."""
AT_ONCE = {"relayout": TP, "runai": 2, "s3fs": 1}
"""Processes at the same time where all ranks load: the memory of one machine does not hold more of some peers."""
RUNAI = {"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0"}


def measure(
    scratch: Path,
    source: Path,
    runs: int,
    limit: float,
    log_line: Callable[[str], None],
    keep: Callable[[dict[str, Any]], object] = lambda results: None,
) -> dict[str, Any]:
    """Publish a checkpoint plainly and converted, and load it by every peer in turns; `keep` gets what is known."""
    peers = {name: LOADERS[name].describe() | {"title": LOADERS[name].family} for name in AT_ONCE}
    results: dict[str, Any] = {"size_gb": round(total_nbytes(source) / 1e9, 2), "peers": peers, "scenarios": {}}
    with ExitStack() as stack:
        server = stack.enter_context(seaweedfs.running(scratch / "server"))
        server.make_bucket(BUCKET)
        os.environ.update(server.environment | {"AWS_EC2_METADATA_DISABLED": "true"})
        publish(source, log_line)
        expected = expected_digests(CONVERTED)
        for title, (ranks, names) in SCENARIOS.items():
            found = results["scenarios"][title] = {}
            turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
            for _ in range(runs):
                for name in names:
                    turns[name].append(_run(name, ranks, expected, server, 3 * total_nbytes(source), limit))
                    log_line(f"{title}, {name}: {turns[name][-1]}")
                    found[name] = _medians(turns[name])
                    keep(results)
    return results


def publish(source: Path, log_line: Callable[[str], None]) -> None:
    """Write a checkpoint to the bucket, plain and converted."""
    from obstore.store import from_url

    bucket = from_url(f"s3://{BUCKET}", client_options={"allow_http": True})
    for file in sorted(source.iterdir()):
        bucket.put(f"plain/{file.name}", file, chunk_size=8 * 2**20, max_concurrency=4)
    log_line(f"converting to {CONVERTED}")
    relayout.convert(source, CONVERTED, tp=TP, memory="256MiB")
    os.sync()  # Else the server's writing takes part in what is measured.


def _run(
    name: str, ranks: list[int], expected: list[str], server: seaweedfs.SeaweedFS, touched_nbytes: int, limit: float
) -> dict[str, Any]:
    """Load the ranks, some at a time: seconds, the server's bytes and processor time, and what clients took."""
    peer, before = LOADERS[name], [0, 0.0]
    if name == "runai":
        peer = replace(peer, environment=RUNAI | {"RUNAI_STREAMER_S3_ENDPOINT": server.url})
    sums = {"seconds": 0.0, "cpu_seconds": 0.0, "server_cpu_seconds": 0.0, "sent_nbytes": 0, "nbytes": 0}
    peak = 0

    def start() -> None:
        touch_memory(touched_nbytes)
        before[:] = server.sent_nbytes(BUCKET), server.cpu_seconds()

    for first in range(0, len(ranks), AT_ONCE[name]):
        some = ranks[first : first + AT_ONCE[name]]
        memory = available_nbytes() // 2 // len(some)
        plain = f"s3://{BUCKET}/plain"
        # Each as if it were alone: what is measured are bytes and processor time.
        jobs = [LoadJob("bench.peers", name, plain, CONVERTED, TP, rank, 1, memory) for rank in some]
        try:
            measured = load_together(jobs, peer, start, limit=limit)
        except LoaderDied as died:
            return {"failed": str(died)}
        sums["sent_nbytes"] += server.sent_nbytes(BUCKET) - int(before[0])
        sums["server_cpu_seconds"] += server.cpu_seconds() - before[1]
        if measured.digests != tuple(expected[rank] for rank in some):
            return {"failed": "loaded wrong bytes"}
        sums["seconds"] += measured.seconds
        sums["cpu_seconds"] += measured.cpu_seconds
        sums["nbytes"] += measured.nbytes
        peak = max(peak, measured.peak_minus_needed_nbytes)
    found = {key: round(value, 2) for key, value in sums.items()}
    over = round(sums["sent_nbytes"] / sums["nbytes"], 4)
    return found | {
        "sent_over_needed": over,
        "peak_minus_needed_nbytes": peak,
        "at_once": min(AT_ONCE[name], len(ranks)),
    }


def _medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The lower median of each figure; of runs of which one failed, that one."""
    failed = next((one for one in runs if "failed" in one), None)
    if failed is not None:
        return failed
    return {key: median_low([one[key] for one in runs]) for key in runs[0]} | {"runs": len(runs)}


def print_table(console: Console, results: dict[str, Any]) -> None:
    """The results, a table for each scenario."""
    for title, found in results["scenarios"].items():
        table = Table(title=f"{title}, {results['size_gb']:g} GB in S3 (SeaweedFS on loopback)", title_justify="left")
        for heading in ("", "GB sent", "sent / needed", "client CPU s", "memory beyond tensors, MiB", "s", "at once"):
            table.add_column(heading, justify="right" if heading else "left")
        for name, one in found.items():
            if "failed" in one:
                table.add_row(results["peers"][name]["title"], one["failed"])
                continue
            cells = (
                f"{one['sent_nbytes'] / 1e9:.3f}",
                f"{one['sent_over_needed']:.3f}",
                f"{one['cpu_seconds']:.1f}",
                f"{one['peak_minus_needed_nbytes'] / 2**20:.0f}",
                f"{one['seconds']:.1f}",
                str(one["at_once"]),
            )
            table.add_row(results["peers"][name]["title"], *cells)
        console.print(table)
