"""Followers: their tensors are those of a step, or what they were."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.steps import CONFIG, assert_is_step, weights_of

import relayout


def test_a_step_with_other_tensors_is_refused_and_another_follower_has_them(tmp_path: Path) -> None:
    publisher = relayout.Publisher(tmp_path / "steps", config=CONFIG, tp=2)
    follower = relayout.Follower(tmp_path / "steps", 0)
    publisher.publish(weights_of(1), 1)
    follower.update()
    other = {name: tensor for name, tensor in weights_of(2).items() if name != "model.norm.weight"}
    publisher.publish(other, 2)
    for _ in range(2):
        with pytest.raises(relayout.PlanError, match=r"the rank has no tensor 'model\.norm\.weight'"):
            follower.update()
        assert_is_step(follower.tensors, weights_of(1), 0)
    late = relayout.Follower(tmp_path / "steps", 0)
    late.update()
    assert_is_step(late.tensors, other, 0)
    publisher.publish(weights_of(3), 3)
    assert follower.update() == 3
    assert_is_step(follower.tensors, weights_of(3), 0)
