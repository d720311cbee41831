"""The store of objects below a prefix of a bucket, a site, or a repository of the hub; and the protocol of its clients.

Only the client differs between such stores. A client of a read-only store has the five members of `Client`. A client of
a store for outputs also has the three members of `WritableClient`. The client repeats requests that may succeed later
(`failures.persistent`). `CloudStore` and the publisher (`publish.bucket`) do everything else.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable
from urllib.parse import unquote

from relayout.errors import FormatError, PlanError
from relayout.storage.cloud import connect
from relayout.storage.cloud.failures import RetryPolicy, replaced, request_error
from relayout.storage.stores import (
    Access,
    Closable,
    Enter,
    Entry,
    FileStat,
    HeadFile,
    Kind,
    ReadableFile,
    RequestCost,
    RequestError,
    Store,
    entered,
    everywhere,
    if_there,
    limited,
    read_whole,
)

if TYPE_CHECKING:
    from obstore import Bytes

CLOUD_COST = RequestCost(request_nbytes=16 * 2**20, max_gap_nbytes=2**20, concurrency=128, is_remote=True)
"""Requests to object stores: one connection transfers 50 to 100 MB/s, and its first byte takes 20 to 200 ms."""

_PROGRESS_NBYTES = 16 * 2**10
"""Minimum bytes that count as progress in `connect.STALL_SECONDS`, or before a connection breaks, unless fewer are
left."""

Version = Mapping[str, str]
"""The condition of a write that replaces one version of an object. Each client defines the keys."""


class Client(Protocol):
    """Objects of one bucket, container or site, by their full names. Thread-safe.

    All methods raise RequestError if a request fails repeatedly.
    """

    @property
    def root(self) -> str:
        """The URL of the bucket, without a trailing slash."""

    @property
    def cost(self) -> RequestCost:
        """The cost of requests."""

    def get(self, name: str, start: int, end: int | None, version: str | None) -> Body:
        """Request a range of an object, cut at the end of the object; the whole object if `end` is None.

        Args:
            version: the expected version; None: any.

        Raises:
            FormatError: the object does not exist ("missing") or has another version ("mismatch").
        """

    def stat(self, name: str) -> FileStat | None:
        """Return the metadata of an object; None if it does not exist."""

    def list_objects(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Yield full names and versions of the objects below a prefix, or of all objects if it is empty.

        A name that continues the last part of the prefix, such as "a/bc" for "a/b", is not below it. A version is empty
        if the listing does not contain it.
        """


