"""Retries and errors of requests. Each error names the object, the range and what to do, and never shows a secret.

The error texts of clients contain URLs, which may be signed, and parts of answers, which may have any content. Only the
status, the server's error code and the kind of failure are passed on.
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
from relayout.storage.stores import RequestError

Answer = TypeVar("Answer")

FIRST_DELAY_SECONDS = 0.5
MAX_DELAY_SECONDS = 15.0
_MAX_RETRY_AFTER_SECONDS = 60.0
_LOG_SECONDS = 5.0
"""Seconds without success before a warning names the failing request. Warnings are at least `_LOG_AGAIN_SECONDS`
apart."""
_LOG_AGAIN_SECONDS = 60.0

_REFUSED_SECONDS = 4.0
"""Seconds of retries for a server that has not answered this process before, if it refuses connections or its name
cannot be looked up. It may just be starting; more likely the name or port is wrong, or the network is down."""

_TRANSIENT = frozenset(
    {errno.EAGAIN, errno.EIO, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ENETUNREACH, errno.ENETDOWN}
)
"""Transient errors: the request is repeated."""
_UNKNOWN_NAME, _NO_LOOKUP = errno.EHOSTUNREACH, errno.ENETDOWN
"""Errors of looking up a server's name: the name does not exist; or it cannot be looked up now, as without a
network. The first is repeated only if the server has answered before: then the network failed, and the name is
right."""

_STATUS = re.compile(r"status code: ([0-9]{3})")
_CODE = re.compile(r"<Code>([A-Za-z.]{1,60})</Code>")

_warned = float("-inf")
"""Time of the last warning, by the clock `time.monotonic`."""
_answered: set[str] = set()
"""Servers and buckets that have answered this process: scheme and host of their URLs."""
_used_by: int | None = None
"""Id of the process that has obstore's threads. A forked child has no such threads: a request there would wait
forever."""


class RetryPolicy:
    """The retry policy of a failing request: `RETRY_SECONDS` without progress, at growing intervals."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._delay = FIRST_DELAY_SECONDS

    def wait(self, error: RequestError) -> None:
        """Wait before the next attempt, or raise `error` if the retries have ended.

        In a worker, the wait ends early when another worker fails.
        """
        now = time.monotonic()
        if error.status is not None:
            _answered.add(_server(error.filename))
        limit, has_answered = connect.RETRY_SECONDS, _server(error.filename) in _answered
        if not has_answered:
            # No file can be read, so the error names the folder instead of the file that was requested first.
            error.filename = error.filename.rpartition("/")[0] if error.filename.count("/") > 3 else error.filename
            limit = min(limit, _REFUSED_SECONDS) if error.errno in (errno.ECONNREFUSED, _NO_LOOKUP) else limit
        left = self._start + limit - now
        may_pass = error.errno in _TRANSIENT or (error.errno == _UNKNOWN_NAME and has_answered)
        if not may_pass or left <= 0:
            raise error
        if now - self._start > _LOG_SECONDS:
            _warn(error, left)
        # The server chooses this time, so it is limited.
        requested = min(error.retry_after or 0.0, _MAX_RETRY_AFTER_SECONDS)
        pause(min(max(self._delay * random.uniform(0.5, 1), requested), left))
        self._delay = min(2 * self._delay, MAX_DELAY_SECONDS)


def _server(location: str) -> str:
    return "/".join(location.split("/")[:3])


def _warn(error: RequestError, left: float) -> None:
    global _warned
    if time.monotonic() - _warned > _LOG_AGAIN_SECONDS:
        _warned = time.monotonic()
        warnings.warn(f"{error.filename}: {error.strerror}; retrying for {left:.0f} s", stacklevel=2)


def request(call: Callable[[], Answer], location: str, part: tuple[int, int] | None = None) -> Answer:
    """Call obstore, translate its errors, and repeat the call as `persistent` does.

    Args:
        location: the object's name in messages.
        part: the requested range, as first byte and end.
    """
    return persistent(lambda: translated(call, location, part), location)


def persistent(call: Callable[[], Answer], location: str) -> Answer:
    """Call, and repeat the call while it raises a transient RequestError. All requests to stores use this function."""
    check_process(location)
    patience = RetryPolicy()
    while True:
        try:
            answer = call()
        except RequestError as error:
            patience.wait(error)
        else:
            _answered.add(_server(location))
            return answer


