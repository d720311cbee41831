"""The stripes of files, from attributes that the structs of Lustre's own headers write."""

from __future__ import annotations

import ctypes
import errno
import os
from ctypes import c_char, c_uint8, c_uint16, c_uint32, c_uint64
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayout.storage.local.stripes import num_stripes

MIB = 2**20
EOF = 2**64 - 1


class Object(ctypes.LittleEndianStructure):
    """`lov_ost_data_v1`."""

    _fields_ = [("l_ost_oi", c_uint64 * 2), ("l_ost_gen", c_uint32), ("l_ost_idx", c_uint32)]


class V1(ctypes.LittleEndianStructure):
    """`lov_mds_md_v1`."""

    _fields_ = [
        ("lmm_magic", c_uint32),
        ("lmm_pattern", c_uint32),
        ("lmm_oi", c_uint64 * 2),
        ("lmm_stripe_size", c_uint32),
        ("lmm_stripe_count", c_uint16),
        ("lmm_layout_gen", c_uint16),
    ]


class V3(ctypes.LittleEndianStructure):
    """`lov_mds_md_v3`: the fields of the first version, and a pool."""

    _fields_ = [("common", V1), ("lmm_pool_name", c_char * 16)]


class Composite(ctypes.LittleEndianStructure):
    """`lov_comp_md_v1`."""

    _pack_ = 1
    _layout_ = "ms"
    _fields_ = [
        ("lcm_magic", c_uint32),
        ("lcm_size", c_uint32),
        ("lcm_layout_gen", c_uint32),
        ("lcm_flags", c_uint16),
        ("lcm_entry_count", c_uint16),
        ("lcm_mirror_count", c_uint16),
        ("lcm_ec_count", c_uint8),
        ("lcm_padding3", c_uint8),
        ("lcm_padding1", c_uint16 * 2),
        ("lcm_padding2", c_uint64),
    ]


class Entry(ctypes.LittleEndianStructure):
    """`lov_comp_md_entry_v1`."""

    _pack_ = 1
    _layout_ = "ms"
    _fields_ = [
        ("lcme_id", c_uint32),
        ("lcme_flags", c_uint32),
        ("e_start", c_uint64),
        ("e_end", c_uint64),
        ("lcme_offset", c_uint32),
        ("lcme_size", c_uint32),
        ("lcme_layout_gen", c_uint32),
        ("lcme_time_and_id", c_uint64),
        ("lcme_padding", c_uint32),
    ]


RAID0, MDT, PARITY, OVERSTRIPED, RELEASED = 0x1, 0x100, 0x5, 0x201, 0x80000001
INIT, STALE = 0x10, 0x1


def plain(stripes: int, pattern: int = RAID0, *, version: int = 1) -> bytes:
    """A layout that is for all of a file."""
    magic = {1: 0x0BD10BD0, 3: 0x0BD30BD0}[version]
    common = V1(magic, pattern, (7, 8), 4 * MIB, stripes, 2)
    head = common if version == 1 else V3(common, b"flash")
    return bytes(head) + bytes(Object((1, 2), 3, 4)) * (0 if pattern == MDT else min(stripes, 2000))


def composite(*components: tuple[int, int, int, bytes]) -> bytes:
    """A layout of components: flags, start, end, and the layout of each."""
    offset = ctypes.sizeof(Composite) + len(components) * ctypes.sizeof(Entry)
    entries = bodies = b""
    for number, (flags, start, end, body) in enumerate(components):
        entries += bytes(Entry(0x10000 + number, flags, start, end, offset + len(bodies), len(body), 3, 4, 5))
        bodies += body
    size = offset + len(bodies)
    return bytes(Composite(0x0BD60BD0, size, 9, 0, len(components), 0, 0, 0, (0, 0), 0)) + entries + bodies


PROGRESSIVE = composite(
    (INIT, 0, MIB, plain(1)),
    (INIT, MIB, 64 * MIB, plain(4, version=3)),
    (0, 64 * MIB, EOF, plain(16)),
)


@pytest.mark.parametrize(
    ("attribute", "nbytes", "expected"),
    [
        (plain(1), 100 * MIB, 1),
        (plain(8), 100 * MIB, 8),
        (plain(12, version=3), 100 * MIB, 12),
        (plain(6, OVERSTRIPED), MIB, 6),
        (plain(0, MDT), 100, None),
        (plain(4, RELEASED), 100 * MIB, None),
        (PROGRESSIVE, MIB, 1),
        (PROGRESSIVE, 3 * MIB, 4),
        (composite((INIT, 0, MIB, plain(0, MDT)), (INIT, MIB, EOF, plain(1))), 100 * MIB, 1),
        (composite((INIT | STALE, 0, EOF, plain(1)), (INIT, 0, EOF, plain(4))), MIB, 4),
        (composite((INIT, 0, EOF, plain(2)), (INIT, 0, EOF, plain(9, PARITY))), MIB, 2),
        (composite((0, 0, EOF, plain(9))), 0, None),
        (b"", MIB, None),
        (plain(4)[:20], MIB, None),
        (PROGRESSIVE[:60], MIB, None),
        (b"\0" * 200, MIB, None),
    ],
)
def test_the_stripes_of_most_of_the_file_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attribute: bytes, nbytes: int, expected: int | None
) -> None:
    asked = {(tmp_path / "file", "lustre.lov"): attribute}
    monkeypatch.setattr(os, "getxattr", lambda *args: asked[args], raising=False)
    assert num_stripes(tmp_path / "file", nbytes) == expected


def test_the_structs_have_the_sizes_that_lustre_asserts() -> None:
    """`wiretest.c` of Lustre."""
    sizes = {kind.__name__: ctypes.sizeof(kind) for kind in (V1, V3, Composite, Entry, Object)}
    assert sizes == {"V1": 32, "V3": 48, "Composite": 32, "Entry": 48, "Object": 24}


@given(st.binary(max_size=200) | st.binary(max_size=120).map(lambda rest: PROGRESSIVE[:60] + rest))
def test_no_attribute_is_an_error(attribute: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getxattr", lambda *_: attribute, raising=False)
        assert num_stripes(Path("file"), MIB) in {None, *range(1, 2**16)}


def test_a_file_elsewhere_has_no_stripes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"x")
    assert num_stripes(tmp_path / "file", 1) is None
    assert num_stripes(tmp_path / "none", 1) is None

    def refuse(*_: object) -> bytes:
        raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))

    monkeypatch.setattr(os, "getxattr", refuse, raising=False)
    assert num_stripes(tmp_path / "file", 1) is None
    monkeypatch.delattr(os, "getxattr")
    assert num_stripes(tmp_path / "file", 1) is None
