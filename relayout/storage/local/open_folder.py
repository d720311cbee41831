"""Folders held open by their descriptors: what others do to the paths that led there changes nothing.

Outputs are put together in places where other users may be able to rename and link, such as /tmp. Everything that is
written there is therefore opened, created, renamed and deleted relative to a descriptor, and no symbolic link is
followed on the way.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from relayout.errors import FormatError
from relayout.storage.libc import exchange_names

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class OpenFolder:
    """A folder that is held open. Names are relative to it; they may lead into its subfolders.

    May be used by several threads.
    """

    def __init__(self, path: Path, fd: int | None = None) -> None:
        """Open a folder, whose path may lead over links, or take one that is open.

        Raises:
            OSError: there is none, or it cannot be opened.
        """
        self.path = path
        """Where it was when it was opened; for messages."""
        self.fd = os.open(path, _FOLDER & ~os.O_NOFOLLOW) if fd is None else fd

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        """Open a file: its descriptor. With O_CREAT, subfolders on the way to it are made too.

        Raises:
            OSError: it cannot be opened; among others, if it is a link or, with O_CREAT, exists.
        """
        above, _, base = name.rpartition("/")
        create = flags & os.O_CREAT
        with self._below(above, create=bool(create)) as folder, self._naming(name):
            return os.open(base, flags | _FILE | (os.O_EXCL if create else 0), mode, dir_fd=folder)

    def open_own(self, name: str, flags: int) -> int:
        """Open a file that is there already, of this folder's owner and without another name.

        Raises:
            FormatError: it is something else, through which somebody else's file could be read or changed.
            OSError: it cannot be opened.
        """
        status = self.status(name)
        if status is not None:
            self._check_own(name, status)
        fd = self.open(name, flags & ~os.O_CREAT)
        try:
            self._check_own(name, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check_own(self, name: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != self.owner:
            raise FormatError(
                "not a regular file of one name and this folder's owner", path=self.path / name, code="unsafe"
            )

    @property
    def owner(self) -> int:
        """The user whose folder it is."""
        return os.fstat(self.fd).st_uid

    def names(self) -> list[str]:
        """Of all that is in it, sorted."""
        with os.scandir(self.fd) as entries:
            return sorted(entry.name for entry in entries)

    def status(self, name: str) -> os.stat_result | None:
        """Of what has this name, a link itself if it is one; None if there is nothing."""
        with self._naming(name):
            try:
                return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            except FileNotFoundError:
                return None

    def subfolder(self, name: str) -> OpenFolder:
        """Open a folder in it.

        Raises:
            OSError: there is none; NotADirectoryError also where there is a link.
        """
        with self._naming(name):
            return OpenFolder(self.path / name, os.open(name, _FOLDER, dir_fd=self.fd))

    def make(self, name: str, mode: int) -> None:
        """Make a folder in it, with as much of the mode as the umask leaves.

        Raises:
            OSError: it exists, among others.
        """
        with self._naming(name):
            os.mkdir(name, mode, dir_fd=self.fd)

    def remove(self, name: str) -> None:
        """Delete what has this name, if there is anything; a folder with all that is in it, also where it is read-only.

        Raises:
            OSError: it cannot be deleted.
        """
        status = self.status(name)
        if status is None:
            return
        if not stat.S_ISDIR(status.st_mode):
            with self._naming(name):
                os.unlink(name, dir_fd=self.fd)
            return
        with self._writable(name) as folder:
            for inside in folder.names():
                folder.remove(inside)
        with self._naming(name):
            os.rmdir(name, dir_fd=self.fd)

    @contextmanager
    def _writable(self, name: str) -> Iterator[OpenFolder]:
        """A folder in it, to be emptied: people take write permission from finished models."""
        try:
            folder = self.subfolder(name)
        except PermissionError:
            self._make_readable(name)
            folder = self.subfolder(name)
        with folder:
            with suppress(PermissionError):
                os.fchmod(folder.fd, 0o700)
            yield folder

    def _make_readable(self, name: str) -> None:
        """Give a folder's owner all rights to it: by a descriptor, since chmod(2) itself would follow a link."""
        if not hasattr(os, "O_PATH"):
            return
        with self._naming(name):
            fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
            try:
                Path(f"/proc/self/fd/{fd}").chmod(0o700)
            finally:
                os.close(fd)

    def allocated_nbytes(self) -> int:
        """Bytes that the files here, and in its subfolders, take on the drive."""
        return sum(
            os.stat(name, dir_fd=fd, follow_symlinks=False).st_blocks * 512
            for _, _, names, fd in os.fwalk(".", dir_fd=self.fd)
            for name in names
        )

    def sync(self) -> None:
        """Return when the entries of it and of its subfolders are on the drive."""
        for above, _, _, fd in os.fwalk(".", dir_fd=self.fd):
            with self._naming(above):
                os.fsync(fd)

    def close(self) -> None:
        """Close it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _below(self, names: str, *, create: bool) -> Iterator[int]:
        """The descriptor of a subfolder, by a path in which no link is followed; "" is this folder."""
        fd = os.dup(self.fd)
        try:
            for part in names.split("/") if names else ():
                with self._naming(names):
                    if create:
                        with suppress(FileExistsError):
                            os.mkdir(part, dir_fd=fd)
                    inner = os.open(part, _FOLDER, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Let an OSError tell the whole path."""
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            raise OSError(error.errno, error.strerror, str(self.path / name)) from None


def rename(source: OpenFolder, name: str, target: OpenFolder, new_name: str) -> None:
    """rename(2) from one open folder into another.

    Raises:
        OSError: it is refused.
    """
    try:
        os.rename(name, new_name, src_dir_fd=source.fd, dst_dir_fd=target.fd)
    except OSError as error:
        paths = (str(source.path / name), None, str(target.path / new_name))
        raise OSError(error.errno, error.strerror, *paths) from None


def exchange(source: OpenFolder, name: str, target: OpenFolder, other: str) -> bool:
    """Let two names change places in one step; whether kernel and file system can do that.

    Raises:
        OSError: it is refused.
    """
    try:
        return exchange_names(source.fd, name, target.fd, other)
    except OSError as error:
        paths = (str(source.path / name), None, str(target.path / other))
        raise OSError(error.errno, error.strerror, *paths) from None


def restrict(fd: int, mode: int) -> None:
    """Take permissions from an open file or folder that go beyond `mode`, where its file system has any."""
    before = stat.S_IMODE(os.fstat(fd).st_mode)
    if before & mode != before:
        with suppress(PermissionError):
            os.fchmod(fd, before & mode)
