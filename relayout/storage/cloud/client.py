"""Clients: what is asked of an object store, a web server or the hub, and the client of a bucket."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from relayout.errors import FormatError
from relayout.storage.cloud import connect
from relayout.storage.cloud.failures import Patience, replaced, request, request_error, translated
from relayout.storage.protocols import FileStat, RequestCost, RequestError

if TYPE_CHECKING:
    from obstore import Bytes, GetResult, ObjectMeta
    from obstore.store import ObjectStore

CLOUD_COST = RequestCost(chunk_nbytes=8 * 2**20, max_gap_nbytes=2**20, concurrency=128, is_remote=True)
"""A connection to an object store brings 50 to 100 MB/s, and its first byte takes 20 to 200 ms."""

_PROGRESS_NBYTES = 16 * 2**10
"""Fewer bytes in `connect.STALL_SECONDS`, or before a connection breaks, are no progress, unless no more are left."""


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
    pieces: Iterator[Bytes | bytes]
    """What arrives; raises RequestError, or FormatError if the object was replaced."""
    again: Callable[[int], Body]
    """Requests the same bytes of the same version, from an offset in the object on."""
    replaces: Version = field(default_factory=dict)
    """What a write that shall replace just this version of an object in a bucket must say."""

    def fill(self, view: memoryview) -> None:
        """Take all bytes, which `view` has room for exactly. Where a connection breaks, another one goes on.

        Raises:
            FormatError: the object was replaced after the first bytes.
            RequestError: connections fail, again and again, or bring fewer or more bytes than announced.
        """
        assert view.nbytes == self.nbytes
        body, done, patience = self, 0, Patience()
        while True:
            before = done
            try:
                for piece in timed(body.pieces, self.where, self.part):
                    view[done : done + len(piece)] = piece  # ValueError: there are more.
                    done += len(piece)
                break
            except ValueError:
                done = -1
                break
            except RequestError as error:
                failure = error
            if done - before >= _PROGRESS_NBYTES:
                patience = Patience()
            patience.wait(failure)
            body = self.again(self.start + done)
        if done != self.nbytes:
            what = "the server sent another number of bytes than it announced; load again"
            raise RequestError(errno.EPROTO, f"bytes {self.start} to {self.part[1]}: {what}", self.where)

    @property
    def part(self) -> tuple[int, int]:
        """First byte and end of the range."""
        return self.start, self.start + self.nbytes

    def content(self) -> bytes:
        """All bytes; for errors see `fill`."""
        view = memoryview(bytearray(self.nbytes))
        self.fill(view)
        return bytes(view)


def timed(pieces: Iterator[Bytes | bytes], where: str, part: tuple[int, int] | None = None) -> Iterator[Bytes | bytes]:
    """What arrives of a body. A server that trickles it is as one that sends nothing."""
    new, since = 0, time.monotonic()
    for piece in pieces:
        yield piece
        new += len(piece)
        if new >= _PROGRESS_NBYTES:
            new, since = 0, time.monotonic()
        elif time.monotonic() - since > connect.STALL_SECONDS:
            raise request_error("TimedOut", where, part)


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
        return cls(root, connect.make_store(root))

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
        where, last, begins = f"{self.root}/{prefix}", None, set()
        pages: Iterator[Sequence[ObjectMeta]] | None = None

        def next_page() -> Sequence[ObjectMeta] | None:
            nonlocal pages
            try:
                pages = pages or iter(self.store.list(prefix or None, offset=last))
                return next(pages, None)
            except BaseException:
                pages = None  # One that has failed is as one at its end.
                raise

        while page := request(next_page, where):
            if page[0]["path"] in begins:
                raise FormatError("the store lists the same names again and again", path=where, code="invalid")
            begins.add(page[0]["path"])
            for found in page:
                last = found["path"]
                yield last, stat_of(found)

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
        return body.content(), body.replaces

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
    asked = None if end is None else (start, end)
    result = request(lambda: store.get(name, options=options), where, asked)  # type: ignore[arg-type]
    found, part = stat_of(result.meta), result.range
    check_answer(found, part, start, end, version, where)
    return Body(
        found,
        where,
        part[0],
        part[1] - part[0],
        _pieces(result, where, part),
        lambda offset: get(store, name, where, offset, part[1], found.version),
        _version(result.meta),
    )


def check_answer(
    found: FileStat, part: tuple[int, int], start: int, end: int | None, version: str | None, where: str
) -> None:
    """Check that an answer has what was asked for; see `Client.get`."""
    if version is not None and found.version != version:  # Some servers take no notice of If-Match.
        raise replaced(where)
    if part != (start, found.nbytes if end is None else min(end, found.nbytes)):
        what = f"asked for bytes {start} to {end}, got {part[0]} to {part[1]}: the server does not serve ranges"
        raise RequestError(errno.EPROTO, what, where)


def _pieces(result: GetResult, where: str, part: tuple[int, int]) -> Iterator[Bytes | bytes]:
    pieces = iter(result.stream(min_chunk_size=1))  # Larger ones would be lost in part when the connection breaks.
    while (piece := translated(lambda: next(pieces, None), where, part)) is not None:
        yield piece


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
