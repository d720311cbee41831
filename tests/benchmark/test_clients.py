"""`tools/run bench clients`: who loads what, what no load can beat, and a load by two nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench import clients
from bench.clients import Links, Place
from support.loader_fixtures import mlp_model
from support.networks import Host, absence
from support.shared_filesystems import FILE_SYSTEMS, Served
from support.tools import PYTHONPATH

import relayout

LINKS = Links(client=100.0, server=200.0)


@pytest.mark.parametrize(
    ("sharing", "num_clients", "seconds"),
    [("ranks", 1, 8.0), ("ranks", 2, 4.0), ("ranks", 8, 4.0), ("replicas", 1, 8.0), ("replicas", 8, 8.0)],
)
def test_no_load_is_faster_than_the_links(sharing: str, num_clients: int, seconds: float) -> None:
    assert LINKS.least_seconds(sharing, num_clients, 800) == seconds


@pytest.mark.parametrize("num_clients", [1, 2, 4, 8])
def test_nodes_divide_the_ranks_of_a_model_or_load_all_of_it(num_clients: int, tmp_path: Path) -> None:
    holder: Any = type("Holder", (), {"pid": 0})()
    hosts = [Host(f"10.0.0.{number}", holder) for number in range(9)]
    place = Place(hosts[0], hosts[1:], Served(lambda place, own: (), tmp_path), tmp_path, Path("/mount"))
    jobs = place.jobs("ranks", num_clients, "relayout")
    assert [job.rank for job in jobs] == list(range(8))
    assert {(job.tp, job.converted, job.num_processes) for job in jobs} == {(8, "/mount/tp8", 8 // num_clients)}
    jobs = place.jobs("replicas", num_clients, "relayout")
    assert [job.rank for job in jobs] == [0] * num_clients
    assert {(job.tp, job.converted, job.num_processes) for job in jobs} == {(1, "/mount/tp1", 1)}


def test_a_summary_has_the_lower_median_of_each_node_and_the_first_failure() -> None:
    runs = [
        {"seconds": seconds, "sent_over_model": 1.0, "received_over_model": [seconds, -seconds]}
        for seconds in (3.0, 1.0, 2.0)
    ]
    found = clients.summary(runs)
    assert (found["seconds"], found["received_over_model"]) == (2.0, [2.0, -2.0])
    assert found["all_seconds"] == [3.0, 1.0, 2.0]
    assert clients.summary([*runs, {"failed": "killed"}]) == {"failed": "killed"}


def test_the_time_of_processes_that_came_or_went_is_not_that_of_a_mount() -> None:
    before = clients._Counters(10, 20, {1: 1.0, 2: 5.0})
    since = clients._Counters(15, 50, {1: 1.5, 3: 9.0}).since(before)
    assert (since.sent_nbytes, since.received_nbytes, since.cpu_seconds) == (5, 30, 0.5)


def test_a_group_of_two_nodes_gets_each_byte_from_the_server_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (why := absence() or FILE_SYSTEMS["sshfs"].absence()) is not None:
        pytest.skip(why)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    (tmp_path / "models").mkdir()
    mlp_model(tmp_path / "models/plain", width=8192)
    relayout.convert(tmp_path / "models/plain", tmp_path / "models/tp1", tp=1)
    nbytes = sum(tensor.nbytes for tensor in relayout.load(tmp_path / "models/tp1", 0).values())
    with clients.place_of("sshfs", tmp_path, 2, Links(1e9, 1e9)) as place:
        names = ["relayout_group", "relayout"]
        [rows] = clients.measure(place, nbytes, LINKS, [2], ["replicas"], names, 1, 60, lambda line: None)
    group, alone = rows
    assert 1 <= group["sent_over_model"] < 1.2 < 2 <= alone["sent_over_model"] < 2.4
    assert 0.8 < group["between_clients_over_model"] < 1.2
    assert all(1 <= one < 1.3 for one in (*group["received_over_model"], *alone["received_over_model"]))
