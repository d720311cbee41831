"""Digests of stored bytes are those of the bytes, however the extents lie and the requests are cut."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support.local_stores import hashed_file

from relayout.core.extents import BLOCK, Extent
from relayout.core.workers import Stop, Stopped
from relayout.errors import FormatError
from relayout.storage import reading
from relayout.storage.local.store import InputFile
from relayout.storage.reading import hash_files

NBYTES = 10 * BLOCK + 1234
BYTES = np.random.default_rng(3).bytes(NBYTES)
EMPTY = xxhash.xxh3_128_hexdigest(b"")

true_read = InputFile.read


def expected(extents: Sequence[Extent], blob: bytes = BYTES) -> list[str]:
    return [xxhash.xxh3_128_hexdigest(blob[one.offset : one.end]) for one in extents]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("rehash") / "file"
    place.write_bytes(BYTES)
    return place


CHUNK_BLOCKS = [1, 2, 5, 1000]


@pytest.fixture(params=CHUNK_BLOCKS, ids=lambda blocks: f"chunks of {blocks} blocks")
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Requests of another size, so that a small file takes many."""
    nbytes: int = request.param * BLOCK
    monkeypatch.setattr(reading, "READ_NBYTES", nbytes)
    return nbytes


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Extent]:
    """What is read."""
    seen: list[Extent] = []

    def spy(self: InputFile, offset: int, view: memoryview) -> None:
        seen.append(Extent(offset, view.nbytes))
        true_read(self, offset, view)

    monkeypatch.setattr(InputFile, "read", spy)
    return seen


@st.composite
def arrangements(draw: Callable[[Any], Any]) -> list[Extent]:
    """Extents in order, without overlap: with gaps, without, empty ones among them."""
    near = st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK])
    extents = []
    offset = 0
    for _ in range(draw(st.integers(0, 12))):
        offset = min(NBYTES, offset + draw(st.one_of(st.just(0), near, st.integers(0, NBYTES))))
        length = min(NBYTES - offset, draw(st.one_of(st.just(0), near, st.integers(0, NBYTES))))
        extents.append(Extent(offset, length))
        offset += length
    return extents


@given(
    arrangement=st.lists(arrangements(), min_size=1, max_size=3),
    empty=st.lists(st.tuples(st.integers(0, 12), st.integers(0, NBYTES)), max_size=3),
    blocks=st.sampled_from(CHUNK_BLOCKS),
    threads=st.integers(1, 4),
)
def test_digests_are_those_of_each_files_bytes(
    path: Path, arrangement: list[list[Extent]], empty: list[tuple[int, int]], blocks: int, threads: int
) -> None:
    """Empty extents may be anywhere."""
    for position, offset in empty:
        arrangement[0].insert(position, Extent(offset, 0))
    other = path.with_name("other")
    if not other.exists():
        other.write_bytes(BYTES[::-1])
    files = [hashed_file((path, other)[n % 2], NBYTES, extents) for n, extents in enumerate(arrangement)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "READ_NBYTES", blocks * BLOCK)
        digests = hash_files(files, threads)
    assert digests == [expected(extents, (BYTES, BYTES[::-1])[n % 2]) for n, extents in enumerate(arrangement)]


def test_nothing_is_read_twice_or_in_vain(path: Path, chunks: int, reads: list[Extent]) -> None:
    extents = [Extent(10, 20), Extent(30, 5), Extent(BLOCK - 1, 2), Extent(5 * BLOCK, 0), Extent(7 * BLOCK + 9, BLOCK)]
    hash_files([hashed_file(path, NBYTES, extents)], 1)
    blocks = sorted(block for one in reads for block in range(one.offset // BLOCK, one.end // BLOCK))
    assert blocks == [0, 1, 7, 8]
    assert all(one.offset % BLOCK == one.nbytes % BLOCK == 0 and one.nbytes <= chunks for one in reads)


def test_where_there_is_nothing_to_hash_nothing_is_read(path: Path, reads: list[Extent]) -> None:
    assert hash_files([], 2) == []
    assert hash_files([hashed_file(path, NBYTES, [])], 2) == [[]]
    assert hash_files([hashed_file(path, NBYTES, [Extent(0, 0), Extent(NBYTES, 0)])], 2) == [[EMPTY, EMPTY]]
    assert reads == []


@pytest.mark.parametrize("nbytes", [NBYTES - 1, NBYTES + 1, 0])
@pytest.mark.parametrize("extents", [[], [Extent(0, 0)], [Extent(0, 100)]], ids=["nothing", "empty", "some"])
def test_a_file_of_another_length_is_refused(tmp_path: Path, nbytes: int, extents: list[Extent]) -> None:
    (tmp_path / "file").write_bytes(bytes(nbytes))
    with pytest.raises(FormatError, match=rf"file: {nbytes} bytes long, expected {NBYTES}"):
        hash_files([hashed_file(tmp_path / "file", NBYTES, extents)], 2)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("num_streams", [1, 2, 5])
def test_files_are_hashed_whole_several_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: list[Extent], num_streams: int, threads: int
) -> None:
    monkeypatch.setattr(reading, "READ_NBYTES", BLOCK)
    files, wanted = [], []
    for number, nbytes in enumerate((NBYTES, 0, 3 * BLOCK, 1)):
        (tmp_path / str(number)).write_bytes(BYTES[:nbytes])
        opened = hashed_file(tmp_path / str(number), nbytes, [])
        files.append(replace(opened, chunks=[Extent(0, nbytes)], new_hash=hashlib.sha256))
        wanted.append([hashlib.sha256(BYTES[:nbytes]).hexdigest()])
    assert hash_files(files, threads, num_streams=num_streams) == wanted
    assert len(reads) == 11 + 3 + 1
    if threads == 1:  # The empty file takes a turn.
        firsts = [number for number, extent in enumerate(reads) if extent.offset == 0]
        assert firsts == {1: [0, 11, 14], 2: [0, 2, 9], 5: [0, 1, 2]}[num_streams]


def test_a_request_to_stop_from_elsewhere_ends_the_hashing(path: Path, reads: list[Extent]) -> None:
    stop = Stop()
    stop.request()
    with pytest.raises(Stopped):
        hash_files([hashed_file(path, NBYTES, [Extent(0, NBYTES)])], 2, stop=stop)
    assert reads == []
