"""A follower has each step as it was published, whichever it had before, and takes nothing else for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.steps import CONFIG, assert_is_step, closed_index, put, weights_of

import relayout


def test_one_that_joins_late_or_goes_back_has_any_step(root: str) -> None:
    publisher = relayout.Publisher(root, config=CONFIG, tp=2, full_every=3)
    for step in range(1, 6):
        publisher.publish(weights_of(step), step)
    for step in (5, 3, 1, 4):
        late = relayout.Follower(root, 0)
        assert late.update(step) == step
        assert_is_step(late.tensors, weights_of(step), 0)
    back = relayout.Follower(root, 0)
    for step in (5, 2, 4):
        back.update(step)
        assert_is_step(back.tensors, weights_of(step), 0)


def test_a_reader_of_an_older_index_goes_on_with_what_is_there(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = relayout.Publisher(root, config=CONFIG, tp=2, full_every=3, keep=1, keep_seconds=0)
    publisher.publish(weights_of(1), 1)
    slow = relayout.Follower(root, 0)
    slow.update()
    publisher.publish(weights_of(2), 2)
    from relayout.train import follower as module

    applied = module.apply

    def late(delta: Any, *arguments: Any, **options: Any) -> None:
        for step in range(3, 9):
            publisher.publish(weights_of(step), step)
        relayout.Steps(root).prune(grace_seconds=0)
        monkeypatch.undo()
        applied(delta, *arguments, **options)

    monkeypatch.setattr(module, "apply", late)
    assert slow.update() == 8
    assert_is_step(slow.tensors, weights_of(8), 0)


def test_an_empty_root_has_no_step(root: str) -> None:
    assert relayout.Steps(root).newest() is None
    assert relayout.Steps(root).chain() is None
    with pytest.raises(
        relayout.PlanError, match=r"has no steps yet: no (such file or folder|objects with this prefix)"
    ):
        relayout.Follower(root, 0).update()
    put(root, "mine", b"mine")
    with pytest.raises(relayout.PlanError, match=r"has no steps yet \(steps\.json of relayout\.Publisher is missing\)"):
        relayout.Follower(root, 0).update()


@pytest.mark.parametrize("kind", ["full", "delta"])
def test_what_makes_another_content_than_the_index_says_is_not_taken_for_the_step(tmp_path: Path, kind: str) -> None:
    places = {}
    for root, last in (("steps", 2), ("other", 3)):
        publisher = relayout.Publisher(tmp_path / root, config=CONFIG, tp=2, full_every=1 if kind == "full" else 100)
        for step, weights in ((1, 1), (2, last)):
            done = publisher.publish(weights_of(weights), step)
        stored = done.full if kind == "full" else done.delta
        assert stored is not None
        places[root] = tmp_path / root / stored.name
    follower = relayout.Follower(tmp_path / "steps", 0)
    follower.update(1)
    shutil.rmtree(places["steps"])
    places["other"].rename(places["steps"])
    entries = json.loads((tmp_path / "steps" / "steps.json").read_text())
    if kind == "full":  # Else there is another way.
        entries["steps"][-1]["delta"] = None
        (tmp_path / "steps" / "steps.json").write_bytes(closed_index(entries))
    with pytest.raises(relayout.FormatError, match=r"relayout\.json: makes content [0-9a-f]+, the index of steps says"):
        follower.update()
    assert_is_step(follower.tensors, weights_of(1), 0)
    assert follower.step == 1
    assert follower.update(1) is None


def test_a_follower_has_the_tensors_of_a_step_that_has_more_or_fewer_or_others(root: str) -> None:
    publisher = relayout.Publisher(root, config=CONFIG, tp=2, unmatched="replicate")
    follower = relayout.Follower(root, 0)
    more = {"model.extra.weight": torch.arange(5.0)}
    for step, others in enumerate(
        [{}, more, {"model.extra.weight": torch.arange(6.0)}, {"model.extra.weight": torch.arange(6)}, {}], 1
    ):
        assert publisher.publish(weights_of(step) | others, step).full is not None
        assert follower.update() == step
        assert follower.tensors.keys() == (weights_of(step) | others).keys()
        assert all(follower.tensors.pop(name).equal(tensor) for name, tensor in others.items())
        assert_is_step(follower.tensors, weights_of(step), 0)
        follower.tensors |= {name: tensor.clone() for name, tensor in others.items()}


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_follower_has_the_dtype_of_the_step_and_goes_on_by_deltas(
    root: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """When a trainer is started again with another one: FP32 could hold what is BF16, but no delta could change it."""
    name, whole = "model.norm.weight", torch.arange(64.0)
    follower, place = relayout.Follower(root, 0), 0
    for number, dtype in enumerate(dtypes):
        publisher = relayout.Publisher(root, config=CONFIG, dtype=dtype)
        for step in (10 * number + 1, 10 * number + 2):
            whole[step] += 1
            publisher.publish({name: whole}, step)
            chain = relayout.Steps(root).chain(follower.content)
            assert follower.update() == step
            assert follower.tensors[name].dtype == dtype
            assert follower.tensors[name].equal(whole.to(dtype))
            assert chain is not None
            assert (chain.full is None) == (step % 10 == 2)
            if step % 10 == 2:
                assert follower.tensors[name].data_ptr() == place, "changed where it is"
            place = follower.tensors[name].data_ptr()


def test_a_follower_reuses_no_memory_that_a_load_would_not_make(tmp_path: Path) -> None:
    root, weights = tmp_path / "steps", {f"model.layers.{i}.input_layernorm.weight": torch.randn(64) for i in range(4)}
    same, strided, wide, gone = weights
    follower = relayout.Follower(root, 0)
    relayout.Publisher(root, config=CONFIG).publish(weights, 1)
    follower.update()
    follower.tensors[strided] = torch.empty(64, 2)[:, 0]
    follower.tensors[wide] = follower.tensors[wide].double()
    before = {name: tensor.data_ptr() for name, tensor in follower.tensors.items()}
    weights.pop(gone)
    relayout.Publisher(root, config=CONFIG).publish(weights, 2)
    follower.update()
    assert follower.tensors.keys() == weights.keys()
    for name, tensor in weights.items():
        found = follower.tensors[name]
        assert found.equal(tensor)
        assert (found.dtype, found.is_contiguous()) == (torch.float32, True)
        assert (found.data_ptr() == before[name]) == (name == same)
