"""The open files of a load, and hints for errors of the operating system.

Bytes that are in the page cache are copied from there. All other bytes are read directly.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from relayout.checkpoint.converted import VerifiedFile, check_head, check_holes
from relayout.core.extents import BLOCK, Grid, align_down
from relayout.core.workers import ADVICE_ON_THREADS, each
from relayout.errors import FormatError
from relayout.loader.requests import local_world_size
from relayout.loader.sources.rank import StoredFile, cost_of
from relayout.storage.stores import Access, Closable, ReadableFile, RequestError
from relayout.storage.system import (
    Buffer,
    advice_on_limit,
    map_file,
    populate,
    read_ahead_nbytes,
    resident_nbytes,
    unmap,
)

_NO_ANSWER = {errno.ENOTCONN, errno.ETIMEDOUT, getattr(errno, "EREMOTEIO", errno.ETIMEDOUT)}
"""The system's errors for a server that does not answer. macOS does not have EREMOTEIO."""

_PIECE_NBYTES = 2**20
"""Size of the pieces of a request if only a part of its bytes is in the page cache."""


class MixedFile(Closable):
    """A file that copies bytes that are in the page cache, and reads all other bytes directly. Thread-safe."""

    def __init__(self, direct: ReadableFile, cached: ReadableFile) -> None:
        """Take one file, opened twice."""
        self._direct = direct
        self._cached = cached
        self._read_ahead = read_ahead_nbytes(_fd(cached))

    @property
    def nbytes(self) -> int:
        return self._direct.nbytes

    @property
    def version(self) -> str:
        return self._direct.version

    @property
    def alignment(self) -> int:
        return self._direct.alignment

    def fileno(self) -> int | None:
        return self._direct.fileno()

    def pieces(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, bool]]:
        """Yield the parts to divide a request into; see `ReadableFiles.pieces`."""
        wanted = min(nbytes, self.nbytes - offset)  # A request may end beyond the end of the file.
        is_cached = self._is_cached(offset, wanted)
        if is_cached or not resident_nbytes(_fd(self._cached), offset, wanted):
            yield offset, nbytes, is_cached
            return
        start, through_cache = offset, None
        for piece in range(offset, offset + wanted, _PIECE_NBYTES):
            is_cached = self._is_cached(piece, min(_PIECE_NBYTES, offset + wanted - piece))
            if through_cache is not None and is_cached != through_cache:
                yield start, piece - start, through_cache
                start = piece
            through_cache = is_cached
        yield start, offset + nbytes - start, bool(through_cache)

    def _is_cached(self, offset: int, nbytes: int) -> bool:
        """Return True if the bytes, and enough bytes after them to prevent read-ahead, are in the page cache.

        Read-ahead leaves a mark on one of its pages. Reading a marked page makes the kernel read ahead from the next
        missing page, even after posix_fadvise (mm/readahead.c, page_cache_async_ra).
        """
        reach = min(nbytes + self._read_ahead, self.nbytes - offset)
        return resident_nbytes(_fd(self._cached), offset, reach) == reach

    def read(self, offset: int, view: memoryview) -> None:
        for start, nbytes, through_cache in self.pieces(offset, view.nbytes):
            file = self._cached if through_cache else self._direct
            file.read(start, view[start - offset : start - offset + nbytes])

    def close(self) -> None:
        self._direct.close()
        self._cached.close()


