"""Holes of files: ranges that were never written and read as zeros."""

from __future__ import annotations

import os
from collections.abc import Iterator

from relayout.core.extents import Extent


def holes(fd: int, extent: Extent) -> Iterator[Extent]:
    """The holes in an extent of a file, as far as the file system reports them.

    ext4 and XFS also report space that was reserved and never written (lseek(2), SEEK_HOLE). Moves the descriptor's
    offset.
    """
    if not hasattr(os, "SEEK_HOLE"):
        return
    position = extent.offset
    try:
        while position < extent.end:
            hole = os.lseek(fd, position, os.SEEK_HOLE)
            if hole >= extent.end:
                return
            try:
                position = min(os.lseek(fd, hole, os.SEEK_DATA), extent.end)
            except OSError:  # ENXIO: no data behind it.
                position = extent.end
            yield Extent(hole, position - hole)
    except OSError:  # Not supported by the file system.
        return
