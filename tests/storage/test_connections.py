"""How stores are reached is the same for reads, by obstore, and for uploads, by each provider's own client."""

from __future__ import annotations

import errno
import json
import os
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import hub_server, s3_server
from support.lying_server import Interference, dropped, is_part, refused, stalled
from support.s3_server import Answer, Request, Server, error

from relayout.errors import FormatError, PlanError
from relayout.storage.cloud import connect, failures
from relayout.storage.cloud.bucket import BucketClient
from relayout.storage.cloud.client import NotCompleted, Uploads
from relayout.storage.cloud.providers import PartBody
from relayout.storage.protocols import RequestError
from relayout.storage.stores import find_store

pytest.importorskip("obstore", reason="the client of object stores")
for client in ("boto3", "google.resumable_media", "azure.storage.blob"):
    pytest.importorskip(client, reason="sends parts of uploads")

PROVIDERS = ["s3", "gs", "az"]
PART = bytes(range(256)) * 5000
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


def uploads(provider: str) -> Uploads:
    return BucketClient.of(f"{provider}://models").uploads()


def with_azure(interfere: Interference) -> Interference:
    """The server knows nothing of Azure's blocks."""
    return lambda request: (
        interfere(request) or (Answer(201) if request.query.get("comp") in ("block", "blocklist") else None)
    )


def sends(request: Request) -> bool:
    return is_part(request) or request.query.get("comp") == "block"


def send(provider: str) -> str:
    """Send one part, of an upload that is begun now."""
    found = uploads(provider)
    return found.send("x/y", found.begin("x/y"), 0, memoryview(PART))


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
def test_a_part_that_fails_is_sent_again_whole(server: Server, slept: list[float], provider: str, fault: str) -> None:
    server.interfere = with_azure(FAULTS[fault]())
    send(provider)
    assert len(slept) == 3
    assert [one.body for one in server.requests if sends(one)][-1] == PART


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_outage_of_a_minute_is_survived_and_an_endless_one_ends_after_90_seconds(
    server: Server, slept: list[float], provider: str
) -> None:
    server.interfere = with_azure(
        lambda request: error(503, "SlowDown") if sends(request) and sum(slept) < 60 else None
    )
    send(provider)
    assert 60 <= sum(slept) < 80
    slept.clear()
    server.interfere = with_azure(refused(sends, 503, "SlowDown", times=10**9))
    with pytest.raises(RequestError, match=r"repeatedly throttled requests.*503.*models/x/y"):
        send(provider)
    assert 80 < sum(slept) < 90.001


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_server_that_says_when_is_not_asked_before(server: Server, slept: list[float], provider: str) -> None:
    waiting = iter([Answer(503, headers={"Retry-After": "11"})])
    server.interfere = with_azure(lambda request: next(waiting, None) if sends(request) else None)
    send(provider)
    assert slept == [11]


@pytest.mark.parametrize(
    ("provider", "status", "code", "outcome"),
    [
        ("s3", 412, "PreconditionFailed", NotCompleted.EXISTS),
        ("s3", 404, "NoSuchUpload", NotCompleted.GONE),
        ("gs", 412, "PreconditionFailed", NotCompleted.EXISTS),
        ("gs", 404, "NoSuchUpload", NotCompleted.GONE),
        ("az", 409, "BlobAlreadyExists", NotCompleted.EXISTS),
        ("az", 412, "ConditionNotMet", NotCompleted.EXISTS),
        ("az", 400, "InvalidBlockList", NotCompleted.GONE),
    ],
)
def test_what_becomes_of_a_completion(
    server: Server, slept: list[float], provider: str, status: int, code: str, outcome: NotCompleted
) -> None:
    refusal = Answer(status, error(status, code).body, {"Content-Type": "application/xml", "x-ms-error-code": code})
    server.interfere = with_azure(lambda request: refusal if completes(request) else None)
    found = uploads(provider)
    assert found.complete("x/y", "an-id", ["a-tag"]) is outcome
    server.interfere = with_azure(lambda request: error(403, "AccessDenied") if completes(request) else None)
    with pytest.raises(RequestError, match=r"access denied.*403"):
        found.complete("x/y", "an-id", ["a-tag"])
    assert slept == []


