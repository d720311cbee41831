"""The store of a local folder or file: positioned reads and writes, with direct I/O where the file system supports it.

Direct I/O (O_DIRECT) bypasses the page cache; offset, length and address must be multiples of `extents.BLOCK`. If the
file system refuses it, at open or at the first transfer, the same calls go through the page cache.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

from relayout.core.extents import BLOCK, Extent, align_down, align_up
from relayout.errors import FormatCode, FormatError, RelayoutError, shown
from relayout.storage.local.descriptors import (
    OpenFolder,
    restrict,
    with_path,
)
from relayout.storage.stores import (
    LOCAL_COST,
    Access,
    Closable,
    Enter,
    Entry,
    FileStat,
    Kind,
    RequestCost,
    Store,
    everywhere,
    limited,
    read_whole,
)
from relayout.storage.system import Buffer, allocate, clone_range, filesystem_of, sync_range


@dataclass(frozen=True, slots=True)
class LocalStore:
    folder: Path
    """The path as given. For a store of a single file, the path of that file."""
    named: str | None = None
    """A file in the folder that the user named explicitly; it may be a link to any file."""

    @property
    def cost(self) -> RequestCost:
        return _cost_at(self.folder)

    def __str__(self) -> str:
        return str(self.folder)

    def location(self, name: str) -> str:
        return str(self.folder / name)

    def path(self, name: str) -> Path:
        return self.folder / name

    def kind(self) -> Kind:
        if self.folder.is_dir():
            return Kind.FOLDER
        if self.folder.is_file():
            return Kind.FILE
        return Kind.OTHER if os.path.lexists(self.folder) else Kind.NOTHING

    def parent(self) -> tuple[Store, str]:
        return LocalStore(self.folder.parent, self.folder.name), self.folder.name

    def snapshot(self) -> LocalStore:
        return self

    def walk(self, enter: Enter = everywhere) -> Iterator[Entry]:
        closed: list[Entry] = []

        def note(name: str, error: OSError) -> None:
            closed.append(Entry(name, f"a folder that cannot be listed: {error.strerror}"))

        for name, entry in entries(self.folder, enter=enter, on_closed=note):
            yield self._entry(name, entry)
        yield from closed

    def _entry(self, name: str, entry: os.DirEntry[str]) -> Entry:
        """Return an entry of a listing. Only links cost system calls: the listing has the type of all else."""
        if not _is_utf8(entry.name):
            return Entry(name, "its name is not UTF-8")
        if entry.is_dir(follow_symlinks=False):
            return Entry(name, is_folder=True)
        if not entry.is_symlink():
            return Entry(name, None if entry.is_file(follow_symlinks=False) else "not a regular file")
        if not is_inside(self.folder, self.folder / name):
            return Entry(name, "a link that leads out of the checkpoint")
        try:
            is_file = (self.folder / name).is_file()  # Also False for a cycle of links.
        except OSError as error:
            return Entry(name, f"a link that cannot be followed: {error.strerror}")
        return Entry(name, None if is_file else "a link to a folder, or a broken link")

    def stat(self, name: str) -> FileStat | None:
        path = self._resolve(name)
        try:
            status = check_regular(path)
        except FileNotFoundError:
            if path.is_symlink():
                raise FormatError("cannot be read: broken symbolic link", path=path, code="missing") from None
            return None
        return stat_of(status)

    def read(self, name: str, limit: int) -> bytes:
        return read_small(self._resolve(name), limit)

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> InputFile:
        return InputFile(self._resolve(name), nbytes, access=access, version=version)

    def _resolve(self, name: str) -> Path:
        return self.folder / name if name == self.named else resolve_inside(self.folder, name)


def offer(path: str) -> LocalStore:
    """Return the store of a path, which need not exist."""
    return LocalStore(Path(path))


_COSTS = {"fuse.seaweedfs": replace(LOCAL_COST, concurrency=1)}
"""Costs that differ from those of a drive, by the kind of file system in mount(8).

