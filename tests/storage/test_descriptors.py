"""Small files are written whole or not at all, through no link, and errors name what was asked for."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from relayout.publish import bucket
from relayout.storage.local import descriptors
from relayout.storage.local.descriptors import OpenFolder, write_file


def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Path:
    """A link to somebody's file under the name that the next temporary file will have."""
    (tmp_path / "precious").write_text("mine")
    monkeypatch.setattr(descriptors.os, "urandom", lambda nbytes: bytes(nbytes))
    partial = tmp_path / f".relayout-{'00' * 8}.partial"
    partial.symlink_to("precious") if name == "a link" else partial.hardlink_to(tmp_path / "precious")
    return partial


@pytest.mark.parametrize("kind", ["a link", "a hard link"])
def test_a_temporary_name_that_somebody_has_guessed_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    planted = plant(tmp_path, monkeypatch, kind)
    with pytest.raises(FileExistsError) as caught:
        write_file(tmp_path / "page.html", b"text")
    assert caught.value.filename == str(tmp_path / "page.html")
    assert planted.read_text() == (tmp_path / "precious").read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "folder", "fifo"])
def test_only_a_regular_file_is_replaced(tmp_path: Path, kind: str) -> None:
    (tmp_path / "precious").write_text("mine")
    there = tmp_path / "page.html"
    {"link": lambda: there.symlink_to("precious"), "folder": there.mkdir, "fifo": lambda: os.mkfifo(there)}[kind]()
    before = there.lstat()
    with pytest.raises(FileExistsError, match=r"exists and is not a regular file: '.*/page.html'"):
        write_file(there, b"text")
    assert there.lstat() == before
    assert (tmp_path / "precious").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("replace", [True, False])
def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: bool) -> None:
    path = tmp_path / "page.html"
    if replace:
        path.write_text("older")
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", lambda *args, **options: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(OSError, match="No space left") as caught:
            write_file(path, b"newer", replace=replace)
    assert caught.value.filename == str(path)
    assert [one.name for one in tmp_path.iterdir()] == (["page.html"] if replace else [])
    write_file(path, b"newer", replace=replace)
    assert path.read_bytes() == b"newer"
    with pytest.raises(FileExistsError):
        write_file(path, b"newest", replace=False)
    assert path.read_bytes() == b"newer"
    assert [one.name for one in tmp_path.iterdir()] == ["page.html"]


def test_an_error_names_the_file_that_was_typed(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_file(tmp_path / "missing" / "x.html", b"")
    assert caught.value.filename == str(tmp_path / "missing" / "x.html")


def test_an_error_of_the_last_step_names_nothing_else(tmp_path: Path) -> None:
    """A renaming has two names, and its error both; the new name is relative to a folder that the caller has open."""
    with OpenFolder(tmp_path) as folder, pytest.raises(FileNotFoundError) as caught:
        folder.write("missing/x.html", b"")
    assert str(caught.value) == f"[Errno 2] No such file or directory: '{tmp_path}/missing/x.html'"
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
from relayout.publish import bucket
from relayout.storage.local.descriptors import write_file

os.rename = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
bucket.take_lock = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "small":
    write_file(Path(sys.argv[1], "page.html"), b"text")
else:
    bucket._new_scratch(Path(sys.argv[1]))
"""
"""Is killed just before a file gets its name, or a scratch folder its lock."""


def killed(folder: Path, what: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(folder), what], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len([*folder.iterdir()]) > 0


def test_the_next_small_file_sweeps_what_a_killed_process_left_of_one_and_nothing_else(tmp_path: Path) -> None:
    killed(tmp_path, "small")
    [left] = tmp_path.iterdir()
    theirs = {".relayout-notes.partial", f".{'0' * 16}.partial", f".relayout-{'0' * 16}.partial.txt", "page.partial"}
    for name in theirs:
        (tmp_path / name).write_text("theirs")
    linked = tmp_path / f".relayout-{'1' * 16}.partial"
    linked.hardlink_to(tmp_path / "page.partial")
    link = tmp_path / f".relayout-{'2' * 16}.partial"
    link.symlink_to("page.partial")
    write_file(tmp_path / "page.html", b"text")
    assert not left.exists()
    assert {one.name for one in tmp_path.iterdir()} == {*theirs, linked.name, link.name, "page.html"}
    assert all((tmp_path / name).read_text() == "theirs" for name in theirs)


def test_a_file_that_another_process_is_writing_is_not_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_rename = os.rename

    def rename(*arguments: object, **options: object) -> None:
        monkeypatch.setattr(os, "rename", true_rename)
        write_file(tmp_path / "other.html", b"other")
        true_rename(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", rename)
    write_file(tmp_path / "page.html", b"text")
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == {"page.html": b"text", "other.html": b"other"}


def test_a_file_that_another_process_believes_to_be_left_over_is_written_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_flock, swept = descriptors.fcntl.flock, list[Path]()

    def flock(fd: int, operation: int) -> None:
        if not swept:
            swept.extend(tmp_path.iterdir())
            swept[0].unlink()
        true_flock(fd, operation)

    monkeypatch.setattr(descriptors.fcntl, "flock", flock)
    write_file(tmp_path / "page.html", b"text")
    assert swept
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == {"page.html": b"text"}


def test_scratch_of_a_process_that_was_killed_before_it_had_a_lock_is_swept(tmp_path: Path) -> None:
    killed(tmp_path, "scratch")
    theirs = tmp_path / "relayout-scratch-theirs"
    theirs.mkdir()
    (theirs / "file").write_text("theirs")
    with bucket.scratch_folder(tmp_path) as scratch:
        assert {one.name for one in tmp_path.iterdir()} == {theirs.name, scratch.parent.name}
        with bucket.scratch_folder(tmp_path) as other:
            assert scratch.exists()
        assert not other.exists()
    assert [one.name for one in tmp_path.iterdir()] == [theirs.name]


def test_scratch_that_is_swept_before_it_has_a_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_mkdtemp, made = bucket.tempfile.mkdtemp, list[str]()

    def mkdtemp(**options: object) -> str:
        made.append(true_mkdtemp(**options))  # type: ignore[call-overload]
        if len(made) == 1:
            shutil.rmtree(made[0])
        return made[-1]

    monkeypatch.setattr(bucket.tempfile, "mkdtemp", mkdtemp)
    with bucket.scratch_folder(tmp_path) as scratch:
        assert scratch.parent == Path(made[1])
