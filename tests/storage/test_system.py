"""relayout.storage.system against a page cache that was emptied, and filled again by reading known pages."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from support.page_cache import Bytes, drive_nbytes, drop, opened, warm, write_cold

from relayout.storage import system as residency
from relayout.storage.system import resident_nbytes

PAGE = mmap.PAGESIZE
NUM_PAGES = 64
NBYTES = NUM_PAGES * PAGE + 100
"""Whole pages, and a part of one."""


@pytest.fixture(params=["cachestat", "mincore"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Which call tells."""
    name: str = request.param
    if name == "mincore":
        monkeypatch.setattr(residency, "_cachestat", lambda *_: None)
    else:
        path = tmp_path / "cachestat"
        path.write_bytes(b"x")
        with opened(path) as fd:
            if residency._cachestat(fd, 0, 1) is None:
                pytest.skip("this kernel has no cachestat(2)")
        monkeypatch.setattr(residency, "_mincore", None)  # Not to be called.
    return name


@dataclass(frozen=True)
class Stored:
    """A cold file."""

    path: Path
    fd: int
    written: Bytes

    def warm_pages(self, pages: Iterable[int]) -> npt.NDArray[np.bool_]:
        """Read these, and tell for each page of the file whether it is there now."""
        there = np.zeros(NUM_PAGES + 1, np.bool_)
        for page in pages:
            warm(self.path, page * PAGE, 1)
            there[page] = True
        return there


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    written = write_cold(tmp_path / "stored", NBYTES)
    with opened(tmp_path / "stored") as fd:
        yield Stored(tmp_path / "stored", fd, written)


def test_nothing_of_a_dropped_file_is_there_and_all_of_one_that_was_read(stored: Stored, way: str) -> None:
    assert resident_nbytes(stored.fd, 0, NBYTES) == 0
    assert stored.path.read_bytes() == stored.written.tobytes()
    assert resident_nbytes(stored.fd, 0, NBYTES) == NBYTES
    drop(stored.path)
    assert resident_nbytes(stored.fd, 0, NBYTES) == 0


def test_looking_reads_nothing(stored: Stored, way: str) -> None:
    resident_nbytes(stored.fd, 0, NBYTES)  # The first call may load code.
    before = drive_nbytes()
    for _ in range(3):
        assert resident_nbytes(stored.fd, 0, NBYTES) == 0
    assert drive_nbytes() == before


def test_all_that_is_not_there_comes_from_the_drive(stored: Stored, way: str) -> None:
    """The same by the kernel's count of what it had to read."""
    stored.warm_pages([*range(5, 25), 63])
    found = resident_nbytes(stored.fd, 0, NUM_PAGES * PAGE)
    assert found is not None
    before = drive_nbytes()
    warm(stored.path, 0, NUM_PAGES * PAGE)
    assert drive_nbytes() - before == NUM_PAGES * PAGE - found == 43 * PAGE


def test_the_last_page_counts_as_far_as_the_file_reaches(stored: Stored, way: str) -> None:
    assert resident_nbytes(stored.fd, NUM_PAGES * PAGE, PAGE) == 0
    warm(stored.path, NUM_PAGES * PAGE, 1)
    assert resident_nbytes(stored.fd, NUM_PAGES * PAGE, PAGE) == 100
    assert resident_nbytes(stored.fd, NUM_PAGES * PAGE + 90, PAGE) == 10
    assert resident_nbytes(stored.fd, 0, 10 * NBYTES) == PAGE  # Whole pages, as long as not all is there.


@pytest.mark.parametrize(
    ("offset", "nbytes", "num_pages"),
    [
        (2 * PAGE - 1, 1, 0),
        (2 * PAGE, 1, 1),
        (3 * PAGE - 1, 1, 1),
        (3 * PAGE - 1, 2, 1),  # The second byte is not there.
        (1, PAGE, 0),
        (PAGE + 7, PAGE, 1),
        (PAGE + 7, 3 * PAGE, 1),
        (7, 8 * PAGE, 3),
        (5 * PAGE + 100, 2 * PAGE - 200, 2),
        (4 * PAGE + 1, PAGE, 1),
        (7 * PAGE - 1, PAGE, 1),
        (0, 10 * NBYTES, 3),  # Whole pages, as long as not all is there.
    ],
)
def test_pages_that_a_stretch_touches_count_whole_but_never_for_more_than_the_stretch(
    stored: Stored, way: str, offset: int, nbytes: int, num_pages: int
) -> None:
    there = stored.warm_pages([2, 5, 6])
    assert there[offset // PAGE : (offset + nbytes - 1) // PAGE + 1].sum() == num_pages
    assert resident_nbytes(stored.fd, offset, nbytes) == min(nbytes, num_pages * PAGE)


@pytest.mark.parametrize(("offset", "nbytes"), [(NBYTES, 1), (NBYTES + 5, 10 * PAGE), (10 * NBYTES, 1), (0, 0), (7, 0)])
def test_behind_the_end_and_in_nothing_there_is_nothing(stored: Stored, way: str, offset: int, nbytes: int) -> None:
    stored.path.read_bytes()
    assert resident_nbytes(stored.fd, offset, nbytes) == 0


def test_it_is_not_known_where_the_system_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 5000)
    with opened(path) as fd:
        monkeypatch.setattr(residency, "_cachestat", lambda *_: None)
        monkeypatch.setattr(residency, "_mincore", lambda *_: None)
        assert resident_nbytes(fd, 0, 5000) is None
        assert resident_nbytes(fd, 5000, 1) == 0
        monkeypatch.setattr(sys, "platform", "darwin")
        assert resident_nbytes(fd, 0, 5000) is None


