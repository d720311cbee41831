"""What a converted folder says of itself, as the planner would have it: source record and layout."""

from __future__ import annotations

from pathlib import Path

from relayout.catalogue import Catalogue
from relayout.errors import FormatError
from relayout.files import read_small
from relayout.folder import MAX_TABLE_FILE_NBYTES
from relayout.index import Manifest, RankTable
from relayout.layout import Layout, RankFile
from relayout.members import member
from relayout.plan import Plan
from relayout.record import SourceRecord, parse_record
from relayout.sidecar import SOURCE_RECORD_NAME, decompress, digest_hex
from relayout.slicing import Slice


def read_record(folder: Path, manifest: Manifest) -> SourceRecord:
    """Read and check the source record.

    Raises:
        FormatError: it cannot be read, is damaged, or of another conversion.
    """
    path = member(folder, SOURCE_RECORD_NAME)
    blob = read_small(path, MAX_TABLE_FILE_NBYTES)
    text = decompress(blob, str(path))
    if (digest_hex(blob), digest_hex(text)) != (manifest.record_digest, manifest.conversion):
        raise FormatError(f"{path}: digest differs from the one that the manifest names")
    return parse_record(text, manifest.num_ranks, str(path))


def stored_layout(manifest: Manifest, tables: list[RankTable], catalogue: Catalogue, plan: Plan) -> Layout:
    """The layout that the sidecar describes."""
    position = {tensor.name: t for t, tensor in enumerate(catalogue.tensors)}
    agreeing: set[tuple[int, int]] = set()
    """Slices that are equal, by identity: many tensors have the same ones, and these may be long."""

    def agree(one: Slice, other: Slice) -> bool:
        if (id(one), id(other)) not in agreeing:
            if one != other:
                return False
            agreeing.add((id(one), id(other)))
        return True

    held = [{t for t, slices in enumerate(plan.slices) if slices[rank].is_held} for rank in range(plan.num_ranks)]
    for rank, table in enumerate(tables):
        for row, name in enumerate(table.names):
            t = position.get(name)
            if t is None or t not in held[rank] or not agree(table.slices[row], plan.slices[t][rank]):
                raise FormatError(f"rank table {rank}: tensor {name!r} is not what the source record says")
        if len(table.names) != len(held[rank]):
            raise FormatError(f"rank table {rank}: {len(table.names)} tensors, the source record has {len(held[rank])}")
    ranks = []
    for rank, (entry, table) in enumerate(zip(manifest.ranks, tables, strict=True)):
        rows = rows_of_files(table, len(entry.files))
        files = (
            RankFile(
                file.name,
                rank,
                part,
                tuple(position[table.names[row]] for row in rows[part]),
                tuple(table.offsets[row] - file.data_start for row in rows[part]),
                file.data_start,
                file.nbytes,
            )
            for part, file in enumerate(entry.files)
        )
        ranks.append(tuple(files))
    return Layout(manifest.alignment, tuple(ranks), manifest.dcp)


def rows_of_files(table: RankTable, num_files: int) -> list[list[int]]:
    """For each file of the rank: its rows in the table, in order."""
    rows: list[list[int]] = [[] for _ in range(num_files)]
    for row, number in enumerate(table.files):
        rows[number].append(row)
    return rows
