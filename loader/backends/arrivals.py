"""How much of each part of a load has arrived."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from relayout.core.workers import Stop


class Arrivals:
    """Counts the bytes of parts of an address space that are still to arrive. Thread-safe."""

    def __init__(self, starts: Sequence[int], sizes: Sequence[int], stop: Stop) -> None:
        """Parts that begin at these offsets, in rising order, and of which so many bytes are read; `stop` is the
        job's."""
        self._starts = starts
        self._left = list(sizes)
        self._stop = stop

    def part_at(self, offset: int) -> int:
        """The number of the part that an offset is in."""
        return bisect_right(self._starts, offset) - 1

    def arrived(self, offset: int, nbytes: int) -> None:
        """See `ReadJob.arrived`; the bytes are of one part."""
        number = self.part_at(offset)
        with self._stop.condition:
            self._left[number] -= nbytes
            if not self._left[number]:
                self._stop.condition.notify_all()

    def wait(self, number: int) -> bool:
        """Wait for a part; False if the job stopped before it arrived."""
        with self._stop.condition:
            while self._left[number] and not self._stop.requested:
                self._stop.condition.wait()
            return not self._left[number]
