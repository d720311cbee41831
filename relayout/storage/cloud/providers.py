"""Uploads by the providers' own clients: boto3 for S3, google-resumable-media for GCS, azure-storage-blob for Azure.

Where a store is, who asks, and how it is reached is what `connect.py` says, as for reads.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote
from xml.etree.ElementTree import ParseError

from relayout.errors import PlanError
from relayout.storage.cloud.client import BucketClient
from relayout.storage.cloud.connect import endpoint_of, is_set, reach_of, require, s3_settings
from relayout.storage.cloud.multipart import Body, Failure, Multipart, Outcome, required, texts_of, with_retries

_NUM_CONNECTIONS = 64


def multipart_of(client: BucketClient) -> Multipart:
    """Uploads to a client's bucket.

    Raises:
        PlanError: a package or credentials are missing.
    """
    kinds: dict[str, Callable[[BucketClient], Multipart]] = {"s3": _S3, "gs": _Gcs, "az": _Azure}
    return kinds[client.root.partition("://")[0]](client)


class _S3:
    def __init__(self, client: BucketClient) -> None:
        require("boto3", client.root, "s3")
        from boto3.session import Session
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.parsers import ResponseParserError

        self._root, self._bucket = client.root, client.root.partition("://")[2]
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
        try:
            self._client: Any = (settings.profile or Session()).client(
                "s3",
                endpoint_url=endpoint,
                region_name=settings.region or "us-east-1",
                verify=reach.verify,
                config=config,
            )
        except (BotoCoreError, ValueError):  # ValueError: the endpoint is no URL.
            raise PlanError("boto3 refuses the settings: check endpoint and region", path=self._root) from None
        errors = BotoCoreError, ClientError, ResponseParserError
        self._request = partial(with_retries, errors=errors, failure_of=_s3_failure)

    def _where(self, name: str) -> str:
        return f"{self._root}/{name}"

    def begin(self, name: str) -> str:
        """See `Multipart.begin`."""
        begin = partial(self._client.create_multipart_upload, Bucket=self._bucket, Key=name)
        where = self._where(name)
        return required(self._request(begin, where).get("UploadId"), where)

    def send(self, name: str, upload: str, number: int, body: memoryview) -> str:
        """See `Multipart.send`."""
        send = partial(self._client.upload_part, Bucket=self._bucket, Key=name, UploadId=upload, PartNumber=number + 1)
        where = self._where(name)
        return required(self._request(lambda: send(Body=Body(body)), where).get("ETag"), where)

    def complete(self, name: str, upload: str, tags: Sequence[str]) -> Outcome:
        """See `Multipart.complete`."""
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
        found: dict[int | str | None, Outcome] = {404: Outcome.GONE, 409: Outcome.CONFLICT, 412: Outcome.EXISTS}

        def complete() -> Outcome:
            self._client.complete_multipart_upload(
                Bucket=self._bucket, Key=name, UploadId=upload, MultipartUpload={"Parts": parts}, IfNoneMatch="*"
            )
            return Outcome.DONE

        return self._request(complete, self._where(name), outcomes=found)

    def abort(self, name: str, upload: str) -> None:
        """See `Multipart.abort`."""
        abort = partial(self._client.abort_multipart_upload, Bucket=self._bucket, Key=name, UploadId=upload)
        self._request(abort, self._where(name), outcomes={404: None})

    def unfinished(self, prefix: str) -> Iterator[tuple[str, str]]:
        """See `Multipart.unfinished`."""
        pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=prefix)
        for page in self._request(lambda: list(pages), self._where(prefix)):
            yield from ((one["Key"], one["UploadId"]) for one in page.get("Uploads", ()))


def _s3_failure(error: Any) -> Failure:
    from botocore.exceptions import ConnectionError, HTTPClientError

    answer = getattr(error, "response", None)
    if answer is None:
        is_final = not isinstance(error, (HTTPClientError, ConnectionError))
        return Failure(None, "", texts_of(error), is_final=is_final)
    found = answer.get("ResponseMetadata", {})
    wait = found.get("HTTPHeaders", {}).get("retry-after", "")
    return Failure(found.get("HTTPStatusCode"), str(answer.get("Error", {}).get("Code", "")), "", wait)


class _Gcs:
    """The XML interface of GCS, whose client has no calls for parts that are in memory."""

    def __init__(self, client: BucketClient) -> None:
        for module in ("google.auth", "google.resumable_media", "requests"):
            require(module, client.root, "gcs")
        from google.auth.exceptions import GoogleAuthError
        from google.auth.transport.requests import AuthorizedSession
        from google.resumable_media import InvalidResponse
        from requests.adapters import HTTPAdapter
        from requests.exceptions import RequestException

        self._root = client.root
        endpoint, reach = endpoint_of("gs") or "https://storage.googleapis.com", reach_of("gs")
        self._url = f"{endpoint.rstrip('/')}/{client.root.partition('://')[2]}"
        session = AuthorizedSession(_google_credentials(client.root))
        session.mount(endpoint, HTTPAdapter(pool_maxsize=_NUM_CONNECTIONS))
        proxies = reach.proxies(endpoint)
        if proxies is not None:
            session.trust_env, session.proxies = False, proxies
        self._timeout = reach.connect_seconds, reach.stall_seconds
        self._session = SimpleNamespace(request=partial(session.request, verify=reach.verify))
        errors = InvalidResponse, RequestException, GoogleAuthError, ParseError
        self._request = partial(with_retries, errors=errors, failure_of=_gcs_failure)

    def _upload(self, name: str, upload: str | None, headers: dict[str, str] | None = None) -> Any:
        from google.resumable_media import RetryStrategy
        from google.resumable_media.requests import XMLMPUContainer

        found = XMLMPUContainer(f"{self._url}/{quote(name, '/~')}", None, headers=headers, upload_id=upload)
        found._retry_strategy = RetryStrategy(max_retries=0)  # Its documents say to set it so.
        return found

    def _where(self, name: str) -> str:
        return f"{self._root}/{name}"

    def begin(self, name: str) -> str:
        """See `Multipart.begin`."""

        def begin() -> Any:
            upload = self._upload(name, None)
            try:
                upload.initiate(self._session, "application/octet-stream", timeout=self._timeout)
            except AttributeError:  # It takes the id from where there is none.
                raise ParseError("no UploadId") from None
            return upload.upload_id

        return required(self._request(begin, self._where(name)), self._where(name))

    def send(self, name: str, upload: str, number: int, body: memoryview) -> str:
        """See `Multipart.send`."""
        from google.resumable_media import InvalidResponse

        url = f"{self._upload(name, upload).upload_url}?partNumber={number + 1}&uploadId={quote(upload, '')}"

        def send() -> Any:
            answer = self._session.request("PUT", url, data=Body(body), timeout=self._timeout)
            if answer.status_code != 200:
                raise InvalidResponse(answer)
            return answer.headers.get("etag")

        return required(self._request(send, self._where(name)), self._where(name))

    def complete(self, name: str, upload: str, tags: Sequence[str]) -> Outcome:
        """See `Multipart.complete`."""
        from google.resumable_media import InvalidResponse

        found = self._upload(name, upload, {"x-goog-if-generation-match": "0"})
        for number, tag in enumerate(tags, 1):
            found.register_part(number, tag)

        def complete() -> Outcome:
            answer = found.finalize(self._session, timeout=self._timeout)
            if b"<Error>" in answer.content[:1000]:  # It failed when its status had been sent.
                raise InvalidResponse(answer)
            return Outcome.DONE

        outcomes: dict[int | str | None, Outcome] = {404: Outcome.GONE, 412: Outcome.EXISTS}
        return self._request(complete, self._where(name), outcomes=outcomes)

    def abort(self, name: str, upload: str) -> None:
        """See `Multipart.abort`."""
        cancel = partial(self._upload(name, upload).cancel, self._session, timeout=self._timeout)
        self._request(cancel, self._where(name), outcomes={404: None})

    def unfinished(self, prefix: str) -> Iterator[tuple[str, str]]:
        """See `Multipart.unfinished`: the client cannot list them."""
        return iter(())


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
        return Failure(None, "", texts_of(error), is_final=not isinstance(error, (RequestException, TransportError)))
    code = re.search(r"<Code>([A-Za-z.]{1,60})</Code>", answer.text[:2000])
    status = 500 if answer.status_code == 200 else answer.status_code
    return Failure(status, code[1] if code else "", "", answer.headers.get("retry-after", ""))


class _Azure:
    """Blocks of Azure, which are known by names of their own; there are no uploads that could be listed or aborted.

    Blocks that are never committed vanish after a week.
    """

    def __init__(self, client: BucketClient) -> None:
        require("azure.storage.blob", client.root, "azure")
        from azure.core.exceptions import AzureError
        from azure.storage.blob import ContainerClient

        self._root = client.root
        account, reach = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", ""), reach_of("az")
        endpoint = endpoint_of("az") or f"https://{account}.blob.core.windows.net"
        proxies = reach.proxies(endpoint)
        self._container: Any = ContainerClient(
            endpoint,
            client.root.partition("://")[2],
            credential=_azure_credential(client.root, account),
            retry_total=0,
            connection_timeout=reach.connect_seconds,
            read_timeout=reach.stall_seconds,
            connection_verify=reach.verify,
            proxies=proxies,
            use_env_settings=proxies is None,
        )
        self._request = partial(with_retries, errors=(AzureError,), failure_of=_azure_failure)

    def begin(self, name: str) -> str:
        """See `Multipart.begin`: a prefix of the blocks' names, so that blocks of two uploads are never mixed."""
        return secrets.token_hex(8)

    def send(self, name: str, upload: str, number: int, body: memoryview) -> str:
        """See `Multipart.send`."""
        block = f"{upload}{number:08}"
        stage = self._container.get_blob_client(name).stage_block
        self._request(lambda: stage(block, Body(body), body.nbytes), f"{self._root}/{name}")
        return block

    def complete(self, name: str, upload: str, tags: Sequence[str]) -> Outcome:
        """See `Multipart.complete`."""
        from azure.core import MatchConditions
        from azure.storage.blob import BlobBlock

        commit = self._container.get_blob_client(name).commit_block_list
        blocks = [BlobBlock(tag) for tag in tags]

        def complete() -> Outcome:
            commit(blocks, match_condition=MatchConditions.IfMissing)
            return Outcome.DONE

        outcomes: dict[int | str | None, Outcome] = {
            "InvalidBlockList": Outcome.GONE,
            "InvalidBlockId": Outcome.GONE,
            409: Outcome.EXISTS,
            412: Outcome.EXISTS,
        }
        return self._request(complete, f"{self._root}/{name}", outcomes=outcomes)

    def abort(self, name: str, upload: str) -> None:
        """See `Multipart.abort`."""

    def unfinished(self, prefix: str) -> Iterator[tuple[str, str]]:
        """See `Multipart.unfinished`."""
        return iter(())


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
        return Failure(None, "", texts_of(error), is_final=is_final)
    code = getattr(error, "error_code", None)
    return Failure(error.status_code, getattr(code, "value", code) or "", "", answer.headers.get("retry-after", ""))
