"""Folders and locks held by descriptor, so that changes of their paths by other users have no effect.

Other users may rename and link files next to an output, for example in /tmp. Files there are therefore opened, created,
renamed and deleted relative to a descriptor, and symbolic links are not followed. A lock (flock) belongs to a
descriptor, and ends with it. The lock's file names the holder, for messages. Waiting for a lock has a time limit. The
lock of an output admits one writing process at a time, and its file belongs to the user of that process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from logging import getLogger
from pathlib import Path

from relayout.core.workers import remake_in_child
from relayout.errors import FormatError, PlanError, RelayoutError, shown
from relayout.storage.stores import Closable
from relayout.storage.system import exchange_names

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_PARTIAL = re.compile(r"\.relayout-[0-9a-f]{16}\.partial")
_O_TMPFILE: int | None = getattr(os, "O_TMPFILE", None)


@contextmanager
def with_path(path: Path, target: Path | None = None) -> Iterator[None]:
    """Set the path in an OSError: `path` alone, or for a rename `path` and `target`."""
    try:
        yield
    except OSError as error:
        if error.errno is None or isinstance(error, RelayoutError):
            raise
        # Raise the same error: a new one, raised in a generator, would be kept alive by its own frames (Python 3.13),
        # and with it all objects of the callers, such as the lease of a cache's entry.
        error.filename = str(path)
        if target is not None:
            error.filename2 = str(target)
        elif error.filename2 is not None:
            del error.filename2  # None would be shown as a name.
        raise


class OpenFolder(Closable):
    """A folder that is held open. Names are relative to it and may include subfolders. Thread-safe."""

    def __init__(self, path: Path, fd: int | None = None) -> None:
        """Open a folder, following links in its path; or take over its descriptor `fd`."""
        self.path = path
        """Path of the folder when it was opened; for messages only."""
        self.fd = os.open(path, _FOLDER & ~os.O_NOFOLLOW) if fd is None else fd

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        """Open a file and return its descriptor. Links are not followed.

        With O_CREAT, the file must be new, and missing subfolders are created.
        """
        above, _, base = name.rpartition("/")
        create = flags & os.O_CREAT
        with self._below(above, create=bool(create)) as folder, with_path(self.path / name):
            return os.open(base, flags | _FILE | (os.O_EXCL if create else 0), mode, dir_fd=folder)

    def open_own(self, name: str, flags: int) -> int:
        """Open an existing regular file of this folder's owner with a single name (hard link)."""
        status = self.status(name)
        if status is not None:
            self._check_own(name, status)
        fd = self.open(name, flags & ~os.O_CREAT)
        try:
            self._check_own(name, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def write(self, name: str, content: bytes, mode: int = 0o666, *, replace: bool = True) -> None:
        """Write a small file whole: sync it under a random name, then rename it to `name`.

        Files with random names that killed processes left in the folder are deleted.

        Args:
            replace: True if a regular file of this name may be replaced. Links and devices are never replaced.
        """
        created = list[str]()
        self.remove_partials()
        with with_path(self.path / name):
            if replace and (status := self.status(name)) is not None and not stat.S_ISREG(status.st_mode):
                raise FileExistsError(errno.EEXIST, "exists and is not a regular file")
            try:
                if not replace:
                    os.close(self.open(name, os.O_WRONLY | os.O_CREAT, mode))  # Exclusively: this reserves the name.
                    created.append(name)
                partial, fd = self._new_partial(mode)
                created.append(partial)
                with open(fd, "wb") as stream:
                    stream.write(content)
                    stream.flush()
                    os.fsync(stream.fileno())
                    os.rename(partial, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)  # While it is locked.
                os.fsync(self.fd)
            except BaseException:
                for ours in created:
                    with suppress(OSError):
                        os.unlink(ours, dir_fd=self.fd)
                raise

    def _new_partial(self, mode: int) -> tuple[str, int]:
        """Create and lock a file with a random name; return its name and descriptor. Locked files are kept."""
        for _ in range(_TRIES):
            name = f".relayout-{os.urandom(8).hex()}.partial"
            fd = self.open(name, os.O_WRONLY | os.O_CREAT, mode)
            try:
                try:
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    is_taken = self.status(name) is None
                except BlockingIOError:  # Another process takes it for left over, and deletes it.
                    is_taken = True
                except OSError:  # Without locks, `remove_partials` deletes nothing.
                    is_taken = False
            except BaseException:
                os.close(fd)
                raise
            if not is_taken:
                return name, fd
            os.close(fd)
        raise PlanError("its new files are deleted again and again", path=self.path, code="busy")

    def remove_partials(self) -> None:
        """Delete the files with random names that killed processes left; see `write`.

        A file is deleted only if it belongs to this user, has no other hard links, has a name of the form that `write`
        uses (16 random hexadecimal digits), and is not locked. Its writer holds the lock from the creation to the
        rename.
        """
        for name in self.names():
            if _PARTIAL.fullmatch(name):
                with suppress(OSError, PlanError):
                    lock = take_lock(self.path / name, folder=self, create=False)
                    with lock or nullcontext():
                        if lock is not None and os.fstat(lock.fd).st_nlink == 1:
                            os.unlink(name, dir_fd=self.fd)

    def _check_own(self, name: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != self.owner:
            what = "not a regular file of this folder's owner, or has several hard links"
            raise FormatError(what, path=self.path / name, code="unsafe")

    @property
    def owner(self) -> int:
        """User id of the folder's owner."""
        return os.fstat(self.fd).st_uid

    def names(self) -> list[str]:
        """Return the names of all entries, sorted."""
        with os.scandir(self.fd) as entries:
            return sorted(entry.name for entry in entries)

    def status(self, name: str) -> os.stat_result | None:
        """Return the status of an entry, without following a link; None if it does not exist."""
        with with_path(self.path / name):
            try:
                return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            except FileNotFoundError:
                return None

    def subfolder(self, name: str) -> OpenFolder:
        """Open a subfolder. NotADirectoryError: the name is not a folder, or is a link."""
        with with_path(self.path / name):
            return OpenFolder(self.path / name, os.open(name, _FOLDER, dir_fd=self.fd))

    def make(self, name: str, mode: int) -> None:
        """Create a subfolder; `mode` is before the umask."""
        with with_path(self.path / name):
            os.mkdir(name, mode, dir_fd=self.fd)

    def remove(self, name: str, only: Collection[str] | None = None) -> None:
        """Delete an entry, if it exists. A folder is deleted recursively, even if it is read-only.

        Args:
            only: the files below the folder that may be deleted. Folders without other files are deleted with them.
        """
        status = self.status(name)
        if status is None:
            return
        with suppress(FileNotFoundError):  # Another process may be deleting it, too.
            if not stat.S_ISDIR(status.st_mode):
                with with_path(self.path / name):
                    os.unlink(name, dir_fd=self.fd)
                return
            with self._writable(name) as folder:
                for inside in folder.names():
                    below = only and [path.removeprefix(f"{inside}/") for path in only if path.startswith(f"{inside}/")]
                    if only is None or below or inside in only:
                        folder.remove(inside, below)
            with with_path(self.path / name):
                os.rmdir(name, dir_fd=self.fd)

    @contextmanager
    def _writable(self, name: str) -> Iterator[OpenFolder]:
        """Open a subfolder to be emptied, and make it writable: users write-protect finished models."""
        try:
            folder = self.subfolder(name)
        except PermissionError:
            self._make_readable(name)
            folder = self.subfolder(name)
        with folder:
            with suppress(PermissionError):
                os.fchmod(folder.fd, 0o700)
            yield folder

    def _make_readable(self, name: str) -> None:
        """Grant a subfolder's owner all permissions, by descriptor, because chmod(2) follows links."""
        if not hasattr(os, "O_PATH"):
            return
        with with_path(self.path / name):
            fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
            try:
                Path(f"/proc/self/fd/{fd}").chmod(0o700)
            finally:
                os.close(fd)

    def sync(self) -> None:
        """Write the entries of this folder and its subfolders to the drive."""
        for above, _, _, fd in os.fwalk(".", dir_fd=self.fd):
            with with_path(self.path / above):
                os.fsync(fd)

    def close(self) -> None:
        """Close the descriptor."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    @contextmanager
    def _below(self, names: str, *, create: bool) -> Iterator[int]:
        """Yield a descriptor of a subfolder, without following links in its path; "" is this folder."""
        fd = os.dup(self.fd)
        try:
            for part in names.split("/") if names else ():
                with with_path(self.path / names):
                    if create:
                        with suppress(FileExistsError):
                            os.mkdir(part, dir_fd=fd)
                    inner = os.open(part, _FOLDER, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)


def write_file(path: Path, content: bytes, *, replace: bool = True) -> None:
    """Write a small file whole; see `OpenFolder.write`. Errors name `path`, never a temporary file."""
    with with_path(path), OpenFolder(path.parent) as folder:
        folder.write(path.name, content, replace=replace)


def rename(source: OpenFolder, name: str, target: OpenFolder, new_name: str) -> None:
    """Rename a file or folder from one open folder into another by rename(2)."""
    with with_path(source.path / name, target.path / new_name):
        os.rename(name, new_name, src_dir_fd=source.fd, dst_dir_fd=target.fd)


def exchange(source: OpenFolder, name: str, target: OpenFolder, other: str) -> bool:
    """Exchange two names atomically. Return False if the kernel or file system does not support it."""
    with with_path(source.path / name, target.path / other):
        return exchange_names(source.fd, name, target.fd, other)


def restrict(fd: int, mode: int) -> None:
    """Remove the permissions of an open file or folder that are not in `mode`."""
    before = stat.S_IMODE(os.fstat(fd).st_mode)
    if before & mode != before:
        with suppress(PermissionError):
            os.fchmod(fd, before & mode)


_NOTE = re.compile(rb"(process [0-9]+, .{1,200} since [0-9]{2}:[0-9]{2}:[0-9]{2})?|\0+", re.DOTALL)
"""The possible contents of a lock file: a note about its holder, nothing, or zeros after a power failure."""
_MAX_NOTE_NBYTES = 256
_MAX_WHAT_LENGTH = 50
"""Maximum characters in the note about the holder's work: at most 200 bytes."""
_TRIES = 100
"""Maximum attempts to lock a file that other processes delete repeatedly."""
_WITHOUT_LOCKS = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})
_POLL_SECONDS = 0.05
_LOOK_SECONDS = 1.0
"""Seconds between two checks for progress during a wait."""
_QUIET_SECONDS = 3.0
LIMIT_SECONDS = 10.0
"""Seconds without progress after which a wait fails."""


