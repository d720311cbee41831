"""The read plan: which requests fill an arena. Pure.

A read whose arena offset is congruent with its file offset, modulo the alignment, goes straight to its place, but for
the edges that do not fill a block. All else goes through a bounce buffer: edges, bytes at odd places, and strided
reads, which are requested whole, gaps included, where the gaps are small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from relayout.extents import Extent, Transfer, align_down, align_up
from relayout.index import Read

CHUNK_NBYTES = 8 * 2**20
"""Largest request. At this size Python's part in a request is noise, and a bounce buffer is still small."""

MIN_RUN_NBYTES = 256 * 2**10
"""Runs of at least this many bytes are requested one by one; the gaps between shorter ones are read as well."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One request."""

    file: int
    extent: Extent
    """What to read; borders are multiples of the alignment, so it may end behind the end of the file."""
    arena_offset: int | None
    """Where it goes, whole; None: through a bounce buffer."""
    transfers: tuple[Transfer, ...] = ()
    """From the bounce buffer to the arena."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arena that it fills."""
        return self.extent.nbytes if self.arena_offset is not None else sum(t.total_nbytes for t in self.transfers)


def plan_chunks(reads: Iterable[Read], alignment: int, chunk_nbytes: int = CHUNK_NBYTES) -> Iterator[Chunk]:
    """Cut reads into requests of at most `chunk_nbytes` (a multiple of `alignment`), and edges."""
    for read in reads:
        transfer = read.transfer
        if transfer.count == 1:
            yield from _contiguous(read.file, transfer, alignment, chunk_nbytes)
        elif transfer.nbytes >= MIN_RUN_NBYTES or transfer.source_stride > chunk_nbytes:
            for run in range(transfer.count):
                source = transfer.source + run * transfer.source_stride
                target = transfer.target + run * transfer.target_stride
                yield from _contiguous(read.file, Transfer(source, target, transfer.nbytes), alignment, chunk_nbytes)
        else:
            rows = chunk_nbytes // transfer.source_stride
            for first in range(0, transfer.count, rows):
                start = transfer.source + first * transfer.source_stride
                for part in transfer.clipped(start, start + rows * transfer.source_stride):
                    yield _bounced(read.file, part, alignment)


def _contiguous(file: int, transfer: Transfer, alignment: int, chunk_nbytes: int) -> Iterator[Chunk]:
    start, end = transfer.source, transfer.source_end
    shift = transfer.target - transfer.source
    if shift % alignment:
        for low in range(align_down(start, alignment), end, chunk_nbytes):
            for part in transfer.clipped(low, low + chunk_nbytes):
                yield _bounced(file, part, alignment)
        return
    low, high = align_up(start, alignment), align_down(end, alignment)
    if low >= high:
        yield _bounced(file, transfer, alignment)
        return
    if start < low:
        yield _bounced(file, Transfer(start, start + shift, low - start), alignment)
    for offset in range(low, high, chunk_nbytes):
        extent = Extent(offset, min(chunk_nbytes, high - offset))
        yield Chunk(file, extent, offset + shift)
    if high < end:
        yield _bounced(file, Transfer(high, high + shift, end - high), alignment)


def _bounced(file: int, transfer: Transfer, alignment: int) -> Chunk:
    low = align_down(transfer.source, alignment)
    extent = Extent(low, align_up(transfer.source_end, alignment) - low)
    return Chunk(file, extent, None, (transfer.shifted(source=-low),))
