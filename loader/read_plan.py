"""The read plan: which requests fill memory. Pure.

A read whose target is congruent with its file offset, modulo the alignment, goes directly into the arena, except for
the edges that do not fill a block. Everything else goes through a bounce buffer: edges, reads whose target is not
congruent, and strided reads, which are requested with their gaps where the gaps are small. Small pieces that share
blocks of a file, or are in neighboring blocks, become one request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from relayout.core.extents import Extent, Transfer, align_down, align_up, coalesce, split
from relayout.format.index import Read
from relayout.storage.protocols import RequestCost


@dataclass(frozen=True, slots=True)
class Chunk:
    """One request."""

    file: int
    extent: Extent
    """What to read; both ends are multiples of the alignment, so it may end beyond the end of the file."""
    arena_offset: int | None
    """Where all of it goes; None: through a bounce buffer."""
    transfers: tuple[Transfer, ...] = ()
    """Copies from the bounce buffer to the arena, in the order of the reads."""

    @property
    def is_sparse(self) -> bool:
        """Whether most of its bytes are gaps between runs."""
        return any(transfer.count > 1 for transfer in self.transfers) and 2 * self.nbytes < self.extent.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes that it puts into the arena."""
        return self.extent.nbytes if self.arena_offset is not None else sum(t.total_nbytes for t in self.transfers)


def plan_chunks(reads: Iterable[Read], alignment: int, cost: RequestCost, bounce_nbytes: int) -> list[Chunk]:
    """Cut reads into requests of at most `cost.chunk_nbytes` (a multiple of `alignment`), and edges.

    Requests through a bounce buffer take at most `bounce_nbytes`, which must be four blocks or more. A strided read
    includes the gaps between its runs if the runs are shorter than `cost.max_gap_nbytes` and the gaps are not longer.
    """
    whole = min(cost.chunk_nbytes, align_down(bounce_nbytes, alignment) - 2 * alignment)
    return list(_merged(_requests(reads, alignment, cost, whole), bounce_nbytes))


def _requests(reads: Iterable[Read], alignment: int, cost: RequestCost, bounce_nbytes: int) -> Iterator[Chunk]:
    for read in reads:
        transfer = read.transfer
        if transfer.count == 1:
            yield from _contiguous(read.file, transfer, alignment, cost.chunk_nbytes, bounce_nbytes)
        elif (
            transfer.nbytes >= cost.max_gap_nbytes
            or transfer.source_stride - transfer.nbytes > cost.max_gap_nbytes
            or transfer.source_stride > bounce_nbytes
        ):
            for run in transfer.runs():
                yield from _contiguous(read.file, run, alignment, cost.chunk_nbytes, bounce_nbytes)
        else:
            rows = bounce_nbytes // transfer.source_stride
            for first in range(0, transfer.count, rows):
                start = transfer.source + first * transfer.source_stride
                for part in transfer.clipped(start, start + rows * transfer.source_stride):
                    yield _bounced(read.file, part, alignment)


def _contiguous(
    file: int, transfer: Transfer, alignment: int, chunk_nbytes: int, bounce_nbytes: int
) -> Iterator[Chunk]:
    start, end = transfer.source, transfer.source_end
    shift = transfer.target - transfer.source
    low, high = align_up(start, alignment), align_down(end, alignment)
    if shift % alignment or low >= high:
        for offset in range(align_down(start, alignment), end, bounce_nbytes):
            for part in transfer.clipped(offset, offset + bounce_nbytes):
                yield _bounced(file, part, alignment)
        return
    if start < low:
        yield _bounced(file, Transfer(start, start + shift, low - start), alignment)
    for extent in split(Extent(low, high - low), chunk_nbytes):
        yield Chunk(file, extent, extent.offset + shift)
    if high < end:
        yield _bounced(file, Transfer(high, high + shift, end - high), alignment)


def _bounced(file: int, transfer: Transfer, alignment: int) -> Chunk:
    extent = Extent(transfer.source, transfer.source_end - transfer.source).aligned(alignment)
    return Chunk(file, extent, None, (transfer.shifted(source=-extent.offset),))


def _where(chunk: Chunk) -> tuple[tuple[int, int | None], int, int]:
    # Arena offsets differ, so that a chunk that has one is never joined.
    return (chunk.file, chunk.arena_offset), chunk.extent.offset, chunk.extent.end


def _merged(chunks: Iterable[Chunk], bounce_nbytes: int) -> Iterator[Chunk]:
    """Join consecutive bounced requests whose extents touch, up to the size of a buffer."""
    for group in coalesce(chunks, _where, max_nbytes=bounce_nbytes):
        if len(group.items) == 1:
            yield group.items[0]
            continue
        transfers = (
            part.shifted(source=chunk.extent.offset - group.extent.offset)
            for chunk in group.items
            for part in chunk.transfers
        )
        yield Chunk(group.items[0].file, group.extent, None, tuple(transfers))
