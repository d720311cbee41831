"""Signatures of requests to S3 (AWS Signature Version 4), for single parts of an upload, which obstore cannot send."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

from relayout.errors import PlanError

_UNRESERVED = "-_.~"
_PAYLOAD = "UNSIGNED-PAYLOAD"


@dataclass(frozen=True, slots=True)
class Keys:
    """Credentials of S3. Their text shows no secret."""

    access_key: str
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


def keys_of(provider: Any, root: str) -> Callable[[], Keys]:
    """A function that returns the credentials as they are now: the environment's, or those that boto3 finds.

    Args:
        provider: what obstore's client asks for credentials; None if it finds them by itself.
        root: the bucket's URL, for messages.

    Raises:
        PlanError: none were found.
    """
    access_key, secret_key = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    if provider is None and access_key and secret_key:
        keys = Keys(access_key, secret_key, os.environ.get("AWS_SESSION_TOKEN") or os.environ.get("AWS_TOKEN"))
        return lambda: keys
    if provider is None and find_spec("boto3") is not None:
        from boto3.session import Session
        from obstore.auth.boto3 import Boto3CredentialProvider

        session = Session()
        if session.get_credentials() is not None:
            provider = Boto3CredentialProvider(session)
    if provider is None:
        what = (
            "no credentials to write with: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or install boto3,"
            " which finds profiles and the roles of machines and pods"
        )
        raise PlanError(what, path=root, code="option")

    def current() -> Keys:
        found = provider()
        return Keys(found["access_key_id"], found["secret_access_key"], found.get("token"))

    return current


def encoded_query(query: dict[str, str]) -> str:
    """A query as signatures want it: sorted and percent-encoded."""
    return "&".join(f"{quote(key, _UNRESERVED)}={quote(value, _UNRESERVED)}" for key, value in sorted(query.items()))


def signed_headers(method: str, url: str, region: str, keys: Keys, now: datetime | None = None) -> dict[str, str]:
    """The headers that authorize a request, whose payload is not signed: the transport proves it.

    Args:
        url: its path is percent-encoded.
    """
    parts = urlsplit(url)
    time = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": parts.netloc, "x-amz-content-sha256": _PAYLOAD, "x-amz-date": time}
    if keys.token:
        headers["x-amz-security-token"] = keys.token
    names = ";".join(sorted(headers))
    request = [
        method,
        parts.path or "/",
        encoded_query(dict(parse_qsl(parts.query, keep_blank_values=True))),
        *(f"{name}:{headers[name]}" for name in sorted(headers)),
        "",
        names,
        _PAYLOAD,
    ]
    scope = f"{time[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256("\n".join(request).encode()).hexdigest()
    key = f"AWS4{keys.secret_key}".encode()
    for part in (*scope.split("/"), f"AWS4-HMAC-SHA256\n{time}\n{scope}\n{digest}"):
        key = hmac.digest(key, part.encode(), "sha256")
    credential = f"Credential={keys.access_key}/{scope}, SignedHeaders={names}, Signature={key.hex()}"
    return headers | {"authorization": f"AWS4-HMAC-SHA256 {credential}"}
