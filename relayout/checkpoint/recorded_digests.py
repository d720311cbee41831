"""Finds the known digests of a plain checkpoint's files without a network, and the origin of each.

A digest stored in the checkpoint's own folder proves that no byte was damaged since the digest was written. It does not
prove who wrote the bytes: a writer of the folder can replace the digest, too. A signature under a policy proves that.

- The cache of the hub (`models--ORG--NAME/snapshots/COMMIT`): the name of a file's blob is its hash.
- `hf download --local-dir`: `.cache/huggingface/download/NAME.metadata` has the hash of the file (huggingface_hub 2.4,
  `_local_folder.py`). As there, the hash of a file that was modified since its download is ignored.
- SHA256SUMS: the lines of `sha256sum`, also with `--tag`.
- model.sig, if there is a policy.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from relayout.core.digests import Hash
from relayout.core.extents import Extent
from relayout.errors import FormatError, about, shown
from relayout.format.fields import decode, is_plain_path
from relayout.format.source_record import FileDigest
from relayout.storage.local.store import blob_hash
from relayout.storage.reading import HashedFile
from relayout.storage.stores import Access, Store, if_there

SUMS_NAME = "SHA256SUMS"
NUM_STREAMS = 4
"""Files that are hashed at the same time: SHA-256 of one file is the work of one thread."""
_DOWNLOADS = ".cache/huggingface/download"
_MAX_SUMS_NBYTES = 16 * 2**20
_MAX_METADATA_NBYTES = 2**16
_SLACK_SECONDS = 1.0
"""Seconds by which a file may seem younger than its metadata; `_local_folder.py` allows this for inexact times."""
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_GNU = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
_TAGGED = re.compile(r"(\\?)SHA256 \((.+)\) = ([0-9a-fA-F]{64})")
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", "r": "\r", "\\": "\\"}


def recorded_digests(folder: Store, names: Iterable[str]) -> list[FileDigest]:
    """Find the digests that a folder's own files and links contain, without a signature. Reads no weights.

    Args:
        folder: the folder of a plain checkpoint.
        names: its files, as paths in the folder. SHA256SUMS may list more.

    Raises:
        FormatError: SHA256SUMS is not an output of `sha256sum`, or lists a path outside of the folder.
        OSError: reading failed.
    """
    found = []
    if folder.path("") is not None:  # Other stores have neither links nor hidden files.
        found = [one for name in names for one in (_of_cache(folder, name), _of_download(folder, name)) if one]
    return [*found, *_of_sums(folder)]


def _of_cache(folder: Store, name: str) -> FileDigest | None:
    path = folder.path("")
    value = None if path is None else blob_hash(path, name)
    return None if value is None else FileDigest(name, _tagged(value), "hub cache")


def _of_download(folder: Store, name: str) -> FileDigest | None:
    path = folder.path(name)
    if path is None or name.startswith(".") or not is_plain_path(name):
        return None
    try:
        blob = folder.read(f"{_DOWNLOADS}/{name}.metadata", _MAX_METADATA_NBYTES)
        _, value, since = blob.decode().split("\n")[:3]
        is_older = path.stat().st_mtime - _SLACK_SECONDS <= float(since)
    except (FormatError, OSError, ValueError):  # No metadata, or invalid for the hub's library.
        return None
    value = value.strip()
    return FileDigest(name, _tagged(value), "hub download") if is_older and _HASH.fullmatch(value) else None


def _tagged(value: str) -> str:
    """Return a hash of the hub with the name of its algorithm."""
    return f"{'sha256' if len(value) == 64 else 'git-sha1'}:{value}"


def _of_sums(folder: Store) -> Iterator[FileDigest]:
    blob = if_there(lambda: folder.read(SUMS_NAME, _MAX_SUMS_NBYTES))
    return iter(()) if blob is None else parse_sums(blob, folder.location(SUMS_NAME))


def parse_sums(blob: bytes, where: str) -> Iterator[FileDigest]:
    """Parse the output of `sha256sum` (GNU coreutils, "cksum output modes").

    Raises:
        FormatError: a line has another form, a path leads out of the folder, or a file is listed twice.
    """
    listed: dict[str, str] = {}
    with about(path=where):
        for number, line in enumerate(decode(blob).split("\n"), 1):
            line = line.removesuffix("\r")
            if not line or line.startswith("#"):
                continue
            if match := _GNU.fullmatch(line):
                escape, value, name = match.groups()
            elif match := _TAGGED.fullmatch(line):
                escape, name, value = match.groups()
            else:
                raise FormatError(f"line {number} is not what sha256sum writes: {shown(line)}", code="syntax")
            if escape:
                name = _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[0]), name)
            name = name.removeprefix("./")
            if not is_plain_path(name):
                raise FormatError(f"line {number}: {shown(name)} is not a file inside the folder", code="unsafe")
            if name in listed:
                raise FormatError(f"line {number}: {shown(name)} is listed twice", code="field")
            listed[name] = value.lower()
    return (FileDigest(name, f"sha256:{value}", SUMS_NAME) for name, value in listed.items())


def to_hash(
    folder: Store, known: FileDigest, nbytes: int, *, extents: list[Extent] | None = None, version: str | None = None
) -> HashedFile:
    """Describe a file for `hash_files`, to compare its digest: the last returned hash is that of the whole file.

    Args:
        known: the known digest; its algorithm is used for the whole file.
        nbytes: expected length of the file; if it differs, reading raises FormatError.
        extents: extents to hash with XXH3-128 in addition, in rising order.
        version: `FileStat.version` of the file; None: any.
    """
    opened = partial(folder.open, known.name, nbytes, access=Access.ONCE, version=version)
    return HashedFile(opened, extents or [], [Extent(0, nbytes)], _new_hash(known, nbytes))


def grouped(known: Iterable[FileDigest]) -> list[list[FileDigest]]:
    """Group equal digests of one file, so that one hash decides all of them."""
    groups: dict[tuple[str, str], list[FileDigest]] = {}
    for one in known:
        groups.setdefault((one.name, one.digest), []).append(one)
    return list(groups.values())


def differs(known: FileDigest, found: str) -> str:
    """Return the message for a file with a hash that differs from the known one."""
    algorithm = known.digest.partition(":")[0]
    return f"{algorithm} is {found}, {hex_of(known)} by {known.by}: damaged, or replaced; download it again"


def hex_of(known: FileDigest) -> str:
    """Return the digest without the name of its algorithm."""
    return known.digest.partition(":")[2]


def _new_hash(known: FileDigest, nbytes: int) -> Callable[[], Hash]:
    if known.digest.startswith("sha256:"):
        return hashlib.sha256
    # git's blob id (gitformat-pack, "object name"); SHA-1 shows damage, and proves nothing against forgery.
    return lambda: hashlib.sha1(b"blob %d\0" % nbytes, usedforsecurity=False)
