"""Saves of one process run one after the other, whichever threads wait for them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from support.patience import PATIENCE, in_time

from relayout.train.save import _Line, _Turn


@pytest.mark.usefixtures("hasty")
def test_turns_that_wait_in_threads_at_once_all_come_in_order() -> None:
    for _ in range(100):
        came, turns = list[int](), list[_Turn]()
        line = _Line()
        for _ in range(6):
            turns.append(_Turn())
            line._join(turns[-1])

        def carry_out(number: int, turns: list[_Turn] = turns, came: list[int] = came) -> None:
            turns[number].wait()
            came.append(number)
            turns[number].end()

        threads = [threading.Thread(target=carry_out, args=[number]) for number in reversed(range(6))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert came == [*range(6)]


def test_a_save_that_waits_for_its_turn_cannot_be_cancelled() -> None:
    line, may_end = _Line(), threading.Event()

    def first(_: Any) -> Any:
        assert may_end.wait(PATIENCE)
        return "first"

    begun = [line.begin(first), line.begin(lambda _: "second")]  # type: ignore[arg-type,return-value]
    assert not begun[1].cancel()
    may_end.set()
    assert in_time(lambda: [one.result(PATIENCE) for one in begun]) == ["first", "second"]


def test_a_turn_that_ctrl_c_left_unnamed_in_the_line_is_not_taken_twice() -> None:
    line, interrupted, later = _Line(), _Turn(), _Turn()
    for turn in (interrupted, interrupted, later, interrupted):  # Joined again, as its caller cannot know.
        line._join(turn)
    assert (later.earlier, interrupted.earlier) == (interrupted, None)
    interrupted.end()
    in_time(later.wait)
