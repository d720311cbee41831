"""The copy plan: which bytes of which source file go where in which rank file, in bounded steps. Pure.

A large tensor is cut into chunks along its bytes, at row borders where its columns are cut, so that what each rank
gets of a chunk is contiguous in its file. Small tensors are gathered into batches, so that what each rank gets of a
batch is written in few pieces. Every source byte is read once, every target byte written once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd

from relayout.catalogue import Catalogue
from relayout.extents import BLOCK, Extent, Transfer, align_down, align_up
from relayout.layout import Layout
from relayout.plan import Plan
from relayout.slicing import distinct_slices, slice_nbytes, slice_transfers

CHUNK_NBYTES = 32 * 2**20
"""Source bytes of one step, about."""

SMALL_NBYTES = 256 * 2**10
"""Tensors below this many bytes are copied in batches."""


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
    start: int
    """Byte offset in the span."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes that lie together in rank files, put together from pieces."""

    nbytes: int
    targets: tuple[Target, ...]
    """The same bytes go to each of these."""
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
    turn: int | None
    """The bytes of a tensor are hashed in order: this is chunk number `turn` of its one tensor. None: all whole."""

    @property
    def nbytes(self) -> int:
        """Source bytes covered."""
        return sum(extent.nbytes for _, extent in self.tensors)


def copy_steps(
    catalogue: Catalogue,
    plan: Plan,
    layout: Layout,
    *,
    chunk_nbytes: int = CHUNK_NBYTES,
    small_nbytes: int = SMALL_NBYTES,
) -> Iterator[Step]:
    """All steps of a conversion, lazily: large tensors in model order, then the small ones."""
    planner = _Planner(catalogue, plan, layout, chunk_nbytes)
    small = []
    for t, tensor in enumerate(catalogue.tensors):
        if tensor.extent.nbytes >= small_nbytes:
            yield from planner.chunks(t)
        elif tensor.extent.nbytes:
            small.append(t)
    small.sort(key=planner.place_in_first_rank)
    for batch in _batches(small, planner.batch_cost, chunk_nbytes):
        yield planner.batch(batch)


class _Planner:
    def __init__(self, catalogue: Catalogue, plan: Plan, layout: Layout, chunk_nbytes: int) -> None:
        self.tensors = catalogue.tensors
        self.slices = plan.slices
        self.chunk_nbytes = chunk_nbytes
        self.places: list[dict[int, tuple[int, int]]] = [
            {t: (file.part, offset) for file in files for t, offset in zip(file.tensors, file.offsets, strict=True)}
            for files in layout.ranks
        ]

    def place_in_first_rank(self, t: int) -> tuple[int, int]:
        return self.places[0].get(t, (-1, t))

    def batch_cost(self, t: int) -> int:
        # Every rank's bytes are staged, and reads are rounded out to blocks.
        tensor = self.tensors[t]
        staged = sum(slice_nbytes(tensor.dtype, tensor.shape, part) for part in self.slices[t])
        return max(staged, tensor.extent.nbytes) + 2 * BLOCK

    def chunks(self, t: int) -> Iterator[Step]:
        """The steps of one large tensor."""
        tensor = self.tensors[t]
        base = tensor.extent.offset
        distinct, held = distinct_slices(self.slices[t])
        # Hashed as they pass, slices want their ranges in the order of the source.
        assert all(list(part.ranges or ()) == sorted(part.ranges or ()) for part in distinct)
        transfers = [slice_transfers(tensor.dtype, tensor.shape, part) for part in distinct]
        length = _chunk_length([one for group in transfers for one in group], self.chunk_nbytes)
        for turn, start in enumerate(range(0, tensor.extent.nbytes, length)):
            end = min(start + length, tensor.extent.nbytes)
            spans = []
            for which, group in enumerate(transfers):
                cut = [Piece(t, part) for one in group for part in one.clipped(start, end)]
                places = [(rank, *self.places[rank][t]) for rank, w in enumerate(held) if w == which]
                for low, high, pieces in _tile(cut):
                    spans.append(
                        Span(
                            high - low,
                            tuple(Target(rank, part, offset + low) for rank, part, offset in places),
                            tuple(Piece(t, p.transfer.shifted(source=base, target=-low)) for p in pieces),
                            () if distinct[which].is_whole else (SliceBytes(t, which, 0, high - low),),
                        )
                    )
            extent = Extent(base + start, end - start)
            yield Step((_block_range(tensor.file, extent),), tuple(spans), ((t, extent),), turn)

    def batch(self, batch: Sequence[int]) -> Step:
        """The step of several small tensors."""
        hashed: set[tuple[int, int]] = set()
        spans = []
        for rank, places in enumerate(self.places):
            by_part: dict[int, list[Piece]] = {}
            slices: dict[int, list[SliceBytes]] = {}
            for t in batch:
                part, offset = places[t]
                tensor = self.tensors[t]
                distinct, held = distinct_slices(self.slices[t])
                pieces = slice_transfers(tensor.dtype, tensor.shape, distinct[held[rank]])
                by_part.setdefault(part, []).extend(
                    Piece(t, one.shifted(source=tensor.extent.offset, target=offset)) for one in pieces
                )
                if pieces and not distinct[held[rank]].is_whole and (t, held[rank]) not in hashed:
                    hashed.add((t, held[rank]))
                    nbytes = sum(one.total_nbytes for one in pieces)
                    slices.setdefault(part, []).append(SliceBytes(t, held[rank], offset, nbytes))
            for part, gathered in by_part.items():
                for low, high, pieces_of_span in _tile(gathered):
                    spans.append(
                        Span(
                            high - low,
                            (Target(rank, part, low),),
                            tuple(Piece(p.tensor, p.transfer.shifted(target=-low)) for p in pieces_of_span),
                            tuple(
                                SliceBytes(s.tensor, s.slice, s.start - low, s.nbytes)
                                for s in slices.get(part, ())
                                if low <= s.start < high
                            ),
                        )
                    )
        return Step(
            _merge([_block_range(self.tensors[t].file, self.tensors[t].extent) for t in batch]),
            tuple(spans),
            tuple((t, self.tensors[t].extent) for t in batch),
            None,
        )


def _chunk_length(transfers: Iterable[Transfer], chunk_nbytes: int) -> int:
    """Source bytes of a chunk: whole rows where columns are cut, and whole blocks in every rank file if possible."""
    strided = [one for one in transfers if one.count > 1]
    stride = max((one.source_stride for one in strided), default=0)
    if not strided or stride > chunk_nbytes:
        return align_up(chunk_nbytes, BLOCK)
    rows_of_blocks = BLOCK // gcd(BLOCK, *(one.nbytes for one in strided))
    unit = stride * rows_of_blocks
    return align_down(chunk_nbytes, unit) if unit <= chunk_nbytes else align_down(chunk_nbytes, stride)


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


def _block_range(file: int, extent: Extent) -> SourceRange:
    start = align_down(extent.offset, BLOCK)
    return SourceRange(file, Extent(start, align_up(extent.end, BLOCK) - start))


def _merge(ranges: list[SourceRange]) -> tuple[SourceRange, ...]:
    """Join ranges that touch or overlap."""
    merged: list[SourceRange] = []
    for one in sorted(ranges, key=lambda r: (r.file, r.extent)):
        last = merged[-1] if merged else None
        if last is not None and last.file == one.file and one.extent.offset <= last.extent.end:
            end = max(last.extent.end, one.extent.end)
            merged[-1] = SourceRange(one.file, Extent(last.extent.offset, end - last.extent.offset))
        else:
            merged.append(one)
    return tuple(merged)


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
