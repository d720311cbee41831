"""Networks on this machine, and the file systems that are mounted over them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.networks import Host, absence, network, started
from support.patience import PATIENCE
from support.shared_filesystems import FILE_SYSTEMS, mounted

NBYTES = 4_000_000
SEND = f"""
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as listener:
    print("listens", flush=True)
    connection, _ = listener.accept()
    connection.sendall(bytes({NBYTES}))
    connection.close()
"""
RECEIVE = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    print(sum(map(len, iter(lambda: connection.recv(2**20), b""))))
"""


def _need_networks() -> None:
    if (why := absence()) is not None:
        pytest.skip(why)


def _moved(server: Host, client: Host) -> tuple[int, float]:
    """Bytes that came from one host to another, and seconds."""
    with subprocess.Popen(
        [*server.within, sys.executable, "-c", SEND, server.address], stdout=subprocess.PIPE
    ) as sending:
        assert sending.stdout
        assert sending.stdout.readline() == b"listens\n"
        began = time.monotonic()
        nbytes = int(client.run(sys.executable, "-c", RECEIVE, server.address))
        return nbytes, time.monotonic() - began


@pytest.mark.parametrize(("rates"), [(None, 20e6), (20e6, None)])
def test_a_link_lets_bytes_pass_no_faster_than_its_rate_and_counts_them(rates: tuple[float | None, ...]) -> None:
    _need_networks()
    with network(rates) as (server, client):
        before = server.sent_nbytes(), client.received_nbytes()
        nbytes, seconds = _moved(server, client)
        moved = server.sent_nbytes() - before[0], client.received_nbytes() - before[1]
    assert nbytes == NBYTES
    assert seconds > 0.9 * NBYTES / 20e6
    assert all(NBYTES <= one < 1.1 * NBYTES for one in moved)


def test_a_program_on_a_host_has_its_processor_time_counted_and_ends_with_its_context(tmp_path: Path) -> None:
    _need_networks()
    with network([None]) as [host]:
        with started(host, [sys.executable, "-c", "while True: pass"], tmp_path / "log") as process:
            end = time.monotonic() + PATIENCE
            while not host.cpu_seconds().get(process.pid, 0) > 0.1:
                assert time.monotonic() < end
                time.sleep(0.02)
        assert process.returncode is not None
        assert process.pid not in host.cpu_seconds()


@pytest.mark.parametrize("name", FILE_SYSTEMS)
def test_clients_read_what_a_server_has_over_their_own_links(tmp_path: Path, name: str) -> None:
    _need_networks()
    if (why := FILE_SYSTEMS[name].absence()) is not None:
        pytest.skip(why)
    models, place = tmp_path / "models", tmp_path / "mount"
    for folder in (models / "one", place, tmp_path / "server"):
        folder.mkdir(parents=True)
    content = bytes(range(251)) * 20_000
    (models / "one" / "file").write_bytes(content)
    with (
        network([None] * 3) as (server, *clients),
        FILE_SYSTEMS[name].serve(server, tmp_path / "server", models) as served,
    ):
        for client in clients:
            with mounted(served, client, place):
                before = client.received_nbytes()
                assert (client.root / place.relative_to("/") / "one" / "file").read_bytes() == content
                assert client.received_nbytes() - before >= len(content)
                assert list(place.iterdir()) == []  # Other hosts do not see the mount.
