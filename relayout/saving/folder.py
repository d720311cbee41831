"""A checkpoint folder that was never written: small files, and shards whose tensors are in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from relayout.core.extents import Extent
from relayout.errors import FormatError
from relayout.saving.shards import Shard
from relayout.storage.protocols import (
    LOCAL_COST,
    Access,
    Entry,
    FileStat,
    Modes,
    ReadableFile,
    RequestCost,
    Store,
    read_whole,
)
from relayout.storage.read_only import ReadOnlyStore

Fill = Callable[[str, Extent, memoryview], None]
"""Fills memory with an extent of a shard, given by name. Bytes of its header, or behind its end, are left alone."""


@dataclass(frozen=True, slots=True, eq=False)
class MemoryFolder(ReadOnlyStore):
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

    def not_found_message(self) -> str:
        return "no such folder"

    def parent(self) -> tuple[Store, str]:
        return self, ""

    def walk(self) -> Iterator[Entry]:
        for name in (*self.files, *self.shards):
            yield Entry(name)

    def stat(self, name: str) -> FileStat | None:
        if name in self.files:
            return FileStat(len(self.files[name]), self.version, vouched=self.version)
        shard = self.shards.get(name)
        return None if shard is None else FileStat(shard.nbytes, self.version, Modes().file, self.version)

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