def translated(call: Callable[[], Answer], location: str, part: tuple[int, int] | None = None) -> Answer:
    """Call obstore once, and translate its errors; see `request`."""
    from obstore import exceptions

    failure: Exception
    try:
        return call()
    except FileNotFoundError:
        failure = FormatError("is missing", path=location, code="missing")
    except exceptions.PreconditionError:
        failure = replaced(location)
    except exceptions.AlreadyExistsError:
        failure = FileExistsError(errno.EEXIST, "an object of this name exists", location)
    except exceptions.InvalidPathError:
        what = "the store lists a name that is not valid for a file: with an empty part, . or .., or control characters"
        failure = FormatError(what, path=location, code="unsafe")
    except exceptions.BaseError as error:
        failure = request_error(str(error), location, part)
        if failure.status == 412:  # obstore has no exception class for this status in the middle of a body.
            failure = replaced(location)
    raise failure  # Raised here, without a reference to obstore's error, which a traceback would show.


def replaced(location: str) -> FormatError:
    """Return the error for an object with another version than bytes that were read before."""
    return FormatError("was replaced while it was read", path=location, code="mismatch")


def check_process(location: str) -> None:
    """Raise RequestError if this process was forked after its parent had used a store."""
    global _used_by
    if _used_by is None:
        _used_by = os.getpid()
    if _used_by != os.getpid():
        what = (
            "this process was forked after its parent had used a store: connection threads do not survive a fork."
            " Start processes by spawn (vLLM: VLLM_WORKER_MULTIPROCESSING_METHOD=spawn)"
        )
        raise RequestError(errno.ENOTSUP, what, location)


def request_error(
    text: str,
    location: str,
    part: tuple[int, int] | None = None,
    *,
    status: int | None = None,
    code: str = "",
    retry_after: str | None = None,
    is_final: bool = False,
) -> RequestError:
    """Return the error for a failed request.

    Args:
        text: the client's error text, in obstore's words or similar ones. It is searched, and never shown.
        status, code: values of the server's answer, if the text does not contain them.
        retry_after: the header `Retry-After` of the answer.
        is_final: True if no repetition can succeed, regardless of the kind of error.
    """
    status = int(match[1]) if status is None and (match := _STATUS.search(text)) else status
    code = match[1] if not code and (match := _CODE.search(text)) else code
    number, what = _meaning(text, status, code)
    if is_final and number in _TRANSIENT:
        number = errno.EINVAL
    named = ", ".join([*([f"HTTP {status}"] if status else []), *([code] if code else [])])
    shown = f"{what} ({named})" if named else what
    if part is not None:
        shown = f"bytes {part[0]} to {part[1]}: {shown}"
    return RequestError(number, shown, location, status, code, seconds_of(retry_after))


def seconds_of(retry_after: str | None) -> float | None:
    """Return the seconds in a header `Retry-After`; None if the header is missing or contains a date."""
    return float(retry_after) if retry_after and re.fullmatch(r"[0-9]{1,18}", retry_after, re.ASCII) else None


def texts_of(error: BaseException | None) -> str:
    """Return the names and texts of a client's error and of its causes, for `request_error`."""
    texts = []
    while error is not None:
        name = type(error).__name__
        texts += [name, "timed out" if "Timeout" in name else "", str(error)]
        error = error.__cause__ or error.__context__
    return " ".join(texts)


