"""Uploads to S3 whose parts the server copies from other objects (UploadPartCopy), by boto3: obstore has no such call.

A caller names sources: ranges of a file that one version of another object of the same service is expected to contain.
The file is on this machine, complete and verified. Only its way into the bucket differs: a copied part is not sent.

**A source is a guess, and proves nothing.** The server copies a part on condition of the object's version
(`x-amz-copy-source-if-match`), and reports the MD5 of the part that it has stored, as for a part that is sent. The part
counts only if this is the MD5 of the file's own bytes there. Otherwise, and if the copy fails, the part is sent. So an
object that was replaced, a wrong index and a server that ignores condition or range cost time, and never a wrong byte.
Trusted is what an upload trusts, too: that the server stores what it reports.

S3 computes the MD5 of each part (S3 User Guide, "Checking object integrity"), but reports other values with encryption
by KMS or by a customer's key. SeaweedFS 4.48 reports the MD5 of sent parts only. There, every part is sent. Cloudflare
R2 requires parts of one size (R2 documentation, "Multipart upload"), and refuses the upload. The file is then uploaded
as others are. A refused upload that completes late does no harm: it has only parts with the file's own bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from logging import getLogger
from pathlib import Path
from typing import Any, TypeVar

from relayout.core.extents import Extent
from relayout.storage.cloud import connect
from relayout.storage.cloud.failures import persistent, request_error, texts_of
from relayout.storage.cloud.store import CloudStore, Version
from relayout.storage.stores import RequestError, Store

_MIN_NBYTES = 5 * 2**20
"""Minimum bytes of each part but the last: S3 User Guide, "Amazon S3 multipart upload limits"."""
_MAX_PARTS = 9000
"""Maximum number of parts of one upload; S3 accepts 10,000."""
_NUM_ATTEMPTS = 3
"""Attempts of boto3 for one request. Sent parts are then repeated as all requests; a copied one is sent instead."""
_NUM_CONNECTIONS = 16

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class CopySource:
    """A range of a file, and the location of bytes that are expected to be equal."""

    extent: Extent
    """The range of the file."""
    url: str
    """URL of the object."""
    offset: int
    """Offset of the bytes in the object."""
    version: str
    """ETag of the object when it was listed."""

    def part(self, start: int, end: int) -> CopySource:
        """Return the part of this source from one offset in the file to another."""
        return CopySource(Extent(start, end - start), self.url, self.offset + start - self.extent.offset, self.version)


@dataclass(frozen=True, slots=True)
class UploadPart:
    """A part of an upload."""

    extent: Extent
    """Its range of the file."""
    source: CopySource | None = None
    """The source of the same range, for the server to copy. None: the part is sent."""


def is_possible(source: Store, target: Store) -> bool:
    """Return True if the server of `target` can copy from `source`: both are buckets of S3, and boto3 is installed."""
    stores = [one for one in (source, target) if isinstance(one, CloudStore)]
    if len(stores) < 2 or not all(one.client.root.startswith("s3://") for one in stores):
        return False
    if find_spec("boto3") is None:
        getLogger("relayout").warning(
            "relayout: every byte is sent to %s. With the package boto3 the server copies equal ranges itself:"
            " pip install boto3",
            target,
        )
        return False
    # With the bucket's name in a named host, boto3 would add the name again.
    return not (connect.endpoint_of("s3") and connect.is_set("AWS_VIRTUAL_HOSTED_STYLE_REQUEST"))


def versions_in(store: Store) -> dict[str, str]:
    """Return the ETags of the objects of a store by name, from one listing."""
    assert isinstance(store, CloudStore)
    listed = store.client.list_objects(store.prefix)
    return {full.removeprefix(f"{store.prefix}/"): version for full, version in listed if version}


def plan_parts(nbytes: int, sources: Iterable[CopySource]) -> list[UploadPart]:
    """Divide a file into the parts of an upload. Pure.

    Every part has at least the minimum size, except the last. Sources that are neighbors in both files are joined.
    A gap between sources that is too short takes bytes of the source after it. A source that is then too short is sent.

    Args:
        sources: in rising order, without overlap.
    """
    least = max(_MIN_NBYTES, -(-nbytes // _MAX_PARTS))
    parts, done = list[UploadPart](), 0
    for source in _joined(sources):
        start = source.extent.offset
        if done < start < done + least:
            start = done + least
        if source.extent.end - start < (1 if source.extent.end == nbytes else least):
            continue
        parts += [UploadPart(Extent(low, high - low)) for low, high in _split(done, start, least)]
        ranges = _split(start, source.extent.end, least)
        parts += [UploadPart(Extent(low, high - low), source.part(low, high)) for low, high in ranges]
        done = source.extent.end
    return parts + [UploadPart(Extent(low, high - low)) for low, high in _split(done, nbytes, least)]


def _joined(sources: Iterable[CopySource]) -> list[CopySource]:
    joined: list[CopySource] = []
    for source in sources:
        if joined and joined[-1].extent.end == source.extent.offset:
            longer = joined[-1].part(joined[-1].extent.offset, source.extent.end)
            if longer.part(source.extent.offset, source.extent.end) == source:
                joined[-1] = longer
                continue
        joined.append(source)
    return joined


def _split(start: int, end: int, least: int) -> Iterator[tuple[int, int]]:
    """Yield pieces of a range, each with `least` to 2 * `least` bytes; a shorter range is one piece."""
    if start < end:
        count = max(1, (end - start) // least)
        yield from pairwise(start + (end - start) * index // count for index in range(count + 1))


class PartCopies:
    """Uploads the files of one output, and lets the server copy parts. Thread-safe."""

    def __init__(self, find: Callable[[str], Sequence[CopySource]]) -> None:
        """Take the function that returns the sources of a file of the output, in rising order, without overlap."""
        self._find = find
        self._lock = threading.Lock()
        self._boto: Any = None
        self._lost: set[str] = set()
        """URLs of objects that could not be copied, or whose copies differed. They are not tried again."""
        self._is_over = False
        """True once such an upload failed: the service does not support it. Nothing is copied any more."""
        self._has_warned = False
        self.nbytes = 0
        """Bytes that the server has copied."""

    def upload(
        self, root: str, full: str, name: str, file: Path, num_streams: int, check: Callable[[], None]
    ) -> Version | None:
        """Upload a local file whole, as `WritableClient.upload` does; return None if that must upload the file.

        None means that no source is left, or that the service has refused the upload. The service may still carry that
        out, or may have done so: with the bytes of the file.

        Args:
            root: URL of the bucket.
            full: name of the object.
            name: name of the file in the output.
        """
        if self._is_over:
            return None
        parts = plan_parts(file.stat().st_size, self._find(name))
        if not any(part.source is not None and part.source.url not in self._lost for part in parts):
            return None
        target = {"Bucket": root.removeprefix("s3://"), "Key": full}
        try:
            return self._send(target, f"{root}/{full}", file, parts, num_streams, check)
        except RequestError as error:
            self._is_over = True
            self._warn(str(error))
            return None

    def _send(
        self,
        target: Mapping[str, str],
        location: str,
        file: Path,
        parts: Sequence[UploadPart],
        num_streams: int,
        check: Callable[[], None],
    ) -> Version:
        client = self._client()
        begun = _persistent(lambda: client.create_multipart_upload(**target), location)
        upload = {**target, "UploadId": begun["UploadId"]}

        def complete(item: tuple[int, UploadPart]) -> dict[str, Any]:
            number, part = item
            check()
            content = os.pread(stream.fileno(), part.extent.nbytes, part.extent.offset)
            assert len(content) == part.extent.nbytes
            tag = self._copied({**upload, "PartNumber": number}, part, content)
            if tag is None:
                sent = _persistent(lambda: client.upload_part(**upload, PartNumber=number, Body=content), location)
                tag = sent["ETag"]
            return {"PartNumber": number, "ETag": tag}

        try:
            with file.open("rb", buffering=0) as stream, ThreadPoolExecutor(num_streams) as pool:
                done = {"Parts": list(pool.map(complete, enumerate(parts, 1)))}
            ended = _persistent(lambda: client.complete_multipart_upload(**upload, MultipartUpload=done), location)
        except BaseException:
            with suppress(RequestError):  # This upload was begun above.
                _translated(lambda: client.abort_multipart_upload(**upload), location)
            raise
        return {"e_tag": ended["ETag"]}

    def _copied(self, upload: Mapping[str, Any], part: UploadPart, content: bytes) -> str | None:
        """Let the server copy a part; return its ETag, or None if the part must be sent.

        Args:
            upload: arguments that name the part of the upload.
            content: the part's own bytes.
        """
        source = part.source
        if source is None or source.url in self._lost:
            return None
        bucket, _, key = source.url.removeprefix("s3://").partition("/")
        request = {
            "CopySource": {"Bucket": bucket, "Key": key},
            "CopySourceRange": f"bytes={source.offset}-{source.offset + part.extent.nbytes - 1}",
            "CopySourceIfMatch": source.version,
        }
        try:
            copied = _translated(lambda: self._client().upload_part_copy(**upload, **request), source.url)
        except RequestError as error:
            self._lose(source, f"{source.url}: was replaced meanwhile" if error.status == 412 else str(error))
            return None
        tag = str(copied.get("CopyPartResult", {}).get("ETag", ""))
        if tag.strip('"') != hashlib.md5(content, usedforsecurity=False).hexdigest():
            self._lose(source, f"{source.url}: a copied part has another MD5, or the server reports none")
            return None
        with self._lock:
            self.nbytes += part.extent.nbytes
        return tag

    def _lose(self, source: CopySource, why: str) -> None:
        with self._lock:
            self._lost.add(source.url)
        self._warn(why)

    def _warn(self, why: str) -> None:
        """Log why bytes are sent instead of copied by the server, once."""
        with self._lock:
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            getLogger("relayout").warning("relayout: not all equal bytes are copied by the server, but sent: %s", why)

    def _client(self) -> Any:
        """Return boto3's client, with the settings that obstore has."""
        with self._lock:
            if self._boto is None:
                self._boto = _connect()
            return self._boto


