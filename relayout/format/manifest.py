"""Writes and reads the manifest, and common parts of all sidecar index files. Pure; FORMAT.md is normative."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import zstandard

from relayout.core.digests import BLAKE3_NBYTES, XXH3_NBYTES, blake3_hex, xxh3_hex
from relayout.core.extents import BLOCK, Transfer
from relayout.core.slices import Slice
from relayout.errors import FormatError, about, readable, shown
from relayout.format.fields import MAX_AXES, MAX_SIZE, Fields, dump_slice, parse_object
from relayout.format.index import (
    ARENA_ALIGNMENT,
    FILE_VERSION,
    FORMAT_VERSION,
    MANIFEST_NAME,
    MAX_ALIGNMENT,
    MAX_CHUNK_NBYTES,
    MIN_ALIGNMENT,
    MIN_CHUNK_NBYTES,
    IndexedFile,
    Manifest,
    RankEntry,
    Read,
)
from relayout.format.safetensors import LENGTH_NBYTES, MAX_HEADER_NBYTES, json_text

SOURCE_RECORD_NAME = "relayout.source.json.zst"

MAX_MANIFEST_NBYTES = 64 * 2**20
MAX_WINDOW_NBYTES = 2**27
"""Maximum bytes of a zstd window."""
MAX_TABLE_NBYTES = 2**27
"""Maximum bytes of a table's JSON, uncompressed."""
MAX_RECORD_NBYTES = 2**29
"""Maximum bytes of the source record's JSON, with the headers of all shards: a million tensors take half."""
_MIN_ENTRY_NBYTES = 48
"""Minimum bytes of a tensor's entry in a header."""
_PIECE_NBYTES = 2**12
"""Bytes of a zstd frame to expand at a time: the result, up to 32,000 times larger, may exceed the limit."""

REQUIRES_DELTA, REQUIRES_WHOLE = "delta", "whole"
"""Values of a manifest's `requires`: its reader must support deltas, or folders with whole tensors."""

_SELF_DIGEST = b'"self_digest"'
_XXH3, _BLAKE3 = (re.compile(rf"[0-9a-f]{{{2 * nbytes}}}\Z") for nbytes in (XXH3_NBYTES, BLAKE3_NBYTES))
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,242}\.(safetensors|slices)\Z")


WHOLE_TABLE_NAME = "relayout.whole.json.zst"
"""File name of the table of whole tensors."""


def table_name(rank: int) -> str:
    """Return the file name of a rank's table."""
    return f"relayout.rank-{rank}.json.zst"


def relayout_entry(tensors_digest: str) -> str:
    """Return the `relayout` entry of a file's `__metadata__`, first in the header: it identifies the tensors."""
    return compact_json({"format": FILE_VERSION, "tensors_digest": tensors_digest}).decode()


def header_prefix(tensors_digest: str) -> bytes:
    """Return the bytes that follow the 8-byte length in a file that holds these tensors."""
    entry = compact_json({"relayout": relayout_entry(tensors_digest)})
    return b'{"__metadata__":' + entry.removesuffix(b"}")


def content_of(blob: bytes) -> str:
    """Return the identity of a checkpoint: the BLAKE3 of its relayout.json as stored, which `b3sum` prints, too."""
    return blake3_hex(blob)


def digest_of_tensors(rows: Iterable[tuple[str, str, str]]) -> str:
    """Return the digest that identifies the tensors in a file.

    Args:
        rows: of each tensor, in file order: its name as JSON, its `tensor_head`, and the digest of its bytes.
    """
    items = ",".join([f'[{name},{head},"{digest}"]' for name, head, digest in rows])
    return xxh3_hex(f"[{items}]".encode())


def tensor_head(dtype: str, source_shape: tuple[int, ...], part: Slice) -> str:
    """Return the common part of rows of `digest_of_tensors` that differ only in name and digest."""
    return json_text([dtype, source_shape, dump_slice(part)])[1:-1]


def compact_json(top: object) -> bytes:
    """Return JSON without white space."""
    return json_text(top).encode()


