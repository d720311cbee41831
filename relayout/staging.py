"""Outputs are absent or complete: everything is written into a folder beside OUT that takes OUT's name at the end."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from relayout.errors import PlanError
from relayout.files import sync_folder
from relayout.index import MANIFEST_NAME

_FOLDER = "output"


def check_output(source: Path, output: Path, *, force: bool) -> None:
    """Refuse an output folder that would lose something.

    Raises:
        PlanError: it is, contains or lies in the source, is not empty, or its parent is missing.
    """
    real_source, real_output = source.resolve(), output.resolve()
    if real_source == real_output:
        raise PlanError(f"{output}: is the source itself; choose another folder with -o")
    if real_output.is_relative_to(real_source) or real_source.is_relative_to(real_output):
        raise PlanError(f"{output}: lies in the source or around it; choose another folder with -o")
    if not real_output.parent.is_dir():
        raise PlanError(f"{output}: its parent folder does not exist")
    if not os.path.lexists(output):
        return
    if not output.is_dir() or output.is_symlink():
        raise PlanError(f"{output}: exists and is not a folder")
    if output.is_mount():
        raise PlanError(f"{output}: is a mount point, which cannot be replaced; choose a folder in it with -o")
    check_vacant(output, force=force)


def check_vacant(output: Path, *, force: bool) -> None:
    """Refuse a folder that holds something, but for one that relayout wrote and that is to be replaced.

    Raises:
        PlanError: it does.
    """
    if any(output.iterdir()):
        if not force:
            raise PlanError(f"{output}: is not empty; --force replaces a folder that relayout wrote")
        if not (output / MANIFEST_NAME).is_file():
            raise PlanError(f"{output}: is not empty and was not written by relayout ({MANIFEST_NAME} is missing)")


def clear_up(output: Path) -> None:
    """Remove what a process that was killed behind its last rename has left beside its output."""
    output = output.resolve()
    lock_path, place = _beside(output)
    if (place / _FOLDER).exists() or not (_is_ours(place) or lock_path.exists()):
        return
    with suppress(PlanError, OSError):
        lock = _acquire(lock_path, output)
        try:
            if _is_ours(place) and not (place / _FOLDER).exists():
                remove(place)
            lock_path.unlink()
        finally:
            os.close(lock)


def check_space(output: Path, nbytes: int) -> None:
    """Refuse to start what the drive cannot hold.

    Raises:
        PlanError: less than `nbytes` bytes are free.
    """
    status = os.statvfs(output.resolve().parent)
    free = status.f_bavail * status.f_frsize
    if free < nbytes:
        raise PlanError(f"{output}: needs {nbytes / 1e9:.3f} GB, {free / 1e9:.3f} GB are free there")


class Staging:
    """A place beside an output, where it is put together."""

    def __init__(self, place: Path) -> None:
        self.place = place
        """Ours; for notes that must not be in the output."""
        self.folder = place / _FOLDER
        """Becomes the output."""
        self.is_kept = False
        """Whether what is here shall stay, for the next attempt, if this one fails."""
        self.advice: str | None = None
        """What to tell, with whatever goes wrong, if it stays."""

    def clear(self) -> None:
        """Make the place an empty one, whatever is there."""
        remove(self.place)
        self.folder.mkdir(parents=True)

    def allocated_nbytes(self) -> int:
        """Bytes that the files here take on the drive."""
        paths = (Path(folder, name) for folder, _, names in os.walk(self.place) for name in names)
        return sum(path.lstat().st_blocks * 512 for path in paths)


@contextmanager
def staging_folder(output: Path, *, replace: bool = False) -> Iterator[Staging]:
    """A place beside `output`, whose folder becomes `output` when the block ends; if it fails, all vanishes, or stays.

    It may hold what an earlier attempt left. An `output` that is there already may be empty, or, with `replace`, a
    folder that relayout wrote.

    Raises:
        PlanError: another process is writing the same output.
        OSError: among others, something else has come to be at `output` meanwhile.
    """
    output = output.resolve()
    lock_path, place = _beside(output)
    staging = Staging(place)
    lock = _acquire(lock_path, output)
    try:
        old = _old(output)
        if old.is_dir() and not output.exists():
            old.rename(output)  # A process was killed between two renames.
            check_vacant(output, force=replace)
        if not _is_ours(staging.place) or not _is_ours(staging.folder):
            staging.clear()
        try:
            yield staging
            _publish(staging, output, replace)
        except BaseException as error:
            if not staging.is_kept:
                remove(staging.place)
            elif staging.advice is not None:
                error.add_note(staging.advice)
            raise
    finally:
        with suppress(FileNotFoundError):
            lock_path.unlink()
        os.close(lock)


def _beside(output: Path) -> tuple[Path, Path]:
    """The lock file, and the place where an output is put together."""
    return output.with_name(f".{output.name}.relayout-lock"), output.with_name(f".{output.name}.relayout-partial")


def _is_ours(folder: Path) -> bool:
    """Whether it is a folder, no link, that nobody else has put there."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _publish(staging: Staging, output: Path, replace: bool) -> None:
    for folder, _, _ in os.walk(staging.folder):
        sync_folder(Path(folder))
    old = _old(output)
    remove(old)
    try:
        if replace and (output / MANIFEST_NAME).is_file():
            output.rename(old)
        staging.folder.rename(output)  # Fails, as it should, where a folder with anything in it has come up meanwhile.
    except BaseException:
        if old.is_dir() and not output.exists():
            old.rename(output)
        raise
    # From here on it is done, whatever becomes of the old one.
    staging.is_kept = False
    with suppress(OSError):
        sync_folder(output.parent)
        remove(old)
        remove(staging.place)


def remove(folder: Path) -> None:
    """Delete a folder of ours, also one whose owner took write permission from it, or what lies in its place."""
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink(missing_ok=True)
        return
    folder.chmod(0o700)
    for parent, names, _ in os.walk(folder):
        for path in (Path(parent, name) for name in names):
            if not path.is_symlink():
                path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _old(output: Path) -> Path:
    """Where a folder that is being replaced waits for the new one to be in its place."""
    return output.with_name(f".{output.name}.relayout-old")


def _acquire(path: Path, output: Path) -> int:
    """Open and lock the lock file; it is the lock only while its name still leads to it."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            os.close(fd)
            raise PlanError(f"{output}: is being written by another relayout (process {holder})") from None
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                os.close(fd)
                raise
            # Some network mounts know no locks: go without.
        try:
            if path.stat().st_ino == os.fstat(fd).st_ino:
                with suppress(OSError):  # For others to read, no more; the drive may be full.
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
