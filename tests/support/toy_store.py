"""A store in one module: names and bytes in a dictionary. It keeps nothing of outputs that fail. The suites take it."""

from __future__ import annotations

import io
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from relayout.errors import FormatError, PlanError
from relayout.storage.protocols import (
    LOCAL_COST,
    Access,
    Entry,
    FileStat,
    Kind,
    Modes,
    Refusal,
    Replaceable,
    Store,
    read_whole,
)

FILES: defaultdict[str, dict[str, tuple[bytes, str]]] = defaultdict(dict)
"""Content and version, by the first word behind toy:// and the rest."""
PARTS: dict[str, dict[str, ToyStaging]] = {}
"""What parts of outputs have added, by the name that they share."""
BUSY: set[str] = set()
VERSIONS = itertools.count()


def offer(url: str) -> Store | Refusal:
    shelf, _, prefix = url.removeprefix("toy://").rstrip("/").partition("/")
    return ToyStore(shelf, prefix) if shelf else Refusal("expected toy://SHELF/PREFIX")


class Closing:
    def close(self) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ToyFile(Closing):
    """One version: it keeps what it has opened."""

    alignment = 1

    def __init__(self, content: bytes | bytearray, version: str) -> None:
        self._content = content
        self.nbytes = len(content)
        self.version = version

    def fileno(self) -> None:
        return None

    def read(self, offset: int, view: memoryview) -> None:
        part = self._content[offset : offset + view.nbytes]
        view[: len(part)] = part

    def write(self, offset: int, view: memoryview, address: int = 0) -> None:
        assert isinstance(self._content, bytearray)
        self._content[offset : offset + view.nbytes] = view


class ToyNotes(io.BytesIO):
    def append(self, text: bytes) -> None:
        self.write(text)

    def close(self) -> None:
        """It can be read again."""


@dataclass(frozen=True)
class ToyStore:
    """See `relayout.storage.protocols.Store`."""

    shelf: str
    prefix: str
    cost = LOCAL_COST

    def __str__(self) -> str:
        return f"toy://{self.shelf}" + (f"/{self.prefix}" if self.prefix else "")

    def where(self, name: str) -> str:
        return f"{self}/{name}"

    def path(self, name: str) -> None:
        return None

    def kind(self) -> Kind:
        if self.prefix in FILES[self.shelf]:
            return Kind.FILE
        return Kind.FOLDER if self._names() else Kind.NOTHING

    def absence(self) -> str:
        return "nothing on the shelf"

    def parent(self) -> tuple[Store, str]:
        above, _, name = self.prefix.rpartition("/")
        return ToyStore(self.shelf, above), name

    def snapshot(self) -> ToyStore:
        return self

    def folder_mode(self) -> int:
        return 0o777

    def walk(self) -> Iterator[Entry]:
        for name in self._names():
            if "/." not in f"/{name}":
                yield Entry(name)

    def stat(self, name: str) -> FileStat | None:
        content, version = FILES[self.shelf].get(self._full(name), (None, ""))
        return None if content is None else FileStat(len(content), version)

    def read(self, name: str, limit: int) -> bytes:
        return read_whole(self.open(name), self.where(name), limit)

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> ToyFile:
        if access is Access.DIRECT:
            raise OSError(95, "no direct I/O", self.where(name))
        found = FILES[self.shelf].get(self._full(name))
        if found is None:
            raise FormatError("is missing", path=self.where(name), code="missing")
        FileStat(len(found[0]), found[1]).check(self.where(name), nbytes, version)
        return ToyFile(*found)

    def check_output(self, source: Store, older: Replaceable, *, force: bool) -> None:
        mine, other = f"{self}/", f"{source}/"
        if mine.startswith(other) or other.startswith(mine):
            raise PlanError(f"{self}: is, or lies in, the source or around it")
        older.check(self, self._names(), force=force)

    @contextmanager
    def stage_part(
        self, older: Replaceable, shared: str, part: str, *, replace: bool, modes: Modes
    ) -> Iterator[ToyStaging]:
        whole = PARTS.get(str(self), {}).get(shared)
        staging = ToyStaging(str(self), whole.notes if whole else {})
        yield staging
        if part in staging.notes:
            if not replace and self.stat(older.marker):
                raise PlanError(f"{self}: is complete already")
            whole = PARTS.setdefault(str(self), {}).setdefault(shared, ToyStaging(str(self)))
            whole.files |= staging.files
            whole.notes |= staging.notes

    @contextmanager
    def stage(
        self, older: Replaceable, *, replace: bool, modes: Modes, shared: str | None = None
    ) -> Iterator[ToyStaging]:
        parts = PARTS.get(str(self), {})
        if (shared is None and parts and not replace) or (shared is not None and shared not in parts):
            raise PlanError(f"{self}: holds other units")
        if str(self) in BUSY:
            raise PlanError(f"{self}: is being written")
        BUSY.add(str(self))
        try:
            staging = ToyStaging(str(self)) if shared is None else parts[shared]
            yield staging
            for name in older.check(self, self._names(), force=True) if replace else ():
                del FILES[self.shelf][self._full(name)]
            if self._names():
                raise FileExistsError(17, "there is something now", str(self))
            for name in sorted(staging.files, key=lambda name: name == older.marker):
                self.write(name, bytes(staging.files[name]))
            PARTS.pop(str(self), None)
        finally:
            BUSY.discard(str(self))

    def write(self, name: str, content: bytes) -> None:
        """Put a file on the shelf, as anybody could."""
        FILES[self.shelf][self._full(name)] = content, str(next(VERSIONS))

    def _full(self, name: str) -> str:
        return f"{self.prefix}/{name}".lstrip("/")

    def _names(self) -> list[str]:
        above = f"{self.prefix}/" if self.prefix else ""
        return [name.removeprefix(above) for name in FILES[self.shelf] if name.startswith(above)]


class ToyStaging:
    """See `relayout.storage.protocols.Staging`."""

    can_read = True

    def __init__(self, where: str, done: Mapping[str, ToyNotes] | None = None) -> None:
        self.where = where
        self.files: dict[str, bytearray] = {}
        self.notes: dict[str, ToyNotes] = {}
        self.done = self.notes if done is None else done
        self.is_kept = False
        self.advice: str | None = None

    def clear(self) -> None:
        self.files.clear()

    def allocated_nbytes(self) -> int:
        return sum(map(len, self.files.values()))

    def check_space(self, nbytes: int) -> None:
        pass

    def names(self) -> list[str]:
        return list(self.files)

    def remove(self, name: str) -> None:
        self.files.pop(name, None)

    def open(self, name: str, nbytes: int) -> ToyFile:
        if len(self.files.get(name, b"")) != nbytes:
            raise FormatError(f"{self.where}/{name}: is missing, or not {nbytes} bytes long")
        return ToyFile(self.files[name], "")

    def write_file(self, name: str, nbytes: int, *, is_new: bool) -> ToyFile:
        if is_new:
            self.put(name, [bytes(nbytes)])
        return ToyFile(self.files[name], "")

    def write_head(self, name: str, head: bytes, nbytes: int) -> None:
        self.write_file(name, nbytes, is_new=name not in self.files).write(0, memoryview(head))

    def put(self, name: str, pieces: Iterable[bytes], mode: int | None = None) -> None:
        if name in self.files:
            raise FileExistsError(17, "exists", name)
        self.files[name] = bytearray(b"".join(pieces))

    def read_notes(self, name: str) -> bytes | None:
        return self.done[name].getvalue() if name in self.done else None

    def open_notes(self, name: str, *, is_new: bool) -> ToyNotes:
        return self.notes.setdefault(name, ToyNotes())
