"""Reads any part of a tensor from stored slices: for another degree, whole tensors, parts, and plain checkpoints.

Modules that only one of these cases needs are imported where they are used.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap
from math import prod
from typing import NamedTuple

from relayout.checkpoint.converted import check_present, read_record, read_table
from relayout.checkpoint.folder import find_config
from relayout.checkpoint.source import SourceCheckpoint, SourceTensor, agreed_metadata, read_source
from relayout.core.arguments import ranks_text
from relayout.core.extents import Transfer
from relayout.core.slices import BITS, WHOLE, Cut, Slice, positions, row_runs, slice_transfers
from relayout.core.workers import remake_in_child
from relayout.errors import FormatError, PlanError, about
from relayout.format.index import Manifest, RankTable, Read
from relayout.format.safetensors import parse_header
from relayout.format.source_record import SourceRecord
from relayout.loader.sources.rank import Names, RankSource, StoredFile, TensorColumns, files_of, rank_files, select
from relayout.storage.stores import Store

_MAX_WORK = 2**24
"""Limit of the ranges to compare. Built-in plans do not come near it; plans of other programs may."""
_MAX_GATHERED = 2**12
"""Number of slices for which reads are cached, for other tensors of the same form."""


@dataclass(frozen=True, slots=True)
class StoredSlice:
    """A slice of a tensor that is stored in one piece."""

    part: Slice
    file: int
    """Position in the list of files."""
    offset: int
    """Absolute offset of the slice's first byte."""


def gather(dtype: str, shape: tuple[int, ...], wanted: Slice, stored: Sequence[StoredSlice]) -> tuple[Read, ...]:
    """Return the reads that fill a slice of a tensor; their targets are relative to its first byte.

    If several stored slices have the next elements, the one with the longest run is read; of equals, the first.
    """
    axis = max((axis for part in (wanted, *(one.part for one in stored)) for axis in part.axes), default=None)
    if not shape or axis is None:
        return _whole(dtype, shape, stored)
    gathering = _Gathering(dtype, shape, axis, prod(shape[axis + 1 :]) * BITS[dtype])
    target = gathering.table(wanted)
    tables = [(one, gathering.table(one.part)) for one in stored]
    bands = list(_bands(target.rows, [rows for _, table in tables for rows in table.rows]))
    if len(bands) * sum(len(table.rows) + len(table.columns) for _, table in tables) > _MAX_WORK:
        what = f"a slice is made of too many pieces: {len(bands)}, from {len(stored)} stored slices"
        raise PlanError(what, code="limit")
    reads: list[Read] = []
    for band in bands:
        held = [one for slice_, table in tables for one in _held(slice_, table, band)]
        for columns in target.columns:
            for source, piece in gathering.pieces(columns, held):
                reads += gathering.reads(source, band, piece, target.width)
    return tuple(reads)


