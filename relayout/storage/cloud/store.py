"""The store of objects below a prefix: of a bucket, a site, or a repository of the hub."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote

from relayout.errors import FormatError, PlanError
from relayout.storage.cloud.client import Client
from relayout.storage.overlay import HeadFile
from relayout.storage.protocols import (
    Access,
    Entry,
    FileStat,
    Kind,
    ReadableFile,
    RequestCost,
    RequestError,
    Store,
    if_there,
    read_whole,
)

_HEAD_NBYTES = 64 * 2**10
"""What opening a file brings of it: its first request tells length and version, and has the header of most files."""
_STAT_NBYTES = 4 * 2**10
"""Bytes that are read of a file that is only to be known: which file it is. A new connection brings this in one round
trip."""

_URL = re.compile(r"[a-z0-9]+://[^/@?#%\\]+(/[^/?#\\]+)*/?")


@dataclass(frozen=True, slots=True)
class CloudStore:
    client: Client
    prefix: str
    """The prefix, without leading or trailing slash; "" for the whole bucket."""
    opened: dict[str, HeadFile] | None = field(default=None, compare=False, repr=False)
    """The files that a snapshot has opened, by full name; None: each `open` is a new one."""

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

    def not_found_message(self) -> str:
        return "no objects with this prefix"

    def parent(self) -> tuple[Store, str]:
        above, _, name = self.prefix.rpartition("/")
        return replace(self, prefix=above), name

    def snapshot(self) -> CloudStore:
        return replace(self, opened={})

    def walk(self) -> Iterator[Entry]:
        for full, _ in self.client.list_objects(self.prefix):
            name = full.removeprefix(self.prefix).lstrip("/")
            if not any(part.startswith(".") for part in name.split("/")):
                yield Entry(name)

    def stat(self, name: str) -> FileStat | None:
        if self.opened is None:
            return self.client.stat(self.full_name(name))
        file = if_there(lambda: self._opened(name, None, _STAT_NBYTES))
        return None if file is None else file.stat

    def read(self, name: str, limit: int) -> bytes:
        """One request."""
        if self.opened is not None and (file := self.opened.get(self.full_name(name))) is not None:
            return read_whole(file, self.location(name), limit)
        return self.client.get(self.full_name(name), 0, None, None).content(limit)

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> ReadableFile:
        """One request."""
        if access is Access.DIRECT:
            raise OSError(errno.EOPNOTSUPP, "stores have no direct I/O; use backend 'buffered'", self.location(name))
        file = self._opened(name, version, _HEAD_NBYTES)
        file.stat.check(self.location(name), nbytes, version)
        return file

    def _opened(self, name: str, version: str | None, head_nbytes: int) -> HeadFile:
        """The file that the snapshot has opened, or a new one."""
        full = self.full_name(name)
        file = None if self.opened is None else self.opened.get(full)
        if file is None:
            file = self._open_object(full, version, head_nbytes)
            if self.opened is not None:
                file = self.opened.setdefault(full, file)  # Another thread may have opened it meanwhile.
        return file

    def _open_object(self, full: str, version: str | None, head_nbytes: int) -> HeadFile:
        """Open an object by one request for its first bytes. The file stays at one version."""
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
            return HeadFile(b"", stat)  # No range of an object without bytes can be asked for.

    def full_name(self, name: str) -> str:
        """A file's object name in the bucket."""
        return f"{self.prefix}/{name}" if self.prefix else name


def _fill(client: Client, name: str, version: str, offset: int, view: memoryview) -> None:
    client.get(name, offset, offset + view.nbytes, version).fill(view)


def offer(url: str) -> Store:
    """A prefix of a bucket of S3, GCS or Azure."""
    check_url(url)
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.rstrip("/").partition("/")
    from relayout.storage.cloud.bucket import BucketClient  # Other stores do not need it.

    return CloudStore(BucketClient.of(f"{scheme.lower()}://{bucket}"), prefix)


def check_url(url: str) -> None:
    """Raise PlanError unless a URL names a place in a store."""
    scheme, _, rest = url.partition("://")
    parts = set(unquote(rest).split("/"))
    if not _URL.fullmatch(f"{scheme.lower()}://{rest}") or {".", ".."} & parts or not unquote(rest).isprintable():
        what = (
            f"expected {scheme}://BUCKET/PREFIX, without user, password, ?, # and \\, and without empty, . and .. parts"
        )
        raise PlanError(what, code="option")
