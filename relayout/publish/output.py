"""Outputs: what is made, what may be replaced, in which order the methods of an output are called; and `LocalOutput`.

That one is a private folder, and is held open from start to end: files in it are opened relative to it. Files and
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
from typing import Protocol

from relayout.core.digests import digest_hex
from relayout.errors import FormatError, PlanError, shown
from relayout.storage.local.descriptors import OpenFolder, rename, restrict, with_path
from relayout.storage.local.store import OutputFile
from relayout.storage.stores import Modes, Store, WritableFile

_IN_THE_WAY = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}
"""Errors of the last rename if something else was created at the output meanwhile."""
_NUM_SHOWN = 3
"""Files that an error names."""


_PARTIAL = re.compile(r"\.(.+)\.relayout-partial", re.DOTALL)
"""The name that `partial_folder` makes."""


def partial_folder(path: Path) -> Path:
    """Return the folder next to an output in which it is assembled."""
    return path.with_name(f".{path.name}.relayout-partial")


def older_folder(path: Path) -> Path:
    """Return the temporary name of a folder that --force replaces, if the two names cannot be exchanged atomically."""
    return path.with_name(f".{path.name}.relayout-old")


def left_of(path: Path) -> str:
    """Return the end of a message about an output that does not exist: what an attempt to make it left next to it."""
    old, partial = older_folder(path), partial_folder(path)
    if old.is_dir():
        return f"; an interrupted replacement left the older folder at {old}: rename it back"
    found = f"; {partial.name} beside it says that it is being made, or that this was interrupted"
    return found if partial.exists() else ""


def refuse_unfinished(store: Store) -> None:
    """Raise PlanError for a folder in which an output is assembled, or that is in one: no checkpoint yet."""
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
class Replaceable:
    """What `force` may replace, and by what proof: an output that its own records describe, and nothing beside it."""

    marker: str
    """The file that every such output has, which is written last."""
    describe: Callable[[Store], str]
    """What an output is, by its records. A FormatError: they are damaged, or foreign."""
    names: Callable[[Store], frozenset[str]]
    """Names of all files that an output's records name, the records too. A FormatError as of `describe`."""

    def check(self, store: Store, there: Collection[str], *, force: bool) -> frozenset[str]:
        """Check that an output may be written to `store`. Changes nothing.

        Args:
            there: names of all that exists, including hidden names and empty folders.
            force: whether an older output may be replaced.

        Returns:
            What may be deleted then: the files that the older output's records name. Nothing else is ever deleted.

        Raises:
            PlanError: something is there that may not be deleted.
        """
        if not there:
            return frozenset()
        if self.marker not in there:
            what = (
                f"is not empty: holds {first_of(there)}, and no {self.marker}, so nothing proves that relayout wrote"
                " it; choose another output"
            )
            raise PlanError(what, path=str(store), code="exists")
        try:
            if not force:
                what = f"already holds {self.describe(store)}; it stays as it is, --force replaces it"
                raise PlanError(what, path=str(store), code="exists")
            named = self.names(store)
        except FormatError as error:
            what = f"is not empty; nothing proves that relayout wrote it, so choose another output: {error}"
            raise PlanError(what, path=str(store), code="exists") from None
        if foreign := sorted(set(there) - named):
            what = f"holds files that relayout did not write, so --force does not replace it: {first_of(foreign)}"
            raise PlanError(what, path=str(store), code="exists")
        return named


def first_of(names: Collection[str]) -> str:
    """The first names, for a message."""
    first = ", ".join(map(shown, sorted(names)[:_NUM_SHOWN]))
    return f"{first} ..." if len(names) > _NUM_SHOWN else first


def kept_note(location: str, error: BaseException) -> str:
    """The note on the error of an attempt whose files are kept: what resumes it, and what must be done before."""
    kept = f"finished work is kept in {location}"
    if isinstance(error, FormatError):  # Of another source, or one that has changed, nothing is resumed.
        return f"{kept}; once that is repaired, the same command resumes it, or says why it cannot"
    if isinstance(error, PlanError) or (isinstance(error, OSError) and error.errno in _IN_THE_WAY):
        return f"{kept}; once nothing is in the way of the output, the same command resumes it"
    return f"{kept}; the same command resumes it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an output is going to be. Who makes the same goes on with what others, or an earlier attempt, finished."""

    what: str
    """What is made, for messages, such as "a conversion of MODEL"."""
    fingerprint: str
    """Digest of all that decides which bytes are written."""
    weights: Collection[str] = ()
    """Names of the weight files, if they are the work's own choice, so that a mark may be added; see `marked`."""
    others: Collection[str] = ()
    """Names of all other files."""
    modes: Modes = field(default_factory=Modes)
    is_resumable: bool = True
    """Whether finished parts are kept if the work fails. Else nothing is left, and several processes add parts only
    while the one that publishes has begun the output."""
    scratch: str | Path | None = None
    """The folder for files on their way to a bucket; None: the system's folder of temporary files."""


