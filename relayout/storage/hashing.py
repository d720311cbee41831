"""Reads stored bytes with several requests in flight and hashes them, for `verify` and for resumption."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from relayout.core.coalesce import coalesce, split
from relayout.core.digests import ExtentDigests
from relayout.core.extents import BLOCK, Extent, align_down, align_up
from relayout.core.workers import Stop, Workers
from relayout.storage.buffers import Buffer
from relayout.storage.file_pool import OpenFiles
from relayout.storage.protocols import ReadableFile

CHUNK_NBYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class HashedFile:
    """A file and the extents of it to hash."""

    open: Callable[[], ReadableFile]
    """Opens the file; may be called more than once."""
    extents: Sequence[Extent]
    """In rising order, without overlap. Empty extents may be at any offset."""


def hash_files(
    files: Sequence[HashedFile], num_threads: int, on_progress: Callable[[int], None] | None = None
) -> list[list[str]]:
    """The digest of each extent of each file, in hex.

    Raises:
        FormatError: a file is missing or has another length.
        OSError: a read failed.
    """
    stop = Stop()
    hashed = [ExtentDigests(file.extents, stop) for file in files]

    def requests() -> Iterator[tuple[int, Extent]]:
        for number, file in enumerate(files):
            yield from ((number, extent) for extent in _requests(file))

    def work(buffer: Buffer, item: tuple[int, Extent]) -> int:
        number, extent = item
        view = buffer.reserve(extent.nbytes)
        with inputs.use(number) as file:
            file.read(extent.offset, view)
        hashed[number].update(extent.offset, view)
        return extent.nbytes

    def open_input(number: int) -> ReadableFile:
        return files[number].open()

    with OpenFiles(open_input) as inputs:
        for number in range(len(files)):  # Checks the length of files without extents as well.
            with inputs.use(number):
                pass
        Workers(num_threads, requests(), Buffer, work, stop).run(on_progress)
    assert not any(one.num_left for one in hashed)
    return [one.digests for one in hashed]


def _requests(file: HashedFile) -> Iterator[Extent]:
    """The blocks that hold the extents: adjacent ones joined, long ones split into chunks."""

    def blocks(extent: Extent) -> tuple[None, int, int]:
        return None, align_down(extent.offset, BLOCK), align_up(extent.end, BLOCK)

    for group in coalesce((extent for extent in file.extents if extent.nbytes), blocks):
        yield from split(group.extent, CHUNK_NBYTES)
