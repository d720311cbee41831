"""Container registries: files that are layers of an artifact, `oci://REGISTRY/NAME:TAG[/FOLDER]`.

An artifact is a manifest, which lists blobs by digest. Each raw layer is one file. Its path is in an annotation: the
one of ModelPack (modelpack/model-spec, docs/annotations.md), or the title that ORAS writes. Requests follow the OCI
distribution specification 1.1.

**Verification.** The manifest is compared with the digest in the URL, if the URL has one. A tag is not verified: the
registry chooses its manifest. The manifest contains each file's length and SHA-256. A blob that is read whole is
compared with its SHA-256. Parts of a blob cannot be, so a reader of parts must compare its own digests
(`RequestCost.needs_digests`).

**What a registry may choose.** A registry may choose the storage of a blob: it redirects to signed URLs of buckets. The
URL must be https, or http if the registry's is, and is requested without credentials. Uploads stay on the registry's
server.
"""

from __future__ import annotations

import errno
import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urljoin, urlsplit

from relayout.core.digests import Hash
from relayout.errors import FormatError, PlanError, about, shown
from relayout.format.fields import Fields, check_apart, is_plain_path, parse_object
from relayout.storage.cloud import connect
from relayout.storage.cloud.failures import RetryPolicy, persistent, replaced, request_error
from relayout.storage.cloud.store import Body, CloudStore
from relayout.storage.stores import FileStat, RequestCost, RequestError, limited
from relayout.storage.web import http
from relayout.storage.web.registry_auth import Login, api_host, refused, whole

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

OCI_COST = RequestCost(
    request_nbytes=16 * 2**20, max_gap_nbytes=2**20, concurrency=16, is_remote=True, needs_digests=True
)
"""Same as for object stores, with fewer concurrent requests: registries are single servers, or limit clients."""

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
_DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
PATH_ANNOTATION = "org.cncf.model.filepath"
TITLE_ANNOTATION = "org.opencontainers.image.title"
MAX_MANIFEST_NBYTES = 4 * 2**20
"""Maximum bytes of a manifest in the distribution specification."""

