"""Folders accessed by descriptor, so that concurrent changes of their paths have no effect.

Other users may rename and link files beside an output, for example in /tmp. Files there are therefore opened, created,
renamed and deleted relative to a descriptor, and symbolic links are not followed. Names inside a checkpoint folder are
untrusted too: links may lead only to where the folder itself, or a cache of the hub, is.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from relayout.errors import FormatError
from relayout.storage.protocols import Closable
from relayout.storage.system import exchange_names

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@contextmanager
def with_path(path: Path, target: Path | None = None) -> Iterator[None]:
    """Let an OSError name this path alone, or of a renaming, also the target."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        # The same error: a new one, raised in a generator, would be kept by its own frames (Python 3.13), and with them
        # whatever the callers hold, such as the lease of a cache's entry.
        error.filename = str(path)
        if target is not None:
            error.filename2 = str(target)
        elif error.filename2 is not None:
            del error.filename2  # None would be shown as a name.
        raise


class OpenFolder(Closable):
    """A folder that is held open. Names are relative to it and may include subfolders. Thread-safe."""

    def __init__(self, path: Path, fd: int | None = None) -> None:
        """Open a folder, following links in its path; or take over its descriptor `fd`."""
        self.path = path
        """Its path when it was opened; for messages only."""
        self.fd = os.open(path, _FOLDER & ~os.O_NOFOLLOW) if fd is None else fd

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        """Open a file, but no link, and return its descriptor.

        With O_CREAT, it must be new; missing subfolders are made, too.
        """
        above, _, base = name.rpartition("/")
        create = flags & os.O_CREAT
        with self._below(above, create=bool(create)) as folder, with_path(self.path / name):
            return os.open(base, flags | _FILE | (os.O_EXCL if create else 0), mode, dir_fd=folder)

    def open_own(self, name: str, flags: int) -> int:
        """Open an existing regular file of this folder's owner with a single name (hard link).

        Raises:
            FormatError: it is something else, which could give access to another user's file.
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

    def write(self, name: str, content: bytes, mode: int = 0o666, *, replace: bool = True) -> None:
        """Write a small file whole: to the drive under a random name, which then becomes `name`.

        Args:
            replace: whether a regular file of this name, but no link or device, may be replaced.

        Raises:
            OSError: there is something that may not be replaced, or writing failed; nothing has changed.
        """
        partial, created = f".{os.urandom(8).hex()}.partial", list[str]()
        with with_path(self.path / name):
            if replace and (status := self.status(name)) is not None and not stat.S_ISREG(status.st_mode):
                raise FileExistsError(errno.EEXIST, "exists and is not a regular file")
            try:
                if not replace:
                    os.close(self.open(name, os.O_WRONLY | os.O_CREAT, mode))  # Exclusively: the name is ours.
                    created.append(name)
                with open(self.open(partial, os.O_WRONLY | os.O_CREAT, mode), "wb") as stream:
                    created.append(partial)
                    stream.write(content)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.rename(partial, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
                os.fsync(self.fd)
            except BaseException:
                for ours in created:
                    with suppress(OSError):
                        os.unlink(ours, dir_fd=self.fd)
                raise

    def _check_own(self, name: str, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or status.st_uid != self.owner:
            what = "not a regular file of this folder's owner, or has several hard links"
            raise FormatError(what, path=self.path / name, code="unsafe")

    @property
    def owner(self) -> int:
        """User id of the folder's owner."""
        return os.fstat(self.fd).st_uid

    def names(self) -> list[str]:
        """Names of all entries, sorted."""
        with os.scandir(self.fd) as entries:
            return sorted(entry.name for entry in entries)

    def status(self, name: str) -> os.stat_result | None:
        """Status of an entry, without following a link; None if it does not exist."""
        with with_path(self.path / name):
            try:
                return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            except FileNotFoundError:
                return None

    def subfolder(self, name: str) -> OpenFolder:
        """Open a subfolder. NotADirectoryError: it is none, or a link."""
        with with_path(self.path / name):
            return OpenFolder(self.path / name, os.open(name, _FOLDER, dir_fd=self.fd))

    def make(self, name: str, mode: int) -> None:
        """Create a subfolder; `mode` is before the umask."""
        with with_path(self.path / name):
            os.mkdir(name, mode, dir_fd=self.fd)

    def remove(self, name: str, only: Collection[str] | None = None) -> None:
        """Delete an entry, if it exists; a folder recursively, even if it is read-only.

        Args:
            only: the files below a folder that may be deleted, and with them the folders that hold no others.

        Raises:
            OSError: the entry cannot be deleted, or holds other files than `only`.
        """
        status = self.status(name)
        if status is None:
            return
        with suppress(FileNotFoundError):  # Another process may be deleting it, too.
            if not stat.S_ISDIR(status.st_mode):
                with with_path(self.path / name):
                    os.unlink(name, dir_fd=self.fd)
                return
            with self._writable(name) as folder:
                for inside in folder.names():
                    below = only and [path.removeprefix(f"{inside}/") for path in only if path.startswith(f"{inside}/")]
                    if only is None or below or inside in only:
                        folder.remove(inside, below)
            with with_path(self.path / name):
                os.rmdir(name, dir_fd=self.fd)

    @contextmanager
    def _writable(self, name: str) -> Iterator[OpenFolder]:
        """Open a subfolder that is to be emptied, and make it writable: users write-protect finished models."""
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
        """Grant a subfolder's owner all permissions, by descriptor, because chmod(2) follows links."""
        if not hasattr(os, "O_PATH"):
            return
        with with_path(self.path / name):
            fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.fd)
            try:
                Path(f"/proc/self/fd/{fd}").chmod(0o700)
            finally:
                os.close(fd)

    def allocated_nbytes(self) -> int:
        """Bytes that the files here and in subfolders occupy on the drive."""
        return sum(
            os.stat(name, dir_fd=fd, follow_symlinks=False).st_blocks * 512
            for _, _, names, fd in os.fwalk(".", dir_fd=self.fd)
            for name in names
        )

    def sync(self) -> None:
        """Write the entries of this folder and its subfolders to the drive."""
        for above, _, _, fd in os.fwalk(".", dir_fd=self.fd):
            with with_path(self.path / above):
                os.fsync(fd)

    def close(self) -> None:
        """Close the descriptor."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    @contextmanager
    def _below(self, names: str, *, create: bool) -> Iterator[int]:
        """Yield a descriptor of a subfolder, without following links in its path; "" is this folder."""
        fd = os.dup(self.fd)
        try:
            for part in names.split("/") if names else ():
                with with_path(self.path / names):
                    if create:
                        with suppress(FileExistsError):
                            os.mkdir(part, dir_fd=fd)
                    inner = os.open(part, _FOLDER, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)


def write_file(path: Path, content: bytes, *, replace: bool = True) -> None:
    """Write a small file whole; see `OpenFolder.write`. Errors name `path`, never a temporary file."""
    with with_path(path), OpenFolder(path.parent) as folder:
        folder.write(path.name, content, replace=replace)


def rename(source: OpenFolder, name: str, target: OpenFolder, new_name: str) -> None:
    """rename(2) from one open folder into another."""
    with with_path(source.path / name, target.path / new_name):
        os.rename(name, new_name, src_dir_fd=source.fd, dst_dir_fd=target.fd)


def exchange(source: OpenFolder, name: str, target: OpenFolder, other: str) -> bool:
    """Exchange two names atomically. Return False if the kernel or file system does not support it."""
    with with_path(source.path / name, target.path / other):
        return exchange_names(source.fd, name, target.fd, other)


def restrict(fd: int, mode: int) -> None:
    """Remove the permissions of an open file or folder that are not in `mode`."""
    before = stat.S_IMODE(os.fstat(fd).st_mode)
    if before & mode != before:
        with suppress(PermissionError):
            os.fchmod(fd, before & mode)


FOLLOW_LINKS = "RELAYOUT_FOLLOW_LINKS"
"""Environment variable: "1" permits links to any file, for folders that a person assembled from links."""

_REPOSITORY = re.compile(r"(models|datasets|spaces)--")
_SHARED_BLOB = re.compile(r"([0-9a-f]{2})/\1[0-9a-f]{62}")


def resolve_inside(folder: Path, name: str) -> Path:
    """The path of a file in a checkpoint folder, which need not exist.

    FormatError: a link in it leads out of the checkpoint.
    """
    path = folder / name
    if not is_inside(folder, path):
        raise FormatError(
            f"a symbolic link that leads out of the checkpoint, to {os.path.realpath(path)}:"
            f" replace it by the file, or set {FOLLOW_LINKS}=1 if you trust it",
            path=path,
            code="unsafe",
        )
    return path


def is_inside(folder: Path, path: Path) -> bool:
    """Whether a path, with symbolic links resolved, is inside a checkpoint folder.

    The files of a snapshot in a Hugging Face cache are links to blobs of its repository (huggingface_hub 2.4,
    `file_download.py`: `models--ORG--NAME/snapshots/REVISION/FILE -> ../../blobs/HASH`). Those may be links to blobs
    that all repositories of the cache share (`utils/_shared_blobs.py`: `blobs/HA/HASH`). Both count as inside.
    """
    home = Path(os.path.realpath(folder))
    real = Path(os.path.realpath(path))
    if real.is_relative_to(home):
        return True
    if os.environ.get(FOLLOW_LINKS) == "1":
        return True
    repository = next((parent.parent for parent in home.parents if parent.name == "snapshots"), None)
    if repository is None or not _REPOSITORY.match(repository.name):
        return False
    own, shared = (Path(os.path.realpath(folder / "blobs")) for folder in (repository, repository.parent))
    return real.parent == own or (
        real.is_relative_to(shared) and _SHARED_BLOB.fullmatch(real.relative_to(shared).as_posix()) is not None
    )


def older_folder(path: Path) -> Path:
    """The temporary name of a folder that --force replaces, if the two names cannot be exchanged atomically."""
    return path.parent / f".{path.name}.relayout-old"


def recovery_advice(path: Path) -> str:
    """Advice for a missing `path`: where its older folder is, if --force was interrupted between two renames."""
    old = older_folder(path)
    return f"; an interrupted replacement left the older folder at {old}: rename it back" if old.is_dir() else ""
