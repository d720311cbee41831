"""Reads a converted checkpoint: manifest, rank tables, source record, and weight files, verified chunk by chunk."""

from __future__ import annotations

import os
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING

from relayout.checkpoint.folder import advice_on_snapshots, check_exists, glance, refuse_incomplete
from relayout.core.arguments import ranks_text
from relayout.core.digests import UNKNOWN_DIGEST, blake3_hex, unpack_digests
from relayout.core.extents import Extent, Grid, align_up, split
from relayout.core.workers import each
from relayout.errors import FormatError, PlanError, about, and_others
from relayout.format.fields import Fields, parse_object, refuse_lfs_pointer
from relayout.format.index import (
    CHUNKS_NAME,
    DIGESTS_NAME,
    HUB_INDEX_NAME,
    MANIFEST_NAME,
    SIGNATURE_NAME,
    IndexedFile,
    Manifest,
    RankTable,
    chunk_digest_extents,
    chunks_over,
    digest_extents,
)
from relayout.format.manifest import (
    MAX_MANIFEST_NBYTES,
    MAX_RECORD_NBYTES,
    MAX_TABLE_NBYTES,
    SOURCE_RECORD_NAME,
    decompress,
    header_prefix,
    parse_manifest,
)
from relayout.format.rank_table import parse_table
from relayout.format.safetensors import LENGTH_NBYTES
from relayout.publish.output import OutputKind
from relayout.storage.local.store import holes
from relayout.storage.stores import (
    Access,
    Closable,
    Enter,
    Entry,
    Kind,
    ReadableFile,
    ReadOnlyStore,
    RequestCost,
    Store,
    everywhere,
    if_there,
)
from relayout.storage.system import Buffer

if TYPE_CHECKING:
    from relayout.format.source_record import SourceRecord

MAX_SIGNATURE_NBYTES = 2**26

_PIECE_NBYTES = 2**24
"""Bytes of a hole that are compared with zeros at once."""

HEAD_NBYTES = 512
"""Bytes read for `check_head`: more than it needs, and fewer than any file has (a header fills a block or more)."""


def is_converted(folder: Store) -> bool:
    """Return True if a folder is a converted checkpoint: it contains a manifest."""
    return folder.kind() is Kind.FOLDER and folder.stat(MANIFEST_NAME) is not None


def find_manifest(folder: Store) -> Manifest | None:
    """Return the manifest; None if a folder is not a converted checkpoint. FormatError: it is damaged."""
    blob = find_manifest_blob(folder)
    return None if blob is None else parse_manifest(blob, folder.location(MANIFEST_NAME))


def find_manifest_blob(folder: Store) -> bytes | None:
    """Return the stored manifest; None if a folder is not a converted checkpoint. For a remote store, one request."""
    if not folder.cost.is_remote and not is_converted(folder):
        return None
    return if_there(lambda: folder.read(MANIFEST_NAME, MAX_MANIFEST_NBYTES))


def read_manifest(folder: Store) -> Manifest:
    """Read and check relayout.json. FormatError: it is missing or damaged. MissingPathError: the folder is missing."""
    return parse_manifest(read_manifest_blob(folder), folder.location(MANIFEST_NAME))


def read_manifest_blob(folder: Store) -> bytes:
    """Read relayout.json. FormatError: it is missing. MissingPathError: the folder is missing, too."""
    blob = if_there(lambda: folder.read(MANIFEST_NAME, MAX_MANIFEST_NBYTES))
    if blob is None:
        check_exists(folder)
        advice = ""
        if not folder.cost.is_remote and folder.kind() is Kind.FOLDER:
            entries = glance(folder)
            refuse_incomplete(folder, (entry.name for entry in entries))
            advice = advice_on_snapshots(entries)
        what = f"not a converted folder ({MANIFEST_NAME} is missing){advice or '; relayout convert makes one'}"
        raise FormatError(what, path=str(folder), code="missing")
    return blob


