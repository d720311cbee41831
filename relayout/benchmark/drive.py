"""The drive's limit: direct reads of the files themselves, many at once."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local

from relayout.core.extents import BLOCK
from relayout.storage.local.mounts import refuses_direct

_REQUEST_NBYTES = 8 * 2**20
_THREADS = 8
"""Requests in flight."""
_SECONDS, _MAX_NBYTES = 3.0, 8 * 10**9
"""A measurement ends after this time or this many bytes."""


def direct_gb_per_s(files: Sequence[Path]) -> float | None:
    """GB/s (10^9 bytes) of direct reads of the files; None if their file system refuses direct reads.

    Reads past the page cache, and leaves it as it is.
    """
    files = [path for path in files if path.stat().st_size >= BLOCK]
    if not files or refuses_direct(files[0]) is not None:
        return None
    requests = [(path, at) for path in files for at in range(0, path.stat().st_size - BLOCK + 1, _REQUEST_NBYTES)]
    own, started = local(), time.monotonic()

    def read(request: tuple[Path, int]) -> int:
        if time.monotonic() - started > _SECONDS:
            return 0
        if not hasattr(own, "buffer"):
            # In huge pages: in small ones drives split a request into many, and deliver less.
            own.buffer = mmap.mmap(-1, _REQUEST_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            own.buffer.madvise(mmap.MADV_HUGEPAGE)
        file = os.open(request[0], os.O_RDONLY | os.O_DIRECT)
        try:
            return os.preadv(file, [own.buffer], request[1])
        finally:
            os.close(file)

    with ThreadPoolExecutor(_THREADS) as threads:
        nbytes = sum(threads.map(read, requests[: _MAX_NBYTES // _REQUEST_NBYTES]))
    return nbytes / (time.monotonic() - started) / 1e9
