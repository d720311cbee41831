"""relayout.loader.backends.files: which bytes come from the page cache, by the kernel's own count."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file
from support.loader_fixtures import nothing_left_behind
from support.local_stores import stored_file
from support.page_cache import (  # noqa: F401
    drive_nbytes,
    drop,
    opened,
    process_drive_nbytes,
    refuse_to_open,
    unmarked,
    warm,
    write_cold,
)

import relayout
from relayout.core.extents import align_up
from relayout.errors import FormatError
from relayout.loader.backends import files as sources_module
from relayout.loader.backends.files import ReadableFiles
from relayout.storage.local import store
from relayout.storage.local.store import InputFile
from relayout.storage.stores import Access
from relayout.storage.system import Buffer, read_ahead_nbytes, resident_nbytes

Bytes = npt.NDArray[np.uint8]

MIB = 2**20
NBYTES = 6 * MIB + 1000
SLACK = MIB // 2
"""Drive bytes that may be code or folders instead: less than the smallest piece here."""


@pytest.fixture
def written(tmp_path: Path) -> Bytes:
    """What is in the file, which is cold."""
    written = write_cold(tmp_path / "file", NBYTES)
    with opened(tmp_path / "file") as fd:
        if resident_nbytes(fd, 0, NBYTES) is None:
            pytest.skip("this system does not tell what is in the page cache")
    try:
        os.close(os.open(tmp_path / "file", os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        pytest.skip(f"no direct I/O in {tmp_path}: {error.strerror}")
    return written


def files_of(paths: Path | Sequence[Path], access: Access) -> ReadableFiles:
    paths = [paths] if isinstance(paths, Path) else paths
    return ReadableFiles([stored_file(path, path.stat().st_size) for path in paths], access)


def read(sources: ReadableFiles, file: int, offset: int, nbytes: int) -> bytes:
    """A request, and what it has brought."""
    view = Buffer().reserve(nbytes)
    sources.read(file, offset, view)
    return bytes(view)


def drive_nbytes_of(path: Path, access: Access, written: Bytes) -> int:
    """Read the whole file, in requests of 2 MiB, and see how many bytes that took from the drive."""
    with files_of(path, access) as sources:
        requests = range(0, align_up(NBYTES, 4096), 2 * MIB)
        before = drive_nbytes()
        parts = [
            read(sources, 0, offset, min(2 * MIB, align_up(NBYTES, sources.alignment) - offset)) for offset in requests
        ]
        count = drive_nbytes() - before
    assert b"".join(parts)[:NBYTES] == written.tobytes()
    return count


def test_a_file_that_is_all_there_costs_nothing(tmp_path: Path, written: Bytes) -> None:
    counts = []
    for _ in range(8):  # A system that is short of memory drops what it has just read, and code: not every time.
        (tmp_path / "file").read_bytes()
        counts.append(drive_nbytes_of(tmp_path / "file", Access.AUTO, written))
    assert min(counts) < SLACK, counts


@pytest.mark.usefixtures("unmarked")
@pytest.mark.parametrize(
    ("access", "there", "from_drive", "there_then"),
    [
        # A cold file leaves nothing in the page cache; of another just the rest is read.
        *(
            (Access.AUTO, there, [number for number in range(7) if number not in there], there)
            for there in ([], [0, 1, 2], [1, 3, 5], [5], [2, 3], [0, 1, 2, 3, 4], [6], [0, 6])
        ),
        (Access.DIRECT, [], range(7), []),
        (Access.DIRECT, range(7), range(7), range(7)),
        (Access.BUFFERED, [], range(7), range(7)),
        (Access.BUFFERED, range(7), [], range(7)),
    ],
)
def test_just_what_is_not_there_is_read_from_the_drive(
    tmp_path: Path,
    written: Bytes,
    access: Access,
    there: Sequence[int],
    from_drive: Sequence[int],
    there_then: Sequence[int],
) -> None:
    path = tmp_path / "file"
    for number in there:
        warm(path, number * MIB, MIB)  # Number 6 is the last, odd, 1000 bytes.
    expected = sum(1000 if number == 6 else MIB for number in from_drive)
    assert expected <= drive_nbytes_of(path, access, written) < expected + SLACK
    with opened(path) as fd:
        assert [number for number in range(7) if resident_nbytes(fd, number * MIB, MIB)] == list(there_then)


def test_mapped_bytes_come_once_from_the_drive_for_all_who_want_them(
    tmp_path: Path, written: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    counts = []
    for offset, nbytes in ((3, NBYTES - 3), (0, NBYTES), (4096, 2 * MIB), (NBYTES - 1, 1), (NBYTES - 1, 4096)):
        with files_of(tmp_path / "file", Access.AUTO) as sources:
            before = drive_nbytes()
            with sources.mapped(0, offset, nbytes) as view:
                assert view is not None
                assert bytes(view) == written[offset : offset + nbytes].tobytes()
            counts.append(drive_nbytes() - before)
    assert NBYTES - SLACK <= counts[0] < NBYTES + SLACK
    assert sum(counts[1:]) < SLACK, counts
    with files_of(tmp_path / "file", Access.DIRECT) as sources, sources.mapped(0, 0, NBYTES) as view:
        assert view is None


def test_what_has_been_cut_off_is_not_mapped_and_fails_when_it_is_read(tmp_path: Path, written: Bytes) -> None:
    """Using such a page would kill the process."""
    with files_of(tmp_path / "file", Access.AUTO) as sources:
        os.truncate(tmp_path / "file", MIB)
        with sources.mapped(0, 0, NBYTES) as view:
            assert view is None
        with pytest.raises(FormatError, match="ends at byte"):
            read(sources, 0, 0, align_up(NBYTES, 4096))


def plain_model(folder: Path) -> tuple[Path, Bytes]:
    """A checkpoint of one row-parallel tensor, not in the page cache, and the tensor."""
    weight = write_cold(folder / "bytes", 16 * MIB).reshape(4096, 4096)
    model = folder / "model"
    model.mkdir()
    save_file({"model.layers.0.mlp.down_proj.weight": weight}, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    drop(model / "model.safetensors")
    return model, weight


def test_a_rank_that_is_alone_leaves_nothing_of_a_plain_checkpoint_in_the_page_cache(tmp_path: Path) -> None:
    model, weight = plain_model(tmp_path)
    with pytest.warns(UserWarning, match="a plain checkpoint"):
        loaded = relayout.load(model, 1, tp=4)["model.layers.0.mlp.down_proj.weight"]
    assert np.array_equal(loaded.numpy(), weight[:, 1024:2048])
    with opened(model / "model.safetensors") as fd:
        there = resident_nbytes(fd, 0, NBYTES)
    assert there is not None
    assert there < SLACK  # The header is read through it.


@pytest.mark.usefixtures("unmarked")
@pytest.mark.parametrize("there", [[], [2, 3]])
def test_without_direct_io_a_file_that_was_cold_is_cold_again(
    tmp_path: Path, written: Bytes, monkeypatch: pytest.MonkeyPatch, there: Sequence[int]
) -> None:
    refuse_to_open(monkeypatch, errno.EINVAL)
    for number in there:
        warm(tmp_path / "file", number * MIB, MIB)
    with files_of(tmp_path / "file", Access.AUTO) as sources:
        for offset in range(0, NBYTES, MIB):
            nbytes = min(MIB, NBYTES - offset)
            assert read(sources, 0, offset, nbytes) == written[offset : offset + nbytes].tobytes()
    with opened(tmp_path / "file") as fd:
        stayed = {number for number in range(7) if resident_nbytes(fd, number * MIB, MIB)}
    assert stayed.issuperset(there)
    assert bool(stayed) == bool(there)


def test_a_rank_of_a_plain_checkpoint_finds_what_another_has_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    model, weight = plain_model(tmp_path)
    counts = []
    for rank in range(4):
        before = process_drive_nbytes()
        with pytest.warns(UserWarning, match="a plain checkpoint"):
            loaded = relayout.load(model, rank, tp=4)["model.layers.0.mlp.down_proj.weight"]
        counts.append(process_drive_nbytes() - before)
        assert np.array_equal(loaded.numpy(), weight[:, rank * 1024 : rank * 1024 + 1024])
    assert weight.nbytes - SLACK <= counts[0]
    assert sum(counts[1:]) < weight.nbytes, counts


def test_reading_what_is_there_does_not_make_the_kernel_read_on(tmp_path: Path) -> None:
    path = tmp_path / "large"
    nbytes = 24 * MIB
    written = write_cold(path, nbytes)
    with opened(path) as fd:
        for offset in range(0, 12 * MIB, 65536):  # As most programs read: the kernel reads ahead, and leaves marks.
            os.pread(fd, 65536, offset)
        before = resident_nbytes(fd, 0, nbytes)
        assert before is not None
        if not 12 * MIB < before < nbytes - MIB:
            pytest.skip(f"the kernel has read ahead to {before} of {nbytes} bytes")
        drive = drive_nbytes()
        with files_of(path, Access.AUTO) as sources:
            for offset in range(0, nbytes, MIB):
                assert read(sources, 0, offset, MIB) == written[offset : offset + MIB].tobytes()
        assert resident_nbytes(fd, 0, nbytes) == before
        assert nbytes - before <= drive_nbytes() - drive <= nbytes - before + read_ahead_nbytes(fd) + MIB


@pytest.mark.usefixtures("unmarked")
@pytest.mark.parametrize("seed", range(4))
def test_pieces_cover_the_request_in_order_and_come_from_where_their_bytes_are(
    tmp_path: Path, written: Bytes, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page cache is one that is written down: the system's own may lose pages, and get others, at any time."""
    random = np.random.default_rng(seed)
    num_pages = align_up(NBYTES, 4096) // 4096
    there = np.zeros(num_pages, np.bool_)
    for _ in range(5):  # Stretches of any length, some of them longer than a piece.
        start = int(random.integers(num_pages))
        there[start : start + int(random.integers(1, 700))] = True

    def num_there(fd: int, offset: int, nbytes: int) -> int:
        nbytes = min(nbytes, NBYTES - offset)
        return min(nbytes, 4096 * int(there[offset // 4096 : -(-(offset + nbytes) // 4096)].sum()))

    monkeypatch.setattr(sources_module, "resident_nbytes", num_there)
    kinds = set()
    with files_of(tmp_path / "file", Access.AUTO) as sources:
        for _ in range(60):
            first = int(random.integers(num_pages))
            offset, nbytes = first * 4096, int(random.integers(1, num_pages + 9 - first)) * 4096
            pieces = list(sources.pieces(0, offset, nbytes))
            assert pieces[0][0] == offset
            assert all(start + length == then for (start, length, _), (then, _, _) in pairwise(pieces))
            assert pieces[-1][0] + pieces[-1][1] == offset + nbytes  # Even behind the end of the file.
            assert all(one[2] != other[2] for one, other in pairwise(pieces))
            for start, length, through_cache in pieces:
                assert length > 0
                assert start % 4096 == length % 4096 == 0
                mine = there[start // 4096 : (start + length) // 4096]
                if through_cache:
                    assert mine.all()
                else:  # In each MiB of it something is missing.
                    assert all(not mine[page : page + 256].all() for page in range(0, mine.size, 256))
                kinds.add(through_cache)
            got = read(sources, 0, offset, nbytes)[: NBYTES - offset]
            assert got == written[offset : offset + nbytes].tobytes()
    assert kinds == {True, False}


@pytest.mark.usefixtures("unmarked")
def test_a_request_is_one_piece_where_there_is_nothing_to_choose(
    tmp_path: Path, written: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    with files_of(path, Access.AUTO) as sources:
        warm(path, 0, 4096)  # What comes into the cache later is not looked for.
        assert list(sources.pieces(0, 0, 4 * MIB)) == [(0, 4 * MIB, False)]
    with files_of(path, Access.AUTO) as sources:
        assert list(sources.pieces(0, 0, 4096)) == [(0, 4096, True)]
        assert list(sources.pieces(0, 4096, 4 * MIB)) == [(4096, 4 * MIB, False)]
        assert list(sources.pieces(0, 0, 4 * MIB)) == [(0, 4 * MIB, False)]  # A block of 256 is not worth it.
    warm(path, 0, MIB)
    with files_of(path, Access.AUTO) as sources:
        assert list(sources.pieces(0, 0, 4 * MIB)) == [(0, MIB, True), (MIB, 3 * MIB, False)]
    with files_of(path, Access.DIRECT) as sources:
        assert list(sources.pieces(0, 0, 4 * MIB)) == [(0, 4 * MIB, False)]
    with files_of(path, Access.BUFFERED) as sources:
        assert list(sources.pieces(0, 5, 4 * MIB)) == [(5, 4 * MIB, True)]
    monkeypatch.setattr(sources_module, "resident_nbytes", lambda *_: None)
    with files_of(path, Access.AUTO) as sources:  # It is not known what is there.
        assert list(sources.pieces(0, 0, 4 * MIB)) == [(0, 4 * MIB, False)]


def test_an_empty_file_is_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for access in (Access.AUTO, Access.BUFFERED):
        with files_of(tmp_path / "empty", access) as sources:
            assert list(sources.pieces(0, 0, 0)) in ([(0, 0, False)], [(0, 0, True)])
            sources.read(0, 0, Buffer().reserve(0))


@pytest.mark.parametrize("access", Access)
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path, access: Access) -> None:
    os.mkfifo(tmp_path / "file")
    with nothing_left_behind(), pytest.raises(FormatError, match=r"file: not a regular file$"):
        ReadableFiles([stored_file(tmp_path / "file", 0)], access)


def test_a_file_that_vanishes_between_two_opens_is_refused(
    tmp_path: Path, written: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.read_bytes()

    class Vanishing(InputFile):
        def __init__(self, path: Path, nbytes: int, **options: Any) -> None:
            if options["access"] is Access.BUFFERED:
                path.unlink()
            super().__init__(path, nbytes, **options)

    monkeypatch.setattr(store, "InputFile", Vanishing)
    with nothing_left_behind(), pytest.raises(FormatError, match=r"file: is missing$"):
        ReadableFiles([stored_file(path, NBYTES)], Access.AUTO)


@pytest.mark.parametrize(
    ("access", "resident", "nbytes"),
    [
        *((access, resident, 2 * MIB + 5000) for access in Access for resident in (False, True)),
        *((Access.AUTO, False, 2 * MIB + more) for more in (0, 100, 4096)),
    ],
)
def test_a_file_that_has_become_shorter_is_damaged(
    tmp_path: Path, written: Bytes, access: Access, resident: bool, nbytes: int
) -> None:
    path = tmp_path / "file"
    if resident:
        path.read_bytes()
    with files_of(path, access) as sources:
        os.truncate(path, nbytes)
        with pytest.raises(FormatError, match=rf"file: ends at byte {nbytes}, expected {NBYTES} bytes$"):
            read(sources, 0, MIB, 4 * MIB)


def refuse_to_read(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """One that opens them, and then refuses each direct read."""
    true_preadv = os.preadv

    def refuse(fd: int, buffers: Iterable[Any], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return true_preadv(fd, list(buffers), offset)

    monkeypatch.setattr(os, "preadv", refuse)


@pytest.mark.parametrize("code", [22, 95])  # EINVAL, EOPNOTSUPP
@pytest.mark.parametrize("refuse", [refuse_to_open, refuse_to_read])
@pytest.mark.parametrize("resident", [False, True])
def test_refused_direct_io_is_an_error_only_where_direct_was_asked_for(
    tmp_path: Path,
    written: Bytes,
    monkeypatch: pytest.MonkeyPatch,
    refuse: Callable[[pytest.MonkeyPatch, int], None],
    code: int,
    resident: bool,
) -> None:
    path = tmp_path / "file"
    if resident:
        warm(path, 0, MIB)
    refuse(monkeypatch, code)
    for access in (Access.AUTO, Access.BUFFERED):
        with files_of(path, access) as sources:
            for offset in (0, 2 * MIB):
                assert read(sources, 0, offset, 2 * MIB) == written[offset : offset + 2 * MIB].tobytes()
            if refuse is refuse_to_open or not resident:
                assert list(sources.pieces(0, 0, MIB)) == [(0, MIB, True)]
                assert sources.alignment == 1
    with (
        nothing_left_behind(),
        pytest.raises(OSError, match=r"refuses direct I/O; use backend 'buffered'.*file'$") as caught,
        files_of(path, Access.DIRECT) as sources,
    ):
        read(sources, 0, 0, MIB)
    assert caught.value.errno == 95


def test_any_other_refusal_to_open_is_an_error_of_each_access(
    tmp_path: Path, written: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_open(monkeypatch, 5)
    for access in (Access.AUTO, Access.DIRECT):
        with pytest.raises(OSError, match=r"^\[Errno 5\] .*file'$"), files_of(tmp_path / "file", access):
            pass
