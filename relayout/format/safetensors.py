"""Reads and writes the header of a safetensors file. Pure: bytes in, bytes out.

A file is 8 bytes (little-endian length n of the header), n bytes of JSON in UTF-8, then the data section.
`parse_header` makes in one pass all checks of the reference reader (safetensors 0.8.0, `src/tensor.rs`,
`Metadata::validate`), so that no later code checks again. It is stricter in the points that SECURITY.md lists.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from relayout.core.extents import align_up
from relayout.core.slices import BITS
from relayout.errors import FormatError, PlanError, about, shown
from relayout.format.fields import MAX_AXES, check_name, refuse_lfs_pointer, strict_json

MAX_HEADER_NBYTES = 100_000_000
"""Maximum bytes of a header: the reference reader refuses a longer one."""

LENGTH_NBYTES = 8
"""Bytes of the length field that starts a file."""

_MAX_SIZE = 2**64 - 1
METADATA_KEY = "__metadata__"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file."""

    name: str
    dtype: str
    """A key of `dtypes.BITS`."""
    shape: tuple[int, ...]
    """Elements along each axis, row-major; for types below 8 bits the logical element count."""
    offset: int
    """Bytes from the start of the data section."""
    nbytes: int
    """Stored bytes."""


@dataclass(frozen=True, slots=True)
class Header:
    """A valid header. The tensors, in offset order, cover the data section without hole or overlap."""

    tensors: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    """The `__metadata__` entry; empty if the file has none."""
    data_start: int
    """Absolute file offset of the data section, in bytes."""
    data_nbytes: int
    """Length of the data section in bytes."""
    is_in_order: bool = True
    """True if the header lists the tensors in offset order."""


def header_nbytes(prefix: bytes, file_nbytes: int) -> int:
    """Return the length n that the first 8 bytes declare, checked against the file's size.

    Args:
        prefix: the first bytes of the file, at least as long as `LFS_POINTER`.
    """
    refuse_lfs_pointer(prefix)
    if len(prefix) < LENGTH_NBYTES:
        raise FormatError(f"{len(prefix)} bytes, shorter than the 8-byte length that starts a file", code="truncated")
    declared = int.from_bytes(prefix[:LENGTH_NBYTES], "little")
    if declared > MAX_HEADER_NBYTES:
        raise FormatError(f"header length {declared} at byte 0, limit {MAX_HEADER_NBYTES}", code="limit")
    if LENGTH_NBYTES + declared > file_nbytes:
        raise FormatError(
            f"header ends at byte {LENGTH_NBYTES + declared}, the file at byte {file_nbytes} (truncated?)",
            code="truncated",
        )
    return declared


def parse_header(blob: bytes, file_nbytes: int, where: str) -> Header:
    """Parse the 8 + n bytes that start a file of `file_nbytes` bytes, and validate the whole file's structure."""
    with about(path=where):
        return _parse_header(blob, file_nbytes)


def _parse_header(blob: bytes, file_nbytes: int) -> Header:
    data_start = LENGTH_NBYTES + header_nbytes(blob, file_nbytes)
    # Decode first: given bytes, json.loads would also accept UTF-16.
    try:
        text = blob[LENGTH_NBYTES:data_start].decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"header is not UTF-8 at byte {LENGTH_NBYTES + error.start}", code="syntax") from None
    top = strict_json(text)
    if not isinstance(top, dict):
        raise FormatError(f"header is a JSON {type(top).__name__}, expected an object", code="field")
    metadata = _parse_metadata(top.pop(METADATA_KEY, None))
    listed = [_parse_entry(name, entry) for name, entry in top.items()]
    tensors = sorted(listed, key=lambda tensor: (tensor.offset, tensor.nbytes))
    data_nbytes = file_nbytes - data_start
    position = 0
    for tensor in tensors:
        if tensor.offset != position:
            what = "overlaps the tensor before it" if tensor.offset < position else "leaves a hole before it"
            raise FormatError(
                f"starts at byte {tensor.offset} of the data section, expected {position}: {what}",
                tensor=tensor.name,
                offset=data_start + tensor.offset,
                code="coverage",
            )
        position += tensor.nbytes
        if position > data_nbytes:
            raise FormatError(
                f"ends at byte {position} of the data section, which has {data_nbytes} (truncated?)",
                tensor=tensor.name,
                offset=data_start + position,
                code="truncated",
            )
    if position != data_nbytes:
        raise FormatError(
            f"the tensors cover {position} bytes, the data section has {data_nbytes}: trailing bytes", code="coverage"
        )
    return Header(tuple(tensors), metadata, data_start, data_nbytes, tensors == listed)


