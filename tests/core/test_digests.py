"""relayout.core.digests: digests of bytes that arrive in pieces, from several threads, are of the bytes in order."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import xxhash
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patience import in_time

from relayout.core.digests import (
    BLAKE3_NBYTES,
    EMPTY_DIGEST,
    ExtentDigests,
    OrderedDigests,
    blake3_hex,
    new_blake3,
    xxh3_hex,
)
from relayout.core.extents import Extent
from relayout.core.workers import Stop, Stopped, Workers

BYTES = np.random.default_rng(11).bytes(20_000)
VIEW = memoryview(BYTES)


def expected(extent: Extent) -> str:
    return xxhash.xxh3_128_hexdigest(BYTES[extent.offset : extent.end])


def test_the_digest_is_xxh3_128_in_hex() -> None:
    assert xxh3_hex(b"") == EMPTY_DIGEST == "99aa06d3014798d86001c324468d497f"  # As xxHash's own test vector has it.
    assert len(xxh3_hex(BYTES)) == 32


def test_a_proof_is_blake3_in_hex() -> None:
    # The first bytes of the algorithm's own test vector for an empty input.
    assert blake3_hex(b"").startswith("af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262")
    assert blake3_hex(VIEW) == blake3(BYTES).hexdigest()
    assert len(blake3_hex(VIEW)) == 2 * BLAKE3_NBYTES
    proofs = ExtentDigests([Extent(0, 300), Extent(300, 0)], Stop(), new_blake3)
    proofs.update(0, VIEW[:100])
    proofs.update(100, VIEW[100:300])
    assert proofs.digests == [blake3(BYTES[:300]).hexdigest(), blake3(b"").hexdigest()]


def test_a_streams_digest_comes_with_its_last_bytes() -> None:
    digests = OrderedDigests(Stop())
    assert digests.update("a", 0, VIEW[:100], 300) is None
    assert digests.update("b", 0, VIEW[100:200], 100) == expected(Extent(100, 100))
    assert digests.update("a", 100, VIEW[100:299], 300) is None
    assert digests.update("a", 299, VIEW[299:300], 300) == expected(Extent(0, 300))
    assert digests.update("a", 0, VIEW[:1], 2) is None  # From the beginning again.


@settings(max_examples=60)
@given(
    borders=st.sets(st.integers(1, len(BYTES) - 1), max_size=30),
    num_streams=st.integers(1, 4),
    num_threads=st.integers(1, 5),
)
def test_pieces_are_hashed_in_order_whichever_threads_have_them(
    borders: set[int], num_streams: int, num_threads: int
) -> None:
    starts = [0, *sorted(borders)]
    pieces = list(zip(starts, [*starts[1:], len(BYTES)], strict=True))
    stop = Stop()
    digests = OrderedDigests(stop)
    found: list[tuple[int, str]] = []

    def work(state: None, item: tuple[int, int, int]) -> int:
        stream, start, end = item
        digest = digests.update(stream, start, VIEW[start:end], len(BYTES))
        if digest is not None:
            found.append((stream, digest))
        return end - start

    items = [(stream, *piece) for piece in pieces for stream in range(num_streams)]
    in_time(Workers(num_threads, items, lambda: None, work, stop).run)
    assert sorted(found) == [(stream, expected(Extent(0, len(BYTES)))) for stream in range(num_streams)]


def test_a_piece_waits_for_those_in_front_of_it() -> None:
    digests = OrderedDigests(Stop())
    found: list[str | None] = []
    last = threading.Thread(target=lambda: found.append(digests.update("a", 200, VIEW[200:300], 300)))
    last.start()
    last.join(0.05)
    assert last.is_alive()
    assert digests.update("a", 0, VIEW[:200], 300) is None
    in_time(last.join)
    assert found == [expected(Extent(0, 300))]


def test_whoever_waits_is_stopped_when_the_work_is_given_up() -> None:
    stop = Stop()
    digests = OrderedDigests(stop)
    stopped = threading.Event()

    def wait() -> None:
        with pytest.raises(Stopped):
            digests.update("a", 1, VIEW[:1], 2)
        stopped.set()

    thread = threading.Thread(target=wait)
    thread.start()
    stop.request()
    in_time(thread.join)
    assert stopped.is_set()


@st.composite
def arrangements(draw: st.DrawFn) -> list[Extent]:
    """Extents without overlap, in any order, with gaps, and empty ones anywhere."""
    borders = sorted(draw(st.sets(st.integers(0, len(BYTES)), max_size=20)))
    extents = [Extent(low, high - low) for low, high in zip(borders[::2], borders[1::2], strict=False)]
    empty = [Extent(offset, 0) for offset in draw(st.lists(st.integers(0, len(BYTES)), max_size=3))]
    return list(draw(st.permutations(extents + empty)))


@given(extents=arrangements(), borders=st.sets(st.integers(1, len(BYTES) - 1), max_size=20))
def test_digests_of_extents_are_complete_when_their_last_byte_arrives(extents: list[Extent], borders: set[int]) -> None:
    digests = ExtentDigests(extents, Stop())
    known = {n for n, one in enumerate(extents) if not one.nbytes}
    starts = [0, *sorted(borders)]
    for start, end in zip(starts, [*starts[1:], len(BYTES)], strict=True):
        assert digests.num_left == len(extents) - len(known)
        complete = digests.update(start, VIEW[start:end])
        assert set(complete) == {n for n, one in enumerate(extents) if start < one.end <= end and one.nbytes}
        known.update(complete)
        assert [n for n, one in enumerate(digests.digests) if one] == sorted(known)
    assert digests.num_left == 0
    assert digests.digests == [expected(one) for one in extents]


def test_an_extent_whose_bytes_did_not_all_arrive_has_no_digest() -> None:
    digests = ExtentDigests([Extent(0, 10), Extent(10, 10), Extent(30, 5)], Stop())
    assert digests.update(0, VIEW[:19]) == [0]
    assert digests.update(30, VIEW[30:35]) == [2]
    assert digests.num_left == 1
    assert digests.digests == [expected(Extent(0, 10)), "", expected(Extent(30, 5))]
