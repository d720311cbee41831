"""Integer arithmetic on bytes: extents of files, groups of them, and strided transfers between two byte spaces.

`copy_runs` carries out a transfer between two buffers in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Item = TypeVar("Item")
Bytes: TypeAlias = "npt.NDArray[np.uint8]"

BLOCK = 4096
"""Bytes. Offset, length and address of a direct transfer are multiples of this.

It is the largest logical block in common use, the memory page, and the granularity that GPUDirect Storage needs.
"""


def align_down(value: int, alignment: int) -> int:
    """Return the largest multiple of `alignment` up to `value`."""
    return value // alignment * alignment


def align_up(value: int, alignment: int) -> int:
    """Return the smallest multiple of `alignment` from `value` on."""
    return -(-value // alignment) * alignment


@dataclass(frozen=True, slots=True)
class Grid:
    """The best offsets to cut a file at: `origin`, and every `step` bytes from there on."""

    origin: int = 0
    step: int = BLOCK

    def down(self, offset: int) -> int:
        """Return the last offset of the grid up to `offset`."""
        return self.origin + align_down(offset - self.origin, self.step)

    def up(self, offset: int) -> int:
        """Return the first offset of the grid from `offset` on."""
        return self.origin + align_up(offset - self.origin, self.step)


def natural_alignment(nbytes: int, limit: int) -> int:
    """Return the largest power of two up to `limit` that divides `nbytes`; `limit` for 0 bytes."""
    return min(nbytes & -nbytes, limit) if nbytes else limit


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """A contiguous byte run of one file: `[offset, offset + nbytes)`."""

    offset: int
    """Absolute file offset of the first byte."""
    nbytes: int
    """Length in bytes."""

    @property
    def end(self) -> int:
        """Absolute file offset of the byte after the last."""
        return self.offset + self.nbytes

    def aligned(self, alignment: int = BLOCK) -> Extent:
        """Return the smallest extent that contains this one, with offset and end at multiples of `alignment`."""
        start = align_down(self.offset, alignment)
        return Extent(start, align_up(self.end, alignment) - start)


@dataclass(frozen=True, slots=True)
class Transfer:
    """`count` runs of `nbytes` each: run `i` goes from `source + i * source_stride` to `target + i * target_stride`.

    The two byte spaces are the caller's: a tensor and its slice, a file and an arena. With `count == 1` both
    strides are 0.
    """

    source: int
    """Byte offset of run 0 in the space read from."""
    target: int
    """Byte offset of run 0 in the space written to."""
    nbytes: int
    """Bytes of one run."""
    count: int = 1
    """Number of runs."""
    source_stride: int = 0
    """Bytes from the start of one run to the start of the next, in the space read from."""
    target_stride: int = 0
    """Bytes from the start of one run to the start of the next, in the space written to."""

    @property
    def total_nbytes(self) -> int:
        """Bytes moved."""
        return self.nbytes * self.count

    @property
    def source_end(self) -> int:
        """Byte offset after the last byte read."""
        return self.source + (self.count - 1) * self.source_stride + self.nbytes

    @property
    def target_end(self) -> int:
        """Byte offset after the last byte written."""
        return self.target + (self.count - 1) * self.target_stride + self.nbytes

    def shifted(self, *, source: int = 0, target: int = 0) -> Transfer:
        """Add `source` and `target` to the offsets of the runs."""
        return Transfer(
            self.source + source,
            self.target + target,
            self.nbytes,
            self.count,
            self.source_stride,
            self.target_stride,
        )

    def inverted(self) -> Transfer:
        """Exchange source and target."""
        return Transfer(self.target, self.source, self.nbytes, self.count, self.target_stride, self.source_stride)

    def packed(self, target: int) -> Transfer:
        """Write the runs one after the other, from `target` on."""
        stride = self.nbytes if self.count > 1 else 0
        return Transfer(self.source, target, self.nbytes, self.count, self.source_stride, stride)

    def unpacked(self, source: int) -> Transfer:
        """Read the runs one after the other, from `source` on."""
        stride = self.nbytes if self.count > 1 else 0
        return Transfer(source, self.target, self.nbytes, self.count, stride, self.target_stride)

    def normalized(self) -> Transfer:
        """Join runs that are contiguous in both spaces into one; other transfers are unchanged."""
        if self.count == 1 or self.nbytes == self.source_stride == self.target_stride:
            return Transfer(self.source, self.target, self.total_nbytes)
        return self

    def runs(self) -> Iterator[Transfer]:
        """Yield each run as a separate transfer."""
        for i in range(self.count):
            yield Transfer(self.source + i * self.source_stride, self.target + i * self.target_stride, self.nbytes)

    def clipped(self, start: int, end: int) -> list[Transfer]:
        """Return the part with source bytes in `[start, end)`.

        It consists of at most a partial first run, whole runs, and a partial last run.
        """
        if self.nbytes == 0 or end <= start:
            return []
        if self.count == 1:
            return self._run_part(0, start, end)
        # Runs first <= i < last are inside [start, end) completely; their neighbors may be inside in part.
        first = max(0, -(-(start - self.source) // self.source_stride))
        last = min(self.count, (end - self.source - self.nbytes) // self.source_stride + 1)
        if last <= first:
            neighbors = range(max(0, first - 1), min(self.count, first + 1))
            return [part for i in neighbors for part in self._run_part(i, start, end)]
        whole = Transfer(
            self.source + first * self.source_stride,
            self.target + first * self.target_stride,
            self.nbytes,
            last - first,
            self.source_stride if last - first > 1 else 0,
            self.target_stride if last - first > 1 else 0,
        )
        before = self._run_part(first - 1, start, end) if first > 0 else []
        after = self._run_part(last, start, end) if last < self.count else []
        return [*before, whole, *after]

    def within(self, other: Transfer) -> Iterator[Transfer]:
        """Yield the part of this transfer that `other` also reads: the bytes of the source space that both read.

        The runs of each transfer ascend and do not overlap.
        """
        if other.count == 1:
            yield from self.clipped(other.source, other.source_end)
        elif self.count == 1:
            for part in other.clipped(self.source, self.source_end):
                target = self.target + part.source - self.source
                yield Transfer(part.source, target, part.nbytes, part.count, part.source_stride, part.source_stride)
        elif self.source_stride == other.source_stride:
            # Divide the source into frames of one stride, each from a run of `other` to its next run. Run i of this
            # transfer begins `start` bytes into frame `i + lag`, and may end in the frame after it.
            stride = self.source_stride
            lag, start = divmod(self.source - other.source, stride)
            for frames, begin in ((lag, start), (lag + 1, start - stride)):
                low, high = max(0, begin), min(other.nbytes, begin + self.nbytes)
                first, last = max(0, -frames), min(self.count, other.count - frames)
                if low < high and first < last:
                    yield Transfer(
                        other.source + (first + frames) * stride + low,
                        self.target + first * self.target_stride + low - begin,
                        high - low,
                        last - first,
                        stride if last - first > 1 else 0,
                        self.target_stride if last - first > 1 else 0,
                    )
        else:
            for run in other.runs():
                yield from self.clipped(run.source, run.source_end)

    def onto(self, other: Transfer) -> Iterator[Transfer]:
        """Yield transfers of the bytes that both read, from this transfer's target space to the target of `other`.

        The runs of each transfer ascend and do not overlap.
        """
        for mine in self.within(other):
            theirs = list(other.within(mine))
            if len(theirs) == 1 and theirs[0].count == mine.count:
                (one,) = theirs
                yield Transfer(mine.target, one.target, one.nbytes, one.count, mine.target_stride, one.target_stride)
                continue
            for run in mine.runs():
                for one in other.clipped(run.source, run.source_end):
                    for part in one.runs():
                        yield Transfer(run.target + part.source - run.source, part.target, part.nbytes)

    def _run_part(self, index: int, start: int, end: int) -> list[Transfer]:
        run = self.source + index * self.source_stride
        low, high = max(run, start), min(run + self.nbytes, end)
        if low >= high:
            return []
        return [Transfer(low, self.target + index * self.target_stride + low - run, high - low)]


@dataclass(frozen=True, slots=True)
class Coalesced(Generic[Item]):
    """Items that one request serves, and the extent of the request."""

    extent: Extent
    """The bytes of the request: all from the first byte of the items to the last."""
    items: tuple[Item, ...]


def coalesce(
    items: Iterable[Item],
    where: Callable[[Item], tuple[Hashable, int, int]],
    *,
    max_gap_nbytes: int = 0,
    max_nbytes: int | None = None,
) -> Iterator[Coalesced[Item]]:
    """Group consecutive items if their extents overlap, touch, or are separated by a small gap.

    Args:
        where: returns an item's key (such as its file), offset and end. Items with different keys are never grouped.
        max_gap_nbytes: largest gap between two neighbors in a group.
        max_nbytes: largest extent of a group of several items; None: no limit.
    """
    group: list[Item] = []
    key: Hashable = None
    low = high = 0
    for item in items:
        item_key, offset, item_end = where(item)
        end = high if high > item_end else item_end
        if group and not (
            item_key == key
            and low <= offset <= high + max_gap_nbytes
            and (max_nbytes is None or end - low <= max_nbytes)
        ):
            yield Coalesced(Extent(low, high - low), tuple(group))
            group = []
        if not group:
            key, low, end = item_key, offset, item_end
        group.append(item)
        high = end
    if group:
        yield Coalesced(Extent(low, high - low), tuple(group))


def split(extent: Extent, max_nbytes: int) -> Iterator[Extent]:
    """Split the extent into pieces of `max_nbytes`; the last may be shorter. An empty extent has no pieces."""
    for offset in range(extent.offset, extent.end, max_nbytes):
        yield Extent(offset, min(max_nbytes, extent.end - offset))


_SMALL_NBYTES = 2**15
"""Bytes. A single run up to this size is copied by a slice assignment, which has less overhead but keeps the GIL."""


def copy_runs(
    source: memoryview | Bytes, target: memoryview | Bytes, transfer: Transfer, origin: int = 0, target_origin: int = 0
) -> None:
    """Copy a transfer's runs. Its offsets are relative to `origin` in the source and `target_origin` in the target.

    Releases the GIL, except for small copies.
    """
    start, end = origin + transfer.source, target_origin + transfer.target
    is_small = transfer.count == 1 and transfer.nbytes <= _SMALL_NBYTES
    if is_small and isinstance(target, memoryview) and isinstance(source, memoryview):
        target[end : end + transfer.nbytes] = source[start : start + transfer.nbytes]
        return
    import numpy as np  # Imported here to keep the command line's help fast.

    has_one = transfer.count == 1
    shape = (transfer.nbytes,) if has_one else (transfer.count, transfer.nbytes)
    to, by = (None, None) if has_one else ((transfer.target_stride, 1), (transfer.source_stride, 1))
    np.copyto(np.ndarray(shape, np.uint8, target, end, to), np.ndarray(shape, np.uint8, source, start, by))
