"""An imitation of a registry on loopback, with a token server, and storage of another origin for large blobs.

It knows the requests of the OCI distribution specification that relayout makes. Tests look at the requests of the three
servers, and change answers by `interfere` of each.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import parse_qs

from support import s3_server
from support.s3_server import Answer, Request

USER, PASSWORD = "someone", "a password that only the registry and its token server may see"
LARGE = 4096
"""Blobs from so many bytes on are in the storage, behind signed URLs."""
MODEL = "application/vnd.cncf.model.weight.v1.raw"
IMAGE = "application/vnd.oci.image.manifest.v1+json"


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@dataclass
class Registry:
    """A registry that runs."""

    api: s3_server.Server
    storage: s3_server.Server
    tokens: s3_server.Server
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[tuple[str, str], bytes] = field(default_factory=dict)
    """By repository, and tag or digest."""
    realm: str | None = None
    """The token server that the registry names; None: it wants no credentials."""
    takes_nbytes: int = 2**40
    """The largest body of a request that the registry takes."""
    _uploads: dict[str, bytearray] = field(default_factory=dict)
    _signed: dict[str, bytes] = field(default_factory=dict)
    _tokens: set[str] = field(default_factory=set)
    _ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def host(self) -> str:
        return self.api.url.removeprefix("http://")

    def url(self, repository: str, reference: str) -> str:
        return f"oci+http://{self.host}/{repository}{'@' if ':' in reference else ':'}{reference}"

    def write(self, repository: str, tag: str, files: dict[str, bytes], **changes: Any) -> dict[str, Any]:
        """Make an artifact of files, as another tool would; `changes` are fields of its manifest."""
        layers = []
        for name, content in files.items():
            self.blobs[sha256(content)] = content
            annotations = {"org.cncf.model.filepath": name}
            layers.append(
                {"mediaType": MODEL, "digest": sha256(content), "size": len(content), "annotations": annotations}
            )
        manifest = {"schemaVersion": 2, "mediaType": IMAGE, "layers": layers} | changes
        self.put(repository, tag, json.dumps(manifest).encode())
        return manifest

    def put(self, repository: str, tag: str, manifest: bytes) -> None:
        self.manifests[repository, tag] = self.manifests[repository, sha256(manifest)] = manifest

    def files(self, repository: str, tag: str) -> dict[str, bytes]:
        """The files of an artifact, by the title of each layer, as ORAS takes them."""
        layers = json.loads(self.manifests.get((repository, tag), b'{"layers": []}'))["layers"]
        keys = ("org.opencontainers.image.title", "org.cncf.model.filepath")
        names = [next(layer["annotations"][key] for key in keys if key in layer["annotations"]) for layer in layers]
        return {name: self.blobs[layer["digest"]] for name, layer in zip(names, layers, strict=True)}

    def clear(self, repository: str) -> None:
        """Forget all artifacts of a repository."""
        self.manifests = {place: one for place, one in self.manifests.items() if place[0] != repository}

    def expire(self) -> None:
        """End all signatures and tokens."""
        self._signed.clear()
        self._tokens.clear()

    @property
    def sent_nbytes(self) -> int:
        """Bytes of blobs that were sent to clients."""
        return self.storage.sent_nbytes + self.api.sent_nbytes

    def answer(self, request: Request) -> Answer:
        if request.bucket != "v2":
            return Answer(404)
        if (refused := self._refused(request)) is not None:
            return refused
        found = re.fullmatch(r"(.+)/(manifests|blobs)/(.+)", request.key)
        upload = re.fullmatch(r"(.+)/blobs/uploads/(.*)", request.key)
        if upload is not None:
            return self._upload(request, upload[1], upload[2])
        if found is None:
            return Answer(404)
        if found[2] == "blobs":
            return self._blob(request, found[3])
        if request.method == "PUT":
            missing = [
                one
                for one in (*json.loads(request.body)["layers"], json.loads(request.body)["config"])
                if one["digest"] not in self.blobs
            ]
            if missing:
                return Answer(404, b'{"errors":[{"code":"MANIFEST_BLOB_UNKNOWN"}]}')
            self.put(found[1], found[3], request.body)
            return Answer(201, headers={"Docker-Content-Digest": sha256(request.body)})
        manifest = self.manifests.get((found[1], found[3]))
        if manifest is None:
            return Answer(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN"}]}')
        return Answer(200, manifest, {"Content-Type": IMAGE, "Docker-Content-Digest": sha256(manifest)})

    def _refused(self, request: Request) -> Answer | None:
        if self.realm is None:
            return None
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        is_read = request.method in ("GET", "HEAD") and "/uploads/" not in request.key
        if token in self._tokens and (is_read or token.startswith("pull,push")):
            return None
        repository = re.split("/(?:manifests|blobs)/", request.key)[0]
        scope = f"repository:{repository}:{'pull' if is_read else 'pull,push'}"
        challenge = f'Bearer realm="{self.realm}",service="a registry",scope="{scope}"'
        return Answer(401, b'{"errors":[{"code":"UNAUTHORIZED"}]}', {"WWW-Authenticate": challenge})

    def answer_token(self, request: Request) -> Answer:
        """Of the token server: for user and password, or for an identity token."""
        basic = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        query = request.query
        if request.method == "POST":
            query = {key: values[0] for key, values in parse_qs(request.body.decode()).items()}
        is_known = query.get("refresh_token") == PASSWORD or request.headers.get("authorization") == f"Basic {basic}"
        if not is_known or query.get("service") != "a registry":
            return Answer(401)
        token = f"{query['scope'].rpartition(':')[2]}-{next(self._ids)}"
        self._tokens.add(token)
        return Answer(200, json.dumps({"access_token": token}).encode())

    def _blob(self, request: Request, digest: str) -> Answer:
        content = self.blobs.get(digest)
        if content is None:
            return Answer(404, b'{"errors":[{"code":"BLOB_UNKNOWN"}]}')
        if len(content) < LARGE or request.method == "HEAD":
            return s3_server.part_of(content, f'"{digest}"', request)
        signature = hashlib.sha1(f"{digest}{next(self._ids)}".encode(), usedforsecurity=False).hexdigest()
        self._signed[signature] = content
        return Answer(307, headers={"Location": f"{self.storage.url}/blobs/{digest[7:]}?Signature={signature}"})

    def answer_storage(self, request: Request) -> Answer:
        """Of the storage of blobs."""
        if "authorization" in request.headers:
            return Answer(400, b"credentials were sent to another origin")
        content = self._signed.get(request.query.get("Signature", ""))
        return Answer(403) if content is None else s3_server.part_of(content, '"of a bucket"', request)

    def _upload(self, request: Request, repository: str, name: str) -> Answer:
        if len(request.body) > self.takes_nbytes:
            return Answer(413)
        if request.method == "POST":
            name = str(next(self._ids))
            self._uploads[name] = bytearray()
        if name not in self._uploads:
            return Answer(404, b'{"errors":[{"code":"BLOB_UPLOAD_UNKNOWN"}]}')
        held = self._uploads[name]
        begun = re.fullmatch("([0-9]+)-([0-9]+)", request.headers.get("content-range", ""))
        if begun and int(begun[1]) != len(held):
            return Answer(416)
        held += request.body
        if request.method == "PUT":
            del self._uploads[name]
            if sha256(bytes(held)) != request.query["digest"]:
                return Answer(400, b'{"errors":[{"code":"DIGEST_INVALID"}]}')
            self.blobs[request.query["digest"]] = bytes(held)
            return Answer(201, headers={"Docker-Content-Digest": request.query["digest"]})
        where = {"Location": f"/v2/{repository}/blobs/uploads/{name}", "Range": f"0-{max(0, len(held) - 1)}"}
        return Answer(204 if request.method == "GET" else 202, headers=where)


@cache
def shared() -> Registry:
    """A registry that runs until the process ends; each test has a repository of its own."""
    api, storage, tokens = servers = [s3_server.Server() for _ in range(3)]
    for server in servers:
        threading.Thread(target=server.serve, daemon=True).start()
    return _connected(api, storage, tokens)


def _connected(api: s3_server.Server, storage: s3_server.Server, tokens: s3_server.Server) -> Registry:
    registry = Registry(api, storage, tokens)
    api.interfere, storage.interfere = registry.answer, registry.answer_storage
    tokens.interfere = registry.answer_token
    return registry


@contextmanager
def running() -> Iterator[Registry]:
    """A registry that runs until the end of the block."""
    with s3_server.running() as api, s3_server.running() as storage, s3_server.running() as tokens:
        yield _connected(api, storage, tokens)
