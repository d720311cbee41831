"""`memory://BUCKET/PREFIX`: an object store in this process's memory, with injectable faults.

For tests, and for work that needs no drive. A bucket is created when it is first named, and exists until the process
ends or `Bucket.clear`. Like an object store it has no descriptors, no rename and no permissions: an output is complete
when its marker, which is written last, exists.
"""

from __future__ import annotations

import errno
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from typing import ClassVar

from relayout.core.children import remake_in_child
from relayout.errors import FormatError, PlanError
from relayout.storage.protocols import (
    LOCAL_COST,
    Access,
    Closable,
    Entry,
    FileStat,
    Kind,
    Modes,
    Refusal,
    Replaceable,
    RequestCost,
    Store,
    read_whole,
)

_NAME = re.compile(r"memory://(?P<bucket>[^/]+)(?P<prefix>(/[^/]+)*)/?", re.DOTALL)


@dataclass(slots=True)
class Fault:
    """A fault injected into some requests of a bucket."""

    operation: str
    """"list", "stat", "read" or "write"."""
    name: str = "*"
    """Affected objects: a shell-style pattern over the whole name."""
    after: int = 0
    """Number of matching requests that pass first."""
    times: int | None = 1
    """Number of requests affected after that; None: all."""
    error: Callable[[], Exception] | None = None
    """Makes the exception that the request raises."""
    seconds: float = 0
    """Delay of the request."""
    nbytes: int | None = None
    """The most bytes that one read request returns."""
    act: Callable[[], object] | None = None
    """Called during the request, for example to replace an object."""

    def hits(self, operation: str, name: str) -> bool:
        """Whether the fault affects this request; counts the request. Not thread-safe."""
        if operation != self.operation or not fnmatchcase(name, self.name) or self.times == 0:
            return False
        if self.after:
            self.after -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return True


@dataclass(frozen=True, slots=True)
class _Object:
    content: bytes | bytearray
    """Immutable: an object is replaced as a whole."""
    version: str


@dataclass(slots=True)
class _Attempt:
    """The files of an unfinished output."""

    files: dict[str, bytearray] = field(default_factory=dict)
    """By name, each with its full length."""
    notes: dict[str, bytearray] = field(default_factory=dict)


class Bucket:
    """Objects by name. Thread-safe."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.faults: list[Fault] = []
        """Injected faults. Delayed requests wait in parallel."""
        self.requests: Counter[str] = Counter()
        """Number of requests by operation."""
        self.read_nbytes = 0
        """Bytes read so far."""
        self._objects: dict[str, _Object] = {}
        self._attempts: dict[str, _Attempt] = {}
        """Unfinished outputs that were kept, by prefix."""
        self._shared: dict[str, dict[str, _Attempt]] = {}
        """Outputs that several processes assemble, by prefix and the name that their parts share."""
        self._writing: set[str] = set()
        """Prefixes of outputs that are being written."""
        self._versions = count(1)
        self._lock = threading.Lock()
        remake_in_child(self)

    def after_fork(self) -> None:
        """See `forks.Forked`."""
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Delete all objects, unfinished outputs, faults and counts."""
        with self._lock:
            self._objects.clear()
            self._attempts.clear()
            self._shared.clear()
            self.faults.clear()
            self.requests.clear()
            self.read_nbytes = 0

    def request(self, operation: str, name: str) -> int | None:
        """Count a request and apply its faults. Return the most bytes that it may read; None: no limit.

        Raises:
            Exception: the exception of a fault.
        """
        with self._lock:
            self.requests[operation] += 1
            hits = [fault for fault in self.faults if fault.hits(operation, name)]
        for fault in hits:
            if fault.seconds:
                time.sleep(fault.seconds)
            if fault.act is not None:
                fault.act()
            if fault.error is not None:
                raise fault.error()
        return min((fault.nbytes for fault in hits if fault.nbytes is not None), default=None)

    def names(self, prefix: str) -> list[str]:
        """Names of the objects below a prefix, sorted."""
        with self._lock:
            return sorted(name for name in self._objects if not prefix or name.startswith(f"{prefix}/"))

    def find(self, name: str) -> _Object | None:
        """The current object of a name; None if there is none."""
        return self._objects.get(name)

    def put(self, name: str, content: bytes | bytearray, *, create: bool = False) -> None:
        """Write an object. It replaces an existing one unless `create` is set.

        Raises:
            FileExistsError: the object exists, and `create` is set.
        """
        with self._lock:
            if create and name in self._objects:
                raise FileExistsError(errno.EEXIST, "an object of this name exists", f"memory://{self.name}/{name}")
            self._objects[name] = _Object(content, f'"{next(self._versions)}"')

    def delete(self, name: str) -> None:
        """Delete an object, if it exists."""
        with self._lock:
            self._objects.pop(name, None)

    def read(self, name: str, version: str, offset: int, view: memoryview) -> int:
        """Read a range of one version of an object, up to its end. Return the number of bytes read.

        Raises:
            FormatError: the object was deleted or replaced.
        """
        limit = self.request("read", name)
        found = self._objects.get(name)
        if found is None or found.version != version:
            raise FormatError("was replaced while it was read", path=f"memory://{self.name}/{name}", code="mismatch")
        part = memoryview(found.content)[offset : offset + view.nbytes][:limit]
        view[: part.nbytes] = part
        with self._lock:
            self.read_nbytes += part.nbytes
        return part.nbytes

    @contextmanager
    def attempt(self, prefix: str) -> Iterator[_Attempt]:
        """Yield the kept files of an unfinished output, or a new attempt, exclusively.

        Raises:
            PlanError: another conversion is writing this output.
        """
        with self._lock:
            if prefix in self._writing:
                raise PlanError(
                    "is being written by another conversion", path=f"memory://{self.name}/{prefix}", code="busy"
                )
            self._writing.add(prefix)
            found = self._attempts.pop(prefix, None)
        try:
            yield found or _Attempt()
        finally:
            with self._lock:
                self._writing.discard(prefix)

    def parts(self, prefix: str) -> dict[str, _Attempt]:
        """What parts of an output have added, by the name that they share."""
        return self._shared.setdefault(prefix, {})

    def add_part(self, prefix: str, shared: str, part: str, added: _Attempt, marker: str | None) -> None:
        """Add files, and the notes of a part.

        Raises:
            PlanError: the object `marker` exists.
        """
        with self._lock:
            if marker in self._objects:
                where = f"memory://{self.name}/{prefix}"
                raise PlanError("is complete already; --force replaces it", path=where, code="exists")
            whole = self._shared.setdefault(prefix, {}).setdefault(shared, _Attempt())
            whole.files |= added.files
            whole.notes[part] = added.notes[part]

    def keep(self, prefix: str, attempt: _Attempt) -> None:
        """Keep the files of an attempt for the next one."""
        with self._lock:
            self._attempts[prefix] = attempt


