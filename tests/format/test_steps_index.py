"""The index of a root of steps, against a plain list of what was published."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from support.steps import closed_index

from relayout.errors import FormatError, PlanError
from relayout.format.steps_index import (
    DELTA,
    FULL,
    Chain,
    PublishedStep,
    Retention,
    RetiredName,
    StepsIndex,
    Stored,
    parse_steps,
    step_name,
)

PUBLICATIONS = st.lists(st.tuples(st.sampled_from(["full", "delta", "both"]), st.integers(1, 100)), min_size=1)
"""What each step is published as, and the bytes of its delta."""
FULL_NBYTES = 1000


def published(publications: list[tuple[str, int]], retention: Retention) -> tuple[StepsIndex, list[PublishedStep]]:
    """An index after all publications, one each second, and the entries that were published."""
    index, entries, tokens = StepsIndex(), [], count()
    for step, (kind, nbytes) in enumerate(publications):

        def name(kind: str, step: int = step) -> str:
            return step_name(kind, step, f"{next(tokens):08x}")

        full = None if kind == "delta" and index.entries else Stored(name(FULL), FULL_NBYTES)
        delta = None if kind == "full" or not index.entries else Stored(name(DELTA), nbytes)
        entries.append(PublishedStep(step, f"{step:064x}", full, delta, time=step))
        announced = index.announced([one.name for one in (full, delta) if one is not None], step, grace_seconds=step)
        assert (announced.entries, announced.grace_seconds) == (index.entries, step)
        index = announced.published(entries[-1], retention)
        assert index.grace_seconds == step
    return index, entries


@cache
def of_document() -> dict[str, Any]:
    """The functions by which FORMAT.md has publishers change the index."""
    section = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text("utf-8").partition("\n## 16. ")[2]
    names: dict[str, Any] = {}
    exec(section.partition("```python\n")[2].partition("```")[0], names)
    return names


RETENTIONS = st.builds(Retention, st.integers(0, 12), st.integers(0, 12))


def contents_along(index: StepsIndex, chain: Chain, have: str | None) -> str | None:
    """The content that a reader has in the end, who has `have` and goes along a chain; None: it cannot."""
    content = have
    if chain.full is not None:
        [content] = [one.content for one in index.entries if one.full is not None and one.full.name == chain.full]
    for name in chain.deltas:
        [at] = [i for i, one in enumerate(index.entries) if one.delta is not None and one.delta.name == name]
        if content != index.entries[at - 1].content:
            return None
        content = index.entries[at].content
    return content


@given(PUBLICATIONS, RETENTIONS, st.data())
def test_a_chain_leads_from_what_a_reader_has_to_each_step_that_is_kept(
    publications: list[tuple[str, int]], retention: Retention, data: st.DataObject
) -> None:
    index, entries = published(publications, retention)
    have = data.draw(st.sampled_from([None, *(entry.content for entry in entries)]))
    for target in (None, *index.entries):
        wanted = entries[-1] if target is None else target
        chain = index.chain(have, None if target is None else target.step)
        assert chain is not None
        assert (chain.step, chain.content) == (wanted.step, wanted.content)
        assert contents_along(index, chain, have) == wanted.content
        assert index.chain(have, wanted.content) == chain


@given(PUBLICATIONS, RETENTIONS)
def test_no_other_chain_has_fewer_bytes(publications: list[tuple[str, int]], retention: Retention) -> None:
    index, _ = published(publications, retention)
    for begin, had in [(-1, None), *enumerate(index.entries)]:
        for end, target in enumerate(index.entries):
            chain = index.chain(None if had is None else had.content, target.content)
            assert chain is not None
            sizes = []
            for start in range(end + 1):
                deltas = [
                    entry.delta.nbytes if entry.delta else FULL_NBYTES**2
                    for entry in index.entries[start + 1 : end + 1]
                ]
                if start == begin:
                    sizes.append(sum(deltas))
                if (full := index.entries[start].full) is not None:
                    sizes.append(full.nbytes + sum(deltas))
            assert chain.nbytes == min(sizes)


@given(PUBLICATIONS, RETENTIONS)
def test_steps_that_are_to_be_kept_are_and_what_leaves_is_retired(
    publications: list[tuple[str, int]], retention: Retention
) -> None:
    index, entries = published(publications, retention)
    now = entries[-1].time
    kept = [entry.step for entry in index.entries]
    young = [entry.step for entry in entries if now - entry.time < retention.seconds]
    last = (
        [entry.step for entry in entries][len(entries) - max(1, retention.num_steps) :]
        if retention.num_steps < len(entries)
        else kept
    )
    assert {*young, *last, entries[-1].step} <= {*kept}
    assert kept == sorted(kept)
    wanted = min([*young, *last, entries[-1].step])
    newest = max(entry.step for entry in entries if entry.full is not None and entry.step <= wanted)
    assert kept[0] == newest
    every = {one.name for entry in entries for one in (entry.full, entry.delta) if one is not None}
    assert index.names | {one.name for one in index.retired} == every
    assert not index.names & {one.name for one in index.retired}


@given(PUBLICATIONS, RETENTIONS, st.integers(0, 2**53 - 1))
def test_an_index_is_read_as_it_was_written(
    publications: list[tuple[str, int]], retention: Retention, grace_seconds: int
) -> None:
    index, _ = published(publications, retention)
    index = index.announced([step_name(DELTA, 10**15, "0" * 7 + "a")], 5, grace_seconds)
    assert parse_steps(index.dump(), "steps.json") == index
    assert json.loads(index.dump())["grace_seconds"] == grace_seconds
    assert index.without([]).abandoned([], 5).grace_seconds == grace_seconds


@given(PUBLICATIONS, RETENTIONS, st.data())
def test_an_index_changes_as_the_functions_of_the_document_change_it(
    publications: list[tuple[str, int]], retention: Retention, data: st.DataObject
) -> None:
    """Also if other publishers begin between, whose clocks differ, and take over."""
    index, tokens = StepsIndex(), count()
    top = json.loads(index.dump())
    begin, end = of_document()["begin"], of_document()["end"]
    for step, (kind, nbytes) in enumerate(publications):
        kinds = [FULL] if not index.entries else [FULL, DELTA] if kind == "both" else [kind]
        names = [step_name(one, step, f"{next(tokens):08x}") for one in kinds]
        now, grace_seconds, taken_over = data.draw(st.tuples(st.integers(0, 99), st.integers(0, 99), st.booleans()))
        index = index.announced(names, now, grace_seconds)
        begin(top, names, now, grace_seconds)
        assert json.loads(index.dump()) == sealed_again(top)
        if taken_over:
            others = [step_name(FULL, step, f"{next(tokens):08x}")]
            index = index.announced(others, now, grace_seconds)
            begin(top, others, now, grace_seconds)
        places = {kind: Stored(name, nbytes) for kind, name in zip(kinds, names, strict=True)}
        entry = PublishedStep(step, f"{step:064x}", places.get(FULL), places.get(DELTA), now)
        row = asdict(entry)
        first_kept = retention.first_kept((*index.entries, entry), now)
        assert end(top, row, first_kept, now) == (not taken_over)
        index = index.abandoned(names, now) if taken_over else index.published(entry, retention)
        assert json.loads(index.dump()) == sealed_again(top)


def sealed_again(top: dict[str, Any]) -> dict[str, Any]:
    """What is read of an index that says of its bytes, as `dump` writes them, what is true."""
    text = json.dumps({name: value for name, value in top.items() if name != "self_digest"}, separators=(",", ":"))
    return top | {"self_digest": blake3(f"{text[:-1]},".encode()).hexdigest()}


def test_what_another_publisher_was_writing_is_retired() -> None:
    index = StepsIndex(pending=("full-000000001-00000001",)).announced(["full-000000001-00000002"], 7, 60)
    assert index.pending == ("full-000000001-00000002",)
    assert [(one.name, one.since) for one in index.retired] == [("full-000000001-00000001", 7)]
    assert index.without(["full-000000001-00000001"]).retired == ()


def test_a_root_without_steps_has_no_chain_and_one_with_others_says_which_it_has() -> None:
    assert StepsIndex().chain() is None
    index, _ = published([("full", 1), ("delta", 1)], Retention(10, 0))
    with pytest.raises(PlanError, match=r"has no step 7 \(any more\): there are 2, 0 to 1") as caught:
        index.chain(step=7)
    assert caught.value.code == "missing"


def test_what_was_retired_in_the_future_is_retired_now() -> None:
    index = StepsIndex(retired=(RetiredName("full-000000001-00000001", 9), RetiredName("full-000000001-00000002", 6)))
    assert [one.since for one in index.announced([], 7, 60).retired] == [7, 6]


def damaged(*without: str, **changes: Any) -> bytes:
    """An index with other fields, or without some."""
    index, _ = published([("full", 1), ("delta", 1)], Retention(10, 0))
    top = json.loads(index.dump()) | changes
    return closed_index({name: value for name, value in top.items() if name not in without})


ENTRY = {
    "step": 0,
    "content": "0" * 64,
    "full": {"name": "full-000000000-00000000", "nbytes": 1},
    "delta": None,
    "time": 0,
}


@pytest.mark.parametrize(
    ("blob", "code"),
    [
        (b"{", "syntax"),
        (damaged().replace(b'"time": 1', b'"time": 2'), "digest"),
        (damaged().replace(b'"self_digest"', b'"self_digesT"'), "digest"),
        (json.dumps(json.loads(damaged()) | {"more": 1}).encode(), "digest"),
        (damaged(relayout="other"), "field"),
        (damaged(version=2), "version"),
        (damaged(requires=["more"]), "version"),
        (damaged("grace_seconds"), "field"),
        (damaged(grace_seconds=-1), "field"),
        (damaged(grace_seconds=3600.0), "field"),
        (damaged(grace_seconds=None), "field"),
        (damaged("requires"), "field"),
        (damaged("pending"), "field"),
        (damaged("retired"), "field"),
        (damaged(pending=["../elsewhere"]), "unsafe"),
        (damaged(retired=[{"name": "full-1-00000001", "since": 0}]), "unsafe"),
        (damaged(pending=["full-000000000-00000000"]), "field"),
        (damaged(steps=[ENTRY | {"full": None}]), "field"),
        (damaged(steps=[ENTRY, ENTRY]), "field"),
        (damaged(steps=[ENTRY | {"delta": {"name": "delta-000000000-00000001", "nbytes": 1}}]), "field"),
        (damaged(steps=[ENTRY | {"full": {"name": "delta-000000000-00000000", "nbytes": 1}}]), "unsafe"),
        (damaged(steps=[ENTRY | {"step": -1}]), "field"),
        (damaged(steps=[ENTRY | {"time": "now"}]), "field"),
    ],
)
def test_a_damaged_index_is_refused(blob: bytes, code: str) -> None:
    with pytest.raises(FormatError, match=r"steps\.json") as caught:
        parse_steps(blob, "root/steps.json")
    assert caught.value.code == code


def test_unknown_fields_are_ignored() -> None:
    assert parse_steps(damaged(more=[1]), "steps.json") == parse_steps(damaged(), "steps.json")
