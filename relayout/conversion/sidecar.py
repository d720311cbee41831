"""Writes the sidecar, all files and bytes besides tensors: side files, source record, headers, rank tables, manifest.

`stored_conversion` is the inverse: it returns the conversion that a folder describes; `recorded_source` returns its
source.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from relayout.checkpoint.converted import digests_of_small, read_packed_digests, read_small
from relayout.checkpoint.source import MAX_INDEX_NBYTES, SourceCheckpoint, SourceFile, SourceTensor, agreed_metadata
from relayout.conversion.copy_plan import TensorDigests, WrittenDigests
from relayout.conversion.layout import (
    Conversion,
    HeaderBuilder,
    Layout,
    RankFile,
    by_holder,
    cut_tensors,
    is_stored,
)
from relayout.core.digests import EMPTY_DIGEST, Hash, blake3_hex, new_blake3, pack_digests
from relayout.core.extents import Extent, Transfer
from relayout.core.slices import BITS, WHOLE, Cut, num_bytes
from relayout.errors import FormatError, readable
from relayout.format.index import (
    CHUNKS_NAME,
    DIGESTED_NBYTES,
    DIGESTS_NAME,
    HUB_INDEX_NAME,
    MANIFEST_NAME,
    RANKS,
    SLICES_ONLY,
    VERSION,
    WHOLE_TENSORS,
    IndexedFile,
    Manifest,
    RankEntry,
    RankTable,
    Read,
    TensorKind,
    missing_shard_name,
    place,
    plan_arena,
)
from relayout.format.manifest import (
    MAX_RECORD_NBYTES,
    SOURCE_RECORD_NAME,
    WHOLE_TABLE_NAME,
    compress,
    dump_manifest,
    table_name,
)
from relayout.format.rank_table import dump_table
from relayout.format.safetensors import parse_header
from relayout.format.source_record import (
    FileDigest,
    RecordedFile,
    RecordedPlan,
    SideFile,
    SourceRecord,
    conversion_digest,
    dump_record,
)
from relayout.plans.family import dump_rules
from relayout.plans.plan import Plan
from relayout.publish.output import Output
from relayout.storage.stores import Access, FileStat, Modes, Store, unversioned


class HeaderWriter:
    """Completes files by writing their headers, unit by unit."""

    def __init__(self, output: Output, conversion: Conversion) -> None:
        self._output = output
        self._conversion = conversion
        self._headers = HeaderBuilder(conversion.source, conversion.cut, conversion.options)
        self._files: dict[int, IndexedFile] = {}

    def write(self, unit: int, written: WrittenDigests) -> None:
        """Write the headers of a unit's files; `written` must have all tensors and files of the unit."""
        for file, header in self.headers(unit, written):
            self._output.head(file.name, header, file.nbytes)

    def headers(self, unit: int, written: WrittenDigests) -> Iterator[tuple[RankFile, bytes]]:
        """Yield each file of a unit and its header, and count the file as complete."""
        layout = self._conversion.layout
        digests = {t: _digests_of(self._conversion, t, written.tensors).slices for t in layout.units[unit]}
        for index in layout.files_of_unit[unit]:
            file = layout.files[index]
            tensors_digest = self._headers.tensors_digest(file, digests)
            header = self._headers.build(file, tensors_digest)
            assert len(header) == file.data_start
            yield file, header
            proofs = map(blake3_hex, (header, written.chunks[index]))
            indexed = IndexedFile(file.name, file.nbytes, file.data_start, tensors_digest, *proofs)
            self._files[index] = indexed

    @property
    def files(self) -> tuple[IndexedFile, ...]:
        """All files; available once those of every unit are complete."""
        return tuple(self._files[index] for index in range(len(self._conversion.layout.files)))


