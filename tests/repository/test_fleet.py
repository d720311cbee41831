"""tools/fleet: the simulation agrees with closed forms, with real transfers, and with what others have published."""

from __future__ import annotations

from dataclasses import replace
from math import isclose

import pytest

pytest.importorskip("simpy", reason="simulates on simpy, which is in the extras `bench` and `test`")

import simpy
from fleet import loopback, tables
from fleet.network import Link, Network
from fleet.published import PUBLISHED, WITHIN
from fleet.simulation import (
    EVERY_RANK,
    GROUP,
    IN_STEP,
    ONE_READER,
    PIECE_NBYTES,
    RANGES,
    SWARM,
    WAYS,
    Fleet,
    simulate,
)

GB = 1e9
STORES = {"the storage": 40 * GB, "the NIC": 1e15}


def fleet(num_nodes: int, storage: float = 40 * GB, **other: float) -> Fleet:
    return replace(Fleet(num_nodes, 140 * GB, storage, 50 * GB, reader=1e12, replicated=0.0), **other)  # type: ignore[arg-type]


def about(found: float, expected: float, within: float = 1e-6) -> bool:
    return isclose(found, expected, rel_tol=within)


def test_links_are_shared_by_max_min_fairness() -> None:
    """Three transfers through one link, one of them with less at most, then one after the other is done."""
    env = simpy.Environment()
    network, link, other = Network(env), Link(10.0), Link(4.0)
    ends = {}

    def run(name: str, nbytes: float, links: dict[Link, float], most: float) -> object:
        yield network.transfer(nbytes, links, most).done
        ends[name] = env.now

    env.process(run("slow", 10, {link: 1}, 1.0))
    env.process(run("narrow", 20, {link: 1, other: 1}, 100.0))
    env.process(run("wide", 50, {link: 1}, 100.0))
    env.run()
    # 1, 4 and 5 until t=5, when the narrow one is done; then 1 and 9 until t=5+25/9; then 1 alone.
    assert about(ends["narrow"], 5)
    assert about(ends["wide"], 5 + 25 / 9)
    assert about(ends["slow"], 10)
    assert about(link.carried_nbytes, 80)
    assert link.peak == 10


@pytest.mark.parametrize("limit", STORES)
@pytest.mark.parametrize("num_nodes", [1, 4, 16, 128, 1024])
def test_each_way_takes_what_its_closed_form_says(num_nodes: int, limit: str) -> None:
    model, storage, nic, ranks = 140 * GB, STORES[limit], 50 * GB, 8
    each = {way: simulate(way, fleet(num_nodes, storage)) for way in WAYS}
    for way, nbytes in ((EVERY_RANK, ranks * model), (ONE_READER, model), (RANGES, model)):
        assert about(each[way].last, max(num_nodes * nbytes / storage, nbytes / nic))
        assert about(each[way].storage_nbytes, num_nodes * nbytes)
        assert about(each[way].peak_requests * 8 * 2**20, min(storage, num_nodes * nic))
    for way in IN_STEP:
        assert about(each[way].storage_nbytes, model)
        limits = max(model / storage, model / nic)
        # A round is exchanged while the next one is read; the first is only read, the last only exchanged.
        assert limits * (1 - 1e-9) <= each[way].last <= limits + model / storage + model / nic
        once = PIECE_NBYTES * ranks * num_nodes
        assert each[way].last <= limits + 2 * once / min(nic, storage) + model / num_nodes / nic
    assert about(each[SWARM].storage_nbytes, model)
    assert max(model / storage, model / 20e9) <= each[SWARM].last - model / 20e9 <= 2 * model / 20e9


def test_on_a_shared_file_system_ranks_of_a_node_share_its_page_cache() -> None:
    assert about(simulate(EVERY_RANK, fleet(4, has_page_cache=True)).storage_nbytes, 4 * 140 * GB)


