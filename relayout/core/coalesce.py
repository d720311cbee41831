"""Groups neighbouring extents, so that one request serves several. Pure."""

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
    """Group items that follow each other, in the given order, where their extents overlap, touch or nearly do so.

    Args:
        where: an item's key, the file for example, its offset and its end. Items of different keys are never in one
            group.
        max_gap_nbytes: bytes between two neighbours of a group that belong to neither, at most.
        max_nbytes: of a group of several items, at most; None: without a limit.
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
    """The extent in pieces of `max_nbytes`, the last one perhaps shorter; none of an empty one."""
    for offset in range(extent.offset, extent.end, max_nbytes):
        yield Extent(offset, min(max_nbytes, extent.end - offset))
