"""Checks digests while bytes arrive."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import xxhash

from relayout.core.workers import Stop, Stopped
from relayout.errors import FormatError


class Checks:
    """The digests that tensors must have, each taken over its bytes in order, by whichever thread has the next ones.

    Deadlock-free as long as threads take a tensor's bytes up in order.
    """

    def __init__(
        self, names: Sequence[str], offsets: Sequence[int], sizes: Sequence[int], digests: Sequence[str], stop: Stop
    ) -> None:
        """Tensors of `sizes` bytes at `offsets` of the arena."""
        order = sorted((row for row in range(len(names)) if sizes[row]), key=offsets.__getitem__)
        self._names = [names[row] for row in order]
        self._starts = [offsets[row] for row in order]
        self._ends = [offsets[row] + sizes[row] for row in order]
        self._digests = [digests[row] for row in order]
        self._stop = stop
        self._hashes: dict[int, xxhash.xxh3_128] = {}
        """Of tensors that have arrived in part."""
        self._position = list(self._starts)
        self._num_left = len(order)
        for row, name in enumerate(names):
            if not sizes[row]:
                _compare(name, digests[row], xxhash.xxh3_128_hexdigest(b""))

    def update(self, offset: int, view: memoryview) -> None:
        """Take note of the arena's bytes from `offset` on, of which some may belong to no tensor.

        Raises:
            FormatError: a tensor is complete and has another digest.
            Stopped: the load was given up.
        """
        end = offset + view.nbytes
        row = max(0, bisect_right(self._starts, offset) - 1)
        while row < len(self._starts) and self._starts[row] < end:
            low, high = max(offset, self._starts[row]), min(end, self._ends[row])
            if low < high:
                self._update_row(row, low, high, view[low - offset : high - offset])
            row += 1

    def finish(self) -> None:
        """Make sure that all tensors have been compared; to be called when all bytes have arrived.

        Raises:
            FormatError: some have not: no read has brought all of their bytes, in order.
        """
        if self._num_left:
            raise FormatError(f"{self._num_left} tensors could not be checked: their bytes did not arrive in order")

    def _update_row(self, row: int, low: int, high: int, view: memoryview) -> None:
        if (low, high) == (self._starts[row], self._ends[row]):
            _compare(self._names[row], self._digests[row], xxhash.xxh3_128_hexdigest(view))
            with self._stop.condition:
                self._num_left -= 1
            return
        with self._stop.condition:
            while self._position[row] != low:
                if self._stop.requested:
                    raise Stopped
                self._stop.condition.wait()
            hashed = self._hashes.setdefault(row, xxhash.xxh3_128())
        hashed.update(view)
        with self._stop.condition:
            self._position[row] = high
            self._stop.condition.notify_all()
            if high < self._ends[row]:
                return
            del self._hashes[row]
            self._num_left -= 1
        _compare(self._names[row], self._digests[row], hashed.hexdigest())


def _compare(name: str, expected: str, found: str) -> None:
    if found != expected:
        raise FormatError(f"tensor {name!r}: its bytes have digest {found}, expected {expected}: damaged")
