"""Conformance tests of backends: bytes of files arrive where they belong in memory, and nothing is left behind.

class TestMyBackend(BackendConformance):
    @pytest.fixture
    def backend(self):
        return MyBackend()
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from blake3 import blake3

from relayout.checkpoint.converted import FileDigests
from relayout.core.extents import BLOCK, Transfer, align_up
from relayout.core.workers import Stop
from relayout.errors import FormatError
from relayout.format.index import Read
from relayout.format.manifest import header_prefix
from relayout.loader.backends.base import Backend, ReadJob
from relayout.loader.requests import Budget
from relayout.loader.sources.rank import StoredFile
from relayout.storage.local.store import LocalStore
from relayout.testing import requirement

Array = npt.NDArray[Any]
Failure = TypeVar("Failure", bound=BaseException)
MIB = 2**20
SIZES = (300_001, 16 * BLOCK, 9 * MIB + 777)
"""Bytes of the test files."""
SMALL = Budget(3, 3 * 64 * 1024)
"""A budget with which small files take many requests."""
HEADS = (BLOCK, 1000, 2 * BLOCK)
"""Bytes of the headers of verified files. Direct I/O cannot read the chunks of the second file in place."""
CHUNK = 4 * BLOCK
"""Bytes of a chunk of a verified file, which one digest covers."""
_UNTOUCHED = 0xEE
_GUARD = 64
"""Least bytes between pieces of memory."""
_PATIENCE = 60.0


def read(source: int, nbytes: int, target: int = 0, *, file: int = 0) -> Read:
    """Return a read of one run of bytes."""
    return Read(file, Transfer(source, target, nbytes))


def strided(source: int, nbytes: int, count: int, stride: int, pitch: int, *, file: int = 0) -> Read:
    """Return a read of runs of bytes, `stride` from each other in the file and `pitch` in memory."""
    return Read(file, Transfer(source, 0, nbytes, count, stride, pitch))


@dataclass(frozen=True)
class Region:
    """A separate piece of memory, and the reads that fill it; their targets are relative to its first byte."""

    reads: tuple[Read, ...]
    skew: int = 0
    """Address of the region, modulo the block."""

    @property
    def nbytes(self) -> int:
        """Bytes of the region, up to the last one that is read."""
        return max((one.transfer.target_end for one in self.reads), default=0)

    @property
    def is_dense(self) -> bool:
        """True if the reads fill all of the region."""
        return sum(one.transfer.total_nbytes for one in self.reads) == self.nbytes


def _many_small() -> list[Region]:
    """Return small regions, of reads that are neighbors, share blocks, or go backwards."""
    sizes = [3 + 7 * n % 90 for n in range(60)]
    starts = [BLOCK * (n % 50) + 13 * n for n in range(60)]
    return [Region((read(start, size),), 16 * n) for n, (start, size) in enumerate(zip(starts, sizes, strict=True))]


CASES: dict[str, list[Region]] = {
    "whole blocks": [Region((read(BLOCK, 40 * BLOCK),))],
    "odd offsets": [Region((read(101, 33_333),), 7)],
    "congruent, with edges": [Region((read(5000, 200_000),), 5000 % BLOCK)],
    "inside a block": [Region((read(5000, 2000),), 5000 % BLOCK), Region((read(1, 1),), 99)],
    "up to a partial last block": [Region((read(SIZES[0] - 70_000, 70_000),), (SIZES[0] - 70_000) % BLOCK)],
    "a partial last block alone": [Region((read(SIZES[0] - 5, 5),))],
    "rows, made dense": [Region((strided(77, 1000, 90, 3000, 1000),), 3)],
    "rows, to rows with gaps": [Region((strided(77, 1000, 90, 3000, 1024),), 3)],
    "rows far apart": [
        Region((strided(5, 500, 8, MIB, 500, file=2),)),
        Region((strided(9, 3, 8, MIB, 9, file=2),), 5),
    ],
    "long rows": [Region((strided(MIB + 3, 300_000, 9, 900_001, 300_000, file=2),), 8)],
    "many small ones": _many_small(),
    "several files": [
        Region((read(8, 90_000, file=0), read(0, 16 * BLOCK, 90_000, file=1)), 8),
        Region((read(3, 9),)),
    ],
    "one after the other": [Region(tuple(read(n * 5000, 5000, n * 5000, file=2) for n in range(40)), 12)],
    "more than a chunk": [Region((read(BLOCK, SIZES[2] - BLOCK, file=2),))],
    "more than a chunk, odd": [Region((read(1, SIZES[2] - 1, file=2),), 2)],
    "nothing": [],
    "memory of no bytes": [Region(()), Region((read(0, 10),)), Region(())],
}
"""Reads of every kind, by the case that they test."""
_SOME = [Region((read(BLOCK, 200_000), read(0, 16 * BLOCK, 200_000, file=1))), Region((read(1, 100_000),), 5)]
_LARGE = [Region((read(BLOCK, SIZES[2] - BLOCK, file=2),)), Region((read(1, 100_000),), 5)]


def write_files(folder: Path) -> list[Path]:
    """Write the test files, of random bytes, and return their paths."""
    paths = [folder / f"file-{number}" for number in range(len(SIZES))]
    for seed, (path, size) in enumerate(zip(paths, SIZES, strict=True)):
        path.write_bytes(random.Random(seed).randbytes(size))
    return paths


def stored(paths: Sequence[Path]) -> tuple[StoredFile, ...]:
    """Return the stored files for a backend."""
    return tuple(StoredFile(LocalStore(path.parent), path.name, size) for path, size in zip(paths, SIZES, strict=False))


def verified(paths: Sequence[Path], folder: Path) -> tuple[StoredFile, ...]:
    """Return copies of the files after headers that name their content, with the digests of their chunks."""
    found = []
    for number, (path, start) in enumerate(zip(paths, HEADS, strict=True)):
        content, body = f"{number:032x}", path.read_bytes()
        head = (start - 8).to_bytes(8, "little") + header_prefix(content)
        (folder / path.name).write_bytes(head.ljust(start) + body)
        chunks = (body[first : first + CHUNK] for first in range(0, len(body), CHUNK))
        digests = b"".join(blake3(chunk).digest() for chunk in chunks)
        file_digests = FileDigests(content, start, CHUNK, partial(bytes, digests))
        found.append(StoredFile(LocalStore(folder), path.name, start + len(body), file_digests, is_verified=True))
    return tuple(found)


def carried_out(reads: Sequence[Read], files: Sequence[Array], nbytes: int) -> tuple[Array, npt.NDArray[np.int_]]:
    """Return memory of `nbytes` after the reads, and how often each byte was written."""
    memory, times = np.full(nbytes, _UNTOUCHED, np.uint8), np.zeros(nbytes, int)
    for one in reads:
        for run in range(one.transfer.count):
            source = one.transfer.source + run * one.transfer.source_stride
            target = one.transfer.target + run * one.transfer.target_stride
            memory[target : target + one.transfer.nbytes] = files[one.file][source : source + one.transfer.nbytes]
            times[target : target + one.transfer.nbytes] += 1
    return memory, times


@dataclass
class Ground:
    """Memory of a backend that pieces are read into, and the content that it should have in the end."""

    memory: Any
    offsets: Sequence[int]
    """Offsets of the pieces in the memory."""
    space: Array
    expected: Array

    def job(self, files: tuple[StoredFile, ...], pieces: Sequence[Region], **options: Any) -> ReadJob:
        """Return the job that fills the memory."""
        starts = [0 if file.digests is None else file.digests.data_start for file in files]
        reads = (
            Read(one.file, one.transfer.shifted(source=starts[one.file], target=offset))
            for piece, offset in zip(pieces, self.offsets, strict=True)
            for one in piece.reads
        )
        return replace(ReadJob(files, tuple(reads), SMALL), **options)


def lay_out(
    backend: Backend[Any], pieces: Sequence[Region], contents: Sequence[Array], *, is_wrapped: bool = False
) -> Ground:
    """Return memory for the pieces, filled with one byte: an arena of the backend, or tensors that it wraps."""
    positions, end = [], _GUARD
    for piece in pieces:
        positions.append(end + (piece.skew - end) % BLOCK)
        end = positions[-1] + piece.nbytes + _GUARD
    arena = backend.allocate(align_up(end, BLOCK))
    whole = arena.tensor()
    space: Array = whole.numpy()
    space[:] = _UNTOUCHED
    expected = space.copy()
    for piece, position in zip(pieces, positions, strict=True):
        held, times = carried_out(piece.reads, contents, piece.nbytes)
        expected[position : position + piece.nbytes][times > 0] = held[times > 0]
    if not is_wrapped:
        return Ground(arena, positions, space, expected)
    memory = backend.wrap([whole[start : start + piece.nbytes] for start, piece in zip(positions, pieces, strict=True)])
    return Ground(memory, memory.offsets, space, expected)


def check_fill(
    backend: Backend[Any],
    files: tuple[StoredFile, ...],
    contents: Sequence[Array],
    pieces: Sequence[Region],
    *,
    is_wrapped: bool = False,
    **options: Any,
) -> None:
    """Let a backend fill memory, and check the bytes, the calls of `on_arrival`, and the progress."""
    ground = lay_out(backend, pieces, contents, is_wrapped=is_wrapped)
    arrived: list[tuple[int, int]] = []
    progress: list[int] = []
    job = ground.job(files, pieces, on_arrival=lambda *one: arrived.append(one), **options)
    with nothing_left_behind():
        backend.start(ground.memory, job).join(progress.append)
    differ = np.flatnonzero(ground.space != ground.expected)
    if differ.size:
        found, expected = ground.space[differ[0]], ground.expected[differ[0]]
        raise AssertionError(f"{differ.size} bytes differ, first at {differ[0]}: {found}, expected {expected}")
    total = sum(one.transfer.total_nbytes for one in job.reads)
    assert progress == sorted(progress), "progress falls"
    assert max(progress, default=0) == total, "progress does not end with all bytes"
    assert sum(nbytes for _, nbytes in arrived) == total, "on_arrival was not told each byte once"
    for piece, offset in zip(pieces, ground.offsets, strict=True):
        told = sorted(one for one in arrived if offset <= one[0] < offset + piece.nbytes)
        assert sum(nbytes for _, nbytes in told) == sum(one.transfer.total_nbytes for one in piece.reads)
        if piece.is_dense:
            ends = np.cumsum([nbytes for _, nbytes in told]).tolist()
            assert [start - offset for start, _ in told] == [0, *ends[:-1]][: len(told)]


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Check that no thread and no open file is left at the end of the block."""
    threads, files = set(threading.enumerate()), _open_files()
    yield
    assert set(threading.enumerate()) <= threads, "threads are left"
    assert _open_files() <= files, "open files are left"  # Fewer if garbage was collected.


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0  # noqa: PTH208


