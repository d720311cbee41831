"""Outputs: the work, the files that may be replaced, the protocol with its order of calls; and `LocalOutput`.

`LocalOutput` is a private folder that is held open from start to end. Files in it are opened relative to it. Files and
folders of other users there are refused, and never opened, deleted or reused.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from relayout.core.digests import xxh3_hex
from relayout.errors import FormatError, PlanError, shown
from relayout.storage.local.descriptors import OpenFolder, rename, restrict, with_path
from relayout.storage.local.store import OutputFile
from relayout.storage.stores import Modes, Store, WritableFile

if TYPE_CHECKING:
    from relayout.storage.cloud.part_copies import PartCopies

_IN_THE_WAY = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}
"""Error numbers of the last rename if another file or folder was created at the output meanwhile."""
_NUM_SHOWN = 3
"""Maximum number of files that an error names."""


_PARTIAL = re.compile(r"\.(.+)\.relayout-partial", re.DOTALL)
"""Matches names that `partial_folder` returns."""


def partial_folder(path: Path) -> Path:
    """Return the folder next to an output in which it is assembled."""
    return path.with_name(f".{path.name}.relayout-partial")


def older_folder(path: Path) -> Path:
    """Return the temporary name of a folder that --force replaces, if the two names cannot be exchanged atomically."""
    return path.with_name(f".{path.name}.relayout-old")


def left_of(path: Path) -> str:
    """Return a clause for a message about a missing output, which names remains of an attempt next to it."""
    old, partial = older_folder(path), partial_folder(path)
    if old.is_dir():
        return f"; an interrupted replacement left the older folder at {old}: rename it back"
    found = f"; {partial.name} next to it belongs to a command that is writing it, or was interrupted"
    return found if partial.exists() else ""


def refuse_unfinished(store: Store) -> None:
    """Raise PlanError for a folder in which an output is assembled, or a folder inside it: not a checkpoint yet."""
    path = store.path("")
    above = () if path is None else (path.absolute(), *path.absolute().parents)[:3]
    for folder in above:
        if match := _PARTIAL.fullmatch(folder.name):
            what = (
                f"is unfinished: relayout was making {folder.with_name(match[1])} there, or still is; the command that"
                f" began it resumes it; or delete {folder}, if no process writes there any more"
            )
            raise PlanError(what, path=str(store), code="missing")


@dataclass(frozen=True, slots=True)
class OutputKind:
    """An output that `force` may replace: only one that its own records describe, without other files."""

    marker: str
    """Name of the file that is written last; every such output has it."""
    describe: Callable[[Store], str]
    """Returns a description of an output from its records. FormatError: they are damaged, or not relayout's."""
    names: Callable[[Store], frozenset[str]]
    """Returns the names of all files in an output's records, including the records. FormatError: as for `describe`."""

    def check(self, store: Store, there: Collection[str], *, force: bool) -> frozenset[str]:
        """Check that an output may be written to `store`. Changes nothing.

        Args:
            there: names of all existing files and empty folders, including hidden names.
            force: True if an older output may be replaced.

        Returns:
            Names of the files that may be deleted: those in the older output's records. No other file is ever deleted.

        Raises:
            PlanError: a file or folder exists that may not be deleted.
        """
        if not there:
            return frozenset()
        if self.marker not in there:
            what = (
                f"is not empty: holds {first_of(there)}, and no {self.marker}: not an output of relayout; choose"
                " another output"
            )
            raise PlanError(what, path=str(store), code="exists")
        try:
            if not force:
                what = f"already holds {self.describe(store)}; it is unchanged; --force replaces it"
                raise PlanError(what, path=str(store), code="exists")
            named = self.names(store)
        except FormatError as error:
            what = f"is not empty; not an output of relayout, so choose another output: {error}"
            raise PlanError(what, path=str(store), code="exists") from None
        if foreign := sorted(set(there) - named):
            what = f"holds files that relayout did not write, so --force does not replace it: {first_of(foreign)}"
            raise PlanError(what, path=str(store), code="exists")
        return named


def first_of(names: Collection[str]) -> str:
    """Return the first names as text for a message."""
    first = ", ".join(map(shown, sorted(names)[:_NUM_SHOWN]))
    return f"{first} ..." if len(names) > _NUM_SHOWN else first


