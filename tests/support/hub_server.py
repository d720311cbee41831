"""An imitation of the Hugging Face hub on loopback: repositories, buckets, and signed URLs of another origin.

It answers what huggingface_hub 2.4 sends and expects; nobody has compared it with the hub.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import quote

from support import s3_server
from support.s3_server import Answer, Request

if TYPE_CHECKING:
    import pytest

TOKEN = "hf_token-that-nobody-else-may-see"
LARGE = 4096
"""Files from so many bytes on are elsewhere, behind signed URLs."""


@dataclass
class Hub:
    """Two servers: the hub, and where the bytes of large files are."""

    hub: s3_server.Server
    bytes: s3_server.Server
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files by name, of each repository."""
    buckets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files by name, of each bucket."""
    page_length: int = 1000
    """Entries of a page of a listing."""
    private: set[str] = field(default_factory=set)
    are_refused: bool = False
    """Whether no signature is valid."""
    sends_bytes: bool = False
    """Whether the hub itself sends the files of buckets."""
    _signed: dict[str, bytes] = field(default_factory=dict)
    """Content, by signature."""

    def expire(self) -> None:
        """End all signatures."""
        self._signed.clear()

    def commit(self, repo: str) -> str:
        digest = hashlib.sha1(usedforsecurity=False)
        for name, content in sorted(self.repos[repo].items()):
            digest.update(name.encode() + _blob_id(content).encode())
        return digest.hexdigest()

    def answer(self, request: Request) -> Answer:
        """Of the hub; its paths are of the form FIRST/REST."""
        path = f"{request.bucket}/{request.key}"
        found = re.fullmatch(r"api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path)
        if found is not None:
            return self._info(request, found[1], found[2] or "main")
        found = re.fullmatch(r"api/buckets/([^/]+/[^/]+)/tree(?:/(.+))?", path)
        if found is not None:
            return self._tree(request, found[1], found[2] or "")
        found = re.fullmatch(r"buckets/([^/]+/[^/]+)/resolve/(.+)", path)
        if found is not None:
            return self._resolve_in_bucket(request, found[1], found[2])
        found = re.fullmatch(r"([^/]+/[^/]+)/resolve/([0-9a-f]{40})/(.+)", path)
        return Answer(404) if found is None else self._resolve(request, found[1], found[2], found[3])

    def _refused(self, request: Request, repo: str) -> Answer | None:
        if repo not in self.repos | self.buckets or (repo in self.private and not self._has_token(request)):
            return Answer(401, headers={"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        return None

    def _has_token(self, request: Request) -> bool:
        return request.headers.get("authorization") == f"Bearer {TOKEN}"

    def _info(self, request: Request, repo: str, revision: str) -> Answer:
        if (refused := self._refused(request, repo)) is not None:
            return refused
        if revision not in ("main", self.commit(repo)):
            return Answer(404, headers={"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no revision"})
        siblings = []
        for name, content in self.repos[repo].items():
            lfs = {"sha256": _sha256(content), "size": len(content), "pointerSize": 130}
            more = {"lfs": lfs} if len(content) >= LARGE else {}
            siblings.append({"rfilename": name, "size": len(content), "blobId": _blob_id(content), **more})
        body = {"id": repo, "modelId": repo, "sha": self.commit(repo), "private": repo in self.private, "tags": []}
        return Answer(200, json.dumps(body | {"siblings": siblings, "downloads": 0, "likes": 0}).encode())

    def _resolve(self, request: Request, repo: str, commit: str, name: str) -> Answer:
        if (refused := self._refused(request, repo)) is not None:
            return refused
        if commit != self.commit(repo) or name not in self.repos[repo]:
            return Answer(404, headers={"X-Error-Code": "EntryNotFound", "X-Error-Message": "no entry"})
        content = self.repos[repo][name]
        headers = {"X-Repo-Commit": commit}
        if len(content) < LARGE:
            return s3_server.part_of(content, f'"{_blob_id(content)}"', request, headers)
        headers |= {"X-Linked-ETag": f'"{_sha256(content)}"', "X-Linked-Size": str(len(content))}
        headers["Location"] = self._sign(name, content)
        return Answer(302, b"elsewhere", headers)

    def _sign(self, name: str, content: bytes) -> str:
        """The URL of bytes on the other server."""
        signature = hashlib.sha1(f"{name}{time.monotonic_ns()}".encode(), usedforsecurity=False).hexdigest()
        self._signed[signature] = content
        return f"{self.bytes.url}/files/{_sha256(content)}?Signature={signature}"

    def _tree(self, request: Request, bucket: str, prefix: str) -> Answer:
        """A page of what begins with a prefix, as `HfApi.list_bucket_tree` reads it."""
        if (refused := self._refused(request, bucket)) is not None:
            return refused
        assert request.query["recursive"] == "true"
        files = {name: content for name, content in self.buckets[bucket].items() if name.startswith(prefix)}
        folders = sorted({str(above) for name in files for above in PurePosixPath(name).parents} - {"."})
        entries: list[dict[str, object]] = [{"type": "directory", "path": name} for name in folders]
        for name, content in sorted(files.items()):
            entries.append({"type": "file", "path": name, "size": len(content), "xetHash": xet_hash(content)})
        start = int(request.query.get("cursor", "0"))
        end, headers = start + self.page_length, {}
        if end < len(entries):
            path = f"api/buckets/{bucket}/tree" + (f"/{quote(prefix, safe='')}" if prefix else "")
            headers["Link"] = f'<{self.hub.url}/{path}?recursive=true&cursor={end}>; rel="next"'
        return Answer(200, json.dumps(entries[start:end]).encode(), headers)

    def _resolve_in_bucket(self, request: Request, bucket: str, name: str) -> Answer:
        """Where a file is, as `HfApi.get_bucket_file_metadata` reads it."""
        if (refused := self._refused(request, bucket)) is not None:
            return refused
        if name not in self.buckets[bucket]:
            return Answer(404, headers={"X-Error-Code": "EntryNotFound", "X-Error-Message": "no entry"})
        content = self.buckets[bucket][name]
        headers = {
            "X-Xet-Hash": xet_hash(content),
            "Link": f'<{self.hub.url}/api/buckets/{bucket}/xet-read-token>; rel="xet-auth"',
        }
        if self.sends_bytes:
            return s3_server.part_of(content, f'"{_sha256(content)}"', request, headers)
        headers |= {"X-Linked-ETag": f'"{_sha256(content)}"', "X-Linked-Size": str(len(content))}
        return Answer(302, b"elsewhere", headers | {"Location": self._sign(name, content)})

    def answer_bytes(self, request: Request) -> Answer:
        """Of the other server."""
        if "authorization" in request.headers:
            return Answer(400, b"a token was sent to another origin")
        content = self._signed.get(request.query.get("Signature", ""))
        if content is None or self.are_refused:
            return Answer(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
        return s3_server.part_of(content, f'"{s3_server.md5(content)}"', request, {})


@lru_cache(64)
def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@lru_cache(64)
def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def xet_hash(content: bytes) -> str:
    """A hash of all content in the form of Xet's; the hub's own is of a tree of chunks."""
    return hashlib.sha256(b"xet" + content).hexdigest()


def point_to(url: str, patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have the hub's library ask this hub, and keep cache and token in a folder. It reads its variables only once."""
    from huggingface_hub import constants

    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    patch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    patch.setattr(constants, "HF_HUB_OFFLINE", False)


@contextmanager
def running() -> Iterator[Hub]:
    """A hub that runs until the end of the block."""
    with s3_server.running() as first, s3_server.running() as second:
        yield _connected(first, second)


@cache
def shared() -> Hub:
    """A hub that runs until the process ends; each test has a bucket of its own."""
    first, second = servers = s3_server.Server(), s3_server.Server()
    for server in servers:
        threading.Thread(target=server.serve, daemon=True).start()
    return _connected(first, second)


def _connected(first: s3_server.Server, second: s3_server.Server) -> Hub:
    hub, lock = Hub(first, second), threading.Lock()

    def answer(request: Request) -> Answer:
        with lock:
            return hub.answer(request)

    first.interfere, second.interfere = answer, hub.answer_bytes
    return hub
