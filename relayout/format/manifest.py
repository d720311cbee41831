"""Writes and reads the manifest, and what all files of the sidecar index share. Pure; FORMAT.md is normative."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import zstandard

from relayout.core.digests import digest_hex
from relayout.core.extents import BLOCK, Transfer
from relayout.errors import FormatError, PlanError, shown
from relayout.format.fields import Fields, parse_object
from relayout.format.index import (
    ARENA_ALIGNMENT,
    FORMAT_VERSION,
    MAX_ALIGNMENT,
    MIN_ALIGNMENT,
    IndexedFile,
    Manifest,
    RankEntry,
    Read,
)
from relayout.format.safetensors import LENGTH_NBYTES, MAX_AXES, MAX_HEADER_NBYTES, json_text

SOURCE_RECORD_NAME = "relayout.source.json.zst"
DIGEST = "xxh3_128"
"""The algorithm of every digest: detects damage and stale copies, not forgery."""

MAX_MANIFEST_NBYTES = 64 * 2**20
MAX_TABLE_NBYTES = 2**27
"""Limit of a table's JSON, uncompressed."""
_MIN_ENTRY_NBYTES = 48
"""Of a tensor's entry in a header."""
_PIECE_NBYTES = 2**12
"""Of a zstd frame, at a time: what this expands to, at most 32,000 times as much, may be too much already."""

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,242}\.safetensors\Z")


def table_name(rank: int) -> str:
    """File name of a rank's table."""
    return f"relayout.rank-{rank}.json.zst"


def relayout_entry(number: int, conversion: str) -> str:
    """The `relayout` entry of a file's `__metadata__`, the first thing in its header: which file it is."""
    return compact_json({"format": FORMAT_VERSION, "file": number, "conversion": conversion}).decode()


def header_prefix(number: int, conversion: str) -> bytes:
    """The bytes that follow the 8-byte length in a file: enough to tell which one of which conversion it is."""
    entry = compact_json({"relayout": relayout_entry(number, conversion)})
    return b'{"__metadata__":' + entry.removesuffix(b"}")


def compact_json(top: object) -> bytes:
    """JSON without white space."""
    return json_text(top).encode()


def compress(text: bytes) -> bytes:
    """What is stored of a table or record.

    Raises:
        PlanError: it would be too large to be read again.
    """
    if len(text) > MAX_TABLE_NBYTES:
        raise PlanError(f"too many tensors: a table of {len(text)} bytes, limit {MAX_TABLE_NBYTES}", code="limit")
    return zstandard.ZstdCompressor(level=10).compress(text)


def decompress(blob: bytes, where: str) -> bytes:
    """The inverse of `compress`, bounded.

    Raises:
        FormatError: not a zstd frame, or larger than a table may be.
    """
    frame = zstandard.ZstdDecompressor(max_window_size=2**27).decompressobj()
    pieces = []
    room = MAX_TABLE_NBYTES
    for start in range(0, len(blob), _PIECE_NBYTES):
        if frame.eof:
            break
        try:
            pieces.append(frame.decompress(blob[start : start + _PIECE_NBYTES]))
        except zstandard.ZstdError as error:
            raise FormatError(f"not a zstd frame: {error}", path=where, code="syntax") from None
        room -= len(pieces[-1])
        if room < 0:
            raise FormatError(f"expands to more than {MAX_TABLE_NBYTES} bytes", path=where, code="limit")
    if not frame.eof:
        raise FormatError("the zstd frame does not end (truncated?)", path=where, code="truncated")
    rest = len(frame.unused_data) + max(0, len(blob) - len(pieces) * _PIECE_NBYTES)
    if rest:
        raise FormatError(f"{rest} bytes behind the zstd frame", path=where, code="syntax")
    return b"".join(pieces)


def dump_manifest(manifest: Manifest) -> bytes:
    """Serialize relayout.json: indented, for people."""
    top: dict[str, Any] = {
        "relayout": FORMAT_VERSION,
        "generator": manifest.generator,
        "conversion": manifest.conversion,
        "digest": DIGEST,
        "model_type": manifest.model_type,
        "plan": manifest.plan,
        "expert_parallel": manifest.expert_parallel,
        "num_ranks": manifest.num_ranks,
        "alignment": manifest.alignment,
        "dcp": manifest.dcp,
        "source": {
            "record": SOURCE_RECORD_NAME,
            "record_digest": manifest.record_digest,
            "nbytes": manifest.source_nbytes,
        },
        "hub_index_digest": manifest.hub_index_digest,
        "files": [asdict(file) for file in manifest.files],
        "ranks": [
            {
                "table": entry.table,
                "table_digest": entry.table_digest,
                "num_tensors": entry.num_tensors,
                "nbytes": entry.nbytes,
                "files": entry.files,
                "arena_nbytes": entry.arena_nbytes,
                "reads": [_dump_read(read) for read in entry.reads],
            }
            for entry in manifest.ranks
        ],
    }
    top["self_digest"] = _self_digest(top)
    return (json.dumps(top, indent=2, ensure_ascii=False) + "\n").encode()


