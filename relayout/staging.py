"""Outputs are absent or complete: everything is written into a folder beside OUT that takes OUT's name at the end."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from relayout.errors import PlanError
from relayout.files import sync_folder
from relayout.index import MANIFEST_NAME


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
    if any(output.iterdir()):
        if not force:
            raise PlanError(f"{output}: is not empty; --force replaces a folder that relayout wrote")
        if not (output / MANIFEST_NAME).is_file():
            raise PlanError(f"{output}: is not empty and was not written by relayout ({MANIFEST_NAME} is missing)")


def check_space(output: Path, nbytes: int) -> None:
    """Refuse to start what the drive cannot hold.

    Raises:
        PlanError: less than `nbytes` bytes are free.
    """
    status = os.statvfs(output.resolve().parent)
    free = status.f_bavail * status.f_frsize
    if free < nbytes:
        raise PlanError(f"{output}: needs {nbytes / 1e9:.3f} GB, {free / 1e9:.3f} GB are free there")


@contextmanager
def staging_folder(output: Path, *, replace: bool = False) -> Iterator[Path]:
    """A new folder beside `output`, which becomes `output` when the block ends, and vanishes if it fails.

    An `output` that is there already may be empty, or, with `replace`, a folder that relayout wrote.

    Raises:
        PlanError: another process is writing the same output.
        OSError: among others, something else has come to be at `output` meanwhile.
    """
    output = output.resolve()
    lock_path = output.with_name(f".{output.name}.relayout-lock")
    staging = output.with_name(f".{output.name}.relayout-partial")
    lock = _acquire(lock_path, output)
    try:
        try:
            old = _old(output)
            if old.is_dir() and not output.exists():
                old.rename(output)  # A process was killed between two renames.
            _remove(staging)  # Left by a process that was killed.
            staging.mkdir()
            yield staging
            _publish(staging, output, replace)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    finally:
        with suppress(FileNotFoundError):
            lock_path.unlink()
        os.close(lock)


def _publish(staging: Path, output: Path, replace: bool) -> None:
    for folder, _, _ in os.walk(staging):
        sync_folder(Path(folder))
    old = _old(output)
    _remove(old)
    try:
        if replace and (output / MANIFEST_NAME).is_file():
            output.rename(old)
        staging.rename(output)  # Fails, as it should, where a folder with anything in it has come up meanwhile.
    except BaseException:
        if old.is_dir() and not output.exists():
            old.rename(output)
        raise
    # From here on it is done, whatever becomes of the old one.
    with suppress(OSError):
        sync_folder(output.parent)
        _remove(old)


def _remove(folder: Path) -> None:
    """Delete a folder of ours, also one whose owner took write permission from it, or what lies in its place."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    if not folder.is_dir():
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
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                return fd
        except FileNotFoundError:
            pass
        os.close(fd)