def marked(name: str, mark: str) -> str:
    """The name of a weight file that has a mark: before its extension."""
    if not mark:
        return name
    stem, dot, extension = name.rpartition(".")
    return f"{stem}-{mark}{dot}{extension}"


class Output(Protocol):
    """An output that is being made. Readers do not see it, or do not take it for complete, before the end.

    The order of calls, of one process that makes an output (`begin`):

    1. `kept(part)` for each part: what is returned is finished, and not made again.
    2. For each other part: `check_space`; `write` opens each of its large files any number of times, `head` completes
       each with its first bytes, which depend on all others; then `keep(part, notes)`.
    3. `put` for small files, in any order.
    4. The end of the `with` block publishes: all becomes visible at once, or the marker is written last. If the block
       fails, what was kept stays for the next attempt, or nothing does (`Work.is_resumable`).

    Several processes make the parts (`begin_part`: 1 and 2, each for its own), and one publishes (`begin` with
    `gathers`: 1, 3 and 4). Parts may be made twice, also at the same time: the files are the same.

    Methods raise OSError if a request or a system call fails, and FormatError if what is here under a given name is not
    a regular file of this user.
    """

    @property
    def mark(self) -> str:
        """What the names of weight files carry; see `marked`. Usually empty."""

    def check_space(self, nbytes: int, part_nbytes: int | None = None) -> None:
        """Check that there is space for `nbytes` in all, of which a part has `part_nbytes`; None: there is one part.

        Raises:
            PlanError: there is less space.
        """

    def write(self, name: str, nbytes: int) -> WritableFile:
        """Open a file of known length for writing. If it is not here yet, create it and allocate its space.

        Raises:
            OSError: there is not enough space.
        """

    def head(self, name: str, head: bytes, nbytes: int) -> None:
        """Write the first bytes of a file of `nbytes` after all others, and close it."""

    def put(self, name: str, pieces: Iterable[bytes], mode: int | None = None) -> None:
        """Write a new file whole.

        Args:
            mode: the file's permissions before the umask; None: those of all other files.
        """

    def kept(self, part: str) -> bytes | None:
        """The notes of a part that is finished, with all of its files; None if it is not."""

    def keep(self, part: str, notes: bytes) -> None:
        """A part is finished: its files are those that were completed since the last call."""


FOLDER = "output"
"""The folder of the files, in the folder in which they are assembled."""
RECORD = "part-"
"""Begins the name of a record of a finished part, beside that folder."""
ATTEMPT = "attempt-"
"""Begins the name of the folder of a process that makes parts, beside that folder."""
_TO_CREATE = os.O_RDWR | os.O_CREAT
_HEAD_NBYTES = 2**16
"""How many of a file's first bytes have a digest in the record of its part."""


