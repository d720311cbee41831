"""Thin file I/O: aligned memory, positioned reads and writes, direct where the file system takes it.

Direct I/O (O_DIRECT) moves bytes between the drive and our memory without the page cache; offset, length and address
must be multiples of `extents.BLOCK`. Where it is refused, at open or at the first transfer, the same calls go through
the page cache.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from relayout.core.extents import BLOCK, align_down, align_up
from relayout.errors import FormatError
from relayout.storage.libc import allocate, sync_range
from relayout.storage.local.open_folder import OpenFolder, restrict
from relayout.storage.protocols import Access

_O_DIRECT: int | None = getattr(os, "O_DIRECT", None)
_PAGE = max(BLOCK, mmap.PAGESIZE)
"""Bytes. What the page cache keeps together must not be written directly and through it."""
_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_NO_FILE = frozenset({errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENXIO})
"""Errors that tell of what lies there, not of the system."""
_NOWHERE = frozenset({errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR})
TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""Does not wait, should a FIFO have taken the place of a file that was looked at."""
_MAX_BEHIND = 4
"""Writes of one file that may be on their way from the page cache to the drive."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError that names no file name this one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def check_regular(path: Path) -> os.stat_result:
    """A file's status. What is none is refused before it is opened: opening a device may do something already.

    Raises:
        FormatError: it is none, or a path that leads nowhere.
        OSError: there is nothing, or it cannot be looked at.
    """
    try:
        status = path.stat()
    except OSError as error:
        if error.errno in _NOWHERE:
            raise FormatError(f"cannot be read: {error.strerror}", path=path, code="unsafe") from None
        raise
    if not stat.S_ISREG(status.st_mode):
        raise FormatError("not a regular file", path=path, code="unsafe")
    return status


def version_of(status: os.stat_result) -> str:
    """See `FileStat.version`."""
    return f"{status.st_size}-{status.st_mtime_ns}"


def read_small(path: Path, limit: int) -> bytes:
    """See `Store.read`."""
    with InputFile(path) as file:
        if file.nbytes > limit:
            raise FormatError(f"{file.nbytes} bytes, limit {limit}", path=path, code="limit")
        text = bytearray(file.nbytes)
        file.read(0, memoryview(text))
        return bytes(text)


class InputFile:
    """A file of known size, read at given offsets by any number of threads."""

    def __init__(
        self,
        path: Path,
        nbytes: int | None = None,
        *,
        access: Access = Access.BUFFERED,
        version: str | None = None,
        folder: OpenFolder | None = None,
    ) -> None:
        """Open `path`; arguments and errors as for `Store.open`. With `folder`, it is its owner's, directly in it."""
        self.path = path
        self._lock = threading.Lock()
        self._access = access
        direct = access is not Access.BUFFERED
        try:
            if folder is None:
                check_regular(path)
                self._fd, self._direct = _open(partial(os.open, path), TO_READ, direct)
            else:
                self._fd, self._direct = _open(partial(folder.open_own, path.name), TO_READ, direct)
        except OSError as error:
            if nbytes is None and error.errno in _NO_FILE:
                code = "missing" if error.errno == errno.ENOENT else "invalid"
                raise FormatError(f"cannot be read: {error.strerror}", path=path, code=code) from None
            if isinstance(error, FileNotFoundError):
                raise FormatError("is missing", path=path, code="missing") from None
            raise
        try:
            if access is Access.DIRECT and not self._direct:
                raise _refused(path)
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise FormatError("not a regular file", path=path, code="unsafe")
            if nbytes not in (None, status.st_size):
                raise FormatError(f"{status.st_size} bytes long, expected {nbytes}", path=path, code="mismatch")
            if version not in (None, version_of(status)):
                raise FormatError("has changed since it was looked at", path=path, code="mismatch")
        except BaseException:
            self.close()
            raise
        self.nbytes = status.st_size
        self.version = version_of(status)

    def fileno(self) -> int:
        """See `ReadableFile.fileno`."""
        return self._fd

    @property
    def alignment(self) -> int:
        """See `ReadableFile.alignment`."""
        return BLOCK if self._direct else 1

    def read(self, offset: int, view: memoryview) -> None:
        """See `ReadableFile.read`."""
        expected = min(view.nbytes, self.nbytes - offset)
        done = 0
        while done < expected:
            direct = self._direct
            try:
                count = _preadv(self._fd, view[done:], offset + done)
            except OSError as error:
                if direct and error.errno in _REFUSED:
                    self._go_buffered()
                    continue
                raise OSError(
                    error.errno, f"{os.strerror(error.errno or 0)} at byte {offset + done}", str(self.path)
                ) from None
            if count == 0:
                raise FormatError(
                    f"ends at byte {offset + done}, expected {self.nbytes} bytes", path=self.path, code="truncated"
                )
            if direct and done + count < expected:
                # A short read may end inside a block: go on from that block's start.
                count = align_down(count, BLOCK)
                if count == 0:
                    length = os.fstat(self._fd).st_size
                    if length < self.nbytes:
                        raise FormatError(
                            f"ends at byte {length}, expected {self.nbytes} bytes", path=self.path, code="truncated"
                        )
                    self._go_buffered()
            done += count
        if self._access is Access.ONCE and not self._direct:
            _forget(self._fd, offset, done)

    def _go_buffered(self) -> None:
        if self._access is Access.DIRECT:
            raise _refused(self.path)
        with self._lock:
            if self._direct and _O_DIRECT is not None:
                # The same descriptor, so that it stays the same file whatever has come to be at its path.
                fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~_O_DIRECT)
                self._direct = False

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class OutputFile:
    """A file of known size, written at given offsets by any number of threads.

    A write goes directly as far as it covers whole pages, and its edges through the page cache. As writes do not
    overlap, a page is either inside one write or made of edges only: never written both ways. Where nothing can be
    written directly, what was written goes to the drive soon, and leaves the page cache.
    """

    def __init__(
        self, folder: OpenFolder, name: str, nbytes: int, *, create: bool = True, direct: bool = True, mode: int = 0o666
    ) -> None:
        """Create a file, which must not exist, and allocate its space; or open one of the folder's owner again.

        Args:
            mode: its permissions, less the umask; one that exists loses those beyond.

        Raises:
            FormatError: it is to be opened again, and is no regular file of its own.
            OSError: it exists, or there is no space.
        """
        self.path = folder.path / name
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._behind: deque[tuple[int, int]] = deque()
        """(offset, nbytes) that are on their way from the page cache to the drive, oldest first."""
        if create:
            self._fd = folder.open(name, os.O_RDWR | os.O_CREAT, mode)
        else:
            self._fd = folder.open_own(name, os.O_RDWR)
        try:
            if create:
                allocate(self._fd, nbytes)
            else:
                restrict(self._fd, mode)
            self._direct_fd, self.direct = _open(partial(folder.open_own, name), os.O_WRONLY, direct)
        except OSError as error:
            os.close(self._fd)
            if create:
                folder.remove(name)  # Another thread would find it half made.
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def write(self, offset: int, view: memoryview, address: int = 0) -> None:
        """See `WritableFile.write`."""
        end = offset + view.nbytes
        low, high = align_up(offset, _PAGE), align_down(end, _PAGE)
        if not self.direct or low >= high or (address - offset) % BLOCK:
            self._write(self._fd, offset, view)
            if not self.direct:
                self._write_behind(offset, view.nbytes)
            return
        self._write(self._fd, offset, view[: low - offset])
        try:
            self._write(self._direct_fd, low, view[low - offset : high - offset])
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self.direct = False
            self._write(self._fd, low, view[low - offset : high - offset])
        self._write(self._fd, high, view[high - offset :])

    def _write_behind(self, offset: int, nbytes: int) -> None:
        with naming(self.path):
            sync_range(self._fd, offset, nbytes, wait=False)
        with self._lock:
            self._behind.append((offset, nbytes))
            oldest = [self._behind.popleft() for _ in range(len(self._behind) - _MAX_BEHIND)]
        for extent in oldest:
            with naming(self.path):
                sync_range(self._fd, *extent, wait=True)
            _forget(self._fd, *extent)

    def _write(self, fd: int, offset: int, view: memoryview) -> None:
        done = 0
        while done < view.nbytes:
            try:
                done += os.pwrite(fd, view[done:], offset + done)
            except OSError as error:
                raise OSError(
                    error.errno, f"{os.strerror(error.errno or 0)} at byte {offset + done}", str(self.path)
                ) from None

    def close(self) -> None:
        """See `File.close`. The kernel tells an error once, to a descriptor that was open then."""
        fds = [fd for fd in (self._fd, self._direct_fd) if fd >= 0]
        self._fd = self._direct_fd = -1
        try:
            with naming(self.path):
                for fd in fds[:1]:
                    os.fsync(fd)
                    for extent in self._behind:
                        _forget(fd, *extent)
        finally:
            for fd in fds:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _refused(path: Path) -> OSError:
    return OSError(errno.EOPNOTSUPP, "the file system refuses direct I/O; use backend 'buffered'", str(path))


