"""Wrong inputs are answered with a message and the next command: a sample, and the recorded answers of all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import wrong
from support.command_runs import Run

SAMPLE = [one for one in wrong.INPUTS if not (one.is_python or one.environment or one.unprivileged or one.interrupted)]
SAMPLE = [one for one in SAMPLE if one.area not in ("store", "system")][::4]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every input finds, to be copied."""
    folder = tmp_path_factory.mktemp("wrong") / "world"
    folder.mkdir()
    wrong.make_world(folder)
    return folder


@pytest.mark.parametrize("one", SAMPLE, ids=lambda one: one.input)
def test_a_wrong_input_is_answered_with_the_next_command(
    one: wrong.Wrong, world: Path, tmp_path: Path, here: Run
) -> None:
    work = tmp_path / "work"
    shutil.copytree(world, work)
    if one.set_up is not None:
        one.set_up(work)
    done = here(*wrong.words_of(one.input), cwd=work)
    assert wrong.problems(one, wrong.Answer.of(done.returncode, done.stderr, work)) == []


def test_the_recorded_answers_are_of_these_inputs_and_right() -> None:
    rows = json.loads(wrong.RESULTS.read_text())
    assert [(row["area"], row["input"]) for row in rows] == [(one.area, one.input) for one in wrong.INPUTS]
    assert len(rows) >= 100
    for row, one in zip(rows, wrong.INPUTS, strict=True):
        lines = [f"relayout: {row['message']}", *([wrong.NEXT + row["next"]] if row["next"] else [])]
        assert wrong.problems(one, wrong.Answer(row["code"], tuple(lines))) == [], row


def test_answers_that_lack_something_are_found() -> None:
    one = wrong.Wrong("path", "inspect modle", "^modle: no such file")
    right = ("relayout: error: modle: no such file or folder", "relayout: next: ls")
    assert wrong.problems(one, wrong.Answer(2, right)) == []
    assert wrong.problems(one, wrong.Answer(3, right)) == ["exit code 3, expected 2"]
    assert wrong.problems(one, wrong.Answer(2, right[:1])) == ["has no next command"]
    assert "has a traceback" in wrong.problems(one, wrong.Answer(2, ("Traceback (most recent call last):", *right)))
    assert wrong.problems(one, wrong.Answer(2, ("relayout: error: no", right[1]))) == [f"does not match {one.says!r}"]
