"""A folder that keeps files fetched from stores, for all processes of a machine and up to a size.

Entries are folders, one for each checkpoint, in a marked subfolder, `relayout-cache-v1`. A process that uses an entry
holds a lease on it, which is a shared lock. Entries without a lease may be removed to make room, the least recently
used first. Room is reserved before it is filled. A file gets its name when it is complete, so that a process may be
killed at any moment.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from relayout.core.arguments import size
from relayout.errors import PlanError, shown
from relayout.storage.local.open_folder import OpenFolder
from relayout.storage.protocols import Closable

_OWN = "relayout-cache-v1"
_TAG = "CACHEDIR.TAG"
_TAG_TEXT = b"""Signature: 8a477f597d28d172789f06886806bc55
# A cache of relayout, which deletes entries to make room.
"""
"""The first line is that of all caches, by which backups leave them out (https://bford.info/cachedir)."""
_ENTRY = re.compile(r"[0-9a-f]{32}")
_GONE = re.compile(r"\.gone-[0-9a-f]{16}")
_COMING = re.compile(r"\.coming-[0-9a-f]{16}")
_LEASE = ".lease"
_ABOUT = ".about.json"
_MAX_ABOUT_NBYTES = 2**16
_LOCK = ".lock"
_FILLING = ".filling"
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """What a cache keeps of one checkpoint."""

    name: str
    """32 hexadecimal digits."""
    source: str
    """The path or URL of the checkpoint; empty if its first load has not begun to fill the entry."""
    num_ranks: int
    """The tensor-parallel degree; 0 as above."""
    ranks: str
    """Those that a conversion has, such as "0-7"; empty: all."""
    nbytes: int
    used: float
    """When a process last began to use it, in seconds since 1970."""
    is_in_use: bool


@dataclass(frozen=True, slots=True)
class Cache:
    """Where loads keep what they fetch, and its limit.

    Several processes of one user may use one folder at once, on one machine. All methods raise PlanError if the
    subfolder for entries is not relayout's, or another user's, and OSError if it cannot be written.
    """

    folder: str | os.PathLike[str]
    """On a local drive. It is made if it does not exist. Only the subfolder `relayout-cache-v1` is ever touched."""
    limit: int | str | None = None
    """The most bytes to keep, as a number or as text such as "2TB"; None: as much as the drive holds."""

    def lease(self, name: str) -> Lease:
        """The entry of this name, made if need be, which is not removed while the lease is open.

        Args:
            name: 32 hexadecimal digits.
        """
        assert _ENTRY.fullmatch(name)
        folder = self._own() / name
        while True:
            folder.mkdir(exist_ok=True)
            try:
                fd = _open(folder / _LEASE, os.O_CREAT)
            except FileNotFoundError:
                continue  # Another process has just removed it.
            fcntl.flock(fd, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat((folder / _LEASE).stat(), os.fstat(fd)):
                    os.utime(fd)
                    return Lease(folder, fd)
            os.close(fd)  # Another process has removed it meanwhile.

    def reserve(self, lease: Lease, files: Mapping[str, int]) -> Reservation | None:
        """Reserve room for files of an entry that are not there yet, by name and bytes.

        Entries that are not in use are removed for it. Processes that reserve the same file share its room.

        Returns:
            What keeps the room until it is closed, or the process ends; None: there is none.

        Raises:
            PlanError: `limit` is no size.
        """
        limit = None if self.limit is None else size(self.limit, "limit")
        own = self._own()
        with _locked(own / _LOCK):
            self._sweep(own)
            coming = {path: nbytes for path, nbytes in self._coming(own).items() if not path.exists()}
            coming |= {lease.folder / name: n for name, n in files.items() if not (lease.folder / name).exists()}
            if limit is not None and sum(coming.values()) > limit:
                return None
            entries = sorted(self._entries(own), key=_last_use)
            growing = {own / path.relative_to(own).parts[0] for path in coming}
            kept = {entry: _nbytes(entry, with_hidden=entry not in growing) for entry in entries}
            for entry in [*entries, None]:
                to_write = max(sum(coming.values()) - sum(map(_hidden_allocated_nbytes, growing)), 0)
                fits = limit is None or sum(kept.values()) + sum(coming.values()) <= limit
                if fits and to_write <= shutil.disk_usage(own).free:
                    return Reservation(own, lease.folder.name, files)
                if entry is not None and self._remove(own, entry):
                    del kept[entry]
            return None

    def try_filling(self) -> int | None:
        """The right to convert into the cache in the background, which one process of the machine has at a time.

        Returns:
            A descriptor; whoever has it or a copy of it open has the right. None: another process has it.
        """
        fd = _open(self._own() / _FILLING, os.O_CREAT)
        if _locks(fd, fcntl.LOCK_EX):
            return fd
        os.close(fd)
        return None

    def entries(self) -> list[CacheEntry]:
        """What is kept, the least recently used first."""
        if not (Path(self.folder) / _OWN).exists():
            return []
        return [_described(entry) for entry in sorted(self._entries(self._own()), key=_last_use)]

    def remove(self, name: str) -> bool:
        """Remove an entry, unless a process uses it; return whether it is gone. PlanError: there is no such entry."""
        own = self._own()
        with _locked(own / _LOCK):
            if own / name not in self._entries(own):
                raise PlanError(f"has no entry {shown(name)}", path=own, code="missing")
            return self._remove(own, own / name)

    def _own(self) -> Path:
        """The subfolder for entries, made if need be."""
        own = Path(self.folder) / _OWN
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            own.mkdir(0o700)
        if not _is_own(own, stat.S_ISDIR):
            raise PlanError("is not a folder of this user; choose another for the cache", path=own, code="exists")
        with OpenFolder(own) as folder:
            # Names first: whatever another process puts there, it puts there behind the tag.
            is_new = all(name.endswith(".partial") for name in folder.names())
            with suppress(FileNotFoundError):
                if _is_own(own / _TAG, stat.S_ISREG) and (own / _TAG).read_bytes() == _TAG_TEXT:
                    return own
            if not is_new:
                what = f"not created by relayout ({_TAG} does not identify it); choose another folder for the cache"
                raise PlanError(what, path=own, code="exists")
            folder.write(_TAG, _TAG_TEXT)
        return own

    def _entries(self, own: Path) -> list[Path]:
        """The entries. The proof: real folders of this user below our tag, with our form of name and our lease."""
        return [
            path
            for path in own.iterdir()
            if _ENTRY.fullmatch(path.name) and _is_own(path, stat.S_ISDIR) and _is_own(path / _LEASE, stat.S_ISREG)
        ]

    def _sweep(self, own: Path) -> None:
        """Delete what killed processes left: entries that were being removed."""
        for path in own.iterdir():
            if _GONE.fullmatch(path.name) and _is_own(path, stat.S_ISDIR):
                shutil.rmtree(path, ignore_errors=True)

    def _coming(self, own: Path) -> dict[Path, int]:
        """The files that processes have reserved room for, and their bytes."""
        coming: dict[Path, int] = {}
        for path in own.iterdir():
            if not _COMING.fullmatch(path.name) or not _is_own(path, stat.S_ISREG):
                continue
            with open(_open(path), "rb") as stream:
                if _locks(stream.fileno(), fcntl.LOCK_SH):
                    path.unlink()  # Its process has ended.
                else:
                    entry, files = json.loads(stream.read())
                    coming |= {own / entry / name: nbytes for name, nbytes in files.items()}
        return coming

    def _remove(self, own: Path, entry: Path) -> bool:
        """Remove an entry, unless it is in use."""
        with suppress(FileNotFoundError), open(_open(entry / _LEASE), "rb") as lease:
            if not _locks(lease.fileno(), fcntl.LOCK_EX):
                return False
            gone = own / f".gone-{os.urandom(8).hex()}"
            entry.rename(gone)  # Atomic: no process sees an incomplete entry.
            shutil.rmtree(gone)
            return True
        return False


CacheOption: TypeAlias = str | os.PathLike[str] | Cache | None
"""The folder of a cache, or a folder with a limit; None: as the environment says."""


def cache_of(option: CacheOption) -> Cache | None:
    """The cache that was asked for, or else that of RELAYOUT_CACHE and RELAYOUT_CACHE_LIMIT; None: no cache."""
    if isinstance(option, Cache):
        return option
    folder = os.environ.get("RELAYOUT_CACHE") if option is None else option
    return Cache(folder, os.environ.get("RELAYOUT_CACHE_LIMIT") or None) if folder else None


class Reservation(Closable):
    """Room in a cache. Released when it is closed, or when the process ends."""

    def __init__(self, own: Path, entry: str, files: Mapping[str, int]) -> None:
        """Reserve it; the caller holds the cache's lock."""
        self._path = own / f".coming-{os.urandom(8).hex()}"
        self._fd = _open(self._path, os.O_CREAT | os.O_EXCL)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        os.write(self._fd, json.dumps([entry, dict(files)]).encode())

    def close(self) -> None:
        """Release the room that is not filled."""
        with suppress(FileNotFoundError):
            self._path.unlink()
        os.close(self._fd)


class Lease(Closable):
    """An entry in use. Thread-safe; released when it is closed or collected, or when the process ends."""

    def __init__(self, folder: Path, fd: int) -> None:
        self.folder = folder
        """The entry."""
        self.was_filled = False
        """Whether weights were missing, and came into the entry while it was in use."""
        self._fd = fd

    def keep(self, name: str, write: Callable[[str], None]) -> None:
        """Make the file `name` of the entry, unless it is there; one process and thread at a time does so.

        Args:
            write: makes the file under the name that it is given, in the same folder, with all bytes on the drive.
        """
        path = self.folder / name
        if path.exists():
            return
        with _locked(self.folder / f"{_LOCK}-{name}"):
            if path.exists():
                return
            partial = _partial(path)
            partial.unlink(missing_ok=True)  # What a killed process left.
            try:
                write(partial.name)
                partial.rename(path)
            finally:
                partial.unlink(missing_ok=True)

    def keep_small(self, name: str, content: Callable[[], bytes]) -> None:
        """Make a small file of the entry, unless it is there; one process and thread at a time does so."""
        with OpenFolder(self.folder) as folder:
            self.keep(name, lambda partial: folder.write(partial, content()))

    def describe(self, source: str, num_ranks: int, ranks: str = "") -> None:
        """Note what `Cache.entries` shows."""
        self.keep_small(_ABOUT, json.dumps({"source": source, "num_ranks": num_ranks, "ranks": ranks}).encode)

    def try_lock(self, name: str, *, shared: bool = False) -> AbstractContextManager[bool]:
        """Hold the entry's lock of this name, if no other process or thread does; or, shared, only others that share.

        Yields whether it is held.
        """
        return _locked(self.folder / f"{_LOCK}-{name}", fcntl.LOCK_SH if shared else fcntl.LOCK_EX, waits=False)

    def close(self) -> None:
        """Release the entry, which may then be removed."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


@contextmanager
def _locked(path: Path, kind: int = fcntl.LOCK_EX, *, waits: bool = True) -> Iterator[bool]:
    """Hold a lock file, and yield whether it is held. Wait for whoever holds it, in a way that can be interrupted."""
    fd = _open(path, os.O_CREAT)
    try:
        while not (is_held := _locks(fd, kind)) and waits:
            time.sleep(_POLL_SECONDS)
        yield is_held
    finally:
        os.close(fd)


def _locks(fd: int, kind: int) -> bool:
    """Lock an open file, unless another process or thread holds a lock that excludes this one."""
    with suppress(BlockingIOError):
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        return True
    return False


def _open(path: Path, flags: int = 0) -> int:
    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o666)


def _is_own(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Whether this user's folder or file is there, and no link to one."""
    with suppress(FileNotFoundError, NotADirectoryError):
        status = path.lstat()
        return is_kind(status.st_mode) and status.st_uid == os.geteuid()
    return False


def _partial(path: Path) -> Path:
    """Where a file of an entry is made."""
    return path.with_name(f".{path.name}.partial")


def _last_use(entry: Path) -> float:
    with suppress(FileNotFoundError):
        return (entry / _LEASE).lstat().st_mtime
    return 0.0


def _described(entry: Path) -> CacheEntry:
    source, num_ranks, ranks = "", 0, ""
    with suppress(OSError, ValueError, KeyError, TypeError), open(entry / _ABOUT, "rb") as file:
        about = json.loads(file.read(_MAX_ABOUT_NBYTES))
        source, num_ranks, ranks = str(about["source"]), int(about["num_ranks"]), str(about["ranks"])
    is_in_use = False
    with suppress(FileNotFoundError), open(_open(entry / _LEASE), "rb") as lease:
        is_in_use = not _locks(lease.fileno(), fcntl.LOCK_EX)
    nbytes = _nbytes(entry, with_hidden=True)
    return CacheEntry(entry.name, source, num_ranks, ranks, nbytes, _last_use(entry), is_in_use)


def _hidden_allocated_nbytes(entry: Path) -> int:
    """Blocks of what is being made in an entry: its name, or its folder's, begins with a dot until it is complete."""
    return sum(status.st_blocks * 512 for is_hidden, status in _files(entry) if is_hidden)


def _nbytes(entry: Path, *, with_hidden: bool) -> int:
    """Bytes of the files of an entry."""
    return sum(status.st_size for is_hidden, status in _files(entry) if with_hidden or not is_hidden)


def _files(entry: Path) -> Iterator[tuple[bool, os.stat_result]]:
    """Of each file of an entry: whether it is still being made."""
    for above, _, names in os.walk(entry):
        for path in (Path(above, name) for name in names):
            with suppress(FileNotFoundError):
                yield any(part.startswith(".") for part in path.relative_to(entry).parts), path.lstat()
