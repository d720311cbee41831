"""The files of a load. Bytes that are in the page cache are copied from there, all others are read directly."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from relayout.checkpoint.converted import check_head
from relayout.core.extents import BLOCK, Extent, align_down
from relayout.errors import FormatError
from relayout.loader.budgets import local_world_size
from relayout.loader.sources.stored import StoredFile, check_hole
from relayout.storage.buffers import Buffer
from relayout.storage.libc import map_file, populate, unmap
from relayout.storage.local.files import holes
from relayout.storage.local.page_cache import read_ahead_nbytes, resident_nbytes
from relayout.storage.protocols import Access, Closable, ReadableFile

_PIECE_NBYTES = 2**20
"""A request is cut into pieces of this size where only some of its bytes are in the page cache."""


class Sources(Closable):
    """Open files. Reads are thread-safe."""

    def __init__(self, files: Sequence[StoredFile], access: Access) -> None:
        """Open them.

        Raises:
            FormatError: a file is missing, has another length or content than expected, or was never filled.
            OSError: a file cannot be opened with this access.
        """
        self._stored = files
        self._is_alone = local_world_size() == 1
        self._is_mappable = access is not Access.DIRECT and not self._is_alone
        self._files: list[ReadableFile] = []
        self._cached: list[ReadableFile | None] = []
        self._read_ahead = 0
        try:
            for file in files:
                opened = file.open(access)
                if access is Access.AUTO and self._is_cold(file, opened):
                    opened.close()
                    opened = file.open(Access.ONCE)
                self._files.append(opened)
                self._cached.append(self._open_cached(file, opened) if access is Access.AUTO else None)
                self._check_proof(len(self._files) - 1, file)
        except BaseException:
            self.close()
            raise

    @property
    def alignment(self) -> int:
        """What offset, length and address of a read must be multiples of, in bytes."""
        return max((file.alignment for file in self._files), default=1)

    def pieces(self, file: int, offset: int, nbytes: int) -> Iterator[tuple[int, int, bool]]:
        """The parts to divide a request into, as (offset, nbytes, whether to read through the page cache)."""
        cached = self._cached[file]
        if cached is None:
            yield offset, nbytes, self._files[file].alignment == 1
            return
        wanted = min(nbytes, cached.nbytes - offset)  # A request may end beyond the end of the file.
        is_cached = self._is_cached(cached, offset, wanted)
        if is_cached or not resident_nbytes(_fd(cached), offset, wanted):
            yield offset, nbytes, is_cached
            return
        start, through_cache = offset, None
        for piece in range(offset, offset + wanted, _PIECE_NBYTES):
            is_cached = self._is_cached(cached, piece, min(_PIECE_NBYTES, offset + wanted - piece))
            if through_cache is not None and is_cached != through_cache:
                yield start, piece - start, through_cache
                start = piece
            through_cache = is_cached
        yield start, offset + nbytes - start, bool(through_cache)

    def _is_cached(self, file: ReadableFile, offset: int, nbytes: int) -> bool:
        """Whether bytes, and enough bytes after them to keep the kernel from reading ahead, are in the page cache.

        Earlier read-ahead has left a mark on a page. Reading that page makes the kernel read ahead from the next
        missing page, whatever posix_fadvise says (mm/readahead.c, page_cache_async_ra).
        """
        reach = min(nbytes + self._read_ahead, file.nbytes - offset)
        return resident_nbytes(_fd(file), offset, reach) == reach

    def read(self, file: int, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`, up to the end of the file.

        Raises:
            FormatError: the file has become shorter.
            OSError: the read failed.
        """
        for start, nbytes, through_cache in self.pieces(file, offset, view.nbytes):
            source = self._cached[file] if through_cache else None
            (source or self._files[file]).read(start, view[start - offset : start - offset + nbytes])

    @contextmanager
    def mapped(self, file: int, offset: int, nbytes: int) -> Iterator[memoryview | None]:
        """The bytes of a file in the page cache, not copied, inside the block; None if they must be read.

        For runs with gaps between them, of a plain checkpoint: all ranks of a node need its bytes, each other ones, and
        the first to come reads them from the drive. None if this rank is alone: nobody shares the page cache, which is
        left as it was, and through which a file system with a long latency reads in small requests.

        The kernel reads ahead in large folios, which are mapped at a tenth of the cost of a copy.
        (posix_fadvise(WILLNEED) would fill the page cache with single pages.)

        What cannot be read when the block begins is None. Inside the block, using a page that was truncated since then,
        or evicted from the cache and cannot be read again, kills the process.
        """
        opened = self._files[file]
        fd = opened.fileno() if self._is_mappable and self._stored[file].proof is None else None
        start = align_down(offset, mmap.PAGESIZE)
        length = min(offset + nbytes, opened.nbytes) - start
        if fd is None or length <= 0:
            yield None
            return
        try:
            address = map_file(fd, start, length, flags=mmap.MAP_SHARED)
        except OSError:
            yield None
            return
        try:
            if populate(address, length):
                yield memoryview((ctypes.c_char * length).from_address(address)).cast("B")[offset - start :]
            else:
                yield None
        finally:
            unmap(address, length)

    def resident_nbytes(self, file: int, offset: int, nbytes: int) -> int | None:
        """How many of these bytes are in the page cache; None where the system does not tell."""
        fd = self._files[file].fileno()
        return None if fd is None else resident_nbytes(fd, offset, nbytes)

    def fd(self, file: int) -> int:
        """The descriptor of a file, of a store that has descriptors."""
        return _fd(self._files[file])

    def check_not_replaced(self, file: int) -> None:
        """Check that the file is still at its path, after other code has opened that path, too.

        Raises:
            FormatError: the file was replaced or removed.
        """
        stored = self._stored[file]
        assert stored.path is not None
        try:
            status = stored.path.stat()
        except FileNotFoundError:
            raise _replaced(stored) from None
        if not os.path.samestat(status, os.fstat(self.fd(file))):
            raise _replaced(stored)

    def close(self) -> None:
        """Close all files."""
        for file in (*self._files, *self._cached):
            if file is not None:
                file.close()

    def _is_cold(self, file: StoredFile, opened: ReadableFile) -> bool:
        """Whether a file that cannot be read directly is to leave the page cache as it was, which has nothing of it."""
        fd = opened.fileno()
        if fd is None or opened.alignment > 1 or not (self._is_alone or file.proof):
            return False  # Ranks of a node share what they read of a plain checkpoint.
        return resident_nbytes(fd, 0, file.nbytes) == 0

    def _check_proof(self, index: int, file: StoredFile) -> None:
        # Read the header by the descriptor that is used for the load: the file at a path may be replaced at any time.
        if file.proof is None:
            return
        opened, view = self._files[index], Buffer().reserve(BLOCK)
        opened.read(0, view)
        check_head(view, file.proof.content, file.proof.data_start, file.where)
        fd = opened.fileno()
        if fd is None:
            return
        for hole in holes(fd, Extent(file.proof.data_start, file.nbytes - file.proof.data_start)):
            check_hole(file, hole)

    def _open_cached(self, file: StoredFile, opened: ReadableFile) -> ReadableFile | None:
        fd = opened.fileno()
        if fd is None or opened.alignment == 1 or not resident_nbytes(fd, 0, file.nbytes):
            return None
        other = file.open(Access.BUFFERED)
        if not os.path.sameopenfile(fd, _fd(other)):
            other.close()
            raise _replaced(file)
        self._read_ahead = max(self._read_ahead, read_ahead_nbytes(_fd(other)))
        return other


@contextmanager
def closed_on_error(sources: Sources) -> Iterator[Sources]:
    """The open files, which an error closes."""
    try:
        yield sources
    except BaseException:
        sources.close()
        raise


def _fd(file: ReadableFile) -> int:
    fd = file.fileno()
    assert fd is not None
    return fd


def _replaced(file: StoredFile) -> FormatError:
    return FormatError("was replaced while it was opened", path=file.where, code="mismatch")
