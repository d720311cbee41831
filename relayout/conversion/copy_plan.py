"""The copy steps: the source bytes for each range of each output file, planned without I/O and then carried out.

The steps of a unit visit its tensors in the order of its files, so that in each file offsets rise from step to step. A
large tensor is cut into chunks along its bytes, at row borders if its columns are cut. So the bytes of a chunk for one
rank are contiguous in that rank's file. Small neighbors are gathered into batches, with one piece for each rank. Every
source byte is read once, every target byte written once.

Digests are of bytes in their stored order. Some slices consist of several ranges in an order that differs from the
source: all query heads, then the key heads, while the source stores them group by group. One copy cannot follow both
orders. Such a large tensor is copied in the order of its slices, and read a second time for its own digest.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import accumulate, chain, pairwise, zip_longest
from math import gcd
from typing import NamedTuple, Self

import numpy as np

from relayout.checkpoint.source import SourceCheckpoint, SourceTensor
from relayout.conversion.layout import Conversion
from relayout.core.digests import EMPTY_DIGEST, OrderedDigests
from relayout.core.extents import BLOCK, Extent, Transfer, align_down, align_up, coalesce, copy_runs, split
from relayout.core.slices import CutTensor
from relayout.core.workers import Stop, Workers
from relayout.storage.reading import OpenFiles
from relayout.storage.stores import Access, ReadableFile
from relayout.storage.system import Buffer

CHUNK_NBYTES = 32 * 2**20
"""Approximate source bytes of one step."""

SMALL_NBYTES = 256 * 2**10
"""Tensors below this many bytes are copied in batches."""

_MAX_RUNS = 4096
"""Maximum number of slice runs that one step reads one by one."""


@dataclass(frozen=True, slots=True)
class SourceRange:
    """Bytes of a source file that one request reads, on block borders (the last may end behind the file's end)."""

    file: int
    """Position in the source's files."""
    extent: Extent


@dataclass(frozen=True, slots=True)
class Target:
    """A location in an output file."""

    file: int
    """Number of the file in the layout."""
    offset: int
    """Absolute file offset in bytes."""


class Piece(NamedTuple):
    """Bytes `[offset, offset + nbytes)` of a slice within a span. A tuple, because a plan has very many."""

    tensor: int
    """Position in the source's tensors."""
    slice: int
    """Position among the tensor's distinct slices."""
    offset: int
    """Byte offset in the slice."""
    position: int
    """Byte offset in the span."""
    nbytes: int
    transfers: Sequence[Transfer]
    """The transfers from the tensor to the slice. They fill the piece without hole or overlap."""
    is_hashed: bool
    """True if the piece is hashed for the slice's digest; a slice that is the whole tensor is hashed as source."""


@dataclass(frozen=True, slots=True)
class Span:
    """Contiguous bytes of output files, assembled from pieces."""

    nbytes: int
    targets: tuple[Target, ...]
    """The locations that each receive all bytes of the span; empty if the span is only hashed."""
    pieces: Sequence[Piece]
    """The pieces that fill the span without hole or overlap."""


@dataclass(frozen=True, slots=True)
class CopyStep:
    """One piece of work: read the ranges, fill the spans, write the spans."""

    ranges: tuple[SourceRange, ...]
    spans: tuple[Span, ...]
    tensors: tuple[tuple[int, Extent], ...]
    """The source bytes covered: tensor, and extent in its file. They are hashed here if the whole tensor is read."""

    @property
    def nbytes(self) -> int:
        """Source bytes covered."""
        return sum(extent.nbytes for _, extent in self.tensors)


_Held = tuple[int, int, Sequence[Transfer], bool]
"""A rank's part of a tensor: index of its slice, bytes, transfers, and True if the slice is hashed for this rank."""


class CopyPlan:
    """Plans the copying of a conversion, unit by unit."""

    def __init__(
        self,
        conversion: Conversion,
        *,
        chunk_nbytes: int = CHUNK_NBYTES,
        small_nbytes: int = SMALL_NBYTES,
        by_source: bool = False,
    ) -> None:
        """Plan the steps of a conversion.

        With `by_source`, the steps go through source files from front to back, and each has all slices of its source
        bytes. Offsets in the unit's files may then decrease.
        """
        self.conversion = conversion
        self._tensors = conversion.source.tensors
        self._cut = conversion.cut
        self._chunk_nbytes = chunk_nbytes
        self._small_nbytes = small_nbytes
        self._by_source = by_source
        self._held = {cut: _held(cut) for cut in set(self._cut)}
        self._extents = conversion.extents_of
        self._places = [_places(conversion, holder) for holder in range(len(conversion.layout.holders))]
        """For each holder: the file that holds each tensor, and the absolute offset in that file."""

    def steps(self, unit: int) -> Iterator[CopyStep]:
        """Yield the steps of a unit."""
        batch: list[int] = []
        cost = 0
        order = self.conversion.layout.units[unit]
        if self._by_source:
            order = tuple(sorted(order, key=lambda t: (self._tensors[t].file, self._tensors[t].extent)))
        for t in order:
            if not self._extents(t):
                continue
            is_small = self._tensors[t].extent.nbytes < self._small_nbytes
            if batch and not (is_small and cost + self._batch_cost(t) <= self._chunk_nbytes):
                yield self._batch(batch)
                batch, cost = [], 0
            if is_small:
                batch.append(t)
                cost += self._batch_cost(t)
            else:
                yield from self._large(t)
        if batch:
            yield self._batch(batch)

    def _batch_cost(self, t: int) -> int:
        # Every rank's bytes are staged, and reads are rounded out to blocks.
        staged = sum(nbytes for _, nbytes, _, _ in self._held[self._cut[t]])
        return max(staged, self._tensors[t].extent.nbytes) + 2 * BLOCK

    def _batch(self, batch: Sequence[int]) -> CopyStep:
        """Return the step of several small tensors."""
        covered = tuple(item for t in batch for item in self._covered(t))
        return CopyStep(
            join_ranges([_block_range(self._tensors[t].file, extent) for t, extent in covered]),
            tuple(span for rank in range(len(self._places)) for span in self._whole_slices(rank, batch)),
            covered,
        )

    def _covered(self, t: int) -> Iterator[tuple[int, Extent]]:
        """Yield the parts of a tensor that are read: tensor, and extent in its file."""
        for extent in self._extents(t):
            yield t, Extent(self._tensors[t].extent.offset + extent.offset, extent.nbytes)

    def _whole_slices(self, rank: int, batch: Sequence[int]) -> Iterator[Span]:
        """Split a batch for one holder: a span for each gapless stretch of a file, and one that is only hashed."""
        files, offsets = self._places[rank]
        pieces: list[Piece] = []
        unstored: list[Piece] = []
        file = low = end = -1
        unstored_nbytes = 0
        for t in batch:
            which, nbytes, transfers, is_first = self._held[self._cut[t]][rank]
            if not nbytes:
                continue
            if files[t] < 0:
                if is_first:
                    unstored.append(Piece(t, which, 0, unstored_nbytes, nbytes, transfers, is_first))
                    unstored_nbytes += nbytes
                continue
            offset = offsets[t]
            if pieces and (offset != end or files[t] != file):
                yield Span(end - low, (Target(file, low),), pieces)
                pieces = []
            if not pieces:
                file, low = files[t], offset
            pieces.append(Piece(t, which, 0, offset - low, nbytes, transfers, is_first))
            end = offset + nbytes
        if pieces:
            yield Span(end - low, (Target(file, low),), pieces)
        if unstored:
            yield Span(unstored_nbytes, (), unstored)

    def _large(self, t: int) -> Iterator[CopyStep]:
        """Yield the steps of one large tensor."""
        slices = self._cut[t].transfers
        length = _chunk_length([transfer for transfers in slices for transfer in transfers], self._chunk_nbytes)
        if self._by_source or all(_in_order(transfers, length) for transfers in slices):
            yield from self._chunks(t, length, slices)
        else:
            yield from self._scattered(t, slices)
            if self.conversion.reads_whole(t):
                yield from self._chunks(t, length, ())
            else:  # Bytes are missing: the tensor has no digest.
                yield CopyStep((), (), tuple(self._covered(t)))

    def _chunks(self, t: int, length: int, slices: Sequence[Sequence[Transfer]]) -> Iterator[CopyStep]:
        """Yield steps that copy the tensor in the order of its source."""
        tensor = self._tensors[t]
        for piece in chain.from_iterable(split(extent, length) for extent in self._extents(t)):
            spans = []
            for which, transfers in enumerate(slices):
                clipped = [part for transfer in transfers for part in transfer.clipped(piece.offset, piece.end)]
                if not _in_order(transfers, length):  # Runs of several ranges may leave gaps between each other.
                    clipped = [run for part in clipped for run in part.runs()]
                spans += [self._span(t, which, group) for group in _gapless(clipped)]
            extent = Extent(tensor.extent.offset + piece.offset, piece.nbytes)
            yield CopyStep((_block_range(tensor.file, extent),), tuple(spans), ((t, extent),))

    def _scattered(self, t: int, slices: Sequence[Sequence[Transfer]]) -> Iterator[CopyStep]:
        """Yield steps that copy the slices of a tensor side by side in their own order; shared bytes are read once."""
        tensor = self._tensors[t]
        share = align_up(max(1, self._chunk_nbytes // len(slices)), BLOCK)
        num_runs = max(1, _MAX_RUNS // len(slices))
        for groups in zip_longest(*(_in_target_order(transfers, share, num_runs) for transfers in slices)):
            spans = tuple(self._span(t, which, group) for which, group in enumerate(groups) if group)
            runs = [run for span in spans for piece in span.pieces for run in piece.transfers]
            ranges = (_block_range(tensor.file, Extent(tensor.extent.offset + run.source, run.nbytes)) for run in runs)
            yield CopyStep(join_ranges(ranges), spans, ())

    def _span(self, t: int, which: int, transfers: Sequence[Transfer]) -> Span:
        """Return the span of a gapless piece of one slice, with a target for each rank that holds the slice."""
        cut = self._cut[t].cut
        low = min(transfer.target for transfer in transfers)
        high = max(transfer.target_end for transfer in transfers)
        places = (self._places[holder] for holder in cut.holders[which])
        targets = tuple(Target(files[t], offsets[t] + low) for files, offsets in places if files[t] >= 0)
        piece = Piece(t, which, low, 0, high - low, transfers, not cut.distinct[which].is_whole)
        return Span(high - low, targets, (piece,))


def _held(tensor: CutTensor) -> list[_Held]:
    """Return each rank's part of a tensor of this kind."""
    cut = tensor.cut
    return [
        (
            which,
            tensor.sizes[which],
            tensor.transfers[which],
            cut.holders[which][0] == rank and not cut.distinct[which].is_whole,
        )
        for rank, which in enumerate(cut.which)
    ]


def _places(conversion: Conversion, holder: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return each tensor's file of the holder, by number, and its absolute offset there; -1 if no file has it."""
    files, offsets = np.full((2, len(conversion.source.tensors)), -1, np.int64)
    for index in conversion.layout.holders[holder]:
        file = conversion.layout.files[index]
        tensors = np.array(file.tensors, np.int64)
        files[tensors] = index
        offsets[tensors] = np.array(file.data_offsets, np.int64) + file.data_start
    # Items of an `array` are Python integers, which cost less than numpy's.
    return array("q", files.tobytes()), array("q", offsets.tobytes())


def _chunk_length(transfers: Iterable[Transfer], chunk_nbytes: int) -> int:
    """Return the size of a source chunk: whole rows if columns are cut, and whole blocks in every file if possible."""
    strided = [transfer for transfer in transfers if transfer.count > 1]
    stride = max((transfer.source_stride for transfer in strided), default=0)
    if not strided or stride > chunk_nbytes:
        return align_up(chunk_nbytes, BLOCK)
    rows_of_blocks = BLOCK // gcd(BLOCK, *(transfer.nbytes for transfer in strided))
    unit = stride * rows_of_blocks
    return align_down(chunk_nbytes, unit) if unit <= chunk_nbytes else align_down(chunk_nbytes, stride)


def _in_order(transfers: Sequence[Transfer], chunk_nbytes: int) -> bool:
    """Return True if chunks of this many source bytes deliver a slice's bytes in the slice's own order."""
    if all(a.source_end <= b.source for a, b in pairwise(transfers)):
        return True
    rows = {(part.count, part.source_stride, part.source // max(1, part.source_stride)) for part in transfers}
    [(count, stride, _), *others] = rows
    if others or count == 1:
        return False
    # All transfers cover the same rows. Their order within each row is the same, or a chunk has whole rows.
    return chunk_nbytes % stride == 0 or all(a.source + a.nbytes <= b.source for a, b in pairwise(transfers))


def _in_target_order(transfers: Sequence[Transfer], max_nbytes: int, max_runs: int) -> Iterator[list[Transfer]]:
    """Yield single runs in the order of their targets, in groups of at most `max_nbytes` and `max_runs`."""
    group: list[Transfer] = []
    room = max_nbytes
    for run in merge(*(transfer.runs() for transfer in transfers), key=lambda run: run.target):
        source, end = run.source, run.source_end
        while source < end:
            group += run.clipped(source, min(source + room, end))
            source, room = source + group[-1].nbytes, room - group[-1].nbytes
            if not room or len(group) == max_runs:
                yield group
                group, room = [], max_nbytes
    if group:
        yield group


def _gapless(transfers: Iterable[Transfer]) -> Iterator[list[Transfer]]:
    """Group transfers into gapless stretches of target bytes."""
    group: list[Transfer] = []
    end = 0
    for transfer in sorted(transfers, key=lambda transfer: transfer.target):
        if group and transfer.target > end:
            yield group
            group = []
        group.append(transfer)
        end = max(end, transfer.target_end)
    if group:
        yield group


def _block_range(file: int, extent: Extent) -> SourceRange:
    return SourceRange(file, extent.aligned())


def join_ranges(ranges: Iterable[SourceRange]) -> tuple[SourceRange, ...]:
    """Join ranges that touch or overlap."""
    in_order = sorted(ranges, key=lambda source: (source.file, source.extent))
    groups = coalesce(in_order, lambda source: (source.file, source.extent.offset, source.extent.end))
    return tuple(SourceRange(group.items[0].file, group.extent) for group in groups)


SOURCE = -1
"""Stands in place of a slice for the whole tensor, as stored in the source."""


@dataclass(frozen=True, slots=True)
class TensorDigests:
    """Digests of one tensor, in hex."""

    source: str | None
    """Digest of the whole tensor, as stored in the source. None: unknown, because not all of it was read."""
    slices: tuple[str, ...]
    """Digests of the tensor's distinct slices, in order of the first rank that holds each."""


@dataclass(frozen=True, slots=True)
class WrittenDigests:
    """The digests of tensors and files that are written."""

    tensors: Mapping[int, TensorDigests] = field(default_factory=dict)
    """Digests of each tensor, by its index in the source."""
    chunks: Mapping[int, bytes] = field(default_factory=dict)
    """Chunk digests of each file, by its number; everything but the file's header is written."""


@dataclass(frozen=True, slots=True)
class LoadedRanges:
    """Source ranges and their memory."""

    memory: memoryview
    starts: list[tuple[int, int]]
    """(file, file offset) of each range, sorted."""
    positions: list[int]
    """Offset of each range in the memory."""

    @classmethod
    def place(cls, ranges: Sequence[SourceRange], buffer: Buffer) -> Self:
        """Reserve memory for the ranges, which must be in order."""
        positions = list(accumulate((source.extent.nbytes for source in ranges), initial=0))
        memory = buffer.reserve(positions.pop())
        return cls(memory, [(source.file, source.extent.offset) for source in ranges], positions)

    def position(self, file: int, offset: int) -> int:
        """Return the position in the memory of the byte at a file's offset."""
        index = bisect_right(self.starts, (file, offset)) - 1
        return self.positions[index] + offset - self.starts[index][1]

    def tensor_position(self, tensor: SourceTensor, offset: int) -> int:
        """Return the position of the tensor's byte 0, extrapolated from that of its byte at `offset`."""
        return self.position(tensor.file, tensor.extent.offset + offset) - offset


class TensorHashes:
    """Digests of tensors and their slices, computed from pieces as they are copied. Thread-safe."""

    def __init__(self, conversion: Conversion, stop: Stop) -> None:
        self._tensors = conversion.source.tensors
        self._cut = conversion.cut
        self._reads_whole = conversion.reads_whole
        self._num_streams: dict[CutTensor, int] = {}
        self._ordered = OrderedDigests(stop)
        self._lock = threading.Lock()
        self._partial: dict[int, dict[int, str]] = {}
        """The digests known so far of tensors that pass in several steps."""

    def add(self, pieces: Iterable[tuple[int, int, int, memoryview]]) -> dict[int, TensorDigests]:
        """Hash pieces: tensor, distinct slice or `SOURCE`, offset in that slice, and the bytes from there on.

        Returns:
            The digests of the tensors that became complete, of the source and of slices.
        """
        ended: dict[int, dict[int, str]] = {}
        for t, which, start, view in pieces:
            nbytes = self._tensors[t].extent.nbytes if which == SOURCE else self._cut[t].sizes[which]
            digest = self._ordered.update((t, which), start, view, nbytes)
            if digest is not None:
                ended.setdefault(t, {})[which] = digest
        complete = {}
        with self._lock:
            for t, digests in ended.items():
                digests |= self._partial.pop(t, {})
                cut = self._cut[t]
                if cut not in self._num_streams:
                    self._num_streams[cut] = len(_streams(cut, with_source=self._reads_whole(t)))
                if len(digests) < self._num_streams[cut]:
                    self._partial[t] = digests
                else:
                    slices = (
                        digests.get(SOURCE if part.is_whole else which, EMPTY_DIGEST)
                        for which, part in enumerate(cut.cut.distinct)
                    )
                    complete[t] = TensorDigests(digests.get(SOURCE), tuple(slices))
        return complete


def _streams(tensor: CutTensor, *, with_source: bool) -> set[int]:
    """Return the streams to hash for a tensor: its different slices with bytes, and the source if all of it is read."""
    parts = zip(tensor.cut.distinct, tensor.sizes, strict=True)
    slices = {SOURCE if part.is_whole else which for which, (part, nbytes) in enumerate(parts) if nbytes}
    return slices | {SOURCE} if with_source else slices


def run_copy_steps(
    conversion: Conversion,
    steps: Iterable[CopyStep],
    put: Callable[[Target, memoryview, int], None] | None,
    *,
    threads: int,
    on_progress: Callable[[int], None] | None = None,
    stop: Stop | None = None,
) -> dict[int, TensorDigests]:
    """Carry out all steps, and return the digests of each tensor that was copied.

    Args:
        put: takes the bytes of a span for each target, as `FileSink.put`; called by several threads. None: digests
            only.
        stop: requested when a step fails.
    """
    source = conversion.source
    stop = stop or Stop()
    done: dict[int, TensorDigests] = {}
    hashes = TensorHashes(conversion, stop)

    def work(buffers: tuple[Buffer, Buffer], step: CopyStep) -> int:
        loaded = _read(step.ranges, inputs, buffers[0])
        staged = _stage(step.spans, source, loaded, buffers[1])
        if put is not None:
            for span, view, address in staged:
                for target in span.targets:
                    put(target, view, address)
        done.update(hashes.add(_hashed(step, conversion, loaded, staged)))
        return step.nbytes

    def open_input(index: int) -> ReadableFile:
        file = source.files[index]
        return source.folder.open(file.name, file.nbytes, access=Access.ONCE, version=file.version)

    with OpenFiles(open_input) as inputs:
        Workers(threads, steps, lambda: (Buffer(), Buffer()), work, stop).run(on_progress)
    return done


def _read(ranges: Sequence[SourceRange], inputs: OpenFiles[int, ReadableFile], buffer: Buffer) -> LoadedRanges:
    loaded = LoadedRanges.place(ranges, buffer)
    for source, position in zip(ranges, loaded.positions, strict=True):
        with inputs.use(source.file) as file:
            file.read(source.extent.offset, loaded.memory[position : position + source.extent.nbytes])
    return loaded


_Staged = tuple[Span, memoryview, int]
"""A span assembled in memory, and its offset from a page border."""


def _stage(spans: Sequence[Span], source: SourceCheckpoint, loaded: LoadedRanges, buffer: Buffer) -> list[_Staged]:
    """Assemble the spans in memory. Modulo a block, each span's address is the offset of its first target."""
    positions = []
    end = 0
    for span in spans:
        positions.append(align_up(end, BLOCK) + (span.targets[0].offset % BLOCK if span.targets else 0))
        end = positions[-1] + span.nbytes
    memory = buffer.reserve(end)
    for span, position in zip(spans, positions, strict=True):
        for piece in span.pieces:
            tensor = source.tensors[piece.tensor]
            for transfer in piece.transfers:
                origin = loaded.tensor_position(tensor, transfer.source)
                copy_runs(loaded.memory, memory, transfer, origin, position + piece.position - piece.offset)
    return [
        (span, memory[position : position + span.nbytes], position)
        for span, position in zip(spans, positions, strict=True)
    ]


def _hashed(
    step: CopyStep, conversion: Conversion, loaded: LoadedRanges, staged: Iterable[_Staged]
) -> Iterator[tuple[int, int, int, memoryview]]:
    """Yield the bytes of a step that are hashed, for `TensorHashes.add`."""
    source = conversion.source
    for span, view, _ in staged:
        for t, which, offset, position, nbytes, _, is_hashed in span.pieces:
            if is_hashed:
                yield t, which, offset, view[position : position + nbytes]
    for t, extent in step.tensors:
        if not conversion.reads_whole(t):
            continue
        tensor = source.tensors[t]
        position = loaded.position(tensor.file, extent.offset)
        yield t, SOURCE, extent.offset - tensor.extent.offset, loaded.memory[position : position + extent.nbytes]