`weed mount` (SeaweedFS 4.48) drops a chunk once its last byte was read, and fetches it again for its other bytes
(weed/filer/reader_cache.go, `readChunkAt`): requests must arrive in the order of the file. docs/guides/NFS.md has the
measured bytes.
"""


def _cost_at(folder: Path) -> RequestCost:
    """Return the cost of requests to the file system that a folder is on; that of a drive if it cannot be found out."""
    try:
        device = folder.stat().st_dev
    except (OSError, ValueError):
        return LOCAL_COST
    return LOCAL_COST if os.major(device) else _cost_on(device, folder)


@lru_cache(maxsize=64)
def _cost_on(device: int, folder: Path) -> RequestCost:
    """Return the cost for a folder on a device without a drive, such as a FUSE file system.

    A number of such a device is given again after it was unmounted. An old answer would cost time and change nothing
    else.
    """
    return _COSTS.get(filesystem_of(folder).kind, LOCAL_COST)


_MAX_DEPTH = 64
"""Maximum depth of folders below a listed folder."""
_CLOSED = frozenset(
    {errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE, errno.ENAMETOOLONG}
)
"""Error numbers of a folder that this process may not list, or that has vanished."""


def entries(
    folder: Path,
    *,
    hidden: bool = False,
    enter: Enter = everywhere,
    on_closed: Callable[[str, OSError], None] | None = None,
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield every entry below a folder, with its relative name.

    Args:
        hidden: include names that begin with a dot.
        enter: returns True for the subfolders to list.
        on_closed: called with the name of a subfolder that cannot be listed or has vanished, and the error. None: raise
            the error.

    Raises:
        FormatError: there are more entries, or deeper ones, than the limits allow.
        OSError: a folder cannot be listed.
    """
    return limited(_entries(folder, hidden, enter, on_closed), folder)


def _entries(
    folder: Path, hidden: bool, enter: Enter, on_closed: Callable[[str, OSError], None] | None
) -> Iterator[tuple[str, os.DirEntry[str]]]:
    pending = [""]
    while pending:
        prefix = pending.pop()
        if prefix.count("/") > _MAX_DEPTH:
            what = f"holds folders nested too deep: more than {_MAX_DEPTH}, such as {shown(prefix)}"
            raise FormatError(what, path=folder, code="limit")
        try:
            with os.scandir(folder / prefix) as listed:
                for entry in listed:
                    if not hidden and entry.name.startswith("."):
                        continue
                    name = prefix + entry.name
                    yield name, entry
                    if entry.is_dir(follow_symlinks=False) and _is_utf8(entry.name) and enter(name):
                        pending.append(f"{name}/")
        except OSError as error:
            if on_closed is None or not prefix or error.errno not in _CLOSED:
                raise
            on_closed(prefix[:-1], error)


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


FOLLOW_LINKS = "RELAYOUT_FOLLOW_LINKS"
"""Environment variable: "1" permits links to any file, for folders that a person assembled from links."""

_REPOSITORY = re.compile(r"(models|datasets|spaces)--")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHARED_BLOB = re.compile(r"([0-9a-f]{2})/\1[0-9a-f]{62}")


