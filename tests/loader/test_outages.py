"""Outages of a store in the middle of whatever reads: all of it goes on, and brings the same bytes.

With RELAYOUT_OUTAGES=1, outages take the seconds that they say; else all clocks are shortened alike.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support import outages, prestarted, s3_server
from support.conversions import stored_in
from support.group_worker import NUM_MEMBERS, digests
from support.loader_fixtures import assert_equal, whole_tensors
from support.outages import Outages
from support.remote import expect
from support.s3_server import Server

import relayout
from relayout.core.workers import each
from relayout.storage.cloud import connect

pytest.importorskip("obstore", reason="the client of object stores")

IS_REAL = os.environ.get("RELAYOUT_OUTAGES") == "1"
GROUP_SCRIPT = "from support.group_worker import from_store; from_store()"
SCALE = 1 if IS_REAL else 40
SECONDS = (10, 30, 60) if IS_REAL else (60,)
Work = Callable[[str], object]


def works(model: Path, converted: Path, place: Path) -> dict[str, Work]:
    """What reads, by name: each is given a URL of its own, and compares what came with what stock readers say."""

    def restore(url: str) -> None:
        relayout.restore(url, place / "restored")
        assert_equal(whole_tensors(place / "restored"), whole_tensors(model))

    def convert(url: str) -> None:
        relayout.convert(url, place / "out", tp=2, max_part_nbytes=2**20)
        for file in converted.iterdir():
            assert (place / "out" / file.name).read_bytes() == file.read_bytes(), file.name

    def verify(url: str) -> None:
        assert relayout.verify(url).ok

    loads = {f"load{number}": partial(_load, converted) for number in range(4 if IS_REAL else 1)}
    return {
        **loads,
        "iter_load": lambda url: expect(dict(relayout.iter_load(url, 1, verify=True)), converted),
        "other_degree": lambda url: assert_equal(relayout.load(url, 0, tp=1), whole_tensors(model)),
        "cache": lambda url: expect(relayout.load(url, 1, cache=place / "cache"), converted),
        "verify": verify,
        "restore": restore,
        "convert": convert,
    }


def _load(converted: Path, url: str) -> None:
    expect(relayout.load(url, 1), converted)


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("kind", outages.KINDS)
def test_what_reads_survives_an_outage(
    server: Server,
    model: Path,
    converted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    seconds: float,
) -> None:
    monkeypatch.setattr(connect, "RETRY_SECONDS", 90.0)  # The fixture has less.
    outages.shorten(monkeypatch, SCALE)
    all_works = works(model, converted, tmp_path)
    for name in all_works:
        for file in (model if name == "convert" else converted).iterdir():
            server.put("models", f"{name}/{file.name}", file.read_bytes())
    server.interfere = outage = Outages(server, kind, seconds / SCALE)

    def run(name: str) -> float:
        all_works[name](f"s3://models/{name}")
        return time.monotonic() - outage.begun[name]

    took = dict(zip(all_works, each(run, list(all_works), len(all_works)), strict=True))
    assert set(outage.num_refused) == set(all_works)
    if kind != "reset":
        assert min(took.values()) >= seconds / SCALE
    if IS_REAL:
        print(
            f"\n{kind}, {seconds} s: {len(took)} of {len(all_works)}", {name: round(s, 1) for name, s in took.items()}
        )


@pytest.mark.xdist_group("group")
@pytest.mark.parametrize("seconds", SECONDS if IS_REAL else (1,))
@pytest.mark.parametrize("kind", outages.KINDS if IS_REAL else ("reset",))
def test_a_group_survives_an_outage(server: Server, converted: Path, tmp_path: Path, kind: str, seconds: float) -> None:
    server.interfere = outage = Outages(server, kind, seconds, after=1)
    for by in ("load", "iter_load") if IS_REAL else ("load",):
        outage.begun.clear()
        folder = tmp_path / by
        folder.mkdir()
        case = {"path": "s3://models/out", "rank": 1, "by": by, "environment": s3_server.environment(server)}
        done = prestarted.run(
            folder, json.dumps(case), script=GROUP_SCRIPT, imports=prestarted.GROUP, env=prestarted.ONE_THREAD
        )
        assert done.returncode == 0, done.stderr
        seen = [json.loads((folder / f"member-{number}.json").read_text()) for number in range(NUM_MEMBERS)]
        assert [member.get("tensors") for member in seen] == [digests(stored_in(converted, 1))] * NUM_MEMBERS, seen
        assert outage.num_refused["out"] > 0
