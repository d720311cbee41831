"""Rank tables, and lies in them: those that one edit of a file can tell are in vectors/."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import zstandard
from support.sidecar import MANIFEST, STORED_TABLE, TABLE, indexed, proof

from relayout.core.extents import Transfer
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