def check_rank(folder: Store, rank: int, num_ranks: int) -> None:
    """Raise PlanError unless a rank is valid for a tensor-parallel degree."""
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
        wanted = ranks_text(sorted({*missing, *manifest.present}))
        what = (
            f"of {manifest.num_ranks} ranks it has only {has}, and lacks {lacks}: `relayout copy FROM TO --ranks"
            f" {wanted}` copies all of these from a folder that has them; where TO is this folder, with --force"
        )
        raise PlanError(what, path=str(folder), code="missing")


def check_lengths(folder: Store, manifest: Manifest, holders: Iterable[int]) -> None:
    """Raise FormatError if a file of these ranks and other holders is missing, or has another length."""
    indices = sorted({index for holder in holders for index in manifest.holders[holder].files})
    each(partial(_check_length, folder, manifest), indices, folder.cost.num_opens)


def _check_length(folder: Store, manifest: Manifest, index: int) -> None:
    file = manifest.files[index]
    status = folder.stat(file.name)
    if status is None:
        raise FormatError("is missing", path=folder.location(file.name), code="missing")
    status.check(folder.location(file.name), file.nbytes)


def check_intact(folder: Store) -> None:
    """Check that all files in a converted checkpoint's manifest exist and seem intact, without reading weights."""
    for fault in find_faults(folder, read_manifest(folder)):
        raise fault


def find_faults(folder: Store, manifest: Manifest) -> list[FormatError]:
    """Return the faults of files that a manifest lists, as far as they are visible without reading the weights.

    Faults are a missing file, a length, head or digest that differs from the manifest, and a hole in place of non-zero
    bytes.
    """

    def fault(check: Callable[[], None]) -> FormatError | None:
        try:
            check()
        except FormatError as error:
            return error
        return None

    weights = [partial(_check_weights, folder, manifest, index) for index in range(len(manifest.files))]
    others: list[Callable[[], None]] = [
        *(partial(_check_small, folder, *one) for one in digests_of_small(manifest).items()),
        *(partial(_check_opens, folder, *one) for one in sizes_of_packed(manifest).items()),
    ]
    found = [*each(fault, weights, folder.cost.num_opens), *map(fault, others)]
    return [one for one in found if one is not None]


def _check_weights(folder: Store, manifest: Manifest, index: int) -> None:
    _check_length(folder, manifest, index)
    file, proof = manifest.files[index], file_digests_of(folder, manifest, index)
    with folder.open(file.name, file.nbytes) as opened:
        read_head(folder, file, opened)
        again = partial(folder.open, file.name, file.nbytes, access=Access.BUFFERED)
        check_holes(opened.fileno(), again, proof, folder.location(file.name))


def check_holes(fd: int | None, open_it: Callable[[], ReadableFile], proof: FileDigests, where: str) -> None:
    """Check that chunks with holes (never written) match their digests: other holes are left by unfinished copies.

    Only chunks with holes are read: most files have none, and for holes the system reads nothing from the drive.

    Args:
        fd: the file's descriptor; None if its store has no descriptors, and cannot report holes.
        open_it: opens the file to read it through the page cache.
        where: its name in messages.
    """
    if fd is None:
        return
    found = list(holes(fd, Extent(proof.data_start, os.fstat(fd).st_size - proof.data_start)))
    if not found:
        return
    with open_it() as opened:
        verified = VerifiedFile(opened, proof, where)
        for hole in found:
            for piece in split(hole, _PIECE_NBYTES):
                try:
                    verified.read(piece.offset, memoryview(bytearray(piece.nbytes)))
                except FormatError as error:
                    if error.code == "digest" and error.path == where:
                        error.amend(what=f"bytes {hole.offset} to {hole.end} were never written: an unfinished copy?")
                    raise


def digests_of_small(manifest: Manifest) -> dict[str, str]:
    """Return digests of small files in the manifest, by name: rank tables, source record, stock loaders' index."""
    tables = {holder.table: holder.table_digest for holder in manifest.holders.values()}
    index = {} if manifest.hub_index_digest is None else {HUB_INDEX_NAME: manifest.hub_index_digest}
    return {**tables, SOURCE_RECORD_NAME: manifest.record_digest, **index}


