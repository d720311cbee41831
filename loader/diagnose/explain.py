"""`explain`: which backend a load would use here, and why."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from relayout.core.arguments import integer
from relayout.core.extents import BLOCK
from relayout.format.index import Read
from relayout.loader.backends.base import Backend
from relayout.loader.backends.files import Sources
from relayout.loader.budgets import Budget
from relayout.loader.diagnose.hints import error_hints
from relayout.loader.loading import options_of
from relayout.loader.pack import ArenaPlan
from relayout.loader.read_plan import Chunk
from relayout.loader.sources.checkpoint import find_rank
from relayout.loader.sources.stored import StoredFile
from relayout.results import Result
from relayout.storage.local.mounts import Filesystem, filesystem_of, refuses_direct
from relayout.storage.protocols import Access
from relayout.storage.stores import scheme_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file that a load would read."""

    name: str
    nbytes: int
    """Length of the file."""
    filesystem: Filesystem
    refuses_direct: str | None
    """Why direct I/O does not work on it; None if it works."""
    resident_nbytes: int | None
    """Bytes of the file in the page cache; None where the system does not tell."""


@dataclass(frozen=True, slots=True)
class Explanation(Result):
    """What a load would do."""

    path: str
    rank: int
    device: str
    backend: str
    """The one that would be used."""
    reason: str
    gds: str | None
    """The way that GPUDirect Storage would really take, "GDS" or "P2PDMA"; None without it."""
    nbytes: int
    """Bytes of the tensors."""
    read_nbytes: int
    """Bytes that would be requested; 0 for "mapped", whose pages are read when they are used."""
    zero_copy_nbytes: int
    """Bytes of the tensors that are read into place, without a bounce buffer."""
    resident_nbytes: int
    """Requested bytes that are in the page cache; for "mapped", bytes of the tensors that are in it."""
    num_requests: int
    threads: int
    """Requests in flight."""
    memory: int
    """Bytes of buffers, at most."""
    files: tuple[FileFacts, ...]


def explain(
    path: str | os.PathLike[str],
    rank: int,
    device: str | torch.device = "cpu",
    *,
    backend: str = "auto",
    threads: int | None = None,
    memory: int | str | None = None,
    tp: int | None = None,
) -> Explanation:
    """Say what `load` with these arguments would do now, and why, without loading anything. Thread-safe.

    Args:
        path, rank, device, backend, threads, memory, tp: as for `load`.

    Raises:
        FormatError, PlanError, OSError: as `load`, for errors that occur before the first byte is read.

    Example:
        >>> import relayout
        >>> relayout.explain("llama-3.1-8b-tp8", rank=3).device
        'cpu'
    """
    with error_hints():
        options = options_of(device, backend, threads=threads, memory=memory)
        plan = find_rank(path, rank, tp).arena()
        choice, budget = options.choose(plan.files)
        look = _look(plan, choice.backend, budget)
    is_lazy = choice.backend.reads_when_used
    return Explanation(
        path=str(path),
        rank=integer(rank, "rank"),
        device=str(options.device),
        backend=choice.backend.name_for(_ways(look)),
        reason=f"{choice.reason}; {_basis(look, is_lazy, plan, budget)}",
        gds=choice.gds,
        nbytes=plan.nbytes,
        read_nbytes=look.requested_nbytes,
        zero_copy_nbytes=look.zero_copy_nbytes if choice.backend.is_zero_copy else 0,
        resident_nbytes=look.resident_nbytes,
        num_requests=look.num_requests,
        threads=budget.threads,
        memory=budget.memory,
        files=look.files,
    )


@dataclass(frozen=True, slots=True)
class _Look:
    """The files, and what a backend would request of them."""

    files: tuple[FileFacts, ...]
    num_requests: int
    requested_nbytes: int
    zero_copy_nbytes: int
    """See `Explanation.zero_copy_nbytes`."""
    resident_nbytes: int
    """See `Explanation.resident_nbytes`."""


