"""Whether what a converted folder says in several places agrees: everything but the tensors' bytes.

FORMAT.md says for each fact which place counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from safetensors import SafetensorError, deserialize

from relayout.checkpoint.config import find_config
from relayout.checkpoint.converted import check_file, read_record, read_table
from relayout.checkpoint.source import (
    MAX_INDEX_NBYTES,
    read_shard,
)
from relayout.commands.differences import Report
from relayout.conversion.layout import rows_of_files
from relayout.conversion.side_files import read_side_file
from relayout.core.digests import digest_hex
from relayout.core.dtypes import num_bytes
from relayout.core.extents import BLOCK, Extent
from relayout.core.slices import WHOLE
from relayout.errors import FormatError, PlanError
from relayout.format.fields import Fields, parse_object
from relayout.format.index import (
    ARENA_ALIGNMENT,
    HUB_INDEX_NAME,
    MANIFEST_NAME,
    MIN_ALIGNMENT,
    WHOLE_TENSORS,
    Manifest,
    RankTable,
)
from relayout.format.manifest import SOURCE_RECORD_NAME, content_digest, content_head
from relayout.format.safetensors import TensorEntry, build_header, json_text
from relayout.format.slices import dump_slice
from relayout.format.source_record import SourceRecord, conversion_digest
from relayout.plans.coverage import check_all_held
from relayout.storage.protocols import Store


def own_files(manifest: Manifest, holder: int) -> list[int]:
    """The numbers of a holder's own files: all of a rank's but those of whole tensors."""
    is_rank = holder < manifest.num_ranks
    return [number for number in manifest.holders[holder].files if not (is_rank and number in manifest.shared)]


def check_holder(folder: Store, manifest: Manifest, holder: int, report: Report) -> RankTable | None:
    """Check one table against the headers of the holder's own files. Return it if it and all files are usable."""
    entry = manifest.holders[holder]
    try:
        table = read_table(folder, manifest, holder)
    except FormatError as error:
        report.add(entry.table, str(error))
        return None
    own = set(own_files(manifest, holder))
    rows = rows_of_files(table, len(entry.files))
    checked = [
        _check_header(folder, manifest, number, column, table, report)
        for number, column in zip(entry.files, rows, strict=True)
        if number in own
    ]
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
        if header.data_start != file.data_start:
            what = f"its data section starts at {header.data_start}, {MANIFEST_NAME} says {file.data_start}"
            raise FormatError(what, path=where, code="mismatch")
        if digest_hex(shard.header) != file.header_digest:
            report.add(file.name, "header differs from the one that was written", extent=Extent(0, file.data_start))
        if file.data_start % manifest.alignment:
            report.add(file.name, f"its data section starts at {file.data_start}, alignment {manifest.alignment}")
        check_by_reference_reader(shard.header, header.data_nbytes, where)
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
    heads = [content_head(kind.dtype, kind.source_shape, kind.part) for kind in table.kinds]
    content = content_digest(
        (json_text(table.names[row]), heads[table.kind_of[row]], table.digests[row]) for row in rows
    )
    if content != file.content:
        report.add(file.name, f"holds the content {content} by the rank table, {MANIFEST_NAME} says {file.content}")
    _check_sharding_info(manifest, number, header.metadata, rows, table, report)
    try:
        check_file(folder, manifest, number)
    except (FormatError, OSError) as error:
        report.add(file.name, str(error))
    return True


def _check_sharding_info(
    manifest: Manifest, number: int, metadata: Mapping[str, str], rows: list[int], table: RankTable, report: Report
) -> None:
    """Check what PyTorch DCP would take for the place of each slice."""
    file = manifest.files[number]
    text = metadata.get("DCP_SHARDING_INFO")
    if text is None or not manifest.dcp:
        if (text is not None) != manifest.dcp:
            report.add(file.name, f"DCP_SHARDING_INFO is {'missing' if manifest.dcp else 'there'}, dcp {manifest.dcp}")
        return
    try:
        found = parse_object(text.encode(), f"{file.name}: DCP_SHARDING_INFO")
    except FormatError as error:
        report.add(file.name, str(error))
        return
    kinds, kind_of = table.kinds, table.kind_of
    starts = [one.part.starts(len(one.source_shape)) if one.part.is_box else None for one in kinds]
    expected = {table.names[row]: {"saved_offsets": starts[kind_of[row]]} for row in rows}
    for name in sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)):
        what = f"DCP_SHARDING_INFO has {found.get(name)}, the slice is at {expected.get(name)}"
        report.add(file.name, what, name)


