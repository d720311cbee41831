"""Reads stored bytes with several requests in flight and hashes them, for `verify` and for resumption."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge

from relayout.core.digests import DigestAlgorithm, ExtentDigests
from relayout.core.extents import BLOCK, Extent, align_up, coalesce, split
from relayout.core.workers import Stop, Workers
from relayout.storage.file_pool import OpenFiles
from relayout.storage.pages import Buffer
from relayout.storage.protocols import ReadableFile

READ_NBYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class HashedFile:
    """A file and the extents of it to hash."""

    open: Callable[[], ReadableFile]
    """Opens the file; may be called more than once."""
    extents: Sequence[Extent]
    """The extents in rising order, without overlap. Empty extents may be at any offset."""
    chunks: Sequence[Extent] = ()
    """More extents, likewise, which may overlap the others."""
    chunk_digest: DigestAlgorithm = DigestAlgorithm.XXH3_128
    """The algorithm for chunks; the extents are hashed by XXH3-128."""


def hash_files(
    files: Sequence[HashedFile], num_threads: int, on_progress: Callable[[int], None] | None = None
) -> list[list[str]]:
    """The digest of each extent of each file, then of each of its chunks, in hex.

    Raises:
        FormatError: a file is missing or has another length.
        OSError: a read failed.
    """
    stop = Stop()
    hashed = [
        [ExtentDigests(file.extents, stop), ExtentDigests(file.chunks, stop, file.chunk_digest)] for file in files
    ]

    def requests() -> Iterator[tuple[int, Extent]]:
        for index, file in enumerate(files):
            yield from ((index, extent) for extent in _requests(file))

    def work(buffer: Buffer, item: tuple[int, Extent]) -> int:
        index, extent = item
        view = buffer.reserve(extent.nbytes)
        with inputs.use(index) as file:
            file.read(extent.offset, view)
        for digests in hashed[index]:
            digests.update(extent.offset, view)
        return extent.nbytes

    def open_input(index: int) -> ReadableFile:
        return files[index].open()

    with OpenFiles(open_input) as inputs:
        for index in range(len(files)):  # Checks the length of files without extents as well.
            with inputs.use(index):
                pass
        Workers(num_threads, requests(), Buffer, work, stop).run(on_progress)
    assert not any(digests.num_left for pair in hashed for digests in pair)
    return [extents.digests + chunks.digests for extents, chunks in hashed]


def sha256_hex(opened: ReadableFile) -> str:
    """SHA-256 of a file, which is closed, in hex; for errors see `ReadableFile.read`."""
    digest = hashlib.sha256()
    buffer = Buffer()
    with opened as file:
        for extent in split(Extent(0, file.nbytes), READ_NBYTES):
            view = buffer.reserve(align_up(extent.nbytes, BLOCK))
            file.read(extent.offset, view)
            digest.update(view[: extent.nbytes])
    return digest.hexdigest()


def _requests(file: HashedFile) -> Iterator[Extent]:
    """The blocks that hold the extents: adjacent ones joined, long ones split into chunks."""

    def blocks(extent: Extent) -> tuple[None, int, int]:
        aligned = extent.aligned()
        return None, aligned.offset, aligned.end

    wanted = (extent for extent in merge(file.extents, file.chunks) if extent.nbytes)
    for group in coalesce(wanted, blocks):
        yield from split(group.extent, READ_NBYTES)