def test_a_process_takes_no_more_than_its_requests_in_flight_bring() -> None:
    one = fleet(1, storage=1e15, nic=1e15, latency=0.1, connection=0.625e9, concurrency=16)
    request = 8 * 2**20
    rate = 8 * 16 * request / (0.1 + request / 0.625e9)
    assert about(simulate(RANGES, one).last, 0.1 + 140 * GB / rate)


def test_starts_one_after_the_other_spread_the_load() -> None:
    late = fleet(16, stagger=10.0)
    found = simulate(RANGES, late)
    # Alone, a node takes 3.5 s: each has the storage to itself.
    assert about(found.first, 3.5)
    assert about(found.median, 75 + 3.5)
    assert about(found.last, 150 + 3.5)
    assert simulate(GROUP, late).first > 150  # The group waits for the last.


def test_one_slow_node_is_late_alone_but_in_a_group_all_wait_for_it() -> None:
    slow = fleet(16, storage=1e15, slow=10.0)
    apart, group = simulate(RANGES, slow), simulate(GROUP, slow)
    assert about(apart.median, 2.8)
    assert about(apart.last, 28)
    assert group.first == group.last
    assert 28 <= group.last <= 34


def test_a_node_that_dies_delays_only_the_groups() -> None:
    dead = fleet(16, storage=400 * GB, dead_at=1.0, detection=10.0)
    apart = simulate(RANGES, dead)
    # For 1 s, 16 nodes share the storage (5.6 s alone); then 15 have its bandwidth.
    assert about(apart.last, 1 + (15 * 140 * GB - 15 / 16 * 400 * GB) / (400 * GB))
    assert about(apart.storage_nbytes, 15 * 140 * GB + 25 * GB)
    group, without = simulate(GROUP, dead), simulate(GROUP, fleet(15, storage=400 * GB))
    assert about(group.last, 11 + without.last)
    assert group.storage_nbytes > 140 * GB
    late = simulate(GROUP, replace(dead, dead_at=1000.0))
    assert about(late.last, simulate(GROUP, fleet(16, storage=400 * GB)).last)


def test_a_store_that_refuses_requests_is_a_slower_store() -> None:
    limited = fleet(16, storage=1e15, max_requests=500.0)
    found = simulate(RANGES, limited)
    assert about(found.peak_requests, 500)
    assert about(found.last, 16 * 140 * GB / (500 * 8 * 2**20))
    larger = replace(limited, request_nbytes=64 * 2**20)
    assert about(simulate(RANGES, larger).last, found.last / 8)


@pytest.mark.parametrize("one", PUBLISHED, ids=lambda one: one.what[:24])
def test_published_times_are_reproduced_within_the_stated_factor(one: object) -> None:
    assert isinstance(one, type(PUBLISHED[0]))
    assert 1 / WITHIN <= one.simulated / one.seconds <= WITHIN


def test_the_tables_of_the_document_are_those_of_today() -> None:
    assert tables.document() == tables.DOCUMENT.read_text(), "tools/run fleet document"


def test_dragonfly_takes_the_model_from_its_origin_once() -> None:
    """26 TB became 130 GB: 130 GB x 200 nodes (CNCF's blog, April 2026)."""
    nodes = Fleet(200, 130e9, storage=40e9, nic=12.5e9)
    assert about(simulate(ONE_READER, nodes).storage_nbytes, 26e12)
    assert about(simulate(SWARM, nodes).storage_nbytes, 130e9)


@pytest.mark.parametrize("way", [EVERY_RANK, RANGES, GROUP])
def test_real_transfers_take_as_long(way: str) -> None:
    """On loopback, with paced bandwidths; a busy machine may be slower, a right one is never faster."""
    small = Fleet(
        3, 3e6, storage=15e6, nic=10e6, num_ranks=2, replicated=0, latency=0.02, concurrency=1, request_nbytes=3e6
    )
    seconds, nbytes = loopback.measure(way, small)
    expected = simulate(way, small)
    assert about(nbytes, expected.storage_nbytes, 0.001)
    assert 0.85 * expected.last <= seconds <= 3 * expected.last + 1