def check_space(folder: Path, output: Path, nbytes: int, advice: str = "") -> None:
    """Raise PlanError, which names `output`, unless the drive of a folder has space for `nbytes` more bytes."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if free < nbytes:
        missing = -(-(nbytes - free) // 10**6) / 1000
        what = f"needs {nbytes / 1e9:.3f} GB, {free / 1e9:.3f} GB are free there ({missing:.3f} GB too few){advice}"
        raise PlanError(what, path=output, code="space")


class LocalOutput:
    """A private folder in which an output is assembled; see `Output`.

    A part is finished when its record is here, which is written after its files are on the drive. The record has the
    state of each file: its length, when it was last written to, and a digest of its first bytes.

    Who makes the parts again if they have changed wants the same time, too: a file that was written to since is no
    longer that of the part. Who only gathers parts of other processes, or publishes, does without it: some network file
    systems change the time of a file after it was closed.
    """

    mark = ""

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
            whole: the folder to which the files of finished parts are moved, and that has their records. Default:
                `place`, in which every file that no record names is deleted.
            gathers: whether other processes make all parts.
        """
        self._wants_times = not gathers
        self._output = output
        self.place = place
        self._whole = place if whole is None else whole
        self.modes = _apply_umask(place, modes)
        """Permissions after the umask, also applied to files that were created under another umask."""
        self.folder = self._open_folder()
        """The files. That of the assembled output becomes the output."""
        self._written: set[str] = set()
        """Files that were opened for writing."""
        self._complete: list[str] = []
        """Files that are complete, of no part yet."""
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
        """Delete the records that are no longer true, and the files of parts that are not finished."""
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
        """Whether a file is to be created. One that was written and is gone is not: its bytes would be zeros."""
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
        """The record of a part; None if there is none, or its files are not as they were."""
        record = Record.read(self._whole, name)
        if record is None:
            return None
        with self._whole.subfolder(FOLDER) as folder:
            if record.changed_in(folder, with_times=self._wants_times):
                return None
            for file in record.files:
                fd = folder.open_own(file, os.O_RDONLY)
                try:
                    restrict(fd, self.modes.file)  # It may have been created under another umask.
                finally:
                    os.close(fd)
        return record

    def check_parts(self) -> None:
        """Check before the output is published that the files of all parts are as they were written.

        Raises:
            FormatError: one was deleted, or written to.
        """
        for name in self.place.names():
            record = Record.read(self.place, name) if name.startswith(RECORD) else None
            if record is not None and (changed := record.changed_in(self.folder, with_times=False)):
                what = "was written to, or deleted, before the output was complete"
                raise FormatError(what, path=self.folder.path / changed[0], code="mismatch")

    def keep(self, part: str, notes: bytes) -> None:
        """Add the files, and then the record of the part. This fails if the output was published meanwhile."""
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
    """A subfolder, which is made if it is missing; several processes may do so at the same time."""
    with suppress(FileExistsError):
        place.make(name, mode)
    return place.subfolder(name)


@dataclass(frozen=True, slots=True)
class FileState:
    """What tells a file of a part from another one at its place."""

    nbytes: int
    changed_ns: int
    """When it was last written to, in nanoseconds."""
    digest: str
    """Digest of its first bytes, which are written last."""

    @staticmethod
    def of(folder: OpenFolder, name: str) -> FileState | None:
        """The state of a regular file of the folder's owner, with a single name; None: there is none."""
        try:
            fd = folder.open_own(name, os.O_RDONLY)
        except (FileNotFoundError, FormatError):
            return None
        with open(fd, "rb") as stream:
            status = os.fstat(fd)
            return FileState(status.st_size, status.st_mtime_ns, digest_hex(stream.read(_HEAD_NBYTES)))


@dataclass(frozen=True, slots=True)
class Record:
    """The record of a finished part."""

    files: Mapping[str, FileState]
    notes: bytes

    def changed_in(self, folder: OpenFolder, *, with_times: bool) -> list[str]:
        """The files that are not as they were; `with_times`, also those that were only written to."""
        changed = []
        for name, state in self.files.items():
            found = FileState.of(folder, name)
            if found is not None and not with_times:
                found = replace(found, changed_ns=state.changed_ns)
            if found != state:
                changed.append(name)
        return changed

    def dump(self) -> bytes:
        """Its content."""
        files = {name: astuple(state) for name, state in self.files.items()}
        return json.dumps({"files": files, "notes": self.notes.decode("latin-1")}).encode()

    @staticmethod
    def read(place: OpenFolder, name: str) -> Record | None:
        """The record in a file of this user; None if there is none."""
        content = read_own(place, name)
        return None if content is None else Record.parse(content)

    @staticmethod
    def parse(content: bytes) -> Record | None:
        """The inverse of `dump`; None if this is no record."""
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
    """The content of a file of this user; None if there is none."""
    try:
        fd = folder.open_own(name, os.O_RDONLY)
    except (FileNotFoundError, FormatError):
        return None
    with with_path(folder.path / name), open(fd, "rb") as file:
        return file.read()


def has_parts(place: OpenFolder) -> bool:
    """Whether there are finished parts, or others are making some."""
    return any(name.startswith((RECORD, ATTEMPT)) for name in place.names())


def _apply_umask(place: OpenFolder, modes: Modes) -> Modes:
    place.remove("probe")
    place.make("probe", 0o777)
    with place.subfolder("probe") as probe:
        granted = os.fstat(probe.fd).st_mode | stat.S_IRWXU
    place.remove("probe")
    return Modes(modes.folder & granted, modes.file & granted)
