"""`toy://SHELF/PREFIX`: a store in one module, of which requests can be made to fail. Objects are in a dictionary.

It is the example of how a store is added: a client with the reads and the writes, `offer`, and one line in the registry
(`tests/conftest.py`). Reading, listing, publishing and resuming are the product's.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Literal

from relayout.errors import FormatError
from relayout.storage.cloud.store import Body, CloudStore, Version, check_url
from relayout.storage.stores import LOCAL_COST, FileStat, Store


def offer(url: str) -> Store:
    check_url(url)
    name, _, prefix = url.removeprefix("toy://").rstrip("/").partition("/")
    return CloudStore(shelf(name), prefix)


@dataclass
class Fault:
    """What happens to some requests of a shelf."""

    operation: str
    """"list", "stat", "read" or "write"."""
    name: str = "*"
    """A shell-style pattern of full names."""
    after: int = 0
    """Number of matching requests that pass first."""
    times: int | None = 1
    """Number of requests affected after that; None: all."""
    error: Callable[[], Exception] | None = None
    seconds: float = 0
    act: Callable[[], object] | None = None
    num_struck: int = 0
    _matching: Iterator[int] = field(default_factory=itertools.count)

    def strike(self, operation: str, name: str) -> None:
        if operation != self.operation or not fnmatchcase(name, self.name):
            return
        index = next(self._matching) - self.after
        if index < 0 or (self.times is not None and index >= self.times):
            return
        self.num_struck += 1
        time.sleep(self.seconds)
        if self.act is not None:
            self.act()
        if self.error is not None:
            raise self.error()


class Shelf:
    """A `WritableClient`. Reads take no lock: a child may be forked at any time."""

    cost = LOCAL_COST

    def __init__(self, name: str) -> None:
        self.root = f"toy://{name}"
        self.objects: dict[str, tuple[bytes, str]] = {}
        """Content and version by full name."""
        self.faults: list[Fault] = []
        self.log: list[tuple[str, str, int]] = []
        """Operation, full name and bytes of each request."""
        self._versions = itertools.count(1)
        self._writing = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return shelf, (self.root.removeprefix("toy://"),)

    def clear(self) -> None:
        for held in (self.objects, self.faults, self.log):
            held.clear()

    @property
    def requests(self) -> Counter[str]:
        """Number of requests by operation."""
        return Counter(operation for operation, _, _ in self.log)

    @property
    def read_nbytes(self) -> int:
        return sum(nbytes for operation, _, nbytes in self.log if operation == "read")

    def names(self, prefix: str = "") -> list[str]:
        """Full names that begin so, as nobody needs to request them."""
        return sorted(name for name in list(self.objects) if name.startswith(prefix))

    def write(self, name: str, content: bytes) -> str:
        """Create or replace an object, as another process would; return its version."""
        version = str(next(self._versions))
        self.objects[name] = content, version
        return version

    def _request(self, operation: str, name: str, nbytes: int = 0) -> None:
        self.log.append((operation, name, nbytes))
        for fault in list(self.faults):
            fault.strike(operation, name)

    # Reads.

    def get(self, name: str, start: int, end: int | None, version: str | None) -> Body:
        content, _ = self.objects.get(name, (b"", ""))
        self._request("read", name, len(content[start:end]))
        location = f"{self.root}/{name}"
        if name not in self.objects:
            raise FormatError("is missing", path=location, code="missing")
        content, current = self.objects[name]
        if version not in (None, current):
            raise FormatError("was replaced while it was read", path=location, code="mismatch")
        piece, stat = content[start:end], FileStat(len(content), current, vouched=f"{location} {current}")
        part, again = (start, start + len(piece)), lambda at: self.get(name, at, end, current)
        return Body(stat, location, part, [piece], again, {"version": current})

    def stat(self, name: str) -> FileStat | None:
        self._request("stat", name)
        content, version = self.objects.get(name, (b"", ""))
        return FileStat(len(content), version, vouched=f"{self.root}/{name} {version}") if version else None

    def list_objects(self, prefix: str) -> Iterator[tuple[str, str]]:
        self._request("list", prefix)
        for name in self.names(f"{prefix}/" if prefix else ""):
            if name in self.objects:
                yield name, self.objects[name][1]

    # Writes.

    def put(self, name: str, content: bytes, replaced: Version | Literal[True] | None = True) -> Version:
        self._request("write", name, len(content))
        with self._writing:
            current = self.objects.get(name, (b"", None))[1]
            if replaced is not True and current != (replaced and replaced["version"]):
                raise FileExistsError(17, "is not as expected", f"{self.root}/{name}")
            return {"version": self.write(name, content)}

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._request("delete", name)
            self.objects.pop(name, None)

    def upload(self, name: str, file: Path, num_streams: int, check: Callable[[], None]) -> Version:
        check()
        content = file.read_bytes()
        self._request("write", name, len(content))
        with self._writing:
            return {"version": self.write(name, content)}


@cache
def shelf(name: str) -> Shelf:
    """The shelf of a name, made when it is first named."""
    return Shelf(name)
