"""The index of steps, as a value: chains against all that there are, and ages whatever the clocks say."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.steps import CONFIG, closed_index, weights_of

import relayout
from relayout.errors import FormatError, PlanError
from relayout.format.steps_index import (
    DELTA,
    FULL,
    PublishedStep,
    Retention,
    RetiredName,
    StepsIndex,
    Stored,
    parse_steps,
    step_name,
)
from relayout.train import repository as module
from relayout.train.repository import StepRepository

HOUR, DAY = 3600, 24 * 3600


def entry(step: int, full: int | None, delta: int | None, time: int = 0) -> PublishedStep:
    stored = {
        kind: None if nbytes is None else Stored(step_name(kind, step, "aaaaaaaa"), nbytes)
        for kind, nbytes in ((FULL, full), (DELTA, delta))
    }
    return PublishedStep(step, f"{step:064x}", stored[FULL], stored[DELTA], time)


NBYTES = st.integers(0, 9)
LATER = st.one_of(st.tuples(NBYTES, NBYTES), st.tuples(st.none(), NBYTES), st.tuples(NBYTES, st.none()))


def all_chains(index: StepsIndex, have: int | None, end: int) -> list[tuple[int, str | None, tuple[str, ...]]]:
    """Every way to an entry: bytes, the folder, and the names of deltas."""
    found: list[tuple[int, str | None, tuple[str, ...]]] = []
    for begin in range(end + 1):
        deltas = [one.delta for one in index.entries[begin + 1 : end + 1]]
        full = index.entries[begin].full
        if all(deltas):
            names = tuple(delta.name for delta in deltas if delta is not None)
            nbytes = sum(delta.nbytes for delta in deltas if delta is not None)
            if full is not None:
                found.append((nbytes + full.nbytes, full.name, names))
            if begin == have:
                found.append((nbytes, None, names))
    return found


@given(st.lists(LATER, max_size=8), NBYTES, st.data())
def test_a_chain_is_the_shortest_of_all_that_there_are(
    later: list[tuple[int | None, int | None]], first: int, data: st.DataObject
) -> None:
    index = StepsIndex((entry(0, first, None), *(entry(i, *one) for i, one in enumerate(later, 1))))
    end = data.draw(st.integers(0, len(later)))
    have = data.draw(st.none() | st.integers(0, len(later)))
    chain = index.chain(have, end)
    assert chain is not None
    ways = all_chains(index, have, end)
    assert (chain.nbytes, chain.full, chain.deltas) in ways
    shortest = min(nbytes for nbytes, _, _ in ways)
    assert (chain.nbytes, len(chain.deltas)) == (shortest, min(len(names) for n, _, names in ways if n == shortest))


def test_a_chain_looks_at_each_entry_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A root with a folder for each step has as many ways as steps, each with all deltas behind it."""
    count, looks = 2000, 0

    class LoadCounter(int):
        """A number of bytes that is counted when it is added."""

        def __radd__(self, other: int) -> int:
            nonlocal looks
            looks += 1
            return int(other) + int(self)

    entries = [entry(0, 10**9, None), *(entry(i, 10**9 + i, LoadCounter(10)) for i in range(1, count))]
    chain = StepsIndex(tuple(entries)).chain()
    assert chain is not None
    assert chain.full == entries[-1].full.name  # type: ignore[union-attr]
    assert looks <= 2 * count


@pytest.mark.parametrize(
    ("times", "kept"),
    [
        ([0, 10, 20, 30, 40], [2, 3, 4]),
        ([0, 10**9, 10**9, 30, 40], [1, 2, 3, 4]),  # Whoever was ahead published before 30.
        ([10**9, 10**9, 10**9, 10**9, 40], [0, 1, 2, 3, 4]),
        ([0, 0, 25, 5, 40], [2, 3, 4]),  # Whoever was behind published after 25.
    ],
)
def test_what_is_young_is_kept_whatever_the_clocks_of_others_say(times: list[int], kept: list[int]) -> None:
    entries = [entry(i, 1, None, time) for i, time in enumerate(times)]
    first = Retention(num_steps=1, seconds=25).first_kept(entries, now=40)
    assert [*range(first, len(times))] == kept
    assert Retention(num_steps=1, seconds=25).first_kept(entries, now=200) == len(times) - 1
    assert Retention(num_steps=3, seconds=0).first_kept(entries, now=40) == 2


