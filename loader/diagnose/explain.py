"""`explain`: which way a load would take here, and why."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from relayout.core.extents import BLOCK
from relayout.format.index import Read
from relayout.loader.backends.files import Sources
from relayout.loader.diagnose.hints import advised
from relayout.loader.loading import options_of
from relayout.loader.placement import place
from relayout.loader.read_plan import Chunk
from relayout.loader.sources.checkpoint import ConvertedRank, find_checkpoint
from relayout.loader.sources.contents import StoredFile
from relayout.storage.local.mounts import Filesystem, filesystem_of, refuses_direct
from relayout.storage.protocols import Access
from relayout.storage.stores import scheme_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class FileFacts:
    """One file that a load would read."""

    name: str
    nbytes: int
    """Length of the file."""
    filesystem: Filesystem
    refuses_direct: str | None
    """Why direct I/O does not work on it; None if it works."""
    resident_nbytes: int | None
    """Bytes of the file in the page cache; None where the system does not tell."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a load would do."""

    path: str
    rank: int
    device: str
    backend: str
    """The one that would run."""
    reason: str
    gds: str | None
    """The way that GPUDirect Storage would really take: "GDS", "P2PDMA" or "compat"; None: it is not available, or of
    no use for this device."""
    nbytes: int
    """Bytes of the tensors."""
    read_nbytes: int
    """Bytes that would be requested; "mapped" requests none, its pages are read when they are used."""
    straight_nbytes: int
    """Bytes of the tensors that come whole blocks at a time to where they belong, through no buffer."""
    resident_nbytes: int
    """Bytes of the requests that would come from the page cache; of "mapped", bytes of the tensors that are in it."""
    num_requests: int
    threads: int
    """Requests in flight."""
    memory: int
    """Bytes of buffers, at most."""
    files: tuple[FileFacts, ...]

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        return asdict(self)


def explain(
    path: str | os.PathLike[str],
    rank: int,
    device: str | torch.device = "cpu",
    *,
    backend: str = "auto",
    threads: int | None = None,
    memory: int | None = None,
    tp: int | None = None,
) -> Explanation:
    """Tell what `load` with these arguments would do now, and why; nothing is loaded. Several threads may ask at once.

    Raises:
        FormatError, PlanError, OSError: as `load`, as far as it is known before the first byte is read.
    """
    with advised():
        options = options_of(device, backend, False, threads, memory, None)
        checkpoint = find_checkpoint(path, rank, tp)
        files: Sequence[StoredFile]
        reads: Sequence[Read]
        if isinstance(checkpoint, ConvertedRank):
            files, reads, nbytes = checkpoint.files, checkpoint.entry.reads, checkpoint.entry.nbytes
        else:
            contents = checkpoint.contents(None)
            sizes = contents.sizes()
            files, reads, nbytes = contents.files, place(contents.reads, sizes).reads, sum(sizes)
        choice, budget = options.choose(files)
        chosen = choice.backend
        # Nothing is read, not even headers: what is in the page cache shall stay as it is found.
        sources = Sources([replace(file, owner=None) for file in files], chosen.access)
        try:
            chunks = chosen.chunks(reads, sources.alignment, budget)
            requested = sum(chunk.extent.nbytes for chunk in chunks)
            is_lazy = chosen.reads_when_used
            resident = _resident_of_tensors(sources, reads) if is_lazy else _resident(sources, chunks)
            facts = tuple(
                FileFacts(
                    file.name,
                    file.nbytes,
                    _filesystem(file),
                    _refuses_direct(file),
                    sources.resident_nbytes(number, 0, file.nbytes),
                )
                for number, file in enumerate(files)
            )
        finally:
            sources.close()
    return Explanation(
        path=str(path),
        rank=checkpoint.rank,
        device=str(options.device),
        backend=chosen.name_for(_ways(facts, resident, requested)),
        reason=f"{choice.reason}; {_found(facts, is_lazy, resident, nbytes if is_lazy else requested)}",
        gds=choice.gds,
        nbytes=nbytes,
        read_nbytes=requested,
        straight_nbytes=sum(chunk.nbytes for chunk in chunks if chunk.arena_offset is not None)
        if chosen.is_zero_copy
        else 0,
        resident_nbytes=resident,
        num_requests=len(chunks),
        threads=budget.threads,
        memory=budget.memory,
        files=facts,
    )


def _filesystem(file: StoredFile) -> Filesystem:
    if file.path is not None:
        return filesystem_of(file.path)
    return Filesystem(scheme_of(str(file.folder)) or "unknown", str(file.folder), file.folder.cost.chunk_nbytes, None)


def _refuses_direct(file: StoredFile) -> str | None:
    return "a store without descriptors" if file.path is None else refuses_direct(file.path)


def _resident(sources: Sources, chunks: Sequence[Chunk]) -> int:
    """Bytes of requests that would come from the page cache."""
    return sum(
        sources.resident_nbytes(chunk.file, offset, nbytes) or 0
        for chunk in chunks
        for offset, nbytes, through_cache in sources.pieces(chunk.file, chunk.extent.offset, chunk.extent.nbytes)
        if through_cache
    )


def _resident_of_tensors(sources: Sources, reads: Sequence[Read]) -> int:
    """Bytes of tensors that are in the page cache; what lies between the pieces of a read may count for them."""
    total = 0
    for read in reads:
        one = read.transfer
        there = sources.resident_nbytes(read.file, one.source, one.source_end - one.source) or 0
        total += min(there, one.total_nbytes)
    return total


def _ways(files: Sequence[FileFacts], resident: int, requested: int) -> list[Access]:
    """How requests would go that are made directly wherever that is better."""
    if resident > requested - BLOCK * (len(files) + 1) or any(file.refuses_direct is not None for file in files):
        return [Access.BUFFERED]
    return [Access.DIRECT, Access.BUFFERED] if resident else [Access.DIRECT]


def _found(files: Sequence[FileFacts], is_lazy: bool, resident: int, total: int) -> str:
    """What the choice is based on."""
    percent = f"{100 * resident / max(1, total):.0f} %"
    if is_lazy:
        kinds = " and ".join(sorted({file.filesystem.kind for file in files}))
        return f"here all of them come through the page cache of {kinds}, which has {percent} of the bytes now"
    refused = [file for file in files if file.refuses_direct is not None]
    kinds = " and ".join(sorted({file.filesystem.kind for file in refused or files}))
    direct = f"{kinds} refuses direct I/O: {refused[0].refuses_direct}" if refused else f"{kinds} takes direct I/O"
    return f"here {direct}, {percent} of the bytes come from the page cache"
