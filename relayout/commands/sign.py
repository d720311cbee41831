"""`sign`: signs a converted checkpoint in the format of OpenSSF Model Signing, with the package model-signing."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from relayout.checkpoint.converted import (
    MAX_SIGNATURE_NBYTES,
    VerifiedFile,
    digests_of_side_files,
    digests_of_small,
    file_digests_of,
    index_of,
    names_of,
    names_of_index,
    read_chunk_digests,
    read_manifest_blob,
    read_packed_digests,
    read_record,
    read_small,
    sizes_of,
)
from relayout.checkpoint.delta import Delta, is_delta, read_delta
from relayout.checkpoint.signing import signed, signer_of
from relayout.core.arguments import integer
from relayout.core.digests import blake3_hex, new_blake3
from relayout.core.workers import each
from relayout.errors import FormatError, PlanError
from relayout.format.delta import NEW
from relayout.format.fields import parse_object
from relayout.format.index import CHUNKS_NAME, DIGESTS_NAME, HUB_INDEX_NAME, MANIFEST_NAME, SIGNATURE_NAME, Manifest
from relayout.format.manifest import SOURCE_RECORD_NAME, content_of, parse_manifest
from relayout.publish.publishers import publisher_of
from relayout.reporting import Progress, Result, reporting
from relayout.storage.reading import sha256_hex
from relayout.storage.stores import Access, Store, find_input

_DEFAULT_THREADS = 8
_PIECES_AT_ONCE = 16
"""Number of pieces of a delta that are read at once."""


@dataclass(frozen=True, slots=True, repr=False)
class SignResult(Result):
    """Result of `sign`."""

    signature: str
    """Path or URL of the signature."""
    content: str
    """Content of the folder, or of the result of the delta (see `manifest.content_of`). A policy can require it."""
    num_files: int
    nbytes: int
    """Bytes of all files; each file was read once."""
    seconds: float


def sign(
    path: str | os.PathLike[str],
    *,
    key: str | os.PathLike[str],
    certificate: str | os.PathLike[str] | None = None,
    chain: Sequence[str | os.PathLike[str]] = (),
    threads: int = _DEFAULT_THREADS,
    progress: Progress = None,
) -> SignResult:
    """Sign a converted checkpoint or a delta: write model.sig next to its files, replacing an older signature.

    Every byte is read once and compared with its digest before it is signed. For a folder, the signature covers all
    files, and `model_signing verify` accepts it. For a delta, it covers relayout.json, which has the digests of all
    other files. Functions with `trust`, such as `load`, verify the files that they read.

    Args:
        path: a converted folder, a delta, or its URL.
        key: a private key on an elliptic curve, as PEM.
        certificate: the certificate of that key (PEM).
        chain: certificates that lead to a root.
        threads: number of files that are read concurrently.
        progress: True for a bar on stderr, or a function that is called with (bytes done, total bytes).

    Raises:
        FormatError: the folder or the delta is damaged.
        PlanError: the key cannot be used; or a chain has no certificate; or model.sig is not a signature; or the
            package is missing.
        OSError: reading or writing failed.

    Example:
        >>> import relayout
        >>> relayout.sign("llama-3.1-8b-tp8", key="release.key").signature
        'llama-3.1-8b-tp8/model.sig'
    """
    started = time.monotonic()
    store = find_input(path)
    if is_delta(path):
        return _sign_delta(store, Path(str(path)).name, signer_of(key, certificate, chain), progress)
    blob = read_manifest_blob(store)
    manifest = parse_manifest(blob, store.location(MANIFEST_NAME))
    _check_older(store)
    signer = signer_of(key, certificate, chain)
    expected = _expected(store, manifest, blob)
    sizes = _sizes(store, expected)
    digests: dict[str, str] = {}
    with reporting(progress, "hashing", sum(sizes.values())) as report:

        def digest(name: str) -> None:
            digests[name] = _digest(store, manifest, name, expected.get(name))
            report(sum(sizes[done] for done in list(digests)))

        each(digest, list(sizes), integer(threads, "threads"))
    signature = signed(signer, Path(str(path)).name, digests)
    publisher_of(store).add(SIGNATURE_NAME, signature)
    return SignResult(
        signature=store.location(SIGNATURE_NAME),
        content=content_of(blob),
        num_files=len(digests),
        nbytes=sum(sizes.values()),
        seconds=time.monotonic() - started,
    )


def _sign_delta(store: Store, name: str, signer: Any, progress: Progress) -> SignResult:
    """Sign a delta, after checking that all its files match its manifests."""
    started, delta = time.monotonic(), read_delta(store)
    _check_older(store)
    nbytes = sum(file.nbytes for file in delta.manifest.files)
    with reporting(progress, "reading", nbytes) as report:
        done = 0
        for file in delta.manifest.files:
            _read_pieces(delta, file.number)
            done += file.nbytes
            report(done)
    for position in range(len(delta.manifest.digests)):
        delta.changed_digests(position)
    others = delta.manifest.others
    record = read_record(store, delta.new, NEW) if SOURCE_RECORD_NAME in others else None
    known = digests_of_small(delta.new) | ({} if record is None else digests_of_side_files(record))
    for other in others:
        if other == SIGNATURE_NAME:
            continue
        if other not in known:
            raise FormatError("has no digest in the result", path=store.location(NEW + other), code="mismatch")
        read_small(store, NEW + other, known[other])
    signature = signed(signer, name, {MANIFEST_NAME: sha256(read_manifest_blob(store)).hexdigest()})
    publisher_of(store).add(SIGNATURE_NAME, signature)
    return SignResult(
        signature=store.location(SIGNATURE_NAME),
        content=delta.manifest.makes,
        num_files=1,
        nbytes=nbytes,
        seconds=time.monotonic() - started,
    )


def _read_pieces(delta: Delta, number: int) -> None:
    """Read all pieces that a delta has for a file, and compare them with their digests."""
    changes = delta.changes(number)
    assert changes is not None
    first, numbers = 0, changes.index.numbers
    for end in [*numbers[_PIECES_AT_ONCE::_PIECES_AT_ONCE].tolist(), int(numbers[-1]) + 1]:
        for _ in changes.read(first, end):
            pass
        first = end


def _check_older(store: Store) -> None:
    """Raise PlanError if model.sig exists and is not a signature."""
    try:
        blob = store.read(SIGNATURE_NAME, MAX_SIGNATURE_NBYTES)
        is_signature = "dsseEnvelope" in parse_object(blob, SIGNATURE_NAME)
    except FormatError as error:
        if error.code == "missing":
            return
        is_signature = False
    if not is_signature:
        raise PlanError("exists and is not a signature; remove it", path=store.location(SIGNATURE_NAME), code="exists")


def _expected(store: Store, manifest: Manifest, blob: bytes) -> dict[str, str | None]:
    """Return the digest of each file in manifest and record; None for weight files, which are verified by chunks."""
    record = read_record(store, manifest)
    expected: dict[str, str | None] = dict.fromkeys(names_of(manifest, record))
    expected |= digests_of_side_files(record)
    expected |= {holder.table: holder.table_digest for holder in manifest.holders.values()}
    expected |= {MANIFEST_NAME: blake3_hex(blob), SOURCE_RECORD_NAME: manifest.record_digest}
    if HUB_INDEX_NAME in names_of_index(manifest):
        expected[HUB_INDEX_NAME] = manifest.hub_index_digest
    chunks = (read_chunk_digests(store, manifest, index) for index in range(len(manifest.files)))
    expected[CHUNKS_NAME] = blake3_hex(b"".join(chunks))
    digests = (read_packed_digests(store, manifest, holder) for holder in (*manifest.holders, None))
    expected[DIGESTS_NAME] = blake3_hex(b"".join(digests))
    return expected


def _sizes(store: Store, expected: Mapping[str, object]) -> dict[str, int]:
    """Return the length of each file to sign: all files except an older signature, hidden files and caches."""
    names = set(expected)
    for entry in store.walk():
        if entry.refusal is not None:
            raise FormatError(entry.refusal, path=store.location(entry.name), code="unsafe")
        if not entry.is_folder:
            names.add(entry.name)
    return sizes_of(store, names - {SIGNATURE_NAME})


def _digest(store: Store, manifest: Manifest, name: str, expected: str | None) -> str:
    """Return the SHA-256 of a file, after checking that its bytes match the manifest and record."""
    where = store.location(name)
    index = index_of(manifest, name)
    if index is None:
        digest = sha256_hex(store.open(name, access=Access.BUFFERED), proof := new_blake3())
        if expected not in (None, proof.hexdigest()):
            raise FormatError("differs from the bytes that were written: damaged", path=where, code="digest")
    else:
        with store.open(name, manifest.files[index].nbytes, access=Access.BUFFERED) as opened:
            digest = sha256_hex(VerifiedFile(opened, file_digests_of(store, manifest, index, with_header=True), where))
    return digest
