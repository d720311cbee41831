"""Connections: obstore's client for a URL, with the environment's credentials, endpoint and options, and time-outs.

Each provider's variables are those of its own tools, which obstore reads; for S3, `~/.aws` counts if boto3 is
installed. STORES.md lists them.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from relayout.errors import PlanError

if TYPE_CHECKING:
    from obstore.store import ObjectStore

STALL_SECONDS = 20.0
"""A request that has brought no byte for so long is made again, from where it was."""
RETRY_SECONDS = 90.0
"""After so long without a byte, a failed request is not made again."""

_PREFIXES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
"""Of the variables of each provider, by the scheme of its URLs."""
_CLIENT_OPTIONS = (
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "read_timeout",
)
"""Options of the HTTP client that are read from such variables."""
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")


def require(module: str, what: str, extra: str = "cloud") -> None:
    """Check that an optional package is installed.

    Raises:
        PlanError: it is not; `what` needs it.
    """
    if find_spec(module) is None:
        raise PlanError(
            f"needs the package {module}, which is not installed: install it, or relayout with the extra {extra!r}",
            path=what,
            code="unsupported",
        )


def make_store(root: str) -> ObjectStore:
    """obstore's client for the URL of a bucket. No request is made yet.

    Raises:
        PlanError: obstore is missing, or the environment is not as a provider expects it.
    """
    require("obstore", root)
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    scheme = urlsplit(root).scheme
    settings = _s3_settings() if scheme == "s3" else {}
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


def _client_options(scheme: str, endpoint: str | None) -> dict[str, Any]:
    """Options given in code replace all of those that obstore finds in the environment: so these are read here."""
    prefix = _PREFIXES[scheme]
    options: dict[str, Any] = {
        "read_timeout": timedelta(seconds=STALL_SECONDS),
        "timeout": timedelta(hours=24),  # An answer may take as long as it likes while bytes arrive.
    }
    for name in _CLIENT_OPTIONS:
        if value := os.environ.get(f"{prefix}_{name.upper()}"):
            options[name] = value
    endpoints = [endpoint, *(os.environ.get(name) for name in (*_ENDPOINTS, "AZURE_STORAGE_ENDPOINT"))]
    if any(one is not None and one.startswith("http://") for one in endpoints):
        options["allow_http"] = True  # It was asked for by name.
    return options


def _s3_settings() -> dict[str, Any]:
    """Settings of S3: payloads, and the credentials, endpoint and region of a profile.

    Raises:
        PlanError: AWS_PROFILE is set, and boto3 is missing or knows no such profile.
    """
    settings: dict[str, Any] = {"unsigned_payload": True}  # The transport proves it; hashing takes 1 to 2 s/GB.
    profile = os.environ.get("AWS_PROFILE")
    if profile:
        require("boto3", f"AWS_PROFILE={profile}")
    elif {"AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"} & set(os.environ) or not _has_profiles():
        return settings
    from boto3.session import Session
    from botocore.exceptions import BotoCoreError
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        session = Session()
        found = session._session.get_scoped_config()
        if session.get_credentials() is None:
            return settings
        settings["credential_provider"] = Boto3CredentialProvider(session)
    except BotoCoreError as error:
        raise PlanError(f"cannot be used: {error}", path=f"AWS_PROFILE={profile}", code="option") from None
    if "endpoint_url" in found and not any(name in os.environ for name in _ENDPOINTS):
        settings["endpoint"] = found["endpoint_url"]
    if "region" in found and not any(name in os.environ for name in _REGIONS):
        settings["region"] = found["region"]
    return settings


def _has_profiles() -> bool:
    """Whether there is something in `~/.aws`, and boto3 to read it."""
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    return any(Path(file).expanduser().is_file() for file in files) and find_spec("boto3") is not None
