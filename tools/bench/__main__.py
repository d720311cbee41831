"""The commands."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from support import seaweedfs
from support.shared_filesystems import FILE_SYSTEMS
from support.slow_storage import Link

import bench
import relayout
from bench import budget as budgets
from bench import chart as charts
from bench import clients as node_loads
from bench import convert as conversions
from bench import costs as first_loads
from bench import index as indexes
from bench import load as loads
from bench import memory as memories
from bench import remote as remotes
from bench import reuse as reuses
from bench import rows as row_reads
from bench import slow as slows
from bench.drive import machine, need_fio, total_nbytes
from bench.peers import LOADERS
from relayout.benchmark.commands import failures
from relayout.benchmark.commands import loads as figures
from relayout.benchmark.machine import describe, devices_of
from relayout.benchmark.measure import expected_digests, layers_of, write_llama
from relayout.benchmark.run import Folders, RankGroup
from relayout.benchmark.verdict import RankLoads, verdict, warnings_of
from relayout.cli.command import Line, show

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, pretty_exceptions_enable=False, help=bench.__doc__)
console = Console(highlight=False, width=132)
progress = Console(highlight=False, stderr=True)

DirOption = Annotated[Path | None, typer.Option("--dir", help="Where to make the checkpoints; a temporary folder.")]
SizeOption = Annotated[float, typer.Option("--size", help="GB of the checkpoint (Llama-3.1-8B shapes, fewer layers).")]
RunsOption = Annotated[int, typer.Option("--runs", help="Runs of everything, interleaved; medians are reported.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="Write the results here, as JSON.")]


@app.command()
def convert(
    folder: DirOption = None,
    size: SizeOption = 5.6,
    runs: RunsOption = 5,
    out: OutOption = None,
    idle: Annotated[float, typer.Option(help="Seconds to wait before each run: memory is left to the host.")] = 0.0,
) -> None:
    """Time `relayout convert --tp 8`, `verify` and `restore` beside `cp -r` with `sync`, from a cold cache."""
    need_fio()
    with tempfile.TemporaryDirectory(prefix="relayout-bench-", dir=folder) as scratch:
        results = conversions.measure(Path(scratch), _make_source(Path(scratch), size), runs, idle)
        conversions.print_table(console, results)
        _write(out, results, Path(scratch))


@app.command()
def load(
    folder: DirOption = None,
    size: SizeOption = 5.6,
    runs: RunsOption = 5,
    out: OutOption = None,
    peers: Annotated[str, typer.Option(help=f"Comma-separated, of: {', '.join(LOADERS)}. Default: the device's.")] = "",
    scenario: Annotated[str, typer.Option(help="Comma-separated: one rank of 8, all 8, the whole model.")] = (
        ",".join(loads.SCENARIOS)
    ),
    cold: Annotated[
        bool, typer.Option("--cold", help="Only from a cold page cache; default is cold and warm.")
    ] = False,
    warm: Annotated[bool, typer.Option("--warm", help="Only from a warm page cache.")] = False,
    memory: Annotated[
        str,
        typer.Option(help="Comma-separated: touched (free memory is touched before each load), idle (6 s are waited)."),
    ] = "touched",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    limit: Annotated[float, typer.Option(help="Seconds that a peer may take.")] = 600,
) -> None:
    """Time loading one rank of 8, all 8 at once, and the whole model (TP 1): relayout and its peers."""
    chosen = loads.select_peers(peers.split(",") if peers else None, device)
    unknown = set(scenario.split(",")) - set(loads.SCENARIOS)
    if unknown:
        raise SystemExit(f"no scenario {min(unknown)!r}, there are: {', '.join(loads.SCENARIOS)}")
    if strange := set(memory.split(",")) - set(loads.IDLE_SECONDS):
        raise SystemExit(f"no state of memory {min(strange)!r}, there are: {', '.join(loads.IDLE_SECONDS)}")
    with tempfile.TemporaryDirectory(prefix="relayout-bench-", dir=folder) as scratch:
        place = Path(scratch)
        source, done, about = _make_source(place, size), [], describe(place)
        everything: dict[str, Any] = {
            "settings": {
                "size_gb": round(total_nbytes(source) / 1e9, 1),
                "runs": runs,
                "device": device,
                "seconds_allowed": limit,
            },
            "peers": {name: peer.describe() for name, peer in chosen.items()},
            "scenarios": [],
        }
        for name in scenario.split(","):
            converted = place / f"tp{loads.SCENARIOS[name][0]}"
            if not converted.exists():
                relayout.convert(source, converted, tp=loads.SCENARIOS[name][0])
            wanted = [is_cold for is_cold in (True, False) if not (cold or warm) or (cold if is_cold else warm)]
            for is_cold, free in product(wanted, memory.split(",")):
                found, kept = loads.measure(
                    source,
                    converted,
                    name,
                    chosen,
                    cold=is_cold,
                    memory=free,
                    runs=runs,
                    device=device,
                    limit=limit,
                    log_line=progress.print,
                )
                done.append(found)
                everything["scenarios"].append(kept)
                show([figures([found], kept["drive_gb_per_s"]), *map(Line, failures([found]))])
                _write(out, everything, place)  # What is done is kept, should the rest fail.
        limits = [one["drive_gb_per_s"] for one in everything["scenarios"] if one["drive_gb_per_s"]]
        said = [f"WRONG BYTES: {line}" for one in done for line in one.wrong()]
        said += [f"warning: {line}" for line in warnings_of(about, done)] + loads.missing(chosen.values())
        text = verdict(about, done, loads.TP, median(limits) if limits else None, is_converted=True)
        console.print(text, *said, sep="\n")


@app.command()
def budget(
    folder: DirOption = None,
    size: SizeOption = 5.6,
    runs: RunsOption = 3,
    out: OutOption = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cuda",
    limit: Annotated[float, typer.Option(help="Seconds that a load may take.")] = 600,
) -> None:
    """Load a whole model with buffers of various sizes, cold and warm: the smallest that is enough is the default."""
    devices = devices_of(device)
    with tempfile.TemporaryDirectory(prefix="relayout-bench-", dir=folder) as scratch:
        place, done = Path(scratch), list[RankLoads]()
        source = _make_source(place, size)
        relayout.convert(source, place / "tp1", tp=1)
        for state in ("cold", "warm"):
            group = RankGroup(
                Folders(source, place / "tp1", 1),
                budgets.LOADERS,
                [0],
                state,
                expected_digests(place / "tp1"),
                registry="bench.budget",
                devices=devices,
                limit=limit,
            )
            group.measure(runs, progress.print, done.append)
            show([figures(done[-1:], None), *map(Line, failures(done[-1:]))])
            settings = {"size_gb": round(total_nbytes(source) / 1e9, 1), "runs": runs, "device": device}
            rows = [loads.kept_of(one, timing) for one in done for timing in one.done]
            _write(out, {"settings": settings, "rows": rows, **budgets.conclusion(done, device)}, place)
        said = [f"WRONG BYTES: {line}" for one in done for line in one.wrong()]
        console.print(*said, budgets.conclusion(done, device), sep="\n")


@app.command()
def chart(results: Path, png: Path) -> None:
    """Draw what `load --out` wrote."""
    charts.draw(json.loads(results.read_text()), png)


@app.command()
def remote(
    folder: DirOption = None,
    size: SizeOption = 3.0,
    runs: RunsOption = 3,
    out: OutOption = None,
    limit: Annotated[float, typer.Option(help="Seconds that a peer may take.")] = 600,
) -> None:
    """Load one rank of 8, and all 8, from S3: a SeaweedFS on this machine; bytes by its own count."""
    if (why := seaweedfs.absence()) is not None:
        raise SystemExit(why)
    with tempfile.TemporaryDirectory(prefix="relayout-bench-", dir=folder) as scratch:
        source = _make_source(Path(scratch), size)
        results = remotes.measure(
            Path(scratch), source, runs, limit, progress.print, keep=lambda known: _write(out, known, Path(scratch))
        )
        remotes.print_table(console, results)
        _write(out, results, Path(scratch))


@app.command()
def slow(
    folder: DirOption = None,
    size: SizeOption = 1.0,
    runs: RunsOption = 3,
    out: OutOption = None,
    storage: Annotated[str, typer.Option(help="Comma-separated: fuse, s3 (SeaweedFS), web (nginx).")] = "fuse,s3",
    latency: Annotated[str, typer.Option(help="Round trips in ms. Default: 0,1,10 of FUSE, 1,20,80 of others.")] = "",
    rate: Annotated[str, typer.Option(help="Gbit/s; 0: no limit. Default: 0 of FUSE, 1,10 of others.")] = "",
    ranks: Annotated[str, typer.Option(help="How many of the 8 ranks load at once.")] = "1,8",
    request: Annotated[int, typer.Option(help="KiB of FUSE's largest request.")] = 1024,
    direct: Annotated[bool, typer.Option(help="Whether FUSE takes O_DIRECT.")] = True,
    peers: Annotated[str, typer.Option(help="Comma-separated. Default: all that are installed.")] = "",
    limit: Annotated[float, typer.Option(help="Seconds that a load may take.")] = 600,
) -> None:
    """Load over a slow link: from a FUSE file system, and from S3 through a proxy; bytes as the link counts them.

    For a real mount: `load --dir MOUNT`.
    """
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="relayout-bench-", dir=folder) as scratch:
        source = _make_source(Path(scratch), size)
        about = {"size_gb": round(total_nbytes(source) / 1e9, 2)}
        for kind in storage.split(","):
            latencies, rates = (latency or slows.DEFAULTS[kind][0]).split(","), rate or slows.DEFAULTS[kind][1]
            links = [
                Link(float(ms) / 1e3, float(gbits) * 1e9 / 8 or None, request * 1024, direct)
                for gbits in rates.split(",")
                for ms in latencies
            ]
            names = peers.split(",") if peers else slows.PEERS[kind]
            with slows.PLACES[kind](Path(scratch), source, progress.print) as place:
                groups = [int(number) for number in ranks.split(",")]
                for row in slows.measure(place, links, groups, names, runs, limit, progress.print):
                    rows.append(row)
                    _write(out, about | {"rows": rows}, Path(scratch))  # What is done is kept, should the rest fail.
    slows.print_table(console, rows)


@app.command()
def clients(
    storage: Annotated[str, typer.Argument(help=f"The file system: {', '.join(FILE_SYSTEMS)}.")],
    folder: DirOption = None,
    size: Annotated[
        float, typer.Option("--size", help="GB of the checkpoint (Llama-3.1-8B shapes, fewer tokens).")
    ] = 0.6,
    runs: RunsOption = 3,
    out: OutOption = None,
    nodes: Annotated[
        str, typer.Option(help=f"Comma-separated: how many load; each divides {node_loads.TP}.")
    ] = "1,2,4,8",
    sharing: Annotated[
        str, typer.Option(help="Comma-separated: ranks (of one model, divided), replicas (each needs all of it).")
    ] = ",".join(node_loads.SHARINGS),
    rate: Annotated[float, typer.Option(help="Gbit/s of the link of each node.")] = 1.0,
    server_rate: Annotated[float, typer.Option(help="Gbit/s of the link of the server.")] = 2.0,
    peers: Annotated[str, typer.Option(help="Comma-separated. Default: all that are installed.")] = "",
    limit: Annotated[float, typer.Option(help="Seconds that a load may take.")] = 600,
) -> None:
    """Load on 1 to 8 nodes from one network file system: seconds, and bytes over each link. Takes a superuser."""
    numbers, links = list(map(int, nodes.split(","))), node_loads.Links(rate * 1e9 / 8, server_rate * 1e9 / 8)
    with tempfile.TemporaryDirectory(prefix="relayout-bench-", dir=folder) as scratch:
        nbytes = node_loads.make_models(Path(scratch) / "models", size, progress.print)
        about = {
            "storage": FILE_SYSTEMS[storage].title,
            "nbytes": nbytes,
            "gbit_per_s": rate,
            "server_gbit_per_s": server_rate,
        }
        rows: list[dict[str, Any]] = []
        with node_loads.place_of(storage, Path(scratch), max(numbers), links) as place:
            names = peers.split(",") if peers else []
            for rows in node_loads.measure(
                place, nbytes, links, numbers, sharing.split(","), names, runs, limit, progress.print
            ):
                _write(out, about | {"rows": rows}, Path(scratch))  # What is done is kept, should the rest fail.
    node_loads.print_table(console, rows)


@app.command()
def memory(
    folder: DirOption = None,
    size: SizeOption = 3.0,
    out: OutOption = None,
    limit: Annotated[float, typer.Option(help="Seconds that a load or command may take.")] = 600,
) -> None:
    """Load one rank of 8, save, convert, copy, verify and restore, in a cgroup of the rank's tensors and 256 MiB."""
    with tempfile.TemporaryDirectory(prefix="relayout-bench-", dir=folder) as scratch:
        rows = memories.measure(_make_source(Path(scratch), size), limit, progress.print)
        _write(out, {"rows": rows}, Path(scratch))
    memories.print_table(console, rows)


