"""Executes transfers between two buffers in memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from relayout.core.extents import Transfer

Bytes = npt.NDArray[np.uint8]


def copy_runs(source: memoryview | Bytes, target: memoryview | Bytes, transfer: Transfer, origin: int = 0) -> None:
    """Copy a transfer's runs. Source offsets are relative to `origin`, target offsets to the start of the target.

    Releases the GIL while it copies.
    """
    np.copyto(
        _runs(target, transfer.target, transfer.target_stride, transfer),
        _runs(source, origin + transfer.source, transfer.source_stride, transfer),
    )


def _runs(memory: memoryview | Bytes, offset: int, stride: int, transfer: Transfer) -> Bytes:
    if transfer.count == 1:
        return np.ndarray((transfer.nbytes,), np.uint8, memory, offset)
    return np.ndarray((transfer.count, transfer.nbytes), np.uint8, memory, offset, (stride, 1))
