"""Reads the sidecar files of a converted checkpoint: manifest, rank tables, source record."""

from __future__ import annotations

import os
from pathlib import Path

from relayout.core.digests import digest_hex
from relayout.errors import FormatError, PlanError
from relayout.format.index import MANIFEST_NAME, Manifest, RankTable
from relayout.format.manifest import (
    MAX_MANIFEST_NBYTES,
    MAX_TABLE_NBYTES,
    SOURCE_RECORD_NAME,
    decompress,
    header_prefix,
    parse_manifest,
)
from relayout.format.rank_table import parse_table
from relayout.format.safetensors import LENGTH_NBYTES
from relayout.format.source_record import SourceRecord, parse_record
from relayout.storage.files import TO_READ, check_regular, naming, read_small
from relayout.storage.paths import member

MAX_TABLE_FILE_NBYTES = MAX_TABLE_NBYTES
"""Limit of a table or record as stored, compressed."""


def read_manifest(folder: Path) -> Manifest:
    """Read and check relayout.json.

    Raises:
        FormatError: it cannot be read or is damaged.
    """
    if not os.path.lexists(folder):
        raise FormatError(f"{folder}: no such file or folder{waiting(folder)}")
    path = member(folder, MANIFEST_NAME)
    return parse_manifest(read_small(path, MAX_MANIFEST_NBYTES), str(path))


def older_folder(path: Path) -> Path:
    """Where a folder that --force replaces waits for the new one, if the two cannot change places in one step."""
    return path.parent / f".{path.name}.relayout-old"


def waiting(path: Path) -> str:
    """What to add to the news that there is nothing at `path`: where an older folder waits to be put back, if one does.

    A conversion with --force that ends between two renames leaves it there.
    """
    old = older_folder(path)
    return f"; the older folder, which was being replaced, is {old}: it can be renamed back" if old.is_dir() else ""


def check_rank(rank: int, num_ranks: int) -> None:
    """Refuse a rank that does not exist.

    Raises:
        PlanError: `rank` is not one of the `num_ranks`.
    """
    if not 0 <= rank < num_ranks:
        raise PlanError(f"rank {rank}, expected 0 to {num_ranks - 1} (tensor-parallel degree {num_ranks})")


def read_table(folder: Path, manifest: Manifest, rank: int) -> RankTable:
    """Read and check one rank's table.

    Raises:
        FormatError: it cannot be read, is damaged, or belongs to another conversion.
    """
    path = member(folder, manifest.ranks[rank].table)
    return parse_table(read_small(path, MAX_TABLE_FILE_NBYTES), manifest, rank, str(path))


def read_record(folder: Path, manifest: Manifest) -> SourceRecord:
    """Read and check the source record.

    Raises:
        FormatError: it cannot be read, is damaged, or of another conversion.
    """
    path = member(folder, SOURCE_RECORD_NAME)
    blob = read_small(path, MAX_TABLE_FILE_NBYTES)
    text = decompress(blob, str(path))
    if (digest_hex(blob), digest_hex(text)) != (manifest.record_digest, manifest.conversion):
        raise FormatError(f"{path}: digest differs from the one that the manifest names")
    return parse_record(text, manifest.num_ranks, str(path))


def check_owner(folder: Path, manifest: Manifest, rank: int) -> None:
    """Check that the rank's files say in their headers that they are this rank's, of this conversion.

    Raises:
        FormatError: one does not: files of different conversions or ranks have been mixed.
    """
    for part, file in enumerate(manifest.ranks[rank].files):
        expected = header_prefix(rank, manifest.num_ranks, part, manifest.conversion)
        path = member(folder, file.name)
        found = _read_start(path, LENGTH_NBYTES + len(expected))
        if found[LENGTH_NBYTES:] != expected:
            raise FormatError(f"{path}: its header is not of rank {rank}, part {part}, of this conversion")


def _read_start(path: Path, nbytes: int) -> bytes:
    """The first bytes of a file, fewer if it has not so many."""
    try:
        check_regular(path)
        fd = os.open(path, TO_READ)
    except FileNotFoundError:
        raise FormatError(f"{path}: is missing") from None
    with naming(path), open(fd, "rb", buffering=0) as file:
        found = b""
        while chunk := file.read(nbytes - len(found)):
            found += chunk
        return found
