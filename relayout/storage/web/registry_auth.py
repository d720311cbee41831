"""Credentials of registries, as stored by `docker login`, and the tokens that registries require.

A registry that requires credentials answers a first request with 401 and a challenge (`WWW-Authenticate`). `Basic`
requires user and password with each request. `Bearer` names a token server, the realm, which exchanges them for a token
that is valid for some minutes (distribution/distribution, docs/spec/auth/token.md; docs/spec/auth/oauth.md for identity
tokens).

A registry chooses its realm, so this module decides which servers receive credentials: servers on the registry's own
host or domain, over TLS if the registry has TLS, and servers with credentials that the user has stored. A redirect of a
token server to another host is not followed.
"""

from __future__ import annotations

import base64
import binascii
import errno
import os
import re
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from relayout.errors import FormatError, PlanError, escape_controls
from relayout.format.fields import Fields, parse_object
from relayout.storage.cloud.failures import persistent, request_error
from relayout.storage.cloud.store import timed
from relayout.storage.stores import RequestError
from relayout.storage.web import http

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

HUB = "docker.io"
"""Name of Docker Hub in references."""
_HUB_HOST = "registry-1.docker.io"
_HUB_KEY = "https://index.docker.io/v1/"
"""Key of Docker Hub's credentials in the file of `docker login` (docker/cli, cli/config/configfile)."""
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
_HELPER_SECONDS = 30.0
"""Maximum duration of a credential helper in seconds."""
_TOKEN_USER = "<token>"
"""User name in a credential helper's answer with an identity token (docker/docker-credential-helpers)."""
_TOKEN = re.compile(r"[\x21-\x7e]+", re.ASCII)
_PARAMETER = re.compile(r'([A-Za-z]+)="([^"\\]{0,2000})"', re.ASCII)
_MAX_CONFIG_NBYTES = 4 * 2**20
_MAX_ANSWER_NBYTES = 2**18


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user's stored credentials for a registry."""

    user: str
    password: str = field(repr=False)
    identity_token: str = field(default="", repr=False)
    """Sent instead of the password to a token server that accepts it."""

    @property
    def basic(self) -> str:
        """The header `Authorization` with user and password."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def api_host(registry: str) -> str:
    """Return the host that serves a registry's API."""
    return _HUB_HOST if registry == HUB else registry


def find_credentials(registry: str) -> Credentials | None:
    """Return the credentials of a registry in Docker's configuration, or None.

    The configuration is `config.json` in `DOCKER_CONFIG`, or else in `~/.docker`. It may name programs that keep
    credentials (`credHelpers`, `credsStore`). This function runs them.

    Raises:
        PlanError: the configuration cannot be read, or a credential helper fails.
    """
    path = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_CONFIG_NBYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise PlanError(f"cannot be read: {error.strerror}", path=path, code="config") from None
    if len(content) > _MAX_CONFIG_NBYTES:
        raise PlanError(f"more than {_MAX_CONFIG_NBYTES} bytes", path=path, code="limit")
    try:
        return _credentials_in(Fields(parse_object(content, str(path)), str(path)), registry)
    except FormatError as error:
        raise PlanError(f"not a configuration of Docker: {error.what}", path=path, code="config") from None


def _credentials_in(top: Fields, registry: str) -> Credentials | None:
    keys = (_HUB_KEY, HUB, _HUB_HOST) if registry == HUB else (registry,)
    helpers = _object(top, "credHelpers")
    helper = next((helpers[key] for key in keys if key in helpers), None) or top.top.get("credsStore")
    if helper:
        return next((found for key in keys if (found := _run_helper(helper, key)) is not None), None)
    for key, entry in _object(top, "auths").items():
        if (key in keys or _host_of(key) in keys) and isinstance(entry, dict) and entry:
            return _stored(entry)
    return None


def _object(top: Fields, name: str) -> Mapping[str, Any]:
    return top.object(name) if top.top.get(name) is not None else {}


def _host_of(key: str) -> str:
    """Return the host of an entry. Older versions of Docker write a URL."""
    return re.sub(r"^https?://", "", key).partition("/")[0]


