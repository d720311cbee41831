"""Outages of a store in the middle of whatever reads: all of it goes on, and brings the same bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support import s3_server
from support.conversions import stored_in
from support.group_worker import NUM_MEMBERS, digests, load_together
from support.loader_fixtures import assert_equal, whole_tensors
from support.lying_server import DroppedError
from support.remote import expect
from support.s3_server import Answer, Request, Server

import relayout
from relayout.core.workers import each
from relayout.storage.cloud import connect, failures

pytest.importorskip("obstore", reason="the client of object stores")

SECONDS = 1.5
"""The shortest time of an outage."""
_NUM_REFUSED = 4
"""The least number of requests that fail, however slow this machine is."""
_RESET_AFTER = 2**20
OutputSpec = Callable[[str], object]


@dataclass
class Outages:
    """For `Server.interfere`: each folder of the server has an outage of its own, after some requests for its bytes.

    The first request gets a part of the answer, then the connection is reset. Others are refused or dropped by turns.
    """

    server: Server
    seconds: float
    after: int = 2
    """Requests for bytes behind the first ones of a file that are answered before."""
    begun: dict[str, float] = field(default_factory=dict)
    """When, by folder."""
    num_refused: dict[str, int] = field(default_factory=dict)
    _seen: dict[str, int] = field(default_factory=dict)

    def __call__(self, request: Request) -> Answer | None:
        folder = request.key.partition("/")[0]
        if folder not in self.begun:
            if request.range is None or not request.range[0]:
                return None
            self._seen[folder] = self._seen.get(folder, 0) + 1
            if self._seen[folder] <= self.after:
                return None
            self.begun[folder] = time.monotonic()
        num_refused = self.num_refused.get(folder, 0)
        if num_refused >= _NUM_REFUSED and time.monotonic() - self.begun[folder] > self.seconds:
            return None
        self.num_refused[folder] = num_refused + 1
        return self._fail(request, self.num_refused[folder])

    def _fail(self, request: Request, number: int) -> Answer:
        if number == 1:
            found = s3_server.answer(self.server, request)
            found.cut, found.is_reset = min(_RESET_AFTER, len(found.body) // 2), True
            return found
        if number % 2:
            raise DroppedError
        return s3_server.error(503, "SlowDown")


def works(server: Server, model: Path, converted: Path, place: Path) -> dict[str, OutputSpec]:
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

    def load_in_a_group(url: str) -> None:
        case = {"path": url, "rank": 1, "environment": s3_server.environment(server)}
        assert load_together(place, **case) == [digests(stored_in(converted, 1))] * NUM_MEMBERS

    return {
        "load": lambda url: expect(relayout.load(url, 1), converted),
        "iter_load": lambda url: expect(dict(relayout.iter_load(url, 1, verify=True)), converted),
        "other_degree": lambda url: assert_equal(relayout.load(url, 0, tp=1), whole_tensors(model)),
        "cache": lambda url: expect(relayout.load(url, 1, cache=place / "cache"), converted),
        "verify": verify,
        "restore": restore,
        "convert": convert,
        "group": load_in_a_group,
    }


@pytest.mark.xdist_group("group")
def test_what_reads_survives_an_outage(
    server: Server, model: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "RETRY_SECONDS", 90.0)  # The fixture has less.
    for name in ("FIRST_DELAY_SECONDS", "MAX_DELAY_SECONDS"):
        monkeypatch.setattr(failures, name, getattr(failures, name) / 40)
    all_works = works(server, model, converted, tmp_path)
    for name in all_works:
        for file in (model if name == "convert" else converted).iterdir():
            server.put("models", f"{name}/{file.name}", file.read_bytes())
    server.interfere = outage = Outages(server, SECONDS)

    def run(name: str) -> float:
        all_works[name](f"s3://models/{name}")
        return time.monotonic() - outage.begun[name]

    took = dict(zip(all_works, each(run, list(all_works), len(all_works)), strict=True))
    assert set(outage.num_refused) == set(all_works)
    assert min(outage.num_refused.values()) >= _NUM_REFUSED
    assert min(took.values()) >= SECONDS
