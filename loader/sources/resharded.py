"""Loads a converted checkpoint at another degree than that of the conversion. Imports the planner."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap

from relayout.checkpoint.config import read_config
from relayout.checkpoint.converted import read_record, read_table
from relayout.core.children import remake_in_child
from relayout.core.slices import WHOLE, Slice, slice_transfers
from relayout.errors import FormatError, PlanError
from relayout.format.index import Manifest, RankTable, Read
from relayout.format.safetensors import parse_header
from relayout.format.source_record import SourceRecord
from relayout.loader.sources.contents import Contents, files_of, proven, rank_files, select
from relayout.loader.sources.pieces import Columns, agreed
from relayout.loader.sources.reshard import Holder, gather
from relayout.plans.plan import Plan, TensorInfo, TensorList
from relayout.plans.recorded import recorded_plan
from relayout.storage.protocols import Store


@dataclass(frozen=True, slots=True)
class ReshardedSlices:
    """What a rank would hold if the source were converted at another degree by the same rules."""

    ranks: Ranks
    """The slices of all ranks."""
    wanted: Sequence[Slice]
    """Of each source tensor."""
    first: int
    """The rank of the conversion to prefer for elements that several hold."""

    def contents(self) -> Contents:
        """See `RankSource.contents`: all of the tensors."""
        return self.ranks.pick(self.wanted, self.first)

    def pieces(self, patterns: Sequence[str] | None) -> ReshardedPieces:
        """See `RankSource.pieces`."""
        return _pieces(self.ranks, self.wanted, patterns)


def resharded_slices(
    folder: Store, manifest: Manifest, rank: int, num_ranks: int, *, is_proven: bool = False
) -> ReshardedSlices:
    """Read the source record, and plan.

    With `is_proven`, bytes are compared with the digests of their chunks when they are read.

    Raises:
        FormatError: the source record is damaged, or its rules do not cut the tensors as it says.
        PlanError: the rank does not exist, the model cannot be cut at this degree, or the record has no rules.
    """
    record = read_record(folder, manifest)
    plan = _plan(folder, record, num_ranks)
    wanted = [plan.cuts[cut].slices[rank] for cut in plan.cut_of]
    ranks = Ranks(folder, manifest, record, is_proven=is_proven)
    return ReshardedSlices(ranks, wanted, rank * manifest.num_ranks // num_ranks)


def whole_pieces(folder: Store, manifest: Manifest) -> ReshardedPieces:
    """The whole tensors.

    Raises:
        FormatError: the source record is damaged.
    """
    record = read_record(folder, manifest)
    return _pieces(Ranks(folder, manifest, record), [WHOLE] * len(record.names), None)


def _pieces(ranks: Ranks, wanted: Sequence[Slice], patterns: Sequence[str] | None) -> ReshardedPieces:
    record = ranks.record
    held = [t for t, part in enumerate(wanted) if part.is_held]
    held.sort(key=lambda t: (record.file_of[t], record.offsets[t]))
    if patterns is not None:
        held = [held[row] for row in select([record.names[t] for t in held], patterns)]
    columns = Columns(record.names, record.dtypes, record.shapes, wanted).rows(held)
    return ReshardedPieces(columns, held, ranks)


@dataclass(frozen=True, slots=True)
class ReshardedPieces:
    """Tensors assembled from the slices of all ranks."""

    columns: Columns
    tensors: Sequence[int]
    """Their positions in the record."""
    ranks: Ranks

    def axes(self, row: int) -> set[int]:
        """See `Pieces.axes`."""
        parts = (self.columns.parts[row], *self.ranks.record.cut(self.tensors[row]).distinct)
        return {axis for part in parts for axis in part.axes}

    def piece(self, row: int, wanted: Slice) -> Contents:
        """See `Pieces.piece`."""
        return self.ranks.pick_one(self.tensors[row], wanted)

    def metadata(self) -> Mapping[str, str] | None:
        """See `Pieces.metadata`."""
        where = f"{self.ranks.folder}: header of "
        return agreed(
            [parse_header(one.header, one.nbytes, where + one.name).metadata for one in self.ranks.record.files]
        )


@dataclass(frozen=True, slots=True)
class _Table:
    """A rank's table, and its rows by name."""

    table: RankTable
    rows: Mapping[str, int]


