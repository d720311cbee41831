"""Clients: what is asked of an object store, a web server or the hub, and the client of a bucket."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from relayout.errors import FormatError
from relayout.storage.cloud.connect import make_store
from relayout.storage.cloud.failures import replaced, request
from relayout.storage.protocols import FileStat, RequestCost, RequestError

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta
    from obstore.store import ObjectStore

CLOUD_COST = RequestCost(chunk_nbytes=8 * 2**20, max_gap_nbytes=2**20, concurrency=128, is_remote=True)
"""A connection to an object store brings 50 to 100 MB/s, and its first byte takes 20 to 200 ms."""

_STREAM_NBYTES = 256 * 2**10
"""What is taken at once from a connection: small enough to be copied while it is in the processor's cache."""


Version = Mapping[str, str]
"""What tells a version of an object to the store that shall replace just this one."""


class Client(Protocol):
    """Objects of one bucket, container or site, by their full names. Thread-safe."""

    @property
    def root(self) -> str:
        """The URL of the bucket, without a slash at the end."""

    @property
    def cost(self) -> RequestCost:
        """What requests cost."""

    def get(self, name: str, start: int, end: int | None, version: str | None) -> Body:
        """Request a range of an object, which is cut at the object's end; all of it if `end` is None.

        Args:
            version: the version that it must have; None: any.

        Raises:
            FormatError: there is no such object ("missing"), or it has another version ("mismatch").
            RequestError: the request failed.
        """

    def stat(self, name: str) -> FileStat | None:
        """An object's metadata; None if there is none of this name.

        Raises:
            RequestError: the request failed.
        """

    def names(self, prefix: str) -> Iterator[str]:
        """Full names of the objects below a prefix, all if it is empty.

        Raises:
            RequestError: a request failed.
        """


@dataclass(frozen=True, slots=True)
class Body:
    """The answer to a request, of which no byte has been taken yet."""

    stat: FileStat
    """Of the whole object."""
    where: str
    start: int
    """Offset of the first byte."""
    nbytes: int
    result: GetResult

    def fill(self, view: memoryview) -> None:
        """Take all bytes, which `view` has room for exactly.

        Raises:
            FormatError: the object was replaced after the first bytes.
            RequestError: the connection failed, or brought fewer or more bytes than announced.
        """
        assert view.nbytes == self.nbytes
        end = self.start + self.nbytes
        if request(lambda: self._copy(view), self.where, (self.start, end)) != self.nbytes:
            what = f"bytes {self.start} to {end}: the server sent another number of bytes than it announced; load again"
            raise RequestError(errno.EPROTO, what, self.where)

    def _copy(self, view: memoryview) -> int:
        """Copy what arrives, while it is in the processor's cache; return how many bytes there were."""
        done = 0
        for piece in self.result.stream(min_chunk_size=_STREAM_NBYTES):
            if done + len(piece) <= view.nbytes:
                view[done : done + len(piece)] = piece
            done += len(piece)
        return done

    def content(self) -> bytes:
        """All bytes; for errors see `fill`."""
        view = memoryview(bytearray(self.nbytes))
        self.fill(view)
        return bytes(view)


@dataclass(frozen=True, slots=True, repr=False)
class ObjectClient:
    """What clients that obstore makes have in common. They are pickled as URLs: credentials are found again there."""

    root: str
    store: ObjectStore
    """Its names are the full names of objects."""

    @property
    def cost(self) -> RequestCost:
        """See `Client.cost`."""
        return CLOUD_COST

    @classmethod
    def of(cls, root: str) -> Self:
        """Make the client; no request is made yet.

        Raises:
            PlanError: obstore is missing, or the environment is not as a provider expects it.
        """
        return cls(root, make_store(root))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).of, (self.root,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.root!r})"

    def get(self, name: str, start: int, end: int | None, version: str | None) -> Body:
        """See `Client.get`."""
        return get(self.store, name, f"{self.root}/{name}", start, end, version)

    def stat(self, name: str) -> FileStat | None:
        """See `Client.stat`."""
        return stat(self.store, name, f"{self.root}/{name}")


