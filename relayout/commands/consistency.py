"""Checks that all copies of a fact in a converted folder agree. Reads no weights.

FORMAT.md says for each fact which copy counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise, takewhile

from relayout.checkpoint.converted import check_file, read_table
from relayout.checkpoint.source import MAX_INDEX_NBYTES, SourceCheckpoint, model_order, read_shard
from relayout.commands.differences import Culprit, Report
from relayout.conversion.layout import file_metadata, rows_of_files
from relayout.conversion.side_files import read_side_file
from relayout.core.digests import DigestAlgorithm
from relayout.core.extents import BLOCK, Extent, align_down, align_up
from relayout.core.slices import num_bytes
from relayout.errors import FormatError, shown
from relayout.format.fields import Fields, parse_object
from relayout.format.index import (
    ARENA_ALIGNMENT,
    HUB_INDEX_NAME,
    MANIFEST_NAME,
    SLICES_ONLY,
    Manifest,
    RankTable,
    missing_shard_name,
)
from relayout.format.manifest import content_digest, content_head
from relayout.format.safetensors import json_text
from relayout.storage.protocols import Store


def own_files(manifest: Manifest, holder: int) -> list[int]:
    """Indices of the own files of a holder: of a rank, all but those of whole tensors."""
    is_rank = holder < manifest.num_ranks
    return [index for index in manifest.holders[holder].files if not (is_rank and index in manifest.shared)]


def check_holder(
    folder: Store, manifest: Manifest, holder: int, source: SourceCheckpoint | None, report: Report
) -> RankTable | None:
    """Check one table against the headers of the holder's own files. Return it if it and all files are usable."""
    entry = manifest.holders[holder]
    with report.errors_of(entry.table):
        table = read_table(folder, manifest, holder)
        own = set(own_files(manifest, holder))
        rows = rows_of_files(table, len(entry.files))
        checked = [
            _check_header(folder, manifest, index, column, table, source, report)
            for index, column in zip(entry.files, rows, strict=True)
            if index in own
        ]
        if all(checked):
            report.num_tensors += len(table.names)
            return table
    return None


def _check_header(
    folder: Store,
    manifest: Manifest,
    index: int,
    rows: list[int],
    table: RankTable,
    source: SourceCheckpoint | None,
    report: Report,
) -> bool:
    """Check a file's length and header against its rows of the table. Return False if it cannot be read."""
    file = manifest.files[index]
    try:
        where = folder.location(file.name)
        shard, header = read_shard(folder, file.name)
        if shard.nbytes != file.nbytes:
            raise FormatError(f"{shard.nbytes} bytes long, expected {file.nbytes}", path=where, code="mismatch")
        if header.data_start != file.data_start:
            what = f"its data section starts at {header.data_start}, {MANIFEST_NAME} says {file.data_start}"
            raise FormatError(what, path=where, code="mismatch")
        if manifest.digest.hex(shard.header) != file.header_digest:
            report.add(file.name, "its header differs from what was written", extent=Extent(0, file.data_start))
        if file.data_start % manifest.alignment:
            report.add(file.name, f"its data section starts at {file.data_start}, alignment {manifest.alignment}")
        if not header.is_in_order:
            report.add(file.name, "its header does not name the tensors in file order")
    except FormatError as error:
        report.add_error(file.name, error)
        return False
    stored = [(header.data_start + tensor.offset, tensor.name, tensor.dtype, tensor.shape) for tensor in header.tensors]
    dtypes, shapes = table.dtypes, table.shapes
    indexed = [(table.offsets[row], table.names[row], dtypes[row], shapes[row]) for row in rows]
    for actual, expected in zip(stored, indexed, strict=False):
        if actual != expected:
            report.add(file.name, f"header has {actual}, the rank table {expected}", actual[1])
    if len(stored) != len(indexed):
        report.add(file.name, f"{len(stored)} tensors, the rank table has {len(indexed)}")
    heads = [content_head(kind.dtype, kind.source_shape, kind.part) for kind in table.kinds]
    content = content_digest(
        (json_text(table.names[row]), heads[table.kind_of[row]], table.digests[row]) for row in rows
    )
    if content != file.content:
        report.add(file.name, f"its content is {content} in the rank table, {MANIFEST_NAME} says {file.content}")
    sharding_info = _check_sharding_info(file.name, header.metadata, rows, table, report) if manifest.dcp else None
    if source is not None:
        metadata = file_metadata(file.content, source.metadata, sharding_info)
        _check_metadata(file.name, header.metadata, metadata, report)
    try:
        check_file(folder, manifest, index)
    except (FormatError, OSError) as error:
        report.add_error(file.name, error)
    return True


