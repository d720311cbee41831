"""relayout.core.extents: which extents one request serves, against a set of bytes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from relayout.core.extents import Extent, Group, coalesce, split

Item = tuple[int, Extent]

EXTENTS = st.builds(Extent, st.integers(0, 60), st.integers(1, 12))
ITEMS = st.lists(st.tuples(st.integers(0, 1), EXTENTS), max_size=12)


def groups_of(items: list[Item], gap: int = 0, most: int | None = None) -> list[Group[Item]]:
    return list(
        coalesce(items, lambda item: (item[0], item[1].offset, item[1].end), max_gap_nbytes=gap, max_nbytes=most)
    )


@given(ITEMS, st.integers(0, 5), st.none() | st.integers(1, 40))
def test_groups_are_the_items_in_order_and_as_few_as_the_limits_allow(
    items: list[Item], gap: int, most: int | None
) -> None:
    groups = groups_of(items, gap, most)
    assert [item for group in groups for item in group.items] == items
    for group in groups:
        assert group.extent.offset == group.items[0][1].offset
        assert group.extent.end == max(extent.end for _, extent in group.items)
        assert len({file for file, _ in group.items}) == 1
        assert most is None or len(group.items) == 1 or group.extent.nbytes <= most
        wanted = {byte for _, one in group.items for byte in range(one.offset, one.end)}
        unwanted = [byte for byte in range(group.extent.offset, group.extent.end) if byte not in wanted]
        assert all(set(range(byte, byte + gap + 1)) & wanted for byte in unwanted)
    for group, after in pairwise(groups):
        file, extent = after.items[0]
        joined = max(group.extent.end, extent.end) - group.extent.offset
        assert (
            file != group.items[0][0]
            or not group.extent.offset <= extent.offset <= group.extent.end + gap
            or (most is not None and joined > most)
        )


@given(EXTENTS | st.builds(Extent, st.integers(0, 60), st.just(0)), st.integers(1, 20))
def test_pieces_of_an_extent_follow_each_other_and_only_the_last_is_short(extent: Extent, most: int) -> None:
    pieces = list(split(extent, most))
    assert [byte for one in pieces for byte in range(one.offset, one.end)] == [*range(extent.offset, extent.end)]
    assert all(one.nbytes == most for one in pieces[:-1])
    assert all(0 < one.nbytes <= most for one in pieces)
