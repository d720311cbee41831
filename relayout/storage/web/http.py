"""Web servers: files below an https:// URL, read by ranges. Redirects stay on the server, and sizes are limited.

obstore follows redirects anywhere, and reports neither the final URL nor `Retry-After`. This module follows redirects
on the same server only. Web servers cannot be listed, so well-known names are requested.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar, TypeAlias
from urllib.parse import quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from relayout.core.workers import each
from relayout.errors import FormatError, escape_controls
from relayout.format.fields import parse_object
from relayout.storage.cloud import connect
from relayout.storage.cloud.bucket import check_answer, is_comparable
from relayout.storage.cloud.failures import persistent, replaced, request_error, texts_of
from relayout.storage.cloud.store import CLOUD_COST, Body, CloudStore, check_url
from relayout.storage.stores import FileStat, RequestCost, RequestError, Store, if_there, limited, listing_timer

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager

_HOST = re.compile(r"[\w-]+(\.[\w-]+)+")
_MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PIECE_NBYTES = 256 * 2**10
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_INDEX = "model.safetensors.index.json"
_KNOWN = (
    "relayout.json",
    _INDEX,
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "LICENSE",
    "README.md",
)
"""Files of checkpoints that are requested one by one."""
_MAX_INDEX_NBYTES = 64 * 2**20

Headers = Mapping[str, str]
Sender: TypeAlias = "Callable[[str, str, str, Headers], BaseHTTPResponse]"
"""Sends one request and returns its answer, as `send` does."""


def get(
    url: str,
    location: str,
    start: int,
    end: int | None,
    version: str | None,
    headers: Headers | None = None,
    sender: Sender | None = None,
) -> Body:
    """Request a range of a file; see `Client.get`. Messages name the file `location`.

    Args:
        sender: sends the request, for a server with its own credentials and redirects. Default: `send`.
    """
    request_headers = dict(headers or {})
    if end is not None:
        request_headers["range"] = f"bytes={start}-{end - 1}"
    if version is not None and is_comparable(version):
        request_headers["if-match"] = version

    def ask() -> Body:
        answer = (sender or send)("GET", url, location, request_headers)
        stat, part = _described(answer, location, None if end is None else (start, end))
        check_answer(stat, part, start, end, version, location)
        pieces = pieces_of(answer, location, part)
        return Body(
            stat,
            location,
            part,
            pieces,
            lambda offset: get(url, location, offset, part[1], stat.version, headers, sender),
        )

    return persistent(ask, location)


def stat(url: str, location: str) -> FileStat | None:
    """Return a file's metadata, or None if it does not exist; see `Client.stat`."""

    return if_there(lambda: persistent(lambda: _described(send("HEAD", url, location), location)[0], location))


def send(
    method: str, url: str, location: str, headers: Headers | None = None, body: bytes | Iterable[bytes] | None = None
) -> BaseHTTPResponse:
    """Send one request and return its answer with any status. Redirects are followed on the same server only.

    Args:
        body: bytes to send, or pieces of a body with its length in the headers. It can be sent only once, so a request
            with a body follows no redirect.
    """
    from urllib3 import Timeout
    from urllib3.exceptions import HTTPError

    timeout = Timeout(connect=connect.CONNECT_SECONDS, read=connect.STALL_SECONDS)
    if body is not None:  # A server answers only after it has stored everything.
        timeout = Timeout(connect=connect.STALL_SECONDS, read=connect.UPLOAD_SECONDS)
    for _ in range(_MAX_REDIRECTS):
        try:
            answer = _pool(urlsplit(url).scheme, urlsplit(url).hostname or "").urlopen(
                method,
                url,
                headers={"accept-encoding": "identity", "user-agent": "relayout", **(headers or {})},
                redirect=False,
                retries=False,
                body=body,
                timeout=timeout,
                preload_content=False,
                decode_content=False,
            )
        except (HTTPError, ValueError, UnicodeError) as error:
            failure = _failure(error, location)
        else:
            target = redirect_of(answer, url)
            # The server may choose this address, because it is on the same server.
            if target is None or body is not None or _origin(target) != _origin(url):
                return answer
            answer.close()
            url = target
            continue
        raise failure
    raise RequestError(errno.EPROTO, f"more than {_MAX_REDIRECTS} redirects", location)


def redirect_of(answer: BaseHTTPResponse, url: str) -> str | None:
    """Return the target of a redirect in the answer to a request for `url`; None if the answer is not a redirect."""
    if answer.status not in _REDIRECTS or "location" not in answer.headers:
        return None
    try:
        target = urljoin(url, answer.headers["location"])
        _origin(target)
    except ValueError:  # Not a URL.
        return "invalid:"
    return target


