"""The input of a load of one rank: its tensors in columns, the files that store them, and one allocation for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

from relayout.checkpoint.converted import FileDigests, VerifiedFile, file_digests_of
from relayout.core.arguments import compile_glob, invalid_because, ranks_text
from relayout.core.extents import align_up
from relayout.core.slices import Slice, num_bytes
from relayout.errors import FormatError, PlanError, did_you_mean, shown
from relayout.format.index import ARENA_ALIGNMENT, Manifest, Read, place
from relayout.storage.stores import LOCAL_COST, Access, ReadableFile, RequestCost, Store, unversioned
from relayout.storage.system import resident_nbytes

Value = TypeVar("Value")
Names: TypeAlias = Sequence[str] | str | None
"""One pattern of names, or several; a pattern that begins with `!` excludes names. None: all names."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file to read from."""

    folder: Store
    name: str
    nbytes: int
    """Expected length of the file."""
    digests: FileDigests | None = None
    """Digests of the file's content; None for a file of a plain checkpoint."""
    version: str | None = None
    """Expected version of the file, if its header has been read."""
    is_verified: bool = False
    """True if all bytes are verified when read. The open file has no descriptor, so that all bytes pass `read`."""

    @property
    def where(self) -> str:
        """The name of the file in messages."""
        return self.folder.location(self.name)

    @property
    def path(self) -> Path | None:
        """The path of the file; None if its store has no file descriptors."""
        return self.folder.path(self.name)

    def verified(self) -> StoredFile:
        """Return a file that verifies its bytes when they are read."""
        assert self.digests is not None
        return replace(self, is_verified=True)

    def open(self, access: Access) -> ReadableFile:
        """Open the file; for errors see `Store.open`. A file without a version is verified, too.

        Raises:
            FormatError: the file has neither a version nor digests.
        """
        opened = self.open_unverified(access)
        try:
            return self.verify_reads(opened)
        except BaseException:
            opened.close()
            raise

    def open_unverified(self, access: Access) -> ReadableFile:
        """Open the file without verification; for errors see `Store.open`. Pass the result to `verify_reads`."""
        return self.folder.open(self.name, self.nbytes, access=access, version=self.version)

    def verify_reads(self, opened: ReadableFile) -> ReadableFile:
        """Return the open file, which verifies its bytes if requested, if it has no version, or if its store needs it.

        Raises:
            FormatError: it has neither a version nor digests; or the digests are damaged.
        """
        is_verified = self.is_verified or self.folder.cost.needs_digests
        if (opened.version and not is_verified) or isinstance(opened, VerifiedFile):  # The store verifies.
            return opened
        if self.digests is None:
            raise unversioned(self.where)
        return VerifiedFile(opened, self.digests, self.where)


def cached_nbytes(files: Iterable[StoredFile]) -> int | None:
    """Return how many bytes of the files are in the page cache; None if unknown, or if a file cannot be opened."""
    total = 0
    for file in files:
        path = file.folder.path(file.name)
        if path is None:  # Bytes from a server bypass the page cache.
            continue
        try:
            with path.open("rb") as opened:
                nbytes = resident_nbytes(opened.fileno(), 0, file.nbytes)
        except OSError:
            return None
        if nbytes is None:
            return None
        total += nbytes
    return total


def cost_of(files: Sequence[StoredFile]) -> RequestCost:
    """Return the cost of requests for files, which are all of one store."""
    return files[0].folder.cost if files else LOCAL_COST


def files_of(folder: Store, manifest: Manifest, indices: Iterable[int]) -> tuple[StoredFile, ...]:
    """Return files by their positions in the manifest, without checks."""

    def stored(index: int) -> StoredFile:
        file = manifest.files[index]
        return StoredFile(folder, file.name, file.nbytes, file_digests_of(folder, manifest, index))

    return tuple(map(stored, indices))


def rank_files(folder: Store, manifest: Manifest, rank: int) -> tuple[StoredFile, ...]:
    """Return the files of a rank, or of another holder, after checking their lengths.

    The lengths of remote files are checked when they are read.

    Raises:
        FormatError: a file is missing, leads out of the folder, or has another length than in the manifest.
        OSError: `stat` failed.
    """
    files = files_of(folder, manifest, manifest.holders[rank].files)
    for file in () if folder.cost.is_remote else files:
        status = folder.stat(file.name)
        if status is None:
            complete = ranks_text(_complete_ranks(folder, manifest))
            others = f"; of {manifest.num_ranks} ranks these are complete here: {complete}" if complete else ""
            raise FormatError(f"is missing{others}", path=file.where, code="missing")
        status.check(file.where, file.nbytes)  # Before memory is reserved: an arena is not larger than its files.
    return files


