"""The publisher of registries: files are written to local scratch and sent as blobs; the manifest is written last.

An output is an artifact in the form of ModelPack: one raw layer for each file, with its path. A blob is named by its
SHA-256, and a blob that the registry has is not sent: tags with the same files share blobs. A blob without a manifest
is invisible, and its deletion is left to the registry. The next attempt finds it, so no other state is kept.

**Publishing.** One request writes the manifest under the tag, replacing the older one. Registries have no
compare-and-swap. So just before this request, the output is refused if the tag has moved to another artifact since the
output was begun.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NoReturn

from relayout.errors import FormatError, PlanError
from relayout.publish.bucket import ScratchOutput, scratch_folder
from relayout.publish.output import LocalOutput, OutputKind, OutputSpec
from relayout.storage.local.descriptors import OpenFolder
from relayout.storage.stores import Modes, Store
from relayout.storage.web.oci import (
    MANIFEST_TYPE,
    MAX_MANIFEST_NBYTES,
    PATH_ANNOTATION,
    TITLE_ANNOTATION,
    Artifact,
    OciClient,
    OciStore,
    Pieces,
    digest_of,
)

_SMALL_NBYTES = 2**20
"""Maximum bytes of a file that is kept in memory."""
_PIECE_NBYTES = 2**20
_NUM_BLOBS = 4
"""Number of blobs that are sent at the same time."""

# modelpack/model-spec, specs-go/v1/mediatype.go.
_ARTIFACT_TYPE = "application/vnd.cncf.model.manifest.v1+json"
_CONFIG_TYPE = "application/vnd.cncf.model.config.v1+json"
_KINDS = {".safetensors": "weight", ".py": "code", ".md": "doc"}


@dataclass(frozen=True, slots=True)
class RegistryPublisher:
    """The publisher for a tag; see `publishers.StorePublisher`."""

    store: OciStore

    @staticmethod
    def of(store: OciStore) -> RegistryPublisher:
        """Return the publisher of a store. PlanError: the store is not a tag."""
        if store.prefix or store.client.is_pinned:
            raise PlanError("an output needs a tag, as oci://REGISTRY/NAME:TAG", path=str(store), code="option")
        return RegistryPublisher(store)

    def check(self, source: Store, older: OutputKind, *, force: bool) -> None:
        own, other = f"{self.store}/", f"{source}/"
        if other.startswith(own):
            raise PlanError("is the source itself; choose another tag", path=str(self.store), code="exists")
        self._check_vacant(older, force=force)

    def _check_vacant(self, older: OutputKind, *, force: bool) -> Artifact | None:
        """Return the artifact with the tag, or None.

        Raises:
            PlanError: it may not be replaced. `force` replaces only an output of relayout, identified by its marker.
        """
        try:
            artifact = self.store.client.artifact
        except FormatError as error:
            what = f"is another artifact, which relayout did not write; choose another tag: {error.what}"
            raise PlanError(what, path=str(self.store), code="exists") from None
        if artifact is not None:
            older.check(self.store, artifact.files.keys() or ["no file"], force=force)
        return artifact

    @contextmanager
    def begin(
        self, older: OutputKind, work: OutputSpec, *, force: bool, gathers: bool = False
    ) -> Iterator[RegistryOutput]:
        if gathers:
            self._refuse()
        before = self._check_vacant(older, force=force)
        with scratch_folder(work.scratch) as scratch, OpenFolder(scratch) as place:
            files = LocalOutput(scratch, place, Modes())
            output = RegistryOutput(self.store.client, files, older.marker, before)
            try:
                yield output
                output.publish()
            except BaseException as error:
                if output.has_sent:
                    error.add_note(f"{self.store}: the same command does not send again what the registry has")
                raise
            finally:
                output.stop()
                files.folder.close()

    def begin_part(self, older: OutputKind, work: OutputSpec, *, force: bool) -> AbstractContextManager[RegistryOutput]:
        self._refuse()

    def replace(self, name: str, expected: bytes | None, content: bytes) -> None:
        self._refuse()

    def add(self, name: str, content: bytes) -> None:
        self._refuse()

    def remove(self, older: OutputKind) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        what = "a registry takes an output whole, by one process: make it in a folder or bucket, and relayout copy it"
        raise PlanError(what, path=str(self.store), code="unsupported")


@dataclass(frozen=True, slots=True)
class SentBlob:
    """A blob that the registry has."""

    digest: str
    nbytes: int


class RegistryOutput(ScratchOutput):
    """An output under a tag; see `Output`."""

    suffix = ""

    def __init__(self, client: OciClient, files: LocalOutput, marker: str, before: Artifact | None) -> None:
        """Begin an output that replaces the artifact `before`; None: the tag is new."""
        super().__init__(files, _NUM_BLOBS, "relayout-push")
        self._client = client
        self._before = before
        self._marker = marker
        self._complete: dict[str, int] = {}
        """Lengths of complete files in scratch that are not being sent."""
        self._small: dict[str, bytes] = {}
        self._sent: dict[str, SentBlob] = {}
        """Blobs of files that the registry has, by file name."""
        self.has_sent = False
        """True if a blob was sent."""
        self._sending: list[Future[None]] = []
        """The uploads of the last part's files, during which the next part is written."""

    def head(self, name: str, head: bytes, nbytes: int) -> None:
        self._scratch.head(name, head, nbytes)
        with self._lock:
            self._complete[name] = nbytes

    def put(self, name: str, pieces: Iterable[bytes], mode: int | None = None) -> None:
        begun, rest = bytearray(), iter(pieces)
        for piece in rest:
            begun += piece
            if len(begun) > _SMALL_NBYTES:
                self._scratch.put(name, chain([bytes(begun)], rest))
                self._send_file(name)
                return
        self._small[name] = bytes(begun)

    def kept(self, part: str) -> bytes | None:
        """Return None: parts have no records in a registry. A file that is written again is not sent again."""
        return None

    def keep(self, part: str, notes: bytes) -> None:
        """Send the files in the background. Later calls raise the errors."""
        with self._lock:
            names, self._complete = list(self._complete), {}
        self._wait()
        self._sending = [self._sender.submit(self._send_file, name) for name in names]

    def _wait(self) -> None:
        sending, self._sending = self._sending, []
        for future in sending:
            future.result()

    def _send_file(self, name: str) -> None:
        """Send a file from scratch, and delete it there."""
        path = self._scratch.folder.path / name
        with path.open("rb") as stream:
            digest = f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"
        self._send(name, digest, path.stat().st_size, lambda start, end: _pieces_of(path, start, end))
        self._scratch.remove(name)

    def _send(self, name: str, digest: str, nbytes: int, pieces: Pieces) -> None:
        self._send_blob(digest, nbytes, pieces)
        self._sent[name] = SentBlob(digest, nbytes)

    def _send_blob(self, digest: str, nbytes: int, pieces: Pieces) -> None:
        if not self._client.has_blob(digest, nbytes):
            self._client.push_blob(digest, nbytes, lambda start, end: self._going_on(pieces(start, end)))
            self.has_sent = True

    def _going_on(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            self._check_going_on()
            yield piece

    def _send_content(self, content: bytes) -> SentBlob:
        sent = SentBlob(digest_of(content), len(content))
        self._send_blob(sent.digest, sent.nbytes, lambda start, end: iter([content[start:end]]))
        return sent

    def publish(self) -> None:
        """Send the remaining files, and write the manifest.

        Raises:
            PlanError: the tag has moved to another artifact; or the manifest is larger than registries accept.
        """
        self.keep("rest", b"")
        self._wait()
        small = list(self._small.items())
        self._sent |= dict(
            zip(self._small, self._sender.map(lambda one: self._send_content(one[1]), small), strict=True)
        )
        config = self._send_content(_config(self._sent))
        manifest = _manifest(self._sent, config, self._marker)
        if len(manifest) > MAX_MANIFEST_NBYTES:
            what = f"{len(self._sent)} files: more than fit into a manifest of {MAX_MANIFEST_NBYTES} bytes"
            raise PlanError(what, path=self._client.root, code="limit")
        there = self._client.again().artifact
        if there is not None and there.digest == digest_of(manifest):
            return
        if there != self._before:
            what = "another process has moved the tag meanwhile; nothing was published"
            raise PlanError(what, path=self._client.root, code="exists")
        self._client.put_manifest(manifest)


def _pieces_of(path: Path, start: int, end: int) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as stream:
        stream.seek(start)
        while start < end and (piece := stream.read(min(_PIECE_NBYTES, end - start))):
            start += len(piece)
            yield piece


def _in_order(files: dict[str, SentBlob], marker: str) -> list[tuple[str, SentBlob]]:
    """Return the files by name, the marker last: a copy in this order is complete once it has the marker."""
    return sorted(files.items(), key=lambda file: (file[0] == marker, file[0]))


def _config(files: dict[str, SentBlob]) -> bytes:
    """Return the configuration of a model artifact (modelpack/model-spec, docs/config.md); equal for equal files."""
    digests = [blob.digest for _, blob in sorted(files.items())]
    top = {"descriptor": {}, "modelfs": {"type": "layers", "diffIds": digests}, "config": {"format": "safetensors"}}
    return json.dumps(top, indent=2).encode()


def _manifest(files: dict[str, SentBlob], config: SentBlob, marker: str) -> bytes:
    layers = [
        {
            "mediaType": f"application/vnd.cncf.model.{_kind_of(name)}.v1.raw",
            "digest": blob.digest,
            "size": blob.nbytes,
            "annotations": {PATH_ANNOTATION: name, TITLE_ANNOTATION: name},
        }
        for name, blob in _in_order(files, marker)
    ]
    top = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": _ARTIFACT_TYPE,
        "config": {"mediaType": _CONFIG_TYPE, "digest": config.digest, "size": config.nbytes},
        "layers": layers,
    }
    return json.dumps(top, indent=2, ensure_ascii=False).encode()


def _kind_of(name: str) -> str:
    """Return the kind of a file in ModelPack's media types."""
    base = name.rpartition("/")[2]
    if base.upper().startswith(("README", "LICENSE", "NOTICE")):
        return "doc"
    return _KINDS.get(base[base.rfind(".") :], "weight.config")
