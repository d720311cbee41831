"""Deltas between converted checkpoints of one layout: manifest and pieces. Pure; FORMAT.md is normative.

A delta has the manifests, tables and records of both checkpoints as they are stored, and of each weight file only what
changed: of each piece, which is the file's header or a chunk, the XOR of its two versions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from relayout.core.digests import DIGEST_NBYTES, DigestAlgorithm, digest_hex
from relayout.core.extents import Extent
from relayout.errors import FormatError, about
from relayout.format.chunks import chunks_of, num_chunks
from relayout.format.fields import Fields, parse_object
from relayout.format.index import FORMAT_VERSION, IndexedFile, Manifest, RankTable
from relayout.format.manifest import DELTA, check_top, digest_field, sealed
from relayout.format.names import check_apart, check_path

OLD, NEW = "old/", "new/"
"""In front of the names of files of the base, and of what the delta makes."""

_PIECE = np.dtype([("nbytes", "<u8"), ("digest", "u1", DIGEST_NBYTES)])


def delta_name(file: str) -> str:
    """File name of what changed in a weight file."""
    return f"{file}.delta"


@dataclass(frozen=True, slots=True)
class DeltaFile:
    """What changed in a weight file."""

    nbytes: int
    """Of the file that has it; 0: it did not change, and there is no such file."""
    index_digest: str
    """Digest of the index at the end of that file."""


@dataclass(frozen=True, slots=True)
class DeltaManifest:
    """relayout.json of a delta."""

    generator: str
    """Program and version that wrote it."""
    base: str
    """Digest of the manifest, as stored, of what the delta applies to."""
    makes: str
    """Digest of the manifest, as stored, of what it makes."""
    files: tuple[DeltaFile, ...]
    """For each file of these manifests."""
    side_files: tuple[str, ...]
    """Those that are new, or not as in the base."""


def dump_delta(manifest: DeltaManifest) -> bytes:
    """Serialize relayout.json."""
    top: dict[str, Any] = {
        "relayout": FORMAT_VERSION,
        "requires": [DELTA],
        "generator": manifest.generator,
        "digest": DigestAlgorithm.XXH3_128.value,
        "base": manifest.base,
        "makes": manifest.makes,
        "files": [{"nbytes": file.nbytes, "index_digest": file.index_digest} for file in manifest.files],
        "side_files": manifest.side_files,
    }
    return sealed(top)


def parse_delta(blob: bytes, where: str) -> DeltaManifest:
    """Parse relayout.json.

    Raises:
        FormatError: it is not what FORMAT.md demands.
    """
    with about(path=where):
        top = parse_object(blob, where)
        check_top(blob, top, is_delta=True)
        fields = Fields(top)
        files = map(Fields, fields.column("files", dict))
        manifest = DeltaManifest(
            generator=fields.text("generator"),
            base=digest_field(fields, "base"),
            makes=digest_field(fields, "makes"),
            files=tuple(DeltaFile(file.size("nbytes"), digest_field(file, "index_digest")) for file in files),
            side_files=tuple(fields.column("side_files", str)),
        )
        for name in manifest.side_files:
            check_path(name)
        check_apart(manifest.side_files)
        return manifest


def layout_difference(old: Manifest, new: Manifest) -> str | None:
    """What keeps a delta between two checkpoints from being possible, for a person; None: nothing."""
    pairs = {
        "tensor-parallel degree": (old.num_ranks, new.num_ranks),
        "layout": (old.whole is None, new.whole is None),
        "digest algorithm": (old.digest, new.digest),
        "size of chunks": (old.chunk_nbytes, new.chunk_nbytes),
        "files": tuple([(file.name, file.nbytes, file.data_start) for file in side.files] for side in (old, new)),
        "ranks": tuple(
            {holder: replace(entry, table_digest="") for holder, entry in side.holders.items()} for side in (old, new)
        ),
    }
    return next((f"the {what} differ" for what, (ours, theirs) in pairs.items() if ours != theirs), None)


def are_alike(old: RankTable, new: RankTable) -> bool:
    """Whether two tables have the same slices at the same places."""

    def columns(table: RankTable) -> list[Any]:
        kinds = list(zip(table.dtypes, table.shapes, table.source_shapes, table.slices, strict=True))
        return [kinds, *map(list, (table.names, table.files, table.offsets, table.arena_offsets))]

    return columns(old) == columns(new)


def pieces_of(file: IndexedFile, chunk_nbytes: int) -> list[Extent]:
    """The pieces of a weight file: its header, and its chunks."""
    return [Extent(0, file.data_start), *chunks_of(file.data_start, file.nbytes, chunk_nbytes)]


def num_pieces(file: IndexedFile, chunk_nbytes: int) -> int:
    """How many pieces a weight file has."""
    return 1 + num_chunks(file.data_start, file.nbytes, chunk_nbytes)


def dump_index(pieces: Iterable[bytes]) -> bytes:
    """What follows the pieces of a file: length and digest of each as stored. A piece that did not change is empty."""
    return b"".join(len(piece).to_bytes(8, "little") + bytes.fromhex(digest_hex(piece)) for piece in pieces)


def place_of_index(file: DeltaFile, num_pieces: int) -> Extent:
    """Where the index is in a file of what changed.

    Raises:
        FormatError: the file is shorter than its index.
    """
    nbytes = _PIECE.itemsize * num_pieces
    if file.nbytes < nbytes:
        raise FormatError(f"{file.nbytes} bytes long, an index of {num_pieces} pieces takes more", code="truncated")
    return Extent(file.nbytes - nbytes, nbytes)


@dataclass(frozen=True, slots=True)
class Index:
    """What is stored of each piece of a file. It takes 32 bytes for each: a chain of deltas has many indexes."""

    extents: Sequence[Extent]
    """The pieces."""
    offsets: npt.NDArray[np.int64]
    """Where each begins in the file of what changed; behind them, where the last one ends."""
    digests: npt.NDArray[np.uint8]
    """Digest of each as stored, in binary form."""

    def place(self, first: int, end: int) -> Extent:
        """Where the pieces from `first` to before `end` are."""
        start, stop = int(self.offsets[first]), int(self.offsets[end])
        return Extent(start, stop - start)

    def digest(self, piece: int) -> str:
        """The digest of a piece as stored."""
        return bytes(self.digests[piece]).hex()


def parse_index(blob: bytes, file: DeltaFile, extents: Sequence[Extent]) -> Index:
    """The inverse of `dump_index`. `extents` are the pieces.

    Raises:
        FormatError: it is damaged, or the pieces are not those of the file.
    """
    if digest_hex(blob) != file.index_digest:
        raise FormatError("its index differs from the manifest", code="digest")
    rows = np.frombuffer(blob, _PIECE)
    # What a reader allocates is bounded by what it asked for.
    limits = np.array([32 * extent.nbytes + 256 for extent in extents], np.uint64)
    if (rows["nbytes"] > limits).any():
        raise FormatError("a piece is larger than what it stands for", code="limit")
    offsets = np.concatenate(([0], np.cumsum(rows["nbytes"].astype(np.int64))))
    if int(offsets[-1]) + len(blob) != file.nbytes:
        raise FormatError(f"pieces of {offsets[-1]} bytes, expected {file.nbytes - len(blob)}", code="mismatch")
    return Index(extents, offsets, rows["digest"])
