"""How fast a remote store answers from here, measured with requests as a load makes them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median

from relayout.core.coalesce import split
from relayout.core.extents import Extent
from relayout.core.workers import Workers
from relayout.loader.budgets import Budget
from relayout.loader.sources.stored import StoredFile
from relayout.storage.buffers import Buffer
from relayout.storage.protocols import Access

_NUM_SHORT = 5
"""Files opened one after the other."""
_MAX_SAMPLE_NBYTES = 512 * 2**20
_MAX_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Network:
    """What was measured."""

    latency_seconds: float
    """Of a short request; the median of a few."""
    bytes_per_second: float
    """Of `threads` connections together."""
    sample_nbytes: int
    """Bytes that were read for it."""
    threads: int

    def seconds(self, nbytes: int) -> float:
        """What a load of so many bytes takes: manifest, files, then the bytes."""
        return 2 * self.latency_seconds + nbytes / self.bytes_per_second


def measure(files: Sequence[StoredFile], budget: Budget) -> Network | None:
    """Read some of the files: for 3 s, or 512 MiB, or all of them. None if they have no bytes.

    Raises:
        FormatError: a file is missing, or not as expected.
        OSError: a request failed.
    """
    opened = [file.open(Access.BUFFERED) for file in files]
    if not any(file.nbytes for file in opened):
        return None
    latencies = []
    for _ in range(_NUM_SHORT):
        start = time.perf_counter()
        files[0].folder.snapshot().stat(files[0].name)
        latencies.append(time.perf_counter() - start)
    chunk = budget.cost.chunk_nbytes
    items = [(file, piece) for file in opened for piece in split(Extent(0, file.nbytes), chunk)]
    end = time.perf_counter() + _MAX_SECONDS

    def read(buffer: Buffer, item: tuple[int, Extent]) -> int:
        index, piece = item
        if time.perf_counter() > end:
            return 0
        items[index][0].read(piece.offset, buffer.reserve(piece.nbytes))
        return piece.nbytes

    sample = [(index, piece) for index, (_, piece) in enumerate(islice(items, _MAX_SAMPLE_NBYTES // chunk))]
    workers = Workers(min(budget.threads, len(sample)), sample, Buffer, read)
    start = time.perf_counter()
    workers.run()
    seconds = time.perf_counter() - start
    return Network(median(latencies), workers.done_nbytes / seconds, workers.done_nbytes, budget.threads)
