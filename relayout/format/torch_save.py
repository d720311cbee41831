"""Finds the bytes of one tensor in an archive of `torch.save`: a zip file that holds a pickle and a storage.

Nothing is unpickled (`pickles`), decompressed or copied. The archive is as `torch/csrc/serialize/` writes it (PyTorch
2.13, `caffe2/serialize/inline_container.cc`): records are stored, not deflated, without a comment.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

from relayout.core.extents import Extent
from relayout.core.slices import TORCH_NAMES, num_bytes
from relayout.errors import FormatError, PlanError, about, shown
from relayout.format.fields import MAX_AXES
from relayout.format.pickles import PERSISTENT, Called, Name, read_pickle

Read = Callable[[int, int], bytes]
"""Reads bytes of the archive: offset, and how many."""

_STORAGES = {
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
    "torch.ComplexFloatStorage": "complex64",
}
"""The dtype of each typed storage (`torch/__init__.py`)."""
_OF_TYPE, _OF_DTYPE = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
"""A tensor in a typed storage, and one of a newer dtype in an untyped storage (`torch/_tensor.py`)."""
_UNTYPED, _ORDERED = "torch.storage.UntypedStorage", "collections.OrderedDict"
TORCH_DTYPES = {f"torch.{name}": dtype for dtype, name in TORCH_NAMES.items() if dtype != "F4"}
"""The name in file headers of each dtype, by the name under which torch pickles it; F4 has another shape there."""
_NAMES = frozenset({_OF_TYPE, _OF_DTYPE, _UNTYPED, _ORDERED, *_STORAGES, *TORCH_DTYPES})

_HEAD_NBYTES, _TAIL_NBYTES = 2**12, 2**16
_MAX_DIRECTORY_NBYTES = _TAIL_NBYTES - 2**10
_MAX_PICKLE_NBYTES = 2**16
_IN_EXTRA = 2**32 - 1
"""Stands in place of a number of 32 bits for one of 64 in the extra field."""
_LOCAL = struct.Struct("<4s22xHH")
_ENTRY = struct.Struct("<4s4xHH8xIIHHH8xI")
_END = struct.Struct("<4s8xII2x")
_LOCATOR = struct.Struct("<4s4xQ4x")
_END_64 = struct.Struct("<4s36xQQ")


@dataclass(frozen=True, slots=True)
class SavedArray:
    """A tensor in an archive."""

    dtype: str
    """Its name in file headers."""
    shape: tuple[int, ...]
    extent: Extent
    """Its elements, dense and in row-major order, relative to the archive."""


def find_array(read: Read, nbytes: int, where: str) -> SavedArray:
    """Find the tensor of an archive, by two or three small reads.

    Args:
        read: reads the archive.
        nbytes: of the archive.
        where: names it, for errors.

    Raises:
        FormatError: it is damaged, or is not an archive of one tensor.
        PlanError: the tensor's elements are not in row-major order.
    """
    with about(path=where):
        try:
            return _find_array(read, nbytes, where)
        except struct.error:
            raise FormatError("the archive of torch.save is truncated", code="truncated") from None


def _find_array(read: Read, nbytes: int, where: str) -> SavedArray:
    head = read(0, min(nbytes, _HEAD_NBYTES))

    def read_part(offset: int, length: int) -> bytes:
        if offset + length > nbytes:
            raise FormatError("the archive of torch.save is truncated", code="truncated")
        return head[offset : offset + length] if offset + length <= len(head) else read(offset, length)

    records = _directory(read_part, nbytes)
    folder = next((name[: -len("data.pkl")] for name in records if name.endswith("/data.pkl")), None)
    if folder is None:
        raise FormatError("not an archive of torch.save: it has no data.pkl", code="field")

    def extent_of(name: str) -> Extent:
        record = records.get(folder + name)
        if record is None:
            raise FormatError(f"the archive of torch.save has no {name}", code="missing")
        signature, name_nbytes, extra_nbytes = _LOCAL.unpack(read_part(record.offset, _LOCAL.size))
        extent = Extent(record.offset + _LOCAL.size + name_nbytes + extra_nbytes, record.nbytes)
        if signature != b"PK\3\4" or extent.end > nbytes:
            raise FormatError(f"the archive of torch.save is damaged: {name} is not in it", code="field")
        return extent

    def content(name: str) -> bytes:
        extent = extent_of(name)
        if extent.nbytes > _MAX_PICKLE_NBYTES:
            raise FormatError(f"{name} has {extent.nbytes} bytes, limit {_MAX_PICKLE_NBYTES}", code="limit")
        return read_part(extent.offset, extent.nbytes)

    if f"{folder}byteorder" in records and content("byteorder") != b"little":
        raise PlanError("saved on a big-endian machine", code="unsupported")
    found = _parse(read_pickle(content("data.pkl"), _NAMES, where))
    storage = extent_of(f"data/{found.key}")
    item_nbytes = prod(found.shape) and found.nbytes // prod(found.shape)
    part = Extent(storage.offset + found.start * item_nbytes, found.nbytes)
    if part.end > storage.end:
        raise FormatError(f"a storage of {storage.nbytes} bytes is shorter than its tensor", code="truncated")
    return SavedArray(found.dtype, found.shape, part)


@dataclass(frozen=True, slots=True)
class _Record:
    offset: int
    nbytes: int


def _directory(read: Read, nbytes: int) -> dict[str, _Record]:
    """Return the records of a zip archive, by name; offsets are those of their local headers."""
    tail_start = max(0, nbytes - _TAIL_NBYTES)
    tail = read(tail_start, nbytes - tail_start)
    end = len(tail) - _END.size
    if end < 0 or tail[end : end + 4] != b"PK\5\6":
        raise FormatError("not an archive of torch.save: the end of a zip file is missing", code="syntax")
    _, directory_nbytes, start = _END.unpack_from(tail, end)
    if end >= _LOCATOR.size and tail[end - _LOCATOR.size :][:4] == b"PK\6\7":
        _, at = _LOCATOR.unpack_from(tail, end - _LOCATOR.size)
        signature, directory_nbytes, start = _END_64.unpack_from(tail, _inside(at - tail_start, tail))
        if signature != b"PK\6\6":
            raise FormatError("the archive of torch.save is damaged", code="field")
    if directory_nbytes > _MAX_DIRECTORY_NBYTES:
        what = f"an archive with a directory of {directory_nbytes} bytes, limit {_MAX_DIRECTORY_NBYTES}"
        raise FormatError(what, code="limit")
    position = _inside(start - tail_start, tail)
    stop = position + directory_nbytes
    records: dict[str, _Record] = {}
    while position < stop:
        signature, flags, method, packed, size, name_nbytes, extra_nbytes, comment_nbytes, offset = _ENTRY.unpack_from(
            tail, position
        )
        if signature != b"PK\1\2" or flags & 1 or method or packed != size:
            raise FormatError("an archive whose records are not stored as they are", code="field")
        position += _ENTRY.size
        name = tail[position : position + name_nbytes].decode("utf-8", "replace")
        position += name_nbytes
        extra = tail[position : position + extra_nbytes]
        position += extra_nbytes + comment_nbytes
        if size == _IN_EXTRA or offset == _IN_EXTRA:
            size, offset = _extended(extra, size, packed, offset)
        records[name] = _Record(offset, size)
    return records


def _inside(position: int, tail: bytes) -> int:
    """Return a position in the tail of an archive. FormatError: it is outside."""
    if not 0 <= position <= len(tail):
        raise FormatError("the archive of torch.save is damaged: its directory is not at its end", code="field")
    return position


def _extended(extra: bytes, size: int, packed: int, offset: int) -> tuple[int, int]:
    """Size and offset of a record, where the 64-bit ones are in the extra field (APPNOTE.TXT 6.3.10, 4.5.3)."""
    position = 0
    while position < len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, position)
        if kind == 1:
            values = iter(struct.unpack_from(f"<{nbytes // 8}Q", extra, position + 4))
            size, _, offset = (next(values, value) if value == _IN_EXTRA else value for value in (size, packed, offset))
            break
        position += 4 + nbytes
    return size, offset


@dataclass(frozen=True, slots=True)
class _Pickled:
    """A tensor as data.pkl describes it."""

    key: str
    """Name of the storage in the archive."""
    dtype: str
    start: int
    """The first element in the storage."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return num_bytes(self.dtype, self.shape) or 0


