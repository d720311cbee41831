"""`tools/run bench load`: the scenarios, what is measured of each peer, and the tables and the summary made of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from bench.drive import direct_read, limit_by
from bench.peers import PEERS
from bench.run import Folders, run_peer
from relayout.benchmark.job import Loader
from relayout.benchmark.run import Died, Measured

TP = 8

_KEYS = ("seconds", "cpu_seconds", "peak_over_needed", "peak_minus_needed_nbytes", "nbytes")
"""What is reported of a load."""


@dataclass(frozen=True)
class Scenario:
    """What is loaded."""

    title: str
    tp: int
    ranks: tuple[int, ...]


SCENARIOS = {
    "one": Scenario("one rank of 8", TP, (3,)),
    "all": Scenario("all 8 ranks at once", TP, tuple(range(TP))),
    "whole": Scenario("whole model", 1, (0,)),
}


def select_peers(names: list[str] | None, device: str) -> dict[str, Loader]:
    """The peers of these names, or all of a device.

    Raises:
        SystemExit: there is no such peer.
    """
    unknown = set(names or ()) - set(PEERS)
    if unknown:
        raise SystemExit(f"no peer {min(unknown)!r}, there are: {', '.join(PEERS)}")
    return {name: peer for name, peer in PEERS.items() if (name in names if names else peer.device == device)}


def measure(
    scenario: Scenario,
    cold: bool,
    folders: Folders,
    peers: dict[str, Loader],
    runs: int,
    limit: float,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Run each peer so many times, in turns, each time beginning with another one."""
    files = sorted(folders.converted.glob("model-rank-*.safetensors"))
    taking_part = [name for name, peer in peers.items() if len(scenario.ranks) > 1 or not peer.group]
    values: dict[str, list[Measured]] = {name: [] for name in taking_part}
    failures = {name: [why] for name in taking_part if (why := peers[name].absence()) is not None}
    given_up = set(failures)
    limits = []
    for run in range(runs):
        limits += [direct_read(files)] if cold else []
        turn = run * len(taking_part) // runs
        for name in taking_part[turn:] + taking_part[:turn]:
            if name in given_up:
                continue
            try:
                one = run_peer(name, peers[name], folders, scenario.tp, list(scenario.ranks), cold=cold, limit=limit)
            except Died as died:
                failures.setdefault(name, []).append(str(died))
                tell(f"{name}: {died}")
                if died.of_memory:
                    given_up.add(name)
            else:
                values[name].append(one)
                tell(f"{name}: {one.seconds:.2f} s")
    rows = {
        name: {key: statistics.median(getattr(one, key) for one in measured) for key in _KEYS}
        | {"drive_over_needed": statistics.median(one.drive_nbytes / one.nbytes for one in measured)}
        | {"all_seconds": [one.seconds for one in measured]}
        for name, measured in values.items()
        if measured
    }
    return {
        "title": scenario.title,
        "state": "cold" if cold else "warm",
        "nbytes": sum(path.stat().st_size for path in files) * len(scenario.ranks) // scenario.tp,
        "drive_gb_per_s": statistics.median(limits) if limits else None,
        "all_drive_gb_per_s": limits,
        "drive_by": limit_by(),
        "peers": rows,
        "failures": failures,
    }


def print_table(console: Console, result: dict[str, Any]) -> None:
    """One scenario: the fastest first."""
    rows, limit = result["peers"], result["drive_gb_per_s"]
    drive = f", drive {limit:.2f} GB/s by {result['drive_by']}" if limit else ""
    table = Table(box=box.SIMPLE_HEAD, title=f"{result['title']}, {result['state']}{drive}", title_justify="left")
    headings = ("", "s", "GB/s", "of drive", "relayout is", "CPU s", "peak / needed", "beyond, MiB", "read / needed")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    mine = _best(rows, ours=True)
    for name, row in sorted(rows.items(), key=lambda item: item[1]["seconds"]):
        speed = row["nbytes"] / row["seconds"] / 1e9
        ratio = (
            "" if mine is None or PEERS[name].family == "relayout" else _faster(row["seconds"] / rows[mine]["seconds"])
        )
        table.add_row(
            PEERS[name].title + (" *" if name in result["failures"] else ""),
            f"{row['seconds']:.2f}",
            f"{speed:.2f}",
            f"{100 * speed / limit:.0f} %" if limit else "",
            ratio,
            f"{row['cpu_seconds']:.2f}",
            f"{row['peak_over_needed']:.2f}",
            f"{row['peak_minus_needed_nbytes'] / 2**20:.0f}",
            f"{row['drive_over_needed']:.2f}",
        )
    for name in result["failures"]:
        if name not in rows:
            table.add_row(PEERS[name].title + " *", "-", *[""] * 7)
    console.print(table)
    for name, failures in result["failures"].items():
        for why in sorted(set(failures)):
            times = f" ({failures.count(why)} times)" if failures.count(why) > 1 else ""
            console.print(f"* {PEERS[name].title}: {why}{times}")


def summarise(results: list[dict[str, Any]]) -> list[str]:
    """The ratios that matter, a line each."""
    lines = []
    for result in results:
        rows = result["peers"]
        mine, best = _best(rows, ours=True), _best(rows, ours=False)
        if mine is None:
            continue
        ours, heading = rows[mine], f"{result['title']}, {result['state']}"
        line = f"{heading}: {ours['seconds']:.2f} s"
        if result["drive_gb_per_s"]:
            share = ours["nbytes"] / ours["seconds"] / 1e9 / result["drive_gb_per_s"]
            line += f", {100 * share:.0f} % of the drive's limit"
        if best is not None:
            other = rows[best]
            line += (
                f"; {_faster(other['seconds'] / ours['seconds'])} than {PEERS[best].title} ({other['seconds']:.2f} s)"
            )
        lines.append(line)
        if best is not None:
            rivals = {name: row for name, row in rows.items() if PEERS[name].family != "relayout"}
            least = min(rivals, key=lambda name: rivals[name]["cpu_seconds"])
            lines.append(
                f"    CPU {ours['cpu_seconds']:.2f} s; that peer {other['cpu_seconds']:.2f} s; the least of any,"
                f" {PEERS[least].title}: {rivals[least]['cpu_seconds']:.2f} s"
            )
            small = min(rivals, key=lambda name: rivals[name]["peak_minus_needed_nbytes"])
            lines.append(
                f"    peak memory beyond what is needed {_mib(ours)} MiB; that peer {_mib(other)} MiB; the least of"
                f" any, {PEERS[small].title}: {_mib(rivals[small])} MiB"
            )
    return lines


def _best(rows: dict[str, Any], ours: bool) -> str | None:
    names = [name for name in rows if (PEERS[name].family == "relayout") == ours]
    return min(names, key=lambda name: rows[name]["seconds"], default=None)


def _faster(ratio: float) -> str:
    return f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"


def _mib(row: dict[str, float]) -> str:
    return f"{row['peak_minus_needed_nbytes'] / 2**20:.0f}"