class _Stretch(NamedTuple):
    """Consecutive rows, or consecutive elements of rows, that a slice has."""

    start: int
    """Position of the first one in the tensor."""
    length: int
    place: int
    """Position of the first one in the slice."""

    @property
    def end(self) -> int:
        """Position after the last one in the tensor."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class _Table:
    """A slice as a table.

    A row is an index of all axes before the last cut one. A column is an element of the last cut axis.
    """

    rows: Sequence[_Stretch]
    columns: Sequence[_Stretch]
    width: int
    """Elements of a row."""


class _Held(NamedTuple):
    """Columns of a stored slice that contains a band of rows."""

    stored: StoredSlice
    width: int
    """Elements of a row of the slice."""
    row: int
    """The row of the slice that is the first row of the band."""
    columns: _Stretch


def _held(stored: StoredSlice, table: _Table, band: _Stretch) -> Iterator[_Held]:
    """Yield the columns that a stored slice has of a band: it has all rows of the band, or none."""
    for rows in table.rows:
        if rows.start <= band.start < rows.end:
            for columns in table.columns:
                yield _Held(stored, table.width, band.start - rows.start + rows.place, columns)


def _bands(wanted: Sequence[_Stretch], stored: Sequence[_Stretch]) -> Iterator[_Stretch]:
    """Yield the wanted rows in bands, such that each stored slice contains a band completely or not at all."""
    borders = sorted({border for rows in stored for border in (rows.start, rows.end)})
    for rows in wanted:
        inside = borders[bisect_right(borders, rows.start) : bisect_left(borders, rows.end)]
        for start, end in pairwise((rows.start, *inside, rows.end) if rows.length else ()):
            yield _Stretch(start, end - start, rows.place + start - rows.start)


@dataclass(frozen=True, slots=True)
class _Gathering:
    """The tensor of a slice to assemble, and the last axis along which its slices are cut."""

    dtype: str
    shape: tuple[int, ...]
    axis: int
    column_bits: int
    """Bits of a column in a row."""

    def table(self, part: Slice) -> _Table:
        """Return a slice as rows and columns."""
        ranges = part.ranges_along(self.axis)
        columns = positions([(0, self.shape[self.axis])] if ranges is None else ranges)
        rows = row_runs(part, self.shape, self.axis)
        return _Table(
            [_Stretch(*one) for one in rows], [_Stretch(*one) for one in columns], sum(one[1] for one in columns)
        )

    def pieces(self, wanted: _Stretch, held: Sequence[_Held]) -> Iterator[tuple[_Held, _Stretch]]:
        """Yield runs of stored columns that fill all wanted columns of a band, each with those it fills."""
        start = wanted.start
        while start < wanted.end:
            having = [one for one in held if one.columns.start <= start < one.columns.end]
            if not having:
                what = f"element {start} of dim {self.axis} of {list(self.shape)} is in no rank's slice"
                raise PlanError(what, code="missing")
            best = max(having, key=lambda one: min(one.columns.end, wanted.end))
            end = min(best.columns.end, wanted.end)
            yield best, _Stretch(start, end - start, wanted.place + start - wanted.start)
            start = end

    def reads(self, source: _Held, band: _Stretch, piece: _Stretch, width: int) -> Iterator[Read]:
        """Yield the read of columns of a band from a stored slice; rows of the wanted slice have `width` elements."""
        column = source.columns.place + piece.start - source.columns.start
        begin, place, nbytes = self._nbytes(column), self._nbytes(piece.place), self._nbytes(piece.length)
        source_stride, target_stride = self._nbytes(source.width), self._nbytes(width)
        if nbytes:
            transfer = Transfer(
                source.stored.offset + source.row * source_stride + begin,
                band.place * target_stride + place,
                nbytes,
                band.length,
                *((source_stride, target_stride) if band.length > 1 else (0, 0)),
            )
            yield Read(source.stored.file, transfer.normalized())

    def _nbytes(self, num_columns: int) -> int:
        """Return the number of bytes of `num_columns` columns in a row."""
        num_bits = num_columns * self.column_bits
        if num_bits % 8:
            what = f"a cut of {self.dtype} {list(self.shape)} along dim {self.axis} falls inside a byte"
            raise PlanError(what, code="indivisible")
        return num_bits // 8


def _whole(dtype: str, shape: tuple[int, ...], stored: Sequence[StoredSlice]) -> tuple[Read, ...]:
    if not stored:
        raise PlanError("no rank holds the tensor", code="missing")
    nbytes = prod(shape) * BITS[dtype] // 8
    return (Read(stored[0].file, Transfer(stored[0].offset, 0, nbytes)),) if nbytes else ()


@dataclass(frozen=True, slots=True)
class StoredPieces:
    """Tensors that are each stored in one file: those of a rank as stored, or of a plain checkpoint."""

    columns: TensorColumns
    files: tuple[StoredFile, ...]
    stored: Sequence[StoredSlice]
    """The stored slice of each tensor."""
    metadata: Callable[[], Mapping[str, str]]

    def axes(self, row: int) -> set[int]:
        return {*self.columns.parts[row].axes, *self.stored[row].part.axes}

    def reads(self, row: int, wanted: Slice) -> tuple[Read, ...]:
        dtype, whole = self.columns.dtypes[row], tuple(self.columns.source_shapes[row])
        return gather(dtype, whole, wanted, [self.stored[row]])


@dataclass(frozen=True, slots=True)
class ReshardedRank(RankSource):
    """One rank of a converted folder at another degree, or with other experts, from the files of all ranks."""

    ranks: Ranks
    """The slices of all ranks."""
    wanted: Sequence[Slice]
    """The wanted slice of each source tensor."""

    def contents(self, names: Names = None) -> TensorColumns:
        # If several slices have an element, prefer the slice of the rank at the same place.
        first = self.rank * self.ranks.manifest.num_ranks // self.num_ranks
        return self.ranks.assemble(self.wanted, first).matching(names)

    def pieces(self, names: Names = None) -> ReshardedPieces:
        return _pieces(self.ranks, self.wanted, names)


def resharded_rank(
    store: Store, manifest: Manifest, rank: int, num_ranks: int, experts: str | Iterable[int] | None = None
) -> ReshardedRank:
    """Read the source record, and plan by its rules; for another degree, also read the folder's config.json."""
    from relayout.plans.division import with_experts
    from relayout.plans.plan import TensorInfo, TensorList
    from relayout.plans.planner import recorded_plan, recorded_rules

    record = read_record(store, manifest)
    tensors = tuple(starmap(TensorInfo, zip(record.names, record.dtypes, record.shapes, strict=True)))
    if num_ranks == manifest.num_ranks:
        wanted = [record.cuts[cut].slices[rank] for cut in record.cut_of]
    else:
        plan = recorded_plan(TensorList(str(store), tensors, find_config(store).content), record, num_ranks)
        wanted = [plan.cuts[cut].slices[rank] for cut in plan.cut_of]
    if experts is not None:
        with about(path=str(store)):
            wanted = with_experts(recorded_rules(store, record), tensors, wanted, experts)
    return ReshardedRank(store, rank, num_ranks, Ranks(store, manifest, record), wanted)