_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_URL = re.compile(
    rf"(?P<scheme>oci|oci\+http)://(?P<registry>(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::[0-9]{{1,5}})?)"
    rf"/(?P<repository>{_COMPONENT}(?:/{_COMPONENT})*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})|@(?P<digest>sha256:[0-9a-f]{64}))(?P<folder>(?:/[^/?#\\]+)*)/?",
    re.ASCII,
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_ARCHIVE = re.compile(r"[.+](tar|gzip|zstd)\b")
_SIGNED_SECONDS = 600.0
"""Seconds after which a new signed URL is requested."""
_UPLOAD_TYPE = {"content-type": "application/octet-stream"}
_UPLOADED = re.compile(r"(?:bytes=)?0-([0-9]{1,18})", re.ASCII)
_CHUNK_NBYTES = 32 * 2**20
"""Bytes of one chunk in uploads to a registry that does not accept a file in one request."""
_MAX_RESTARTS = 5
"""Maximum number of consecutive requests of one upload that break off without progress."""

Pieces = Callable[[int, int], Iterator[bytes]]
"""Returns the bytes of a blob from an offset to an end."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A manifest as found in the registry."""

    digest: str
    """Digest of the manifest, as sha256:HEX."""
    files: Mapping[str, FileStat]
    """The layers by path. Their versions are digests."""


class OciClient:
    """One artifact of a registry, pinned to one manifest from its first request on. Thread-safe."""

    cost: RequestCost = OCI_COST

    def __init__(self, scheme: str, registry: str, repository: str, reference: str) -> None:
        """Name an artifact. `reference` is a tag, or a digest as sha256:HEX."""
        self.scheme = scheme
        """`oci`, or `oci+http` for a registry without TLS."""
        self.registry = registry
        self.repository = repository
        self.reference = reference
        self._login = Login(registry, repository, "http" if scheme == "oci+http" else "https")
        self._lock = threading.Lock()
        self._known: Artifact | None = None
        self._addresses: dict[str, tuple[str, float]] = {}
        """Signed URLs of blobs by their URL in the registry, each with the time by the clock `time.monotonic`."""

    def __reduce__(self) -> tuple[object, ...]:
        return OciClient, (self.scheme, self.registry, self.repository, self.reference)

    def __repr__(self) -> str:
        return f"OciClient({self.root!r})"

    @property
    def root(self) -> str:
        mark = "@" if self.is_pinned else ":"
        return f"{self.scheme}://{self.registry}/{self.repository}{mark}{self.reference}"

    @property
    def is_pinned(self) -> bool:
        """True if the URL contains the manifest's digest."""
        return _DIGEST.fullmatch(self.reference) is not None

    @property
    def artifact(self) -> Artifact | None:
        """The artifact; a missing one is requested again. None: the registry has no artifact of this tag or digest."""
        with self._lock:
            self._known = self._known or self._find()
            return self._known

    def _api(self, path: str) -> str:
        scheme = "http" if self.scheme == "oci+http" else "https"
        return f"{scheme}://{api_host(self.registry)}/v2/{self.repository}/{path}"

    # Reading.

    def _find(self) -> Artifact | None:
        url, accepted = (
            self._api(f"manifests/{self.reference}"),
            ", ".join((MANIFEST_TYPE, _DOCKER_MANIFEST, *_INDEXES)),
        )

        def ask() -> bytes:
            answer = self._send("GET", url, self.root, {"accept": accepted})
            if answer.status == 404:
                answer.close()
                raise FormatError("is missing", path=self.root, code="missing")
            return whole(answer, self.root, MAX_MANIFEST_NBYTES)

        try:
            content = persistent(ask, self.root)
        except FormatError as error:
            if error.code != "missing":
                raise
            return None
        digest = digest_of(content)
        if self.is_pinned and digest != self.reference:
            raise FormatError("the registry returned a manifest of another digest", path=self.root, code="digest")
        return Artifact(digest, _files_of(content, self.root))

    @property
    def files(self) -> Mapping[str, FileStat]:
        """All files of the artifact by path; empty if the artifact does not exist."""
        artifact = self.artifact
        return {} if artifact is None else artifact.files

    def get(self, name: str, start: int, end: int | None, version: str | None) -> Body:
        location, known = f"{self.root}/{name}", self.stat(name)
        if known is None:
            what = "is missing" if self.artifact else "is missing: the registry has no artifact of this name and tag"
            raise FormatError(what, path=location, code="missing")
        if version not in (None, known.version):
            raise replaced(location)
        is_whole = start == 0 and (end is None or end >= known.nbytes)
        return self._get(known, location, start, end, hashlib.sha256() if is_whole else None)

    def _get(self, known: FileStat, location: str, start: int, end: int | None, hashed: Hash | None) -> Body:
        """Request a range of a blob. `hashed` is the hash of the blob's bytes before the range."""
        part: tuple[int, int] = (0, 0)
        pieces: Iterable[Any] = ()
        if known.nbytes:  # An empty blob has no range.
            url, until = self._api(f"blobs/{known.version}"), None if end is None else min(end, known.nbytes)
            try:
                body = http.get(url, location, start, until, None, None, self._send_for_blob)
            except FormatError as error:
                if error.code != "missing":
                    raise
                what = "the registry lacks this file of its manifest"
                raise FormatError(what, path=location, code="mismatch") from None
            if body.stat.nbytes != known.nbytes:
                raise FormatError(
                    f"{body.stat.nbytes} bytes long, {known.nbytes} by the manifest", path=location, code="mismatch"
                )
            part, pieces = body.part, body.pieces
        if hashed is not None:
            pieces = _hashed(pieces, hashed, known, part[0], location)
        again = partial(self._again, known, location, part[1], hashed)
        return Body(known, location, part, pieces, again)

    def _again(self, known: FileStat, location: str, end: int, hashed: Hash | None, offset: int) -> Body:
        return self._get(known, location, offset, end, hashed)

    def stat(self, name: str) -> FileStat | None:
        """Look a file up in the manifest."""
        return self.files.get(name)

    def list_objects(self, prefix: str) -> Iterator[tuple[str, str]]:
        for name, stat in self.files.items():
            if not prefix or name.startswith(f"{prefix}/"):
                yield name, stat.version

    # Requests.

    def _send(
        self, method: str, url: str, location: str, headers: http.Headers, body: Callable[[], Any] = lambda: None
    ) -> BaseHTTPResponse:
        """Send a request with the credentials that the registry requires; `body` is called once for each attempt.

        Raises:
            RequestError: the request failed, or is not permitted.
        """
        is_write = method not in ("GET", "HEAD")
        for is_last in (False, True):
            used = self._login.header(is_write=is_write)
            answer = http.send(method, url, location, {**headers, **used}, body())
            if answer.status not in (401, 403):
                break
            answer.close()
            if is_last or answer.status == 403 or not self._login.renew(answer, used, is_write=is_write):
                raise refused(location, self.registry, answer.status)
        return answer

    def _send_for_blob(self, method: str, url: str, location: str, headers: http.Headers) -> BaseHTTPResponse:
        """Request bytes of a blob, from the registry or from its storage elsewhere, and return the answer."""
        address, since = self._addresses.get(url, ("", 0.0))
        if address and time.monotonic() - since < _SIGNED_SECONDS:
            answer = http.send(method, address, location, headers)
            if answer.status in (200, 206):
                return answer
            answer.close()  # The signature has expired, or the storage has failed: request a new URL from the registry.
        answer = self._send(method, url, location, headers)
        target = http.redirect_of(answer, url)
        if target is None:
            return answer
        answer.close()
        # The registry may choose this address: no credentials are sent there, and length and digests are compared.
        parts = urlsplit(target)
        if parts.scheme not in ("https", urlsplit(url).scheme) or "@" in parts.netloc or not parts.hostname:
            what = f"the registry redirects to {shown(parts.scheme[:20])}, expected https without a user"
            raise RequestError(errno.EPROTO, what, location)
        answer = http.send(method, target, location, headers)
        if answer.status in (200, 206):
            self._addresses[url] = (target, time.monotonic())
        return answer

    # Writing.

    def has_blob(self, digest: str, nbytes: int) -> bool:
        """Return True if the repository has a blob of this digest."""

        def ask() -> bool:
            answer = self._send("HEAD", self._api(f"blobs/{digest}"), self.root, {})
            answer.close()
            if answer.status == 404:
                return False
            # Storage may be elsewhere, and may not permit HEAD: the registry's redirect is enough to show that it has
            # the blob.
            if answer.status == 200 or http.redirect_of(answer, self._api("")) is not None:
                length = answer.headers.get("content-length", str(nbytes))
                return answer.status != 200 or length == str(nbytes)
            raise request_error("", self.root, status=answer.status, retry_after=answer.headers.get("retry-after"))

        return persistent(ask, self.root)

    def push_blob(self, digest: str, nbytes: int, pieces: Pieces) -> None:
        """Send a blob in one request. If that breaks off, continue from the offset that the registry reports.

        The last request contains the digest, and the registry compares it. Some registries lose an upload that broke
        off (distribution 2.8); then it begins again.

        Raises:
            RequestError: no request succeeded for `connect.RETRY_SECONDS`; `_MAX_RESTARTS` requests broke off and the
                registry kept none of their bytes; or the registry rejects the blob.
        """
        where = f"{self.root}: blob {digest[:19]}"
        upload, offset, chunk_nbytes, num_lost, patience = "", 0, nbytes, 0, RetryPolicy()
        sent_nbytes = 0

        def counted(start: int, end: int) -> Iterator[bytes]:
            nonlocal sent_nbytes
            for piece in pieces(start, end):
                yield piece
                sent_nbytes += len(piece)

        while True:
            before, sent_nbytes = offset, 0
            try:
                if not upload:
                    upload, offset = self._begin_upload(where), 0
                while offset < nbytes:
                    end = min(nbytes, offset + chunk_nbytes)
                    upload = self._send_chunk(upload, offset, end, nbytes, counted, where)
                    offset = end
                self._end_upload(upload, digest, where)
                return
            except RequestError as error:
                failure = error
            if failure.status == 413 and chunk_nbytes > _CHUNK_NBYTES:
                upload, chunk_nbytes = "", _CHUNK_NBYTES
                continue
            # The upload may be complete if only the last answer was lost; otherwise the registry may have kept some
            # bytes.
            has_lost = bool(sent_nbytes) or (failure.status in (404, 416) and bool(upload))
            if has_lost and num_lost < _MAX_RESTARTS:
                num_lost, patience = num_lost + 1, RetryPolicy()
            if not (has_lost and failure.status in (404, 416) and num_lost < _MAX_RESTARTS):
                patience.wait(failure)
            if self.has_blob(digest, nbytes):
                return
            upload, offset = self._upload_state(upload, nbytes, where)
            if offset > before:
                num_lost = 0

    def _begin_upload(self, where: str) -> str:
        url = self._api("blobs/uploads/")
        answer = self._send("POST", url, where, {"content-length": "0"}, lambda: b"")
        return self._upload_of(answer, url, (202,), where)

    def _send_chunk(self, upload: str, start: int, end: int, nbytes: int, pieces: Pieces, where: str) -> str:
        headers = _UPLOAD_TYPE | {"content-length": str(end - start)}
        if (start, end) != (0, nbytes):  # As Docker's own client: a whole blob has no range.
            headers["content-range"] = f"{start}-{end - 1}"
        answer = self._send("PATCH", upload, where, headers, lambda: pieces(start, end))
        return self._upload_of(answer, upload, (202,), where)

    def _end_upload(self, upload: str, digest: str, where: str) -> None:
        url = upload + ("&" if urlsplit(upload).query else "?") + urlencode({"digest": digest})
        answer = self._send("PUT", url, where, _UPLOAD_TYPE | {"content-length": "0"}, lambda: b"")
        _check_written(answer, digest, where)

    def _upload_state(self, upload: str, nbytes: int, where: str) -> tuple[str, int]:
        """Return URL and offset at which an upload continues after a failure; the empty URL to begin again."""
        if not upload:
            return "", 0
        try:
            answer = self._send("GET", upload, where, {})
            answer.close()
            found = _UPLOADED.fullmatch(answer.headers.get("range", ""))
            # "0-0" may mean one byte or none: registries differ.
            if answer.status != 204 or found is None or not 0 < int(found[1]) < nbytes:
                return "", 0
            return self._upload_of(answer, upload, (204,), where), int(found[1]) + 1
        except RequestError:
            return "", 0

    def _upload_of(self, answer: BaseHTTPResponse, url: str, statuses: tuple[int, ...], where: str) -> str:
        """Return an upload's URL from an answer. The registry may choose it only on its own server."""
        answer.close() if answer.length_remaining else answer.release_conn()
        if answer.status not in statuses:
            raise request_error("", where, status=answer.status, retry_after=answer.headers.get("retry-after"))
        try:
            target = urljoin(url, answer.headers.get("location", ""))
        except ValueError:
            target = ""
        if "location" not in answer.headers or not http.is_same_server(target, url):
            raise RequestError(errno.EPROTO, "the registry sends an upload to another server, or nowhere", where)
        return target

    def put_manifest(self, content: bytes) -> None:
        """Write the manifest of the tag, replacing the older one. Its blobs must exist already. Atomic."""

        def ask() -> None:
            headers = {"content-type": MANIFEST_TYPE, "content-length": str(len(content))}
            url = self._api(f"manifests/{self.reference}")
            answer = self._send("PUT", url, self.root, headers, lambda: content)
            _check_written(answer, digest_of(content), self.root)

        persistent(ask, self.root)

    def again(self) -> OciClient:
        """Return a new client of the same artifact, with the same tokens, which will request the manifest again."""
        client = OciClient(self.scheme, self.registry, self.repository, self.reference)
        client._login = self._login
        return client


def digest_of(content: bytes) -> str:
    """Return the SHA-256 of content as registries write it."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _check_written(answer: BaseHTTPResponse, digest: str, where: str) -> None:
    answer.close() if answer.length_remaining else answer.release_conn()
    if answer.status != 201:
        raise request_error("", where, status=answer.status, retry_after=answer.headers.get("retry-after"))
    if answer.headers.get("docker-content-digest", digest) != digest:
        raise RequestError(errno.EPROTO, "the registry has stored another digest than was sent", where)


def _hashed(pieces: Any, hashed: Hash, known: FileStat, offset: int, location: str) -> Iterator[bytes]:
    """Yield the pieces of a blob to its end, where its digest is compared."""
    for piece in pieces:
        hashed.update(piece)
        offset += len(piece)
        if offset == known.nbytes and f"sha256:{hashed.hexdigest()}" != known.version:
            raise FormatError("does not match its SHA-256 in the manifest: damaged", path=location, code="digest")
        yield piece
    if not known.nbytes and f"sha256:{hashed.hexdigest()}" != known.version:
        raise FormatError("does not match its SHA-256 in the manifest: damaged", path=location, code="digest")


def _files_of(content: bytes, where: str) -> dict[str, FileStat]:
    """Return the files in a manifest.

    Raises:
        FormatError: the manifest is not of an artifact of files, or contains names that are not valid in a folder.
    """
    top = Fields(parse_object(content, where), where)
    if top.top.get("mediaType") in _INDEXES or "manifests" in top.top:
        what = "is an index of several manifests, as of an image for several platforms: name one by its digest"
        raise FormatError(what, path=where, code="mismatch")
    files: dict[str, FileStat] = {}
    for layer in limited(top.column("layers", dict), where):
        fields = Fields(layer, where)
        kind, digest, nbytes = fields.text("mediaType"), fields.text("digest"), fields.size("size")
        annotations = fields.top.get("annotations") or {}
        noted = Fields(annotations if isinstance(annotations, dict) else {}, where)
        key = PATH_ANNOTATION if PATH_ANNOTATION in noted.top else TITLE_ANNOTATION
        if _ARCHIVE.search(kind) or key not in noted.top:
            what = f"has a layer of media type {shown(kind[:100])}, expected raw layers with paths"
            raise FormatError(what, path=where, code="mismatch")
        name = noted.text(key)
        if not is_plain_path(name):
            raise FormatError(f"{shown(name[:100])} is not a file name", path=where, code="unsafe")
        if not _DIGEST.fullmatch(digest):
            raise FormatError(f"{shown(digest[:100])} is not a SHA-256 digest", path=where, code="field")
        if name in files:
            raise FormatError(f"{shown(name)} is the path of two layers", path=where, code="field")
        files[name] = FileStat(nbytes, digest, vouched=digest)
    with about(path=where):
        check_apart(files)
    return files


@dataclass(frozen=True, slots=True)
class OciStore(CloudStore):
    """The files of an artifact, as a store."""

    client: OciClient


def offer(url: str) -> OciStore:
    """Return the store of an artifact, or of a folder in it, without a request."""
    match = _URL.fullmatch(re.sub("^[^:]*", lambda scheme: scheme[0].lower(), url))
    if match is None or {".", ".."} & set(match["folder"].split("/")):
        what = (
            "expected oci://REGISTRY/NAME:TAG or oci://REGISTRY/NAME@sha256:DIGEST, or a folder below it; the name in"
        )
        raise PlanError(f"{what} lower case; oci+http:// for a registry without TLS", code="option")
    connect.require("urllib3", url, "web")
    client = OciClient(match["scheme"], match["registry"], match["repository"], match["tag"] or match["digest"])
    return OciStore(client, match["folder"].strip("/"))
