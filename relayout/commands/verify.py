"""`verify`: checks a converted checkpoint, by itself or against its source."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain

from safetensors import SafetensorError, deserialize

from relayout.checkpoint.converted import check_file, read_manifest, read_record, read_table
from relayout.checkpoint.source import SourceCheckpoint, read_shard, read_source
from relayout.commands.coverage import missing_element
from relayout.conversion.copy import DEFAULT_MEMORY, DEFAULT_THREADS, NoSink, run_steps, share_memory
from relayout.conversion.layout import rows_of_files, stored_conversion
from relayout.conversion.side_files import read_side_file
from relayout.conversion.sidecar import digests_of_all
from relayout.conversion.steps import CopyPlan
from relayout.core.arguments import integer, size
from relayout.core.digests import digest_hex
from relayout.core.dtypes import num_bytes
from relayout.core.extents import Extent
from relayout.errors import FormatError, PlanError
from relayout.format.index import HUB_INDEX_NAME, MIN_ALIGNMENT, IndexedFile, Manifest, RankTable
from relayout.format.manifest import SOURCE_RECORD_NAME
from relayout.format.safetensors import TensorEntry, build_header
from relayout.format.source_record import SourceRecord
from relayout.progress import Progress, reporting
from relayout.storage.hashing import CHUNK_NBYTES as REHASH_NBYTES
from relayout.storage.hashing import HashedFile, hash_files
from relayout.storage.protocols import Access, Store
from relayout.storage.stores import find_store


@dataclass(frozen=True, slots=True)
class Difference:
    """One error that `verify` found."""

    file: str
    tensor: str | None
    start: int | None
    """Absolute file offset of the first affected byte; None if unknown."""
    end: int | None
    """Absolute file offset after the last affected byte."""
    what: str

    def __str__(self) -> str:
        place = "" if self.start is None else f", bytes {self.start} to {self.end}"
        tensor = "" if self.tensor is None else f": tensor {self.tensor!r}"
        return f"{self.file}{tensor}{place}: {self.what}"


@dataclass(slots=True)
class Report:
    """What `verify` found."""

    num_ranks: int
    num_tensors: int = 0
    """Number of slices over all ranks."""
    nbytes: int = 0
    """Bytes of rank files that were read and hashed."""
    compared_with_source: bool = False
    differences: list[Difference] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether there are no differences."""
        return not self.differences

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        return asdict(self) | {"ok": self.ok}

    def add(self, file: str, what: str, tensor: str | None = None, extent: Extent | None = None) -> None:
        """Add a difference."""
        start, end = (None, None) if extent is None else (extent.offset, extent.end)
        self.differences.append(Difference(file, tensor, start, end, what))


