"""`relayout doctor` and `explain`: the backend and requests that a load would use, why, and the storage's speed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING

from relayout.checkpoint.converted import find_manifest
from relayout.checkpoint.source import read_source
from relayout.core.arguments import integer
from relayout.core.extents import BLOCK, Extent, align_down, align_up, split
from relayout.core.workers import Workers
from relayout.errors import PlanError
from relayout.loader.backends.cuda import is_integrated
from relayout.loader.backends.files import ReadableFiles, error_hints
from relayout.loader.requests import Budget, Request, local_world_size, num_cpus, plan_budget
from relayout.loader.sources.checkpoint import LoadRequest
from relayout.loader.sources.rank import ArenaPlan, StoredFile, cost_of
from relayout.reporting import Result
from relayout.storage.local.store import refuses_direct
from relayout.storage.local.stripes import num_stripes
from relayout.storage.stores import Access, ReadableFile, find_input, scheme_of
from relayout.storage.system import Buffer, Filesystem, filesystem_of, measured_pages

if TYPE_CHECKING:
    import torch

_NUM_SHORT = 5
"""Number of short requests, which run one after the other."""
_MIN_LATENCY_SECONDS = 0.0005
"""Latency below which a file system counts as local."""
_MAX_SAMPLE_NBYTES = 512 * 2**20
_MAX_SECONDS = 3.0


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
    """Bytes of the file in the page cache; None where the system does not report it."""
    num_stripes: int | None = None
    """Objects of Lustre's servers over which most of the file is striped; None on other file systems."""


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(Result):
    """The backend, budget and requests that a load would use."""

    path: str
    rank: int
    device: str
    backend: str
    """The backend that would be used."""
    reason: str
    gds: str | None
    """The path that GPUDirect Storage would take: "GDS" or "P2PDMA". None: it would not be used."""
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
    """Upper bound of the buffers, in bytes."""
    files: tuple[FileFacts, ...]


def explain(
    path: str | os.PathLike[str],
    rank: int | None = None,
    device: str | torch.device = "cpu",
    *,
    backend: str = "auto",
    threads: int | None = None,
    memory: int | str | None = None,
    tp: int | None = None,
) -> Explanation:
    """Explain what `load` with these arguments would do now, and why, without loading anything. Thread-safe.

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
        load_request = LoadRequest(
            path=path, rank=rank, device=device, backend=backend, threads=threads, memory=memory, tp=tp
        )
        options, source = load_request.options(), load_request.source()
        plan = source.arena()
        chosen, budget = options.choose(plan.files)
        # Read nothing, not even headers, because that would change the contents of the page cache.
        with ReadableFiles([replace(file, digests=None) for file in plan.files], chosen.access) as opened:
            requests = chosen.requests(plan.reads, opened.alignment, budget)
            files = tuple(_facts(opened, index, file) for index, file in enumerate(plan.files))
            resident = _resident(opened, requests)
    direct = sum(request.nbytes for request in requests if request.arena_offset is not None)
    told = Explanation(
        path=str(path),
        rank=source.rank,
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
        stripes = num_stripes(file.path, file.nbytes)
        return FileFacts(file.name, file.nbytes, filesystem_of(file.path), refuses_direct(file.path), resident, stripes)
    store = str(file.folder)
    filesystem = Filesystem(scheme_of(store) or "unknown", store, file.folder.cost.request_nbytes, None)
    return FileFacts(file.name, file.nbytes, filesystem, "the store has no file descriptors", resident)


def _resident(opened: ReadableFiles, requests: Sequence[Request]) -> int:
    """Return the number of requested bytes that would come from the page cache."""
    return sum(
        opened.resident_nbytes(request.file, offset, nbytes) or 0
        for request in requests
        for offset, nbytes, through_cache in opened.pieces(request.file, request.extent.offset, request.extent.nbytes)
        if through_cache
    )


def _ways(told: Explanation) -> list[str]:
    """Return the access modes that backend "auto" would use for the requests."""
    resident, files = told.resident_nbytes, told.files
    if resident > told.read_nbytes - BLOCK * (len(files) + 1) or any(file.refuses_direct for file in files):
        return [Access.BUFFERED.value]
    return [Access.DIRECT.value, *([Access.BUFFERED.value] if resident else [])]


def _basis(told: Explanation, plan: ArenaPlan, budget: Budget) -> str:
    """Return the facts that the choice is based on, as text for the user."""
    refused = [file for file in told.files if file.refuses_direct is not None]
    kinds = _kinds(told.files)
    if any(file.folder.cost.is_remote for file in plan.files):
        most = budget.cost.request_nbytes / 1e6
        more = f", up to {budget.max_threads} where that reads faster" if budget.max_threads > budget.threads else ""
        return f"here {kinds} reads them in requests of at most {most:.1f} MB, {budget.threads} at a time{more}"
    percent = f"{100 * told.resident_nbytes / max(1, told.read_nbytes):.0f} %"
    direct = f"{kinds} supports direct I/O"
    if refused:
        direct = f"{_kinds(refused)} refuses direct I/O: {refused[0].refuses_direct}"
    return f"here {direct}, {percent} of the bytes come from the page cache"


def _kinds(files: Sequence[FileFacts]) -> str:
    """Return the kinds of the files' file systems, as text for the user."""
    return " and ".join(sorted({file.filesystem.kind for file in files}))


@dataclass(frozen=True, slots=True)
class Network:
    """The speed of storage that is not on this machine."""

    latency_seconds: float
    """Median latency of a few short requests."""
    bytes_per_second: float
    """Throughput with `threads` requests in flight."""
    sample_nbytes: int
    """Bytes that were read for the measurement."""
    threads: int

    def seconds(self, nbytes: int) -> float:
        """Return the seconds of a load of `nbytes`: one round trip each for manifest and files, then the bytes."""
        return 2 * self.latency_seconds + nbytes / self.bytes_per_second


