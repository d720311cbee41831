"""Rank tables, and lies in them: those that one edit of a file can tell are in vectors/."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import zstandard
from support.sidecar import MANIFEST, STORED_TABLE, TABLE, indexed, proof

from relayout.core.extents import Transfer
from relayout.core.slices import BITS
from relayout.errors import FormatError
from relayout.format.index import RankTable, Read
from relayout.format.rank_table import dump_table, parse_table

Tree = dict[str, Any]


def table_tree() -> Tree:
    tree: Tree = json.loads(zstandard.ZstdDecompressor().decompressobj().decompress(STORED_TABLE))
    return tree


def parse_stored(stored: bytes, rank: int = 0) -> RankTable:
    """Parse a stored table under a manifest that names its digest."""
    entry = replace(MANIFEST.ranks[rank], table_digest=proof(stored))
    ranks = tuple(entry if i == rank else other for i, other in enumerate(MANIFEST.ranks))
    return parse_table(stored, replace(MANIFEST, ranks=ranks), rank, "table")


def stored(top: Any) -> bytes:
    return zstandard.ZstdCompressor().compress(json.dumps(top, ensure_ascii=False).encode())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_table_survives_a_round_trip(rank: int) -> None:
    found = parse_table(dump_table(replace(TABLE, rank=rank)), MANIFEST, rank, "table")
    assert [list(getattr(found, name)) for name in RankTable.__slots__ if name != "rank"] == [
        list(getattr(TABLE, name)) for name in RankTable.__slots__ if name != "rank"
    ]
    assert found.rank == rank


def with_kinds(*rows: int, **columns: Any) -> Tree:
    """The table with other columns of these kinds."""
    top = table_tree()
    for name, value in columns.items():
        for row in rows:
            top["kinds"][name][row] = value
    return top


@pytest.mark.parametrize(
    ("dtype", "bits", "shape"),
    [
        ("x_own", 16, [3]),
        ("BF17", 16, [3]),
        ("", 16, [3]),
        ("bf16", 48, []),
        ("F8_NEW", 8, [2, 3]),
        ("F6_NEW", 6, [8]),
        ("F12", 12, [4]),
        ("x_bit", 1, [48]),
    ],
)
def test_tensors_of_a_dtype_that_nobody_knows_are_placed_by_its_bits(dtype: str, bits: int, shape: list[int]) -> None:
    found = parse_stored(stored(with_kinds(2, dtype=dtype, bits=bits, shape=shape)))
    assert list(found.sizes) == [4096, 48, 6, 6, 6]
    assert list(found.dtypes) == ["BF16", "F32", dtype, dtype, "F16"]
    assert list(found.shapes)[2:4] == [tuple(shape)] * 2
    assert [kind.bits for kind in found.kinds] == [16, 32, bits, 16]
    assert [kind.nbytes for kind in found.kinds] == [4096, 48, 6, 6]
    assert list(parse_stored(dump_table(found)).sizes) == list(found.sizes)


def test_elements_have_up_to_1024_bits() -> None:
    found = parse_stored(
        stored(with_kinds(0, dtype="x_wide", bits=1024, shape=[4, 8], source_shape=[8, 8], slice={"0": [[4, 4]]}))
    )
    assert list(found.sizes) == [4096, 48, 6, 6, 6]


def test_an_empty_slice_of_an_unknown_dtype_has_no_bytes() -> None:
    top = with_kinds(3, dtype="x_own", bits=7, shape=[0, 1], source_shape=[3, 1], slice={"0": []})
    for column in ("name", "kind", "file", "offset", "arena_offset"):  # In front of what starts where it does.
        top[column].insert(2, top[column].pop())
    top["offset"][2], top["arena_offset"][2] = 4656, 0
    blob = stored(top)
    reads = (Read(0, Transfer(512, 512, 4144)), Read(0, Transfer(4656, 8192, 6, 2, 6, 16)))
    entry = replace(MANIFEST.holders[0], table_digest=proof(blob), nbytes=4156, reads=reads)
    found = parse_table(blob, replace(MANIFEST, ranks=(entry, MANIFEST.ranks[1])), 0, "table")
    assert list(found.sizes) == [4096, 48, 0, 6, 6]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"bits": 17}, r"'I16' of 17 bits$"),
        ({"bits": 0}, r"'I16' of 0 bits$"),
        ({"dtype": "x_own", "bits": 0}, r"'x_own' of 0 bits$"),
        ({"dtype": "x_own", "bits": 1025, "shape": [0]}, r"'x_own' of 1025 bits$"),
        ({"dtype": "x_own", "bits": 15}, r"tensor 'c': 'x_own' \[3\] is not a stored tensor$"),
        ({"dtype": "x_own", "bits": 1024, "shape": [2**53 - 1]}, r"tensor 'c': 'x_own' .* is not a stored tensor$"),
        ({"dtype": "x_own", "bits": 8}, r"tensors of 4156 bytes, relayout\.json says 4162$"),
        ({"dtype": "x_own", "bits": 24}, r"tensor '(c|d|scale)': "),
    ],
)
def test_bits_that_no_tensor_there_has_are_refused(columns: Tree, says: str) -> None:
    with pytest.raises(FormatError, match=f"^table: {says}") as caught:
        parse_stored(stored(with_kinds(2, **columns)))
    assert caught.value.code in ("field", "truncated", "coverage")


@pytest.mark.parametrize("dtype", BITS)
def test_the_bits_of_a_dtype_that_is_known_are_compared(dtype: str) -> None:
    nbytes, bits = 48, BITS[dtype]
    right = with_kinds(1, dtype=dtype, bits=bits, shape=[8 * nbytes // bits], source_shape=None, slice={})
    assert parse_stored(stored(right)).kinds[1].nbytes == nbytes
    for other in (bits // 2, 2 * bits):  # In a shape of as many bytes.
        wrong = with_kinds(1, dtype=dtype, bits=other, shape=[8 * nbytes // other], source_shape=None, slice={})
        with pytest.raises(FormatError, match=f"^table: '{dtype}' of {other} bits$"):
            parse_stored(stored(wrong))


def parse_small_tensors(reads: tuple[Read, ...], nbytes: int, **columns: list[int]) -> RankTable:
    """Parse a table of just the three tensors of 6 bytes, with other reads, and the columns replaced."""
    top = {name: value[2:] if isinstance(value, list) else value for name, value in table_tree().items()}
    blob = stored({**top, **columns})
    entry = replace(MANIFEST.ranks[0], table_digest=proof(blob), num_tensors=3, nbytes=nbytes, reads=reads)
    return parse_table(blob, replace(MANIFEST, ranks=(entry, MANIFEST.ranks[1])), 0, "table")


STRIDED = Read(0, Transfer(4656, 8192, 6, 3, 6, 16))


def test_tensors_are_not_believed_to_come_from_nowhere() -> None:
    assert parse_small_tensors((STRIDED,), 18).names == ["c", "d", "scale"]
    with pytest.raises(FormatError, match=r"^table: tensor 'c': no read in the manifest covers it"):
        parse_small_tensors((), 18)


def test_a_tensor_where_a_run_before_the_first_would_be_is_refused() -> None:
    with pytest.raises(FormatError, match=r"^table: tensor 'c': no read in the manifest covers it"):
        parse_small_tensors((STRIDED,), 18, offset=[4650, 4656, 4662], arena_offset=[8176, 8192, 8208])


def test_a_tensor_that_no_single_read_brings_is_refused() -> None:
    halves = (Read(0, Transfer(4656, 8192, 3)), Read(0, Transfer(4659, 8195, 3)))
    with pytest.raises(FormatError, match=r"^table: tensor 'c': no read in the manifest covers it"):
        parse_small_tensors((*halves, Read(0, Transfer(4662, 8208, 6, 2, 6, 16))), 18)


def test_a_tensor_that_begins_in_the_last_bytes_of_another_is_refused() -> None:
    """By as little as arena offsets can differ, and brought so by its read."""
    top = table_tree()
    top["offset"][1] -= 16
    top["arena_offset"][1] -= 16
    with pytest.raises(FormatError, match=r"^table: tensors 'größe' and 'b' overlap in the arena"):
        parse_stored(stored(top))


def test_a_tensor_that_a_read_of_another_file_brings_is_refused() -> None:
    """The other file exists, and is long enough."""
    entry = MANIFEST.ranks[0]
    other = indexed("model-rank-0-part-1.safetensors", 4674, 512)

    def parse(number: int) -> RankTable:
        top = table_tree()
        top["file"][4] = number
        blob = stored(top)
        two = replace(entry, files=(0, 2), table_digest=proof(blob))
        manifest = replace(MANIFEST, files=(*MANIFEST.files, other), ranks=(two, MANIFEST.ranks[1]))
        return parse_table(blob, manifest, 0, "table")

    assert parse(0).files == TABLE.files
    with pytest.raises(FormatError, match=r"^table: tensor 'scale': no read in the manifest covers it .arena .* 8224"):
        parse(1)
