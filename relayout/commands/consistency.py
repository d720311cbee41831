"""Whether what a converted folder says in several places agrees: everything but the tensors' bytes.

FORMAT.md says for each fact which place counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile

from safetensors import SafetensorError, deserialize

from relayout.checkpoint.converted import check_file, read_table
from relayout.checkpoint.source import MAX_INDEX_NBYTES, SourceCheckpoint, model_order, read_shard
from relayout.commands.differences import Report
from relayout.conversion.layout import file_metadata, rows_of_files
from relayout.conversion.side_files import read_side_file
from relayout.core.digests import digest_hex
from relayout.core.dtypes import num_bytes
from relayout.core.extents import BLOCK, Extent, align_down, align_up
from relayout.errors import FormatError, shown
from relayout.format.fields import Fields, parse_object
from relayout.format.index import (
    ARENA_ALIGNMENT,
    HUB_INDEX_NAME,
    MANIFEST_NAME,
    MIN_ALIGNMENT,
    Manifest,
    RankTable,
)
from relayout.format.manifest import content_digest, content_head
from relayout.format.safetensors import TensorEntry, build_header, json_text
from relayout.storage.protocols import Store


def own_files(manifest: Manifest, holder: int) -> list[int]:
    """The numbers of a holder's own files: all of a rank's but those of whole tensors."""
    is_rank = holder < manifest.num_ranks
    return [number for number in manifest.holders[holder].files if not (is_rank and number in manifest.shared)]


def check_holder(
    folder: Store, manifest: Manifest, holder: int, source: SourceCheckpoint | None, report: Report
) -> RankTable | None:
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
        _check_header(folder, manifest, number, column, table, source, report)
        for number, column in zip(entry.files, rows, strict=True)
        if number in own
    ]
    report.num_tensors += len(table.names)
    return table if all(checked) else None


def _check_header(
    folder: Store,
    manifest: Manifest,
    number: int,
    rows: list[int],
    table: RankTable,
    source: SourceCheckpoint | None,
    report: Report,
) -> bool:
    """Check a file's length and header against its rows of the table. Return False if it cannot be read."""
    file = manifest.files[number]
    try:
        where = folder.location(file.name)
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
        if not header.is_in_order:
            report.add(file.name, "its header does not name the tensors in file order")
        check_by_reference_reader(shard.header, header.data_nbytes, where)
    except FormatError as error:
        report.add(file.name, str(error))
        return False
    stored = [(header.data_start + tensor.offset, tensor.name, tensor.dtype, tensor.shape) for tensor in header.tensors]
    dtypes, shapes = table.dtypes, table.shapes
    indexed = [(table.offsets[row], table.names[row], dtypes[row], shapes[row]) for row in rows]
    for found, expected in zip(stored, indexed, strict=False):
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
    sharding_info = _check_sharding_info(file.name, header.metadata, rows, table, report) if manifest.dcp else None
    if source is not None:
        metadata = file_metadata(file.content, source.metadata, sharding_info)
        _check_metadata(file.name, header.metadata, metadata, report)
    try:
        check_file(folder, manifest, number)
    except (FormatError, OSError) as error:
        report.add(file.name, str(error))
    return True


def _check_metadata(name: str, found: Mapping[str, str], expected: Mapping[str, str], report: Report) -> None:
    """Check that a header has the entries that it should have, and no others, in their order."""
    keys = [key for key in {**expected, **found} if found.get(key) != expected.get(key)]
    for key in keys:
        what = f"__metadata__ has {key} {shown(found.get(key))}, expected {shown(expected.get(key))}"
        report.add(name, what)
    if not keys and list(found) != list(expected):
        report.add(name, f"__metadata__ has {', '.join(map(shown, found))}, expected {', '.join(map(shown, expected))}")


def _check_sharding_info(
    name: str, metadata: Mapping[str, str], rows: list[int], table: RankTable, report: Report
) -> str:
    """Check what PyTorch DCP would take for the place of each slice. Return the text that is right.

    Where slices are told to be elsewhere, that is all that is reported, and the text is the one that is there.
    """
    kinds, kind_of = table.kinds, table.kind_of
    starts = [one.part.starts(len(one.source_shape)) if one.part.is_box else None for one in kinds]
    expected = {table.names[row]: {"saved_offsets": starts[kind_of[row]]} for row in rows}
    text = metadata.get("DCP_SHARDING_INFO")
    try:
        found = expected if text is None else parse_object(text.encode(), f"{name}: DCP_SHARDING_INFO")
    except FormatError as error:
        report.add(name, str(error))
        return text or ""
    wrong = sorted(one for one in found.keys() | expected.keys() if found.get(one) != expected.get(one))
    for one in wrong:
        what = f"DCP_SHARDING_INFO has {found.get(one)}, the slice is at {expected.get(one)}"
        report.add(name, what, one)
    return text if wrong and text is not None else json_text(expected)


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


