"""Real registries: what relayout publishes, other clients pull, and the other way round."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support import registries
from support.loader_fixtures import assert_equal, converted, model, whole_tensors
from support.registries import DockerRegistry, skopeo

import relayout
from relayout.storage.cloud import failures
from relayout.storage.stores import find_store
from relayout.storage.web.oci import OciStore, digest_of

pytest.importorskip("urllib3", reason="the client of registries")

pytestmark = pytest.mark.slow

__all__ = ["converted", "model"]


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerRegistry]:
    if (why := registries.absence("docker-registry")) is not None:
        pytest.skip(why)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "nowhere"))
    with registries.running(tmp_path / "registry") as registry:
        yield registry


def test_docker_registry_takes_a_folder_and_gives_each_rank_its_bytes(
    registry: DockerRegistry, converted: Path, tmp_path: Path
) -> None:
    url = registry.url("models/tiny", "tp2")
    relayout.copy(converted, url)
    whole = registry.stored_nbytes()
    relayout.copy(converted, registry.url("models/tiny", "tp2-rank-1"), ranks="1")
    assert registry.stored_nbytes() < whole * 1.01 + 2**14, "blobs are shared"
    assert_equal(relayout.load(url, 1), whole_tensors(converted, "model-rank-1-*"))
    assert relayout.verify(url).ok
    relayout.copy(registry.url("models/tiny", "tp2-rank-1"), tmp_path / "half")
    assert relayout.verify(tmp_path / "half").ok
    needed = relayout.files(registry.url("models/tiny", "tp2-rank-1")).nbytes
    assert needed < 0.51 * relayout.files(url).nbytes
    relayout.copy(converted, url, ranks="0", force=True)
    assert relayout.verify(url).ranks == (0,)


def test_skopeo_pulls_the_files_and_relayout_reads_what_skopeo_has_pushed(
    registry: DockerRegistry, converted: Path, tmp_path: Path
) -> None:
    if (why := registries.absence("skopeo")) is not None:
        pytest.skip(why)
    relayout.copy(converted, registry.url("models/tiny", "tp2"))
    policy = ("--insecure-policy", "copy", "--src-tls-verify=false", "--dest-tls-verify=false")
    place = f"docker://{registry.host}/models"
    skopeo(*policy, f"{place}/tiny:tp2", f"dir:{tmp_path / 'pulled'}")
    pulled = json.loads((tmp_path / "pulled" / "manifest.json").read_bytes())
    names = {layer["annotations"]["org.cncf.model.filepath"]: layer["digest"] for layer in pulled["layers"]}
    assert names.keys() == {file.name for file in converted.iterdir()}
    for name, digest in names.items():
        assert (tmp_path / "pulled" / digest.removeprefix("sha256:")).read_bytes() == (converted / name).read_bytes()
    skopeo(*policy, f"dir:{tmp_path / 'pulled'}", f"{place}/other:tag")
    url = registry.url("models/other", "tag")
    assert_equal(relayout.load(url, 0), whole_tensors(converted, "model-rank-0-*"))


@contextmanager
def breaking(registry: DockerRegistry, after_nbytes: int) -> Iterator[tuple[str, list[int]]]:
    """A host in front of a registry, which ends its first connections that have sent so many bytes."""
    listener = socket.create_server(("127.0.0.1", 0))
    broken: list[int] = []
    target = registry.host.rpartition(":")[2]

    def forward(source: socket.socket, to: socket.socket, limit: int | None) -> None:
        sent = 0
        with suppress(OSError):
            while piece := source.recv(2**16):
                to.sendall(piece)
                sent += len(piece)
                if limit is not None and sent > limit and len(broken) < 3:
                    broken.append(sent)
                    break
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                client = listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", int(target)))
                threading.Thread(target=forward, args=(client, server, after_nbytes), daemon=True).start()
                threading.Thread(target=forward, args=(server, client, None), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", broken
    finally:
        listener.close()


def test_docker_registry_has_a_blob_whose_upload_broke(
    registry: DockerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "FIRST_DELAY_SECONDS", 0.05)
    content = bytes(range(251)) * 40_000
    sent: list[tuple[int, int]] = []

    def pieces(start: int, end: int) -> Iterator[bytes]:
        sent.append((start, end))
        for offset in range(start, end, 2**20):
            yield content[offset : min(end, offset + 2**20)]

    with breaking(registry, 4 * 2**20) as (host, broken):
        store = find_store(f"oci+http://{host}/models/tiny:tag")
        assert isinstance(store, OciStore)
        store.client.push_blob(digest_of(content), len(content), pieces)
        assert store.client.has_blob(digest_of(content), len(content))
    assert len(broken) == 3
    # distribution 2.8 gives up an upload that breaks off within a request: its state has another offset.
    assert sent == [(0, len(content))] * 4
    assert registry.stored_nbytes() == len(content)