def read_small(folder: Store, name: str, proof: str) -> bytes:
    """Read a small file. FormatError: it is missing, or has another digest."""
    blob = folder.read(name, MAX_RECORD_NBYTES)
    if blake3_hex(blob) != proof:
        what = f"digest differs from the one in {MANIFEST_NAME}: damaged, or of another conversion"
        raise FormatError(what, path=folder.location(name), code="digest")
    return blob


def digests_of_side_files(record: SourceRecord) -> dict[str, str]:
    """Return the BLAKE3 digests of the side files, by name."""
    return {side.name: side.digest for side in record.side_files}


PACKED = (CHUNKS_NAME, DIGESTS_NAME)
"""The files that contain digests in binary form. The manifest has a digest of each of their parts."""


def parts_of_packed(manifest: Manifest, name: str) -> list[tuple[Extent, str]]:
    """Return the parts of a file of `PACKED`, in order: the extent of each, and its BLAKE3 digest."""
    if name == CHUNKS_NAME:
        places = chunk_digest_extents(manifest.files, manifest.chunk_nbytes)
        return list(zip(places, (file.chunks_digest for file in manifest.files), strict=True))
    proofs = [*(entry.digests_digest for entry in manifest.holders.values()), manifest.source_digests_digest]
    return list(zip(digest_extents(manifest), proofs, strict=True))


def sizes_of_packed(manifest: Manifest) -> dict[str, int]:
    """Return the lengths in bytes of the files of `PACKED`, by name."""
    return {name: parts[-1][0].end if (parts := parts_of_packed(manifest, name)) else 0 for name in PACKED}


def _check_small(folder: Store, name: str, proof: str) -> None:
    read_small(folder, name, proof)


def _check_opens(folder: Store, name: str, nbytes: int) -> None:
    """Check that a file exists and has this length."""
    folder.open(name, nbytes).close()


def read_table(folder: Store, manifest: Manifest, rank: int) -> RankTable:
    """Read and check the table of one rank that the folder has, or of another holder. FormatError: it is damaged."""
    name = manifest.holders[rank].table
    return parse_table(folder.read(name, MAX_TABLE_NBYTES), manifest, rank, folder.location(name))


def read_record(folder: Store, manifest: Manifest, prefix: str = "") -> SourceRecord:
    """Read and check the source record. FormatError: it is missing, damaged, or of another conversion.

    Args:
        prefix: of its file name in the folder.
    """
    # Imported here: a load of a rank as stored needs no record.
    from relayout.format.source_record import parse_record

    where = folder.location(prefix + SOURCE_RECORD_NAME)
    blob = folder.read(prefix + SOURCE_RECORD_NAME, MAX_RECORD_NBYTES)
    with about(path=where):
        refuse_lfs_pointer(blob)
        if blake3_hex(blob) != manifest.record_digest:
            raise FormatError("digest differs from the one in the manifest", code="digest")
    record = parse_record(decompress(blob, where, MAX_RECORD_NBYTES), manifest.num_ranks, where)
    if len(record.names) != manifest.num_source_tensors:
        what = f"{len(record.names)} tensors, {MANIFEST_NAME} says {manifest.num_source_tensors}"
        raise FormatError(what, path=where, code="mismatch")
    return record


def names_of_output(folder: Store) -> frozenset[str]:
    """Return the names of all files of a converted checkpoint, from its manifest and source record."""
    blob = read_manifest_blob(folder)
    manifest = parse_manifest(blob, folder.location(MANIFEST_NAME))
    signature = [] if find_signature(folder, blob) is None else [SIGNATURE_NAME]
    return names_of(manifest, read_record(folder, manifest)).union(signature)


def find_signature(folder: Store, blob: bytes) -> bytes | None:
    """Return the folder's unverified signature if it lists the SHA-256 of `blob`, the stored manifest; else None."""
    try:
        signature = folder.read(SIGNATURE_NAME, MAX_SIGNATURE_NBYTES)
        envelope = Fields(Fields(parse_object(signature, SIGNATURE_NAME)).object("dsseEnvelope"))
        payload = b64decode(envelope.text("payload"), validate=True)
    except (FormatError, ValueError):
        return None
    return signature if sha256(blob).hexdigest().encode() in payload else None