@app.command()
def index(folder: DirOption = None, out: OutOption = None) -> None:
    """Measure what lies beside the weights of DeepSeek-V3, and in a delta without a change: bytes, seconds to parse."""
    with tempfile.TemporaryDirectory(prefix="relayout-bench-", dir=folder) as scratch:
        rows = indexes.measure(Path(scratch), (8, 16), (4 * 10**9, 2**29))
        _write(out, {"rows": rows}, Path(scratch))
    indexes.print_table(console, rows)


@app.command()
def reuse(
    folder: DirOption = None,
    runs: RunsOption = 3,
    out: OutOption = None,
    layers: Annotated[int, typer.Option(help="Layers of 25 MB, beside 67 MB of embedding and head.")] = 8,
    rate: Annotated[float, typer.Option(help="Gbit/s of the link.")] = 1.0,
) -> None:
    """Copy new versions over a link with an older one there: bytes that cross it, and the time of a full copy."""
    rows, in_bucket = [], []
    with tempfile.TemporaryDirectory(prefix="relayout-bench-", dir=folder) as scratch:
        about = {"tp": reuses.TP, "layers": layers, "gbit_per_s": rate, "runs": runs}
        for row in reuses.measure(Path(scratch), layers, runs, rate * 1e9 / 8, progress.print):
            rows.append(row)
            _write(out, about | {"rows": rows}, Path(scratch))
        for row in reuses.measure_bucket(Path(scratch), layers, progress.print):
            in_bucket.append(row)
            _write(out, about | {"rows": rows, "bucket": in_bucket}, Path(scratch))
    reuses.print_table(console, rows)
    reuses.print_bucket_table(console, in_bucket)


