"""The requests that bring what a load reads. Pure.

A read whose target is congruent with its file offset, modulo the alignment, goes directly into the arena, except for
the edges that do not fill a block. Everything else goes through a bounce buffer: edges, reads whose target is not
congruent, and strided reads, which are requested with their gaps where the gaps are small. Small pieces that share
blocks of a file, or are in neighboring blocks, become one request. Of a file that is proven, requests are for whole
chunks, so that none is read and hashed twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from relayout.core.extents import Extent, Grid, Transfer, align_down, coalesce, split
from relayout.format.index import Read
from relayout.storage.stores import RequestCost


@dataclass(frozen=True, slots=True)
class Request:
    """Bytes of a file that are read at once."""

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


def plan_requests(
    reads: Iterable[Read],
    alignment: int,
    cost: RequestCost,
    bounce_nbytes: int,
    grids: Sequence[Grid | None] = (),
) -> list[Request]:
    """Cut reads into requests of at most `cost.chunk_nbytes` (a multiple of `alignment`), and edges.

    Requests through a bounce buffer take at most `bounce_nbytes`, which must be four blocks or more. A strided read
    includes the gaps between its runs if the runs are shorter than `cost.max_gap_nbytes` and the gaps are not longer.

    Args:
        grids: of each file that is proven, the borders of its chunks, at multiples of `alignment`. A chunk that is
            larger than a bounce buffer is requested in parts.
    """
    planner = _Planner(alignment, cost, bounce_nbytes, grids)
    return list(planner.merged(request for read in reads for request in planner.cut(read)))


class _Planner:
    """Cuts the reads of a load."""

    def __init__(self, alignment: int, cost: RequestCost, bounce_nbytes: int, grids: Sequence[Grid | None]) -> None:
        """Take the arguments of `plan_requests`."""
        self._alignment = alignment
        self._cost = cost
        self._bounce_nbytes = bounce_nbytes
        # Before its ends are moved to borders of blocks, a request takes two blocks less than a buffer.
        self._most_nbytes = min(cost.chunk_nbytes, align_down(bounce_nbytes, alignment) - 2 * alignment)
        self._blocks = Grid(0, alignment), Grid(0, self._most_nbytes)
        self._grids = {
            file: (grid, Grid(grid.origin, align_down(bounce_nbytes, grid.step)))
            for file, grid in enumerate(grids)
            if grid is not None and grid.step <= bounce_nbytes
        }
        """For each file that is proven the borders of its chunks, and those that no bounced request goes across."""

    def cut(self, read: Read) -> Iterator[Request]:
        """The requests for a read, in the order of the file."""
        transfer, is_proven = read.transfer, read.file in self._grids
        most = self._bounce_nbytes if is_proven else self._most_nbytes
        if transfer.count == 1:
            yield from self._contiguous(read.file, transfer)
        elif (
            transfer.nbytes >= self._cost.max_gap_nbytes
            or transfer.source_stride - transfer.nbytes > self._cost.max_gap_nbytes
            or transfer.source_stride > most
        ):
            for run in transfer.runs():
                yield from self._contiguous(read.file, run)
        elif is_proven:
            yield from self._bounced(read.file, transfer)
        else:
            rows = most // transfer.source_stride
            for first in range(0, transfer.count, rows):
                start = transfer.source + first * transfer.source_stride
                yield self._request(read.file, transfer.clipped(start, start + rows * transfer.source_stride))

    def _contiguous(self, file: int, transfer: Transfer) -> Iterator[Request]:
        grid, _ = self._grids.get(file, self._blocks)
        start, end = transfer.source, transfer.source_end
        shift = transfer.target - transfer.source
        low, high = grid.up(start), grid.down(end)
        if shift % self._alignment or low >= high:
            yield from self._bounced(file, transfer)
            return
        if start < low:
            yield from self._bounced(file, Transfer(start, start + shift, low - start))
        for extent in split(Extent(low, high - low), max(grid.step, align_down(self._cost.chunk_nbytes, grid.step))):
            yield Request(file, extent, extent.offset + shift)
        if high < end:
            yield from self._bounced(file, Transfer(high, high + shift, end - high))

    def _bounced(self, file: int, transfer: Transfer) -> Iterator[Request]:
        _, window = self._grids.get(file, self._blocks)
        for offset in range(window.down(transfer.source), transfer.source_end, window.step):
            if parts := transfer.clipped(offset, offset + window.step):
                yield self._request(file, parts)

    def _request(self, file: int, parts: Sequence[Transfer]) -> Request:
        """The request for parts of a file, in rising order, through a bounce buffer."""
        grid, _ = self._grids.get(file, self._blocks)
        start, end = grid.down(parts[0].source), grid.up(parts[-1].source_end)
        return Request(file, Extent(start, end - start), None, tuple(part.shifted(source=-start) for part in parts))

    def merged(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Join consecutive bounced requests whose extents touch, up to the size of a buffer."""
        for group in coalesce(requests, self._where, max_nbytes=self._bounce_nbytes):
            if len(group.items) == 1:
                yield group.items[0]
                continue
            transfers = (
                part.shifted(source=request.extent.offset - group.extent.offset)
                for request in group.items
                for part in request.transfers
            )
            yield Request(group.items[0].file, group.extent, None, tuple(transfers))

    def _where(self, request: Request) -> tuple[tuple[int, int | None, int], int, int]:
        # Arena offsets differ, so that a request that has one is never joined.
        cut = self._grids.get(request.file)
        window = 0 if cut is None else cut[1].down(request.extent.offset)
        return (request.file, request.arena_offset, window), request.extent.offset, request.extent.end
