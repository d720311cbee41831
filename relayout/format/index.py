"""The sidecar index of a converted checkpoint, as values: the manifest, the rank tables, and the chunks.

The manifest is small and lists the bytes that a rank needs, with their offsets in memory: a rank is a list of reads
that fill an arena. The rank table, which can be large, contains the location of each tensor in the arena. Chunks divide
the files into pieces, and relayout.chunks has a BLAKE3 digest of each. FORMAT.md is normative.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from math import prod
from typing import TypeVar, overload

from relayout.core.digests import BLAKE3_NBYTES, XXH3_NBYTES
from relayout.core.extents import BLOCK, Extent, Transfer, align_up, coalesce, split
from relayout.core.slices import Slice, slice_transfers

MANIFEST_NAME = "relayout.json"
"""The manifest's file name. A folder with this file is a converted checkpoint."""

SIGNATURE_NAME = "model.sig"
"""The file with a signature of all files in its folder. `model_signing sign` writes that name by default."""

HUB_INDEX_NAME = "model.safetensors.index.json"
"""The index with which stock loaders find the file of each tensor."""

SLICES_ONLY = "relayout: this folder has slices of tensors only"
"""The name in that index in place of tensors, if the folder has only slices.

The index assigns it to a file that does not exist, so that loaders that use the index stop.
"""

VERSION = "0.1.0"
"""The version of relayout, which is `relayout.__version__`; manifests contain it."""

RANK_FILE = re.compile(r"model-rank-\d+-part-\d+\.safetensors|relayout-rank-\d+-part-\d+\.slices")
"""Matches the results of `rank_file_name`: the only sign that a folder without a manifest was a converted one."""

FORMAT_VERSION = 1
"""The version of manifest, rank tables and source record."""

FILE_VERSION = 1
"""The version of the rules of rank files."""

ARENA_ALIGNMENT = 16
"""Alignment in bytes of every tensor in the arena."""


RANKS, WHOLE_TENSORS = "ranks", "whole"
"""The layouts: each rank's slices in its own files; or whole tensors, plus each rank's non-contiguous slices."""

MIN_ALIGNMENT, MAX_ALIGNMENT = 512, 16 * 2**20
"""The least and the greatest alignment of a conversion, in bytes. It is a power of two."""


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes of one file and their offset in the arena."""

    file: int
    """Position in the rank's list of files."""
    transfer: Transfer
    """The bytes to move, from absolute offsets in the file to the arena."""


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """A file with tensors. Its position in the manifest's list is its number, by which the index refers to it."""

    name: str
    """File name in the checkpoint folder."""
    nbytes: int
    """Length of the whole file."""
    data_start: int
    """Absolute offset of its data section."""
    tensors_digest: str
    """Digest of the tensors in the file, see `digest_of_tensors`. The file's first bytes repeat it."""
    header_digest: str
    """BLAKE3 digest, in hex, of the bytes before the data section."""
    chunks_digest: str
    """BLAKE3 digest, in hex, of the file's part of relayout.chunks."""


