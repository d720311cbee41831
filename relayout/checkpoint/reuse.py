"""Bytes of a new converted checkpoint that an older one already has: a plan, and verified reads.

Copying a new version of a model sends every byte again, although the destination often has most of them: frozen layers
of a fine-tune, all rows of a vocabulary but the new ones, another degree of the same model.

The plan comes from the two indexes alone, without reading a weight. A range of a new file is expected in an older file
under one of these conditions, in this order:

1. A chunk has the same BLAKE3 digest. Chunks lie on a fixed grid, so this finds bytes at an unchanged offset in their
   file.
2. A slice has the same digest and length. This finds bytes that moved, because data before them changed its size.
3. A tensor of the same name and dtype has rows of the same shape, but other slices: it grew, or it is cut for another
   degree. Equal bytes of the two whole tensors are then at equal offsets, if rows were only appended.

**The plan is a guess, and proves nothing.** The older folder may be damaged, may change while it is read, and its index
may be wrong or hostile. So `Reuse.fill` compares each chunk that has bytes of the older folder with the chunk's digest
in the new checkpoint, in the memory that is then written. `Reuse.clone` lets a chunk of a new file share the blocks of
an older one, and compares what the new file then contains. If the digest differs, or the older folder cannot be read,
the whole chunk comes from the source. No file is linked or moved: the older folder is only read.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from logging import getLogger
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from relayout.checkpoint.converted import read_chunk_digests, read_packed_digests, read_table
from relayout.core.digests import BLAKE3_NBYTES, XXH3_NBYTES, blake3_hex
from relayout.core.extents import BLOCK, Extent, Grid
from relayout.core.slices import Slice
from relayout.errors import FormatError
from relayout.format.index import Manifest, RankTable, TensorKind, chunks_over
from relayout.storage.reading import OpenFiles
from relayout.storage.stores import Access, Closable, ReadableFile, Store, WritableFile
from relayout.storage.system import Buffer

_MIN_NBYTES = 2**16
"""Minimum bytes of a range: each range is a request of its own, and splits a request to the source."""

Numbers: TypeAlias = npt.NDArray[np.int64]
Location: TypeAlias = tuple[int, int]
"""Number of an older file, and an absolute offset in it."""
Tensor: TypeAlias = tuple[str, str, tuple[int, ...]]
"""Name, dtype, and shape of a row. Tensors with equal values may have equal rows at equal offsets."""


@dataclass(frozen=True, slots=True, order=True)
class ReusedRange:
    """A range of a new file with bytes that an older file is expected to contain."""

    extent: Extent
    """The range of the new file."""
    file: int
    """Number of the older file in its manifest."""
    offset: int
    """Absolute offset of the same bytes in the older file."""

    def is_before(self, other: ReusedRange) -> bool:
        """Return True if the other range begins where this one ends, in both files."""
        is_next = self.extent.end == other.extent.offset
        return is_next and (self.file, self.offset + self.extent.nbytes) == (other.file, other.offset)

    def inside(self, extent: Extent) -> ReusedRange | None:
        """Return the part that lies in an extent of the new file; None if none does."""
        start, end = max(self.extent.offset, extent.offset), min(self.extent.end, extent.end)
        if start >= end:
            return None
        return ReusedRange(Extent(start, end - start), self.file, self.offset + start - self.extent.offset)


@dataclass(frozen=True, slots=True)
class Contents:
    """The index of a converted checkpoint: all digests of the bytes in its weight files."""

    manifest: Manifest
    chunk_digests: Mapping[int, bytes]
    """Stored BLAKE3 digests of the chunks of each file, by file number. Files outside this mapping are ignored."""
    tables: Mapping[int, RankTable]
    """The table of each holder of these files."""
    digests: Mapping[int, bytes]
    """The digests of the tensors of each holder, as stored."""

    @staticmethod
    def read(folder: Store, manifest: Manifest, holders: Collection[int]) -> Contents:
        """Read the index of the files of these holders. FormatError: it is damaged."""
        numbers = sorted({number for one in holders for number in manifest.holders[one].files})
        return Contents(
            manifest,
            {number: read_chunk_digests(folder, manifest, number) for number in numbers},
            {one: read_table(folder, manifest, one) for one in holders},
            {one: read_packed_digests(folder, manifest, one) for one in holders},
        )


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces of one file that have digests: its chunks, or its slices. They are in file order, without overlap."""

    offsets: Numbers
    """Absolute file offsets."""
    sizes: Numbers
    """Bytes of each piece."""
    keys: Numbers
    """The first 8 bytes of each digest, as an integer."""

    def over(self, extent: Extent) -> Iterator[tuple[int, Extent]]:
        """Yield the position of each piece that overlaps an extent of the file, and the overlap."""
        first = int(np.searchsorted(self.offsets + self.sizes, extent.offset, side="right"))
        for position in range(first, int(np.searchsorted(self.offsets, extent.end))):
            start = max(int(self.offsets[position]), extent.offset)
            end = min(int(self.offsets[position] + self.sizes[position]), extent.end)
            if start < end:
                yield position, Extent(start, end - start)