def _check_metadata(name: str, actual: Mapping[str, str], expected: Mapping[str, str], report: Report) -> None:
    """Check that a header has the entries that it should have, and no others, in their order."""
    keys = [key for key in {**expected, **actual} if actual.get(key) != expected.get(key)]
    for key in keys:
        what = f"__metadata__ has {key} {shown(actual.get(key))}, expected {shown(expected.get(key))}"
        report.add(name, what)
    if not keys and list(actual) != list(expected):
        report.add(
            name, f"__metadata__ has {', '.join(map(shown, actual))}, expected {', '.join(map(shown, expected))}"
        )


def _check_sharding_info(
    name: str, metadata: Mapping[str, str], rows: list[int], table: RankTable, report: Report
) -> str:
    """Check the offsets of slices that PyTorch DCP reads. Return the expected text; after errors, the stored one."""
    kinds, kind_of = table.kinds, table.kind_of
    starts = [kind.part.starts(len(kind.source_shape)) if kind.part.is_box else None for kind in kinds]
    expected = {table.names[row]: {"saved_offsets": starts[kind_of[row]]} for row in rows}
    text = metadata.get("DCP_SHARDING_INFO")
    try:
        actual = expected if text is None else parse_object(text.encode(), f"{name}: DCP_SHARDING_INFO")
    except FormatError as error:
        report.add(name, str(error))
        return text or ""
    wrong = sorted(tensor for tensor in actual.keys() | expected.keys() if actual.get(tensor) != expected.get(tensor))
    for tensor in wrong:
        what = f"DCP_SHARDING_INFO has {actual.get(tensor)}, the slice is at {expected.get(tensor)}"
        report.add(name, what, tensor)
    return text if wrong and text is not None else json_text(expected)


def check_arenas(manifest: Manifest, tables: Mapping[int, RankTable], report: Report) -> None:
    """Check where the bytes of each rank are: inside whole tensors, or where direct reads can get them."""
    whole = tables.get(manifest.num_ranks)
    for rank in tables.keys() & set(manifest.present):
        if manifest.whole is None:
            _check_bulk(manifest, rank, tables[rank], report)
        elif whole is not None:
            _check_places(manifest, rank, tables[rank], whole, report)


def _check_bulk(manifest: Manifest, rank: int, table: RankTable, report: Report) -> None:
    """Check that the bulk of each file can be read directly to its place: one read that shares no block."""
    entry = manifest.holders[rank]
    sizes = [num_bytes(dtype, shape) or 0 for dtype, shape in zip(table.dtypes, table.shapes, strict=True)]
    reads = [read.transfer for read in entry.reads]
    for position, rows in enumerate(rows_of_files(table, len(entry.files))):
        bulk = list(takewhile(lambda row: sizes[row] % ARENA_ALIGNMENT == 0, rows))
        start, end = manifest.holder_files(rank)[position].data_start, 0
        end = table.offsets[bulk[-1]] + sizes[bulk[-1]] if bulk else start
        actual = [n for n, read in enumerate(entry.reads) if read.file == position and read.transfer.source < end]
        what = f"rank {rank}: bytes {start} to {end} of {manifest.holder_files(rank)[position].name}"
        if start == end:
            continue
        if [(reads[n].source, reads[n].source_end, reads[n].count) for n in actual] != [(start, end, 1)]:
            report.add(MANIFEST_NAME, f"{what} must be one read")
            continue
        [n] = actual
        first, last = align_down(reads[n].target, BLOCK), align_up(reads[n].target_end, BLOCK)
        before, after = (reads[n - 1].target_end if n else 0), (reads[n + 1].target if n + 1 < len(reads) else last)
        if (reads[n].target - start) % BLOCK or before > first or after < last:
            report.add(MANIFEST_NAME, f"{what} cannot be read directly to byte {reads[n].target} of the arena")