def check_by_reference_reader(header: bytes, data_nbytes: int, where: str) -> None:
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


def check_facts(folder: Store, manifest: Manifest, record: SourceRecord, report: Report) -> None:
    """Check what the manifest repeats of the source record, and how its reads lie."""
    options = record.options
    sizes = (num_bytes(dtype, shape) or 0 for dtype, shape in zip(record.dtypes, record.shapes, strict=True))
    expected = {
        "conversion": conversion_digest(record),
        "model_type": _model_type(folder, manifest),
        "plan": options.plan,
        "expert_parallel": options.expert_parallel,
        "alignment": options.alignment,
        "dcp": options.dcp,
        "source_nbytes": sum(sizes),
    }
    if (options.layout == WHOLE_TENSORS) != (manifest.whole is not None):
        report.add(MANIFEST_NAME, f"'whole' does not fit the layout {options.layout!r} of the source record")
    for name, value in expected.items():
        if getattr(manifest, name) != value:
            field = "source.nbytes" if name == "source_nbytes" else name
            report.add(MANIFEST_NAME, f"{field} is {getattr(manifest, name)}, by the source record {value}")


def _model_type(folder: Store, manifest: Manifest) -> str | None:
    """As config.json has it. Where that cannot be read, which is told with the side files, as the manifest has it."""
    try:
        found = find_config(folder).content.get("model_type")
    except FormatError:
        return manifest.model_type
    return found if isinstance(found, str) else None


def _check_bulk(manifest: Manifest, rank: int, table: RankTable, report: Report) -> None:
    """Check that what comes first in each file can go directly to its place: whole blocks of file and arena agree."""
    entry = manifest.ranks[rank]
    sizes = [num_bytes(*one) or 0 for one in zip(table.dtypes, table.shapes, strict=True)]
    for position, rows in enumerate(rows_of_files(table, len(entry.files))):
        bulk = list(takewhile(lambda row: sizes[row] % ARENA_ALIGNMENT == 0, rows))
        end = table.offsets[bulk[-1]] + sizes[bulk[-1]] if bulk else 0
        for read in entry.reads:
            one = read.transfer
            if read.file == position and one.source < end and (one.target - one.source) % BLOCK:
                name = manifest.holder_files(rank)[position].name
                what = (
                    f"rank {rank}: bytes {one.source} to {one.source_end} of {name} cannot go directly to their place"
                )
                report.add(MANIFEST_NAME, f"{what}, {one.target} of the arena")


def check_other_files(folder: Store, manifest: Manifest, tables: list[RankTable | None], report: Report) -> None:
    """Check the index for stock loaders, and that there is no other file that a loader would read."""
    known = {file.name for file in manifest.files}
    for name in sorted(entry.name for entry in folder.walk()):
        if name.endswith(".safetensors") and "/" not in name and name not in known:
            report.add(name, "is not part of this conversion")
    if manifest.hub_index_digest is None:
        if folder.stat(HUB_INDEX_NAME) is not None:
            report.add(HUB_INDEX_NAME, "is not part of this conversion")
        return
    what = "differs from the one that was written"
    check_copy(folder, HUB_INDEX_NAME, None, manifest.hub_index_digest, what, report)
    if tables[-1] is not None:
        _check_hub_index(folder, manifest, tables[-1], report)