def _complete_ranks(folder: Store, manifest: Manifest) -> Iterator[int]:
    """Yield the ranks with all files in a local folder: a tool may have copied the files of some ranks only."""
    there = {index for index, file in enumerate(manifest.files) if folder.stat(file.name) is not None}
    yield from (rank for rank in manifest.present if there.issuperset(manifest.holders[rank].files))


@dataclass(frozen=True, slots=True)
class TensorColumns:
    """Tensors of one rank, in columns of equal length, in file order. A column that is not needed is empty."""

    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    """The shapes of the slices, in elements."""
    files: tuple[StoredFile, ...] = ()
    """The files that `reads` refers to."""
    reads: Sequence[tuple[Read, ...]] = ()
    """The reads that fill each tensor. Their targets are relative to its first byte; an empty tensor has none."""
    digests: Callable[[], Mapping[str, str]] | None = None
    """Function that reads the digests of the stored bytes, by name, of at least these tensors.

    None if the checkpoint has no digests, like a plain one. It raises FormatError if they are damaged.
    """
    offsets: Sequence[int] = ()
    """Offsets of the first bytes in an arena, multiples of `ARENA_ALIGNMENT`."""
    parts: Sequence[Slice] = ()
    """The part of the whole tensor that each tensor is."""
    source_shapes: Sequence[tuple[int, ...]] = ()
    """The shapes of the whole tensors, in elements."""

    def sizes(self) -> list[int]:
        """Return the number of bytes of each tensor."""
        if self.reads:
            return [sum(read.transfer.total_nbytes for read in reads) for reads in self.reads]
        return [num_bytes(dtype, shape) or 0 for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]

    def rows(self, rows: Sequence[int]) -> TensorColumns:
        """Return some of the tensors, and only the files that they need."""
        reads = _picked(self.reads, rows)
        needed = sorted({read.file for tensor in reads for read in tensor})
        position = {file: index for index, file in enumerate(needed)}
        return TensorColumns(
            _picked(self.names, rows),
            _picked(self.dtypes, rows),
            _picked(self.shapes, rows),
            tuple(self.files[file] for file in needed),
            [tuple(Read(position[read.file], read.transfer) for read in tensor) for tensor in reads],
            self.digests,
            _picked(self.offsets, rows),
            _picked(self.parts, rows),
            _picked(self.source_shapes, rows),
        )

    def matching(self, names: Names) -> TensorColumns:
        """Return the tensors with names that match; for errors see `select`."""
        return self if names is None else self.rows(select(self.names, names))

    def at(self, offsets: Sequence[int]) -> TensorColumns:
        """Return the tensors at these offsets of an arena."""
        return replace(self, offsets=offsets)


def _picked(column: Sequence[Value], rows: Sequence[int]) -> Sequence[Value]:
    return [column[row] for row in rows] if column else ()


def select(names: Sequence[str], patterns: Sequence[str] | str) -> list[int]:
    """Return the rows of the names that match, or equal, at least one of the patterns (see `core.arguments`).

    A pattern that begins with `!` excludes the names that it matches. If all patterns do, all other names are selected.

    Raises:
        PlanError: a pattern is invalid, or matches no name; or all names are excluded.
    """
    listed = [patterns] if isinstance(patterns, str) else list(patterns) if isinstance(patterns, Iterable) else None
    if listed is None or not all(isinstance(pattern, str) for pattern in listed):
        raise PlanError(f"names: {shown(patterns)}, expected a pattern, or a list of patterns", code="option")
    row_of = {name: row for row, name in enumerate(names)}
    is_out = [pattern.startswith("!") and pattern not in row_of for pattern in listed]
    selected: set[int] = set(range(len(names))) if is_out and all(is_out) else set()
    left_out: set[int] = set()
    for text, out in zip(listed, is_out, strict=True):
        pattern = text[1:] if out else text
        rows = [row_of[pattern]] if pattern in row_of else []
        reason = invalid_because(pattern)
        if reason is None and any(character in pattern for character in "*#{"):
            match = compile_glob(pattern).match
            rows += [row for row, name in enumerate(names) if match(name)]
        if not rows:
            hint = "" if "*" in pattern else did_you_mean(pattern, names)
            if "*" in pattern.replace("**", ""):
                hint = "; * is text without a dot, ** any text"
            raise PlanError(
                f"names: invalid pattern {pattern!r}: {reason}"
                if reason
                else f"names: no tensor matches {pattern!r} (there are {len(names)}){hint}",
                code="option",
            )
        (left_out if out else selected).update(rows)
    if selected and selected <= left_out:
        raise PlanError(f"names: {shown(listed)} leaves out all of {len(selected)} tensors", code="option")
    return sorted(selected - left_out)


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """One allocation for tensors, and the reads that fill it."""

    files: tuple[StoredFile, ...]
    reads: tuple[Read, ...]
    """The reads that fill the arena. Their targets do not overlap."""
    arena_nbytes: int
    nbytes: int
    """Bytes of the tensors."""
    tensors: Callable[[], TensorColumns]
    """Returns the tensors and their offsets. This may parse a rank table; call it while bytes arrive."""