class Ranks:
    """The slices of all ranks, from which others are assembled. Reads each rank table on demand, once. Thread-safe."""

    def __init__(self, folder: Store, manifest: Manifest, record: SourceRecord, *, is_proven: bool = False) -> None:
        self.folder = folder
        self._manifest = manifest
        self.record = record
        # Numbered by the manifest, so that file numbers do not depend on the order in which threads open tables.
        files = files_of(folder, manifest, range(len(manifest.files)))
        self._files = tuple(map(proven, files)) if is_proven else files
        self._tables: dict[int, _Table] = {}
        self._lock = threading.Lock()
        remake_in_child(self)

    def after_fork(self) -> None:
        """See `forks.Forked`."""
        self._lock = threading.Lock()

    def pick(self, wanted: Sequence[Slice], first: int) -> Contents:
        """The wanted slice of each source tensor, in file order.

        Args:
            first: the rank to prefer for elements that several hold, then the ranks after it.

        Raises:
            FormatError: a rank table is damaged.
            PlanError: the ranks do not hold all of a tensor.
        """
        record = self.record
        found: dict[tuple[str, tuple[int, ...], int, Slice], tuple[Read, ...]] = {}
        rows = []
        for t, part in enumerate(wanted):
            if part.is_held:
                alike = record.dtypes[t], record.shapes[t], record.cut_of[t], part
                if alike not in found:
                    found[alike] = self._gather(t, part, first)
                rows.append((t, self._locate(t, found[alike])))
        rows.sort(key=lambda row: (row[1][0].file, row[1][0].transfer.source) if row[1] else (-1, 0))
        return self._contents(rows, [wanted[t].shape(record.shapes[t]) for t, _ in rows])

    def pick_one(self, t: int, wanted: Slice) -> Contents:
        """A slice of one source tensor.

        Raises:
            FormatError, PlanError: as `pick`.
        """
        reads = self._locate(t, self._gather(t, wanted, 0))
        return self._contents([(t, reads)], [wanted.shape(self.record.shapes[t])])

    def _gather(self, t: int, wanted: Slice, first: int) -> tuple[Read, ...]:
        """The reads of ranks' slices that fill a slice; their `file` is the rank. Tensors that are alike share them."""
        record, count = self.record, self._manifest.num_ranks
        order = ((first + i) % count for i in range(count))
        slices = record.cut(t).slices
        holders = [Holder(slices[rank], rank, 0) for rank in order if slices[rank].is_held]
        try:
            if self._manifest.whole is not None and self._is_best_of_whole(t, wanted):
                holders = [Holder(WHOLE, count, 0)]
            return gather(record.dtypes[t], record.shapes[t], wanted, holders)
        except PlanError as error:
            error.path, error.tensor = str(self.folder), record.names[t]
            raise

    def _is_best_of_whole(self, t: int, wanted: Slice) -> bool:
        """Whether a slice is contiguous in the whole tensor, or no rank has another part of it in files of its own."""
        dtype, shape = self.record.dtypes[t], self.record.shapes[t]
        apart = self.record.cut(t).tensor(dtype, shape).transfers
        return all(one.count == 1 for one in slice_transfers(dtype, shape, wanted)) or all(
            one.count == 1 for transfers in apart for one in transfers
        )

    def _locate(self, t: int, reads: tuple[Read, ...]) -> tuple[Read, ...]:
        """Reads of rank files, for reads as of `_gather`."""
        if not reads:  # Believe that there are no bytes only if a table says so, too.
            self._find(t, next((rank for rank, part in enumerate(self.record.cut(t).slices) if part.is_held), 0))
        return tuple(self._locate_one(t, read) for read in reads)

    def _locate_one(self, t: int, read: Read) -> Read:
        """A read of a rank file, for a read of a rank's slice whose `file` is the rank."""
        table, row = self._find(t, read.file)
        number = self._manifest.holders[read.file].files[table.files[row]]
        return Read(number, read.transfer.shifted(source=table.offsets[row]))

    def _find(self, t: int, rank: int) -> tuple[RankTable, int]:
        """A rank's table, and the row of a tensor, which is as the source record has it."""
        record, opened = self.record, self._open(rank)
        row = opened.rows.get(record.names[t], -1)
        slices = record.cut(t).slices
        part = slices[rank] if rank < len(slices) else WHOLE
        expected = (record.dtypes[t], record.shapes[t], part)
        table = opened.table
        if row < 0 or (table.dtypes[row], table.source_shapes[row], table.slices[row]) != expected:
            raise FormatError(
                "differs from the source record",
                path=f"{self.folder}: table of rank {rank}",
                tensor=record.names[t],
                code="mismatch",
            )
        return table, row

    def _open(self, rank: int) -> _Table:
        with self._lock:  # Each table is parsed once.
            if rank not in self._tables:
                rank_files(self.folder, self._manifest, rank)
                table = read_table(self.folder, self._manifest, rank)
                self._tables[rank] = _Table(table, {name: row for row, name in enumerate(table.names)})
            return self._tables[rank]

    def _contents(self, rows: Sequence[tuple[int, tuple[Read, ...]]], shapes: Sequence[tuple[int, ...]]) -> Contents:
        everything = Contents(
            files=self._files,
            names=[self.record.names[t] for t, _ in rows],
            dtypes=[self.record.dtypes[t] for t, _ in rows],
            shapes=shapes,
            reads=[reads for _, reads in rows],
            digests=None,
        )
        return everything.rows(range(len(rows)))


def _plan(folder: Store, record: SourceRecord, num_ranks: int) -> Plan:
    """Who holds what at another degree, by the rules in the record and the folder's config.json alone."""
    columns = zip(record.names, record.dtypes, record.shapes, strict=True)
    source = TensorList(str(folder), tuple(starmap(TensorInfo, columns)), read_config(folder))
    return recorded_plan(source, record, num_ranks)