def measure(files: Sequence[StoredFile], budget: Budget) -> Network | None:
    """Read from the files until 3 s have passed, or 512 MiB or all bytes were read; return the speed.

    Returns None if the files have no bytes or are on this machine.
    """
    with ExitStack() as stack:
        opened = [stack.enter_context(file.open(Access.AUTO)) for file in files]
        largest = max(range(len(opened)), key=lambda index: opened[index].nbytes, default=None)
        if largest is None or not opened[largest].nbytes:
            return None
        latency = median(_latencies(files[largest], opened[largest]))
        if not files[0].folder.cost.is_remote and latency < _MIN_LATENCY_SECONDS:
            return None
        return _measured(opened, budget, latency)


def _latencies(file: StoredFile, opened: ReadableFile) -> Iterator[float]:
    """Yield the seconds of short requests at offsets that read-ahead has not reached."""
    buffer = Buffer()
    for index in range(_NUM_SHORT):
        start = time.perf_counter()
        if file.path is None:
            file.folder.snapshot().stat(file.name)
        else:
            opened.read(align_down(index * opened.nbytes // _NUM_SHORT, BLOCK), buffer.reserve(BLOCK))
        yield time.perf_counter() - start


def _measured(opened: Sequence[ReadableFile], budget: Budget, latency: float) -> Network:
    most_nbytes = budget.cost.request_nbytes
    items = [(file, piece) for file in opened for piece in split(Extent(0, file.nbytes), most_nbytes)]
    end = time.perf_counter() + _MAX_SECONDS

    def read(buffer: Buffer, item: tuple[int, Extent]) -> int:
        index, piece = item
        if time.perf_counter() > end:
            return 0
        items[index][0].read(piece.offset, buffer.reserve(align_up(piece.nbytes, BLOCK)))
        return piece.nbytes

    sample = [(index, piece) for index, (_, piece) in enumerate(islice(items, _MAX_SAMPLE_NBYTES // most_nbytes))]
    workers = Workers(min(budget.threads, len(sample)), sample, Buffer, read)
    start = time.perf_counter()
    workers.run()
    seconds = time.perf_counter() - start
    return Network(latency, workers.done_nbytes / seconds, workers.done_nbytes, budget.threads)


@dataclass(frozen=True, slots=True, repr=False)
class Diagnosis(Result):
    """The environment of this machine, and an explanation of each load of a checkpoint."""

    path: str
    is_converted: bool
    num_cpus: int
    local_world_size: int
    """Number of ranks on this node, which divide the budgets."""
    torch: str | None
    """The version of torch; None if it is not installed."""
    gpus: tuple[str, ...]
    """Name and memory of each CUDA device, and a note if the memory is the host's."""
    num_ranks: int
    """The tensor-parallel degree of the loads."""
    ranks: tuple[Explanation, ...]
    network: Network | None = None
    """Speed of the store or file system; None for files of this machine."""


def diagnose(
    path: str | os.PathLike[str], *, rank: int | None = None, device: str | None = None, tp: int | None = None
) -> Diagnosis:
    """Explain the load of one rank, or of all.

    Args:
        path: a folder that `relayout convert` wrote, or a plain checkpoint.
        rank: from 0; None: all ranks with complete files.
        device: the torch device of the tensors; None: a CUDA device if one is available, else the CPU.
        tp: the tensor-parallel degree to load at; None: that of the conversion, 1 for a plain checkpoint.
    """
    version, gpus = _machine()
    if device is None:
        device = "cuda" if gpus else "cpu"
    store = find_input(path)
    manifest = find_manifest(store)
    if manifest is None and tp is None and rank is not None and integer(rank, "rank") > 0:
        read_source(store)  # The error of a missing checkpoint comes first.
        raise PlanError(f"not converted, so it has no rank {rank}: set --tp N", path=str(store), code="option")
    if tp is None:
        tp = manifest.num_ranks if manifest is not None else 1
    # `explain` refuses a degree below 1.
    ranks = range(max(1, integer(tp, "tp")))
    present = ranks if manifest is None or tp != manifest.num_ranks else manifest.present
    explained = tuple(explain(path, index, device, tp=tp) for index in (present if rank is None else [rank]))
    return Diagnosis(
        path=str(path),
        is_converted=manifest is not None,
        num_cpus=num_cpus(),
        local_world_size=local_world_size(),
        torch=version,
        gpus=gpus,
        num_ranks=tp,
        ranks=explained,
        network=None if _is_on_drive(explained[0]) else _network(path, explained[0], tp),
    )


def _is_on_drive(explained: Explanation) -> bool:
    """Return True if all files are on drives of this machine. A network file system has no block device."""
    return all(file.filesystem.drive_block_nbytes is not None for file in explained.files)


def _network(path: str | os.PathLike[str], explained: Explanation, tp: int) -> Network | None:
    """Measure the speed with the files of a load."""
    files = LoadRequest(path=path, rank=explained.rank, tp=tp).source().arena().files
    return measure(files, plan_budget(explained.threads, explained.memory, explained.memory, cost_of(files)))


def _machine() -> tuple[str | None, tuple[str, ...]]:
    """Return torch's version, and its CUDA devices."""
    try:
        import torch
    except ImportError:
        return None, ()
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        shared = " of the host's memory" if is_integrated(index) else ""
        gpus.append(f"{properties.name}, {properties.total_memory / 1e9:.0f} GB{shared}")
    return str(torch.__version__), tuple(gpus)