def whole_pieces(store: Store, manifest: Manifest) -> ReshardedPieces:
    """Return the whole tensors."""
    if manifest.whole is None:
        check_present(store, manifest, range(manifest.num_ranks))
    record = read_record(store, manifest)
    return _pieces(Ranks(store, manifest, record), [WHOLE] * len(record.names), None)


def _pieces(ranks: Ranks, wanted: Sequence[Slice], names: Names) -> ReshardedPieces:
    record = ranks.record
    held = [t for t, part in enumerate(wanted) if part.is_held]
    held.sort(key=lambda t: (record.file_of[t], record.offsets[t]))
    if names is not None:
        held = [held[row] for row in select([record.names[t] for t in held], names)]
    columns = TensorColumns(
        names=[record.names[t] for t in held],
        dtypes=[record.dtypes[t] for t in held],
        shapes=[wanted[t].shape(tuple(record.shapes[t])) for t in held],
        parts=[wanted[t] for t in held],
        source_shapes=[record.shapes[t] for t in held],
    )
    return ReshardedPieces(columns, held, ranks)


@dataclass(frozen=True, slots=True)
class ReshardedPieces:
    """Tensors assembled from the slices of all ranks."""

    columns: TensorColumns
    tensors: Sequence[int]
    """Positions of the tensors in the record."""
    ranks: Ranks

    def axes(self, row: int) -> set[int]:
        parts = (self.columns.parts[row], *self.ranks.record.cut(self.tensors[row]).distinct)
        return {axis for part in parts for axis in part.axes}

    @property
    def files(self) -> tuple[StoredFile, ...]:
        return self.ranks.files

    def reads(self, row: int, wanted: Slice) -> tuple[Read, ...]:
        return self.ranks.reads(self.tensors[row], wanted)

    def metadata(self) -> Mapping[str, str]:
        where = f"{self.ranks.store}: header of "
        files = self.ranks.record.files
        return agreed_metadata([parse_header(file.header, file.nbytes, where + file.name).metadata for file in files])


