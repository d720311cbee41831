"""The manifest of a delta and the index of its files: what is not as FORMAT.md says is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from relayout.core.extents import Extent
from relayout.core.slices import WHOLE
from relayout.errors import FormatError
from relayout.format.delta import (
    DeltaFile,
    DeltaManifest,
    are_alike,
    dump_delta,
    parse_delta,
    parse_index,
    place_of_index,
)
from relayout.format.index import Kind, RankTable

DIGEST = xxh3_128_hexdigest(b"x")
MANIFEST = DeltaManifest("test", DIGEST, DIGEST[::-1], (DeltaFile(100, DIGEST), DeltaFile(0, DIGEST)), ("sub/a.json",))


def sealed(top: dict[str, Any]) -> bytes:
    text = json.dumps({name: value for name, value in top.items() if name != "self_digest"})[:-1] + ", "
    return (text + f'"self_digest": "{xxh3_128_hexdigest(text.encode())}"}}').encode()


def test_a_manifest_comes_back() -> None:
    assert parse_delta(dump_delta(MANIFEST), "here") == MANIFEST
    top = json.loads(dump_delta(MANIFEST))
    assert top["requires"] == ["delta"]
    assert parse_delta(sealed(top | {"x_new": {}}), "here") == MANIFEST


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (lambda top: top.update(relayout=2), "format version 2"),
    "no delta": (lambda top: top.update(requires=[]), "not a delta"),
    "more": (lambda top: top["requires"].append("teleport"), "requires 'teleport', which this relayout does not know"),
    "digest": (lambda top: top.update(digest="md5"), "digest algorithm 'md5'"),
    "base": (lambda top: top.update(base="old"), "'base' is 'old', not a digest"),
    "makes": (lambda top: top.pop("makes"), "'makes' is missing"),
    "files": (lambda top: top.update(files=[1]), "'files' is missing or not a list of objects"),
    "size": (lambda top: top["files"][0].update(nbytes=-1), "'nbytes' is missing or not a size"),
    "index": (lambda top: top["files"][0].pop("index_digest"), "'index_digest' is missing"),
    "above": (lambda top: top.update(side_files=["../a"]), "is not the name of a file inside"),
    "absolute": (lambda top: top.update(side_files=["/etc/passwd"]), "is not the name of a file inside"),
    "twice": (lambda top: top.update(side_files=["a", "a"]), "is used for two files"),
    "no names": (lambda top: top.update(side_files=[None]), "a list of str"),
}


@pytest.mark.parametrize("name", EDITS)
def test_another_manifest_is_refused(name: str) -> None:
    edit, message = EDITS[name]
    top = json.loads(dump_delta(MANIFEST))
    edit(top)
    with pytest.raises(FormatError, match=message):
        parse_delta(sealed(top), "here")


EXTENTS = [Extent(0, 64), Extent(64, 1000)]


def index(*pieces: int) -> bytes:
    return b"".join(nbytes.to_bytes(8, "little") + xxh3_128_digest(b"x") for nbytes in pieces)


def test_an_index_says_where_each_piece_is() -> None:
    blob = index(7, 0)
    parsed = parse_index(blob, DeltaFile(7 + 48, xxh3_128_hexdigest(blob)), EXTENTS)
    assert [parsed.place(piece, piece + 1) for piece in range(2)] == [Extent(0, 7), Extent(7, 0)]
    assert parsed.place(0, 2) == Extent(0, 7)
    assert [parsed.digest(piece) for piece in range(2)] == [DIGEST, DIGEST]
    assert place_of_index(DeltaFile(7 + 48, DIGEST), 2) == Extent(7, 48)


@pytest.mark.parametrize(
    ("pieces", "nbytes", "message"),
    [
        ((7, 1), 7 + 48, "pieces of 8 bytes, expected 7"),
        ((32 * 64 + 257, 0), 32 * 64 + 257 + 48, "larger than what it stands for"),
        ((0, 2**64 - 1), 2**64 - 1 + 48, "larger than what it stands for"),
    ],
)
def test_another_index_is_refused(pieces: tuple[int, ...], nbytes: int, message: str) -> None:
    blob = index(*pieces)
    with pytest.raises(FormatError, match=message):
        parse_index(blob, DeltaFile(nbytes, xxh3_128_hexdigest(blob)), EXTENTS)
    with pytest.raises(FormatError, match="differs from the manifest"):
        parse_index(blob, DeltaFile(nbytes, DIGEST), EXTENTS)
    with pytest.raises(FormatError, match="47 bytes long, an index of 2 pieces takes more"):
        place_of_index(DeltaFile(47, DIGEST), 2)


KINDS = [Kind("BF16", (4, 4), (4, 4), WHOLE), Kind("F16", (4, 4), (4, 4), WHOLE)]
TABLE = RankTable(0, KINDS, [0, 0], ["a", "b"], [0, 0], [512, 544], [0, 32], ["1", "2"])


@pytest.mark.parametrize(
    "columns",
    [
        {"kind_of": [0, 1]},
        {"names": ["b", "a"]},
        {"files": [0, 1]},
        {"offsets": [512, 576]},
        {"arena_offsets": [32, 0]},
    ],
    ids=lambda columns: next(iter(columns)),
)
def test_tables_are_alike_if_all_but_their_digests_agrees(columns: dict[str, Any]) -> None:
    assert are_alike(TABLE, replace(TABLE, digests=["3", "4"], kinds=[*KINDS, KINDS[0]], kind_of=[2, 0]))
    assert not are_alike(TABLE, replace(TABLE, **columns))
