"""Repositories of models on the Hugging Face hub: `hf://ORG/MODEL[@REVISION][/FOLDER]`.

One request tells the commit and all files; each file is resolved once, to a signed URL from which its ranges come. So
the hub's limit on requests is met by the number of files and not of ranges. What is in the hub's own cache on this
machine is read there.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from relayout.errors import FormatError, PlanError
from relayout.storage.cloud.client import CLOUD_COST, Body, get
from relayout.storage.cloud.connect import make_store, require
from relayout.storage.cloud.failures import replaced
from relayout.storage.cloud.store import CloudStore
from relayout.storage.local.store import LocalStore
from relayout.storage.protocols import Access, FileStat, Kind, ReadableFile, Refusal, RequestCost, RequestError, Store

if TYPE_CHECKING:
    from obstore.store import ObjectStore

Result = TypeVar("Result")

_URL = re.compile(
    r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^/@?#]+))?(?P<folder>(?:/[^/?#]+)*)/?", re.IGNORECASE | re.ASCII
)
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SIGNED_SECONDS = 600.0
"""A signed URL is asked for again after so long; the hub's are good for an hour."""


@dataclass(frozen=True, slots=True)
class _Location:
    """Where a file's bytes come from."""

    store: ObjectStore
    name: str
    made: float
    """When, by the clock `time.monotonic`."""


class HubClient:
    """One revision of a repository; see `client.Client`. It is at one commit from its first request on."""

    cost: RequestCost = CLOUD_COST

    def __init__(self, repo: str, revision: str | None, *, is_guess: bool = False) -> None:
        """With `is_guess`, the name was given as a path that does not exist."""
        self._is_guess = is_guess
        self.repo = repo
        """As ORG/MODEL."""
        self.revision = revision
        """A branch, tag or commit; None: the main branch."""
        self._locations: dict[str, _Location] = {}

    @property
    def root(self) -> str:
        """See `Client.root`."""
        return f"hf://{self.repo}" + (f"@{self.revision}" if self.revision else "")

    def __reduce__(self) -> tuple[object, ...]:
        return HubClient, (self.repo, self.revision)

    def __repr__(self) -> str:
        return f"HubClient({self.root!r})"

    @cached_property
    def commit(self) -> str:
        """The commit's hash.

        Raises:
            PlanError: the repository or revision does not exist, or may not be read.
            RequestError: the hub does not answer, and its cache does not say.
        """
        if self.revision is not None and _COMMIT.fullmatch(self.revision) and self.snapshot_of(self.revision):
            return self.revision
        try:
            return self._info[0]
        except (PlanError, RequestError):
            reference = self._cache / "refs" / (self.revision or "main")
            if reference.is_file():  # As the hub's own tools do where there is no network.
                return reference.read_text().strip()
            raise

    @cached_property
    def files(self) -> Mapping[str, FileStat]:
        """All files of the commit, by name; for errors see `commit`."""
        return self._info[1]

    @cached_property
    def _info(self) -> tuple[str, dict[str, FileStat]]:
        api = _hub().HfApi(endpoint=_endpoint())
        try:
            info = self._asked(
                lambda: api.model_info(self.repo, revision=self.revision, files_metadata=True), self.root
            )
        except (PlanError, RequestError) as error:
            if not self._is_guess:
                raise
            why = error.what if isinstance(error, PlanError) else error.strerror
            what = f"no such file or folder; as a repository of the hub: {why}"
            raise PlanError(what, path=self.repo, code="missing") from None
        files = {
            one.rfilename: FileStat(one.size or 0, str(one.lfs.sha256 if one.lfs else one.blob_id))
            for one in info.siblings or ()
        }
        return str(info.sha), files

    @property
    def _cache(self) -> Path:
        """The repository's folder in the hub's own cache."""
        folder = os.environ.get("HF_HUB_CACHE") or _hub().constants.HF_HUB_CACHE
        return Path(folder) / f"models--{self.repo.replace('/', '--')}"

    def snapshot_of(self, commit: str) -> Path | None:
        """The folder of a commit in the hub's own cache, where only some of its files may be; None if it has none."""
        folder = self._cache / "snapshots" / commit
        return folder if folder.is_dir() else None

    def get(self, name: str, start: int, end: int | None, version: str | None) -> Body:
        """See `Client.get`."""
        where, known = f"{self.root}/{name}", self.stat(name)
        if known is None:
            raise FormatError("is missing", path=where, code="missing")
        if version not in (None, known.version):
            raise replaced(where)
        location = self._locations.get(name)
        if location is None or time.monotonic() - location.made > _SIGNED_SECONDS:
            location = self._resolve(name)
        try:
            body = get(location.store, location.name, where, start, end, None)
        except RequestError as error:
            if error.status not in (401, 403):
                raise
            location = self._resolve(name)  # The signature has expired.
            body = get(location.store, location.name, where, start, end, None)
        if body.stat.nbytes != known.nbytes:
            raise replaced(where)
        return replace(body, stat=known)

    def stat(self, name: str) -> FileStat | None:
        """See `Client.stat`: the commit's list says it."""
        return self.files.get(name)

    def names(self, prefix: str) -> Iterator[str]:
        """See `Client.names`."""
        yield from (name for name in self.files if not prefix or name.startswith(f"{prefix}/"))

    def _resolve(self, name: str) -> _Location:
        """Ask the hub where a file is. Of several threads that ask at once, all get an answer that is right."""
        url = f"{_endpoint()}/{self.repo}/resolve/{self.commit}/{quote(name)}"
        token = _hub().get_token()
        found = self._asked(
            lambda: _hub().get_hf_file_metadata(url, token=token, endpoint=_endpoint(), retry_on_errors=True),
            f"{self.root}/{name}",
        )
        if found.location == url:  # The hub itself has small files.
            headers = {"Authorization": f"Bearer {token}"} if token else None
            location = _Location(make_store(url.removesuffix(f"/{quote(name)}"), headers), name, time.monotonic())
        else:  # The signature is in the URL; nobody else may see the token.
            location = _Location(make_store(found.location), "", time.monotonic())
        self._locations[name] = location
        return location

    def _asked(self, call: Callable[[], Result], where: str) -> Result:
        """What the hub's library returns; its errors are put into our words."""
        from huggingface_hub import errors

        failure: Exception
        try:
            return call()
        except errors.GatedRepoError:
            what = "is gated: accept its terms on the hub, and log in (hf auth login, or HF_TOKEN)"
            failure = PlanError(what, path=where, code="missing")
        except errors.RepositoryNotFoundError:
            what = "no such repository on the hub; for a private one, log in (hf auth login, or HF_TOKEN)"
            failure = PlanError(what, path=where, code="missing")
        except errors.RevisionNotFoundError:
            failure = PlanError("no such revision of the repository", path=where, code="missing")
        except errors.EntryNotFoundError:
            failure = FormatError("is missing", path=where, code="missing")
        except errors.HFValidationError:
            failure = PlanError("is not the name of a repository", path=where, code="option")
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            says = _STATUS.get(status, "the hub failed: load later")
            failure = RequestError(errno.EREMOTEIO, f"{says} (HTTP {status})", where, status)
        except Exception as error:  # The library's transports have their own.
            what = f"the hub cannot be reached ({type(error).__name__}): check the network and HF_ENDPOINT"
            failure = RequestError(errno.EHOSTUNREACH, what, where)
        raise failure