@runtime_checkable
class WritableClient(Client, Protocol):
    """A client of a bucket to which outputs can be published."""

    def put(self, name: str, content: bytes, replaced: Version | Literal[True] | None = True) -> Version:
        """Write a small object and return its version.

        Args:
            replaced: True: write unconditionally; None: only if the object does not exist; a version: only if the
                object has this version.

        Raises:
            FileExistsError: the condition does not hold.
            RequestError: the write may have been carried out, or may be carried out later.
        """

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects; names without an object are not an error."""

    def upload(self, name: str, file: Path, num_streams: int, check: Callable[[], None]) -> Version:
        """Upload a local file whole, replacing an existing object; return its version if the store reports it.

        Args:
            num_streams: parts that are sent at the same time.
            check: called before each part. It raises to stop the upload, which then stays incomplete; its deletion is
                left to the bucket (lifecycle rules).

        Raises:
            RequestError: the upload may have been carried out, or may be carried out later.
        """


@dataclass(frozen=True, slots=True)
class Body:
    """The answer to a request, before its bytes are read."""

    stat: FileStat
    """Metadata of the whole object."""
    location: str
    part: tuple[int, int]
    """First byte and end of the range."""
    pieces: Iterable[Bytes | bytes]
    """The bytes in pieces. Iterating raises RequestError, or FormatError if the object was replaced."""
    again: Callable[[int], Body]
    """Requests the rest of the range in the same version, from an offset in the object."""
    replaces: Version = field(default_factory=dict)
    """The condition of a write that replaces this version."""

    def fill(self, view: memoryview) -> None:
        """Read all bytes into `view`, which has exactly their size. If a connection breaks, a new one continues."""
        assert view.nbytes == self.nbytes
        body, done, patience = self, 0, RetryPolicy()
        while True:
            before = done
            try:
                for piece in timed(body.pieces, self.location, self.part):
                    view[done : done + len(piece)] = piece  # ValueError: more bytes than announced.
                    done += len(piece)
                break
            except ValueError:
                done = -1
                break
            except RequestError as error:
                failure = error
            if done - before >= _PROGRESS_NBYTES:
                patience = RetryPolicy()
            patience.wait(failure)
            body = self.again(self.part[0] + done)
        if done != self.nbytes:
            what = "the server sent another number of bytes than it announced; load again"
            raise RequestError(errno.EPROTO, f"bytes {self.part[0]} to {self.part[1]}: {what}", self.location)

    @property
    def nbytes(self) -> int:
        return self.part[1] - self.part[0]

    def content(self, limit: int | None = None) -> bytes:
        """Return all bytes. FormatError: the object was replaced, or the range is longer than `limit` bytes."""
        if limit is not None and self.nbytes > limit:
            raise FormatError(f"{self.nbytes} bytes, limit {limit}", path=self.location, code="limit")
        view = memoryview(bytearray(self.nbytes))
        self.fill(view)
        return bytes(view)


def timed(
    pieces: Iterable[Bytes | bytes], location: str, part: tuple[int, int] | None = None
) -> Iterator[Bytes | bytes]:
    """Yield the pieces of a body; fail if fewer than `_PROGRESS_NBYTES` arrive in `connect.STALL_SECONDS`."""
    new, since = 0, time.monotonic()
    for piece in pieces:
        yield piece
        new += len(piece)
        if new >= _PROGRESS_NBYTES:
            new, since = 0, time.monotonic()
        elif time.monotonic() - since > connect.STALL_SECONDS:
            raise request_error("TimedOut", location, part)


_HEAD_NBYTES = 64 * 2**10
"""Bytes read when a file of unknown length is opened: they contain the header of most files."""
_STAT_NBYTES = 4 * 2**10
"""Bytes read when a file of known length is opened, to identify it. A new connection transfers them in one round
trip."""

_URL = re.compile(r"[a-z0-9]+://[^/@?#%\\]+(/[^/?#\\]+)*/?")


@dataclass(frozen=True, slots=True)
class CloudStore:
    client: Client
    prefix: str
    """The prefix, without leading or trailing slash; "" for the whole bucket."""
    opened: dict[str, HeadFile | ObjectFile] | None = field(default=None, compare=False, repr=False)
    """Files that a snapshot has opened, by full name. None: each call of `open` opens the file again."""

    @property
    def cost(self) -> RequestCost:
        return self.client.cost

    def __str__(self) -> str:
        return f"{self.client.root}/{self.prefix}" if self.prefix else self.client.root

    def location(self, name: str) -> str:
        return f"{self}/{name}"

    def path(self, name: str) -> Path | None:
        return None

    def kind(self) -> Kind:
        if any(True for _ in self.client.list_objects(self.prefix)):
            return Kind.FOLDER
        return Kind.FILE if self.prefix and self.client.stat(self.prefix) is not None else Kind.NOTHING

    def parent(self) -> tuple[Store, str]:
        above, _, name = self.prefix.rpartition("/")
        return replace(self, prefix=above), name

    def snapshot(self) -> CloudStore:
        return replace(self, opened={})

    def walk(self, enter: Enter = everywhere) -> Iterator[Entry]:
        listed = limited(self.client.list_objects(self.prefix), str(self))
        names = (full.removeprefix(self.prefix).lstrip("/") for full, _ in listed)
        yield from entered((name for name in names if not re.match(r"\.|.*/\.", name, re.DOTALL)), enter)

    def stat(self, name: str) -> FileStat | None:
        if self.opened is None:
            return self.client.stat(self.full_name(name))
        file = if_there(lambda: self._opened(name, None, _STAT_NBYTES))
        return None if file is None else file.stat

    def read(self, name: str, limit: int) -> bytes:
        """Read a small file by one request."""
        if self.opened is not None and (file := self.opened.get(self.full_name(name))) is not None:
            return read_whole(file, self.location(name), limit)
        return self.client.get(self.full_name(name), 0, None, None).content(limit)

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> ReadableFile:
        """Open a file by one request. A snapshot of a bucket sends none if only the length is given."""
        if access is Access.DIRECT:
            raise OSError(errno.EOPNOTSUPP, "stores have no direct I/O; use backend 'buffered'", self.location(name))
        full = self.full_name(name)
        # All objects of a store for outputs have versions. A web server's files may have none, and then need
        # verification.
        if self.opened is not None and nbytes and version is None and isinstance(self.client, WritableClient):
            known = self.opened.setdefault(full, ObjectFile(self.client, full, nbytes))
            if isinstance(known, ObjectFile) and known.nbytes == nbytes:
                return known
        file = self._opened(name, version, _HEAD_NBYTES if nbytes is None else _STAT_NBYTES)
        file.stat.check(self.location(name), nbytes, version)
        return file

    def _opened(self, name: str, version: str | None, head_nbytes: int) -> HeadFile | ObjectFile:
        """Return the file that the snapshot has opened, or open it."""
        full = self.full_name(name)
        file = None if self.opened is None else self.opened.get(full)
        if file is None:
            file = self._open_object(full, version, head_nbytes)
            if self.opened is not None:
                file = self.opened.setdefault(full, file)  # Another thread may have opened it meanwhile.
        return file

    def _open_object(self, full: str, version: str | None, head_nbytes: int) -> HeadFile:
        """Open an object by one request for its first bytes. The file keeps the version of this answer."""
        try:
            body = self.client.get(full, 0, head_nbytes, version)
            return HeadFile(body.content(), body.stat, partial(_fill, self.client, full, body.stat.version))
        except FormatError as error:
            if error.code == "mismatch":
                what = "has changed since it was last checked"
                raise FormatError(what, path=f"{self.client.root}/{full}", code="mismatch") from None
            raise
        except RequestError as error:
            stat = self.client.stat(full) if error.status == 416 else None
            if stat is None or stat.nbytes:
                raise
            return HeadFile(b"", stat)  # An empty object has no range to request.

    def full_name(self, name: str) -> str:
        """Return a file's object name in the bucket."""
        return f"{self.prefix}/{name}" if self.prefix else name