def resolve_inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a checkpoint folder. The file need not exist.

    FormatError: a link in the path leads out of the checkpoint.
    """
    path = folder / name
    if not is_inside(folder, path):
        raise FormatError(
            f"a symbolic link that leads out of the checkpoint, to {os.path.realpath(path)}:"
            f" replace it by the file, or set {FOLLOW_LINKS}=1 if you trust it",
            path=path,
            code="unsafe",
        )
    return path


def is_inside(folder: Path, path: Path) -> bool:
    """Return True if a path, with symbolic links resolved, is inside a checkpoint folder.

    The files of a snapshot in a Hugging Face cache are links to blobs of its repository (huggingface_hub 2.4,
    `file_download.py`: `models--ORG--NAME/snapshots/REVISION/FILE -> ../../blobs/HASH`). Those may be links to blobs
    that all repositories of the cache share (`utils/_shared_blobs.py`: `blobs/HA/HASH`). Both count as inside.

    A `blobs` folder may itself be a link, to another drive. An archive could contain such a link to any folder of the
    user who unpacks it, so the link's target must have the form of blobs: `models--ORG--NAME/blobs/HASH`.
    """
    home = Path(os.path.realpath(folder))
    real = Path(os.path.realpath(path))
    if real.is_relative_to(home):
        return True
    if os.environ.get(FOLLOW_LINKS) == "1":
        return True
    repository = next((parent.parent for parent in home.parents if parent.name == "snapshots"), None)
    if repository is None or not _REPOSITORY.match(repository.name):
        return False
    if real.parent == repository / "blobs":  # `repository` has no links: this `blobs` is a folder in it.
        return True
    own, shared = (Path(os.path.realpath(above / "blobs")) for above in (repository, repository.parent))
    if real.parent == own:
        is_of_hub = own.name == "blobs" and _REPOSITORY.match(own.parent.name) is not None
        return is_of_hub and _BLOB.fullmatch(real.name) is not None
    return (
        shared.name == "blobs"
        and real.is_relative_to(shared)
        and _SHARED_BLOB.fullmatch(real.relative_to(shared).as_posix()) is not None
    )


def blob_hash(folder: Path, name: str) -> str | None:
    """Return the hash by which a Hugging Face cache names the content of a snapshot's file.

    The hash is the name of the blob to which the file links: the SHA-256 of a file in LFS or Xet (64 hex digits), or
    the git blob id of any other file (40; huggingface_hub 2.4, `file_download.py`). The caller must verify that the
    bytes have this hash. Even then, the link may not be the downloaded one.

    Returns:
        None: the file is not a link to a blob of its own repository.
    """
    path = Path(os.path.realpath(folder)) / name
    repository = next((above.parent for above in path.parents if above.name == "snapshots"), None)
    if repository is None or not _REPOSITORY.match(repository.name):
        return None
    try:
        target = Path(os.path.normpath(Path(os.path.realpath(path.parent)) / path.readlink()))
    except OSError:
        return None
    is_blob = target.parent == repository / "blobs" and _BLOB.fullmatch(target.name) is not None
    return target.name if is_blob else None


_O_DIRECT: int | None = getattr(os, "O_DIRECT", None)
_PAGE = max(BLOCK, mmap.PAGESIZE)
"""Bytes of the unit of direct I/O. One page of the page cache must not be written both directly and through the
cache."""
_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_NO_FILE = frozenset({errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENXIO})
"""Error numbers caused by the file or its path, not by the system."""
_BAD_PATH = frozenset({errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR})
TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""O_NONBLOCK: do not wait if a FIFO has replaced the file since it was checked."""
_MAX_PENDING = 4
"""Maximum number of writes of one file that may be in write-back from the page cache to the drive."""


def check_regular(path: Path) -> os.stat_result:
    """Return the status of a regular file, before it is opened, because opening a device may have side effects."""
    try:
        status = path.stat()
    except OSError as error:
        if error.errno in _BAD_PATH:
            raise FormatError(f"cannot be read: {error.strerror}", path=path, code="unsafe") from None
        raise
    if not stat.S_ISREG(status.st_mode):
        raise FormatError("not a regular file", path=path, code="unsafe")
    return status


def stat_of(status: os.stat_result) -> FileStat:
    """Return the metadata of a file by its status."""
    return FileStat(status.st_size, f"{status.st_size}-{status.st_mtime_ns}", status.st_mode & 0o777)


def read_small(path: Path, limit: int) -> bytes:
    with InputFile(path) as file:
        return read_whole(file, path, limit)


