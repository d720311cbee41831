"""Outputs are absent or complete: everything is written into a folder beside OUT that takes OUT's name at the end.

The folder beside OUT, `.OUT.relayout-partial`, is readable by nobody else and held open from beginning to end. Beside
OUT others may be able to make, rename and link what they like, as in /tmp: what belongs to somebody else there is
refused, and never entered, deleted or taken over.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from relayout.errors import FormatError, PlanError
from relayout.storage.local.files import InputFile, OutputFile, naming, sync_and_forget
from relayout.storage.local.lock_file import check_user, locked
from relayout.storage.local.open_folder import OpenFolder, exchange, rename, restrict
from relayout.storage.protocols import Access, Modes

_TO_CREATE = os.O_RDWR | os.O_CREAT
_FOLDER = "output"
_DONE = "done"
"""What is complete, a moment before it becomes the output; then what it has replaced, to be deleted."""
_CANNOT_REPLACE = {
    errno.EBUSY: "is a mount point, which cannot be replaced; choose a folder in it with -o",
    errno.EXDEV: "lies in a lower layer of an overlay file system, where it cannot be replaced; choose another with -o",
}


def older_folder(path: Path) -> Path:
    """Where a folder that --force replaces waits for the new one, if the two cannot change places in one step."""
    return path.parent / f".{path.name}.relayout-old"


def waiting(path: Path) -> str:
    """What to add to the news that there is nothing at `path`: where an older folder waits to be put back, if one does.

    A conversion with --force that ends between two renames leaves it there.
    """
    old = older_folder(path)
    return f"; the older folder, which was being replaced, is {old}: it can be renamed back" if old.is_dir() else ""


def check_output(source: Path | None, output: Path, marker: str, *, force: bool) -> None:
    """Refuse an output folder that would lose something. Changes nothing.

    Args:
        source: what is read; None where it is not on a file system.
        marker: what a folder holds that `force` may replace.

    Raises:
        PlanError: it is, contains or lies in the source, is not empty, or its parent is missing.
    """
    real_output = output.resolve()
    if source is not None:
        real_source = source.resolve()
        if real_source == real_output:
            raise PlanError("is the source itself; choose another folder with -o", path=output, code="exists")
        if real_output.is_relative_to(real_source) or real_source.is_relative_to(real_output):
            raise PlanError(
                "lies in the source or around it; choose another folder with -o", path=output, code="exists"
            )
    if not real_output.parent.is_dir():
        raise PlanError("its parent folder does not exist", path=output, code="missing")
    if os.path.lexists(output):
        if not output.is_dir() or output.is_symlink():
            raise PlanError("exists and is not a folder", path=output, code="exists")
        if _holds_working_folder(real_output):
            raise PlanError(
                "is or holds the working directory, and would be replaced by another folder", path=output, code="exists"
            )
        if real_output.is_mount():
            raise PlanError(_CANNOT_REPLACE[errno.EBUSY], path=output, code="exists")
        _check_vacant(output, marker, force=force)


def _holds_working_folder(folder: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(folder)
    except FileNotFoundError:  # Deleted.
        return False


def _check_vacant(output: Path, marker: str, *, force: bool) -> None:
    """Refuse a folder that holds something, but for one that relayout wrote and that is to be replaced.

    Raises:
        PlanError: it does.
    """
    if any(output.iterdir()):
        if not force:
            raise PlanError("is not empty; --force replaces a folder that relayout wrote", path=output, code="exists")
        if not (output / marker).is_file():
            raise PlanError(
                f"is not empty and was not written by relayout ({marker} is missing)", path=output, code="exists"
            )


def clear_up(output: Path) -> None:
    """Delete what a process of this user that was killed behind its last rename has left beside its output."""
    output = output.resolve()
    if not output.name or not any(os.path.lexists(name_of(output)) for name_of in (_place, _lock, older_folder)):
        return
    with (
        suppress(PlanError, OSError),
        _alone(output) as (parent, user),
        _open_place(parent, output, user) or _make_place(parent, output, user) as place,
    ):
        if place.status(_FOLDER) is None:
            _take_in_old(place, parent, output, user)
            _remove_place(parent, place)


def check_space(output: Path, nbytes: int) -> None:
    """Refuse to start what the drive cannot hold.

    Raises:
        PlanError: less than `nbytes` bytes are free.
    """
    status = os.statvfs(output.resolve().parent)
    free = status.f_bavail * status.f_frsize
    if free < nbytes:
        raise PlanError(
            f"needs {nbytes / 1e9:.3f} GB, {free / 1e9:.3f} GB are free there ({nbytes - free} bytes too few)",
            path=output,
            code="space",
        )


class LocalStaging:
    """A folder beside an output, in which it is put together; see `protocols.Staging`."""

    def __init__(self, output: Path, place: OpenFolder, modes: Modes) -> None:
        """Take the place, which is this user's alone; another attempt may have left something there."""
        self._output = output
        self.place = place
        """For notes that must not be in the output."""
        self.modes = _granted(place, modes)
        """What the umask leaves of them, also for files that were made under another one."""
        self.is_kept = False
        self.advice: str | None = None
        self.folder = self._open_folder()
        """Becomes the output."""

    @property
    def where(self) -> str:
        """See `Staging.where`."""
        return str(self.place.path)

    def _open_folder(self) -> OpenFolder:
        status = self.place.status(_FOLDER)
        if status is None or not stat.S_ISDIR(status.st_mode) or status.st_uid != self.place.owner:
            return self._emptied()
        folder = self.place.subfolder(_FOLDER)
        restrict(folder.fd, self.modes.folder)
        return folder

    def clear(self) -> None:
        """See `Staging.clear`."""
        self.folder.close()
        self.folder = self._emptied()

    def _emptied(self) -> OpenFolder:
        for name in self.place.names():
            self.place.remove(name)
        self.place.make(_FOLDER, self.modes.folder)
        return self.place.subfolder(_FOLDER)

    def allocated_nbytes(self) -> int:
        """See `Staging.allocated_nbytes`."""
        return self.place.allocated_nbytes()

    def check_space(self, nbytes: int) -> None:
        """See `Staging.check_space`."""
        check_space(self._output, nbytes)

    def names(self) -> list[str]:
        """See `Staging.names`."""
        return self.folder.names()

    def remove(self, name: str) -> None:
        """See `Staging.remove`."""
        self.folder.remove(name)

    def open(self, name: str, nbytes: int) -> InputFile:
        """See `Staging.open`."""
        # What an error kept from the drive may still be in the page cache, and look right.
        sync_and_forget(self.folder, name)
        return InputFile(self.folder.path / name, nbytes, access=Access.ONCE, folder=self.folder)

    def write_file(self, name: str, nbytes: int, *, is_new: bool) -> OutputFile:
        """See `Staging.write_file`."""
        return OutputFile(self.folder, name, nbytes, create=is_new, mode=self.modes.file)

    def write_head(self, name: str, head: bytes, nbytes: int) -> None:
        """See `Staging.write_head`."""
        is_new = self.folder.status(name) is None
        fd = self.folder.open(name, _TO_CREATE, self.modes.file) if is_new else self.folder.open_own(name, os.O_RDWR)
        with open(fd, "r+b") as stream, naming(self.folder.path / name):
            restrict(fd, self.modes.file)
            stream.write(head)
            stream.truncate(nbytes)
            stream.flush()
            os.fsync(stream.fileno())

    def put(self, name: str, pieces: Iterable[bytes], mode: int | None = None) -> None:
        """See `Staging.put`."""
        mode = self.modes.file if mode is None else mode | stat.S_IRUSR
        with open(self.folder.open(name, _TO_CREATE, mode), "wb") as stream:
            for piece in pieces:  # Errors of reading them name their own file.
                with naming(self.folder.path / name):
                    stream.write(piece)
            with naming(self.folder.path / name):
                stream.flush()
                os.fsync(stream.fileno())

    def read_notes(self, name: str) -> bytes | None:
        """See `Staging.read_notes`."""
        return read_notes(self.place, name)

    def open_notes(self, name: str, *, is_new: bool) -> LocalNotes:
        """See `Staging.open_notes`."""
        return LocalNotes(self.place, name, is_new=is_new)


