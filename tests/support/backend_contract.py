"""Every backend and the kinds of memory that it fills, and what a fill promises, written down with numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from support.fake_cuda import FakeCuFile, Lanes
from support.loader_fixtures import MIB, Array, nothing_left_behind
from support.local_stores import stored_file
from support.reads import carried_out

from relayout.checkpoint.converted import FileProof
from relayout.core.digests import DigestAlgorithm
from relayout.core.extents import BLOCK, Transfer, align_up
from relayout.format.index import Read
from relayout.format.manifest import header_prefix
from relayout.loader.backends.base import REGISTRY, Backend, ReadJob, Refusal
from relayout.loader.backends.cuda import DeviceBackend
from relayout.loader.budgets import Budget
from relayout.loader.sources.rank import StoredFile

UNTOUCHED = 0xEE
GUARD = 64
"""Bytes between pieces of memory, at least."""
SMALL = Budget(3, 3 * 64 * 1024)
"""So that small files take many requests."""
SIZES = (300_001, 16 * BLOCK, 9 * MIB + 777)
"""Bytes of the stored files."""
HEADS = (BLOCK, 1000, 2 * BLOCK)
"""Bytes of the headers of those that are proven: direct I/O cannot read the chunks of the second one in place."""
CHUNK = 4 * BLOCK


@dataclass(frozen=True)
class Piece:
    """Memory that lies by itself, and the reads that fill it; their targets are relative to its first byte."""

    reads: tuple[Read, ...]
    skew: int = 0
    """Of its address, modulo the block."""

    @property
    def nbytes(self) -> int:
        return max((one.transfer.target_end for one in self.reads), default=0)

    @property
    def is_dense(self) -> bool:
        return sum(one.transfer.total_nbytes for one in self.reads) == self.nbytes


def first_difference(found: Array, expected: Array) -> str:
    """Where two arrays differ, for a message."""
    places = np.flatnonzero(found != expected)
    return f"{places.size} bytes differ, first at {places[0]}: {found[places[0]]}, expected {expected[places[0]]}"


@dataclass
class Target:
    """A backend, and the kind of memory that it is to fill."""

    name: str
    kind: str
    stored: tuple[StoredFile, ...]
    contents: list[Array]
    lanes: Lanes
    cufile: FakeCuFile = field(default_factory=FakeCuFile)

    @property
    def backend(self) -> Backend[Any]:
        found = REGISTRY[self.name]("cpu", self.stored, True)
        if not isinstance(found, Refusal):
            return found
        return DeviceBackend("cpu", self.lanes.make, self.cufile if self.name == "gds" else None)

    def lay_out(self, pieces: Sequence[Piece]) -> Ground:
        """Memory for the pieces, full of one byte, and what it should hold in the end."""
        positions, end = [], GUARD
        for piece in pieces:
            positions.append(end + (piece.skew - end) % BLOCK)
            end = positions[-1] + piece.nbytes + GUARD
        backend = self.backend
        arena = backend.allocate(align_up(end, BLOCK))
        whole = arena.tensor()
        space: Array = whole.numpy()
        space[:] = UNTOUCHED
        expected = space.copy()
        for piece, position in zip(pieces, positions, strict=True):
            held, times = carried_out(piece.reads, self.contents, piece.nbytes)
            place = expected[position : position + piece.nbytes]
            place[times > 0] = held[times > 0]
        places = [slice(start, start + piece.nbytes) for start, piece in zip(positions, pieces, strict=True)]
        if self.kind == "arena":
            return Ground(arena, positions, space, expected, places)
        memory = backend.wrap([whole[place] for place in places])
        return Ground(memory, memory.offsets, space, expected, places)

    def fill(self, ground: Ground, pieces: Sequence[Piece], **options: Any) -> ReadJob:
        """What brings the pieces where the memory has them."""
        starts = [0 if file.proof is None else file.proof.data_start for file in self.stored]
        reads = (
            Read(read.file, read.transfer.shifted(source=starts[read.file], target=offset))
            for piece, offset in zip(pieces, ground.offsets, strict=True)
            for read in piece.reads
        )
        return replace(ReadJob(self.stored, tuple(reads), SMALL), **options)

    def check(self, pieces: Sequence[Piece], **options: Any) -> None:
        """Fill the pieces, and look at everything that a fill promises."""
        ground = self.lay_out(pieces)
        arrived: list[tuple[int, int]] = []
        progress: list[int] = []
        fill = self.fill(ground, pieces, on_arrival=lambda *one: arrived.append(one), **options)
        with nothing_left_behind():
            self.backend.start(ground.memory, fill).join(progress.append)
            assert np.array_equal(ground.space, ground.expected), first_difference(ground.space, ground.expected)
            assert self.lanes.in_flight == 0
            self.cufile.assert_given_back()
        total = sum(read.transfer.total_nbytes for piece in pieces for read in piece.reads)
        assert progress == sorted(progress)
        assert max(progress, default=0) == total
        assert sum(nbytes for _, nbytes in arrived) == total
        self._check_arrived(ground, pieces, arrived)
        assert self.lanes.pinned <= fill.budget.memory
        self.lanes.forget()

    def _check_arrived(self, ground: Ground, pieces: Sequence[Piece], arrived: list[tuple[int, int]]) -> None:
        for piece, offset in zip(pieces, ground.offsets, strict=True):
            told = [one for one in arrived if offset <= one[0] < offset + piece.nbytes]
            assert sum(nbytes for _, nbytes in told) == sum(read.transfer.total_nbytes for read in piece.reads)
            if piece.is_dense:
                ends = np.cumsum([nbytes for _, nbytes in sorted(told)])
                assert [start - offset for start, _ in sorted(told)] == [0, *ends[:-1]][: len(told)]


@dataclass
class Ground:
    """Memory, before and after."""

    memory: Any
    offsets: Sequence[int]
    """Of the pieces, as the memory counts."""
    space: Array
    expected: Array
    places: list[slice]
    """Of the pieces in `space`."""


def stored(paths: Sequence[Path]) -> tuple[StoredFile, ...]:
    return tuple(stored_file(path, size) for path, size in zip(paths, SIZES, strict=False))


def proven(paths: Sequence[Path], folder: Path) -> tuple[StoredFile, ...]:
    """Copies behind headers that name their content, with the digests of their chunks."""
    found = []
    for number, (path, start) in enumerate(zip(paths, HEADS, strict=True)):
        content, body = f"{number:032x}", path.read_bytes()
        head = (start - 8).to_bytes(8, "little") + header_prefix(content)
        (folder / path.name).write_bytes(head.ljust(start) + body)
        chunks = (body[first : first + CHUNK] for first in range(0, len(body), CHUNK))
        digests = b"".join(xxhash.xxh3_128_digest(chunk) for chunk in chunks)
        proof = FileProof(content, start, CHUNK, lambda digests=digests: digests, DigestAlgorithm.XXH3_128)
        file = stored_file(folder / path.name, start + len(body))
        found.append(replace(file, proof=proof, is_proven=True))
    return tuple(found)


def read(source: int, nbytes: int, target: int = 0, *, file: int = 0) -> Read:
    return Read(file, Transfer(source, target, nbytes))


def strided(source: int, nbytes: int, count: int, stride: int, pitch: int, *, file: int = 0) -> Read:
    return Read(file, Transfer(source, 0, nbytes, count, stride, pitch))