_BUCKETS: dict[str, Bucket] = {}


def bucket(name: str) -> Bucket:
    """The bucket `name`; created on first use."""
    return _BUCKETS.get(name) or _BUCKETS.setdefault(name, Bucket(name))


def offer(url: str) -> Store | Refusal:
    """See `stores.REGISTRY`."""
    found = _NAME.fullmatch(url)
    if found is None or {".", ".."} & set(found["prefix"].split("/")):
        return Refusal("expected memory://BUCKET or memory://BUCKET/PREFIX, without empty, . and .. parts")
    return MemoryStore(bucket(found["bucket"]), found["prefix"].strip("/"))


class _MemoryClosable(Closable):
    def close(self) -> None:
        """Do nothing."""


class MemoryFile(_MemoryClosable):
    """One version of an object; see `protocols.ReadableFile`."""

    alignment: ClassVar[int] = 1

    def __init__(self, source: Bucket, name: str, nbytes: int, version: str) -> None:
        self.nbytes = nbytes
        self.version = version
        self._bucket = source
        self._name = name

    def fileno(self) -> None:
        """See `ReadableFile.fileno`."""
        return

    def read(self, offset: int, view: memoryview) -> None:
        """See `ReadableFile.read`."""
        expected = min(view.nbytes, self.nbytes - offset)
        done = 0
        while done < expected:
            num_read = self._bucket.read(self._name, self.version, offset + done, view[done:expected])
            if not num_read:
                where = f"memory://{self._bucket.name}/{self._name}"
                raise OSError(errno.EIO, f"a read at byte {offset + done} returned no bytes", where)
            done += num_read


