"""`tools/run bench slow`: loads from slow storage, see `support/slow_storage.py`, and what went over its link."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median_low
from typing import Any

from rich.console import Console
from rich.table import Table
from support import seaweedfs
from support.slow_storage import Link, Slow, absence, slow_folder, slow_server

import relayout
from bench import remote
from bench.drive import total_nbytes
from bench.peers import LOADERS
from relayout.benchmark.loaders import LoadJob
from relayout.benchmark.machine import prepare, remember, touch_memory
from relayout.benchmark.measure import expected_digests
from relayout.benchmark.run import LoaderDied, load_together
from relayout.storage.system import available_nbytes

TP = 8
PEERS = {
    "fuse": ("relayout", "relayout_plain", "get_slice", "threads", "load_file", "fastsafetensors", "runai"),
    "s3": ("relayout", "relayout_plain", "runai", "s3fs"),
    "web": ("relayout", "relayout_plain"),
}
"""By the kind of storage. load_file reads as engines do by default: every tensor whole, then it is cut. safetensors and
fastsafetensors read files only."""
DEFAULTS = {"fuse": ("0,1,10", "0"), "s3": ("1,20,80", "1,10"), "web": ("1,20,80", "1,10")}
"""Round trips in ms, and Gbit/s."""
LogLine = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Place:
    """A checkpoint on storage that can be reached through a link."""

    kind: str
    source: Path
    converted: Path
    """Both on this machine."""
    connect: Callable[[Link], Any]
    """A context with what is reached through a link."""

    def where(self, slow: Slow) -> tuple[str, str]:
        """The plain and the converted checkpoint, through the link."""
        root = f"s3://{remote.BUCKET}" if self.kind == "s3" else slow.where
        return f"{root}/{self.source.name}", f"{root}/{self.converted.name}"


def _converted(source: Path, log_line: LogLine) -> Path:
    converted = source.with_name(f"tp{TP}")
    if not converted.exists():
        log_line(f"converting to {converted}")
        relayout.convert(source, converted, tp=TP)
    return converted


@contextmanager
def fuse_place(scratch: Path, source: Path, log_line: LogLine) -> Iterator[Place]:
    """A folder behind a FUSE file system."""
    if (why := absence()) is not None:
        raise SystemExit(why)
    converted = _converted(source, log_line)
    yield Place("fuse", source, converted, partial(slow_folder, source.parent, scratch / "mount"))


@contextmanager
def s3_place(scratch: Path, source: Path, log_line: LogLine) -> Iterator[Place]:
    """A bucket of SeaweedFS."""
    if (why := seaweedfs.absence()) is not None:
        raise SystemExit(why)
    with seaweedfs.running(scratch / "server") as server:
        server.make_bucket(remote.BUCKET)
        os.environ.update(server.environment | {"AWS_EC2_METADATA_DISABLED": "true"})
        remote.publish(source, log_line)
        connect = partial(slow_server, int(server.url.rpartition(":")[2]))
        yield Place("s3", source.with_name("plain"), source.with_name(f"tp{TP}"), connect)
        os.environ.update(server.environment)


_NGINX = """\
user root; daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/log;
events {{ worker_connections 1024; }}
http {{ access_log off; sendfile on; tcp_nopush on; client_body_temp_path {folder}; proxy_temp_path {folder};
  fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
  server {{ listen 127.0.0.1:{port}; root {root}; }} }}
