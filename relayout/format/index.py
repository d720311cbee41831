"""The sidecar index of a converted checkpoint: the manifest and the rank tables. Pure; FORMAT.md is normative.

The manifest is small and says at once which bytes a rank needs and where they go in memory: a rank is a list of reads
that fill an arena. The rank table, which can be large, says which tensor lies where in the arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relayout.core.extents import BLOCK, Transfer, align_up, natural_alignment
from relayout.core.slices import Slice

MANIFEST_NAME = "relayout.json"
"""Its presence makes a folder a converted checkpoint."""

HUB_INDEX_NAME = "model.safetensors.index.json"
"""What stock loaders read to find out which tensor lies in which file."""

FORMAT_VERSION = 1

ARENA_ALIGNMENT = 16
"""Bytes. Every tensor starts at a multiple of this in the arena."""


MIN_ALIGNMENT, MAX_ALIGNMENT = 512, 16 * 2**20
"""Bytes. Between them a conversion's alignment is a power of two."""


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes of one rank file and where in the arena they go."""

    file: int
    """Position in the rank's list of files."""
    transfer: Transfer
    """From the file (absolute offsets) to the arena."""


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """A file that holds bytes of a rank."""

    name: str
    """File name in the checkpoint folder."""
    nbytes: int
    """Length of the whole file."""
    data_start: int
    """Absolute offset of its data section."""
    header_digest: str
    """Digest, in hex, of the bytes before it."""


@dataclass(frozen=True, slots=True)
class RankEntry:
    """What the manifest says of one rank."""

    table: str
    """File name of the rank table."""
    table_digest: str
    """Digest of the table as stored, in hex."""
    num_tensors: int
    nbytes: int
    """Bytes of all the rank's tensors."""
    files: tuple[IndexedFile, ...]
    arena_nbytes: int
    reads: tuple[Read, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """relayout.json."""

    generator: str
    """Program and version that wrote it."""
    conversion: str
    """Digest of the source record's JSON: names this conversion. Each rank file's header repeats it."""
    model_type: str | None
    plan: str
    expert_parallel: bool
    """Whether experts are owned whole."""
    alignment: int
    dcp: bool
    """Whether PyTorch DCP can read the rank files as one model."""
    record_digest: str
    """Digest of the source record as stored, in hex."""
    source_nbytes: int
    """Bytes of all source tensors."""
    hub_index_digest: str | None
    """Digest of model.safetensors.index.json, where one was written for stock loaders."""
    ranks: tuple[RankEntry, ...]

    @property
    def num_ranks(self) -> int:
        """The tensor-parallel degree."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class RankTable:
    """The tensors of one rank, in columns of equal length, in file order."""

    rank: int
    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    """Of the slices, in elements."""
    files: Sequence[int]
    """Position in the rank's list of files."""
    offsets: Sequence[int]
    """Absolute file offset."""
    arena_offsets: Sequence[int]
    """Byte offset in the arena."""
    digests: Sequence[str]
    """Of the stored bytes."""
    source_shapes: Sequence[tuple[int, ...]]
    """Of the whole tensors."""
    slices: Sequence[Slice]
    """Which part of the whole tensor each is."""


@dataclass(frozen=True, slots=True)
class Arena:
    """Where a rank's bytes lie in memory."""

    nbytes: int
    reads: tuple[Read, ...]
    offsets: tuple[tuple[int, ...], ...]
    """For each file: the arena offset of each of its slices, in file order."""


def plan_arena(files: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> Arena:
    """Lay out the arena for files given as (data start, offsets, sizes) of their slices in file order.

    The bulk of a file is one read, congruent with its file offset modulo a block, so that it can go directly to its
    place, with whole blocks of the arena to itself. Slices whose size is not a multiple of 16 bytes, which would lie
    at odd addresses, are spread out to multiples of 16, one strided read for each run of equal sizes.
    """
    reads: list[Read] = []
    columns = []
    end = 0
    for number, (data_start, offsets, sizes) in enumerate(files):
        column: list[int] = []
        bulk = align_up(end, BLOCK) + data_start % BLOCK
        for offset, nbytes in zip(offsets, sizes, strict=True):
            if natural_alignment(nbytes, ARENA_ALIGNMENT) < ARENA_ALIGNMENT:
                break
            column.append(bulk + offset - data_start)
            end = column[-1] + nbytes
        if column and end > bulk:
            reads.append(Read(number, Transfer(data_start, bulk, end - bulk)))
        odd = list(zip(offsets, sizes, strict=True))[len(column) :]
        end = align_up(end, BLOCK)
        while odd:
            offset, nbytes = odd[0]
            count = next((i for i, (_, other) in enumerate(odd) if other != nbytes), len(odd))
            pitch = align_up(nbytes, ARENA_ALIGNMENT)
            strides = (nbytes, pitch) if count > 1 else (0, 0)
            reads.append(Read(number, Transfer(offset, end, nbytes, count, *strides)))
            column.extend(end + i * pitch for i in range(count))
            end += count * pitch
            odd = odd[count:]
        columns.append(tuple(column))
    return Arena(align_up(end, BLOCK), tuple(reads), tuple(columns))