def write_sidecar(
    output: Output,
    conversion: Conversion,
    written: WrittenDigests,
    files: Sequence[IndexedFile],
    verified: Sequence[FileDigest] = (),
) -> None:
    """Write everything but the files with the tensors, the manifest last.

    Args:
        written: all tensors with bytes, and all files.
        files: the same files, with their headers.
        verified: the digests with which shards of the source were compared.
    """
    source, options = conversion.source, conversion.options
    side_files = [copy_side_file(source.folder, output, name) for name in source.side_files]
    digests = digests_of_all(conversion, written.tensors)
    record = replace(source_record(conversion, side_files), verified=tuple(verified))
    of_source = [tensor.source for tensor in digests]
    conversion_id = conversion_digest(record, of_source)
    plan_name = "none" if record.plan is None else record.plan.full_name
    stored_record = compress(dump_record(record), MAX_RECORD_NBYTES)
    output.put(SOURCE_RECORD_NAME, [stored_record])
    del record, side_files
    output.put(CHUNKS_NAME, [written.chunks[index] for index in range(len(files))])
    num_ranks, holders, packed = conversion.plan.num_ranks, dict[int, RankEntry](), list[bytes]()
    for holder in (*conversion.ranks, *([num_ranks] if conversion.has_whole else [])):
        holders[holder], table, of_holder = _holder(conversion, holder, digests)
        output.put(holders[holder].table, [table])
        packed.append(of_holder)
    packed.append(pack_digests(of_source))
    output.put(DIGESTS_NAME, packed)
    hub_index = _hub_index(conversion)
    output.put(HUB_INDEX_NAME, [hub_index])
    manifest = Manifest(
        generator=f"relayout {VERSION}",
        conversion=conversion_id,
        model_type=source.model_type,
        plan=plan_name,
        expert_parallel=options.expert_parallel,
        alignment=options.alignment,
        dcp=options.dcp,
        record_digest=blake3_hex(stored_record),
        source_digests_digest=blake3_hex(packed[-1]),
        num_source_tensors=len(source.tensors),
        source_nbytes=source.nbytes,
        hub_index_digest=blake3_hex(hub_index),
        chunk_nbytes=DIGESTED_NBYTES,
        files=tuple(files),
        ranks=tuple(map(holders.get, range(num_ranks))),
        whole=holders.get(num_ranks),
    )
    output.put(MANIFEST_NAME, [dump_manifest(manifest)])


def digests_of_all(conversion: Conversion, written: Mapping[int, TensorDigests]) -> list[TensorDigests]:
    """Return the digests of each tensor, including tensors without any bytes to read.

    Tensors without bytes to read are in no step, so `written` lacks them.
    """
    return [_digests_of(conversion, t, written) for t in range(len(conversion.source.tensors))]


def _digests_of(conversion: Conversion, t: int, written: Mapping[int, TensorDigests]) -> TensorDigests:
    if t in written:
        return written[t]
    tensor = conversion.source.tensors[t]
    assert not conversion.extents_of(t), f"tensor {tensor.name!r}: was not hashed to its end"
    source = None if tensor.extent.nbytes else EMPTY_DIGEST
    return TensorDigests(source, (EMPTY_DIGEST,) * len(conversion.cut[t].cut.distinct))


def other_names(conversion: Conversion) -> list[str]:
    """Return the names of all files of an output except those with tensors."""
    holders = [*conversion.ranks, *([conversion.plan.num_ranks] if conversion.has_whole else [])]
    tables = [_table_name(conversion, holder) for holder in holders]
    fixed = [SOURCE_RECORD_NAME, CHUNKS_NAME, DIGESTS_NAME, HUB_INDEX_NAME, MANIFEST_NAME]
    return [*conversion.source.side_files, *tables, *fixed]


def _table_name(conversion: Conversion, holder: int) -> str:
    return WHOLE_TABLE_NAME if holder == conversion.plan.num_ranks else table_name(holder)


@dataclass(frozen=True, slots=True)
class _Row:
    """One tensor of a holder, and its location."""

    tensor: int
    file: int
    """Position in the files that the holder reads."""
    offset: int
    """Absolute file offset of its first byte."""
    reads: tuple[Read, ...]
    """The reads of the slice; their targets are relative to its first byte."""


def _holder(conversion: Conversion, holder: int, digests: Sequence[TensorDigests]) -> tuple[RankEntry, bytes, bytes]:
    """Return a holder's manifest entry, its table, and the packed digests of its tensors."""
    layout, cut, num_ranks = conversion.layout, conversion.cut, conversion.plan.num_ranks
    if conversion.has_whole and holder < num_ranks:
        numbers, rows = _rows_next_to_whole(conversion, holder)
        placed = place([row.reads for row in rows], [cut[row.tensor].rank_nbytes(holder) for row in rows])
        arena_nbytes, reads, arena_offsets = placed.nbytes, placed.reads, placed.offsets
    else:
        numbers, files = layout.holders[holder], layout.files_of(holder)
        rows = [
            _Row(t, position, offset, ())
            for position, file in enumerate(files)
            for t, offset in zip(file.tensors, file.offsets, strict=True)
        ]
        sizes = {tensor: tensor.rank_nbytes(holder) for tensor in set(cut)}
        arena = plan_arena([(file.data_start, file.offsets, [sizes[cut[t]] for t in file.tensors]) for file in files])
        arena_nbytes, reads = arena.nbytes, arena.reads
        arena_offsets = tuple(offset for column in arena.offsets for offset in column)
    table = dump_table(_table(conversion, holder, rows, arena_offsets))
    packed = pack_digests(digests[row.tensor].slices[cut[row.tensor].cut.which[holder]] for row in rows)
    entry = RankEntry(
        table=_table_name(conversion, holder),
        table_digest=blake3_hex(table),
        digests_digest=blake3_hex(packed),
        num_tensors=len(rows),
        nbytes=sum(read.transfer.total_nbytes for read in reads),
        files=numbers,
        arena_nbytes=arena_nbytes,
        reads=reads,
    )
    return entry, table, packed


