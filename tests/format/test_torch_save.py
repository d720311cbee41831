"""The bytes of a tensor in what the real `torch.save` wrote are where they are found without unpickling it."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relayout.core.slices import TORCH_NAMES
from relayout.errors import FormatError, PlanError, RelayoutError
from relayout.format.torch_save import SavedArray, find_array

DTYPES = {name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items() if name != "F4"}


def archive(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def find(blob: bytes) -> SavedArray:
    return find_array(lambda offset, nbytes: blob[offset : offset + nbytes], len(blob), "here")


def numbered(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = torch.empty(shape, dtype=dtype).nbytes
    flat = (torch.arange(size) % (2 if dtype == torch.bool else 251)).to(torch.uint8)
    return flat.view(dtype).reshape(shape)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5), (), (1, 1, 7), (0, 4), (70, 90)])
def test_the_tensor_of_each_dtype_is_found(name: str, shape: tuple[int, ...]) -> None:
    tensor = numbered(DTYPES[name], *shape)
    blob = archive(tensor)
    found = find(blob)
    assert (found.dtype, found.shape) == (name, shape)
    expected = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert blob[found.extent.offset : found.extent.end] == expected


def test_a_view_is_found_in_the_storage_that_was_saved_with_it() -> None:
    blob = archive(torch.arange(40, dtype=torch.int16).reshape(8, 5)[2:4])
    found = find(blob)
    assert blob[found.extent.offset : found.extent.end] == torch.arange(10, 20, dtype=torch.int16).numpy().tobytes()


@pytest.mark.parametrize("tensor", [torch.ones(3, 4).t(), torch.ones(4, 4)[:, :2], torch.ones(1).expand(3)])
def test_elements_in_another_order_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(PlanError, match=r"call .contiguous"):
        find(archive(tensor))


def with_64_bit_directory(blob: bytes) -> bytes:
    """Return the same archive, whose directory has all sizes and offsets in 64 bits, as above 4 GiB."""
    entries = zipfile.ZipFile(io.BytesIO(blob)).infolist()
    start = blob.index(b"PK\1\2")
    directory = b""
    for entry in entries:
        extra = struct.pack("<HHQQQ", 1, 24, entry.file_size, entry.compress_size, entry.header_offset)
        name, most = entry.filename.encode(), 2**32 - 1
        head = struct.pack("<4s6H3I5H2I", b"PK\1\2", 0, 45, entry.flag_bits, 0, 0, 0, entry.CRC, most, most, len(name),
                           len(extra), 0, 0, 0, 0, most)  # fmt: skip
        directory += head + name + extra
    count, end = len(entries), start + len(directory)
    end_64 = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
    last = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 2**16 - 1, 2**16 - 1, 2**32 - 1, 2**32 - 1, 0)
    return blob[:start] + directory + end_64 + locator + last


def test_an_archive_above_4_gib_has_its_sizes_in_64_bits() -> None:
    tensor = numbered(torch.float32, 100, 7)
    blob = with_64_bit_directory(archive(tensor))
    assert torch.equal(torch.load(io.BytesIO(blob), weights_only=True), tensor)  # torch reads it.
    found = find(blob)
    assert blob[found.extent.offset : found.extent.end] == tensor.numpy().tobytes()


class _Exit:
    def __reduce__(self) -> tuple[object, tuple[int]]:
        return os._exit, (3,)


def test_a_hostile_pickle_in_an_archive_is_not_run() -> None:
    with pytest.raises(FormatError, match=r"imports '(posix|nt)._exit'.*was not run"):
        find(archive(_Exit()))


def rewritten(blob: bytes, **records: bytes) -> bytes:
    """The archive with other records, stored by zipfile; what begins with "-" is left out."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(blob)) as old, zipfile.ZipFile(stream, "w") as new:
        for name in old.namelist():
            short = name.rpartition("/")[2].partition(".")[0]
            if f"without_{short}" not in records:
                new.writestr(name, records.get(short, old.read(name)))
    return stream.getvalue()


def test_other_archives_are_refused() -> None:
    blob = archive(torch.arange(50.0))
    assert find(rewritten(blob)).shape == (50,)
    with pytest.raises(PlanError, match="big-endian"):
        find(rewritten(blob, byteorder=b"big"))
    with pytest.raises(FormatError, match=r"no data\.pkl"):
        find(rewritten(blob, without_data=b""))
    with pytest.raises(FormatError, match="has no data/0"):
        find(rewritten(blob, without_0=b""))
    with pytest.raises(FormatError, match="shorter than its tensor"):
        find(rewritten(blob, **{"0": b"short"}))
    for value in ({"x": torch.ones(2)}, 7, [torch.ones(2)]):
        with pytest.raises(FormatError, match="something other than one tensor"):
            find(archive(value))
    with pytest.raises(FormatError, match="not an archive"):
        find(pickle.dumps(7))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as deflated:
        deflated.writestr("archive/data.pkl", b"x" * 100)
    with pytest.raises(FormatError, match="not stored as they are"):
        find(stream.getvalue())


@given(st.data())
def test_damage_is_an_error_or_leads_nowhere_outside(data: st.DataObject) -> None:
    blob = bytearray(archive(torch.arange(9.0)))
    for _ in range(data.draw(st.integers(1, 3))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    blob = blob[: data.draw(st.sampled_from([len(blob), len(blob), len(blob) // 2]))]
    try:
        found = find(bytes(blob))
    except RelayoutError:
        return
    assert 0 <= found.extent.offset <= found.extent.end <= len(blob)
