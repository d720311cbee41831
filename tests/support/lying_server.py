"""What a server of the S3 protocol may do wrong: for `s3_server.Server.interfere`."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from support.s3_server import Answer, Request, Server, answer, error

Matches = Callable[[Request], bool]
Interference = Callable[[Request], Answer | None]


class DroppedError(Exception):
    """Ends the connection without an answer."""


def is_part(request: Request) -> bool:
    return request.method == "PUT" and "partNumber" in request.query


def is_completion(request: Request) -> bool:
    return request.method == "POST" and "uploadId" in request.query


def puts(name: str) -> Matches:
    """Whether an object of this name, whatever its prefix, is written whole."""
    return lambda request: request.method == "PUT" and not request.query and request.key.endswith(f"/{name}")


def refused(matches: Matches, status: int, code: str, times: int = 1, after: int = 0) -> Interference:
    """So many of these requests, after the first few, are answered by an error."""
    return _some(matches, times, after, lambda request: error(status, code))


def failing_late(matches: Matches, times: int = 1) -> Interference:
    """The error comes behind a good status, as S3 does when a completion takes long."""
    body = b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>InternalError</Code></Error>'
    return _some(matches, times, 0, lambda request: Answer(200, body))


def dropped(matches: Matches, times: int = 1, after: int = 0) -> Interference:
    """The connection ends, and nothing was done."""
    return _some(matches, times, after, _drop)


def lost(server: Server, matches: Matches, times: int = 1) -> Interference:
    """What is asked for is done, and the connection ends before the answer."""

    def act(request: Request) -> Answer:
        answer(server, request)
        return _drop(request)

    return _some(matches, times, 0, act)


def stalled(matches: Matches, seconds: float, times: int = 1) -> Interference:
    """No byte comes for a while."""

    def act(request: Request) -> None:
        time.sleep(seconds)

    return _some(matches, times, 0, act)


def at(matches: Matches, call: Callable[[], object], after: int = 0) -> Interference:
    """Something happens before one of these requests is answered."""
    return _some(matches, 1, after, lambda request: call() and None)


def _drop(request: Request) -> Answer:
    raise DroppedError


def _some(matches: Matches, times: int, after: int, act: Callable[[Request], Answer | None]) -> Interference:
    counter, lock = itertools.count(), threading.Lock()

    def interfere(request: Request) -> Answer | None:
        if not matches(request):
            return None
        with lock:
            number = next(counter)
        return act(request) if after <= number < after + times else None

    return interfere