class FileLock(Closable):
    """An open file that may be locked. The lock ends with `close`, with this object, or with this process.

    A forked child closes its copy of the descriptor at once, because the copy would keep the lock. A process that
    receives the descriptor on purpose shares the lock until `close` is called here.
    """

    fd: int = -1
    """The descriptor; -1 if closed. While open, it is an attribute of the object."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._has_note = False
        remake_in_child(self)

    def try_lock(self, kind: int = fcntl.LOCK_EX) -> bool:
        """Lock the file, unless another process or thread excludes this one. Return True if it is locked."""
        try:
            fcntl.flock(self.fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def write_holder(self, what: str) -> None:
        """Write a note about the holder to the file, if `what` is not empty and the file is a plain lock file."""
        with suppress(OSError):  # The note is only informative; the drive may be full.
            if what and self.is_lock_file:
                self._has_note = True
                note = f"process {os.getpid()}, {what[:_MAX_WHAT_LENGTH]} since {time.strftime('%H:%M:%S')}"
                os.ftruncate(self.fd, 0)
                os.pwrite(self.fd, note.encode(errors="replace"), 0)

    @property
    def is_lock_file(self) -> bool:
        """True if the file has no other name, and no content but a note: writing to it destroys nothing."""
        if os.fstat(self.fd).st_nlink > 1:  # 0: its holder has just removed it.
            return False
        return _NOTE.fullmatch(os.pread(self.fd, _MAX_NOTE_NBYTES + 1, 0)) is not None

    def after_fork(self) -> None:
        """Close the copy of the descriptor, without unlocking."""
        if (fd := self._take()) >= 0:
            os.close(fd)

    def close(self) -> None:
        """Unlock, for all copies of the descriptor, and close. Thread-safe."""
        if (fd := self._take()) >= 0:
            try:
                with suppress(OSError):
                    if self._has_note:
                        os.ftruncate(fd, 0)
                with suppress(OSError):
                    fcntl.flock(fd, fcntl.LOCK_UN)
            finally:
                os.close(fd)

    def _take(self) -> int:
        """Return the descriptor to one caller only, as `pop` is atomic; -1 if another caller took it."""
        descriptor: int = vars(self).pop("fd", -1)
        return descriptor

    def __del__(self) -> None:
        self.close()


def holder_in(*paths: Path) -> str:
    """Return the notes of the holders of some lock files, for messages only."""
    notes = [note for path in paths if (note := _note_in(path))]
    more = f" and {len(notes) - 1} more" if len(notes) > 1 else ""
    return f"{notes[0]}{more}" if notes else "another process"


def _note_in(path: Path) -> str:
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return shown(os.pread(fd, _MAX_NOTE_NBYTES, 0).decode("ascii", "replace").strip())[1:-1]
        finally:
            os.close(fd)
    return ""


class LockWait:
    """A wait for another process. It logs that process after some seconds, and fails after a time without progress."""

    def __init__(
        self,
        path: Path,
        who: Callable[[], str] | None = None,
        growth: Callable[[], object] = lambda: None,
        limit_seconds: float | None = None,
    ) -> None:
        """Begin to wait.

        Args:
            path: the awaited path, for messages. By default it is also the lock file with the note about its holder.
            who: returns the name of the awaited process.
            growth: returns a progress value, which changes when the awaited work makes progress.
            limit_seconds: maximum seconds without progress; default `LIMIT_SECONDS`.
        """
        self._path = path
        self._who = who or (lambda: holder_in(path))
        self._growth = growth
        self._limit = LIMIT_SECONDS if limit_seconds is None else limit_seconds
        self._is_said = False
        self.moved()

    def moved(self) -> None:
        """Restart the time limit: until now, this process was not waiting."""
        self._begun = self._since = self._looked = time.monotonic()
        self._seen = self._growth()

    def pause(self) -> None:
        """Sleep briefly. TimeoutError: there was no progress within the limit; the text names the awaited process."""
        time.sleep(_POLL_SECONDS)
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        if (seen := self._growth()) != self._seen:
            self._seen, self._since = seen, now
        if now - self._since >= self._limit:
            what = f"waited {now - self._begun:.0f} s for {self._who()}, which does not go on"
            raise TimeoutError(errno.ETIMEDOUT, what, str(self._path))
        if not self._is_said and now - self._begun >= _QUIET_SECONDS:
            self._is_said = True
            getLogger("relayout").warning("relayout: %s: waiting for %s", self._path, self._who())


def open_ours(path: Path, flags: int = 0) -> int:
    """Open a regular file of this user to read and lock it; reject anything else at its path."""
    fd = os.open(path, os.O_RDWR | _FILE | flags, 0o666)
    try:
        if not is_ours(os.fstat(fd), stat.S_ISREG):
            raise PlanError("is not a regular file of this user; remove it", path=path, code="exists")
    except BaseException:
        os.close(fd)
        raise
    return fd


def status_of(path: Path) -> os.stat_result | None:
    """Return the status of a file or folder, or of a link itself; None if the path does not exist."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return path.lstat()
    return None


