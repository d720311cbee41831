"""Reads the sidecar files of a converted checkpoint: manifest, rank tables, source record."""

from __future__ import annotations

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
from relayout.storage.protocols import Kind, Store

MAX_TABLE_FILE_NBYTES = MAX_TABLE_NBYTES
"""Limit of a table or record as stored, compressed."""


def is_converted(folder: Store) -> bool:
    """Whether a manifest is there, which makes a folder a converted checkpoint."""
    return folder.kind() is Kind.FOLDER and folder.stat(MANIFEST_NAME) is not None


def read_manifest(folder: Store) -> Manifest:
    """Read and check relayout.json.

    Raises:
        FormatError: it cannot be read or is damaged.
    """
    if folder.kind() is Kind.NOTHING:
        raise FormatError(folder.absence(), path=str(folder), code="missing")
    return parse_manifest(folder.read(MANIFEST_NAME, MAX_MANIFEST_NBYTES), folder.where(MANIFEST_NAME))


def check_rank(rank: int, num_ranks: int) -> None:
    """Refuse a rank that does not exist.

    Raises:
        PlanError: `rank` is not one of the `num_ranks`.
    """
    if not 0 <= rank < num_ranks:
        raise PlanError(
            f"rank {rank}, expected 0 to {num_ranks - 1} (tensor-parallel degree {num_ranks})", code="option"
        )


def read_table(folder: Store, manifest: Manifest, rank: int) -> RankTable:
    """Read and check one rank's table.

    Raises:
        FormatError: it cannot be read, is damaged, or belongs to another conversion.
    """
    name = manifest.ranks[rank].table
    return parse_table(folder.read(name, MAX_TABLE_FILE_NBYTES), manifest, rank, folder.where(name))


def read_record(folder: Store, manifest: Manifest) -> SourceRecord:
    """Read and check the source record.

    Raises:
        FormatError: it cannot be read, is damaged, or of another conversion.
    """
    where = folder.where(SOURCE_RECORD_NAME)
    blob = folder.read(SOURCE_RECORD_NAME, MAX_TABLE_FILE_NBYTES)
    text = decompress(blob, where)
    if (digest_hex(blob), digest_hex(text)) != (manifest.record_digest, manifest.conversion):
        raise FormatError("digest differs from the one that the manifest names", path=where, code="digest")
    return parse_record(text, manifest.num_ranks, where)


def check_file(folder: Store, manifest: Manifest, number: int) -> None:
    """Check that a file says in its header that it is this one, of this conversion.

    Raises:
        FormatError: it does not: files of different conversions have been mixed, or two have changed places.
    """
    file, expected = manifest.files[number], header_prefix(number, manifest.conversion)
    start = bytearray(LENGTH_NBYTES + len(expected))
    with folder.open(file.name, file.nbytes) as opened:
        opened.read(0, memoryview(start))
    if start[LENGTH_NBYTES:] != expected:
        where = folder.where(file.name)
        raise FormatError(f"its header is not of file {number} of this conversion", path=where, code="owner")
