"""What lies under a file: file system, block sizes, and whether it takes direct I/O."""

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
    """Where a file lies."""

    kind: str
    """As mount(8) names it: ext4, xfs, nfs4, overlay ...; "unknown" where the system does not tell."""
    mount_point: str
    block_nbytes: int
    """What the file system would like to be read in."""
    drive_block_nbytes: int | None
    """Logical block of the drive; None where there is no single one."""


def filesystem_of(path: Path) -> Filesystem:
    """Look up a file that exists.

    Raises:
        OSError: it cannot be looked at.
    """
    status = path.stat()
    mount_point, kind = _mount_of(path)
    return Filesystem(kind, mount_point, status.st_blksize, _drive_block(status.st_dev))


def refuses_direct(path: Path) -> str | None:
    """Why direct I/O does not work on a file, found out by reading its first block; None if it works."""
    try:
        with InputFile(path, path.stat().st_size, access=Access.DIRECT) as file:
            file.read(0, Buffer().reserve(BLOCK))
    except OSError as error:
        return error.strerror or str(error)
    except RelayoutError as error:
        return str(error)
    return None


def _mount_of(path: Path) -> tuple[str, str]:
    """Mount point and kind of the file system that a file lies on; see proc(5), fdinfo and mountinfo."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            described = (_DESCRIPTORS / str(fd)).read_text()
        finally:
            os.close(fd)
        number = next(line.split()[1] for line in described.splitlines() if line.startswith("mnt_id:"))
        lines = os.fsdecode(_MOUNTS.read_bytes()).splitlines()
        before, _, after = next(line.partition(" - ") for line in lines if line.split(" ", 1)[0] == number)
    except (AttributeError, OSError, StopIteration):  # AttributeError: macOS has no O_PATH.
        return "/", "unknown"
    mount_point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), before.split(" ")[4])
    return mount_point, after.split(" ")[0]


def _drive_block(device: int) -> int | None:
    drive = _DRIVES / f"{os.major(device)}:{os.minor(device)}"
    for place in (drive, drive.resolve().parent):  # A partition's queue is its drive's.
        try:
            return int((place / "queue" / "logical_block_size").read_text())
        except (OSError, ValueError):
            continue
    return None
