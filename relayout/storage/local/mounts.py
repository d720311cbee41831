"""A file's file system, its block sizes, and whether it supports direct I/O."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from relayout.core.extents import BLOCK
from relayout.errors import RelayoutError
from relayout.storage.buffers import Buffer
from relayout.storage.local.files import InputFile
from relayout.storage.protocols import Access

_MOUNTS = Path("/proc/self/mountinfo")
_DESCRIPTORS = Path("/proc/self/fdinfo")
_DRIVES = Path("/sys/dev/block")


@dataclass(frozen=True, slots=True)
class Filesystem:
    """The file system of a file."""

    kind: str
    """The kind as mount(8) names it: ext4, xfs, nfs4, overlay ...; "unknown" if the system does not report it."""
    mount_point: str
    block_nbytes: int
    """Preferred I/O size of the file system."""
    drive_block_nbytes: int | None
    """Logical block size of the drive; None if unknown or if there are several drives."""


def filesystem_of(path: Path) -> Filesystem:
    """The file system of an existing file."""
    status = path.stat()
    mount_point, kind = _mount_of(path)
    return Filesystem(kind, mount_point, status.st_blksize, _drive_block(status.st_dev))


def refuses_direct(path: Path) -> str | None:
    """Why direct I/O fails on a file, tested by reading its first block; None if it works."""
    try:
        with InputFile(path, path.stat().st_size, access=Access.DIRECT) as file:
            file.read(0, Buffer().reserve(BLOCK))
    except OSError as error:
        return error.strerror or str(error)
    except RelayoutError as error:
        return str(error)
    return None


def _mount_of(path: Path) -> tuple[str, str]:
    """Mount point and kind of a file's file system; see proc(5), fdinfo and mountinfo."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            described = (_DESCRIPTORS / str(fd)).read_text()
        finally:
            os.close(fd)
        mount = next(line.split()[1] for line in described.splitlines() if line.startswith("mnt_id:"))
        lines = os.fsdecode(_MOUNTS.read_bytes()).splitlines()
        before, _, after = next(line.partition(" - ") for line in lines if line.split(" ", 1)[0] == mount)
    except (AttributeError, OSError, StopIteration):  # AttributeError: macOS has no O_PATH.
        return "/", "unknown"
    mount_point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split(" ")[4])
    return mount_point, after.split(" ")[0]


def _drive_block(device: int) -> int | None:
    drive = _DRIVES / f"{os.major(device)}:{os.minor(device)}"
    for place in (drive, drive.resolve().parent):  # A partition's queue is its drive's.
        try:
            return int((place / "queue" / "logical_block_size").read_text())
        except (OSError, ValueError):
            continue
    return None
