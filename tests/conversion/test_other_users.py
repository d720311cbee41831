"""In a folder where others may write, such as /tmp, nothing of theirs is entered, changed or taken over."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import relayout
from relayout.errors import PlanError

NOBODY = 65534
W = np.arange(1, 4097, dtype=np.uint16)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only a superuser can give files away")

Facts = dict[str, tuple[int, int, int, bytes | str | None]]


def facts(folder: Path) -> Facts:
    """Owner, mode, inode and content of everything below a folder; links are not followed."""
    found: Facts = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        kind = stat.S_IFMT(status.st_mode)
        content = path.read_bytes() if kind == stat.S_IFREG else str(path.readlink()) if kind == stat.S_IFLNK else None
        found[path.relative_to(folder).as_posix()] = (status.st_uid, status.st_mode, status.st_ino, content)
    return found


def give_away(*paths: Path) -> None:
    for path in paths:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        if path.is_dir() and not path.is_symlink():
            give_away(*path.iterdir())


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder like /tmp, beside a source and a folder that must not change."""
    source = tmp_path / "model"
    source.mkdir()
    save_file({"w": W}, source / "model.safetensors")
    (tmp_path / "victim").mkdir(mode=0o755)
    (tmp_path / "victim" / "precious").write_text("mine")
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    return place


def convert(shared: Path, *, force: bool = False) -> None:
    relayout.convert(shared.parent / "model", shared / "out", force=force)


def restore(shared: Path, *, force: bool = False) -> None:
    relayout.restore(shared.parent / "model-tp1", shared / "out", force=force)


def planted_folder(shared: Path) -> None:
    place = shared / ".out.relayout-partial"
    (place / "output").mkdir(parents=True)
    (place / "P").mkdir()
    (place / "P" / "link").symlink_to(shared.parent / "victim")
    (place / "relayout.journal").write_text("what is this?")
    give_away(place)


def planted_link_to_a_folder(shared: Path) -> None:
    place = shared / ".out.relayout-partial"
    place.symlink_to(shared.parent / "victim")
    give_away(place)


def planted_file(shared: Path) -> None:
    (shared / ".out.relayout-partial").write_text("what is this?")
    give_away(shared / ".out.relayout-partial")


def planted_lock(shared: Path) -> None:
    (shared / ".out.relayout-lock").write_text("1\n")
    give_away(shared / ".out.relayout-lock")


def planted_link_for_a_lock(shared: Path) -> None:
    (shared / ".out.relayout-lock").symlink_to(shared.parent / "victim" / "precious")
    give_away(shared / ".out.relayout-lock")


def planted_fifo_for_a_lock(shared: Path) -> None:
    os.mkfifo(shared / ".out.relayout-lock")
    give_away(shared / ".out.relayout-lock")


def planted_older_folder(shared: Path) -> None:
    relayout.convert(shared.parent / "model", shared / ".out.relayout-old")
    give_away(shared / ".out.relayout-old")


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("command", [convert, restore])
@pytest.mark.parametrize(
    "plant",
    [
        planted_folder,
        planted_link_to_a_folder,
        planted_file,
        planted_lock,
        planted_link_for_a_lock,
        planted_fifo_for_a_lock,
        planted_older_folder,
    ],
)
def test_what_somebody_else_has_put_beside_the_output_is_refused_and_left_alone(
    shared: Path, plant: Callable[[Path], None], command: Callable[..., None], force: bool
) -> None:
    relayout.convert(shared.parent / "model")
    plant(shared)
    before = facts(shared.parent)
    [planted] = [path for path in shared.iterdir() if path.name.startswith(".")]
    says = rf"{re.escape(str(planted))}: belongs to another user \(id {NOBODY}, not 0\)"
    with pytest.raises(PlanError, match=says):
        command(shared, force=force)
    assert facts(shared.parent) == before
    if planted.is_dir() and not planted.is_symlink():
        shutil.rmtree(planted)
    else:
        planted.unlink()
    command(shared)
    assert {path.stat().st_uid for path in (shared / "out").rglob("*")} == {0}


@pytest.mark.parametrize("name", ["model-rank-0-part-0.safetensors", "relayout.journal"])
@pytest.mark.parametrize("how", ["hard link", "link", "file of another user"])
def test_through_what_was_planted_in_an_own_folder_nothing_is_read_or_written(
    shared: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    # An own folder that was open to others, before it is closed to them.
    def stop(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("relayout.conversion.run.write_sidecar", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(shared)
    place = shared / ".out.relayout-partial"
    path = place / name if name == "relayout.journal" else place / "output" / name
    aside = shared.parent / "victim" / name
    path.rename(aside)
    if how == "hard link":
        os.link(aside, path)
    elif how == "link":
        path.symlink_to(aside)
    else:
        shutil.copy(aside, path)
        os.chown(path, NOBODY, NOBODY)
    before = aside.read_bytes()
    convert(shared)
    assert aside.read_bytes() == before
    assert relayout.verify(shared / "out", source=shared.parent / "model").ok
    assert {path.lstat().st_uid for path in (shared / "out").rglob("*")} == {0}
    assert {path.lstat().st_nlink for path in (shared / "out").iterdir()} == {1}
    assert [path.name for path in shared.iterdir()] == ["out"]


def test_a_refused_command_does_not_bring_back_an_older_folder_of_somebody_else(shared: Path) -> None:
    # Else another user's weights would pass for what this one converted.
    planted_older_folder(shared)
    (shared / "out").mkdir()
    before = facts(shared)
    with pytest.raises(PlanError, match="belongs to another user"):
        convert(shared)
    assert facts(shared) == before