def test_mapping_to_look_leaves_no_mapping(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "_cachestat", lambda *_: None)
    assert resident_nbytes(stored.fd, PAGE + 1, 2 * PAGE) == 0
    assert str(stored.path) not in Path("/proc/self/maps").read_text()


AS_ANOTHER = """
import ctypes, mmap, os, sys
from relayout.storage import system as residency
user = int(sys.argv[1])
fd = os.open(sys.argv[2], os.O_RDONLY)
nbytes = os.fstat(fd).st_size
if user:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
page = (ctypes.c_ubyte * 8)()
address = residency.map_file(fd, 0, 8 * mmap.PAGESIZE, flags=mmap.MAP_SHARED)
assert residency.libc().mincore(ctypes.c_void_p(address), ctypes.c_size_t(8 * mmap.PAGESIZE), page) == 0
print(sum(one & 1 for one in page))
print(residency.resident_nbytes(fd, 0, nbytes))
residency._cachestat = lambda *_: None
print(residency.resident_nbytes(fd, 0, nbytes))
"""
"""Prints what mincore says of the first 8 pages, what we say, and what we say without cachestat."""


def told_to(user: int, path: Path) -> tuple[int, str, str]:
    """What `AS_ANOTHER` prints to a user, or to a superuser who has none of the rights of one."""
    command = [sys.executable, "-c", AS_ANOTHER, str(user), str(path)]
    if user == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("setpriv is missing")
        command = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all", *command]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    mincore, either, alone = done.stdout.split()
    return int(mincore), either, alone


@pytest.mark.skipif(
    os.getuid() != 0 or not sys.platform.startswith("linux"), reason="becoming another user takes a superuser of Linux"
)
@pytest.mark.parametrize(
    ("owner", "group", "mode", "user", "is_believed"),
    [
        (0, 0, 0o644, 65534, False),
        (0, 65534, 0o640, 65534, False),
        (0, 65534, 0o606, 65534, False),  # The group's bits count for its members, not everybody's.
        (1000, 1000, 0o644, 0, False),  # In a container without capabilities, root is a user as any other.
        (65534, 0, 0o644, 65534, True),
        (65534, 0, 0o444, 65534, True),
        (0, 65534, 0o664, 65534, True),
        (0, 0, 0o646, 65534, True),
        (0, 0, 0o644, 0, True),
    ],
)
def test_mincore_is_believed_only_of_files_that_one_owns_or_may_write(
    stored: Stored, owner: int, group: int, mode: int, user: int, is_believed: bool
) -> None:
    stored.path.chmod(mode)
    os.chown(stored.path, owner, group)
    if is_believed:
        stored.warm_pages([1, 2, 20])
        assert told_to(user, stored.path) == (2, str(3 * PAGE), str(3 * PAGE))
        return
    mincore, either, alone = told_to(user, stored.path)
    if mincore != 8:
        pytest.skip(f"this kernel's mincore claims only {mincore} of 8 pages of a cold file of others")
    assert either in ("None", "0")  # cachestat may tell, or not be permitted.
    assert alone == "None"


def test_blocks_are_shared_where_a_file_system_can_and_otherwise_nothing_changes(tmp_path: Path) -> None:
    first, second = np.arange(8 * PAGE, dtype=np.uint32).tobytes(), bytes(32 * PAGE)
    (tmp_path / "first").write_bytes(first)
    (tmp_path / "second").write_bytes(second)
    with open(tmp_path / "first", "rb") as source, open(tmp_path / "second", "r+b") as target:
        done = residency.clone_range(source.fileno(), 4 * PAGE, target.fileno(), 8 * PAGE, 16 * PAGE)
        assert not residency.clone_range(source.fileno(), 4 * PAGE + 1, target.fileno(), 8 * PAGE, PAGE)
        assert not residency.clone_range(source.fileno(), 0, source.fileno(), 0, PAGE)  # Not open for writing.
    cloned = second[: 8 * PAGE] + first[4 * PAGE : 20 * PAGE] + second[24 * PAGE :]
    assert (tmp_path / "second").read_bytes() == (cloned if done else second)
    assert (tmp_path / "first").read_bytes() == first
