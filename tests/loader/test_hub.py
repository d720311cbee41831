"""Loads from the Hugging Face hub, of which an imitation runs on loopback; and from plain web servers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import hub_server
from support.hub_server import TOKEN, Hub
from support.loader_fixtures import MIB, assert_equal, whole_tensors
from support.remote import URL, expect, files_of_rank
from support.s3_server import Answer, Request, Server

import relayout
from relayout.conversion.planning import check_plan
from relayout.errors import FormatError, PlanError
from relayout.storage.cloud import connect, failures
from relayout.storage.stores import RequestError, find_input, find_store
from relayout.storage.web import hub as web_hub
from relayout.storage.web.hub import HubClient

pytest.importorskip("urllib3", reason="the client of web servers")
constants = pytest.importorskip("huggingface_hub.constants", reason="the hub's own library")


def download(hub: Hub, repo: str, folder: Path, *names: str) -> Path:
    """Some files of a repository as its own library keeps them."""
    commit = hub.commit(repo)
    place = folder / "hub" / f"models--{repo.replace('/', '--')}"
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "blobs").mkdir(exist_ok=True)
    (place / "refs" / "main").write_text(commit)
    snapshot = place / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        (place / "blobs" / str(number)).write_bytes(hub.repos[repo][name])
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    return snapshot


@pytest.mark.parametrize("path", ["hf://org/out@main", "org/out"])
def test_each_file_is_resolved_once(hub: Hub, converted: Path, path: str) -> None:
    expect(relayout.load(path, 1), converted)
    asked = Counter(one.key.rpartition("/")[2] for one in hub.hub.requests if "/resolve/" in one.key)
    large = {name for name, nbytes in files_of_rank(converted, 1).items() if nbytes >= hub_server.LARGE}
    assert {name: asked[name] for name in large} == dict.fromkeys(large, 1)
    assert sum(one.key.startswith("models/") for one in hub.hub.requests) == 1
    needed = sum(files_of_rank(converted, 1).values())
    assert hub.bytes.sent_nbytes <= needed * 1.01 + 2**16
    assert all("if-match" not in one.headers or one.status == 206 for one in hub.bytes.requests)


def test_other_ways_to_load_work_alike(hub: Hub, converted: Path, model: Path, tmp_path: Path) -> None:
    expect(dict(relayout.iter_load("hf://org/out", 0, verify=True)), converted, 0)
    expect(relayout.load("org/out", 1, cache=tmp_path / "cache"), converted)
    with relayout.open("org/out", 1) as opened:
        expect({name: opened.get_tensor(name) for name in opened.offset_keys()}, converted)
    with relayout.safe_open("org/out") as opened:
        assert_equal({name: opened.get_tensor(name) for name in opened.offset_keys()}, whole_tensors(model))
    with pytest.warns(UserWarning, match="hf://org/model: a plain checkpoint"):
        expect(relayout.load("org/model", 1, tp=2), converted)
    assert relayout.explain("org/out", 1).files[0].filesystem.kind == "hf"


def test_a_repository_is_converted_verified_and_restored(
    hub: Hub, converted: Path, model: Path, tmp_path: Path
) -> None:
    relayout.convert("org/model", tmp_path / "out", tp=2, max_part_nbytes=MIB)
    for file in converted.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name
    assert relayout.verify("hf://org/out", source="org/model").ok
    relayout.restore("org/out", tmp_path / "restored")
    assert_equal(whole_tensors(tmp_path / "restored"), whole_tensors(model))
    assert check_plan("org/model").ok
    with pytest.raises(
        PlanError, match="hf://org/model-tp2: relayout cannot write to this store: choose another output"
    ):
        relayout.convert("hf://org/model", tp=2)


def test_a_signature_that_has_expired_is_asked_for_again(hub: Hub, converted: Path) -> None:
    with relayout.open("org/out", 1) as opened:
        found = {}
        for name in opened.offset_keys():
            hub.expire()
            found[name] = opened.get_tensor(name)
        expect(found, converted)
    assert 403 in {one.status for one in hub.bytes.requests}


def test_signatures_that_are_never_valid_are_an_error_that_does_not_show_them(hub: Hub) -> None:
    hub.are_refused = True
    with pytest.raises(RequestError, match="access denied") as caught:
        relayout.load("org/out", 1)
    assert "Signature" not in str(caught.value)


def test_a_private_repository_needs_the_token_which_only_the_hub_sees(
    hub: Hub, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.private.add("org/out")
    with pytest.raises(PlanError, match=r"hf://org/out: no such repository on the hub; for a private one, log in"):
        relayout.load("hf://org/out", 1)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    expect(relayout.load("hf://org/out", 1), converted)
    assert all("authorization" not in one.headers for one in hub.bytes.requests)
    assert TOKEN not in repr(find_store("hf://org/out"))


def test_what_was_downloaded_is_read_on_the_drive_and_the_rest_from_the_hub(
    hub: Hub, converted: Path, tmp_path: Path
) -> None:
    small = ["relayout.json", "relayout.rank-1.json.zst"]
    some, *others = files_of_rank(converted, 1)
    snapshot = download(hub, "org/out", tmp_path, *small, some)
    expect(relayout.load("org/out", 1), converted)
    asked = {one.key.rpartition("/")[2] for one in hub.hub.requests if "/resolve/" in one.key}
    assert asked == set(others)
    shutil.rmtree(snapshot)
    download(hub, "org/out", tmp_path, *small, some, *others)
    hub.hub.requests.clear()
    expect(relayout.load("org/out", 1, backend="direct"), converted)
    assert not any("/resolve/" in one.key for one in hub.hub.requests)
    hub.hub.interfere = lambda request: Answer(500)
    expect(relayout.load("org/out", 1), converted)
    expect(relayout.load(f"hf://org/out@{hub.commit('org/out')}", 1), converted)


@pytest.mark.parametrize(
    ("how", "pinned"), [("HF_HUB_OFFLINE", ""), ("no network", "@main"), ("no network", "@COMMIT")]
)
def test_a_plain_model_in_the_hubs_cache_needs_no_network(
    hub: Hub, model: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, pinned: str
) -> None:
    download(hub, "org/model", tmp_path, *hub.repos["org/model"])
    if how == "HF_HUB_OFFLINE":
        monkeypatch.setattr(constants, how, True)
    else:
        hub_server.point_to("http://127.0.0.1:9", monkeypatch, tmp_path)
    monkeypatch.setattr(connect, "RETRY_SECONDS", 90.0)
    url = f"hf://org/model{pinned.replace('COMMIT', hub.commit('org/model'))}"
    assert relayout.inspect(url).num_tensors == len(whole_tensors(model))
    relayout.convert(url, tmp_path / "out", tp=2, max_part_nbytes=MIB)
    assert_equal(whole_tensors(tmp_path / "out", "model-rank-1-*"), whole_tensors(converted, "model-rank-1-*"))
    assert_equal(relayout.load(url, 0, tp=1), whole_tensors(model))
    assert not hub.hub.requests


def test_the_place_of_the_hub_s_cache_is_known_without_a_variable(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "relayout", "inspect", "org/out"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 2), done.stderr
    assert "HF_HUB_OFFLINE is set" in done.stderr


def test_offline_without_a_cache_it_says_what_to_do(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RequestError, match=r"HF_HUB_OFFLINE is set.*hf download org/out"):
        relayout.load("hf://org/out", 1)
    assert not hub.hub.requests


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (socket.EAI_NONAME, "the server's name is unknown: check the URL, the endpoint and the network"),
        (socket.EAI_AGAIN, "the server's name cannot be looked up: check the network and the resolver"),
    ],
)
def test_without_a_network_the_first_request_ends_soon_and_says_why(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    waited: list[float] = []

    def look_up(*args: object, **options: object) -> None:
        text = {
            socket.EAI_NONAME: "Name or service not known",
            socket.EAI_AGAIN: "Temporary failure in name resolution",
        }
        raise socket.gaierror(number, text[number])

    hub_server.point_to("http://no-such-host.invalid", monkeypatch, tmp_path)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(connect, "RETRY_SECONDS", 90.0)
    monkeypatch.setattr(failures, "pause", waited.append)
    monkeypatch.setattr(failures, "time", SimpleNamespace(monotonic=lambda: sum(waited)))
    monkeypatch.setattr(failures, "_answered", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RequestError) as caught:
            relayout.inspect("hf://org/model")
    assert (caught.value.strerror, caught.value.filename) == (says, "hf://org/model")
    assert sum(waited) <= 4


def test_commit_and_files_are_of_one_answer(hub: Hub, model: Path, tmp_path: Path) -> None:
    old = hub.commit("org/model")
    download(hub, "org/model", tmp_path, *hub.repos["org/model"])
    client = HubClient("org/model", None)
    assert (client.commit, set(client.files)) == (old, set(hub.repos["org/model"]))
    hub.repos["org/model"]["new.json"] = b"{}"
    assert (client.commit, "new.json" in client.files) == (old, False)
    again = HubClient("org/model", None)
    hub.hub.interfere = lambda request: Answer(400)
    assert (again.commit, "new.json" in again.files) == (old, False)


@pytest.mark.parametrize("header", [{}, {"Retry-After": "1"}])
def test_what_the_hub_refuses_for_now_is_asked_again(
    hub: Hub, converted: Path, monkeypatch: pytest.MonkeyPatch, header: dict[str, str]
) -> None:
    monkeypatch.setattr(connect, "RETRY_SECONDS", 90.0)
    waited: list[float] = []
    monkeypatch.setattr(failures, "pause", waited.append)
    right, seen = hub.answer, Counter[str]()

    def interfere(request: Request) -> Answer:
        seen[request.key] += 1
        return Answer(429, headers=header) if seen[request.key] == 1 else right(request)

    hub.hub.interfere = interfere
    expect(relayout.load("org/out", 1), converted)
    assert len(waited) == sum(number > 1 for number in seen.values()) > 3
    assert min(waited) >= (1 if header else 0)
    assert max(waited) <= 1


def test_a_server_cannot_ask_to_be_waited_for_longer_than_is_bearable(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(connect, "RETRY_SECONDS", 90.0)
    monkeypatch.setattr(failures, "_warned", float("-inf"))
    monkeypatch.setattr(failures, "pause", lambda seconds: now.append(now[-1] + seconds))
    monkeypatch.setattr(failures.time, "monotonic", lambda: now[-1])
    hub.hub.interfere = lambda request: Answer(429, headers={"Retry-After": "86400"})
    with (
        pytest.warns(UserWarning, match="the hub throttles requests.*; retrying for 30 s"),
        pytest.raises(RequestError, match=r"the hub throttles requests.* \(HTTP 429\)"),
    ):
        relayout.load("org/out", 1)
    assert now == [0, 60, 90]


def test_bytes_that_only_xet_brings_are_no_matter_of_credentials(hub: Hub) -> None:
    hub.are_refused, right = True, hub.answer

    def interfere(request: Request) -> Answer:
        answer = right(request)
        return replace(answer, headers=answer.headers | {"X-Xet-Hash": "0" * 64, "X-Xet-Refresh-Route": "/x"})

    hub.hub.interfere = interfere
    with pytest.raises(RequestError, match=r"by Xet only: download it with the hub's own tool"):
        relayout.load("org/out", 1)


def test_what_is_not_there_is_told(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = "no such file or folder; as a repository of the hub: "
    with pytest.raises(PlanError, match=r"^hf://org/none: no such repository on the hub"):
        relayout.load("hf://org/none", 0)
    with pytest.raises(PlanError, match=f"^org/none: {nothing}no such repository"):
        relayout.load("org/none", 0)
    with pytest.raises(PlanError, match=r"^hf://org/out@v9: no such revision"):
        relayout.load("hf://org/out@v9", 0)
    del hub.repos["org/out"]["model-rank-1-part-0.safetensors"]
    with pytest.raises(FormatError, match=r"hf://org/out/model-rank-1-part-0.safetensors: is missing"):
        relayout.load("hf://org/out", 1)
    hub.hub.interfere = lambda request: Answer(500)
    with pytest.raises(RequestError, match=r"the hub returned a server error.* \(HTTP 500\)"):
        relayout.load("hf://org/out", 1)
    hub_server.point_to("http://127.0.0.1:9", monkeypatch, tmp_path)
    with pytest.raises(PlanError, match=f"^org/out: {nothing}the server cannot be reached"):
        relayout.load("org/out", 0)
    with pytest.raises(RequestError, match="the server cannot be reached"):
        relayout.load("hf://org/out", 0)


def test_without_the_extra_a_name_that_may_be_of_the_hub_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "llama").mkdir(parents=True)
    monkeypatch.setattr(web_hub, "find_spec", lambda name: None)
    hint = r"for a repository of the hub, pip install '\.\[hub\]' in a checkout of relayout$"
    with pytest.raises(PlanError, match=f"^org/model: no such file or folder; {hint}"):
        relayout.inspect("org/model")
    with pytest.raises(PlanError, match=rf"^models/lama: no such file or folder; did you mean 'llama'\?; {hint}"):
        relayout.inspect("models/lama")
    assert find_input("models/llama").path("") == Path("models/llama")


@pytest.mark.parametrize("url", ["hf://", "hf://org", "hf://org/model/../x", "hf://org/model@a/b?c", "hf://u:p@org/m"])
def test_a_url_that_names_no_repository_is_refused(url: str) -> None:
    with pytest.raises(PlanError, match="expected hf://ORG/MODEL, hf://ORG/MODEL@REVISION or a folder below it"):
        find_store(url)


def test_only_what_is_no_path_and_has_two_parts_is_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert find_input("org/model").path("x") == Path("org/model/x")
    assert find_input(Path("org/none")).path("x") == Path("org/none/x")
    for path in ("org", "a/b/c", "./org/none", "/org/none", "../org"):
        assert find_input(path).path("x") == Path(path) / "x"
    assert str(find_input("org/none")) == "hf://org/none"


# Web servers.


@pytest.fixture
def web(server: Server) -> str:
    """The same bytes by plain HTTP: the server that is also one of S3 takes requests without a signature."""
    server.checks_keys = False
    return f"{server.url}/models"


def test_a_server_that_does_not_serve_ranges_is_refused(server: Server, web: str, converted: Path) -> None:
    def whole(request: Request) -> None:
        request.headers.pop("range", None)

    server.interfere = whole
    with pytest.raises(RequestError, match="range"):
        relayout.load(f"{web}/out", 1)


def test_a_url_with_a_trailing_slash_is_the_same(server: Server, converted: Path) -> None:
    expect(relayout.load(f"{URL}/", 1), converted)