_STATUS = {
    401: "the hub refuses the token: log in again (hf auth login, or HF_TOKEN)",
    403: "the token may not read it",
    429: "the hub has too many requests from here: load later, or with a token",
}


@dataclass(frozen=True, slots=True)
class HubStore(CloudStore):
    """A repository; see `protocols.Store`. What its own cache on this machine has is read there."""

    @property
    def _hub(self) -> HubClient:
        assert isinstance(self.client, HubClient)
        return self.client

    def _local(self, name: str) -> LocalStore | None:
        """The folder of the hub's cache that has a file; None if it was not downloaded."""
        snapshot = self._hub.snapshot_of(self._hub.commit)
        if snapshot is None or not (snapshot / self.full_name(name)).is_file():
            return None
        return LocalStore(snapshot / self.prefix)

    def path(self, name: str) -> Path | None:
        """See `Store.path`."""
        local = self._local(name)
        return None if local is None else local.path(name)

    def kind(self) -> Kind:
        """See `Store.kind`."""
        snapshot = self._hub.snapshot_of(self._hub.commit)
        if snapshot is not None and (found := LocalStore(snapshot / self.prefix).kind()) is not Kind.NOTHING:
            return found
        return CloudStore.kind(self)

    def parent(self) -> tuple[Store, str]:
        """See `Store.parent`."""
        above, _, name = self.prefix.rpartition("/")
        return HubStore(self.client, above, self.opened), name

    def stat(self, name: str) -> FileStat | None:
        """See `Store.stat`."""
        local = self._local(name)
        return CloudStore.stat(self, name) if local is None else local.stat(name)

    def read(self, name: str, limit: int) -> bytes:
        """See `Store.read`."""
        local = self._local(name)
        return CloudStore.read(self, name, limit) if local is None else local.read(name, limit)

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> ReadableFile:
        """See `Store.open`."""
        local = self._local(name)
        if local is None:
            return CloudStore.open(self, name, nbytes, access=access, version=version)
        return local.open(name, nbytes, access=access, version=version)


def offer(url: str) -> Store | Refusal:
    """See `stores.REGISTRY`. No request is made yet."""
    found = _URL.fullmatch(url)
    if found is None or {".", ".."} & set(found["folder"].split("/")):
        return Refusal("expected hf://ORG/MODEL, hf://ORG/MODEL@REVISION or a folder below it")
    require("huggingface_hub", url, "hub")
    require("obstore", url, "hub")
    return HubStore(HubClient(found["repo"], found["revision"]), found["folder"].strip("/"))


def offer_model(path: str, absence: Callable[[], str]) -> Store | None:
    """The repository that a path such as "org/model" may mean; None if it does not look like one.

    Raises:
        PlanError: it does, but the extra is not installed; `absence` says that there is no such path.
    """
    if not _REPO.fullmatch(path):
        return None
    if find_spec("huggingface_hub") is None or find_spec("obstore") is None:
        what = f"{absence()}; for a repository of the hub, install relayout with the extra 'hub'"
        raise PlanError(what, path=path, code="missing")
    return HubStore(HubClient(path, None, is_guess=True), "")


def _hub() -> Any:
    """The library; imported where it is used, as that takes a while."""
    import huggingface_hub

    return huggingface_hub


def _endpoint() -> str:
    return str(os.environ.get("HF_ENDPOINT") or _hub().constants.ENDPOINT).rstrip("/")
