"""Deltas between converted checkpoints of one layout: manifest and pieces. Pure; FORMAT.md is normative.

A delta contains the manifest of the result, and only the changes of everything else. A piece of a weight file is its
header or a chunk. For each changed piece, the delta has the compressed XOR of the two versions and the BLAKE3 digest of
the new one; for each changed tensor it has the digest. So the size of a delta is proportional to the changes.

Most bytes of an XOR are zero. The elements that an optimizer step changes are scattered, and differ in their low bits.
So `encode` stores the positions of non-zero elements as gaps, and the first bytes of all elements before their second
bytes: for zstd, little is then left to exploit except the frequencies of bytes. Measured on 1 MiB of BF16 in which 5 %
of the elements changed by one unit in the last place: 2.6 %, while zstd on byte planes of all elements takes 4.8 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from relayout.core.digests import BLAKE3_NBYTES, XXH3_NBYTES, blake3_hex
from relayout.core.extents import Extent
from relayout.errors import FormatError, about, shown
from relayout.format.fields import Fields, check_apart, check_path, parse_object
from relayout.format.index import FORMAT_VERSION, MANIFEST_NAME, IndexedFile, Manifest, num_chunks
from relayout.format.manifest import MAX_WINDOW_NBYTES, REQUIRES_DELTA, blake3_field, check_top, sealed

Array = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.intp]

WIDTHS = (1, 2, 4, 8)
"""Supported bytes of an element."""

_HEAD = np.dtype("<u4")
_NUM_FIELDS = 4
_SKIP = 255
"""A gap of this many zeros, without an element after it."""
_DENSE = 4
"""A run is stored without gaps, with all elements, if more than 1/`_DENSE` of its elements are non-zero."""
_MANY, _SEEN = 64, 4096
"""A run is searched in blocks if more than 1/`_MANY`, but less than 1/8, of its first `_SEEN` elements are non-zero."""
_BLOCK = 2**18
"""Number of elements that are searched at a time in that case."""
_LEVEL = 1
"""The zstd level. Higher levels search for repetitions, which do not occur: they are slower, and no smaller."""


def encode(data: Array, runs: Sequence[tuple[int, int]]) -> bytes:
    """Compress.

    Args:
        data: 1-D, contiguous.
        runs: consecutive parts of `data`: each is its length in bytes, and the bytes of an element: one of `WIDTHS`
            that divides the length.

    Returns:
        The input of `xor_into`; empty if all of `data` is zero.
    """
    ends = list(accumulate(nbytes for nbytes, _ in runs))
    assert ends[-1:] == [data.nbytes]
    found = [data[end - nbytes : end].view(f"<u{width}") for end, (nbytes, width) in zip(ends, runs, strict=True)]
    indices_of = list(map(_indices_of, found))
    if not any(map(len, indices_of)):
        return b""
    head, gaps, values = [len(runs)], [], []
    for elements, indices, (nbytes, width) in zip(found, indices_of, runs, strict=True):
        is_dense = _DENSE * len(indices) > len(elements)
        gaps.append(np.empty(0, np.uint8) if is_dense else _gaps(indices))
        values.append((elements if is_dense else elements[indices]).view(np.uint8).reshape(-1, width))
        head += [nbytes, width, len(gaps[-1]), len(values[-1])]
    streams = [np.concatenate(gaps)] + [
        np.concatenate([rows[:, byte] for rows in values if rows.shape[1] > byte])
        for byte in range(max(width for _, width in runs))
    ]
    frame = zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=sum(stream.nbytes for stream in streams))
    pieces = [np.array(head, _HEAD).tobytes()]
    for stream in streams:  # Each stream is in its own blocks: its byte frequencies differ.
        pieces += [frame.compress(stream.tobytes()), frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*pieces, frame.flush()])


def _indices_of(elements: npt.NDArray[Any]) -> Indices:
    """Return the positions of non-zero elements, by the method that is fastest for the density of the first ones."""
    num_seen, seen = min(_SEEN, len(elements)), np.count_nonzero(elements[:_SEEN])
    if 8 * seen < num_seen < _MANY * seen:
        return _indices_in_blocks(elements)
    return np.flatnonzero(elements != 0)


def _indices_in_blocks(elements: npt.NDArray[Any]) -> Indices:
    """Return the positions of non-zero elements. Each block reuses the memory of the last, without page faults."""
    found = []
    for start in range(0, len(elements), _BLOCK):
        indices = _set_in(elements[start : start + _BLOCK] != 0)
        if start:
            indices += start
        found.append(indices)
    return found[0] if len(found) == 1 else np.concatenate(found)


def _set_in(mask: npt.NDArray[np.bool_]) -> Indices:
    """Return the set positions of a mask.

    NumPy mispredicts a branch for each set position, up to a density of 1/10. So eight elements are compared as one
    word first, and only non-zero words are searched.
    """
    if len(mask) % 8 or 8 * np.count_nonzero(mask) > len(mask):
        return np.flatnonzero(mask)
    words = mask.view(np.uint64)
    held = np.flatnonzero(words != 0)
    inside = np.flatnonzero(words[held].view(np.bool_))
    indices: Indices = held[inside >> 3]
    indices <<= 3
    inside &= 7
    indices |= inside
    return indices


def _gaps(indices: Indices) -> Array:
    """Return the number of zeros before each position, as one byte, preceded by one `_SKIP` for each 255 zeros."""
    gaps = indices.copy()
    gaps[1:] -= indices[:-1] + 1
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
        """Raise FormatError if the run's numbers are impossible for any data."""
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
    """The non-zero elements of a run, or all of its elements."""

    offset: int
    """Offset of the run in the data, in bytes."""
    nbytes: int
    """Bytes of the run."""
    indices: npt.NDArray[np.int64] | None
    """Positions of the elements in the run, rising; None: all."""
    values: npt.NDArray[np.unsignedinteger[Any]]

    def within(self, start: int, end: int, width: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]] | None:
        """Return positions, counted from `start`, and values in a part of the data; None: other width or alignment.

        Args:
            start, end: of the part, in bytes of the data.
            width: bytes of an element.
        """
        assert self.indices is not None
        first, rest = divmod(start - self.offset, width)
        if rest or width != self.values.itemsize:
            return None
        low, high = np.searchsorted(self.indices, (first, first + (end - start) // width))
        return self.indices[low:high] - first, self.values[low:high]


def xor_into(encoded: bytes | memoryview, target: memoryview | Array) -> None:
    """XOR the encoded data into `target`, which has the same length. Zero elements outside dense runs are skipped."""
    for run in decode(encoded, target.nbytes):
        elements = np.frombuffer(target, np.uint8, run.nbytes, run.offset).view(run.values.dtype)
        if run.indices is None:
            elements ^= run.values
        else:
            elements[run.indices] ^= run.values


def decode(encoded: bytes | memoryview, nbytes: int) -> Iterator[Elements]:
    """Yield the non-zero runs of encoded data that has `nbytes` bytes when decoded."""
    if not len(encoded):
        return
    runs = _parse_head(encoded, nbytes)
    body = _expand(encoded[_HEAD.itemsize * (1 + _NUM_FIELDS * len(runs)) :], runs)
    offset_of_gap, offset_of_value = 0, sum(run.num_gaps for run in runs)
    starts = [offset_of_value]  # One for each plane.
    for byte in range(WIDTHS[-1]):
        starts.append(starts[-1] + sum(run.num_stored for run in runs if run.width > byte))
    offset = 0
    for run in runs:
        values = np.empty((run.num_stored, run.width), np.uint8)
        for byte in range(run.width):
            values[:, byte] = body[starts[byte] : starts[byte] + run.num_stored]
            starts[byte] += run.num_stored
        if run.num_stored or run.num_gaps:
            gaps = body[offset_of_gap : offset_of_gap + run.num_gaps]
            indices = _indices(gaps, run) if run.num_gaps else None
            yield Elements(offset, run.nbytes, indices, values.view(f"<u{run.width}")[:, 0])
        offset_of_gap += run.num_gaps
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
    """Expand the zstd frame. The runs determine the length of its content, which bounds the allocated memory."""
    total = sum(run.num_gaps + run.num_stored * run.width for run in runs)
    try:
        found = zstandard.get_frame_parameters(frame)
        if zstandard.frame_content_size(frame) != total:
            raise FormatError(f"a zstd frame of another length than {total} bytes", code="mismatch")
        if found.window_size > MAX_WINDOW_NBYTES or found.dict_id:
            raise FormatError(f"a zstd frame with a window of {found.window_size} bytes, or a dictionary", code="limit")
        if total:
            return np.frombuffer(zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False), np.uint8)
        stream = zstandard.ZstdDecompressor().decompressobj()  # The other call does not check such a frame.
        if stream.decompress(bytes(frame)) or not stream.eof or stream.unused_data:
            raise FormatError("a zstd frame that is not alone, or does not end", code="syntax")
        return np.empty(0, np.uint8)
    except zstandard.ZstdError as error:
        raise FormatError(f"not a zstd frame: {error}", code="syntax") from None


def _indices(gaps: Array, run: _Run) -> npt.NDArray[np.int64]:
    is_element = gaps != _SKIP
    ends = np.cumsum(gaps + is_element.astype(np.int64))
    indices: npt.NDArray[np.int64] = ends[is_element] - 1
    if len(indices) != run.num_stored or int(ends[-1]) > run.nbytes // run.width:
        raise FormatError(f"gaps lead beyond a run of {run.nbytes} bytes", code="field")
    return indices


NEW = "new/"
"""Prefix of files that the result has, and the base lacks or has in another version."""

NEW_MANIFEST_NAME = NEW + MANIFEST_NAME + ".zst"
"""The relayout.json of the result, compressed."""

CHANGED_DIGESTS_NAME = "relayout.digests.delta"
"""The file of changed tensor digests."""

ENCODING = 1
"""Version of the format that `encode` writes."""

_PIECE = np.dtype(
    [("piece", "<u8"), ("nbytes", "<u8"), ("stored", "u1", BLAKE3_NBYTES), ("content", "u1", BLAKE3_NBYTES)]
)
_CHANGED_DIGEST = np.dtype([("row", "<u8"), ("digest", "u1", XXH3_NBYTES)])


def delta_name(file: str) -> str:
    """Return the name of the file with the changes of a weight file."""
    return f"{file}.delta"


@dataclass(frozen=True, slots=True)
class DeltaFile:
    """The entry of a manifest for the changes of one weight file."""

    number: int
    """Number of the weight file in the manifests of base and result."""
    nbytes: int
    """Length in bytes of the file with the changes."""
    num_pieces: int
    """Number of changed pieces."""
    index_digest: str
    """BLAKE3 digest of the index at the end of that file."""

    @property
    def index_extent(self) -> Extent:
        """Extent of the index in the file with the changes."""
        nbytes = _PIECE.itemsize * self.num_pieces
        return Extent(self.nbytes - nbytes, nbytes)


@dataclass(frozen=True, slots=True)
class ChangedDigests:
    """The entry of a manifest for the changed digests of one holder's tensors, or of the source's."""

    count: int
    digest: str
    """BLAKE3 digest of their part of the file."""


@dataclass(frozen=True, slots=True)
class DeltaManifest:
    """relayout.json of a delta."""

    generator: str
    """Program and version that wrote it."""
    base: str
    """Content of the checkpoint to which the delta applies; see `manifest.content_of`."""
    makes: str
    """Content of the result."""
    files: tuple[DeltaFile, ...]
    """The changed weight files, by rising number."""
    digests: tuple[ChangedDigests, ...]
    """For each holder of the result, in order, and then for the source."""
    others: tuple[str, ...]
    """Other files that are new, or differ from the base: record, index for stock loaders, side files."""

    by_number: Mapping[int, DeltaFile] = field(init=False, repr=False, compare=False)
    """The changed weight files, by number."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_number", {file.number: file for file in self.files})

    @property
    def digest_extents(self) -> list[Extent]:
        """Extents of the changed digests of each holder's tensors in their file, and last those of the source."""
        sizes = [_CHANGED_DIGEST.itemsize * part.count for part in self.digests]
        return [Extent(end - nbytes, nbytes) for nbytes, end in zip(sizes, accumulate(sizes), strict=True)]


def dump_delta(manifest: DeltaManifest) -> bytes:
    """Serialize relayout.json."""
    top: dict[str, Any] = {
        "relayout": FORMAT_VERSION,
        "requires": [REQUIRES_DELTA],
        "generator": manifest.generator,
        "encoding": ENCODING,
        "base": manifest.base,
        "makes": manifest.makes,
        "files": [
            {
                "file": file.number,
                "nbytes": file.nbytes,
                "num_pieces": file.num_pieces,
                "index_digest": file.index_digest,
            }
            for file in manifest.files
        ],
        "digests": [{"count": part.count, "digest": part.digest} for part in manifest.digests],
        "others": manifest.others,
    }
    return sealed(top)


def parse_delta(blob: bytes, where: str) -> DeltaManifest:
    """Parse relayout.json. FormatError: it violates FORMAT.md."""
    with about(path=where):
        top = parse_object(blob, where)
        check_top(blob, top, is_delta=True)
        fields = Fields(top)
        if (encoding := fields.size("encoding")) != ENCODING:
            raise FormatError(f"encoding {encoding}, this relayout reads {ENCODING}", code="version")
        manifest = DeltaManifest(
            generator=fields.text("generator"),
            base=blake3_field(fields, "base"),
            makes=blake3_field(fields, "makes"),
            files=tuple(map(_parse_file, fields.column("files", dict))),
            digests=tuple(map(_parse_digests, fields.column("digests", dict))),
            others=tuple(fields.column("others", str)),
        )
        numbers = [file.number for file in manifest.files]
        if any(second <= first for first, second in pairwise(numbers)):
            raise FormatError(f"files {shown(numbers)}, expected rising numbers", code="field")
        for name in manifest.others:
            check_path(name)
        check_apart(manifest.others)
        return manifest


def _parse_file(entry: Mapping[str, Any]) -> DeltaFile:
    fields = Fields(entry)
    file = DeltaFile(
        fields.size("file"), fields.size("nbytes"), fields.size("num_pieces"), blake3_field(fields, "index_digest")
    )
    if not file.num_pieces or file.nbytes < _PIECE.itemsize * file.num_pieces:
        what = f"file {file.number}: {file.num_pieces} pieces and their index in {file.nbytes} bytes"
        raise FormatError(what, code="truncated")
    return file


def _parse_digests(entry: Mapping[str, Any]) -> ChangedDigests:
    fields = Fields(entry)
    return ChangedDigests(fields.size("count"), blake3_field(fields, "digest"))


def layout_difference(old: Manifest, new: Manifest) -> str | None:
    """Return the reason why a delta between two checkpoints is impossible, as text for the user; None: it is possible.

    A delta is possible if all files have the same lengths, and all holders have the same tables: tables contain the
    locations of tensors, and do not depend on the values.
    """
    pairs: dict[str, tuple[object, ...]] = {
        "tensor-parallel degree differs": (old.num_ranks, new.num_ranks),
        "layout differs": (old.whole is None, new.whole is None),
        "size of chunks differs": (old.chunk_nbytes, new.chunk_nbytes),
        "number of source tensors differs": (old.num_source_tensors, new.num_source_tensors),
        "files differ": tuple(
            [(file.name, file.nbytes, file.data_start) for file in side.files] for side in (old, new)
        ),
        "ranks differ": tuple(
            {holder: replace(entry, table_digest="", digests_digest="") for holder, entry in side.holders.items()}
            for side in (old, new)
        ),
        "tables differ: other tensors, or written with another version of zstd": tuple(
            [entry.table_digest for entry in side.holders.values()] for side in (old, new)
        ),
    }
    return next((f"the {what}" for what, (ours, theirs) in pairs.items() if ours != theirs), None)


def dump_changed_digests(old: bytes, new: bytes) -> tuple[bytes, ChangedDigests]:
    """Return the changed digests of one holder's tensors, or of the source's, and their entry in the manifest.

    Args:
        old, new: all digests of the base and of the result, in binary form.
    """
    rows = [np.frombuffer(side, np.uint8).reshape(-1, XXH3_NBYTES) for side in (old, new)]
    changed = np.flatnonzero((rows[0] != rows[1]).any(axis=1))
    found = np.empty(len(changed), _CHANGED_DIGEST)
    found["row"], found["digest"] = changed, rows[1][changed]
    stored = found.tobytes()
    return stored, ChangedDigests(len(changed), blake3_hex(stored))


def parse_changed_digests(blob: bytes, part: ChangedDigests, count: int) -> tuple[npt.NDArray[np.int64], Array]:
    """Parse the result of `dump_changed_digests`: ascending row numbers, and the digest of each row in binary form.

    Args:
        count: of all digests of the holder, or of the source.
    """
    if part.count > count:
        raise FormatError(f"{part.count} digests that changed, of {count}", code="field")
    if blake3_hex(blob) != part.digest:
        raise FormatError("digests of tensors that changed differ from the manifest", code="digest")
    found = np.frombuffer(blob, _CHANGED_DIGEST)
    return _rising(found["row"], count, "digests that changed"), found["digest"]


def _rising(numbers: npt.NDArray[np.uint64], count: int, what: str) -> npt.NDArray[np.int64]:
    """Return numbers. Raise FormatError unless they are ascending and below a count."""
    if len(numbers) and (int(numbers.max()) >= count or (numbers[1:] <= numbers[:-1]).any()):
        raise FormatError(f"{what}: expected rising numbers below {count}", code="field")
    return numbers.astype(np.int64)


def piece_of(file: IndexedFile, chunk_nbytes: int, number: int) -> Extent:
    """Return the extent of a piece of a weight file: its header, which is piece 0, or chunk `number - 1`."""
    if number == 0:
        return Extent(0, file.data_start)
    start = file.data_start + (number - 1) * chunk_nbytes
    return Extent(start, min(chunk_nbytes, file.nbytes - start))


def dump_index(pieces: Sequence[tuple[int, int, str, str]]) -> bytes:
    """Return the index that follows the pieces of a file.

    Args:
        pieces: of each changed piece, its number, its stored length in bytes, and two BLAKE3 digests: of the stored
            piece, and of the piece in the result.
    """
    found = np.empty(len(pieces), _PIECE)
    for row, (piece, nbytes, stored, content) in enumerate(pieces):
        proofs = (np.frombuffer(bytes.fromhex(proof), np.uint8) for proof in (stored, content))
        found[row] = (piece, nbytes, *proofs)
    return found.tobytes()


@dataclass(frozen=True, slots=True)
class PieceIndex:
    """The index of the changed pieces of a file."""

    numbers: npt.NDArray[np.int64]
    """Numbers of the pieces, rising."""
    offsets: npt.NDArray[np.int64]
    """Offset of each piece in the file with the changes, followed by the end of the last one."""
    stored: Array
    """BLAKE3 digest of each piece as stored, in binary form."""
    contents: Array
    """BLAKE3 digest of each piece in the result, in binary form."""

    def rows(self, first: int, end: int) -> range:
        """Return the rows of the pieces from `first` to before `end`."""
        return range(*(int(np.searchsorted(self.numbers, piece)) for piece in (first, end)))

    def place(self, rows: range) -> Extent:
        """Return the extent of the pieces in some rows."""
        start, stop = int(self.offsets[rows.start]), int(self.offsets[rows.stop])
        return Extent(start, stop - start)


def parse_index(blob: bytes, stored: DeltaFile, file: IndexedFile, chunk_nbytes: int) -> PieceIndex:
    """Parse the result of `dump_index`."""
    if blake3_hex(blob) != stored.index_digest:
        raise FormatError("its index differs from the manifest", code="digest")
    rows = np.frombuffer(blob, _PIECE)
    num_pieces = 1 + num_chunks(file.data_start, file.nbytes, chunk_nbytes)
    numbers = _rising(rows["piece"], num_pieces, "pieces that changed")
    # The size of the requested pieces bounds the memory that a reader allocates.
    limits = np.array([32 * piece_of(file, chunk_nbytes, int(n)).nbytes + 256 for n in numbers], np.uint64)
    if (rows["nbytes"] > limits).any() or not rows["nbytes"].all():
        raise FormatError("a piece is empty, or larger than what it stands for", code="limit")
    offsets = np.concatenate(([0], np.cumsum(rows["nbytes"].astype(np.int64))))
    if int(offsets[-1]) + len(blob) != stored.nbytes:
        raise FormatError(f"pieces of {offsets[-1]} bytes, expected {stored.nbytes - len(blob)}", code="mismatch")
    if numbers[:1].tolist() == [0] and bytes(rows["content"][0]).hex() != file.header_digest:
        raise FormatError("the digest of its header differs from the manifest", code="digest")
    return PieceIndex(numbers, offsets, rows["stored"], rows["content"])
