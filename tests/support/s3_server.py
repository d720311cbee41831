"""An object store of the S3 protocol on loopback, in one file: objects in memory, every request noted.

It knows what relayout asks of S3: ranges with If-Match, listings, conditional writes, multipart uploads, parts that are
copied. Tests look at `requests`, and change answers by `interfere`.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import cache, lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

ACCESS_KEY = "AKIDEXAMPLE"
SECRET_KEY = "secret-that-nobody-may-see"
_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_MODIFIED = formatdate(1.7e9, usegmt=True)


@lru_cache(64)
def md5(content: bytes) -> str:
    """The digest of content that many tests put on servers of their own."""
    return hashlib.md5(content).hexdigest()


@dataclass
class Request:
    """What a client has asked for."""

    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    """By lower-case name."""
    body: bytes = field(repr=False, default=b"")
    status: int = 0
    """Of the answer."""
    sent_nbytes: int = 0
    """Of the answer's body."""

    @property
    def range(self) -> tuple[int, int] | None:
        """First byte and end of the range; None: the whole object."""
        found = re.fullmatch(r"bytes=([0-9]+)-([0-9]+)", self.headers.get("range", ""))
        return (int(found[1]), int(found[2]) + 1) if found else None


@dataclass
class Answer:
    """What the server says."""

    status: int
    body: bytes = field(repr=False, default=b"")
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    """So many bytes of the body are sent, and then the connection ends; None: all are."""
    pause_seconds: float = 0
    """Before the end of a connection whose body is cut."""
    is_reset: bool = False
    """Whether such a connection ends by RST."""
    trickles: bool = False
    """Whether the body is sent byte by byte, and slowly."""


@dataclass(frozen=True)
class Object:
    content: bytes = field(repr=False)
    etag: str

    @property
    def generation(self) -> str:
        """What GCS calls a version."""
        return str(int(md5(self.etag.encode())[:12], 16))

    @property
    def headers(self) -> dict[str, str]:
        return {"ETag": self.etag, "x-goog-generation": self.generation}


class Server(ThreadingHTTPServer):
    """The server; `url` is its endpoint."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lock = threading.Lock()
        self.objects: dict[tuple[str, str], Object] = {}
        """By bucket and key."""
        self.uploads: dict[str, tuple[str, str, dict[int, Object]]] = {}
        """Unfinished ones, by id: bucket, key, parts."""
        self.requests: list[Request] = []
        """In the order of their answers."""
        self.interfere: Callable[[Request], Answer | None] = lambda request: None
        """Called before an answer is made; may give another one, or end the connection by an exception."""
        self.checks_keys = False
        """Whether requests without `ACCESS_KEY` are refused."""
        self.checks_parts = False
        """Whether uploads with parts below 5 MiB, except the last, are refused."""
        self.copied_nbytes = 0
        """Bytes of all parts that were copied from other objects."""
        self._ids = itertools.count(1)
        self._is_stopped = False

    @property
    def url(self) -> str:
        return f"http{'s' * isinstance(self.socket, ssl.SSLSocket)}://127.0.0.1:{self.server_address[1]}"

    @property
    def sent_nbytes(self) -> int:
        """Bytes of all answers to GET."""
        return sum(one.sent_nbytes for one in list(self.requests) if one.method == "GET")

    def put(self, bucket: str, key: str, content: bytes) -> Object:
        """Make or replace an object, as somebody else would."""
        made = Object(content, f'"{md5(content)}-{next(self._ids)}"')
        self.objects[bucket, key] = made
        return made

    def clear(self, bucket: str, *prefixes: str) -> None:
        """Delete objects and unfinished uploads whose names begin with one of the prefixes; without prefixes, all."""
        with self.lock:
            self.objects = {place: one for place, one in self.objects.items() if not _begins(*place, bucket, prefixes)}
            self.uploads = {name: one for name, one in self.uploads.items() if not _begins(*one[:2], bucket, prefixes)}

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        return sorted(key for where, key in list(self.objects) if where == bucket and key.startswith(prefix))

    def serve(self) -> None:
        """Take connections until `stop` is called, without looking again and again whether it was."""
        while not self._is_stopped:
            self.handle_request()

    def stop(self) -> None:
        """End the waiting for a connection."""
        self._is_stopped = True
        with suppress(OSError):
            socket.create_connection(self.server_address[:2], 1).close()

    def new_id(self) -> str:
        return f"upload-{next(self._ids)}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients that are killed, and faults, end connections."""


def _begins(where: str, key: str, bucket: str, prefixes: tuple[str, ...]) -> bool:
    return where == bucket and key.startswith(prefixes or "")


