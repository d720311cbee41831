"""Outputs are absent or complete: they are written to a staging folder next to OUT, which is renamed to OUT at the end.

The staging folder, `.OUT.relayout-partial`, is readable by this user only and held open from start to end. Other users
may create, rename and link files next to OUT, for example in /tmp. Files and folders of other users there are refused,
and never opened, deleted or reused.

The staging folder has a subfolder for each work that was begun there, named after the work's fingerprint. It contains
the assembled output, and the records of its finished parts. Several processes, also on several machines, may write
parts of one output on a shared file system, each in a private folder there. When all files of a part are on the drive,
they are renamed to the assembled output, and its record is written last. So files of a lost process never count as a
part.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from relayout.errors import PlanError, shown
from relayout.publish.output import (
    ATTEMPT,
    FOLDER,
    LocalOutput,
    OutputKind,
    OutputSpec,
    has_parts,
    kept_note,
    left_of,
    older_folder,
    partial_folder,
    read_own,
    subfolder,
)
from relayout.storage.local.descriptors import (
    OpenFolder,
    check_owner_is,
    exchange,
    is_ours,
    locked,
    locked_file,
    rename,
    restrict,
    user_of_new_files,
    write_file,
)
from relayout.storage.local.store import LocalStore, entries
from relayout.storage.stores import Store

_WORK = "work-"
_LIVE = "live-"
REPLACED = "replaced"
"""Name of the record of an output that is being replaced."""
_DONE = "done"
"""Name of the complete folder just before it becomes the output. After an exchange, it is the replaced folder, to be
deleted."""
_OURS = re.compile(r"done|replaced|occupied|work-.+|\..+\.partial", re.DOTALL)
"""Matches names in a staging folder: those above, and small files that are being written."""
_CANNOT_REPLACE = {
    errno.EBUSY: "is a mount point, which cannot be replaced; choose a folder in it",
    errno.EXDEV: "is in a lower layer of an overlay file system and cannot be replaced; choose another folder",
}


@dataclass(frozen=True, slots=True)
class FolderPublisher:
    """The publisher for a folder; see `publishers.StorePublisher`."""

    output: Path

    def check(self, source: Store, older: OutputKind, *, force: bool) -> None:
        remove_leftovers(self.output)
        check_output_path(source.path(""), self.output)
        replaceable(older, force, self.output)

    def begin(
        self, older: OutputKind, work: OutputSpec, *, force: bool, gathers: bool = False
    ) -> AbstractContextManager[LocalOutput]:
        replaced = partial(replaceable, older, True) if force else None
        return staging_folder(self.output, work, replaced, gathers=gathers)

    def begin_part(self, older: OutputKind, work: OutputSpec, *, force: bool) -> AbstractContextManager[LocalOutput]:
        return staging_part(self.output, older.marker, work, replace=force)

    def replace(self, name: str, expected: bytes | None, content: bytes) -> None:
        replace_file(self.output / name, expected, content)

    def add(self, name: str, content: bytes) -> None:
        write_file(self.output / name, content)

    def remove(self, older: OutputKind) -> None:
        remove_output(self.output, older)


def replaceable(older: OutputKind, force: bool, folder: Path) -> frozenset[str]:
    """Return the names of an output's files that may be deleted; see `OutputKind.check`."""
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if force and older.marker in there:  # Otherwise the output is refused at once, without listing a large folder.
        names = {name: entry.is_dir(follow_symlinks=False) for name, entry in entries(folder, hidden=True)}
        above = {name.rpartition("/")[0] for name in names}
        there = {name for name, is_folder in names.items() if not is_folder or name not in above}
    return older.check(LocalStore(folder), there, force=force)