@dataclass(frozen=True, slots=True)
class MemoryStore:
    """See `protocols.Store`."""

    bucket: Bucket
    prefix: str
    """Without leading or trailing slash; "" for the whole bucket."""

    cost: ClassVar[RequestCost] = LOCAL_COST

    def __str__(self) -> str:
        return f"memory://{self.bucket.name}" + (f"/{self.prefix}" if self.prefix else "")

    def where(self, name: str) -> str:
        """See `Store.where`."""
        return f"{self}/{name}"

    def path(self, name: str) -> Path | None:
        """See `Store.path`."""
        return None

    def kind(self) -> Kind:
        """See `Store.kind`."""
        self.bucket.request("list", self.prefix)
        if self.bucket.find(self.prefix) is not None:
            return Kind.FILE
        return Kind.FOLDER if self.bucket.names(self.prefix) else Kind.NOTHING

    def absence(self) -> str:
        """See `Store.absence`."""
        return "no objects with this prefix"

    def parent(self) -> tuple[Store, str]:
        """See `Store.parent`."""
        above, _, name = self.prefix.rpartition("/")
        return MemoryStore(self.bucket, above), name

    def snapshot(self) -> MemoryStore:
        """See `Store.snapshot`."""
        return self

    def folder_mode(self) -> int:
        """See `Store.folder_mode`."""
        return Modes().folder

    def walk(self) -> Iterator[Entry]:
        """See `Store.walk`."""
        self.bucket.request("list", self.prefix)
        for full in self.bucket.names(self.prefix):
            name = full.removeprefix(self.prefix).lstrip("/")
            if not any(part.startswith(".") for part in name.split("/")):
                yield Entry(name)

    def stat(self, name: str) -> FileStat | None:
        """See `Store.stat`."""
        self.bucket.request("stat", self.full_name(name))
        found = self.bucket.find(self.full_name(name))
        return None if found is None else FileStat(len(found.content), found.version)

    def read(self, name: str, limit: int) -> bytes:
        """See `Store.read`."""
        with self.open(name) as file:
            return read_whole(file, self.where(name), limit)

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> MemoryFile:
        """See `Store.open`."""
        if access is Access.DIRECT:
            raise OSError(errno.EOPNOTSUPP, "memory has no direct I/O; use backend 'buffered'", self.where(name))
        found = self.stat(name)
        if found is None:
            raise FormatError("is missing", path=self.where(name), code="missing")
        found.check(self.where(name), nbytes, version)
        return MemoryFile(self.bucket, self.full_name(name), found.nbytes, found.version)

    def check_output(self, source: Store, older: Replaceable, *, force: bool) -> None:
        """See `Store.check_output`."""
        mine, other = f"{self}/", f"{source}/"
        if mine == other:
            raise PlanError("is the source itself; choose another prefix with -o", path=str(self), code="exists")
        if mine.startswith(other) or other.startswith(mine):
            what = "is inside the source, or contains it; choose another prefix with -o"
            raise PlanError(what, path=str(self), code="exists")
        if self.kind() is Kind.FILE:
            raise PlanError("exists and is not a folder", path=str(self), code="exists")
        self._replaced(older, force=force)

    def _replaced(self, older: Replaceable, *, force: bool) -> frozenset[str]:
        """Names of what may be deleted; see `Replaceable.check`."""
        found = {name.removeprefix(self.prefix).lstrip("/") for name in self.bucket.names(self.prefix)}
        return older.check(self, found, force=force)

    @contextmanager
    def stage(
        self, older: Replaceable, *, replace: bool, modes: Modes, shared: str | None = None
    ) -> Iterator[MemoryStaging]:
        """See `Store.stage`."""
        with self.bucket.attempt(self.prefix) as attempt:
            attempt = self._assembled(attempt, shared, replace)
            staging = MemoryStaging(self, attempt)
            try:
                yield staging
                self._publish(attempt, older, replace=replace)
                self.bucket.parts(self.prefix).clear()
            except BaseException as error:
                if staging.is_kept and shared is None:
                    self.bucket.keep(self.prefix, attempt)
                    if staging.advice is not None:
                        error.add_note(staging.advice)
                raise

    def _assembled(self, attempt: _Attempt, shared: str | None, replace: bool) -> _Attempt:
        """The attempt; or what was added by the parts that share a name.

        Raises:
            PlanError: there are no such parts; or there are some, which are not asked for.
        """
        parts = self.bucket.parts(self.prefix)
        if shared is not None:
            if shared not in parts:
                raise PlanError("no unit of this conversion is done", path=str(self), code="missing")
            return parts[shared]
        if parts and not replace:
            what = "holds units that other processes convert: --commit publishes, --force discards them"
            raise PlanError(what, path=str(self), code="exists")
        return attempt

    @contextmanager
    def stage_part(
        self, older: Replaceable, shared: str, part: str, *, replace: bool, modes: Modes
    ) -> Iterator[MemoryStaging]:
        """See `Store.stage_part`."""
        attempt = _Attempt()
        done = self.bucket.parts(self.prefix).get(shared)
        yield MemoryStaging(self, attempt, {} if done is None else done.notes)
        if part in attempt.notes:
            self.bucket.add_part(self.prefix, shared, part, attempt, None if replace else self.full_name(older.marker))

    def _publish(self, attempt: _Attempt, older: Replaceable, *, replace: bool) -> None:
        """Write the files as objects, the marker last. A replaced output loses its marker first."""
        marker = older.marker
        for name in sorted(self._replaced(older, force=True), key=lambda name: name != marker) if replace else ():
            self.bucket.delete(self.full_name(name))
        written = []
        try:
            for name in sorted(attempt.files, key=lambda name: (name == marker, name)):
                self.bucket.request("write", self.full_name(name))
                self.bucket.put(self.full_name(name), attempt.files[name], create=True)
                written.append(self.full_name(name))
        except BaseException:
            for name in reversed(written):
                self.bucket.delete(name)
            raise

    def full_name(self, name: str) -> str:
        """A file's object name in the bucket."""
        return f"{self.prefix}/{name}" if self.prefix else name