def compress(text: bytes, limit: int = MAX_TABLE_NBYTES) -> bytes:
    """Compress JSON for storage. PlanError: it would be too large to be read again."""
    what = "a table or record"
    return readable(zstandard.ZstdCompressor(level=10).compress(readable(text, limit, what)), limit, what)


def decompress(blob: bytes, where: str, limit: int = MAX_TABLE_NBYTES) -> bytes:
    """Expand the result of `compress`. FormatError: not a zstd frame, or larger than the limit."""
    with about(path=where):
        _check_window(blob)
        frame = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_NBYTES).decompressobj()
        pieces = []
        room = limit
        for start in range(0, len(blob), _PIECE_NBYTES):
            if frame.eof:
                break
            try:
                pieces.append(frame.decompress(blob[start : start + _PIECE_NBYTES]))
            except zstandard.ZstdError as error:
                raise FormatError(f"not a zstd frame: {error}", code="syntax") from None
            room -= len(pieces[-1])
            if room < 0:
                raise FormatError(f"expands to more than {limit} bytes", code="limit")
        if not frame.eof:
            raise FormatError("the zstd frame does not end (truncated?)", code="truncated")
        rest = len(frame.unused_data) + max(0, len(blob) - len(pieces) * _PIECE_NBYTES)
        if rest:
            raise FormatError(f"{rest} bytes after the zstd frame", code="syntax")
        return b"".join(pieces)


def _check_window(blob: bytes) -> None:
    """Refuse a frame with a large window: the library checks it only if the frame needs a window."""
    try:
        window_nbytes = zstandard.get_frame_parameters(blob).window_size
    except zstandard.ZstdError as error:
        raise FormatError(f"not a zstd frame: {error}", code="syntax") from None
    if window_nbytes > MAX_WINDOW_NBYTES:
        raise FormatError(f"a zstd window of {window_nbytes} bytes, limit {MAX_WINDOW_NBYTES}", code="limit")


def dump_manifest(manifest: Manifest) -> bytes:
    """Serialize relayout.json, indented for people."""
    top: dict[str, Any] = {
        "relayout": FORMAT_VERSION,
        "requires": [] if manifest.whole is None else [REQUIRES_WHOLE],
        "generator": manifest.generator,
        "conversion": manifest.conversion,
        "model_type": manifest.model_type,
        "plan": manifest.plan,
        "expert_parallel": manifest.expert_parallel,
        "num_ranks": manifest.num_ranks,
        "alignment": manifest.alignment,
        "dcp": manifest.dcp,
        "source": {
            "record_digest": manifest.record_digest,
            "digests_digest": manifest.source_digests_digest,
            "num_tensors": manifest.num_source_tensors,
            "nbytes": manifest.source_nbytes,
        },
        "hub_index_digest": manifest.hub_index_digest,
        "chunk_nbytes": manifest.chunk_nbytes,
        "files": [asdict(file) for file in manifest.files],
        "ranks": [None if entry is None else _dump_holder(entry) for entry in manifest.ranks],
        "whole": None if manifest.whole is None else _dump_holder(manifest.whole),
    }
    return sealed(top)


def sealed(top: Mapping[str, Any]) -> bytes:
    """Return a manifest as stored: a line for each entry, and last the BLAKE3 digest of all bytes before.

    PlanError: it would be too large to be read again.
    """
    lines = ",\n".join(f"  {json_text(name)}: {_lines(value)}" for name, value in top.items())
    text = f"{{\n{lines},\n  "
    return readable(closed(text.encode(), ": ", "\n}\n"), MAX_MANIFEST_NBYTES, MANIFEST_NAME)


def _lines(value: object) -> str:
    """Return the JSON of a field of the manifest: for a list of entries, a line for each."""
    if isinstance(value, list | tuple) and any(isinstance(entry, dict) for entry in value):
        return "[\n" + ",\n".join(f"    {_line(entry)}" for entry in value) + "\n  ]"
    return _line(value)


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def closed(text: bytes, colon: str = ":", end: str = "}\n") -> bytes:
    """Close a JSON object with its last field, the BLAKE3 digest of all bytes before; see `check_self_digest`.

    Args:
        text: the object up to this field, with a comma at its end.
        colon, end: text after the name and after the value.
    """
    return text + _SELF_DIGEST + f'{colon}"{blake3_hex(text)}"{end}'.encode()