def _connect() -> Any:
    from boto3.session import Session
    from botocore import UNSIGNED
    from botocore.config import Config

    settings = connect.s3_settings()
    options: dict[str, Any] = {
        "connect_timeout": connect.CONNECT_SECONDS,
        "read_timeout": connect.UPLOAD_SECONDS,
        "retries": {"total_max_attempts": _NUM_ATTEMPTS, "mode": "standard"},
        "max_pool_connections": _NUM_CONNECTIONS,
        # Other servers than Amazon's reject the checksums that boto3 adds by itself.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "s3": {"addressing_style": "path" if settings.endpoint else "auto", "payload_signing_enabled": False},
    }
    if connect.is_set("AWS_SKIP_SIGNATURE"):
        options["signature_version"] = UNSIGNED
    return (settings.profile or Session()).client(
        "s3",
        endpoint_url=settings.endpoint,
        region_name=settings.region or "us-east-1",
        verify=connect.named_certificates("s3") or os.environ.get("SSL_CERT_FILE"),
        config=Config(**options),
    )


def _persistent(call: Callable[[], Answer], location: str) -> Answer:
    """Call boto3, and repeat the call as all requests to stores are."""
    return persistent(lambda: _translated(call, location), location)


def _translated(call: Callable[[], Answer], location: str) -> Answer:
    """Call boto3 once. RequestError: the request failed; the error has no text of the server."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return call()
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = str(error.response.get("Error", {}).get("Code", ""))
        code = code if re.fullmatch(r"[A-Za-z.]{1,60}", code) else ""
        failure = request_error("", location, status=status, code=code)
    except BotoCoreError as error:
        failure = request_error(texts_of(error), location)
    raise failure  # Raised here, without a reference to boto3's error, which a traceback would show.