def _rows_next_to_whole(conversion: Conversion, rank: int) -> tuple[tuple[int, ...], list[_Row]]:
    """Return the numbers of the files that a rank reads, and its tensors, in its own files or in whole tensors."""
    layout, cut, num_ranks = conversion.layout, conversion.cut, conversion.plan.num_ranks
    own = layout.holders[rank]
    indices: list[int] = []
    rows: list[_Row] = []
    for index in sorted((*own, *layout.holders[num_ranks])):
        file, position, rows_of_file = layout.files[index], len(indices), []
        for t, offset in zip(file.tensors, file.offsets, strict=True):
            if index in own:
                transfers = [Transfer(offset, 0, cut[t].rank_nbytes(rank))]
            elif cut[t].cut.slices[rank].is_held and not is_stored(cut[t], rank, num_ranks):
                transfers = [transfer.shifted(source=offset) for transfer in cut[t].rank_transfers(rank)]
            else:
                continue
            first = transfers[0].source if transfers else offset
            rows_of_file.append(_Row(t, position, first, tuple(Read(position, transfer) for transfer in transfers)))
        if rows_of_file or index in own:
            indices.append(index)
            rows += rows_of_file
    return tuple(indices), rows


def _table(
    conversion: Conversion,
    holder: int,
    rows: Sequence[_Row],
    arena_offsets: Sequence[int],
) -> RankTable:
    tensors, cut = conversion.source.tensors, conversion.cut
    order = [row.tensor for row in rows]
    kinds = list(dict.fromkeys(cut[t] for t in order))
    index_of = {kind: index for index, kind in enumerate(kinds)}
    return RankTable(
        rank=holder,
        kinds=[
            TensorKind(kind.dtype, BITS[kind.dtype], kind.rank_shape(holder), kind.shape, kind.cut.slices[holder])
            for kind in kinds
        ],
        kind_of=[index_of[cut[t]] for t in order],
        names=[tensors[t].name for t in order],
        files=[row.file for row in rows],
        offsets=[row.offset for row in rows],
        arena_offsets=arena_offsets,
    )


def source_record(conversion: Conversion, side_files: Sequence[SideFile]) -> SourceRecord:
    """Return the source record of a conversion with these side files."""
    source = conversion.source
    tensors, family = source.tensors, conversion.plan.family
    return SourceRecord(
        options=conversion.options,
        plan=None if family is None else RecordedPlan(family.name, family.origin, dump_rules(family)),
        names=[tensor.name for tensor in tensors],
        dtypes=[tensor.dtype for tensor in tensors],
        shapes=[tensor.shape for tensor in tensors],
        cuts=conversion.plan.cuts,
        cut_of=conversion.plan.cut_of,
        file_of=[tensor.file for tensor in tensors],
        offsets=[tensor.extent.offset for tensor in tensors],
        files=tuple(RecordedFile(file.name, file.nbytes, file.header) for file in source.files),
        index=source.index,
        side_files=tuple(side_files),
    )


def _hub_index(conversion: Conversion) -> bytes:
    """Return the index.json with which stock loaders read the whole tensors.

    If the folder has only slices, the index names a file that does not exist, so that loaders that use the index fail
    instead of taking slices for tensors.
    """
    source, num_ranks = conversion.source, conversion.plan.num_ranks
    is_whole = num_ranks == 1 or conversion.has_whole
    holders = [-1] if is_whole else reversed(conversion.ranks)  # The lowest rank wins.
    files = [file for holder in holders for file in conversion.layout.files_of(holder)]
    weight_map = {source.tensors[t].name: file.name for file in files for t in file.tensors}
    refusal = missing_shard_name(num_ranks)
    ordered = {tensor.name: weight_map.get(tensor.name, refusal) for tensor in source.tensors}
    if not is_whole:
        ordered[SLICES_ONLY] = refusal
    top = {"metadata": {"total_size": source.nbytes}, "weight_map": ordered}
    blob = (json.dumps(top, indent=2, ensure_ascii=False) + "\n").encode()
    return readable(blob, MAX_INDEX_NBYTES, HUB_INDEX_NAME)