class InputFile(Closable):
    def __init__(
        self,
        path: Path,
        nbytes: int | None = None,
        *,
        access: Access = Access.BUFFERED,
        version: str | None = None,
    ) -> None:
        """Open `path`; arguments as for `Store.open`."""
        self.path = path
        self._lock = threading.Lock()
        self._access = access
        direct = access is not Access.BUFFERED
        try:
            check_regular(path)
            self._fd, self._direct = _open(partial(os.open, path), TO_READ, direct)
        except OSError as error:
            if nbytes is None and error.errno in _NO_FILE:
                code: FormatCode = "missing" if error.errno == errno.ENOENT else "invalid"
                raise FormatError(f"cannot be read: {error.strerror}", path=path, code=code) from None
            if isinstance(error, FileNotFoundError):
                raise FormatError("is missing", path=path, code="missing") from None
            raise
        try:
            if access is Access.DIRECT and not self._direct:
                raise _no_direct_io(path)
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise FormatError("not a regular file", path=path, code="unsafe")
            file = stat_of(status)
            file.check(path, nbytes, version)
        except BaseException:
            self.close()
            raise
        self.nbytes = file.nbytes
        self.version = file.version

    def fileno(self) -> int:
        return self._fd

    @property
    def alignment(self) -> int:
        return BLOCK if self._direct else 1

    def read(self, offset: int, view: memoryview) -> None:
        expected = min(view.nbytes, self.nbytes - offset)
        done = 0
        while done < expected:
            direct = self._direct
            try:
                count = _preadv(self._fd, view[done:], offset + done)
            except OSError as error:
                if direct and error.errno in _REFUSED:
                    self._disable_direct()
                    continue
                raise _at_byte(error, offset + done, self.path) from None
            if count == 0:
                raise self._truncated(offset + done)
            if direct and done + count < expected:
                # A short read may end inside a block: continue at the start of that block.
                count = align_down(count, BLOCK)
                if count == 0:
                    length = os.fstat(self._fd).st_size
                    if length < self.nbytes:
                        raise self._truncated(length)
                    self._disable_direct()
            done += count
        if self._access is Access.ONCE and not self._direct:
            _drop_pages(self._fd, offset, done)

    def _truncated(self, end: int) -> FormatError:
        return FormatError(f"ends at byte {end}, expected {self.nbytes} bytes", path=self.path, code="truncated")

    def _disable_direct(self) -> None:
        if self._access is Access.DIRECT:
            raise _no_direct_io(self.path)
        with self._lock:
            if self._direct and _O_DIRECT is not None:
                # Change the descriptor instead of reopening the path, which may lead to another file by now.
                fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~_O_DIRECT)
                self._direct = False

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class OutputFile(Closable):
    """A file of an output on a local drive, see `stores.WritableFile`.

    Whole pages of a write use direct I/O, and its edges use the page cache. Writes do not overlap, so a page is either
    inside one write or consists of edges: it is never written both ways. Without direct I/O, written pages are sent to
    the drive soon and dropped from the page cache.
    """

    def __init__(self, folder: OpenFolder, name: str, nbytes: int, *, create: bool = True, mode: int = 0o666) -> None:
        """Create a file and allocate its space; or, without `create`, open an existing file of the folder's owner.

        Args:
            mode: permissions before the umask. Other permissions are removed from an existing file.
        """
        self.path = folder.path / name
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._pending: deque[tuple[int, int]] = deque()
        """(offset, nbytes) in write-back from the page cache to the drive, oldest first."""
        if create:
            self._fd = folder.open(name, os.O_RDWR | os.O_CREAT, mode)
        else:
            self._fd = folder.open_own(name, os.O_RDWR)
        try:
            if create:
                allocate(self._fd, nbytes)
            else:
                restrict(self._fd, mode)
            self._direct_fd, self.direct = _open(partial(folder.open_own, name), os.O_WRONLY, True)
        except BaseException as error:
            os.close(self._fd)
            if create:
                with suppress(OSError):  # Otherwise another thread could open an incomplete file.
                    folder.remove(name)
            if not isinstance(error, OSError):
                raise
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def write(self, offset: int, view: memoryview, address: int = 0) -> None:
        end = offset + view.nbytes
        low, high = align_up(offset, _PAGE), align_down(end, _PAGE)
        if not self.direct or low >= high or (address - offset) % BLOCK:
            self._write(self._fd, offset, view)
            if not self.direct:
                self._write_back(offset, view.nbytes)
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

    def clone(self, source: int, source_offset: int, offset: int, view: memoryview) -> bool:
        if not clone_range(source, source_offset, self._fd, offset, view.nbytes):
            return False
        done = 0
        while done < view.nbytes:
            with with_path(self.path):
                count = os.preadv(self._fd, [view[done:]], offset + done)
            if not count:
                return False
            done += count
        _drop_pages(self._fd, offset, view.nbytes)
        return True

    def _write_back(self, offset: int, nbytes: int) -> None:
        with with_path(self.path):
            sync_range(self._fd, offset, nbytes, wait=False)
        with self._lock:
            self._pending.append((offset, nbytes))
            oldest = [self._pending.popleft() for _ in range(len(self._pending) - _MAX_PENDING)]
        for extent in oldest:
            with with_path(self.path):
                sync_range(self._fd, *extent, wait=True)
            _drop_pages(self._fd, *extent)

    def _write(self, fd: int, offset: int, view: memoryview) -> None:
        done = 0
        while done < view.nbytes:
            try:
                done += os.pwrite(fd, view[done:], offset + done)
            except OSError as error:
                raise _at_byte(error, offset + done, self.path) from None

    def close(self) -> None:
        """Close the file. The kernel reports a write-back error once, to descriptors open at that time."""
        fds = [fd for fd in (self._fd, self._direct_fd) if fd >= 0]
        self._fd = self._direct_fd = -1
        try:
            with with_path(self.path):
                for fd in fds[:1]:
                    os.fsync(fd)
                    for extent in self._pending:
                        _drop_pages(fd, *extent)
        finally:
            for fd in fds:
                os.close(fd)