@dataclass(frozen=True, slots=True)
class RankEntry:
    """The manifest's entry of one rank."""

    table: str
    """File name of the rank table."""
    table_digest: str
    """BLAKE3 digest of the table as stored, in hex."""
    digests_digest: str
    """BLAKE3 digest, in hex, of the rank's part of relayout.digests: its tensors' digests, in table order."""
    num_tensors: int
    nbytes: int
    """Bytes of all the rank's tensors."""
    files: tuple[int, ...]
    """Numbers of the files that hold the rank's tensors."""
    arena_nbytes: int
    reads: tuple[Read, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of relayout.json."""

    generator: str
    """Program and version that wrote it."""
    conversion: str | None
    """The name of this conversion: a digest of degree, weights and cuts, see `conversion_digest`.

    None: unknown, because only some ranks were converted.
    """
    model_type: str | None
    plan: str
    """"ORIGIN:NAME", or "none"."""
    expert_parallel: bool
    """True if experts are held whole (expert parallel)."""
    alignment: int
    dcp: bool
    """True if PyTorch DCP can read the rank files as one model."""
    record_digest: str
    """BLAKE3 digest of the source record as stored, in hex."""
    source_digests_digest: str
    """BLAKE3 digest, in hex, of the last part of relayout.digests: the source tensors' digests, in record order."""
    num_source_tensors: int
    source_nbytes: int
    """Bytes of all source tensors."""
    hub_index_digest: str | None
    """BLAKE3 digest of model.safetensors.index.json, for stock loaders; None: the folder has no such index."""
    chunk_nbytes: int
    """Bytes of a chunk: relayout.chunks has one digest for each chunk of a file."""
    files: tuple[IndexedFile, ...]
    """All files with tensors."""
    ranks: tuple[RankEntry | None, ...]
    """The entry of each rank; None for a rank that the folder does not have."""
    whole: RankEntry | None = None
    """The whole tensors, as if they were a rank's; None except in the `whole` layout."""
    holders: Mapping[int, RankEntry] = field(init=False, repr=False, compare=False)
    """The ranks in the folder, and after them, in the `whole` layout, the whole tensors with the key `num_ranks`."""

    def __post_init__(self) -> None:
        holders = {holder: entry for holder, entry in enumerate((*self.ranks, self.whole)) if entry is not None}
        object.__setattr__(self, "holders", holders)

    @property
    def num_ranks(self) -> int:
        """The tensor-parallel degree."""
        return len(self.ranks)

    @property
    def present(self) -> tuple[int, ...]:
        """The ranks that the folder has."""
        return tuple(rank for rank, entry in enumerate(self.ranks) if entry is not None)

    @property
    def has_all(self) -> bool:
        """True if the folder has all ranks."""
        return None not in self.ranks

    @property
    def shared(self) -> frozenset[int]:
        """Numbers of the files of whole tensors."""
        return frozenset(() if self.whole is None else self.whole.files)

    def holder_files(self, holder: int) -> list[IndexedFile]:
        """Return the files of a holder, in its order; file positions in its reads and table refer to this list."""
        return [self.files[index] for index in self.holders[holder].files]

    def only(self, ranks: Container[int]) -> Manifest:
        """Return the manifest of a folder with only these ranks."""
        entries = [entry if rank in ranks else None for rank, entry in enumerate(self.ranks)]
        used = sorted({index for entry in (*entries, self.whole) if entry is not None for index in entry.files})
        number = {index: position for position, index in enumerate(used)}

        def renumbered(entry: RankEntry | None) -> RankEntry | None:
            return None if entry is None else replace(entry, files=tuple(number[index] for index in entry.files))

        return replace(
            self,
            files=tuple(self.files[index] for index in used),
            ranks=tuple(map(renumbered, entries)),
            whole=renumbered(self.whole),
        )


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Properties that many tensors of a rank share: dtype, shapes and slice."""

    dtype: str
    bits: int
    """Bits of an element."""
    shape: tuple[int, ...]
    """Shape of the slice, in elements."""
    source_shape: tuple[int, ...]
    """Shape of the whole tensor."""
    part: Slice
    """The slice of the whole tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes of the slice."""
        return prod(self.shape) * self.bits // 8

    @property
    def in_whole(self) -> tuple[Transfer, ...]:
        """The transfers from the whole tensor to the slice."""
        return slice_transfers(self.dtype, self.source_shape, self.part, self.bits)


Value = TypeVar("Value")


class OfKinds(Sequence[Value]):
    """A column that is stored once for each kind."""

    def __init__(self, values: Sequence[Value], kind_of: Sequence[int]) -> None:
        self._values = values
        self._kind_of = kind_of

    def __len__(self) -> int:
        return len(self._kind_of)

    def __iter__(self) -> Iterator[Value]:
        return map(self._values.__getitem__, self._kind_of)

    @overload
    def __getitem__(self, row: int) -> Value: ...
    @overload
    def __getitem__(self, row: slice) -> list[Value]: ...
    def __getitem__(self, row: int | slice) -> Value | list[Value]:
        if isinstance(row, slice):
            return [self._values[kind] for kind in self._kind_of[row]]
        return self._values[self._kind_of[row]]


@dataclass(frozen=True, slots=True)
class RankTable:
    """The tensors of one rank, in columns of equal length, in file order."""

    rank: int
    kinds: Sequence[TensorKind]
    kind_of: Sequence[int]
    """Position in `kinds`."""
    names: Sequence[str]
    files: Sequence[int]
    """Position in the rank's list of files."""
    offsets: Sequence[int]
    """Absolute file offset."""
    arena_offsets: Sequence[int]
    """Byte offset in the arena."""

    @property
    def dtypes(self) -> Sequence[str]:
        """Dtype of each tensor."""
        return OfKinds([kind.dtype for kind in self.kinds], self.kind_of)

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each slice."""
        return OfKinds([kind.nbytes for kind in self.kinds], self.kind_of)

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Shape of each slice, in elements."""
        return OfKinds([kind.shape for kind in self.kinds], self.kind_of)

    @property
    def source_shapes(self) -> Sequence[tuple[int, ...]]:
        """Shape of each whole tensor."""
        return OfKinds([kind.source_shape for kind in self.kinds], self.kind_of)

    @property
    def slices(self) -> Sequence[Slice]:
        """The slice of each tensor, as a part of the whole tensor."""
        return OfKinds([kind.part for kind in self.kinds], self.kind_of)


def rank_file_name(rank: int, part: int, *, next_to_whole: bool = False) -> str:
    """Return the name that vLLM and SGLang use for sharded state; with `next_to_whole`, one that no loader accepts.

    PyTorch's HuggingFaceStorageReader (torch 2.13, `hf_storage.py`) reads every *.safetensors of a folder.
    """
    return f"relayout-rank-{rank}-part-{part}.slices" if next_to_whole else f"model-rank-{rank}-part-{part}.safetensors"


def missing_shard_name(num_ranks: int) -> str:
    """Return the file name in the index of a folder with only slices. It names no file: errors of loaders show it."""
    return f"this-folder-is-converted-for-{num_ranks}-ranks-and-needs-relayout.safetensors"


CHUNKS_NAME = "relayout.chunks"
"""The file with the BLAKE3 digests of the chunks of all files, in the order of the manifest."""

DIGESTS_NAME = "relayout.digests"
"""The file with the digests of the tensors of all holders, in the order of the manifest, and then of the source."""

DIGESTED_NBYTES = 2**20
"""Bytes of the chunks that relayout writes."""

MIN_CHUNK_NBYTES, MAX_CHUNK_NBYTES = 2**16, 2**30
"""The smallest and the largest size of chunks, in bytes. The size is a power of two."""


def chunks_of(data_start: int, nbytes: int, chunk_nbytes: int) -> list[Extent]:
    """Return the chunks of a file of `nbytes`: they cover its data section; the last may be shorter."""
    return list(split(Extent(data_start, nbytes - data_start), chunk_nbytes))


def chunks_over(piece: Extent, data_start: int, nbytes: int, chunk_nbytes: int) -> Iterator[tuple[int, Extent, Extent]]:
    """Yield the chunks that a piece of the data section touches: number, chunk, and the chunk's part in the piece."""
    if not piece.nbytes:
        return
    for index in range((piece.offset - data_start) // chunk_nbytes, -(-(piece.end - data_start) // chunk_nbytes)):
        start = data_start + index * chunk_nbytes
        chunk = Extent(start, min(chunk_nbytes, nbytes - start))
        low = max(piece.offset, start)
        yield index, chunk, Extent(low, min(piece.end, chunk.end) - low)


def num_chunks(data_start: int, nbytes: int, chunk_nbytes: int) -> int:
    """Return the number of chunks of a file of `nbytes`."""
    return -(-(nbytes - data_start) // chunk_nbytes)


def chunk_digest_extents(files: Sequence[IndexedFile], chunk_nbytes: int) -> list[Extent]:
    """Return the extent of each file's chunk digests in relayout.chunks."""
    sizes = [BLAKE3_NBYTES * num_chunks(file.data_start, file.nbytes, chunk_nbytes) for file in files]
    return [Extent(end - nbytes, nbytes) for nbytes, end in zip(sizes, accumulate(sizes), strict=True)]


def digest_extents(manifest: Manifest) -> list[Extent]:
    """Return the extent of each holder's tensor digests in relayout.digests, in order, and last the source's."""
    counts = [*(entry.num_tensors for entry in manifest.holders.values()), manifest.num_source_tensors]
    ends = accumulate(XXH3_NBYTES * count for count in counts)
    return [Extent(end - XXH3_NBYTES * n, XXH3_NBYTES * n) for n, end in zip(counts, ends, strict=True)]


_DIRECT_NBYTES = 2**20
"""Minimum bytes of contiguous reads that get a target suitable for direct I/O; that may waste a block."""


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """The layout of an arena: the target in memory for the bytes of each read."""

    nbytes: int
    reads: tuple[Read, ...]
    offsets: tuple[tuple[int, ...], ...]
    """For each file: the arena offset of each of its slices, in file order."""


def plan_arena(files: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> ArenaLayout:
    """Lay out the arena for files given as (data start, offsets, sizes) of their slices in file order.

    The bulk of a file is one read. Its arena offset is congruent with its file offset modulo a block, and it has whole
    blocks of the arena to itself, so that direct I/O can read it in place. Slices with a size that is not a multiple of
    16 bytes would lie at odd addresses. They are spread out to multiples of 16, one strided read for each run of equal
    sizes.
    """
    reads: list[Read] = []
    columns = []
    end = 0
    for index, (data_start, offsets, sizes) in enumerate(files):
        bulk = align_up(end, BLOCK) + data_start % BLOCK
        num_even = next((i for i, nbytes in enumerate(sizes) if nbytes % ARENA_ALIGNMENT), len(sizes))
        column = [bulk + offset - data_start for offset in offsets[:num_even]]
        if column:
            end = column[-1] + sizes[num_even - 1]
            if end > bulk:
                reads.append(Read(index, Transfer(data_start, bulk, end - bulk)))
        end = align_up(end, BLOCK)
        position = num_even
        for nbytes, group in groupby(sizes[num_even:]):
            count = sum(1 for _ in group)
            pitch = align_up(nbytes, ARENA_ALIGNMENT)
            strides = (nbytes, pitch) if count > 1 else (0, 0)
            if nbytes:
                reads.append(Read(index, Transfer(offsets[position], end, nbytes, count, *strides)))
            column.extend(end + i * pitch for i in range(count))
            end += count * pitch
            position += count
        columns.append(tuple(column))
    return ArenaLayout(align_up(end, BLOCK), tuple(reads), tuple(columns))


@dataclass(frozen=True, slots=True)
class Placement:
    """An arena for some tensors, with the location of each."""

    nbytes: int
    """Bytes of the arena, a multiple of the block."""
    offsets: tuple[int, ...]
    """Arena offset of each tensor, a multiple of `ARENA_ALIGNMENT`."""
    reads: tuple[Read, ...]
    """The reads that fill the arena. Targets do not overlap."""


def place(tensors: Sequence[tuple[Read, ...]], sizes: Sequence[int], start: int = 0) -> Placement:
    """Place tensors one after the other, from the arena offset `start` (a multiple of the block).

    Each tensor is given by its reads, with targets relative to its first byte. Tensors that are also adjacent in a file
    share one read.
    """
    offsets: list[int] = []
    reads: list[Read] = []
    end = start
    for first, last in _runs(tensors, sizes):
        base = _start(end, tensors[first], tensors[last])
        if first < last:
            source = tensors[first][0].transfer.source
            reads.append(
                Read(tensors[first][0].file, Transfer(source, base, tensors[last][0].transfer.source_end - source))
            )
            offsets += [base + tensors[row][0].transfer.source - source for row in range(first, last + 1)]
        else:
            reads += [Read(read.file, read.transfer.shifted(target=base)) for read in tensors[first]]
            offsets.append(base)
        end = offsets[-1] + sizes[last]
    return Placement(align_up(end, BLOCK) - start, tuple(offsets), tuple(reads))


def _start(end: int, first: tuple[Read, ...], last: tuple[Read, ...]) -> int:
    """Return the first offset from `end` on at which the largest of these reads can go directly into the arena."""
    start = align_up(end, ARENA_ALIGNMENT)
    contiguous = [read.transfer for read in first if read.transfer.count == 1]
    if not contiguous:
        return start
    largest = max(contiguous, key=lambda transfer: transfer.nbytes)
    # Adjacent tensors share one read.
    nbytes = last[0].transfer.source_end - largest.source if last is not first else largest.nbytes
    phase = (largest.source - largest.target) % BLOCK
    return align_up(end, BLOCK) + phase if nbytes >= _DIRECT_NBYTES and phase % ARENA_ALIGNMENT == 0 else start


def _runs(tensors: Sequence[tuple[Read, ...]], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield first and last row of each group of tensors that can share one read, each at a multiple of 16 bytes."""
    # Offsets if all tensors were packed. Tensors can share a read if file offset minus packed offset is constant.
    positions = accumulate((align_up(nbytes, ARENA_ALIGNMENT) for nbytes in sizes), initial=0)

    def where(item: tuple[int, int]) -> tuple[tuple[int, ...], int, int]:
        row, position = item
        reads = tensors[row]
        if len(reads) != 1 or reads[0].transfer.count > 1:
            return (row,), 0, 0  # A group of its own.
        source = reads[0].transfer.source
        return (reads[0].file, source - position), source, source + sizes[row]

    for group in coalesce(zip(range(len(tensors)), positions, strict=False), where):
        yield group.items[0][0], group.items[-1][0]