def _look(plan: ArenaPlan, backend: Backend[Any], budget: Budget) -> _Look:
    # Read nothing, not even headers: that would change what is in the page cache.
    sources = Sources([replace(file, proof=None) for file in plan.files], backend.access)
    try:
        chunks = backend.chunks(plan.reads, sources.alignment, budget)
        is_lazy = backend.reads_when_used
        return _Look(
            tuple(_facts(sources, index, file) for index, file in enumerate(plan.files)),
            len(chunks),
            sum(chunk.extent.nbytes for chunk in chunks),
            sum(chunk.nbytes for chunk in chunks if chunk.arena_offset is not None),
            _resident_of_tensors(sources, plan.reads) if is_lazy else _resident(sources, chunks),
        )
    finally:
        sources.close()


def _facts(sources: Sources, index: int, file: StoredFile) -> FileFacts:
    return FileFacts(
        file.name,
        file.nbytes,
        _filesystem(file),
        _refuses_direct(file),
        sources.resident_nbytes(index, 0, file.nbytes),
    )


def _filesystem(file: StoredFile) -> Filesystem:
    if file.path is not None:
        return filesystem_of(file.path)
    return Filesystem(scheme_of(str(file.folder)) or "unknown", str(file.folder), file.folder.cost.chunk_nbytes, None)


def _refuses_direct(file: StoredFile) -> str | None:
    return "the store has no file descriptors" if file.path is None else refuses_direct(file.path)


def _resident(sources: Sources, chunks: Sequence[Chunk]) -> int:
    """Requested bytes that would come from the page cache."""
    return sum(
        sources.resident_nbytes(chunk.file, offset, nbytes) or 0
        for chunk in chunks
        for offset, nbytes, through_cache in sources.pieces(chunk.file, chunk.extent.offset, chunk.extent.nbytes)
        if through_cache
    )


def _resident_of_tensors(sources: Sources, reads: Sequence[Read]) -> int:
    """Bytes of tensors that are in the page cache. Of a strided read, bytes in its gaps may be counted."""
    total = 0
    for read in reads:
        transfer = read.transfer
        cached = sources.resident_nbytes(read.file, transfer.source, transfer.source_end - transfer.source) or 0
        total += min(cached, transfer.total_nbytes)
    return total


def _ways(look: _Look) -> list[Access]:
    """How the requests of backend "auto" would be made."""
    resident, files = look.resident_nbytes, look.files
    if resident > look.requested_nbytes - BLOCK * (len(files) + 1) or any(file.refuses_direct for file in files):
        return [Access.BUFFERED]
    return [Access.DIRECT, Access.BUFFERED] if resident else [Access.DIRECT]


def _basis(look: _Look, is_lazy: bool, plan: ArenaPlan, budget: Budget) -> str:
    """The facts that the choice is based on."""
    if any(file.folder.cost.is_remote for file in plan.files):
        kinds = " and ".join(sorted({file.filesystem.kind for file in look.files}))
        chunk = budget.cost.chunk_nbytes // 2**20
        more = f", up to {budget.max_threads} where that reads faster" if budget.max_threads > budget.threads else ""
        return f"here {kinds} brings them by at most {chunk} MiB each, {budget.threads} at a time{more}"
    total = plan.nbytes if is_lazy else look.requested_nbytes
    percent = f"{100 * look.resident_nbytes / max(1, total):.0f} %"
    if is_lazy:
        kinds = " and ".join(sorted({file.filesystem.kind for file in look.files}))
        return f"here all of them come through the page cache of {kinds}, which has {percent} of the bytes now"
    refused = [file for file in look.files if file.refuses_direct is not None]
    kinds = " and ".join(sorted({file.filesystem.kind for file in refused or look.files}))
    direct = f"{kinds} refuses direct I/O: {refused[0].refuses_direct}" if refused else f"{kinds} supports direct I/O"
    return f"here {direct}, {percent} of the bytes come from the page cache"
