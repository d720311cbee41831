"""Backends: the ways from files into an arena, behind one protocol."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from relayout.errors import PlanError
from relayout.extents import BLOCK
from relayout.files import Buffer, InputFile
from relayout.index import Read
from relayout.loader.readplan import Chunk, plan_chunks
from relayout.strided import copy_runs
from relayout.workers import Workers

MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that bytes come from."""

    path: Path
    nbytes: int
    """The length that it must have."""


class Filling(Protocol):
    """A fill that is under way."""

    def join(self) -> None:
        """Return when every byte is in the arena; all threads and files of the fill are gone then.

        Raises:
            FormatError: a file is shorter than expected.
            OSError: a read failed.
        """

    def cancel(self) -> None:
        """Give up; all threads and files of the fill are gone on return."""


class Backend(Protocol):
    """One way to fill an arena."""

    @property
    def name(self) -> str:
        """What it is called in `BACKENDS` and in messages."""

    def start(self, arena: memoryview, files: Sequence[StoredFile], reads: Sequence[Read]) -> Filling:
        """Begin to fill the arena, and return at once.

        Raises:
            FormatError: a file has another length than expected.
            OSError: a file cannot be opened as this backend needs it.
        """


@dataclass(frozen=True, slots=True)
class HostBackend:
    """Threads that read into host memory: past the page cache ("direct"), or through it ("buffered")."""

    name: str
    direct: bool
    fallback: bool = False
    """Whether files on which direct I/O is refused are read through the page cache instead."""

    def start(self, arena: memoryview, files: Sequence[StoredFile], reads: Sequence[Read]) -> Filling:
        """See `Backend.start`."""
        opened: list[InputFile] = []
        try:
            opened.extend(self._open(file) for file in files)
        except BaseException:
            _close(opened)
            raise
        return _HostFilling(arena, opened, list(plan_chunks(reads, BLOCK if self.direct else 1)))

    def _open(self, file: StoredFile) -> InputFile:
        return InputFile(file.path, file.nbytes, direct=self.direct, fallback=self.fallback)


class _HostFilling:
    def __init__(self, arena: memoryview, files: list[InputFile], chunks: list[Chunk]) -> None:
        self._arena = arena
        self._files = files
        self._workers = Workers(min(default_threads(), len(chunks)), chunks, Buffer, self._fill)
        self._workers.start()

    def join(self) -> None:
        try:
            self._workers.join()
        finally:
            _close(self._files)

    def cancel(self) -> None:
        self._workers.cancel()
        _close(self._files)

    def _fill(self, bounce: Buffer, chunk: Chunk) -> int:
        file, extent = self._files[chunk.file], chunk.extent
        if chunk.arena_offset is not None:
            file.read(extent.offset, self._arena[chunk.arena_offset : chunk.arena_offset + extent.nbytes])
        else:
            view = bounce.reserve(extent.nbytes)
            file.read(extent.offset, view)
            for transfer in chunk.transfers:
                copy_runs(view, self._arena, transfer)
        return chunk.nbytes


BACKENDS = ("auto", "direct", "buffered")


def choose_backend(name: str) -> Backend:
    """The backend of that name; "auto" reads directly where each file's file system takes it.

    Raises:
        PlanError: there is no such backend.
    """
    match name:
        case "auto":
            return HostBackend("direct", direct=True, fallback=True)
        case "direct":
            return HostBackend("direct", direct=True)
        case "buffered":
            return HostBackend("buffered", direct=False)
    raise PlanError(f"backend {name!r}, expected one of {', '.join(BACKENDS)}")


def default_threads() -> int:
    """Requests in flight: enough to keep a drive busy, few enough to leave the machine usable."""
    return min(MAX_THREADS, 2 * (os.cpu_count() or 1))


def _close(files: Sequence[InputFile]) -> None:
    for file in files:
        file.close()
