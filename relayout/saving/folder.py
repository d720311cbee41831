"""A checkpoint folder that was never written: small files, and shards whose tensors are in memory."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from relayout.core.extents import Extent
from relayout.errors import FormatError
from relayout.saving.shards import Shard
from relayout.storage.protocols import (
    LOCAL_COST,
    Access,
    Entry,
    FileStat,
    Kind,
    Modes,
    ReadableFile,
    Replaceable,
    RequestCost,
    Staging,
    Store,
    read_whole,
)

Fill = Callable[[str, Extent, memoryview], None]
"""Fills memory with an extent of a shard, given by name. Bytes of its header, or behind its end, are left alone."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryFolder:
    """A folder to convert. Thread-safe, if `fill` is."""

    files: Mapping[str, bytes]
    """Small files."""
    shards: Mapping[str, Shard]
    fill: Fill
    version: str
    """Of all files."""

    @property
    def cost(self) -> RequestCost:
        return LOCAL_COST

    def __str__(self) -> str:
        return "tensors in memory"

    def location(self, name: str) -> str:
        return f"{self}: {name}"

    def path(self, name: str) -> Path | None:
        return None

    def kind(self) -> Kind:
        return Kind.FOLDER

    def not_found_message(self) -> str:
        return "no such folder"

    def parent(self) -> tuple[Store, str]:
        return self, ""

    def snapshot(self) -> MemoryFolder:
        return self

    def walk(self) -> Iterator[Entry]:
        for name in (*self.files, *self.shards):
            yield Entry(name)

    def stat(self, name: str) -> FileStat | None:
        if name in self.files:
            return FileStat(len(self.files[name]), self.version)
        shard = self.shards.get(name)
        return None if shard is None else FileStat(shard.nbytes, self.version, Modes().file)

    def read(self, name: str, limit: int) -> bytes:
        return read_whole(self.open(name), self.location(name), limit)

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> ReadableFile:
        stat = self.stat(name)
        if stat is None:
            raise FormatError("no such file", path=self.location(name), code="missing")
        stat.check(self.location(name), nbytes, version)
        return _MemoryFile(self, name, stat)

    def add(self, name: str, content: bytes) -> None:
        self._refuse()

    def check_output(self, source: Store, older: Replaceable, *, force: bool) -> None:
        self._refuse()

    def stage(
        self, older: Replaceable, *, replace: bool, modes: Modes, shared: str | None = None
    ) -> AbstractContextManager[Staging]:
        self._refuse()

    def stage_part(
        self, older: Replaceable, shared: str, part: str, *, replace: bool, modes: Modes
    ) -> AbstractContextManager[Staging]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise OSError(errno.EROFS, "cannot be written", str(self))


class _MemoryFile(ReadableFile):
    def __init__(self, folder: MemoryFolder, name: str, stat: FileStat) -> None:
        self._folder = folder
        self._name = name
        self._stat = stat

    @property
    def nbytes(self) -> int:
        return self._stat.nbytes

    @property
    def version(self) -> str:
        return self._stat.version

    @property
    def alignment(self) -> int:
        return 1

    def fileno(self) -> int | None:
        return None

    def read(self, offset: int, view: memoryview) -> None:
        shard = self._folder.shards.get(self._name)
        head = self._folder.files[self._name] if shard is None else shard.header
        known = memoryview(head)[offset : offset + view.nbytes]
        view[: known.nbytes] = known
        if shard is not None and known.nbytes < view.nbytes:
            self._folder.fill(self._name, Extent(offset, view.nbytes), view)

    def close(self) -> None:
        pass