def parse_manifest(blob: bytes, where: str) -> Manifest:
    """Parse relayout.json, and check that its reads stay inside files and arena and do not overlap there."""
    with about(path=where):
        return _parse_manifest(blob, parse_object(blob, where))


def _parse_manifest(blob: bytes, top: Mapping[str, Any]) -> Manifest:
    check_top(blob, top)
    fields = Fields(top)
    ranks = fields.column("ranks", (dict, type(None)))
    if len(ranks) != fields.size("num_ranks") or not ranks:
        raise FormatError(f"{len(ranks)} entries in 'ranks', num_ranks is {top['num_ranks']}", code="field")
    if not any(entry is not None for entry in ranks):
        raise FormatError("every entry in 'ranks' is null, expected one rank or more", code="field")
    source = Fields(fields.object("source"))
    files = _parse_files(fields)
    whole = fields.object_or_null("whole")
    if (whole is not None) != (REQUIRES_WHOLE in top["requires"]):
        raise FormatError(f"'requires' and 'whole' differ: {shown(top['requires'])}", code="field")
    manifest = Manifest(
        generator=fields.text("generator"),
        conversion=_or_null(fields, "conversion", xxh3_field),
        model_type=fields.text_or_null("model_type"),
        plan=fields.text("plan"),
        expert_parallel=fields.flag("expert_parallel"),
        alignment=_power_of_two(fields, "alignment", MIN_ALIGNMENT, MAX_ALIGNMENT),
        dcp=fields.flag("dcp"),
        record_digest=blake3_field(source, "record_digest"),
        source_digests_digest=blake3_field(source, "digests_digest"),
        num_source_tensors=source.size("num_tensors"),
        source_nbytes=source.size("nbytes"),
        hub_index_digest=_or_null(fields, "hub_index_digest", blake3_field),
        chunk_nbytes=_power_of_two(fields, "chunk_nbytes", MIN_CHUNK_NBYTES, MAX_CHUNK_NBYTES),
        files=files,
        ranks=tuple(_parse_holder(entry, table_name(rank), files, f"rank {rank}") for rank, entry in enumerate(ranks)),
        whole=_parse_holder(whole, WHOLE_TABLE_NAME, files, "whole"),
    )
    unused = set(range(len(files))).difference(*(entry.files for entry in manifest.holders.values()))
    if unused:
        raise FormatError(f"{files[min(unused)].name} belongs to no rank", code="field")
    if manifest.conversion is None and manifest.has_all:
        raise FormatError("'conversion' is null, and no rank is", code="field")
    return manifest


def check_top(blob: bytes, top: Mapping[str, Any], *, is_delta: bool = False) -> None:
    """Check that a manifest is readable, before its other fields: version, `requires`, and its own digest."""
    check_version(top)
    _check_requirements(top.get("requires"), is_delta)
    check_self_digest(blob, top)


def check_version(top: Mapping[str, Any]) -> None:
    """Raise FormatError if the format version is missing or not the supported one."""
    version = top.get("relayout")
    if type(version) is not int or version != FORMAT_VERSION:
        raise FormatError(f"format version {shown(version)}, this relayout reads {FORMAT_VERSION}", code="version")


def _check_requirements(requires: object, is_delta: bool) -> None:
    """Refuse a folder with requirements that this reader does not support."""
    if not isinstance(requires, list) or not all(isinstance(name, str) for name in requires):
        raise FormatError("'requires' is missing or not a list of strings", code="field")
    unknown = sorted(set(requires) - {REQUIRES_DELTA, REQUIRES_WHOLE})
    if unknown:
        raise FormatError(
            f"requires {', '.join(map(shown, unknown))}, which this relayout does not know: use a newer one",
            code="version",
        )
    if (REQUIRES_DELTA in requires) != is_delta:
        what = (
            "is not a delta; relayout delta makes one" if is_delta else "is a delta: relayout apply adds it to its base"
        )
        raise FormatError(what, code="version")


