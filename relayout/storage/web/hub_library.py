"""Requests to the hub by its own library, and the addresses of files: shared by repositories and buckets.

The hub's own library supplies the endpoint, the credentials, and the URL of a file's bytes. Some of its calls follow
redirects and read without a limit. So this module reads the answers of the hub's API.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from relayout.errors import FormatError, PlanError, RelayoutError, shown
from relayout.storage.cloud import connect
from relayout.storage.cloud.failures import persistent, request_error, seconds_of, texts_of
from relayout.storage.cloud.store import timed
from relayout.storage.stores import RequestError
from relayout.storage.web import http

Answer = TypeVar("Answer")

_SIGNED_SECONDS = 600.0
"""A signed URL is asked for again after so long; the hub's are good for an hour."""


@dataclass(frozen=True, slots=True)
class Address:
    """The source of a file's bytes."""

    url: str
    headers: Mapping[str, str]
    since: float
    """Time of the request, by the clock `time.monotonic`, in seconds."""
    is_xet: bool
    """True if the hub offers the bytes by Xet, the protocol of its own tools."""
    is_hub: bool
    """True if the hub itself sends the bytes, without a redirect to a storage."""

    @property
    def is_old(self) -> bool:
        """True if the URL may soon expire."""
        return time.monotonic() - self.since > _SIGNED_SECONDS


def library() -> Any:
    """Return the hub's library. It is imported at the first call, because that takes a while."""
    import huggingface_hub.errors
    import huggingface_hub.file_download
    import huggingface_hub.utils

    return huggingface_hub


def call_library(call: Callable[[], Answer], location: str, download: str) -> Answer:
    """Call the hub's library, and return the result. Errors are translated, and contain no text of a server.

    Args:
        download: the command that downloads the file, for messages.
    """
    try:
        return call()
    except Exception as error:
        failure = _translated(error, location, download)
    raise failure  # Here, so that it does not refer to the library's error, which a traceback would show.


def endpoint() -> str:
    """Return the URL of the hub, without a slash at the end."""
    return str(library().constants.ENDPOINT)


def read_answer(url: str, location: str, limit: int) -> tuple[bytes, str | None]:
    """Request a URL of the hub's API; return the content, and the URL of the page that follows it.

    The library's own calls would follow redirects, and read without a limit. To be called by `call_library`.
    """
    hub, content = library(), bytearray()
    options = {"headers": hub.utils.build_hf_headers(), "timeout": connect.STALL_SECONDS}
    with hub.utils.get_session().stream("GET", url, follow_redirects=False, **options) as answer:
        hub.utils.hf_raise_for_status(answer)
        for piece in timed(answer.iter_bytes(), location):
            content += piece
            if len(content) > limit:
                raise FormatError(f"more than {limit} bytes", path=location, code="limit")
        following = answer.links.get("next", {}).get("url")
    # Proof that the server may choose: the next page is on the hub itself.
    if following is not None and not http.is_same_server(following, url):
        raise RequestError(errno.EPROTO, "the hub continues a listing on another server", location)
    return bytes(content), following


def metadata_of(url: str, location: str, download: str) -> Any:
    """Request a file's length, hash, and the location of its bytes from the hub. Retried like all requests."""
    hub = library()

    def ask() -> Any:
        return call_library(lambda: hub.get_hf_file_metadata(url, timeout=connect.STALL_SECONDS), location, download)

    return persistent(ask, location)


def address_of(found: Any, url: str, location: str) -> Address:
    """Check the location of a file's bytes that the hub returned.

    An address on another server is accepted, because it must be https if the hub is, the caller has compared length and
    hash, and the token is not sent to that server.
    """
    scheme, _, rest = found.location.partition("://")
    is_hub = http.is_same_server(found.location, url)
    if not is_hub and (scheme not in ("https", url.partition(":")[0]) or "@" in rest.partition("/")[0]):
        raise RequestError(errno.EPROTO, f"the hub redirects to {shown(scheme)}, expected https", location)
    headers = library().utils.build_hf_headers() if is_hub else {}  # The hub itself has small files.
    return Address(found.location, headers, time.monotonic(), found.xet_file_data is not None, is_hub)


_LOG_IN = "log in (hf auth login, or HF_TOKEN)"
_ERRORS: dict[str, tuple[type[FormatError | PlanError], str]] = {
    "GatedRepoError": (PlanError, f"is gated: accept its terms on the hub, and {_LOG_IN}"),
    "RepositoryNotFoundError": (PlanError, f"no such repository on the hub; for a private one, {_LOG_IN}"),
    "BucketNotFoundError": (PlanError, f"no such bucket on the hub; for a private one, {_LOG_IN}"),
    "RevisionNotFoundError": (PlanError, "no such revision of the repository"),
    "EntryNotFoundError": (FormatError, "is missing"),
}
"""Translations of the library's errors, by class name. The first class in the order of inheritance applies."""
_STATUS = {
    400: (errno.EINVAL, "the hub refuses the request"),
    401: (errno.EACCES, f"the hub refuses the token: {_LOG_IN}"),
    403: (errno.EACCES, "the token may not read it"),
    404: (errno.ENOENT, "not found on the hub"),
    429: (errno.EAGAIN, "the hub throttles requests from here: retry later, or use a token"),
}


def _translated(error: Exception, location: str, download: str) -> Exception:
    """Return a translated error: the library's errors come from packages that differ between its major versions."""
    errors = library().errors
    for kind in type(error).__mro__:
        if kind.__name__ in _ERRORS:
            family, what = _ERRORS[kind.__name__]
            return family(what, path=location, code="missing")
    if isinstance(error, errors.OfflineModeIsEnabled):
        what = (
            "HF_HUB_OFFLINE is set, and the hub's cache on this machine does not have it: download it where there is"
            f" a network ({download}), or unset HF_HUB_OFFLINE"
        )
        return RequestError(errno.ENOTCONN, what, location)
    if isinstance(error, errors.HfHubHTTPError):
        status, wait = error.response.status_code, seconds_of(error.response.headers.get("retry-after"))
        number, what = _STATUS.get(status, (errno.EIO, "the hub returned a server error: retry later"))
        return RequestError(number, f"{what} (HTTP {status})", location, status, retry_after=wait)
    if isinstance(error, RelayoutError | RequestError):
        return error
    if isinstance(error, ValueError):  # An address that is none.
        return FormatError("the hub's answer is not what its library expects", path=location, code="invalid")
    return request_error(http.without_hosts(texts_of(error)), location)


def denied(error: RequestError, address: Address, location: str, download: str) -> RequestError:
    """Return the error for bytes that are refused, although the hub has just signed their URL."""
    if error.status not in (401, 403) or not address.is_xet:
        return error
    what = (
        f"the hub serves this file by Xet only: download it with the hub's own tool ({download}), and give the folder"
    )
    return RequestError(errno.EACCES, f"{what} (HTTP {error.status})", location, error.status)