class Clocks:
    """The two clocks of this machine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall, self.monotonic = 10.0**9, 500.0
        monkeypatch.setattr(time, "time", lambda: self.wall)
        monkeypatch.setattr(time, "monotonic", lambda: self.monotonic)

    def wait(self, seconds: float) -> None:
        self.wall, self.monotonic = self.wall + seconds, self.monotonic + seconds


@pytest.mark.parametrize("others_clock", [-2 * HOUR, 2 * HOUR, 10**9])
def test_what_is_retired_stays_for_the_grace_and_no_longer_whatever_the_clock_of_who_retired_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others_clock: int
) -> None:
    publisher = relayout.Publisher(tmp_path / "steps", config=CONFIG, keep=1, keep_seconds=0, full_every=1)
    with monkeypatch.context() as patch:
        clocks = Clocks(patch)
        clocks.wall += others_clock
        for step in (1, 2):
            publisher.publish(weights_of(step), step)
    root = StepRepository.at(tmp_path / "steps")
    retired = [one.name for one in root.read().retired]
    assert retired
    clocks = Clocks(monkeypatch)
    for _ in range(4):
        assert root.prune(HOUR) == []
        clocks.wait(HOUR / 4)
    assert root.prune(HOUR) == retired


def test_who_deletes_keeps_what_is_retired_as_long_as_the_last_publisher_has_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index has it: another process, which was told nothing, goes by that."""
    clocks, place = Clocks(monkeypatch), tmp_path / "steps"
    options: dict[str, Any] = {"config": CONFIG, "keep": 1, "keep_seconds": 0, "full_every": 1}
    for step, grace in ((1, HOUR), (2, 3 * HOUR), (3, 2 * HOUR)):
        relayout.Publisher(place, grace_seconds=grace, **options).publish(weights_of(step), step)
        index = json.loads((place / "steps.json").read_text())
        assert index["grace_seconds"] == grace == StepRepository.at(place).read().grace_seconds
    steps, retired = relayout.Steps(place), [one["name"] for one in index["retired"]]
    assert len(retired) == 2
    for _ in range(4):
        assert steps.prune() == []
        clocks.wait(HOUR / 2)
    assert steps.prune() == retired
    assert StepRepository.at(place).read().grace_seconds == 2 * HOUR


def test_a_process_that_has_just_begun_deletes_what_was_retired_a_day_before_the_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks(monkeypatch)
    now = int(clocks.wall)
    names = [step_name(DELTA, i, "aaaaaaaa") for i in range(3)]
    times = (now - DAY - HOUR, now - DAY, now + DAY)
    StepRepository.at(tmp_path).move(lambda _: StepsIndex(retired=tuple(map(RetiredName, names, times))))
    assert StepRepository.at(tmp_path).prune(HOUR) == names[:1]
    announced = StepRepository.at(tmp_path).move(lambda index: index.announced([], now, HOUR))
    assert [one.since for one in announced.retired] == [now - DAY, now]
    assert StepRepository.at(tmp_path).prune(0) == names[1:]


def test_an_index_that_nobody_could_read_is_not_written_and_fewer_steps_are_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "steps"
    options: dict[str, Any] = {"config": CONFIG, "keep_seconds": 0, "full_every": 1, "grace_seconds": 0}
    publisher = relayout.Publisher(root, keep=1000, **options)
    for step in (1, 2, 3):
        publisher.publish(weights_of(step), step)
    monkeypatch.setattr("relayout.train.publisher._RESERVED_NBYTES", 500)
    monkeypatch.setattr(module, "MAX_STEPS_NBYTES", (root / "steps.json").stat().st_size + 500)
    for _ in range(2):
        with pytest.raises(
            PlanError, match=r"steps\.json: an index of .* bytes, and readers accept .*keep fewer steps"
        ):
            publisher.publish(weights_of(4), 4)
    assert [one.step for one in relayout.Steps(root).entries()] == [1, 2, 3]
    relayout.Publisher(root, keep=2, **options).publish(weights_of(5), 5)
    assert [one.step for one in relayout.Steps(root).entries()] == [3, 5]


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (7, "delta-000000003-aaaaaaaa"),
        (7, "full-000000007-aaaaaaaa"),
        (3, "delta-0000000003-aaaaaaaa"),
        (3, "delta-00000003-aaaaaaaa"),
        (10**9, "delta-01000000000-aaaaaaaa"),
    ],
)
def test_a_step_whose_number_is_not_that_of_its_name_is_refused(step: int, name: str) -> None:
    index = StepsIndex((entry(1, 1, None), entry(3, None, 1)))
    assert parse_steps(index.dump(), "steps.json") == index
    top = json.loads(index.dump())
    top["steps"][1] |= {"step": step, "delta": {"name": name, "nbytes": 1}}
    with pytest.raises(FormatError, match=f"{name}.*is not the name of"):
        parse_steps(closed_index(top), "steps.json")


def test_a_step_of_many_digits_has_a_name() -> None:
    index = StepsIndex((entry(10**12, 1, None),))
    assert parse_steps(index.dump(), "steps.json") == index
