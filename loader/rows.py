"""Rows of a table, read by their number: for tables that stay on the drive, as a batch needs only some thousand rows.

Rows of a batch are sorted. Each block of the file that contains requested rows is read once, past the page cache, with
many reads at a time (`storage.local.batched`). A batch with rows that are in the page cache is read from there. Files
that cannot be read in this way are read in the ordinary way: those of a remote store, and those that are verified.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import starmap
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from relayout.checkpoint.converted import read_manifest, read_record
from relayout.core.arguments import at_least_one, compile_glob
from relayout.core.slices import num_bytes, positions
from relayout.core.tables import PlannedTensor, tables_of
from relayout.core.workers import each
from relayout.errors import PlanError, about, shown
from relayout.loader.backends.files import ReadableFiles, error_hints
from relayout.loader.requests import MAX_CONNECTIONS, MAX_THREADS
from relayout.loader.sources.checkpoint import LoadRequest
from relayout.loader.sources.rank import Pieces, RankSource, StoredFile, TensorColumns, cost_of
from relayout.loader.tensors import bytes_of, check_mode, torch_dtype, torch_shape
from relayout.storage.local.batched import BatchedReads
from relayout.storage.stores import Access, Closable
from relayout.storage.system import Buffer

if TYPE_CHECKING:
    import torch

    from relayout.cache.folder import CacheOption
    from relayout.checkpoint.trust import Trust

DEPTH = 64
"""Reads in flight."""
_MAX_ROWS = 2**13
"""Limit of the rows of a batch."""
_MAX_BATCH_NBYTES = 2**24
"""Limit of the bytes that are read for a batch, unless a single row is larger."""
_NUM_SAMPLED = 16
"""Number of sampled rows of a batch. If all of them are in the page cache, the batch is read through it."""

Numbers: TypeAlias = npt.NDArray[np.int64]
_Run: TypeAlias = tuple[int, int, int, int]
"""First row, number of rows, position of the file, absolute file offset."""


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowRuns:
    """The location of a table's stored rows: runs of consecutive rows, ascending by row and disjoint."""

    row_nbytes: int
    first: Numbers
    """The number in the table of each run's first row."""
    count: Numbers
    """Rows of each run."""
    file: Numbers
    """Position of each run's file in the files that are read."""
    offset: Numbers
    """Absolute file offset of each run's first row."""

    def find(self, rows: Numbers) -> tuple[Numbers, Numbers]:
        """Return the file and the file offset of each row.

        Raises:
            PlanError: a row is in no run.
        """
        if not len(self.first):
            raise PlanError("ids: the rank holds no row", code="option")
        run = np.searchsorted(self.first, rows, "right") - 1
        inside = rows - self.first[run]
        is_held = (run >= 0) & (inside < self.count[run])
        if not is_held.all():
            held = ", ".join(f"{first} to {end - 1}" for first, end in self.held)
            raise PlanError(f"ids: no row {int(rows[~is_held][0])}, expected {held}", code="option")
        return self.file[run], self.offset[run] + inside * self.row_nbytes

    @property
    def held(self) -> tuple[tuple[int, int], ...]:
        """The (first, end) of each range of rows that are stored."""
        starts = np.r_[True, self.first[1:] != self.first[:-1] + self.count[:-1]][: len(self.first)]
        ends = np.r_[starts[1:], True][: len(self.first)]
        return tuple(zip(self.first[starts].tolist(), (self.first + self.count)[ends].tolist(), strict=True))


