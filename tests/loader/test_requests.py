"""relayout.loader.requests: what they ask for, how many are in flight, and what a node's ranks have together."""

from __future__ import annotations

import heapq
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.loader_fixtures import assert_equal, whole_tensors, write_model
from support.reads import UNTOUCHED, carried_out

import relayout
from relayout.core.extents import Transfer
from relayout.format.index import Read
from relayout.loader import requests
from relayout.loader.backends import host
from relayout.loader.backends.files import ReadableFiles
from relayout.loader.requests import (
    Budget,
    InFlight,
    Pace,
    Request,
    local_world_size,
    num_cpus,
    plan_budget,
    plan_requests,
    steps,
)
from relayout.storage.stores import RequestCost
from relayout.storage.system import Buffer

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


GIB = 2**30
HOST, PINNED = 32 * MIB, 128 * MIB


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def on_a_node(monkeypatch: pytest.MonkeyPatch, cpus: int, ranks: object) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))


@pytest.mark.parametrize(
    ("cpus", "ranks", "most", "threads", "memory"),
    [
        (2, 1, HOST, 4, HOST),
        (192, 1, PINNED, 8, PINNED),
        (192, 8, PINNED, 8, PINNED),  # 8 ranks: all of the node's 1 GiB.
        (12, 8, HOST, 3, HOST),
        (2, 8, HOST, 1, HOST),
        (192, 64, PINNED, 6, 16 * MIB),
        (192, 4096, PINNED, 1, MIB),  # Less would not be enough to read anything.
    ],
)
def test_a_rank_takes_its_share_of_the_node(
    monkeypatch: pytest.MonkeyPatch, cpus: int, ranks: int, most: int, threads: int, memory: int
) -> None:
    on_a_node(monkeypatch, cpus, ranks)
    budget = plan_budget(None, None, most)
    assert (budget.threads, budget.memory) == (threads, memory)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("1", 1), ("8", 8), ("08", 8), ("0", 1), ("", 1), ("garbage", 1), ("-3", 1), ("8.0", 1), ("0x8", 1), ("²", 1)],
)
def test_the_number_of_ranks_is_torchruns_where_it_is_a_number(
    monkeypatch: pytest.MonkeyPatch, text: str, ranks: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    assert local_world_size() == ranks
    on_a_node(monkeypatch, 64, text)
    assert plan_budget(None, None, GIB).memory == GIB // ranks


def test_what_was_asked_for_is_taken_however_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_node(monkeypatch, 2, 8)
    assert plan_budget(20, 3 * GIB, HOST) == Budget(20, 3 * GIB)
    assert plan_budget(None, 3 * GIB, HOST) == Budget(1, 3 * GIB, max_threads=4)
    assert plan_budget(3, None, HOST) == Budget(3, HOST)


@given(
    cpus=st.integers(1, 512),
    ranks=st.integers(1, 2000),
    most=st.sampled_from([HOST, PINNED, 512 * MIB]),
    threads=st.none() | st.integers(1, 64),
    memory=st.none() | st.integers(MIB, GIB),
)
def test_all_ranks_together_stay_in_bounds(
    cpus: int, ranks: int, most: int, threads: int | None, memory: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        on_a_node(patch, cpus, ranks)
        budget = plan_budget(threads, memory, most)
    assert 1 <= budget.threads <= (threads or 8)
    assert MIB <= budget.memory <= (memory or most)
    assert budget.buffer_nbytes % 4096 == 0
    assert budget.buffer_nbytes >= MIB
    assert budget.buffer_nbytes * budget.threads <= budget.memory
    if memory is None:
        assert ranks * budget.memory <= max(GIB, ranks * MIB)
    if threads is None:
        assert ranks * budget.threads <= max(2 * cpus, ranks)
        assert ranks * budget.max_threads <= 32
        assert budget.max_threads * MIB <= budget.memory
    else:
        assert not budget.max_threads


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_processors_are_those_that_the_process_may_run_on() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        for few in (1, len(allowed)):
            os.sched_setaffinity(0, sorted(allowed)[:few])
            assert num_cpus() == few
            assert plan_budget(None, None, HOST).threads == min(8, 2 * few)
    finally:
        os.sched_setaffinity(0, allowed)


def test_all_processors_count_where_the_system_has_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert num_cpus() == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert num_cpus() == 1


REMOTE = (16, 32, 8 * MIB, 16 * MIB)
LOCAL = (4, 32, 8 * MIB, 8 * MIB)
FOREVER = float("inf")


def read(
    ladder: list[InFlight], nbytes: int, latency: float, rate: Callable[[int], float], connection: float = FOREVER
) -> tuple[float, list[InFlight]]:
    """Seconds, and the steps taken: requests wait for the latency, then their bytes pass one after another.

    Args:
        rate: bytes per second of the link, by the number of requests in flight.
        connection: bytes per second of one connection.
    """
    pace, now, free_at, left, taken = Pace(ladder), 0.0, 0.0, nbytes, [ladder[0]]
    flying: list[tuple[float, int, int, float, InFlight]] = []
    while left or flying:
        while left and len(flying) < pace.step.threads:
            size = min(left, pace.step.request_nbytes)
            left -= size
            free_at = max(now + latency, free_at) + size / rate(len(flying) + 1)
            heapq.heappush(flying, (max(free_at, now + latency + size / connection), left, size, now, pace.step))
        end, _, size, began, step = heapq.heappop(flying)
        pace.finished(step, size, end - began)
        now = end
        if pace.step != taken[-1]:
            taken.append(pace.step)
    return now, taken


@given(latency=st.floats(0, 0.2), gbits=st.floats(0.1, 10), seconds=st.floats(8, 30))
@example(latency=0.2, gbits=10.0, seconds=8.0)
@example(latency=0.2, gbits=2.5, seconds=8.0)
def test_a_load_takes_nine_tenths_of_a_link(latency: float, gbits: float, seconds: float) -> None:
    rate = gbits * 1e9 / 8
    nbytes = int(rate * seconds)
    took, _ = read(steps(*REMOTE), nbytes, latency, lambda flying: rate)
    assert nbytes / took >= 0.9 * rate


@given(latency=st.floats(0, 0.2), connection=st.floats(1e6, 2e8))
def test_slow_connections_are_used_in_large_numbers(latency: float, connection: float) -> None:
    """As of a store that limits each, or a file system that sends one small request after another."""
    took, taken = read(steps(*LOCAL), 4 * 10**9, latency, lambda flying: 1e11, connection)
    assert taken[-1].threads == 32
    few, _ = read(steps(4, 4, 8 * MIB, 8 * MIB), 4 * 10**9, latency, lambda flying: 1e11, connection)
    assert took < 0.4 * few


@given(
    gb_per_s=st.floats(0.05, 8),
    loss=st.floats(0, 0.02),
    threads=st.integers(1, 8),
    mib=st.integers(1, 4000),
    latency=st.floats(0, 0.0005),
)
def test_on_a_local_drive_it_is_as_fast_as_a_fixed_number(
    gb_per_s: float, loss: float, threads: int, mib: int, latency: float
) -> None:
    """Of a drive that loses a part of its rate with each request in flight, if anything changes at all."""

    def rate(flying: int) -> float:
        return gb_per_s * 1e9 * (1 - loss * max(0, flying - threads))

    took, taken = read(steps(threads, 32, 8 * MIB, 8 * MIB), mib * MIB, latency, rate)
    fixed, _ = read(steps(threads, threads, 8 * MIB, 8 * MIB), mib * MIB, latency, rate)
    highest = max(step.threads for step in taken)
    assert took <= 1.001 * fixed * rate(threads) / rate(highest)
    assert highest <= 4 * threads
    if mib > 2000:
        assert took <= 1.1 * fixed


@given(
    threads=st.integers(1, 40), more=st.integers(0, 100), size=st.integers(1, 16 * MIB), larger=st.integers(0, 64 * MIB)
)
def test_steps_never_leave_their_bounds(threads: int, more: int, size: int, larger: int) -> None:
    ladder = steps(threads, threads + more, size, size + larger)
    assert ladder[0] == InFlight(threads, size)
    assert ladder[-1] == InFlight(threads + more, size + larger)
    for low, high in itertools.pairwise(ladder):
        in_flight = low.threads * low.request_nbytes
        assert in_flight < high.threads * high.request_nbytes <= 2 * in_flight


def test_requests_of_an_earlier_step_do_not_count() -> None:
    pace = Pace(steps(2, 4, MIB, MIB))
    for _ in range(2):
        pace.finished(InFlight(2, MIB), MIB, 1.0)
    assert pace.step == InFlight(4, MIB)
    for _ in range(100):
        pace.finished(InFlight(2, MIB), MIB, 1.0)
    assert pace.step == InFlight(4, MIB)
    for _ in range(4):
        pace.finished(InFlight(4, MIB), MIB, 2.0)
    assert pace.step == InFlight(2, MIB)


@given(
    threads=st.integers(1, 8),
    most=st.integers(1, 40),
    limit=st.integers(1, 40),
    before=st.integers(0, 20),
    seed=st.randoms(use_true_random=False),
)
def test_a_limit_is_kept_from_when_it_is_set(
    threads: int, most: int, limit: int, before: int, seed: random.Random
) -> None:
    pace = Pace(steps(threads, max(threads, most), MIB, 4 * MIB))

    def go_on() -> int:
        pace.finished(pace.step, MIB, seed.choice([0.01, 0.5, 9.0]) * pace.step.threads)
        return pace.step.threads

    for _ in range(before):
        go_on()
    in_flight = pace.step.threads
    assert pace.limit(limit) == (in_flight <= limit)
    assert max([go_on() for _ in range(60)]) <= (limit if in_flight <= limit else max(threads, most))


@pytest.mark.parametrize("pages", ["small", "huge", "small later"])
def test_buffers_of_small_pages_stay_within_the_memory_of_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: str
) -> None:
    """Slow requests, of which there would be twice as many: each of 2 MiB, through a buffer if pages are small."""
    folder, memory = tmp_path / "folder", 8 * MIB
    relayout.convert(write_model(tmp_path / "source", {"weight": (torch.uint8, (48 * MIB,))}), folder)
    lock, flying, most = threading.Lock(), [0], [0]
    true_read, true_make, made, aligned = ReadableFiles.read, host.Buffers.make, list[Buffer](), set[int]()

    def slow(self: ReadableFiles, file: int, offset: int, view: memoryview) -> None:
        aligned.add(self.alignment)
        with lock:
            flying[0] += 1
            most[0] = max(most[0], flying[0])
        time.sleep(0.125)
        true_read(self, file, offset, view)
        with lock:
            flying[0] -= 1

    def make(self: host.Buffers) -> Buffer:
        made.append(true_make(self))
        return made[-1]

    monkeypatch.setattr(ReadableFiles, "read", slow)
    monkeypatch.setattr(host.Buffers, "make", make)
    monkeypatch.setattr(host, "_FIRST_NBYTES", 2 * MIB)
    monkeypatch.setattr(host, "are_small", lambda: pages == "small" or (pages == "small later" and most[0] > 4))
    monkeypatch.setattr(requests, "num_cpus", lambda: 2)
    found = relayout.load(folder, 0, memory=memory)
    held = [0 if buffer._memory is None else buffer._memory.nbytes for buffer in made]
    assert sum(held) <= memory
    if aligned != {1}:
        assert most[0] == (4 if pages == "small" else 8)
        assert (max(held) == 2 * MIB) == (pages == "small")
    assert_equal(found, whole_tensors(folder))


@pytest.mark.parametrize("threads", [None, 3])
def test_a_load_from_slow_storage_has_more_in_flight_than_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int | None
) -> None:
    """Requests take an eighth of a second each, whatever their size and number."""
    folder = tmp_path / "folder"
    relayout.convert(write_model(tmp_path / "source", {"weight": (torch.uint8, (48 * MIB,))}), folder)
    lock, flying, sizes = threading.Lock(), [0], list[tuple[int, int]]()
    true_read = ReadableFiles.read

    def slow(self: ReadableFiles, file: int, offset: int, view: memoryview) -> None:
        with lock:
            flying[0] += 1
            sizes.append((flying[0], view.nbytes))
        time.sleep(0.125)
        true_read(self, file, offset, view)
        with lock:
            flying[0] -= 1

    monkeypatch.setattr(ReadableFiles, "read", slow)
    monkeypatch.setattr(host, "_FIRST_NBYTES", MIB)
    first = threads or relayout.explain(folder, 0).threads
    assert_equal(relayout.load(folder, 0, threads=threads), whole_tensors(folder))
    most = max(number for number, _ in sizes)
    assert most == first if threads else 2 * first <= most <= 32
