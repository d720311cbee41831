"""What a rank holds, in columns: the tensors, and the reads that bring each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relayout.core.dtypes import num_bytes
from relayout.core.extents import Transfer
from relayout.core.patterns import compile_glob, invalid_because
from relayout.errors import FormatError, PlanError
from relayout.format.index import Manifest, RankTable, Read
from relayout.format.manifest import header_prefix
from relayout.storage.protocols import LOCAL_COST, Access, ReadableFile, RequestCost, Store


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that bytes come from."""

    folder: Store
    name: str
    nbytes: int
    """The length that it must have."""
    owner: Owner | None = None
    """Whose it must be, where its header tells."""
    version: str | None = None
    """The version that it must have, where its header was read before."""

    @property
    def where(self) -> str:
        """What messages call it."""
        return self.folder.where(self.name)

    @property
    def path(self) -> Path | None:
        """See `Store.path`."""
        return self.folder.path(self.name)

    def open(self, access: Access) -> ReadableFile:
        """Open it; errors as of `Store.open`."""
        return self.folder.open(self.name, self.nbytes, access=access, version=self.version)


def cost_of(files: Sequence[StoredFile]) -> RequestCost:
    """What requests for files of one store should look like."""
    return files[0].folder.cost if files else LOCAL_COST


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
        )


def rank_files(folder: Store, manifest: Manifest, rank: int) -> tuple[StoredFile, ...]:
    """The files of a rank, looked at.

    Raises:
        FormatError: one is missing, no file of the folder, or has another length than the manifest says.
        OSError: one cannot be looked at.
    """
    files = files_of(folder, manifest, rank)
    for file in files:
        status = folder.stat(file.name)
        if status is None:
            raise FormatError("is missing", path=file.where, code="missing")
        if status.nbytes != file.nbytes:  # Before memory is taken: an arena is no larger than its files.
            raise FormatError(f"{status.nbytes} bytes long, expected {file.nbytes}", path=file.where, code="mismatch")
    return files


def files_of(folder: Store, manifest: Manifest, rank: int) -> tuple[StoredFile, ...]:
    """The files of a rank, as the manifest has them; not looked at."""
    return tuple(
        StoredFile(
            folder,
            file.name,
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
    return Contents(files, table.names, table.dtypes, table.shapes, reads, table.digests)


def select(names: Sequence[str], patterns: Sequence[str]) -> list[int]:
    """The rows of the names that match one of the patterns or more (see `core.patterns`), or are one.

    Raises:
        PlanError: a pattern is invalid, or matches no name, which is a mistake rather than a wish.
    """
    row_of = {name: row for row, name in enumerate(names)}
    wanted: set[int] = set()
    for pattern in patterns:
        found = [row_of[pattern]] if pattern in row_of else []
        reason = invalid_because(pattern)
        if reason is None and any(character in pattern for character in "*#{"):
            match = compile_glob(pattern).match
            found += [row for row, name in enumerate(names) if match(name)]
        if not found:
            hint = "; * is text without a dot, ** any text" if "*" in pattern and "**" not in pattern else ""
            raise PlanError(
                f"names: invalid pattern {pattern!r}: {reason}"
                if reason
                else f"names: no tensor matches {pattern!r} (there are {len(names)}){hint}"
            )
        wanted.update(found)
    return sorted(wanted)
