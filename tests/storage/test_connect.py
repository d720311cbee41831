"""How buckets are reached is the same for reads and for uploads."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace

import pytest
from support import hub_server, s3_server
from support.lying_server import Interference, dropped, is_part, refused, stalled
from support.patience import PATIENCE
from support.s3_server import Answer, Request, Server

from relayout.errors import FormatError, PlanError
from relayout.publish.publishers import publisher_of
from relayout.storage.cloud import connect, failures
from relayout.storage.cloud.bucket import BucketClient
from relayout.storage.cloud.store import Version
from relayout.storage.stores import RequestError, find_store

pytest.importorskip("obstore", reason="the client of object stores")

PROVIDERS = ["s3", "gs", "az"]
BLOB = bytes(range(256)) * 50_000
"""12 MiB: two parts."""
SECRET = "secret-of-a-proxy"


def reach(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Let all clients find a server."""
    variables = {
        "AWS_ACCESS_KEY_ID": s3_server.ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": s3_server.SECRET_KEY,
        "AWS_ENDPOINT_URL": url,
        "GOOGLE_BEARER_TOKEN": "a-token",
        "GOOGLE_BASE_URL": url,
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_ACCOUNT_KEY": "c2VjcmV0LXRoYXQtbm9ib2R5LW1heS1zZWU=",
        "AZURE_STORAGE_ENDPOINT": url,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # This machine's own.
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with s3_server.running() as server:
        reach(monkeypatch, server.url)
        yield server


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds of each pause between requests, which take no time."""
    found: list[float] = []
    monkeypatch.setattr(failures, "pause", found.append)
    monkeypatch.setattr(failures, "time", SimpleNamespace(monotonic=lambda: sum(found)))
    return found


def with_azure(interfere: Interference) -> Interference:
    """The server knows nothing of Azure's blocks."""
    return lambda request: (
        interfere(request)
        or (Answer(201, headers={"ETag": '"0x1"'}) if request.query.get("comp") in ("block", "blocklist") else None)
    )


def sends(request: Request) -> bool:
    return is_part(request) or request.query.get("comp") == "block"


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    """A file to be uploaded."""
    (tmp_path / "blob").write_bytes(BLOB)
    return tmp_path / "blob"


def upload(provider: str, file: Path) -> Version:
    return BucketClient.of(f"{provider}://models").upload("x/y", file, 2, lambda: None)


def put(provider: str) -> Version:
    return BucketClient.of(f"{provider}://models").put("x/y", b"small")


def described(content: bytes) -> tuple[int, str]:
    """Length and digest, which can be read where megabytes differ."""
    return len(content), hashlib.sha256(content).hexdigest()


def completes(request: Request) -> bool:
    return (request.method == "POST" and "uploadId" in request.query) or request.query.get("comp") == "blocklist"


# Requests that fail.

FAULTS = {
    "503": lambda: refused(sends, 503, "SlowDown", times=3),
    "429": lambda: refused(sends, 429, "TooManyRequests", times=3),
    "time-out": lambda: refused(sends, 400, "RequestTimeout", times=3),
    "a broken connection": lambda: dropped(sends, times=3),
}


@pytest.mark.parametrize(
    ("provider", "fault"),
    [
        *((one, fault) for one in PROVIDERS for fault in ("503", "a broken connection")),
        ("s3", "429"),
        ("s3", "time-out"),
    ],
)
def test_a_part_that_fails_is_sent_again_whole(server: Server, blob: Path, provider: str, fault: str) -> None:
    server.interfere = with_azure(FAULTS[fault]())
    upload(provider, blob)
    taken = {described(one.body) for one in server.requests if sends(one) and one.status in (200, 201)}
    assert taken == {described(BLOB[: 8 * 2**20]), described(BLOB[8 * 2**20 :])}
    if provider != "az":
        assert described(server.objects["models", "x/y"].content) == described(BLOB)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_endless_outage_ends(server: Server, blob: Path, monkeypatch: pytest.MonkeyPatch, provider: str) -> None:
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(connect, "UPLOAD_SECONDS", 2.0)
    server.interfere = with_azure(refused(sends, 503, "SlowDown", times=10**9))
    with pytest.raises(RequestError, match=r"throttles requests.*503.*models/x/y"):
        upload(provider, blob)


def test_an_upload_that_is_gone_is_an_error_that_says_so(server: Server, blob: Path) -> None:
    server.interfere = refused(completes, 404, "NoSuchUpload", times=10**9)
    with pytest.raises(RequestError, match=r"its upload no longer exists.*models/x/y"):
        upload("s3", blob)
    server.interfere = refused(completes, 403, "AccessDenied", times=10**9)
    with pytest.raises(RequestError, match=r"access denied.*403"):
        upload("s3", blob)


@pytest.mark.parametrize("body", [b"", b"<InitiateMultipartUploadResult/>", b"no XML"])
def test_an_answer_that_cannot_be_read_is_an_error(
    server: Server, blob: Path, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(connect, "UPLOAD_SECONDS", 1.0)
    server.interfere = lambda request: Answer(200, body)
    with pytest.raises(RequestError, match=r"models/x/y"):
        upload("s3", blob)


def test_a_process_that_was_forked_does_not_use_connections_of_its_parent(
    server: Server, blob: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = BucketClient.of("s3://models")
    client.put("x/y", b"1")
    monkeypatch.setattr(failures, "_used_by", os.getpid() + 1)
    for call in (lambda: client.put("x/y", b"2"), lambda: upload("s3", blob)):
        with pytest.raises(RequestError, match="was forked after its parent had used a store"):
            call()
    assert len(server.requests) == 1


# Certificates, proxies, time-outs.


@pytest.fixture
def secure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Path]]:
    """A server with a certificate of an authority that nobody knows, and the file that has the authority's own."""
    trustme = pytest.importorskip("trustme", reason="makes certificates")
    authority, context = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    with s3_server.running(context) as server:
        reach(monkeypatch, server.url)
        server.put("models", "x/a.txt", b"hello")
        yield server, tmp_path / "authority.pem"


@pytest.mark.parametrize(
    ("provider", "name"), [("s3", "AWS_CA_BUNDLE"), *((provider, "SSL_CERT_FILE") for provider in PROVIDERS)]
)
def test_a_private_authority_that_is_named_is_trusted_by_reads_and_uploads(
    secure: tuple[Server, Path], monkeypatch: pytest.MonkeyPatch, provider: str, name: str, blob: Path
) -> None:
    monkeypatch.setenv(name, str(secure[1]))
    secure[0].interfere = with_azure(lambda request: None)
    assert find_store(f"{provider}://models/x").read("a.txt", 100) == b"hello"
    upload(provider, blob)
    if name == "SSL_CERT_FILE":
        assert find_store(f"{secure[0].url}/models/x").read("a.txt", 100) == b"hello"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_authority_that_nobody_knows_is_an_error_that_says_so_at_once(
    secure: tuple[Server, Path], slept: list[float], provider: str
) -> None:
    for url in (f"{provider}://models/x", f"{secure[0].url}/models/x"):
        with pytest.raises(RequestError, match=r"certificate is not trusted: .* SSL_CERT_FILE.*models/x") as caught:
            find_store(url).read("a.txt", 100)
        assert caught.value.errno == errno.EPROTO
    with pytest.raises(RequestError, match=r"certificate is not trusted: .* SSL_CERT_FILE.*models/x"):
        put(provider)
    assert slept == []


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_proxy_and_its_exceptions_hold_for_reads_and_uploads(
    server: Server, slept: list[float], monkeypatch: pytest.MonkeyPatch, provider: str, blob: Path
) -> None:
    reach(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", server.url.replace("//", f"//me:{SECRET}@"))
    server.put("models", "x/a.txt", b"hello")
    server.interfere = with_azure(lambda request: None)
    assert find_store(f"{provider}://models/x").read("a.txt", 100) == b"hello"
    upload(provider, blob)
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(connect, "UPLOAD_SECONDS", 1.0)
    before = len(server.requests)
    monkeypatch.setenv("NO_PROXY", "elsewhere.invalid,127.0.0.1")
    with pytest.raises(RequestError, match="models/x"):
        find_store(f"{provider}://models/x").read("a.txt", 100)
    with pytest.raises(RequestError, match="the server cannot be reached"):
        put(provider)
    assert len(server.requests) == before


def test_a_proxy_and_its_exceptions_hold_for_web_servers(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.checks_keys = False
    server.put("models", "x/a.txt", b"hello")
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(connect, "UPLOAD_SECONDS", 1.0)
    monkeypatch.setenv("HTTP_PROXY", server.url.replace("//", f"//me:{SECRET}@"))
    monkeypatch.setenv("NO_PROXY", "direct.invalid")
    assert find_store("http://proxied.invalid/models/x").read("a.txt", 100) == b"hello"
    before = len(server.requests)
    with pytest.raises(RequestError, match=r"direct\.invalid/models/x") as caught:
        find_store("http://direct.invalid/models/x").read("a.txt", 100)
    assert len(server.requests) == before
    assert SECRET not in f"{caught.value!r} {caught.value.__cause__!r} {caught.value.__context__!r}"


def test_a_proxy_that_refuses_is_an_error_without_its_password(
    server: Server, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    reach(monkeypatch, "https://store.invalid")
    server.interfere = refused(lambda request: True, 407, "x", times=10**9)
    for proxy in (server.url, "http://127.0.0.1:9"):
        monkeypatch.setenv("HTTPS_PROXY", proxy.replace("//", f"//me:{SECRET}@"))
        with pytest.raises(RequestError, match=r"the proxy is unreachable or refuses|refuses connections") as caught:
            put("s3")
        assert SECRET not in f"{caught.value!r} {caught.value.__cause__!r} {caught.value.__context__!r}"


def wait_for(is_so: Callable[[], bool]) -> None:
    """The stalled request is recorded when its handler goes on."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_stall_of_an_upload_ends_and_the_part_is_sent_again(
    server: Server, slept: list[float], monkeypatch: pytest.MonkeyPatch, provider: str, blob: Path
) -> None:
    monkeypatch.setattr(connect, "UPLOAD_SECONDS", 2.0)
    server.interfere = with_azure(stalled(sends, 4.0))
    upload(provider, blob)
    wait_for(lambda: len([one for one in server.requests if sends(one)]) > 2)


def test_a_file_of_certificates_that_cannot_be_read_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nowhere.pem")
    with pytest.raises(PlanError, match=r"AWS_CA_BUNDLE=/nowhere\.pem: the file cannot be read"):
        find_store("s3://models/x")


@pytest.mark.parametrize(("place", "extra"), [*((f"{provider}://models/x", "cloud") for provider in PROVIDERS)])
def test_the_client_that_is_missing_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, place: str, extra: str
) -> None:
    known = connect.find_spec
    monkeypatch.setattr(connect, "find_spec", lambda name: None if name == "obstore" else known(name))
    says = rf"needs the package obstore, which is not installed: pip install '\.\[{extra}\]'"
    with pytest.raises(PlanError, match=says):
        find_store(place).read("a.txt", 10)


def test_buckets_in_host_names_are_so_for_reads_and_uploads(
    server: Server, monkeypatch: pytest.MonkeyPatch, blob: Path
) -> None:
    reach(monkeypatch, "http://models.store.invalid")
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    monkeypatch.setenv("HTTP_PROXY", server.url)
    server.put("x", "a.txt", b"hello")  # The proxy sees no bucket in the path.
    assert find_store("s3://models/x").read("a.txt", 100) == b"hello"
    upload("s3", blob)
    assert {one.headers["host"] for one in server.requests} == {"models.store.invalid"}
    assert {(one.bucket, one.key) for one in server.requests} == {("x", "a.txt"), ("x", "y")}


def test_a_profile_has_endpoint_region_and_credentials_of_reads_and_uploads(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blob: Path
) -> None:
    place = f"endpoint_url = {server.url}\nregion = eu-north-1\n"
    keys = f"aws_access_key_id = {s3_server.ACCESS_KEY}\naws_secret_access_key = {s3_server.SECRET_KEY}\n"
    (tmp_path / "config").write_text(f"[profile work]\n{place}{keys}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "work")
    server.put("models", "x/a.txt", b"hello")
    assert find_store("s3://models/x").read("a.txt", 100) == b"hello"
    upload("s3", blob)
    signed = {one.headers["authorization"].partition("/s3/")[0].partition("/")[::2] for one in server.requests}
    assert {key for key, _ in signed} == {f"AWS4-HMAC-SHA256 Credential={s3_server.ACCESS_KEY}"}
    assert {scope.partition("/")[2] for _, scope in signed} == {"eu-north-1"}


def test_without_signatures_what_anybody_may_read_and_write_is_asked_for(
    server: Server, monkeypatch: pytest.MonkeyPatch, blob: Path
) -> None:
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    server.put("models", "x/a.txt", b"hello")
    assert find_store("s3://models/x").read("a.txt", 100) == b"hello"
    upload("s3", blob)
    assert len(server.requests) == 5
    assert not [one for one in server.requests if "authorization" in one.headers]


def test_a_signature_of_azure_is_enough_to_upload(server: Server, monkeypatch: pytest.MonkeyPatch, blob: Path) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "?sv=2022-11-02&sig=a%2Bsignature")
    server.interfere = with_azure(lambda request: None)
    upload("az", blob)
    assert server.requests[-1].query["sig"] == "a+signature"


# Redirects.

CALLS: dict[str, Callable[[str], object]] = {
    "read": lambda url: find_store(url).read("a.txt", 100),
    "open": lambda url: find_store(url).open("a.txt"),
    "head": lambda url: find_store(url).stat("a.txt"),
    "list": lambda url: list(find_store(url).walk()),
    "put": lambda url: publisher_of(find_store(url)).add("a.txt", b"weights"),
    "delete": lambda url: BucketClient.of(url.rpartition("/")[0]).delete(["x/a.txt"]),
    "upload": lambda url: upload(url.partition(":")[0], Path(__file__)),
    "multipart": lambda url: _multipart(url.partition(":")[0]),
}


def _multipart(provider: str) -> None:
    with NamedTemporaryFile() as file:
        file.write(BLOB)
        file.flush()
        upload(provider, Path(file.name))


OF_READERS = ("read", "open", "head", "list")


@pytest.fixture
def redirected(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Another host, to which all clients of stores are sent: with `redirected.status`, which a test sets."""
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(connect, "UPLOAD_SECONDS", 1.0)
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRET)
    hub_server.point_to(server.url, monkeypatch, tmp_path)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    with s3_server.running() as other:
        port = other.server_address[1]
        server.interfere = lambda request: Answer(
            other.status, headers={"Location": f"http://localhost:{port}/{request.bucket}/{request.key}"}
        )
        yield other


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    ("scheme", "call"),
    [
        *((scheme, call) for scheme in PROVIDERS for call in CALLS),
        *((scheme, call) for scheme in ("http", "hf") for call in OF_READERS),
    ],
)
def test_no_store_is_followed_to_another_host(
    server: Server, redirected: Server, scheme: str, call: str, status: int
) -> None:
    """The hub's own storage: tests/loader/test_hub.py."""
    redirected.status = status
    url = f"{server.url}/models/x" if scheme == "http" else f"{scheme}://models/x"
    with pytest.raises(
        (RequestError, FormatError, PlanError),
        match=r"redirect|another region|refuses|not valid JSON|the request failed",
    ):
        CALLS[call](url)
    assert server.requests
    assert not redirected.requests


def test_networks_that_need_no_proxy_are_fenced_too(
    server: Server, redirected: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    redirected.status = 307
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", " 127.0.0.0/8,localhost")
    with pytest.raises(RequestError, match="the store redirects requests, which are not followed to other hosts"):
        CALLS["read"]("s3://models/x")
    assert not redirected.requests


def test_services_of_credentials_are_reached_beside_a_named_endpoint(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("a-token")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    port = server.server_address[1]
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://localhost:{port}/keys/of-a-role")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setattr(connect, "_has_profiles", lambda: False)
    server.put("models", "x/a.txt", b"hello")
    server.put("keys", "of-a-role", json.dumps({
        "AccessKeyId": s3_server.ACCESS_KEY, "SecretAccessKey": s3_server.SECRET_KEY, "Token": "t",
        "Expiration": "2099-01-01T00:00:00Z",
    }).encode())  # fmt: skip
    assert find_store("s3://models/x").read("a.txt", 100) == b"hello"
    assert [one.headers["host"] for one in server.requests] == [f"localhost:{port}", f"127.0.0.1:{port}"]


def test_an_answer_of_azure_that_is_no_text_is_an_error_of_the_request(
    server: Server, blob: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(connect, "UPLOAD_SECONDS", 1.0)
    server.interfere = lambda request: Answer(200, b"\xa2\xff" * 99)
    with pytest.raises(RequestError, match="models/x"):
        upload("az", blob)
