"""Digests of content, cryptographic digests of stored bytes, and digests of streams that several threads hash."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol

import xxhash
from blake3 import blake3

from relayout.core.extents import Extent
from relayout.core.workers import Stop, Stopped

XXH3_NBYTES = 16
"""Bytes of an XXH3-128 in its binary form, the canonical big-endian one."""

EMPTY_DIGEST = xxhash.xxh3_128_hexdigest(b"")
"""Digest of zero bytes."""


def xxh3_hex(blob: bytes | memoryview) -> str:
    """Return the XXH3-128 of the bytes, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(blob)


UNKNOWN_DIGEST = "0" * (2 * XXH3_NBYTES)
"""Placeholder for an unknown digest."""


def pack_digests(digests: Iterable[str | None]) -> bytes:
    """Join digests in binary form, one after the other; None becomes `UNKNOWN_DIGEST`."""
    return bytes.fromhex("".join([digest or UNKNOWN_DIGEST for digest in digests]))


def unpack_digests(packed: bytes) -> list[str]:
    """Return the digests that `pack_digests` joined, in hex."""
    joined, length = packed.hex(), 2 * XXH3_NBYTES
    return [joined[at : at + length] for at in range(0, len(joined), length)]


class Hash(Protocol):
    """A running hash."""

    def update(self, view: bytes | bytearray | memoryview, /) -> object:
        """Hash more bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""


new_xxh3: Callable[[], Hash] = xxhash.xxh3_128
"""Constructor of a running XXH3-128."""

BLAKE3_NBYTES = 32
"""Bytes of a BLAKE3 in its binary form."""

new_blake3: Callable[[], Hash] = blake3
"""Constructor of a running BLAKE3."""


def blake3_hex(blob: bytes | bytearray | memoryview) -> str:
    """Return the BLAKE3 of the bytes, as 64 hex digits. It is cryptographic: a trusted digest verifies the bytes."""
    return blake3(blob).hexdigest()


class OrderedDigests:
    """Digests of several streams. Each stream is hashed in byte order, by the thread that has the next piece.

    Thread-safe. Free of deadlock if the pieces of each stream are started in order, as `Workers` start their items.
    Keeps state only for streams that have arrived in part.
    """

    def __init__(self, stop: Stop, new: Callable[[], Hash] = new_xxh3) -> None:
        """Take `stop`, which wakes waiting threads when work is canceled, and `new`, which begins a running hash."""
        self._stop = stop
        self._new = new
        self._partial: dict[Hashable, tuple[int, Hash]] = {}
        """Number of bytes hashed and running hash, for each stream that has arrived in part."""

    def update(self, stream: Hashable, start: int, view: memoryview, nbytes: int) -> str | None:
        """Hash bytes `[start, start + len(view))` of a stream of `nbytes`; waits until all bytes before are hashed.

        Returns:
            The digest of the whole stream if these were its last bytes, else None.
        """
        if view.nbytes == nbytes:
            running = self._new()
            running.update(view)
            return running.hexdigest()
        with self._stop.condition:
            while (known := self._partial.get(stream) or (0, self._new()))[0] != start:
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
    """Digests of extents of one byte space, such as a file or an arena, with pieces that arrive in any order.

    Each extent is hashed in byte order by `OrderedDigests`; the same rules apply to threads.
    """

    def __init__(self, extents: Sequence[Extent], stop: Stop, new: Callable[[], Hash] = new_xxh3) -> None:
        """Take extents, which must not overlap, in any order. Empty extents may have any offset."""
        self._order = sorted((n for n, extent in enumerate(extents) if extent.nbytes), key=lambda n: extents[n].offset)
        self._starts = [extents[n].offset for n in self._order]
        self._ends = [extents[n].end for n in self._order]
        self._ordered = OrderedDigests(stop, new)
        self.digests = ["" if extent.nbytes else new().hexdigest() for extent in extents]
        """The digest of each extent, in hex; "" until its last byte is hashed."""

    @property
    def num_left(self) -> int:
        """Number of extents without a digest so far."""
        return self.digests.count("")

    def update(self, offset: int, view: memoryview) -> list[int]:
        """Hash the bytes at `offset`; bytes outside every extent are skipped.

        Returns:
            Positions of the extents that these bytes completed.
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
