"""What failures of requests mean: by the texts of the real client, from servers that fail so."""

from __future__ import annotations

import errno
import re
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import s3_server
from support.patience import in_time

import relayout
from relayout.core.workers import Workers
from relayout.storage.cloud import connect, failures
from relayout.storage.cloud.failures import RetryPolicy, request_error
from relayout.storage.stores import RequestError, find_store
from relayout.storage.web.http import _failure

pytest.importorskip("obstore", reason="the client of object stores")

ROOT = Path(relayout.__file__).parent.parent


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.SECRET_KEY)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setattr(connect, "RETRY_SECONDS", 0.0)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)


def said(url: str) -> RequestError:
    with pytest.raises(RequestError) as caught:
        find_store(f"{url}/out").read("x", 100)
    return caught.value


@pytest.mark.parametrize("is_web", [False, True], ids=["s3", "web"])
@pytest.mark.parametrize(
    ("how", "number", "says"),
    [
        ("refused", errno.ECONNREFUSED, "it refuses connections"),
        ("reset", errno.ECONNRESET, "the connection broke"),
        ("silent", errno.ETIMEDOUT, "requests timed out"),
        ("unknown", errno.EHOSTUNREACH, "the server's name is unknown"),
    ],
)
def test_why_no_answer_came_is_told(
    monkeypatch: pytest.MonkeyPatch, is_web: bool, how: str, number: int, says: str
) -> None:
    monkeypatch.setattr(connect, "STALL_SECONDS", 0.3)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if how != "refused":
            listening.listen()
        over = threading.Event()
        if how == "reset":
            threading.Thread(target=_reset, args=(listening, over), daemon=True).start()
        host = "no-such-host.invalid" if how == "unknown" else "127.0.0.1"
        endpoint = f"http://{host}:{listening.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        error = said(f"{endpoint}/models" if is_web else "s3://models")
        over.set()
    # Without any resolver, its failure may be taken for temporary.
    is_temporary = how == "unknown" and error.errno == errno.ENETDOWN
    assert error.errno == number or is_temporary, error
    assert says in str(error) or (is_temporary and "the server's name cannot be looked up" in str(error))
    assert endpoint.partition("//")[2] not in str(error) or is_web


def _reset(listening: socket.socket, over: threading.Event) -> None:
    while not over.is_set():
        try:
            one, _ = listening.accept()
        except OSError:
            return
        one.recv(1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        one.close()


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (403, "RequestTimeTooSkewed", "this machine's clock is off"),
        (403, "RequestExpired", "this machine's clock is off"),
        (403, "InvalidAccessKeyId", "access denied"),
    ],
)
def test_a_wrong_clock_is_no_matter_of_credentials(status: int, code: str, says: str) -> None:
    with s3_server.running() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", server.url)
        server.interfere = lambda request: s3_server.error(status, code)
        assert says in str(said("s3://models"))


def test_without_an_endpoint_of_http_credentials_go_by_https_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    assert "allow_http" not in connect._client_options("s3", None)
    assert "allow_http" not in connect._client_options("s3", "https://minio")
    assert connect._client_options("s3", "http://minio")["allow_http"] is True


PORTABLE = """
    E2BIG EACCES EADDRINUSE EADDRNOTAVAIL EAGAIN EBADF EBUSY ECANCELED ECHILD ECONNABORTED ECONNREFUSED ECONNRESET
    EDQUOT EEXIST EFAULT EFBIG EHOSTUNREACH EINTR EINVAL EIO EISDIR ELOOP EMFILE EMLINK ENAMETOOLONG ENETDOWN
    ENETUNREACH ENFILE ENODEV ENOENT ENOLCK ENOMEM ENOSPC ENOSYS ENOTCONN ENOTDIR ENOTEMPTY ENOTSUP ENXIO EOPNOTSUPP
    EPERM EPIPE EPROTO ERANGE EROFS ESPIPE ESRCH ESTALE ETIMEDOUT ETXTBSY EXDEV
"""
"""What the errno of macOS has, too (sys/errno.h of XNU), as far as it was ever of use here."""


def test_only_numbers_of_errors_that_macos_has_are_used() -> None:
    files = [*ROOT.glob("relayout/**/*.py"), *ROOT.glob("loader/**/*.py")]
    used = {(file.name, name) for file in files for name in re.findall(r"\berrno\.(E\w+)", file.read_text())}
    assert len(used) > 20
    assert not sorted((file, name) for file, name in used if name not in PORTABLE.split())


