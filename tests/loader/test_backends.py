"""What every backend does, in one suite: bytes of files to their places in memory, and nothing left behind.

Those for devices run with the fake device of lanes.py; test_cuda.py has what only a real one can show.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.backend_contract import Target
from support.bits import flip
from support.fake_cuda import FakeCuFile, Lanes
from support.loader_fixtures import MIB, WAYS, Array, cache_in_part, forget, nothing_left_behind
from support.patience import PATIENCE, in_time

from relayout.core.extents import BLOCK, Transfer
from relayout.core.workers import Stop
from relayout.errors import FormatError
from relayout.format.index import Read
from relayout.loader.backends.base import REGISTRY, ReadJob
from relayout.loader.backends.cuda import DeviceBackend
from relayout.loader.requests import Budget
from relayout.loader.sources.rank import StoredFile
from relayout.storage.local.store import InputFile, LocalStore
from relayout.storage.system import resident_nbytes
from relayout.testing.backends import (
    CASES,
    CHUNK,
    HEADS,
    SIZES,
    Ground,
    Region,
    read,
    stored,
    strided,
    verified,
    write_files,
)

TARGETS = [
    *((name, kind, name == "auto") for name in ("auto", "gds") for kind in ("arena", "scattered")),
    *(("auto", "scattered", False), ("direct", "scattered", True), ("buffered", "arena", False)),
    *(("pinned", "arena", True), ("pinned", "scattered", False), ("toy", "scattered", True)),
    *(("cufile-compat", kind, False) for kind in ("arena", "scattered")),
]
"""Both kinds of memory by the backends that have all ways of the others, each of those by one; and whether the bytes of
the files are proven."""


def name_of(value: object) -> str:
    return {True: "proven", False: "unproven"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def names_of(target: tuple[object, ...]) -> str:
    return "-".join(map(name_of, target))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_files(tmp_path_factory.mktemp("stored"))


@pytest.fixture(scope="module")
def contents(files: list[Path]) -> list[Array]:
    return [np.fromfile(path, np.uint8) for path in files]


@pytest.fixture(scope="module")
def headed(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[StoredFile, ...]:
    return verified(files, tmp_path_factory.mktemp("proven"))


@pytest.fixture(params=TARGETS, ids=names_of)
def target(
    request: pytest.FixtureRequest, files: list[Path], headed: tuple[StoredFile, ...], contents: list[Array]
) -> Iterator[Target]:
    name, kind, is_verified = request.param
    if name in ("gds", "cufile-compat"):  # They have nothing to do for what is in the page cache.
        forget(*files)
    with Lanes() as lanes:
        yield Target(name, kind, headed if is_verified else stored(files), contents, lanes)
        assert lanes.in_flight == 0


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_reads_of_every_kind_arrive_where_they_belong(target: Target, case: list[Region]) -> None:
    target.check(case)


@pytest.mark.parametrize("target", TARGETS[:2], indirect=True, ids=names_of)
def test_small_pages_get_the_same_bytes(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relayout.loader.backends.host.are_small", lambda: True)
    for case in ("whole blocks", "up to a partial last block", "several files", "more than a chunk"):
        target.check(CASES[case])


def test_no_files_are_no_error(target: Target) -> None:
    target.stored = ()
    target.check([])


@pytest.mark.parametrize("threads", [1, 8])
def test_any_number_of_threads_gives_the_same(target: Target, threads: int) -> None:
    pieces = [*CASES["one after the other"], *CASES["rows, made dense"], *CASES["several files"]]
    target.check(pieces, budget=Budget(threads, threads * 32 * 1024))


def test_bytes_in_the_page_cache_and_bytes_on_the_drive_are_taken_alike(target: Target) -> None:
    for stretch in (4 * BLOCK, 3 * MIB // 2):
        for path in (file.path for file in target.stored):
            cache_in_part(path, stretch)
        target.check([Region((read(BLOCK, SIZES[2] - BLOCK, file=2),))])
        target.check([Region((read(1, SIZES[0] - 1),), 2)])


@pytest.mark.parametrize(("kind", "registers"), [("arena", True), ("arena", False), ("scattered", True)])
def test_cufile_reads_all_whole_blocks_that_are_not_in_the_page_cache(
    files: list[Path], contents: list[Array], kind: str, registers: bool
) -> None:
    forget(*files)
    with files[2].open("rb") as file:
        if resident_nbytes(file.fileno(), 0, SIZES[2]):
            pytest.skip("this file system keeps files in memory")
    with Lanes() as lanes:
        target = Target("gds", kind, stored(files), contents, lanes, FakeCuFile(registers=registers))
        target.check([Region((read(1000, 8 * MIB, file=2),), 1000)])
        assert target.cufile.nbytes == 8 * MIB - BLOCK
        assert target.cufile.num_reads > 8 * MIB // (32 * 1024)
        assert target.cufile.num_registered == (kind == "arena")


@st.composite
def dense_pieces(draw: st.DrawFn) -> Region:
    reads: list[Read] = []
    end = 0
    for _ in range(draw(st.integers(1, 3))):
        file = draw(st.sampled_from([0, 1]))
        start = draw(st.integers(0, SIZES[file] - 1))
        nbytes = draw(st.integers(1, min(60_000, SIZES[file] - start)))
        room = SIZES[file] - start - nbytes
        stride = nbytes + draw(st.integers(0, 9000))
        count = 1 + draw(st.integers(0, min(12, room // stride)))
        strides = (stride, nbytes) if count > 1 else (0, 0)
        reads.append(Read(file, Transfer(start, end, nbytes, count, *strides)))
        end = reads[-1].transfer.target_end
    congruent = reads[0].transfer.source % BLOCK
    return Region(tuple(reads), draw(st.sampled_from([0, congruent]) | st.integers(0, BLOCK - 1)))


@st.composite
def pieces_with_gaps(draw: st.DrawFn) -> Region:
    nbytes, count = draw(st.integers(1, 2000)), draw(st.integers(2, 9))
    stride, pitch = nbytes + draw(st.integers(0, 20_000)), nbytes + draw(st.integers(1, 50))
    start = draw(st.integers(0, SIZES[0] - stride * count))
    return Region((strided(start, nbytes, count, stride, pitch),), draw(st.integers(0, BLOCK - 1)))


@settings(max_examples=12)
@given(
    st.lists(dense_pieces(), max_size=4) | st.lists(dense_pieces() | pieces_with_gaps(), max_size=4),
    st.sampled_from([1, 2, 5]),
)
def test_any_reads_arrive_where_they_belong(target: Target, pieces: list[Region], threads: int) -> None:
    target.check(pieces, budget=Budget(threads, threads * 32 * 1024))


LARGE = [Region((read(BLOCK, SIZES[2] - BLOCK, file=2),)), Region((read(1, 100_000),), 5)]
SOME = [Region((read(BLOCK, 200_000), read(0, 16 * BLOCK, 200_000, file=1))), Region((read(1, 100_000),), 5)]


def copied(target: Target, folder: Path, num_files: int = 2) -> Target:
    """The same with files of its own, to be damaged."""
    files = target.stored[:num_files]
    paths = [Path(shutil.copy(file.path, folder)) for file in files]
    if target.name in ("gds", "cufile-compat"):
        forget(*paths)
    return replace(target, stored=tuple(replace(file, folder=LocalStore(folder)) for file in files))


def assert_fails(
    target: Target,
    error: type[BaseException],
    message: str,
    pieces: Any = SOME,
    ground: Ground | None = None,
    on_progress: Callable[[int], None] | None = None,
    **options: Any,
) -> None:
    """A fill fails so, leaves nothing behind, and is not in the way of the next."""
    ground = ground or target.lay_out(pieces)
    fill = target.fill(ground, pieces, **options)
    with nothing_left_behind():
        with pytest.raises(error, match=message):
            in_time(lambda: target.backend.start(ground.memory, fill).join(on_progress))
        assert target.lanes.in_flight == 0
        target.cufile.assert_restored()
    target.lanes.forget()


@pytest.mark.parametrize("change", [None, -1, BLOCK])
def test_a_file_that_is_missing_or_of_another_length_is_named(
    target: Target, tmp_path: Path, change: int | None
) -> None:
    broken = copied(target, tmp_path)
    path = broken.stored[1].path
    if change is None:
        path.unlink()
        assert_fails(broken, FormatError, "file-1: is missing")
    else:
        nbytes = broken.stored[1].nbytes
        os.truncate(path, nbytes + change)
        assert_fails(broken, FormatError, f"file-1: {nbytes + change} bytes long, expected {nbytes}")
    target.check(SOME)


def test_a_file_that_is_cut_while_it_is_read_is_named(target: Target, tmp_path: Path) -> None:
    broken = copied(target, tmp_path, 3)
    path = broken.stored[2].path
    cut = 8 * MIB + 3 * BLOCK
    message = f"file-2: ends at byte {cut}, expected {broken.stored[2].nbytes} bytes"
    options = {"budget": Budget(1, 2**16), "on_arrival": lambda *_: os.truncate(path, cut)}
    assert_fails(broken, FormatError, message, LARGE, **options)
    target.check(SOME)


@pytest.mark.parametrize("target", [one for one in TARGETS if one[2]], indirect=True, ids=names_of)
@pytest.mark.parametrize(("file", "position"), [(0, 0), (0, SIZES[0] - 1), (1, 3 * CHUNK - 1), (2, 9 * MIB), (0, 9)])
def test_a_wrong_byte_of_a_file_that_is_proven_names_file_and_range(
    target: Target, tmp_path: Path, file: int, position: int
) -> None:
    """Wherever it is: requests go along the borders of chunks, or, as of the second file, across them."""
    broken = copied(target, tmp_path, 3)
    flip(broken.stored[file].path, HEADS[file] + position)
    start = HEADS[file] + position // CHUNK * CHUNK
    message = f"file-{file}: bytes {start} to {min(start + CHUNK, HEADS[file] + SIZES[file])} do not match digest"
    whole = [Region((read(0, size, file=number),), skew=17 * number) for number, size in enumerate(SIZES)]
    assert_fails(broken, FormatError, message, whole)
    target.check(whole)


@pytest.mark.parametrize("target", [one for one in TARGETS if one[2]], indirect=True, ids=names_of)
def test_no_chunk_is_read_twice(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    requested = 0
    true_read = InputFile.read

    def count(self: InputFile, offset: int, view: memoryview) -> None:
        nonlocal requested
        requested += min(view.nbytes, self.nbytes - offset) if offset >= HEADS[2] else 0
        true_read(self, offset, view)

    monkeypatch.setattr(InputFile, "read", count)
    sizes = [9_000 + n * 1_001 for n in range(50)]
    rows = tuple(read(sum(sizes[:n]), size, sum(sizes[:n]), file=2) for n, size in enumerate(sizes))
    for pieces in (
        [Region((read(0, SIZES[2], file=2),))],
        [Region((one,), 3 * n) for n, one in enumerate(rows)],
    ):
        requested = 0
        target.check(pieces, budget=Budget(2, 2**18))
        wanted = sum(one.transfer.nbytes for piece in pieces for one in piece.reads)
        assert wanted <= requested < wanted + CHUNK + BLOCK


def test_a_fill_that_is_cancelled_stops_and_leaves_nothing(target: Target) -> None:
    ground = target.lay_out(LARGE)
    begun = threading.Event()
    stop = Stop()

    def wait(offset: int, nbytes: int) -> None:
        begun.set()
        while not stop.requested:
            time.sleep(0.001)

    with nothing_left_behind():
        fill = target.fill(ground, LARGE, stop=stop, on_arrival=wait, budget=Budget(1, 64 * 1024))
        filling = target.backend.start(ground.memory, fill)
        assert begun.wait(PATIENCE)
        in_time(filling.cancel)
        filling.cancel()
        assert target.lanes.in_flight == 0
        target.cufile.assert_restored()
    assert not np.array_equal(ground.space, ground.expected)
    target.lanes.forget()
    target.check(SOME)


def test_an_error_of_who_is_told_or_watches_ends_the_fill(target: Target) -> None:
    def fail(*_: int) -> None:
        raise ZeroDivisionError("told")

    assert_fails(target, ZeroDivisionError, "told", on_arrival=fail)
    assert_fails(target, ZeroDivisionError, "told", on_progress=fail)


def test_the_backends_are_those_that_are_tested() -> None:
    assert {name for name, _, _ in TARGETS} == set(REGISTRY)
    assert set(REGISTRY) - set(WAYS) == {"cufile-compat"}, "which is gds to all that does not read"


@pytest.mark.parametrize("kind", ["arena", "scattered"])
@pytest.mark.parametrize(
    ("error", "message", "cufile", "refuse"),
    [
        (MemoryError, "cannot pin", {}, True),
        (OSError, r"cuFile refuses it: .*file-1", {"refuses": "file-1"}, False),
        (OSError, r"cuFile failed at byte \d+: .*file-[01]", {"fails_at": 1}, False),
        (OSError, r"cuFile failed at byte \d+: .*file-[01]", {"fails_at": 5}, False),
    ],
)
def test_what_a_device_refuses_is_an_error_that_leaves_nothing(
    files: list[Path], kind: str, error: type[BaseException], message: str, cufile: dict[str, Any], refuse: bool
) -> None:
    forget(*files[:2])
    contents = [np.zeros(size, np.uint8) for size in SIZES]
    with Lanes(refuse=refuse) as lanes:
        assert_fails(Target("gds", kind, stored(files[:2]), contents, lanes, FakeCuFile(**cufile)), error, message)


class CopyingLane:
    """A lane of a device that copies at once."""

    def __init__(self, nbytes: int) -> None:
        self._slab = torch.empty(nbytes + BLOCK, dtype=torch.uint8)

    def buffer(self) -> torch.Tensor:
        return self._slab[-self._slab.data_ptr() % BLOCK :][: -BLOCK or None]

    def send(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)

    def settle(self) -> None:
        pass

    drain = close = settle


class ViewedMemory:
    """Memory that knows which of its views are still referred to."""

    def __init__(self, arena: Any) -> None:
        self.arena, self.views = arena, list[weakref.ref[torch.Tensor]]()

    def span(self, offset: int, nbytes: int) -> torch.Tensor:
        view: torch.Tensor = self.arena.span(offset, nbytes)
        self.views.append(weakref.ref(view))
        return view


def test_a_lane_refers_to_no_memory_that_has_arrived(files: list[Path], contents: list[Array]) -> None:
    """The thread of the consumer frees it: another one could wait for that thread's lock, with what it waits for."""
    backend: Any = DeviceBackend("cpu", CopyingLane)  # type: ignore[arg-type]
    memory, left = ViewedMemory(backend.allocate(SIZES[0] + 2 * BLOCK)), list[int]()

    def arrived(offset: int, nbytes: int) -> None:
        left.append(sum(view() is not None for view in memory.views))

    whole, rows = read(1, SIZES[0] - 1), strided(0, 5000, 3, 16, 64)
    for one in (whole, rows):
        job = ReadJob(stored(files), (one,), Budget(1, 64 * 1024), arrived)
        backend.fill(memory, job)
    assert len(left) > 2
    assert not any(left)


def test_arenas_of_a_device_have_one_size_so_that_one_takes_the_place_of_another() -> None:
    pool = DeviceBackend("cpu", CopyingLane).pool(MIB)  # type: ignore[arg-type]
    assert [pool.take(nbytes)[1].numel() for nbytes in (1, MIB // 2, MIB, 3 * MIB)] == [MIB, MIB, MIB, 3 * MIB]
