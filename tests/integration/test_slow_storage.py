"""Slow storage: loads from a FUSE file system, if mfusepy and fuse3 are installed, and the proxy's link."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from support.loader_fixtures import assert_equal, mlp_model
from support.page_cache import opened
from support.slow_storage import Link, absence, slow_folder, slow_server

import relayout
from relayout.loader.diagnose import diagnose
from relayout.storage.system import resident_nbytes


@pytest.mark.skipif(absence() is not None, reason=str(absence()))
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("path", ["out", "model"])
def test_a_rank_moves_its_bytes_once_and_leaves_the_page_cache_as_it_was(
    tmp_path: Path, direct: bool, path: str
) -> None:
    (tmp_path / "files").mkdir()
    mlp_model(tmp_path / "files/model", width=8192)
    relayout.convert(tmp_path / "files/model", tmp_path / "files/out", tp=2)
    expected = relayout.load(tmp_path / "files/out", 1)
    with slow_folder(tmp_path / "files", tmp_path / "mount", Link(0.002, 1e9, 128 * 1024, direct)) as slow:
        before = slow.sent_nbytes()
        loaded = relayout.load(tmp_path / "mount" / path, 1, tp=2)
        moved = slow.sent_nbytes() - before
        found = diagnose(tmp_path / "mount/out", rank=1, device="cpu")
        for file in (tmp_path / "mount" / path).glob("*.safetensors"):
            with opened(file) as fd:
                assert (resident_nbytes(fd, 0, file.stat().st_size) or 0) < 2**18
    assert_equal(loaded, expected)
    nbytes = sum(tensor.nbytes for tensor in expected.values())
    assert nbytes <= moved < nbytes * (1.1 if path == "out" else 2.2) + 2**19
    assert found.network is not None
    assert 0.002 <= found.network.latency_seconds < 1
    assert found.ranks[0].backend == ("direct" if direct else "buffered")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the proxy splices")
def test_the_proxy_passes_all_bytes_no_faster_than_its_link() -> None:
    content = os.urandom(3_000_000)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    one, _ = listener.accept()
                except OSError:
                    return
                with one:
                    one.sendall(one.recv(100) + content)

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        found: list[bytes] = []

        def ask(port: int, word: bytes) -> None:
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(word)
                with connection.makefile("rb") as answer:
                    found.append(answer.read())

        with slow_server(listener.getsockname()[1], Link(0.05, 20e6)) as slow:
            words = [b"first", b"other"]
            asking = [threading.Thread(target=ask, args=(int(slow.where.rpartition(":")[2]), word)) for word in words]
            began = time.monotonic()
            for one in asking:
                one.start()
            for one in asking:
                one.join()
            seconds = time.monotonic() - began
            assert slow.sent_nbytes() == sum(map(len, found))
        listener.shutdown(socket.SHUT_RDWR)
        server.join()
    assert sorted(found) == [b"first" + content, b"other" + content]
    # Two round trips before the first byte, and the bytes of both over one link.
    assert seconds > 2 * 0.05 + 6e6 / 20e6
