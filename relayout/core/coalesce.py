"""Groups neighboring extents, so that one request serves several. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from relayout.core.extents import Extent

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Group(Generic[Item]):
    """Items that one request serves."""

    extent: Extent
    """From the first byte of all items to the last."""
    items: tuple[Item, ...]


def coalesce(
    items: Iterable[Item],
    where: Callable[[Item], tuple[Hashable, int, int]],
    *,
    max_gap_nbytes: int = 0,
    max_nbytes: int | None = None,
) -> Iterator[Group[Item]]:
    """Group consecutive items whose extents overlap, touch, or are separated by a small gap.

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
            yield Group(Extent(low, high - low), tuple(group))
            group = []
        if not group:
            key, low, end = item_key, offset, item_end
        group.append(item)
        high = end
    if group:
        yield Group(Extent(low, high - low), tuple(group))


def split(extent: Extent, max_nbytes: int) -> Iterator[Extent]:
    """Split the extent into pieces of `max_nbytes`; the last may be shorter. An empty extent has no pieces."""
    for offset in range(extent.offset, extent.end, max_nbytes):
        yield Extent(offset, min(max_nbytes, extent.end - offset))