class Ranks:
    """The slices of all ranks, to assemble other slices from. Reads each rank table on demand, once. Thread-safe."""

    def __init__(self, store: Store, manifest: Manifest, record: SourceRecord) -> None:
        self.store = store
        self.manifest = manifest
        self.record = record
        # In the manifest's order, so that positions do not depend on the order in which threads open tables.
        self.files = files_of(store, manifest, range(len(manifest.files)))
        self._gathered: dict[tuple[object, ...], tuple[Read, ...]] = {}
        """Results of `_gather`, which tensors of the same form share."""
        self._tables: dict[int, tuple[RankTable, Mapping[str, int]]] = {}
        self._lock = threading.Lock()
        remake_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def assemble(self, wanted: Sequence[Slice], first: int) -> TensorColumns:
        """Return the wanted slice of each source tensor, in file order.

        Args:
            first: the rank to prefer for elements that several hold, then the ranks after it.
        """
        record = self.record
        rows = [(t, self.reads(t, part, first)) for t, part in enumerate(wanted) if part.is_held]
        rows.sort(key=lambda row: (row[1][0].file, row[1][0].transfer.source) if row[1] else (-1, 0))
        columns = TensorColumns(
            names=[record.names[t] for t, _ in rows],
            dtypes=[record.dtypes[t] for t, _ in rows],
            shapes=[wanted[t].shape(record.shapes[t]) for t, _ in rows],
            files=self.files,
            reads=[reads for _, reads in rows],
        )
        return columns.rows(range(len(rows)))  # Only the needed files.

    def reads(self, t: int, wanted: Slice, first: int = 0) -> tuple[Read, ...]:
        """Return the reads that fill a slice of one source tensor, from `files`; `first` is as for `assemble`."""
        alike = self.record.dtypes[t], self.record.shapes[t], self.record.cut_of[t], wanted, first
        gathered = self._gathered.get(alike)
        if gathered is None:
            if len(self._gathered) >= _MAX_GATHERED:
                self._gathered.clear()
            gathered = self._gathered[alike] = self._gather(t, wanted, first)
        return self._locate(t, gathered)

    def _gather(self, t: int, wanted: Slice, first: int) -> tuple[Read, ...]:
        """Return the reads that fill a slice from ranks' slices; their `file` is the rank."""
        record, count = self.record, self.manifest.num_ranks
        order = ((first + i) % count for i in range(count))
        slices = record.cut(t).slices
        stored = [StoredSlice(slices[rank], rank, 0) for rank in order if slices[rank].is_held and self._has(rank)]
        try:
            if self._has(count) and (not self.manifest.has_all or self._is_best_of_whole(t, wanted)):
                stored = [StoredSlice(WHOLE, count, 0)]
            return gather(record.dtypes[t], record.shapes[t], wanted, stored)
        except PlanError as error:
            error.amend(path=str(self.store), tensor=record.names[t])
            if not self.manifest.has_all:
                has = f"of {count} ranks the folder has only {ranks_text(self.manifest.present)}"
                error.amend(what=f"{error.what}: {has}", code="missing")
            raise

    def _has(self, holder: int) -> bool:
        """Return True if the folder has a rank, or the whole tensors."""
        return holder in self.manifest.holders

    def _is_best_of_whole(self, t: int, wanted: Slice) -> bool:
        """Return True if a slice is best read from the whole tensor.

        That is so if the slice is contiguous there, or if every rank's is: then slices have no files of their own.
        """
        dtype, shape = self.record.dtypes[t], self.record.shapes[t]
        apart = self.record.cut(t).tensor(dtype, shape).transfers
        return all(transfer.count == 1 for transfer in slice_transfers(dtype, shape, wanted)) or all(
            transfer.count == 1 for transfers in apart for transfer in transfers
        )

    def _locate(self, t: int, reads: tuple[Read, ...]) -> tuple[Read, ...]:
        """Return reads of rank files, for the reads that `_gather` returned."""
        if not reads:  # If a slice has no bytes, check this in a table, too.
            slices = self.record.cut(t).slices
            present = self.manifest.present
            self._find(t, next((rank for rank in present if slices[rank].is_held), present[0]))
        located = []
        for read in reads:
            table, row = self._find(t, read.file)
            file = self.manifest.holders[read.file].files[table.files[row]]
            located.append(Read(file, read.transfer.shifted(source=table.offsets[row])))
        return tuple(located)

    def _find(self, t: int, rank: int) -> tuple[RankTable, int]:
        """Return a rank's table, and the row of a tensor, after checking it against the source record."""
        record, (table, row_of) = self.record, self._open(rank)
        row = row_of.get(record.names[t], -1)
        slices = record.cut(t).slices
        part = slices[rank] if rank < len(slices) else WHOLE
        expected = (record.dtypes[t], record.shapes[t], part)
        if row < 0 or (table.dtypes[row], table.source_shapes[row], table.slices[row]) != expected:
            raise FormatError(
                "differs from the source record",
                path=f"{self.store}: table of rank {rank}",
                tensor=record.names[t],
                code="mismatch",
            )
        return table, row

    def _open(self, rank: int) -> tuple[RankTable, Mapping[str, int]]:
        """Return a rank's table, and its rows by name."""
        with self._lock:  # Each table is parsed once.
            if rank not in self._tables:
                rank_files(self.store, self.manifest, rank)
                table = read_table(self.store, self.manifest, rank)
                self._tables[rank] = table, {name: row for row, name in enumerate(table.names)}
            return self._tables[rank]


