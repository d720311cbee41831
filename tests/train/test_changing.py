"""Steps that the processes of a training publish together: of each rank, numpy's slices, or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import prestarted, s3_server
from support.group_worker import NUM_MEMBERS
from support.profile import sample
from support.saving_worker import model_of
from support.steps import CONFIG, assert_is_step, outputs_of, weights_of
from support.steps_worker import PLACED_STEPS, changed, placed_weights

import relayout

pytestmark = pytest.mark.xdist_group("group")

FAILING = {
    "progress": "the drive is on fire",
    "copy": "the device is on fire",
    "compare": "the device is on fire",
    "dtype": "expected",
}
"""The cases that fail all members, and what each of them says."""


def published(folder: Path, script: str, *words: object, num_members: int = NUM_MEMBERS) -> list[dict[str, Any]]:
    """The errors that each process saw."""
    variables = {**prestarted.ONE_THREAD, **s3_server.environment(s3_server.shared())}
    given: dict[str, Any] = {"imports": prestarted.GROUP, "env": variables}
    done = prestarted.run(folder, *words, script=f"from support.steps_worker import {script}; {script}()", **given)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"member-{number}.json").read_text()) for number in range(num_members)]


@pytest.mark.parametrize(("num_members", "tp"), sample([(2, 2), (2, 4), (4, 2), (4, 4)], [(2, 4), (4, 2)]))
def test_each_step_is_whole_and_what_fails_one_fails_all(tmp_path: Path, root: str, num_members: int, tp: int) -> None:
    seen = published(tmp_path, "main", root, num_members, tp, num_members=num_members)
    for member, cases in enumerate(seen):
        for case, error in cases.items():
            if case == "alone":
                assert (error is not None) == (member == num_members - 1)
            elif case in FAILING:
                assert FAILING[case] in error[1], (case, error)
            else:
                assert error is None, (case, error)
    entries = relayout.Steps(root).entries()
    kinds = {entry.step: [kind for kind in ("full", "delta") if getattr(entry, kind)] for entry in entries}
    assert kinds == {
        **{1: ["full"], 2: ["delta"], 3: ["delta"], 5: ["full"], 6: ["delta"]},
        **{8: ["full"], 11: ["full"], 12: ["delta"], 13: ["full"], 14: ["delta"]},
    }
    for rank in range(tp):
        for step in kinds:
            follower = relayout.Follower(root, rank)
            assert follower.update(step) == step
            assert_is_step(follower.tensors, weights_of(step), rank, tp)
    relayout.Steps(root).prune(grace_seconds=0)
    named = {one.name for entry in entries for one in (entry.full, entry.delta) if one is not None}
    assert outputs_of(root) == {*named, "steps.json"}


@pytest.mark.parametrize("tp", sample([1, 2, 4, 8], [2, 8]))
def test_whatever_members_hold_deltas_lead_to_what_a_save_writes_byte_for_byte(tmp_path: Path, tp: int) -> None:
    place = tmp_path / "steps"
    for cases in published(tmp_path, "of_placements", place, tp):
        assert set(cases.values()) == {None}, cases
    steps = relayout.Steps(place)
    entries = steps.entries()
    assert [entry.full is not None for entry in entries] == [True, False, False, False, True]
    first = entries[0].full
    assert first is not None
    deltas = []
    for entry, step in zip(entries, PLACED_STEPS, strict=True):
        deltas += [] if entry.delta is None else [steps.path(entry.delta.name)]
        if deltas:
            relayout.apply_deltas(steps.path(first.name), deltas, tmp_path / f"applied-{step}")
        made = [tmp_path / f"applied-{step}"] if deltas else []
        made += [] if entry.full is None else [Path(steps.path(entry.full.name))]
        saved = {path.name: path.read_bytes() for path in (tmp_path / f"saved-{step}").iterdir()}
        for folder in made:
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == saved
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(placed_weights(5), plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(CONFIG))
    for rank in range(tp):
        found, expected = (relayout.load(tmp_path / "applied-5", rank), relayout.load(plain, rank, tp=tp))
        assert found.keys() == expected.keys()
        assert all(found[name].view(torch.int16).equal(one.view(torch.int16)) for name, one in expected.items())


def test_a_model_with_merged_experts_is_published_by_the_names_of_its_checkpoint(tmp_path: Path) -> None:
    place = tmp_path / "steps"
    for member, cases in enumerate(published(tmp_path, "of_models", place)):
        assert cases == {"step 1": None, "step 2": None} | ({"pair": None} if member < 2 else {})
    first, second = relayout.Steps(place).entries()
    assert first.full is not None
    assert second.full is None
    for step in (1, 2):
        model = model_of("qwen3_moe")
        changed(model, step)
        model.save_pretrained(tmp_path / f"plain-{step}")
        for rank in (0, 1):
            follower = relayout.Follower(place, rank)
            follower.update(step)
            expected = relayout.load(tmp_path / f"plain-{step}", rank, tp=2)
            assert follower.tensors.keys() == expected.keys()
            assert all(follower.tensors[name].equal(tensor) for name, tensor in expected.items())
    model_of("llama").save_pretrained(tmp_path / "llama")
    for rank in (0, 1):
        saved, expected = relayout.load(tmp_path / "pair", rank), relayout.load(tmp_path / "llama", rank, tp=2)
        assert saved.keys() == expected.keys()
        assert all(saved[name].equal(tensor) for name, tensor in expected.items())
