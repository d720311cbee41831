"""relayout.loader.budgets: what one load may use, and what all ranks of a node use together."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relayout.loader.budgets import Budget, local_world_size, num_cpus, plan_budget

MIB = 2**20
GIB = 2**30
HOST, PINNED = 32 * MIB, 128 * MIB


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def on_a_node(monkeypatch: pytest.MonkeyPatch, cpus: int, ranks: object) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))


@pytest.mark.parametrize(
    ("cpus", "ranks", "most", "threads", "memory"),
    [
        (2, 1, HOST, 4, HOST),
        (192, 1, PINNED, 8, PINNED),
        (192, 8, PINNED, 8, PINNED),  # 8 ranks: all of the node's 1 GiB.
        (12, 8, HOST, 3, HOST),
        (2, 8, HOST, 1, HOST),
        (192, 64, PINNED, 6, 16 * MIB),
        (192, 4096, PINNED, 1, MIB),  # Less would not be enough to read anything.
    ],
)
def test_a_rank_takes_its_share_of_the_node(
    monkeypatch: pytest.MonkeyPatch, cpus: int, ranks: int, most: int, threads: int, memory: int
) -> None:
    on_a_node(monkeypatch, cpus, ranks)
    budget = plan_budget(None, None, most)
    assert (budget.threads, budget.memory) == (threads, memory)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("1", 1), ("8", 8), ("08", 8), ("0", 1), ("", 1), ("garbage", 1), ("-3", 1), ("8.0", 1), ("0x8", 1), ("²", 1)],
)
def test_the_number_of_ranks_is_torchruns_where_it_is_a_number(
    monkeypatch: pytest.MonkeyPatch, text: str, ranks: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    assert local_world_size() == ranks
    on_a_node(monkeypatch, 64, text)
    assert plan_budget(None, None, GIB).memory == GIB // ranks


def test_what_was_asked_for_is_taken_however_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_node(monkeypatch, 2, 8)
    assert plan_budget(20, 3 * GIB, HOST) == Budget(20, 3 * GIB)
    assert plan_budget(None, 3 * GIB, HOST) == Budget(1, 3 * GIB, max_threads=4)
    assert plan_budget(3, None, HOST) == Budget(3, HOST)


@given(
    cpus=st.integers(1, 512),
    ranks=st.integers(1, 2000),
    most=st.sampled_from([HOST, PINNED, 512 * MIB]),
    threads=st.none() | st.integers(1, 64),
    memory=st.none() | st.integers(MIB, GIB),
)
def test_all_ranks_together_stay_in_bounds(
    cpus: int, ranks: int, most: int, threads: int | None, memory: int | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        on_a_node(patch, cpus, ranks)
        budget = plan_budget(threads, memory, most)
    assert 1 <= budget.threads <= (threads or 8)
    assert MIB <= budget.memory <= (memory or most)
    assert budget.buffer_nbytes % 4096 == 0
    assert budget.buffer_nbytes >= MIB
    assert budget.buffer_nbytes * budget.threads <= budget.memory
    if memory is None:
        assert ranks * budget.memory <= max(GIB, ranks * MIB)
    if threads is None:
        assert ranks * budget.threads <= max(2 * cpus, ranks)
        assert ranks * budget.max_threads <= 32
        assert budget.max_threads * MIB <= budget.memory
    else:
        assert not budget.max_threads


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_processors_are_those_that_the_process_may_run_on() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        for few in (1, len(allowed)):
            os.sched_setaffinity(0, sorted(allowed)[:few])
            assert num_cpus() == few
            assert plan_budget(None, None, HOST).threads == min(8, 2 * few)
    finally:
        os.sched_setaffinity(0, allowed)


def test_all_processors_count_where_the_system_has_no_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert num_cpus() == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert num_cpus() == 1