def pack(tensors: TensorColumns) -> ArenaPlan:
    """Return the plan for an arena that holds just these tensors."""
    sizes = tensors.sizes()
    layout = place(tensors.reads, sizes)
    return ArenaPlan(tensors.files, layout.reads, layout.nbytes, sum(sizes), lambda: tensors.at(layout.offsets))


def place_at(tensors: Sequence[tuple[Read, ...]], offsets: Sequence[int]) -> tuple[Read, ...]:
    """Return the reads of tensors at given arena offsets."""
    return tuple(
        Read(read.file, read.transfer.shifted(target=offset))
        for reads, offset in zip(tensors, offsets, strict=True)
        for read in reads
    )


def batches(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Divide tensors, in order, into batches of at most `limit` bytes; a larger tensor is a separate batch."""
    first = total = 0
    for row, nbytes in enumerate(sizes):
        padded = align_up(nbytes, ARENA_ALIGNMENT)
        if row > first and total + padded > limit:
            yield range(first, row)
            first, total = row, 0
        total += padded
    if first < len(sizes):
        yield range(first, len(sizes))


class Pieces(Protocol):
    """Tensors that can be read in part. Thread-safe."""

    @property
    def columns(self) -> TensorColumns:
        """The tensors, with their parts and the shapes of the whole tensors, in the order of the source's files."""

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """The files that `reads` refers to."""

    def axes(self, row: int) -> set[int]:
        """Return the axes, besides axis 0, along which a part of a tensor can be read separately."""

    def reads(self, row: int, wanted: Slice) -> tuple[Read, ...]:
        """Return the reads that fill a slice of one whole tensor; their targets are relative to its first byte.

        Raises:
            FormatError: a rank table is damaged.
            PlanError: the ranks do not hold all of the piece.
        """

    def metadata(self) -> Mapping[str, str]:
        """Return the entries of `__metadata__` that all files share.

        Raises:
            FormatError: a header is damaged.
        """


def parts_of(pieces: Pieces, wanted: Mapping[int, Slice]) -> TensorColumns:
    """Return slices of whole tensors, by their rows, in this order; for errors see `Pieces.reads`."""
    columns = pieces.columns
    return TensorColumns(
        [columns.names[row] for row in wanted],
        [columns.dtypes[row] for row in wanted],
        [part.shape(tuple(columns.source_shapes[row])) for row, part in wanted.items()],
        pieces.files,
        [pieces.reads(row, part) for row, part in wanted.items()],
    ).rows(range(len(wanted)))


@dataclass(frozen=True, slots=True)
class RankSource(ABC):
    """One rank of a checkpoint."""

    store: Store
    """The folder, prefix or file."""
    rank: int
    num_ranks: int

    @property
    def slow_because(self) -> str | None:
        """Why loading is slow, and how to make it fast, as text for the user; None if it is fast."""
        return None

    @property
    def is_unconverted(self) -> bool:
        """True if the checkpoint was not converted: this is a `UnconvertedRank`."""
        return False

    @property
    def is_as_stored(self) -> bool:
        """True if the bytes of every tensor are contiguous in a file."""
        return False

    @abstractmethod
    def contents(self, names: Names = None) -> TensorColumns:
        """Return the tensors with names that match, and the reads that fill them.

        Raises:
            FormatError: a file that the manifest lists, or the plain checkpoint, is damaged.
            PlanError: a pattern matches nothing.
        """

    @abstractmethod
    def pieces(self, names: Names = None) -> Pieces:
        """Open the tensors so that any part of one can be read; for errors see `contents`."""

    def arena(self, names: Names = None) -> ArenaPlan:
        """Plan one allocation for the tensors; for errors see `contents`."""
        return pack(self.contents(names))

    def columns(self) -> TensorColumns:
        """Return all of the rank's tensors, with their parts and without reads; for errors see `contents`."""
        return self.pieces().columns

    def used_files(self) -> tuple[StoredFile, ...]:
        """Return the files that store the rank's bytes; for errors see `contents`."""
        return self.contents().files
