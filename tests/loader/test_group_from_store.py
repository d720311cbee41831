"""A group that loads from an object store: the server sends the rank once. tests/integration asks a real server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import s3_server, seaweedfs, store_contract
from support.conversions import reference_tensors, stored_in
from support.group_worker import NUM_MEMBERS, digests, load_together
from support.loader_fixtures import MIB, mlp_model

import relayout

pytestmark = pytest.mark.xdist_group("group")
pytest.importorskip("obstore", reason="the client of object stores")

IS_REAL = "seaweedfs" in os.environ.get(store_contract.REAL_STORES, "").split(",")


@dataclass(frozen=True)
class HeldSlice:
    """A model, converted for two ranks: 8 MB each."""

    folder: Path
    url: str
    """Of the conversion; that of the source ends in `-source`."""
    sent_nbytes: Callable[[], int]
    """Bytes of objects that the server has sent until now."""
    environment: dict[str, str]

    def run(self, folder: Path, **case: Any) -> tuple[list[dict[str, str]], int]:
        """What each member has after a load, and how many bytes were sent for it."""
        before = self.sent_nbytes()
        found = load_together(folder, **{"path": self.url, "environment": self.environment, **case})
        return found, self.sent_nbytes() - before

    def rank_nbytes(self) -> int:
        return int(json.loads((self.folder / "out" / "relayout.json").read_text())["ranks"][1]["nbytes"])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeldSlice]:
    folder = tmp_path_factory.mktemp("group")
    source = mlp_model(folder / "source", num_layers=2, width=6144)
    relayout.convert(source, folder / "out", tp=2, max_part_nbytes=5 * MIB)
    if IS_REAL:
        url = f"s3://{store_contract.BUCKET}/{folder.name}"
        relayout.convert(source, url, tp=2, max_part_nbytes=5 * MIB)
        relayout.restore(url, f"{url}-source")
        yield HeldSlice(folder, url, lambda: seaweedfs.sent_nbytes(store_contract.BUCKET), {})
        return
    with s3_server.running() as server:
        for name, prefix in (("out", "out"), ("source", "out-source")):
            for file in (folder / name).iterdir():
                server.put("models", f"{prefix}/{file.name}", file.read_bytes())
        yield HeldSlice(folder, "s3://models/out", lambda: server.sent_nbytes, s3_server.environment(server))


@pytest.mark.parametrize("options", [{}, {"by": "iter_load"}])
def test_the_server_sends_the_rank_once(place: HeldSlice, tmp_path: Path, options: dict[str, Any]) -> None:
    found, sent = place.run(tmp_path, rank=1, **options)
    assert found == [digests(stored_in(place.folder / "out", 1))] * NUM_MEMBERS
    # Each reads manifest, table and the beginning of each file.
    assert place.rank_nbytes() <= sent <= 1.05 * place.rank_nbytes()


def test_the_server_sends_a_plain_checkpoint_once(place: HeldSlice, tmp_path: Path) -> None:
    found, sent = place.run(tmp_path, path=f"{place.url}-source", tp=NUM_MEMBERS)
    assert found == [digests(relayout.load(place.folder / "out", rank, tp=NUM_MEMBERS)) for rank in range(NUM_MEMBERS)]
    nbytes = sum(tensor.nbytes for tensor in reference_tensors(place.folder / "source").values())
    assert nbytes <= sent <= 1.02 * nbytes