def parse_manifest(blob: bytes, where: str) -> Manifest:
    """Parse relayout.json, and prove that its reads stay inside files and arena and do not overlap there.

    Raises:
        FormatError: it is not what FORMAT.md demands.
    """
    top = parse_object(blob, where)
    check_version(top, where)
    claimed = top.pop("self_digest", None)
    if claimed != _self_digest(top):
        raise FormatError(
            f"its self_digest is {shown(claimed)}, not that of its content: damaged or edited",
            path=where,
            code="digest",
        )
    if top.get("digest") != DIGEST:
        raise FormatError(
            f"digest algorithm {shown(top.get('digest'))}, expected {DIGEST!r}", path=where, code="version"
        )
    fields = Fields(top, where)
    ranks = fields.objects("ranks")
    if len(ranks) != fields.size("num_ranks") or not ranks:
        raise FormatError(f"{len(ranks)} entries in 'ranks', num_ranks is {top['num_ranks']}", path=where, code="field")
    model_type = top.get("model_type")
    source = Fields(fields.object("source"), where)
    files = _parse_files(fields, where)
    manifest = Manifest(
        generator=fields.text("generator"),
        conversion=fields.text("conversion"),
        model_type=model_type if isinstance(model_type, str) else None,
        plan=fields.text("plan"),
        expert_parallel=top.get("expert_parallel") is True,
        alignment=_alignment(fields),
        dcp=top.get("dcp") is True,
        record_digest=source.text("record_digest"),
        source_nbytes=source.size("nbytes"),
        hub_index_digest=None if top.get("hub_index_digest") is None else fields.text("hub_index_digest"),
        files=files,
        ranks=tuple(_parse_rank(entry, rank, files, where) for rank, entry in enumerate(ranks)),
    )
    unused = set(range(len(files))).difference(*(entry.files for entry in manifest.ranks))
    if unused:
        raise FormatError(f"{files[min(unused)].name} is a file of no rank", path=where, code="field")
    return manifest


def check_version(top: Mapping[str, Any], where: str) -> None:
    """Refuse a format that is not this one.

    Raises:
        FormatError: it is another, or none is named.
    """
    version = top.get("relayout")
    if type(version) is not int or version != FORMAT_VERSION:
        raise FormatError(
            f"format version {shown(version)}, this relayout reads {FORMAT_VERSION}", path=where, code="version"
        )


def _self_digest(top: Mapping[str, Any]) -> str:
    """Digest of a manifest's fields, in their order, as compact JSON."""
    return digest_hex(compact_json(top))


def _alignment(fields: Fields) -> int:
    alignment = fields.size("alignment")
    if not MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise FormatError(
            f"alignment {alignment}, expected a power of two, {MIN_ALIGNMENT} to {MAX_ALIGNMENT}",
            path=fields.where,
            code="field",
        )
    return alignment


def _dump_read(read: Read) -> dict[str, int]:
    transfer = read.transfer
    row = {
        "file": read.file,
        "offset": transfer.source,
        "nbytes": transfer.nbytes,
        "arena_offset": transfer.target,
    }
    if transfer.count > 1:
        row |= {
            "count": transfer.count,
            "stride": transfer.source_stride,
            "arena_stride": transfer.target_stride,
        }
    return row


def _parse_read(row: Mapping[str, Any], where: str) -> Read:
    fields = Fields(row, where)
    count = fields.size("count", 1)
    return Read(
        fields.size("file"),
        Transfer(
            source=fields.size("offset"),
            target=fields.size("arena_offset"),
            nbytes=fields.size("nbytes"),
            count=count,
            source_stride=fields.size("stride") if count > 1 else 0,
            target_stride=fields.size("arena_stride") if count > 1 else 0,
        ),
    )


def _parse_files(fields: Fields, where: str) -> tuple[IndexedFile, ...]:
    files = []
    for row in fields.objects("files"):
        file = Fields(row, where)
        if not _FILE_NAME.match(file.text("name")):
            raise FormatError(
                f"{shown(file.text('name'))} is not the name of a .safetensors file", path=where, code="unsafe"
            )
        files.append(
            IndexedFile(file.text("name"), file.size("nbytes"), file.size("data_start"), file.text("header_digest"))
        )
        if files[-1].data_start > min(files[-1].nbytes, LENGTH_NBYTES + MAX_HEADER_NBYTES):
            raise FormatError(
                f"{files[-1].name}: data_start {files[-1].data_start} exceeds the file or the header limit",
                path=where,
                code="truncated",
            )
    if len({file.name for file in files}) < len(files):
        raise FormatError("two files have one name", path=where, code="field")
    return tuple(files)