def names_of(manifest: Manifest, record: SourceRecord) -> frozenset[str]:
    """Return the names of all files in a manifest and a source record, including the names of these two."""
    weights, sides = (file.name for file in manifest.files), (side.name for side in record.side_files)
    return frozenset([*names_of_index(manifest), *weights, *sides])


def names_of_index(manifest: Manifest) -> list[str]:
    """Return the files of a converted checkpoint other than weights and side files, the manifest last."""
    hub_index = [] if manifest.hub_index_digest is None else [HUB_INDEX_NAME]
    tables = [holder.table for holder in manifest.holders.values()]
    return [SOURCE_RECORD_NAME, CHUNKS_NAME, DIGESTS_NAME, *tables, *hub_index, MANIFEST_NAME]


def sizes_of(folder: Store, names: Iterable[str]) -> dict[str, int]:
    """Return the length in bytes of each file, by name, in the order of the names."""
    sizes = {}
    for name in sorted(names):
        status = folder.stat(name)
        if status is None:
            raise FormatError("is missing", path=folder.location(name), code="missing")
        sizes[name] = status.nbytes
    return sizes


def describe_output(folder: Store) -> str:
    """Describe a converted checkpoint by its manifest, which is written last, and name its visible faults."""
    manifest = read_manifest(folder)
    model = f"model type {manifest.model_type}" if manifest.model_type else "a model"
    some = "" if manifest.has_all else f" (ranks {ranks_text(manifest.present)})"
    of = f"conversion of {model}, {manifest.source_nbytes:,} bytes, at TP {manifest.num_ranks}{some}"
    faults = find_faults(folder, manifest)
    return f"a damaged {of} ({and_others(faults)})" if faults else f"a complete {of}"


CONVERTED = OutputKind(MANIFEST_NAME, describe_output, names_of_output)
"""An output of `convert`; `force` replaces only such outputs."""


def read_digests(folder: Store, manifest: Manifest, holder: int) -> list[str]:
    """Return the digests of a holder's tensors, in the order of its table. FormatError: they are missing or damaged."""
    return unpack_digests(read_packed_digests(folder, manifest, holder))


def read_source_digests(folder: Store, manifest: Manifest) -> list[str | None]:
    """Return the digests of the source's tensors, in record order; None: unknown. Errors as of `read_digests`."""
    found = unpack_digests(read_packed_digests(folder, manifest, None))
    return [None if digest == UNKNOWN_DIGEST else digest for digest in found]


def read_packed_digests(folder: Store, manifest: Manifest, holder: int | None) -> bytes:
    """Read the digests of a holder's tensors, or of the source's for None, as stored. Errors as of `read_digests`."""
    if holder is None:
        position, proof, what = -1, manifest.source_digests_digest, SOURCE_RECORD_NAME
    else:
        entry = manifest.holders[holder]
        position, proof, what = list(manifest.holders).index(holder), entry.digests_digest, entry.table
    packed = _part_of(folder, DIGESTS_NAME, digest_extents(manifest), position)
    if blake3_hex(packed) != proof:
        where = folder.location(DIGESTS_NAME)
        raise FormatError(f"its part for {what} differs from the manifest", path=where, code="digest")
    return packed


def _part_of(folder: Store, name: str, places: Sequence[Extent], position: int) -> bytes:
    """Read one of the parts of a file, given the extents of all parts. FormatError: the file has another length."""
    place, end = places[position], places[-1].end
    with folder.open(name) as opened:
        if opened.nbytes != end:  # Checked before memory is allocated: a manifest may contain any number.
            what = f"{opened.nbytes} bytes long, expected {end}"
            raise FormatError(what, path=folder.location(name), code="mismatch")
        part = memoryview(bytearray(place.nbytes))
        opened.read(place.offset, part)
    return bytes(part)


def read_chunk_digests(folder: Store, manifest: Manifest, index: int) -> bytes:
    """Return the digests of a file's chunks, one after the other, in binary form. FormatError: they are damaged."""
    file = manifest.files[index]
    digests = _part_of(folder, CHUNKS_NAME, chunk_digest_extents(manifest.files, manifest.chunk_nbytes), index)
    if blake3_hex(digests) != file.chunks_digest:
        where = folder.location(CHUNKS_NAME)
        raise FormatError(f"its part for {file.name} differs from the manifest", path=where, code="digest")
    return digests


