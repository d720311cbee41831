"""Samples of a drive while it is read, from the kernel's counters (`/proc/diskstats`), as `iostat` takes them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_COUNTERS = Path("/proc/diskstats")
_SECTOR = 512
"""Bytes of the unit that the kernel counts in, on any drive (Linux, Documentation/admin-guide/iostats.rst)."""
_INTERVAL = 0.05
"""Seconds between two samples."""


@dataclass(frozen=True, slots=True)
class DriveSample:
    """The reads of one drive in one interval, of all processes."""

    start: float
    """Start of the interval, in seconds since the start of the load."""
    seconds: float
    """Length of the interval."""
    nbytes: int
    """Bytes that were read."""
    requests: int
    """Requests that were completed."""
    queue: float
    """Mean number of read requests in flight."""

    @property
    def gb_per_s(self) -> float:
        """Speed in this interval, in GB/s (10^9 bytes)."""
        return self.nbytes / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class DriveCounters:
    """The counters of one drive since the system started."""

    at: float
    """Time of the reading, by `time.monotonic`."""
    requests: int
    nbytes: int
    request_seconds: float
    """Sum of the times that all read requests took."""

    @staticmethod
    def parse(text: str, number: str, at: float) -> DriveCounters | None:
        """Return the counters of the drive MAJOR:MINOR in the text of `/proc/diskstats`; None: it has none."""
        for line in text.splitlines():
            major, minor, _, requests, _, sectors, milliseconds, *_ = line.split()
            if f"{major}:{minor}" == number:
                return DriveCounters(at, int(requests), int(sectors) * _SECTOR, int(milliseconds) / 1e3)
        return None

    def since(self, before: DriveCounters, origin: float) -> DriveSample:
        """Return the sample of the interval between two readings; `origin` is the time of the load's start."""
        seconds = self.at - before.at
        return DriveSample(
            start=before.at - origin,
            seconds=seconds,
            nbytes=self.nbytes - before.nbytes,
            requests=self.requests - before.requests,
            queue=(self.request_seconds - before.request_seconds) / seconds,
        )


def drive_number(path: Path) -> str:
    """Return MAJOR:MINOR of the block device that holds a file. It has no counters if it is virtual, as for NFS."""
    device = path.stat().st_dev
    return f"{os.major(device)}:{os.minor(device)}"


@contextmanager
def sampling(number: str | None) -> Iterator[list[DriveSample]]:
    """Sample a drive until the block ends; the yielded list is complete then.

    Args:
        number: of `drive_number`. None, or a drive without counters: the list remains empty.
    """
    samples: list[DriveSample] = []
    first = None if number is None else _read(number)
    if number is None or first is None:
        yield samples
        return
    ended = threading.Event()
    thread = threading.Thread(target=_sample, args=(number, first, samples, ended), name="drive-samples", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def _sample(number: str, first: DriveCounters, samples: list[DriveSample], ended: threading.Event) -> None:
    before, is_over = first, False
    while not is_over:
        is_over = ended.wait(_INTERVAL)
        now = _read(number)
        if now is None:  # The drive was removed.
            return
        if now.at > before.at:
            samples.append(now.since(before, first.at))
        before = now


def _read(number: str) -> DriveCounters | None:
    try:
        return DriveCounters.parse(_COUNTERS.read_text(), number, time.monotonic())
    except (OSError, ValueError):  # Not Linux; or fewer columns than any kernel since 2.6 writes.
        return None


def mean_request_nbytes(samples: Sequence[DriveSample]) -> float | None:
    """Return the mean size of requests, in bytes; None: there were none."""
    requests = sum(sample.requests for sample in samples)
    return sum(sample.nbytes for sample in samples) / requests if requests else None


def mean_queue(samples: Sequence[DriveSample]) -> float:
    """Return the mean number of requests in flight; 0 without samples."""
    seconds = sum(sample.seconds for sample in samples)
    return sum(sample.queue * sample.seconds for sample in samples) / seconds if samples else 0.0
