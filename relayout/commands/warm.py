"""`warm`: reads files into the page cache before a load."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from relayout.checkpoint.converted import check_present, check_rank, is_converted, read_manifest
from relayout.checkpoint.source import read_source
from relayout.core.arguments import integer, size
from relayout.core.extents import Extent, split
from relayout.core.workers import Stop, Workers
from relayout.errors import PlanError
from relayout.reporting import Progress, Result, reporting
from relayout.storage.reading import OpenFiles
from relayout.storage.stores import Access, ReadableFile, Store, find_store
from relayout.storage.system import Buffer, available_nbytes, resident_nbytes

_REQUEST_NBYTES = 8 * 2**20
_DEFAULT_THREADS = 4
_SHARE_OF_MEMORY = 2
"""Divisor of the available memory for the default limit (2: one half)."""


@dataclass(frozen=True, slots=True)
class WarmFile:
    """A file, with its bytes in the page cache before and after; None if the system does not report them."""

    name: str
    nbytes: int
    before_nbytes: int | None
    after_nbytes: int | None


@dataclass(frozen=True, slots=True, repr=False)
class WarmResult(Result):
    """Result of `warm`."""

    path: str
    files: tuple[WarmFile, ...]
    read_nbytes: int
    """Bytes that were not in the page cache before."""
    left_nbytes: int
    """Bytes that were not read because of the memory limit."""
    seconds: float


def warm(
    path: str | os.PathLike[str],
    *,
    rank: int | None = None,
    memory: int | str | None = None,
    threads: int = _DEFAULT_THREADS,
    progress: Progress = None,
) -> WarmResult:
    """Read files into the page cache for the loads that follow.

    Cached bytes are not read again. All files are read concurrently, each from its start, in the order of a load.

    Args:
        path: a converted folder, or a plain checkpoint (all shards are read).
        rank: read only this rank's files; None: the files of all ranks.
        memory: limit for the bytes of these files in the page cache, or text such as "64GiB". Default: half of the
            available memory.
        threads: number of concurrent requests.
        progress: True for a bar on stderr, or a function that is called with (bytes done, total bytes).

    Raises:
        FormatError: the manifest is damaged, or a file is missing or has the wrong length.
        PlanError: the rank does not exist, or the store has no page cache.
        OSError: reading failed.

    Example:
        >>> import relayout
        >>> [file.name for file in relayout.warm("llama-3.1-8b-tp8", rank=3).files]
        ['model-rank-3-part-0.safetensors']
    """
    started = time.perf_counter()
    store = find_store(path)
    names, sizes = _files(store, None if rank is None else integer(rank, "rank"))
    limit = available_nbytes() // _SHARE_OF_MEMORY if memory is None else size(memory, "memory")
    requests, left = _within(list(_side_by_side(sizes)), limit)
    total, read = sum(extent.nbytes for _, extent in requests), 0
    stop = Stop()

    def open_file(index: int) -> ReadableFile:
        return store.open(names[index], sizes[index], access=Access.BUFFERED)

    def work(buffer: Buffer, item: tuple[int, Extent]) -> int:
        nonlocal read
        index, extent = item
        with inputs.use(index) as file:
            if _resident(file, extent, store) != extent.nbytes:
                file.read(extent.offset, buffer.reserve(extent.nbytes))
                with stop.condition:
                    read += extent.nbytes
        return extent.nbytes

    def resident(index: int) -> int | None:
        with inputs.use(index) as file:
            return _resident(file, Extent(0, sizes[index]), store)

    with OpenFiles(open_file) as inputs:
        before = list(map(resident, range(len(sizes))))
        with reporting(progress, "warming", total) as on_progress:
            Workers(integer(threads, "threads"), requests, Buffer, work, stop).run(on_progress)
        after = list(map(resident, range(len(sizes))))
    files = tuple(map(WarmFile, names, sizes, before, after))
    return WarmResult(str(path), files, read, left, time.perf_counter() - started)


def _files(store: Store, rank: int | None) -> tuple[list[str], list[int]]:
    """Return the names and lengths of the files that a load reads."""
    if not is_converted(store):
        shards = read_source(store).files
        if rank is not None:
            raise PlanError("not converted, so it has no ranks: omit --rank", path=str(store), code="option")
        return [file.name for file in shards], [file.nbytes for file in shards]
    manifest = read_manifest(store)
    ranks = manifest.present if rank is None else [rank]
    if rank is not None:
        check_rank(store, rank, manifest.num_ranks)
        check_present(store, manifest, ranks)
    numbers = dict.fromkeys(index for each in ranks for index in manifest.holders[each].files)
    files = [manifest.files[index] for index in numbers]
    return [file.name for file in files], [file.nbytes for file in files]


def _side_by_side(sizes: Sequence[int]) -> Iterator[tuple[int, Extent]]:
    """Yield requests for all files: the first request of each file, then the second of each, etc."""
    columns = [
        [(index, extent) for extent in split(Extent(0, nbytes), _REQUEST_NBYTES)] for index, nbytes in enumerate(sizes)
    ]
    return (request for request in chain.from_iterable(zip_longest(*columns)) if request is not None)


def _within(requests: list[tuple[int, Extent]], limit: int) -> tuple[list[tuple[int, Extent]], int]:
    """Return the first requests, up to a limit in bytes, and the number of bytes in the remaining ones."""
    total = 0
    for count, (_, extent) in enumerate(requests):
        if total + extent.nbytes > limit:
            return requests[:count], sum(other.nbytes for _, other in requests[count:])
        total += extent.nbytes
    return requests, 0


def _resident(file: ReadableFile, extent: Extent, store: Store) -> int | None:
    """Return the number of bytes of an extent in the page cache; None if the system does not report it."""
    fd = file.fileno()
    if fd is None:
        raise PlanError("the store has no page cache: nothing to warm", path=str(store), code="unsupported")
    return resident_nbytes(fd, extent.offset, extent.nbytes)
