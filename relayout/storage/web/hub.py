"""Repositories of models on the Hugging Face hub: `hf://ORG/MODEL[@REVISION][/FOLDER]`.

The hub's own library (see `hub_library`) returns the location of a file's bytes, and caches downloads on this machine.
Files in its cache are read there. This module reads ranges: each file is resolved once, to a signed URL that serves its
ranges. So only files, not ranges, count against the hub's limit on requests. Buckets of the hub are in `hub_bucket`.
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

from relayout.errors import FormatError, MissingPathError, PlanError, how_to_install, shown
from relayout.format.fields import Fields, is_plain_path, parse_object
from relayout.storage.cloud import connect
from relayout.storage.cloud.failures import persistent, replaced
from relayout.storage.cloud.store import CLOUD_COST, Body, CloudStore
from relayout.storage.local.store import LocalStore
from relayout.storage.stores import Access, FileStat, Kind, ReadableFile, RequestCost, RequestError, Store
from relayout.storage.web import http, hub_bucket
from relayout.storage.web.hub_library import (
    Address,
    address_of,
    call_library,
    denied,
    endpoint,
    library,
    metadata_of,
    read_answer,
)

_URL = re.compile(
    r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/@?#]+))?(?P<folder>(?:/[^/?#]+)*)/?", re.IGNORECASE | re.ASCII
)
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_MAX_INFO_NBYTES = 64 * 2**20


class HubClient:
    """One revision of a repository, pinned to one commit from its first request on."""

    cost: RequestCost = CLOUD_COST

    def __init__(self, repo: str, revision: str | None, *, is_guess: bool = False) -> None:
        """Take the name of a repository. `is_guess` is True if it was given as a path that does not exist."""
        self._is_guess = is_guess
        self.repo = repo
        """The name, as ORG/MODEL."""
        self.revision = revision
        """A branch, tag or commit; None: the main branch."""
        self._addresses: dict[str, Address] = {}
        self._lock = threading.Lock()
        self._is_offline = False
        self._known: tuple[str, Mapping[str, FileStat]] | None = None

    @property
    def root(self) -> str:
        return f"hf://{self.repo}" + (f"@{self.revision}" if self.revision else "")

    def __reduce__(self) -> tuple[object, ...]:
        return HubClient, (self.repo, self.revision)

    def __repr__(self) -> str:
        return f"HubClient({self.root!r})"

    @property
    def commit(self) -> str:
        """The commit's hash."""
        if self.revision is not None and self.snapshot_of(self.revision):
            return self.revision
        return self._commit_and_files[0]

    @property
    def files(self) -> Mapping[str, FileStat]:
        """All files of the commit, by name."""
        return self._commit_and_files[1]

    @property
    def _commit_and_files(self) -> tuple[str, Mapping[str, FileStat]]:
        """Commit and files, both from the hub; without a network, both from its cache. Requested once."""
        with self._lock:
            self._known = self._known or self._find()
            return self._known

    def _find(self) -> tuple[str, Mapping[str, FileStat]]:
        cached = self._cached()
        try:
            return self._request_commit(is_expected=cached is None and not self._is_guess)
        except PlanError as error:
            if not self._is_guess:
                raise
            what = error.what
        except RequestError as error:
            if cached is not None:
                self._is_offline = True
                return cached
            if not self._is_guess or error.status is not None:
                raise
            what = str(error.strerror)
        what = f"no such file or folder; as a repository of the hub: {what}"
        raise MissingPathError(what, path=self.repo)

    def _request_commit(self, *, is_expected: bool) -> tuple[str, Mapping[str, FileStat]]:
        """Request commit and files. Without `is_expected`, the request is not repeated if the hub cannot be reached."""
        revision = f"/revision/{quote(self.revision, safe='')}" if self.revision else ""
        url = f"{endpoint()}/api/models/{self.repo}{revision}?blobs=true"

        def ask() -> bytes:
            try:
                return call_library(lambda: read_answer(url, self.root, _MAX_INFO_NBYTES)[0], self.root, self._download)
            except RequestError as error:
                if error.status is None and not is_expected:
                    raise RequestError(errno.ENOTCONN, str(error.strerror), self.root) from None
                raise

        location = f"{self.root}: the hub's answer"
        top = Fields(parse_object(persistent(ask, self.root), location), location)
        commit = _commit(top.text("sha"), location)
        if self.revision is not None and _COMMIT.fullmatch(self.revision) and commit != self.revision:
            raise FormatError(f"is of commit {commit}", path=location, code="mismatch")
        return commit, dict(_file(entry, location) for entry in top.column("siblings", dict))

    def _cached(self) -> tuple[str, Mapping[str, FileStat]] | None:
        """Return commit and files in the hub's cache, read as the hub's own tools do; None if they are not cached."""
        commit, reference = self.revision or "main", self._cache / "refs" / (self.revision or "main")
        if not _COMMIT.fullmatch(commit):
            if not reference.is_file():
                return None
            with reference.open(errors="replace") as file:
                commit = _commit(file.read(64).strip(), str(reference))
        folder = self.snapshot_of(commit)
        if folder is None:
            return None
        local = LocalStore(folder)
        entries = (entry for entry in local.walk() if not entry.is_folder and entry.refusal is None)
        return commit, {entry.name: stat for entry in entries if (stat := local.stat(entry.name)) is not None}

    @property
    def _cache(self) -> Path:
        """The repository's folder in the hub's own cache."""
        name = library().file_download.repo_folder_name(repo_id=self.repo, repo_type="model")
        return Path(library().constants.HF_HUB_CACHE, name)

    def snapshot_of(self, commit: str) -> Path | None:
        """Return the folder of a commit in the hub's own cache, which may lack files; None if it does not exist."""
        folder = self._cache / "snapshots" / commit
        # A server cannot choose the folder: a commit is a hash.
        return folder if _COMMIT.fullmatch(commit) and folder.is_dir() else None

    def get(self, name: str, start: int, end: int | None, version: str | None) -> Body:
        location, known = f"{self.root}/{name}", self.stat(name)
        if known is None:
            offline = " in the hub's cache on this machine, and the hub does not answer" if self._is_offline else ""
            raise FormatError(f"is missing{offline}", path=location, code="missing")
        if version not in (None, known.version):
            raise replaced(location)
        address = self._addresses.get(name)
        for is_new in (True,) if address is None or address.is_old else (False, True):
            address = self._resolve(name, known) if is_new or address is None else address
            try:
                body = http.get(address.url, location, start, end, None, address.headers)
                break
            except RequestError as error:
                if error.status not in (401, 403) or is_new:
                    raise denied(error, address, location, self._download) from None
        if body.stat.nbytes != known.nbytes:
            raise replaced(location)
        end = body.part[1]
        return replace(body, stat=known, again=lambda offset: self.get(name, offset, end, known.version))

    def stat(self, name: str) -> FileStat | None:
        """Look a file up in the list of the commit."""
        return self.files.get(name)

    def list_objects(self, prefix: str) -> Iterator[tuple[str, str]]:
        for name, stat in self.files.items():
            if not prefix or name.startswith(f"{prefix}/"):
                yield name, stat.version

    def _resolve(self, name: str, known: FileStat) -> Address:
        """Request a file's address from the hub. Several threads may do so at once."""
        location = f"{self.root}/{name}"
        url = library().hf_hub_url(self.repo, name, revision=self.commit)
        found = metadata_of(url, location, self._download)
        if (found.etag, found.size) != (known.version, known.nbytes):
            raise FormatError("the hub returned a file that is not the commit's", path=location, code="mismatch")
        address = self._addresses[name] = address_of(found, url, location)
        return address

    @property
    def _download(self) -> str:
        return f"hf download {self.repo}"


