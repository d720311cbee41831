"""relayout.core.extents: alignment, transfers and their clipping, copying, and which extents one request serves."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relayout.core.extents import (
    BLOCK,
    Bytes,
    Coalesced,
    Extent,
    Transfer,
    align_down,
    align_up,
    coalesce,
    copy_runs,
    natural_alignment,
    split,
)

Pair = tuple[int, int]


def moves(transfer: Transfer) -> list[Pair]:
    """(source byte, target byte) of each byte moved, in order."""
    return [
        (transfer.source + run * transfer.source_stride + i, transfer.target + run * transfer.target_stride + i)
        for run in range(transfer.count)
        for i in range(transfer.nbytes)
    ]


@st.composite
def transfers(draw: st.DrawFn, *, min_nbytes: int = 0) -> Transfer:
    """Runs that do not overlap in either space, near enough to each other to touch often."""
    nbytes = draw(st.integers(min_nbytes, 6))
    count = draw(st.integers(1, 6))
    strides = [max(1, nbytes) + draw(st.sampled_from([0, 0, 1, 5])) if count > 1 else 0 for _ in range(2)]
    return Transfer(draw(st.integers(0, 9)), draw(st.integers(0, 9)), nbytes, count, *strides)


@given(transfer=transfers(), start=st.integers(-2, 80), length=st.integers(-3, 80))
@example(transfer=Transfer(5, 0, 4, 3, 10, 4), start=5, length=24)
@example(transfer=Transfer(5, 0, 4, 3, 10, 4), start=6, length=22)
@example(transfer=Transfer(5, 0, 4, 3, 10, 4), start=16, length=2)
@example(transfer=Transfer(5, 0, 4, 3, 10, 4), start=7, length=10)
def test_clipping_keeps_just_the_bytes_of_the_window(transfer: Transfer, start: int, length: int) -> None:
    end = start + length
    parts = transfer.clipped(start, end)
    assert [pair for part in parts for pair in moves(part)] == [p for p in moves(transfer) if start <= p[0] < end]
    assert len(parts) <= 3
    assert all(part.nbytes and part.count for part in parts)
    assert all(part.count > 1 or part.source_stride == part.target_stride == 0 for part in parts)


@given(transfer=transfers(), other=transfers(), stride=st.none() | st.integers(6, 12))
@example(transfer=Transfer(3, 0, 4, 3, 10, 4), other=Transfer(0, 0, 5, 4, 10, 5), stride=None)
@example(transfer=Transfer(8, 0, 4, 3, 10, 4), other=Transfer(0, 0, 5, 4, 10, 5), stride=None)
def test_what_two_transfers_both_read(transfer: Transfer, other: Transfer, stride: int | None) -> None:
    if stride is not None and transfer.count > 1 and other.count > 1:
        transfer, other = (replace(one, source_stride=stride) for one in (transfer, other))
    read = {source for source, _ in moves(other)}
    found = [pair for part in transfer.within(other) for pair in moves(part)]
    assert sorted(found) == sorted(pair for pair in moves(transfer) if pair[0] in read)


@given(transfer=transfers(), other=transfers(), stride=st.none() | st.integers(6, 12))
@example(transfer=Transfer(0, 0, 12, 1), other=Transfer(2, 0, 4, 3, 5, 4), stride=None)
@example(transfer=Transfer(3, 0, 4, 3, 10, 4), other=Transfer(0, 0, 5, 4, 10, 5), stride=None)
def test_from_what_one_transfer_writes_to_what_another_does(
    transfer: Transfer, other: Transfer, stride: int | None
) -> None:
    if stride is not None and transfer.count > 1 and other.count > 1:
        transfer, other = (replace(one, source_stride=stride) for one in (transfer, other))
    goes_to = dict(moves(other))
    expected = sorted((target, goes_to[source]) for source, target in moves(transfer) if source in goes_to)
    assert sorted(pair for part in transfer.onto(other) for pair in moves(part)) == expected


@given(transfer=transfers())
def test_normalizing_joins_runs_that_touch_in_both_spaces(transfer: Transfer) -> None:
    joined = transfer.normalized()
    assert moves(joined) == moves(transfer)
    steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(moves(transfer))}
    if transfer.nbytes and steps <= {(1, 1)}:
        assert joined == Transfer(transfer.source, transfer.target, transfer.total_nbytes)
    elif transfer.nbytes:
        assert joined == transfer


@given(transfer=transfers(), source=st.integers(-9, 9), target=st.integers(-9, 9))
def test_shifting_moves_each_space_by_its_own_distance(transfer: Transfer, source: int, target: int) -> None:
    shifted = transfer.shifted(source=source, target=target)
    assert moves(shifted) == [(a + source, b + target) for a, b in moves(transfer)]
    assert transfer.shifted() == transfer


@given(transfer=transfers(), start=st.integers(-9, 9))
def test_packing_lays_one_run_behind_the_other(transfer: Transfer, start: int) -> None:
    places = range(start, start + transfer.total_nbytes)
    assert moves(transfer.packed(start)) == [(a, place) for (a, _), place in zip(moves(transfer), places, strict=True)]
    assert moves(transfer.unpacked(start)) == [(p, b) for (_, b), p in zip(moves(transfer), places, strict=True)]


@given(transfer=transfers(min_nbytes=1))
def test_a_transfer_knows_its_size_and_its_ends(transfer: Transfer) -> None:
    assert transfer.total_nbytes == len(moves(transfer))
    assert transfer.source_end == 1 + max(source for source, _ in moves(transfer))
    assert transfer.target_end == 1 + max(target for _, target in moves(transfer))


@pytest.mark.parametrize("alignment", [1, 2, 8, 512, 3, 4096 * 5])
def test_aligning_finds_the_nearest_multiples(alignment: int) -> None:
    multiples = [i * alignment for i in range(4)]
    for value in {*range(2 * min(alignment, 600) + 1), alignment - 1, alignment + 1, 2 * alignment}:
        assert align_down(value, alignment) == max(m for m in multiples if m <= value)
        assert align_up(value, alignment) == min(m for m in multiples if m >= value)


def test_aligning_is_exact_beyond_the_precision_of_floats() -> None:
    assert align_up(2**60 + 1, BLOCK) == 2**60 + 4096
    assert align_down(2**60 + 4095, BLOCK) == 2**60


@given(nbytes=st.integers(0, 2**24), limit=st.sampled_from([1, 16, 512, 4096, 2**21]))
@example(nbytes=0, limit=4096)
@example(nbytes=2**23, limit=4096)
@example(nbytes=3 * 2**11, limit=4096)
def test_the_natural_alignment_is_the_largest_power_that_divides(nbytes: int, limit: int) -> None:
    powers = [2**i for i in range(25) if 2**i <= limit]
    assert natural_alignment(nbytes, limit) == max(power for power in powers if nbytes % power == 0)


def test_extents_sort_by_offset_then_length() -> None:
    extents = [Extent(8, 1), Extent(0, 4), Extent(0, 0)]
    assert sorted(extents) == [Extent(0, 0), Extent(0, 4), Extent(8, 1)]
    assert Extent(8, 3).end == 11


def memory(nbytes: int, salt: int) -> Bytes:
    return (np.arange(nbytes) * 167 + salt).astype(np.uint8)


@given(transfer=transfers(), as_memoryviews=st.booleans())
def test_copying_moves_each_byte_to_its_place_and_touches_no_other(transfer: Transfer, as_memoryviews: bool) -> None:
    source, target = memory(80, 3), memory(80, 71)
    expected = target.copy()
    pairs = np.array(moves(transfer), dtype=np.intp).reshape(-1, 2)
    expected[pairs[:, 1]] = source[pairs[:, 0]]
    if as_memoryviews:
        copy_runs(source.data, target.data, transfer)
    else:
        copy_runs(source, target, transfer)
    np.testing.assert_array_equal(target, expected)
    np.testing.assert_array_equal(source, memory(80, 3))


LEAVING = {
    "run behind the source": Transfer(60, 0, 8),
    "run behind the target": Transfer(0, 60, 8),
    "runs behind the source": Transfer(0, 0, 4, 5, 16, 4),
    "runs behind the target": Transfer(0, 0, 4, 5, 4, 16),
    "last byte behind the source": Transfer(13, 0, 4, 5, 12, 4),
    "last byte behind the target": Transfer(0, 13, 4, 5, 4, 12),
}


@pytest.mark.parametrize("transfer", LEAVING.values(), ids=LEAVING)
def test_a_transfer_that_leaves_the_memory_is_not_carried_out(transfer: Transfer) -> None:
    source, target = memory(64, 3), memory(64, 71)
    with pytest.raises((TypeError, ValueError), match="buffer"):  # numpy's own words.
        copy_runs(source, target, transfer)
    np.testing.assert_array_equal(target, memory(64, 71))


def test_a_transfer_may_end_with_the_memory() -> None:
    source, target = memory(64, 3), memory(64, 71)
    copy_runs(source, target, Transfer(12, 44, 4, 5, 12, 4))
    np.testing.assert_array_equal(target[44:].reshape(5, 4), [source[at : at + 4] for at in (12, 24, 36, 48, 60)])


Item = tuple[int, Extent]

EXTENTS = st.builds(Extent, st.integers(0, 60), st.integers(1, 12))
ITEMS = st.lists(st.tuples(st.integers(0, 1), EXTENTS), max_size=12)


def groups_of(items: list[Item], gap: int = 0, most: int | None = None) -> list[Coalesced[Item]]:
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