def failing() -> RequestError:
    return request_error("status code: 503", "s3://models/x")


def test_waiting_grows_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited = [0.0], []

    def pause(seconds: float) -> None:
        waited.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(connect, "RETRY_SECONDS", 90.0)
    monkeypatch.setattr(failures, "pause", pause)
    monkeypatch.setattr(failures.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(failures, "_warned", float("-inf"))
    patience = RetryPolicy()

    def wait_on() -> None:
        while True:
            patience.wait(failing())

    with pytest.warns(UserWarning, match=r"s3://models/x: .*; retrying for"), pytest.raises(RequestError):
        wait_on()
    assert sum(waited) == pytest.approx(90)
    limits = [0.5, 1, 2, 4, 8, *[15] * 20]
    assert all(limit / 2 <= seconds <= limit for seconds, limit in zip(waited[:-1], limits, strict=False))
    assert len(waited) >= 9


@pytest.mark.parametrize("text", ["status code: 403", "status code: 404", "certificate"])
def test_what_another_request_would_not_change_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(connect, "RETRY_SECONDS", 90.0)
    with pytest.raises(RequestError):
        RetryPolicy().wait(request_error(text, "s3://models/x"))


def test_when_another_worker_fails_nobody_waits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "RETRY_SECONDS", 3600.0)
    monkeypatch.setattr(failures, "FIRST_DELAY_SECONDS", 1800.0)
    waits = threading.Event()

    def work(_: None, item: int) -> int:
        if item == 0:
            waits.set()
            RetryPolicy().wait(failing())
        waits.wait()
        raise KeyError(item)

    start = time.monotonic()
    with pytest.raises(KeyError):
        in_time(lambda: Workers(2, range(2), lambda: None, work).run())
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("host", ["models.tunnel.example", "certificates.example", "x.example"])
def test_words_in_the_name_of_a_web_server_do_not_decide_what_an_error_means(host: str) -> None:
    urllib3 = pytest.importorskip("urllib3", reason="the client of web servers")
    pool, refused = urllib3.HTTPSConnectionPool(host), "Failed to establish a new connection: [Errno 111]"
    for error, number in (
        (urllib3.exceptions.ReadTimeoutError(pool, "/x", "Read timed out."), errno.ETIMEDOUT),
        (urllib3.exceptions.NewConnectionError(urllib3.connection.HTTPSConnection(host), refused), errno.ENETUNREACH),
        (urllib3.exceptions.SSLError("certificate verify failed"), errno.EPROTO),
    ):
        assert _failure(error, "https://HOST/x").errno == number


REFUSED = "ConnectionRefused"
NO_NAME = "ConnectError  [Errno -2] Name or service not known gaierror"
NO_LOOKUP = "failed to lookup address information: Temporary failure in name resolution"


@pytest.mark.parametrize(
    ("answered", "text", "seconds", "named"),
    [
        (False, REFUSED, 4, "https://h/model"),
        (True, REFUSED, 90, "https://h/model/config.json"),
        (False, "status code: 503", 90, "https://h/model/config.json"),
        (False, NO_NAME, 0, "https://h/model"),
        (True, NO_NAME, 90, "https://h/model/config.json"),
        (False, NO_LOOKUP, 4, "https://h/model"),
        (True, NO_LOOKUP, 90, "https://h/model/config.json"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*retrying")
def test_only_a_server_that_has_never_answered_is_given_up_soon_and_the_checkpoint_named(
    monkeypatch: pytest.MonkeyPatch, answered: bool, text: str, seconds: float, named: str
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(connect, "RETRY_SECONDS", 90.0)
    monkeypatch.setattr(failures, "pause", waited.append)
    monkeypatch.setattr(failures, "time", SimpleNamespace(monotonic=lambda: sum(waited)))
    monkeypatch.setattr(failures, "_answered", {"https://h"} if answered else set())

    def fail() -> None:
        raise request_error(text, "https://h/model/config.json")

    with pytest.raises(RequestError) as caught:
        failures.persistent(fail, "https://h/model/config.json")
    assert (sum(waited), caught.value.filename) == (pytest.approx(seconds), named)
    assert failures.persistent(lambda: 7, "https://h/model/config.json") == 7
    assert "https://h" in failures._answered