def _at_byte(error: OSError, offset: int, path: Path) -> OSError:
    return OSError(error.errno, f"{os.strerror(error.errno or 0)} at byte {offset}", str(path))


def _no_direct_io(path: Path) -> OSError:
    return OSError(errno.EOPNOTSUPP, "the file system refuses direct I/O; use backend 'buffered'", str(path))


def _open(opener: Callable[[int], int], flags: int, direct: bool) -> tuple[int, bool]:
    if direct and _O_DIRECT is not None:
        try:
            return opener(flags | _O_DIRECT), True
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
    return opener(flags), False


def _preadv_by_copy(fd: int, view: memoryview, offset: int) -> int:
    piece = os.pread(fd, view.nbytes, offset)
    view[: len(piece)] = piece
    return len(piece)


def _preadv_in_place(fd: int, view: memoryview, offset: int) -> int:
    return os.preadv(fd, [view], offset)


# macOS has no preadv in Python.
_preadv = _preadv_in_place if hasattr(os, "preadv") else _preadv_by_copy


def _drop_pages(fd: int, offset: int, nbytes: int) -> None:
    """Drop these pages from the page cache (POSIX_FADV_DONTNEED)."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def holes(fd: int, extent: Extent) -> Iterator[Extent]:
    """Yield the holes in an extent of a file, as far as the file system reports them.

    ext4 and XFS also report space that was reserved and never written (lseek(2), SEEK_HOLE). Moves the descriptor's
    offset.
    """
    if not hasattr(os, "SEEK_HOLE"):
        return
    position = extent.offset
    try:
        while position < extent.end:
            hole = os.lseek(fd, position, os.SEEK_HOLE)
            if hole >= extent.end:
                return
            try:
                position = min(os.lseek(fd, hole, os.SEEK_DATA), extent.end)
            except OSError:  # ENXIO: no data behind it.
                position = extent.end
            yield Extent(hole, position - hole)
    except OSError:  # Not supported by the file system.
        return


def refuses_direct(path: Path) -> str | None:
    """Return why direct I/O fails on a file, tested by reading its first block; None if it works."""
    try:
        with InputFile(path, path.stat().st_size, access=Access.DIRECT) as file:
            file.read(0, Buffer().reserve(BLOCK))
    except OSError as error:
        return error.strerror or str(error)
    except RelayoutError as error:
        return str(error)
    return None
