"""What servers must not choose: a table of what each does, and what must be said. Nothing else of them is believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import hub_server, s3_server
from support.hub_server import Hub
from support.loader_fixtures import assert_equal, whole_tensors
from support.patience import in_time
from support.remote import expect
from support.s3_server import Answer, Request, Server

import relayout
from relayout.errors import FormatError, RelayoutError
from relayout.storage import stores
from relayout.storage.cloud import connect, failures
from relayout.storage.stores import RequestError, find_store
from relayout.storage.web import http
from relayout.storage.web import hub as hub_module

pytest.importorskip("urllib3", reason="the client of web servers")
pytest.importorskip("huggingface_hub", reason="finds the token")

Spoil = Callable[[Request, Answer], Answer | None]
"""What is answered instead of the right answer."""


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.3)
    monkeypatch.setattr(failures, "FIRST_DELAY_SECONDS", 0.05)


def info(**fields: Any) -> Spoil:
    """The hub's list says something else."""

    def spoil(request: Request, right: Answer) -> Answer | None:
        return Answer(200, json.dumps(json.loads(right.body) | fields).encode()) if request.bucket == "api" else None

    return spoil


def listed(name: object) -> Spoil:
    return info(siblings=[{"rfilename": name, "size": 1, "blobId": "0" * 40}])


def blob(content: bytes) -> Spoil:
    return lambda request, right: Answer(200, content) if request.bucket == "api" else None


def resolved(**headers: str) -> Spoil:
    """A file is said to be elsewhere, or another one."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda request, right: replace(right, headers=right.headers | named) if right.status == 302 else None


OTHER = "is not a file name"
HUB: dict[str, tuple[Spoil, str]] = {
    "commit above the cache": (info(sha="../../../../victim"), "'../../../../victim' is not a commit"),
    "commit absolute": (info(sha="/victim"), "'/victim' is not a commit"),
    "commit short": (info(sha="abc"), "is not a commit: expected 40 hexadecimal digits"),
    "commit with a line break": (info(sha="a" * 40 + "\n"), "is not a commit"),
    "commit of another type": (info(sha=5), "'sha' is missing or not a string"),
    "name of another type": (listed(5), "'rfilename' is missing or not a string"),
    "name empty": (listed(""), OTHER),
    "name with an empty part": (listed("a//b"), OTHER),
    "name absolute": (listed("/etc/x"), OTHER),
    "name above": (listed("../x"), OTHER),
    "name with NUL": (listed("x\0"), OTHER),
    "name with ESC": (listed("x\x1b[2J"), OTHER),
    "name too long": (listed("x" * 256), OTHER),
    "no list": (info(siblings={}), "'siblings' is missing or not a list of objects"),
    "list nested": (blob(b'{"a":' + b"[" * 100_000), "JSON"),
    "list no JSON": (blob(b"<html>"), "JSON"),
    "list endless": (blob(b" " * 2**21), "more than 1048576 bytes"),
    "to a bucket": (resolved(Location="s3://bucket/x"), "the hub redirects to 's3', expected https"),
    "to another bucket": (resolved(Location="gs://bucket/x"), "the hub redirects to 'gs', expected https"),
    "to a file": (resolved(Location="file:///etc/passwd"), "the hub redirects to 'file', expected https"),
    "to ftp": (resolved(Location="ftp://127.0.0.1/x"), "the hub redirects to 'ftp', expected https"),
    "with a password": (resolved(Location="http://u:p@127.0.0.1/x"), "the hub redirects to 'http', expected https"),
    "to no port": (resolved(Location="//127.0.0.1:99999/x"), "is not what its library expects"),
    "to no host": (resolved(Location="//[/x"), "is not what its library expects"),
    "another length": (resolved(X_Linked_Size="1"), "has changed since it was last checked"),
    "another hash": (resolved(X_Linked_ETag='"00"'), "has changed since it was last checked"),
}


@pytest.fixture
def victim(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder beside the hub's cache, and a token that nobody else may see."""
    monkeypatch.setattr(hub_module, "_MAX_INFO_NBYTES", 2**20)
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "config.json").write_text('{"secret": "of the victim"}')
    (tmp_path / "hub" / "models--org--model" / "snapshots").mkdir(parents=True)