def kept_note(location: str, error: BaseException) -> str:
    """Return the note for the error of an attempt with kept files: how to resume it, and what to repair before."""
    kept = f"finished work is kept in {location}"
    if isinstance(error, FormatError):  # The source is damaged, changed, or another one: no attempt resumes with it.
        return f"{kept}; once that is repaired, the same command resumes it, or says why it cannot"
    if isinstance(error, PlanError) or (isinstance(error, OSError) and error.errno in _IN_THE_WAY):
        return f"{kept}; once nothing is in the way of the output, the same command resumes it"
    return f"{kept}; the same command resumes it"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """Describes an output to write. Writers with equal fingerprints resume each other's work."""

    what: str
    """Name of the work for messages, such as "a conversion of MODEL"."""
    fingerprint: str
    """Digest of everything that determines the written bytes."""
    weights: Collection[str] = ()
    """Names of the weight files, if the work chooses them, so that a mark may be added; see `with_suffix`."""
    others: Collection[str] = ()
    """Names of all other files."""
    modes: Modes = field(default_factory=Modes)
    is_resumable: bool = True
    """True if finished parts are kept when the work fails. Otherwise no file is kept, and other processes add parts
    only after the publishing process has begun the output."""
    scratch: str | Path | None = None
    """Folder for files to be uploaded to a bucket. None: the system's folder of temporary files."""
    copies: PartCopies | None = None
    """For a bucket: uploads of files whose parts the server copies from other objects. None: all bytes are sent."""


def with_suffix(name: str, suffix: str) -> str:
    """Return the name of a weight file with a mark before its extension."""
    if not suffix:
        return name
    stem, dot, extension = name.rpartition(".")
    return f"{stem}-{suffix}{dot}{extension}"


class Output(Protocol):
    """An unfinished output. Until the end, readers do not see it, or do not take it for complete.

    The order of calls, in one process that writes an output (`begin`):

    1. `kept(part)` for each part: a part with notes is finished, and is not written again.
    2. For each other part: `check_space`; `write` opens each of its large files any number of times; `head` completes
       each one with its first bytes, which depend on all other bytes; then `keep(part, notes)`.
    3. `put` for small files, in any order.
    4. The end of the `with` block publishes: all files become visible at once, or the marker is written last. If the
       block fails, finished parts are kept for the next attempt, or no file is (`OutputSpec.is_resumable`).

    Several processes may write the parts (`begin_part`: steps 1 and 2, each for its own parts), and one publishes
    (`begin` with `gathers`: steps 1, 3 and 4). Parts may be written twice, also at the same time: the files are equal.

    Methods raise OSError if a request or a system call fails. They raise FormatError if a given name exists here but is
    not a regular file of this user.
    """

    @property
    def suffix(self) -> str:
        """The mark in the names of weight files, see `with_suffix`. Usually empty."""

    def check_space(self, nbytes: int, part_nbytes: int | None = None) -> None:
        """Check that the output has space: `nbytes` in all, and `part_nbytes` for each part; None: one part.

        Raises:
            PlanError: the drive has less space.
        """

    def write(self, name: str, nbytes: int) -> WritableFile:
        """Open a file of known length for writing. If it does not exist yet, create it and allocate its space.

        Raises:
            OSError: there is not enough space.
        """

    def head(self, name: str, head: bytes, nbytes: int) -> None:
        """Write the first bytes of a file of `nbytes` bytes, after all its other bytes, and close it."""

    def put(self, name: str, pieces: Iterable[bytes], mode: int | None = None) -> None:
        """Write a new file whole.

        Args:
            mode: the file's permissions before the umask. None: the permissions of all other files.
        """

    def kept(self, part: str) -> bytes | None:
        """Return the notes of a finished part with all of its files; None if the part is not finished."""

    def keep(self, part: str, notes: bytes) -> None:
        """Mark a part as finished. Its files are all files that were completed since the last call."""


FOLDER = "output"
"""Name of the folder with the files of the output, in the folder where it is assembled."""
RECORD = "part-"
"""Prefix of the records of finished parts, next to that folder."""
ATTEMPT = "attempt-"
"""Prefix of the folders of processes that write parts, next to that folder."""
_TO_CREATE = os.O_RDWR | os.O_CREAT
_HEAD_NBYTES = 2**16
"""Number of a file's first bytes that the digest in its part's record covers."""


