"""Holes of files: ranges to which nothing was ever written, and which read as zeros."""

from __future__ import annotations

import os
from collections.abc import Iterator

from relayout.core.extents import Extent


def holes(fd: int, extent: Extent) -> Iterator[Extent]:
    """The holes in an extent of a file, as far as the file system tells.

    ext4 and XFS also tell of space that was reserved and never written (lseek(2), SEEK_HOLE). Moves the descriptor's
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
    except OSError:  # Not every file system tells.
        return
