"""Uploads by the providers' own clients: boto3 for S3, google-resumable-media for GCS, azure-storage-blob for Azure.

The first bytes of a file depend on all others, so that its first part is sent last; obstore's own uploads send parts
in order. How stores are reached is the same as for reads (`connect.py`). The clients' own retries are off, because none
of them lasts as long as an outage: requests are repeated by `failures.persistent`.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypeVar
from urllib.parse import quote
from xml.etree.ElementTree import ParseError

from relayout.errors import PlanError
from relayout.storage.cloud import connect
from relayout.storage.cloud.client import NotCompleted, Uploads
from relayout.storage.cloud.connect import boto_session, endpoint_of, is_set, require, s3_settings
from relayout.storage.cloud.failures import persistent, request_error, texts_of
from relayout.storage.protocols import RequestError

_NUM_CONNECTIONS = 64
_PIECE_NBYTES = 2**20
"""What is passed to a connection at once. The time of a stall is for each piece."""
_Key = int | str | None
"""The status or code of a failure."""
_COMPLETED: Mapping[_Key, NotCompleted] = {404: NotCompleted.GONE, 412: NotCompleted.EXISTS}
"""Why an upload to S3 or GCS is not completed, by the status."""
Answer = TypeVar("Answer")
Outcome = TypeVar("Outcome")


def uploads_of(root: str) -> Uploads:
    """Uploads to a bucket, by its URL."""
    kinds: dict[str, Callable[[str], Uploads]] = {"s3": _S3, "gs": _Gcs, "az": _Azure}
    return kinds[root.partition("://")[0]](root)


class PartBody:
    """A part as a file that clients read, without a copy. It starts again after its end, for a client that resends.

    It has no `tell`, by which clients would skip what they have read already.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._offset = 0

    def __len__(self) -> int:
        return self._view.nbytes

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self.read, b"")

    def read(self, size: int = -1) -> memoryview:
        """The next piece; it may be larger than `size`, as clients ask for 16 KiB."""
        piece = self._view[self._offset : self._offset + _PIECE_NBYTES]
        self._offset = self._offset + piece.nbytes if piece.nbytes else 0
        return piece

    def seek(self, offset: int) -> int:
        """Go to an offset from the beginning."""
        self._offset = offset
        return offset


class _Requests:
    """What requests of all providers have in common."""

    _errors: tuple[type[Exception], ...]
    """Those that the client raises."""
    _failure_of: Callable[[Any, str], RequestError]
    """What one of them means, for an object in messages. It is final if no request was made, or the answer cannot be
    read."""

    def __init__(self, root: str) -> None:
        self._root, self._bucket = root, root.partition("://")[2]

    def _request(
        self,
        name: str,
        call: Callable[[], Answer],
        outcomes: Mapping[_Key, Outcome] = MappingProxyType({}),
    ) -> Answer | Outcome:
        """What `call` returns, which makes a request; `outcomes` are results for failures of these statuses or codes.

        Raises:
            RequestError: the request failed repeatedly.
        """
        location = f"{self._root}/{name}"

        def attempt() -> Answer | Outcome:
            try:
                return call()
            except self._errors as error:
                failure = self._failure_of(error, location)
            for key in (failure.code, failure.status):
                if key in outcomes:
                    return outcomes[key]
            raise failure  # Not within `except`: the client's error, which a traceback would show, may have secrets.

        return persistent(attempt, location)

    def _text(self, name: str, call: Callable[[], Any]) -> str:
        """What `call` returns, which must be a text."""
        value = self._request(name, call)
        if not value or not isinstance(value, str):
            raise request_error("ParseError", f"{self._root}/{name}")
        return value


