"""Small files are written whole or not at all, through no link, and errors name what was asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relayout.storage.local import descriptors
from relayout.storage.local.descriptors import OpenFolder, write_file


def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Path:
    """A link to somebody's file under the name that the next temporary file will have."""
    (tmp_path / "precious").write_text("mine")
    monkeypatch.setattr(descriptors.os, "urandom", lambda nbytes: bytes(nbytes))
    partial = tmp_path / f".{'00' * 8}.partial"
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
