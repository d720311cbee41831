"""What every backend does, in one suite: bytes of files to their places in memory, and nothing left behind.

Those for devices run with the fake device of lanes.py; test_cuda.py has what only a real one can show.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.backend_contract import SIZES, Ground, Piece, Target, read, stored, strided
from support.fake_cuda import FakeCuFile, Lanes
from support.loader_fixtures import MIB, WAYS, Array, cache_in_part, forget, nothing_left_behind
from support.patience import PATIENCE, in_time

from relayout.core.extents import BLOCK, Transfer
from relayout.core.workers import Stop
from relayout.errors import FormatError
from relayout.format.index import Read
from relayout.loader.backends.choice import REGISTRY
from relayout.loader.backends.digests import checks_of
from relayout.loader.budgets import Budget
from relayout.loader.sources.columns import TensorColumns
from relayout.storage.local.page_cache import resident_nbytes

TARGETS = [
    *((name, kind) for name in ("auto", "gds") for kind in ("arena", "scattered")),
    *(("direct", "scattered"), ("buffered", "arena"), ("pinned", "arena"), ("toy", "scattered")),
]
"""Both kinds of memory by the backends that have all ways of the others; each of those by one."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("stored")
    rng = np.random.default_rng(0)
    paths = [folder / f"file-{number}" for number in range(len(SIZES))]
    for path, size in zip(paths, SIZES, strict=True):
        path.write_bytes(rng.integers(0, 256, size, dtype=np.uint8).tobytes())
    return paths


@pytest.fixture(scope="module")
def contents(files: list[Path]) -> list[Array]:
    return [np.fromfile(path, np.uint8) for path in files]


@pytest.fixture(params=TARGETS, ids="-".join)
def target(request: pytest.FixtureRequest, files: list[Path], contents: list[Array]) -> Iterator[Target]:
    name, kind = request.param
    if name == "gds":  # It has nothing to do for what is in the page cache.
        forget(*files)
    with Lanes() as lanes:
        yield Target(name, kind, stored(files), contents, lanes)
        assert lanes.in_flight == 0


def many_small() -> list[Piece]:
    """Neighbors, some of which share blocks, and some that go backwards."""
    sizes = [3 + 7 * n % 90 for n in range(60)]
    starts = [BLOCK * (n % 50) + 13 * n for n in range(60)]
    return [Piece((read(start, size),), 16 * n) for n, (start, size) in enumerate(zip(starts, sizes, strict=True))]


