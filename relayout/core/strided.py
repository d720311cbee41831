"""Executes transfers between two buffers in memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from relayout.core.extents import Transfer

Bytes = npt.NDArray[np.uint8]


_SMALL_NBYTES = 2**15
"""Bytes. A single run up to this size is copied by a slice assignment, which has less overhead but keeps the GIL."""


def copy_runs(
    source: memoryview | Bytes, target: memoryview | Bytes, transfer: Transfer, origin: int = 0, target_origin: int = 0
) -> None:
    """Copy a transfer's runs. Its offsets are relative to `origin` in the source and `target_origin` in the target.

    Releases the GIL, except for small copies.
    """
    start, end = origin + transfer.source, target_origin + transfer.target
    is_small = transfer.count == 1 and transfer.nbytes <= _SMALL_NBYTES
    if is_small and isinstance(target, memoryview) and isinstance(source, memoryview):
        target[end : end + transfer.nbytes] = source[start : start + transfer.nbytes]
        return
    np.copyto(
        _runs(target, end, transfer.target_stride, transfer),
        _runs(source, start, transfer.source_stride, transfer),
    )


def _runs(memory: memoryview | Bytes, offset: int, stride: int, transfer: Transfer) -> Bytes:
    if transfer.count == 1:
        return np.ndarray((transfer.nbytes,), np.uint8, memory, offset)
    return np.ndarray((transfer.count, transfer.nbytes), np.uint8, memory, offset, (stride, 1))
