"""Loads a converted checkpoint at another degree than that of the conversion. Imports the planner."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap

from relayout.checkpoint.converted import check_present, read_record, read_table
from relayout.checkpoint.folder import find_config
from relayout.checkpoint.source import agreed_metadata
from relayout.core.arguments import ranks_text
from relayout.core.slices import WHOLE, Slice, slice_transfers
from relayout.core.workers import remake_in_child
from relayout.errors import FormatError, PlanError
from relayout.format.index import Manifest, RankTable, Read
from relayout.format.safetensors import parse_header
from relayout.format.source_record import SourceRecord
from relayout.loader.sources.base import RankSource
from relayout.loader.sources.columns import Names, TensorColumns, select
from relayout.loader.sources.reshard import Holder, gather
from relayout.loader.sources.stored import files_of, rank_files
from relayout.plans.plan import TensorInfo, TensorList
from relayout.plans.planner import recorded_plan
from relayout.storage.protocols import Store


@dataclass(frozen=True, slots=True)
class ReshardedRank(RankSource):
    """One rank of a converted folder at another degree: what it would hold if the source were converted at that one."""

    ranks: Ranks
    """The slices of all ranks."""
    wanted: Sequence[Slice]
    """Of each source tensor."""

    def contents(self, names: Names = None) -> TensorColumns:
        # Of the slices that have an element, prefer that of the rank at the same place.
        first = self.rank * self.ranks.manifest.num_ranks // self.num_ranks
        return self.ranks.assemble(self.wanted, first).matching(names)

    def pieces(self, names: Names = None) -> ReshardedPieces:
        return _pieces(self.ranks, self.wanted, names)


def resharded_rank(store: Store, manifest: Manifest, rank: int, num_ranks: int) -> ReshardedRank:
    """Read the source record and the folder's config.json, and plan by the rules in the record alone.

    Raises:
        FormatError: the source record is damaged, or its rules do not cut the tensors as it says.
        PlanError: the rank does not exist, the model cannot be cut at this degree, or the record has no rules.
    """
    record = read_record(store, manifest)
    columns = zip(record.names, record.dtypes, record.shapes, strict=True)
    source = TensorList(str(store), tuple(starmap(TensorInfo, columns)), find_config(store).content)
    plan = recorded_plan(source, record, num_ranks)
    wanted = [plan.cuts[cut].slices[rank] for cut in plan.cut_of]
    return ReshardedRank(store, rank, num_ranks, Ranks(store, manifest, record), wanted)


def whole_pieces(store: Store, manifest: Manifest) -> ReshardedPieces:
    """The whole tensors.

    Raises:
        FormatError: the source record is damaged.
        PlanError: the folder lacks ranks.
    """
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
    """Their positions in the record."""
    ranks: Ranks

    def axes(self, row: int) -> set[int]:
        parts = (self.columns.parts[row], *self.ranks.record.cut(self.tensors[row]).distinct)
        return {axis for part in parts for axis in part.axes}

    def piece(self, row: int, wanted: Slice) -> TensorColumns:
        return self.ranks.assemble_one(self.tensors[row], wanted)

    def metadata(self) -> Mapping[str, str]:
        where = f"{self.ranks.store}: header of "
        files = self.ranks.record.files
        return agreed_metadata([parse_header(file.header, file.nbytes, where + file.name).metadata for file in files])


class Ranks:
    """The slices of all ranks, from which others are assembled. Reads each rank table on demand, once. Thread-safe."""

    def __init__(self, store: Store, manifest: Manifest, record: SourceRecord) -> None:
        self.store = store
        self.manifest = manifest
        self.record = record
        # In the order of the manifest, so that positions do not depend on the order in which threads open tables.
        self._files = files_of(store, manifest, range(len(manifest.files)))
        self._tables: dict[int, tuple[RankTable, Mapping[str, int]]] = {}
        self._lock = threading.Lock()
        remake_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def assemble(self, wanted: Sequence[Slice], first: int) -> TensorColumns:
        """The wanted slice of each source tensor, in file order.

        Args:
            first: the rank to prefer for elements that several hold, then the ranks after it.

        Raises:
            FormatError: a rank table is damaged.
            PlanError: the ranks do not hold all of a tensor.
        """
        record = self.record
        reads_of: dict[tuple[str, tuple[int, ...], int, Slice], tuple[Read, ...]] = {}
        rows = []
        for t, part in enumerate(wanted):
            if part.is_held:
                alike = record.dtypes[t], record.shapes[t], record.cut_of[t], part
                if alike not in reads_of:
                    reads_of[alike] = self._gather(t, part, first)
                rows.append((t, self._locate(t, reads_of[alike])))
        rows.sort(key=lambda row: (row[1][0].file, row[1][0].transfer.source) if row[1] else (-1, 0))
        return self._columns(rows, [wanted[t].shape(record.shapes[t]) for t, _ in rows])

    def assemble_one(self, t: int, wanted: Slice) -> TensorColumns:
        """A slice of one source tensor.

        Raises:
            FormatError, PlanError: as `assemble`.
        """
        reads = self._locate(t, self._gather(t, wanted, 0))
        return self._columns([(t, reads)], [wanted.shape(self.record.shapes[t])])

    def _gather(self, t: int, wanted: Slice, first: int) -> tuple[Read, ...]:
        """The reads of ranks' slices that fill a slice; their `file` is the rank. Tensors that are alike share them."""
        record, count = self.record, self.manifest.num_ranks
        order = ((first + i) % count for i in range(count))
        slices = record.cut(t).slices
        holders = [Holder(slices[rank], rank, 0) for rank in order if slices[rank].is_held and self._has(rank)]
        try:
            if self._has(count) and (not self.manifest.has_all or self._is_best_of_whole(t, wanted)):
                holders = [Holder(WHOLE, count, 0)]
            return gather(record.dtypes[t], record.shapes[t], wanted, holders)
        except PlanError as error:
            error.amend(path=str(self.store), tensor=record.names[t])
            if not self.manifest.has_all:
                has = f"of {count} ranks the folder has only {ranks_text(self.manifest.present)}"
                error.amend(what=f"{error.what}: {has}", code="missing")
            raise

    def _has(self, holder: int) -> bool:
        """Whether the folder has a rank, or the whole tensors."""
        return holder in self.manifest.holders

    def _is_best_of_whole(self, t: int, wanted: Slice) -> bool:
        """Whether a slice is contiguous in the whole tensor, or no rank has another part of it in files of its own."""
        dtype, shape = self.record.dtypes[t], self.record.shapes[t]
        apart = self.record.cut(t).tensor(dtype, shape).transfers
        return all(transfer.count == 1 for transfer in slice_transfers(dtype, shape, wanted)) or all(
            transfer.count == 1 for transfers in apart for transfer in transfers
        )

    def _locate(self, t: int, reads: tuple[Read, ...]) -> tuple[Read, ...]:
        """Reads of rank files, for reads as of `_gather`."""
        if not reads:  # Believe that there are no bytes only if a table says so, too.
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
        """A rank's table, and the row of a tensor, which is as the source record has it."""
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
        """A rank's table, and its rows by name."""
        with self._lock:  # Each table is parsed once.
            if rank not in self._tables:
                rank_files(self.store, self.manifest, rank)
                table = read_table(self.store, self.manifest, rank)
                self._tables[rank] = table, {name: row for row, name in enumerate(table.names)}
            return self._tables[rank]

    def _columns(
        self, rows: Sequence[tuple[int, tuple[Read, ...]]], shapes: Sequence[tuple[int, ...]]
    ) -> TensorColumns:
        columns = TensorColumns(
            names=[self.record.names[t] for t, _ in rows],
            dtypes=[self.record.dtypes[t] for t, _ in rows],
            shapes=shapes,
            files=self._files,
            reads=[reads for _, reads in rows],
        )
        return columns.rows(range(len(rows)))  # Of the files, only those that are needed.
