"""Reads the sidecar files of a converted checkpoint: manifest, rank tables, source record."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable
from typing import TYPE_CHECKING

from relayout.core.arguments import ranks_text
from relayout.core.digests import DigestAlgorithm
from relayout.core.workers import each
from relayout.errors import FormatError, PlanError, about
from relayout.format.chunks import CHUNKS_NAME, places_of_digests
from relayout.format.fields import Fields, parse_object
from relayout.format.index import HUB_INDEX_NAME, MANIFEST_NAME, SIGNATURE_NAME, Manifest, RankTable
from relayout.format.manifest import (
    MAX_MANIFEST_NBYTES,
    MAX_TABLE_NBYTES,
    SOURCE_RECORD_NAME,
    decompress,
    header_prefix,
    parse_manifest,
)
from relayout.format.rank_table import parse_table
from relayout.format.safetensors import LENGTH_NBYTES, refuse_lfs_pointer
from relayout.storage.protocols import Kind, Replaceable, Store, if_there

if TYPE_CHECKING:
    from relayout.format.source_record import SourceRecord

MAX_SIGNATURE_NBYTES = 2**26

HEAD_NBYTES = 512
"""More than what `check_head` looks at, and less than any file has: its header fills at least one block."""


def is_converted(folder: Store) -> bool:
    """Whether a folder is a converted checkpoint: it contains a manifest."""
    return folder.kind() is Kind.FOLDER and folder.stat(MANIFEST_NAME) is not None


def find_manifest(folder: Store) -> Manifest | None:
    """The manifest; None if a folder is no converted checkpoint. FormatError: it is damaged."""
    blob = find_manifest_blob(folder)
    return None if blob is None else parse_manifest(blob, folder.location(MANIFEST_NAME))


def find_manifest_blob(folder: Store) -> bytes | None:
    """The manifest as stored; None if a folder is no converted checkpoint. For a remote store, one request."""
    if not folder.cost.is_remote and not is_converted(folder):
        return None
    return if_there(lambda: folder.read(MANIFEST_NAME, MAX_MANIFEST_NBYTES))


def read_manifest(folder: Store) -> Manifest:
    """Read and check relayout.json. FormatError: it is missing or damaged."""
    return parse_manifest(read_manifest_blob(folder), folder.location(MANIFEST_NAME))


def read_manifest_blob(folder: Store) -> bytes:
    """Read relayout.json. FormatError: it is missing."""
    blob = if_there(lambda: folder.read(MANIFEST_NAME, MAX_MANIFEST_NBYTES))
    if blob is None:
        what = f"not a converted folder ({MANIFEST_NAME} is missing); relayout convert makes one"
        what = folder.not_found_message() if folder.kind() is Kind.NOTHING else what
        raise FormatError(what, path=str(folder), code="missing")
    return blob


def check_rank(folder: Store, rank: int, num_ranks: int) -> None:
    """Raise PlanError unless a degree has a rank."""
    if not 0 <= rank < num_ranks:
        raise PlanError(
            f"rank {rank}, expected 0 to {num_ranks - 1} (tensor-parallel degree {num_ranks})",
            path=str(folder),
            code="option",
        )


def check_present(folder: Store, manifest: Manifest, ranks: Iterable[int]) -> None:
    """Raise PlanError unless a folder has these ranks of its degree."""
    missing = [rank for rank in ranks if manifest.ranks[rank] is None]
    if missing:
        lacks, has = ranks_text(missing), ranks_text(manifest.present)
        what = (
            f"of {manifest.num_ranks} ranks it has only {has}, and lacks {lacks}: `relayout copy FROM TO --ranks"
            f" {lacks}` copies those from a folder that has them"
        )
        raise PlanError(what, path=str(folder), code="missing")


def check_lengths(folder: Store, manifest: Manifest, holders: Iterable[int]) -> None:
    """Raise FormatError if a file of these ranks and other holders is missing, or has another length."""

    def check(index: int) -> None:
        file = manifest.files[index]
        status = folder.stat(file.name)
        if status is None:
            raise FormatError("is missing", path=folder.location(file.name), code="missing")
        status.check(folder.location(file.name), file.nbytes)

    each(
        check, sorted({index for holder in holders for index in manifest.holders[holder].files}), folder.cost.num_opens
    )


def check_intact(folder: Store) -> None:
    """Check a converted checkpoint without reading its weights: that what its manifest lists is all there.

    Raises:
        FormatError: the manifest is damaged; or a file is missing, or has another length, or another head or digest
            than the manifest says.
        OSError: a file cannot be read.
    """
    manifest = read_manifest(folder)
    check_lengths(folder, manifest, manifest.holders)
    for index in range(len(manifest.files)):
        check_file(folder, manifest, index)
    for name, digest in digests_of_small(manifest).items():
        check_small(folder, manifest, name, digest)
    folder.open(CHUNKS_NAME, chunks_nbytes(manifest)).close()


def digests_of_small(manifest: Manifest) -> dict[str, str]:
    """The small files whose digests are in the manifest, by name: rank tables, source record, and stock index."""
    tables = {holder.table: holder.table_digest for holder in manifest.holders.values()}
    index = {} if manifest.hub_index_digest is None else {HUB_INDEX_NAME: manifest.hub_index_digest}
    return {**tables, SOURCE_RECORD_NAME: manifest.record_digest, **index}


def check_small(folder: Store, manifest: Manifest, name: str, digest: str) -> None:
    """Raise FormatError unless a small file is there and has this digest."""
    if manifest.digest.hex(folder.read(name, MAX_TABLE_NBYTES)) != digest:
        what = f"digest differs from the one in {MANIFEST_NAME}: damaged, or of another conversion"
        raise FormatError(what, path=folder.location(name), code="digest")


def chunks_nbytes(manifest: Manifest) -> int:
    """The length of relayout.chunks."""
    places = places_of_digests(manifest.files, manifest.chunk_nbytes, manifest.digest)
    return places[-1].end if places else 0


def read_table(folder: Store, manifest: Manifest, rank: int) -> RankTable:
    """Read and check the table of one rank that the folder has, or of another holder. FormatError: it is damaged."""
    name = manifest.holders[rank].table
    return parse_table(folder.read(name, MAX_TABLE_NBYTES), manifest, rank, folder.location(name))


def read_record(folder: Store, manifest: Manifest) -> SourceRecord:
    """Read and check the source record. FormatError: it is missing, damaged, or of another conversion."""
    # Imported here: a load of a rank as stored needs no record.
    from relayout.format.source_record import parse_record

    where = folder.location(SOURCE_RECORD_NAME)
    blob = folder.read(SOURCE_RECORD_NAME, MAX_TABLE_NBYTES)
    with about(path=where):
        refuse_lfs_pointer(blob)
        if manifest.digest.hex(blob) != manifest.record_digest:
            raise FormatError("digest differs from the one in the manifest", code="digest")
    return parse_record(decompress(blob, where), manifest.num_ranks, where)


def names_of_output(folder: Store) -> frozenset[str]:
    """Names of all files of a converted checkpoint, as its manifest and source record name them."""
    blob = read_manifest_blob(folder)
    manifest = parse_manifest(blob, folder.location(MANIFEST_NAME))
    signature = [] if find_signature(folder, blob) is None else [SIGNATURE_NAME]
    return names_of(manifest, read_record(folder, manifest)).union(signature)


def find_signature(folder: Store, blob: bytes) -> bytes | None:
    """The signature beside a manifest, given as stored, if it lists the SHA-256 of that, else None; not verified."""
    try:
        signature = folder.read(SIGNATURE_NAME, MAX_SIGNATURE_NBYTES)
        envelope = Fields(Fields(parse_object(signature, SIGNATURE_NAME)).object("dsseEnvelope"))
        payload = b64decode(envelope.text("payload"), validate=True)
    except (FormatError, ValueError):
        return None
    return signature if DigestAlgorithm.SHA256.hex(blob).encode() in payload else None


def names_of(manifest: Manifest, record: SourceRecord) -> frozenset[str]:
    """Names of all files that a manifest and a source record name, themselves included."""
    weights, sides = (file.name for file in manifest.files), (side.name for side in record.side_files)
    return frozenset([*names_of_index(manifest), *weights, *sides])


def names_of_index(manifest: Manifest) -> list[str]:
    """The files of a converted checkpoint beside weights and side files, the manifest last."""
    hub_index = [] if manifest.hub_index_digest is None else [HUB_INDEX_NAME]
    tables = [holder.table for holder in manifest.holders.values()]
    return [SOURCE_RECORD_NAME, CHUNKS_NAME, *tables, *hub_index, MANIFEST_NAME]


def describe_output(folder: Store) -> str:
    """What a converted checkpoint is, by its manifest, which is written last.

    Raises:
        FormatError: it is damaged, or foreign.
    """
    manifest = read_manifest(folder)
    model = f"model type {manifest.model_type}" if manifest.model_type else "a model"
    some = "" if manifest.has_all else f" (ranks {ranks_text(manifest.present)})"
    return f"a complete conversion of {model}, {manifest.source_nbytes:,} bytes, at TP {manifest.num_ranks}{some}"


CONVERTED = Replaceable(MANIFEST_NAME, describe_output, names_of_output)
"""An output of `convert`, the only one that `force` replaces."""


def read_chunk_digests(folder: Store, manifest: Manifest, index: int) -> bytes:
    """The digests of the chunks of a file, one after the other, in binary form. FormatError: they are damaged."""
    file = manifest.files[index]
    places = places_of_digests(manifest.files, manifest.chunk_nbytes, manifest.digest)
    place = places[index]
    digests = memoryview(bytearray(place.nbytes))
    with folder.open(CHUNKS_NAME) as opened:
        if opened.nbytes != places[-1].end:
            what = f"{opened.nbytes} bytes long, expected {places[-1].end}"
            raise FormatError(what, path=folder.location(CHUNKS_NAME), code="mismatch")
        opened.read(place.offset, digests)
    if manifest.digest.hex(digests) != file.chunks_digest:
        where = folder.location(CHUNKS_NAME)
        raise FormatError(f"its part for {file.name} differs from the manifest", path=where, code="digest")
    return bytes(digests)


def check_file(folder: Store, manifest: Manifest, index: int) -> None:
    """Raise FormatError unless a file's first bytes name the content that the manifest says: files may be mixed up."""
    file = manifest.files[index]
    start = memoryview(bytearray(HEAD_NBYTES))
    with folder.open(file.name, file.nbytes) as opened:
        opened.read(0, start)
    check_head(start, file.content, file.data_start, folder.location(file.name))


def check_head(start: memoryview, content: str, data_start: int, where: str) -> None:
    """Raise FormatError unless the first bytes of a file name this content and this start of the data section."""
    prefix = header_prefix(content)
    if start[LENGTH_NBYTES : LENGTH_NBYTES + len(prefix)] != prefix:
        raise FormatError(
            f"content in its header differs from {content}: not the file that {MANIFEST_NAME} describes",
            path=where,
            code="owner",
        )
    stored_start = LENGTH_NBYTES + int.from_bytes(start[:LENGTH_NBYTES], "little")
    if stored_start != data_start:
        what = f"its data section starts at {stored_start}, {MANIFEST_NAME} says {data_start}"
        raise FormatError(what, path=where, code="mismatch")