def _keys(packed: bytes, width: int) -> Numbers:
    """Return the first 8 bytes of each digest; longer keys are not needed, as reads are verified."""
    digests = np.frombuffer(packed, np.uint8).reshape(-1, width)
    return np.ascontiguousarray(digests[:, :8]).view(np.int64).reshape(-1)


def _chunks_in(contents: Contents, number: int) -> _Pieces:
    file, step = contents.manifest.files[number], contents.manifest.chunk_nbytes
    offsets = np.arange(file.data_start, file.nbytes, step, dtype=np.int64)
    return _Pieces(
        offsets, np.minimum(file.nbytes - offsets, step), _keys(contents.chunk_digests[number], BLAKE3_NBYTES)
    )


@dataclass(frozen=True, slots=True)
class _Slices:
    """The slices in one file, in file order."""

    table: RankTable
    rows: range
    """The slices' rows in the table."""
    pieces: _Pieces

    def tensor(self, position: int) -> tuple[Tensor, TensorKind]:
        """Return the tensor of a slice, and the kind of the slice."""
        row = self.rows[position]
        kind = self.table.kinds[self.table.kind_of[row]]
        return (self.table.names[row], kind.dtype, kind.source_shape[1:]), kind


def _slices_in(contents: Contents) -> dict[int, _Slices]:
    """Return the slices in each file, by file number, from one holder: all holders that list a file agree on them.

    A file of whole tensors has none, unless the table of whole tensors is among the contents.
    """
    found: dict[int, _Slices] = {}
    manifest = contents.manifest
    for holder, table in contents.tables.items():
        files, offsets = np.asarray(table.files, np.int64), np.asarray(table.offsets, np.int64)
        sizes = np.asarray(list(table.sizes), np.int64)
        keys = _keys(contents.digests[holder], XXH3_NBYTES)
        for position, number in enumerate(manifest.holders[holder].files):
            # In a file of whole tensors, a rank's slice may be many pieces: the whole tensors have one each.
            if number in found or (number in manifest.shared) != (holder == manifest.num_ranks):
                continue
            first, end = np.searchsorted(files, [position, position + 1]).tolist()
            pieces = _Pieces(offsets[first:end], sizes[first:end], keys[first:end])
            found[number] = _Slices(table, range(first, end), pieces)
    return found


class _Older:
    """The pieces of all older files, found by digest and length."""

    def __init__(self, files: Mapping[int, _Pieces]) -> None:
        """Index the pieces; `files` has the pieces of each file, by its number."""
        self._files = np.repeat(np.asarray(list(files), np.int64), [len(each.sizes) for each in files.values()])
        self._offsets = _concatenated(each.offsets for each in files.values())
        self._sizes = _concatenated(each.sizes for each in files.values())
        self._keys = _concatenated(each.keys for each in files.values())
        self._order = np.argsort(self._keys, kind="stable")

    def find(self, pieces: _Pieces) -> list[Location | None]:
        """Return the location of each of these pieces; None: not found."""
        if not len(self._keys):
            return [None] * len(pieces.keys)
        nearest = np.searchsorted(self._keys, pieces.keys, sorter=self._order)
        at = self._order[np.minimum(nearest, len(self._keys) - 1)]
        is_same = (self._keys[at] == pieces.keys) & (self._sizes[at] == pieces.sizes)
        places = zip(self._files[at].tolist(), self._offsets[at].tolist(), strict=True)
        return [place if same else None for place, same in zip(places, is_same.tolist(), strict=True)]


def _concatenated(columns: Iterable[Numbers]) -> Numbers:
    return np.concatenate([np.empty(0, np.int64), *columns])


