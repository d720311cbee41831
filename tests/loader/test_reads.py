"""relayout.loader.reads: requests carried out by numpy fill memory as the reads say, and ask for little else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.reads import UNTOUCHED, carried_out

from relayout.core.extents import Transfer
from relayout.format.index import Read
from relayout.loader.reads import Request, plan_requests
from relayout.storage.stores import RequestCost

Bytes = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]

KIB = 2**10
MIB = 2**20
FILE_NBYTES = 60_000
FILES = [np.random.default_rng(seed).integers(0, 256, FILE_NBYTES, dtype=np.uint8) for seed in range(2)]
BEHIND = 0x5A
"""What a request finds behind the end of a file."""
GAP = 256 * 1024
"""Bytes."""


@dataclass(frozen=True)
class Case:
    """Reads that do not overlap in the arena, and how to cut them."""

    reads: list[Read]
    arena_nbytes: int
    alignment: int
    chunk_nbytes: int
    bounce_nbytes: int
    max_gap_nbytes: int
    """Runs that are shorter, with gaps that are not longer, are requested together."""

    def requests(self) -> list[Request]:
        cost = RequestCost(self.chunk_nbytes, self.max_gap_nbytes)
        return plan_requests(self.reads, self.alignment, cost, self.bounce_nbytes)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Contiguous and strided reads, near each other and far, at congruent places and not, in any order."""
    alignment = draw(st.sampled_from([1, 512, 4096]))
    reads: list[Read] = []
    end = 0
    for _ in range(draw(st.integers(1, 8))):
        follows = bool(reads) and draw(st.booleans())
        file = reads[-1].file if follows else draw(st.integers(0, 1))
        start = reads[-1].transfer.source_end + draw(st.sampled_from([0, 0, 1, 300])) if follows else FILE_NBYTES
        if start >= FILE_NBYTES:
            start = draw(st.integers(0, FILE_NBYTES - 1))
        nbytes = draw(st.integers(1, min(draw(st.sampled_from([40, 9_000, 30_000])), FILE_NBYTES - start)))
        stride = nbytes + draw(st.one_of(st.integers(0, 40), st.integers(0, 9_000)))
        count = draw(st.integers(1, min(9, 1 + (FILE_NBYTES - start - nbytes) // stride)))
        pitch = nbytes + draw(st.integers(0, 40))
        target = end + draw(st.one_of(st.integers(0, 20), st.just((start - end) % alignment)))
        strides = (stride, pitch) if count > 1 else (0, 0)
        reads.append(Read(file, Transfer(start, target, nbytes, count, *strides)))
        end = reads[-1].transfer.target_end
    return Case(
        reads,
        end,
        alignment,
        alignment * draw(st.integers(1, 8)) if alignment > 1 else draw(st.sampled_from([700, 8192])),
        alignment * 4 + draw(st.integers(0, 40_000)),
        draw(st.sampled_from([1, 1000, 2**18])),
    )


def wanted(reads: Sequence[Read]) -> list[Mask]:
    """For each file, which of its bytes the reads are about."""
    masks = [np.zeros(FILE_NBYTES + 100_000, np.bool_) for _ in FILES]
    for read in reads:
        one = read.transfer
        for run in range(one.count):
            start = one.source + run * one.source_stride
            masks[read.file][start : start + one.nbytes] = True
    return masks


@given(cases())
def test_requests_bring_every_byte_of_the_reads_to_its_place_and_touch_no_other(case: Case) -> None:
    expected, _ = carried_out(case.reads, FILES, case.arena_nbytes)
    arena = np.full(case.arena_nbytes, UNTOUCHED, np.uint8)
    written = np.zeros(case.arena_nbytes, np.uint8)
    for request in case.requests():
        taken = np.full(request.extent.nbytes, BEHIND, np.uint8)
        there = FILES[request.file][request.extent.offset : request.extent.end]
        taken[: there.size] = there
        if request.arena_offset is not None:
            assert not request.transfers
            arena[request.arena_offset : request.arena_offset + taken.size] = taken
            written[request.arena_offset : request.arena_offset + taken.size] += 1
        brought = taken.size if request.arena_offset is not None else 0
        for part in request.transfers:
            for run in range(part.count):
                source, target = part.source + run * part.source_stride, part.target + run * part.target_stride
                assert 0 <= source <= source + part.nbytes <= taken.size
                arena[target : target + part.nbytes] = taken[source : source + part.nbytes]
                written[target : target + part.nbytes] += 1
                brought += part.nbytes
        assert request.nbytes == brought
    np.testing.assert_array_equal(arena, expected)
    assert written.max() == 1
    assert written.sum() == sum(read.transfer.total_nbytes for read in case.reads)


@given(cases())
def test_requests_are_aligned_no_larger_than_they_may_be_and_one_where_they_touch_and_fit(case: Case) -> None:
    for request in case.requests():
        assert request.extent.offset % case.alignment == request.extent.nbytes % case.alignment == 0
        assert request.extent.nbytes > 0
        if request.arena_offset is None:
            assert request.extent.nbytes <= case.bounce_nbytes
            assert request.transfers
        else:
            assert request.arena_offset % case.alignment == 0
            assert request.extent.nbytes <= case.chunk_nbytes
    for one, other in pairwise(case.requests()):
        if one.arena_offset is None and other.arena_offset is None and one.file == other.file:
            first, then = one.extent, other.extent
            # At most a block is in both: reads that go back in a file are not looked for.
            touches = first.end - case.alignment <= then.offset <= first.end and first.offset <= then.offset
            assert not (touches and then.end - first.offset <= case.bounce_nbytes)


@given(cases())
def test_what_is_requested_and_not_wanted_is_edges_of_blocks_and_gaps_of_strided_reads(case: Case) -> None:
    exactly = wanted(case.reads)
    allowed = []
    for mask in exactly:
        blocks = mask[: mask.size // case.alignment * case.alignment].reshape(-1, case.alignment).any(axis=1)
        allowed.append(np.repeat(blocks, case.alignment))
    for read in case.reads:
        one = read.transfer
        gap = one.source_stride - one.nbytes
        has_gaps_read = one.count > 1 and one.nbytes < case.max_gap_nbytes >= gap
        if has_gaps_read and one.source_stride <= case.bounce_nbytes:
            low = one.source // case.alignment * case.alignment
            allowed[read.file][low : -(-one.source_end // case.alignment) * case.alignment] = True
    for request in case.requests():
        mask = allowed[request.file] if request.arena_offset is None else exactly[request.file]
        assert mask[request.extent.offset : request.extent.end].all()


@given(cases())
def test_whole_blocks_of_a_congruent_read_go_through_no_buffer(case: Case) -> None:
    straight = np.zeros(case.arena_nbytes, np.bool_)
    for request in case.requests():
        if request.arena_offset is not None:
            straight[request.arena_offset : request.arena_offset + request.extent.nbytes] = True
    for read in case.reads:
        one = read.transfer
        if one.count == 1 and (one.target - one.source) % case.alignment == 0:
            low = one.source + -one.source % case.alignment
            high = one.source_end - one.source_end % case.alignment
            shift = one.target - one.source
            assert straight[low + shift : max(low, high) + shift].all()


COST = RequestCost(8 * MIB, GAP)


def test_a_large_read_to_an_odd_place_fits_the_buffers() -> None:
    requests = plan_requests([Read(0, Transfer(4096, 1, 20 * MIB))], 4096, COST, MIB + 5000)
    assert {one.arena_offset for one in requests} == {None}
    assert all(one.extent.nbytes <= MIB + 5000 for one in requests)
    assert len(requests) == 21  # Two blocks of each buffer stay free for edges: 1 MiB - 4 KiB each.
    assert sum(one.extent.nbytes for one in requests) == 20 * MIB  # Nothing twice.


@pytest.mark.parametrize(
    ("run", "stride", "requests", "nbytes"),
    [
        (4 * KIB, 8 * KIB, 1, 8 * 8 * KIB - 4 * KIB),  # With the gaps.
        (252 * KIB, 508 * KIB, 1, (7 * 508 + 252) * KIB),
        (248 * KIB, 508 * KIB, 8, 8 * 248 * KIB),  # A gap that is not worth reading.
        (256 * KIB, 512 * KIB, 8, 8 * 256 * KIB),  # Without them.
        (4 * KIB, 9 * MIB, 8, 8 * 4 * KIB),
    ],
)
def test_small_gaps_are_read_between_small_runs(run: int, stride: int, requests: int, nbytes: int) -> None:
    found = plan_requests([Read(0, Transfer(0, 1, run, 8, stride, run))], 4096, COST, 8 * MIB)
    assert (len(found), sum(one.extent.nbytes for one in found)) == (requests, nbytes)
