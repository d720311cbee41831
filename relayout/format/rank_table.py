"""Writes and reads rank tables: the locations of a rank's tensors. Pure; FORMAT.md is normative.

Half a million tensors are of a few dozen kinds (dtype, shape, cut), which are stored once each. The properties of each
tensor are columns of numbers, which numpy checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from relayout.core.digests import blake3_hex
from relayout.core.extents import Transfer
from relayout.core.slices import BITS
from relayout.errors import FormatCode, FormatError, PlanError, about, shown
from relayout.format.fields import Fields, check_name, dump_slice, parse_object, parse_slice, refuse_lfs_pointer
from relayout.format.index import (
    ARENA_ALIGNMENT,
    FORMAT_VERSION,
    MANIFEST_NAME,
    Manifest,
    RankEntry,
    RankTable,
    TensorKind,
)
from relayout.format.manifest import (
    check_version,
    compact_json,
    compress,
    decompress,
    parse_shapes,
)

Column = npt.NDArray[np.int64]

_MAX_BITS = 1024
"""Maximum bits of an element of an unknown dtype."""


def dump_table(table: RankTable) -> bytes:
    """Serialize a rank table, as it is stored."""
    kinds = table.kinds
    top = {
        "relayout": FORMAT_VERSION,
        "kinds": {
            "dtype": [kind.dtype for kind in kinds],
            "bits": [kind.bits for kind in kinds],
            "shape": [kind.shape for kind in kinds],
            "source_shape": [None if kind.part.is_whole else kind.source_shape for kind in kinds],
            "slice": [dump_slice(kind.part) for kind in kinds],
        },
        "name": table.names,
        "kind": table.kind_of,
        "file": table.files,
        "offset": table.offsets,
        "arena_offset": table.arena_offsets,
    }
    return compress(compact_json(top))


def parse_table(blob: bytes, manifest: Manifest, rank: int, where: str) -> RankTable:
    """Parse a rank table, given as stored, and check that its tensors lie inside files and arena.

    `rank` may be any holder of the manifest.
    """
    with about(path=where):
        return _parse_table(blob, manifest, rank, where)


def _parse_table(blob: bytes, manifest: Manifest, rank: int, where: str) -> RankTable:
    entry = manifest.holders[rank]
    refuse_lfs_pointer(blob)
    if blake3_hex(blob) != entry.table_digest:
        raise FormatError(
            f"digest differs from the one in {MANIFEST_NAME}: damaged, or of another rank or conversion", code="digest"
        )
    top = parse_object(decompress(blob, where), where)
    check_version(top)
    fields = Fields(top)
    kinds = _parse_kinds(Fields(fields.object("kinds")))
    count = entry.num_tensors
    table = RankTable(
        rank=rank,
        kinds=kinds,
        kind_of=fields.positions("kind", count, len(kinds)),
        names=fields.column("name", str, count),
        files=fields.column("file", int, count),
        offsets=fields.column("offset", int, count),
        arena_offsets=fields.column("arena_offset", int, count),
    )
    if count:
        check_name(max(table.names, key=len))
    if len(set(table.names)) != count:
        raise FormatError("a tensor name occurs twice", code="field")
    sizes = _sizes(table, entry)
    _check_offsets(table, manifest, sizes)
    if (total := sum(sizes.tolist())) != entry.nbytes:
        raise FormatError(f"tensors of {total} bytes, {MANIFEST_NAME} says {entry.nbytes}", code="field")
    return table


def _parse_kinds(fields: Fields) -> list[TensorKind]:
    dtypes = fields.column("dtype", str)
    count = len(dtypes)
    bits = fields.column("bits", int, count)
    shapes = parse_shapes(fields.column("shape", list, count))
    whole = fields.column("source_shape", (list, type(None)), count)
    slices = [parse_slice(value) for value in fields.column("slice", dict, count)]
    source_shapes = [shape if value is None else value for shape, value in zip(shapes, whole, strict=True)]
    columns = (dtypes, bits, shapes, parse_shapes(source_shapes), slices)
    kinds = [TensorKind(*row) for row in zip(*columns, strict=True)]
    for kind in kinds:
        if BITS.get(kind.dtype, kind.bits) != kind.bits or not 1 <= kind.bits <= _MAX_BITS:
            raise FormatError(f"{shown(kind.dtype)} of {kind.bits} bits", code="field")
        if not kind.part.is_inside(kind.source_shape) or kind.part.shape(kind.source_shape) != kind.shape:
            shape, part, source_shape = (
                shown(value) for value in (list(kind.shape), dump_slice(kind.part), list(kind.source_shape))
            )
            raise FormatError(f"{shape} is not slice {part} of a tensor {source_shape}", code="field")
    return kinds


def _sizes(table: RankTable, entry: RankEntry) -> Column:
    """Return the bytes of each tensor."""
    kind_of = np.array(table.kind_of, np.int64)
    sizes = np.zeros(len(table.kinds), np.int64)
    for index, first in zip(*np.unique(kind_of, return_index=True), strict=True):
        kind = table.kinds[index]
        nbytes = kind.nbytes
        if prod(kind.shape) * kind.bits % 8 or nbytes > entry.nbytes:
            what = f"{shown(kind.dtype)} {shown(list(kind.shape))} is not a stored tensor"
            raise FormatError(what, tensor=table.names[first], code="field")
        sizes[index] = nbytes
    return sizes[kind_of]


def _check_offsets(table: RankTable, manifest: Manifest, sizes: Column) -> None:
    """Check that each tensor lies inside its file and the arena, and that a single run of a single read puts it there.

    In a file of whole tensors, this must hold for each range of a slice.

    All numbers are at most MAX_SIZE, and `_check_reads` has checked those of the reads: no sum below overflows.
    """

    def refuse(
        wrong: npt.NDArray[np.bool_], what: Callable[[int], str], code: FormatCode, rows: Column | None = None
    ) -> None:
        """Raise FormatError for the first wrong item; `rows` are the items' tensors, if items are pieces."""
        for index in np.flatnonzero(wrong)[:1]:
            name = table.names[index if rows is None else rows[index]]
            raise FormatError(what(index), tensor=name, code=code)

    entry, stored = manifest.holders[table.rank], manifest.holder_files(table.rank)
    files, offsets, arena_offsets = (
        np.array(column, np.int64) for column in (table.files, table.offsets, table.arena_offsets)
    )
    lengths = np.array([file.nbytes for file in stored], np.int64)
    data_starts = np.array([file.data_start for file in stored], np.int64)
    refuse(files >= len(lengths), lambda row: f"file {files[row]} of {len(lengths)}", "truncated")
    refuse(offsets < data_starts[files], lambda row: f"begins in the header, at byte {offsets[row]}", "truncated")
    of_whole = manifest.shared
    rows, starts, targets, piece_sizes = _pieces(table, [index in of_whole for index in entry.files], sizes)
    refuse(
        starts > lengths[files[rows]] - piece_sizes,
        lambda piece: f"ends outside its file, at byte {int(starts[piece]) + int(piece_sizes[piece])}",
        "truncated",
        rows,
    )
    refuse(
        (arena_offsets % ARENA_ALIGNMENT != 0) | (arena_offsets > entry.arena_nbytes - sizes),
        lambda row: f"{sizes[row]} bytes at {arena_offsets[row]} of an arena of {entry.arena_nbytes}",
        "field",
    )
    in_file_order = np.lexsort((sizes > 0, offsets, files))
    refuse(in_file_order != np.arange(len(sizes)), lambda row: "is not in file order", "field")
    order = np.argsort(arena_offsets, kind="stable")
    order = order[sizes[order] > 0]
    ends = arena_offsets[order] + sizes[order]
    for row in np.flatnonzero(ends[:-1] > arena_offsets[order[1:]])[:1]:
        name, other = table.names[order[row]], table.names[order[row + 1]]
        raise FormatError(f"tensors {name!r} and {other!r} overlap in the arena", code="coverage")
    refuse(
        ~_are_brought(entry, files[rows], starts, targets, piece_sizes),
        lambda piece: f"no read in the manifest covers it (arena offset {arena_offsets[rows[piece]]})",
        "coverage",
        rows,
    )