def _max_open() -> int:
    """Return the limit of local files that one job keeps open, so that two jobs can open each file twice."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**20 if soft == resource.RLIM_INFINITY else max(1, soft // 4)


class ReadableFiles(Closable):
    """The open files of a job. Reads are thread-safe.

    If a job has more local files than it may keep open (`ulimit -n`), the least recently used ones are closed. They are
    opened and checked again for the next read.
    """

    def __init__(self, files: Sequence[StoredFile], access: Access) -> None:
        """Open the files, remote ones concurrently."""
        self._stored = files
        self._is_alone = local_world_size() == 1
        self._is_mappable = access is not Access.DIRECT and not self._is_alone
        self._access = access
        self._max_open = len(files) if any(file.folder.cost.is_remote for file in files) else _max_open()
        self._files: dict[int, ReadableFile] = {}
        """The open files by index. If not all can be open, the least recently used comes first."""
        self._alignments: dict[int, int] = {}
        """Alignments of files that were closed so that others could be opened."""
        self._num_users: Counter[int] = Counter()
        """Number of calls that are using each open file, if not all files can be open."""
        self._unused = threading.Condition()
        self.grids: list[Grid | None] = [None] * len(files)
        """Chunk borders of each verified file, if reads can begin and end there."""
        try:
            each(self._open, range(len(files)), cost_of(files).num_opens)
            self._chunk_nbytes = max((grid.step for grid in self.grids if grid is not None), default=1)
        except BaseException:
            self.close()
            raise

    def _open(self, index: int) -> None:
        """Open a file, and check that it is the right one, unless the check would be a round trip."""
        file, access = self._stored[index], self._access
        if len(self._files) >= self._max_open:
            self._close_one()
        opened = file.open_unverified(access)
        try:
            if access is Access.AUTO and self._is_cold(file, opened):
                opened.close()
                opened = file.open_unverified(Access.ONCE)
            if access is Access.AUTO:
                opened = _mixed(file, opened)
            if not file.folder.cost.is_remote:
                _check_content(file, opened)
            verified = file.verify_reads(opened)
        except BaseException:
            opened.close()
            raise
        self._files[index] = verified
        self._alignments.pop(index, None)
        self.grids[index] = verified.grid if isinstance(verified, VerifiedFile) else None

    def _close_one(self) -> None:
        """Close the least recently used file that no call uses. At least one such file must exist."""
        oldest = next(index for index in self._files if not self._num_users[index])
        self._alignments[oldest] = self._files[oldest].alignment
        self._files.pop(oldest).close()

    @contextmanager
    def _using(self, index: int) -> Iterator[ReadableFile]:
        """Keep a file open inside the block, which must not use another file.

        If the maximum number of files is open and all are in use, wait until a call ends, which is soon: calls only
        read.
        """
        if len(self._stored) <= self._max_open:
            yield self._files[index]
            return
        with self._unused:
            self._unused.wait_for(lambda: index in self._files or self._has_room())
            if index not in self._files:
                self._open(index)
            file = self._files[index] = self._files.pop(index)  # Now the most recently used one.
            self._num_users[index] += 1
        try:
            yield file
        finally:
            with self._unused:
                self._num_users[index] -= 1
                self._unused.notify_all()

    def _has_room(self) -> bool:
        return len(self._files) < self._max_open or any(not self._num_users[index] for index in self._files)

    @property
    def unchecked(self) -> list[int]:
        """Remote files to check by their first bytes. Each check is a request that runs concurrently with reads."""
        return [i for i, file in enumerate(self._stored) if file.folder.cost.is_remote and file.digests is not None]

    def check(self, file: int) -> None:
        """Check that a remote file is the right one. Thread-safe.

        Raises:
            FormatError: it is missing, or has another length or content than expected.
            OSError: the request failed.
        """
        _check_content(self._stored[file], self._files[file])

    @property
    def alignment(self) -> int:
        """Alignment of offset, length and address of a read, in bytes."""
        with self._unused:
            return max((*(file.alignment for file in self._files.values()), *self._alignments.values()), default=1)

    def whole_chunks(self, nbytes: int) -> int:
        """Return about `nbytes`, as a multiple of the chunk size of files that are verified."""
        return max(self._chunk_nbytes, align_down(nbytes, self._chunk_nbytes))

    def pieces(self, file: int, offset: int, nbytes: int) -> Iterator[tuple[int, int, bool]]:
        """Yield the parts to divide a request into, as (offset, nbytes, True to read through the page cache)."""
        with self._using(file) as opened:
            whole = (offset, nbytes, opened.alignment == 1)
            pieces = list(opened.pieces(offset, nbytes)) if isinstance(opened, MixedFile) else [whole]
        yield from pieces

    def read(self, file: int, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`, up to the end of the file.

        Raises:
            FormatError: the file has become shorter; or its bytes are verified, and a digest differs.
            OSError: the read failed.
        """
        with self._using(file) as opened:
            opened.read(offset, view)

    @contextmanager
    def mapped(self, file: int, offset: int, nbytes: int) -> Iterator[memoryview | None]:
        """Provide a range of a file as mapped memory inside the block, without a copy; None if it must be read.

        This is for runs with gaps between them, of a plain checkpoint. Each rank of a node needs different bytes of the
        range, and the first rank reads them from the drive for all. The result is None if this rank is alone on its
        node: no other rank would use the page cache, so it is left unchanged. Also, on a file system with high latency,
        mapping would read in small requests.

        The kernel reads ahead in large folios. Mapping them costs a tenth of a copy. (posix_fadvise(WILLNEED) would
        fill the page cache with single pages.)

        The result is None if the range cannot be read when the block begins. Inside the block, accessing a page kills
        the process if the page was truncated, or was evicted from the cache and cannot be read again.
        """
        start = align_down(offset, mmap.PAGESIZE)
        address = None
        if self._is_mappable and self._stored[file].digests is None:
            with self._using(file) as opened, suppress(OSError):
                fd, length = opened.fileno(), min(offset + nbytes, opened.nbytes) - start
                address = map_file(fd, start, length, flags=mmap.MAP_SHARED) if fd is not None and length > 0 else None
        if address is None:
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
        """Return how many of these bytes are in the page cache; None where the system does not report it."""
        with self._using(file) as opened:
            fd = opened.fileno()
            return None if fd is None else resident_nbytes(fd, offset, nbytes)

    def fd(self, file: int) -> int:
        """Return the descriptor of a file, if its store has descriptors. It is valid until another file is used."""
        with self._using(file) as opened:
            return _fd(opened)

    def check_not_replaced(self, file: int) -> None:
        """Check that the path still leads to this file. Call this after other code has opened the path."""
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
        for file in self._files.values():
            file.close()

    def _is_cold(self, file: StoredFile, opened: ReadableFile) -> bool:
        """Return True if a file without direct reads is not in the page cache at all and should not be added to it."""
        fd = opened.fileno()
        if fd is None or opened.alignment > 1 or not (self._is_alone or file.digests):
            return False  # Ranks of a node share the bytes that they read of a plain checkpoint.
        return resident_nbytes(fd, 0, file.nbytes) == 0


