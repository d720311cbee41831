"""The drive's limit: direct reads of the files themselves, many at once."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from relayout.core.coalesce import split
from relayout.core.extents import BLOCK, Extent, align_down
from relayout.core.workers import Workers
from relayout.storage.file_pool import OpenFiles
from relayout.storage.local.files import InputFile
from relayout.storage.local.mounts import refuses_direct
from relayout.storage.protocols import Access

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
    started = time.monotonic()

    def requests() -> Iterator[tuple[int, Extent]]:
        total = 0
        for number, path in enumerate(files):
            for extent in split(Extent(0, align_down(path.stat().st_size, BLOCK)), _REQUEST_NBYTES):
                if total >= _MAX_NBYTES or time.monotonic() - started > _SECONDS:
                    return
                total += extent.nbytes
                yield number, extent

    def open_file(number: int) -> InputFile:
        return InputFile(files[number], access=Access.DIRECT)

    with OpenFiles(open_file) as inputs:

        def read(buffer: memoryview, item: tuple[int, Extent]) -> int:
            number, extent = item
            with inputs.use(number) as file:
                file.read(extent.offset, buffer[: extent.nbytes])
            return extent.nbytes

        workers = Workers(_THREADS, requests(), _buffer, read)
        workers.run()
    return workers.done_nbytes / (time.monotonic() - started) / 1e9


def _buffer() -> memoryview:
    """Memory in huge pages. In small pages, drives split a request into many, and deliver less."""
    memory = mmap.mmap(-1, _REQUEST_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