def plan_reuse(new: Contents, old: Contents) -> dict[int, list[ReusedRange]]:
    """Plan which ranges of new files are taken from older files. Pure.

    Returns:
        By number of the new file: ranges in rising order, without overlap, each as long as possible. A header is taken
        whole or not at all.
    """
    slices, older_slices = _slices_in(new), _slices_in(old)
    same_grid = new.manifest.chunk_nbytes == old.manifest.chunk_nbytes
    known_chunks = _Older({number: _chunks_in(old, number) for number in old.chunk_digests} if same_grid else {})
    known_slices = _Older({number: found.pieces for number, found in older_slices.items()})
    taken: dict[int, list[ReusedRange]] = {}
    left: list[tuple[int, int, Extent]] = []
    """New file, position of a slice in it, and bytes of the slice that match no chunk or slice of an older file."""
    for number in new.chunk_digests:
        file = new.manifest.files[number]
        body = Extent(file.data_start, file.nbytes - file.data_start)
        taken[number], _ = _equal(_chunks_in(new, number), known_chunks, [body])
        if number in slices:
            others, unequal = _equal(slices[number].pieces, known_slices, _gaps(body, taken[number]))
            taken[number] += others
            left += [(number, *one) for one in unequal]
    wholes = _Wholes(older_slices, {slices[number].tensor(position)[0] for number, position, _ in left})
    for number, position, extent in left:
        taken[number] += wholes.find(slices[number], position, extent)
    return {number: [*_equal_head(new, number, old), *_worthwhile(new, number, taken[number])] for number in taken}


def _equal(
    pieces: _Pieces, known: _Older, wanted: Iterable[Extent]
) -> tuple[list[ReusedRange], list[tuple[int, Extent]]]:
    """Split extents of a file into ranges found in older files by digest, and the rest, by position of its piece."""
    places, taken, left = known.find(pieces), list[ReusedRange](), list[tuple[int, Extent]]()
    for extent in wanted:
        for position, part in pieces.over(extent):
            if (place := places[position]) is None:
                left.append((position, part))
            else:
                taken.append(ReusedRange(part, place[0], place[1] + part.offset - int(pieces.offsets[position])))
    return taken, left


def _equal_head(new: Contents, number: int, old: Contents) -> list[ReusedRange]:
    """Take the header from an older file with the same header digest in its manifest."""
    file = new.manifest.files[number]
    same = (one for one in old.chunk_digests if old.manifest.files[one].header_digest == file.header_digest)
    return [ReusedRange(Extent(0, file.data_start), one, 0) for one in same][:1]


def _gaps(extent: Extent, taken: Sequence[ReusedRange]) -> list[Extent]:
    """Return the parts of an extent that are in none of the taken ranges, which are in rising order."""
    ends = [extent.offset, *(one.extent.end for one in taken)]
    starts = [*(one.extent.offset for one in taken), extent.end]
    return [Extent(end, start - end) for end, start in zip(ends, starts, strict=True) if start > end]


class _Wholes:
    """Locations of whole tensors' bytes in older files."""

    def __init__(self, older: Mapping[int, _Slices], tensors: Collection[Tensor]) -> None:
        self._pieces: dict[Tensor, dict[Extent, Location]] = {}
        """The contiguous byte ranges of each requested tensor that are in a file, and their locations."""
        self._known: set[tuple[Tensor, tuple[int, ...], Slice]] = set()
        """The slices that the older files have."""
        for number, in_file in older.items() if tensors else ():
            for position, offset in enumerate(in_file.pieces.offsets.tolist()):
                tensor, kind = in_file.tensor(position)
                if tensor not in tensors:
                    continue
                self._known.add((tensor, kind.source_shape, kind.part))
                for run in kind.in_whole:
                    if run.count == 1:
                        place = number, offset + run.target
                        self._pieces.setdefault(tensor, {}).setdefault(Extent(run.source, run.nbytes), place)

    def find(self, in_file: _Slices, position: int, extent: Extent) -> Iterator[ReusedRange]:
        """Yield the ranges of a slice that older files may have; `extent` is in the new file.

        Yields nothing if they have exactly this slice, because its digest was found to differ.
        """
        tensor, kind = in_file.tensor(position)
        if (tensor, kind.source_shape, kind.part) in self._known:
            return
        start = int(in_file.pieces.offsets[position])
        for run in kind.in_whole:
            here = ReusedRange(Extent(start + run.target, run.nbytes), 0, run.source).inside(extent)
            if run.count == 1 and here is not None:
                yield from self._over(tensor, here)

    def _over(self, tensor: Tensor, wanted: ReusedRange) -> Iterator[ReusedRange]:
        """Yield the ranges that pieces of a tensor cover; `wanted.offset` is in the whole tensor."""
        shift, done, end = wanted.extent.offset - wanted.offset, wanted.offset, wanted.offset + wanted.extent.nbytes
        for piece, (file, offset) in sorted(self._pieces.get(tensor, {}).items()):
            low, high = max(done, piece.offset), min(end, piece.end)
            if low < high:
                yield ReusedRange(Extent(low + shift, high - low), file, offset + low - piece.offset)
                done = high