def recorded_source(folder: Store, record: SourceRecord, *, is_whole: bool = True) -> SourceCheckpoint:
    """Return the source checkpoint that a record describes; its files need not exist.

    Args:
        folder: the converted folder.
        record: its source record.
        is_whole: True if all tensors of the shards must have been converted.
    """
    metadata = []
    files = []
    tensors = []
    stored: list[dict[str, tuple[str, tuple[int, ...], int]]] = [{} for _ in record.files]
    for name, dtype, shape, file, offset in zip(
        record.names, record.dtypes, record.shapes, record.file_of, record.offsets, strict=True
    ):
        stored[file][name] = (dtype, shape, offset)
        tensors.append(SourceTensor(name, dtype, shape, file, Extent(offset, num_bytes(dtype, shape) or 0)))
    for shard, expected in zip(record.files, stored, strict=True):
        where = f"{folder}: header of {shard.name}"
        header = parse_header(shard.header, shard.nbytes, where)
        metadata.append(header.metadata)
        for entry in header.tensors:
            stored_as = entry.dtype, entry.shape, header.data_start + entry.offset
            known = expected.pop(entry.name, None)
            if known is None and is_whole:
                what = "was not converted, so the file cannot be restored"
                raise FormatError(what, path=folder.location(shard.name), tensor=entry.name, code="mismatch")
            if known not in (None, stored_as):
                what = f"{list(stored_as)}, the source record has {list(known or ())}"
                raise FormatError(what, path=where, tensor=entry.name, code="mismatch")
        if expected:
            raise FormatError("is not in the header", path=where, tensor=min(expected), code="mismatch")
        files.append(SourceFile(shard.name, shard.nbytes, header.data_start, shard.header))
    agreed = agreed_metadata(metadata)
    return SourceCheckpoint(folder, tuple(files), tuple(tensors), agreed, index=record.index)


def stored_conversion(
    folder: Store,
    manifest: Manifest,
    tables: Mapping[int, RankTable],
    record: SourceRecord,
    source: SourceCheckpoint,
) -> Conversion:
    """Return the conversion that the sidecar describes.

    Args:
        tables: of each holder that the folder has.
    """
    options = record.options
    plan = Plan(options.plan, options.num_ranks, record.cuts, record.cut_of, options.expert_parallel)
    cut = cut_tensors(source, plan, options.layout, None if manifest.has_all else manifest.holders)
    position = {tensor.name: t for t, tensor in enumerate(source.tensors)}
    stored: list[dict[int, int]] = [{} for _ in manifest.files]
    """The tensors of each file, and their offsets."""
    owner = [0] * len(manifest.files)
    shared = manifest.shared
    for holder, entry in manifest.holders.items():
        table = tables[holder]
        held = {t for t, tensor in enumerate(cut) if tensor.cut.slices[holder].is_held}
        own = [holder == options.num_ranks or index not in shared for index in entry.files]
        for row, (name, file_index, offset) in enumerate(zip(table.names, table.files, table.offsets, strict=True)):
            t = position.get(name)
            if t is None or t not in held or table.slices[row] != cut[t].cut.slices[holder]:
                raise FormatError(f"{entry.table}: tensor {name!r} differs from the source record", code="mismatch")
            if own[file_index] and stored[entry.files[file_index]].setdefault(t, offset) != offset:
                raise FormatError(
                    f"{entry.table}: tensor {name!r} is not at the offset that other ranks have", code="mismatch"
                )
        if len(table.names) != len(held):
            what = f"{entry.table}: {len(table.names)} tensors, the source record has {len(held)}"
            raise FormatError(what, code="mismatch")
        for index, is_own in zip(entry.files, own, strict=True):
            owner[index] = holder if is_own else owner[index]
    files = []
    for file, holder, offsets in zip(manifest.files, owner, stored, strict=True):
        data_offsets = tuple(offset - file.data_start for offset in offsets.values())
        files.append(RankFile(file.name, holder, tuple(offsets), data_offsets, file.data_start, file.nbytes))
    # Some writers have no units: treat all files, in their order, as one unit.
    order = tuple(dict.fromkeys(t for offsets in stored for t in offsets))
    holders = by_holder(files, plan.num_ranks + (options.layout == WHOLE_TENSORS))
    layout = Layout(tuple(files), holders, (order,), (range(len(files)),))
    return Conversion(folder, source, plan, cut, layout, options, manifest.present)


