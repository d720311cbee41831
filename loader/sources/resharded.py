"""Loads a converted checkpoint at another degree than that of the conversion. Imports the planner."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relayout.checkpoint.config import read_config
from relayout.checkpoint.converted import check_rank, read_record, read_table
from relayout.checkpoint.source import SourceCheckpoint, SourceTensor
from relayout.core.dtypes import num_bytes
from relayout.core.extents import Extent
from relayout.core.forks import remake_in_child
from relayout.core.slices import WHOLE, Range, Slice
from relayout.errors import FormatError, PlanError
from relayout.format.index import Manifest, RankTable, Read
from relayout.format.safetensors import parse_header
from relayout.format.source_record import SourceRecord
from relayout.loader.sources.contents import Contents, files_of, rank_files, select
from relayout.loader.sources.pieces import Columns, agreed
from relayout.loader.sources.reshard import Holder, gather
from relayout.plans.planner import TRANSFORMERS, Plan, plan_for
from relayout.storage.protocols import Store


@dataclass(frozen=True, slots=True)
class ReshardedSlices:
    """What a rank would hold if the source were converted at another degree by the same rules."""

    folder: Store
    manifest: Manifest
    record: SourceRecord
    wanted: Sequence[Slice]
    """Of each source tensor."""
    first: int
    """The rank of the conversion to prefer for elements that several hold."""

    def contents(self) -> Contents:
        """See `RankSource.contents`: all of the tensors."""
        return Ranks(self.folder, self.manifest, self.record).pick(self.wanted, self.first)

    def pieces(self, patterns: Sequence[str] | None) -> ReshardedPieces:
        """See `RankSource.pieces`."""
        return _pieces(self.folder, self.manifest, self.record, self.wanted, patterns)


def resharded_slices(folder: Store, manifest: Manifest, rank: int, num_ranks: int) -> ReshardedSlices:
    """Read the source record, and plan.

    Raises:
        FormatError: the source record is damaged.
        PlanError: the rank does not exist, the model cannot be cut at this degree, or this relayout has other rules for
            the model than those of the conversion.
    """
    check_rank(rank, num_ranks)
    record = read_record(folder, manifest)
    plan = _plan(folder, manifest, record, num_ranks)
    wanted = [plan.cuts[cut].slices[rank] for cut in plan.cut_of]
    return ReshardedSlices(folder, manifest, record, wanted, rank * manifest.num_ranks // num_ranks)


def whole_pieces(folder: Store, manifest: Manifest) -> ReshardedPieces:
    """The whole tensors.

    Raises:
        FormatError: the source record is damaged.
    """
    record = read_record(folder, manifest)
    return _pieces(folder, manifest, record, [WHOLE] * len(record.names), None)


def _pieces(
    folder: Store, manifest: Manifest, record: SourceRecord, wanted: Sequence[Slice], patterns: Sequence[str] | None
) -> ReshardedPieces:
    held = [t for t, part in enumerate(wanted) if part.is_held]
    held.sort(key=lambda t: (record.file_of[t], record.offsets[t]))
    if patterns is not None:
        held = [held[row] for row in select([record.names[t] for t in held], patterns)]
    columns = Columns(record.names, record.dtypes, record.shapes, wanted).rows(held)
    return ReshardedPieces(columns, folder, record, held, Ranks(folder, manifest, record))


@dataclass(frozen=True, slots=True)
class ReshardedPieces:
    """Tensors assembled from the slices of all ranks."""

    columns: Columns
    folder: Store
    record: SourceRecord
    tensors: Sequence[int]
    """Their positions in the record."""
    ranks: Ranks

    def axis(self, row: int) -> int:
        """See `Pieces.axis`."""
        cuts = (self.columns.parts[row], *self.record.cut(self.tensors[row]).distinct)
        return next((part.axis for part in cuts if part.ranges), 0)

    def piece(self, row: int, wanted: Slice, rows: Range | None, shape: tuple[int, ...]) -> Contents:
        """See `Pieces.piece`."""
        return self.ranks.pick_one(self.tensors[row], wanted, rows, shape)

    def metadata(self) -> Mapping[str, str] | None:
        """See `Pieces.metadata`."""
        where = f"{self.folder}: header of "
        return agreed([parse_header(one.header, one.nbytes, where + one.name).metadata for one in self.record.files])


@dataclass(frozen=True, slots=True)
class _Table:
    """A rank's table, and its rows by name."""

    table: RankTable
    rows: Mapping[str, int]