def check_arenas(manifest: Manifest, tables: Sequence[RankTable | None], report: Report) -> None:
    """Check where what ranks read lies: in files of whole tensors, or so that direct reads can bring it."""
    for rank, table in enumerate(tables[: manifest.num_ranks]):
        if table is not None and manifest.whole is None:
            _check_bulk(manifest, rank, table, report)
        elif table is not None and tables[-1] is not None:
            _check_places(manifest, rank, table, tables[-1], report)


def _check_bulk(manifest: Manifest, rank: int, table: RankTable, report: Report) -> None:
    """Check that what comes first in each file can go directly to its place: one read, whose blocks are its own."""
    entry = manifest.ranks[rank]
    sizes = [num_bytes(*one) or 0 for one in zip(table.dtypes, table.shapes, strict=True)]
    reads = [read.transfer for read in entry.reads]
    for position, rows in enumerate(rows_of_files(table, len(entry.files))):
        bulk = list(takewhile(lambda row: sizes[row] % ARENA_ALIGNMENT == 0, rows))
        start, end = manifest.holder_files(rank)[position].data_start, 0
        end = table.offsets[bulk[-1]] + sizes[bulk[-1]] if bulk else start
        found = [n for n, read in enumerate(entry.reads) if read.file == position and read.transfer.source < end]
        what = f"rank {rank}: bytes {start} to {end} of {manifest.holder_files(rank)[position].name}"
        if start == end:
            continue
        if [(reads[n].source, reads[n].source_end, reads[n].count) for n in found] != [(start, end, 1)]:
            report.add(MANIFEST_NAME, f"{what} are not one read")
            continue
        [n] = found
        first, last = align_down(reads[n].target, BLOCK), align_up(reads[n].target_end, BLOCK)
        before, after = (reads[n - 1].target_end if n else 0), (reads[n + 1].target if n + 1 < len(reads) else last)
        if (reads[n].target - start) % BLOCK or before > first or after < last:
            report.add(MANIFEST_NAME, f"{what} cannot go directly to their place, {reads[n].target} of the arena")


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


def check_other_files(folder: Store, manifest: Manifest, tables: list[RankTable | None], report: Report) -> None:
    """Check the names of files, the index for stock loaders, and that there is no other file that one would read."""
    known = {file.name for file in manifest.files}
    for one, other in pairwise(sorted(known, key=str.lower)):
        if one.lower() == other.lower():
            report.add(MANIFEST_NAME, f"{one} and {other} differ in case only")
    for name in sorted(entry.name for entry in folder.walk()):
        if name.endswith(".safetensors") and "/" not in name and name not in known:
            report.add(name, "is not part of this conversion")
    if manifest.hub_index_digest is None:
        if folder.stat(HUB_INDEX_NAME) is not None:
            report.add(HUB_INDEX_NAME, "is not part of this conversion")
        return
    if manifest.whole is None and manifest.num_ranks > 1:
        report.add(MANIFEST_NAME, "has a hub_index_digest, but no rank has whole tensors")
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
        top = parse_object(folder.read(HUB_INDEX_NAME, MAX_INDEX_NBYTES), folder.location(HUB_INDEX_NAME))
        found = Fields(top, HUB_INDEX_NAME).object("weight_map")
        total = Fields(Fields(top, HUB_INDEX_NAME).object("metadata"), HUB_INDEX_NAME).size("total_size")
    except FormatError as error:
        report.add(HUB_INDEX_NAME, str(error))
        return
    for name in sorted(
        found.keys() ^ expected.keys() | {name for name in expected if found.get(name) != expected[name]}
    ):
        report.add(HUB_INDEX_NAME, f"names {found.get(name)}, it is in {expected.get(name)}", name)
    if found == expected and list(found) != sorted(found, key=lambda name: (model_order(name), name)):
        report.add(HUB_INDEX_NAME, "weight_map is not in model order")
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
