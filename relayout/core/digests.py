"""Digests of bytes that arrive in pieces, from several threads, and are hashed in their order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence

import xxhash

from relayout.core.extents import Extent
from relayout.core.workers import Stop, Stopped

EMPTY_DIGEST = xxhash.xxh3_128_hexdigest(b"")
"""Of no bytes."""


def digest_hex(blob: bytes | memoryview) -> str:
    """Digest of some bytes: XXH3-128, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(blob)


class OrderedDigests:
    """Digests of several streams, each taken over the stream's bytes in order, by the thread that has the next ones.

    Deadlock-free as long as work is started in the order of each stream's bytes, as `Workers` start their items. State
    is kept only of streams that have arrived in part. Any number of threads may update.
    """

    def __init__(self, stop: Stop) -> None:
        """`stop` ends the waiting when the work is given up."""
        self._stop = stop
        self._partial: dict[Hashable, tuple[int, xxhash.xxh3_128]] = {}
        """Of streams that have arrived in part: bytes hashed so far, and their hash."""

    def update(self, stream: Hashable, start: int, view: memoryview, nbytes: int) -> str | None:
        """Hash bytes `[start, start + len(view))` of a stream of `nbytes`; wait until all in front of them are hashed.

        Returns:
            The digest of the whole stream, if these were its last bytes.

        Raises:
            Stopped: the work was given up.
        """
        if view.nbytes == nbytes:
            return digest_hex(view)
        with self._stop.condition:
            while (known := self._partial.get(stream) or (0, xxhash.xxh3_128()))[0] != start:
                if self._stop.requested:
                    raise Stopped
                self._stop.condition.wait()
        _, running = known
        running.update(view)
        end = start + view.nbytes
        with self._stop.condition:
            self._stop.condition.notify_all()
            if end < nbytes:
                self._partial[stream] = (end, running)
                return None
            self._partial.pop(stream, None)
        return running.hexdigest()


class ExtentDigests:
    """Digests of extents of one byte space, such as a file or an arena, whose chunks arrive in any order.

    An extent's own bytes are hashed in order, by `OrderedDigests`: the same holds for threads.
    """

    def __init__(self, extents: Sequence[Extent], stop: Stop) -> None:
        """Extents that do not overlap, in any order. Empty ones may lie anywhere."""
        self._order = sorted((n for n, one in enumerate(extents) if one.nbytes), key=lambda n: extents[n].offset)
        self._starts = [extents[n].offset for n in self._order]
        self._ends = [extents[n].end for n in self._order]
        self._ordered = OrderedDigests(stop)
        self.digests = ["" if one.nbytes else EMPTY_DIGEST for one in extents]
        """Of each extent, in hex; empty until its last byte was hashed."""

    @property
    def num_left(self) -> int:
        """How many extents have no digest yet."""
        return self.digests.count("")

    def update(self, offset: int, view: memoryview) -> list[int]:
        """Hash the bytes from `offset` on, some of which may be in no extent.

        Returns:
            The positions of those extents of which these were the last bytes: their digests are known now.

        Raises:
            Stopped: the work was given up.
        """
        complete = []
        end = offset + view.nbytes
        for place in range(max(0, bisect_right(self._starts, offset) - 1), len(self._starts)):
            start = self._starts[place]
            if start >= end:
                break
            low, high = max(offset, start), min(end, self._ends[place])
            if low < high:
                part = view[low - offset : high - offset]
                digest = self._ordered.update(place, low - start, part, self._ends[place] - start)
                if digest is not None:
                    self.digests[self._order[place]] = digest
                    complete.append(self._order[place])
        return complete
