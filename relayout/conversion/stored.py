"""The conversion that a converted folder describes, and its source, from the files beside the weights. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from relayout.checkpoint.source import SourceCheckpoint, SourceFile, SourceTensor, agreed_metadata
from relayout.conversion.layout import Conversion, Layout, RankFile, by_holder, cut_tensors
from relayout.core.extents import Extent
from relayout.core.slices import WHOLE, Cut, num_bytes
from relayout.errors import FormatError
from relayout.format.index import RANKS, WHOLE_TENSORS, Manifest, RankTable
from relayout.format.safetensors import parse_header
from relayout.format.source_record import SourceRecord
from relayout.plans.plan import Plan
from relayout.storage.stores import Store


def recorded_source(folder: Store, record: SourceRecord, *, is_whole: bool = True) -> SourceCheckpoint:
    """The source checkpoint that a record describes; its files need not exist.

    Args:
        folder: the converted folder.
        record: its source record.
        is_whole: whether all tensors of the shards must have been converted.

    Raises:
        FormatError: a shard's header is damaged, or its tensors are not those of the record.
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
    """The conversion that the sidecar describes.

    Args:
        tables: of each holder that the folder has.

    Raises:
        FormatError: tables and source record contradict each other.
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
    # Not every writer has units: all files are one, in their order.
    order = tuple(dict.fromkeys(t for offsets in stored for t in offsets))
    holders = by_holder(files, plan.num_ranks + (options.layout == WHOLE_TENSORS))
    layout = Layout(tuple(files), holders, (order,), (range(len(files)),))
    return Conversion(folder, source, plan, cut, layout, options, manifest.present, manifest.digest)


def as_one_rank(manifest: Manifest, record: SourceRecord) -> tuple[Manifest, SourceRecord]:
    """A folder with whole tensors as the conversion for one rank that these are; others as they are."""
    if manifest.whole is None:
        return manifest, record
    options = replace(record.options, num_ranks=1, layout=RANKS)
    one_rank = replace(record, options=options, cuts=(Cut((WHOLE,)),), cut_of=(0,) * len(record.names))
    return replace(manifest, ranks=(manifest.whole,), whole=None), one_rank


def rows_of_files(table: RankTable, num_files: int) -> list[list[int]]:
    """The rows of the table that are about each file of the rank, in order."""
    rows: list[list[int]] = [[] for _ in range(num_files)]
    for row, number in enumerate(table.files):
        rows[number].append(row)
    return rows
