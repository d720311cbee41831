"""Credentials as `docker login` leaves them, and what registries may do with them."""

from __future__ import annotations

import base64
import json
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import oci_server
from support.oci_server import PASSWORD, USER, Registry
from support.s3_server import Answer, Request

from relayout.errors import PlanError, RelayoutError
from relayout.storage.cloud import connect
from relayout.storage.stores import RequestError, Store, find_store
from relayout.storage.web import registry_auth
from relayout.storage.web.registry_auth import find_credentials, is_near

pytest.importorskip("urllib3", reason="the client of registries")

BASIC = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


@pytest.fixture
def registry() -> Iterator[Registry]:
    """A registry that wants a token for all that it does."""
    with oci_server.running() as registry:
        registry.realm = f"{registry.tokens.url}/token"
        registry.write("models/tiny", "tp2", {"relayout.json": b"1", "model-rank-0.safetensors": bytes(2 * 4096)})
        yield registry


@pytest.fixture
def login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes Docker's configuration."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.0)

    def write(**top: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps(top))

    return write


def read(registry: Registry) -> Store:
    store = find_store(registry.url("models/tiny", "tp2"))
    assert store.read("relayout.json", 1) == b"1"
    with store.open("model-rank-0.safetensors", 2 * 4096) as file:
        file.read(4096, memoryview(bytearray(4096)))
    return store


def everything(*servers: Any) -> str:
    return "\n".join(f"{one.query} {one.headers} {one.body!r}" for server in servers for one in server.requests)


@pytest.mark.parametrize(
    "entry",
    [{"auth": BASIC}, {"username": USER, "password": PASSWORD}, {"identitytoken": PASSWORD}],
    ids=lambda entry: next(iter(entry)),
)
def test_a_token_is_had_for_what_docker_login_has_stored(
    registry: Registry, login: Callable[..., None], entry: dict[str, str]
) -> None:
    login(auths={registry.host: entry})
    store = read(registry)
    assert [one.status for one in registry.tokens.requests] == [200]
    registry.expire()
    assert store.read("relayout.json", 1) == b"1"
    assert [one.status for one in registry.tokens.requests] == [200, 200], "a token that has expired is renewed"
    for secret in (PASSWORD, BASIC):
        assert secret not in everything(registry.storage, registry.api), "it goes to the token server only"
        assert secret not in repr(store)
        assert secret.encode() not in pickle.dumps(store)
    assert "Bearer" not in everything(registry.storage)


def test_basic_credentials_go_to_the_registry_alone(registry: Registry, login: Callable[..., None]) -> None:
    right = registry.answer
    registry.realm = None

    def answer(request: Request) -> Answer:
        if request.headers.get("authorization") != f"Basic {BASIC}":
            return Answer(401, headers={"WWW-Authenticate": 'Basic realm="a registry"'})
        return right(request)

    registry.api.interfere = answer
    login(auths={f"https://{registry.host}/v1/": {"auth": BASIC}})
    read(registry)
    assert BASIC not in everything(registry.storage, registry.tokens)


def test_without_credentials_or_with_wrong_ones_it_says_what_to_do(
    registry: Registry, login: Callable[..., None]
) -> None:
    wrong = base64.b64encode(b"someone:wrong-password").decode()
    for auths in ({}, {registry.host: {"auth": wrong}}):
        login(auths=auths)
        with pytest.raises(RequestError, match=rf"denies access: `docker login {registry.host}`") as caught:
            read(registry)
        assert caught.value.errno == 13
        assert "wrong-password" not in str(caught.value)


def test_a_token_that_does_not_help_is_asked_for_once(registry: Registry, login: Callable[..., None]) -> None:
    login(auths={registry.host: {"auth": BASIC}})
    right = registry.answer
    registry.api.interfere = lambda request: right(Request(request.method, request.bucket, request.key, {}, {}))
    with pytest.raises(RequestError, match="denies access"):
        read(registry)
    assert len(registry.tokens.requests) == 1


@pytest.mark.parametrize(
    ("realm", "says"),
    [
        ("http://localhost:{port}/token", "sends to the token server localhost:[0-9]+: `docker login localhost"),
        ("https://tokens.example.com/token", "sends to the token server tokens.example.com: `docker login"),
        ("http://user:word@127.0.0.1:{port}/token", "a URL that is not https, or has a user"),
        ("ftp://127.0.0.1/token", "a URL that is not https, or has a user"),
        ("/token", "a URL that is not https, or has a user"),
        ("http://[/", "a URL that is not https, or has a user"),
    ],
)
def test_a_registry_chooses_no_server_that_gets_credentials(
    registry: Registry, login: Callable[..., None], realm: str, says: str
) -> None:
    login(auths={registry.host: {"auth": BASIC}})
    registry.realm = realm.format(port=registry.tokens.server_address[1])
    with pytest.raises(RequestError, match=says):
        read(registry)
    assert registry.tokens.requests == []