def _parse_rank(entry: Mapping[str, Any], rank: int, files: Sequence[IndexedFile], where: str) -> RankEntry:
    where = f"{where}: rank {rank}"
    fields = Fields(entry, where)
    if fields.text("table") != table_name(rank):
        raise FormatError(
            f"table {shown(fields.text('table'))}, expected {table_name(rank)!r}", path=where, code="field"
        )
    numbers = fields.column("files", int)
    if len(set(numbers)) < len(numbers) or (numbers and max(numbers) >= len(files)):
        raise FormatError(
            f"files {shown(numbers)}, expected different numbers below {len(files)}", path=where, code="mismatch"
        )
    parsed = RankEntry(
        table=fields.text("table"),
        table_digest=fields.text("table_digest"),
        num_tensors=fields.size("num_tensors"),
        nbytes=fields.size("nbytes"),
        files=tuple(numbers),
        arena_nbytes=fields.size("arena_nbytes"),
        reads=tuple(_parse_read(row, where) for row in fields.objects("reads")),
    )
    _check_reads(parsed, [files[number] for number in numbers], where)
    return parsed


def _check_reads(entry: RankEntry, files: Sequence[IndexedFile], where: str) -> None:
    for number, read in enumerate(entry.reads):
        transfer = read.transfer
        if read.file >= len(files):
            raise FormatError(f"read {number}: file {read.file} of {len(files)}", path=where, code="field")
        if transfer.nbytes == 0 or transfer.count == 0:
            raise FormatError(f"read {number}: reads nothing", path=where, code="coverage")
        if transfer.count > 1 and min(transfer.source_stride, transfer.target_stride) < transfer.nbytes:
            raise FormatError(f"read {number}: runs of {transfer.nbytes} bytes overlap", path=where, code="coverage")
        file = files[read.file]
        if transfer.source_end > file.nbytes:
            raise FormatError(
                f"read {number}: ends at byte {transfer.source_end} of {file.name}, which has {file.nbytes}",
                path=where,
                code="truncated",
            )
        if transfer.target_end > entry.arena_nbytes:
            raise FormatError(
                f"read {number}: ends at byte {transfer.target_end} of an arena of {entry.arena_nbytes}",
                path=where,
                code="truncated",
            )
    headers_nbytes = sum(file.data_start for file in files)
    if entry.num_tensors * _MIN_ENTRY_NBYTES > headers_nbytes:
        raise FormatError(f"{entry.num_tensors} tensors in headers of {headers_nbytes} bytes", path=where, code="field")
    limit = entry.nbytes + ARENA_ALIGNMENT * entry.num_tensors + 2 * BLOCK * (len(files) + 1)
    if entry.arena_nbytes > limit:
        raise FormatError(
            f"an arena of {entry.arena_nbytes} bytes for tensors of {entry.nbytes}", path=where, code="field"
        )
    total = sum(read.transfer.total_nbytes for read in entry.reads)
    if total != entry.nbytes:
        raise FormatError(f"reads of {total} bytes, tensors of {entry.nbytes}", path=where, code="field")
    end = 0
    for read in sorted(entry.reads, key=lambda read: read.transfer.target):
        if read.transfer.target < end:
            raise FormatError(f"reads overlap at byte {read.transfer.target} of the arena", path=where, code="coverage")
        end = read.transfer.target_end
    wanted = [0] * len(files)
    for read in entry.reads:
        wanted[read.file] += read.transfer.total_nbytes
    for file, nbytes in zip(files, wanted, strict=True):
        if nbytes > file.nbytes:
            raise FormatError(
                f"reads of {nbytes} bytes of {file.name}, which has {file.nbytes}", path=where, code="coverage"
            )


def parse_shapes(values: Iterable[Any], where: str) -> list[tuple[int, ...]]:
    """Shapes from lists of sizes.

    Raises:
        FormatError: one is none.
    """
    shapes = list(map(tuple, values))
    dims = [dim for shape in shapes for dim in shape]
    if any(len(shape) > MAX_AXES for shape in shapes):
        raise FormatError(f"a shape of {max(map(len, shapes))} axes, limit {MAX_AXES}", path=where, code="limit")
    if not set(map(type, dims)) <= {int} or (dims and not (min(dims) >= 0 and max(dims) < 2**63)):
        wrong = next(shape for shape in shapes if not all(type(dim) is int and 0 <= dim < 2**63 for dim in shape))
        raise FormatError(f"{shown(list(wrong))} is no shape", path=where, code="field")
    return shapes