class MemoryStaging:
    """Files that become objects when they are published; see `protocols.Staging`."""

    can_read = True

    def __init__(self, store: MemoryStore, attempt: _Attempt, notes: Mapping[str, bytearray] | None = None) -> None:
        """`notes` are those to read, if they are not the attempt's."""
        self._store = store
        self._attempt = attempt
        self._notes = attempt.notes if notes is None else notes
        self.is_kept = False
        self.advice: str | None = None

    @property
    def where(self) -> str:
        """See `Staging.where`."""
        return f"{self._store} (unfinished)"

    def clear(self) -> None:
        """See `Staging.clear`."""
        self._attempt.files.clear()
        self._attempt.notes.clear()
        self._store.bucket.parts(self._store.prefix).clear()

    def allocated_nbytes(self) -> int:
        """See `Staging.allocated_nbytes`."""
        return sum(map(len, self._attempt.files.values()))

    def check_space(self, nbytes: int) -> None:
        """See `Staging.check_space`: accepts any size."""

    def names(self) -> list[str]:
        """See `Staging.names`."""
        return sorted(self._attempt.files)

    def remove(self, name: str) -> None:
        """See `Staging.remove`."""
        self._attempt.files.pop(name, None)

    def open(self, name: str, nbytes: int) -> _StagedFile:
        """See `Staging.open`."""
        found = self._attempt.files.get(name)
        if found is None:
            raise FormatError("is missing", path=self._store.where(name), code="missing")
        FileStat(len(found), "").check(self._store.where(name), nbytes)
        return _StagedFile(self._store, name, found)

    def write_file(self, name: str, nbytes: int, *, is_new: bool) -> _StagedFile:
        """See `Staging.write_file`."""
        if is_new:
            self._create(name, bytearray(nbytes))
        return _StagedFile(self._store, name, self._attempt.files[name])

    def write_head(self, name: str, head: bytes, nbytes: int) -> None:
        """See `Staging.write_head`."""
        if name not in self._attempt.files:
            self._create(name, bytearray(nbytes))
        with self.write_file(name, nbytes, is_new=False) as file:
            file.write(0, memoryview(head))

    def put(self, name: str, pieces: Iterable[bytes], mode: int | None = None) -> None:
        """See `Staging.put`."""
        self._create(name, bytearray(b"".join(pieces)))

    def _create(self, name: str, content: bytearray) -> None:
        if name in self._attempt.files:
            raise FileExistsError(errno.EEXIST, "exists", self._store.where(name))
        self._attempt.files[name] = content

    def read_notes(self, name: str) -> bytes | None:
        """See `Staging.read_notes`."""
        found = self._notes.get(name)
        return None if found is None else bytes(found)

    def open_notes(self, name: str, *, is_new: bool) -> _Notes:
        """See `Staging.open_notes`."""
        if is_new:
            self._attempt.notes[name] = bytearray()
        return _Notes(self._attempt.notes[name])


class _StagedFile(_MemoryClosable):
    """A file of an unfinished output, readable and writable."""

    alignment: ClassVar[int] = 1

    def __init__(self, store: MemoryStore, name: str, content: bytearray) -> None:
        self.nbytes = len(content)
        self.version = ""
        self._store = store
        self._name = name
        self._content = content

    def fileno(self) -> None:
        """See `ReadableFile.fileno`."""
        return

    def read(self, offset: int, view: memoryview) -> None:
        """See `ReadableFile.read`."""
        part = memoryview(self._content)[offset : offset + view.nbytes]
        view[: part.nbytes] = part

    def write(self, offset: int, view: memoryview, address: int = 0) -> None:
        """See `WritableFile.write`."""
        self._store.bucket.request("write", self._store.full_name(self._name))
        assert offset + view.nbytes <= self.nbytes
        self._content[offset : offset + view.nbytes] = view


class _Notes(_MemoryClosable):
    def __init__(self, content: bytearray) -> None:
        self._content = content

    def append(self, text: bytes) -> None:
        """See `Notes.append`."""
        self._content += text
