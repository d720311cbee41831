"""A folder that keeps files fetched from stores, for all processes of a machine and up to a size.

It has one entry, a folder, for each checkpoint. A process that uses an entry holds a lease on it, which is a shared
lock; an entry that nobody holds may be removed to make room, the least recently used first. A file gets its name when
it is complete, so that a process may be killed at any moment.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from relayout.core.arguments import size
from relayout.storage.protocols import Closable

_LEASE = ".lease"
_LOCK = ".lock"
_GONE = ".gone-"
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Cache:
    """Where loads keep what they fetch, and how much of it.

    Several processes may use one folder at once, on one machine.
    """

    folder: str | os.PathLike[str]
    """On a local drive. It is made if it does not exist."""
    limit: int | str | None = None
    """The most bytes to keep, as a number or as text such as "2TB"; None: as much as the drive holds."""

    @property
    def root(self) -> Path:
        """The folder's path."""
        return Path(self.folder)

    def lease(self, name: str) -> Lease:
        """The entry of this name, made if need be, which is not removed while the lease is open.

        Raises:
            OSError: the folder cannot be written.
        """
        folder = self.root / name
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                fd = os.open(folder / _LEASE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            except FileNotFoundError:
                continue  # Another process has just removed it.
            fcntl.flock(fd, fcntl.LOCK_SH)
            if _is_at(folder / _LEASE, fd):
                os.utime(fd)
                return Lease(folder, fd)
            os.close(fd)

    def make_room(self, nbytes: int) -> bool:
        """Remove entries that nobody uses until so many bytes more fit; whether they fit.

        Raises:
            PlanError: `limit` is no size.
            OSError: an entry cannot be removed.
        """
        limit = None if self.limit is None else size(self.limit, "limit")
        with _alone(self.root / _LOCK):
            for left in self.root.glob(f"{_GONE}*"):
                shutil.rmtree(left, ignore_errors=True)
            entries = sorted((one for one in self.root.iterdir() if one.is_dir()), key=_last_use)
            total = sum(map(_nbytes, entries))
            for entry in [*entries, None]:
                free = shutil.disk_usage(self.root).free
                if nbytes <= free and (limit is None or total + nbytes <= limit):
                    return True
                if entry is not None:
                    total -= self._remove(entry)
            return False

    def _remove(self, entry: Path) -> int:
        """Remove an entry unless it is in use; return its bytes."""
        fd = os.open(entry / _LEASE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            nbytes = _nbytes(entry)
            gone = self.root / f"{_GONE}{os.urandom(8).hex()}"
            entry.rename(gone)  # At once: nobody sees an entry of which only some files are there.
            shutil.rmtree(gone)
            return nbytes
        except BlockingIOError:
            return 0
        finally:
            os.close(fd)


class Lease(Closable):
    """An entry in use. Thread-safe; released when it is closed or collected, or when the process ends."""

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder = folder
        """The entry."""
        self._fd = fd

    def keep(self, name: str, write: Callable[[str], None]) -> None:
        """Make the file `name` of the entry, unless it is there; one process and thread at a time does so.

        Args:
            write: makes the file under the name that it is given, in the same folder, with all bytes on the drive.

        Raises:
            OSError: the file cannot be made; or whatever `write` raises.
        """
        path = self.folder / name
        if path.exists():
            return
        with _alone(self.folder / f"{_LOCK}-{name}"):
            if path.exists():
                return
            partial = f".{name}.partial"
            with suppress(FileNotFoundError):
                (self.folder / partial).unlink()  # What a killed process left.
            try:
                write(partial)
                (self.folder / partial).rename(path)
            finally:
                with suppress(FileNotFoundError):
                    (self.folder / partial).unlink()

    def close(self) -> None:
        """Release the entry, which may then be removed."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold a lock file. Wait for whoever holds it, in a way that can be interrupted."""
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(fd)


def _is_at(path: Path, fd: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(fd))
    return False


def _last_use(entry: Path) -> float:
    with suppress(FileNotFoundError):
        return (entry / _LEASE).stat().st_mtime
    return 0.0


def _nbytes(entry: Path) -> int:
    """Bytes that an entry has, with those of files that are being made."""
    total = 0
    for path in entry.iterdir():
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total