@dataclass(frozen=True, slots=True)
class UnconvertedRank(RankSource):
    """One rank of a checkpoint that was not converted, by the built-in plan for its model type."""

    checkpoint: SourceCheckpoint
    cuts: Sequence[Cut]
    """The cut of each tensor of the checkpoint."""

    @property
    def tensors(self) -> list[tuple[SourceTensor, Cut]]:
        """The tensors that the rank holds, with their cuts."""
        pairs = zip(self.checkpoint.tensors, self.cuts, strict=True)
        return [(tensor, cut) for tensor, cut in pairs if cut.slices[self.rank].is_held]

    @property
    def is_unconverted(self) -> bool:
        return True

    @property
    def slow_because(self) -> str | None:
        if self.num_ranks == 1:
            return None
        return (
            f"{self.store}: a plain checkpoint, sliced while it is loaded; `relayout convert {self.store}"
            f" --tp {self.num_ranks}` once makes every later load faster"
        )

    def contents(self, names: Names = None) -> TensorColumns:
        tensors = self.tensors
        parts = [cut.tensor(tensor.dtype, tensor.shape) for tensor, cut in tensors]
        columns = TensorColumns(
            names=[tensor.name for tensor, _ in tensors],
            dtypes=[tensor.dtype for tensor, _ in tensors],
            shapes=[part.rank_shape(self.rank) for part in parts],
            files=self.files,
            reads=[
                tuple(
                    Read(tensor.file, transfer.shifted(source=tensor.extent.offset))
                    for transfer in part.rank_transfers(self.rank)
                )
                for (tensor, _), part in zip(tensors, parts, strict=True)
            ],
        )
        return columns.matching(names)

    def pieces(self, names: Names = None) -> StoredPieces:
        tensors = self.tensors
        by_name = {tensor.name: tensor for tensor, _ in tensors}
        slices = [cut.slices[self.rank] for _, cut in tensors]
        columns = TensorColumns(
            names=list(by_name),
            dtypes=[tensor.dtype for tensor in by_name.values()],
            shapes=[part.shape(tensor.shape) for part, tensor in zip(slices, by_name.values(), strict=True)],
            parts=slices,
            source_shapes=[tensor.shape for tensor in by_name.values()],
        ).matching(names)
        stored = [StoredSlice(WHOLE, by_name[name].file, by_name[name].extent.offset) for name in columns.names]
        return StoredPieces(columns, self.files, stored, lambda: self.checkpoint.metadata)

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """All files of the checkpoint."""
        folder = self.checkpoint.folder
        return tuple(StoredFile(folder, file.name, file.nbytes, version=file.version) for file in self.checkpoint.files)


def unconverted_rank(store: Store, rank: int, num_ranks: int, *, by_transformers: bool = False) -> UnconvertedRank:
    """Read the headers, and plan; `by_transformers` is as for `read_source`."""
    from relayout.plans.planner import plan_by, plan_for

    checkpoint = read_source(store, by_transformers=by_transformers)
    plan = plan_for(checkpoint, num_ranks) if num_ranks > 1 else plan_by(checkpoint, num_ranks, None)
    return UnconvertedRank(store, rank, num_ranks, checkpoint, [plan.cuts[cut] for cut in plan.cut_of])