def _check_content(file: StoredFile, opened: ReadableFile) -> None:
    # Read the header through the load's own descriptor: the file at a path may be replaced at any time.
    if file.digests is None:
        return
    view = Buffer().reserve(BLOCK)
    opened.read(0, view)
    check_head(view, file.digests.tensors_digest, file.digests.data_start, file.where)
    check_holes(opened.fileno(), partial(file.open_unverified, Access.BUFFERED), file.digests, file.where)


def _mixed(file: StoredFile, opened: ReadableFile) -> ReadableFile:
    """Open a file a second time if it is read directly and some of it is in the page cache."""
    fd = opened.fileno()
    if fd is None or opened.alignment == 1 or not resident_nbytes(fd, 0, file.nbytes):
        return opened
    other = file.open_unverified(Access.BUFFERED)
    try:
        if not os.path.sameopenfile(fd, _fd(other)):
            raise _replaced(file)
        return MixedFile(opened, other)
    except BaseException:
        other.close()
        raise


@contextmanager
def closed_on_error(opened: ReadableFiles) -> Iterator[ReadableFiles]:
    """Close the open files if the block raises."""
    try:
        yield opened
    except BaseException:
        opened.close()
        raise


def _fd(file: ReadableFile) -> int:
    fd = file.fileno()
    assert fd is not None
    return fd


def _replaced(file: StoredFile) -> FormatError:
    return FormatError("was replaced while it was opened", path=file.where, code="mismatch")


@contextmanager
def error_hints() -> Iterator[None]:
    """Add a hint to an error of the operating system, if one exists."""
    try:
        yield
    except Exception as error:
        better = _with_hint(error)
        if better is None:
            raise
        raise better from (None if isinstance(error, ModuleNotFoundError) else error)


def no_torch() -> ModuleNotFoundError:
    """Return the error of a load without torch."""
    return ModuleNotFoundError("torch is not installed, but loading needs it: pip install torch", name="torch")


def _with_hint(error: Exception) -> Exception | None:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return no_torch()
    if isinstance(error, MemoryError) and not str(error):
        return MemoryError(f"out of memory for objects other than tensors and buffers{_limit()}")
    if not isinstance(error, OSError) or isinstance(error, RequestError):  # RequestError already contains a hint.
        return None
    hint = _hint(error.errno)
    if hint is None or str(error.strerror).endswith(hint):
        return None
    return OSError(error.errno, f"{error.strerror}; {hint}", error.filename)


def _hint(code: int | None) -> str | None:
    match code:
        case errno.EMFILE:
            return advice_on_limit()
        case errno.ENFILE:
            return "the system has too many files open: see fs.file-max"
        case errno.EACCES | errno.EPERM:
            return f"check the permissions of file and folders (user {os.geteuid()})"
        case errno.EIO:
            return "the drive or file system failed: see dmesg, then restore the file and run relayout verify"
        case errno.ESTALE:
            return "the network file system has replaced the file: mount it again, or load again"
        case errno.ENOMEM:
            return "the system has no memory for the request: use fewer threads, or raise ulimit -l"
        case errno.EAGAIN:
            return ADVICE_ON_THREADS
    return "the network file system does not answer" if code in _NO_ANSWER else None


def _limit() -> str:
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return "" if limit == resource.RLIM_INFINITY else f": this process may have {limit} bytes (ulimit -v)"