class ObjectFile(Closable):
    """An object of known length, opened without a request. It keeps the version of the first answer.

    Concurrent requests before the first answer accept any version. Each answer is compared with the first one.
    Thread-safe.
    """

    alignment: ClassVar[int] = 1

    def __init__(self, client: Client, name: str, nbytes: int) -> None:
        """Open the object with the full name `name`; `nbytes` is compared with the first answer."""
        self.nbytes = nbytes
        self._client = client
        self._name = name
        self._stat: FileStat | None = None
        self._head = b""
        """The first bytes, if they were read alone: verification of the file reads them repeatedly."""
        self._lock = Lock()

    @property
    def version(self) -> str:
        """The version of the file. `*` before the first answer fixes it, as in If-Match: any version."""
        return "*" if self._stat is None else self._stat.version

    @property
    def stat(self) -> FileStat:
        """The metadata, by a request for the first bytes if no answer has arrived yet. For errors see `read`."""
        if self._stat is None:
            self.read(0, memoryview(bytearray(_STAT_NBYTES)))
        assert self._stat is not None
        return self._stat

    def fileno(self) -> None:
        return

    def read(self, offset: int, view: memoryview) -> None:
        """Fill memory from an offset in the object, as every `ReadableFile` does.

        Raises:
            FormatError: the object is missing, has another length, or was replaced.
        """
        view = view[: max(0, self.nbytes - offset)]
        if not view.nbytes or offset + view.nbytes <= len(self._head):
            view[:] = self._head[offset : offset + view.nbytes]
            return
        version = None if self._stat is None else self._stat.version
        try:
            body = self._client.get(self._name, offset, offset + view.nbytes, version)
        except RequestError as error:
            if error.status == 416 and version is None:  # The object is shorter: raise the exact error if possible.
                with suppress(RequestError):
                    if (stat := self._client.stat(self._name)) is not None:
                        self._keep(stat)
            raise
        self._keep(body.stat)
        body.fill(view)
        if offset == 0 and view.nbytes <= _STAT_NBYTES:
            self._head = bytes(view)

    def _keep(self, stat: FileStat) -> None:
        """Check that an answer has the file's version, which is the version of the first answer."""
        with self._lock:
            if self._stat is None:
                stat.check(self._location, self.nbytes)
                self._stat = stat
            elif stat.version != self._stat.version:
                raise replaced(self._location)

    @property
    def _location(self) -> str:
        return f"{self._client.root}/{self._name}"

    def close(self) -> None:
        """Do nothing."""


def _fill(client: Client, name: str, version: str, offset: int, view: memoryview) -> None:
    client.get(name, offset, offset + view.nbytes, version).fill(view)


def check_url(url: str) -> None:
    """Raise PlanError unless a URL is a valid location in a store."""
    scheme, _, rest = url.partition("://")
    parts = set(unquote(rest).split("/"))
    if not _URL.fullmatch(f"{scheme.lower()}://{rest}") or {".", ".."} & parts or not unquote(rest).isprintable():
        what = (
            f"expected {scheme}://BUCKET/PREFIX, without user, password, ?, # and \\, and without empty, . and .. parts"
        )
        raise PlanError(what, code="option")
