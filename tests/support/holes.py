"""Files with ranges that were never written, as a copy leaves them that reserved its space, and died."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relayout.core.extents import Extent
from relayout.storage.local.store import holes

MIB = 2**20


def has_holes(folder: Path) -> bool:
    """Whether the file system tells of holes."""
    path = folder / "probe"
    path.touch()
    os.truncate(path, MIB)
    with path.open("rb") as file:
        found = list(holes(file.fileno(), Extent(0, MIB)))
    path.unlink()
    return found == [Extent(0, MIB)]


def never_write(file: Path, offset: int) -> None:
    """Take away what a file has from `offset` on, and keep its length. Skip where the file system tells of no holes."""
    if not has_holes(file.parent):
        pytest.skip("this file system does not tell of holes")
    nbytes = file.stat().st_size
    os.truncate(file, offset)
    os.truncate(file, nbytes)
