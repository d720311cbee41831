"""Writes and reads rank tables: which tensor of a rank lies where. Pure; FORMAT.md is normative.

Half a million tensors are of a few dozen kinds (dtype, shape, how they were cut): these are stored once each. What is
said of each tensor is a column of numbers, which numpy checks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from relayout.core.digests import digest_hex
from relayout.core.dtypes import BITS, num_bytes
from relayout.core.slices import Slice
from relayout.errors import FormatError, shown
from relayout.format.fields import Fields, parse_object
from relayout.format.index import ARENA_ALIGNMENT, FORMAT_VERSION, MANIFEST_NAME, Kind, Manifest, RankEntry, RankTable
from relayout.format.manifest import (
    check_version,
    compact_json,
    compress,
    decompress,
    parse_shapes,
)
from relayout.format.safetensors import check_name
from relayout.format.slices import dump_slice, parse_slice

Column = npt.NDArray[np.int64]


def dump_table(table: RankTable, conversion: str) -> bytes:
    """Serialize a rank table, as it is stored."""
    kinds = table.kinds
    top = {
        "relayout": FORMAT_VERSION,
        "conversion": conversion,
        "rank": table.rank,
        "kinds": {
            "dtype": [one.dtype for one in kinds],
            "shape": [one.shape for one in kinds],
            "source_shape": [None if one.part.is_whole else one.source_shape for one in kinds],
            "slice": [dump_slice(one.part) for one in kinds],
        },
        "name": table.names,
        "kind": table.kind_of,
        "file": table.files,
        "offset": table.offsets,
        "arena_offset": table.arena_offsets,
        "digest": table.digests,
    }
    return compress(compact_json(top))


def parse_table(blob: bytes, manifest: Manifest, rank: int, where: str) -> RankTable:
    """Parse a rank table, given as stored, and prove that its tensors lie inside files and arena.

    Raises:
        FormatError: it is damaged, of another rank or conversion, or not what FORMAT.md demands.
    """
    entry = manifest.ranks[rank]
    if digest_hex(blob) != entry.table_digest:
        raise FormatError(
            f"digest differs from the one in {MANIFEST_NAME}: damaged, or of another conversion",
            path=where,
            code="digest",
        )
    top = parse_object(decompress(blob, where), where, plain_integers=True)
    check_version(top, where)
    fields = Fields(top, where)
    if (fields.text("conversion"), fields.size("rank")) != (manifest.conversion, rank):
        raise FormatError(
            f"is of rank {top['rank']} of conversion {shown(top['conversion'])}", path=where, code="owner"
        )
    kinds = _parse_kinds(Fields(fields.object("kinds"), where), where)
    count = entry.num_tensors
    kind = fields.column("kind", int, count)
    if kind and max(kind) >= len(kinds):
        raise FormatError(f"kind {max(kind)} of {len(kinds)}", path=where, code="field")
    table = RankTable(
        rank=rank,
        kinds=kinds,
        kind_of=kind,
        names=fields.column("name", str, count),
        files=fields.column("file", int, count),
        offsets=fields.column("offset", int, count),
        arena_offsets=fields.column("arena_offset", int, count),
        digests=fields.column("digest", str, count),
    )
    if count:
        check_name(max(table.names, key=len), where)
    if len(set(table.names)) != count:
        raise FormatError("a tensor name occurs twice", path=where, code="field")
    sizes = _sizes(table, entry, where)
    _check_places(table, entry, [file.nbytes for file in manifest.rank_files(rank)], sizes, where)
    if (total := sum(sizes.tolist())) != entry.nbytes:
        raise FormatError(f"tensors of {total} bytes, {MANIFEST_NAME} says {entry.nbytes}", path=where, code="field")
    return table


def _parse_kinds(fields: Fields, where: str) -> list[Kind]:
    count = len(fields.items("dtype"))
    shapes = parse_shapes(fields.column("shape", list, count), where)
    whole = fields.column("source_shape", (list, type(None)), count)
    slices = [parse_slice(value, where) for value in fields.column("slice", dict, count)]
    source_shapes = [shape if value is None else value for shape, value in zip(shapes, whole, strict=True)]
    columns = (fields.column("dtype", str, count), shapes, parse_shapes(source_shapes, where), slices)
    kinds = [Kind(*one) for one in zip(*columns, strict=True)]
    for one in kinds:
        if not _is_part(one.part, one.source_shape, one.shape):
            shape, part, source_shape = (
                shown(value) for value in (list(one.shape), dump_slice(one.part), list(one.source_shape))
            )
            raise FormatError(
                f"{shape} is not slice {part} of a tensor {source_shape}",
                path=where,
                code="field",
            )
    return kinds


def _sizes(table: RankTable, entry: RankEntry, where: str) -> Column:
    """Bytes of each tensor."""
    kinds, kind = table.kinds, np.array(table.kind_of, np.int64)
    sizes = np.zeros(len(kinds), np.int64)
    for number, first in zip(*np.unique(kind, return_index=True), strict=True):
        one = kinds[number]
        nbytes = num_bytes(one.dtype, one.shape) if one.dtype in BITS else None
        if nbytes is None or nbytes > entry.nbytes:
            name = table.names[first]
            raise FormatError(
                f"{shown(one.dtype)} {shown(list(one.shape))} is no stored tensor",
                path=where,
                tensor=name,
                code="field",
            )
        sizes[number] = nbytes
    return sizes[kind]


def _check_places(table: RankTable, entry: RankEntry, file_nbytes: Sequence[int], sizes: Column, where: str) -> None:
    """Prove that each tensor lies inside its file and the arena, and that one run of one read brings it there.

    All numbers are below 2**63, and `_check_reads` has proved those of the reads: no sum below overflows.
    """
    files, offsets, arena_offsets = (
        np.array(column, np.int64) for column in (table.files, table.offsets, table.arena_offsets)
    )
    lengths = np.array(file_nbytes, np.int64)
    exists = files < len(lengths)
    inside = exists.copy()
    inside[exists] = offsets[exists] <= lengths[files[exists]] - sizes[exists]
    for row in np.flatnonzero(~inside)[:1]:
        end = int(offsets[row]) + int(sizes[row])
        raise FormatError(
            f"ends outside its file, at byte {end}", path=where, tensor=table.names[row], code="truncated"
        )
    for row in np.flatnonzero((arena_offsets % ARENA_ALIGNMENT != 0) | (arena_offsets > entry.arena_nbytes - sizes))[
        :1
    ]:
        raise FormatError(
            f"{sizes[row]} bytes at {arena_offsets[row]} of an arena of {entry.arena_nbytes}",
            path=where,
            tensor=table.names[row],
            code="field",
        )
    order = np.argsort(arena_offsets, kind="stable")
    order = order[sizes[order] > 0]
    ends = arena_offsets[order] + sizes[order]
    for place in np.flatnonzero(ends[:-1] > arena_offsets[order[1:]])[:1]:
        one, other = table.names[order[place]], table.names[order[place + 1]]
        raise FormatError(f"tensors {one!r} and {other!r} overlap in the arena", path=where, code="coverage")
    brought = _are_brought(entry, files, offsets, arena_offsets, sizes)
    for row in np.flatnonzero(~brought)[:1]:
        raise FormatError(
            f"no read in the manifest covers it (arena offset {arena_offsets[row]})",
            path=where,
            tensor=table.names[row],
            code="coverage",
        )


def _are_brought(
    entry: RankEntry, files: Column, offsets: Column, arena_offsets: Column, sizes: Column
) -> npt.NDArray[np.bool_]:
    """Whether one run of one read has a tensor's bytes and puts them where the table says; empty tensors need none."""
    is_empty: npt.NDArray[np.bool_] = sizes == 0
    if not entry.reads:
        return is_empty
    reads = sorted(entry.reads, key=lambda read: read.transfer.target)

    def column(values: list[int]) -> Column:
        return np.array(values, np.int64)[which]

    targets = np.array([read.transfer.target for read in reads], np.int64)
    which = np.searchsorted(targets, arena_offsets, side="right") - 1
    before_all = which < 0
    which = np.maximum(which, 0)
    count = column([read.transfer.count for read in reads])
    pitch = column([max(1, read.transfer.target_stride) for read in reads])
    nbytes = column([read.transfer.nbytes for read in reads])
    inside = arena_offsets - targets[which]
    run = np.where(count == 1, 0, np.minimum(inside // pitch, count - 1))
    start = inside - run * pitch
    source = column([read.transfer.source for read in reads]) + run * column(
        [read.transfer.source_stride for read in reads]
    )
    right: npt.NDArray[np.bool_] = (
        ~before_all
        & (column([read.file for read in reads]) == files)
        & (source + start == offsets)
        & (start <= nbytes - sizes)
    )
    return right | is_empty


def _is_part(part: Slice, whole: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a slice of a tensor of shape `whole` exists and has `shape`."""
    return part.is_inside(whole) and part.shape(whole) == shape
