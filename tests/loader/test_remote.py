"""Loads from an object store: which requests they make, and what becomes of a load when the store fails."""

from __future__ import annotations

import os
import pickle
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import prestarted, s3_server
from support.loader_fixtures import assert_equal, fake_device, loader_threads, whole_tensors
from support.patience import in_time
from support.remote import HEAD, URL, expect, files_of_rank
from support.s3_server import Answer, Request, Server

import relayout
from relayout.errors import FormatError
from relayout.loader.diagnose import diagnose
from relayout.storage.cloud import connect, failures
from relayout.storage.stores import RequestError, find_store

pytest.importorskip("obstore", reason="the client of object stores")


def test_a_load_asks_for_the_manifest_a_table_and_each_file_and_then_only_for_bytes(
    server: Server, converted: Path
) -> None:
    expect(relayout.load(URL, 1), converted)
    assert {one.method for one in server.requests} == {"GET"}
    assert not any(one.query for one in server.requests), "nothing is listed"
    files = files_of_rank(converted, 1)
    names = Counter(one.key.removeprefix("out/") for one in server.requests)
    assert {name for name in names if name not in files} == {"relayout.json", "relayout.rank-1.json.zst"}
    assert names["relayout.json"] == names["relayout.rank-1.json.zst"] == 1
    assert server.requests[0].key == "out/relayout.json"
    for name, nbytes in files.items():
        asked = [one for one in server.requests if one.key == f"out/{name}"]
        ranges = sorted(one.range or (0, 0) for one in asked)
        assert ranges[0] == (0, HEAD)
        assert sum(end - start for start, end in ranges) == nbytes, "each byte once"
        etag = server.objects["models", f"out/{name}"].etag
        assert {one.headers.get("if-match", etag) for one in asked} == {etag}
    needed = sum(files.values())
    small = sum((converted / name).stat().st_size for name in names if name not in files)
    assert needed + small <= server.sent_nbytes <= needed + small, "what opening brings is not read again"


def test_a_load_takes_two_round_trips_the_manifest_and_all_else_at_once(server: Server, converted: Path) -> None:
    """Heads, table and ranges are all under way before one is answered: what waits for an answer breaks the barrier."""
    relayout.load(URL, 1)
    together = threading.Barrier(len(server.requests) - 1)

    def wait(request: Request) -> None:
        if request.key != "out/relayout.json":
            together.wait(20)

    server.interfere = wait
    expect(relayout.load(URL, 1), converted)
    assert not together.broken


def test_an_object_that_is_shorter_than_the_manifest_says_is_an_error_that_says_so(
    server: Server, converted: Path
) -> None:
    for name, nbytes in files_of_rank(converted, 1).items():
        server.put("models", f"out/{name}", (converted / name).read_bytes()[: HEAD + 1])
        with pytest.raises(FormatError, match=f"{name}: {HEAD + 1} bytes long, expected {nbytes}"):
            relayout.load(URL, 1)
        server.put("models", f"out/{name}", (converted / name).read_bytes())
    assert loader_threads() == []


def test_another_file_in_the_place_of_one_is_an_error_though_all_its_bytes_arrive(
    server: Server, converted: Path
) -> None:
    name = max(files_of_rank(converted, 1))
    content = bytearray((converted / name).read_bytes())
    content[60] ^= 1  # In the digest of its content, which its header has.
    server.put("models", f"out/{name}", bytes(content))
    with pytest.raises(FormatError, match="tensors_digest in its header differs") as caught:
        relayout.load(URL, 1)
    assert caught.value.path == f"{URL}/{name}"