@pytest.mark.usefixtures("victim")
@pytest.mark.parametrize("case", HUB)
def test_what_a_hub_must_not_choose(hub: Hub, server: Server, case: str) -> None:
    spoil, says = HUB[case]
    right = hub.hub.interfere

    def interfere(request: Request) -> Answer | None:
        answer = right(request)
        assert answer is not None
        return spoil(request, answer) or answer

    hub.hub.interfere = interfere
    with pytest.raises((RelayoutError, RequestError), match=says):
        relayout.load("hf://org/model", 0, tp=1)
    assert not server.requests, "credentials of a store, which is not the hub's, were used"
    assert not [one for one in hub.bytes.requests if "authorization" in one.headers]


@pytest.mark.parametrize("extra", [b"x", b""], ids=["longer", "shorter"])
def test_bytes_of_another_length_than_the_commits_are_refused(hub: Hub, extra: bytes) -> None:
    right = hub.answer_bytes

    def interfere(request: Request) -> Answer:
        hub._signed = {name: one[: len(one) if extra else -1] + extra for name, one in hub._signed.items()}
        return right(request)

    hub.bytes.interfere = interfere
    with pytest.raises(RelayoutError, match="has changed since it was last checked"):
        relayout.load("hf://org/model", 0, tp=1)


@pytest.mark.usefixtures("victim")
@pytest.mark.parametrize("text", ["../../../../victim", "main", "A" * 40])
def test_a_reference_in_the_hubs_cache_is_a_commit_or_an_error(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refs = tmp_path / "hub" / "models--org--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text(text)
    with pytest.raises(RelayoutError, match="is not a commit"):
        relayout.inspect("hf://org/model")


# Web servers. FOLDER is that of a plain checkpoint.


def with_headers(change: Callable[[dict[str, str]], dict[str, str]], name: str = "") -> Spoil:
    def spoil(request: Request, right: Answer) -> Answer | None:
        return replace(right, headers=change(right.headers)) if request.key.endswith(name) else None

    return spoil


def sent_to(target: str) -> Spoil:
    return lambda request, right: (
        Answer(302, b"", {"Location": target}) if request.key.endswith("safetensors") else None
    )


def index(content: bytes, **headers: str) -> Spoil:
    def spoil(request: Request, right: Answer) -> Answer | None:
        if not request.key.endswith("index.json"):
            return None
        return Answer(200, content, {"ETag": '"x"', **{name.replace("_", "-"): one for name, one in headers.items()}})

    return spoil


def without(*names: str) -> Spoil:
    return with_headers(lambda headers: {name: one for name, one in headers.items() if name not in names})


def is_range(request: Request) -> bool:
    return request.range is not None


ELSEWHERE = "redirected to {}: redirects to other servers are not followed"
WEB: dict[str, tuple[Spoil, str]] = {
    "to another server": (sent_to("http://127.0.0.2:1/x?secret=1"), ELSEWHERE.format("http://127.0.0.2")),
    "to another port": (sent_to("http://127.0.0.1:1/x"), ELSEWHERE.format("http://127.0.0.1")),
    "to the cloud's credentials": (sent_to("http://169.254.169.254/"), ELSEWHERE.format("http://169.254.169.254")),
    "to ftp": (sent_to("ftp://127.0.0.1/x"), ELSEWHERE.format("ftp://127.0.0.1")),
    "to no URL": (sent_to("//[/x"), "redirected to invalid:"),
    "in circles": (sent_to("/models/model/model.safetensors"), "more than 5 redirects"),
    "index nested": (index(b"[" * 100_000), "JSON"),
    "index without end": (index(b"", Content_Length=str(2**40)), f"{2**40} bytes, limit"),
    "index no JSON": (index(b"<html>"), "JSON"),
    "no length": (
        lambda request, right: Answer(200, b"", {"Content-Length": "many"}) if is_range(request) else None,
        "the server sends no file length",
    ),
    "range of words": (
        with_headers(lambda headers: headers | {"Content-Range": "bytes a-b/c"}, "model.safetensors"),
        "the server sends no file length, or no valid range",
    ),
    "no version": (without("ETag", "Last-Modified"), "the server sends neither ETag nor Last-Modified"),
}


@pytest.mark.parametrize("case", WEB)
def test_what_a_web_server_must_not_choose(server: Server, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, says = WEB[case]
    server.checks_keys = False

    def interfere(request: Request) -> Answer | None:
        return spoil(request, s3_server.answer(server, request))

    server.interfere = interfere
    with pytest.raises((RelayoutError, RequestError), match=says) as caught:
        relayout.load(f"{server.url}/models/model", 0, tp=1)
    assert "secret" not in str(caught.value)
    assert not [one for one in server.requests if "referer" in one.headers]


def test_a_redirect_on_the_same_server_is_followed(server: Server, model: Path) -> None:
    server.checks_keys = False

    def interfere(request: Request) -> Answer | None:
        moved = request.key.replace("old/", "model/")
        return Answer(302, b"", {"Location": f"/models/{moved}"}) if request.key.startswith("old/") else None

    server.interfere = interfere
    assert_equal(relayout.load(f"{server.url}/models/old", 0, tp=1), whole_tensors(model))


def test_without_versions_a_converted_folder_is_read_with_proof(server: Server, converted: Path) -> None:
    server.checks_keys = False
    hide = without("ETag", "Last-Modified")
    server.interfere = lambda request: hide(request, s3_server.answer(server, request))
    url = f"{server.url}/models/out"
    expect(relayout.load(url, 1), converted)
    expect(dict(relayout.iter_load(url, 1)), converted)
    with relayout.open(url, 1) as opened:
        expect({name: opened.get_tensor(name) for name in opened.offset_keys()}, converted)
    name = "out/model-rank-1-part-0.safetensors"

    def put_another(request: Request) -> Answer | None:
        if request.key == name and request.range != (0, 4 * 2**10):
            content = server.objects["models", name].content
            server.put("models", name, content[: 2**16] + bytes(len(content) - 2**16))
        return hide(request, s3_server.answer(server, request))

    server.interfere = put_another
    with pytest.raises(RelayoutError, match="do not match digest"):
        relayout.load(url, 1)


def test_a_server_that_trickles_bytes_is_as_one_that_sends_none(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "STALL_SECONDS", 1.0)

    def trickle(request: Request) -> Answer | None:
        if request.range is None:
            return None
        monkeypatch.setattr(connect, "RETRY_SECONDS", 0.1)  # What was asked for before may be slow.
        return replace(s3_server.answer(server, request), trickles=True)

    server.interfere = trickle
    for url in ("s3://models/out", f"{server.url}/models/out"):
        server.checks_keys = url.startswith("s3")
        with pytest.raises(RequestError, match="requests timed out"):
            in_time(lambda url=url: relayout.load(url, 1))


def test_an_index_is_read_no_further_than_any_needs(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_MAX_INDEX_NBYTES", 100)
    server.checks_keys = False
    server.put("models", "model/model.safetensors.index.json", b" " * 101)
    with pytest.raises(RelayoutError, match="101 bytes, limit 100"):
        relayout.inspect(f"{server.url}/models/model")


@pytest.mark.parametrize("name", ["model/a//b", "model/a\x1b[2J", "model/" + "x" * 256, "model/sub", "model/a\nb"])
def test_names_that_no_folder_can_have_are_refused_before_a_byte_is_copied(
    server: Server, tmp_path: Path, name: str
) -> None:
    server.put("models", name, b"x")
    server.put("models", "model/sub/x", b"x")
    with pytest.raises(
        RelayoutError,
        match=r"is (no|not the) name of a file|is not valid for a file|is used for two files or folders",
    ):
        relayout.convert("s3://models/model", tmp_path / "out", tp=2)
    assert not list(tmp_path.iterdir())
    assert not [one for one in server.requests if one.range and one.range[0] >= 64 * 2**10]


def test_a_listing_that_goes_on_where_it_broke_has_every_name_once(server: Server) -> None:
    expected = [f"many/{number:04}" for number in range(2500)]
    for name in expected:
        server.put("models", name, b"")
    failed: list[str] = []

    def interfere(request: Request) -> Answer | None:
        token = request.query.get("continuation-token", "")
        if not token or token in failed:
            return None
        failed.append(token)
        return s3_server.error(503, "SlowDown")

    server.interfere = interfere
    assert [f"many/{entry.name}" for entry in find_store("s3://models/many").walk()] == expected
    assert failed


def test_a_listing_without_end_is_an_error(server: Server) -> None:
    for number in range(2000):
        server.put("models", f"many/{number:04}", b"")

    def interfere(request: Request) -> Answer | None:
        if "list-type" in request.query:
            request.query.pop("continuation-token", None)
        return None

    server.interfere = interfere
    with pytest.raises(RelayoutError, match="the listing of the store repeats names"):
        list(find_store("s3://models/many").walk())


ENDLESS: dict[str, Callable[[str, Path], object]] = {
    "inspect": lambda url, path: relayout.inspect(url),
    "convert": lambda url, path: relayout.convert(url, path / "out", tp=2),
    "load": lambda url, path: relayout.load(url),
    "output": lambda url, path: relayout.convert(path / "model", url, tp=2),
    "copy to it": lambda url, path: relayout.copy(path / "converted", url),
}


@pytest.mark.parametrize("call", ENDLESS)
def test_a_listing_of_ever_new_names_ends_at_its_limit(
    server: Server, model: Path, converted: Path, tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "MAX_LISTED", 2500)
    (tmp_path / "model").symlink_to(model)
    (tmp_path / "converted").symlink_to(converted)
    pages = []

    def endless(request: Request) -> Answer | None:
        if request.method != "GET" or "list-type" not in request.query:
            return None
        pages.append(request)
        prefix, number = request.query.get("prefix", ""), len(pages)
        rows = "".join(
            f"<Contents><Key>{prefix}{number:06}-{row:04}.txt</Key><LastModified>2023-11-14T22:13:20.000Z</LastModified>"
            "<ETag>&quot;x&quot;</ETag><Size>1</Size></Contents>"
            for row in range(1000)
        )
        text = (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>models</Name>'
            f"<IsTruncated>true</IsTruncated><NextContinuationToken>{number}</NextContinuationToken>"
            f"<KeyCount>1000</KeyCount>{rows}</ListBucketResult>"
        )
        return Answer(200, text.encode(), {"content-type": "application/xml"})

    server.interfere = endless
    with pytest.raises(FormatError, match="its listing has more than 2,500 names, the limit") as caught:
        ENDLESS[call]("s3://models/endless", tmp_path)
    assert caught.value.code == "limit"
    assert len(pages) <= 10


@pytest.mark.parametrize(
    "url",
    [
        "https://u:PW@h/x",
        "https://u%3aPW%40h/x",
        "ftp://u:PW@h/x",
        "gopher://u%3APW%40h/x?secret=PW",
        "s3://u:PW@h/x",
        "s3://bucket/a\\PW@x",
        "gopher://u:a/PW@h/x",
        "s3://a/b?X-Amz-Signature=PW",
        *("s3://", "s3:///x", "s3://a//b", "s3://a/../b"),
    ],
)
def test_a_url_that_names_nothing_or_too_much_is_refused_and_shown_without_its_password(url: str) -> None:
    says = "expected s3://BUCKET/PREFIX, without user, password" if url.startswith("s3") else "no store for|expected"
    with pytest.raises(RelayoutError, match=says) as caught:
        relayout.load(url, 0)
    assert "PW" not in str(caught.value)


@pytest.mark.parametrize("url", ["nope://bucket/model@v1/x", "hf://org/mo del@v1", "s3://bucket/model@v1/x"])
def test_a_revision_is_shown(url: str) -> None:
    with pytest.raises(RelayoutError) as caught:
        relayout.load(f"{url}?versionId=1" if url.startswith("s3") else url, 0)
    assert str(caught.value).startswith(f"{url}: ")
