"""Reads stored bytes again, several requests in flight, and hashes them: for `verify`, and before going on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from relayout.core.coalesce import coalesce, split
from relayout.core.extents import BLOCK, Extent, align_down, align_up
from relayout.core.workers import Stop, Turns, Workers
from relayout.storage.file_pool import OpenFiles
from relayout.storage.files import Buffer, InputFile
from relayout.storage.open_folder import OpenFolder

CHUNK_NBYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class HashedFile:
    """A file, and what of it to hash."""

    path: Path
    nbytes: int
    """The length that it must have."""
    extents: Sequence[Extent]
    """In order, without overlap. Empty ones may lie anywhere."""
    folder: OpenFolder | None = None
    """Where the path was found: it is to be a file of this folder's owner, directly in it."""


def hash_files(
    files: Sequence[HashedFile], num_threads: int, on_progress: Callable[[int], None] | None = None
) -> list[list[str]]:
    """The digest of each extent of each file, in hex.

    Raises:
        FormatError: a file is missing or has another length.
        OSError: a read failed.
    """
    stop = Stop()
    turns = Turns(stop)
    running = [_Running(file.extents) for file in files]

    def requests() -> Iterator[tuple[int, int, Extent]]:
        for number, file in enumerate(files):
            for turn, extent in enumerate(_requests(file)):
                yield number, turn, extent

    def work(buffer: Buffer, item: tuple[int, int, Extent]) -> int:
        number, turn, extent = item
        view = buffer.reserve(extent.nbytes)
        with inputs.use(number) as file:
            file.read(extent.offset, view)
        turns.wait(number, turn)
        running[number].update(extent, view)
        turns.done(number)
        return extent.nbytes

    def open_input(number: int) -> InputFile:
        file = files[number]
        return InputFile(file.path, file.nbytes, pass_by=True, folder=file.folder)

    with OpenFiles(open_input) as inputs:
        for number in range(len(files)):  # Those with nothing to read must be right as well.
            with inputs.use(number):
                pass
        Workers(num_threads, requests(), Buffer, work, stop).run(on_progress)
    return [one.digests() for one in running]


def _requests(file: HashedFile) -> Iterator[Extent]:
    """The blocks that hold the extents, joined where they touch, cut where they are long."""

    def blocks(extent: Extent) -> tuple[None, Extent]:
        low = align_down(extent.offset, BLOCK)
        return None, Extent(low, align_up(extent.end, BLOCK) - low)

    for group in coalesce((extent for extent in file.extents if extent.nbytes), blocks):
        yield from split(group.extent, CHUNK_NBYTES)


class _Running:
    """Hashes extents as their bytes come by in order."""

    def __init__(self, extents: Sequence[Extent]) -> None:
        self._extents = extents
        self._digests: list[str] = []
        self._digest = xxhash.xxh3_128()

    def update(self, chunk: Extent, view: memoryview) -> None:
        while len(self._digests) < len(self._extents):
            extent = self._extents[len(self._digests)]
            low, high = max(extent.offset, chunk.offset), min(extent.end, chunk.end)
            if low < high:
                self._digest.update(view[low - chunk.offset : high - chunk.offset])
            if extent.nbytes and extent.end > chunk.end:
                return
            self._complete()

    def digests(self) -> list[str]:
        while len(self._digests) < len(self._extents):
            self._complete()
        return self._digests

    def _complete(self) -> None:
        self._digests.append(self._digest.hexdigest())
        self._digest = xxhash.xxh3_128()