class LocalNotes:
    """See `protocols.Notes`. Not forced to the drive: what counts is proved before it is believed."""

    def __init__(self, folder: OpenFolder, name: str, *, is_new: bool) -> None:
        """See `Staging.open_notes`."""
        self._lock = threading.Lock()
        self._path = folder.path / name
        if is_new:
            folder.remove(name)
            self._fd = folder.open(name, os.O_WRONLY | os.O_CREAT, 0o600)
        else:
            self._fd = folder.open_own(name, os.O_WRONLY | os.O_APPEND)

    def append(self, text: bytes) -> None:
        """See `Notes.append`."""
        with self._lock, naming(self._path):
            while text:
                text = text[os.write(self._fd, text) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_notes(folder: OpenFolder, name: str) -> bytes | None:
    """See `Staging.read_notes`."""
    try:
        fd = folder.open_own(name, os.O_RDONLY)
    except (FileNotFoundError, FormatError):
        return None
    with naming(folder.path / name), open(fd, "rb") as file:
        return file.read()


def _granted(place: OpenFolder, modes: Modes) -> Modes:
    place.remove("probe")
    place.make("probe", 0o777)
    with place.subfolder("probe") as probe:
        granted = os.fstat(probe.fd).st_mode | stat.S_IRWXU
    place.remove("probe")
    return Modes(modes.folder & granted, modes.file & granted)


@contextmanager
def staging_folder(
    output: Path, marker: str, *, replace: bool = False, modes: Modes | None = None
) -> Iterator[LocalStaging]:
    """A place beside `output`, whose folder becomes `output` when the block ends; if it fails, all vanishes, or stays.

    It may hold what an earlier attempt left. An `output` that is there already may be empty, or, with `replace`, a
    folder that relayout wrote.

    Raises:
        PlanError: another process is writing the same output, what lies beside it is somebody else's, or `output`
            cannot be replaced. Nothing has been changed then.
        OSError: among others, something else has come to be at `output` meanwhile.
    """
    output = output.resolve()
    with _alone(output) as (parent, user):
        _put_back(parent, output, user, replace)
        left = _open_place(parent, output, user)
        with left or _make_place(parent, output, user) as place:
            staging = LocalStaging(output, place, modes or Modes())
            try:
                staging.is_kept = left is not None  # As it was, if the output cannot be replaced.
                _check_replaceable(place, parent, output)
                staging.is_kept = False
                yield staging
                _publish(staging, parent, output, replace=replace and (output / marker).is_file())
                _take_in_old(place, parent, output, user)
                _remove_place(parent, place)
            except BaseException as error:
                if not staging.is_kept:
                    _remove_place(parent, place)
                elif staging.advice is not None:
                    error.add_note(staging.advice)
                raise
            finally:
                staging.folder.close()


@contextmanager
def _alone(output: Path) -> Iterator[tuple[OpenFolder, int]]:
    """The folder that the output lies in, and the id that this user has there, while others are kept away.

    Raises:
        PlanError: another process is writing the same output, or the lock is somebody else's.
    """
    with OpenFolder(output.parent) as parent, locked(parent, _lock(output).name, output) as user:
        yield parent, user


def _lock(output: Path) -> Path:
    return output.with_name(f".{output.name}.relayout-lock")


def _place(output: Path) -> Path:
    """Where an output is put together."""
    return output.with_name(f".{output.name}.relayout-partial")


def _open_place(parent: OpenFolder, output: Path, user: int) -> OpenFolder | None:
    """The place that an earlier attempt of this user has left, closed to all others.

    Raises:
        PlanError: there is one of somebody else.
    """
    path = _place(output)
    status = parent.status(path.name)
    if status is None:
        return None
    check_user(path, status, user)
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(path.name, dir_fd=parent.fd)  # Which no folder suffers, should one have taken its place.
        return None
    place = parent.subfolder(path.name)
    try:
        check_user(path, os.fstat(place.fd), user)
        restrict(place.fd, stat.S_IRWXU)
    except BaseException:
        place.close()
        raise
    return place


def _make_place(parent: OpenFolder, output: Path, user: int) -> OpenFolder:
    parent.make(_place(output).name, stat.S_IRWXU)
    place = _open_place(parent, output, user)
    if place is None or place.names():
        raise PlanError("somebody else has put something in its place", path=_place(output), code="exists")
    return place


def _remove_place(parent: OpenFolder, place: OpenFolder) -> None:
    """Delete the place; whatever else may have come to be at its path stays."""
    for name in place.names():
        with suppress(OSError):
            place.remove(name)
    with suppress(OSError):
        os.rmdir(place.path.name, dir_fd=parent.fd)


def _put_back(parent: OpenFolder, output: Path, user: int, replace: bool) -> None:
    """Give a folder its name again that waits since a process was killed between two renames.

    Raises:
        PlanError: it is somebody else's, or is not to be replaced.
    """
    old = older_folder(output)
    status = parent.status(old.name)
    if status is None:
        return
    check_user(old, status, user)
    if parent.status(output.name) is None:
        if not replace:
            raise PlanError(f"is missing{waiting(output)}, or replaced with --force", path=output, code="missing")
        rename(parent, old.name, parent, output.name)


def _check_replaceable(place: OpenFolder, parent: OpenFolder, output: Path) -> None:
    """Find out before any work whether a folder that is there can be renamed away.

    rename(2) onto a folder with something in it always fails. Where it would have been refused anyway, it fails for
    that reason: the kernel looks at mount points and permissions first, overlayfs at its layers.

    Raises:
        PlanError: it cannot.
    """
    if parent.status(output.name) is None:
        return
    place.remove("occupied")
    place.make("occupied", stat.S_IRWXU)
    place.make("occupied/by", stat.S_IRWXU)
    try:
        rename(parent, output.name, place, "occupied")
    except OSError as error:
        if error.errno not in _expected(output):
            reason = _CANNOT_REPLACE.get(error.errno or 0, f"cannot be replaced: {error.strerror}")
            raise PlanError(reason, path=output, code="exists") from None
    finally:
        place.remove("occupied")


def _expected(output: Path) -> set[int]:
    """Errors of that rename that do not stand in the way."""
    is_empty = not any(output.iterdir())
    is_read_only = not os.access(output, os.W_OK)
    return (
        {errno.ENOTEMPTY, errno.EEXIST}
        | ({errno.EXDEV} if is_empty else set())  # Is not renamed, but written over.
        | ({errno.EACCES} if is_read_only else set())  # Its owner can change that, as `_replace` does.
    )


def _publish(staging: LocalStaging, parent: OpenFolder, output: Path, *, replace: bool) -> None:
    staging.folder.sync()
    if replace:
        _replace(staging.place, parent, output)
    else:
        # Fails, as it should, where a folder with anything in it has come up meanwhile.
        rename(staging.place, _FOLDER, parent, output.name)
    # It is done now, whatever becomes of the old one.
    staging.is_kept = False
    with suppress(OSError):
        os.fsync(parent.fd)


def _replace(place: OpenFolder, parent: OpenFolder, output: Path) -> None:
    """Put the folder in the place of an older one, which comes here."""
    # From here on the next attempt finds nothing to go on from: it could not tell this folder from the older one.
    rename(place, _FOLDER, place, _DONE)
    try:
        with suppress(PermissionError), parent.subfolder(output.name) as older:
            # A folder that its owner may not write to cannot be moved to another one.
            os.fchmod(older.fd, stat.S_IMODE(os.fstat(older.fd).st_mode) | stat.S_IWUSR)
        if not exchange(place, _DONE, parent, output.name):
            _take_in_old(place, parent, output, place.owner)
            _replace_in_two_steps(place, parent, output)
    except BaseException:
        rename(place, _DONE, place, _FOLDER)
        raise


def _replace_in_two_steps(place: OpenFolder, parent: OpenFolder, output: Path) -> None:
    """Where the system cannot exchange two names: for a moment there is no output."""
    old = older_folder(output).name
    rename(parent, output.name, parent, old)
    try:
        rename(place, _DONE, parent, output.name)
    except BaseException:
        rename(parent, old, parent, output.name)
        raise


def _take_in_old(place: OpenFolder, parent: OpenFolder, output: Path, user: int) -> None:
    """Bring a folder that has been replaced to where it will be deleted."""
    name = older_folder(output).name
    status = parent.status(name)
    if status is not None and status.st_uid == user and parent.status(output.name) is not None:
        with suppress(OSError):
            rename(parent, name, place, "old")
