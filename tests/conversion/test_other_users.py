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
from support.interruptions import interrupted_before_the_end

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


def plant_folder(place: Path, victim: Path) -> None:
    (place / "output").mkdir(parents=True)
    (place / "P").mkdir()
    (place / "P" / "link").symlink_to(victim)
    (place / "work-1").write_text("what is this?")


def plant_older_folder(place: Path, victim: Path) -> None:
    relayout.convert(victim.parent / "model", place)


PARTIAL, LOCK, OLDER = ".out.relayout-partial", ".out.relayout-lock", ".out.relayout-old"
Plant = Callable[[Path, Path], object]
PLANTED: dict[str, tuple[str, Plant]] = {
    "a folder": (PARTIAL, plant_folder),
    "a link to a folder": (PARTIAL, lambda place, victim: place.symlink_to(victim)),
    "a file": (PARTIAL, lambda place, victim: place.write_text("what is this?")),
    "a lock": (LOCK, lambda place, victim: place.write_text("1\n")),
    "a link for a lock": (LOCK, lambda place, victim: place.symlink_to(victim / "precious")),
    "a fifo for a lock": (LOCK, lambda place, victim: os.mkfifo(place)),
    "an older folder": (OLDER, plant_older_folder),
}
"""The name beside the output, and what is planted there; the other path is that of a folder that must not change."""


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("command", [convert, restore])
@pytest.mark.parametrize("kind", PLANTED)
def test_what_somebody_else_has_put_beside_the_output_is_refused_and_left_alone(
    shared: Path, kind: str, command: Callable[..., None], force: bool
) -> None:
    relayout.convert(shared.parent / "model")
    name, plant = PLANTED[kind]
    planted = shared / name
    plant(planted, shared.parent / "victim")
    give_away(planted)
    before = facts(shared.parent)
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


def test_a_refused_command_does_not_bring_back_an_older_folder_of_somebody_else(shared: Path) -> None:
    # Else another user's weights would pass for what this one converted.
    plant_older_folder(shared / OLDER, shared.parent / "victim")
    give_away(shared / OLDER)
    (shared / "out").mkdir()
    before = facts(shared)
    with pytest.raises(PlanError, match="belongs to another user"):
        convert(shared)
    assert facts(shared) == before


def test_a_folder_of_another_user_in_the_place_of_the_staged_files_is_not_gone_on_with(shared: Path) -> None:
    """Its owner may have it open, and write to what is published."""
    with interrupted_before_the_end():
        convert(shared)
    [staged] = (shared / ".out.relayout-partial").glob("work-*/output")
    before = staged.stat().st_ino
    os.chown(staged, NOBODY, NOBODY)
    opened = os.open(staged, os.O_RDONLY)  # So that no other folder gets its inode.
    try:
        convert(shared)
        status = (shared / "out").stat()
    finally:
        os.close(opened)
    assert (status.st_uid, status.st_ino == before) == (os.geteuid(), False)
