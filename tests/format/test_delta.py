"""relayout.format.delta: the manifest and pieces of a delta, and the compression of what changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from relayout.core.extents import Extent
from relayout.core.slices import WHOLE
from relayout.errors import FormatError
from relayout.format.delta import (
    WIDTHS,
    DeltaFile,
    DeltaManifest,
    are_alike,
    dump_delta,
    encode,
    parse_delta,
    parse_index,
    place_of_index,
    xor_into,
)
from relayout.format.index import RankTable, TensorKind

Bytes = npt.NDArray[np.uint8]
GUARD = 64

Runs = list[tuple[int, int]]
runs_of = st.lists(
    st.sampled_from(WIDTHS).flatmap(
        lambda width: st.tuples(st.integers(1, 700).map(lambda n: n * width), st.just(width))
    ),
    min_size=1,
    max_size=6,
)


def sparse_bytes(nbytes: int, share: float, seed: int) -> Bytes:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, nbytes, np.uint8) * (random.random(nbytes) < share)


@given(runs_of, st.sampled_from([0, 0.0005, 0.01, 0.05, 0.3, 0.9, 1]), st.integers(0, 2**32))
def test_a_target_becomes_its_xor_with_what_was_encoded(runs: Runs, share: float, seed: int) -> None:
    data = sparse_bytes(sum(nbytes for nbytes, _ in runs), share, seed)
    encoded = encode(data, runs)
    assert bool(encoded) == bool(data.any())
    before = np.random.default_rng(seed + 1).integers(0, 256, data.nbytes + 2 * GUARD, np.uint8)
    memory = before.copy()
    xor_into(encoded, memory.data[GUARD : GUARD + data.nbytes])
    np.testing.assert_array_equal(memory, before ^ np.pad(data, GUARD))
    xor_into(encoded, memory.data[GUARD : GUARD + data.nbytes])
    np.testing.assert_array_equal(memory, before)


@pytest.mark.parametrize("share", [0.02, 0.05, 0.12, 0.13, 0.24, 0.26, 1])
@pytest.mark.parametrize("num_elements", [3 * 2**18 + 8, 3 * 2**18 + 11])
def test_many_elements_of_several_blocks_come_back(num_elements: int, share: float) -> None:
    """More than are looked at at a time; in one of the blocks nothing changed, and in the last one the last element."""
    random = np.random.default_rng(5)
    change = random.integers(0, 2**16, num_elements, np.uint16) * (random.random(num_elements) < share)
    change[2**18 : 2**19] = 0
    change[-1] = 7
    target = bytearray(change.nbytes)
    xor_into(encode(change.view(np.uint8), [(change.nbytes, 2)]), memoryview(target))
    np.testing.assert_array_equal(np.frombuffer(target, np.uint16), change)


@pytest.mark.parametrize("zeros", [0, 1, 253, 254, 255, 256, 509, 510, 511, 70_000])
def test_a_gap_of_any_length_comes_back(zeros: int) -> None:
    elements = np.zeros(2 * zeros + 700, np.uint16)
    elements[[0, zeros + 1, 2 * zeros + 2]] = 0x1234, 0x00FF, 0xFF00
    target = bytearray(elements.nbytes)
    xor_into(encode(elements.view(np.uint8), [(elements.nbytes, 2)]), memoryview(target))
    assert bytes(target) == elements.tobytes()


def low_bits(share: float, num_elements: int = 2**19) -> Bytes:
    """The XOR of BF16 elements and the same, of which a share is one unit in the last place larger."""
    random = np.random.default_rng(3)
    old = (random.standard_normal(num_elements).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return (old ^ (old + (random.random(num_elements) < share)).astype(np.uint16)).view(np.uint8)


@pytest.mark.parametrize(("share", "most"), [(0.01, 0.010), (0.05, 0.035), (0.5, 0.20)])
def test_low_bits_that_change_anywhere_take_little(share: float, most: float) -> None:
    """In the whole; where all elements change, no more than they have."""
    data = low_bits(share)
    assert len(encode(data, [(data.nbytes, 2)])) < most * data.nbytes


def test_bytes_without_order_take_hardly_more_than_they_are() -> None:
    data = sparse_bytes(2**20, 1, 0)
    assert len(encode(data, [(data.nbytes, 2)])) < 1.001 * data.nbytes


@given(st.data())
def test_damage_raises_or_stays_inside_the_target(draws: st.DataObject) -> None:
    runs: Runs = [(600, 2), (3, 1), (800, 8)]
    data = sparse_bytes(1403, 0.1, 0)
    encoded = bytearray(encode(data, runs))
    end = draws.draw(st.integers(0, len(encoded)))
    for _ in range(draws.draw(st.integers(0, 3))):
        place: Any = draws.draw(st.integers(0, len(encoded) - 1))
        encoded[place] ^= draws.draw(st.integers(1, 255))
    memory = np.full(data.nbytes + 2 * GUARD, 7, np.uint8)
    with suppress(FormatError):
        xor_into(bytes(encoded[:end]), memory.data[GUARD : GUARD + data.nbytes])
    assert (memory[:GUARD] == 7).all()
    assert (memory[-GUARD:] == 7).all()


def test_what_is_of_other_bytes_is_refused() -> None:
    data = sparse_bytes(4000, 0.1, 0)
    for nbytes in (3998, 4002):
        with pytest.raises(FormatError, match=f"of 4000 bytes, expected {nbytes}"):
            xor_into(encode(data, [(4000, 2)]), memoryview(bytearray(nbytes)))
    with pytest.raises(FormatError, match="not a zstd frame"):
        xor_into(encode(data, [(4000, 2)]) + b"behind", memoryview(bytearray(4000)))
    with pytest.raises(FormatError, match="runs in"):
        xor_into(b"\xff" * 9, memoryview(bytearray(4000)))


@pytest.mark.parametrize(
    ("runs", "body", "message"),
    [
        # There may be millions of these, each of which takes memory and time.
        ([(4000, 2, 0, 0), (0, 1, 0, 0)], b"", "a run of 0 bytes"),
        ([(4000, 3, 0, 0)], b"", "a run of 4000 bytes in elements of 3"),
        ([(4000, 2, 0, 1)], b"\1\1", "0 gaps and 1 elements"),
        ([(4000, 2, 1, 2)], b"\1\1\1\1\1", "1 gaps and 2 elements"),
        ([(4000, 2, 1, 1)], b"\xff\1\1", "gaps lead beyond"),
        ([(4000, 2, 9, 9)], b"\xfe" * 9 + bytes(18), "gaps lead beyond"),
        ([(4000, 2, 0, 0)], b"\1", "another length than 0 bytes"),
    ],
)
def test_runs_that_no_piece_has_are_refused(runs: list[tuple[int, int, int, int]], body: bytes, message: str) -> None:
    head = np.array([len(runs), *(number for run in runs for number in run)], "<u4").tobytes()
    with pytest.raises(FormatError, match=message):
        xor_into(head + zstandard.compress(body), memoryview(bytearray(4000)))
    with pytest.raises(FormatError, match="not a zstd frame"):
        xor_into(np.array([1, 4000, 2, 0, 0], "<u4").tobytes() + body, memoryview(bytearray(4000)))


PROOF = blake3(b"x").hexdigest()
MANIFEST = DeltaManifest("test", PROOF, PROOF[::-1], (DeltaFile(100, PROOF), DeltaFile(0, PROOF)), ("sub/a.json",))


def sealed(top: dict[str, Any]) -> bytes:
    text = json.dumps({name: value for name, value in top.items() if name != "self_digest"})[:-1] + ", "
    return (text + f'"self_digest": "{blake3(text.encode()).hexdigest()}"}}').encode()


def test_a_manifest_comes_back() -> None:
    assert parse_delta(dump_delta(MANIFEST), "here") == MANIFEST
    top = json.loads(dump_delta(MANIFEST))
    assert top["requires"] == ["delta"]
    assert parse_delta(sealed(top | {"x_new": {}}), "here") == MANIFEST


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "version": (lambda top: top.update(relayout=2), "format version 2"),
    "no delta": (lambda top: top.update(requires=[]), "not a delta"),
    "more": (lambda top: top["requires"].append("teleport"), "requires 'teleport', which this relayout does not know"),
    "base": (lambda top: top.update(base="old"), "'base' is 'old', not a proof"),
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
    parsed = parse_index(blob, DeltaFile(7 + 48, blake3(blob).hexdigest()), EXTENTS)
    assert [parsed.place(piece, piece + 1) for piece in range(2)] == [Extent(0, 7), Extent(7, 0)]
    assert parsed.place(0, 2) == Extent(0, 7)
    assert [parsed.digest(piece) for piece in range(2)] == [xxh3_128_hexdigest(b"x")] * 2
    assert place_of_index(DeltaFile(7 + 48, PROOF), 2) == Extent(7, 48)


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
        parse_index(blob, DeltaFile(nbytes, blake3(blob).hexdigest()), EXTENTS)
    with pytest.raises(FormatError, match="differs from the manifest"):
        parse_index(blob, DeltaFile(nbytes, PROOF), EXTENTS)
    with pytest.raises(FormatError, match="47 bytes long, an index of 2 pieces takes more"):
        place_of_index(DeltaFile(47, PROOF), 2)


KINDS = [TensorKind("BF16", (4, 4), (4, 4), WHOLE), TensorKind("F16", (4, 4), (4, 4), WHOLE)]
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
