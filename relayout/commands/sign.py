"""`sign`: signs a converted checkpoint, in the format of OpenSSF Model Signing, by the package model-signing."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from relayout.checkpoint.converted import (
    MAX_SIGNATURE_NBYTES,
    Proven,
    index_of,
    names_of,
    names_of_index,
    proof_of,
    read_chunk_digests,
    read_manifest_blob,
    read_record,
    sizes_of,
)
from relayout.checkpoint.trust import package_missing
from relayout.core.arguments import integer
from relayout.core.digests import new_proof, proof_hex
from relayout.core.workers import each
from relayout.errors import FormatError, PlanError, shown
from relayout.format.fields import parse_object
from relayout.format.index import CHUNKS_NAME, HUB_INDEX_NAME, MANIFEST_NAME, SIGNATURE_NAME, Manifest
from relayout.format.manifest import SOURCE_RECORD_NAME, content_of, parse_manifest
from relayout.publish.publishers import publisher_of
from relayout.reporting import Progress, Result, reporting
from relayout.storage.reading import sha256_hex
from relayout.storage.stores import Access, Store, find_input

_DEFAULT_THREADS = 8


@dataclass(frozen=True, slots=True, repr=False)
class SignatureWritten(Result):
    """What was signed."""

    signature: str
    """Where the signature is."""
    content: str
    """Content of the folder, see `manifest.content_of`: a policy can name it."""
    num_files: int
    nbytes: int
    """Bytes of all files, which were read once."""
    seconds: float


def sign(
    path: str | os.PathLike[str],
    *,
    key: str | os.PathLike[str],
    certificate: str | os.PathLike[str] | None = None,
    chain: Sequence[str | os.PathLike[str]] = (),
    threads: int = _DEFAULT_THREADS,
    progress: Progress = None,
) -> SignatureWritten:
    """Sign all files of a converted checkpoint, and write model.sig beside them, in place of an older signature.

    Only what is as its digests say is signed: every byte is read once, and compared. `model_signing verify` accepts the
    folder; `trust` of `load` and others proves what they read of it.

    Args:
        path: a converted folder, or its URL.
        key: a private key (PEM, an elliptic curve).
        certificate: of that key (PEM).
        chain: of certificates that lead to a root.
        threads: files that are read at the same time.
        progress: True for a bar on stderr, or a function that is called with (bytes done, total bytes).

    Raises:
        FormatError: the folder is damaged.
        PlanError: the key cannot be used; a chain without a certificate; model.sig is no signature; or the package
            is missing.
        OSError: reading or writing failed.

    Example:
        >>> import relayout
        >>> relayout.sign("llama-3.1-8b-tp8", key="release.key").signature
        'llama-3.1-8b-tp8/model.sig'
    """
    started = time.monotonic()
    if chain and certificate is None:
        raise PlanError("--chain needs --certificate", code="option")
    store = find_input(path)
    blob = read_manifest_blob(store)
    manifest = parse_manifest(blob, store.location(MANIFEST_NAME))
    _check_older(store)
    signer = _signer(key, certificate, chain)
    expected = _expected(store, manifest, blob)
    sizes = _sizes(store, expected)
    digests: dict[str, str] = {}
    with reporting(progress, "hashing", sum(sizes.values())) as report:

        def digest(name: str) -> None:
            digests[name] = _digest(store, manifest, name, expected.get(name))
            report(sum(sizes[done] for done in list(digests)))

        each(digest, list(sizes), integer(threads, "threads"))
    signature = _signed(signer, Path(str(path)).name, digests)
    publisher_of(store).add(SIGNATURE_NAME, signature)
    return SignatureWritten(
        signature=store.location(SIGNATURE_NAME),
        content=content_of(blob),
        num_files=len(digests),
        nbytes=sum(sizes.values()),
        seconds=time.monotonic() - started,
    )


def _check_older(store: Store) -> None:
    """Check that what is to be replaced is a signature."""
    try:
        blob = store.read(SIGNATURE_NAME, MAX_SIGNATURE_NBYTES)
        is_signature = "dsseEnvelope" in parse_object(blob, SIGNATURE_NAME)
    except FormatError as error:
        if error.code == "missing":
            return
        is_signature = False
    if not is_signature:
        raise PlanError("is there and is no signature: remove it", path=store.location(SIGNATURE_NAME), code="exists")


def _expected(store: Store, manifest: Manifest, blob: bytes) -> dict[str, str | None]:
    """The proof of each file that manifest and record name; None for weight files, whose pieces they prove."""
    record = read_record(store, manifest)
    expected: dict[str, str | None] = dict.fromkeys(names_of(manifest, record))
    expected |= {side.name: side.digest for side in record.side_files}
    expected |= {holder.table: holder.table_digest for holder in manifest.holders.values()}
    expected |= {MANIFEST_NAME: proof_hex(blob), SOURCE_RECORD_NAME: manifest.record_digest}
    if HUB_INDEX_NAME in names_of_index(manifest):
        expected[HUB_INDEX_NAME] = manifest.hub_index_digest
    chunks = (read_chunk_digests(store, manifest, index) for index in range(len(manifest.files)))
    expected[CHUNKS_NAME] = proof_hex(b"".join(chunks))
    return expected


def _sizes(store: Store, expected: Mapping[str, object]) -> dict[str, int]:
    """The length of each file to be signed: all that is there but an older signature, hidden files and caches."""
    names = set(expected)
    for entry in store.walk():
        if entry.refusal is not None:
            raise FormatError(entry.refusal, path=store.location(entry.name), code="unsafe")
        if not entry.is_folder:
            names.add(entry.name)
    return sizes_of(store, names - {SIGNATURE_NAME})


def _digest(store: Store, manifest: Manifest, name: str, expected: str | None) -> str:
    """The SHA-256 of a file that is as manifest and record say."""
    where = store.location(name)
    index = index_of(manifest, name)
    if index is None:
        digest = sha256_hex(store.open(name, access=Access.BUFFERED), proof := new_proof())
        if expected not in (None, proof.hexdigest()):
            raise FormatError("differs from what was written: damaged", path=where, code="digest")
    else:
        with store.open(name, manifest.files[index].nbytes, access=Access.BUFFERED) as opened:
            digest = sha256_hex(Proven(opened, proof_of(store, manifest, index, with_header=True), where))
    return digest


def _signer(
    key: str | os.PathLike[str],
    certificate: str | os.PathLike[str] | None,
    chain: Sequence[str | os.PathLike[str]],
) -> Any:
    """What signs: a `model_signing.signing.Config`."""
    try:
        from model_signing.signing import Config as AnyConfig
    except ImportError:
        raise package_missing() from None
    Config: Any = AnyConfig  # Whose methods have no types.
    try:
        if certificate is None:
            return Config().use_elliptic_key_signer(private_key=key)
        return Config().use_certificate_signer(
            private_key=key, signing_certificate=certificate, certificate_chain=chain
        )
    except OSError:
        raise
    except Exception as error:  # The package and its parsers raise many kinds, and none has a common base.
        what = f"cannot sign with it: {type(error).__name__}: {shown(str(error))}"
        raise PlanError(what, path=key, code="option") from None


def _signed(signer: Any, name: str, digests: Mapping[str, str]) -> bytes:
    """The signature of a folder of these files, by their SHA-256."""
    with TemporaryDirectory(prefix="relayout-") as folder:  # The package writes files only.
        path = Path(folder) / SIGNATURE_NAME
        signer.set_hashing_config(_Hashes(name, digests)).sign(Path(folder), path)
        return path.read_bytes()


@dataclass(frozen=True, slots=True)
class _Digest:
    """A digest as the package wants it."""

    algorithm: str
    digest_hex: str

    @property
    def digest_value(self) -> bytes:
        return bytes.fromhex(self.digest_hex)


@dataclass(frozen=True, slots=True)
class _Hashes:
    """Stands for the package's own hashing of a folder, which reads local files only."""

    name: str
    digests: Mapping[str, str]

    def hash(self, model_path: object) -> Any:
        """The manifest to be signed."""
        from model_signing.manifest import FileManifestItem, Manifest, SerializationType

        items = [
            FileManifestItem(path=Path(name), digest=_Digest("sha256", digest))  # type: ignore[arg-type]
            for name, digest in self.digests.items()
        ]
        how = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": [SIGNATURE_NAME]}
        return Manifest(self.name, items, SerializationType.from_args(how))
