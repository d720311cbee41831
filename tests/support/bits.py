"""Bytes that depend on their position, and damage to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt


def pattern(nbytes: int, salt: int = 0) -> npt.NDArray[np.uint8]:
    """Bytes that depend on their position."""
    return ((np.arange(nbytes, dtype=np.uint64) * 2654435761 + salt * 40503) >> 13).astype(np.uint8)


def flip(file: Path, offset: int, bit: int = 0) -> None:
    """Damage a file by one bit; or repair it. An offset below 0 is counted from the end."""
    offset %= file.stat().st_size
    with file.open("r+b") as stream:
        stream.seek(offset)
        (byte,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte ^ 1 << bit]))
