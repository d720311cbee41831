"""`verify` of a plain checkpoint: checks files against known digests, and headers against the index."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relayout.checkpoint.recorded_digests import (
    NUM_STREAMS,
    SUMS_NAME,
    differs,
    grouped,
    hex_of,
    recorded_digests,
    to_hash,
)
from relayout.checkpoint.source import read_source
from relayout.checkpoint.trust import Trust, policy_of, verify_source_signature
from relayout.conversion.consistency import Difference, difference, difference_of
from relayout.conversion.run import DEFAULT_MEMORY, DEFAULT_THREADS, num_readers_of, share_memory
from relayout.errors import FormatError, PlanError
from relayout.format.index import MANIFEST_NAME, RANK_FILE, SIGNATURE_NAME
from relayout.format.source_record import FileDigest
from relayout.reporting import Progress, Result, reporting
from relayout.storage.reading import hash_files
from relayout.storage.stores import Kind, Store, find_input, nowhere


@dataclass(frozen=True, slots=True, repr=False)
class SourceVerification(Result):
    """Result of `verify_source`."""

    path: str
    num_tensors: int
    """Number of tensors in the headers; 0 if the headers cannot be read."""
    verified: tuple[FileDigest, ...]
    """Files that match a known digest, with the digest and its origin. A file may have several entries."""
    unknown: tuple[str, ...]
    """Files without a known digest: their bytes were not compared."""
    shards: tuple[str, ...]
    """Files that contain tensors; empty if a header or the index is damaged."""
    nbytes: int
    """Bytes that were hashed."""
    signer: str | None
    """The verified signer, as named in the policy. None: verified without a policy."""
    has_signature: bool
    """True if a signature exists, verified or not."""
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        """True if no differences were found, even if nothing could be compared; see `is_verified`."""
        return not self.differences

    @property
    def is_verified(self) -> bool:
        """True if every byte of every shard was compared with a known digest, and nothing differs."""
        return self.ok and bool(self.shards) and set(self.shards).isdisjoint(self.unknown)

    def as_json(self) -> dict[str, object]:
        return Result.as_json(self) | {"ok": self.ok, "is_verified": self.is_verified}


def is_unconverted(store: Store) -> bool:
    """Return True for a safetensors file, and for a folder with such files and no part of a converted checkpoint."""
    if store.kind() is not Kind.FOLDER:
        return store.kind() is Kind.FILE
    if store.stat(MANIFEST_NAME) is not None:
        return False
    names = [entry.name for entry in store.walk(nowhere) if entry.name.endswith(".safetensors")]
    return bool(names) and not any(map(RANK_FILE.fullmatch, names))


def verify_source(
    path: str | os.PathLike[str],
    *,
    trust: Trust = None,
    threads: int = DEFAULT_THREADS,
    memory: int | str = DEFAULT_MEMORY,
    progress: Progress = None,
) -> SourceVerification:
    """Check a plain checkpoint without a network: every byte that has a known digest, then headers and index.

    Known digests come from the names of blobs in the cache of the hub, the metadata of `hf download --local-dir`,
    SHA256SUMS, and (with a policy) model.sig. Only the signature protects against forgery. The other digests detect
    damage: anyone who can write to the folder can replace these digests as well.

    Args:
        path: a snapshot in the cache of the hub, another folder of a plain checkpoint, or one safetensors file.
        trust: policy of accepted signers, as for `load`. Every file must then be signed.
        threads: threads that read and hash.
        memory: bytes that these threads may use, or text such as "512MiB".
        progress: True for a bar on stderr, or a function that is called with (bytes done, total bytes).

    Returns:
        The differences found, the verified files with their digests, and the files that could not be verified.

    Raises:
        FormatError: SHA256SUMS cannot be read, or the signature is not by a signer of the policy.
        PlanError: `path` is not a plain checkpoint.
        OSError: reading failed.

    Example:
        >>> import relayout
        >>> relayout.verify_source("llama-3.1-8b").ok
        True
    """
    num_readers = num_readers_of(*share_memory(threads, memory))
    store, policy = find_input(path), policy_of(trust)
    if not is_unconverted(store):
        raise PlanError("is not a plain checkpoint: relayout verify", path=str(store), code="option")
    is_file = store.kind() is Kind.FILE
    folder, only = store.parent() if is_file else (store, None)
    signer, signed = (None, None) if policy is None else verify_source_signature(folder, policy)
    found: list[Difference] = []
    names = [only] if only is not None else _files(folder, found)
    known = recorded_digests(folder, names)
    if signed is not None:
        known += [FileDigest(name, f"sha256:{digest}", SIGNATURE_NAME) for name, digest in signed.items()]
        found += [_other(name, "is not signed") for name in names if name not in (SIGNATURE_NAME, *signed)]
    known = [one for one in known if only in (None, one.name)]
    verified, nbytes = _compare(folder, known, found, num_readers, progress)
    # Headers and index come last: a damaged byte in them is also a difference of its file.
    shards, num_tensors = _shards(store, found)
    stated = {one.name for one in known} | {difference.file for difference in found} | {SUMS_NAME, SIGNATURE_NAME}
    return SourceVerification(
        path=str(store),
        num_tensors=num_tensors,
        verified=tuple(verified),
        unknown=tuple(sorted(name for name in names if name not in stated)),
        shards=shards,
        nbytes=nbytes,
        signer=signer,
        has_signature=signed is not None or folder.stat(SIGNATURE_NAME) is not None,
        differences=tuple(dict.fromkeys(found)),
    )


def _files(folder: Store, found: list[Difference]) -> list[str]:
    """Return the names of a folder's files, and append entries that cannot be read to `found`."""
    names = []
    for entry in folder.walk():
        if entry.refusal is not None:
            found.append(_other(entry.name, entry.refusal))
        elif not entry.is_folder:
            names.append(entry.name)
    return sorted(names)


def _compare(
    folder: Store, known: Sequence[FileDigest], found: list[Difference], threads: int, progress: Progress
) -> tuple[list[FileDigest], int]:
    """Hash the files once per digest, and append differing and missing files to `found`.

    Returns:
        The digests that match, and the number of bytes that were hashed.
    """
    refused = {difference.file for difference in found}
    groups, files = [], []
    for same in grouped(one for one in known if one.name not in refused):
        first = same[0]
        try:
            status = folder.stat(first.name)
            if status is None:
                raise FormatError(f"is missing, and in {first.by}", path=folder.location(first.name), code="missing")
        except FormatError as error:
            found.append(difference_of(first.name, error, "source"))
            continue
        groups.append(same)
        files.append(to_hash(folder, first, status.nbytes))
    total = sum(chunk.nbytes for file in files for chunk in file.chunks)
    with reporting(progress, "verifying", total) as report:
        hashed = hash_files(files, threads, report, num_streams=NUM_STREAMS)
    verified = []
    for same, (whole,) in zip(groups, hashed, strict=True):
        if whole == hex_of(same[0]):
            verified += same
        else:
            found.append(_other(same[0].name, differs(same[0], whole)))
    return verified, total


def _shards(store: Store, found: list[Difference]) -> tuple[tuple[str, ...], int]:
    """Return the files with tensors and the number of tensors; append errors in headers and index to `found`."""
    try:
        source = read_source(store)
    except FormatError as error:
        name = str(store) if error.path is None else Path(str(error.path)).name
        found.append(difference_of(name, error, "source"))
        return (), 0
    return tuple(file.name for file in source.files), len(source.tensors)


def _other(name: str, what: str) -> Difference:
    return difference(name, what, culprit="source")
