"""Data-parallel replicas of vLLM that load the same rank: they read it once together, and one that fails fails all."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import prestarted
from support.conversions import reference_tensors
from support.fake_vllm import Engine, Model, install
from support.replicas_worker import NUM_REPLICAS, RANK

pytestmark = pytest.mark.xdist_group("group")

SCRIPT = "from support.replicas_worker import main; main()"


@pytest.fixture(scope="module")
def replicas(folders: Path) -> list[dict[str, Any]]:
    """What each replica saw in each case."""
    done = prestarted.run(folders, script=SCRIPT, imports=prestarted.GROUP, env=prestarted.ONE_THREAD)
    assert done.returncode == 0, done.stderr
    return [json.loads((folders / f"replica-{number}.json").read_text()) for number in range(NUM_REPLICAS)]


@pytest.mark.parametrize("case", ["shared", "verified", "again"])
def test_replicas_read_a_rank_once_together(folders: Path, replicas: list[dict[str, Any]], case: str) -> None:
    tensors = [replica[case]["tensors"] for replica in replicas]
    assert tensors[0] == tensors[1]
    assert [replica[case]["readers"] for replica in replicas] == [NUM_REPLICAS] * 2
    assert all(any("read once for 2 replicas" in line for line in replica[case]["log"]) for replica in replicas)
    alone = sum(replica["alone"]["nbytes"] for replica in replicas) / NUM_REPLICAS
    rank_nbytes = json.loads((folders / "moe-tp2" / "relayout.json").read_text())["ranks"][RANK]["nbytes"]
    assert sum(replica["shared"]["nbytes"] for replica in replicas) < alone + rank_nbytes / 2


@pytest.mark.parametrize("case", ["alone", "draft"])
def test_what_is_not_to_be_shared_or_cannot_be_is_read_by_each(replicas: list[dict[str, Any]], case: str) -> None:
    for replica in replicas:
        assert replica[case]["readers"] == 1
        assert replica[case]["tensors"] == replica["shared"]["tensors"]
        assert "replicas" not in replica[case]["log"][-1]


@pytest.mark.parametrize(
    ("case", "culprit", "reason"),
    [
        ("a read fails", 0, "the drive is on fire"),
        ("missing", 0, "is not a folder: no objects with this prefix"),
        ("the engine fails", 1, "no place for this tensor"),
        ("the engine stops", 1, "rank 1: the engine stopped after 2 tensors"),
    ],
)
def test_what_fails_in_one_replica_fails_all_with_its_reason(
    replicas: list[dict[str, Any]], case: str, culprit: int, reason: str
) -> None:
    found = [replica[case]["error"] for replica in replicas]
    assert reason in found[culprit]
    assert f"member {culprit} of the group failed: " not in found[culprit]
    assert f"member {culprit} of the group failed: " in found[1 - culprit]
    assert reason in found[1 - culprit] or "it stopped before the last tensor" in found[1 - culprit]


def test_a_replica_whose_load_cannot_be_shared_lets_nobody_wait_for_it(replicas: list[dict[str, Any]]) -> None:
    """Of a plain checkpoint vLLM loads all itself; the other replica has a converted one."""
    loads_alone, waits = (replica["one shares nothing"] for replica in replicas)
    assert "error" not in loads_alone
    assert "member 0 of the group failed: " in waits["error"]
    assert "group: this load cannot be shared" in waits["error"]


def test_experts_that_replicas_own_are_never_shared(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Engine = install(monkeypatch)
    engine.rank, engine.tp, engine.replicas = 0, 2, SimpleNamespace()  # No group: to use it would fail.
    engine.parallel.data_parallel_size, engine.parallel.enable_expert_parallel = 2, True
    whole = reference_tensors(folders / "moe")
    loader = engine.load(folders / "moe-tp2", Model(whole, 0, 2, experts=range(4)))
    assert loader.load.delivery.report().num_readers == 1
