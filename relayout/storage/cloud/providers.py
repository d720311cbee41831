"""Uploads by the providers' own clients: boto3 for S3, google-resumable-media for GCS, azure-storage-blob for Azure.

Where a store is, who asks, and how it is reached is what `connect.py` says, as for reads.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any
from urllib.parse import quote
from xml.etree.ElementTree import ParseError

from relayout.errors import PlanError
from relayout.storage.cloud.client import BucketClient
from relayout.storage.cloud.connect import endpoint_of, is_set, reach_of, require, s3_settings
from relayout.storage.cloud.multipart import Body, Failure, Multipart, Outcome, required, texts_of, with_retries

_NUM_CONNECTIONS = 64
_Key = int | str | None
"""Of an outcome: the status or code of a failure."""


def multipart_of(client: BucketClient) -> Multipart:
    """Uploads to a client's bucket.

    Raises:
        PlanError: a package or credentials are missing.
    """
    kinds: dict[str, Callable[[str], Multipart]] = {"s3": _S3, "gs": _Gcs, "az": _Azure}
    return kinds[client.root.partition("://")[0]](client.root)


class _Requests:
    """What requests of all providers have in common. See `Multipart` for the methods of its subclasses."""

    _errors: tuple[type[Exception], ...]
    """Those that the client raises."""
    _failure_of: Callable[[Any], Failure]

    def __init__(self, root: str) -> None:
        self._root, self._bucket = root, root.partition("://")[2]

    def _request(self, name: str, call: Callable[[], Any], outcomes: Mapping[_Key, Any] = MappingProxyType({})) -> Any:
        return with_retries(call, f"{self._root}/{name}", self._errors, self._failure_of, outcomes)

    def _text(self, name: str, call: Callable[[], Any]) -> str:
        return required(self._request(name, call), f"{self._root}/{name}")

    def _outcome(self, name: str, call: Callable[[], Any], outcomes: Mapping[_Key, Outcome]) -> Outcome:
        found = self._request(name, call, outcomes)
        return found if isinstance(found, Outcome) else Outcome.DONE


class _S3(_Requests):
    def __init__(self, root: str) -> None:
        super().__init__(root)
        require("boto3", root, "s3")
        from boto3.session import Session
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        self._errors, self._failure_of = (BotoCoreError, ClientError, ResponseParserError), _s3_failure
        settings, reach = s3_settings(), reach_of("s3")
        # obstore wants a virtual host in the endpoint, and boto3 puts it there.
        is_virtual = is_set("AWS_VIRTUAL_HOSTED_STYLE_REQUEST")
        endpoint = settings.endpoint and settings.endpoint.replace(f"://{self._bucket}.", "://", is_virtual)
        config = Config(
            signature_version=UNSIGNED if is_set("AWS_SKIP_SIGNATURE") else None,
            s3={"addressing_style": "virtual" if is_virtual else "path", "payload_signing_enabled": False},
            request_checksum_calculation="when_required",  # Other servers than Amazon's may know no others.
            response_checksum_validation="when_required",
            connect_timeout=reach.connect_seconds,
            read_timeout=reach.stall_seconds,
            proxies=reach.proxies(endpoint or "https://amazonaws.com"),
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=_NUM_CONNECTIONS,
        )
        region = settings.region or "us-east-1"
        try:
            self._client: Any = (settings.profile or Session()).client(
                "s3", endpoint_url=endpoint, region_name=region, verify=reach.verify, config=config
            )
        except (BotoCoreError, ValueError):  # ValueError: the endpoint is no URL.
            raise PlanError("boto3 refuses the settings: check endpoint and region", path=root, code="option") from None

    def begin(self, name: str) -> str:
        begin = partial(self._client.create_multipart_upload, Bucket=self._bucket, Key=name)
        return self._text(name, lambda: begin().get("UploadId"))

    def send(self, name: str, upload: str, number: int, body: memoryview) -> str:
        send = partial(self._client.upload_part, Bucket=self._bucket, Key=name, UploadId=upload, PartNumber=number + 1)
        return self._text(name, lambda: send(Body=Body(body)).get("ETag"))

    def complete(self, name: str, upload: str, tags: Sequence[str]) -> Outcome:
        complete = partial(
            self._client.complete_multipart_upload,
            Bucket=self._bucket,
            Key=name,
            UploadId=upload,
            MultipartUpload={"Parts": [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]},
            IfNoneMatch="*",
        )
        return self._outcome(name, complete, {404: Outcome.GONE, 409: Outcome.CONFLICT, 412: Outcome.EXISTS})

    def abort(self, name: str, upload: str) -> None:
        abort = partial(self._client.abort_multipart_upload, Bucket=self._bucket, Key=name, UploadId=upload)
        self._request(name, abort, {404: None})


def _s3_failure(error: Any) -> Failure:
    from botocore.exceptions import ConnectionError, HTTPClientError

    answer = getattr(error, "response", None)
    if answer is None:
        return Failure(text=texts_of(error), is_final=not isinstance(error, (HTTPClientError, ConnectionError)))
    found = answer.get("ResponseMetadata", {})
    wait = found.get("HTTPHeaders", {}).get("retry-after", "")
    return Failure(found.get("HTTPStatusCode"), str(answer.get("Error", {}).get("Code", "")), wait)


class _Gcs(_Requests):
    """The XML interface of GCS. Its client has no calls for parts that are in memory, but all others."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        for module in ("google.auth", "google.resumable_media", "requests"):
            require(module, root, "gcs")
        from google.auth.exceptions import GoogleAuthError
        from google.auth.transport.requests import AuthorizedSession
        from google.resumable_media import InvalidResponse
        from requests.adapters import HTTPAdapter
        from requests.exceptions import RequestException

        self._errors = InvalidResponse, RequestException, GoogleAuthError, ParseError
        self._failure_of = _gcs_failure
        endpoint, reach = endpoint_of("gs") or "https://storage.googleapis.com", reach_of("gs")
        self._url = f"{endpoint.rstrip('/')}/{self._bucket}"
        session = AuthorizedSession(_google_credentials(root))
        session.mount(endpoint, HTTPAdapter(pool_maxsize=_NUM_CONNECTIONS))
        proxies = reach.proxies(endpoint)
        if proxies is not None:
            session.trust_env, session.proxies = False, proxies
        self._timeout = reach.connect_seconds, reach.stall_seconds
        self._session = SimpleNamespace(request=partial(session.request, verify=reach.verify))

    def _upload(self, name: str, upload: str | None, headers: dict[str, str] | None = None) -> Any:
        from google.resumable_media import RetryStrategy
        from google.resumable_media.requests import XMLMPUContainer

        found = XMLMPUContainer(f"{self._url}/{quote(name, '/~')}", None, headers=headers, upload_id=upload)
        found._retry_strategy = RetryStrategy(max_retries=0)  # There is no other way to say so.
        return found

    def begin(self, name: str) -> str:
        def begin() -> Any:
            upload = self._upload(name, None)
            try:
                upload.initiate(self._session, "application/octet-stream", timeout=self._timeout)
            except AttributeError:  # It takes the id from where there is none.
                raise ParseError("no UploadId") from None
            return upload.upload_id

        return self._text(name, begin)

    def send(self, name: str, upload: str, number: int, body: memoryview) -> str:
        from google.resumable_media import InvalidResponse

        url = f"{self._upload(name, upload).upload_url}?partNumber={number + 1}&uploadId={quote(upload, '')}"

        def send() -> Any:
            answer = self._session.request("PUT", url, data=Body(body), timeout=self._timeout)
            if answer.status_code != 200:
                raise InvalidResponse(answer)
            return answer.headers.get("etag")

        return self._text(name, send)

    def complete(self, name: str, upload: str, tags: Sequence[str]) -> Outcome:
        from google.resumable_media import InvalidResponse

        found = self._upload(name, upload, {"x-goog-if-generation-match": "0"})
        for number, tag in enumerate(tags, 1):
            found.register_part(number, tag)

        def complete() -> None:
            answer = found.finalize(self._session, timeout=self._timeout)
            if b"<Error>" in answer.content[:1000]:  # It failed when its status had been sent.
                raise InvalidResponse(answer)

        return self._outcome(name, complete, {404: Outcome.GONE, 412: Outcome.EXISTS})

    def abort(self, name: str, upload: str) -> None:
        cancel = partial(self._upload(name, upload).cancel, self._session, timeout=self._timeout)
        self._request(name, cancel, {404: None})


