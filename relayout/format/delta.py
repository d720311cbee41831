"""Deltas between converted checkpoints of one layout: manifest and pieces. Pure; FORMAT.md is normative.

A delta has the manifests, tables and records of both checkpoints as they are stored, and of each weight file only what
changed: of each piece, which is the file's header or a chunk, the XOR of its two versions, compressed.

Most bytes of an XOR are zero. Elements that change by an optimizer step are anywhere, and differ in their low bits. So
`encode` stores the places of the others as gaps, and the first bytes of all elements before their second bytes: zstd
then has little to find but the frequencies of bytes. Measured on 1 MiB of BF16 of which 5 % changed by one unit in the
last place: 2.6 %, where planes of all bytes and zstd take 4.8 %.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from relayout.core.digests import DIGEST_NBYTES, digest_hex, proof_hex
from relayout.core.extents import Extent
from relayout.errors import FormatError, about
from relayout.format.fields import Fields, check_apart, check_path, parse_object
from relayout.format.index import FORMAT_VERSION, IndexedFile, Manifest, RankTable, chunks_of, num_chunks
from relayout.format.manifest import DELTA, check_top, proof_field, sealed

Array = npt.NDArray[np.uint8]
Places = npt.NDArray[np.intp]

WIDTHS = (1, 2, 4, 8)
"""Bytes of an element."""

_HEAD = np.dtype("<u4")
_NUM_FIELDS = 4
_SKIP = 255
"""A gap of so many zeros, with no element behind it."""
_DENSE = 4
"""All elements are stored, without gaps, if more than one in so many is not zero."""
_MANY, _SEEN = 64, 4096
"""Many elements are not zero if more than one in so many is, of as many first ones."""
_BLOCK = 2**18
"""Elements that are looked at at a time, if many are not zero."""
_LEVEL = 1
"""The level of zstd. Higher ones look for repetitions, of which there are none: slower, and no smaller."""


def encode(data: Array, runs: Sequence[tuple[int, int]]) -> bytes:
    """Compress.

    Args:
        data: 1-D, contiguous.
        runs: what it consists of: bytes, and bytes of an element, which is one of `WIDTHS` and divides the first.

    Returns:
        What `xor_into` reads; nothing if all of `data` is zero.
    """
    ends = list(accumulate(nbytes for nbytes, _ in runs))
    assert ends[-1:] == [data.nbytes]
    found = [data[end - nbytes : end].view(f"<u{width}") for end, (nbytes, width) in zip(ends, runs, strict=True)]
    places_of = list(map(_places_of, found))
    if not any(map(len, places_of)):
        return b""
    head, gaps, values = [len(runs)], [], []
    for elements, places, (nbytes, width) in zip(found, places_of, runs, strict=True):
        is_dense = _DENSE * len(places) > len(elements)
        gaps.append(np.empty(0, np.uint8) if is_dense else _gaps(places))
        values.append((elements if is_dense else elements[places]).view(np.uint8).reshape(-1, width))
        head += [nbytes, width, len(gaps[-1]), len(values[-1])]
    streams = [np.concatenate(gaps)] + [
        np.concatenate([rows[:, byte] for rows in values if rows.shape[1] > byte])
        for byte in range(max(width for _, width in runs))
    ]
    frame = zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=sum(stream.nbytes for stream in streams))
    pieces = [np.array(head, _HEAD).tobytes()]
    for stream in streams:  # Each in blocks of its own: they have frequencies of their own.
        pieces += [frame.compress(stream.tobytes()), frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*pieces, frame.flush()])


def _places_of(elements: npt.NDArray[Any]) -> Places:
    """Where elements are not zero, found in the way that is fastest for as many as the first ones have."""
    num_seen, seen = min(_SEEN, len(elements)), np.count_nonzero(elements[:_SEEN])
    if 8 * seen < num_seen < _MANY * seen:
        return _places_in_blocks(elements)
    return np.flatnonzero(elements != 0)


def _places_in_blocks(elements: npt.NDArray[Any]) -> Places:
    """Where elements are not zero. The memory of a block is little, so that the next one has it without faults."""
    found = []
    for start in range(0, len(elements), _BLOCK):
        places = _set_in(elements[start : start + _BLOCK] != 0)
        if start:
            places += start
        found.append(places)
    return found[0] if len(found) == 1 else np.concatenate(found)


def _set_in(mask: npt.NDArray[np.bool_]) -> Places:
    """What is set in a mask.

    NumPy mispredicts a branch for each place, up to one in ten. So eight are looked at as one word first, and then only
    the words that are not zero.
    """
    if len(mask) % 8 or 8 * np.count_nonzero(mask) > len(mask):
        return np.flatnonzero(mask)
    words = mask.view(np.uint64)
    held = np.flatnonzero(words != 0)
    inside = np.flatnonzero(words[held].view(np.bool_))
    places: Places = held[inside >> 3]
    places <<= 3
    inside &= 7
    places |= inside
    return places


def _gaps(places: Places) -> Array:
    """How many zeros are in front of each place, behind the one before: one byte, after as many `_SKIP` as it takes."""
    gaps = places.copy()
    gaps[1:] -= places[:-1] + 1
    long = np.flatnonzero(gaps >= _SKIP)
    if not len(long):
        return gaps.astype(np.uint8)
    skips = np.zeros(len(gaps), np.intp)
    skips[long] = gaps[long] // _SKIP
    stored = np.full(len(gaps) + int(skips.sum()), _SKIP, np.uint8)
    stored[np.arange(len(gaps)) + np.cumsum(skips)] = gaps - _SKIP * skips
    return stored


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements of one width."""

    nbytes: int
    width: int
    num_gaps: int
    num_stored: int

    def check(self) -> None:
        """Refuse a run that no data has. FormatError: it is one."""
        if self.width not in WIDTHS or self.nbytes % self.width or not self.nbytes:
            raise FormatError(f"a run of {self.nbytes} bytes in elements of {self.width}", code="field")
        num_elements = self.nbytes // self.width
        if self.num_gaps:
            is_possible = self.num_stored <= self.num_gaps <= self.num_stored + num_elements // _SKIP
        else:
            is_possible = self.num_stored in (0, num_elements)
        if not is_possible or self.num_stored > num_elements:
            what = f"{self.num_gaps} gaps and {self.num_stored} elements in a run of {num_elements}"
            raise FormatError(what, code="field")