def _stored(entry: Mapping[str, Any]) -> Credentials:
    fields = Fields({"auth": "", "username": "", "password": "", "identitytoken": "", **entry})
    user, password = fields.text("username"), fields.text("password")
    if fields.text("auth"):
        try:
            user, _, password = base64.b64decode(fields.text("auth"), validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            raise FormatError("an entry 'auth' is not base64", code="field") from None
    return Credentials(user, password.rstrip("\0"), fields.text("identitytoken"))


def _run_helper(helper: object, key: str) -> Credentials | None:
    """Return the credentials of a Docker credential helper, or None. Its output is never shown."""
    if not isinstance(helper, str) or not _HELPER.fullmatch(helper):
        raise FormatError("a credential helper is not the name of a program", code="field")
    program = f"docker-credential-{helper}"
    try:
        done = subprocess.run([program, "get"], input=key.encode(), capture_output=True, timeout=_HELPER_SECONDS)
    except FileNotFoundError:
        raise PlanError("no such program, which Docker's configuration names", path=program, code="missing") from None
    except (OSError, subprocess.TimeoutExpired):
        raise PlanError("the credential helper does not answer", path=program, code="config") from None
    if done.returncode:
        if b"credentials not found" in done.stdout + done.stderr:
            return None
        raise PlanError(f"the credential helper fails with status {done.returncode}", path=program, code="config")
    found = Fields(parse_object(done.stdout, program), program)
    user, secret = found.text("Username"), found.text("Secret")
    return Credentials("", "", secret) if user == _TOKEN_USER else Credentials(user, secret)


class Login:
    """The credentials of one client at one repository of a registry. Thread-safe. Never shows a secret."""

    def __init__(self, registry: str, repository: str, scheme: str) -> None:
        """Read and request nothing until a registry requires credentials; `scheme` is that of the registry's URLs."""
        self._registry = registry
        self._repository = repository
        self._scheme = scheme
        self._headers: dict[bool, str] = {}
        """Values of `Authorization`, for requests that read (False) and that write (True)."""
        self._lock = threading.Lock()

    def header(self, *, is_write: bool) -> Mapping[str, str]:
        """Return the current header for requests; empty before the registry has required one."""
        known = self._headers.get(is_write)
        return {"authorization": known} if known else {}

    def renew(self, answer: BaseHTTPResponse, used: Mapping[str, str], *, is_write: bool) -> bool:
        """Obtain the credentials for a registry that answered 401. Threads that are refused together request them once.

        Args:
            used: the header of the refused request.

        Returns:
            True if the request is worth repeating.

        Raises:
            RequestError: the token server refuses, or must not receive credentials.
            PlanError: Docker's configuration is wrong.
        """
        challenge = answer.headers.get("www-authenticate", "")[:8192]
        with self._lock:
            if dict(used) != dict(self.header(is_write=is_write)):
                return True
            kind, _, rest = challenge.partition(" ")
            credentials = find_credentials(self._registry)
            if kind.lower() == "bearer":
                made = "Bearer " + self._token(dict(_PARAMETER.findall(rest)), credentials, is_write=is_write)
            elif kind.lower() == "basic" and credentials is not None and credentials.user:
                made = credentials.basic
            else:
                return False
            is_new = self._headers.get(is_write) != made
            self._headers[is_write] = made
            return is_new

    def _token(self, asked: Mapping[str, str], credentials: Credentials | None, *, is_write: bool) -> str:
        """Return a token of the server that a challenge names."""
        where = f"oci://{self._registry}"
        realm, credentials = self._checked(asked.get("realm", ""), credentials, where)
        actions = "pull,push" if is_write else "pull"
        scope = asked.get("scope") or f"repository:{self._repository}:{actions}"
        query = {"service": asked.get("service", ""), "scope": scope}
        headers: dict[str, str] = {}
        body: bytes | None = None
        if credentials is not None and credentials.identity_token:
            form = {"grant_type": "refresh_token", "refresh_token": credentials.identity_token, "client_id": "relayout"}
            body = urlencode(query | form).encode()
            headers["content-type"] = "application/x-www-form-urlencoded"
        else:
            realm += ("&" if "?" in realm else "?") + urlencode({key: text for key, text in query.items() if text})
            if credentials is not None and credentials.user:
                headers["authorization"] = credentials.basic

        def ask() -> bytes:
            return whole(http.send("POST" if body else "GET", realm, where, headers, body), where, _MAX_ANSWER_NBYTES)

        try:
            top = parse_object(persistent(ask, where), f"{where}: the token server's answer")
        except RequestError as error:
            if error.status in (400, 401, 403):
                raise refused(where, self._registry, error.status) from None
            raise
        token = top.get("token") or top.get("access_token")
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise RequestError(errno.EPROTO, "the token server's answer has no token", where)
        return token

    def _checked(self, realm: str, credentials: Credentials | None, where: str) -> tuple[str, Credentials | None]:
        """Return the realm and the credentials to send there; raise RequestError if the realm is not permitted.

        A realm is permitted on the registry's host or domain, over TLS if the registry has TLS. On another host it is
        permitted if the user has stored credentials for that host, which are then sent instead.
        """
        try:
            parts = urlsplit(realm)
            host, place = parts.hostname or "", parts.netloc
        except ValueError:
            host = place = ""
        own = urlsplit(f"//{api_host(self._registry)}").hostname or ""
        if not host or "@" in place or parts.scheme not in ("https", self._scheme) or parts.fragment:
            what = "the registry names a token server by a URL that is not https, or has a user"
            raise RequestError(errno.EPROTO, what, where)
        if not is_near(host, own):
            credentials = find_credentials(place)
            if credentials is None:
                named = escape_controls(place[:100])
                what = f"the registry sends to the token server {named}: `docker login {named}` if you trust it"
                raise RequestError(errno.EPROTO, what, where)
        return realm, credentials


def is_near(host: str, own: str) -> bool:
    """Return True if a host is the registry's own, or in its domain: the registry's name without its first part."""
    if host == own:
        return True
    domain = own.partition(".")[2]
    try:
        ip_address(own)
    except ValueError:
        return "." in domain and (host == domain or host.endswith(f".{domain}"))
    return False


def refused(where: str, registry: str, status: int | None) -> RequestError:
    """Return the error for a request that a registry, or its token server, does not permit."""
    what = (
        f"the registry denies access: `docker login {registry}` as a user who may do this; a registry may also answer"
        f" so if the repository does not exist (HTTP {status})"
    )
    return RequestError(errno.EACCES, what, where, status)


def whole(answer: BaseHTTPResponse, where: str, limit: int) -> bytes:
    """Return the body of an answer of status 200. FormatError: it has more than `limit` bytes."""
    if answer.status != 200:
        answer.close()
        raise request_error("", where, status=answer.status, retry_after=answer.headers.get("retry-after"))
    content = bytearray()
    for piece in timed(http.pieces_of(answer, where), where):
        content += piece
        if len(content) > limit:
            answer.close()
            raise FormatError(f"more than {limit} bytes", path=where, code="limit")
    return bytes(content)
