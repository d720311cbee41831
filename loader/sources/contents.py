"""What a rank holds, in columns: the tensors, and the reads that bring each of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path

from relayout.core.dtypes import num_bytes
from relayout.core.extents import Transfer
from relayout.core.slices import Slice
from relayout.errors import FormatError, PlanError
from relayout.format.index import Manifest, RankTable, Read
from relayout.format.manifest import header_prefix
from relayout.storage.files import check_regular
from relayout.storage.paths import member


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that bytes come from."""

    path: Path
    nbytes: int
    """The length that it must have."""
    owner: Owner | None = None
    """Whose it must be, where its header tells."""


@dataclass(frozen=True, slots=True)
class Owner:
    """What a rank file is."""

    rank: int
    part: int
    prefix: bytes
    """What follows the length of its header."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Tensors of one rank, in columns of equal length, in file order."""

    files: tuple[StoredFile, ...]
    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    """Of the slices, in elements."""
    reads: Sequence[tuple[Read, ...]]
    """Targets are relative to the tensor's first byte; none for an empty tensor."""
    digests: Sequence[str] | None
    """Of the stored bytes; None for a plain checkpoint, which has none."""
    source_shapes: Sequence[tuple[int, ...]]
    """Of the whole tensors."""
    slices: Sequence[Slice]
    """Which part of the whole tensor each is."""

    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [sum(one.transfer.total_nbytes for one in reads) for reads in self.reads]

    def rows(self, rows: Sequence[int]) -> Contents:
        """Some of the tensors, and the files that they need."""
        reads = [self.reads[row] for row in rows]
        needed = sorted({one.file for tensor in reads for one in tensor})
        number = {file: position for position, file in enumerate(needed)}
        return Contents(
            tuple(self.files[file] for file in needed),
            [self.names[row] for row in rows],
            [self.dtypes[row] for row in rows],
            [self.shapes[row] for row in rows],
            [tuple(Read(number[one.file], one.transfer) for one in tensor) for tensor in reads],
            None if self.digests is None else [self.digests[row] for row in rows],
            [self.source_shapes[row] for row in rows],
            [self.slices[row] for row in rows],
        )


def rank_files(folder: Path, manifest: Manifest, rank: int) -> tuple[StoredFile, ...]:
    """The files of a rank, looked at.

    Raises:
        FormatError: one is missing, no file of the folder, or has another length than the manifest says.
        OSError: one cannot be looked at.
    """
    files = files_of(folder, manifest, rank)
    for file, entry in zip(files, manifest.ranks[rank].files, strict=True):
        member(folder, entry.name)
        try:
            status = check_regular(file.path)
        except FileNotFoundError:
            raise FormatError(f"{file.path}: is missing") from None
        if status.st_size != file.nbytes:  # Before memory is taken: an arena is no larger than its files.
            raise FormatError(f"{file.path}: {status.st_size} bytes long, expected {file.nbytes}")
    return files


def files_of(folder: Path, manifest: Manifest, rank: int) -> tuple[StoredFile, ...]:
    """The files of a rank, as the manifest has them; not looked at."""
    return tuple(
        StoredFile(
            folder / file.name,
            file.nbytes,
            Owner(rank, part, header_prefix(rank, manifest.num_ranks, part, manifest.conversion)),
        )
        for part, file in enumerate(manifest.ranks[rank].files)
    )


def contents_of(files: tuple[StoredFile, ...], table: RankTable) -> Contents:
    """All of a rank of a converted checkpoint, which lies in `files`."""
    reads = []
    for dtype, shape, file, offset in zip(table.dtypes, table.shapes, table.files, table.offsets, strict=True):
        nbytes = num_bytes(dtype, shape)
        assert nbytes is not None  # The table was checked.
        reads.append((Read(file, Transfer(offset, 0, nbytes)),) if nbytes else ())
    return Contents(
        files, table.names, table.dtypes, table.shapes, reads, table.digests, table.source_shapes, table.slices
    )


def select(names: Sequence[str], patterns: Sequence[str]) -> list[int]:
    """The rows of the names that match one of the shell-style patterns or more (`*` matches any characters).

    Raises:
        PlanError: a pattern matches no name, which is a mistake rather than a wish.
    """
    row_of = {name: row for row, name in enumerate(names)}
    wanted: set[int] = set()
    for pattern in patterns:
        found = [row_of[pattern]] if pattern in row_of else []
        if any(character in pattern for character in "*?["):
            match = re.compile(translate(pattern)).match
            found += [row for row, name in enumerate(names) if match(name)]
        if not found:
            raise PlanError(f"{pattern!r} is none of the rank's {len(names)} tensors, and matches none")
        wanted.update(found)
    return sorted(wanted)
