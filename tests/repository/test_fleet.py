"""`tools/run fleet`: what it calculates is what arithmetic, a schedule of rounds, and others' measurements say."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from fleet import PIECE_NBYTES, PUBLISHED, WAYS, Fleet, every_rank, group, p2p_cache, ranges

pytestmark = pytest.mark.documents

GB = 1e9
SMALL = Fleet(16, 140 * GB, storage=40 * GB, nic=50 * GB, reader=1e12)
about = pytest.approx


@pytest.mark.parametrize(("num_nodes", "storage", "seconds"), [(1, 40, 3.5), (16, 40, 56), (16, 1e6, 2.8)])
def test_nodes_that_read_apart_share_the_storage_or_wait_for_their_own_nic(
    num_nodes: int, storage: float, seconds: float
) -> None:
    fleet = replace(SMALL, num_nodes=num_nodes, storage=storage * GB)
    assert (ranges(fleet).last, every_rank(fleet).last) == (about(seconds), about(8 * seconds))
    assert (ranges(fleet).storage_nbytes, every_rank(fleet).storage_nbytes) == (
        140 * GB * num_nodes,
        8 * 140 * GB * num_nodes,
    )


@pytest.mark.parametrize("storage", [40 * GB, 1e15])
@pytest.mark.parametrize("num_nodes", [1, 4, 16, 128, 1024])
def test_a_group_takes_as_long_as_its_rounds_one_after_the_other(num_nodes: int, storage: float) -> None:
    fleet = replace(SMALL, num_nodes=num_nodes, storage=storage)
    rounds = -(-140 * GB // (8 * num_nodes * PIECE_NBYTES))
    piece = 140 * GB / num_nodes / rounds
    # What a node has received, and when: its own pieces as fast as the storage gives them, the others' by the NIC.
    reading, read, exchanged = min(storage / num_nodes, 50 * GB), 0.0, 0.0
    for number in range(int(rounds)):
        read += piece / reading
        # All that came until the end of this exchange passed the NIC: its own pieces, one ahead, and the others'.
        through = (number + 1) * num_nodes * piece / (50 * GB)
        exchanged = max(max(exchanged, read) + (num_nodes - 1) * piece / (50 * GB), through)
    assert group(fleet).last == about(exchanged, rel=0.07)
    assert group(fleet).last >= max(140 * GB / storage, 140 * GB / (50 * GB)) * (1 - 1e-9)
    assert group(fleet).storage_nbytes == 140 * GB


def test_a_process_takes_no_more_than_its_requests_in_flight_bring() -> None:
    single = Fleet(1, 140 * GB, 1e15, 1e15, 1, 1e12, latency=0.1, connection=0.625 * GB, request_nbytes=2**23)
    assert ranges(single).last == about(0.1 + 140 * GB / (16 * 2**23 / (0.1 + 2**23 / (0.625 * GB))))
    assert ranges(replace(single, reader=GB)).last == about(140.1)
    assert ranges(replace(single, max_requests=100)).last == about(0.1 + 140 * GB / (100 * 2**23))


def test_what_happens_to_one_node_delays_it_alone_but_all_of_a_group() -> None:
    wide = replace(SMALL, storage=1e15)
    slow, late, dead = (replace(wide, **change) for change in ({"slow": 10}, {"stagger": 10.0}, {"dead_at": 1.0}))
    assert (median(ranges(slow).ready), ranges(slow).last) == (about(2.8), about(28))
    assert (min(ranges(late).ready), ranges(late).last) == (about(2.8), about(152.8))
    assert ranges(dead).last == about(2.8)
    assert min(group(slow).ready) == group(slow).last == about(28, rel=0.1)
    assert min(group(late).ready) == group(late).last == about(152.8, rel=0.1)
    assert group(dead).last == 11 + group(replace(wide, num_nodes=15)).last


def test_a_p2p_cache_takes_the_model_from_its_origin_once_as_dragonfly_has_published() -> None:
    """26 TB became 130 GB: 130 GB x 200 nodes (CNCF's blog, April 2026)."""
    nodes = Fleet(200, 130 * GB, storage=40 * GB, nic=12.5 * GB)
    assert (ranges(nodes).storage_nbytes, p2p_cache(nodes).storage_nbytes) == (about(26e12), 130 * GB)
    # Onto the drives at the NIC's speed, then from there; the last piece passes 8 times from node to node.
    assert p2p_cache(nodes).last == about(10.4 + 6.5 + 8 * PIECE_NBYTES / (12.5 * GB))


def test_published_times_are_reproduced_within_the_stated_factor() -> None:
    factors = [group(fleet).last / seconds for _, seconds, fleet, _ in PUBLISHED]
    assert len(factors) == 5
    assert all(1 / 2.6 <= factor <= 2.6 for factor in factors)
    assert {way(Fleet(1, 15 * GB, 40 * GB, 50 * GB)).storage_nbytes for way in WAYS.values()} == {15 * GB, 120 * GB}