def is_ours(status: os.stat_result, is_kind: Callable[[int], bool]) -> bool:
    """Return True if a status is of this kind, such as `stat.S_ISREG`, and of this user."""
    return is_kind(status.st_mode) and status.st_uid == os.geteuid()


def take_lock(
    path: Path,
    kind: int = fcntl.LOCK_EX,
    *,
    what: str = "",
    folder: OpenFolder | None = None,
    create: bool = True,
    mode: int = 0o666,
    needs_locks: bool = True,
) -> FileLock | None:
    """Lock the file that exists at the path now. Step repositories, outputs and caches all take their locks here.

    If the file is deleted or replaced before it is locked, the lock is useless, and the file that now has the name is
    locked instead. A file with other content than a note is locked, and never written to.

    Args:
        what: the work of this process, for the messages of waiting processes.
        folder: the open folder of the file. None: the folder is opened by its path.
        create: True if a missing file is created, with `mode`.
        needs_locks: False if a file system without locks is not an error. Nothing is locked there.

    Returns:
        None: another process or thread holds a lock that excludes this one.
    """
    for _ in range(_TRIES):
        lock = FileLock(_open_lock(path, folder, mode if create else None))
        try:
            try:
                if not lock.try_lock(kind):
                    lock.close()
                    return None
            except OSError as error:
                if needs_locks or error.errno not in _WITHOUT_LOCKS:
                    raise
            named = status_of(path) if folder is None else folder.status(path.name)
            if named is not None and os.path.samestat(named, os.fstat(lock.fd)):
                lock.write_holder(what)
                return lock
        except BaseException:
            lock.close()
            raise
        lock.close()
    raise PlanError("is deleted again and again by another process", path=path, code="busy")