def answer(server: Server, request: Request) -> Answer:
    """The right answer to a request."""
    if server.checks_keys and f"Credential={ACCESS_KEY}/" not in request.headers.get("authorization", ""):
        return error(403, "InvalidAccessKeyId")
    with server.lock:
        if request.method in ("GET", "HEAD"):
            return _read(server, request)
        if request.method == "PUT":
            return _write(server, request)
        if request.method == "DELETE":
            if "uploadId" in request.query:
                return Answer(204 if server.uploads.pop(request.query["uploadId"], None) else 404)
            server.objects.pop((request.bucket, request.key), None)
            return Answer(204)
        return _post(server, request)


def _read(server: Server, request: Request) -> Answer:
    if not request.key:
        return _list(server, request)
    found = server.objects.get((request.bucket, request.key))
    if found is None:
        return error(404, "NoSuchKey")
    return part_of(found.content, found.etag, request, {"x-goog-generation": found.generation})


def part_of(content: bytes, etag: str, request: Request, headers: Mapping[str, str] = MappingProxyType({})) -> Answer:
    """What is asked for of an object, if its condition holds."""
    if request.headers.get("if-match", etag) != etag:
        return error(412, "PreconditionFailed")
    headers = {"ETag": etag, "Last-Modified": _MODIFIED, "Accept-Ranges": "bytes", **headers}
    wanted = re.fullmatch(r"bytes=([0-9]*)-([0-9]*)", request.headers.get("range", ""))
    if wanted is None:
        return Answer(200, content, headers)
    size = len(content)
    start = int(wanted[1]) if wanted[1] else max(0, size - int(wanted[2]))
    end = min(size, int(wanted[2]) + 1) if wanted[1] and wanted[2] else size
    if start >= size:
        return error(416, "InvalidRange")
    return Answer(206, content[start:end], headers | {"Content-Range": f"bytes {start}-{end - 1}/{size}"})


def _write(server: Server, request: Request) -> Answer:
    if "uploadId" in request.query:
        upload = server.uploads.get(request.query["uploadId"])
        if upload is None:
            return error(404, "NoSuchUpload")
        part = Object(request.body, f'"{md5(request.body)}"')
        is_copied = "x-amz-copy-source" in request.headers
        if is_copied:
            found = _copy_source(server, request)
            if isinstance(found, Answer):
                return found
            part = Object(found, f'"{md5(found)}"')
        upload[2][int(request.query["partNumber"])] = part
        if is_copied:
            server.copied_nbytes += len(part.content)
            return _xml("CopyPartResult", f"<ETag>{escape(part.etag)}</ETag><LastModified>2023-11-14</LastModified>")
        return Answer(200, headers={"ETag": part.etag})
    refused = _refused(server, request)
    return refused or Answer(200, headers=server.put(request.bucket, request.key, request.body).headers)


def _copy_source(server: Server, request: Request) -> bytes | Answer:
    """The bytes that UploadPartCopy names, or why they are not copied (API reference of S3, UploadPartCopy)."""
    bucket, _, key = unquote(request.headers["x-amz-copy-source"]).lstrip("/").partition("/")
    found = server.objects.get((bucket, key))
    if found is None:
        return error(404, "NoSuchKey")
    if request.headers.get("x-amz-copy-source-if-match", found.etag) != found.etag:
        return error(412, "PreconditionFailed")
    wanted = re.fullmatch(r"bytes=([0-9]+)-([0-9]+)", request.headers.get("x-amz-copy-source-range", ""))
    if wanted is None:
        return found.content
    start, end = int(wanted[1]), int(wanted[2]) + 1
    if not start < end <= len(found.content):
        return error(400, "InvalidArgument")
    return found.content[start:end]


def _refused(server: Server, request: Request) -> Answer | None:
    """Why the conditions of a write do not hold."""
    found = server.objects.get((request.bucket, request.key))
    generation = request.headers.get("x-goog-if-generation-match", "")
    if found is not None and (request.headers.get("if-none-match") == "*" or generation == "0"):
        return error(412, "PreconditionFailed")
    if generation not in ("", "0") and (found is None or generation != found.generation):
        return error(412, "PreconditionFailed")
    if "if-match" in request.headers and (found is None or request.headers["if-match"] != found.etag):
        return error(412, "PreconditionFailed")
    return None


