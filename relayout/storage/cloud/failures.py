"""Errors of requests, in our words: each names the object, the range and what to do, and never shows a secret.

obstore's own texts have URLs, which may be signed, and what the server said, which may be anything: nothing of them is
passed on but status, the server's error code, and which kind of failure it was.
"""

from __future__ import annotations

import errno
import os
import random
import re
import time
import warnings
from collections.abc import Callable
from typing import TypeVar

from relayout.core.workers import pause
from relayout.errors import FormatError
from relayout.storage.cloud import connect
from relayout.storage.protocols import RequestError

Answer = TypeVar("Answer")

FIRST_DELAY_SECONDS = 0.5
MAX_DELAY_SECONDS = 15.0
_MAX_RETRY_AFTER_SECONDS = 60.0
_TELL_SECONDS = 5.0
"""After so long without success, a person is told what is waited for, at most once a minute."""
_TELL_AGAIN_SECONDS = 60.0

_TRANSIENT = frozenset(
    {errno.EAGAIN, errno.EIO, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ENETUNREACH}
)
"""Errors that may be gone when a request is made again."""

_STATUS = re.compile(r"status code: ([0-9]{3})")
_CODE = re.compile(r"<Code>([A-Za-z.]{1,60})</Code>")
_BROKEN = re.compile(
    r"ConnectionReset|ConnectionAborted|ConnectionClosed|RemoteDisconnected|BrokenPipe|UnexpectedEof"
    r"|Incomplete(Body|Message|Read)"
)
_UNREACHABLE = re.compile(
    r"Unreachable|NetworkDown|NewConnectionError|ServiceRequestError|\bConnect\b"
    r"|[Tt]emporary failure in name resolution"
)
_MISSING = re.compile(
    r"Missing\w+|169\.254\.|metadata\.google|CredentialsNotLoaded|[Uu]nable to locate credentials"
    r"|CredentialsError|CredentialRetrieval|RefreshError|ClientAuthenticationError"
)
_CERTIFICATE = re.compile(r"certificate|UnknownIssuer|NotValidForName", re.IGNORECASE)
_PROXY = re.compile(r"ProxyError|ProxyConnectionError|[Tt]unnel")
_UNREADABLE = re.compile(r"ResponseParserError|ParseError|DecodeError")

_told = float("-inf")
"""When a person was told last, by the clock `time.monotonic`."""
_used_by: int | None = None
"""The process in which obstore's threads are. A forked child has none of them: a request there would wait forever."""


class Patience:
    """How long a request that fails is made again: for `RETRY_SECONDS` without progress, at growing intervals."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._delay = FIRST_DELAY_SECONDS

    def wait(self, error: RequestError) -> None:
        """Wait before the next request; in a worker, no longer than it works.

        Raises:
            RequestError: it is `error`, which another request would not change, or the time is over.
        """
        now = time.monotonic()
        left = self._start + connect.RETRY_SECONDS - now
        if error.errno not in _TRANSIENT or left <= 0:
            raise error
        if now - self._start > _TELL_SECONDS:
            _tell(error, left)
        # A server's word, so no longer than is bearable.
        asked = min(error.retry_after or 0.0, _MAX_RETRY_AFTER_SECONDS)
        pause(min(max(self._delay * random.uniform(0.5, 1), asked), left))
        self._delay = min(2 * self._delay, MAX_DELAY_SECONDS)


def _tell(error: RequestError, left: float) -> None:
    global _told
    if time.monotonic() - _told > _TELL_AGAIN_SECONDS:
        _told = time.monotonic()
        warnings.warn(f"{error.filename}: {error.strerror}; trying again for {left:.0f} s", stacklevel=2)


def request(call: Callable[[], Answer], where: str, part: tuple[int, int] | None = None) -> Answer:
    """What `call` returns, which calls obstore; its errors are translated. All requests are made so, see `persistent`.

    Args:
        where: the object's name in messages.
        part: the range that is asked for, as first byte and end.

    Raises:
        FormatError: the object is missing, or has another version than it must have.
        FileExistsError: it exists, and must not.
        RequestError: the request failed, again and again; or this process was forked after it had made requests.
    """
    return persistent(lambda: translated(call, where, part), where)


def persistent(call: Callable[[], Answer], where: str) -> Answer:
    """What `call` returns, which is called again while it raises a RequestError that may be gone later.

    Raises:
        RequestError: the request failed, again and again; or this process was forked after it had made requests.
    """
    check_process(where)
    patience = Patience()
    while True:
        try:
            return call()
        except RequestError as error:
            patience.wait(error)


def translated(call: Callable[[], Answer], where: str, part: tuple[int, int] | None = None) -> Answer:
    """What `call` returns, which calls obstore, once; its errors are translated. See `request`."""
    from obstore import exceptions

    failure: Exception
    try:
        return call()
    except FileNotFoundError:
        failure = FormatError("is missing", path=where, code="missing")
    except exceptions.PreconditionError:
        failure = replaced(where)
    except exceptions.AlreadyExistsError:
        failure = FileExistsError(errno.EEXIST, "an object of this name exists", where)
    except exceptions.InvalidPathError:
        what = "the store has a name that is no name of a file: with an empty part, . or .., or control characters"
        failure = FormatError(what, path=where, code="unsafe")
    except exceptions.BaseError as error:
        found = request_error(str(error), where, part)
        failure = replaced(where) if found.status == 412 else found  # In the middle of a body, obstore has no class.
    raise failure  # Here, so that it does not refer to obstore's error, which a traceback would show.


def replaced(where: str) -> FormatError:
    """The error for an object that is not the one of which other bytes were read."""
    return FormatError("was replaced while it was read", path=where, code="mismatch")


def check_process(where: str) -> None:
    """Check that this process was not forked after its parent had used a store.

    Raises:
        RequestError: it was.
    """
    global _used_by
    if _used_by is None:
        _used_by = os.getpid()
    if _used_by != os.getpid():
        what = (
            "this process was forked after its parent had used a store: threads of connections are not forked."
            " Start processes by spawn (vLLM: VLLM_WORKER_MULTIPROCESSING_METHOD=spawn)"
        )
        raise RequestError(errno.ENOTSUP, what, where)


def is_untrusted(text: str) -> bool:
    """Whether an error's text says that a certificate was refused."""
    return _CERTIFICATE.search(text) is not None