def _file(entry: Mapping[str, Any], location: str) -> tuple[str, FileStat]:
    """Return the name of a file in the hub's list, and its length and hash."""
    fields = Fields(entry, location)
    name, lfs = fields.text("rfilename"), Fields(fields.top.get("lfs") or {}, location)
    if not is_plain_path(name):
        raise FormatError(f"{shown(name)} is not a file name", path=location, code="unsafe")
    hashed = lfs.text("sha256") if lfs.top else fields.text("blobId")
    return name, FileStat(fields.size("size", 0), hashed, vouched=hashed)


def _commit(text: str, location: str) -> str:
    """Check and return a commit's hash, which becomes part of paths and URLs. FormatError: it is not a hash."""
    if not _COMMIT.fullmatch(text):
        raise FormatError(
            f"{shown(text)} is not a commit: expected 40 hexadecimal digits", path=location, code="unsafe"
        )
    return text


@dataclass(frozen=True, slots=True)
class HubStore(CloudStore):
    """A repository on the hub. Files in the hub's cache on this machine are read there."""

    client: HubClient

    def _source(self, name: str) -> Store:
        """Return the folder of the hub's cache if it has the file, else the store of the hub alone."""
        snapshot = self.client.snapshot_of(self.client.commit)
        if snapshot is None or not (snapshot / self.full_name(name)).is_file():
            return CloudStore(self.client, self.prefix, self.opened)
        return LocalStore(snapshot / self.prefix)

    def path(self, name: str) -> Path | None:
        return self._source(name).path(name)

    def kind(self) -> Kind:
        snapshot = self.client.snapshot_of(self.client.commit)
        if snapshot is not None and (kind := LocalStore(snapshot / self.prefix).kind()) is not Kind.NOTHING:
            return kind
        return CloudStore.kind(self)

    def stat(self, name: str) -> FileStat | None:
        return self._source(name).stat(name)

    def read(self, name: str, limit: int) -> bytes:
        return self._source(name).read(name, limit)

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> ReadableFile:
        return self._source(name).open(name, nbytes, access=access, version=version)


def offer(url: str) -> Store:
    """Return a repository, a bucket, or a folder in one, without a request."""
    connect.require("huggingface_hub", url, "hub")
    connect.require("urllib3", url, "hub")
    if hub_bucket.is_of_bucket(url):
        return hub_bucket.offer(url)
    match = _URL.fullmatch(url)
    if match is None or {".", ".."} & set(match["folder"].split("/")):
        raise PlanError("expected hf://ORG/MODEL, hf://ORG/MODEL@REVISION or a folder below it", code="option")
    return HubStore(HubClient(match["repo"], match["revision"]), match["folder"].strip("/"))


def offer_model(path: str) -> Store | None:
    """Return the repository that a path such as "org/model" may mean.

    Returns:
        None: the path does not have this form, or the extra is not installed; see `advice_on_model`.
    """
    if not _REPO.fullmatch(path) or not _is_installed():
        return None
    return HubStore(HubClient(path, None, is_guess=True), "")


def advice_on_model(path: str) -> str:
    """Return the end of a message about a missing path: how to read it as a repository, if its form permits that."""
    if not _REPO.fullmatch(path) or _is_installed():
        return ""
    return f"; for a repository of the hub, {how_to_install('hub')}"


def _is_installed() -> bool:
    return find_spec("huggingface_hub") is not None and find_spec("urllib3") is not None
