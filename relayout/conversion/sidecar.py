"""Writes what a folder has beside the tensors' bytes: side files, source record, headers, rank tables, manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from relayout import __version__
from relayout.conversion.journal import TensorDigests
from relayout.conversion.layout import Conversion, HeaderBuilder
from relayout.conversion.side_files import copy_side_file
from relayout.core.digests import EMPTY_DIGEST, digest_hex
from relayout.format.index import (
    HUB_INDEX_NAME,
    MANIFEST_NAME,
    Arena,
    IndexedFile,
    Kind,
    Manifest,
    RankEntry,
    RankTable,
    plan_arena,
)
from relayout.format.manifest import SOURCE_RECORD_NAME, compress, dump_manifest, table_name
from relayout.format.rank_table import dump_table
from relayout.format.source_record import RecordedFile, RecordedPlan, SideFile, SourceRecord, dump_record
from relayout.plans.family import dump_rules
from relayout.storage.protocols import Staging


def write_sidecar(staging: Staging, conversion: Conversion, passed: Mapping[int, TensorDigests]) -> None:
    """Write everything but the tensors' bytes, the manifest last; `passed` are digests of all tensors with bytes."""
    source = conversion.source
    side_files = [copy_side_file(source.folder, staging, name) for name in source.side_files]
    digests = digests_of_all(conversion, passed)
    record = dump_record(_source_record(conversion, [one.source for one in digests], side_files))
    conversion_id = digest_hex(record)
    stored_record = compress(record)
    staging.put(SOURCE_RECORD_NAME, [stored_record])
    del record, side_files
    files = _write_headers(staging, conversion, conversion_id)
    ranks = []
    for rank in range(conversion.plan.num_ranks):
        entry, table = _rank(conversion, rank, digests, conversion_id)
        staging.put(entry.table, [table])
        ranks.append(entry)
    hub_index = _hub_index(conversion) if conversion.plan.num_ranks == 1 else None
    if hub_index is not None:
        staging.put(HUB_INDEX_NAME, [hub_index])
    manifest = Manifest(
        generator=f"relayout {__version__}",
        conversion=conversion_id,
        model_type=source.model_type,
        plan=conversion.options.plan,
        expert_parallel=conversion.options.expert_parallel,
        alignment=conversion.options.alignment,
        dcp=conversion.options.dcp,
        record_digest=digest_hex(stored_record),
        source_nbytes=source.nbytes,
        hub_index_digest=None if hub_index is None else digest_hex(hub_index),
        files=files,
        ranks=tuple(ranks),
    )
    staging.put(MANIFEST_NAME, [dump_manifest(manifest)])


def digests_of_all(conversion: Conversion, passed: Mapping[int, TensorDigests]) -> list[TensorDigests]:
    """The digests of each tensor: of those that have passed, and of those without bytes, which no step deals with."""
    digests = []
    for t, tensor in enumerate(conversion.source.tensors):
        assert t in passed or not tensor.extent.nbytes, f"tensor {tensor.name!r}: was not hashed to its end"
        num_slices = len(conversion.plan.cut(t).distinct)
        digests.append(passed[t] if t in passed else TensorDigests(EMPTY_DIGEST, (EMPTY_DIGEST,) * num_slices))
    return digests


def _write_headers(staging: Staging, conversion: Conversion, conversion_id: str) -> tuple[IndexedFile, ...]:
    headers = HeaderBuilder(conversion.source, conversion.cut, conversion.options)
    files = []
    for number, file in enumerate(conversion.layout.files):
        header = headers.build(file, number, conversion_id)
        assert len(header) == file.data_start
        staging.write_head(file.name, header, file.nbytes)
        files.append(IndexedFile(file.name, file.nbytes, file.data_start, digest_hex(header)))
    return tuple(files)


def _rank(
    conversion: Conversion, rank: int, digests: Sequence[TensorDigests], conversion_id: str
) -> tuple[RankEntry, bytes]:
    """What the manifest says of a rank, and its table."""
    files = conversion.layout.files_of(rank)
    sizes = {cut: cut.rank_nbytes(rank) for cut in set(conversion.cut)}
    columns = [[sizes[conversion.cut[t]] for t in file.tensors] for file in files]
    arena = plan_arena([(file.data_start, file.offsets, nbytes) for file, nbytes in zip(files, columns, strict=True)])
    table = dump_table(_rank_table(conversion, rank, arena, digests), conversion_id)
    entry = RankEntry(
        table=table_name(rank),
        table_digest=digest_hex(table),
        num_tensors=sum(map(len, columns)),
        nbytes=sum(map(sum, columns)),
        files=conversion.layout.ranks[rank],
        arena_nbytes=arena.nbytes,
        reads=arena.reads,
    )
    return entry, table


def _rank_table(conversion: Conversion, rank: int, arena: Arena, digests: Sequence[TensorDigests]) -> RankTable:
    files = conversion.layout.files_of(rank)
    tensors, cut = conversion.source.tensors, conversion.cut
    order = [t for file in files for t in file.tensors]
    different = list(dict.fromkeys(cut[t] for t in order))
    number = {one: position for position, one in enumerate(different)}
    which = {one: one.cut.which[rank] for one in different}
    return RankTable(
        rank=rank,
        kinds=[Kind(one.dtype, one.rank_shape(rank), one.shape, one.cut.slices[rank]) for one in different],
        kind_of=[number[cut[t]] for t in order],
        names=[tensors[t].name for t in order],
        files=[position for position, file in enumerate(files) for _ in file.tensors],
        offsets=[offset for file in files for offset in file.offsets],
        arena_offsets=[offset for column in arena.offsets for offset in column],
        digests=[digests[t].slices[which[cut[t]]] for t in order],
    )


def _source_record(conversion: Conversion, digests: Sequence[str], side_files: Sequence[SideFile]) -> SourceRecord:
    source = conversion.source
    tensors, family = source.tensors, conversion.plan.family
    return SourceRecord(
        options=conversion.options,
        plan=None if family is None else RecordedPlan(family.name, family.origin, dump_rules(family)),
        names=[tensor.name for tensor in tensors],
        dtypes=[tensor.dtype for tensor in tensors],
        shapes=[tensor.shape for tensor in tensors],
        digests=digests,
        cuts=conversion.plan.cuts,
        cut_of=conversion.plan.cut_of,
        file_of=[tensor.file for tensor in tensors],
        offsets=[tensor.extent.offset for tensor in tensors],
        files=tuple(RecordedFile(file.name, file.nbytes, file.header) for file in source.files),
        index=source.index,
        side_files=tuple(side_files),
    )


def _hub_index(conversion: Conversion) -> bytes:
    """The index.json that lets stock loaders read a folder of one rank."""
    source = conversion.source
    weight_map = {source.tensors[t].name: file.name for file in conversion.layout.files_of(0) for t in file.tensors}
    ordered = {tensor.name: weight_map[tensor.name] for tensor in source.tensors}
    top = {"metadata": {"total_size": source.nbytes}, "weight_map": ordered}
    return (json.dumps(top, indent=2, ensure_ascii=False) + "\n").encode()