def _open_lock(path: Path, folder: OpenFolder | None, mode: int | None) -> int:
    """Return the descriptor of a lock file of this user. A missing file is created, unless `mode` is None."""
    with nullcontext(folder) if folder is not None else OpenFolder(path.parent) as place:
        for _ in range(_TRIES):
            try:
                return _open_there(place, path.name)
            except FileNotFoundError:
                if mode is None:
                    raise
            with suppress(FileExistsError):  # Another process has just made it.
                return place.open(path.name, os.O_RDWR | os.O_CREAT, mode)
    raise PlanError("is deleted again and again by another process", path=path, code="busy")


def _open_there(folder: OpenFolder, name: str) -> int:
    """Open a lock file that exists. Its status is checked before, because opening a device may have side effects."""
    status = folder.status(name)
    if status is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder.path / name))
    _check_is_lock(folder, name, status)
    fd = folder.open(name, os.O_RDWR)
    try:
        _check_is_lock(folder, name, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_is_lock(folder: OpenFolder, name: str, status: os.stat_result) -> None:
    """Raise PlanError unless a file is a regular file of this user.

    The server of a network file system may map user ids. Files of this user then have the same id as a new file there.
    """
    path = folder.path / name
    if status.st_uid != os.geteuid():
        check_owner_is(path, status, user_of_new_files(folder, name))
    if not stat.S_ISREG(status.st_mode):
        raise PlanError("is not a regular file, and blocks the lock; remove it", path=path, code="exists")


@contextmanager
def locked_file(
    path: Path,
    *,
    what: str = "working",
    create: bool = True,
    growth: Callable[[], object] = lambda: None,
    limit_seconds: float | None = None,
) -> Iterator[None]:
    """Hold a lock file, see `take_lock`. Wait for its holder while that makes progress; see `LockWait`."""
    waiting: LockWait | None = None
    while (lock := take_lock(path, what=what, create=create)) is None:
        waiting = waiting or LockWait(path, growth=growth, limit_seconds=limit_seconds)
        waiting.pause()
    with lock:
        yield


def check_owner_is(path: Path, status: os.stat_result, user: int) -> None:
    """Raise PlanError unless a file or folder belongs to this user."""
    if status.st_uid != user:
        raise PlanError(
            f"belongs to another user (id {status.st_uid}, not {user}); have it removed, or choose another folder",
            path=path,
            code="exists",
        )


@contextmanager
def locked(parent: OpenFolder, name: str, output: Path) -> Iterator[int]:
    """Hold the lock of an output. Yield this user's id as the file system of the output reports it."""
    path = parent.path / name
    with with_path(output):
        lock = take_lock(path, what="writing it", folder=parent, mode=0o600, needs_locks=False)
    if lock is None:
        raise PlanError(f"is being written by another relayout ({holder_in(path)})", path=output, code="busy")
    with lock:
        if not lock.is_lock_file:  # The file is deleted at the end.
            what = "exists and is not relayout's lock, or has several hard links; move it away"
            raise PlanError(what, path=path, code="exists")
        try:
            yield os.fstat(lock.fd).st_uid
        finally:
            if lock.fd >= 0:  # Not in a fork.
                _remove_lock(parent, name, lock)


def _remove_lock(parent: OpenFolder, name: str, lock: FileLock) -> None:
    """Delete a lock file that this process holds. The protected work is done, so a failure is only logged."""
    try:
        status = parent.status(name)
        if status is not None and os.path.samestat(status, os.fstat(lock.fd)):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=parent.fd)
    except OSError as error:
        what = "its lock cannot be removed, and the next process that writes there does it"
        getLogger("relayout").warning("relayout: %s: %s: %s", parent.path / name, what, error.strerror)


def user_of_new_files(parent: OpenFolder, name: str) -> int:
    """Return the owner id of files that this process creates in a folder; `name` is the prefix of a probe file."""
    if _O_TMPFILE is not None:
        with suppress(OSError):  # Not every file system has files without a name.
            return _owner_of(os.open(".", os.O_RDWR | os.O_CLOEXEC | _O_TMPFILE, 0o600, dir_fd=parent.fd))
    probe = f"{name}-{os.urandom(8).hex()}"
    fd = parent.open(probe, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.unlink(probe, dir_fd=parent.fd)
    finally:
        owner = _owner_of(fd)
    return owner


def _owner_of(fd: int) -> int:
    """Return the owner of an open file, and close the file."""
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)