def check_output_path(source: Path | None, output: Path) -> None:
    """Check that an output can be written at this path. Changes nothing.

    Args:
        source: the source's path; None if it is not on a file system.
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
    except FileNotFoundError:  # The working directory was deleted.
        return False


def remove_leftovers(output: Path) -> None:
    """Delete the remains next to an output of a process of this user that was killed after its last rename."""
    output = output.resolve()
    if not output.name or not any(os.path.lexists(name_of(output)) for name_of in (partial_folder, lock_of)):
        return
    with suppress(PlanError, OSError), _locked_parent(output) as (parent, user):
        place = open_left(parent, output, user)
        if place is not None:
            with place:
                if not any(_is_assembled(place, name) for name in _works(place)):
                    _remove(parent, place, output)


@contextmanager
def staging_folder(
    output: Path,
    work: OutputSpec,
    replaced: Callable[[Path], frozenset[str]] | None = None,
    *,
    gathers: bool = False,
) -> Iterator[LocalOutput]:
    """Yield a staging folder next to `output`, which becomes `output` when the block ends.

    It contains the finished parts of earlier attempts at the same work. If the block fails, it is deleted, unless it
    contains parts of resumable work. An existing `output` must be empty or, with `replaced`, an older output.

    Args:
        replaced: returns the files of an older output that may be deleted, or raises PlanError. If given, the remains
            of other work are deleted, too.
        gathers: True if other processes write all parts.
    """
    output = output.resolve()
    with _locked_parent(output) as (parent, user):
        _undo_rename(parent, output, user, replaced)
        with open_left(parent, output, user) or _make_new(parent, output, user) as place, ExitStack() as opened:
            others = _others_of(place, work, force=replaced is not None, gathers=gathers)
            if not work.is_resumable:
                place.remove(folder_of(work))
            inner = opened.enter_context(subfolder(place, folder_of(work)))
            _delete_replaced(parent, place, output)
            staging = LocalOutput(output, inner, work.modes, gathers=gathers)
            try:
                _check_replaceable(place, parent, output)
                if replaced is not None:
                    replaced(output)
                for other in others:
                    place.remove(other)
                yield staging
                staging.check_parts()
                _publish(staging, parent, place, output, frozenset() if replaced is None else replaced(output))
                _remove(parent, place, output)
            except BaseException as error:
                is_published = inner.status(FOLDER) is None
                if is_published or not any(_has_parts(place, name) for name in _works(place)):
                    _remove(parent, place, output)
                elif not gathers:
                    error.add_note(kept_note(str(place.path), error))
                raise
            finally:
                staging.folder.close()


def _others_of(place: OpenFolder, work: OutputSpec, *, force: bool, gathers: bool) -> list[str]:
    """Return the folders of other work in a staging folder, which this process has locked."""
    own, works = folder_of(work), _works(place)
    if gathers and work.is_resumable and (own not in works or place.status(f"{own}/{FOLDER}") is None):
        with suppress(OSError):
            place.path.rmdir()  # Only removes an empty folder.
        raise PlanError("no unit of this conversion is done", path=place.path, code="missing")
    if gathers and work.is_resumable:
        return []  # Other work may be running. Once the output is published, its folders are useless.
    others = [name for name in works if name != own]
    if not force and any(_has_parts(place, name) for name in others):
        what = "holds an interrupted attempt, with other options or of another source; --force discards it"
        raise PlanError(what, path=place.path, code="exists")
    return others


def folder_of(work: OutputSpec) -> str:
    """Return the name of the work's subfolder in the staging folder.

    If the work is not resumable, its remains are useless, and the holder of the output's lock may delete them.
    """
    return f"{_WORK}{'' if work.is_resumable else _LIVE}{work.fingerprint}"


def _works(place: OpenFolder) -> list[str]:
    """Return the names of the subfolders of all works."""
    return [name for name in place.names() if name.startswith(_WORK)]


def _is_assembled(place: OpenFolder, work: str) -> bool:
    """Return True if files of an output exist there, or another process is writing some."""
    with place.subfolder(work) as folder:
        return any(name == FOLDER or name.startswith(ATTEMPT) for name in folder.names())


def _has_parts(place: OpenFolder, work: str) -> bool:
    """Return True if an attempt could resume from parts."""
    with place.subfolder(work) as folder:
        return not work.startswith(_WORK + _LIVE) and has_parts(folder)


def remove_output(output: Path, older: OutputKind) -> None:
    """Delete an output and the remains of an unfinished one, see `StorePublisher.remove`.

    As for a replacement, only files in the output's records are deleted. Their names and the inode of the output's
    folder are recorded before that folder is moved to the staging folder, where it is deleted. A link at the output's
    path is refused: its target is another output.
    """
    check_output_path(None, output)
    output = output.parent.resolve() / output.name
    with _locked_parent(output) as (parent, user):
        status, left = parent.status(output.name), open_left(parent, output, user)
        if status is None and left is None:
            return
        files = frozenset[str]() if status is None else replaceable(older, True, output)
        with left or _make_new(parent, output, user) as place:
            _delete_replaced(parent, place, output)
            if status is not None:
                check_owner_is(output, status, user)
                with parent.subfolder(output.name) as folder:
                    record = _Replaced(os.fstat(folder.fd).st_ino, 0, sorted(files))
                    with suppress(PermissionError):
                        os.fchmod(folder.fd, stat.S_IMODE(os.fstat(folder.fd).st_mode) | stat.S_IWUSR)
                place.write(REPLACED, json.dumps(asdict(record)).encode(), 0o600)
                place.remove(_DONE)
                rename(parent, output.name, place, _DONE)
                _delete_replaced(parent, place, output)
            _remove(parent, place, output)


def replace_file(path: Path, expected: bytes | None, content: bytes) -> None:
    """Replace a small file if its content is the expected one, see `StorePublisher.replace`.

    The holder of the lock file replaces the file. If the lock file is deleted, two processes may each hold a lock. So
    the file itself is locked, too: only one process can hold that lock, because the name is checked after locking.

    The new content is written next to the file under a fixed name with relayout's mark. A killed process leaves that
    file. The next call unlinks it and creates a new file, so that a hard link to the old one is not written through.
    """
    lock, new = (path.with_name(f".{path.name}.relayout-{what}") for what in ("lock", "new"))
    with ExitStack() as held:
        held.enter_context(locked_file(lock, what=f"replacing {path.name}"))
        folder = held.enter_context(OpenFolder(path.parent))
        if (status := folder.status(path.name)) is not None and not stat.S_ISREG(status.st_mode):
            raise PlanError("exists and is not a regular file", path=path, code="exists")
        if status is not None:
            try:
                held.enter_context(locked_file(path, what="", create=False))
            except FileNotFoundError:
                status = None  # Another process has deleted it meanwhile.
        if (None if status is None else path.read_bytes()) != expected:
            raise FileExistsError(errno.EEXIST, "was replaced by another process", str(path))
        if (left := folder.status(new.name)) is not None:
            if not is_ours(left, stat.S_ISREG):
                raise PlanError("is not a regular file of this user; remove it", path=new, code="exists")
            folder.remove(new.name)
        with open(folder.open(new.name, os.O_WRONLY | os.O_CREAT), "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        rename(folder, new.name, folder, path.name)
        os.fsync(folder.fd)


@contextmanager
def _locked_parent(output: Path) -> Iterator[tuple[OpenFolder, int]]:
    """Hold the output's lock. Yield its parent folder and this user's id there."""
    with OpenFolder(output.parent) as parent, locked(parent, lock_of(output).name, output) as user:
        yield parent, user


def lock_of(output: Path) -> Path:
    """Return the path of the lock of an output."""
    return output.with_name(f".{output.name}.relayout-lock")


def open_left(parent: OpenFolder, output: Path, user: int) -> OpenFolder | None:
    """Open the staging folder of an earlier attempt and make it private; None if it does not exist."""
    path = partial_folder(output)
    status = parent.status(path.name)
    if status is None:
        return None
    check_owner_is(path, status, user)
    if not stat.S_ISDIR(status.st_mode):
        raise PlanError("exists and is not a folder of relayout; remove it", path=path, code="exists")
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
    parent.make(partial_folder(output).name, stat.S_IRWXU)
    place = open_left(parent, output, user)
    try:
        if place is None or place.names():
            raise PlanError("was changed by another process", path=partial_folder(output), code="exists")
    except BaseException:
        if place is not None:
            place.close()
        raise
    return place


def _remove(parent: OpenFolder, place: OpenFolder, output: Path) -> None:
    """Delete the staging folder, except foreign files and anything that has replaced it at its path."""
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
            raise PlanError(f"is missing{left_of(output)}, or use --force", path=output, code="missing")
        replaced(old)
        rename(parent, old.name, parent, output.name)


def _check_replaceable(place: OpenFolder, parent: OpenFolder, output: Path) -> None:
    """Check before any work that an existing output can be renamed.

    rename(2) onto a folder that is not empty always fails, but reports other obstacles first: the kernel checks mount
    points and permissions before, and overlayfs checks its layers.
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
    """Return the errors of the trial rename that do not prevent the replacement."""
    is_empty = not any(output.iterdir())
    is_read_only = not os.access(output, os.W_OK)
    return (
        {errno.ENOTEMPTY, errno.EEXIST}
        | ({errno.EXDEV} if is_empty else set())  # An empty folder is overwritten, not renamed.
        | ({errno.EACCES} if is_read_only else set())  # `_replace` makes it writable.
    )