def check_space(folder: Path, output: Path, nbytes: int, advice: str = "") -> None:
    """Raise PlanError, which names `output`, unless the drive of a folder has space for `nbytes` more bytes."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if free < nbytes:
        from rich.filesize import decimal  # Only for errors.

        what = f"needs {decimal(nbytes)}, {decimal(free)} are free there ({decimal(nbytes - free)} too few){advice}"
        raise PlanError(what, path=output, code="space")


class LocalOutput:
    """A private folder in which an output is assembled; see `Output`.

    A part is finished when its record exists, which is written after its files are on the drive. The record contains
    the state of each file: length, modification time, and a digest of its first bytes.

    A process that can rewrite changed parts also compares the modification time, so it rejects a file that was written
    to since. A process that only gathers parts of other processes, or publishes, does not compare it: some network file
    systems change the time of a file after it was closed.
    """

    suffix = ""

    def __init__(
        self,
        output: Path,
        place: OpenFolder,
        modes: Modes,
        whole: OpenFolder | None = None,
        *,
        gathers: bool = False,
    ) -> None:
        """Write files below `place`, a private folder of this user.

        Args:
            whole: the folder that receives the files of finished parts and their records. Default: `place`; every file
                in it without a record is deleted.
            gathers: True if other processes write all parts.
        """
        self._wants_times = not gathers
        self._output = output
        self.place = place
        self._whole = place if whole is None else whole
        self.modes = _apply_umask(place, modes)
        """Permissions after the umask, also applied to files that were created under another umask."""
        self.folder = self._open_folder()
        """The folder of the files. In the assembled output, this folder becomes the output."""
        self._written: set[str] = set()
        """Files that were opened for writing."""
        self._complete: list[str] = []
        """Complete files that do not belong to a part yet."""
        if whole is None:
            try:
                self._sweep()
            except BaseException:
                self.folder.close()
                raise

    def _open_folder(self) -> OpenFolder:
        status = self.place.status(FOLDER)
        if status is None or not stat.S_ISDIR(status.st_mode) or status.st_uid != self.place.owner:
            self.place.remove(FOLDER)
            return subfolder(self.place, FOLDER, self.modes.folder)
        folder = self.place.subfolder(FOLDER)
        try:
            restrict(folder.fd, self.modes.folder)
        except BaseException:
            folder.close()
            raise
        return folder

    def _sweep(self) -> None:
        """Delete outdated records, and the files of parts that are not finished."""
        named: set[str] = set()
        for name in self.place.names():
            if name.startswith(RECORD):
                record = self._read_record(name)
                if record is None:
                    self.place.remove(name)
                else:
                    named |= record.files.keys()
        for name in self.folder.names():
            if name not in named:
                self.folder.remove(name)

    def check_space(self, nbytes: int, part_nbytes: int | None = None) -> None:
        check_space(self._output.parent, self._output, nbytes)

    def remove(self, name: str) -> None:
        """Delete the file `name`, if it exists."""
        self._written.discard(name)
        self.folder.remove(name)

    def write(self, name: str, nbytes: int) -> OutputFile:
        file = OutputFile(self.folder, name, nbytes, create=self._is_new(name), mode=self.modes.file)
        self._written.add(name)
        return file

    def _is_new(self, name: str) -> bool:
        """Return True if a file is to be created. One that was written and is gone is not: it would be all zeros."""
        return name not in self._written and self.folder.status(name) is None

    def head(self, name: str, head: bytes, nbytes: int) -> None:
        is_new = self._is_new(name)
        fd = self.folder.open(name, _TO_CREATE, self.modes.file) if is_new else self.folder.open_own(name, os.O_RDWR)
        with open(fd, "r+b") as stream, with_path(self.folder.path / name):
            restrict(fd, self.modes.file)
            stream.write(head)
            stream.truncate(nbytes)
            stream.flush()
            os.fsync(stream.fileno())
        self._complete.append(name)

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

    def kept(self, part: str) -> bytes | None:
        record = self._read_record(RECORD + part)
        return None if record is None else record.notes

    def _read_record(self, name: str) -> Record | None:
        """Return the record of a part; None if it does not exist, or if the part's files have changed."""
        record = Record.read(self._whole, name)
        if record is None:
            return None
        with self._whole.subfolder(FOLDER) as folder:
            if record.changed_in(folder, with_times=self._wants_times):
                return None
            for file in record.files:
                fd = folder.open_own(file, os.O_RDONLY)
                try:
                    restrict(fd, self.modes.file)  # The file may have been created under another umask.
                finally:
                    os.close(fd)
        return record

    def check_parts(self) -> None:
        """Check before publishing that the files of all parts are unchanged.

        Raises:
            FormatError: a file was deleted, or written to.
        """
        for name in self.place.names():
            record = Record.read(self.place, name) if name.startswith(RECORD) else None
            if record is not None and (changed := record.changed_in(self.folder, with_times=False)):
                what = "was written to, or deleted, before the output was complete"
                raise FormatError(what, path=self.folder.path / changed[0], code="mismatch")

    def keep(self, part: str, notes: bytes) -> None:
        """Add the files, and then the record of the part. Fails if the output was published meanwhile."""
        names, self._complete = self._complete, []
        with subfolder(self._whole, FOLDER, self.modes.folder) as folder:
            if self._whole is not self.place:
                if self.kept(part) is not None:
                    return  # Another attempt has finished it: its files are equal.
                names = self.folder.names()
                for name in names:
                    rename(self.folder, name, folder, name)
            os.fsync(folder.fd)
            states = {name: FileState.of(folder, name) for name in names}
        files = {name: state for name, state in states.items() if state is not None}
        if len(files) < len(states):
            missing = min(states.keys() - files.keys())
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.folder.path / missing))
        self._whole.write(RECORD + part, Record(files, notes).dump(), 0o600)


