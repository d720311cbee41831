"""The command `steps`: what a root has, and the exit code of a check."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support import prestarted
from support.steps import changed, files_of, names_of, outputs_of, published


def listed(*words: str) -> tuple[int, Any]:
    done = prestarted.run("steps", *words, "--json")
    return done.returncode, json.loads(done.stdout or done.stderr)


def test_the_steps_are_listed_and_what_none_needs_is_deleted_when_it_was_needed_long_ago(tmp_path: Path) -> None:
    root = str(tmp_path / "steps")
    published(root)
    index = json.loads(files_of(root)["steps.json"])
    code, found = listed(root)
    assert code == 0
    assert found["steps"] == index["steps"]
    assert found["retired"] == index["retired"] != []
    assert (found["deleted"], found["differences"]) == ([], None)
    before = outputs_of(root)
    assert listed(root, "--prune")[1]["deleted"] == []
    assert outputs_of(root) == before
    code, found = listed(root, "--prune", "--grace", "0", "--check")
    assert code == 0
    assert sorted(found["deleted"]) == sorted(one["name"] for one in index["retired"])
    assert before - outputs_of(root) == set(found["deleted"])
    assert (found["retired"], found["differences"]) == ([], [])
    text = prestarted.run("steps", root).stdout
    assert all(f" {one['step']} " in text for one in index["steps"])


def test_the_exit_code_says_that_something_differs_or_that_there_is_nothing(tmp_path: Path) -> None:
    root = str(tmp_path / "steps")
    code, found = listed(root)
    assert code == 2
    assert "has no steps yet" in str(found)
    published(root)
    changed(root, f"{names_of(root, 'full')[-1]}/relayout.json", 40)
    assert listed(root, "--check")[0] == 1