class _S3(_Requests):
    def __init__(self, root: str) -> None:
        super().__init__(root)
        require("boto3", root, "s3")
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        self._errors, self._failure_of = (BotoCoreError, ClientError, ResponseParserError), _s3_failure
        settings = s3_settings()
        # obstore wants a virtual host in the endpoint, and boto3 puts it there.
        is_virtual = is_set("AWS_VIRTUAL_HOSTED_STYLE_REQUEST")
        endpoint = settings.endpoint and settings.endpoint.replace(f"://{self._bucket}.", "://", is_virtual)
        config = Config(
            signature_version=UNSIGNED if is_set("AWS_SKIP_SIGNATURE") else None,
            s3={"addressing_style": "virtual" if is_virtual else "path", "payload_signing_enabled": False},
            request_checksum_calculation="when_required",  # Other servers than Amazon's may know no others.
            response_checksum_validation="when_required",
            connect_timeout=connect.CONNECT_SECONDS,
            read_timeout=connect.STALL_SECONDS,
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=_NUM_CONNECTIONS,
        )
        region = settings.region or "us-east-1"
        try:
            self._client: Any = (settings.profile or boto_session()).client(
                "s3", endpoint_url=endpoint, region_name=region, verify=connect.certificates("s3"), config=config
            )
        except (BotoCoreError, ValueError):  # ValueError: the endpoint is no URL.
            raise PlanError("boto3 refuses the settings: check endpoint and region", path=root, code="option") from None
        self._client.meta.events.register_first("needs-retry.s3", _refuse_redirect)

    def begin(self, name: str) -> str:
        begin = partial(self._client.create_multipart_upload, Bucket=self._bucket, Key=name)
        return self._text(name, lambda: begin().get("UploadId"))

    def send(self, name: str, upload: str, index: int, body: memoryview) -> str:
        send = partial(self._client.upload_part, Bucket=self._bucket, Key=name, UploadId=upload, PartNumber=index + 1)
        return self._text(name, lambda: send(Body=PartBody(body)).get("ETag"))

    def complete(self, name: str, upload: str, tags: Sequence[str]) -> str | NotCompleted:
        complete = partial(
            self._client.complete_multipart_upload,
            Bucket=self._bucket,
            Key=name,
            UploadId=upload,
            MultipartUpload={"Parts": [{"PartNumber": part, "ETag": tag} for part, tag in enumerate(tags, 1)]},
            IfNoneMatch="*",
        )
        return self._request(name, lambda: str(complete().get("ETag", "")), _COMPLETED)

    def abort(self, name: str, upload: str) -> None:
        abort = partial(self._client.abort_multipart_upload, Bucket=self._bucket, Key=name, UploadId=upload)
        self._request(name, abort, {404: None})


def _refuse_redirect(response: Any = None, operation: Any = None, **_: object) -> None:
    """Raise a ClientError for a redirect: boto3 would ask for the bucket's region, and is redirected there, too."""
    from botocore.exceptions import ClientError

    if response is not None and 300 <= response[0].status_code < 400:
        raise ClientError(response[1], operation.name)


def _s3_failure(error: Any, location: str) -> RequestError:
    from botocore.exceptions import ConnectionError, HTTPClientError

    answer = getattr(error, "response", None)
    if answer is None:
        is_final = not isinstance(error, (HTTPClientError, ConnectionError))
        return request_error(texts_of(error), location, is_final=is_final)
    metadata = answer.get("ResponseMetadata", {})
    return request_error(
        "",
        location,
        status=metadata.get("HTTPStatusCode"),
        code=str(answer.get("Error", {}).get("Code", "")),
        retry_after=metadata.get("HTTPHeaders", {}).get("retry-after"),
    )


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
        endpoint = endpoint_of("gs") or "https://storage.googleapis.com"
        self._url = f"{endpoint.rstrip('/')}/{self._bucket}"
        session = AuthorizedSession(_google_credentials(root))
        session.mount(endpoint, HTTPAdapter(pool_maxsize=_NUM_CONNECTIONS))
        self._timeout = connect.CONNECT_SECONDS, connect.STALL_SECONDS
        self._session = SimpleNamespace(
            request=partial(session.request, verify=connect.certificates("gs"), allow_redirects=False)
        )

    def _upload(self, name: str, upload: str | None, headers: dict[str, str] | None = None) -> Any:
        from google.resumable_media import RetryStrategy
        from google.resumable_media.requests import XMLMPUContainer

        container = XMLMPUContainer(f"{self._url}/{quote(name, '/~')}", None, headers=headers, upload_id=upload)
        container._retry_strategy = RetryStrategy(max_retries=0)  # It has no public parameter for this.
        return container

    def begin(self, name: str) -> str:
        def begin() -> Any:
            upload = self._upload(name, None)
            try:
                upload.initiate(self._session, "application/octet-stream", timeout=self._timeout)
            except AttributeError:  # It takes the id from where there is none.
                raise ParseError("no UploadId") from None
            return upload.upload_id

        return self._text(name, begin)

    def send(self, name: str, upload: str, index: int, body: memoryview) -> str:
        from google.resumable_media import InvalidResponse

        url = f"{self._upload(name, upload).upload_url}?partNumber={index + 1}&uploadId={quote(upload, '')}"

        def send() -> Any:
            answer = self._session.request("PUT", url, data=PartBody(body), timeout=self._timeout)
            if answer.status_code != 200:
                raise InvalidResponse(answer)
            return answer.headers.get("etag")

        return self._text(name, send)

    def complete(self, name: str, upload: str, tags: Sequence[str]) -> str | NotCompleted:
        from google.resumable_media import InvalidResponse

        container = self._upload(name, upload, {"x-goog-if-generation-match": "0"})
        for part, tag in enumerate(tags, 1):
            container.register_part(part, tag)

        def complete() -> str:
            answer = container.finalize(self._session, timeout=self._timeout)
            if b"<Error>" in answer.content[:1000]:  # It failed after its status had been sent.
                raise InvalidResponse(answer)
            tag = re.search(rb"<ETag>(?:&quot;|\")?([0-9A-Za-z/+=_-]+)", answer.content[:4000])
            return tag[1].decode() if tag else ""

        return self._request(name, complete, _COMPLETED)

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


