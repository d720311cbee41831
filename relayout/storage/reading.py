"""Files that several threads read: a pool with a bounded number of open files, and the hashing of their content."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from heapq import merge
from itertools import islice, repeat
from typing import Generic, TypeVar

from relayout.core.digests import ExtentDigests, Hash, new_blake3
from relayout.core.extents import BLOCK, Extent, align_up, coalesce, split
from relayout.core.workers import Stop, Workers
from relayout.storage.stores import Closable, ReadableFile
from relayout.storage.system import Buffer, max_descriptors

_MAX_OPEN_FILES = 64
_SHARE = 4
"""A pool uses at most 1 / _SHARE of the process's descriptor limit."""

Key = TypeVar("Key", bound=Hashable)
File = TypeVar("File", bound=Closable)


class OpenFiles(Closable, Generic[Key, File]):
    """A pool of files by key that keeps a bounded number of them open. Thread-safe.

    A thread must not request a second file while it uses one: threads could deadlock.
    """

    def __init__(self, open_file: Callable[[Key], File], *, num_descriptors: int = 1) -> None:
        """Keep files open that `open_file` opens by a key; each uses `num_descriptors` file descriptors.

        Calls of `open_file` for one key never overlap each other, or the closing of the file with this key.
        """
        self._open_file = open_file
        self._limit = max(1, min(_MAX_OPEN_FILES, max_descriptors() // (_SHARE * num_descriptors)))
        self._changed = threading.Condition()
        self._files: dict[Key, File] = {}
        """Open files, least recently used first."""
        self._users: Counter[Key] = Counter()
        self._busy: set[Key] = set()
        """Keys of the files that threads are opening or closing."""

    @contextmanager
    def use(self, key: Key) -> Iterator[File]:
        """Yield the file of a key, which stays open until the block ends."""
        file = self._take(key)
        try:
            yield file
        finally:
            with self._changed:
                self._users[key] -= 1
                self._changed.notify_all()

    def _take(self, key: Key) -> File:
        with self._changed:
            while key not in self._files:
                idle = next((other for other in self._files if not self._users[other]), None)
                if key in self._busy:
                    self._changed.wait()
                elif len(self._files) + len(self._busy) < self._limit:
                    with self._unlocked(key):
                        opened = self._open_file(key)
                    self._files[key] = opened
                elif idle is not None:
                    closed = self._files.pop(idle)
                    with self._unlocked(idle):
                        closed.close()
                else:
                    self._changed.wait()
            self._files[key] = self._files.pop(key)
            self._users[key] += 1
            return self._files[key]

    @contextmanager
    def _unlocked(self, key: Key) -> Iterator[None]:
        """Release the lock while this thread opens or closes a file, which may take long."""
        self._busy.add(key)
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()
            self._busy.remove(key)
            self._changed.notify_all()

    def close(self) -> None:
        """Close all open files, also if closing one of them fails.

        No thread may use the pool during this call or afterwards.
        """
        with ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)
            self._files.clear()


READ_NBYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class HashedFile:
    """A file and the extents of it to hash."""

    open: Callable[[], ReadableFile]
    """Opens the file. May be called more than once."""
    extents: Sequence[Extent]
    """The extents in rising order, without overlap. Empty extents may be at any offset."""
    chunks: Sequence[Extent] = ()
    """More extents in rising order, without overlap among themselves. They may overlap `extents`."""
    new_hash: Callable[[], Hash] = new_blake3
    """Creates the running hash of a chunk."""


def hash_files(
    files: Sequence[HashedFile],
    num_threads: int,
    on_progress: Callable[[int], None] | None = None,
    *,
    num_streams: int = 1,
    stop: Stop | None = None,
) -> list[list[str]]:
    """Return, for each file, the digests of its extents, followed by the hashes of its chunks, in hex.

    Args:
        num_streams: the number of files that are read at the same time. A chunk is always hashed by one thread, even if
            the chunk is the whole file.
        stop: requested when a read fails. A request by another thread stops the work.
    """
    stop = stop or Stop()
    hashed = [[ExtentDigests(file.extents, stop), ExtentDigests(file.chunks, stop, file.new_hash)] for file in files]

    def requests() -> Iterator[tuple[int, Extent]]:
        streams: deque[Iterator[tuple[int, Extent]]] = deque()
        waiting = (zip(repeat(index), _requests(file), strict=False) for index, file in enumerate(files))
        streams.extend(islice(waiting, num_streams))
        while streams:
            stream = streams.popleft()
            if (request := next(stream, None)) is not None:
                yield request
                streams.append(stream)
            else:
                streams.extend(islice(waiting, 1))

    def work(buffer: Buffer, item: tuple[int, Extent]) -> int:
        index, extent = item
        view = buffer.reserve(extent.nbytes)
        with inputs.use(index) as file:
            file.read(extent.offset, view)
        for digests in hashed[index]:
            digests.update(extent.offset, view)
        return extent.nbytes

    def open_input(index: int) -> ReadableFile:
        return files[index].open()

    with OpenFiles(open_input) as inputs:
        for index in range(len(files)):  # Checks the length of files without extents as well.
            with inputs.use(index):
                pass
        Workers(num_threads, requests(), Buffer, work, stop).run(on_progress)
    assert not any(digests.num_left for pair in hashed for digests in pair)
    return [extents.digests + chunks.digests for extents, chunks in hashed]


def sha256_hex(opened: ReadableFile, proof: Hash | None = None) -> str:
    """Return the SHA-256 of a file in hex, after closing the file; update `proof` with the same bytes if given."""
    digest = hashlib.sha256()
    buffer = Buffer()
    with opened as file:
        for extent in split(Extent(0, file.nbytes), READ_NBYTES):
            view = buffer.reserve(align_up(extent.nbytes, BLOCK))
            file.read(extent.offset, view)
            digest.update(view[: extent.nbytes])
            if proof is not None:
                proof.update(view[: extent.nbytes])
    return digest.hexdigest()


def _requests(file: HashedFile) -> Iterator[Extent]:
    """Yield the blocks that contain the extents: adjacent blocks joined, long ones split."""

    def blocks(extent: Extent) -> tuple[None, int, int]:
        aligned = extent.aligned()
        return None, aligned.offset, aligned.end

    wanted = (extent for extent in merge(file.extents, file.chunks) if extent.nbytes)
    for group in coalesce(wanted, blocks):
        yield from split(group.extent, READ_NBYTES)
