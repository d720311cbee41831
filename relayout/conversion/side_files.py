"""Writes the small files of an open folder, each on the drive when its call returns."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import xxhash

from relayout.errors import FormatError
from relayout.format.source_record import SideFile
from relayout.storage.files import naming, open_regular
from relayout.storage.open_folder import OpenFolder, restrict
from relayout.storage.paths import member

_COPY_NBYTES = 2**20
_TO_CREATE = os.O_RDWR | os.O_CREAT


def copy_side_file(source: Path, folder: OpenFolder, name: str, expected: SideFile | None = None) -> SideFile:
    """Copy a regular file from one folder into an open one, with as much of its permissions as the umask leaves.

    Raises:
        FormatError: it cannot be opened, is no regular file, or has not the length, if one is expected.
    """
    descriptor, status = open_regular(member(source, name))
    if expected is not None and status.st_size != expected.nbytes:
        os.close(descriptor)
        raise FormatError(f"{source / name}: differs from the file that was copied")
    mode = status.st_mode & 0o777 if expected is None else expected.mode
    with (
        open(descriptor, "rb") as reader,
        naming(folder.path / name),
        open(folder.open(name, _TO_CREATE, mode | stat.S_IRUSR), "wb") as writer,
    ):
        nbytes, digest = _read_through(reader, source / name, writer.write)
        writer.flush()
        os.fsync(writer.fileno())
    return SideFile(name, nbytes, digest, mode)


def read_side_file(folder: Path, name: str) -> SideFile:
    """Length and digest of a regular file, and its permission bits.

    Raises:
        FormatError: it cannot be read, or is no regular file.
    """
    path = member(folder, name)
    descriptor, status = open_regular(path)
    with open(descriptor, "rb") as reader:
        nbytes, digest = _read_through(reader, path)
    return SideFile(name, nbytes, digest, status.st_mode & 0o777)


def _read_through(reader: BinaryIO, path: Path, use: Callable[[bytes], object] | None = None) -> tuple[int, str]:
    """Length and digest of all that is read, and `use` it on the way; `path` is for errors of reading."""
    digest = xxhash.xxh3_128()
    nbytes = 0
    while True:
        with naming(path):
            chunk = reader.read(_COPY_NBYTES)
        if not chunk:
            return nbytes, digest.hexdigest()
        digest.update(chunk)
        nbytes += len(chunk)
        if use is not None:
            use(chunk)


def check_side_file(path: Path, expected: SideFile, found: SideFile) -> None:
    """Refuse a copy that is not what it should be.

    Raises:
        FormatError: its bytes are not.
    """
    if (found.nbytes, found.digest) != (expected.nbytes, expected.digest):
        raise FormatError(f"{path}: differs from the file that was copied")


def write_header(folder: OpenFolder, name: str, header: bytes, nbytes: int, mode: int = 0o666) -> None:
    """Write the header of a file of `nbytes`, which is there already, or has no data section.

    Raises:
        FormatError: what is there is no regular file of the folder's owner.
        OSError: writing failed.
    """
    is_new = folder.status(name) is None
    fd = folder.open(name, _TO_CREATE, mode) if is_new else folder.open_own(name, os.O_RDWR)
    with open(fd, "r+b") as stream, naming(folder.path / name):
        restrict(fd, mode)
        stream.write(header)
        stream.truncate(nbytes)
        stream.flush()
        os.fsync(stream.fileno())


def write_file(folder: OpenFolder, name: str, blob: bytes, mode: int = 0o666) -> None:
    """Write a new file, with as much of the mode as the umask leaves.

    Raises:
        OSError: it exists, or writing failed.
    """
    with open(folder.open(name, _TO_CREATE, mode), "wb") as stream, naming(folder.path / name):
        stream.write(blob)
        stream.flush()
        os.fsync(stream.fileno())
