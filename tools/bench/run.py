"""Runs a peer once, by the same means as `relayout bench`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.drive import files_of, num_gpus, total_nbytes
from relayout.benchmark.child import digest_of
from relayout.benchmark.job import Job, Loader
from relayout.benchmark.machine import meminfo, prepare
from relayout.benchmark.run import Died, Measured, load_together
from relayout.checkpoint.converted import read_manifest, read_table
from relayout.storage.stores import find_store


@dataclass(frozen=True)
class PackedJob(Job):
    """What to load, for peers that may read a format of their own."""

    packed: str = ""
    """The checkpoint as one FlashPack file, where that peer takes part."""


@dataclass(frozen=True)
class Folders:
    """What there is to load."""

    source: Path
    converted: Path
    """`source`, converted for the degree that is measured."""
    packed: Path
    """The folder of FlashPack's copy of `source`; empty where that takes no part."""

    @property
    def every_file(self) -> list[Path]:
        """The files of all of them."""
        return files_of([self.source, self.converted, self.packed])

    def read_by(self, peer: Loader) -> list[Path]:
        """The files that a peer reads."""
        folder = self.packed if peer.family == "FlashPack" else self.converted if peer.reads_converted else self.source
        return files_of([folder])


def run_peer(
    name: str,
    peer: Loader,
    folders: Folders,
    tp: int,
    ranks: list[int],
    *,
    cold: bool,
    limit: float,
    verify: bool = True,
) -> Measured:
    """Load the ranks at once.

    Raises:
        Died: a process died, had no answer after `limit` seconds, or a byte was wrong; or the page cache would not be
            as it should.
    """
    jobs = [
        PackedJob(
            loader=name,
            source=str(folders.source),
            converted=str(folders.converted),
            packed=str(folders.packed / "model.flashpack"),
            tp=tp,
            rank=rank,
            num_processes=len(ranks),
            memory_nbytes=meminfo("MemAvailable") // 2 // len(ranks),
            device=peer.device if peer.device == "cpu" else f"cuda:{number % num_gpus()}",
        )
        for number, rank in enumerate(ranks)
    ]
    # As much as a peer may take that keeps all of the model, a copy of it, and pages of the cache.
    needed = 3 * total_nbytes(folders.source)

    def ready() -> None:
        prepare(folders.read_by(peer), folders.every_file, cold=cold, needed_nbytes=needed)

    measured = load_together(jobs, peer, ready, limit=limit, module="bench.peer")
    if verify and measured.digests != tuple(_expected(folders.converted, rank) for rank in ranks):
        raise Died("loaded wrong bytes")
    return measured


@cache
def _expected(converted: Path, rank: int) -> str:
    folder = find_store(converted)
    table = read_table(folder, read_manifest(folder), rank)
    return digest_of(zip(table.names, table.shapes, table.digests, strict=True))