def _parse(value: Any) -> _Pickled:
    """Parse the arguments of `_rebuild_tensor_v2` or `_v3`: (storage, offset, shape, strides, grad, hooks, dtype)."""
    if not isinstance(value, Called) or value.kind not in (_OF_TYPE, _OF_DTYPE) or len(value.args) < 6:
        raise FormatError("data.pkl has something other than one tensor", code="field")
    storage, start, shape, strides = value.args[:4]
    held = storage.args[0] if isinstance(storage, Called) and storage.kind == PERSISTENT else None
    # ("storage", its type, key, device, number of elements)
    if not isinstance(held, tuple) or len(held) != 5 or not isinstance(held[1], Name) or not isinstance(held[2], str):
        raise FormatError("data.pkl has a tensor without a storage", code="field")
    typed = f"torch.{_STORAGES.get(held[1], '')}"
    named = value.args[6] if value.kind == _OF_DTYPE and len(value.args) > 6 else typed
    dtype = TORCH_DTYPES.get(named) if isinstance(named, str) else None
    if dtype is None:
        raise PlanError(f"a tensor of {shown(named)}, which safetensors does not have", code="unsupported")
    if not (_are_sizes(shape) and _are_sizes(strides) and len(shape) == len(strides) and _are_sizes((start,))):
        raise FormatError("data.pkl has a tensor whose shape is not a tuple of sizes", code="field")
    dense = [*accumulate(reversed(shape[1:]), mul, initial=1)][::-1]
    if prod(shape) and any(a != b for a, b, size in zip(strides, dense, shape, strict=False) if size > 1):
        what = f"saved with the strides {list(strides)}, as of a transposed tensor: call .contiguous() before dcp.save"
        raise PlanError(what, code="unsupported")
    return _Pickled(held[2], dtype, start, shape)


def _are_sizes(values: Any) -> bool:
    return (
        isinstance(values, tuple)
        and len(values) <= MAX_AXES
        and all(type(value) is int and 0 <= value < 2**63 for value in values)
    )