@pytest.mark.parametrize("backend", ["auto", "pinned"])
def test_every_way_that_reads_brings_the_same_tensors(
    server: Server, converted: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = fake_device(monkeypatch, backend) if backend == "pinned" else iter([backend])
    way = next(fake)
    expect(relayout.load(URL, 0, backend=way), converted, 0)
    expect(relayout.load(URL, 1, backend=way, verify=True), converted)
    expect(dict(relayout.iter_load(URL, 1, backend=way, verify=True)), converted)
    given = {name: torch.zeros_like(tensor) for name, tensor in whole_tensors(converted, "model-rank-1-*").items()}
    expect(relayout.load(URL, 1, backend=way, into=given), converted)
    for _ in fake:
        pass
    assert loader_threads() == []


def test_what_is_selected_is_all_that_is_fetched(server: Server, converted: Path) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    [tensor] = relayout.load(URL, 1, names=name).values()
    opened = len(files_of_rank(converted, 1)) * HEAD
    assert server.sent_nbytes <= tensor.nbytes + opened + 2**16
    assert_equal({name: tensor}, {name: whole_tensors(converted, "model-rank-1-*")[name]})


def test_tensors_are_read_when_they_are_asked_for(server: Server, converted: Path, model: Path) -> None:
    whole, mine = whole_tensors(model), whole_tensors(converted, "model-rank-1-*")
    name = "model.layers.1.mlp.gate_proj.weight"
    with relayout.open(URL, 1) as opened:
        before = len(server.requests)
        assert opened.keys() == list(mine)
        assert len(server.requests) == before
        assert_equal({name: opened.get_tensor(name)}, {name: mine[name]})
        assert len(server.requests) == before + 2, "one request for one tensor, and one for which file it is in"
        assert_equal({name: opened.get_slice(name)[5:7]}, {name: mine[name][5:7]})
        assert len(server.requests) == before + 3
    with relayout.safe_open(URL) as opened:
        assert_equal({name: opened.get_tensor(name) for name in opened.offset_keys()}, whole)
    assert {one.method for one in server.requests} == {"GET"}
    assert not any(one.query for one in server.requests)


def test_what_a_load_would_do_is_told(server: Server, converted: Path) -> None:
    found = relayout.explain(URL, 1)
    assert (found.backend, found.threads) == ("buffered", 16)
    assert found.nbytes == relayout.explain(converted, 1).nbytes
    assert {file.filesystem.kind for file in found.files} == {"s3"}
    assert found.reason.partition("; memory: ")[0] == (
        "threads request ranges of the files, which go straight into memory; here s3 reads them in requests of at most"
        " 16.8 MB, 16 at a time, up to 32 where that reads faster"
    )
    assert server.sent_nbytes < found.nbytes


def test_the_doctor_measures_the_network(server: Server, converted: Path) -> None:
    server.interfere = lambda request: time.sleep(0.02)  # type: ignore[func-returns-value]
    network = diagnose(URL, device="cpu").network
    assert network is not None
    assert 0.02 <= network.latency_seconds < 2
    assert network.sample_nbytes == sum(files_of_rank(converted, 0).values())
    said = " ".join(prestarted.run("doctor", URL, imports=prestarted.LOADER).stdout.split())
    assert re.search(r"network [0-9.]+ ms .* byte, [0-9.]+ GB/s over 16 connections .*: rank 0 would take", said)
    assert f"on {URL}, in ranges of at most 16.8 MB" in said
    assert diagnose(converted, device="cpu").network is None


@pytest.mark.parametrize("is_ignored", [False, True], ids=["If-Match", "If-Match ignored"])
def test_two_versions_of_an_object_are_never_mixed(server: Server, converted: Path, is_ignored: bool) -> None:
    name = max(files_of_rank(converted, 1))

    def put_another(request: Request) -> None:
        if is_ignored:
            request.headers.pop("if-match", None)
        if request.key == f"out/{name}" and request.range != (0, HEAD):
            server.put("models", f"out/{name}", bytes((converted / name).stat().st_size))

    server.interfere = put_another
    # Heads are checked while ranges arrive: which of them meets the other version first is chance.
    says = f"{URL}/{name}: (was replaced while it was read|tensors_digest in its header differs)"
    with pytest.raises(FormatError, match=says) as caught:
        relayout.load(URL, 1)
    assert caught.value.code == ("mismatch" if "was replaced" in str(caught.value) else "owner")
    assert loader_threads() == []


SAYS: dict[int, tuple[str, type[Exception]]] = {
    400: (r"the store refuses the request: check region, endpoint and credentials \(HTTP 400, Oops\)", RequestError),
    401: (r"access denied: check that the credentials .* \(HTTP 401, Oops\)", RequestError),
    403: (r"access denied: check that the credentials .* \(HTTP 403, Oops\)", RequestError),
    404: (r"is missing", FormatError),
    412: (r"was replaced while it was read", FormatError),
    416: (r"range beyond the end of the object: it is truncated \(HTTP 416, Oops\)", RequestError),
    429: (
        r"the store throttles requests: retry later, or with fewer threads \(HTTP 429, Oops\)",
        RequestError,
    ),
    500: (r"the store returns server errors: retry later \(HTTP 500, Oops\)", RequestError),
    503: (
        r"the store throttles requests: retry later, or with fewer threads \(HTTP 503, Oops\)",
        RequestError,
    ),
}


@pytest.mark.parametrize("status", SAYS)
def test_what_a_store_refuses_is_said_with_object_range_and_what_to_do(
    server: Server, converted: Path, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.1)
    name = max(files_of_rank(converted, 1))
    body = f"<Error><Code>Oops</Code><Message>{s3_server.SECRET_KEY}</Message></Error>".encode()

    def refuse(request: Request) -> Answer | None:
        is_meant = request.key == f"out/{name}" and request.range != (0, HEAD)
        return Answer(status, body) if is_meant else None

    server.interfere = refuse
    says, kind = SAYS[status]
    with pytest.raises(kind, match=says) as caught:
        relayout.load(URL, 1)
    text = f"{caught.value} {caught.value!r} {caught.value.__context__!r}"
    assert f"{URL}/{name}" in text
    if kind is RequestError:
        assert re.search(r"bytes [0-9]+ to [0-9]+: ", text)
    for secret in (s3_server.SECRET_KEY, s3_server.ACCESS_KEY, server.url):
        assert secret not in text
    assert loader_threads() == []


Spoil = Callable[[Request, Answer], Answer]
"""Makes of the right answer to a request another one."""


def is_body(request: Request) -> bool:
    """Whether it asks for bytes of a weight file, behind the first ones."""
    return "part" in request.key and request.range is not None and request.range[0] >= HEAD


def spoiled(server: Server, spoil: Spoil, times: int) -> Callable[[Request], Answer | None]:
    """Spoils the first answers that have bytes of weight files."""
    left = iter(range(times))

    def interfere(request: Request) -> Answer | None:
        if not is_body(request) or next(left, None) is None:
            return None
        return spoil(request, s3_server.answer(server, request))

    return interfere


def dropped(request: Request, right: Answer) -> Answer:
    return replace(right, cut=len(right.body) // 2)


def stalled(request: Request, right: Answer) -> Answer:
    return replace(right, cut=len(right.body) // 3, pause_seconds=2)


@pytest.mark.parametrize("spoil", [dropped, stalled])
def test_a_body_that_ends_early_goes_on_from_where_it_was(
    server: Server, converted: Path, spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "STALL_SECONDS", 1.0)
    monkeypatch.setattr(connect, "RETRY_SECONDS", 90.0)
    monkeypatch.setattr(failures, "FIRST_DELAY_SECONDS", 0.05)
    server.interfere = spoiled(server, spoil, 3)
    expect(relayout.load(URL, 1, verify=True), converted)
    starts = [(one.key, one.range[0]) for one in server.requests if is_body(one) and one.range]
    assert len(starts) == len(set(starts)), "no byte that has arrived is asked for again"


@pytest.mark.parametrize("spoil", [dropped, stalled])
def test_bodies_that_always_end_early_are_an_error(
    server: Server, converted: Path, spoil: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "STALL_SECONDS", 1.0)

    def empty(request: Request, right: Answer) -> Answer:
        monkeypatch.setattr(connect, "RETRY_SECONDS", 0.1)  # What was asked for before may be slow.
        return replace(spoil(request, right), cut=0)

    server.interfere = spoiled(server, empty, 1000)
    with pytest.raises(RequestError, match=rf"bytes [0-9]+ to [0-9]+: .*: '{URL}/model-rank-1-part-") as caught:
        in_time(lambda: relayout.load(URL, 1))
    assert re.search(r"requests timed out|the connection broke", str(caught.value))
    assert loader_threads() == []


def test_an_object_that_is_replaced_while_its_body_arrives_is_never_mixed(server: Server, converted: Path) -> None:
    def replace_too(request: Request, right: Answer) -> Answer:
        server.put(request.bucket, request.key, bytes(len(server.objects[request.bucket, request.key].content)))
        return dropped(request, right)

    server.interfere = spoiled(server, replace_too, 1)
    with pytest.raises((FormatError, RequestError), match="was replaced while it was read"):
        relayout.load(URL, 1)


def other_range(by: int, missing: int) -> Spoil:
    """Fewer bytes than were asked for, or others."""

    def spoil(request: Request, right: Answer) -> Answer:
        assert request.range is not None
        start, end = request.range
        size = right.headers["Content-Range"].rpartition("/")[2]
        headers = right.headers | {"Content-Range": f"bytes {start + by}-{end + by - missing - 1}/{size}"}
        return replace(right, body=right.body[: len(right.body) - missing], headers=headers)

    return spoil


@pytest.mark.parametrize("spoil", [other_range(-1, 0), other_range(0, 5)], ids=["others", "fewer"])
def test_other_bytes_than_were_asked_for_are_an_error(server: Server, converted: Path, spoil: Spoil) -> None:
    server.interfere = spoiled(server, spoil, 1)
    with pytest.raises(RequestError, match="range"):
        relayout.load(URL, 1)
    assert loader_threads() == []


def test_a_store_is_pickled_without_what_it_knows(server: Server, converted: Path) -> None:
    store = find_store(URL)
    blob = pickle.dumps(store)
    for secret in (s3_server.SECRET_KEY, s3_server.ACCESS_KEY):
        assert secret not in repr(store)
        assert secret.encode() not in blob
    again = pickle.loads(blob)
    assert str(again) == URL
    assert again.read("relayout.json", 2**20) == (converted / "relayout.json").read_bytes()


def test_a_forked_child_says_why_it_cannot_load(server: Server) -> None:
    relayout.load(URL, 1)
    child = os.fork()
    if child == 0:
        try:
            relayout.load(URL, 1)
        except OSError as error:
            says = "this process was forked after its parent had used a store" in str(error) and "spawn" in str(error)
            os._exit(0 if says else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