def _gcs_failure(error: Any, location: str) -> RequestError:
    from google.auth.exceptions import TransportError
    from requests.exceptions import RequestException

    answer = getattr(error, "response", None)
    if answer is None:
        is_final = not isinstance(error, (RequestException, TransportError))
        return request_error(texts_of(error), location, is_final=is_final)
    text = answer.content[:2000].decode("ascii", "replace")
    status = 500 if answer.status_code == 200 else answer.status_code
    return request_error(text, location, status=status, retry_after=answer.headers.get("retry-after"))


class _Azure(_Requests):
    """Blocks of Azure, which are known by names of their own; there are no uploads that could be listed or aborted.

    Blocks that are never committed vanish after a week.
    """

    def __init__(self, root: str) -> None:
        super().__init__(root)
        require("azure.storage.blob", root, "azure")
        from azure.core.exceptions import AzureError
        from azure.storage.blob import ContainerClient

        # UnicodeDecodeError: an answer is no text, which the client does not expect.
        self._errors, self._failure_of = (AzureError, UnicodeDecodeError), _azure_failure
        account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
        endpoint = endpoint_of("az") or f"https://{account}.blob.core.windows.net"
        self._container: Any = ContainerClient(
            endpoint,
            self._bucket,
            credential=_azure_credential(root, account),
            retry_total=0,
            permit_redirects=False,
            connection_timeout=connect.CONNECT_SECONDS,
            read_timeout=connect.STALL_SECONDS,
            connection_verify=connect.certificates("az"),
        )

    def begin(self, name: str) -> str:
        return secrets.token_hex(8)  # The blocks' names begin so: those of two uploads are never mixed.

    def send(self, name: str, upload: str, index: int, body: memoryview) -> str:
        block, stage = f"{upload}{index:08}", self._container.get_blob_client(name).stage_block
        self._request(name, lambda: stage(block, PartBody(body), body.nbytes))
        return block

    def complete(self, name: str, upload: str, tags: Sequence[str]) -> str | NotCompleted:
        from azure.core import MatchConditions
        from azure.storage.blob import BlobBlock

        commit, blocks = self._container.get_blob_client(name).commit_block_list, [BlobBlock(tag) for tag in tags]
        outcomes: dict[_Key, NotCompleted] = {409: NotCompleted.EXISTS, 412: NotCompleted.EXISTS}
        outcomes |= dict.fromkeys(("InvalidBlockList", "InvalidBlockId"), NotCompleted.GONE)
        created = partial(commit, blocks, match_condition=MatchConditions.IfMissing)
        return self._request(name, lambda: str(created().get("etag", "")), outcomes)

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


def _azure_failure(error: Any, location: str) -> RequestError:
    from azure.core.exceptions import ServiceRequestError, ServiceResponseError

    answer = getattr(error, "response", None)
    if answer is None:
        is_final = not isinstance(error, (ServiceRequestError, ServiceResponseError))
        return request_error(texts_of(error), location, is_final=is_final)
    code, wait = getattr(error, "error_code", None), answer.headers.get("retry-after")
    code = str(getattr(code, "value", code) or "")
    return request_error("", location, status=error.status_code, code=code, retry_after=wait)
