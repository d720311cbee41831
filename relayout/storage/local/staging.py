"""Outputs are absent or complete: they are written to a folder beside OUT, which is renamed to OUT at the end.

The folder beside OUT, `.OUT.relayout-partial`, is readable by this user only and held open from start to end. Other
users may create, rename and link files beside OUT, for example in /tmp. Files and folders of other users there are
refused, and never opened, deleted or reused.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from relayout.errors import FormatError, PlanError, shown
from relayout.storage.local.files import InputFile, OutputFile, sync_and_drop_pages
from relayout.storage.local.lock_file import check_owner_is, locked
from relayout.storage.local.open_folder import OpenFolder, exchange, rename, restrict, with_path
from relayout.storage.protocols import LIVE, Access, Closable, Modes, kept_note

_TO_CREATE = os.O_RDWR | os.O_CREAT
FOLDER = "output"
"""In which the output is assembled, in the folder beside it."""
_SHARED = "shared-"
_REPLACED = "relayout.replaced"
_DONE = "done"
"""The complete folder just before it becomes the output; after an exchange, the replaced folder, to be deleted."""
_OURS = re.compile(r"output|done|probe|occupied|shared-.+|relayout\..+|\..+\.partial", re.DOTALL)
"""Names in a staging folder: those above, notes, and small files that are being written."""
_CANNOT_REPLACE = {
    errno.EBUSY: "is a mount point, which cannot be replaced; choose a folder in it",
    errno.EXDEV: "is in a lower layer of an overlay file system and cannot be replaced; choose another folder",
}


def older_folder(path: Path) -> Path:
    """The temporary name of a folder that --force replaces, if the two names cannot be exchanged atomically."""
    return path.parent / f".{path.name}.relayout-old"


def recovery_advice(path: Path) -> str:
    """Advice for a missing `path`: where its older folder is, if --force was interrupted between two renames."""
    old = older_folder(path)
    return f"; an interrupted replacement left the older folder at {old}: rename it back" if old.is_dir() else ""


def check_place(source: Path | None, output: Path) -> None:
    """Check that an output can be at this path. Changes nothing.

    Args:
        source: the source's path; None if it is not on a file system.

    Raises:
        PlanError: the output is the source, contains it or is inside it; is no folder; or has no parent folder.
    """
    real_output = output.resolve()
    if source is not None:
        real_source = source.resolve()
        if real_source == real_output:
            raise PlanError("is the source itself; choose another folder", path=output, code="exists")
        if real_output.is_relative_to(real_source) or real_source.is_relative_to(real_output):
            what = "is inside the source folder, or contains it; choose another folder"
            raise PlanError(what, path=output, code="exists")
    if not real_output.parent.is_dir():
        raise PlanError("its parent folder does not exist", path=output, code="missing")
    if os.path.lexists(output):
        if not output.is_dir() or output.is_symlink():
            raise PlanError("exists and is not a folder", path=output, code="exists")
        if _holds_working_folder(real_output):
            what = "is or contains the working directory, and would be replaced by another folder"
            raise PlanError(what, path=output, code="exists")
        if real_output.is_mount():
            raise PlanError(_CANNOT_REPLACE[errno.EBUSY], path=output, code="exists")


def _holds_working_folder(folder: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(folder)
    except FileNotFoundError:  # Deleted.
        return False


def remove_leftovers(output: Path) -> None:
    """Delete what a process of this user left beside an output if it was killed after its last rename."""
    output = output.resolve()
    if not output.name or not any(os.path.lexists(name_of(output)) for name_of in (place_of, lock_of)):
        return
    with suppress(PlanError, OSError), _locked_parent(output) as (parent, user):
        place = open_left(parent, output, user)
        if place is not None:
            with place:
                if place.status(FOLDER) is None and not _shared(place):
                    _remove(parent, place, output)


def check_space(output: Path, nbytes: int) -> None:
    """Raise PlanError unless the drive has space for `nbytes` more bytes."""
    status = os.statvfs(output.resolve().parent)
    free = status.f_bavail * status.f_frsize
    if free < nbytes:
        missing = -(-(nbytes - free) // 10**6) / 1000
        raise PlanError(
            f"needs {nbytes / 1e9:.3f} GB, {free / 1e9:.3f} GB are free there ({missing:.3f} GB too few)",
            path=output,
            code="space",
        )


class LocalStaging:
    """A folder beside an output, in which it is assembled; see `protocols.Staging`."""

    can_read = True

    def __init__(self, output: Path, place: OpenFolder, modes: Modes) -> None:
        """Use `place`, a private folder of this user, which may hold files of an earlier attempt."""
        self._output = output
        self.place = place
        """Holds the notes, which must not be in the output."""
        self.modes = _apply_umask(place, modes)
        """Permissions after the umask, also applied to files that were created under another umask."""
        self.folder = self._open_folder()
        """Becomes the output."""
        self.notes: list[LocalNotes] = []
        """Those of this attempt."""
        self._written: set[str] = set()
        """Files that this attempt has opened for writing."""

    @property
    def location(self) -> str:
        return str(self.place.path)

    def _open_folder(self) -> OpenFolder:
        status = self.place.status(FOLDER)
        if status is None or not stat.S_ISDIR(status.st_mode) or status.st_uid != self.place.owner:
            return self._make_empty()
        folder = self.place.subfolder(FOLDER)
        restrict(folder.fd, self.modes.folder)
        return folder

    def clear(self) -> None:
        self.notes.clear()
        self._written.clear()
        self.folder.close()
        self.folder = self._make_empty()

    def _make_empty(self) -> OpenFolder:
        for name in self.place.names():
            self.place.remove(name)
        self.place.make(FOLDER, self.modes.folder)
        return self.place.subfolder(FOLDER)

    def check_space(self, nbytes: int) -> None:
        check_space(self._output, nbytes - self.place.allocated_nbytes())

    @property
    def has_notes(self) -> bool:
        """Whether there are notes about files here."""
        if self.notes:
            return any(notes.are_kept for notes in self.notes)
        return _has_notes(self.place)

    def take_parts(self) -> None:
        """They are here."""

    def names(self) -> list[str]:
        return self.folder.names()

    def remove(self, name: str) -> None:
        self._written.discard(name)
        self.folder.remove(name)

    def open(self, name: str, nbytes: int) -> InputFile:
        # After a failed write-back the page cache may still hold the intended bytes.
        sync_and_drop_pages(self.folder, name)
        return InputFile(self.folder.path / name, nbytes, access=Access.ONCE, folder=self.folder)

    def write_file(self, name: str, nbytes: int) -> OutputFile:
        file = OutputFile(self.folder, name, nbytes, create=self._is_new(name), mode=self.modes.file)
        self._written.add(name)
        return file

    def _is_new(self, name: str) -> bool:
        """Whether a file is to be created. One that was written and is gone is not: its bytes would be zeros."""
        return name not in self._written and self.folder.status(name) is None

    def write_head(self, name: str, head: bytes, nbytes: int) -> None:
        is_new = self._is_new(name)
        fd = self.folder.open(name, _TO_CREATE, self.modes.file) if is_new else self.folder.open_own(name, os.O_RDWR)
        with open(fd, "r+b") as stream, with_path(self.folder.path / name):
            restrict(fd, self.modes.file)
            stream.write(head)
            stream.truncate(nbytes)
            stream.flush()
            os.fsync(stream.fileno())

    def put(self, name: str, pieces: Iterable[bytes], mode: int | None = None) -> None:
        mode = self.modes.file if mode is None else mode | stat.S_IRUSR
        stream = open(self.folder.open(name, _TO_CREATE, mode), "wb")  # noqa: SIM115 (closing may fail as writing does)
        try:
            for piece in pieces:  # Outside with_path: errors of reading the pieces name their own file.
                with with_path(self.folder.path / name):
                    stream.write(piece)
            with with_path(self.folder.path / name):
                stream.flush()
                os.fsync(stream.fileno())
        finally:
            with with_path(self.folder.path / name):
                stream.close()

    def read_notes(self, name: str) -> bytes | None:
        return read_notes(self.place, name)

    def open_notes(self, name: str, header: bytes | None) -> LocalNotes:
        self.notes.append(LocalNotes(self.place, name, header))
        return self.notes[-1]


class LocalNotes(Closable):
    """See `protocols.Notes`. Not synced to the drive: resumption verifies what they say."""

    def __init__(self, folder: OpenFolder, name: str, header: bytes | None) -> None:
        """As `Staging.open_notes`."""
        self._lock = threading.Lock()
        self._path = folder.path / name
        self.are_kept = header is None
        """Whether there is anything behind the header."""
        if header is None:
            self._fd = folder.open_own(name, os.O_WRONLY | os.O_APPEND)
            return
        folder.remove(name)
        self._fd = folder.open(name, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            self.append(header)
        except BaseException:
            self.close()
            raise
        self.are_kept = False

    def append(self, text: bytes) -> None:
        with self._lock, with_path(self._path):
            while text:
                text = text[os.write(self._fd, text) :]
        self.are_kept = True

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_notes(folder: OpenFolder, name: str) -> bytes | None:
    """The content of notes; None if this user has none."""
    try:
        fd = folder.open_own(name, os.O_RDONLY)
    except (FileNotFoundError, FormatError):
        return None
    with with_path(folder.path / name), open(fd, "rb") as file:
        return file.read()


def _apply_umask(place: OpenFolder, modes: Modes) -> Modes:
    place.remove("probe")
    place.make("probe", 0o777)
    with place.subfolder("probe") as probe:
        granted = os.fstat(probe.fd).st_mode | stat.S_IRWXU
    place.remove("probe")
    return Modes(modes.folder & granted, modes.file & granted)


@contextmanager
def staging_folder(
    output: Path,
    replaced: Callable[[Path], frozenset[str]] | None = None,
    *,
    modes: Modes | None = None,
    shared: str | None = None,
) -> Iterator[LocalStaging]:
    """Yield a staging folder beside `output`, which becomes `output` when the block ends.

    It may hold files of an earlier attempt; with `shared` it holds those that parts have added, see `Store.stage`. If
    the block fails, they are deleted unless there are notes about them, or parts. An existing `output` must be empty
    or, with `replaced`, an older output.

    Args:
        replaced: returns the files of an older output that may be deleted, or raises PlanError.

    Raises:
        PlanError: another process is writing the same output, the files beside it are not this user's and relayout's,
            or `output` cannot be replaced. Nothing was changed.
        OSError: writing failed, or something else was created at `output` meanwhile.
    """
    output = output.resolve()
    with _locked_parent(output) as (parent, user):
        _undo_rename(parent, output, user, replaced)
        left = open_left(parent, output, user)
        with left or _make_new(parent, output, user) as place, _folder_of(place, shared, replaced) as inner:
            _delete_replaced(parent, place, output)
            staging = LocalStaging(output, inner, modes or Modes())
            try:
                _check_replaceable(place, parent, output)
                if replaced is not None:
                    replaced(output)
                yield staging
                _publish(staging, parent, place, output, frozenset() if replaced is None else replaced(output))
                _remove(parent, place, output)
            except BaseException as error:
                is_published = inner.status(FOLDER) is None
                if is_published or not (staging.has_notes or _shared(place)):
                    _remove(parent, place, output)
                elif staging.notes:
                    error.add_note(kept_note(staging.location))
                raise
            finally:
                staging.folder.close()


def _folder_of(place: OpenFolder, shared: str | None, replaced: Callable[[Path], object] | None) -> OpenFolder:
    """Where an output is assembled: in the folder beside it, or in the one in there that parts share."""
    if shared is not None and shared.startswith(LIVE):
        _remove_older(place, force=replaced is not None)
        return subfolder(place, shared_folder(shared))
    if shared is not None:
        if place.status(f"{shared_folder(shared)}/{FOLDER}") is None:
            with suppress(OSError):
                place.path.rmdir()  # Only if it is empty.
            raise PlanError("no unit of this conversion is done", path=place.path, code="missing")
        return place.subfolder(shared_folder(shared))
    if _shared(place) and replaced is None:
        what = "holds units of other processes: --commit publishes them, --force discards them"
        raise PlanError(what, path=place.path, code="exists")
    return place.subfolder(".")


def _remove_older(place: OpenFolder, *, force: bool) -> None:
    """Delete what earlier attempts have left in a staging folder, whose lock is held.

    Units and resumable conversions are deleted only with `force`; else PlanError is raised.
    """
    if not force and (_has_notes(place) or _shared(place)):
        what = "holds an interrupted conversion, or units of other processes; --force discards them"
        raise PlanError(what, path=place.path, code="exists")
    for name in place.names():
        if name != _REPLACED:
            place.remove(name)


def _has_notes(place: OpenFolder) -> bool:
    """Whether there are notes about files here."""
    names = [name for name in place.names() if name.startswith("relayout.") and name != _REPLACED]
    return any(status.st_size > 0 for name in names if (status := place.status(name)) is not None)


def shared_folder(shared: str) -> str:
    """The folder, in that beside an output, in which parts of this name are assembled."""
    return f"{_SHARED}{shared}"


def _shared(place: OpenFolder) -> bool:
    """Whether there are parts that a later process may publish."""
    return any(name.startswith(_SHARED) and not name.startswith(shared_folder(LIVE)) for name in place.names())


def subfolder(place: OpenFolder, name: str, mode: int = stat.S_IRWXU) -> OpenFolder:
    """A subfolder, which is made if it is missing; several processes may do so at the same time."""
    with suppress(FileExistsError):
        place.make(name, mode)
    return place.subfolder(name)


@contextmanager
def _locked_parent(output: Path) -> Iterator[tuple[OpenFolder, int]]:
    """Hold the output's lock. Yield its parent folder and this user's id there."""
    with OpenFolder(output.parent) as parent, locked(parent, lock_of(output).name, output) as user:
        yield parent, user


def lock_of(output: Path) -> Path:
    """Path of the lock of an output."""
    return output.with_name(f".{output.name}.relayout-lock")


def place_of(output: Path) -> Path:
    """Path of the folder in which an output is assembled."""
    return output.with_name(f".{output.name}.relayout-partial")


def open_left(parent: OpenFolder, output: Path, user: int) -> OpenFolder | None:
    """Open the staging folder of an earlier attempt and make it private; None if there is none.

    Raises:
        PlanError: it belongs to another user, or relayout did not make it.
    """
    path = place_of(output)
    status = parent.status(path.name)
    if status is None:
        return None
    check_owner_is(path, status, user)
    if not stat.S_ISDIR(status.st_mode):
        raise PlanError("exists and is not relayout's folder; remove it", path=path, code="exists")
    place = parent.subfolder(path.name)
    try:
        check_owner_is(path, os.fstat(place.fd), user)
        _check_ours(place)
        restrict(place.fd, stat.S_IRWXU)
    except BaseException:
        place.close()
        raise
    return place


def _check_ours(place: OpenFolder) -> None:
    """Raise PlanError unless a staging folder has only names that relayout uses, so that it may be deleted."""
    for name in place.names():
        if not _OURS.fullmatch(name):
            what = f"holds {shown(name)}, which relayout did not put there; move it away"
            raise PlanError(what, path=place.path, code="exists")


def _make_new(parent: OpenFolder, output: Path, user: int) -> OpenFolder:
    parent.make(place_of(output).name, stat.S_IRWXU)
    place = open_left(parent, output, user)
    if place is None or place.names():
        raise PlanError("was changed by another process", path=place_of(output), code="exists")
    return place


def _remove(parent: OpenFolder, place: OpenFolder, output: Path) -> None:
    """Delete the staging folder, but nothing that has replaced it at its path, and no foreign files."""
    with suppress(OSError, PlanError):
        _delete_replaced(parent, place, output)
        _check_ours(place)
        for name in place.names():
            with suppress(OSError):
                place.remove(name)
        os.rmdir(place.path.name, dir_fd=parent.fd)


def _undo_rename(
    parent: OpenFolder, output: Path, user: int, replaced: Callable[[Path], frozenset[str]] | None
) -> None:
    """Rename an older folder back to `output`, if a process was killed between two renames."""
    old = older_folder(output)
    status = parent.status(old.name)
    if status is None:
        return
    check_owner_is(old, status, user)
    if parent.status(output.name) is None:
        if replaced is None:
            raise PlanError(f"is missing{recovery_advice(output)}, or use --force", path=output, code="missing")
        replaced(old)
        rename(parent, old.name, parent, output.name)


def _check_replaceable(place: OpenFolder, parent: OpenFolder, output: Path) -> None:
    """Check before any work whether an existing output can be renamed.

    rename(2) onto a folder that is not empty always fails, but reports other obstacles first: the kernel checks mount
    points and permissions before, and overlayfs its layers.

    Raises:
        PlanError: the output cannot be renamed.
    """
    if parent.status(output.name) is None:
        return
    place.remove("occupied")
    place.make("occupied", stat.S_IRWXU)
    place.make("occupied/by", stat.S_IRWXU)
    try:
        rename(parent, output.name, place, "occupied")
    except OSError as error:
        if error.errno not in _harmless_errors(output):
            reason = _CANNOT_REPLACE.get(error.errno or 0, f"cannot be replaced: {error.strerror}")
            raise PlanError(reason, path=output, code="exists") from None
    finally:
        place.remove("occupied")


def _harmless_errors(output: Path) -> set[int]:
    """Errors of the trial rename that do not prevent the replacement."""
    is_empty = not any(output.iterdir())
    is_read_only = not os.access(output, os.W_OK)
    return (
        {errno.ENOTEMPTY, errno.EEXIST}
        | ({errno.EXDEV} if is_empty else set())  # An empty folder is overwritten, not renamed.
        | ({errno.EACCES} if is_read_only else set())  # `_replace` makes it writable.
    )


def _publish(
    staging: LocalStaging, parent: OpenFolder, place: OpenFolder, output: Path, replaced: frozenset[str]
) -> None:
    staging.folder.sync()
    if replaced:
        _replace(staging.place, parent, place, output, replaced)
    else:
        # Fails if a folder with files in it was created there meanwhile.
        rename(staging.place, FOLDER, parent, output.name)
    # The output is complete now, even if deleting the older one fails.
    with suppress(OSError):
        os.fsync(parent.fd)


def _replace(
    assembly: OpenFolder, parent: OpenFolder, place: OpenFolder, output: Path, replaced: frozenset[str]
) -> None:
    """Exchange the complete folder with the older output, which is moved to the staging folder."""
    with parent.subfolder(output.name) as older, assembly.subfolder(FOLDER) as newer:
        record = _Replaced(os.fstat(older.fd).st_ino, os.fstat(newer.fd).st_ino, sorted(replaced))
        with suppress(PermissionError):
            # A folder without write permission cannot be moved to another parent.
            os.fchmod(older.fd, stat.S_IMODE(os.fstat(older.fd).st_mode) | stat.S_IWUSR)
    place.write(_REPLACED, json.dumps(asdict(record)).encode(), 0o600)
    # Rename it first, so that a later attempt does not mistake the older folder for one to resume.
    rename(assembly, FOLDER, place, _DONE)
    try:
        if not exchange(place, _DONE, parent, output.name):
            _replace_in_two_steps(place, parent, output)
    except BaseException:
        rename(place, _DONE, assembly, FOLDER)
        place.remove(_REPLACED)
        raise


def _replace_in_two_steps(place: OpenFolder, parent: OpenFolder, output: Path) -> None:
    """Replace by two renames if the system cannot exchange names. Between them, no output exists."""
    old = older_folder(output).name
    rename(parent, output.name, parent, old)
    try:
        rename(place, _DONE, parent, output.name)
    except BaseException:
        rename(parent, old, parent, output.name)
        raise


@dataclass(frozen=True, slots=True)
class _Replaced:
    """Recorded before an output is replaced: the proof by which the older one is deleted, also after a kill."""

    older: int
    """Its inode."""
    newer: int
    """The inode of the folder that takes its place."""
    files: list[str]
    """The files that its records name."""


def _delete_replaced(parent: OpenFolder, place: OpenFolder, output: Path) -> None:
    """Delete the replaced output: by its inode it is the one of the record, and only files that the record names.

    Raises:
        PlanError: it holds other files, which stay.
        OSError: a file cannot be deleted.
    """
    text = read_notes(place, _REPLACED)
    if text is None:
        return
    record = _Replaced(**json.loads(text))
    old = older_folder(output)
    for folder, path in ((place, place.path / _DONE), (parent, old)):
        status = folder.status(path.name)
        if status is None or (path == old and parent.status(output.name) is None):
            continue
        if status.st_ino == record.older:
            try:
                folder.remove(path.name, record.files)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                what = "holds files that relayout did not write; move them away"
                raise PlanError(what, path=path, code="exists") from None
        elif folder is place and status.st_ino != record.newer:
            raise PlanError("is not the folder that was replaced; move it away", path=path, code="exists")
    place.remove(_REPLACED)
