"""relayout.checkpoint.step_chain: the way to a step, and what happens if it is gone while it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest

from relayout.checkpoint.step_chain import follow
from relayout.errors import FormatError, PlanError

Way = str | None


def finding(*ways: Way) -> tuple[Callable[[bool], Way], list[bool]]:
    """A function that finds these ways, one after the other, and what it was told."""
    told: list[bool] = []
    left: Iterator[Way] = iter(ways)

    def find(has: bool) -> Way:
        told.append(has)
        return next(left)

    return find, told


def using(*gone: Way) -> tuple[Callable[[Way], str], list[Way]]:
    """A function that fails for these ways, and what it was given."""
    given: list[Way] = []

    def use(way: Way) -> str:
        given.append(way)
        if way in gone:
            raise FormatError(f"{way} is missing", code="missing")
        return f"used {way}"

    return use, given


def test_a_way_that_is_there_is_used_once() -> None:
    (find, told), (use, given) = finding("a"), using()
    assert follow(find, use, "root") == "used a"
    assert (told, given) == ([True], ["a"])


def test_another_way_is_used_if_the_first_is_gone() -> None:
    (find, told), (use, given) = finding("a", "b", "c"), using("a", "b")
    assert follow(find, use, "root") == "used c"
    assert (told, given) == ([True, False, False], ["a", "b", "c"])


@pytest.mark.parametrize("again", ["a", None])
def test_the_error_is_that_of_the_way_if_there_is_no_other(again: Way) -> None:
    (find, told), (use, given) = finding("a", again), using("a")
    with pytest.raises(FormatError, match=r"^a is missing$"):
        follow(find, use, "root")
    assert (told, given) == ([True, False], ["a"])


def test_where_there_is_no_way_from_the_start_nothing_is_tried_twice() -> None:
    (find, told), (use, given) = finding(None, None), using(None)
    with pytest.raises(FormatError, match=r"^None is missing$"):
        follow(find, use, "root")
    assert (told, given) == ([True, False], [None])


def test_an_error_of_another_kind_is_raised_at_once() -> None:
    find, told = finding("a", "b")

    def use(way: Way) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        follow(find, use, "root")
    assert told == [True]


def test_ways_that_change_without_end_are_an_error() -> None:
    numbers, tried = count(), list[int]()

    def use(way: int) -> None:
        tried.append(way)
        raise OSError("gone")

    with pytest.raises(PlanError, match=r"^root: its steps are deleted faster than they are read$") as caught:
        follow(lambda has: next(numbers), use, "root")
    assert caught.value.code == "busy"
    assert tried == list(range(8))