def _worthwhile(new: Contents, number: int, taken: Iterable[ReusedRange]) -> Iterator[ReusedRange]:
    """Join ranges that are neighbors in both files; leave out short ones, unless they cover a whole chunk."""
    joined: list[ReusedRange] = []
    for one in sorted(taken):
        if joined and joined[-1].is_before(one):
            first = joined[-1]
            whole = Extent(first.extent.offset, one.extent.end - first.extent.offset)
            joined[-1] = ReusedRange(whole, first.file, first.offset)
        else:
            joined.append(one)
    file, grid = new.manifest.files[number], Grid(new.manifest.files[number].data_start, new.manifest.chunk_nbytes)
    for one in joined:
        chunk = grid.up(one.extent.offset)
        if one.extent.nbytes >= _MIN_NBYTES or min(chunk + grid.step, file.nbytes) <= one.extent.end:
            yield one


class Reuse(Closable):
    """Fills chunks of new files with bytes of an older folder, and verifies the chunks. Thread-safe."""

    def __init__(self, new: Contents, older: Store, old: Contents) -> None:
        """Plan the ranges to take; `older` is the folder of the index `old`."""
        self._new, self._older, self._old = new, older, old
        self._plan = plan_reuse(new, old)
        self._starts = {number: [one.extent.offset for one in found] for number, found in self._plan.items()}
        self._files = OpenFiles(self._open)
        self._lock = threading.Lock()
        self._lost: set[int] = set()
        """Older files that could not be read; they are not tried again."""
        self._can_clone = True
        """False once a chunk could not share blocks: the file system does not support it."""
        self.nbytes = 0
        """Bytes of the older folder that were verified and used so far."""
        self.shared_nbytes = 0
        """Bytes of `nbytes` that were not written: the new files share their blocks."""

    def clone(self, number: int, extent: Extent, output: WritableFile, view: memoryview) -> bool:
        """Let a chunk of a new file share the blocks of an older file, if one has all of its bytes, and verify it.

        Args:
            number: of the new file, which is `output`.
            extent: of the chunk, in whole blocks. For another one nothing is done.
            view: memory for the bytes.

        Returns:
            True: `output` has the chunk, verified by the digest in the new checkpoint's index. False: the content of
                `view`, and of the chunk in `output`, is undefined.
        """
        proof, found = self._find_digest(number, extent), self._within(number, extent)
        if not self._can_clone or proof is None or len(found) != 1 or found[0].extent != extent:
            return False
        (one,) = found
        if one.offset % BLOCK or extent.offset % BLOCK or extent.nbytes % BLOCK or not extent.offset:
            return False

        def clone(opened: ReadableFile) -> None:
            source = opened.fileno()
            self._can_clone = source is not None and output.clone(source, one.offset, extent.offset, view)

        if not self._use(one.file, clone) or not self._can_clone or blake3_hex(view) != proof:
            return False
        with self._lock:
            self.nbytes += extent.nbytes
            self.shared_nbytes += extent.nbytes
        return True

    def fill(
        self, number: int, extent: Extent, view: memoryview, scratch: Buffer, rest: Callable[[Extent, memoryview], None]
    ) -> bool:
        """Fill memory with a chunk of a new file, or its header, if older files have some of its bytes.

        Args:
            number: of the new file.
            extent: of the chunk or header. For a part of a chunk nothing is taken, as it has no digest.
            view: memory for the bytes.
            scratch: memory for a direct read that cannot go into `view`.
            rest: reads another extent of the new file from its source.

        Returns:
            True: `view` has the bytes, verified by the digest in the new checkpoint's index. False: the content of
                `view` is undefined, and the caller must read all of it from the source.
        """
        proof, found = self._find_digest(number, extent), self._within(number, extent)
        if proof is None or not found:
            return False
        for one in found:
            part = view[one.extent.offset - extent.offset : one.extent.end - extent.offset]
            if not self._read(one, part, scratch):
                return False
        for gap in _gaps(extent, found):
            rest(gap, view[gap.offset - extent.offset : gap.end - extent.offset])
        if blake3_hex(view) != proof:
            return False
        with self._lock:
            self.nbytes += sum(one.extent.nbytes for one in found)
        return True

    def taken(self, name: str) -> list[tuple[ReusedRange, str]]:
        """Return the ranges of a new file that older files are expected to contain, and the names of these files."""
        numbers = [number for number in self._plan if self._new.manifest.files[number].name == name]
        return [(one, self._old.manifest.files[one.file].name) for number in numbers for one in self._plan[number]]

    def fill_chunks(
        self, number: int, extent: Extent, view: memoryview, scratch: Buffer, rest: Callable[[Extent, memoryview], None]
    ) -> list[Extent]:
        """Fill memory with neighboring chunks, as far as older files have bytes of them; arguments as of `fill`.

        Returns:
            The chunks that the caller must read from the source and verify, neighbors joined.
        """
        file, left = self._new.manifest.files[number], list[Extent]()
        for _, chunk, part in chunks_over(extent, file.data_start, file.nbytes, self._new.manifest.chunk_nbytes):
            inside = view[part.offset - extent.offset : part.end - extent.offset]
            if chunk == part and self.fill(number, chunk, inside, scratch, rest):
                continue
            if left and left[-1].end == part.offset:
                left[-1] = Extent(left[-1].offset, left[-1].nbytes + part.nbytes)
            else:
                left.append(part)
        return left

    def _within(self, number: int, extent: Extent) -> list[ReusedRange]:
        """Return the parts of an extent that the plan takes."""
        plan, first = self._plan.get(number, []), bisect_right(self._starts.get(number, []), extent.offset)
        near = takewhile(lambda one: one.extent.offset < extent.end, plan[max(0, first - 1) :])
        return [part for one in near if (part := one.inside(extent)) is not None]

    def _find_digest(self, number: int, extent: Extent) -> str | None:
        """Return the BLAKE3 digest of a chunk or header; None if the extent is neither."""
        file, step = self._new.manifest.files[number], self._new.manifest.chunk_nbytes
        if extent == Extent(0, file.data_start):
            return file.header_digest
        chunk, inside = divmod(extent.offset - file.data_start, step)
        if inside or extent.end != min(extent.offset + step, file.nbytes):
            return None
        return self._new.chunk_digests[number][BLAKE3_NBYTES * chunk :][:BLAKE3_NBYTES].hex()

    def _open(self, number: int) -> ReadableFile:
        file = self._old.manifest.files[number]
        return self._older.open(file.name, file.nbytes, access=Access.ONCE)

    def _read(self, taken: ReusedRange, view: memoryview, scratch: Buffer) -> bool:
        """Read a range of an older file; return False if it cannot be read."""
        wanted = Extent(taken.offset, taken.extent.nbytes)
        return self._use(taken.file, lambda opened: read_into(opened, wanted, view, scratch))

    def _use(self, number: int, act: Callable[[ReadableFile], None]) -> bool:
        """Call a function with an open older file; return False if the file cannot be read."""
        if number in self._lost:
            return False
        try:
            with self._files.use(number) as opened:
                act(opened)
        except (FormatError, OSError) as error:
            with self._lock:
                # A FormatError concerns one file. A failing drive or server would delay each chunk, so all files are
                # given up.
                self._lost |= {number} if isinstance(error, FormatError) else self._old.chunk_digests.keys()
            getLogger("relayout").warning("relayout: not reused, and copied from the source: %s", error)
            return False
        return True

    def close(self) -> None:
        self._files.close()


def read_into(opened: ReadableFile, extent: Extent, view: memoryview, scratch: Buffer) -> None:
    """Read an extent of a file into memory at any address; errors as of `ReadableFile.read`.

    Args:
        scratch: for a direct read that cannot go into `view`.
    """
    alignment = opened.alignment
    if alignment == 1:
        opened.read(extent.offset, view)
        return
    blocks = extent.aligned(alignment)
    memory = scratch.reserve(blocks.nbytes)
    opened.read(blocks.offset, memory)
    view[:] = memory[extent.offset - blocks.offset :][: extent.nbytes]