def request_error(text: str, where: str, part: tuple[int, int] | None = None) -> RequestError:
    """The error that a text of obstore's means, or one like those."""
    status = int(found[1]) if (found := _STATUS.search(text)) else None
    code = found[1] if (found := _CODE.search(text)) else None
    number, what = _CODES.get(code or "") or _meaning(text, status)
    named = ", ".join([*([f"HTTP {status}"] if status else []), *([code] if code else [])])
    shown = f"{what} ({named})" if named else what
    return RequestError(number, shown if part is None else f"bytes {part[0]} to {part[1]}: {shown}", where, status)


_SKEWED = errno.EACCES, "this machine's clock is wrong by minutes, which signatures do not bear: set it"
_CODES = {"RequestTimeTooSkewed": _SKEWED, "RequestExpired": _SKEWED}
"""What the codes of a server's errors mean, where the status alone would mislead."""


def _meaning(text: str, status: int | None) -> tuple[int, str]:
    """The system's number of an error, and what happened and what to do."""
    if "NoSuchUpload" in text:
        return errno.EIO, "its upload is gone: another process, or a rule of the bucket, has aborted it; convert again"
    match status:
        case 401 | 403:
            return errno.EACCES, (
                "access is denied: check that the credentials are right, not expired, and may read or write it"
                " (a store that may not be listed also says so of what does not exist)"
            )
        case 407:
            return errno.EACCES, "the proxy wants other credentials: check AWS_PROXY_URL (GOOGLE_, AZURE_), HTTPS_PROXY"
        case 416:
            return errno.EINVAL, "there are no such bytes: the object is shorter than it should be"
        case 429 | 503:
            return errno.EAGAIN, "the store has too many requests, again and again: load later, or with fewer threads"
        case 501 | 405:
            return errno.ENOTSUP, "the server does not know such requests"
        case int() if status >= 500:
            return errno.EIO, "the store failed, again and again: load later"
        case 408:
            return errno.ETIMEDOUT, "the store got no request in time, again and again: check the network"
        case int() if 300 <= status < 400:
            return errno.EINVAL, "the store sends requests elsewhere: check region and endpoint"
        case int():
            return errno.EINVAL, "the store refuses the request: check region, endpoint and credentials"
    if "BareRedirect" in text:
        return errno.EINVAL, "the bucket is in another region: set AWS_REGION"
    if _MISSING.search(text):
        return errno.EACCES, (
            "no credentials were found: set them in the environment as STORES.md says; for a public bucket of S3,"
            " AWS_SKIP_SIGNATURE=true"
        )
    if is_untrusted(text):
        return errno.EPROTO, (
            "the server's certificate is not trusted: name the file of the authority that signed it by SSL_CERT_FILE,"
            " for S3 also AWS_CA_BUNDLE, and check the server's name and this machine's clock"
        )
    if _PROXY.search(text):
        return errno.ECONNREFUSED, (
            "the proxy cannot be reached, or refuses: check AWS_PROXY_URL (GOOGLE_, AZURE_), HTTPS_PROXY and NO_PROXY"
        )
    if _UNREADABLE.search(text):
        return errno.EPROTO, "the server's answer cannot be read: check the endpoint"
    if "BadScheme" in text:
        return errno.EPROTO, "http:// is refused: say AWS_ALLOW_HTTP=true (GOOGLE_, AZURE_) if it is meant"
    if "TimedOut" in text or "timed out" in text:
        return errno.ETIMEDOUT, "no bytes arrived in time, again and again: check the network, or load later"
    if _BROKEN.search(text):
        return errno.ECONNRESET, "the connection broke, again and again: check the network, or load later"
    if "ConnectionRefused" in text:
        return errno.ECONNREFUSED, "the server cannot be reached, it refuses connections: check URL and endpoint"
    if _UNREACHABLE.search(text):
        return errno.ENETUNREACH, "the server cannot be reached: check the URL, the endpoint and the network"
    if "dns error" in text or "failed to lookup" in text or "Failed to resolve" in text:
        return errno.EHOSTUNREACH, "the server's name is unknown: check the URL, the endpoint and the network"
    if re.search(r"Requested \d+\.\.\d+, got \d+\.\.\d+|RangeNotSupported|ContentRange|content-range", text):
        return errno.EPROTO, "the server sent other bytes than were asked for: it does not serve ranges as it should"
    return errno.EIO, "the request failed, again and again: check the network and the endpoint, or load later"