def sync_and_forget(folder: OpenFolder, name: str) -> None:
    """Let the next read of a file show what is on the drive.

    Raises:
        FormatError: it is no regular file of the folder's owner.
        OSError: what is in the page cache could not be written.
    """
    fd = folder.open_own(name, os.O_RDONLY)
    try:
        with naming(folder.path / name):
            os.fsync(fd)
        _forget(fd, 0, 0)
    finally:
        os.close(fd)


def _open(opener: Callable[[int], int], flags: int, direct: bool) -> tuple[int, bool]:
    if direct and _O_DIRECT is not None:
        try:
            return opener(flags | _O_DIRECT), True
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
    return opener(flags), False


def _preadv_by_copy(fd: int, view: memoryview, offset: int) -> int:
    chunk = os.pread(fd, view.nbytes, offset)
    view[: len(chunk)] = chunk
    return len(chunk)


def _preadv_in_place(fd: int, view: memoryview, offset: int) -> int:
    return os.preadv(fd, [view], offset)


# macOS has no preadv in Python.
_preadv = _preadv_in_place if hasattr(os, "preadv") else _preadv_by_copy


def _forget(fd: int, offset: int, nbytes: int) -> None:
    """Take bytes that nobody will want again soon out of the page cache, which would push out others for them."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