def check_file(folder: Store, manifest: Manifest, index: int) -> None:
    """Raise FormatError unless a file's first bytes have the manifest's tensors_digest: files may be mixed up."""
    file = manifest.files[index]
    with folder.open(file.name, file.nbytes) as opened:
        read_head(folder, file, opened)


def read_head(folder: Store, file: IndexedFile, opened: ReadableFile) -> bytes:
    """Read the first `HEAD_NBYTES` of an open weight file. FormatError: they differ from the manifest."""
    start = memoryview(bytearray(HEAD_NBYTES))
    opened.read(0, start)
    check_head(start, file.tensors_digest, file.data_start, folder.location(file.name))
    return bytes(start)


def check_head(start: memoryview, tensors_digest: str, data_start: int, where: str) -> None:
    """Raise FormatError unless the first bytes of a file contain this tensors_digest and data start."""
    prefix = header_prefix(tensors_digest)
    if start[LENGTH_NBYTES : LENGTH_NBYTES + len(prefix)] != prefix:
        raise FormatError(
            f"tensors_digest in its header differs from {tensors_digest}: not the file that {MANIFEST_NAME} describes",
            path=where,
            code="owner",
        )
    stored_start = LENGTH_NBYTES + int.from_bytes(start[:LENGTH_NBYTES], "little")
    if stored_start != data_start:
        what = f"its data section starts at {stored_start}, {MANIFEST_NAME} says {data_start}"
        raise FormatError(what, path=where, code="mismatch")


_NUM_KEPT, _MAX_KEPT_NBYTES = 4, 2**20
"""Maximum number of chunks that an open file keeps in memory, and maximum bytes of each."""


@dataclass(frozen=True, slots=True)
class FileDigests:
    """The digests that verify a file against the manifest."""

    tensors_digest: str
    """The digest in the file's first bytes."""
    data_start: int
    """Absolute offset of its data section."""
    chunk_nbytes: int
    chunk_digests: Callable[[], bytes]
    """Reads the digests of the chunks of its data section. FormatError: they are damaged."""
    header_digest: str | None = None
    """Digest of the bytes before the data section; None: these bytes are not verified."""

    @property
    def grid(self) -> Grid:
        """The borders of its chunks."""
        return Grid(self.data_start, self.chunk_nbytes)


def file_digests_of(folder: Store, manifest: Manifest, index: int, *, with_header: bool = False) -> FileDigests:
    """Return the digests that verify a file, by its position in the manifest; of its header only if `with_header`."""
    file = manifest.files[index]
    digests = partial(read_chunk_digests, folder, manifest, index)
    header_digest = file.header_digest if with_header else None
    return FileDigests(file.tensors_digest, file.data_start, manifest.chunk_nbytes, digests, header_digest)


def index_of(manifest: Manifest, name: str) -> int | None:
    """Return the position of a weight file in a manifest; None for other files."""
    return next((index for index, file in enumerate(manifest.files) if file.name == name), None)