def _google_credentials(root: str) -> Any:
    import google.auth
    from google.auth.exceptions import GoogleAuthError
    from google.oauth2.credentials import Credentials

    if token := os.environ.get("GOOGLE_BEARER_TOKEN"):
        return Credentials(token)
    try:
        return google.auth.default(scopes=["https://www.googleapis.com/auth/devstorage.read_write"])[0]
    except GoogleAuthError:
        what = "no credentials to write with: set GOOGLE_APPLICATION_CREDENTIALS, or see STORES.md"
        raise PlanError(what, path=root, code="option") from None


def _gcs_failure(error: Any) -> Failure:
    from google.auth.exceptions import TransportError
    from requests.exceptions import RequestException

    answer = getattr(error, "response", None)
    if answer is None:
        return Failure(text=texts_of(error), is_final=not isinstance(error, (RequestException, TransportError)))
    code = re.search(rb"<Code>([A-Za-z.]{1,60})</Code>", answer.content[:2000])
    status = 500 if answer.status_code == 200 else answer.status_code
    return Failure(status, code[1].decode() if code else "", answer.headers.get("retry-after", ""))


class _Azure(_Requests):
    """Blocks of Azure, which are known by names of their own; there are no uploads that could be listed or aborted.

    Blocks that are never committed vanish after a week.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        require("azure.storage.blob", root, "azure")
        from azure.core.exceptions import AzureError
        from azure.storage.blob import ContainerClient

        self._errors, self._failure_of = (AzureError,), _azure_failure
        account, reach = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", ""), reach_of("az")
        endpoint = endpoint_of("az") or f"https://{account}.blob.core.windows.net"
        proxies = reach.proxies(endpoint)
        self._container: Any = ContainerClient(
            endpoint,
            self._bucket,
            credential=_azure_credential(root, account),
            retry_total=0,
            connection_timeout=reach.connect_seconds,
            read_timeout=reach.stall_seconds,
            connection_verify=reach.verify,
            proxies=proxies,
            use_env_settings=proxies is None,
        )

    def begin(self, name: str) -> str:
        return secrets.token_hex(8)  # The blocks' names begin so: those of two uploads are never mixed.

    def send(self, name: str, upload: str, number: int, body: memoryview) -> str:
        block, stage = f"{upload}{number:08}", self._container.get_blob_client(name).stage_block
        self._request(name, lambda: stage(block, Body(body), body.nbytes))
        return block

    def complete(self, name: str, upload: str, tags: Sequence[str]) -> Outcome:
        from azure.core import MatchConditions
        from azure.storage.blob import BlobBlock

        commit, blocks = self._container.get_blob_client(name).commit_block_list, [BlobBlock(tag) for tag in tags]
        outcomes: dict[_Key, Outcome] = {409: Outcome.EXISTS, 412: Outcome.EXISTS}
        outcomes |= dict.fromkeys(("InvalidBlockList", "InvalidBlockId"), Outcome.GONE)
        return self._outcome(name, lambda: commit(blocks, match_condition=MatchConditions.IfMissing), outcomes)

    def abort(self, name: str, upload: str) -> None:
        pass


def _azure_credential(root: str, account: str) -> Any:
    if key := os.environ.get("AZURE_STORAGE_ACCOUNT_KEY"):
        return {"account_name": account, "account_key": key}
    if token := os.environ.get("AZURE_STORAGE_SAS_TOKEN"):
        return token.lstrip("?")
    if is_set("AZURE_SKIP_SIGNATURE"):
        return None
    require("azure.identity", root, "azure")
    from azure.identity import DefaultAzureCredential

    return DefaultAzureCredential()


def _azure_failure(error: Any) -> Failure:
    from azure.core.exceptions import ServiceRequestError, ServiceResponseError

    answer = getattr(error, "response", None)
    if answer is None:
        is_final = not isinstance(error, (ServiceRequestError, ServiceResponseError))
        return Failure(text=texts_of(error), is_final=is_final)
    code = getattr(error, "error_code", None)
    return Failure(error.status_code, getattr(code, "value", code) or "", answer.headers.get("retry-after", ""))