@dataclass(frozen=True, slots=True, repr=False)
class BucketClient(ObjectClient):
    """A bucket of S3, GCS or Azure."""

    def names(self, prefix: str) -> Iterator[str]:
        """See `Client.names`."""
        return (name for name, _ in self.stats(prefix))

    def stats(self, prefix: str) -> Iterator[tuple[str, FileStat]]:
        """Full names and metadata of the objects below a prefix, all if it is empty."""
        pages = iter(self.store.list(prefix or None))
        while page := request(lambda: next(pages, None), f"{self.root}/{prefix}"):
            for found in page:
                yield found["path"], stat_of(found)

    def load(self, name: str, limit: int) -> tuple[bytes, Version] | None:
        """A small object and its version; None if there is none.

        Raises:
            FormatError: it is larger than `limit` bytes.
            RequestError: the request failed.
        """
        try:
            body = self.get(name, 0, None, None)
        except FormatError as error:
            if error.code == "missing":
                return None
            raise
        if body.nbytes > limit:
            raise FormatError(f"{body.nbytes} bytes, limit {limit}", path=f"{self.root}/{name}", code="limit")
        return body.content(), _version(body.result.meta)

    def put(self, name: str, content: bytes, replaced: Version | Literal[True] | None = True) -> Version:
        """Write a small object, and return its version.

        Args:
            replaced: True: whatever there is; None: only if there is none; a version: only in place of this one.

        Raises:
            FileExistsError: there is another one, or none that could be replaced.
            RequestError: the request failed. It may have been carried out, or may still be.
        """
        where = f"{self.root}/{name}"
        mode: Any = "overwrite" if replaced is True else replaced or "create"
        put = partial(self.store.put, name, content, mode=mode, use_multipart=False)
        try:
            return _version(request(put, where))
        except FormatError:
            raise FileExistsError(errno.EEXIST, "was replaced or deleted by somebody else", where) from None

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects that exist, or have existed."""
        request(lambda: self.store.delete(list(names)), self.root)


def _version(found: Any) -> Version:
    return {key: found[key] for key in ("e_tag", "version") if found[key] is not None}


def get(store: ObjectStore, name: str, where: str, start: int, end: int | None, version: str | None) -> Body:
    """Request a range of an object; see `Client.get`.

    Args:
        where: the object's name in messages.
    """
    options: dict[str, Any] = {} if end is None else {"range": (start, end)}
    if version is not None and is_comparable(version):
        options["if_match"] = version
    result = request(lambda: store.get(name, options=options), where, None if end is None else (start, end))  # type: ignore[arg-type]
    found, part = stat_of(result.meta), result.range
    if version is not None and found.version != version:  # Some servers take no notice of If-Match.
        raise replaced(where)
    if part != (start, found.nbytes if end is None else min(end, found.nbytes)):
        what = f"asked for bytes {start} to {end}, got {part[0]} to {part[1]}: the server does not serve ranges"
        raise RequestError(errno.EPROTO, what, where)
    return Body(found, where, part[0], part[1] - part[0], result)


def stat(store: ObjectStore, name: str, where: str) -> FileStat | None:
    """An object's metadata; see `Client.stat`."""
    try:
        return stat_of(request(lambda: store.head(name), where))
    except FormatError as error:
        if error.code == "missing":
            return None
        raise


def stat_of(meta: ObjectMeta) -> FileStat:
    """What obstore says of an object. Without an ETag, its time is the version."""
    return FileStat(meta["size"], meta["e_tag"] or f"{meta['last_modified'].isoformat()} {meta['size']}")


def is_comparable(version: str) -> bool:
    """Whether a version is an ETag that servers compare: weak ones never match (RFC 9110, section 13.1.1)."""
    return version.startswith('"')
