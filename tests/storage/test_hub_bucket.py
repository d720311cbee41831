"""Buckets of the hub, of which an imitation runs on loopback: what is requested, and what the hub must not choose."""

from __future__ import annotations

import json
import pickle
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.hub_server import TOKEN, Hub
from support.remote import expect, files_of_rank
from support.s3_server import Answer, Request
from support.steps import CONFIG, assert_is_step, weights_of
from support.training import tree

import relayout
from relayout.errors import FormatError, PlanError, RelayoutError
from relayout.storage import stores
from relayout.storage.cloud import connect
from relayout.storage.stores import Kind, RequestError, Store, find_store
from relayout.storage.web import hub_bucket, hub_library

pytest.importorskip("urllib3", reason="the client of web servers")
pytest.importorskip("huggingface_hub", reason="the hub's own library")

BUCKET = "org/weights"
URL = f"hf://buckets/{BUCKET}"
CONTENT = bytes(index * 7 % 251 for index in range(20_000))


@pytest.fixture
def files(hub: Hub) -> dict[str, bytes]:
    """The files of a bucket: one of each kind of name."""
    hub.buckets[BUCKET] = {"run/weights": CONTENT, "run/sub/x": b"12", "run": b"beside", "run-2/weights": b"other"}
    return hub.buckets[BUCKET]


@pytest.fixture
def store(files: dict[str, bytes]) -> Store:
    return find_store(f"{URL}/run")


def read(file: stores.ReadableFile, offset: int, nbytes: int) -> bytes:
    memory = bytearray(nbytes)
    file.read(offset, memoryview(memory))
    return bytes(memory)