def _post(server: Server, request: Request) -> Answer:
    if "uploads" in request.query:
        name = server.new_id()
        server.uploads[name] = request.bucket, request.key, {}
        return _xml("InitiateMultipartUploadResult", f"<UploadId>{name}</UploadId>")
    if "uploadId" in request.query:
        upload = server.uploads.get(request.query["uploadId"])
        if upload is None:
            return error(404, "NoSuchUpload")
        if (refused := _refused(server, request)) is not None:
            return refused
        numbers = [int(number) for number in _texts(request.body, "PartNumber")]
        parts = [upload[2].get(number) for number in numbers]
        if [part and part.etag for part in parts] != _texts(request.body, "ETag") or numbers != sorted(numbers):
            return error(400, "InvalidPart")
        if server.checks_parts and any(part and len(part.content) < 5 * 2**20 for part in parts[:-1]):
            return error(400, "EntityTooSmall")
        del server.uploads[request.query["uploadId"]]
        made = server.put(request.bucket, request.key, b"".join(part.content for part in parts if part))
        return _xml("CompleteMultipartUploadResult", f"<ETag>{escape(made.etag)}</ETag>")
    if "delete" in request.query:
        keys = _texts(request.body, "Key")
        for key in keys:
            server.objects.pop((request.bucket, key), None)
        return _xml("DeleteResult", "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys))
    return error(400, "InvalidRequest")


def _texts(body: bytes, tag: str) -> list[str]:
    return [one.text or "" for one in ElementTree.fromstring(body).iter() if one.tag.rpartition("}")[2] == tag]


def _list(server: Server, request: Request) -> Answer:
    prefix, most = request.query.get("prefix", ""), int(request.query.get("max-keys", 1000))
    after = request.query.get("continuation-token") or request.query.get("start-after", "")
    items: list[tuple[str, str]] = []
    for key in server.names(request.bucket, prefix):
        if key <= after or (after.endswith("/") and key.startswith(after)):
            continue
        head, slash, _ = key[len(prefix) :].partition("/")
        if slash and request.query.get("delimiter") == "/":
            shown = f"{prefix}{head}/"
            if not items or items[-1][0] != shown:
                items.append((shown, f"<CommonPrefixes><Prefix>{escape(shown)}</Prefix></CommonPrefixes>"))
        else:
            found = server.objects[request.bucket, key]
            items.append(
                (
                    key,
                    f"<Contents><Key>{escape(key)}</Key><Size>{len(found.content)}</Size><ETag>{escape(found.etag)}"
                    "</ETag><LastModified>2023-11-14T22:13:20.000Z</LastModified></Contents>",
                )
            )
    more = len(items) > most
    token = f"<NextContinuationToken>{escape(items[most - 1][0])}</NextContinuationToken>" if more else ""
    body = "".join(text for _, text in items[:most])
    return _xml("ListBucketResult", f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{body}")


def _xml(tag: str, body: str, status: int = 200) -> Answer:
    space = "" if tag == "Error" else f' xmlns="{_NAMESPACE}"'
    text = f'<?xml version="1.0" encoding="UTF-8"?><{tag}{space}>{body}</{tag}>'
    return Answer(status, text.encode(), {"Content-Type": "application/xml"})


def error(status: int, code: str) -> Answer:
    return _xml("Error", f"<Code>{code}</Code><Message>{code}</Message>", status)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: Server

    def handle_any(self) -> None:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).lstrip("/").partition("/")
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        headers = {name.lower(): value for name, value in self.headers.items()}
        nbytes = int(headers.get("content-length", 0))
        body = self.rfile.read(nbytes)
        if len(body) < nbytes:  # The client is gone: what came is no part, as for every server of the protocol.
            self.close_connection = True
            return
        request = Request(self.command, bucket, key, query, headers, body)
        found = self.server.interfere(request) or answer(self.server, request)
        request.status, request.sent_nbytes = found.status, 0 if self.command == "HEAD" else len(found.body)
        self.server.requests.append(request)
        self.send_response(found.status)
        for name, value in ({"Content-Length": str(len(found.body))} | found.headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            if found.trickles:
                self._trickle(found.body)
            self.wfile.write(found.body[: found.cut])
        self.wfile.flush()
        if found.cut is not None:
            time.sleep(found.pause_seconds)
            if found.is_reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True

    def handle_expect_100(self) -> bool:
        """Say at once that the body may come."""
        known = super().handle_expect_100()
        self.wfile.flush()
        return known

    def _trickle(self, body: bytes) -> None:
        for number in range(len(body)):
            self.wfile.write(body[number : number + 1])
            self.wfile.flush()
            time.sleep(0.02)

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do_DELETE = handle_any

    def log_message(self, *message: object) -> None:
        """Say nothing."""


@contextmanager
def running(tls: ssl.SSLContext | None = None) -> Iterator[Server]:
    """A server that runs until the end of the block."""
    with Server() as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve, daemon=True).start()
        try:
            yield server
        finally:
            server.stop()


@cache
def shared() -> Server:
    """A server that runs until the process ends; each test has a bucket of its own."""
    server = Server()
    threading.Thread(target=server.serve, daemon=True).start()
    return server


def environment(server: Server) -> dict[str, str]:
    """The variables by which any client of S3 finds the server."""
    return {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server.url,
    }
