"""relayout.loader.budgets: requests in flight, on simulated links and drives, and in loads of a store."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.loader_fixtures import assert_equal, whole_tensors, write_model

import relayout
from relayout.loader import budgets
from relayout.loader.backends import host
from relayout.loader.backends.files import ReadableFiles
from relayout.loader.budgets import InFlight, Pace, steps
from relayout.storage.system import Buffer

MIB = 2**20
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
    monkeypatch.setattr(budgets, "num_cpus", lambda: 2)
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
