"""What is below a folder, to be compared with what was there before."""

from __future__ import annotations

import os
from pathlib import Path


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tree(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Everything below a folder: name, and mode, size and time of the last change of what is not a folder."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in folders + files:
            path = Path(parent, name)
            status = path.lstat()
            own = (0, 0) if name in folders else (status.st_size, status.st_mtime_ns)
            found[str(path.relative_to(folder))] = (status.st_mode, *own)
    return found
