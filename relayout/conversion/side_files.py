"""Small files that go along with the weights: what they are, and how they are copied."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterable, Iterator

from relayout.checkpoint.source import SourceCheckpoint
from relayout.core.digests import DigestAlgorithm, Hash
from relayout.errors import FormatError
from relayout.format.source_record import SideFile
from relayout.publish.output import Output
from relayout.storage.protocols import Access, FileStat, Modes, Store, unversioned

_COPY_NBYTES = 2**20


def modes_of(folders: Iterable[Store], files: Collection[str], *, with_folders: bool = True) -> Modes:
    """What all of the files grant, and the folders, to others than the owner, who may always read and write.

    Files that are missing are ignored: whoever reads them complains.
    """
    folder_mode, file_mode = Modes().folder, Modes().file
    for folder in folders:
        if with_folders and (path := folder.path("")) is not None:
            folder_mode &= path.stat().st_mode
        for name in files:
            status = folder.stat(name)
            if status is not None:
                file_mode &= status.mode
    return Modes(folder_mode | stat.S_IRWXU, file_mode | stat.S_IRUSR | stat.S_IWUSR)


def output_modes(source: SourceCheckpoint) -> Modes:
    """What an output grants: at most what its source does."""
    return modes_of([source.folder], [file.name for file in source.files], with_folders=not source.is_file)


def copy_side_file(
    source: Store,
    output: Output,
    name: str,
    algorithm: DigestAlgorithm,
    expected: SideFile | None = None,
    prefix: str = "",
) -> SideFile:
    """Copy a file into an output, with `prefix` in front of its name and as much of its mode as the umask leaves.

    Raises:
        FormatError: it cannot be read, or is not the one that is expected.
    """
    status = _status(source, name)
    if expected is None and not status.version:
        raise unversioned(source.location(name))
    differs = FormatError("differs from the file that was copied", path=source.location(name), code="digest")
    if expected is not None and expected.nbytes != status.nbytes:
        raise differs
    mode, digest = status.mode if expected is None else expected.mode, algorithm.new()
    output.put(prefix + name, _pieces(source, name, status.version, digest), mode)
    copied = SideFile(name, status.nbytes, digest.hexdigest(), mode)
    if expected is not None and copied.digest != expected.digest:
        raise differs
    return copied


def read_side_file(folder: Store, name: str, algorithm: DigestAlgorithm) -> SideFile:
    """Length and digest of a file, and its permission bits.

    Raises:
        FormatError: it cannot be read.
    """
    status, digest = _status(folder, name), algorithm.new()
    if not status.version:
        raise unversioned(folder.location(name))
    for _ in _pieces(folder, name, status.version, digest):
        pass
    return SideFile(name, status.nbytes, digest.hexdigest(), status.mode)


def are_there(folder: Store, files: Iterable[SideFile], algorithm: DigestAlgorithm) -> bool:
    """Whether a folder has these files, with these digests.

    Raises:
        FormatError: one cannot be read.
    """
    return all(read_side_file(folder, file.name, algorithm).digest == file.digest for file in files)


def _status(folder: Store, name: str) -> FileStat:
    status = folder.stat(name)
    if status is None:
        raise FormatError(f"cannot be read: {os.strerror(errno.ENOENT)}", path=folder.location(name), code="missing")
    return status


def _pieces(folder: Store, name: str, version: str, digest: Hash) -> Iterator[bytes]:
    """The bytes of a file, in order, which pass once and are hashed."""
    with folder.open(name, access=Access.BUFFERED, version=version) as file:
        for offset in range(0, file.nbytes, _COPY_NBYTES):
            piece = bytearray(min(_COPY_NBYTES, file.nbytes - offset))
            file.read(offset, memoryview(piece))
            digest.update(piece)
            yield bytes(piece)
