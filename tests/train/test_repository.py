"""The index of a root: whoever moves it loses nothing of what others write, and overwrites nothing of a person."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.steps import CONFIG, weights_of

import relayout
from relayout.errors import PlanError
from relayout.format.steps_index import RetiredName, StepsIndex
from relayout.publish import folder as publish_folder
from relayout.publish.folder import FolderPublisher
from relayout.storage.local import descriptors
from relayout.train.repository import StepRepository


def retire(root: Path, step: int) -> StepsIndex:
    """Add a name to an index."""
    one = RetiredName(f"delta-{step:09d}-aaaaaaaa", 0)
    return StepRepository.at(root).move(lambda index: replace(index, retired=(*index.retired, one)))


def steps_in(root: Path) -> list[int]:
    return [int(one.name.split("-")[1]) for one in StepRepository.at(root).read().retired]


@pytest.mark.parametrize("name", ["lock", "new"])
def test_a_file_of_a_person_that_also_has_a_name_of_the_root_is_unchanged(tmp_path: Path, name: str) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("what the person has elsewhere\n" * 20)
    root = tmp_path / "root"
    root.mkdir()
    retire(root, 1)
    place = root / f".steps.json.relayout-{name}"
    place.unlink(missing_ok=True)
    place.hardlink_to(theirs)
    retire(root, 2)
    assert steps_in(root) == [1, 2]
    assert theirs.read_text() == "what the person has elsewhere\n" * 20
    assert not (root / "steps.json").samefile(theirs)


@pytest.mark.parametrize("kind", ["a folder", "a link", "a FIFO"])
@pytest.mark.parametrize("name", ["lock", "new"])
def test_what_is_no_file_in_the_place_of_one_of_the_root_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    place = tmp_path / f".steps.json.relayout-{name}"
    {"a folder": place.mkdir, "a link": lambda: place.symlink_to(theirs), "a FIFO": lambda: os.mkfifo(place)}[kind]()
    with pytest.raises(PlanError, match=f"relayout-{name}: is not a regular file.*; remove it"):
        retire(tmp_path, 1)
    assert theirs.read_text() == "theirs"
    assert not (tmp_path / "steps.json").exists()


def test_a_root_whose_files_have_other_names_as_after_cp_al_goes_on(tmp_path: Path) -> None:
    """And the copy has what it had."""
    root, copy = tmp_path / "root", tmp_path / "copy"
    root.mkdir()
    copy.mkdir()
    retire(root, 1)
    for file in root.iterdir():
        (copy / file.name).hardlink_to(file)
    before = {file.name: file.read_bytes() for file in copy.iterdir()}
    retire(root, 2)
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == before
    assert (steps_in(root), steps_in(copy)) == ([1, 2], [1])


def test_a_move_waits_for_another_though_its_lock_file_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else both would replace the same index, and one of two moves that have returned is lost."""
    monkeypatch.setattr(descriptors, "LIMIT_SECONDS", 0.2)
    monkeypatch.setattr(descriptors, "_LOOK_SECONDS", 0.05)
    true_rename, errors = publish_folder.rename, list[BaseException]()
    retire(tmp_path, 1)

    def another() -> None:
        try:
            retire(tmp_path, 2)
        except BaseException as error:
            errors.append(error)

    def rename(*arguments: object) -> None:
        monkeypatch.setattr(publish_folder, "rename", true_rename)
        (tmp_path / ".steps.json.relayout-lock").unlink()
        thread = threading.Thread(target=another)
        thread.start()
        thread.join()
        true_rename(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(publish_folder, "rename", rename)
    retire(tmp_path, 3)
    assert [type(error) for error in errors] == [TimeoutError]
    assert steps_in(tmp_path) == [1, 3]
    retire(tmp_path, 2)
    assert steps_in(tmp_path) == [1, 3, 2]


def retired_steps(root: Path, count: int) -> list[str]:
    """Publish steps of which the first ones are retired; return the names that are due."""
    publisher = relayout.Publisher(root, config=CONFIG, keep=1, keep_seconds=0, full_every=1)
    for step in range(1, count + 1):
        publisher.publish(weights_of(step), step)
    return [one.name for one in StepRepository.at(root).read().retired]


@pytest.mark.parametrize("error", [PermissionError("of another user"), KeyboardInterrupt()])
def test_what_cannot_be_deleted_keeps_nothing_else_and_what_is_gone_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    due = retired_steps(tmp_path / "root", 5)
    true_remove, bad = FolderPublisher.remove, due[2]

    def remove(self: FolderPublisher, older: Any) -> None:
        if self.output.name == bad:
            raise error
        true_remove(self, older)

    monkeypatch.setattr(FolderPublisher, "remove", remove)
    with pytest.raises(type(error)):
        StepRepository.at(tmp_path / "root").prune(0)
    left = due[2:] if isinstance(error, KeyboardInterrupt) else [bad]
    assert [one.name for one in StepRepository.at(tmp_path / "root").read().retired] == left
    there = {one.name for one in (tmp_path / "root").iterdir()}
    assert there.intersection(due) == set(left)
    monkeypatch.undo()
    assert StepRepository.at(tmp_path / "root").prune(0) == left