def _check_places(manifest: Manifest, rank: int, table: RankTable, whole: RankTable, report: Report) -> None:
    """Check that slices in files of whole tensors are inside their own tensors."""
    assert manifest.whole is not None
    entry = manifest.holders[rank]
    places = {
        name: (manifest.whole.files[file], offset)
        for name, file, offset in zip(whole.names, whole.files, whole.offsets, strict=True)
    }
    starts = [kind.in_whole[0].source if kind.in_whole else 0 for kind in table.kinds]
    shared = manifest.shared
    for name, kind, file, offset in zip(table.names, table.kind_of, table.files, table.offsets, strict=True):
        index = entry.files[file]
        if index in shared and places.get(name) != (index, offset - starts[kind]):
            report.add(entry.table, f"is at {offset} of {manifest.files[index].name}, not in its whole tensor", name)


def check_other_files(folder: Store, manifest: Manifest, tables: Mapping[int, RankTable], report: Report) -> None:
    """Check the names of files, the index for stock loaders, and that there are no other safetensors files."""
    known = {file.name for file in manifest.files}
    for name, next_name in pairwise(sorted(known, key=str.lower)):
        if name.lower() == next_name.lower():
            report.add(MANIFEST_NAME, f"{name} and {next_name} differ in case only")
    for name in sorted(entry.name for entry in folder.walk()):
        if name.endswith(".safetensors") and "/" not in name and name not in known:
            report.add(name, "is not part of this conversion")
    if manifest.hub_index_digest is None:
        if folder.stat(HUB_INDEX_NAME) is not None:
            report.add(HUB_INDEX_NAME, "is not part of this conversion")
        return
    digest, what = manifest.hub_index_digest, "differs from what was written"
    check_copy(folder, HUB_INDEX_NAME, None, digest, manifest.digest, what, report)
    holder = max(manifest.holders)
    if manifest.whole is None and manifest.num_ranks > 1:
        _check_refusal(folder, manifest, report)
    elif holder in tables:  # It has whole tensors.
        _check_hub_index(folder, manifest, holder, tables[holder], report)


def _check_refusal(folder: Store, manifest: Manifest, report: Report) -> None:
    """Check that the index of a folder with slices only stops stock loaders."""
    with report.errors_of(HUB_INDEX_NAME):
        blob = folder.read(HUB_INDEX_NAME, MAX_INDEX_NBYTES)
        top = Fields(parse_object(blob, folder.location(HUB_INDEX_NAME)), HUB_INDEX_NAME)
        expected = missing_shard_name(manifest.num_ranks)
        if top.object("weight_map").get(SLICES_ONLY) != expected:
            report.add(
                HUB_INDEX_NAME, f"does not name {expected}, by which other loaders see that this has slices only"
            )


def _check_hub_index(folder: Store, manifest: Manifest, holder: int, table: RankTable, report: Report) -> None:
    """Check that the index names the file of each whole tensor."""
    files = manifest.holder_files(holder)
    expected = {name: files[file].name for name, file in zip(table.names, table.files, strict=True)}
    with report.errors_of(HUB_INDEX_NAME):
        top = Fields(
            parse_object(folder.read(HUB_INDEX_NAME, MAX_INDEX_NBYTES), folder.location(HUB_INDEX_NAME)), HUB_INDEX_NAME
        )
        named, total = top.object("weight_map"), Fields(top.object("metadata"), HUB_INDEX_NAME).size("total_size")
        for name in sorted({**named, **expected}):
            if named.get(name) != expected.get(name):
                report.add(HUB_INDEX_NAME, f"names {named.get(name)}, it is in {expected.get(name)}", name)
        if named == expected and list(named) != sorted(named, key=lambda name: (model_order(name), name)):
            report.add(HUB_INDEX_NAME, "weight_map is not in model order")
        if total != manifest.source_nbytes:
            report.add(HUB_INDEX_NAME, f"total_size {total}, expected {manifest.source_nbytes}")


def check_copy(
    folder: Store,
    name: str,
    nbytes: int | None,
    digest: str,
    algorithm: DigestAlgorithm,
    what: str,
    report: Report,
    culprit: Culprit = "folder",
) -> None:
    """Check a file's digest, and its length if it is not None; report `what` if they differ."""
    with report.errors_of(name, culprit):
        side = read_side_file(folder, name, algorithm)
        if side.digest != digest or nbytes not in (None, side.nbytes):
            report.add(name, what, culprit=culprit)
