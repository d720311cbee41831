"""`warm`: brings files into the page cache before something loads them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

from relayout.checkpoint.converted import check_rank, is_converted, read_manifest
from relayout.checkpoint.source import read_source
from relayout.core.arguments import integer, size
from relayout.core.coalesce import split
from relayout.core.extents import Extent
from relayout.core.workers import Stop, Workers
from relayout.errors import PlanError
from relayout.progress import Progress, reporting
from relayout.results import Result
from relayout.storage.buffers import Buffer
from relayout.storage.file_pool import OpenFiles
from relayout.storage.local.page_cache import resident_nbytes
from relayout.storage.memory import available_nbytes
from relayout.storage.protocols import Access, ReadableFile, Store
from relayout.storage.stores import find_store

_CHUNK_NBYTES = 8 * 2**20
_DEFAULT_THREADS = 4
_SHARE_OF_MEMORY = 2
"""By default, half of the memory that the system could give is filled at most."""


@dataclass(frozen=True, slots=True)
class WarmFile:
    """A file, and what of it was in the page cache before and after; None where the system does not tell."""

    name: str
    nbytes: int
    before_nbytes: int | None
    after_nbytes: int | None


@dataclass(frozen=True, slots=True)
class Warmed(Result):
    """What `warm` has done."""

    path: str
    files: tuple[WarmFile, ...]
    read_nbytes: int
    """Bytes that were read, as they were not in the page cache."""
    left_nbytes: int
    """Bytes that were left where they are, for want of memory."""
    seconds: float


def warm(
    path: str | os.PathLike[str],
    *,
    rank: int | None = None,
    memory: int | str | None = None,
    threads: int = _DEFAULT_THREADS,
    progress: Progress = None,
) -> Warmed:
    """Read files into the page cache, so that loads that follow take them from there.

    What is there already is not read again. Files are read side by side, each from its start, as loads need them.

    Args:
        path: a converted folder, or a plain checkpoint, of which all shards are read.
        rank: bring only this rank's files; None: those of all ranks.
        memory: bytes, or text such as "64GiB", that may be in the page cache of these files. Default: half of what
            the system could give.
        threads: requests in flight.
        progress: True shows a bar on stderr; a function is called with (bytes done, bytes in all).

    Raises:
        FormatError: the manifest is damaged, a file is missing, or has another length than it says.
        PlanError: the rank does not exist, or files of this store are in no page cache.
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
    chunks, left = _within(list(_side_by_side(sizes)), limit)
    total, read = sum(extent.nbytes for _, extent in chunks), 0
    stop = Stop()

    def open_file(number: int) -> ReadableFile:
        return store.open(names[number], sizes[number], access=Access.BUFFERED)

    def work(buffer: Buffer, item: tuple[int, Extent]) -> int:
        nonlocal read
        number, extent = item
        with inputs.use(number) as file:
            if _resident(file, extent, store) != extent.nbytes:
                file.read(extent.offset, buffer.reserve(extent.nbytes))
                with stop.condition:
                    read += extent.nbytes
        return extent.nbytes

    def resident(number: int) -> int | None:
        with inputs.use(number) as file:
            return _resident(file, Extent(0, sizes[number]), store)

    with OpenFiles(open_file) as inputs:
        before = list(map(resident, range(len(sizes))))
        with reporting(progress, "warming", total) as on_progress:
            Workers(integer(threads, "threads"), chunks, Buffer, work, stop).run(on_progress)
        after = list(map(resident, range(len(sizes))))
    files = tuple(WarmFile(*one) for one in zip(names, sizes, before, after, strict=True))
    return Warmed(str(path), files, read, left, time.perf_counter() - started)


def _files(store: Store, rank: int | None) -> tuple[list[str], list[int]]:
    """Names and lengths of the files that loads read."""
    if not is_converted(store):
        if rank is not None:
            raise PlanError("not converted: it has no ranks; without a rank all shards are read", path=str(store))
        shards = read_source(store).files
        return [file.name for file in shards], [file.nbytes for file in shards]
    manifest = read_manifest(store)
    if rank is not None:
        check_rank(store, rank, manifest.num_ranks)
    entries = manifest.ranks if rank is None else [manifest.ranks[rank]]
    files = [manifest.files[number] for number in dict.fromkeys(number for entry in entries for number in entry.files)]
    return [file.name for file in files], [file.nbytes for file in files]


def _side_by_side(sizes: Sequence[int]) -> Iterator[tuple[int, Extent]]:
    """Chunks of all files: the first of each, then the second of each."""
    columns = [
        [(number, extent) for extent in split(Extent(0, nbytes), _CHUNK_NBYTES)] for number, nbytes in enumerate(sizes)
    ]
    return (one for one in chain.from_iterable(zip_longest(*columns)) if one is not None)


def _within(chunks: list[tuple[int, Extent]], limit: int) -> tuple[list[tuple[int, Extent]], int]:
    """The first chunks that fit into a limit of bytes, and the bytes of the others."""
    total = 0
    for count, (_, extent) in enumerate(chunks):
        if total + extent.nbytes > limit:
            return chunks[:count], sum(other.nbytes for _, other in chunks[count:])
        total += extent.nbytes
    return chunks, 0


def _resident(file: ReadableFile, extent: Extent, store: Store) -> int | None:
    """How many bytes of an extent are in the page cache; None where the system does not tell."""
    fd = file.fileno()
    if fd is None:
        raise PlanError("its files are in no page cache: there is nothing to warm", path=str(store), code="unsupported")
    return resident_nbytes(fd, extent.offset, extent.nbytes)
