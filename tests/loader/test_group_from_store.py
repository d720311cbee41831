"""A group that loads from an object store: the server sends the rank once. tests/integration asks a real server."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import prestarted, s3_server, seaweedfs, store_contract
from support.conversions import stock_tensors, stored_in
from support.group_worker import NUM_MEMBERS, digests
from support.loader_fixtures import MIB, mlp_model

import relayout

pytestmark = pytest.mark.xdist_group("group")
pytest.importorskip("obstore", reason="the client of object stores")

SCRIPT = "from support.group_worker import from_store; from_store()"
IS_REAL = "seaweedfs" in os.environ.get(store_contract.REAL_STORES, "").split(",")


@dataclass(frozen=True)
class Place:
    """A model, converted for two ranks: 16 MB each."""

    folder: Path
    url: str
    """Of the conversion; that of the source ends in `-source`."""
    sent_nbytes: Callable[[], int]
    """Bytes of objects that the server has sent until now."""
    environment: dict[str, str]

    def run(self, folder: Path, **case: Any) -> list[dict[str, Any]]:
        """What each member saw of a load."""
        case = {"path": self.url, "environment": self.environment, **case}
        done = prestarted.run(
            folder, json.dumps(case), script=SCRIPT, imports=prestarted.GROUP, env=prestarted.ONE_THREAD
        )
        assert done.returncode == 0, done.stderr
        found = [folder / f"member-{number}.json" for number in range(NUM_MEMBERS)]
        return [json.loads(file.read_text()) for file in found if file.exists()]

    def rank_nbytes(self) -> int:
        return int(json.loads((self.folder / "out" / "relayout.json").read_text())["ranks"][1]["nbytes"])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("group")
    source = mlp_model(folder / "source", num_layers=4, width=6144)
    relayout.convert(source, folder / "out", tp=2, max_part_nbytes=9 * MIB)
    if IS_REAL:
        url = f"s3://{store_contract.BUCKET}/{folder.name}"
        relayout.convert(source, url, tp=2, max_part_nbytes=9 * MIB)
        relayout.restore(url, f"{url}-source")
        yield Place(folder, url, lambda: seaweedfs.sent_nbytes(store_contract.BUCKET), {})
        return
    with s3_server.running() as server:
        for name, prefix in (("out", "out"), ("source", "out-source")):
            for file in (folder / name).iterdir():
                server.put("models", f"{prefix}/{file.name}", file.read_bytes())
        yield Place(folder, "s3://models/out", lambda: server.sent_nbytes, s3_server.environment(server))


@pytest.mark.parametrize("by", ["load", "iter_load"])
def test_the_server_sends_the_rank_once(place: Place, tmp_path: Path, by: str) -> None:
    before = place.sent_nbytes()
    seen = place.run(tmp_path, by=by, rank=1)
    sent = place.sent_nbytes() - before
    expected = digests(stored_in(place.folder / "out", 1))
    assert [member["tensors"] for member in seen] == [expected] * NUM_MEMBERS
    # Each reads manifest, table and the beginning of each file.
    assert place.rank_nbytes() <= sent <= 1.05 * place.rank_nbytes()


def test_with_verify_at_another_degree(place: Place, tmp_path: Path) -> None:
    whole = digests(stock_tensors(place.folder / "source"))
    before = place.sent_nbytes()
    seen = place.run(tmp_path, rank=0, tp=1)
    sent = place.sent_nbytes() - before
    assert [member["tensors"] for member in seen] == [whole] * NUM_MEMBERS
    assert sent <= 1.05 * 2 * place.rank_nbytes()
    (tmp_path / "verified").mkdir()
    seen = place.run(tmp_path / "verified", rank=0, tp=1, verify=True)
    assert [member["tensors"] for member in seen] == [whole] * NUM_MEMBERS


def test_with_verify_most_chunks_are_sent_once(place: Place, tmp_path: Path) -> None:
    before = place.sent_nbytes()
    seen = place.run(tmp_path, rank=1, verify=True)
    assert [member["tensors"] for member in seen] == [digests(stored_in(place.folder / "out", 1))] * NUM_MEMBERS
    # Small slices at the ends of both files are read one by one, each with all of its chunk.
    assert place.sent_nbytes() - before <= place.rank_nbytes() + 6 * MIB


def test_the_server_sends_a_plain_checkpoint_once(place: Place, tmp_path: Path) -> None:
    source = place.folder / "source"
    before = place.sent_nbytes()
    seen = place.run(tmp_path, path=f"{place.url}-source", tp=NUM_MEMBERS)
    sent = place.sent_nbytes() - before
    expected = [digests(relayout.load(place.folder / "out", rank, tp=NUM_MEMBERS)) for rank in range(NUM_MEMBERS)]
    assert [member["tensors"] for member in seen] == expected
    nbytes = sum(tensor.nbytes for tensor in stock_tensors(source).values())
    assert nbytes <= sent <= 1.02 * nbytes


def test_a_member_that_is_killed_fails_the_others(place: Place, tmp_path: Path) -> None:
    seen = place.run(tmp_path, by="iter_load", rank=1, memory="6MiB", kill=True)
    assert len(seen) == NUM_MEMBERS - 1
    assert all("a member may be gone" in member["error"] for member in seen)
