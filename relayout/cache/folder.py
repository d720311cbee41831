"""The folder of a cache: its entries, the processes that hold them, and the removal of entries to make room.

Entries are folders, one for each checkpoint, in a marked subfolder, `relayout-cache-v1`. A process that uses an entry
holds it, by a shared lock. Entries that no process holds may be removed to make room, the least recently used first.
Room is reserved before it is filled. A file gets its name when it is complete, so that a process may be killed at any
moment. A process that is stopped delays other processes by some seconds; then they continue without the cache.
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
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from logging import getLogger
from pathlib import Path
from typing import TypeAlias

from relayout.core.arguments import path_text, size
from relayout.errors import FormatError, PlanError, shown
from relayout.format.fields import Fields, parse_object
from relayout.storage.local.descriptors import (
    FileLock,
    LockWait,
    OpenFolder,
    is_ours,
    locked_file,
    open_ours,
    status_of,
    take_lock,
)
from relayout.storage.stores import Closable

_LIMIT = "RELAYOUT_CACHE_LIMIT"
_OWN = "relayout-cache-v1"
_TAG = "CACHEDIR.TAG"
_TAG_TEXT = b"""Signature: 8a477f597d28d172789f06886806bc55
# A cache of relayout, which deletes entries to make room.
"""
"""Content of `CACHEDIR.TAG`. The first line is the same in all caches: backups exclude them by it
(https://bford.info/cachedir)."""
_ENTRY = re.compile(r"[0-9a-f]{32}")
_GONE = re.compile(r"\.gone-[0-9a-f]{16}")
_COMING = re.compile(r"\.coming-[0-9a-f]{16}")
_HELD = ".held"
"""Name of the file in an entry that its holders have locked."""
_ABOUT = ".about.json"
_INVALID = ".doubted"
_MAX_NOTE_NBYTES = 2**24
_LOCK = ".lock"
_FILLING = ".filling"
_LOADING = ".loading"
_OTHERS_MAY_WRITE = 0o022
_ASIDE_SECONDS = 3.0
"""Seconds to wait for other processes that found the same damage to release the entry."""


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """Describes a cache's entry for one checkpoint."""

    name: str
    """32 hexadecimal digits."""
    source: str
    """Path or URL of the checkpoint; empty if its first load has not begun to fill the entry."""
    num_ranks: int
    """The tensor-parallel degree; 0 if the first load has not begun to fill the entry."""
    ranks: str
    """The ranks in a conversion, such as "0-7"; empty: all ranks."""
    nbytes: int
    used: float
    """Time of the last use by a process, in seconds since 1970."""
    is_in_use: bool


@dataclass(frozen=True, slots=True)
class Cache:
    """The folder in which loads keep fetched files and conversions, and its limit.

    Several processes of one user may use one folder at once, on one machine. All methods raise PlanError if the
    subfolder for entries is not relayout's or belongs to another user, and OSError if it cannot be written.
    """

    folder: str | os.PathLike[str]
    """A folder on a local drive, created if missing. Only the subfolder `relayout-cache-v1` is ever accessed."""
    limit: int | str | None = None
    """Maximum bytes to keep, as a number or as text such as "2TB". None: limited only by the drive."""
    limit_name: str = field(default="limit", repr=False, compare=False)
    """Name of the option or variable that sets the limit, for errors."""

    def __post_init__(self) -> None:
        path_text(self.folder, "folder", "the path of a folder")
        if self.limit_name == "limit":  # A variable is checked on use: a load can do without the cache.
            self.limit_nbytes()

    def limit_nbytes(self) -> int | None:
        """Return the limit as a number, or None. PlanError: it is not a valid size."""
        return None if self.limit is None else size(self.limit, self.limit_name)

    @property
    def exists(self) -> bool:
        """True if the folder contains a cache."""
        return (Path(self.folder) / _OWN).exists()

    def hold(self, name: str, check: Callable[[HeldEntry], object] = lambda entry: None) -> HeldEntry:
        """Hold the entry of this name, and create it if missing. It is not removed while it is held.

        A faulty entry is removed and rebuilt. An entry is faulty if other users may write to it, if a load from it has
        found damage (`HeldEntry.invalidate`), or if `check` raises FormatError.

        Args:
            name: 32 hexadecimal digits.
            check: compares the entry's content with the expected content.

        Raises:
            PlanError: the entry is faulty, and cannot be removed because another process holds it; or it is still
                faulty after it was rebuilt.
            TimeoutError: another process is removing the entry, and makes no progress.
        """
        entry = self._hold(name)
        if (why := entry.what_is_wrong(check)) is None:
            return entry
        self._put_aside(entry, why)
        entry = self._hold(name)
        if (why := entry.what_is_wrong(check)) is not None:
            raise PlanError(f"{why}, although it was rebuilt", path=entry.folder)
        return entry

    def _hold(self, name: str) -> HeldEntry:
        """Hold the entry of this name without checking it."""
        assert _ENTRY.fullmatch(name)
        folder = self._own() / name
        waiting = LockWait(folder / _HELD)
        while (entry := _held(folder)) is None:
            waiting.pause()  # Another process is removing it, or has just done so.
        return entry

    def _put_aside(self, held: HeldEntry, why: str) -> None:
        """Release a faulty entry, and remove it if no other process holds it."""
        own, entry, mine = self._own(), held.folder, held.status()
        held.close()
        end = time.monotonic() + _ASIDE_SECONDS
        while True:
            with locked_file(own / _LOCK, growth=lambda: _num_files_gone(own)):
                status = status_of(entry / _HELD)
                if status is None or not os.path.samestat(status, mine):
                    return  # Another process has removed it, and logged that.
                if self._remove(own, entry):
                    getLogger("relayout").warning("relayout: %s: %s: rebuilt in the cache", entry, why)
                    return
            if time.monotonic() >= end:
                advice = f"`relayout cache remove {entry.name[:8]} --folder {self.folder}` removes it later"
                raise PlanError(f"{why}, and another process uses it; {advice}", path=entry, code="busy")
            time.sleep(_ASIDE_SECONDS / 20)

    def reserve(self, held: HeldEntry, files: Mapping[str, int]) -> Reservation | None:
        """Reserve room for files of an entry that do not exist yet, by name and bytes.

        Entries that no process holds are removed to make room. Processes that reserve the same file share its room.

        Returns:
            A reservation that lasts until it is closed, or the process ends. None: the cache has no room.

        Raises:
            PlanError: `limit` is not a valid size.
        """
        limit = self.limit_nbytes()
        own = self._own()
        with locked_file(own / _LOCK, growth=lambda: _num_files_gone(own)):
            self._sweep(own)
            coming = {path: nbytes for path, nbytes in self._coming(own).items() if not path.exists()}
            coming |= {held.folder / name: n for name, n in files.items() if not (held.folder / name).exists()}
            if limit is not None and sum(coming.values()) > limit:
                return None
            entries = sorted(self._entries(own), key=_last_use)
            growing = {own / path.relative_to(own).parts[0] for path in coming}
            kept = {entry: _nbytes(entry, with_hidden=entry not in growing) for entry in entries}
            for entry in [*entries, None]:
                to_write = max(sum(coming.values()) - sum(map(_hidden_allocated_nbytes, growing)), 0)
                fits = limit is None or sum(kept.values()) + sum(coming.values()) <= limit
                if fits and to_write <= shutil.disk_usage(own).free:
                    return Reservation(own, held.folder.name, files)
                try:
                    if entry is not None and self._remove(own, entry):
                        del kept[entry]
                except (PlanError, OSError) as error:  # Removing the next entry may make room.
                    getLogger("relayout").warning("relayout: %s: cannot be removed to make room: %s", entry, error)
            return None

    def try_filling(self) -> FileLock | None:
        """Take the lock for converting into the cache in the background. One process of the machine has it at a time.

        Returns:
            The lock. A child process that receives its descriptor shares it, until it is closed here. None: another
                process has the lock.
        """
        return self._locked(_FILLING, fcntl.LOCK_EX, "converting into the cache")

    def register_load(self) -> FileLock | None:
        """Mark an engine of this machine as loading, until the lock is closed or the process ends; see `is_loading`.

        Returns:
            A shared lock. None: another process is testing the lock at this moment. Loading never waits for the lock.
        """
        return self._locked(_LOADING, fcntl.LOCK_SH)

    def is_loading(self) -> bool:
        """Return True if an engine of this machine loads a model that is not in the cache."""
        lock = self._locked(_LOADING, fcntl.LOCK_EX)
        if lock is not None:
            lock.close()
        return lock is None

    def _locked(self, name: str, kind: int, what: str = "") -> FileLock | None:
        """Lock a file of this name until the lock is closed. Return None if another process has the lock."""
        return take_lock(self._own() / name, kind, what=what)

    def entries(self) -> list[CacheEntry]:
        """Return descriptions of all entries, the least recently used first."""
        if not self.exists:
            return []
        return [_described(entry) for entry in sorted(self._entries(self._own()), key=_last_use)]

    def others(self, held: HeldEntry) -> list[Path]:
        """Return the folders of all other entries, the most recently used first. They may be removed at any time."""
        own = self._own()
        return [entry for entry in sorted(self._entries(own), key=_last_use, reverse=True) if entry != held.folder]

    def remove(self, name: str) -> bool:
        """Remove an entry, unless a process holds it; return True if it was removed. PlanError: it does not exist."""
        own = self._own()
        with locked_file(own / _LOCK, growth=lambda: _num_files_gone(own)):
            if own / name not in self._entries(own):
                raise PlanError(f"has no entry {shown(name)}", path=own, code="missing")
            return self._remove(own, own / name)

    def _own(self) -> Path:
        """Return the subfolder for entries; create it if missing."""
        own = Path(self.folder) / _OWN
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            own.mkdir(0o700)
        if not _is_own(own, stat.S_ISDIR):
            raise PlanError("is not a folder of this user; choose another for the cache", path=own, code="exists")
        if _may_be_written_by_others(own):
            what = "other users may write to it, so its entries are not used: delete it, or `chmod go-w` it"
            raise PlanError(what, path=own, code="exists")
        with OpenFolder(own) as folder:
            # List the names first: another process writes the tag before anything else.
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
        """Return the entries: folders of this user in the subfolder, with an entry's form of name and a lock file."""
        return [
            path
            for path in own.iterdir()
            if _ENTRY.fullmatch(path.name) and _is_own(path, stat.S_ISDIR) and _is_own(path / _HELD, stat.S_ISREG)
        ]

    def _sweep(self, own: Path) -> None:
        """Delete remains of killed processes: small files, partly removed entries, empty folders of new entries."""
        with OpenFolder(own) as folder:
            folder.remove_partials()
        for path in own.iterdir():
            if _GONE.fullmatch(path.name) and _is_own(path, stat.S_ISDIR):
                shutil.rmtree(path, ignore_errors=True)
            elif _ENTRY.fullmatch(path.name) and _is_own(path, stat.S_ISDIR):
                with suppress(OSError):  # Only if empty: every entry has at least a lock file.
                    path.rmdir()

    def _coming(self, own: Path) -> dict[Path, int]:
        """Return the files in the reservations of all processes, with their bytes. Invalid reservations are ignored."""
        coming: dict[Path, int] = {}
        for path in own.iterdir():
            if _COMING.fullmatch(path.name) and _is_own(path, stat.S_ISREG):
                with suppress(FormatError, PlanError, OSError), FileLock(open_ours(path)) as lock:
                    if lock.try_lock(fcntl.LOCK_SH):
                        path.unlink()  # Its process has ended.
                    else:
                        coming |= _reserved(own, os.pread(lock.fd, _MAX_NOTE_NBYTES, 0))
        return coming

    def _remove(self, own: Path, entry: Path) -> bool:
        """Remove an entry, unless a process holds it. Return True if it was removed."""
        gone = own / f".gone-{os.urandom(8).hex()}"
        with suppress(FileNotFoundError):
            lock = take_lock(entry / _HELD, what="removing it", create=False)
            if lock is None:
                return False
            with lock:
                entry.rename(gone)  # Atomic: no process sees an incomplete entry.
            shutil.rmtree(gone)
            return True
        return False


CacheOption: TypeAlias = str | os.PathLike[str] | Cache | None
"""The folder of a cache, or a `Cache` with a limit. None: the environment variables apply."""


def cache_of(option: CacheOption) -> Cache | None:
    """Return the requested cache, or else the cache of RELAYOUT_CACHE and RELAYOUT_CACHE_LIMIT; None: no cache."""
    if isinstance(option, Cache):
        return option
    if not isinstance(option, str | os.PathLike | None):
        raise PlanError(f"cache: {shown(option)}, expected a folder, or a relayout.Cache", code="option")
    folder = os.environ.get("RELAYOUT_CACHE") if option is None else option
    return Cache(folder, os.environ.get(_LIMIT) or None, _LIMIT) if folder else None


class Reservation(Closable):
    """Room in a cache. Released when it is closed, or when the process ends."""

    def __init__(self, own: Path, entry: str, files: Mapping[str, int]) -> None:
        """Write the reservation. The caller holds the cache's lock."""
        self._path = own / f".coming-{os.urandom(8).hex()}"
        self._lock = FileLock(open_ours(self._path, os.O_CREAT | os.O_EXCL))
        try:
            self._lock.try_lock()
            note = json.dumps({"entry": entry, "files": dict(files)}).encode()
            while note:
                note = note[os.write(self._lock.fd, note) :]
        except BaseException:  # A full drive, or a quota.
            self.close()
            raise

    def close(self) -> None:
        """Release the room that is not filled."""
        try:
            if self._lock.fd >= 0:  # Otherwise this is a forked child, or it was closed before.
                self._path.unlink(missing_ok=True)
        finally:
            self._lock.close()


class HeldEntry(Closable):
    """An entry that this process holds, until it is closed or collected, or the process ends. Thread-safe."""

    def __init__(self, folder: Path, lock: FileLock) -> None:
        self.folder = folder
        """The entry's folder."""
        self.was_filled = False
        """True if weights were missing, and came into the entry while it was in use."""
        self._lock = lock

    def status(self) -> os.stat_result:
        """Return the status of the locked file, which distinguishes this entry from a later one of the same name."""
        return os.fstat(self._lock.fd)

    def has(self, name: str, nbytes: int | None = None) -> bool:
        """Return True if a file of the entry exists: of this user, not a link, and of length `nbytes` if given."""
        status = status_of(self.folder / name)
        return status is not None and is_ours(status, stat.S_ISREG) and nbytes in (None, status.st_size)

    def keep(
        self, name: str, write: Callable[[str], None], nbytes: int | None = None, *, limit_seconds: float | None = None
    ) -> None:
        """Create the file `name` of the entry if it is missing. Only one process and thread does so at a time.

        Args:
            write: creates the file under the name in its argument, in the same folder, and returns when all bytes are
                on the drive.
            nbytes: bytes of the file. A file of another length is replaced.
            limit_seconds: maximum seconds without a write by another process that creates it; see `LockWait`.

        Raises:
            TimeoutError: the other process made no progress for that time.
        """
        if self.has(name, nbytes):
            return
        with locked_file(self.lock_file(name), what=f"making {name}", growth=self.growth, limit_seconds=limit_seconds):
            if self.has(name, nbytes):
                return
            path = self.folder / name
            partial = path.with_name(f".{path.name}.partial")
            partial.unlink(missing_ok=True)  # Left by a killed process.
            try:
                write(partial.name)
                partial.rename(path)
            finally:
                partial.unlink(missing_ok=True)

    def keep_small(self, name: str, content: Callable[[], bytes], *, limit_seconds: float | None = None) -> None:
        """Create a small file of the entry if it is missing. Only one process and thread does so at a time."""
        with OpenFolder(self.folder) as folder:
            self.keep(name, lambda partial: folder.write(partial, content()), limit_seconds=limit_seconds)

    def forget_damaged(self, name: str, check: Callable[[], object]) -> None:
        """Delete a file of the entry if `check` raises FormatError, so that it is created again on its next use."""
        try:
            check()
        except FormatError:
            with locked_file(self.lock_file(name), what=f"checking {name}", growth=self.growth):
                try:
                    check()  # Check again: another process may have replaced it.
                except FormatError:
                    (self.folder / name).unlink(missing_ok=True)

    def what_is_wrong(self, check: Callable[[HeldEntry], object]) -> str | None:
        """Return why the entry must be rebuilt; None if it is intact. For the criteria see `Cache.hold`."""
        if _may_be_written_by_others(self.folder):
            return "others may write to it"
        if os.path.lexists(self.folder / _INVALID):
            return "was damaged when it was read"
        try:
            check(self)
        except FormatError as error:
            return str(error)
        return None

    def invalidate(self) -> None:
        """Mark the entry as damaged for the next process that holds it, and release it."""
        with suppress(OSError):
            os.close(open_ours(self.folder / _INVALID, os.O_CREAT))
        self.close()

    def growth(self) -> object:
        """Return a progress probe: a value that changes with each write to a file under construction."""
        return {
            (status.st_ino, status.st_size, status.st_blocks, status.st_mtime_ns)
            for path, is_hidden, status in _files(self.folder)
            if is_hidden and not path.name.startswith(_LOCK)
        }

    def describe(self, source: str, num_ranks: int, ranks: str = "") -> None:
        """Store the values that `Cache.entries` shows."""
        self.keep_small(_ABOUT, json.dumps({"source": source, "num_ranks": num_ranks, "ranks": ranks}).encode)

    def lock_file(self, name: str) -> Path:
        """Return the path of the entry's lock of this name."""
        return self.folder / f"{_LOCK}-{name}"

    @contextmanager
    def try_lock(self, name: str, *, shared: bool = False, what: str = "") -> Iterator[bool]:
        """Try to hold the entry's lock of this name, shared or exclusively. Yield True if it is held.

        Args:
            what: the work of this process, for the messages of waiting processes.
        """
        lock = take_lock(self.lock_file(name), fcntl.LOCK_SH if shared else fcntl.LOCK_EX, what=what)
        with lock or nullcontext():
            yield lock is not None

    def close(self) -> None:
        """Release the entry, so that it may be removed."""
        self._lock.close()


def _held(folder: Path) -> HeldEntry | None:
    """Hold an entry, and create it if missing. Return None if another process is removing it."""
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    if (status := status_of(folder)) is None:
        return None
    if not is_ours(status, stat.S_ISDIR):
        raise PlanError("is not a folder of this user, and no entry; remove it", path=folder, code="exists")
    lock = None
    with suppress(FileNotFoundError):
        lock = take_lock(folder / _HELD, fcntl.LOCK_SH)
    if lock is None:
        return None
    try:
        os.utime(lock.fd)
    except BaseException:
        lock.close()
        raise
    return HeldEntry(folder, lock)


def _reserved(own: Path, note: bytes) -> dict[Path, int]:
    """Return the files of a reservation. FormatError: it is not valid, or has names outside of an entry."""
    fields = Fields(parse_object(note, ".coming"), ".coming")
    entry, files = fields.text("entry"), Fields(fields.object("files"), ".coming")
    if not _ENTRY.fullmatch(entry) or any(".." in name.split("/") or name.startswith("/") for name in files.top):
        raise FormatError("names no files of an entry", path=".coming", code="field")
    return {own / entry / name: files.size(name) for name in files.top}


def _may_be_written_by_others(folder: Path) -> bool:
    status = status_of(folder)
    return status is not None and bool(status.st_mode & _OTHERS_MAY_WRITE)


def _is_own(path: Path, is_kind: Callable[[int], bool]) -> bool:
    """Return True if this user's folder or file exists and is not a link."""
    status = status_of(path)
    return status is not None and is_ours(status, is_kind)


def _last_use(entry: Path) -> float:
    with suppress(FileNotFoundError):
        return (entry / _HELD).lstat().st_mtime
    return 0.0


def _described(entry: Path) -> CacheEntry:
    source, num_ranks, ranks = "", 0, ""
    with suppress(OSError, PlanError, FormatError), open(open_ours(entry / _ABOUT), "rb") as file:
        about = Fields(parse_object(file.read(_MAX_NOTE_NBYTES), _ABOUT))
        source, num_ranks, ranks = about.text("source"), about.size("num_ranks"), about.text("ranks")
    try:
        with take_lock(entry / _HELD, create=False) or nullcontext() as lock:
            is_in_use = lock is None
    except (PlanError, OSError) as error:  # An entry that cannot be inspected cannot be removed.
        is_in_use = not isinstance(error, FileNotFoundError)
    nbytes = _nbytes(entry, with_hidden=True)
    return CacheEntry(entry.name, source, num_ranks, ranks, nbytes, _last_use(entry), is_in_use)


def _hidden_allocated_nbytes(entry: Path) -> int:
    """Return the allocated bytes of unfinished files in an entry: their name, or a folder's, begins with a dot."""
    return sum(status.st_blocks * 512 for _, is_hidden, status in _files(entry) if is_hidden)


def _nbytes(entry: Path, *, with_hidden: bool) -> int:
    """Return the bytes of the files of an entry."""
    return sum(status.st_size for _, is_hidden, status in _files(entry) if with_hidden or not is_hidden)


def _num_files_gone(own: Path) -> int:
    """Return the number of remaining files in entries that are being removed."""
    return sum(1 for path in own.glob(".gone-*") for _ in _files(path))


def _files(entry: Path) -> Iterator[tuple[Path, bool, os.stat_result]]:
    """Yield each file of an entry, True if it is unfinished, and its status."""
    for above, _, names in os.walk(entry):
        for path in (Path(above, name) for name in names):
            with suppress(FileNotFoundError):
                yield path, any(part.startswith(".") for part in path.relative_to(entry).parts), path.lstat()