def _pieces(table: RankTable, shared: Sequence[bool], sizes: Column) -> Column:
    """Return contiguous pieces of tensors in their files, in columns: rows, file offsets, arena offsets, bytes."""
    offsets, arena_offsets = (np.array(column, np.int64) for column in (table.offsets, table.arena_offsets))
    whole = np.stack([np.arange(len(sizes)), offsets, arena_offsets, sizes])
    is_shared = np.array(shared, bool)[np.array(table.files, np.int64)] if any(shared) else np.zeros(len(sizes), bool)
    transfers: dict[int, tuple[Transfer, ...]] = {}
    pieces: list[tuple[int, int, int, int]] = []
    is_split = np.zeros(len(sizes), bool)
    for row in map(int, np.flatnonzero(is_shared)):
        kind = table.kind_of[row]
        if kind not in transfers:
            transfers[kind] = _ranges_in_whole(table.kinds[kind], table.names[row])
        for transfer in transfers[kind] if len(transfers[kind]) > 1 else ():
            is_split[row] = True
            place = table.offsets[row] + transfer.source - transfers[kind][0].source
            pieces.append((row, place, table.arena_offsets[row] + transfer.target, transfer.nbytes))
    return np.concatenate([whole[:, ~is_split], np.array(pieces, np.int64).T], axis=1) if pieces else whole


def _ranges_in_whole(kind: TensorKind, name: str) -> tuple[Transfer, ...]:
    """Return the contiguous pieces of a slice in its whole tensor."""
    try:
        transfers = kind.in_whole
    except PlanError as error:
        raise FormatError(error.what, tensor=name, code="field") from None
    if any(transfer.count > 1 for transfer in transfers):
        raise FormatError("is not contiguous in a file of whole tensors", tensor=name, code="field")
    return transfers


def _are_brought(
    entry: RankEntry, files: Column, offsets: Column, arena_offsets: Column, sizes: Column
) -> npt.NDArray[np.bool_]:
    """Return, for each piece, True if it is empty, or one run of one read puts it at its arena offset."""
    if not entry.reads:
        return np.equal(sizes, 0)
    numbers = [
        (read.file, move.source, move.target, move.nbytes, move.count, move.source_stride, move.target_stride)
        for read in entry.reads
        for move in (read.transfer,)
    ]
    reads = np.array(numbers, np.int64)
    which = np.searchsorted(reads[:, 2], arena_offsets, side="right") - 1  # Reads are by rising target.
    file, source, target, nbytes, count, stride, pitch = reads[np.maximum(which, 0)].T
    inside = arena_offsets - target
    run = np.minimum(inside // np.maximum(pitch, 1), count - 1)
    start = inside - run * pitch
    is_right = (file == files) & (source + run * stride + start == offsets) & (start <= nbytes - sizes)
    brought: npt.NDArray[np.bool_] = (sizes == 0) | (which >= 0) & is_right
    return brought