def _publish(
    staging: LocalOutput, parent: OpenFolder, place: OpenFolder, output: Path, replaced: frozenset[str]
) -> None:
    staging.folder.sync()
    if replaced:
        _replace(staging.place, parent, place, output, replaced)
    else:
        # Fails if a folder with files was created there meanwhile.
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
    place.write(REPLACED, json.dumps(asdict(record)).encode(), 0o600)
    # Rename it first, so that a later attempt does not take the older folder for one to resume.
    rename(assembly, FOLDER, place, _DONE)
    try:
        if not exchange(place, _DONE, parent, output.name):
            _replace_in_two_steps(place, parent, output)
    except BaseException:
        rename(place, _DONE, assembly, FOLDER)
        place.remove(REPLACED)
        raise


def _replace_in_two_steps(place: OpenFolder, parent: OpenFolder, output: Path) -> None:
    """Replace by two renames if the system cannot exchange names. Between them, the output does not exist."""
    old = older_folder(output).name
    rename(parent, output.name, parent, old)
    try:
        rename(place, _DONE, parent, output.name)
    except BaseException:
        rename(parent, old, parent, output.name)
        raise


@dataclass(frozen=True, slots=True)
class _Replaced:
    """A record written before an output is replaced. It identifies the older one for deletion, also after a kill."""

    older: int
    """Inode of the older output's folder."""
    newer: int
    """Inode of the folder that replaces it."""
    files: list[str]
    """Names of the files in the older output's records."""


