"""What reads bring, carried out by numpy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from relayout.format.index import Read

Array = npt.NDArray[Any]
UNTOUCHED = 0xA5


def carried_out(reads: Iterable[Read], files: Sequence[Array], nbytes: int) -> tuple[Array, Array]:
    """Memory of that many bytes after the reads, and how often each byte was written."""
    memory, times = np.full(nbytes, UNTOUCHED, np.uint8), np.zeros(nbytes, int)
    for read in reads:
        one = read.transfer
        for run in range(one.count):
            source, target = one.source + run * one.source_stride, one.target + run * one.target_stride
            assert 0 <= source <= source + one.nbytes <= len(files[read.file])
            assert 0 <= target <= target + one.nbytes <= nbytes
            memory[target : target + one.nbytes] = files[read.file][source : source + one.nbytes]
            times[target : target + one.nbytes] += 1
    return memory, times
