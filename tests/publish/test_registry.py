"""Publishing to registries, of which an imitation runs on loopback."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import oci_server
from support.loader_fixtures import converted, model
from support.oci_server import PASSWORD, USER, Registry, sha256
from support.s3_server import Answer, Request

import relayout
from relayout.errors import PlanError
from relayout.publish.publishers import publisher_of
from relayout.storage.cloud import connect, failures
from relayout.storage.stores import RequestError, find_store
from relayout.storage.web import oci

pytest.importorskip("urllib3", reason="the client of registries")

__all__ = ["converted", "model"]
REPOSITORY = "models/tiny"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Registry]:
    """An empty registry."""
    monkeypatch.setattr(connect, "RETRY_SECONDS", 5.0)
    monkeypatch.setattr(failures, "FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with oci_server.running() as registry:
        yield registry


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def pushes(registry: Registry) -> list[Request]:
    return [request for request in registry.api.requests if request.method in ("PATCH", "POST")]


def test_a_folder_is_an_artifact_as_modelpack_has_it(registry: Registry, converted: Path) -> None:
    copied = relayout.copy(converted, registry.url(REPOSITORY, "tp2"))
    assert copied.ranks == (0, 1)
    assert registry.files(REPOSITORY, "tp2") == files_of(converted)
    manifest = json.loads(registry.manifests[REPOSITORY, "tp2"])
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    paths = [layer["annotations"]["org.cncf.model.filepath"] for layer in manifest["layers"]]
    assert paths[-1] == "relayout.json", "who copies in this order has a complete folder when it has that"
    assert sorted(paths) == sorted(files_of(converted))
    kinds = {path: layer["mediaType"] for path, layer in zip(paths, manifest["layers"], strict=True)}
    assert kinds["model-rank-0-part-0.safetensors"] == "application/vnd.cncf.model.weight.v1.raw"
    assert kinds["config.json"] == "application/vnd.cncf.model.weight.config.v1.raw"
    config = json.loads(registry.blobs[manifest["config"]["digest"]])
    assert config["modelfs"]["type"] == "layers"
    assert sorted(config["modelfs"]["diffIds"]) == sorted(layer["digest"] for layer in manifest["layers"])
    for layer in manifest["layers"]:
        assert len(registry.blobs[layer["digest"]]) == layer["size"]


def test_tags_of_some_ranks_share_the_blobs_of_all(registry: Registry, converted: Path, tmp_path: Path) -> None:
    relayout.copy(converted, registry.url(REPOSITORY, "tp2"))
    whole = sum(len(request.body) for request in pushes(registry))
    registry.api.requests.clear()
    relayout.copy(converted, registry.url(REPOSITORY, "tp2-rank-0"), ranks="0")
    weights = {sha256(content) for name, content in files_of(converted).items() if name.endswith(".safetensors")}
    sent = {sha256(request.body) for request in pushes(registry)}
    assert not weights & sent
    assert sum(len(request.body) for request in pushes(registry)) < whole / 100
    registry.storage.requests.clear()
    registry.api.requests.clear()
    relayout.copy(registry.url(REPOSITORY, "tp2-rank-0"), tmp_path / "half")
    assert registry.sent_nbytes < 0.51 * whole
    assert relayout.verify(tmp_path / "half").ok


def test_equal_folders_are_equal_artifacts(registry: Registry, converted: Path, tmp_path: Path) -> None:
    relayout.copy(converted, tmp_path / "copy")
    relayout.copy(converted, registry.url(REPOSITORY, "a"))
    registry.api.requests.clear()
    relayout.copy(tmp_path / "copy", registry.url(REPOSITORY, "b"))
    assert pushes(registry) == []
    assert registry.manifests[REPOSITORY, "a"] == registry.manifests[REPOSITORY, "b"]


def test_a_model_is_converted_into_a_registry(registry: Registry, converted: Path, model: Path) -> None:
    relayout.convert(model, registry.url(REPOSITORY, "tp2"), tp=2, max_part_nbytes=2**20)
    assert registry.files(REPOSITORY, "tp2") == files_of(converted)


def test_the_tag_is_written_last_or_not_at_all(registry: Registry, converted: Path) -> None:
    relayout.copy(converted, registry.url(REPOSITORY, "tp2"))
    assert registry.api.requests[-1].key.endswith("manifests/tp2")
    assert registry.api.requests[-1].method == "PUT"

    def answer(request: Request) -> Answer:
        is_late = request.method == "PATCH" and len(pushes(registry)) > 3
        return Answer(403) if is_late else registry.answer(request)

    registry.blobs.clear()
    registry.api.requests.clear()
    registry.api.interfere = answer
    with pytest.raises(RequestError, match="denies access") as caught:
        relayout.copy(converted, registry.url(REPOSITORY, "other"))
    assert "does not send again what the registry has" in "".join(caught.value.__notes__)
    assert (REPOSITORY, "other") not in registry.manifests
    there = set(registry.blobs)
    assert there
    registry.api.interfere = registry.answer
    registry.api.requests.clear()
    relayout.copy(converted, registry.url(REPOSITORY, "other"))
    assert registry.files(REPOSITORY, "other") == files_of(converted)
    assert not {sha256(request.body) for request in pushes(registry)} & there


def test_a_tag_of_others_is_never_moved(registry: Registry, converted: Path) -> None:
    registry.write(REPOSITORY, "theirs", {"model.bin": b"of somebody else"})
    image = [{"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": sha256(b"1"), "size": 1}]
    registry.write(REPOSITORY, "image", {}, layers=image)
    registry.write(REPOSITORY, "similar", files_of(converted) | {"notes.txt": b"of somebody else"})
    before = dict(registry.manifests)
    for tag, says in {
        "theirs": "holds model.bin, and no relayout.json|holds 'model.bin'",
        "image": "is another artifact, which relayout did not write",
        "similar": "holds files that relayout did not write",
    }.items():
        for force in (False, True):
            with pytest.raises(PlanError, match=says if force else tag) as caught:
                relayout.copy(converted, registry.url(REPOSITORY, tag), force=force)
            assert caught.value.code == "exists"
    assert registry.manifests == before
    assert pushes(registry) == []


def test_force_moves_a_tag_of_relayout(registry: Registry, converted: Path) -> None:
    relayout.copy(converted, registry.url(REPOSITORY, "tp2"), ranks="0")
    with pytest.raises(PlanError, match=r"already holds .* --force replaces it"):
        relayout.copy(converted, registry.url(REPOSITORY, "tp2"))
    relayout.copy(converted, registry.url(REPOSITORY, "tp2"), force=True)
    assert registry.files(REPOSITORY, "tp2") == files_of(converted)


def test_a_tag_that_moves_meanwhile_is_left_alone(registry: Registry, converted: Path) -> None:
    def answer(request: Request) -> Answer:
        if request.method == "PATCH":
            registry.write(REPOSITORY, "tp2", {"model.bin": b"of somebody else"})
        return registry.answer(request)

    registry.api.interfere = answer
    with pytest.raises(PlanError, match="another process has moved the tag meanwhile"):
        relayout.copy(converted, registry.url(REPOSITORY, "tp2"))
    assert registry.files(REPOSITORY, "tp2") == {"model.bin": b"of somebody else"}


@pytest.mark.parametrize("place", ["{tag}/folder", "{digest}"])
def test_an_output_is_a_tag(registry: Registry, converted: Path, place: str) -> None:
    found = place.format(tag=registry.url(REPOSITORY, "tp2"), digest=registry.url(REPOSITORY, sha256(b"1")))
    with pytest.raises(PlanError, match="an output needs a tag"):
        relayout.copy(converted, found)


def test_the_source_is_no_output(registry: Registry, converted: Path) -> None:
    relayout.copy(converted, url := registry.url(REPOSITORY, "tp2"))
    with pytest.raises(PlanError, match="is the source itself"):
        relayout.copy(url, url, ranks="0", force=True)


def test_what_changes_a_place_bit_by_bit_is_refused(registry: Registry) -> None:
    publisher = publisher_of(find_store(registry.url(REPOSITORY, "tp2")))
    older: Any = None
    calls: list[Callable[[], object]] = [
        lambda: publisher.replace("name", None, b""),
        lambda: publisher.add("name", b""),
        lambda: publisher.remove(older),
        lambda: publisher.begin_part(older, older, force=False),
        lambda: publisher.begin(older, older, force=False, gathers=True).__enter__(),
    ]
    for call in calls:
        with pytest.raises(PlanError, match="takes an output whole, by one process"):
            call()
    assert registry.api.requests == []


# Uploads.


def test_an_upload_that_breaks_goes_on_where_the_registry_is(registry: Registry, converted: Path) -> None:
    broken: list[Request] = []

    def answer(request: Request) -> Answer:
        if request.method == "PATCH" and len(request.body) > 2**19 and len(broken) < 2:
            broken.append(request)  # The half of it has come, and then the connection has ended.
            half = Request(request.method, request.bucket, request.key, request.query, request.headers)
            half.body = request.body[: len(request.body) // 2]
            registry.answer(half)
            raise ConnectionError
        return registry.answer(request)

    registry.api.interfere = answer
    relayout.copy(converted, registry.url(REPOSITORY, "tp2"))
    assert registry.files(REPOSITORY, "tp2") == files_of(converted)
    resumed = [request for request in pushes(registry) if re.match("[1-9]", request.headers.get("content-range", ""))]
    assert resumed
    sent = sum(len(request.body) for request in (*pushes(registry), *broken))
    assert sent < sum(map(len, files_of(converted).values())) * 1.2 + 2**20


def test_an_upload_that_always_breaks_ends(
    registry: Registry, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: list[Request] = []

    def answer(request: Request) -> Answer:
        if request.method == "PATCH" and len(request.body) > 2**19:
            broken.append(request)
            raise ConnectionError
        return registry.answer(request)

    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.3)
    registry.api.interfere = answer
    with pytest.raises(RequestError, match="the connection broke"):
        relayout.copy(converted, registry.url(REPOSITORY, "tp2"))
    assert 1 < len(broken) < 12


def test_an_upload_that_the_registry_has_lost_begins_again(registry: Registry, converted: Path) -> None:
    lost: list[Request] = []

    def answer(request: Request) -> Answer:
        if request.method == "PUT" and "digest" in request.query and len(lost) < 2:
            lost.append(request)
            return Answer(404)
        return registry.answer(request)

    registry.api.interfere = answer
    relayout.copy(converted, registry.url(REPOSITORY, "tp2"))
    assert registry.files(REPOSITORY, "tp2") == files_of(converted)


def test_an_answer_that_is_lost_sends_nothing_twice(registry: Registry, converted: Path) -> None:
    lost: list[str] = []

    def answer(request: Request) -> Answer:
        found = registry.answer(request)
        if request.method == "PUT" and request.key not in lost and len(lost) < 5:
            lost.append(request.key)
            raise ConnectionError
        return found

    registry.api.interfere = answer
    relayout.copy(converted, registry.url(REPOSITORY, "tp2"))
    assert registry.files(REPOSITORY, "tp2") == files_of(converted)
    bodies = [sha256(request.body) for request in pushes(registry) if request.method == "PATCH"]
    assert len(bodies) == len(set(bodies))


def test_a_registry_that_limits_requests_gets_chunks(
    registry: Registry, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oci, "_CHUNK_NBYTES", 2**18)
    registry.takes_nbytes = 2**18
    relayout.copy(converted, registry.url(REPOSITORY, "tp2"))
    assert registry.files(REPOSITORY, "tp2") == files_of(converted)


LIES: dict[str, tuple[Callable[[Registry], Answer], str]] = {
    "elsewhere": (
        lambda registry: Answer(202, headers={"Location": f"{registry.storage.url}/v2/x"}),
        "sends an upload to another server",
    ),
    "nowhere": (lambda registry: Answer(202), "sends an upload to another server, or nowhere"),
    "no url": (
        lambda registry: Answer(202, headers={"Location": "http://[/"}),
        "sends an upload to another server",
    ),
    "redirect": (
        lambda registry: Answer(307, headers={"Location": f"{registry.storage.url}/v2/x"}),
        "redirects requests",
    ),
    "refused": (lambda registry: Answer(405), "does not support this request"),
    "always lost": (lambda registry: Answer(404), "HTTP 404"),
    "always larger": (lambda registry: Answer(413), "HTTP 413"),
}


@pytest.mark.parametrize("case", LIES)
@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_no_byte_goes_to_another_server_and_every_upload_ends(
    registry: Registry, converted: Path, case: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.3)
    change, says = LIES[case]
    registry.api.interfere = lambda request: change(registry) if request.method == method else registry.answer(request)
    with pytest.raises(RequestError, match=says):
        relayout.copy(converted, registry.url(REPOSITORY, "tp2"))
    assert registry.storage.requests == []
    assert registry.manifests == {}


@pytest.mark.parametrize("what", ["blobs", "manifests"])
def test_a_registry_that_stores_another_digest_is_an_error(registry: Registry, converted: Path, what: str) -> None:
    def answer(request: Request) -> Answer:
        found = registry.answer(request)
        if request.method == "PUT" and f"/{what}/" in request.key:
            return Answer(201, headers={"Docker-Content-Digest": sha256(b"another")})
        return found

    registry.api.interfere = answer
    with pytest.raises(RequestError, match="has stored another digest than was sent"):
        relayout.copy(converted, registry.url(REPOSITORY, "tp2"))


def test_a_token_that_may_write_is_had_for_writing(registry: Registry, converted: Path, tmp_path: Path) -> None:
    registry.realm = f"{registry.tokens.url}/token"
    (tmp_path / "config.json").write_text(
        json.dumps({"auths": {registry.host: {"username": USER, "password": PASSWORD}}})
    )
    relayout.copy(converted, registry.url(REPOSITORY, "tp2"))
    assert registry.files(REPOSITORY, "tp2") == files_of(converted)
    scopes = {request.query["scope"] for request in registry.tokens.requests}
    assert scopes == {f"repository:{REPOSITORY}:pull", f"repository:{REPOSITORY}:pull,push"}
    assert len(registry.tokens.requests) == 2
    assert PASSWORD not in "".join(f"{request.headers}{request.body!r}" for request in registry.api.requests)
