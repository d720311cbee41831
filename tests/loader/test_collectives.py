"""One member of a group fails at each of its messages, or for a reason that only it has: all raise, and go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import prestarted
from support.failing_worker import CAUSES, LOADS, PUBLISHES, SAVES, prepare
from support.profile import IS_LONG, sample

import relayout
from relayout.loader.group.collectives import Alone

pytestmark = pytest.mark.xdist_group("group")


def seen_by_members(folder: Path, script: str, num_members: int, *words: object) -> list[list[Any]]:
    """What each member saw; the last one may be dead."""
    prepare(folder)
    code = f"from support.failing_worker import {script}; {script}()"
    given: dict[str, Any] = {"imports": prestarted.GROUP, "env": prestarted.ONE_THREAD}
    done = prestarted.run(folder, num_members, *words, script=code, **given)
    assert done.returncode == 0, done.stderr
    files = [folder / f"member-{number}.json" for number in range(num_members)]
    return [json.loads(file.read_text()) for file in files if file.exists()]


def assert_all_raise(seen: list[list[Any]]) -> None:
    """All members raise, of an output there is all or nothing, and the next attempt is complete."""
    for places in zip(*seen, strict=True):
        first, case = places[0], [place["error"] for place in places]
        if "signal" in first["what"] and first["at"] == first["of"]:  # All was done when it came.
            assert sum(error is not None for error in case) == 1, (first, case)
            assert first["left"] == "complete" or first["operation"] in LOADS, first
        else:
            assert None not in case, (first, case)
        assert first["left"] in ("", "complete"), first
        assert first["again"] == ("nothing" if first["operation"] in LOADS else "complete"), first


OPERATIONS = (*SAVES, "save_first", *PUBLISHES, *LOADS)
EVERY = 1 if IS_LONG else 6
"""Each message in each way; or each sixth message in one way."""


@pytest.mark.parametrize(
    ("num_members", "operations"),
    sample(
        [(n, some) for n in (2, 3) for some in (SAVES[:3], SAVES[3:], ("save_first", *PUBLISHES), LOADS)],
        [(2, ("save_first", *PUBLISHES)), (3, SAVES[:3]), (2, LOADS)],
    ),
)
def test_what_fails_at_a_message_fails_all(tmp_path: Path, num_members: int, operations: tuple[str, ...]) -> None:
    seen = seen_by_members(tmp_path, "main", num_members, EVERY, 0, *operations)
    assert {place["operation"] for place in seen[0]} == set(operations)
    assert_all_raise(seen)


@pytest.mark.parametrize("num_members", sample([2, 3], [2]))
def test_what_fails_one_alone_fails_all(tmp_path: Path, num_members: int) -> None:
    seen = seen_by_members(tmp_path, "causes", num_members, len(OPERATIONS) if IS_LONG else 1)
    assert {place["what"] for place in seen[0]} == {what for what, _, _ in CAUSES}
    assert_all_raise(seen)


@pytest.mark.parametrize(
    ("operation", "message"),
    sample(
        [(name, at) for name in OPERATIONS for at in (range(5) if name in LOADS else range(0, 19, 3))],
        [("save", 9), ("publish_delta", 3), ("fill", 2)],
    ),
)
def test_a_member_that_is_killed_in_a_message_fails_the_others(tmp_path: Path, operation: str, message: int) -> None:
    for (place,) in seen_by_members(tmp_path, "killed", 3, operation, message)[:2]:
        assert "a member may be gone" in place["error"]


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("rules")
    return folder, seen_by_members(folder, "rules", 2)


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("a message in a block", "AssertionError: a message of all members in a block"),
        ("a block in a block", "AssertionError: a block in a block"),
        ("an exchange outside", "AssertionError: an exchange outside of a block"),
        ("a broadcast outside", "AssertionError: a broadcast outside of a block"),
        ("other calls", "value 1 of member 0, block 1 of member 1 came together"),
        ("other order, one", "all members begin the same, in the same order"),
        ("other order, two", "all members begin the same, in the same order"),
        ("a step, not a save", "all members begin the same, in the same order"),
        ("a save, not a step", "all members begin the same, in the same order"),
        ("in progress", "called by the progress function of a save"),
    ],
)
def test_what_would_leave_members_waiting_is_an_error(rules: tuple[Path, list[Any]], case: str, what: str) -> None:
    for member in rules[1]:
        assert what in member[case]
        assert ("group: member 0 makes " in member[case]) == ("begin the same" in what)


def test_a_group_goes_on_after_such_an_error(rules: tuple[Path, list[Any]]) -> None:
    folder, members = rules
    assert [member["afterwards"] for member in members] == [[0, 1]] * 2
    assert [member["saved at last"] for member in members] == [None] * 2
    assert relayout.verify(folder / "last").ok
    assert not [name for name in ("one", "two", "three", "inside", "outside") if (folder / name).exists()]


def test_a_save_behind_one_in_the_foreground_waits_for_it(rules: tuple[Path, list[Any]]) -> None:
    folder, members = rules
    assert [(member["first"], member["second"]) for member in members] == [(None, None)] * 2
    first, second = (relayout.load(folder / name, 0)["model.norm.weight"] for name in ("first", "second"))
    assert not first.equal(second)
    assert relayout.verify(folder / "first").ok
    assert relayout.verify(folder / "second").ok


def test_ctrl_c_ends_the_wait_for_a_turn_and_the_others_raise_it(rules: tuple[Path, list[Any]]) -> None:
    folder, (other, member) = rules
    assert member["waits in line"] == "KeyboardInterrupt: "
    assert "member 1 of the group failed: KeyboardInterrupt" in other["waits in line"]
    assert [one[case] for one in rules[1] for case in ("held up", "after a wait")] == [None] * 4
    assert not (folder / "interrupted-save").exists()
    assert relayout.verify(folder / "held").ok


def test_a_member_that_stands_still_is_waited_for_as_long_as_the_group_has_it(rules: tuple[Path, list[Any]]) -> None:
    folder, (first, _) = rules
    assert "later than the group's timeout of 3 s" in first["stands still"]
    assert not (folder / "still").exists()


def test_a_group_of_one_has_what_it_sends_itself() -> None:
    group, received = Alone(), torch.zeros(3)
    with group.collective():
        group.exchange(torch.arange(3.0), [3], received, [3])
        assert received.tolist() == [0, 0, 0]
    assert received.tolist() == [0, 1, 2]
    assert group.all_gather("mine") == ["mine"]
