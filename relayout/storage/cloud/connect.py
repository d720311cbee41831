"""Connections: how stores are reached, which is the same for reads (obstore) and for uploads (the providers' clients).

Each provider's variables are those of its own tools; for S3, `~/.aws` counts if boto3 is installed. STORES.md lists
them.
"""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

from relayout.errors import PlanError

if TYPE_CHECKING:
    from boto3.session import Session
    from obstore.store import ObjectStore

STALL_SECONDS = 20.0
"""A request that has brought no byte for so long is made again, from where it was."""
RETRY_SECONDS = 90.0
"""After so long without a byte, a failed request is not made again."""

_PREFIXES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
"""Of the variables of each provider, by the scheme of its URLs."""
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT",),
}
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?) ?(ms|s|m)?")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0}


def require(module: str, what: str, extra: str = "cloud") -> None:
    """Raise PlanError unless an optional package is installed, which `what` needs."""
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:  # Nor is the package that it is in.
        is_there = False
    if not is_there:
        raise PlanError(
            f"needs the package {module}, which is not installed: install it, or relayout with the extra {extra!r}",
            path=what,
            code="unsupported",
        )


def make_store(root: str) -> ObjectStore:
    """obstore's client for the URL of a bucket. PlanError: the environment is not as a provider expects it."""
    require("obstore", root)
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    scheme = urlsplit(root).scheme
    settings = s3_settings().for_obstore() if scheme == "s3" else {}
    options: Any = _client_options(scheme, settings.get("endpoint"))
    retries: Any = {"max_retries": 0}  # `failures.request` does it, for all kinds of stores alike.
    try:
        return from_url(root, client_options=options, retry_config=retries, **settings)
    except BaseError as error:
        raise PlanError(f"cannot be used: {_first_line(error)}", path=root, code="option") from None


def _first_line(error: BaseException) -> str:
    """What obstore says of settings, without URLs."""
    lines = str(error).splitlines() or [""]
    return re.sub(r"[a-z0-9+]+://\S+", "URL", lines[0])[:200]


@dataclass(frozen=True, slots=True, repr=False)
class Reach:
    """How servers are reached, whatever client does it. It may have a proxy's password, and is not shown."""

    connect_seconds: float
    stall_seconds: float
    proxy: str | None
    """URL; None: that of `HTTP_PROXY`, `HTTPS_PROXY` and `NO_PROXY`, if any."""
    proxy_excludes: str | None
    """Names of hosts that are reached without the proxy, with commas between them."""
    certificates: str | None
    """A file of certificates that is named for this provider; None: those of the system, or of SSL_CERT_FILE."""
    any_certificate: bool

    def proxies(self, url: str) -> dict[str, str] | None:
        """The proxies for a URL, by scheme; None: those that the environment says."""
        if self.proxy is None:
            return None
        host = urlsplit(url).netloc.rpartition("@")[2]
        if proxy_bypass_environment(host, {"no": self.proxy_excludes or ""}):
            return {}
        return {"http": self.proxy, "https": self.proxy}

    @property
    def verify(self) -> bool | str:
        """What botocore and requests want to know of certificates. They have their own, and do not ask the system's."""
        return not self.any_certificate and (self.certificates or ssl.get_default_verify_paths().cafile or True)


def reach_of(scheme: str) -> Reach:
    """What the environment says for URLs of this scheme.

    Raises:
        PlanError: a variable has no such value, or names a file that cannot be read.
    """
    prefix = _PREFIXES.get(scheme, "HTTP")

    def value(name: str) -> str | None:
        return os.environ.get(f"{prefix}_{name}") or None

    certificates = value("CA_BUNDLE")
    if certificates is not None and not os.access(certificates, os.R_OK):
        raise PlanError("the file cannot be read", path=f"{prefix}_CA_BUNDLE={certificates}", code="option")
    return Reach(
        connect_seconds=_seconds(f"{prefix}_CONNECT_TIMEOUT", 5.0),
        stall_seconds=_seconds(f"{prefix}_READ_TIMEOUT", STALL_SECONDS),
        proxy=value("PROXY_URL"),
        proxy_excludes=value("PROXY_EXCLUDES"),
        certificates=certificates,
        any_certificate=is_set(f"{prefix}_ALLOW_INVALID_CERTIFICATES"),
    )