def verify(
    path: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    threads: int = DEFAULT_THREADS,
    memory: int | str = DEFAULT_MEMORY,
    progress: Progress = None,
) -> Report:
    """Check a converted checkpoint: its structure, its sidecar files, and the digest of every slice.

    Args:
        path: the converted folder.
        source: the source checkpoint; every slice is cut from it again and compared.
        threads: threads that read and hash.
        memory: bytes that these threads may use, or text such as "512MiB".
        progress: True for a bar on stderr, or a function that is called with (bytes done, total bytes).

    Returns:
        The differences found; `ok` if there are none.

    Raises:
        FormatError: `path` has no valid manifest, or the source is damaged.
        PlanError: `source` is not a checkpoint.
        OSError: reading failed.
    """
    threads, memory = integer(threads, "threads"), size(memory, "memory")
    shared = share_memory(threads, memory)
    folder = find_store(path)
    manifest = read_manifest(folder)
    report = Report(manifest.num_ranks)
    tables = [_check_rank(folder, manifest, rank, report) for rank in range(manifest.num_ranks)]
    record = _check_record(folder, manifest, tables, report)
    _check_other_files(folder, manifest, report)
    original = None if source is None else read_source(find_store(source))
    usable = {rank: table for rank, table in enumerate(tables) if table is not None}
    hash_nbytes = sum(file.nbytes for rank in usable for file in manifest.rank_files(rank))
    total = hash_nbytes + (0 if original is None else original.nbytes)
    with reporting(progress, "verifying", total) as report_nbytes:

        def after(nbytes_before: int) -> Callable[[int], None] | None:
            return None if report_nbytes is None else lambda done: report_nbytes(nbytes_before + done)

        num_readers = max(1, min(threads, memory // REHASH_NBYTES))
        for rank, table in usable.items():
            _check_digests(folder, manifest.rank_files(rank), table, report, num_readers, after(report.nbytes))
        # Skip the comparison if errors were found: the layout cannot be trusted.
        if original is not None and record is not None and report.ok:
            _compare(folder, manifest, list(usable.values()), record, original, report, *shared, after(hash_nbytes))
    return report


def _check_rank(folder: Store, manifest: Manifest, rank: int, report: Report) -> RankTable | None:
    """Check one rank's table against its files' headers. Return the table if it and all files are usable."""
    entry = manifest.ranks[rank]
    try:
        table = read_table(folder, manifest, rank)
    except FormatError as error:
        report.add(entry.table, str(error))
        return None
    rows = rows_of_files(table, len(entry.files))
    checked = [_check_header(folder, manifest, *one, table, report) for one in zip(entry.files, rows, strict=True)]
    report.num_tensors += len(table.names)
    return table if all(checked) else None


def _check_header(
    folder: Store, manifest: Manifest, number: int, rows: list[int], table: RankTable, report: Report
) -> bool:
    """Check a file's length and header against its rows of the table. Return False if it cannot be read."""
    file = manifest.files[number]
    try:
        where = folder.where(file.name)
        shard, header = read_shard(folder, file.name)
        if shard.nbytes != file.nbytes:
            raise FormatError(f"{shard.nbytes} bytes long, expected {file.nbytes}", path=where, code="mismatch")
        if digest_hex(shard.header) != file.header_digest:
            report.add(file.name, "header differs from the one that was written", extent=Extent(0, file.data_start))
        _check_by_reference_reader(shard.header, header.data_nbytes, where)
    except FormatError as error:
        report.add(file.name, str(error))
        return False
    stored = [(header.data_start + tensor.offset, tensor.name, tensor.dtype, tensor.shape) for tensor in header.tensors]
    dtypes, shapes = table.dtypes, table.shapes
    indexed = [(table.offsets[row], table.names[row], dtypes[row], shapes[row]) for row in rows]
    # Sorted by offset and name: a zero-size tensor shares its offset with the next.
    for found, expected in zip(sorted(stored), sorted(indexed), strict=False):
        if found != expected:
            report.add(file.name, f"header has {found}, the rank table {expected}", found[1])
    if len(stored) != len(indexed):
        report.add(file.name, f"{len(stored)} tensors, the rank table has {len(indexed)}")
    try:
        check_file(folder, manifest, number)
    except (FormatError, OSError) as error:
        report.add(file.name, str(error))
    return True


def _check_by_reference_reader(header: bytes, data_nbytes: int, where: str) -> None:
    """Parse a header with the safetensors library. It gets only the header: it would map a whole file into memory.

    Raises:
        FormatError: the library reports an error other than the missing data section.
    """
    complaint = _complaint(header)
    one_byte = build_header([TensorEntry("x", "U8", (1,), 0, 1)], {}, MIN_ALIGNMENT)
    if complaint != (_complaint(one_byte) if data_nbytes else None):
        raise FormatError(f"the reference reader of safetensors: {complaint}", path=where)


def _complaint(header: bytes) -> str | None:
    try:
        deserialize(header)  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        return str(error)
    return None


def _check_other_files(folder: Store, manifest: Manifest, report: Report) -> None:
    """Check the index for stock loaders, and that there is no other .safetensors file that a loader would read."""
    known = {file.name for file in manifest.files}
    for name in sorted(entry.name for entry in folder.walk()):
        if name.endswith(".safetensors") and "/" not in name and name not in known:
            report.add(name, "is not part of this conversion")
    if manifest.hub_index_digest is not None:
        what = "differs from the one that was written"
        _check_copy(folder, HUB_INDEX_NAME, None, manifest.hub_index_digest, what, report)


def _check_copy(folder: Store, name: str, nbytes: int | None, digest: str, what: str, report: Report) -> None:
    """Check a file's digest, and its length if it is not None; report `what` if they differ."""
    try:
        found = read_side_file(folder, name)
    except FormatError as error:
        report.add(name, str(error))
        return
    if found.digest != digest or nbytes not in (None, found.nbytes):
        report.add(name, what)


def _check_record(
    folder: Store, manifest: Manifest, tables: list[RankTable | None], report: Report
) -> SourceRecord | None:
    """Check the source record, the side files, and that the slices of all ranks are those of the record."""
    try:
        record = read_record(folder, manifest)
    except FormatError as error:
        report.add(SOURCE_RECORD_NAME, str(error))
        return None
    for side in record.side_files:
        what = "differs from the file that was copied"
        _check_copy(folder, side.name, side.nbytes, side.digest, what, report)
    _check_cuts(record, report)
    for rank, table in enumerate(tables):
        if table is not None:
            _check_slices(manifest.ranks[rank].table, rank, table, record, report)
    return record


def _check_cuts(record: SourceRecord, report: Report) -> None:
    """Check that the ranks together hold every element of each tensor."""
    first = dict(zip(zip(record.cut_of, record.shapes, strict=True), record.names, strict=True))
    for (cut, shape), name in first.items():
        slices = [part for part in record.cuts[cut].distinct if part.is_held]
        if not slices:
            report.add(SOURCE_RECORD_NAME, "no rank holds the tensor", name)
        elif not any(part.is_whole for part in slices):
            try:
                element = missing_element(shape, slices)
            except PlanError as error:
                report.add(SOURCE_RECORD_NAME, str(error), name)
                continue
            if element is not None:
                report.add(SOURCE_RECORD_NAME, f"no rank holds element {list(element)} of {list(shape)}", name)


def _check_slices(name: str, rank: int, table: RankTable, record: SourceRecord, report: Report) -> None:
    rows = {tensor: row for row, tensor in enumerate(table.names)}
    kinds, kind_of = table.kinds, table.kind_of
    for t, tensor in enumerate(record.names):
        row = rows.pop(tensor, None)
        part = record.cut(t).slices[rank]
        if row is None:
            if part.is_held:
                report.add(name, "is missing", tensor)
            continue
        expected = (record.dtypes[t], record.shapes[t], part, part.shape(record.shapes[t]))
        kind = kinds[kind_of[row]]
        if (kind.dtype, kind.source_shape, kind.part, kind.shape) != expected:
            report.add(name, f"is not the slice in the source record: {expected}", tensor)
        if part.is_whole and table.digests[row] != record.digests[t]:
            report.add(name, "its digest differs from the source tensor's", tensor)
    for tensor in rows:
        report.add(name, "is not in the source record", tensor)


def _check_digests(
    folder: Store,
    files: list[IndexedFile],
    table: RankTable,
    report: Report,
    threads: int,
    on_progress: Callable[[int], None] | None,
) -> None:
    """Read a rank's files once, with several requests in flight, and compare the digest of each slice."""
    rows: list[list[tuple[Extent, str, str]]] = [[] for _ in files]
    for name, dtype, shape, number, offset, digest in zip(
        table.names, table.dtypes, table.shapes, table.files, table.offsets, table.digests, strict=True
    ):
        rows[number].append((Extent(offset, num_bytes(dtype, shape) or 0), name, digest))
    to_hash = [
        HashedFile(
            partial(folder.open, file.name, file.nbytes, access=Access.ONCE),
            [extent for extent, _, _ in sorted(column)],
        )
        for file, column in zip(files, rows, strict=True)
    ]
    hashed = hash_files(to_hash, threads, on_progress)
    for file, column, digests in zip(files, rows, hashed, strict=True):
        for (extent, name, expected), found in zip(sorted(column), digests, strict=True):
            if found != expected:
                report.add(file.name, "digest differs: the stored bytes are damaged", name, extent)
    report.nbytes += sum(file.nbytes for file in files)


def _compare(
    folder: Store,
    manifest: Manifest,
    tables: list[RankTable],
    record: SourceRecord,
    source: SourceCheckpoint,
    report: Report,
    threads: int,
    chunk_nbytes: int,
    on_progress: Callable[[int], None] | None,
) -> None:
    """Cut the source again by the conversion's copy plan, and compare the digest of each slice."""
    found = [(tensor.name, tensor.dtype, tensor.shape) for tensor in source.tensors]
    expected = list(zip(record.names, record.dtypes, record.shapes, strict=True))
    if found != expected:
        different = sorted({name for name, *_ in set(found) ^ set(expected)}) or ["the order"]
        report.add(str(source.root), f"is not the source: {len(different)} tensors differ, such as {different[0]!r}")
        return
    conversion = stored_conversion(folder, manifest, tables, record, source)
    plan = CopyPlan(conversion, chunk_nbytes=chunk_nbytes)
    steps = chain.from_iterable(map(plan.steps, range(len(conversion.layout.units))))
    passed = run_steps(conversion, steps, NoSink(), threads=threads, on_progress=on_progress)
    digests = digests_of_all(conversion, passed)
    rows = [{name: row for row, name in enumerate(table.names)} for table in tables]
    for t, name in enumerate(record.names):
        of_tensor = digests[t]
        held = record.cut(t).which
        for rank, table in enumerate(tables):
            row = rows[rank].get(name)
            if row is not None and table.digests[row] != of_tensor.slices[held[rank]]:
                file = manifest.rank_files(rank)[table.files[row]]
                extent = Extent(table.offsets[row], conversion.cut[t].rank_nbytes(rank))
                report.add(file.name, "differs from the source", name, extent)
        if of_tensor.source != record.digests[t]:
            report.add(str(source.root), "has changed in the source since the conversion", name)
    for side in record.side_files:
        what = "has changed in the source since the conversion"
        _check_copy(source.folder, side.name, side.nbytes, side.digest, what, report)
    report.compared_with_source = True
