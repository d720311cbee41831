"""relayout.format.delta: the manifest and pieces of a delta, and the compression of what changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from blake3 import blake3
from hypothesis import assume, given
from hypothesis import strategies as st
from support.sidecar import MANIFEST as CHECKPOINT
from support.sidecar import indexed

from relayout.core.extents import Extent
from relayout.errors import FormatError
from relayout.format.delta import (
    WIDTHS,
    ChangedDigests,
    DeltaFile,
    DeltaManifest,
    delta_name,
    dump_changed_digests,
    dump_delta,
    dump_index,
    encode,
    layout_difference,
    parse_changed_digests,
    parse_delta,
    parse_index,
    piece_of,
    xor_into,
)
from relayout.format.index import IndexedFile, Manifest

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
FILES = (DeltaFile(1, 500, 2, PROOF), DeltaFile(4, 81, 1, PROOF[::-1]))
DIGESTS = (ChangedDigests(2, PROOF), ChangedDigests(0, blake3(b"").hexdigest()), ChangedDigests(3, PROOF[::-1]))
MANIFEST = DeltaManifest("test", PROOF, PROOF[::-1], FILES, DIGESTS, ("sub/a.json", "relayout.source.json.zst"))

Top = dict[str, Any]


def sealed(top: Top) -> bytes:
    text = json.dumps({name: value for name, value in top.items() if name != "self_digest"})[:-1] + ", "
    return (text + f'"self_digest": "{blake3(text.encode()).hexdigest()}"}}').encode()


def top_of(manifest: DeltaManifest = MANIFEST) -> Top:
    top: Top = json.loads(dump_delta(manifest))
    return top


def test_a_manifest_comes_back() -> None:
    assert parse_delta(dump_delta(MANIFEST), "here") == MANIFEST
    assert top_of()["requires"] == ["delta"]
    nothing = replace(MANIFEST, files=(), digests=(), others=())
    assert parse_delta(dump_delta(nothing), "here") == nothing


def test_what_later_writers_add_is_ignored_and_words_may_stand_twice() -> None:
    top = top_of()
    assert parse_delta(sealed(top | {"requires": ["delta", "delta"]}), "here") == MANIFEST
    for entry in (top, *top["files"], *top["digests"]):
        entry |= {"x_new": {"nbytes": [-1]}, "side_files": 7}
    assert parse_delta(sealed(top), "here") == MANIFEST


def test_a_manifest_says_where_what_changed_is() -> None:
    assert MANIFEST.by_number == {1: FILES[0], 4: FILES[1]}
    assert [file.index_extent for file in FILES] == [Extent(500 - 160, 160), Extent(1, 80)]
    assert MANIFEST.digest_extents == [Extent(0, 48), Extent(48, 0), Extent(48, 72)]
    assert delta_name("model-rank-0-part-0.safetensors") == "model-rank-0-part-0.safetensors.delta"


EDITS: dict[str, tuple[Callable[[Top], object], str, str]] = {
    "version": (lambda top: top.update(relayout=2), "format version 2", "version"),
    "no delta": (lambda top: top.update(requires=[]), "not a delta", "version"),
    "of whole tensors": (lambda top: top.update(requires=["whole"]), "not a delta", "version"),
    "more": (
        lambda top: top["requires"].append("teleport"),
        "requires 'teleport', which this relayout does not know",
        "version",
    ),
    "no words": (lambda top: top.pop("requires"), "'requires' is missing or not a list of strings", "field"),
    "newer encoding": (lambda top: top.update(encoding=2), "encoding 2, this relayout reads 1", "version"),
    "no encoding": (lambda top: top.pop("encoding"), "'encoding' is missing or not a size", "field"),
    "encoding 0": (lambda top: top.update(encoding=0), "encoding 0, this relayout reads 1", "version"),
    "encoding as text": (lambda top: top.update(encoding="1"), "'encoding' is missing or not a size", "field"),
    "encoding true": (lambda top: top.update(encoding=True), "'encoding' is missing or not a size", "field"),
    "generator": (lambda top: top.pop("generator"), "'generator' is missing or not a string", "field"),
    "base": (lambda top: top.update(base="old"), "'base' is 'old', not a BLAKE3 digest", "field"),
    "base of another kind": (lambda top: top.update(base=PROOF[:32]), "'base' is .*, not a BLAKE3 digest", "field"),
    "makes": (lambda top: top.pop("makes"), "'makes' is missing", "field"),
    "makes upper case": (lambda top: top.update(makes="A" * 64), "'makes' is .*, not a BLAKE3 digest", "field"),
    "files": (lambda top: top.update(files=[1]), "'files' is missing or not a list of objects", "field"),
    "files null": (lambda top: top["files"].append(None), "'files' is missing or not a list of objects", "field"),
    "files fall": (lambda top: top["files"].reverse(), r"files \[4, 1\], expected rising numbers", "field"),
    "a file twice": (
        lambda top: top["files"].insert(1, top["files"][0]),
        r"files \[1, 1, 4\], expected rising numbers",
        "field",
    ),
    "number": (lambda top: top["files"][0].pop("file"), "'file' is missing or not a size", "field"),
    "number below 0": (lambda top: top["files"][0].update(file=-1), "'file' is missing or not a size", "field"),
    "size": (lambda top: top["files"][0].update(nbytes=-1), "'nbytes' is missing or not a size", "field"),
    "no pieces": (lambda top: top["files"][0].update(num_pieces=0), "file 1: 0 pieces and their index in", "truncated"),
    "pieces": (lambda top: top["files"][0].pop("num_pieces"), "'num_pieces' is missing or not a size", "field"),
    "index longer than the file": (
        lambda top: top["files"][1].update(nbytes=79),
        "file 4: 1 pieces and their index in 79 bytes",
        "truncated",
    ),
    "pieces without end": (
        lambda top: top["files"][1].update(num_pieces=2**53 - 1),
        "file 4: 9007199254740991 pieces and their index in 81 bytes",
        "truncated",
    ),
    "index": (lambda top: top["files"][0].pop("index_digest"), "'index_digest' is missing", "field"),
    "index of another kind": (
        lambda top: top["files"][0].update(index_digest="0" * 32),
        "'index_digest' is .*, not a BLAKE3 digest",
        "field",
    ),
    "digests": (lambda top: top.pop("digests"), "'digests' is missing or not a list of objects", "field"),
    "digests null": (lambda top: top["digests"].append(None), "'digests' is missing or not a list of objects", "field"),
    "count": (lambda top: top["digests"][0].pop("count"), "'count' is missing or not a size", "field"),
    "count below 0": (lambda top: top["digests"][0].update(count=-1), "'count' is missing or not a size", "field"),
    "proof of digests": (lambda top: top["digests"][2].pop("digest"), "'digest' is missing or not a string", "field"),
    "digests of another kind": (
        lambda top: top["digests"][0].update(digest="0" * 32),
        "'digest' is .*, not a BLAKE3 digest",
        "field",
    ),
    "above": (lambda top: top.update(others=["../a"]), "is not the name of a file inside", "unsafe"),
    "absolute": (lambda top: top.update(others=["/etc/passwd"]), "is not the name of a file inside", "unsafe"),
    "hidden": (lambda top: top.update(others=["sub/.a"]), "is not the name of a file inside", "unsafe"),
    "twice": (lambda top: top.update(others=["a", "a"]), "is used for two files", "field"),
    "in a file": (lambda top: top.update(others=["a", "a/b"]), "is used for two files", "field"),
    "no names": (lambda top: top.update(others=[None]), "a list of str", "field"),
    "no others": (lambda top: top.pop("others"), "'others' is missing or not a list of strings", "field"),
}


@pytest.mark.parametrize("name", EDITS)
def test_another_manifest_is_refused(name: str) -> None:
    edit, message, code = EDITS[name]
    top = top_of()
    edit(top)
    with pytest.raises(FormatError, match=f"^here: .*{message}") as caught:
        parse_delta(sealed(top), "here")
    assert caught.value.code == code


def test_a_manifest_that_is_not_its_own_proof_is_refused() -> None:
    for blob in (dump_delta(MANIFEST).replace(b'"test"', b'"best"'), json.dumps(top_of() | {"x": 1}).encode()):
        with pytest.raises(FormatError, match=r"its self_digest is .*: damaged or edited") as caught:
            parse_delta(blob, "here")
        assert caught.value.code == "digest"


CHUNK_NBYTES = 2**16


@st.composite
def weight_files(draw: st.DrawFn) -> IndexedFile:
    """A weight file of up to eight chunks, of which the last may be short."""
    data_start = draw(st.sampled_from([8, 100, 512, 4096, 100_000]))
    nbytes = data_start + draw(st.integers(0, 8)) * CHUNK_NBYTES
    return indexed("a.safetensors", nbytes + draw(st.sampled_from([0, 1, 77, CHUNK_NBYTES - 1])), data_start)


def pieces_of(file: IndexedFile) -> list[Extent]:
    """The header and the chunks of a file, by FORMAT.md."""
    starts = [0, *range(file.data_start, file.nbytes, CHUNK_NBYTES)]
    ends = [file.data_start, *(min(start + CHUNK_NBYTES, file.nbytes) for start in starts[1:])]
    return [Extent(start, end - start) for start, end in zip(starts, ends, strict=True)]


@given(weight_files())
def test_pieces_are_the_header_and_the_chunks(file: IndexedFile) -> None:
    expected = pieces_of(file)
    assert [piece_of(file, CHUNK_NBYTES, number) for number in range(len(expected))] == expected


Row = tuple[int, int, str, str]
proofs = st.binary(min_size=32, max_size=32).map(bytes.hex)


@st.composite
def indexes(draw: st.DrawFn) -> tuple[IndexedFile, list[Row]]:
    """A weight file, and what an index has of the pieces of it that changed, at least one."""
    file = draw(weight_files())
    extents = pieces_of(file)
    numbers = sorted(draw(st.sets(st.integers(0, len(extents) - 1), min_size=1)))
    lengths = [draw(st.integers(1, 32 * extents[number].nbytes + 256)) for number in numbers]
    contents = [draw(proofs) if number else file.header_digest for number in numbers]
    return file, [(*row[:2], draw(proofs), row[2]) for row in zip(numbers, lengths, contents, strict=True)]


def raw_index(rows: Iterable[Row]) -> bytes:
    """An index as FORMAT.md has it."""
    return b"".join(
        number.to_bytes(8, "little") + nbytes.to_bytes(8, "little") + bytes.fromhex(stored) + bytes.fromhex(content)
        for number, nbytes, stored, content in rows
    )


def entry_of(rows: Sequence[Row], blob: bytes) -> DeltaFile:
    """What a manifest says of a file with such an index."""
    return DeltaFile(0, sum(nbytes for _, nbytes, *_ in rows) + len(blob), len(rows), blake3(blob).hexdigest())


@given(indexes(), st.data())
def test_an_index_says_where_each_piece_is(given_index: tuple[IndexedFile, list[Row]], data: st.DataObject) -> None:
    file, rows = given_index
    blob = dump_index(rows)
    assert blob == raw_index(rows)
    entry = entry_of(rows, blob)
    parsed = parse_index(blob, entry, file, CHUNK_NBYTES)
    assert parsed.numbers.tolist() == [number for number, *_ in rows]
    assert [bytes(row).hex() for row in parsed.stored] == [stored for *_, stored, _ in rows]
    assert [bytes(row).hex() for row in parsed.contents] == [content for *_, content in rows]
    ends = list(accumulate(nbytes for _, nbytes, *_ in rows))
    indices = [Extent(end - nbytes, nbytes) for end, (_, nbytes, *_) in zip(ends, rows, strict=True)]
    assert [parsed.place(range(row, row + 1)) for row in range(len(rows))] == indices
    assert entry.index_extent == Extent(ends[-1], 80 * len(rows))
    first, end = sorted(data.draw(st.tuples(st.integers(0, 12), st.integers(0, 12))))
    found = parsed.rows(first, end)
    assert [rows[row] for row in found] == [row for row in rows if first <= row[0] < end]
    assert parsed.place(found).nbytes == sum(rows[row][1] for row in found)


def test_an_index_by_hand() -> None:
    file, other = indexed("a.safetensors", 512 + 2 * CHUNK_NBYTES + 7, 512), blake3(b"y").hexdigest()
    blob = dump_index([(0, 7, PROOF, file.header_digest), (3, 480, other, PROOF)])
    assert blob[80:96].hex() == "0300000000000000e001000000000000"
    parsed = parse_index(blob, DeltaFile(9, 647, 2, blake3(blob).hexdigest()), file, CHUNK_NBYTES)
    assert parsed.rows(0, 3) == range(1)
    assert parsed.rows(1, 4) == range(1, 2)
    assert parsed.place(range(1, 2)) == Extent(7, 480)  # As long as a piece of seven bytes may be.
    assert bytes(parsed.contents[1]).hex() == PROOF


Hostile = Callable[[list[Row], list[Extent], int], object]
"""Changes rows, of which one is chosen; given the pieces of the file, too."""


def swap(rows: list[Row], pieces: list[Extent], at: int) -> None:
    rows.append(rows.pop(0))


def number_of(number: int) -> Hostile:
    def change(rows: list[Row], pieces: list[Extent], at: int) -> None:
        rows[-1] = (number, *rows[-1][1:])

    return change


def length_of(nbytes: int, times: int = 0) -> Hostile:
    def change(rows: list[Row], pieces: list[Extent], at: int) -> None:
        number = rows[at][0]
        rows[at] = (number, nbytes + times * pieces[number].nbytes, *rows[at][2:])

    return change


HOSTILE: dict[str, tuple[Hostile, str, str]] = {
    "numbers fall": (swap, "pieces that changed: expected rising numbers below", "field"),
    "a number twice": (
        lambda rows, pieces, at: rows.insert(at, rows[at]),
        "pieces that changed: expected rising numbers below",
        "field",
    ),
    "a number behind the last": (
        lambda rows, pieces, at: number_of(len(pieces))(rows, pieces, at),
        "pieces that changed: expected rising numbers below",
        "field",
    ),
    "a number of 63 bits": (number_of(2**63 - 1), "pieces that changed: expected rising numbers below", "field"),
    "a number below 0, if it had a sign": (
        number_of(2**64 - 1),
        "pieces that changed: expected rising numbers below",
        "field",
    ),
    "an empty piece": (length_of(0), "a piece is empty, or larger than what it stands for", "limit"),
    "a piece that is too long": (length_of(257, 32), "a piece is empty, or larger than what it stands for", "limit"),
    "a length of 63 bits": (length_of(2**63), "a piece is empty, or larger than what it stands for", "limit"),
    "a length of 64 bits": (length_of(2**64 - 1), "a piece is empty, or larger than what it stands for", "limit"),
}


@given(indexes(), st.sampled_from([*HOSTILE]), st.data())
def test_another_index_is_refused(given_index: tuple[IndexedFile, list[Row]], name: str, data: st.DataObject) -> None:
    """Its proof is right, and so is the length of the file, as far as a number has it."""
    (file, rows), (change, message, code) = given_index, HOSTILE[name]
    assume(name != "numbers fall" or len(rows) > 1)
    change(rows, pieces_of(file), data.draw(st.integers(0, len(rows) - 1)))
    blob = raw_index(rows)
    with pytest.raises(FormatError, match=message) as caught:
        parse_index(blob, entry_of(rows, blob), file, CHUNK_NBYTES)
    assert caught.value.code == code


@given(indexes(), st.sampled_from([-1, 1, 80, -80, 2**40]))
def test_an_index_of_a_file_of_another_length_is_refused(given_index: tuple[IndexedFile, list[Row]], more: int) -> None:
    file, rows = given_index
    blob, nbytes = raw_index(rows), sum(nbytes for _, nbytes, *_ in rows)
    entry = replace(entry_of(rows, blob), nbytes=nbytes + len(blob) + more)
    with pytest.raises(FormatError, match=f"pieces of {nbytes} bytes, expected {nbytes + more}") as caught:
        parse_index(blob, entry, file, CHUNK_NBYTES)
    assert caught.value.code == "mismatch"


@given(indexes(), st.data())
def test_an_index_that_is_not_the_one_that_is_proven_is_refused(
    given_index: tuple[IndexedFile, list[Row]], data: st.DataObject
) -> None:
    file, rows = given_index
    blob = bytearray(raw_index(rows))
    entry = entry_of(rows, bytes(blob))
    blob[data.draw(st.integers(0, len(blob) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(FormatError, match="its index differs from the manifest") as caught:
        parse_index(bytes(blob), entry, file, CHUNK_NBYTES)
    assert caught.value.code == "digest"


@st.composite
def changed_rows(draw: st.DrawFn) -> tuple[int, list[tuple[int, bytes]]]:
    """How many digests there are, and which of them changed to what."""
    count = draw(st.integers(0, 40))
    rows = sorted(draw(st.sets(st.integers(0, count - 1)))) if count else []
    return count, [(row, draw(st.binary(min_size=16, max_size=16))) for row in rows]


def raw_rows(rows: Iterable[tuple[int, bytes]]) -> bytes:
    """The digests that changed, as FORMAT.md has them."""
    return b"".join(row.to_bytes(8, "little") + digest for row, digest in rows)


def part_of(blob: bytes) -> ChangedDigests:
    """What a manifest says of them."""
    return ChangedDigests(len(blob) // 24, blake3(blob).hexdigest())


@given(changed_rows(), st.integers(0, 2**32))
def test_digests_that_changed_come_back(given_rows: tuple[int, list[tuple[int, bytes]]], seed: int) -> None:
    count, rows = given_rows
    old = np.random.default_rng(seed).integers(0, 256, (count, 16), np.uint8)
    new = old.copy()
    for row, digest in rows:
        new[row] = np.frombuffer(digest, np.uint8)
    blob, part = dump_changed_digests(old.tobytes(), new.tobytes())
    changed = [(row, digest) for row, digest in rows if old[row].tobytes() != digest]
    assert (blob, part) == (raw_rows(changed), part_of(raw_rows(changed)))
    found, digests = parse_changed_digests(blob, part, count)
    assert found.tolist() == [row for row, _ in changed]
    assert [bytes(digest) for digest in digests] == [digest for _, digest in changed]
    old[found] = digests
    np.testing.assert_array_equal(old, new)


def test_digests_of_which_none_changed_take_nothing() -> None:
    for packed in (b"", bytes(32)):
        assert dump_changed_digests(packed, packed) == (b"", ChangedDigests(0, blake3(b"").hexdigest()))
    rows, digests = parse_changed_digests(b"", ChangedDigests(0, blake3(b"").hexdigest()), 7)
    assert (rows.shape, digests.shape) == ((0,), (0, 16))


@given(changed_rows(), st.sampled_from(["fall", "twice", "behind", "63 bits", "64 bits"]), st.data())
def test_other_rows_are_refused(
    given_rows: tuple[int, list[tuple[int, bytes]]], name: str, data: st.DataObject
) -> None:
    count, rows = given_rows
    assume(len(rows) > (1 if name == "fall" else 0))
    at = data.draw(st.integers(0, len(rows) - 1))
    if name == "fall":
        rows.append(rows.pop(0))
    elif name == "twice":
        rows.insert(at, rows[at])
    else:
        rows[-1] = ({"behind": count, "63 bits": 2**63 - 1, "64 bits": 2**64 - 1}[name], rows[-1][1])
    blob = raw_rows(rows)
    message = rf"digests that changed(: expected rising numbers below|, of) {count}$"
    with pytest.raises(FormatError, match=message) as caught:
        parse_changed_digests(blob, part_of(blob), count)
    assert caught.value.code == "field"


@given(changed_rows(), st.data())
def test_rows_that_are_not_those_that_are_proven_are_refused(
    given_rows: tuple[int, list[tuple[int, bytes]]], data: st.DataObject
) -> None:
    count, rows = given_rows
    blob = bytearray(raw_rows(rows))
    part = part_of(bytes(blob))
    if blob:
        blob[data.draw(st.integers(0, len(blob) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    else:
        blob += bytes(24)
    with pytest.raises(FormatError, match="digests of tensors that changed differ from the manifest") as caught:
        parse_changed_digests(bytes(blob), part, count)
    assert caught.value.code == "digest"


FIRST, SECOND = CHECKPOINT.files
RANK = CHECKPOINT.holders[0]
WHOLE = replace(RANK, table="relayout.whole.json.zst")


def with_file(**fields: Any) -> Manifest:
    return replace(CHECKPOINT, files=(replace(FIRST, **fields), SECOND))


def with_rank(**fields: Any) -> Manifest:
    return replace(CHECKPOINT, ranks=(replace(RANK, **fields), CHECKPOINT.ranks[1]))


OTHER_TABLES = "tables differ: other tensors, or written with another version of zstd"
DIFFERENCES: dict[str, tuple[Manifest, str | None]] = {
    "nothing": (CHECKPOINT, None),
    "digests of tensors": (with_rank(digests_digest=PROOF), None),
    "tensors of a file": (with_file(tensors_digest="0" * 32), None),
    "header": (with_file(header_digest=PROOF), None),
    "chunks": (with_file(chunks_digest=PROOF), None),
    "what is not of the layout": (
        replace(
            CHECKPOINT,
            generator="another",
            conversion="0" * 32,
            model_type=None,
            plan="none",
            record_digest=PROOF,
            source_digests_digest=PROOF,
            hub_index_digest=PROOF,
        ),
        None,
    ),
    "fewer ranks": (replace(CHECKPOINT, ranks=CHECKPOINT.ranks[:1]), "tensor-parallel degree differs"),
    "whole tensors": (replace(CHECKPOINT, whole=WHOLE), "layout differs"),
    "chunk size": (replace(CHECKPOINT, chunk_nbytes=2**21), "size of chunks differs"),
    "source tensors": (replace(CHECKPOINT, num_source_tensors=6), "number of source tensors differs"),
    "name": (with_file(name="other.safetensors"), "files differ"),
    "length": (with_file(nbytes=4675), "files differ"),
    "data start": (with_file(data_start=513), "files differ"),
    "a file more": (replace(CHECKPOINT, files=(FIRST, SECOND, replace(FIRST, name="c.safetensors"))), "files differ"),
    "order of files": (replace(CHECKPOINT, files=(SECOND, FIRST)), "files differ"),
    "a rank less": (replace(CHECKPOINT, ranks=(None, CHECKPOINT.ranks[1])), "ranks differ"),
    "tensors": (with_rank(num_tensors=6), "ranks differ"),
    "bytes": (with_rank(nbytes=4163), "ranks differ"),
    "files of a rank": (with_rank(files=(1,)), "ranks differ"),
    "arena": (with_rank(arena_nbytes=12289), "ranks differ"),
    "reads": (with_rank(reads=RANK.reads[:1]), "ranks differ"),
    "name of a table": (with_rank(table="relayout.rank-9.json.zst"), "ranks differ"),
    "table": (with_rank(table_digest=PROOF), OTHER_TABLES),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_delta_is_possible_if_all_but_digests_and_proofs_is_as_before(name: str) -> None:
    other, difference = DIFFERENCES[name]
    assert (other == CHECKPOINT) == (name == "nothing")
    for sides in ((CHECKPOINT, other), (other, CHECKPOINT)):
        assert layout_difference(*sides) == (None if difference is None else f"the {difference}")


def test_whole_tensors_are_compared_as_ranks_are() -> None:
    old = replace(CHECKPOINT, whole=WHOLE)
    for fields, difference in (
        ({"digests_digest": PROOF}, None),
        ({"num_tensors": 6}, "the ranks differ"),
        ({"table_digest": PROOF}, f"the {OTHER_TABLES}"),
    ):
        assert layout_difference(old, replace(CHECKPOINT, whole=replace(WHOLE, **fields))) == difference