class BackendConformance:
    """The conformance tests of filling host memory. A subclass provides the fixture `backend`."""

    @pytest.fixture
    def backend(self) -> Backend[Any]:
        """Return the backend."""
        raise NotImplementedError(f"{type(self).__name__} has no fixture `backend`, expected one that returns one")

    @pytest.fixture
    def paths(self, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
        """Write the test files, and return their paths."""
        return write_files(tmp_path_factory.mktemp("stored"))

    @pytest.fixture
    def contents(self, paths: list[Path]) -> list[Array]:
        """Return the bytes of the test files."""
        return [np.fromfile(path, np.uint8) for path in paths]

    @requirement
    @pytest.mark.parametrize("wrapped", [False, True], ids=["arena", "tensors"])
    @pytest.mark.parametrize("case", CASES)
    def test_bytes_arrive_where_they_belong(
        self, backend: Backend[Any], paths: list[Path], contents: list[Array], case: str, wrapped: bool
    ) -> None:
        """A job brings the bytes of each read to their place, and writes no other byte.

        It reports each byte to `on_arrival` once, counts all bytes as progress, and leaves no thread and no open file.
        """
        check_fill(backend, stored(paths), contents, CASES[case], is_wrapped=wrapped)

    @requirement
    @pytest.mark.parametrize("threads", [1, 8])
    def test_any_number_of_threads_gives_the_same(
        self, backend: Backend[Any], paths: list[Path], contents: list[Array], threads: int
    ) -> None:
        """The budget's threads and buffers change only the time, not the result."""
        pieces = [*CASES["one after the other"], *CASES["rows, made dense"], *CASES["several files"]]
        check_fill(backend, stored(paths), contents, pieces, budget=Budget(threads, threads * 32 * 1024))

    @requirement
    def test_without_files_there_is_nothing_to_do(self, backend: Backend[Any]) -> None:
        """A job without files and reads ends at once."""
        check_fill(backend, (), (), [])

    @requirement
    @pytest.mark.parametrize("case", ["odd offsets", "rows, made dense", "several files", "more than a chunk"])
    def test_proven_files_give_the_same(
        self, backend: Backend[Any], paths: list[Path], contents: list[Array], tmp_path: Path, case: str
    ) -> None:
        """Files that are verified (`StoredFile.is_verified`) yield the same bytes as others."""
        check_fill(backend, verified(paths, tmp_path), contents, CASES[case])

    @requirement
    def test_a_byte_that_differs_in_a_proven_file_is_found(
        self, backend: Backend[Any], paths: list[Path], contents: list[Array], tmp_path: Path
    ) -> None:
        """One wrong bit in a chunk that is read of a verified file raises a FormatError with code "digest"."""
        files = verified(paths, tmp_path)
        with (tmp_path / paths[1].name).open("r+b") as file:
            file.seek(HEADS[1] + 5 * CHUNK // 2)
            [byte] = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        error = _failure(backend, files, contents, _SOME, FormatError, r"file-1: ")
        assert error.code == "digest"

    @requirement
    @pytest.mark.parametrize("change", [None, -1, BLOCK])
    def test_a_file_that_is_not_as_expected_is_named(
        self, backend: Backend[Any], paths: list[Path], contents: list[Array], tmp_path: Path, change: int | None
    ) -> None:
        """A file that is missing or of another length raises a FormatError that names it, and the next job works."""
        broken = _copies(paths, tmp_path)
        if change is None:
            broken[1].unlink()
            message = "file-1: is missing"
        else:
            os.truncate(broken[1], SIZES[1] + change)
            message = f"file-1: {SIZES[1] + change} bytes long, expected {SIZES[1]}"
        _failure(backend, stored(broken), contents, _SOME, FormatError, message)
        check_fill(backend, stored(paths), contents, _SOME)

    @requirement
    def test_a_file_that_is_cut_while_it_is_read_is_named(
        self, backend: Backend[Any], paths: list[Path], contents: list[Array], tmp_path: Path
    ) -> None:
        """A file that becomes shorter during a job raises a FormatError with the byte at which it ends."""
        broken, cut = _copies(paths, tmp_path), 8 * MIB + 3 * BLOCK
        message = f"file-2: ends at byte {cut}, expected {SIZES[2]} bytes"
        options: dict[str, Any] = {"budget": Budget(1, 2**16)}
        options["on_arrival"] = lambda *_: os.truncate(broken[2], cut)
        _failure(backend, stored(broken), contents, _LARGE, FormatError, message, **options)

    @requirement
    @pytest.mark.parametrize("who", ["on_arrival", "on_progress"])
    def test_an_error_of_who_is_told_ends_the_job(
        self, backend: Backend[Any], paths: list[Path], contents: list[Array], who: str
    ) -> None:
        """An error of `on_arrival` or `on_progress` ends the job with that error, and leaves nothing behind."""

        def fail(*_: int) -> None:
            raise ZeroDivisionError("told")

        _failure(backend, stored(paths), contents, _SOME, ZeroDivisionError, "told", **{who: fail})

    @requirement
    def test_a_job_that_is_cancelled_ends(
        self, backend: Backend[Any], paths: list[Path], contents: list[Array]
    ) -> None:
        """`cancel` ends a job before all is read, any number of times, and leaves no thread and no open file."""
        ground = lay_out(backend, _LARGE, contents)
        begun, stop = threading.Event(), Stop()

        def wait(offset: int, nbytes: int) -> None:
            begun.set()
            while not stop.requested:
                time.sleep(0.001)

        with nothing_left_behind():
            job = ground.job(stored(paths), _LARGE, stop=stop, on_arrival=wait, budget=Budget(1, 64 * 1024))
            running = backend.start(ground.memory, job)
            assert begun.wait(_PATIENCE), "nothing arrives"
            running.cancel()
            running.cancel()
        assert not np.array_equal(ground.space, ground.expected)


def _failure(
    backend: Backend[Any],
    files: tuple[StoredFile, ...],
    contents: Sequence[Array],
    pieces: Sequence[Region],
    error: type[Failure],
    message: str,
    *,
    on_progress: Callable[[int], None] | None = None,
    **options: Any,
) -> Failure:
    """Return the error with which a job fails, and check that it leaves nothing behind."""
    ground = lay_out(backend, pieces, contents)
    with nothing_left_behind(), pytest.raises(error, match=message) as caught:
        backend.start(ground.memory, ground.job(files, pieces, **options)).join(on_progress)
    return caught.value


def _copies(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Return copies of the files, to be damaged."""
    copies = [folder / path.name for path in paths]
    for path, copy in zip(paths, copies, strict=True):
        copy.write_bytes(path.read_bytes())
    return copies