def runs_of(pieces: Pieces, starts: Sequence[int], row_nbytes: int) -> RowRuns:
    """Return the runs of rows of the tensors that make up a table.

    Args:
        pieces: the tensors, or a rank's slices of them.
        starts: the number of rows of the table before each whole tensor.

    Raises:
        PlanError: rows are not stored in one piece, such as when columns are cut.
    """
    columns, found = pieces.columns, list[_Run]()
    for index, (name, part, start) in enumerate(zip(columns.names, columns.parts, starts, strict=True)):
        reads = pieces.reads(index, part)
        is_whole = part.axes in ((), (0,)) and all(read.transfer.count == 1 for read in reads)
        edges = [edge for read in reads for edge in (read.transfer.target, read.transfer.nbytes)]
        if not is_whole or (row_nbytes and any(edge % row_nbytes for edge in edges)):
            raise PlanError("its rows are not stored in one piece", tensor=name, code="unsupported")
        num_rows, *_ = columns.source_shapes[index]
        for first, count, position in positions(part.ranges_along(0) or (((0, num_rows),) if part.is_whole else ())):
            for read in reads:
                transfer = read.transfer
                row = transfer.target // row_nbytes
                low, high = max(row, position), min(row + transfer.nbytes // row_nbytes, position + count)
                if low < high:
                    offset = transfer.source + (low - row) * row_nbytes
                    found.append((start + first + low - position, high - low, read.file, offset))
    return RowRuns(row_nbytes, *np.array(_merged(sorted(found), row_nbytes), np.int64).reshape(-1, 4).T)


def _merged(runs: Sequence[_Run], row_nbytes: int) -> list[_Run]:
    """Join runs that follow each other in the table and in a file, and drop rows that an earlier run already has."""
    merged: list[_Run] = []
    for first, count, file, offset in runs:
        if merged:
            before, num, same, at = merged[-1]
            skip = max(0, before + num - first)
            first, count, offset = first + skip, count - skip, offset + skip * row_nbytes
            if count <= 0:
                continue
            if (before + num, same, at + num * row_nbytes) == (first, file, offset):
                merged[-1] = before, num + count, same, at
                continue
        merged.append((first, count, file, offset))
    return merged


@dataclass(frozen=True, slots=True)
class StoredRun:
    """Rows that are stored one after another in a file, without gaps."""

    file: StoredFile
    fd: int
    """A descriptor of the file. Its content was checked; it is open as long as the reader."""
    offset: int
    """Absolute file offset of the first row."""
    nbytes: int


class RowReader(Closable):
    """A table of a checkpoint, or the rows of it that a rank holds. Created by `open_rows`; thread-safe.

    Example:
        >>> import relayout
        >>> with relayout.open_rows("llama-3.1-8b-tp8", 3, "model.embed_tokens.weight") as table:
        ...     table.held, table.rows([400, 390, 400]).shape
        (((384, 512),), torch.Size([3, 128]))
    """

    def __init__(self, table: PlannedTensor, runs: RowRuns, files: tuple[StoredFile, ...], depth: int) -> None:
        self.name = table.name
        """The name of the tensor, or the pattern of the shards' names."""
        self.shape = tuple(table.shape)
        """Shape of the whole table, in elements."""
        needed, place = np.unique(runs.file, return_inverse=True)
        self._runs = runs = replace(runs, file=place.reshape(-1))
        self._files = files = tuple(files[file] for file in needed.tolist())
        self.dtype = torch_dtype(table.name, table.dtype)
        """The dtype, as torch's."""
        self._row_shape = torch_shape(table.name, table.dtype, table.shape)[1:]
        self._stack = ExitStack()
        self._reads: BatchedReads | None = None
        try:
            self._opened = self._stack.enter_context(ReadableFiles(files, Access.AUTO))
            if all(file.path is not None and not file.is_verified for file in files):
                self._cached = self._stack.enter_context(ReadableFiles(files, Access.BUFFERED))
                self._reads = self._stack.enter_context(BatchedReads(depth))
        except BaseException:
            self._stack.close()
            raise
        self._threads = MAX_CONNECTIONS if cost_of(files).is_remote else MAX_THREADS

    def __repr__(self) -> str:
        return f"<RowReader {self.name!r}: {self.dtype} {list(self.shape)}>"

    @property
    def held(self) -> tuple[tuple[int, int], ...]:
        """The rows that can be read, by their numbers in the whole table: (first, end) of each range."""
        return self._runs.held

    @property
    def run(self) -> StoredRun | None:
        """Location of the rows if they are one run, as for a rule with `table`; else None.

        Also None for a store without descriptors, and for a file that is verified.
        """
        runs = self._runs
        if len(runs.first) != 1 or self._reads is None:
            return None
        file, nbytes = int(runs.file[0]), int(runs.count[0]) * runs.row_nbytes
        return StoredRun(self._files[file], self._cached.fd(file), int(runs.offset[0]), nbytes)

    def rows(self, ids: Any, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Read rows; see `relayout.rows`."""
        import torch

        check_mode()
        wanted = _integers(ids)
        shape = (*wanted.shape, *self._row_shape)
        if out is None:
            out = torch.empty(shape, dtype=self.dtype)
        elif not isinstance(out, torch.Tensor):
            raise PlanError(f"out: {type(out).__name__}, expected a tensor", code="option")
        elif (tuple(out.shape), out.dtype, out.device.type) != (shape, self.dtype, "cpu") or not out.is_contiguous():
            found = f"{out.dtype} {list(out.shape)} on {out.device}"
            what = f"out: {found}, expected a contiguous tensor, {self.dtype} {list(shape)}, on the CPU"
            raise PlanError(what, tensor=self.name, code="option")
        if out.numel():
            target = bytes_of(out.detach()).numpy().reshape(-1, self._runs.row_nbytes)
            with error_hints():
                self._fill(target, wanted.reshape(-1))
        return out

    def _fill(self, target: npt.NDArray[np.uint8], ids: Numbers) -> None:
        order = np.argsort(ids, kind="stable")
        ordered = ids[order]
        files, offsets = self._runs.find(ordered)
        buffer = Buffer()
        for batch in self._batches(len(ids)):
            rows, which = np.unique(ordered[batch], return_index=True)
            found = np.empty((len(rows), self._runs.row_nbytes), np.uint8)
            for file in np.unique(files[batch]).tolist():
                of_file = files[batch][which] == file
                part = np.empty((int(of_file.sum()), self._runs.row_nbytes), np.uint8)
                self._read(file, offsets[batch][which][of_file], part, buffer)
                found[of_file] = part
            target[order[batch]] = found[np.searchsorted(rows, ordered[batch])]

    def _batches(self, count: int) -> Iterator[slice]:
        block = self._opened.alignment
        size = max(1, min(_MAX_ROWS, _MAX_BATCH_NBYTES // (self._runs.row_nbytes + 2 * block)))
        return (slice(start, start + size) for start in range(0, count, size))

    def _read(self, file: int, offsets: Numbers, into: npt.NDArray[np.uint8], buffer: Buffer) -> None:
        """Fill `into` with rows of a file, at ascending offsets."""
        left = self._copy_cached(file, offsets, into)
        if not len(left):
            return
        row, block = self._runs.row_nbytes, self._opened.alignment
        start, end = offsets[left] // block * block, -(-(offsets[left] + row) // block) * block
        is_new = np.r_[True, start[1:] > np.maximum.accumulate(end)[:-1]]
        group = np.cumsum(is_new) - 1
        starts = start[is_new]
        sizes = np.maximum.reduceat(end, np.flatnonzero(is_new)) - starts
        places = np.cumsum(sizes) - sizes
        view = buffer.reserve(int(sizes.sum()))
        self._read_blocks(file, starts, sizes, places, view)
        memory = np.frombuffer(view, np.uint8)
        rows = np.lib.stride_tricks.sliding_window_view(memory, row)
        into[left] = rows[places[group] + offsets[left] - starts[group]]

    def _copy_cached(self, file: int, offsets: Numbers, into: npt.NDArray[np.uint8]) -> Numbers:
        """Fill the rows if they are in the page cache, and return the positions of the rows that are left."""
        left, row = np.arange(len(offsets)), self._runs.row_nbytes
        if self._reads is None or not self._is_cached(file, offsets):
            return left
        with suppress(OSError):  # The error recurs in the ordinary read.
            sizes = np.full(len(offsets), row)
            left = left[self._reads.read(self._cached.fd(file), into.ctypes.data + left * row, offsets, sizes) != row]
        return left

    def _is_cached(self, file: int, offsets: Numbers) -> bool:
        """Return True if each row of a sample is in the page cache: checking all would take as long as reading them.

        (RWF_NOWAIT cannot be used to check: for missing pages, the kernel begins to read ahead.)
        """
        sample = offsets[:: -(-len(offsets) // _NUM_SAMPLED)].tolist()
        return all(self._cached.resident_nbytes(file, offset, self._runs.row_nbytes) for offset in sample)

    def _read_blocks(self, file: int, starts: Numbers, sizes: Numbers, places: Numbers, view: memoryview) -> None:
        """Read ranges of a file to their places in memory. Ranges that cannot be read together are read one by one."""
        nbytes = np.zeros(len(starts), np.int64)
        if self._reads is not None:
            address = np.frombuffer(view, np.uint8).ctypes.data
            with suppress(OSError):  # The read below raises it again.
                nbytes = self._reads.read(self._opened.fd(file), address + places, starts, sizes)
        wanted = np.minimum(sizes, self._files[file].nbytes - starts)
        others = np.flatnonzero(nbytes < wanted).tolist()
        each(partial(self._read_block, file, starts, sizes, places, view), others, self._threads)

    def _read_block(
        self, file: int, starts: Numbers, sizes: Numbers, places: Numbers, view: memoryview, which: int
    ) -> None:
        place = int(places[which])
        self._opened.read(file, int(starts[which]), view[place : place + int(sizes[which])])

    def close(self) -> None:
        """Close the files. A closed reader must not be used."""
        self._stack.close()


def _integers(ids: Any) -> Numbers:
    """Return row numbers as an array of int64."""
    array = np.asarray(ids.cpu() if hasattr(ids, "cpu") else ids)
    if not array.size:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu" or (array.dtype == np.uint64 and int(array.max()) >= 2**63):
        raise PlanError(f"ids: {shown(array.dtype.name)}, expected integers", code="option")
    return array.astype(np.int64)


def open_rows(
    path: str | os.PathLike[str],
    rank: int | None,
    name: str,
    *,
    depth: int = DEPTH,
    tp: int | None = None,
    cache: CacheOption = None,
    trust: Trust = None,
) -> RowReader:
    """Open a table of a checkpoint, to read rows of it repeatedly.

    Use it in a `with` statement, or close it. No row is read yet, and no memory is allocated for rows.

    Args:
        path, rank, name, depth, tp, cache, trust: as for `rows`.

    Raises:
        FormatError, OSError: as `rows`.
        PlanError: as `rows`, except for `ids` and `out`.

    Example:
        >>> import relayout
        >>> with relayout.open_rows("llama-3.1-8b-tp8", 3, "model.embed_tokens.weight") as table:
        ...     table.shape
        (1000, 128)
    """
    depth = at_least_one(depth, "depth")
    check_mode()
    with error_hints():
        request = LoadRequest(path=path, rank=rank, tp=tp, cache=cache, trust=trust)
        request.options()
        source = request.source()
        with about(path=str(source.store)):
            pieces = source.pieces(name)
            table, starts = _table_of(source, pieces.columns, name)
            runs = runs_of(pieces, starts, _row_nbytes(table))
        return RowReader(table, runs, pieces.files, depth)


def _table_of(source: RankSource, columns: TensorColumns, name: str) -> tuple[PlannedTensor, list[int]]:
    """Return the table as one tensor, and the number of rows of the table before each of the rank's tensors."""
    if isinstance(name, str) and "#" not in name and len(columns.names) == 1:
        return _Tensor(columns.names[0], columns.dtypes[0], tuple(columns.source_shapes[0])), [0]
    if not isinstance(name, str) or name.count("#") != 1:
        what = f"name: {shown(name)}, expected one tensor, or a pattern with one # for the shards of a table"
        raise PlanError(what, code="option")
    match, tensors = compile_glob(name).match, _all_tensors(source)
    tables = tables_of(tensors, lambda known: name if match(known) else None)
    if len(tables) != 1:
        raise PlanError(f"name: {name!r} matches {len(tables)} tables, expected one", code="option")
    [table] = tables
    first = tensors[table.members[0]]
    start_of = dict(zip((tensors[t].name for t in table.members), table.starts, strict=True))
    whole = _Tensor(name, first.dtype, (table.num_rows, *first.shape[1:]))
    return whole, [start_of[held] for held in columns.names]


def _all_tensors(source: RankSource) -> Sequence[PlannedTensor]:
    """Return all tensors of the checkpoint: a rank may hold only some shards of a table."""
    from relayout.loader.sources.reshard import UnconvertedRank

    if isinstance(source, UnconvertedRank):
        return source.checkpoint.tensors
    record = read_record(source.store, read_manifest(source.store))
    return list(starmap(_Tensor, zip(record.names, record.dtypes, map(tuple, record.shapes), strict=True)))


def _row_nbytes(table: PlannedTensor) -> int:
    nbytes = num_bytes(table.dtype, table.shape[1:]) if table.shape else None
    if nbytes is None:
        what = f"{table.dtype} {list(table.shape)} has no rows of whole bytes"
        raise PlanError(what, tensor=table.name, code="unsupported")
    return nbytes


def rows(
    path: str | os.PathLike[str],
    rank: int | None,
    name: str,
    ids: Any,
    *,
    out: torch.Tensor | None = None,
    depth: int = DEPTH,
    tp: int | None = None,
    cache: CacheOption = None,
    trust: Trust = None,
) -> torch.Tensor:
    """Read rows of a table of a checkpoint by their number, without loading the table.

    Rows that are in the page cache are read from there, all others by direct I/O, which leaves the page cache
    unchanged. In addition to the result, this takes at most 64 MiB, and 50 bytes for each id. To read repeatedly, use
    `open_rows`, which opens the files once.

    Args:
        path: a folder that `relayout convert` wrote, or a plain checkpoint. A `str` may also be the URL of a store.
        rank: from 0. None: whole tensors, from the files of all ranks.
        name: of a tensor with rows along dim 0. Or a pattern with one `#`, the number of a shard: the shards are one
            table, in the order of their numbers.
        ids: integers of any shape and order; duplicates are allowed. They are numbers in the whole table, as engines
            count them, not in the rank's part. Ids of rows that the rank does not hold are an error.
        out: a contiguous tensor in host memory to fill.
        depth: reads in flight; at most 16 for a remote store.
        tp, cache, trust: as for `load`. With a policy, every byte is verified.

    Returns:
        The rows, in the order of `ids`: of shape [*ids.shape, *shape of a row], in host memory.

    Raises:
        FormatError: a file is damaged, missing, or of another conversion.
        PlanError: the path, rank, tensor or row does not exist, or rows are not stored in one piece, such as when
            columns are cut; or as for `load`.
        OSError: a read failed.

    Example:
        >>> import relayout
        >>> relayout.rows("llama-3.1-8b-tp8", 3, "model.embed_tokens.weight", [400, 390, 400]).shape
        torch.Size([3, 128])
    """
    with open_rows(path, rank, name, depth=depth, tp=tp, cache=cache, trust=trust) as table:
        return table.rows(ids, out=out)