def subfolder(place: OpenFolder, name: str, mode: int = stat.S_IRWXU) -> OpenFolder:
    """Create a subfolder if it is missing, and open it. Several processes may do so at the same time."""
    with suppress(FileExistsError):
        place.make(name, mode)
    return place.subfolder(name)


@dataclass(frozen=True, slots=True)
class FileState:
    """Distinguishes a file of a part from another file with the same name."""

    nbytes: int
    changed_ns: int
    """Modification time in nanoseconds."""
    digest: str
    """Digest of its first bytes, which are written last."""

    @staticmethod
    def of(folder: OpenFolder, name: str) -> FileState | None:
        """Return the state of a regular file of the folder's owner with a single hard link, or None."""
        try:
            fd = folder.open_own(name, os.O_RDONLY)
        except (FileNotFoundError, FormatError):
            return None
        with open(fd, "rb") as stream:
            status = os.fstat(fd)
            return FileState(status.st_size, status.st_mtime_ns, xxh3_hex(stream.read(_HEAD_NBYTES)))


@dataclass(frozen=True, slots=True)
class Record:
    """The record of a finished part."""

    files: Mapping[str, FileState]
    notes: bytes

    def changed_in(self, folder: OpenFolder, *, with_times: bool) -> list[str]:
        """Return the names of files with another state; `with_times` also compares modification times."""
        changed = []
        for name, state in self.files.items():
            found = FileState.of(folder, name)
            if found is not None and not with_times:
                found = replace(found, changed_ns=state.changed_ns)
            if found != state:
                changed.append(name)
        return changed

    def dump(self) -> bytes:
        """Return the record's content."""
        files = {name: astuple(state) for name, state in self.files.items()}
        return json.dumps({"files": files, "notes": self.notes.decode("latin-1")}).encode()

    @staticmethod
    def read(place: OpenFolder, name: str) -> Record | None:
        """Return the record in a file of this user; None if no valid one exists."""
        content = read_own(place, name)
        return None if content is None else Record.parse(content)

    @staticmethod
    def parse(content: bytes) -> Record | None:
        """Return the record from its content; None if the content is not a record."""
        try:
            value = json.loads(content)
            files = {
                name: FileState(int(nbytes), int(changed), str(digest))
                for name, (nbytes, changed, digest) in value["files"].items()
            }
            return Record(files, value["notes"].encode("latin-1"))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None


def read_own(folder: OpenFolder, name: str) -> bytes | None:
    """Return the content of a file of this user; None if no such file exists."""
    try:
        fd = folder.open_own(name, os.O_RDONLY)
    except (FileNotFoundError, FormatError):
        return None
    with with_path(folder.path / name), open(fd, "rb") as file:
        return file.read()


def has_parts(place: OpenFolder) -> bool:
    """Return True if finished parts exist, or if other processes are writing parts."""
    return any(name.startswith((RECORD, ATTEMPT)) for name in place.names())


def _apply_umask(place: OpenFolder, modes: Modes) -> Modes:
    place.remove("probe")
    place.make("probe", 0o777)
    with place.subfolder("probe") as probe:
        granted = os.fstat(probe.fd).st_mode | stat.S_IRWXU
    place.remove("probe")
    return Modes(modes.folder & granted, modes.file & granted)