def check_self_digest(blob: bytes, top: Mapping[str, Any]) -> None:
    """Compare the last field with the digest of all bytes before it. FormatError: it differs, or is not the last."""
    place = blob.rfind(_SELF_DIGEST)
    if place < 0 or list(top)[-1] != "self_digest" or top["self_digest"] != blake3_hex(blob[:place]):
        raise FormatError(
            f"its self_digest is {shown(top.get('self_digest'))}, which does not match its bytes: damaged or edited",
            code="digest",
        )


def xxh3_field(fields: Fields, name: str) -> str:
    """Return an XXH3-128 digest in hex. FormatError: the field is not one."""
    return _hex_field(fields, name, _XXH3, "a digest")


def blake3_field(fields: Fields, name: str) -> str:
    """Return a BLAKE3 digest in hex. FormatError: the field is not one."""
    return _hex_field(fields, name, _BLAKE3, "a BLAKE3 digest")


def _or_null(fields: Fields, name: str, parse: Callable[[Fields, str], str]) -> str | None:
    return None if fields.text_or_null(name) is None else parse(fields, name)


def _hex_field(fields: Fields, name: str, pattern: re.Pattern[str], what: str) -> str:
    value = fields.text(name)
    if not pattern.match(value):
        raise FormatError(f"{name!r} is {shown(value)}, not {what}", code="field")
    return value


def _power_of_two(fields: Fields, name: str, low: int, high: int) -> int:
    value = fields.size(name)
    if not low <= value <= high or value & (value - 1):
        raise FormatError(f"{name} {value}, expected a power of two, {low} to {high}", code="field")
    return value


def _dump_holder(entry: RankEntry) -> dict[str, Any]:
    return asdict(replace(entry, reads=())) | {"reads": [_dump_read(read) for read in entry.reads]}


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


def _parse_read(row: Mapping[str, Any]) -> Read:
    fields = Fields(row)
    count, strides = 1, (0, 0)
    if row.keys() & {"count", "stride", "arena_stride"}:
        count, strides = fields.size("count"), (fields.size("stride"), fields.size("arena_stride"))
        if count < 2:
            raise FormatError(f"a read of {count} runs, expected 2 or more", code="field")
    source, target, nbytes = fields.size("offset"), fields.size("arena_offset"), fields.size("nbytes")
    return Read(fields.size("file"), Transfer(source, target, nbytes, count, *strides))


def _parse_files(fields: Fields) -> tuple[IndexedFile, ...]:
    files = []
    for row in fields.column("files", dict):
        file = Fields(row)
        if not _FILE_NAME.match(file.text("name")):
            raise FormatError(
                f"{shown(file.text('name'))} is not the name of a .safetensors file, nor of a .slices file",
                code="unsafe",
            )
        files.append(
            IndexedFile(
                name=file.text("name"),
                nbytes=file.size("nbytes"),
                data_start=file.size("data_start"),
                tensors_digest=xxh3_field(file, "tensors_digest"),
                header_digest=blake3_field(file, "header_digest"),
                chunks_digest=blake3_field(file, "chunks_digest"),
            )
        )
        if files[-1].data_start > min(files[-1].nbytes, LENGTH_NBYTES + MAX_HEADER_NBYTES):
            raise FormatError(
                f"{files[-1].name}: data_start {files[-1].data_start} exceeds the file or the header limit",
                code="truncated",
            )
    if len({file.name for file in files}) < len(files):
        raise FormatError("two files have one name", code="field")
    return tuple(files)