def test_a_token_server_elsewhere_gets_the_credentials_that_the_user_has_for_it(
    registry: Registry, login: Callable[..., None]
) -> None:
    port = registry.tokens.server_address[1]
    registry.realm = f"http://localhost:{port}/token"
    other = base64.b64encode(b"other:other-secret").decode()
    login(auths={registry.host: {"auth": other}, f"localhost:{port}": {"auth": BASIC}})
    read(registry)
    assert other not in everything(registry.tokens)


def test_a_redirect_of_the_token_server_is_not_followed_elsewhere(
    registry: Registry, login: Callable[..., None]
) -> None:
    login(auths={registry.host: {"auth": BASIC}})
    registry.tokens.interfere = lambda request: Answer(307, headers={"Location": f"{registry.storage.url}/token"})
    with pytest.raises(RequestError, match="redirects"):
        read(registry)
    assert registry.storage.requests == []


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{}", "has no token"),
        (b'{"token": "a\\r\\nX-Injected: 1"}', "has no token"),
        (b'{"token": 7}', "has no token"),
        (b"<html>", "not JSON|JSON"),
        (b" " * 2**20, "more than 262144 bytes"),
    ],
)
def test_a_token_server_s_answer_is_a_token_or_an_error(
    registry: Registry, login: Callable[..., None], body: bytes, says: str
) -> None:
    login(auths={registry.host: {"auth": BASIC}})
    registry.tokens.interfere = lambda request: Answer(200, body)
    with pytest.raises((RequestError, RelayoutError), match=says):
        read(registry)


def helper(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a credential helper into the search path."""
    path = folder / "docker-credential-tests"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize("top", [{"credsStore": "tests"}, {"credHelpers": {"registry.example.com": "tests"}}])
def test_a_credential_helper_is_asked(
    login: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top: dict[str, Any]
) -> None:
    answer = json.dumps({"ServerURL": "registry.example.com", "Username": USER, "Secret": PASSWORD})
    helper(tmp_path, monkeypatch, f"test \"$1 $(cat)\" = 'get registry.example.com' && echo '{answer}'")
    login(**top)
    found = find_credentials("registry.example.com")
    assert found is not None
    assert (found.user, found.password, found.identity_token) == (USER, PASSWORD, "")
    assert PASSWORD not in repr(found)


def test_an_identity_token_of_a_helper_is_one(
    login: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper(tmp_path, monkeypatch, 'echo \'{"ServerURL": "r", "Username": "<token>", "Secret": "identity"}\'')
    login(credsStore="tests")
    found = find_credentials("r.example.com")
    assert found is not None
    assert (found.user, found.identity_token) == ("", "identity")


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo credentials not found in native keychain; exit 1", None),
        ("echo a-secret >&2; exit 3", "fails with status 3$"),
        ("echo a-secret", "not JSON|JSON"),
        ("exec sleep 60", "does not answer"),
    ],
)
def test_a_helper_that_fails_is_an_error_without_its_output(
    login: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str | None
) -> None:
    helper(tmp_path, monkeypatch, script)
    monkeypatch.setattr(registry_auth, "_HELPER_SECONDS", 1.0)
    login(credsStore="tests")
    if says is None:
        assert find_credentials("r.example.com") is None
        return
    with pytest.raises(PlanError, match=says) as caught:
        find_credentials("r.example.com")
    assert "a-secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["../evil", "/bin/sh", "a b", "-x"])
def test_a_helper_is_a_program_in_the_search_path(login: Callable[..., None], name: str) -> None:
    login(credsStore=name)
    with pytest.raises(PlanError, match="not the name of a program"):
        find_credentials("r.example.com")


def test_a_configuration_that_is_none_is_an_error(login: Callable[..., None], tmp_path: Path) -> None:
    assert find_credentials("r.example.com") is None, "there is none"
    for content in (b"{", b'{"auths": 7}', b'{"auths": {"r.example.com": {"auth": "?"}}}'):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(PlanError, match=r"config\.json: not a configuration of Docker"):
            find_credentials("r.example.com")


def test_docker_hub_has_a_name_of_its_own(login: Callable[..., None]) -> None:
    login(auths={"https://index.docker.io/v1/": {"auth": BASIC}})
    assert (found := find_credentials("docker.io")) is not None
    assert found.user == USER
    assert find_credentials("index.docker.io.example.com") is None


NEAR: Sequence[tuple[str, str, bool]] = [
    ("ghcr.io", "ghcr.io", True),
    ("auth.docker.io", "registry-1.docker.io", True),
    ("gitlab.com", "registry.gitlab.com", True),
    ("evil-docker.io", "registry-1.docker.io", False),
    ("io", "ghcr.io", False),
    ("evil.io", "ghcr.io", False),
    ("10.0.0.2", "10.0.0.1", False),
    ("auth", "registry", False),
]


@pytest.mark.parametrize(("host", "own", "expected"), NEAR)
def test_near_is_the_same_host_or_domain(host: str, own: str, expected: bool) -> None:
    assert is_near(host, own) is expected
