"""The copy plan: which bytes of which source file go where in which rank file, in bounded steps. Pure.

A large tensor is cut into chunks along its bytes, at row borders where its columns are cut, so that what each rank
gets of a chunk is contiguous in its file. Small tensors are gathered into batches, so that what each rank gets of a
batch is written in few pieces. Every source byte is read once, every target byte written once.

Digests are of bytes in their stored order. A slice of several ranges in another order than the source's (all query
heads, then the key heads, where the source has them group by group) does not come by in its own order: for its digest,
its bytes are read a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import pairwise
from math import gcd

from relayout.conversion.layout import Conversion, cut_tensors
from relayout.core.coalesce import coalesce
from relayout.core.extents import BLOCK, Extent, Transfer, align_down, align_up

CHUNK_NBYTES = 32 * 2**20
"""Source bytes of one step, about."""

SMALL_NBYTES = 256 * 2**10
"""Tensors below this many bytes are copied in batches."""

_MAX_RUNS = 4096
"""Of a slice, to be read one by one in one step."""


@dataclass(frozen=True, slots=True)
class SourceRange:
    """Bytes of a source file that one request reads, on block borders (the last may end behind the file's end)."""

    file: int
    """Position in the catalogue's files."""
    extent: Extent


@dataclass(frozen=True, slots=True)
class Target:
    """A place in a rank file."""

    rank: int
    part: int
    offset: int
    """Absolute file offset in bytes."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one tensor."""

    tensor: int
    """Position in the catalogue's tensors."""
    transfer: Transfer
    """From the tensor's file (absolute offsets) to the span."""


@dataclass(frozen=True, slots=True)
class SliceBytes:
    """Bytes of a slice that lie in a span, to be hashed."""

    tensor: int
    slice: int
    """Position among the tensor's distinct slices."""
    offset: int
    """Byte offset in the slice."""
    position: int
    """Byte offset in the span."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes that lie together in rank files, put together from pieces."""

    nbytes: int
    targets: tuple[Target, ...]
    """The same bytes go to each of these; none, where they are wanted for their digest only."""
    pieces: tuple[Piece, ...]
    """They fill the span without hole or overlap."""
    slices: tuple[SliceBytes, ...]
    """What to hash here; a slice that is the whole tensor is hashed as source."""


@dataclass(frozen=True, slots=True)
class Step:
    """One unit of work: read the ranges, fill the spans, write them."""

    ranges: tuple[SourceRange, ...]
    spans: tuple[Span, ...]
    tensors: tuple[tuple[int, Extent], ...]
    """The source bytes covered: tensor, and extent in its file."""

    @property
    def nbytes(self) -> int:
        """Source bytes covered."""
        return sum(extent.nbytes for _, extent in self.tensors)


def copy_steps(
    conversion: Conversion,
    *,
    done: Container[int] = (),
    chunk_nbytes: int = CHUNK_NBYTES,
    small_nbytes: int = SMALL_NBYTES,
) -> Iterator[Step]:
    """All steps of a conversion, but for tensors that are done: large tensors in model order, then the small ones."""
    planner = _Planner(conversion, chunk_nbytes)
    small = []
    for t, tensor in enumerate(conversion.catalogue.tensors):
        if t in done:
            continue
        if tensor.extent.nbytes >= small_nbytes:
            yield from planner.chunks(t)
        elif tensor.extent.nbytes:
            small.append(t)
    small.sort(key=planner.first_place)
    for batch in _batches(small, planner.batch_cost, chunk_nbytes):
        yield planner.batch(batch)


_Placed = tuple[int, int, int]
"""A slice in a rank file: offset in the data section, bytes, tensor."""


class _Planner:
    def __init__(self, conversion: Conversion, chunk_nbytes: int) -> None:
        self.tensors = conversion.catalogue.tensors
        self.cut = cut_tensors(conversion.catalogue, conversion.plan)
        self.chunk_nbytes = chunk_nbytes
        self.files = conversion.layout.ranks
        self.places: list[dict[int, tuple[int, int]]] = []
        """Of each rank: tensor -> part, and offset in its data section. Ranks that are alike share one."""
        known: dict[tuple[tuple[int, ...], ...], dict[int, tuple[int, int]]] = {}
        for files in self.files:
            alike = tuple(column for file in files for column in (file.tensors, file.data_offsets))
            if alike not in known:
                known[alike] = {
                    t: (file.part, offset)
                    for file in files
                    for t, offset in zip(file.tensors, file.data_offsets, strict=True)
                }
            self.places.append(known[alike])

    def target(self, rank: int, t: int) -> Target:
        """Where a rank's slice of a tensor starts."""
        part, offset = self.places[rank][t]
        return Target(rank, part, self.files[rank][part].data_start + offset)

    def first_place(self, t: int) -> tuple[int, int, int]:
        """The first rank that holds a tensor, and where."""
        rank = next((rank for rank, places in enumerate(self.places) if t in places), 0)
        return (rank, *self.places[rank].get(t, (0, 0)))

    def batch_cost(self, t: int) -> int:
        # Every rank's bytes are staged, and reads are rounded out to blocks.
        staged = sum(size * len(ranks) for size, ranks in zip(self.cut[t].sizes, self.cut[t].cut.holders, strict=True))
        return max(staged, self.tensors[t].extent.nbytes) + 2 * BLOCK

    def chunks(self, t: int) -> Iterator[Step]:
        """The steps of one large tensor."""
        tensor = self.tensors[t]
        base = tensor.extent.offset
        cut, transfers = self.cut[t].cut, self.cut[t].transfers
        length = _chunk_length([one for group in transfers for one in group], self.chunk_nbytes)
        in_order = [_in_order(group, length) for group in transfers]
        for start in range(0, tensor.extent.nbytes, length):
            end = min(start + length, tensor.extent.nbytes)
            spans = []
            for which, group in enumerate(transfers):
                parts = (part for one in group for part in one.clipped(start, end))
                # Out of order, runs of several ranges may leave gaps between each other.
                runs = parts if in_order[which] else (run for part in parts for run in part.runs())
                moved = [Piece(t, one) for one in runs]
                targets = [self.target(rank, t) for rank in cut.holders[which]] if moved else []
                hashed = in_order[which] and not cut.distinct[which].is_whole
                for low, high, pieces in _tile(moved):
                    spans.append(
                        Span(
                            high - low,
                            tuple(Target(one.rank, one.part, one.offset + low) for one in targets),
                            tuple(Piece(t, p.transfer.shifted(source=base, target=-low)) for p in pieces),
                            (SliceBytes(t, which, low, 0, high - low),) if hashed else (),
                        )
                    )
            extent = Extent(base + start, end - start)
            yield Step((_block_range(tensor.file, extent),), tuple(spans), ((t, extent),))
        for which, group in enumerate(transfers):
            if not in_order[which]:
                yield from self.hashing(t, which, group)

    def hashing(self, t: int, which: int, transfers: Sequence[Transfer]) -> Iterator[Step]:
        """The steps that read a slice of one large tensor again, in the slice's own order."""
        tensor = self.tensors[t]
        for pieces in _in_target_order(transfers, self.chunk_nbytes):
            low, nbytes = pieces[0].target, sum(one.nbytes for one in pieces)
            moved = [one.shifted(source=tensor.extent.offset, target=-low) for one in pieces]
            span = Span(nbytes, (), tuple(Piece(t, one) for one in moved), (SliceBytes(t, which, low, 0, nbytes),))
            ranges = [_block_range(tensor.file, Extent(one.source, one.nbytes)) for one in moved]
            yield Step(join_ranges(ranges), (span,), ())

    def batch(self, batch: Sequence[int]) -> Step:
        """The step of several small tensors."""
        spans = (
            self.span_of_slices(rank, part, group)
            for rank in range(len(self.places))
            for part, placed in self.placed(rank, batch).items()
            for group in _touching(placed)
        )
        return Step(
            join_ranges([_block_range(self.tensors[t].file, self.tensors[t].extent) for t in batch]),
            tuple(spans),
            tuple((t, self.tensors[t].extent) for t in batch),
        )

    def placed(self, rank: int, batch: Sequence[int]) -> dict[int, list[_Placed]]:
        """What a rank holds of a batch, by part; not what has no bytes."""
        by_part: dict[int, list[_Placed]] = {}
        places = self.places[rank]
        for t in batch:
            nbytes = self.cut[t].rank_nbytes(rank)
            if nbytes and t in places:
                part, offset = places[t]
                by_part.setdefault(part, []).append((offset, nbytes, t))
        return by_part

    def span_of_slices(self, rank: int, part: int, group: Sequence[_Placed]) -> Span:
        """The span of whole slices that lie side by side."""
        low = group[0][0]
        end = group[-1][0] + group[-1][1]
        pieces: list[Piece] = []
        slices = []
        for offset, nbytes, t in group:
            cut, source = self.cut[t].cut, self.tensors[t].extent.offset
            which = cut.which[rank]
            moved = (one.shifted(source=source, target=offset - low) for one in self.cut[t].transfers[which])
            pieces += [Piece(t, one) for one in moved]
            if rank == cut.holders[which][0] and not cut.distinct[which].is_whole:
                slices.append(SliceBytes(t, which, 0, offset - low, nbytes))
        target = Target(rank, part, self.files[rank][part].data_start + low)
        return Span(end - low, (target,), tuple(pieces), tuple(slices))


def _chunk_length(transfers: Iterable[Transfer], chunk_nbytes: int) -> int:
    """Source bytes of a chunk: whole rows where columns are cut, and whole blocks in every rank file if possible."""
    strided = [one for one in transfers if one.count > 1]
    stride = max((one.source_stride for one in strided), default=0)
    if not strided or stride > chunk_nbytes:
        return align_up(chunk_nbytes, BLOCK)
    rows_of_blocks = BLOCK // gcd(BLOCK, *(one.nbytes for one in strided))
    unit = stride * rows_of_blocks
    return align_down(chunk_nbytes, unit) if unit <= chunk_nbytes else align_down(chunk_nbytes, stride)


def _in_order(transfers: Sequence[Transfer], chunk_nbytes: int) -> bool:
    """Whether a slice's bytes come by in its own order, in chunks of so many source bytes."""
    if all(a.source < b.source for a, b in pairwise(transfers)):
        return True
    # The order is another within each row only, and a chunk has whole rows.
    return all(one.count > 1 and chunk_nbytes % one.source_stride == 0 for one in transfers)


def _in_target_order(transfers: Sequence[Transfer], chunk_nbytes: int) -> Iterator[list[Transfer]]:
    """Single runs in the order of their targets, in groups of bounded number and at most `chunk_nbytes`."""
    group: list[Transfer] = []
    room = chunk_nbytes
    for run in merge(*(one.runs() for one in transfers), key=lambda one: one.target):
        source, end = run.source, run.source_end
        while source < end:
            group += run.clipped(source, min(source + room, end))
            source, room = source + group[-1].nbytes, room - group[-1].nbytes
            if not room or len(group) == _MAX_RUNS:
                yield group
                group, room = [], chunk_nbytes
    if group:
        yield group


def _tile(pieces: list[Piece]) -> Iterator[tuple[int, int, list[Piece]]]:
    """Group pieces into gapless runs of target bytes: (start, end, pieces of the run)."""
    group: list[Piece] = []
    low = high = 0
    for piece in sorted(pieces, key=lambda piece: piece.transfer.target):
        if group and piece.transfer.target > high:
            yield low, high, group
            group = []
        if not group:
            low = high = piece.transfer.target
        group.append(piece)
        high = max(high, piece.transfer.target_end)
    if group:
        yield low, high, group


def _touching(placed: Iterable[_Placed]) -> Iterator[list[_Placed]]:
    """Group slices, by offset, into gapless runs."""
    group: list[_Placed] = []
    end = 0
    for one in sorted(placed):
        if group and one[0] > end:
            yield group
            group = []
        group.append(one)
        end = one[0] + one[1]
    if group:
        yield group


def _block_range(file: int, extent: Extent) -> SourceRange:
    start = align_down(extent.offset, BLOCK)
    return SourceRange(file, Extent(start, align_up(extent.end, BLOCK) - start))


def join_ranges(ranges: Iterable[SourceRange]) -> tuple[SourceRange, ...]:
    """Join ranges that touch or overlap."""
    in_order = sorted(ranges, key=lambda one: (one.file, one.extent))
    groups = coalesce(in_order, lambda one: (one.file, one.extent.offset, one.extent.end))
    return tuple(SourceRange(group.items[0].file, group.extent) for group in groups)


def _batches(tensors: Sequence[int], cost: Callable[[int], int], limit: int) -> Iterator[list[int]]:
    batch: list[int] = []
    total = 0
    for t in tensors:
        if batch and total + cost(t) > limit:
            yield batch
            batch, total = [], 0
        batch.append(t)
        total += cost(t)
    if batch:
        yield batch
