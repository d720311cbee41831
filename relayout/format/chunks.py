"""Chunk digests: any range of a file is proven by the chunks that it touches. Pure; FORMAT.md is normative."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from relayout.core.digests import DigestAlgorithm
from relayout.core.extents import Extent, split
from relayout.format.index import IndexedFile

CHUNKS_NAME = "relayout.chunks"
"""The file with the chunk digests of all files, in the order of the manifest."""

DIGESTED_NBYTES = 2**20
"""The size of chunks that relayout writes."""

MIN_CHUNK_NBYTES, MAX_CHUNK_NBYTES = 2**16, 2**30
"""Between them the size of chunks is a power of two."""


def chunks_of(data_start: int, nbytes: int, chunk_nbytes: int) -> list[Extent]:
    """The chunks of a file of `nbytes`: they cover its data section; the last may be shorter."""
    return list(split(Extent(data_start, nbytes - data_start), chunk_nbytes))


def chunks_over(piece: Extent, data_start: int, nbytes: int, chunk_nbytes: int) -> Iterator[tuple[int, Extent, Extent]]:
    """The chunks that a piece of the data section touches: number, the chunk, and what of it is in the piece."""
    if not piece.nbytes:
        return
    for index in range((piece.offset - data_start) // chunk_nbytes, -(-(piece.end - data_start) // chunk_nbytes)):
        start = data_start + index * chunk_nbytes
        chunk = Extent(start, min(chunk_nbytes, nbytes - start))
        low = max(piece.offset, start)
        yield index, chunk, Extent(low, min(piece.end, chunk.end) - low)


def num_chunks(data_start: int, nbytes: int, chunk_nbytes: int) -> int:
    """How many chunks a file of `nbytes` has."""
    return -(-(nbytes - data_start) // chunk_nbytes)


def places_of_digests(files: Sequence[IndexedFile], chunk_nbytes: int, digest: DigestAlgorithm) -> list[Extent]:
    """Where the chunk digests of each file lie in relayout.chunks."""
    sizes = [digest.nbytes * num_chunks(file.data_start, file.nbytes, chunk_nbytes) for file in files]
    return [Extent(end - nbytes, nbytes) for nbytes, end in zip(sizes, accumulate(sizes), strict=True)]
