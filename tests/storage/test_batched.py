"""relayout.storage.local.batched: many reads by one call, beside what Python reads of the same file."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from support.page_cache import drop

from relayout.storage.local import batched
from relayout.storage.local.batched import BatchedReads
from relayout.storage.system import Buffer, resident_nbytes

CONTENT = np.random.default_rng(5).integers(0, 256, 300_000, np.uint8)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(CONTENT.tobytes())
    return tmp_path / "file"


@pytest.fixture
def queue() -> Iterator[BatchedReads]:
    with BatchedReads(8) as queue:
        try:
            queue.read(0, *(np.zeros(0, np.int64),) * 3)
        except OSError as error:
            pytest.skip(f"the system has no such reads here: {error}")
        yield queue


@pytest.fixture
def fd(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    yield fd
    os.close(fd)


def read(queue: BatchedReads, fd: int, offsets: list[int], size: int) -> tuple[list[int], npt.NDArray[np.uint8]]:
    memory = np.frombuffer(Buffer().reserve(max(1, len(offsets)) * size), np.uint8).reshape(-1, size)
    addresses = memory.ctypes.data + np.arange(len(offsets)) * size
    sizes = np.full(len(offsets), size)
    return queue.read(fd, addresses, np.array(offsets, np.int64), sizes).tolist(), memory


def test_more_reads_than_may_be_in_flight_each_arrive_in_their_own_memory(queue: BatchedReads, fd: int) -> None:
    offsets = np.random.default_rng(1).integers(0, len(CONTENT) - 100, 1000).tolist()
    results, memory = read(queue, fd, offsets, 100)
    assert results == [100] * 1000
    assert all(np.array_equal(memory[i], CONTENT[offset : offset + 100]) for i, offset in enumerate(offsets))


def test_a_read_at_the_end_is_short_and_one_of_another_file_fails_alone(queue: BatchedReads, fd: int) -> None:
    results, memory = read(queue, fd, [len(CONTENT) - 30, 0, len(CONTENT) + 5], 100)
    assert results == [30, 100, 0]
    assert np.array_equal(memory[0][:30], CONTENT[-30:])
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        read(queue, 10**6, [0], 100)
    assert read(queue, fd, [0], 100)[0] == [100]  # It can be used again.


def test_blocks_are_read_past_the_page_cache(queue: BatchedReads, path: Path) -> None:
    drop(path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        results, memory = read(queue, fd, [8192, 0, 294_912], 8192)
        assert resident_nbytes(fd, 0, len(CONTENT)) == 0
        assert read(queue, fd, [1], 4096)[0] == [-errno.EINVAL]  # That one alone fails.
    finally:
        os.close(fd)
    assert results == [8192, 8192, len(CONTENT) - 294_912]
    assert np.array_equal(memory[0], CONTENT[8192:16384])
    assert np.array_equal(memory[2][: results[2]], CONTENT[294_912:])


def test_threads_share_a_queue(queue: BatchedReads, fd: int) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        offsets = np.random.default_rng(seed).integers(0, len(CONTENT) - 64, 300).tolist()
        results, memory = read(queue, fd, offsets, 64)
        same = [np.array_equal(memory[i], CONTENT[at : at + 64]) for i, at in enumerate(offsets)]
        wrong.extend([seed] if results != [64] * 300 or not all(same) else [])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


def test_a_forked_child_reads_by_a_queue_of_its_own(queue: BatchedReads, fd: int) -> None:
    assert read(queue, fd, [7], 100)[0] == [100]
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(read(queue, fd, [7], 100)[1][0], CONTENT[7:107]) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert np.array_equal(read(queue, fd, [9], 100)[1][0], CONTENT[9:109])


def test_an_interruption_leaves_nothing_in_flight(
    queue: BatchedReads, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue is released, for which the kernel waits, before anybody can free the memory."""
    calls: list[int] = []
    ordinary = batched._call

    def interrupted(which: int, *arguments: object) -> int:
        calls.append(which)
        if which == batched._GETEVENTS and calls.count(which) == 2:
            raise KeyboardInterrupt
        return ordinary(which, *arguments)

    monkeypatch.setattr(batched, "_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        read(queue, fd, list(range(0, 100_000, 100)), 100)
    assert calls[-1] == batched._DESTROY
    assert read(queue, fd, [0], 100)[0] == [100]


def test_a_system_without_such_reads_says_so(monkeypatch: pytest.MonkeyPatch, fd: int) -> None:
    monkeypatch.setattr(batched.platform, "machine", lambda: "riscv64")
    with BatchedReads(4) as queue, pytest.raises(OSError, match=os.strerror(errno.ENOSYS)):
        read(queue, fd, [0], 100)
