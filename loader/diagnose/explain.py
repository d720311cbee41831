"""`explain`: which backend a load would use here, and why."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from relayout.core.arguments import integer
from relayout.core.extents import BLOCK
from relayout.loader.backends.files import ReadableFiles
from relayout.loader.budgets import Budget
from relayout.loader.diagnose.hints import error_hints
from relayout.loader.loading import options_of
from relayout.loader.reads import ArenaPlan, Request
from relayout.loader.sources.checkpoint import find_rank
from relayout.loader.sources.stored import StoredFile
from relayout.results import Result
from relayout.storage.local.mounts import Filesystem, filesystem_of, refuses_direct
from relayout.storage.pages import measured_pages
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


@dataclass(frozen=True, slots=True, repr=False)
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
    """Bytes that would be requested."""
    zero_copy_nbytes: int
    """Bytes of the tensors that are read into place, without a bounce buffer."""
    resident_nbytes: int
    """Requested bytes that are in the page cache."""
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
        chosen, budget = options.choose(plan.files)
        # Read nothing, not even headers: that would change what is in the page cache.
        with ReadableFiles([replace(file, proof=None) for file in plan.files], chosen.access) as opened:
            requests = chosen.requests(plan.reads, opened.alignment, budget)
            files = tuple(_facts(opened, index, file) for index, file in enumerate(plan.files))
            resident = _resident(opened, requests)
    direct = sum(request.nbytes for request in requests if request.arena_offset is not None)
    told = Explanation(
        path=str(path),
        rank=integer(rank, "rank"),
        device=str(options.device),
        backend="",
        reason="",
        gds=chosen.gds,
        nbytes=plan.nbytes,
        read_nbytes=sum(request.extent.nbytes for request in requests),
        zero_copy_nbytes=direct if chosen.is_zero_copy else 0,
        resident_nbytes=resident,
        num_requests=len(requests),
        threads=budget.threads,
        memory=budget.memory,
        files=files,
    )
    reason = f"{chosen.reason}; {_basis(told, plan, budget)}; {measured_pages()}"
    name = chosen.name
    return replace(told, backend=" and ".join(_ways(told)) if name == "auto" else name, reason=reason)


def _facts(opened: ReadableFiles, index: int, file: StoredFile) -> FileFacts:
    resident = opened.resident_nbytes(index, 0, file.nbytes)
    if file.path is not None:
        return FileFacts(file.name, file.nbytes, filesystem_of(file.path), refuses_direct(file.path), resident)
    store = str(file.folder)
    filesystem = Filesystem(scheme_of(store) or "unknown", store, file.folder.cost.chunk_nbytes, None)
    return FileFacts(file.name, file.nbytes, filesystem, "the store has no file descriptors", resident)


def _resident(opened: ReadableFiles, requests: Sequence[Request]) -> int:
    """Requested bytes that would come from the page cache."""
    return sum(
        opened.resident_nbytes(request.file, offset, nbytes) or 0
        for request in requests
        for offset, nbytes, through_cache in opened.pieces(request.file, request.extent.offset, request.extent.nbytes)
        if through_cache
    )


def _ways(told: Explanation) -> list[str]:
    """How the requests of backend "auto" would be made."""
    resident, files = told.resident_nbytes, told.files
    if resident > told.read_nbytes - BLOCK * (len(files) + 1) or any(file.refuses_direct for file in files):
        return [Access.BUFFERED.value]
    return [Access.DIRECT.value, *([Access.BUFFERED.value] if resident else [])]


def _basis(told: Explanation, plan: ArenaPlan, budget: Budget) -> str:
    """The facts that the choice is based on."""
    refused = [file for file in told.files if file.refuses_direct is not None]
    kinds = _kinds(told.files)
    if any(file.folder.cost.is_remote for file in plan.files):
        chunk = budget.cost.chunk_nbytes // 2**20
        more = f", up to {budget.max_threads} where that reads faster" if budget.max_threads > budget.threads else ""
        return f"here {kinds} brings them by at most {chunk} MiB each, {budget.threads} at a time{more}"
    percent = f"{100 * told.resident_nbytes / max(1, told.read_nbytes):.0f} %"
    direct = f"{kinds} supports direct I/O"
    if refused:
        direct = f"{_kinds(refused)} refuses direct I/O: {refused[0].refuses_direct}"
    return f"here {direct}, {percent} of the bytes come from the page cache"


def _kinds(files: Sequence[FileFacts]) -> str:
    """Of file systems."""
    return " and ".join(sorted({file.filesystem.kind for file in files}))
