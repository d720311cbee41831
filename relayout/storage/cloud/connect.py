"""Connections to stores by obstore: endpoints, credentials, proxies and timeouts.

Each provider has the same environment variables as its own tools. For S3, `~/.aws` is read if boto3 is installed.
STORES.md lists the variables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from relayout.errors import PlanError, how_to_install

if TYPE_CHECKING:
    from boto3.session import Session
    from obstore.store import ObjectStore

CONNECT_SECONDS = 5.0
"""Seconds without a connection after which a request is repeated."""
STALL_SECONDS = 20.0
"""Seconds without a byte after which a request is repeated, from the byte that it had reached."""
RETRY_SECONDS = 90.0
"""Seconds without a byte after which a failed request is given up."""
UPLOAD_SECONDS = 120.0
"""Seconds that one part of an upload may take. All parts in flight share the connection."""

_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_KEYS = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"),
    "gs": ("GOOGLE_BEARER_TOKEN", "GOOGLE_SKIP_SIGNATURE"),
    "az": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_SKIP_SIGNATURE"),
}
"""Variables with credentials. If one of a provider's variables is set, no credential service is called."""
_SERVICES = {
    "s3": ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_ENDPOINT_URL_STS", "AWS_METADATA_ENDPOINT"),
    "gs": ("GCE_METADATA_HOST", "GCE_METADATA_ROOT", "GCE_METADATA_IP"),
    "az": ("AZURE_AUTHORITY_HOST", "AZURE_STORAGE_AUTHORITY_HOST", "AZURE_IDENTITY_ENDPOINT", "IDENTITY_ENDPOINT"),
}
"""Variables that name credential services, by URL or host."""
_OWN_SERVICES = {
    "s3": ("http://169.254.169.254", "http://169.254.170.2", "https://sts.{region}.amazonaws.com"),
    "gs": (
        "http://169.254.169.254",
        "http://metadata.google.internal",
        "https://accounts.google.com",
        *(f"https://{name}.googleapis.com" for name in ("www", "oauth2", "sts", "iamcredentials")),
    ),
    "az": ("http://169.254.169.254", "https://login.microsoftonline.com"),
}
"""The providers' own credential services."""
_NOWHERE = "socks5://127.0.0.1:0"
"""A proxy that is unreachable: obstore does not support the scheme, and no server listens at port 0."""
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")


def require(module: str, what: str, extra: str) -> None:
    """Raise PlanError unless the package that `what` requires is installed; an extra of relayout installs it."""
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:  # Its parent package is missing, too.
        is_there = False
    if not is_there:
        raise PlanError(
            f"needs the package {module}, which is not installed: {how_to_install(extra)}",
            path=what,
            code="unsupported",
        )


def make_store(root: str, *, for_uploads: bool = False) -> ObjectStore:
    """Return obstore's client for the URL of a bucket. PlanError: a provider's environment settings are invalid."""
    require("obstore", root, "cloud" if urlsplit(root).scheme in _ENDPOINTS else "web")
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    scheme = urlsplit(root).scheme
    settings = s3_settings().for_obstore() if scheme == "s3" else {}
    endpoint = settings.get("endpoint") or endpoint_of(scheme)
    options: Any = _client_options(scheme, endpoint)
    if endpoint is not None:
        options |= _fence(endpoint, () if "credential_provider" in settings else _services(scheme, settings))
    retries: Any = {"max_retries": 0}  # `failures.request` repeats requests, for all kinds of stores alike.
    if for_uploads:  # Only obstore can repeat one of the many requests of an upload.
        options["read_timeout"] = timedelta(seconds=UPLOAD_SECONDS)
        retries = {"max_retries": 1000, "retry_timeout": timedelta(seconds=RETRY_SECONDS + UPLOAD_SECONDS)}
    try:
        return from_url(root, client_options=options, retry_config=retries, **settings)
    except BaseError as error:
        raise PlanError(f"cannot be used: {_first_line(error)}", path=root, code="option") from None


def _first_line(error: BaseException) -> str:
    """Return the first line of obstore's error about settings, without URLs."""
    lines = str(error).splitlines() or [""]
    return re.sub(r"[a-z0-9+]+://\S+", "URL", lines[0])[:200]


def named_certificates(scheme: str) -> str | None:
    """Return the certificate file named for S3. None: the certificates of the system, or of SSL_CERT_FILE, apply."""
    file = os.environ.get("AWS_CA_BUNDLE") if scheme == "s3" else None
    if file and not os.access(file, os.R_OK):
        raise PlanError("the file cannot be read", path=f"AWS_CA_BUNDLE={file}", code="option")
    return file or None


