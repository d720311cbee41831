"""Uploads by parts that are sent in any order: what obstore has no calls for, and the providers' own clients have.

A file's first bytes depend on all others, so that its first part is sent last; obstore's own uploads send parts in
order. `providers.py` has an adapter for each client; requests that fail are made again here, for all of them: none of
the clients goes on for as long as an outage lasts, and their own retries are off.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Protocol, TypeVar

from relayout.storage.cloud.connect import RETRY_SECONDS
from relayout.storage.cloud.failures import check_process, is_untrusted, request_error

_RETRIED = {408, 429, 500, 502, 503, 504}
_RETRIED_CODES = {"RequestTimeout", "SlowDown"}
"""S3 says the first one with status 400."""
_PIECE_NBYTES = 2**20
"""What is handed to a connection at once: the time of a stall is for each."""
_FIRST_DELAY_SECONDS, _MAX_DELAY_SECONDS = 0.1, 8.0

Answer = TypeVar("Answer")


class Outcome(Enum):
    """What became of the completion of an upload."""

    DONE = "done"
    EXISTS = "exists"
    """An object of this name exists. It may be this one: the answer to an earlier request can have been lost."""
    CONFLICT = "conflict"
    """The store is busy with a conflicting request: to be asked again."""
    GONE = "gone"
    """There is no such upload (any more): it was completed, or aborted."""


class Multipart(Protocol):
    """Uploads to one bucket. Names are full names of objects; an upload is known by its name and id. Thread-safe.

    All calls raise RequestError if a request fails, again and again.
    """

    def begin(self, name: str) -> str:
        """Begin an upload, and return its id."""

    def send(self, name: str, upload: str, number: int, body: memoryview) -> str:
        """Send part `number`, from 0; return what `complete` must know of it. All parts but the last have 5 MiB."""

    def complete(self, name: str, upload: str, tags: Sequence[str]) -> Outcome:
        """Make the object of the parts, if there is none of this name."""

    def abort(self, name: str, upload: str) -> None:
        """Give the upload up, if it exists."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a provider's client says of a request that failed."""

    status: int | None = None
    """Of the answer; None: there was none."""
    code: str = ""
    """The server's name of the error."""
    retry_after: str = ""
    """The server's wish, in seconds."""
    text: str = ""
    """The client's own words, which may have URLs and secrets: they are looked into, and never shown."""
    is_final: bool = False
    """Whether the same request would fail again: no request was made, or the answer cannot be read."""

    @property
    def is_passing(self) -> bool:
        """Whether the same request may succeed later."""
        if self.status is None:
            return not self.is_final and not is_untrusted(self.text)
        return self.status in _RETRIED or self.code in _RETRIED_CODES

    @property
    def wait_seconds(self) -> float:
        """How long the server wants to be left alone."""
        return float(self.retry_after) if re.fullmatch(r"[0-9]{1,4}", self.retry_after) else 0.0


def texts_of(error: BaseException | None) -> str:
    """Names and texts of an error, and of those that led to it."""
    found = []
    while error is not None:
        name = type(error).__name__
        found += [name, "timed out" if "Timeout" in name else "", str(error)]
        error = error.__cause__ or error.__context__
    return " ".join(found)


def with_retries(
    call: Callable[[], Answer],
    where: str,
    errors: tuple[type[Exception], ...],
    failure_of: Callable[[Exception], Failure],
    outcomes: Mapping[int | str | None, Answer] = MappingProxyType({}),
) -> Answer:
    """What `call` returns, which makes a request; it is called again while what fails may pass.

    Args:
        errors: those that a client raises, of which `failure_of` tells what they mean.
        outcomes: what failures with these statuses or codes are answers to.

    Raises:
        RequestError: the request failed; or this process was forked after it had made requests.
    """
    check_process(where)
    end, delay = time.monotonic() + RETRY_SECONDS, _FIRST_DELAY_SECONDS
    while True:
        try:
            return call()
        except errors as error:
            found = failure_of(error)
        for key in (found.code, found.status):
            if key in outcomes:
                return outcomes[key]
        wait = max(found.wait_seconds, delay * random.uniform(0.5, 1))
        if not found.is_passing or time.monotonic() + wait > end:
            # Not within `except`: the client's error, which a traceback would show, may have secrets.
            status = "" if found.status is None else f"status code: {found.status}"
            raise request_error(f"{status} <Code>{found.code}</Code> {found.text}", where)
        time.sleep(wait)
        delay = min(2 * delay, _MAX_DELAY_SECONDS)


def required(value: object, where: str) -> str:
    """What an answer must have.

    Raises:
        RequestError: it lacks it.
    """
    if not value or not isinstance(value, str):
        raise request_error("ParseError", where)
    return value


class Body:
    """A part as a file that clients read, without a copy. It begins anew behind its end, for a client that resends.

    It has no `tell`, from which clients would take that what they have read already shall not be sent.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._offset = 0

    def __len__(self) -> int:
        return self._view.nbytes

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self.read, b"")

    def read(self, size: int = -1) -> memoryview:
        """The next piece; it may be larger than `size`, as clients ask for 16 KiB."""
        piece = self._view[self._offset : self._offset + _PIECE_NBYTES]
        self._offset = self._offset + piece.nbytes if piece.nbytes else 0
        return piece

    def seek(self, offset: int) -> int:
        """Go to an offset from the beginning."""
        self._offset = offset
        return offset