def _described(
    answer: BaseHTTPResponse, location: str, part: tuple[int, int] | None = None
) -> tuple[FileStat, tuple[int, int]]:
    """Return length and version of the file from an answer, and the range in the answer.

    Args:
        part: the requested range, for messages.
    """
    if answer.status in (200, 206):
        found = _RANGE.fullmatch(answer.headers.get("content-range", "")) if answer.status == 206 else None
        length = found[3] if found else answer.headers.get("content-length", "")
        if (answer.status == 206 and found is None) or not _NUMBER.fullmatch(length):
            answer.close()
            raise RequestError(errno.EPROTO, "the server sends no file length, or no valid range", location)
        version = answer.headers.get("etag") or answer.headers.get("last-modified") or ""
        brought = (int(found[1]), int(found[2]) + 1) if found else (0, int(length))
        return FileStat(int(length), version, vouched=_vouched(location, int(length), version)), brought
    answer.close()
    target = redirect_of(answer, "")
    if target is not None:
        parts = urlsplit(target)
        named = escape_controls(f"{parts.scheme}://{parts.hostname}"[:100])  # The rest may contain a signature.
        what = f"redirected to {named}: redirects to other servers are not followed; give that URL if you trust it"
        raise RequestError(errno.EPROTO, f"{what} (HTTP {answer.status})", location, answer.status)
    if answer.status in (404, 410):
        raise FormatError("is missing", path=location, code="missing")
    if answer.status == 412:
        raise replaced(location)
    raise request_error("", location, part, status=answer.status, retry_after=answer.headers.get("retry-after"))


def _vouched(location: str, nbytes: int, version: str) -> str | None:
    """Return `FileStat.vouched` for a strong ETag. ETags of nginx and Apache, made from time and length, give None."""
    made_of = version.strip('"').lower().split("-")
    return f"{location} {version}" if is_comparable(version) and f"{nbytes:x}" not in made_of else None


def pieces_of(answer: BaseHTTPResponse, location: str, part: tuple[int, int] | None = None) -> Iterator[bytes]:
    from urllib3.exceptions import HTTPError

    try:
        while True:
            try:
                piece = answer.read1(_PIECE_NBYTES)
            except (HTTPError, OSError) as error:
                failure = _failure(error, location, part)
            else:
                if not piece:
                    return
                yield piece
                continue
            raise failure
    finally:
        answer.close() if answer.length_remaining else answer.release_conn()


def _failure(error: Exception, location: str, part: tuple[int, int] | None = None) -> RequestError:
    """Translate an error of urllib3. The result shows nothing of the URL."""
    if isinstance(error, ValueError) and not isinstance(error, OSError):  # Errors of certificates are both.
        return RequestError(errno.EINVAL, "is not a valid URL for a request", location)
    return request_error(without_hosts(texts_of(error)), location, part)


def without_hosts(text: str) -> str:
    """Remove host names from a client's text: they may contain words that `request_error` searches for."""
    return _HOST.sub("", text)


def is_same_server(url: str, other: str) -> bool:
    """Return True if both URLs are of one server: scheme, host and port. An invalid URL is of no server."""
    try:
        return _origin(url) == _origin(other)
    except ValueError:
        return False


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    return scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(scheme)


@cache
def _pool(scheme: str, host: str) -> PoolManager:
    """Return the connections to a host, through the environment's proxy if it has one."""
    import urllib3

    proxy = None if proxy_bypass(host) else getproxies().get(scheme)
    return urllib3.ProxyManager(proxy, maxsize=128) if proxy else urllib3.PoolManager(maxsize=128)


@dataclass(frozen=True, slots=True)
class WebClient:
    """A web server."""

    root: str
    cost: ClassVar[RequestCost] = CLOUD_COST

    def get(self, name: str, start: int, end: int | None, version: str | None) -> Body:
        return get(f"{self.root}/{quote(name)}", f"{self.root}/{name}", start, end, version)

    def stat(self, name: str) -> FileStat | None:
        return stat(f"{self.root}/{quote(name)}", f"{self.root}/{name}")

    def list_objects(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Yield the well-known names that exist, and the files in the checkpoint's index."""
        above = f"{prefix}/" if prefix else ""
        stats = each(lambda name: self.stat(above + name), _KNOWN, self.cost.num_opens)
        versions = {name: stat.version for name, stat in zip(_KNOWN, stats, strict=True) if stat is not None}
        if _INDEX in versions:
            shards = self._shards(above)
            if "relayout.json" in versions:  # In a folder with only slices, the index names files that do not exist.
                check_time = listing_timer(f"{self.root}/{above}")
                found = each(lambda name: (check_time(), self.stat(above + name))[1], shards, self.cost.num_opens)
                shards = [name for name, stat in zip(shards, found, strict=True) if stat is not None]
            versions |= dict.fromkeys(shards, "")
        yield from ((above + name, version) for name, version in versions.items())

    def _shards(self, above: str) -> list[str]:
        """Return the files in the checkpoint's index. The reader of the checkpoint checks these names."""
        location = f"{self.root}/{above}{_INDEX}"
        content = self.get(above + _INDEX, 0, None, None).content(_MAX_INDEX_NBYTES)
        named = parse_object(content, location).get("weight_map")
        values = named.values() if isinstance(named, dict) else ()
        return sorted(limited({name for name in values if isinstance(name, str)} - set(_KNOWN), location))


def offer(url: str) -> Store:
    """Return the store of a folder or file of a web server."""
    check_url(url)
    connect.require("urllib3", url, "web")
    parts = urlsplit(url)
    return CloudStore(WebClient(f"{parts.scheme.lower()}://{parts.netloc}"), unquote(parts.path).strip("/"))