def is_set(name: str) -> bool:
    """Return True if an environment variable is set to 1, true, yes or on."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on")


def endpoint_of(scheme: str) -> str | None:
    """Return the endpoint in the environment, or None."""
    return next((value for name in _ENDPOINTS.get(scheme, ()) if (value := os.environ.get(name))), None)


def _client_options(scheme: str, endpoint: str | None) -> dict[str, Any]:
    """Return the options for obstore's client. Options given in code replace all options from the environment."""
    options: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
        "read_timeout": timedelta(seconds=STALL_SECONDS),
        "timeout": timedelta(hours=24),  # An answer may take any time while bytes arrive.
    }
    if (file := named_certificates(scheme)) is not None:
        options["root_certificate"] = Path(file).read_bytes()
    if endpoint is not None and endpoint.startswith("http:"):
        options["allow_http"] = True
    return options


def _services(scheme: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the URLs of the services that obstore may call for credentials; empty if credentials are configured."""
    if any(is_set(name) if name.endswith("_SKIP_SIGNATURE") else os.environ.get(name) for name in _KEYS[scheme]):
        return []
    named = [value for name in _SERVICES[scheme] if (value := os.environ.get(name))]
    own = [url.format(region=settings.get("region", "us-east-1")) for url in _OWN_SERVICES[scheme]]
    return [*(name if "//" in name else f"http://{name}" for name in named), *own]


def _fence(endpoint: str, services: Iterable[str]) -> dict[str, str]:
    """Return options that keep obstore, which follows redirects anywhere, on the host of a configured endpoint.

    All other hosts, except the services for credentials, are assigned an unreachable proxy. obstore accepts only one
    proxy: if the endpoint or a service requires the environment's own proxy, the result is empty, and redirects are not
    restricted.
    """
    urls = [urlsplit(url) for url in (endpoint, *services)]
    if any(_is_proxied(url.scheme, url.hostname or "") for url in urls):
        return {}
    return {"proxy_url": _NOWHERE, "proxy_excludes": ",".join(url.hostname for url in urls if url.hostname)}


def _is_proxied(scheme: str, host: str) -> bool:
    """Return True if the environment has a proxy for a host. NO_PROXY may contain networks, too."""
    proxies = getproxies()
    if not (proxies.get(scheme) or proxies.get("all")) or proxy_bypass(host):
        return False
    for excluded in proxies.get("no", "").split(","):
        with suppress(ValueError):  # `excluded` is a host name.
            if ip_address(host) in ip_network(excluded.strip(), strict=False):
                return False
    return True


@dataclass(frozen=True, slots=True, repr=False)
class S3Settings:
    """Endpoint, region and credentials for S3."""

    endpoint: str | None
    region: str | None
    profile: Session | None
    """A boto3 session with a profile's credentials. None: the credentials come from the environment, or from a role."""

    def for_obstore(self) -> dict[str, Any]:
        """Return arguments for obstore, without settings that are not set."""
        # Unsigned: TLS protects the payload; hashing takes 1 to 2 s/GB.
        settings: dict[str, Any] = {"unsigned_payload": True, "endpoint": self.endpoint, "region": self.region}
        if self.profile is not None:
            from obstore.auth.boto3 import Boto3CredentialProvider

            settings["credential_provider"] = Boto3CredentialProvider(self.profile)
        return {name: value for name, value in settings.items() if value is not None}


def s3_settings() -> S3Settings:
    """Return the settings for S3 from the environment, or from a profile."""
    endpoint = endpoint_of("s3")
    region = next((value for name in _REGIONS if (value := os.environ.get(name))), None)
    profile = os.environ.get("AWS_PROFILE")
    if profile:
        if find_spec("boto3") is None:
            what = "needs the package boto3, which is not installed: pip install boto3"
            raise PlanError(what, path=f"AWS_PROFILE={profile}", code="unsupported")
    elif {"AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"} & set(os.environ) or not _has_profiles():
        return S3Settings(endpoint, region, None)
    from boto3.session import Session
    from botocore.exceptions import BotoCoreError

    try:
        session = Session()
        config = session._session.get_scoped_config()
        if session.get_credentials() is None:
            return S3Settings(endpoint, region, None)
    except BotoCoreError as error:
        raise PlanError(f"cannot be used: {error}", path=f"AWS_PROFILE={profile}", code="option") from None
    return S3Settings(endpoint or config.get("endpoint_url"), region or config.get("region"), session)


def _has_profiles() -> bool:
    """Return True if `~/.aws` has a file and boto3 is installed to read it."""
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    return any(Path(file).expanduser().is_file() for file in files) and find_spec("boto3") is not None