class VerifiedFile(Closable):
    """A file that is read in whole chunks, each compared with its digest. Thread-safe.

    A read that begins and ends at borders of chunks is one request, straight into the caller's memory.
    """

    def __init__(self, file: ReadableFile, proof: FileDigests, where: str) -> None:
        """Take an open file and its digests; `where` names the file in messages."""
        self._file = file
        self._expected = proof
        self._where = where
        self._digests = proof.chunk_digests()
        self._recent: tuple[tuple[int, memoryview], ...] = ()
        """Chunks that were read in part, with their numbers."""
        self._head: memoryview | None = None
        """The header, once it is verified."""

    @property
    def nbytes(self) -> int:
        return self._file.nbytes

    @property
    def version(self) -> str:
        return self._file.version

    @property
    def alignment(self) -> int:
        return self._file.alignment

    @property
    def grid(self) -> Grid | None:
        """The borders of its chunks; None if they are not at multiples of its alignment."""
        grid = self._expected.grid
        return None if grid.origin % self.alignment or grid.step % self.alignment else grid

    def fileno(self) -> None:
        return

    def read(self, offset: int, view: memoryview) -> None:
        """Fill `view`; for errors see `ReadableFile.read`. FormatError: also if a digest differs."""
        start, end = self._expected.data_start, min(offset + view.nbytes, self.nbytes)
        if offset < start:
            self._read_head(offset, view[: min(start, end) - offset])
        first = max(offset, start)
        wanted = Extent(first, max(0, end - first))
        touched = list(chunks_over(wanted, start, self.nbytes, self._expected.chunk_nbytes))
        is_straight = self.grid is not None
        complete = [chunk for _, chunk, part in touched if is_straight and part == chunk]
        if complete:  # All in one request: a store may be remote.
            until = align_up(complete[-1].end, self.alignment)
            self._file.read(complete[0].offset, view[complete[0].offset - offset : until - offset])
        for index, chunk, part in touched:
            target = view[part.offset - offset : part.end - offset]
            if is_straight and part == chunk:
                check_chunk(blake3_hex(target), self._digests, index, chunk, self._where)
            else:
                target[:] = self._whole(index, chunk)[part.offset - chunk.offset : part.end - chunk.offset]

    def _whole(self, index: int, chunk: Extent) -> memoryview:
        """Verify and keep a whole chunk when a part of it is read: its other parts are often read next."""
        whole = next((kept for number, kept in self._recent if number == index), None)
        if whole is None:
            whole = self._read_alone(chunk)
            check_chunk(blake3_hex(whole), self._digests, index, chunk, self._where)
            if chunk.nbytes <= _MAX_KEPT_NBYTES:  # Threads replace the tuple: a lost chunk is read again.
                self._recent = (*self._recent[1 - _NUM_KEPT :], (index, whole))
        return whole

    def _read_head(self, offset: int, view: memoryview) -> None:
        """Fill `view` with a part of the header, verified if `FileDigests.header_digest` is set."""
        if self._expected.header_digest is None:
            view[:] = self._read_alone(Extent(offset, view.nbytes))
            return
        head = self._head
        if head is None:
            head = self._read_alone(Extent(0, self._expected.data_start))
            check_header(head, self._expected.header_digest, self._where)
            self._head = head
        view[:] = head[offset : offset + view.nbytes]

    def _read_alone(self, extent: Extent) -> memoryview:
        """Read an extent into separate memory with the alignment of direct I/O."""
        aligned = extent.aligned(self.alignment)
        blocks = Buffer().reserve(aligned.nbytes)
        self._file.read(aligned.offset, blocks)
        return blocks[extent.offset - aligned.offset :][: extent.nbytes]

    def close(self) -> None:
        self._file.close()


def check_chunk(digest: str, digests: bytes, index: int, chunk: Extent, where: str) -> None:
    """Raise FormatError unless a chunk has the digest at its index in the digests of its file.

    Args:
        digests: of all chunks, one after the other, in binary form.
        where: the file's name in messages.
    """
    nbytes = len(digest) // 2
    expected = digests[nbytes * index : nbytes * (index + 1)].hex()
    if digest != expected:
        raise FormatError(
            f"bytes {chunk.offset} to {chunk.end} do not match digest {expected}: damaged",
            path=where,
            offset=chunk.offset,
            code="digest",
        )


def check_header(header: bytes | memoryview, digest: str, where: str) -> None:
    """Raise FormatError unless a file's header has the digest of the manifest. `where` names the file in messages."""
    if blake3_hex(header) != digest:
        raise FormatError("its header does not match the manifest: damaged", path=where, code="digest")


@dataclass(frozen=True, slots=True)
class StoreOver(ReadOnlyStore):
    """Base class of stores that wrap another store."""

    base: Store

    @property
    def cost(self) -> RequestCost:
        return self.base.cost

    def __str__(self) -> str:
        return str(self.base)

    def location(self, name: str) -> str:
        return self.base.location(name)

    def parent(self) -> tuple[Store, str]:
        return self.base.parent()

    def walk(self, enter: Enter = everywhere) -> Iterator[Entry]:
        return self.base.walk(enter)