def test_a_load_resolves_each_file_once_and_sends_the_token_to_the_hub_only(
    hub: Hub, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.buckets[BUCKET] = {f"models/out/{file.name}": file.read_bytes() for file in converted.iterdir()}
    hub.private.add(BUCKET)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    expect(relayout.load(f"{URL}/models/out", 1), converted)
    asked = Counter(one.key.rpartition("/")[2] for one in hub.hub.requests)
    assert asked == dict.fromkeys([*files_of_rank(converted, 1), "relayout.json", "relayout.rank-1.json.zst"], 1)
    assert hub.bytes.sent_nbytes <= sum(files_of_rank(converted, 1).values()) * 1.01 + 2**16
    assert all("authorization" not in one.headers for one in hub.bytes.requests)
    assert TOKEN not in repr(find_store(URL))


def test_the_library_of_the_hub_reads_the_imitation_alike(hub: Hub, files: dict[str, bytes], store: Store) -> None:
    """Names, lengths and hashes, in pages; and the metadata of each file."""
    import huggingface_hub

    if not hasattr(huggingface_hub.HfApi, "list_bucket_tree"):
        pytest.skip("this version of huggingface_hub has no buckets")
    hub.page_length = 2
    api = huggingface_hub.HfApi(endpoint=hub.hub.url, token=False)
    found = {
        one.path: (one.size, one.xet_hash)
        for one in api.list_bucket_tree(BUCKET, "run/", recursive=True)
        if one.type == "file"
    }
    assert set(found) == {"run/weights", "run/sub/x"}
    metadata = {name: api.get_bucket_file_metadata(BUCKET, name) for name in found}
    assert {name: (one.size, one.xet_file_data.file_hash) for name, one in metadata.items()} == found
    names = {entry.name for entry in store.walk() if not entry.is_folder}
    assert {f"run/{name}" for name in names} == found.keys()
    stats = {name: store.stat(name.removeprefix("run/")) for name in found}
    assert {name: (stat.nbytes, stat.version) for name, stat in stats.items() if stat is not None} == found


def test_a_listing_has_pages_and_no_neighbours(hub: Hub, files: dict[str, bytes], store: Store) -> None:
    files |= {f"run/many/{number:03}": b"1" for number in range(50)}
    hub.page_length = 7
    names = {entry.name for entry in store.walk() if not entry.is_folder}
    assert names == {"weights", "sub/x", *(f"many/{number:03}" for number in range(50))}
    assert len([one for one in hub.hub.requests if one.bucket == "api"]) > 50 // 7
    assert find_store(f"{URL}/ru").kind() is Kind.NOTHING
    assert find_store(f"{URL}/run/weights").kind() is Kind.FILE


def test_a_folder_without_a_listing_has_nothing(hub: Hub, store: Store) -> None:
    right = hub.answer
    hub.hub.interfere = lambda request: (
        Answer(404, headers={"X-Error-Code": "EntryNotFound"}) if request.bucket == "api" else right(request)
    )
    assert list(store.walk()) == []
    assert find_store(f"{URL}/none").kind() is Kind.NOTHING


def test_a_signature_that_has_expired_is_asked_for_again(hub: Hub, store: Store) -> None:
    with store.open("weights", len(CONTENT)) as file:
        assert read(file, 0, 10) == CONTENT[:10]
        hub.expire()
        assert read(file, 9000, 900) == CONTENT[9000:9900]
    assert 403 in {one.status for one in hub.bytes.requests}


def test_an_old_address_is_asked_for_again_before_it_expires(
    hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.open("weights", len(CONTENT)) as file:
        hub.expire()
        monkeypatch.setattr(hub_library, "_SIGNED_SECONDS", -1.0)
        assert read(file, 9000, 900) == CONTENT[9000:9900]
    assert 403 not in {one.status for one in hub.bytes.requests}


@pytest.mark.parametrize("how", ["expired", "sent by the hub"])
def test_bytes_of_another_version_are_never_taken(
    hub: Hub, files: dict[str, bytes], store: Store, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that replaces it has the same length."""
    hub.sends_bytes = how == "sent by the hub"
    with store.open("weights", len(CONTENT)) as file:
        assert read(file, 0, 10) == CONTENT[:10]
        files["run/weights"] = CONTENT[::-1]
        hub.expire()
        with pytest.raises(FormatError, match=r"run/weights: was replaced while it was read"):
            read(file, 9000, 900)
    assert store.read("weights", 2**20) == CONTENT[::-1]


def test_files_that_the_hub_itself_sends_are_read(hub: Hub, files: dict[str, bytes], store: Store) -> None:
    hub.sends_bytes = True
    assert store.read("weights", 2**20) == CONTENT
    with store.open("weights") as file:
        assert read(file, 9000, 900) == CONTENT[9000:9900]
    assert not hub.bytes.requests


def test_a_private_or_missing_bucket_is_told(hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"hf://buckets/org/none.*: no such (bucket|repository) on the hub; for a priv"):
        relayout.load("hf://buckets/org/none", 0)
    with pytest.raises(PlanError, match=r"hf://buckets/org/none.*: no such (bucket|repository) on the hub; for a priv"):
        find_store("hf://buckets/org/none/x").kind()
    hub.private.add(BUCKET)
    with pytest.raises(PlanError, match="log in"):
        store.read("weights", 2**20)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert store.read("weights", 2**20) == CONTENT


def test_without_a_network_it_says_how_to_download(hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RequestError, match=rf"HF_HUB_OFFLINE is set.*hf buckets sync {URL} FOLDER"):
        store.read("weights", 2**20)


def test_bytes_that_only_xet_brings_are_no_matter_of_credentials(hub: Hub, store: Store) -> None:
    hub.are_refused = True
    with pytest.raises(RequestError, match=rf"by Xet only: .*\(hf buckets sync {URL} FOLDER\)") as caught:
        store.read("weights", 2**20)
    assert "Signature" not in str(caught.value)


def test_a_pickled_store_has_the_name_alone(store: Store) -> None:
    store.read("weights", 2**20)
    again = pickle.loads(pickle.dumps(store))
    assert again == store
    assert b"Signature" not in pickle.dumps(store)
    assert again.read("weights", 2**20) == CONTENT


@pytest.mark.parametrize(
    "url", ["hf://buckets", "hf://buckets/", "hf://buckets/org", "hf://buckets/org/b/../x", "hf://buckets/org/b@main/x"]
)
def test_a_url_that_names_no_bucket_is_refused(url: str) -> None:
    with pytest.raises(PlanError, match="expected hf://"):
        find_store(url)


def test_nothing_is_written(hub: Hub, store: Store, converted: Path) -> None:
    with pytest.raises(PlanError, match=r"relayout cannot write to this store: choose another output"):
        relayout.copy(converted, f"{URL}/out")
    with pytest.raises(PlanError, match=r"relayout cannot write to this store"):
        relayout.Publisher(f"{URL}/steps", config=CONFIG, tp=2).publish(weights_of(1), 1)
    assert {one.method for one in hub.hub.requests} <= {"GET", "HEAD"}


def test_steps_that_are_copied_to_a_bucket_are_followed(hub: Hub, tmp_path: Path) -> None:
    root, files = tmp_path / "run", hub.buckets.setdefault(BUCKET, {})
    publisher = relayout.Publisher(root, config=CONFIG, tp=2)
    follower = relayout.Follower(f"{URL}/run", 0)
    for step in range(1, 4):
        publisher.publish(weights_of(step), step)
        made = {name: content for name, (content, _) in tree(root).items()}
        for name in sorted(made, key=lambda name: name == "steps.json"):
            files[f"run/{name}"] = made[name]
        assert follower.update() == step
        assert_is_step(follower.tensors, weights_of(step), 0)


Spoil = Callable[[Request, Answer], Answer | None]
"""What is answered instead of the right answer."""


def listed(entry: object) -> Spoil:
    return lambda request, right: Answer(200, json.dumps([entry]).encode()) if request.bucket == "api" else None


def page(content: bytes) -> Spoil:
    return lambda request, right: Answer(200, content) if request.bucket == "api" else None


def follow(url: str) -> Spoil:
    """The listing goes on there."""
    link = {"Link": f'<{url}>; rel="next"'}
    return lambda request, right: replace(right, headers=link) if request.bucket == "api" else None


def resolved(**headers: Any) -> Spoil:
    """A file is said to be elsewhere, or another one. None: the header is missing."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}

    def spoil(request: Request, right: Answer) -> Answer | None:
        kept = {name: value for name, value in (right.headers | named).items() if value is not None}
        return replace(right, headers=kept) if right.status == 302 else None

    return spoil


HOSTILE: dict[str, tuple[Spoil, str]] = {
    "a page elsewhere": (follow("http://127.0.0.1:9/next"), "the hub continues a listing on another server"),
    "a page of no URL": (follow("//[/x"), "the hub continues a listing on another server"),
    "a page endless": (page(b" " * 2**21), "more than 1048576 bytes"),
    "a page that is no list": (page(b"{}"), "'listing' is missing or not a list of objects"),
    "a page no JSON": (page(b"<html>"), "JSON"),
    "a page of texts": (page(b'["a"]'), "'listing' is missing or not a list of objects"),
    "a name of another type": (listed({"type": "file", "path": 5, "xetHash": ""}), "'path' is missing or not a string"),
    "no hash in a list": (listed({"type": "file", "path": "run/x"}), "'xetHash' is missing or not a string"),
    "no hash": (resolved(X_Xet_Hash=None), "the hub does not say what the file is"),
    "a hash that is none": (resolved(X_Xet_Hash="../../x"), "the hub does not say what the file is"),
    # Older versions of the library then take the length of the redirection.
    "no length": (resolved(X_Linked_Size=None), "the hub does not say what the file is|was replaced"),
    "another length": (resolved(X_Linked_Size="1"), "was replaced while it was read"),
    "to a bucket of S3": (resolved(Location="s3://bucket/x"), "the hub redirects to 's3', expected https"),
    "to ftp": (resolved(Location="ftp://127.0.0.1/x"), "the hub redirects to 'ftp', expected https"),
    "with a password": (resolved(Location="http://u:p@127.0.0.1/x"), "the hub redirects to 'http', expected https"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_a_hub_must_not_choose(hub: Hub, store: Store, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, says = HOSTILE[case]
    monkeypatch.setattr(hub_bucket, "_MAX_PAGE_NBYTES", 2**20)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    right, found = hub.answer, list[str]()
    hub.hub.interfere = lambda request: spoil(request, right(request)) or right(request)
    for use in (lambda: list(store.walk()), lambda: store.read("weights", 2**20)):
        try:
            use()
        except (RelayoutError, RequestError) as error:
            found.append(str(error))
    assert len(found) == 1
    assert re.search(says, found[0])
    assert not [one for one in hub.bytes.requests if "authorization" in one.headers]


def test_a_listing_ends(hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It repeats itself; or has ever new pages, with nothing on them."""
    right, pages = hub.answer, iter(range(10**6))

    def repeat(request: Request) -> Answer:
        return follow(f"{hub.hub.url}/api/buckets/{BUCKET}/tree?recursive=true")(request, right(request)) or right(
            request
        )

    hub.hub.interfere = repeat
    with pytest.raises(FormatError, match="repeats"):
        list(store.walk())

    def go_on(request: Request) -> Answer:
        link = {"Link": f'<{hub.hub.url}/api/buckets/{BUCKET}/tree?recursive=true&cursor={next(pages)}>; rel="next"'}
        return Answer(200, b"[]", link)

    hub.hub.interfere = go_on
    monkeypatch.setattr(stores, "LISTING_SECONDS", 0.2)
    with pytest.raises(FormatError, match=r"takes more than 0\.2 s"):
        list(store.walk())


def test_what_the_hub_refuses_for_now_is_asked_again(hub: Hub, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "RETRY_SECONDS", 90.0)
    monkeypatch.setattr("relayout.storage.cloud.failures.pause", lambda seconds: None)
    right, seen = hub.answer, Counter[str]()

    def interfere(request: Request) -> Answer:
        seen[request.key] += 1
        return Answer(429) if seen[request.key] == 1 else right(request)

    hub.hub.interfere = interfere
    assert store.read("weights", 2**20) == CONTENT
    assert {entry.name for entry in store.walk() if not entry.is_folder} == {"weights", "sub/x"}
    assert set(seen.values()) == {2}
