"""Reading from registries, of which an imitation runs on loopback: what they may choose, and what is proven."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from support import oci_server
from support.loader_fixtures import assert_equal, whole_tensors
from support.oci_server import IMAGE, MODEL, Registry, sha256
from support.s3_server import Answer, Request

import relayout
from relayout.errors import FormatError, PlanError, RelayoutError
from relayout.storage.cloud import connect
from relayout.storage.stores import Kind, RequestError, find_store
from relayout.storage.web.oci import MAX_MANIFEST_NBYTES, OciStore

pytest.importorskip("urllib3", reason="the client of registries")

REPOSITORY, TAG = "models/tiny", "tp2"
WEIGHTS = "model-rank-1-part-0.safetensors"


@pytest.fixture
def registry(converted: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Registry]:
    """A registry with a converted checkpoint."""
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.0)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "nowhere"))
    with oci_server.running() as registry:
        registry.write(REPOSITORY, TAG, {file.name: file.read_bytes() for file in converted.iterdir()})
        yield registry


@pytest.fixture
def url(registry: Registry) -> str:
    return registry.url(REPOSITORY, TAG)


def expect(found: dict[str, Any], converted: Path) -> None:
    assert_equal(found, whole_tensors(converted, "model-rank-1-*"))


def test_a_rank_is_loaded_by_its_own_bytes(registry: Registry, url: str, converted: Path) -> None:
    expect(relayout.load(url, 1), converted)
    own = sum(file.stat().st_size for file in converted.glob("model-rank-1-*"))
    assert registry.storage.sent_nbytes < own * 1.01 + 2**16
    digests = {request.key.rpartition("/")[2] for request in registry.storage.requests}
    others = {sha256(file.read_bytes())[7:] for file in converted.glob("model-rank-0-*")}
    assert not digests & others


def test_all_that_reads_a_converted_folder_reads_an_artifact(
    url: str, converted: Path, model: Path, tmp_path: Path
) -> None:
    expect(dict(relayout.iter_load(url, 1, verify=True)), converted)
    expect(relayout.load(url, 1, cache=tmp_path / "cache"), converted)
    with relayout.open(url, 1) as opened:
        expect({name: opened.get_tensor(name) for name in opened.offset_keys()}, converted)
    assert relayout.verify(url, source=model).ok
    relayout.restore(url, tmp_path / "restored")
    assert_equal(whole_tensors(tmp_path / "restored"), whole_tensors(model))
    assert relayout.files(url, ranks="1").nbytes < relayout.files(url).nbytes
    relayout.copy(url, tmp_path / "copy")
    for file in converted.iterdir():
        assert (tmp_path / "copy" / file.name).read_bytes() == file.read_bytes(), file.name


def test_a_digest_names_one_manifest_whatever_the_tag_does(registry: Registry, url: str, converted: Path) -> None:
    content = registry.manifests[REPOSITORY, TAG]
    pinned = registry.url(REPOSITORY, sha256(content))
    store = find_store(url)
    assert isinstance(store, OciStore)
    assert store.client.artifact is not None
    assert store.client.artifact.digest == sha256(content)
    registry.write(REPOSITORY, TAG, {"relayout.json": b"other"})
    assert store.read("relayout.json", 2**20) == (converted / "relayout.json").read_bytes(), "it stays"
    assert find_store(url).read("relayout.json", 2**20) == b"other"
    expect(relayout.load(pinned, 1), converted)
    registry.manifests[REPOSITORY, sha256(content)] = content + b" "
    with pytest.raises(FormatError, match="returned a manifest of another digest"):
        relayout.load(pinned, 1)


def test_a_missing_tag_is_missing(registry: Registry) -> None:
    store = find_store(registry.url(REPOSITORY, "other"))
    assert store.kind() is Kind.NOTHING
    with pytest.raises(FormatError, match="the registry has no artifact of this name and tag"):
        store.read("relayout.json", 1)
    with pytest.raises(RelayoutError, match="other"):
        relayout.load(registry.url(REPOSITORY, "other"), 0)


def test_a_plain_checkpoint_is_refused_because_no_part_of_it_can_be_proven(registry: Registry, model: Path) -> None:
    registry.write(REPOSITORY, "plain", {file.name: file.read_bytes() for file in model.iterdir()})
    plain = registry.url(REPOSITORY, "plain")
    with pytest.raises(FormatError, match="a plain checkpoint in a registry: its digests are of whole files"):
        relayout.load(plain, 0, tp=2)
    with pytest.raises(FormatError, match="download it"):
        relayout.convert(plain, model.parent / "never", tp=2)


# What a registry says of an artifact.


def layer(**changes: Any) -> dict[str, Any]:
    annotations = {"org.cncf.model.filepath": changes.pop("path", "file")}
    return {"mediaType": MODEL, "digest": sha256(b"1"), "size": 1, "annotations": annotations} | changes


MANIFESTS: dict[str, tuple[Any, str, str]] = {
    "leaves": ([layer(path="../../etc/passwd")], "'../../etc/passwd' is not a file name", "unsafe"),
    "absolute": ([layer(path="/etc/passwd")], "'/etc/passwd' is not a file name", "unsafe"),
    "control": ([layer(path="a\nb")], r"is not a file name", "unsafe"),
    "empty": ([layer(path="")], "'' is not a file name", "unsafe"),
    "long": ([layer(path="x" * 5000)], "is not a file name", "unsafe"),
    "twice": ([layer(), layer()], "'file' is the path of two layers", "field"),
    "folder and file": ([layer(path="a"), layer(path="a/b")], "'a' is used for two files or folders", "field"),
    "no path": ([layer(annotations={})], "expected raw layers with paths", "mismatch"),
    "no annotations": ([layer(annotations=None)], "expected raw layers with paths", "mismatch"),
    "path is a number": ([layer(annotations={"org.cncf.model.filepath": 7})], "not a string|a string", "field"),
    "tar": ([layer(mediaType="application/vnd.cncf.model.weight.v1.tar")], "of media type", "mismatch"),
    "gzip": ([layer(mediaType="application/vnd.docker.image.rootfs.diff.tar.gzip")], "of media type", "mismatch"),
    "digest": ([layer(digest="sha256:../../../x")], "is not a SHA-256 digest", "field"),
    "other digest": ([layer(digest="md5:" + "0" * 32)], "is not a SHA-256 digest", "field"),
    "size": ([layer(size=-1)], "size", "field"),
    "huge": ([layer(size=2**70)], "size", "field"),
    "no layers": (None, "layers", "field"),
    "layers of numbers": ([1], "layers", "field"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_names_files_or_is_an_error(registry: Registry, url: str, case: str, tmp_path: Path) -> None:
    layers, says, code = MANIFESTS[case]
    registry.put(REPOSITORY, TAG, json.dumps({"schemaVersion": 2, "mediaType": IMAGE, "layers": layers}).encode())
    for read in (lambda: relayout.load(url, 1), lambda: relayout.copy(url, tmp_path / "out")):
        with pytest.raises(FormatError, match=says) as caught:
            read()
        assert caught.value.code == code
    assert list(tmp_path.iterdir()) == []
    assert all("/blobs/" not in request.key for request in registry.api.requests)


def test_an_index_of_images_is_no_artifact(registry: Registry, url: str) -> None:
    registry.put(REPOSITORY, TAG, b'{"schemaVersion": 2, "manifests": []}')
    with pytest.raises(FormatError, match="is an index of several manifests"):
        relayout.load(url, 1)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"<html>", b"[" * 10**5, b"\xff"])
def test_a_manifest_is_json(registry: Registry, url: str, content: bytes) -> None:
    registry.put(REPOSITORY, TAG, content)
    with pytest.raises(FormatError, match=re.escape(url)):
        relayout.load(url, 1)


def test_a_manifest_without_end_is_read_to_its_limit(registry: Registry, url: str) -> None:
    registry.put(REPOSITORY, TAG, b" " * (64 * 2**20))
    registry.api.requests.clear()
    with pytest.raises(FormatError, match=f"more than {MAX_MANIFEST_NBYTES} bytes"):
        relayout.load(url, 1)


# What a registry says of a blob.


def of_blobs(registry: Registry, change: Callable[[Request, Answer], Answer]) -> None:
    """Change the answers with bytes of blobs, from whichever server."""

    def changed(right: Callable[[Request], Answer]) -> Callable[[Request], Answer]:
        def answer(request: Request) -> Answer:
            found = right(request)
            is_blob = "/blobs/" in f"/{request.bucket}/{request.key}" and found.status in (200, 206)
            return change(request, found) if is_blob and request.method == "GET" else found

        return answer

    registry.api.interfere = changed(registry.answer)
    registry.storage.interfere = changed(registry.answer_storage)


def flipped(request: Request, answer: Answer) -> Answer:
    """One bit in the middle of each answer is another."""
    body = bytearray(answer.body)
    body[len(body) // 2] ^= 16
    return Answer(answer.status, bytes(body), answer.headers)


READERS: dict[str, Callable[[str, Path], Any]] = {
    "load": lambda url, folder: relayout.load(url, 1),
    "iter_load": lambda url, folder: dict(relayout.iter_load(url, 1)),
    "open": lambda url, folder: _all_of(url),
    "cache": lambda url, folder: relayout.load(url, 1, cache=folder / "cache"),
    "copy": lambda url, folder: relayout.copy(url, folder / "copy"),
    "restore": lambda url, folder: relayout.restore(url, folder / "restored"),
    "other degree": lambda url, folder: relayout.load(url, 0, tp=1),
}


def _all_of(url: str) -> dict[str, Any]:
    with relayout.open(url, 1) as opened:
        return {name: opened.get_tensor(name) for name in opened.offset_keys()}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("only_weights", [True, False])
def test_no_wrong_byte_is_accepted(
    registry: Registry, url: str, read: str, only_weights: bool, tmp_path: Path, converted: Path
) -> None:
    weights = {sha256(file.read_bytes())[7:] for file in converted.glob("*.safetensors")}

    def lie(request: Request, answer: Answer) -> Answer:
        is_weight = any(digest in request.key for digest in weights)
        return flipped(request, answer) if is_weight or not only_weights else answer

    of_blobs(registry, lie)
    with pytest.raises(FormatError) as caught:
        READERS[read](url, tmp_path)
    assert caught.value.code in ("digest", "mismatch", "invalid", "field", "syntax", "owner")
    assert not (tmp_path / "copy").exists()
    assert not (tmp_path / "restored").exists()


def test_verify_finds_what_a_registry_changes(registry: Registry, url: str) -> None:
    assert relayout.verify(url).ok
    of_blobs(registry, lambda request, answer: flipped(request, answer) if len(answer.body) > 2**16 else answer)
    assert not relayout.verify(url).ok


ANSWERS: dict[str, tuple[Callable[[Request, Answer], Answer], str]] = {
    "short": (lambda request, answer: Answer(answer.status, answer.body, answer.headers, cut=1), "connection broke"),
    "other length": (
        lambda request, answer: Answer(200, b"x" * 9999),
        "requested bytes|9999 bytes long|does not serve ranges",
    ),
    "no length": (lambda request, answer: Answer(200, b"", {"Content-Length": "many"}), "no file length"),
    "other range": (
        lambda request, answer: Answer(206, answer.body, answer.headers | {"Content-Range": "bytes 7-8/10"}),
        "requested bytes|by the manifest",
    ),
    "gone": (lambda request, answer: Answer(404), "the registry lacks this file of its manifest"),
    "denied": (lambda request, answer: Answer(403), "denie[sd]"),
    "to another scheme": (lambda request, answer: Answer(307, headers={"Location": "file:///etc/passwd"}), "redirect"),
    "to nowhere": (lambda request, answer: Answer(307, headers={"Location": "http://[/"}), "redirect"),
    "to a user": (lambda request, answer: Answer(307, headers={"Location": "https://a:b@example.com/"}), "redirect"),
    "in circles": (
        lambda request, answer: Answer(
            307, headers={"Location": f"/{request.bucket}/{request.key}?{urlencode(request.query)}"}
        ),
        "more than 5 redirects",
    ),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_that_is_none_to_the_request_is_an_error(registry: Registry, url: str, case: str) -> None:
    change, says = ANSWERS[case]
    of_blobs(registry, change)
    started = time.monotonic()
    with pytest.raises((RequestError, FormatError), match=says) as caught:
        relayout.load(url, 1)
    assert time.monotonic() - started < 20
    assert "Signature" not in str(caught.value)


def test_a_body_without_end_is_an_error_and_is_not_read(registry: Registry, url: str, converted: Path) -> None:
    digest = sha256((converted / "config.json").read_bytes())

    def endless(request: Request, answer: Answer) -> Answer:
        body = b"x" * (32 * 2**20)
        is_chosen = request.key.endswith(digest)
        return Answer(200, body, {"Content-Length": str(2**50)}, cut=len(body)) if is_chosen else answer

    of_blobs(registry, endless)
    with pytest.raises(FormatError, match=rf"{2**50} bytes long, [0-9]+ by the manifest"):
        find_store(url).read("config.json", 2**20)


def test_a_connection_that_breaks_goes_on_and_the_whole_is_compared(
    registry: Registry, url: str, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "RETRY_SECONDS", 30.0)
    digest, broken = sha256((converted / WEIGHTS).read_bytes())[7:], []

    def cut(request: Request, answer: Answer) -> Answer:
        if digest not in request.key or len(broken) > 1:
            return answer
        broken.append(request)
        return Answer(answer.status, answer.body, answer.headers, cut=len(answer.body) // 2)

    of_blobs(registry, cut)
    assert find_store(url).read(WEIGHTS, 2**30) == (converted / WEIGHTS).read_bytes()
    assert len(broken) == 2


def test_a_signed_url_is_used_again_until_it_expires(registry: Registry, url: str, converted: Path) -> None:
    store = find_store(url)
    with store.open(WEIGHTS) as file:
        for _ in range(3):
            file.read(70_000, memoryview(bytearray(100)))
        asked = [request for request in registry.api.requests if "/blobs/" in request.key]
        assert len(asked) == 1
        registry.expire()
        view = memoryview(bytearray(100))
        file.read(70_000, view)
        assert bytes(view) == (converted / WEIGHTS).read_bytes()[70_000:70_100]


@pytest.mark.parametrize(
    "url",
    [
        "oci://",
        "oci://registry.example.com",
        "oci://registry.example.com/name",
        "oci://registry.example.com/Name:tag",
        "oci://registry.example.com/name:",
        "oci://registry.example.com/name:tag/../other",
        "oci://registry.example.com/name@sha256:12",
        "oci://registry.example.com/a/../b:tag",
        "oci://registry.example.com/name:tag?x=1",
        "oci://user:word@registry.example.com/name:tag",
        "oci://registry.example.com:port/name:tag",
    ],
)
def test_a_url_that_names_no_artifact_is_refused(url: str) -> None:
    with pytest.raises(PlanError, match="expected oci://REGISTRY/NAME:TAG") as caught:
        find_store(url)
    assert "word" not in str(caught.value)


def test_a_url_names_a_tag_a_digest_or_a_folder() -> None:
    digest = sha256(b"1")
    for url in (
        "oci://registry.example.com/a/b_c/d:v1.0",
        f"oci://registry.example.com:5000/a@{digest}",
        "oci+http://[::1]:5000/a:b/folder/below",
    ):
        assert str(find_store(url)) == url


def test_a_registry_without_tls_is_named_so(registry: Registry) -> None:
    with pytest.raises(RequestError, match=r"does not speak TLS: .* oci\+http://"):
        find_store(registry.url(REPOSITORY, TAG).replace("oci+http", "oci")).read("relayout.json", 1)