CASES = {
    "whole blocks": [Piece((read(BLOCK, 40 * BLOCK),))],
    "odd offsets": [Piece((read(101, 33_333),), 7)],
    "congruent, with edges": [Piece((read(5000, 200_000),), 5000 % BLOCK)],
    "inside a block": [Piece((read(5000, 2000),), 5000 % BLOCK), Piece((read(1, 1),), 99)],
    "up to a partial last block": [Piece((read(SIZES[0] - 70_000, 70_000),), (SIZES[0] - 70_000) % BLOCK)],
    "a partial last block alone": [Piece((read(SIZES[0] - 5, 5),))],
    "rows, made dense": [Piece((strided(77, 1000, 90, 3000, 1000),), 3)],
    "rows, to rows with gaps": [Piece((strided(77, 1000, 90, 3000, 1024),), 3)],
    "rows far apart": [Piece((strided(5, 500, 8, MIB, 500, file=2),)), Piece((strided(9, 3, 8, MIB, 9, file=2),), 5)],
    "long rows": [Piece((strided(MIB + 3, 300_000, 9, 900_001, 300_000, file=2),), 8)],
    "many small ones": many_small(),
    "several files": [Piece((read(8, 90_000, file=0), read(0, 16 * BLOCK, 90_000, file=1)), 8), Piece((read(3, 9),))],
    "one after the other": [Piece(tuple(read(n * 5000, 5000, n * 5000, file=2) for n in range(40)), 12)],
    "more than a chunk": [Piece((read(BLOCK, SIZES[2] - BLOCK, file=2),))],
    "more than a chunk, odd": [Piece((read(1, SIZES[2] - 1, file=2),), 2)],
    "nothing": [],
    "memory of no bytes": [Piece(()), Piece((read(0, 10),)), Piece(())],
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_reads_of_every_kind_arrive_where_they_belong(target: Target, case: list[Piece]) -> None:
    target.check(case, cuts=(1, 100, 4096, 50_000, 8 * MIB + 5))


@pytest.mark.parametrize("target", TARGETS[:2], indirect=True, ids="-".join)
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
    target.check(pieces, cuts=(4000, 9000), budget=Budget(threads, threads * 32 * 1024))


def test_bytes_in_the_page_cache_and_bytes_on_the_drive_are_taken_alike(target: Target) -> None:
    for stretch in (4 * BLOCK, 3 * MIB // 2):
        for path in (file.path for file in target.stored):
            cache_in_part(path, stretch)
        target.check([Piece((read(BLOCK, SIZES[2] - BLOCK, file=2),))], cuts=(MIB, 5 * MIB + 1))
        target.check([Piece((read(1, SIZES[0] - 1),), 2)], cuts=(5000,))


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
        target.check([Piece((read(1000, 8 * MIB, file=2),), 1000)], cuts=(MIB, 5 * MIB + 3))
        assert target.cufile.nbytes == 8 * MIB - BLOCK
        assert target.cufile.num_reads > 8 * MIB // (32 * 1024)
        assert target.cufile.num_registered == (kind == "arena")


@st.composite
def dense_pieces(draw: st.DrawFn) -> Piece:
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
    return Piece(tuple(reads), draw(st.sampled_from([0, congruent]) | st.integers(0, BLOCK - 1)))


@st.composite
def pieces_with_gaps(draw: st.DrawFn) -> Piece:
    nbytes, count = draw(st.integers(1, 2000)), draw(st.integers(2, 9))
    stride, pitch = nbytes + draw(st.integers(0, 20_000)), nbytes + draw(st.integers(1, 50))
    start = draw(st.integers(0, SIZES[0] - stride * count))
    return Piece((strided(start, nbytes, count, stride, pitch),), draw(st.integers(0, BLOCK - 1)))


@settings(max_examples=12)
@given(
    st.lists(dense_pieces(), max_size=4) | st.lists(dense_pieces() | pieces_with_gaps(), max_size=4),
    st.lists(st.integers(1, 80_000), max_size=3),
    st.sampled_from([1, 2, 5]),
)
def test_any_reads_arrive_where_they_belong(target: Target, pieces: list[Piece], cuts: list[int], threads: int) -> None:
    target.check(pieces, cuts=cuts, budget=Budget(threads, threads * 32 * 1024))


LARGE = [Piece((read(BLOCK, SIZES[2] - BLOCK, file=2),)), Piece((read(1, 100_000),), 5)]
SOME = [Piece((read(BLOCK, 200_000), read(0, 16 * BLOCK, 200_000, file=1))), Piece((read(1, 100_000),), 5)]


def copied(target: Target, folder: Path, num_files: int = 2) -> Target:
    """The same with files of its own, to be damaged."""
    paths = [Path(shutil.copy(file.path, folder)) for file in target.stored[:num_files]]
    if target.name == "gds":
        forget(*paths)
    return replace(target, stored=stored(paths))


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
        target.cufile.assert_given_back()
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
        os.truncate(path, SIZES[1] + change)
        assert_fails(broken, FormatError, f"file-1: {SIZES[1] + change} bytes long, expected {SIZES[1]}")
    target.check(SOME)


def test_a_file_that_is_cut_while_it_is_read_is_named(target: Target, tmp_path: Path) -> None:
    broken = copied(target, tmp_path, 3)
    path = broken.stored[2].path
    cut = 8 * MIB + 3 * BLOCK
    message = f"file-2: ends at byte {cut}, expected {SIZES[2]} bytes"
    options = {"budget": Budget(1, 2**16), "on_arrival": lambda *_: os.truncate(path, cut)}
    assert_fails(broken, FormatError, message, LARGE, **options)
    target.check(SOME)


@pytest.mark.parametrize("wrong", [0, 3])
def test_a_wrong_digest_names_the_tensor(target: Target, wrong: int) -> None:
    ground, stop = target.lay_out(SOME), Stop()
    checks = ground.checks(SOME, (10, 70_000), stop, wrong=wrong)
    message = f"tensor 'tensor {wrong}': its bytes have digest"
    assert_fails(target, FormatError, message, ground=ground, checks=checks, stop=stop)
    target.check(SOME, cuts=(10, 70_000))


def test_a_wrong_digest_of_nothing_is_not_blamed_on_the_file_of_the_next_tensor(files: list[Path]) -> None:
    tensors = TensorColumns(["none", "some"], ["U8"] * 2, [(0,), (4,)], digests=["0" * 32] * 2, offsets=[0, 0])
    with pytest.raises(FormatError, match=r"^tensor 'none': its bytes have digest"):
        checks_of(tensors, stored(files), [Read(1, Transfer(0, 0, 4))], Stop())


def test_a_tensor_that_no_read_brought_whole_is_not_taken_for_checked(target: Target) -> None:
    """The digests are of all pieces, and the last one is not read."""
    ground, stop = target.lay_out(SOME), Stop()
    reads = target.fill(ground, SOME).reads[:-1]
    checks = ground.checks(SOME, (), stop)
    message = r"^1 tensors could not be checked"
    assert_fails(target, FormatError, message, ground=ground, checks=checks, stop=stop, reads=reads)


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
        target.cufile.assert_given_back()
    assert not np.array_equal(ground.space, ground.expected)
    target.lanes.forget()
    target.check(SOME)


def test_an_error_of_who_is_told_or_watches_ends_the_fill(target: Target) -> None:
    def fail(*_: int) -> None:
        raise ZeroDivisionError("told")

    assert_fails(target, ZeroDivisionError, "told", on_arrival=fail)
    assert_fails(target, ZeroDivisionError, "told", on_progress=fail)


def test_the_backends_are_those_that_are_tested() -> None:
    assert {name for name, _ in TARGETS} == set(WAYS) == set(REGISTRY)


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
