"""Reads the sidecar files of a converted checkpoint: manifest, rank tables, source record."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from relayout.storage.protocols import Kind, Store

if TYPE_CHECKING:
    from relayout.format.source_record import SourceRecord


def is_converted(folder: Store) -> bool:
    """Whether a folder is a converted checkpoint: it contains a manifest."""
    return folder.kind() is Kind.FOLDER and folder.stat(MANIFEST_NAME) is not None


def read_manifest(folder: Store) -> Manifest:
    """Read and check relayout.json.

    Raises:
        FormatError: the manifest is missing or damaged.
    """
    try:
        blob = folder.read(MANIFEST_NAME, MAX_MANIFEST_NBYTES)
    except FormatError as error:
        if error.code == "missing" and folder.kind() is Kind.NOTHING:
            raise FormatError(folder.absence(), path=str(folder), code="missing") from None
        raise
    return parse_manifest(blob, folder.where(MANIFEST_NAME))


def check_rank(folder: Store, rank: int, num_ranks: int) -> None:
    """Check that a rank exists.

    Raises:
        PlanError: `rank` is not from 0 to `num_ranks` - 1.
    """
    if not 0 <= rank < num_ranks:
        raise PlanError(
            f"rank {rank}, expected 0 to {num_ranks - 1} (tensor-parallel degree {num_ranks})",
            path=str(folder),
            code="option",
        )


def read_table(folder: Store, manifest: Manifest, rank: int) -> RankTable:
    """Read and check one rank's table.

    Raises:
        FormatError: the table is missing, damaged, or of another conversion.
    """
    name = manifest.ranks[rank].table
    return parse_table(folder.read(name, MAX_TABLE_NBYTES), manifest, rank, folder.where(name))


def read_record(folder: Store, manifest: Manifest) -> SourceRecord:
    """Read and check the source record.

    Raises:
        FormatError: the record is missing, damaged, or of another conversion.
    """
    # Imported here: a load of a rank as stored needs no record.
    from relayout.format.source_record import parse_record

    where = folder.where(SOURCE_RECORD_NAME)
    blob = folder.read(SOURCE_RECORD_NAME, MAX_TABLE_NBYTES)
    text = decompress(blob, where)
    if (digest_hex(blob), digest_hex(text)) != (manifest.record_digest, manifest.conversion):
        raise FormatError("digest differs from the one in the manifest", path=where, code="digest")
    return parse_record(text, manifest.num_ranks, where)


def check_file(folder: Store, manifest: Manifest, number: int) -> None:
    """Check that a rank file's header names this file number and this conversion.

    Raises:
        FormatError: the header names another file or conversion: files have been mixed up.
    """
    file, expected = manifest.files[number], header_prefix(number, manifest.conversion)
    start = bytearray(LENGTH_NBYTES + len(expected))
    with folder.open(file.name, file.nbytes) as opened:
        opened.read(0, memoryview(start))
    if start[LENGTH_NBYTES:] != expected:
        where = folder.where(file.name)
        raise FormatError(f"its header is not of file {number} of this conversion", path=where, code="owner")
