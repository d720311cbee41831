"""Small files that go along with the weights: what they are, and how they are copied."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator

import xxhash

from relayout.checkpoint.source import SourceCheckpoint
from relayout.errors import FormatError
from relayout.format.source_record import SideFile
from relayout.storage.protocols import Access, Modes, Staging, Store, unversioned

_COPY_NBYTES = 2**20


def modes_of(folder: Store, files: Iterable[str], *, with_folder: bool = True) -> Modes:
    """What all of the files grant, and the folder, to others than the owner, who may always read and write.

    A file that is missing, or no file, is left to whoever reads it.
    """
    folder_mode, file_mode = Modes().folder, Modes().file
    if with_folder and (path := folder.path("")) is not None:
        folder_mode &= path.stat().st_mode
    for name in files:
        status = folder.stat(name)
        if status is not None:
            file_mode &= status.mode
    return Modes(folder_mode | stat.S_IRWXU, file_mode | stat.S_IRUSR | stat.S_IWUSR)


def output_modes(source: SourceCheckpoint) -> Modes:
    """What an output grants: at most what its source does."""
    return modes_of(source.folder, [file.name for file in source.files], with_folder=not source.is_file)


def copy_side_file(source: Store, staging: Staging, name: str, expected: SideFile | None = None) -> SideFile:
    """Copy a file into an output, with as much of its permissions as the umask leaves.

    Raises:
        FormatError: it cannot be read, or is not the one that is expected.
    """
    side = _Passing(source, name, None if expected is None else expected.nbytes)
    mode = side.mode if expected is None else expected.mode
    staging.put(name, side.pieces(), mode)
    found = SideFile(name, side.nbytes, side.digest.hexdigest(), mode)
    if expected is not None and found.digest != expected.digest:
        raise FormatError("differs from the file that was copied", path=source.location(name), code="digest")
    return found


def read_side_file(folder: Store, name: str) -> SideFile:
    """Length and digest of a file, and its permission bits.

    Raises:
        FormatError: it cannot be read.
    """
    side = _Passing(folder, name, None)
    for _ in side.pieces():
        pass
    return SideFile(name, side.nbytes, side.digest.hexdigest(), side.mode)


class _Passing:
    """A file whose bytes pass once, and are hashed."""

    def __init__(self, folder: Store, name: str, expected_nbytes: int | None) -> None:
        status = folder.stat(name)
        if status is None:
            raise FormatError(
                f"cannot be read: {os.strerror(errno.ENOENT)}", path=folder.location(name), code="missing"
            )
        if expected_nbytes not in (None, status.nbytes):
            raise FormatError("differs from the file that was copied", path=folder.location(name), code="digest")
        if not status.version and expected_nbytes is None:
            raise unversioned(folder.location(name))
        self.mode, self.nbytes = status.mode, status.nbytes
        self.digest = xxhash.xxh3_128()
        self._folder, self._name, self._version = folder, name, status.version

    def pieces(self) -> Iterator[bytes]:
        """The bytes, in order."""
        with self._folder.open(self._name, access=Access.BUFFERED, version=self._version) as file:
            for offset in range(0, file.nbytes, _COPY_NBYTES):
                piece = bytearray(min(_COPY_NBYTES, file.nbytes - offset))
                file.read(offset, memoryview(piece))
                self.digest.update(piece)
                yield bytes(piece)
