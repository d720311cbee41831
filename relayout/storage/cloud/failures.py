"""Errors of requests, in our words: each names the object, the range and what to do, and never shows a secret.

obstore's own texts have URLs, which may be signed, and what the server said, which may be anything: nothing of them is
passed on but status, the server's error code, and which kind of failure it was.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from typing import TypeVar

from relayout.errors import FormatError
from relayout.storage.protocols import RequestError

Answer = TypeVar("Answer")

_STATUS = re.compile(r"status code: ([0-9]{3})")
_CODE = re.compile(r"<Code>([A-Za-z.]{1,60})</Code>")
_MISSING = re.compile(
    r"Missing\w+|169\.254\.|metadata\.google|CredentialsNotLoaded|[Uu]nable to locate credentials"
    r"|CredentialsError|CredentialRetrieval|RefreshError|ClientAuthenticationError"
)
_CERTIFICATE = re.compile(r"CERTIFICATE_VERIFY_FAILED|InvalidCertificate|invalid peer certificate")
_PROXY = re.compile(r"ProxyError|ProxyConnectionError|[Tt]unnel")
_UNREADABLE = re.compile(r"ResponseParserError|ParseError|DecodeError")

_used_by: int | None = None
"""The process in which obstore's threads are. A forked child has none of them: a request there would wait forever."""


def request(call: Callable[[], Answer], where: str, part: tuple[int, int] | None = None) -> Answer:
    """What `call` returns, which calls obstore; its errors are translated. All requests are made so.

    Args:
        where: the object's name in messages.
        part: the range that is asked for, as first byte and end.

    Raises:
        FormatError: the object is missing, or has another version than it must have.
        FileExistsError: it exists, and must not.
        RequestError: the request failed; or this process was forked after it had made requests.
    """
    check_process(where)
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
    except exceptions.BaseError as error:
        found = request_error(str(error), where, part)
        failure = replaced(where) if found.status == 412 else found  # In the middle of a body, obstore has no class.
    raise failure  # Here, so that it does not refer to obstore's error, which a traceback would show.


def replaced(where: str) -> FormatError:
    """The error for an object that is not the one of which other bytes were read."""
    return FormatError("was replaced while it was read", path=where, code="mismatch")


def first_line(error: BaseException) -> str:
    """What obstore says of settings, without URLs."""
    lines = str(error).splitlines() or [""]
    return re.sub(r"[a-z0-9+]+://\S+", "URL", lines[0])[:200]


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
    number, what = _meaning(text, status)
    named = ", ".join([*([f"HTTP {status}"] if status else []), *([code] if code else [])])
    shown = f"{what} ({named})" if named else what
    return RequestError(number, shown if part is None else f"bytes {part[0]} to {part[1]}: {shown}", where, status)


def _meaning(text: str, status: int | None) -> tuple[int, str]:
    """The system's number of an error, and what happened and what to do."""
    if "RequestTimeTooSkewed" in text:
        return errno.EACCES, "this machine's clock is wrong by many minutes, so that signatures are refused: set it"
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
            return errno.EREMOTEIO, "the store failed, again and again: load later"
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
            " for S3 also AWS_CA_BUNDLE"
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
    if "dns error" in text or "failed to lookup" in text or "Failed to resolve" in text:
        return errno.EHOSTUNREACH, "the server's name is unknown: check the URL, the endpoint and the network"
    if "ConnectionRefused" in text or "Connect" in text:
        return errno.ECONNREFUSED, "the server cannot be reached: check the URL, the endpoint and the network"
    if re.search(r"Requested \d+\.\.\d+, got \d+\.\.\d+|RangeNotSupported|ContentRange|content-range", text):
        return errno.EPROTO, "the server sent other bytes than were asked for: it does not serve ranges as it should"
    return errno.EREMOTEIO, "the request failed, again and again: check the network and the endpoint, or load later"