def test_a_completion_that_always_conflicts_is_an_error_that_says_so(server: Server, slept: list[float]) -> None:
    server.interfere = refused(completes, 409, "ConditionalRequestConflict", times=10**9)
    with pytest.raises(RequestError, match=r"conflicting requests for this object: retry later.*models/x/y"):
        uploads("s3").complete("x/y", "an-id", ["a-tag"])
    assert 80 < sum(slept) < 90.001


EMPTY, NO_XML = b"<InitiateMultipartUploadResult/>", b"no XML"


@pytest.mark.parametrize(("provider", "body"), [("s3", b""), ("s3", EMPTY), ("gs", b""), ("gs", EMPTY), ("gs", NO_XML)])
def test_an_answer_that_cannot_be_read_is_an_error_at_once(
    server: Server, slept: list[float], provider: str, body: bytes
) -> None:
    server.interfere = lambda request: Answer(200, body)
    found = uploads(provider)
    with pytest.raises(RequestError, match=r"the server's answer cannot be read.*models/x/y"):
        found.begin("x/y")
    with pytest.raises(RequestError, match="the server's answer cannot be read"):  # It has no ETag.
        found.send("x/y", "an-id", 0, memoryview(PART))
    assert slept == []


def test_a_process_that_was_forked_does_not_use_connections_of_its_parent(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = uploads("s3")
    found.begin("x/y")
    monkeypatch.setattr(failures, "_used_by", os.getpid() + 1)
    with pytest.raises(RequestError, match="was forked after its parent had used a store"):
        found.begin("x/y")
    assert len(server.requests) == 1


def test_a_part_that_a_client_reads_twice_is_whole_both_times() -> None:
    view = memoryview(bytes(5 * 2**20 // 2))
    body = PartBody(view)
    assert b"".join(body) == b"".join(body) == view
    body.read(7)
    body.seek(0)
    assert b"".join(body) == view
    assert len(body) == view.nbytes


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
    secure: tuple[Server, Path], monkeypatch: pytest.MonkeyPatch, provider: str, name: str
) -> None:
    monkeypatch.setenv(name, str(secure[1]))
    secure[0].interfere = with_azure(lambda request: None)
    assert find_store(f"{provider}://models/x").read("a.txt", 100) == b"hello"
    send(provider)
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
        send(provider)
    assert slept == []


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_proxy_and_its_exceptions_hold_for_reads_and_uploads(
    server: Server, slept: list[float], monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    reach(monkeypatch, "http://127.0.0.1:9")
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.0)
    monkeypatch.setenv("HTTP_PROXY", server.url.replace("//", f"//me:{SECRET}@"))
    server.put("models", "x/a.txt", b"hello")
    server.interfere = with_azure(lambda request: None)
    assert find_store(f"{provider}://models/x").read("a.txt", 100) == b"hello"
    send(provider)
    before = len(server.requests)
    monkeypatch.setenv("NO_PROXY", "elsewhere.invalid,127.0.0.1")
    with pytest.raises(RequestError, match="models/x"):
        find_store(f"{provider}://models/x").read("a.txt", 100)
    with pytest.raises(RequestError, match="the server cannot be reached"):
        send(provider)
    assert len(server.requests) == before


def test_a_proxy_and_its_exceptions_hold_for_web_servers(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.checks_keys = False
    server.put("models", "x/a.txt", b"hello")
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.0)
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
        with pytest.raises(RequestError, match="the proxy is unreachable or refuses the request") as caught:
            send("s3")
        assert SECRET not in f"{caught.value!r} {caught.value.__cause__!r} {caught.value.__context__!r}"


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_stall_of_an_upload_ends_and_the_part_is_sent_again(
    server: Server, slept: list[float], monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    monkeypatch.setattr(connect, "STALL_SECONDS", 0.2)
    server.interfere = with_azure(stalled(sends, 0.6))
    send(provider)
    assert slept  # Once, unless this machine is busy.


def test_a_file_of_certificates_that_cannot_be_read_is_refused(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nowhere.pem")
    with pytest.raises(PlanError, match=r"AWS_CA_BUNDLE=/nowhere\.pem: the file cannot be read"):
        find_store("s3://models/x")


@pytest.mark.parametrize(
    ("provider", "package", "extra"),
    [
        ("s3", "obstore", "s3"),
        ("s3", "boto3", "s3"),
        ("gs", "google.auth", "gcs"),
        ("az", "azure.storage.blob", "azure"),
    ],
)
def test_a_client_that_is_missing_is_named_with_its_extra(
    server: Server, monkeypatch: pytest.MonkeyPatch, provider: str, package: str, extra: str
) -> None:
    known = connect.find_spec
    monkeypatch.setattr(connect, "find_spec", lambda name: None if name == package else known(name))
    says = rf"needs the package {package}, which is not installed: pip install '\.\[{extra}\]'"
    with pytest.raises(PlanError, match=says):
        uploads(provider)


def test_buckets_in_host_names_are_so_for_reads_and_uploads(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    reach(monkeypatch, "http://models.store.invalid")
    monkeypatch.setenv("AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "true")
    monkeypatch.setenv("HTTP_PROXY", server.url)
    server.put("x", "a.txt", b"hello")  # The proxy sees no bucket in the path.
    assert find_store("s3://models/x").read("a.txt", 100) == b"hello"
    send("s3")
    assert {one.headers["host"] for one in server.requests} == {"models.store.invalid"}
    assert {(one.bucket, one.key) for one in server.requests} == {("x", "a.txt"), ("x", "y")}


def test_a_profile_has_endpoint_region_and_credentials_of_reads_and_uploads(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    send("s3")
    signed = {one.headers["authorization"].partition("/s3/")[0].partition("/")[::2] for one in server.requests}
    assert {key for key, _ in signed} == {f"AWS4-HMAC-SHA256 Credential={s3_server.ACCESS_KEY}"}
    assert {scope.partition("/")[2] for _, scope in signed} == {"eu-north-1"}


def test_without_signatures_what_anybody_may_read_and_write_is_asked_for(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    server.put("models", "x/a.txt", b"hello")
    assert find_store("s3://models/x").read("a.txt", 100) == b"hello"
    send("s3")
    assert len(server.requests) == 3
    assert not [one for one in server.requests if "authorization" in one.headers]


def test_a_signature_of_azure_is_enough_to_upload(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "?sv=2022-11-02&sig=a%2Bsignature")
    server.interfere = with_azure(lambda request: None)
    send("az")
    assert server.requests[-1].query["sig"] == "a+signature"


# Redirects.

CALLS: dict[str, Callable[[str], object]] = {
    "read": lambda url: find_store(url).read("a.txt", 100),
    "open": lambda url: find_store(url).open("a.txt"),
    "head": lambda url: find_store(url).stat("a.txt"),
    "list": lambda url: list(find_store(url).walk()),
    "put": lambda url: find_store(url).add("a.txt", b"weights"),
    "delete": lambda url: BucketClient.of(url.rpartition("/")[0]).delete(["x/a.txt"]),
    "upload": lambda url: uploads(url.partition(":")[0]).send("x/y", "an-upload", 0, memoryview(PART)),
    "begin": lambda url: uploads(url.partition(":")[0]).begin("x/y"),
    "complete": lambda url: uploads(url.partition(":")[0]).complete("x/y", "an-upload", ["tag"]),
    "abort": lambda url: uploads(url.partition(":")[0]).abort("x/y", "an-upload"),
}
OF_READERS = ("read", "open", "head", "list")


@pytest.fixture
def redirected(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Another host, to which all clients of stores are sent: with `redirected.status`, which a test sets."""
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.0)
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
        *(
            (scheme, call)
            for scheme in PROVIDERS
            for call in CALLS
            if (scheme, call[0]) not in (("az", "b"), ("az", "a"))
        ),
        *((scheme, call) for scheme in ("http", "hf") for call in OF_READERS),
    ],
)
def test_no_store_is_followed_to_another_host(
    server: Server, redirected: Server, scheme: str, call: str, status: int
) -> None:
    """Azure begins and aborts uploads without a request; boto3 does not understand 303, which makes no request for it.

    The hub's own storage: tests/loader/test_hub.py.
    """
    redirected.status = status
    url = f"{server.url}/models/x" if scheme == "http" else f"{scheme}://models/x"
    with pytest.raises(
        (RequestError, FormatError, PlanError),
        match=r"redirect|another region|refuses|not valid JSON|failed repeatedly",
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
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.0)
    server.interfere = lambda request: Answer(200, b"\xa2\xff" * 99)
    with pytest.raises(RequestError, match="the server's answer cannot be read"):
        uploads("az").complete("x/y", "an-upload", ["tag"])