def as_one_rank(manifest: Manifest, record: SourceRecord) -> tuple[Manifest, SourceRecord]:
    """Return the whole tensors of a folder as a conversion for one rank; return other folders unchanged."""
    if manifest.whole is None:
        return manifest, record
    options = replace(record.options, num_ranks=1, layout=RANKS)
    one_rank = replace(record, options=options, cuts=(Cut((WHOLE,)),), cut_of=(0,) * len(record.names))
    return replace(manifest, ranks=(manifest.whole,), whole=None), one_rank


def rows_of_files(table: RankTable, num_files: int) -> list[list[int]]:
    """Return the table rows of each file of the rank, in order."""
    rows: list[list[int]] = [[] for _ in range(num_files)]
    for row, number in enumerate(table.files):
        rows[number].append(row)
    return rows


def put_index(
    source: Store,
    output: Output,
    manifest: Manifest,
    kept: Manifest,
    record: SourceRecord,
    chunk_digests: Iterable[bytes],
) -> None:
    """Copy all but weight files and the manifest, verified against the manifest's digests.

    Args:
        manifest: of the source.
        kept: of the output, with all ranks or some.
    """
    for name, proof in digests_of_small(kept).items():
        output.put(name, [read_small(source, name, proof)])
    output.put(CHUNKS_NAME, chunk_digests)
    output.put(DIGESTS_NAME, (read_packed_digests(source, manifest, holder) for holder in (*kept.holders, None)))
    for side in record.side_files:
        copy_side_file(source, output, side.name, side)


def modes_of(folders: Iterable[Store], files: Collection[str], *, with_folders: bool = True) -> Modes:
    """Return the permissions that all files and folders grant to group and others; the owner may always read and write.

    Missing files are ignored: a later read raises the error.
    """
    folder_mode, file_mode = Modes().folder, Modes().file
    for folder in folders:
        if with_folders and (path := folder.path("")) is not None:
            folder_mode &= path.stat().st_mode
        for name in files:
            status = folder.stat(name)
            if status is not None:
                file_mode &= status.mode
    return Modes(folder_mode | stat.S_IRWXU, file_mode | stat.S_IRUSR | stat.S_IWUSR)


def output_modes(source: SourceCheckpoint) -> Modes:
    """Return the permissions of an output: at most those of its source."""
    return modes_of([source.folder], [file.name for file in source.files], with_folders=not source.is_file)


def copy_side_file(
    source: Store,
    output: Output,
    name: str,
    expected: SideFile | None = None,
    prefix: str = "",
) -> SideFile:
    """Copy a file into an output under `prefix` + its name, with its mode as far as the umask allows."""
    status = _status(source, name)
    if expected is None and not status.version:
        raise unversioned(source.location(name))
    differs = FormatError("differs from the file that was copied", path=source.location(name), code="digest")
    if expected is not None and expected.nbytes != status.nbytes:
        raise differs
    mode, digest = status.mode if expected is None else expected.mode, new_blake3()
    output.put(prefix + name, _pieces(source, name, status.version, digest), mode)
    copied = SideFile(name, status.nbytes, digest.hexdigest(), mode)
    if expected is not None and copied.digest != expected.digest:
        raise differs
    return copied


def read_side_file(folder: Store, name: str) -> SideFile:
    """Return length, BLAKE3 digest and permission bits of a file."""
    status, digest = _status(folder, name), new_blake3()
    if not status.version:
        raise unversioned(folder.location(name))
    for _ in _pieces(folder, name, status.version, digest):
        pass
    return SideFile(name, status.nbytes, digest.hexdigest(), status.mode)


def find_other_files(folder: Store, files: Iterable[SideFile]) -> list[str]:
    """Return a message for each of these files that a folder lacks, or has with another digest."""
    others = []
    for file in files:
        try:
            if read_side_file(folder, file.name).digest != file.digest:
                others.append(f"{folder.location(file.name)}: differs from the source's")
        except FormatError as error:
            others.append(str(error))
    return others


def _status(folder: Store, name: str) -> FileStat:
    status = folder.stat(name)
    if status is None:
        raise FormatError(f"cannot be read: {os.strerror(errno.ENOENT)}", path=folder.location(name), code="missing")
    return status


def _pieces(folder: Store, name: str, version: str, digest: Hash) -> Iterator[bytes]:
    """Yield the bytes of a file in order, reading each once and adding it to the hash."""
    with folder.open(name, access=Access.BUFFERED, version=version) as file:
        step = folder.cost.request_nbytes
        for offset in range(0, file.nbytes, step):
            piece = bytearray(min(step, file.nbytes - offset))
            file.read(offset, memoryview(piece))
            digest.update(piece)
            yield bytes(piece)