@app.command()
def costs(
    folder: DirOption = None,
    sizes: Annotated[str, typer.Option(help='GB of checkpoints of Llama-3.1-8B shapes; "": none.')] = "2.5,5,10",
    tensors: Annotated[str, typer.Option(help='Tensors of checkpoints of 1.6 GB; "": none.')] = "1000,10000,100000",
    files: Annotated[str, typer.Option(help='Rank files of a checkpoint of 2.5 GB; "": none.')] = "8,80,800",
    runs: RunsOption = 3,
    out: OutOption = None,
) -> None:
    """Time a fleet's first load by bytes, tensors and files: convert, verify, copy, load of each rank; and its memory.

    Needs room for two copies of the largest checkpoint.
    """
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="relayout-bench-", dir=folder) as scratch:
        asked = (
            [float(one) for one in sizes.split(",") if one],
            *([int(one) for one in text.split(",") if one] for text in (tensors, files)),
        )
        for case in first_loads.cases(*asked):
            rows.append(first_loads.measure(Path(scratch), case, runs, progress.print))
            _write(out, {"tp": first_loads.TP, "rows": rows}, Path(scratch))  # Kept, should the rest fail.
    first_loads.print_table(console, rows)


@app.command()
def rows(
    folder: DirOption = None,
    size: Annotated[float, typer.Option("--size", help="GB of the table.")] = 3.0,
    runs: RunsOption = 5,
    count: Annotated[int, typer.Option(help="Rows that each run reads, a multiple of 1024.")] = 64 * 1024,
    out: OutOption = None,
) -> None:
    """Time reads of rows of a table by number beside a mapped file, and count what a start writes of it."""
    with tempfile.TemporaryDirectory(prefix="relayout-bench-", dir=folder) as scratch:
        converted = row_reads.make(Path(scratch), int(size * 1e9))
        found = row_reads.measure(converted, count, runs, progress.print)
        _write(out, {"batch": row_reads.BATCH, "depth": 64, "rows": found}, Path(scratch))
    row_reads.print_table(console, found)


def _make_source(folder: Path, size: float) -> Path:
    layers = layers_of(size * 1e9)
    progress.print(f"making a checkpoint of Llama-3.1-8B shapes with {layers} layers")
    write_llama(folder / "source", layers, shard_nbytes=10**9)
    os.sync()
    return folder / "source"


def _write(out: Path | None, results: dict[str, Any], folder: Path) -> None:
    if out is not None:
        out.write_text(json.dumps({"machine": machine(folder), **results}, indent=1) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Checkpoints of many gigabytes are not left behind.
    app()