class Ranks:
    """The slices of all ranks, from which others are assembled. Reads each rank table on demand, once. Thread-safe."""

    def __init__(self, folder: Store, manifest: Manifest, record: SourceRecord) -> None:
        self._folder = folder
        self._manifest = manifest
        self._record = record
        # Numbered by the manifest, so that file numbers do not depend on the order in which threads open tables.
        self._files = files_of(folder, manifest, range(len(manifest.files)))
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
        record = self._record
        rows = [(t, self._reads(t, part, first, None)) for t, part in enumerate(wanted) if part.is_held]
        rows.sort(key=lambda row: (row[1][0].file, row[1][0].transfer.source) if row[1] else (-1, 0))
        return self._contents(rows, [wanted[t].shape(record.shapes[t]) for t, _ in rows])

    def pick_one(self, t: int, wanted: Slice, rows: Range | None, shape: tuple[int, ...]) -> Contents:
        """A piece of one source tensor: a slice, restricted to some rows (see `gather`).

        Args:
            shape: of the piece.

        Raises:
            FormatError, PlanError: as `pick`.
        """
        return self._contents([(t, self._reads(t, wanted, 0, rows))], [shape])

    def _reads(self, t: int, wanted: Slice, first: int, rows: Range | None) -> tuple[Read, ...]:
        record, count = self._record, self._manifest.num_ranks
        order = ((first + i) % count for i in range(count))
        slices = record.cut(t).slices
        holders = [Holder(slices[rank], rank, 0) for rank in order if slices[rank].is_held]
        try:
            reads = gather(record.dtypes[t], record.shapes[t], wanted, holders, rows)
        except PlanError as error:
            error.path, error.tensor = str(self._folder), record.names[t]
            raise
        return tuple(self._locate(t, read) for read in reads)

    def _locate(self, t: int, read: Read) -> Read:
        """A read of a rank file, for a read of a rank's slice whose `file` is the rank."""
        record, rank = self._record, read.file
        opened = self._open(rank)
        row = opened.rows.get(record.names[t], -1)
        expected = (record.dtypes[t], record.shapes[t], record.cut(t).slices[rank])
        table = opened.table
        if row < 0 or (table.dtypes[row], table.source_shapes[row], table.slices[row]) != expected:
            raise FormatError(
                "differs from the source record",
                path=f"{self._folder}: table of rank {rank}",
                tensor=record.names[t],
                code="mismatch",
            )
        number = self._manifest.ranks[rank].files[table.files[row]]
        return Read(number, read.transfer.shifted(source=table.offsets[row]))

    def _open(self, rank: int) -> _Table:
        with self._lock:  # Each table is parsed once.
            if rank not in self._tables:
                rank_files(self._folder, self._manifest, rank)
                table = read_table(self._folder, self._manifest, rank)
                self._tables[rank] = _Table(table, {name: row for row, name in enumerate(table.names)})
            return self._tables[rank]

    def _contents(self, rows: Sequence[tuple[int, tuple[Read, ...]]], shapes: Sequence[tuple[int, ...]]) -> Contents:
        everything = Contents(
            files=self._files,
            names=[self._record.names[t] for t, _ in rows],
            dtypes=[self._record.dtypes[t] for t, _ in rows],
            shapes=shapes,
            reads=[reads for _, reads in rows],
            digests=None,
        )
        return everything.rows(range(len(rows)))


def _plan(folder: Store, manifest: Manifest, record: SourceRecord, num_ranks: int) -> Plan:
    tensors = tuple(
        SourceTensor(name, dtype, shape, file, Extent(offset, num_bytes(dtype, shape) or 0))
        for name, dtype, shape, file, offset in zip(
            record.names, record.dtypes, record.shapes, record.file_of, record.offsets, strict=True
        )
    )
    source = SourceCheckpoint(folder, (), tensors, {}, read_config(folder), None, (), ())
    if manifest.num_ranks == 1:
        return plan_for(source, num_ranks)

    def plan(degree: int) -> Plan:
        rules = TRANSFORMERS if manifest.plan.startswith(TRANSFORMERS) else None
        return plan_for(source, degree, rules, expert_parallel=manifest.expert_parallel, unmatched="replicate")

    if num_ranks > 1 and not _are_alike(plan(manifest.num_ranks), record):
        raise PlanError(
            f"was cut by the plan {manifest.plan!r} with other rules than this relayout has for the model:"
            f" it can only be loaded at its own degree, {manifest.num_ranks}",
            path=str(folder),
            code="no_plan",
        )
    return plan(num_ranks)


def _are_alike(plan: Plan, record: SourceRecord) -> bool:
    """Whether a plan cuts every tensor as the record says."""
    pairs = set(zip(plan.cut_of, record.cut_of, strict=True))
    return all(plan.cuts[one] == record.cuts[other] for one, other in pairs)
