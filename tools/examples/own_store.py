"""A store in one module: `shelf://NAME/PREFIX`, objects in a dictionary of this process.

One line makes it known: `relayout.storage.stores.REGISTRY["shelf"] = "own_store"`. Listing, opening, ranges, versions,
snapshots and publishing are relayout's. `relayout.testing` says whether it is right.
"""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from relayout.errors import FormatError
from relayout.storage.cloud.store import Body, CloudStore, Version, check_url
from relayout.storage.stores import LOCAL_COST, FileStat


def offer(url: str) -> CloudStore:
    """The store of a URL. PlanError: it has a password, a query or the like."""
    check_url(url)
    name, _, prefix = url.removeprefix("shelf://").rstrip("/").partition("/")
    return CloudStore(shelf(name), prefix)


@cache
def shelf(name: str) -> Shelf:
    """The shelf of a name, made when it is first named."""
    return Shelf(name)


class Shelf:
    """A client, of which relayout makes the store."""

    cost = LOCAL_COST

    def __init__(self, name: str) -> None:
        self.root = f"shelf://{name}"
        self.objects: dict[str, tuple[bytes, str]] = {}
        """Content and version, by full name."""
        self._versions = itertools.count(1)
        self._writing = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return shelf, (self.root.removeprefix("shelf://"),)  # A pickled client is one that connects anew.

    # What is read.

    def get(self, name: str, start: int, end: int | None, version: str | None) -> Body:
        location = f"{self.root}/{name}"
        if name not in self.objects:
            raise FormatError("is missing", path=location, code="missing")
        content, current = self.objects[name]  # Both at once: content and version belong together.
        if version not in (None, current):
            raise FormatError("was replaced while it was read", path=location, code="mismatch")
        piece = content[start:end]
        stat = FileStat(len(content), current, vouched=f"{location} {current}")
        again: Callable[[int], Body] = lambda at: self.get(name, at, end, current)  # noqa: E731
        return Body(stat, location, (start, start + len(piece)), [piece], again, {"version": current})

    def stat(self, name: str) -> FileStat | None:
        if name not in self.objects:
            return None
        content, version = self.objects[name]
        return FileStat(len(content), version, vouched=f"{self.root}/{name} {version}")

    def list_objects(self, prefix: str) -> Iterator[tuple[str, str]]:
        start = f"{prefix}/" if prefix else ""
        yield from ((name, version) for name, (_, version) in [*self.objects.items()] if name.startswith(start))

    # What is written.

    def put(self, name: str, content: bytes, replaced: Version | Literal[True] | None = True) -> Version:
        with self._writing:
            _, current = self.objects.get(name, (b"", None))
            if replaced is not True and current != (replaced and replaced["version"]):
                raise FileExistsError(errno.EEXIST, "is not as expected", f"{self.root}/{name}")
            version = str(next(self._versions))
            self.objects[name] = content, version
            return {"version": version}

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.objects.pop(name, None)

    def upload(self, name: str, file: Path, num_streams: int, check: Callable[[], None]) -> Version:
        check()
        return self.put(name, file.read_bytes())
