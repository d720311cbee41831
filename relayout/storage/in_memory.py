"""`memory://BUCKET/PREFIX`: objects in this process's memory, as an object store has them, and requests that can fail.

For tests, and for work that needs no drive. A bucket comes into being when it is first named, and stays until the
process ends or `Bucket.clear`. Like an object store it has no descriptors, no rename and no permissions: an output is
complete when its marker, written last, is there.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from relayout.core.forks import remake_in_child
from relayout.errors import FormatError, PlanError
from relayout.storage.protocols import LOCAL_COST, Access, Entry, FileStat, Kind, Modes, Refusal, RequestCost, Store

_NAME = re.compile(r"memory://(?P<bucket>[^/]+)(?P<prefix>(/[^/]+)*)/?", re.DOTALL)


@dataclass(slots=True)
class Fault:
    """What goes wrong with some requests of a bucket."""

    operation: str
    """"list", "stat", "read" or "write"."""
    name: str = "*"
    """Which objects it is about: a shell-style pattern over the whole name."""
    after: int = 0
    """So many such requests pass first."""
    times: int | None = 1
    """So many are hit then; None: all."""
    error: Callable[[], Exception] | None = None
    """Makes what the request raises."""
    seconds: float = 0
    """How long it takes."""
    nbytes: int | None = None
    """A read brings so many bytes at most, and more only when it is asked again."""
    act: Callable[[], object] | None = None
    """Called meanwhile: to replace an object, for example."""

    def hits(self, operation: str, name: str) -> bool:
        """Whether it strikes this request; counts it. Not for concurrent use."""
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
    """Never changed: an object is replaced as a whole."""
    version: str


@dataclass(slots=True)
class _Attempt:
    """What an output is put together of."""

    files: dict[str, bytearray] = field(default_factory=dict)
    """By name, with their full length."""
    notes: dict[str, bytearray] = field(default_factory=dict)


class Bucket:
    """Objects by name. Any number of threads may use it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.faults: list[Fault] = []
        """What goes wrong. Requests that a fault makes slow are slow together, as those of a network are."""
        self.requests: Counter[str] = Counter()
        """How many there were of each operation."""
        self.read_nbytes = 0
        """Bytes that reads have brought."""
        self._objects: dict[str, _Object] = {}
        self._attempts: dict[str, _Attempt] = {}
        """By prefix: outputs that were not completed, and are kept."""
        self._writing: set[str] = set()
        """Prefixes of outputs that are being put together."""
        self._versions = count(1)
        self._lock = threading.Lock()
        remake_in_child(self)

    def after_fork(self) -> None:
        """See `forks.Forked`."""
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forget all objects, attempts, faults and counts."""
        with self._lock:
            self._objects.clear()
            self._attempts.clear()
            self.faults.clear()
            self.requests.clear()
            self.read_nbytes = 0

    def request(self, operation: str, name: str) -> int | None:
        """Count a request, and do what faults want of it; to how many bytes it is cut, if it is.

        Raises:
            Exception: what a fault says.
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
        """Of the objects below a prefix, sorted."""
        with self._lock:
            return sorted(name for name in self._objects if not prefix or name.startswith(f"{prefix}/"))

    def find(self, name: str) -> _Object | None:
        """The object that has a name now."""
        return self._objects.get(name)

    def put(self, name: str, content: bytes | bytearray, *, create: bool = False) -> None:
        """Give a name an object, in place of another perhaps; with `create`, only where there is none.

        Raises:
            FileExistsError: there is one.
        """
        with self._lock:
            if create and name in self._objects:
                raise FileExistsError(17, "an object of this name exists", f"memory://{self.name}/{name}")
            self._objects[name] = _Object(content, f'"{next(self._versions)}"')

    def delete(self, name: str) -> None:
        """Delete an object, if there is one."""
        with self._lock:
            self._objects.pop(name, None)

    def read(self, name: str, version: str, offset: int, view: memoryview) -> int:
        """Read a range of one version of an object, as far as it goes; the bytes that came.

        Raises:
            FormatError: the object is not there any more in this version.
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
        """What was kept of an attempt at an output, or a new one, while others are kept away.

        Raises:
            PlanError: somebody else has it.
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

    def keep(self, prefix: str, attempt: _Attempt) -> None:
        """Keep an attempt for the next one."""
        with self._lock:
            self._attempts[prefix] = attempt


_BUCKETS: dict[str, Bucket] = {}


def bucket(name: str) -> Bucket:
    """The bucket of a name."""
    return _BUCKETS.get(name) or _BUCKETS.setdefault(name, Bucket(name))


def offer(url: str) -> Store | Refusal:
    """See `stores.REGISTRY`."""
    found = _NAME.fullmatch(url)
    if found is None or {".", ".."} & set(found["prefix"].split("/")):
        return Refusal("expected memory://BUCKET or memory://BUCKET/PREFIX, without empty, . and .. parts")
    return MemoryStore(bucket(found["bucket"]), found["prefix"].strip("/"))


