"""Outputs: what is made, what may be replaced, in which order the methods of an output are called; and `LocalOutput`.

That one is a private folder, with notes beside it, and is held open from start to end: files in it are opened relative
to it. Files and folders of other users there are refused, and never opened, deleted or reused.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from relayout.core.extents import BLOCK, align_up
from relayout.errors import FormatError, PlanError, shown
from relayout.storage.local.descriptors import OpenFolder, restrict, with_path
from relayout.storage.local.store import InputFile, OutputFile, sync_and_drop_pages
from relayout.storage.stores import Access, Closable, Modes, Store, WritableFile
from relayout.storage.system import Buffer

_IN_THE_WAY = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}
"""Errors of the last rename if something else was created at the output meanwhile."""
_NUM_SHOWN = 3
"""Files that an error names."""


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
    """Whether finished parts are kept if the work fails. Else nothing is left."""
    is_live: bool = False
    """Whether its parts are added only while the process that publishes has begun the output, as in a group."""
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

    What `begin` yields for a local folder is a `LocalOutput`. One process makes all in it without parts: it has the
    unfinished files of an earlier attempt, and its own notes of them.

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
"""The folder in which the output is assembled, in the folder beside it."""
REPLACED = "relayout.replaced"
"""The record of an output that is being replaced; no notes."""
_TO_CREATE = os.O_RDWR | os.O_CREAT


def check_space(folder: Path, output: Path, nbytes: int, advice: str = "") -> None:
    """Raise PlanError, which names `output`, unless the drive of a folder has space for `nbytes` more bytes."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if free < nbytes:
        missing = -(-(nbytes - free) // 10**6) / 1000
        what = f"needs {nbytes / 1e9:.3f} GB, {free / 1e9:.3f} GB are free there ({missing:.3f} GB too few){advice}"
        raise PlanError(what, path=output, code="space")


class LocalOutput:
    """A folder beside an output, in which it is assembled; see `Output`."""

    mark = ""

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
        """The notes of this attempt."""
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
        try:
            restrict(folder.fd, self.modes.folder)
        except BaseException:
            folder.close()
            raise
        return folder

    def clear(self) -> None:
        """Delete everything that was written here, also by an earlier attempt."""
        self.notes.clear()
        self._written.clear()
        self.folder.close()
        self.folder = self._make_empty()

    def _make_empty(self) -> OpenFolder:
        for name in self.place.names():
            self.place.remove(name)
        self.place.make(FOLDER, self.modes.folder)
        return self.place.subfolder(FOLDER)

    def check_space(self, nbytes: int, part_nbytes: int | None = None) -> None:
        check_space(self._output.parent, self._output, nbytes - self.place.allocated_nbytes())

    @property
    def has_notes(self) -> bool:
        """Whether there are notes about files here."""
        if self.notes:
            return any(notes.are_kept for notes in self.notes)
        return has_notes(self.place)

    def names(self) -> list[str]:
        """Names of the files here."""
        return self.folder.names()

    def remove(self, name: str) -> None:
        """Delete the file `name`, if it exists."""
        self._written.discard(name)
        self.folder.remove(name)

    def open(self, name: str, nbytes: int) -> InputFile:
        """Open a file that was written here, to read what is stored on the drive.

        Raises:
            FormatError: the file is missing, or has another length.
            OSError: the file cannot be opened, or written bytes did not reach the drive.
        """
        # After a failed write-back the page cache may still hold the intended bytes.
        sync_and_drop_pages(self.folder, name)
        return InputFile(self.folder.path / name, nbytes, access=Access.ONCE, folder=self.folder)

    def head_of(self, name: str, nbytes: int, head_nbytes: int) -> memoryview:
        """The first bytes of a file of this length, as stored; for errors see `open`."""
        view = Buffer().reserve(align_up(head_nbytes, BLOCK))
        with self.open(name, nbytes) as file:
            file.read(0, view)
        return view[:head_nbytes]

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
        return self.read_notes(part)

    def keep(self, part: str, notes: bytes) -> None:
        """Do nothing: what is here is published as a whole."""

    def read_notes(self, name: str) -> bytes | None:
        """Read notes, which do not become part of the output; None if this user has no notes here."""
        return read_notes(self.place, name)

    def open_notes(self, name: str, header: bytes | None) -> LocalNotes:
        """Open notes for appending. Of an output, they are named `relayout.*`.

        Args:
            header: begin new notes with it, in place of existing ones; None: continue existing notes.
        """
        self.notes.append(LocalNotes(self.place, name, header))
        return self.notes[-1]


class LocalNotes(Closable):
    """An append-only file. Thread-safe. Not synced to the drive: resumption verifies what it says."""

    def __init__(self, folder: OpenFolder, name: str, header: bytes | None) -> None:
        """Open the notes, see `LocalOutput.open_notes`."""
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
        """Append `text` atomically."""
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


def has_notes(place: OpenFolder) -> bool:
    """Whether there are notes about files here."""
    names = [name for name in place.names() if name.startswith("relayout.") and name != REPLACED]
    return any(status.st_size > 0 for name in names if (status := place.status(name)) is not None)
