"""The files of an output that is being written: a private folder, with notes beside it.

It is held open from start to end, and files in it are opened relative to it. Files and folders of other users there are
refused, and never opened, deleted or reused.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterable
from pathlib import Path

from relayout.errors import FormatError, PlanError
from relayout.storage.local.files import InputFile, OutputFile, sync_and_drop_pages
from relayout.storage.local.open_folder import OpenFolder, restrict, with_path
from relayout.storage.protocols import Access, Closable, Modes

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
        restrict(folder.fd, self.modes.folder)
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

    @property
    def earlier(self) -> LocalOutput | None:
        return self

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