class _Closable:
    """Nothing needs to be closed."""

    def close(self) -> None:
        """See `File.close`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MemoryFile(_Closable):
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
            brought = self._bucket.read(self._name, self.version, offset + done, view[done:expected])
            if not brought:
                raise OSError(5, f"brought no bytes at {offset + done}", f"memory://{self._bucket.name}/{self._name}")
            done += brought


@dataclass(frozen=True, slots=True)
class MemoryStore:
    """See `protocols.Store`."""

    bucket: Bucket
    prefix: str
    """Without slashes at its ends; "" for all of the bucket."""

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
        return "no objects there"

    def parent(self) -> tuple[Store, str]:
        """See `Store.parent`."""
        above, _, name = self.prefix.rpartition("/")
        return MemoryStore(self.bucket, above), name

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
            if file.nbytes > limit:
                raise FormatError(f"{file.nbytes} bytes, limit {limit}", path=self.where(name), code="limit")
            text = bytearray(file.nbytes)
            file.read(0, memoryview(text))
            return bytes(text)

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> MemoryFile:
        """See `Store.open`."""
        if access is Access.DIRECT:
            raise OSError(95, "a store in memory has no direct I/O; use backend 'buffered'", self.where(name))
        found = self.stat(name)
        if found is None:
            raise FormatError("is missing", path=self.where(name), code="missing")
        if nbytes not in (None, found.nbytes):
            raise FormatError(f"{found.nbytes} bytes long, expected {nbytes}", path=self.where(name), code="mismatch")
        if version not in (None, found.version):
            raise FormatError("has changed since it was looked at", path=self.where(name), code="mismatch")
        return MemoryFile(self.bucket, self.full_name(name), found.nbytes, found.version)

    def check_output(self, source: Store, marker: str, *, force: bool) -> None:
        """See `Store.check_output`."""
        mine, other = f"{self}/", f"{source}/"
        if mine == other:
            raise PlanError("is the source itself; choose another prefix with -o", path=str(self), code="exists")
        if mine.startswith(other) or other.startswith(mine):
            raise PlanError(
                "lies in the source or around it; choose another prefix with -o", path=str(self), code="exists"
            )
        match self.kind():
            case Kind.FILE:
                raise PlanError("exists and is not a folder", path=str(self), code="exists")
            case Kind.FOLDER if not force:
                raise PlanError(
                    "is not empty; --force replaces a folder that relayout wrote", path=str(self), code="exists"
                )
            case Kind.FOLDER if self.bucket.find(self.full_name(marker)) is None:
                raise PlanError(
                    f"is not empty and was not written by relayout ({marker} is missing)",
                    path=str(self),
                    code="exists",
                )

    @contextmanager
    def stage(self, marker: str, *, replace: bool, modes: Modes) -> Iterator[MemoryStaging]:
        """See `Store.stage`."""
        with self.bucket.attempt(self.prefix) as attempt:
            staging = MemoryStaging(self, attempt)
            try:
                yield staging
                self._publish(attempt, marker, replace=replace)
            except BaseException as error:
                if staging.is_kept:
                    self.bucket.keep(self.prefix, attempt)
                    if staging.advice is not None:
                        error.add_note(staging.advice)
                raise

    def _publish(self, attempt: _Attempt, marker: str, *, replace: bool) -> None:
        """Make objects of the files, the marker last; an output that is replaced is none from the beginning on."""
        if replace:
            self.bucket.delete(self.full_name(marker))
            for name in self.bucket.names(self.prefix):
                self.bucket.delete(name)
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
        """Of a file, in the bucket."""
        return f"{self.prefix}/{name}" if self.prefix else name


class MemoryStaging:
    """Files that become objects at the end; see `protocols.Staging`."""

    def __init__(self, store: MemoryStore, attempt: _Attempt) -> None:
        self._store = store
        self._attempt = attempt
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

    def allocated_nbytes(self) -> int:
        """See `Staging.allocated_nbytes`."""
        return sum(map(len, self._attempt.files.values()))

    def check_space(self, nbytes: int) -> None:
        """See `Staging.check_space`: nobody knows."""

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
        if len(found) != nbytes:
            raise FormatError(
                f"{len(found)} bytes long, expected {nbytes}", path=self._store.where(name), code="mismatch"
            )
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
            raise FileExistsError(17, "exists", self._store.where(name))
        self._attempt.files[name] = content

    def read_notes(self, name: str) -> bytes | None:
        """See `Staging.read_notes`."""
        found = self._attempt.notes.get(name)
        return None if found is None else bytes(found)

    def open_notes(self, name: str, *, is_new: bool) -> _Notes:
        """See `Staging.open_notes`."""
        if is_new:
            self._attempt.notes[name] = bytearray()
        return _Notes(self._attempt.notes[name])


class _StagedFile(_Closable):
    """A file of an attempt, to read and to write."""

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


class _Notes(_Closable):
    def __init__(self, content: bytearray) -> None:
        self._content = content

    def append(self, text: bytes) -> None:
        """See `Notes.append`."""
        self._content += text