def build_header(tensors: Iterable[TensorEntry], metadata: Mapping[str, str], alignment: int) -> bytes:
    """Serialize a header, padded with trailing spaces so that the data section starts at a multiple of `alignment`.

    `tensors` are in offset order (a zero-size tensor before the one that starts at the same offset); keys are
    written in that order.
    """
    rows = (
        (json_text(tensor.name), entry_head(tensor.dtype, tensor.shape), tensor.offset, tensor.offset + tensor.nbytes)
        for tensor in tensors
    )
    return join_header(entries_text(rows), metadata, alignment)


def entry_head(dtype: str, shape: Iterable[int]) -> str:
    """Return the common part of entries with this dtype and shape: all but the two offsets, which come last."""
    return f'{{"dtype":"{dtype}","shape":[{",".join(map(str, shape))}],"data_offsets":['


def entries_text(rows: Iterable[tuple[str, str, int, int]]) -> str:
    """Return the tensors' entries, without the braces around them; headers of several ranks may share this text.

    Args:
        rows: name as JSON, `entry_head`, and start and end in the data section.
    """
    return ",".join([f"{name}:{head}{start},{end}]}}" for name, head, start, end in rows])


def join_header(entries: str, metadata: Mapping[str, str], alignment: int) -> bytes:
    """Build a header from the result of `entries_text`; other arguments as for `build_header`."""
    parts = [f"{json_text(METADATA_KEY)}:{json_text(dict(metadata))}"] if metadata else []
    text = f"{{{','.join([*parts, entries] if entries else parts)}}}".encode()
    padded = data_start_after(len(text), alignment) - LENGTH_NBYTES
    return padded.to_bytes(LENGTH_NBYTES, "little") + text.ljust(padded, b" ")


def data_start_after(text_nbytes: int, alignment: int) -> int:
    """Return the data start of a file with a header of this many bytes of JSON."""
    start = align_up(LENGTH_NBYTES + text_nbytes, alignment)
    if start - LENGTH_NBYTES > MAX_HEADER_NBYTES:
        what = f"a header of {start - LENGTH_NBYTES} bytes, limit {MAX_HEADER_NBYTES}"
        raise PlanError(what, code="limit")
    return start


json_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
"""Serializer of a value as JSON, without white space, with non-ASCII characters unescaped."""


def _parse_metadata(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise FormatError(f"{METADATA_KEY} must map strings to strings", code="field")
    return value


def _parse_entry(name: str, entry: Any) -> TensorEntry:
    check_name(name)
    if not isinstance(entry, dict):
        raise FormatError(f"expected an object, found {type(entry).__name__}", tensor=name, code="field")
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except KeyError as error:
        raise FormatError(f"{error.args[0]!r} is missing", tensor=name, code="field") from None
    bits = BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise FormatError(f"unknown dtype {shown(dtype)}", tensor=name, code="field")
    if not isinstance(shape, list) or not all(_is_size(dim) for dim in shape):
        raise FormatError(f"shape {shown(shape)} is not a list of sizes", tensor=name, code="field")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise FormatError(f"data_offsets {shown(offsets)} is not a pair of sizes", tensor=name, code="field")
    if len(shape) > MAX_AXES:
        raise FormatError(f"a shape of {len(shape)} axes, limit {MAX_AXES}", tensor=name, code="limit")
    size = 1
    for dim in shape:
        size *= dim
        if size > _MAX_SIZE:
            raise FormatError(f"shape {shown(shape)} overflows 64 bits", tensor=name, code="limit")
    size *= bits
    start, end = offsets
    if size > _MAX_SIZE:
        raise FormatError(f"shape {shown(shape)} of {dtype} overflows 64 bits", tensor=name, code="limit")
    if size % 8:
        raise FormatError(f"shape {shown(shape)} of {dtype} does not fill whole bytes", tensor=name, code="field")
    if end - start != size // 8:
        raise FormatError(
            f"data_offsets [{start}, {end}] hold {end - start} bytes, shape {shown(shape)} of {dtype} "
            f"needs {size // 8}",
            tensor=name,
            code="field",
        )
    return TensorEntry(name, dtype, tuple(shape), start, size // 8)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SIZE