def _parse_holder(
    entry: Mapping[str, Any] | None,
    table: str,
    files: Sequence[IndexedFile],
    what: str,
) -> RankEntry | None:
    if entry is None:
        return None
    fields = Fields(entry)
    with about(part=what):
        if fields.text("table") != table:
            raise FormatError(f"table {shown(fields.text('table'))}, expected {table!r}", code="field")
        indices = fields.column("files", int)
        if len(set(indices)) < len(indices) or (indices and max(indices) >= len(files)):
            raise FormatError(f"files {shown(indices)}, expected distinct indices below {len(files)}", code="mismatch")
        parsed = RankEntry(
            table=table,
            table_digest=blake3_field(fields, "table_digest"),
            digests_digest=blake3_field(fields, "digests_digest"),
            num_tensors=fields.size("num_tensors"),
            nbytes=fields.size("nbytes"),
            files=tuple(indices),
            arena_nbytes=fields.size("arena_nbytes"),
            reads=tuple(_parse_read(row) for row in fields.column("reads", dict)),
        )
        _check_reads(parsed, [files[index] for index in indices])
        return parsed


def _check_reads(entry: RankEntry, files: Sequence[IndexedFile]) -> None:
    end = 0
    wanted = [0] * len(files)
    for index, read in enumerate(entry.reads):
        transfer = read.transfer
        if read.file >= len(files):
            raise FormatError(f"read {index}: file {read.file} of {len(files)}", code="field")
        if transfer.nbytes == 0:
            raise FormatError(f"read {index}: is empty", code="coverage")
        if transfer.count > 1 and min(transfer.source_stride, transfer.target_stride) < transfer.nbytes:
            raise FormatError(f"read {index}: runs of {transfer.nbytes} bytes overlap", code="coverage")
        file = files[read.file]
        if not file.data_start <= transfer.source <= transfer.source_end <= file.nbytes:
            raise FormatError(
                f"read {index}: bytes {transfer.source} to {transfer.source_end} of {file.name}, whose data section is"
                f" {file.data_start} to {file.nbytes}",
                code="truncated",
            )
        if transfer.target < end:
            raise FormatError(
                f"read {index}: starts at byte {transfer.target} of the arena, the read before it ends at {end}",
                code="coverage",
            )
        end = transfer.target_end
        wanted[read.file] += transfer.total_nbytes
    if end > entry.arena_nbytes:
        raise FormatError(f"reads end at byte {end} of an arena of {entry.arena_nbytes}", code="truncated")
    headers_nbytes = sum(file.data_start for file in files)
    if entry.num_tensors * _MIN_ENTRY_NBYTES > headers_nbytes:
        raise FormatError(f"{entry.num_tensors} tensors in headers of {headers_nbytes} bytes", code="field")
    limit = entry.nbytes + entry.nbytes // 64 + ARENA_ALIGNMENT * entry.num_tensors + 2 * BLOCK * (len(files) + 1)
    if entry.arena_nbytes > limit:
        raise FormatError(f"an arena of {entry.arena_nbytes} bytes for tensors of {entry.nbytes}", code="field")
    if sum(wanted) != entry.nbytes:
        raise FormatError(f"reads of {sum(wanted)} bytes, tensors of {entry.nbytes}", code="field")
    for file, nbytes in zip(files, wanted, strict=True):
        if nbytes > file.nbytes - file.data_start:
            raise FormatError(
                f"reads of {nbytes} bytes of {file.name}, which has {file.nbytes - file.data_start}", code="coverage"
            )


def parse_shapes(values: Iterable[Any]) -> list[tuple[int, ...]]:
    """Return shapes from lists of sizes. FormatError: one is invalid."""
    shapes = list(map(tuple, values))
    dims = [dim for shape in shapes for dim in shape]
    if any(len(shape) > MAX_AXES for shape in shapes):
        raise FormatError(f"a shape of {max(map(len, shapes))} axes, limit {MAX_AXES}", code="limit")
    if not set(map(type, dims)) <= {int} or (dims and not (min(dims) >= 0 and max(dims) <= MAX_SIZE)):
        wrong = next(shape for shape in shapes if not all(type(dim) is int and 0 <= dim <= MAX_SIZE for dim in shape))
        raise FormatError(f"{shown(list(wrong))} is not a shape", code="field")
    return shapes
