"""Buckets of the Hugging Face hub, which are only read: `hf://buckets/ORG/BUCKET[/FOLDER]`.

A bucket has no revisions: a new file replaces the old one. Its version is the Xet hash of its content. Each file is
resolved to that hash and to a signed URL, which serves its ranges. When the URL expires, a reader of one version
resolves the file again, and fails if the hash has changed. The hub binds the URL to the content. If the hub itself
sends the bytes, under the file's name, the answer's ETag must equal the one that came with the hash.

Buckets are not written: the hub's call for writing (`HfApi.batch_bucket_files` of huggingface_hub 2.4) takes no
condition, so two concurrent publishers would both succeed (see `WritableClient.put`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar
from urllib.parse import quote

from relayout.errors import FormatError, PlanError, about
from relayout.format.fields import Fields, decode, strict_json
from relayout.storage.cloud.failures import persistent, replaced
from relayout.storage.cloud.store import CLOUD_COST, Body, CloudStore
from relayout.storage.stores import FileStat, RequestCost, RequestError, Store, if_there, listing_timer, unversioned
from relayout.storage.web import http
from relayout.storage.web.hub_library import (
    Address,
    address_of,
    call_library,
    denied,
    endpoint,
    metadata_of,
    read_answer,
)

_URL = re.compile(r"hf://buckets/(?P<bucket>[\w.-]+/[\w.-]+)(?P<folder>(?:/[^/?#]+)*)/?", re.IGNORECASE | re.ASCII)
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_MAX_PAGE_NBYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class _Resolved:
    """One version of a file, and the location of its bytes."""

    stat: FileStat
    address: Address
    tag: str | None
    """The ETag that bytes under the file's name must have; None if the hub redirects to a storage."""


@dataclass(frozen=True, slots=True)
class HubBucketClient:
    """A bucket of the hub."""

    bucket: str
    """The name, as ORG/BUCKET."""
    _known: dict[str, _Resolved] = field(default_factory=dict, compare=False, repr=False)
    """Hash and address of each file when it was last resolved, by name."""
    cost: ClassVar[RequestCost] = CLOUD_COST

    @property
    def root(self) -> str:
        return f"hf://buckets/{self.bucket}"

    def __reduce__(self) -> tuple[object, ...]:
        return HubBucketClient, (self.bucket,)

    def get(self, name: str, start: int, end: int | None, version: str | None) -> Body:
        location = f"{self.root}/{name}"
        known = self._known.get(name) if version is not None else None
        if known is None or known.stat.version != version or known.address.is_old:
            return self._get(location, self._resolve(name, version), start, end, name)
        try:
            return self._get(location, known, start, end, name)
        except RequestError as error:
            if error.status not in (401, 403):
                raise
        return self._get(location, self._resolve(name, version), start, end, name)

    def _get(self, location: str, found: _Resolved, start: int, end: int | None, name: str) -> Body:
        """Request a range of a version of a file."""
        address = found.address
        try:
            body = http.get(address.url, location, start, end, None, address.headers)
        except RequestError as error:
            raise denied(error, address, location, self._download) from None
        if body.stat.nbytes != found.stat.nbytes or found.tag not in (None, _bare(body.stat.version)):
            raise replaced(location)
        end = body.part[1]
        return replace(body, stat=found.stat, again=lambda offset: self.get(name, offset, end, found.stat.version))

    def stat(self, name: str) -> FileStat | None:
        return if_there(lambda: self._resolve(name, None).stat)

    def _resolve(self, name: str, version: str | None) -> _Resolved:
        """Request a file's version and address. Several threads may do so at once.

        Raises:
            FormatError: the file is missing, or has another version than the expected one.
        """
        location, url = f"{self.root}/{name}", f"{endpoint()}/buckets/{self.bucket}/resolve/{quote(name, safe='')}"
        found = metadata_of(url, location, self._download)
        hashed = "" if found.xet_file_data is None else found.xet_file_data.file_hash
        if not _HASH.fullmatch(hashed) or found.size is None:
            raise FormatError("the hub does not say what the file is", path=location, code="invalid")
        if version not in (None, hashed):
            raise replaced(location)
        address = address_of(found, url, location)
        if address.is_hub and not found.etag:
            raise unversioned(location)
        stat = FileStat(found.size, hashed, vouched=f"xet:{hashed}")
        resolved = self._known[name] = _Resolved(stat, address, found.etag if address.is_hub else None)
        return resolved

    def list_objects(self, prefix: str) -> Iterator[tuple[str, str]]:
        location, check_time, seen = f"{self.root}/{prefix}", listing_timer(self.root), set[str]()
        below = f"/{quote(prefix, safe='')}" if prefix else ""
        url: str | None = f"{endpoint()}/api/buckets/{self.bucket}/tree{below}?recursive=true"
        while url is not None:
            check_time()
            if url in seen:
                raise FormatError("the listing of the store repeats names", path=location, code="invalid")
            seen.add(url)
            # The hub may have no listing of a folder that is not there.
            content, url = if_there(partial(self._page, url, location)) or (b"[]", None)
            with about(path=location):
                listing = Fields({"listing": strict_json(decode(content))}, location).column("listing", dict)
            for entry in listing:
                fields = Fields(entry, location)
                name = fields.text("path")
                if fields.text("type") == "file" and (not prefix or name.startswith(f"{prefix}/")):
                    yield name, fields.text("xetHash")

    def _page(self, url: str, location: str) -> tuple[bytes, str | None]:
        """One page of a listing, and the URL of the next one."""
        return persistent(
            lambda: call_library(lambda: read_answer(url, location, _MAX_PAGE_NBYTES), location, self._download),
            location,
        )

    @property
    def _download(self) -> str:
        return f"hf buckets sync {self.root} FOLDER"


def _bare(tag: str) -> str:
    """Return an ETag in the form of the hub's library."""
    return tag.removeprefix("W/").strip('"')


def is_of_bucket(url: str) -> bool:
    """Return True if a URL of the hub is of a bucket: no user or organization has the name `buckets`."""
    return url.lower().startswith("hf://buckets/")


def offer(url: str) -> Store:
    """Return a bucket, or a folder in it, without a request."""
    match = _URL.fullmatch(url)
    if match is None or {".", ".."} & set(match["folder"].split("/")):
        raise PlanError("expected hf://buckets/ORG/BUCKET or a folder in it", code="option")
    return CloudStore(HubBucketClient(match["bucket"]), match["folder"].strip("/"))
