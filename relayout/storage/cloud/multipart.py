"""Uploads by parts that are sent in any order, to S3, GCS and Azure: what obstore has no calls for.

A file's first bytes depend on all others, so that its first part is sent last; obstore's own uploads send parts in
order. Endpoints are obstore's, and so are credentials as far as it tells them (`signing`).
"""

from __future__ import annotations

import base64
import os
import random
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from enum import Enum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, cast
from urllib.parse import parse_qs, quote, urlsplit
from urllib.request import getproxies, proxy_bypass
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from relayout.errors import PlanError
from relayout.storage.cloud.client import BucketClient
from relayout.storage.cloud.connect import RETRY_SECONDS, STALL_SECONDS, require
from relayout.storage.cloud.failures import request, request_error
from relayout.storage.cloud.signing import encoded_query, keys_of, signed_headers

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store
    from urllib3 import BaseHTTPResponse

_RETRIED = {408, 429, 500, 502, 503, 504}
_PIECE_NBYTES = 2**20
"""What is handed to a connection at once: `STALL_SECONDS` are for each."""
_SAS_SECONDS = 6 * 3600
_MAX_DELAY_SECONDS = 8.0

Pieces = Sequence[memoryview]
Headers = Mapping[str, str]
Authorize = Callable[[str, str], dict[str, str]]
"""The headers that authorize a request, by its method and URL."""


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

    def send(self, name: str, upload: str, number: int, pieces: Pieces) -> str:
        """Send part `number`, from 0; return what `complete` must know of it. All parts but the last have 5 MiB."""

    def complete(self, name: str, upload: str, tags: Sequence[str]) -> Outcome:
        """Make the object of the parts, if there is none of this name."""

    def abort(self, name: str, upload: str) -> None:
        """Give the upload up, if it exists."""

    def unfinished(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Names and ids of the uploads below a prefix that were begun, and neither completed nor aborted."""


def multipart_of(client: BucketClient) -> Multipart:
    """Uploads to a client's bucket.

    Raises:
        PlanError: a package or credentials are missing.
    """
    require("urllib3", client.root)
    scheme = client.root.partition("://")[0]
    kinds: dict[str, Callable[[BucketClient], Multipart]] = {
        "s3": _S3Multipart,
        "gs": _GcsMultipart,
        "az": _AzureMultipart,
    }
    return kinds[scheme](client)


class _Http:
    """Requests that are made again if they fail. Thread-safe."""

    def __init__(self, url: str) -> None:
        import urllib3

        parts = urlsplit(url)
        timeout = urllib3.Timeout(connect=STALL_SECONDS, read=STALL_SECONDS)
        proxy = getproxies().get(parts.scheme)
        if proxy and not proxy_bypass(parts.hostname or ""):
            self._pool: urllib3.PoolManager = urllib3.ProxyManager(proxy, timeout=timeout, maxsize=64)
        else:
            self._pool = urllib3.PoolManager(timeout=timeout, maxsize=64)

    def request(
        self,
        method: str,
        url: str,
        where: str,
        *,
        authorize: Authorize,
        pieces: Pieces = (),
        headers: Headers | None = None,
        expected: Sequence[int] = (200,),
    ) -> BaseHTTPResponse:
        """An answer with one of the `expected` statuses.

        Raises:
            RequestError: there was none.
        """
        from urllib3.exceptions import HTTPError, TimeoutError

        nbytes = sum(piece.nbytes for piece in pieces)
        end, delay = time.monotonic() + RETRY_SECONDS, 0.1
        while True:
            try:
                found = self._pool.urlopen(
                    method,
                    url,
                    body=_small(pieces),
                    headers={"content-length": str(nbytes), **(headers or {}), **authorize(method, url)},
                    redirect=False,
                    retries=False,
                )
            except HTTPError as error:
                text, is_final = "TimedOut" if isinstance(error, TimeoutError) else "Connect", False
            else:
                # A completion may fail when its status has been sent.
                status = 500 if found.status == 200 and b"<Error>" in found.data[:1000] else found.status
                if status in expected:
                    return found
                text, is_final = f"status code: {status} {found.data[:2000]!r}", status not in _RETRIED
            if is_final or time.monotonic() + delay > end:
                raise request_error(text, where)
            time.sleep(delay * random.uniform(0.5, 1))
            delay = min(2 * delay, _MAX_DELAY_SECONDS)


def _small(pieces: Pieces) -> list[memoryview]:
    return [piece[at : at + _PIECE_NBYTES] for piece in pieces for at in range(0, piece.nbytes, _PIECE_NBYTES)]


class _XmlMultipart:
    """The protocol that S3 and the XML interface of GCS have in common."""

    def __init__(self, client: BucketClient, bucket_url: str, authorize: Authorize, if_absent: Headers) -> None:
        """`bucket_url` ends with a slash; `if_absent` are the headers of a write that must not replace an object."""
        self._root = client.root
        self._bucket_url = bucket_url
        self._authorize = authorize
        self._if_absent = if_absent
        self._http = _Http(bucket_url)

    def _request(
        self,
        method: str,
        name: str,
        query: dict[str, str],
        pieces: Pieces = (),
        headers: Headers | None = None,
        expected: Sequence[int] = (200,),
    ) -> BaseHTTPResponse:
        url = f"{self._bucket_url}{quote(name, '/-_.~')}?{encoded_query(query)}"
        where = f"{self._root}/{name}"
        return self._http.request(
            method, url, where, authorize=self._authorize, pieces=pieces, headers=headers, expected=expected
        )

    def begin(self, name: str) -> str:
        """See `Multipart.begin`."""
        [upload] = _texts(self._request("POST", name, {"uploads": ""}).data, "UploadId")
        return upload

    def send(self, name: str, upload: str, number: int, pieces: Pieces) -> str:
        """See `Multipart.send`."""
        query = {"uploadId": upload, "partNumber": str(number + 1)}
        return self._request("PUT", name, query, pieces).headers["etag"]

    def complete(self, name: str, upload: str, tags: Sequence[str]) -> Outcome:
        """See `Multipart.complete`."""
        parts = (
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(tag)}</ETag></Part>"
            for number, tag in enumerate(tags, 1)
        )
        body = memoryview(f"<CompleteMultipartUpload>{''.join(parts)}</CompleteMultipartUpload>".encode())
        headers = {"content-type": "application/xml", **self._if_absent}
        found = self._request("POST", name, {"uploadId": upload}, [body], headers, (200, 404, 409, 412))
        outcomes = {200: Outcome.DONE, 404: Outcome.GONE, 409: Outcome.CONFLICT}
        return outcomes.get(found.status, Outcome.EXISTS)

    def abort(self, name: str, upload: str) -> None:
        """See `Multipart.abort`."""
        self._request("DELETE", name, {"uploadId": upload}, expected=(204, 200, 404))

    def unfinished(self, prefix: str) -> Iterator[tuple[str, str]]:
        """See `Multipart.unfinished`."""
        query = {"uploads": "", "prefix": prefix}
        while True:
            page = self._request("GET", "", query).data
            found = list(zip(_texts(page, "Key"), _texts(page, "UploadId"), strict=True))
            yield from found
            if _texts(page, "IsTruncated") != ["true"]:
                return
            markers = _texts(page, "NextKeyMarker"), _texts(page, "NextUploadIdMarker")
            query |= {"key-marker": markers[0][0], "upload-id-marker": markers[1][0]}


def _texts(body: bytes, tag: str) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(body).iter() if one.tag.rpartition("}")[2] == tag]


class _S3Multipart(_XmlMultipart):
    def __init__(self, client: BucketClient) -> None:
        keys = keys_of(client.store.credential_provider, client.root)  # type: ignore[union-attr]
        # A URL that obstore signs shows where objects of the bucket are, and in which region.
        url = urlsplit(_sign(client, "x", timedelta(minutes=1)))
        region = parse_qs(url.query)["X-Amz-Credential"][0].split("/")[2]

        def authorize(method: str, url: str) -> dict[str, str]:
            return signed_headers(method, url, region, keys())

        bucket_url = f"{url.scheme}://{url.netloc}{url.path.removesuffix('x')}"
        super().__init__(client, bucket_url, authorize, {"if-none-match": "*"})


class _GcsMultipart(_XmlMultipart):
    def __init__(self, client: BucketClient) -> None:
        token = os.environ.get("GOOGLE_BEARER_TOKEN")
        base = os.environ.get("GOOGLE_BASE_URL", "https://storage.googleapis.com")
        if token is None and find_spec("google.auth") is None:
            what = "no credentials to write with: set GOOGLE_BEARER_TOKEN, or install google-auth and requests"
            raise PlanError(what, path=client.root, code="option")
        if token is None:
            from obstore.auth.google import GoogleCredentialProvider

            provider = GoogleCredentialProvider()

        def authorize(method: str, url: str) -> dict[str, str]:
            return {"authorization": f"Bearer {token or provider()['token']}"}

        bucket_url = f"{base.rstrip('/')}/{client.root.partition('://')[2]}/"
        super().__init__(client, bucket_url, authorize, {"x-goog-if-generation-match": "0"})


class _AzureMultipart:
    """Blocks of Azure, which are known by names of their own; there are no uploads that could be listed or aborted.

    Blocks that are never committed vanish after a week.
    """

    def __init__(self, client: BucketClient) -> None:
        self._client = client
        self._http = _Http(_sign(client, "x", timedelta(minutes=1)))
        self._signed: dict[str, tuple[str, float]] = {}
        """URLs by name of the object, and until when they are used."""

    def _request(
        self, name: str, query: str, pieces: Pieces, headers: Headers, expected: Sequence[int]
    ) -> BaseHTTPResponse:
        url, end = self._signed.get(name, ("", 0.0))
        if time.monotonic() > end:
            url = _sign(self._client, name, timedelta(seconds=2 * _SAS_SECONDS))
            self._signed[name] = url, time.monotonic() + _SAS_SECONDS
        return self._http.request(
            "PUT",
            f"{url}&{query}",
            f"{self._client.root}/{name}",
            authorize=lambda method, url: {},
            pieces=pieces,
            headers=headers,
            expected=expected,
        )

    def begin(self, name: str) -> str:
        """See `Multipart.begin`: a prefix of the blocks' names, so that blocks of two uploads are never mixed.

        Raises:
            PlanError: the name has characters that a URL encodes, with which obstore's signatures are wrong (0.12).
        """
        if quote(name, "/-_.~") != name:
            what = "uploads to Azure need names of letters, digits and -_.~; choose another prefix, or rename the file"
            raise PlanError(what, path=f"{self._client.root}/{name}", code="unsupported")
        return secrets.token_hex(8)

    def send(self, name: str, upload: str, number: int, pieces: Pieces) -> str:
        """See `Multipart.send`."""
        block = base64.b64encode(f"{upload}{number:08}".encode()).decode()
        self._request(name, f"comp=block&blockid={quote(block, '')}", pieces, {}, (201,))
        return block

    def complete(self, name: str, upload: str, tags: Sequence[str]) -> Outcome:
        """See `Multipart.complete`."""
        blocks = "".join(f"<Latest>{tag}</Latest>" for tag in tags)
        body = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{blocks}</BlockList>'.encode()
        headers = {"content-type": "application/xml", "if-none-match": "*"}
        found = self._request(name, "comp=blocklist", [memoryview(body)], headers, (201, 400, 404, 409, 412))
        if found.status == 400 and not re.search(rb"InvalidBlock(List|Id)", found.data):
            raise request_error(f"status code: 400 {found.data[:2000]!r}", f"{self._client.root}/{name}")
        return {201: Outcome.DONE, 400: Outcome.GONE, 404: Outcome.GONE}.get(found.status, Outcome.EXISTS)

    def abort(self, name: str, upload: str) -> None:
        """See `Multipart.abort`."""

    def unfinished(self, prefix: str) -> Iterator[tuple[str, str]]:
        """See `Multipart.unfinished`."""
        return iter(())


def _sign(client: BucketClient, name: str, expires: timedelta) -> str:
    import obstore

    store = cast("S3Store | GCSStore | AzureStore", client.store)
    return request(lambda: obstore.sign(store, "PUT", name, expires), f"{client.root}/{name}")
