"""How fast storage answers that is not on this machine, measured with requests as a load makes them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from statistics import median

from relayout.core.extents import BLOCK, Extent, align_down, align_up, split
from relayout.core.workers import Workers
from relayout.loader.budgets import Budget
from relayout.loader.sources.stored import StoredFile
from relayout.storage.buffers import Buffer
from relayout.storage.protocols import Access, ReadableFile

_NUM_SHORT = 5
"""Short requests, one after the other."""
_MIN_LATENCY_SECONDS = 0.0005
"""A file system that answers sooner is on this machine."""
_MAX_SAMPLE_NBYTES = 512 * 2**20
_MAX_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Network:
    """What was measured."""

    latency_seconds: float
    """Of a short request; the median of a few."""
    bytes_per_second: float
    """Of `threads` requests at a time."""
    sample_nbytes: int
    """Bytes that were read for it."""
    threads: int

    def seconds(self, nbytes: int) -> float:
        """What a load of so many bytes takes: manifest, files, then the bytes."""
        return 2 * self.latency_seconds + nbytes / self.bytes_per_second


def measure(files: Sequence[StoredFile], budget: Budget) -> Network | None:
    """Read some of the files: for 3 s, or 512 MiB, or all of them. None if they have no bytes, or are on this machine.

    Raises:
        FormatError: a file is missing, or not as expected.
        OSError: a request failed.
    """
    with ExitStack() as stack:
        opened = [stack.enter_context(file.open(Access.AUTO)) for file in files]
        largest = max(range(len(opened)), key=lambda index: opened[index].nbytes, default=None)
        if largest is None or not opened[largest].nbytes:
            return None
        latency = median(_latencies(files[largest], opened[largest]))
        if not files[0].folder.cost.is_remote and latency < _MIN_LATENCY_SECONDS:
            return None
        return _measured(opened, budget, latency)


def _latencies(file: StoredFile, opened: ReadableFile) -> Iterator[float]:
    """Seconds of short requests at places that no read-ahead has brought."""
    buffer = Buffer()
    for index in range(_NUM_SHORT):
        start = time.perf_counter()
        if file.path is None:
            file.folder.snapshot().stat(file.name)
        else:
            opened.read(align_down(index * opened.nbytes // _NUM_SHORT, BLOCK), buffer.reserve(BLOCK))
        yield time.perf_counter() - start


def _measured(opened: Sequence[ReadableFile], budget: Budget, latency: float) -> Network:
    chunk = budget.cost.chunk_nbytes
    items = [(file, piece) for file in opened for piece in split(Extent(0, file.nbytes), chunk)]
    end = time.perf_counter() + _MAX_SECONDS

    def read(buffer: Buffer, item: tuple[int, Extent]) -> int:
        index, piece = item
        if time.perf_counter() > end:
            return 0
        items[index][0].read(piece.offset, buffer.reserve(align_up(piece.nbytes, BLOCK)))
        return piece.nbytes

    sample = [(index, piece) for index, (_, piece) in enumerate(islice(items, _MAX_SAMPLE_NBYTES // chunk))]
    workers = Workers(min(budget.threads, len(sample)), sample, Buffer, read)
    start = time.perf_counter()
    workers.run()
    seconds = time.perf_counter() - start
    return Network(latency, workers.done_nbytes / seconds, workers.done_nbytes, budget.threads)