def _delete_replaced(parent: OpenFolder, place: OpenFolder, output: Path) -> None:
    """Delete the replaced output if its inode is the recorded one, and in it only the recorded files."""
    text = read_own(place, REPLACED)
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
    place.remove(REPLACED)


_TRIES = 100


@contextmanager
def staging_part(output: Path, marker: str, work: OutputSpec, *, replace: bool) -> Iterator[LocalOutput]:
    """Yield a private folder for one attempt at parts of a work."""
    output = output.resolve()
    attempt, shared = f"{ATTEMPT}{os.urandom(8).hex()}", folder_of(work)
    with OpenFolder(output.parent) as parent:
        _check_not_published(output, marker, replace)
        with _assembly(parent, output, shared, attempt) as whole:
            try:
                with whole.subfolder(attempt) as folder:
                    staging = LocalOutput(output, folder, work.modes, whole)
                    try:
                        yield staging
                    except FileNotFoundError:
                        _check_not_published(output, marker, replace)
                        raise
                    finally:
                        staging.folder.close()
            finally:
                with suppress(OSError):
                    whole.remove(attempt)
                # Remove the folders if no part was added or the output was published. Both calls fail if a folder is
                # not empty.
                place = partial_folder(output).name
                with suppress(OSError):
                    os.rmdir(f"{place}/{shared}", dir_fd=parent.fd)
                    os.rmdir(place, dir_fd=parent.fd)


def _check_not_published(output: Path, marker: str, replace: bool) -> None:
    if not replace and (output / marker).is_file():
        raise PlanError("is complete already; --force replaces it", path=output, code="exists")


def _assembly(parent: OpenFolder, output: Path, shared: str, attempt: str) -> OpenFolder:
    """Open the assembly folder, with a new folder for an attempt. Several processes may create it at the same time."""
    user = user_of_new_files(parent, lock_of(output).name)
    for _ in range(_TRIES):
        with suppress(FileExistsError):
            parent.make(partial_folder(output).name, stat.S_IRWXU)
        try:
            with open_left(parent, output, user) or parent.subfolder(partial_folder(output).name) as place:
                whole = subfolder(place, shared)
            whole.make(attempt, stat.S_IRWXU)
            return whole
        except FileNotFoundError:
            continue  # Another process has just found it empty, and removed it.
    raise PlanError("is removed repeatedly by another process", path=partial_folder(output), code="busy")
