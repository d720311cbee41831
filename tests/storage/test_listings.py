"""Every listing ends, by a number of names and by time, and lists only the folders that it is asked to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from relayout.errors import FormatError
from relayout.publish.claim import Prefix
from relayout.storage import stores
from relayout.storage.cloud.store import CLOUD_COST, CloudStore
from relayout.storage.local.store import LocalStore, entries
from relayout.storage.stores import Entry, FileStat, RequestCost, entered, nowhere
from relayout.storage.web.http import WebClient


class Endless:
    """A client whose listing has ever new names."""

    root = "s3://bucket"
    cost: RequestCost = CLOUD_COST

    def list_objects(self, prefix: str) -> Iterator[tuple[str, str]]:
        return ((f"{prefix}/{number}.txt", "") for number in count())

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(name)


@pytest.fixture(params=["MAX_LISTED", "LISTING_SECONDS"])
def says(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the error says of the one limit that is set."""
    monkeypatch.setattr(stores, request.param, 20 if request.param == "MAX_LISTED" else -1.0)
    return {
        "MAX_LISTED": "its listing has more than 20 names, the limit",
        "LISTING_SECONDS": "its listing takes more than -1 s, the limit",
    }[request.param]


def test_the_listing_of_a_bucket_ends(says: str) -> None:
    client: Any = Endless()
    store = CloudStore(client, "m")
    with pytest.raises(FormatError, match=f"^s3://bucket/m: {says}"):
        list(store.walk())
    with pytest.raises(FormatError, match=f"^s3://bucket/m: {says}"):
        list(store.walk(nowhere))
    with pytest.raises(FormatError, match=f"^s3://bucket/m: {says}"):
        Prefix(client, "m", store).objects()


def test_the_listing_of_a_local_folder_ends(tmp_path: Path, says: str) -> None:
    for number in range(4):
        (tmp_path / f"{number}").mkdir()
        for file in range(6):
            (tmp_path / f"{number}" / f"{file}").touch()
    with pytest.raises(FormatError, match=f"{tmp_path.name}: {says}"):
        list(LocalStore(tmp_path).walk())
    with pytest.raises(FormatError, match=f"{tmp_path.name}: {says}"):
        list(entries(tmp_path, hidden=True))


def test_the_names_of_an_index_on_a_web_server_end(says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index = json.dumps({"weight_map": {f"t{number}": f"{number}.safetensors" for number in range(100)}}).encode()
    asked: list[str] = []

    class Body:
        def content(self, limit: int) -> bytes:
            return index

    def stat(self: WebClient, name: str) -> FileStat | None:
        asked.append(name)
        return FileStat(1, "1") if name.endswith(("relayout.json", "index.json")) else None

    monkeypatch.setattr(WebClient, "stat", stat)
    monkeypatch.setattr(WebClient, "get", lambda *_: Body())
    with pytest.raises(FormatError, match=says):
        list(WebClient("http://host").list_objects("m"))
    assert not [name for name in asked if name.endswith("0.safetensors")]


def test_a_store_without_folders_lists_those_that_are_not_entered() -> None:
    names = ["a", "sub/b", "sub/deep/c", "sub/deep/d", "other/deep/e", "other/f"]
    assert list(entered(names, lambda folder: folder == "sub")) == [
        Entry("a"),
        Entry("sub/b"),
        Entry("sub/deep", is_folder=True),
        Entry("other", is_folder=True),
    ]
    assert [entry.name for entry in entered(names, nowhere)] == ["a", "sub", "other"]