"""


@contextmanager
def web_place(scratch: Path, source: Path, log_line: LogLine) -> Iterator[Place]:
    """A web server, nginx: it takes less of the processors than SeaweedFS, and passes more."""
    if shutil.which("nginx") is None:
        raise SystemExit("nginx is not installed")
    folder, converted, [port] = scratch / "nginx", _converted(source, log_line), seaweedfs.free_ports(1)
    folder.mkdir()
    (folder / "conf").write_text(_NGINX.format(folder=folder, port=port, root=source.parent))
    server = subprocess.Popen(["nginx", "-p", folder, "-c", folder / "conf", "-e", folder / "log"])
    try:
        seaweedfs.wait_for(f"http://127.0.0.1:{port}", server, folder / "log")
        yield Place("web", source, converted, partial(slow_server, port))
    finally:
        server.terminate()
        server.wait()


PLACES = {"fuse": fuse_place, "s3": s3_place, "web": web_place}


def measure(
    place: Place,
    links: Iterable[Link],
    groups: Iterable[int],
    names: Iterable[str],
    runs: int,
    limit: float,
    log_line: LogLine,
) -> Iterator[dict[str, Any]]:
    """Rows of the table: each loader in turns, over each link, with so many ranks at once."""
    names = [name for name in names if LOADERS[name].absence() is None]
    peaks: dict[str, int] = {}
    for link in links:
        for num_ranks in groups:
            turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
            for _ in range(runs):
                for name in names:
                    if any("failed" in one for one in turns[name]):
                        continue
                    if (needed := num_ranks * peaks.get(name, 0)) > available_nbytes():
                        found = {"failed": f"not run: {num_ranks} at once need {needed / 1e9:.0f} GB of memory"}
                    else:
                        found = _run(place, link, num_ranks, name, limit)
                        peaks[name] = max(peaks.get(name, 0), found.get("peak_minus_needed_nbytes", 0))
                    turns[name].append(found)
                    log_line(f"{link}, {num_ranks} ranks, {name}: {found}")
            for name, done in turns.items():
                failed = next((one for one in done if "failed" in one), None)
                figures = failed or {key: _median(one[key] for one in done) for key in done[0]}
                yield {
                    "storage": place.kind,
                    "latency_ms": 1e3 * link.latency_seconds,
                    "gbit_per_s": None if link.bytes_per_second is None else 8e-9 * link.bytes_per_second,
                    "request_kib": link.request_nbytes // 1024 if place.kind == "fuse" else None,
                    "direct": link.direct if place.kind == "fuse" else None,
                    "ranks": num_ranks,
                    "loader": LOADERS[name].title.removesuffix("" if place.kind == "fuse" else ", O_DIRECT"),
                    "runs": len(done),
                } | figures


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median_low(known) if known else None


def _run(place: Place, link: Link, num_ranks: int, name: str, limit: float) -> dict[str, Any]:
    with place.connect(link) as slow:
        peer, local = LOADERS[name], place.kind == "fuse"
        if not local:
            os.environ["AWS_ENDPOINT_URL"] = slow.where
            if name == "runai":
                peer = replace(peer, environment=remote.RUNAI | {"RUNAI_STREAMER_S3_ENDPOINT": slow.where})
        source, converted = place.where(slow)
        expected = expected_digests(converted if place.kind == "s3" else place.converted)
        ranks, memory = [3] if num_ranks == 1 else list(range(num_ranks)), available_nbytes() // 2 // num_ranks
        jobs = [LoadJob("bench.peers", name, source, converted, TP, rank, num_ranks, memory) for rank in ranks]
        before = 0

        def ready() -> None:
            nonlocal before
            if place.kind != "s3":
                remember(path for folder in (place.source, place.converted) for path in folder.glob("*.safetensors"))
            if local:
                files = [path for folder in (source, converted) for path in Path(folder).glob("*.safetensors")]
                prepare([], files, cold=True, needed_nbytes=total_nbytes(place.source))
            else:
                touch_memory(2**30)
            before = slow.sent_nbytes()

        try:
            measured = load_together(jobs, peer, ready, limit=limit)
        except LoaderDied as died:
            return {"failed": str(died)}
        moved = slow.sent_nbytes() - before
    if measured.digests != tuple(expected[rank] for rank in ranks):
        return {"failed": "loaded wrong bytes"}
    return {
        "seconds": round(measured.seconds, 3),
        "moved_over_needed": round(moved / measured.nbytes, 3),
        "share_of_link": round(moved / measured.seconds / link.bytes_per_second, 3) if link.bytes_per_second else None,
        "cpu_seconds": round(measured.cpu_seconds, 2),
        "peak_minus_needed_nbytes": measured.peak_minus_needed_nbytes,
    }


def print_table(console: Console, rows: Iterable[dict[str, Any]]) -> None:
    """The rows, with a line between settings."""
    table = Table()
    for heading in (
        "storage",
        "latency, ms",
        "Gbit/s",
        "ranks",
        "loader",
        "s",
        "moved / needed",
        "of the link",
        "CPU s",
    ):
        table.add_column(heading, justify="left" if heading in ("storage", "loader") else "right")
    table.add_column("beyond tensors, MiB", justify="right")
    before: Any = None
    for row in rows:
        setting = [row[key] for key in ("storage", "latency_ms", "gbit_per_s", "ranks")]
        if before not in (None, setting):
            table.add_section()
        before = setting
        kind = row["storage"] if row["direct"] is not False else f"{row['storage']}, no O_DIRECT"
        cells = [kind, *(f"{value:g}" if value is not None else "-" for value in setting[1:]), row["loader"]]
        if "failed" in row:
            table.add_row(*cells, row["failed"])
            continue
        share = "-" if row["share_of_link"] is None else f"{row['share_of_link']:.2f}"
        over = f"{row['peak_minus_needed_nbytes'] / 2**20:.0f}"
        table.add_row(
            *cells, f"{row['seconds']:.2f}", f"{row['moved_over_needed']:.2f}", share, f"{row['cpu_seconds']:.1f}", over
        )
    console.print(table)
