"""Steps that are published and followed, against numpy's slices of what was published."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from support.mounts import mounted_tmpfs
from support.patience import in_time
from support.steps import CONFIG, assert_is_step, delete, files_of, outputs_of, put, weights_of

import relayout
from relayout.publish.bucket import BucketPublisher
from relayout.publish.folder import FolderPublisher
from relayout.train import save as saving


def test_followers_have_each_step_as_it_was_published(root: str) -> None:
    publisher = relayout.Publisher(root, config=CONFIG, tp=2, full_every=4)
    follower = relayout.Follower(root, 1)
    kinds = []
    for step in range(1, 8):
        done = publisher.publish(weights_of(step), step)
        kinds.append(("full" if done.full else "") + ("delta" if done.delta else ""))
        held = {name: tensor.data_ptr() for name, tensor in follower.tensors.items()}
        assert follower.update() == step
        assert_is_step(follower.tensors, weights_of(step), 1)
        if held:
            assert {name: tensor.data_ptr() for name, tensor in follower.tensors.items()} == held
    assert kinds == ["full", "delta", "delta", "delta", "fulldelta", "delta", "delta"]
    assert follower.update() is None


def test_what_is_not_kept_is_deleted_and_nothing_else(root: str) -> None:
    publisher = relayout.Publisher(root, config=CONFIG, tp=2, full_every=2, keep=2, keep_seconds=0)
    for step in range(1, 9):
        publisher.publish(weights_of(step), step)
    steps = relayout.Steps(root)
    kept = [entry.step for entry in steps.entries()]
    assert kept[-2:] == [7, 8]
    assert len(kept) <= 4
    before = outputs_of(root)
    strangers = {"full-000000001-00000000/relayout.json": b"{}", "notes.txt": b"mine"}
    for name, content in strangers.items():
        put(root, name, content)
    gone = steps.prune(grace_seconds=0)
    assert gone
    names = {one.name for entry in steps.entries() for one in (entry.full, entry.delta) if one is not None}
    assert outputs_of(root) == {*names, "steps.json", "notes.txt", "full-000000001-00000000"}
    assert before - outputs_of(root) == set(gone)
    assert {name: content for name, content in files_of(root).items() if name in strangers} == strangers
    late = relayout.Follower(root, 0)
    late.update()
    assert_is_step(late.tensors, weights_of(8), 0)


def test_a_retired_folder_with_a_strangers_file_stays(root: str) -> None:
    publisher = relayout.Publisher(root, config=CONFIG, tp=2, full_every=1, keep=1, keep_seconds=0)
    first = publisher.publish(weights_of(1), 1).full
    assert first is not None
    stranger = f"{first.name}/mine.txt"
    put(root, stranger, b"mine")
    publisher.publish(weights_of(2), 2)
    with pytest.raises(relayout.PlanError, match=r"holds files that relayout did not write.*mine\.txt"):
        relayout.Steps(root).prune(grace_seconds=0)
    assert files_of(root)[stranger] == b"mine"
    assert [one["name"] for one in json.loads(files_of(root)["steps.json"])["retired"]][:1] == [first.name]
    delete(root, stranger)
    assert first.name in relayout.Steps(root).prune(grace_seconds=0)
    assert first.name not in outputs_of(root)


def test_a_second_publisher_takes_over_and_the_first_is_told(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = relayout.Publisher(root, config=CONFIG, tp=2)
    second = relayout.Publisher(root, config=CONFIG, tp=2)
    first.publish(weights_of(1), 1)
    moved = relayout.Publisher._move

    def overtaken(self: relayout.Publisher, done: Any) -> Any:
        monkeypatch.undo()
        as_another_process(lambda: second.publish(weights_of(2), 2))
        return moved(self, done)

    monkeypatch.setattr(relayout.Publisher, "_move", overtaken)
    with pytest.raises(FileExistsError, match="another publisher has taken over"):
        first.publish(weights_of(3), 3)
    assert [entry.step for entry in relayout.Steps(root).entries()] == [1, 2]
    again = first.publish(weights_of(4), 4)
    assert again.full is not None
    late = relayout.Follower(root, 0)
    assert late.update() == 4
    assert_is_step(late.tensors, weights_of(4), 0)


def as_another_process(publish: Callable[[], object]) -> None:
    """Publish now, as another process may while this one is in the middle of a step."""
    with patch.object(saving, "_line_of_process", lambda _: saving._Line()):
        in_time(publish)


@pytest.mark.parametrize("how", ["published", "was killed"])
def test_one_whose_root_another_has_begun_to_use_is_told_once(
    root: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (relayout.Publisher(root, config=CONFIG, tp=2) for _ in range(2))
    first.publish(weights_of(1), 1)
    first.publish(weights_of(2), 2)
    if how == "published":
        second.publish(weights_of(3), 3)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(relayout.Publisher, "_move", interrupt)
            with pytest.raises(KeyboardInterrupt):
                second.publish(weights_of(3), 3)
    before = relayout.Steps(root).entries()
    with pytest.raises(FileExistsError, match="another publisher has taken over"):
        first.publish(weights_of(4), 4)
    assert relayout.Steps(root).entries() == before
    assert first.publish(weights_of(5), 5).full is not None
    if how == "published":
        with pytest.raises(FileExistsError, match="another publisher has taken over"):
            second.publish(weights_of(6), 6)
    follower = relayout.Follower(root, 0)
    assert follower.update() == 5
    assert_is_step(follower.tensors, weights_of(5), 0)


def test_one_that_fails_at_its_first_step_on_anothers_root_has_not_lost_it(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    relayout.Publisher(root, config=CONFIG, tp=2).publish(weights_of(1), 1)
    publisher = relayout.Publisher(root, config=CONFIG, tp=2)
    with monkeypatch.context() as patch:
        patch.setattr(relayout.Publisher, "_move", interrupt)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(weights_of(2), 2)
    assert publisher.publish(weights_of(2), 2).step == 2
    assert [entry.step for entry in relayout.Steps(root).entries()] == [1, 2]


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_file_or_a_checkpoint_is_no_root_and_stays_as_it_is(tmp_path: Path) -> None:
    relayout.save(weights_of(1), tmp_path / "converted", config=CONFIG, tp=2)
    relayout.save(weights_of(1), tmp_path / "without", tp=1)  # Without a config.json.
    (tmp_path / "plain").mkdir()
    save_file(weights_of(1), tmp_path / "plain" / "model.safetensors")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    checkpoints = ("converted", "without", "plain")
    before = [files_of(str(tmp_path / name)) for name in checkpoints]
    others = [("file", "is not a folder"), ("link", "is not a folder")]
    for name, why in [*((name, "is a checkpoint") for name in checkpoints), *others]:
        with pytest.raises(relayout.PlanError, match=f"{name}: {why}"):
            relayout.Publisher(tmp_path / name, config=CONFIG, tp=2).publish(weights_of(2), 2)
    assert [files_of(str(tmp_path / name)) for name in checkpoints] == before
    assert {path.name for path in tmp_path.iterdir()} == {*checkpoints, "file", "link"}


def test_a_root_whose_folder_somebody_has_deleted_is_made_again(tmp_path: Path) -> None:
    publisher = relayout.Publisher(tmp_path / "root", config=CONFIG, tp=2)
    publisher.publish(weights_of(1), 1)
    shutil.rmtree(tmp_path / "root")
    publisher.publish(weights_of(2), 2)
    publisher.publish(weights_of(3), 3)
    follower = relayout.Follower(tmp_path / "root", 0)
    assert follower.update() == 3


def test_what_one_writes_that_was_overtaken_and_stood_still_beyond_the_grace_is_deleted_by_the_next(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (relayout.Publisher(root, config=CONFIG, tp=2) for _ in range(2))
    first.publish(weights_of(1), 1)
    moved = relayout.Publisher._move
    written = set[str]()

    def stands_still(self: relayout.Publisher, done: Any) -> Any:
        monkeypatch.undo()
        as_another_process(lambda: second.publish(weights_of(2), 2))
        before = files_of(root)
        relayout.Steps(root).prune(grace_seconds=0)
        for name, content in before.items():  # As if it had been written only now.
            if name.partition("/")[0] in done.names.values() and content:  # No folders.
                put(root, name, content)
        written.update(done.names.values())
        return moved(self, done)

    monkeypatch.setattr(relayout.Publisher, "_move", stands_still)
    with pytest.raises(FileExistsError, match="another publisher has taken over"):
        first.publish(weights_of(3), 3)
    put(root, "delta-000000003-00000000/relayout.json", b"mine")
    assert written <= outputs_of(root)
    assert set(relayout.Steps(root).prune(grace_seconds=0)) == written
    named = {one.name for entry in relayout.Steps(root).entries() for one in (entry.full, entry.delta) if one}
    assert outputs_of(root) == {*named, "steps.json", "delta-000000003-00000000"}


def test_a_folder_of_which_a_file_was_changed_before_it_is_published_is_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relayout.train.comparing import StepOutput

    put_all, place = StepOutput.put, tmp_path / "steps"

    def put_after(self: Any, name: str, *rest: Any) -> None:
        if name == "relayout.json":
            file = next(path for path in place.rglob("*rank-1*.safetensors"))
            with file.open("r+b") as stream:
                stream.seek(16)
                stream.write(b"mine")
        put_all(self, name, *rest)

    monkeypatch.setattr(StepOutput, "put", put_after)
    publisher = relayout.Publisher(place, config=CONFIG, tp=2)
    with pytest.raises(relayout.FormatError, match=r"rank-1-part-0\.safetensors: was written to, or deleted, before"):
        publisher.publish(weights_of(1), 1)
    assert relayout.Steps(place).newest() is None
    monkeypatch.undo()
    assert publisher.publish(weights_of(1), 1).full is not None


def test_a_step_that_failed_leaves_the_steps_from_before_and_the_next_is_whole(root: str) -> None:
    fails = False

    def stop(done: int, total: int) -> None:
        if fails:
            raise OSError("the drive is gone")

    publisher = relayout.Publisher(root, config=CONFIG, tp=2, progress=stop)
    kinds = []
    for step, fails in enumerate([False, False, True, True, False, False], 1):
        if fails:
            with pytest.raises(OSError, match="the drive is gone"):
                publisher.publish(weights_of(step), step)
            continue
        done = publisher.publish(weights_of(step), step)
        kinds.append("delta" if done.full is None else "full")
        late = relayout.Follower(root, 1)
        assert late.update() == step
        assert_is_step(late.tensors, weights_of(step), 1)
    assert kinds == ["full", "delta", "full", "delta"]


def test_masters_are_cast_while_they_are_copied(root: str) -> None:
    masters = {name: tensor.nan_to_num().float() for name, tensor in weights_of(1).items()}
    publisher = relayout.Publisher(root, config=CONFIG, tp=2, dtype=torch.bfloat16)
    publisher.publish(masters, 1)
    follower = relayout.Follower(root, 0)
    follower.update()
    assert_is_step(follower.tensors, {name: tensor.bfloat16() for name, tensor in masters.items()}, 0)


def test_fp4_is_published_and_followed(tmp_path: Path) -> None:
    packed = torch.arange(64 * 32, dtype=torch.uint8).reshape(64, 32)
    publisher = relayout.Publisher(tmp_path / "steps", config={})
    follower = relayout.Follower(tmp_path / "steps", 0)
    for step in range(3):
        packed[step, 3] ^= 0x1F
        publisher.publish({"x": packed.view(torch.float4_e2m1fn_x2), "y": torch.arange(9.0) + step}, step)
        follower.update()
        assert follower.tensors["x"].dtype == torch.float4_e2m1fn_x2
        assert torch.equal(follower.tensors["x"].view(torch.uint8), packed)


@pytest.mark.parametrize("step", [-1, 2**53])
def test_a_number_that_no_step_has_is_refused_and_nothing_is_written(tmp_path: Path, step: int) -> None:
    publisher = relayout.Publisher(tmp_path / "steps", config=CONFIG, tp=2)
    with pytest.raises(relayout.PlanError, match=f"step: {step}, expected 0 to 9007199254740991"):
        publisher.publish(weights_of(1), step)
    assert not (tmp_path / "steps").exists()
    for number in (2**53 - 1, 0):
        assert publisher.publish(weights_of(1), number).step == number


@pytest.mark.parametrize("option", ["full_every", "keep"])
def test_no_step_at_all_is_no_choice(tmp_path: Path, option: str) -> None:
    with pytest.raises(relayout.PlanError, match=f"{option}: 0, expected 1 or more"):
        relayout.Publisher(tmp_path / "steps", **{option: 0})  # type: ignore[arg-type]


def test_an_index_that_was_written_and_of_which_the_answer_was_lost_is_not_written_twice(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_lost = 0

    def losing(replace: Callable[..., None], *arguments: Any) -> None:
        nonlocal num_lost
        replace(*arguments)  # Which refuses an index that is not what the caller has read.
        num_lost += 1
        raise FileExistsError

    publisher = relayout.Publisher(root, config=CONFIG, tp=2)

    for one in (FolderPublisher, BucketPublisher):
        monkeypatch.setattr(one, "replace", lambda *given, replace=one.replace: losing(replace, *given))
    for step in (1, 2, 3):
        publisher.publish(weights_of(step), step)
    assert num_lost == 6
    assert [entry.step for entry in relayout.Steps(root).entries()] == [1, 2, 3]
    late = relayout.Follower(root, 0)
    late.update()
    assert_is_step(late.tensors, weights_of(3), 0)


def test_a_link_in_place_of_the_index_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "steps/steps.json").symlink_to(tmp_path / "mine")
    with pytest.raises(relayout.RelayoutError):
        relayout.Publisher(tmp_path / "steps", config=CONFIG, tp=2).publish(weights_of(1), 1)
    assert (tmp_path / "mine").read_text() == "mine"


def test_what_may_be_deleted_makes_room_for_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with mounted_tmpfs(tmp_path / "drive", "2m") as drive:
        publisher = relayout.Publisher(drive / "steps", config=CONFIG, tp=2, full_every=1, keep=1, keep_seconds=0)
        published = partial(publisher.publish, weights_of(1))
        for _ in range(2):
            with pytest.raises((relayout.PlanError, OSError), match=r"B too few|No space left"):
                list(map(published, range(1, 99)))
        now = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + 3601)
        assert publisher.publish(weights_of(2), 101).step == 101
        follower = relayout.Follower(drive / "steps", 0)
        follower.update()
        assert_is_step(follower.tensors, weights_of(2), 0)