def _meaning(text: str, status: int | None, code: str) -> tuple[int, str]:
    """Return the error number, and a text with the failure and the advice."""
    if code in _CODES:
        return _CODES[code]
    if status is not None:
        return _STATUSES.get(status) or _STATUSES.get(status // 100, _REFUSED)
    return next((meaning for pattern, meaning in _TEXTS.items() if re.search(pattern, text)), _UNKNOWN)


_REFUSED = errno.EINVAL, "the store refuses the request: check region, endpoint and credentials"
_UNKNOWN = errno.EIO, "the request failed: check the network and the endpoint, or retry later"
_BUSY = errno.EAGAIN, "the store throttles requests: retry later, or with fewer threads"
_SLOW = errno.ETIMEDOUT, "the store timed out waiting for a request: check the network"
_DENIED = (
    errno.EACCES,
    "access denied: check that the credentials are valid and permit this request"
    " (a store that denies listing also answers so for objects that do not exist)",
)
_UNSUPPORTED = errno.ENOTSUP, "the server does not support this request"
_SKEWED = errno.EACCES, "this machine's clock is off by minutes, so signatures are rejected: set the clock"
_NO_CREDENTIALS = (
    errno.EACCES,
    "no credentials found: set them in the environment (see STORES.md); for a public bucket of S3,"
    " AWS_SKIP_SIGNATURE=true",
)
_NO_TLS = errno.EPROTO, "the server does not speak TLS: check the port; a registry without TLS is oci+http://"
_UNTRUSTED = (
    errno.EPROTO,
    "the server's certificate is not trusted: set SSL_CERT_FILE to the certificate of the authority that signed it,"
    " for S3 also AWS_CA_BUNDLE, and check the server's name and this machine's clock",
)
_NO_PROXY = (
    errno.ECONNREFUSED,
    "the proxy is unreachable or refuses the request: check HTTPS_PROXY and NO_PROXY",
)
_NO_ANSWER = "the server's answer cannot be read: check the endpoint"
_BROKEN = "the connection broke: check the network, or retry later"
_UNREACHABLE = "the server cannot be reached"
_CHECK = "check the URL, the endpoint and the network"
_NETWORK = "check the network and the resolver"
_WRONG_RANGE = errno.EPROTO, "the server did not return the requested range: it does not support ranges correctly"
_REDIRECTED = (
    errno.EINVAL,
    "the store redirects requests, which are not followed to other hosts: check region and endpoint",
)
_CODES = {
    "RequestTimeTooSkewed": _SKEWED,
    "RequestExpired": _SKEWED,
    "RequestTimeout": _SLOW,  # With status 400.
    "SlowDown": _BUSY,
    "NoSuchUpload": (
        errno.EINVAL,
        "its upload no longer exists: aborted by another process or a lifecycle rule; convert again",
    ),
}
"""Kinds of failure by the server's error code, where the status alone would mislead."""
_STATUSES = {
    3: _REDIRECTED,
    401: _DENIED,
    403: _DENIED,
    405: _UNSUPPORTED,
    407: (errno.EACCES, "the proxy requires credentials: check HTTPS_PROXY"),
    408: _SLOW,
    409: (errno.EAGAIN, "the store reports conflicting requests for this object: retry later"),
    416: (errno.EINVAL, "range beyond the end of the object: it is truncated"),
    429: _BUSY,
    5: (errno.EIO, "the store returns server errors: retry later"),
    501: _UNSUPPORTED,
    503: _BUSY,
}
"""Kinds of failure by the status, or by its first digit."""
_TEXTS = {
    r"unsupported scheme socks5|127\.0\.0\.1:0\b": _REDIRECTED,  # The redirect went to a host that `connect` blocks.
    r"BareRedirect": (errno.EINVAL, "the bucket is in another region: set AWS_REGION"),
    r"Missing(E[Tt]ag|LastModified|ContentLength|Version)": (errno.EPROTO, _NO_ANSWER),
    r"Missing\w+|169\.254\.|metadata\.google|CredentialsNotLoaded|[Uu]nable to locate credentials"
    r"|CredentialsError|CredentialRetrieval|RefreshError|ClientAuthenticationError": _NO_CREDENTIALS,
    r"(?i:WRONG_VERSION_NUMBER|record layer failure)": _NO_TLS,
    r"(?i:certificate|UnknownIssuer|NotValidForName)": _UNTRUSTED,
    r"ProxyError|ProxyConnectionError|[Tt]unnel": _NO_PROXY,
    r"ResponseParserError|ParseError|DecodeError": (errno.EPROTO, _NO_ANSWER),
    r"BadScheme": (errno.EPROTO, "http:// is refused: an endpoint that is named with http:// permits it"),
    r"TimedOut|timed out": (errno.ETIMEDOUT, "requests timed out: check the network, or retry later"),
    r"ConnectionReset|ConnectionAborted|ConnectionClosed|RemoteDisconnected|BrokenPipe|UnexpectedEof"
    r"|Incomplete(Body|Message|Read)|Connection (aborted|broken)": (errno.ECONNRESET, _BROKEN),
    r"[Tt]emporary failure in name resolution": (_NO_LOOKUP, f"the server's name cannot be looked up: {_NETWORK}"),
    r"dns error|failed to lookup|Failed to resolve|gaierror": (
        _UNKNOWN_NAME,
        f"the server's name is unknown: {_CHECK}",
    ),
    r"ConnectionRefused": (errno.ECONNREFUSED, f"{_UNREACHABLE}, it refuses connections: check URL and endpoint"),
    r"Unreachable|NetworkDown|NewConnectionError|ServiceRequestError|\bConnect\b": (
        errno.ENETUNREACH,
        f"{_UNREACHABLE}: {_CHECK}",
    ),
    r"Requested \d+\.\.\d+, got \d+\.\.\d+|RangeNotSupported|ContentRange|content-range": _WRONG_RANGE,
}
"""Kinds of failure by a pattern in the client's text about a request without an answer. The first match counts."""