def _seconds(name: str, default: float) -> float:
    value = os.environ.get(name)
    if not value:
        return default
    match = _DURATION.fullmatch(value)
    if match is None:
        raise PlanError("expected seconds, such as 20 or 20s", path=f"{name}={value}", code="option")
    return float(match[1]) * _UNITS[match[2] or "s"]


def is_set(name: str) -> bool:
    """Whether a variable says yes."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")


def endpoint_of(scheme: str) -> str | None:
    """The endpoint that the environment names."""
    return next((value for name in _ENDPOINTS.get(scheme, ()) if (value := os.environ.get(name))), None)


def _client_options(scheme: str, endpoint: str | None) -> dict[str, Any]:
    """For obstore. Options given in code replace all of those that it finds in the environment."""
    reach = reach_of(scheme)
    is_named = any((url or "").startswith("http:") for url in (endpoint, endpoint_of(scheme)))
    options: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=reach.connect_seconds),
        "read_timeout": timedelta(seconds=reach.stall_seconds),
        "timeout": timedelta(hours=24),  # An answer may take as long as it likes while bytes arrive.
        "allow_invalid_certificates": reach.any_certificate or None,
        "root_certificate": reach.certificates and Path(reach.certificates).read_bytes(),
        "proxy_url": reach.proxy,
        "proxy_excludes": reach.proxy_excludes,
        "allow_http": is_named or is_set(f"{_PREFIXES[scheme]}_ALLOW_HTTP") or None,
    }
    return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True, slots=True, repr=False)
class S3Settings:
    """Where S3 is, and whose credentials count."""

    endpoint: str | None
    region: str | None
    profile: Session | None
    """A session of boto3 with a profile's credentials; None: those of the environment, or of a role."""

    def for_obstore(self) -> dict[str, Any]:
        """Arguments for obstore, without what is not set."""
        # Unsigned: the transport proves the payload; hashing takes 1 to 2 s/GB.
        settings: dict[str, Any] = {"unsigned_payload": True, "endpoint": self.endpoint, "region": self.region}
        if self.profile is not None:
            from obstore.auth.boto3 import Boto3CredentialProvider

            settings["credential_provider"] = Boto3CredentialProvider(self.profile)
        return {name: value for name, value in settings.items() if value is not None}


def s3_settings() -> S3Settings:
    """What the environment, or a profile, says of S3.

    Raises:
        PlanError: AWS_PROFILE is set, and boto3 is missing or knows no such profile.
    """
    endpoint = endpoint_of("s3")
    region = next((value for name in _REGIONS if (value := os.environ.get(name))), None)
    profile = os.environ.get("AWS_PROFILE")
    if profile:
        require("boto3", f"AWS_PROFILE={profile}", "s3")
    elif {"AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"} & set(os.environ) or not _has_profiles():
        return S3Settings(endpoint, region, None)
    from botocore.exceptions import BotoCoreError

    try:
        session = boto_session()
        config = session._session.get_scoped_config()
        if session.get_credentials() is None:
            return S3Settings(endpoint, region, None)
    except BotoCoreError as error:
        raise PlanError(f"cannot be used: {error}", path=f"AWS_PROFILE={profile}", code="option") from None
    return S3Settings(endpoint or config.get("endpoint_url"), region or config.get("region"), session)


def boto_session() -> Session:
    """A session of boto3. All share the descriptions of services, which take 50 ms to parse."""
    import botocore.session
    from boto3.session import Session

    core = botocore.session.get_session()
    core.register_component("data_loader", _service_descriptions())
    return Session(botocore_session=core)


@cache
def _service_descriptions() -> Any:
    from botocore.loaders import create_loader

    return create_loader(os.environ.get("AWS_DATA_PATH"))


def _has_profiles() -> bool:
    """Whether there is something in `~/.aws`, and boto3 to read it."""
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    return any(Path(file).expanduser().is_file() for file in files) and find_spec("boto3") is not None
