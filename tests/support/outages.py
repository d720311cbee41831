"""A server that is out of order for a while, in the middle of a piece of work; and clocks that are as much shorter."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
from support import s3_server
from support.lying_server import DroppedError
from support.s3_server import Answer, Request, Server

from relayout.storage.cloud import connect, failures

_RESET_AFTER = 2**20


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
        if time.monotonic() - self.begun[folder] > self.seconds:
            return None
        self.num_refused[folder] = self.num_refused.get(folder, 0) + 1
        return self._fail(request, self.num_refused[folder])

    def _fail(self, request: Request, number: int) -> Answer:
        if number == 1:
            found = s3_server.answer(self.server, request)
            found.cut, found.is_reset = min(_RESET_AFTER, len(found.body) // 2), True
            return found
        if number % 2:
            raise DroppedError
        return s3_server.error(503, "SlowDown")


def shorten(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """Make all waiting shorter by a factor."""
    for module, name in (
        (connect, "RETRY_SECONDS"),
        (connect, "STALL_SECONDS"),
        (failures, "FIRST_DELAY_SECONDS"),
        (failures, "MAX_DELAY_SECONDS"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name) / scale)