@dataclass(frozen=True, slots=True)
class Elements:
    """The elements of a run that are not zero, or all."""

    offset: int
    """Where the run begins in the data, in bytes."""
    nbytes: int
    """Bytes of the run."""
    places: npt.NDArray[np.int64] | None
    """Which elements of the run, rising; None: all."""
    values: npt.NDArray[np.unsignedinteger[Any]]

    def within(self, start: int, end: int, width: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]] | None:
        """The elements of a part of the data, counted from its first one; None: it does not consist of such elements.

        Args:
            start, end: of the part, in bytes of the data.
            width: bytes of an element.
        """
        assert self.places is not None
        first, rest = divmod(start - self.offset, width)
        if rest or width != self.values.itemsize:
            return None
        low, high = np.searchsorted(self.places, (first, first + (end - start) // width))
        return self.places[low:high] - first, self.values[low:high]


def xor_into(encoded: bytes | memoryview, target: memoryview | Array) -> None:
    """Change `target`, as long as the data was, to its XOR with the data. Where that was zero, nothing is written."""
    for run in decode(encoded, target.nbytes):
        elements = np.frombuffer(target, np.uint8, run.nbytes, run.offset).view(run.values.dtype)
        if run.places is None:
            elements ^= run.values
        else:
            elements[run.places] ^= run.values


def decode(encoded: bytes | memoryview, nbytes: int) -> Iterator[Elements]:
    """What `encode` has made of data of so many bytes: the runs that are not zero."""
    if not len(encoded):
        return
    runs = _parse_head(encoded, nbytes)
    body = _expand(encoded[_HEAD.itemsize * (1 + _NUM_FIELDS * len(runs)) :], runs)
    place_of_gap, place_of_value = 0, sum(run.num_gaps for run in runs)
    starts = [place_of_value]  # Of the planes.
    for byte in range(WIDTHS[-1]):
        starts.append(starts[-1] + sum(run.num_stored for run in runs if run.width > byte))
    offset = 0
    for run in runs:
        values = np.empty((run.num_stored, run.width), np.uint8)
        for byte in range(run.width):
            values[:, byte] = body[starts[byte] : starts[byte] + run.num_stored]
            starts[byte] += run.num_stored
        if run.num_stored or run.num_gaps:
            gaps = body[place_of_gap : place_of_gap + run.num_gaps]
            places = _places(gaps, run) if run.num_gaps else None
            yield Elements(offset, run.nbytes, places, values.view(f"<u{run.width}")[:, 0])
        place_of_gap += run.num_gaps
        offset += run.nbytes


def _parse_head(encoded: bytes | memoryview, nbytes: int) -> list[_Run]:
    num_runs = int(np.frombuffer(encoded, _HEAD, 1)[0]) if len(encoded) >= _HEAD.itemsize else 0
    if len(encoded) < _HEAD.itemsize * (1 + _NUM_FIELDS * num_runs):
        raise FormatError(f"{num_runs} runs in {len(encoded)} bytes", code="truncated")
    head = np.frombuffer(encoded, _HEAD, _NUM_FIELDS * num_runs, _HEAD.itemsize)
    runs = [_Run(*row) for row in head.reshape(-1, _NUM_FIELDS).tolist()]
    if sum(run.nbytes for run in runs) != nbytes:
        raise FormatError(f"of {sum(run.nbytes for run in runs)} bytes, expected {nbytes}", code="mismatch")
    for run in runs:
        run.check()
    return runs


def _expand(frame: bytes | memoryview, runs: Sequence[_Run]) -> Array:
    """Expand the zstd frame. The runs say how long its content is, which limits the memory that it takes."""
    total = sum(run.num_gaps + run.num_stored * run.width for run in runs)
    try:
        if zstandard.frame_content_size(frame) != total:
            raise FormatError(f"a zstd frame of another length than {total} bytes", code="mismatch")
        return np.frombuffer(zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False), np.uint8)
    except zstandard.ZstdError as error:
        raise FormatError(f"not a zstd frame: {error}", code="syntax") from None


def _places(gaps: Array, run: _Run) -> npt.NDArray[np.int64]:
    is_element = gaps != _SKIP
    ends = np.cumsum(gaps + is_element.astype(np.int64))
    places: npt.NDArray[np.int64] = ends[is_element] - 1
    if len(places) != run.num_stored or int(ends[-1]) > run.nbytes // run.width:
        raise FormatError(f"gaps lead beyond a run of {run.nbytes} bytes", code="field")
    return places


OLD, NEW = "old/", "new/"
"""What the names of files in a delta begin with: those of the base, and those of what the delta makes."""

_PIECE = np.dtype([("nbytes", "<u8"), ("digest", "u1", DIGEST_NBYTES)])


def delta_name(file: str) -> str:
    """File name of what changed in a weight file."""
    return f"{file}.delta"


@dataclass(frozen=True, slots=True)
class DeltaFile:
    """The entry of a manifest for the changes of one weight file."""

    nbytes: int
    """Length of the file that has the changes; 0: nothing changed, and there is no such file."""
    index_digest: str
    """Proof of the index at the end of that file."""


@dataclass(frozen=True, slots=True)
class DeltaManifest:
    """relayout.json of a delta."""

    generator: str
    """Program and version that wrote it."""
    base: str
    """Content of what the delta applies to; see `manifest.content_of`."""
    makes: str
    """Content of what it makes."""
    files: tuple[DeltaFile, ...]
    """For each file of these manifests."""
    side_files: tuple[str, ...]
    """The side files that are new, or differ from those of the base."""


def dump_delta(manifest: DeltaManifest) -> bytes:
    """Serialize relayout.json."""
    top: dict[str, Any] = {
        "relayout": FORMAT_VERSION,
        "requires": [DELTA],
        "generator": manifest.generator,
        "base": manifest.base,
        "makes": manifest.makes,
        "files": [{"nbytes": file.nbytes, "index_digest": file.index_digest} for file in manifest.files],
        "side_files": manifest.side_files,
    }
    return sealed(top)


def parse_delta(blob: bytes, where: str) -> DeltaManifest:
    """Parse relayout.json. FormatError: it is not what FORMAT.md demands."""
    with about(path=where):
        top = parse_object(blob, where)
        check_top(blob, top, is_delta=True)
        fields = Fields(top)
        files = map(Fields, fields.column("files", dict))
        manifest = DeltaManifest(
            generator=fields.text("generator"),
            base=proof_field(fields, "base"),
            makes=proof_field(fields, "makes"),
            files=tuple(DeltaFile(file.size("nbytes"), proof_field(file, "index_digest")) for file in files),
            side_files=tuple(fields.column("side_files", str)),
        )
        for name in manifest.side_files:
            check_path(name)
        check_apart(manifest.side_files)
        return manifest


def layout_difference(old: Manifest, new: Manifest) -> str | None:
    """What keeps a delta between two checkpoints from being possible, for a person; None: nothing."""
    pairs = {
        "tensor-parallel degree differs": (old.num_ranks, new.num_ranks),
        "layout differs": (old.whole is None, new.whole is None),
        "size of chunks differs": (old.chunk_nbytes, new.chunk_nbytes),
        "files differ": tuple(
            [(file.name, file.nbytes, file.data_start) for file in side.files] for side in (old, new)
        ),
        "ranks differ": tuple(
            {holder: replace(entry, table_digest="") for holder, entry in side.holders.items()} for side in (old, new)
        ),
    }
    return next((f"the {what}" for what, (ours, theirs) in pairs.items() if ours != theirs), None)


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
    """Where the index is in a file of what changed. FormatError: the file is shorter than its index."""
    nbytes = _PIECE.itemsize * num_pieces
    if file.nbytes < nbytes:
        raise FormatError(f"{file.nbytes} bytes long, an index of {num_pieces} pieces takes more", code="truncated")
    return Extent(file.nbytes - nbytes, nbytes)


@dataclass(frozen=True, slots=True)
class PieceIndex:
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


def parse_index(blob: bytes, file: DeltaFile, extents: Sequence[Extent]) -> PieceIndex:
    """The inverse of `dump_index`. `extents` are the pieces."""
    if proof_hex(blob) != file.index_digest:
        raise FormatError("its index differs from the manifest", code="digest")
    rows = np.frombuffer(blob, _PIECE)
    # What a reader allocates is bounded by what it asked for.
    limits = np.array([32 * extent.nbytes + 256 for extent in extents], np.uint64)
    if (rows["nbytes"] > limits).any():
        raise FormatError("a piece is larger than what it stands for", code="limit")
    offsets = np.concatenate(([0], np.cumsum(rows["nbytes"].astype(np.int64))))
    if int(offsets[-1]) + len(blob) != file.nbytes:
        raise FormatError(f"pieces of {offsets[-1]} bytes, expected {file.nbytes - len(blob)}", code="mismatch")
    return PieceIndex(extents, offsets, rows["digest"])