def _check_hub_index(folder: Store, manifest: Manifest, table: RankTable, report: Report) -> None:
    """Check that the index has the whole tensors, where they are."""
    files = manifest.holder_files(-1)
    expected = {name: files[file].name for name, file in zip(table.names, table.files, strict=True)}
    try:
        top = parse_object(folder.read(HUB_INDEX_NAME, MAX_INDEX_NBYTES), folder.where(HUB_INDEX_NAME))
        found = Fields(top, HUB_INDEX_NAME).object("weight_map")
        total = Fields(Fields(top, HUB_INDEX_NAME).object("metadata"), HUB_INDEX_NAME).size("total_size")
    except FormatError as error:
        report.add(HUB_INDEX_NAME, str(error))
        return
    for name in sorted(
        found.keys() ^ expected.keys() | {name for name in expected if found.get(name) != expected[name]}
    ):
        report.add(HUB_INDEX_NAME, f"names {found.get(name)}, it is in {expected.get(name)}", name)
    if total != manifest.source_nbytes:
        report.add(HUB_INDEX_NAME, f"total_size {total}, expected {manifest.source_nbytes}")


def check_copy(folder: Store, name: str, nbytes: int | None, digest: str, what: str, report: Report) -> None:
    """Check a file's digest, and its length if it is not None; report `what` if they differ."""
    try:
        found = read_side_file(folder, name)
    except FormatError as error:
        report.add(name, str(error))
        return
    if found.digest != digest or nbytes not in (None, found.nbytes):
        report.add(name, what)


def check_record(
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
        check_copy(folder, side.name, side.nbytes, side.digest, what, report)
    _check_cuts(record, report)
    for holder, table in enumerate(tables):
        if table is not None:
            _check_slices(manifest.holders[holder].table, holder, table, record, report)
    for rank, table in enumerate(tables if manifest.whole is None else ()):
        if table is not None:
            _check_bulk(manifest, rank, table, report)
    if manifest.whole is not None and tables[-1] is not None:
        for rank, table in enumerate(tables[:-1]):
            if table is not None:
                _check_places(manifest, rank, table, tables[-1], report)
    return record


def _check_places(manifest: Manifest, rank: int, table: RankTable, whole: RankTable, report: Report) -> None:
    """Check that slices in files of whole tensors are inside of the tensors that they are slices of."""
    assert manifest.whole is not None
    entry = manifest.ranks[rank]
    places = {
        name: (manifest.whole.files[file], offset)
        for name, file, offset in zip(whole.names, whole.files, whole.offsets, strict=True)
    }
    starts = [one.in_whole[0].source if one.in_whole else 0 for one in table.kinds]
    shared = manifest.shared
    for name, kind, file, offset in zip(table.names, table.kind_of, table.files, table.offsets, strict=True):
        number = entry.files[file]
        if number in shared and places.get(name) != (number, offset - starts[kind]):
            report.add(entry.table, f"is at {offset} of {manifest.files[number].name}, not in its whole tensor", name)


def _check_cuts(record: SourceRecord, report: Report) -> None:
    """Check that the ranks together hold every element of each tensor, and that slices are in canonical form."""
    first = dict(zip(zip(record.cut_of, record.shapes, strict=True), record.names, strict=True))
    for (cut, shape), name in first.items():
        slices = record.cuts[cut].distinct
        try:
            check_all_held(shape, slices)
        except PlanError as error:
            report.add(SOURCE_RECORD_NAME, str(error), name)
        for part in slices:
            if (canonical := part.canonical(shape)) != part:
                what = f"slice {dump_slice(part)} of {list(shape)}, in canonical form {dump_slice(canonical)}"
                report.add(SOURCE_RECORD_NAME, what, name)


def _check_slices(name: str, rank: int, table: RankTable, record: SourceRecord, report: Report) -> None:
    rows = {tensor: row for row, tensor in enumerate(table.names)}
    kinds, kind_of = table.kinds, table.kind_of
    for t, tensor in enumerate(record.names):
        row = rows.pop(tensor, None)
        slices = record.cut(t).slices
        part = slices[rank] if rank < len(slices) else WHOLE
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
