"""The tensors of a rank, in columns, and the reads that fill each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from relayout.checkpoint.converted import read_chunk_digests
from relayout.core.coalesce import split
from relayout.core.dtypes import num_bytes
from relayout.core.extents import Extent, Transfer
from relayout.core.patterns import compile_glob, invalid_because
from relayout.core.workers import each
from relayout.errors import FormatError, PlanError
from relayout.format.index import Manifest, RankTable, Read
from relayout.loader.sources.proven import FileProof, Proven
from relayout.storage.protocols import LOCAL_COST, Access, ReadableFile, RequestCost, Store, unversioned

_PIECE_NBYTES = 2**24


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file to read from."""

    folder: Store
    name: str
    nbytes: int
    """Its expected length."""
    proof: FileProof | None = None
    """What it must hold; None for a file of a plain checkpoint, which does not say."""
    version: str | None = None
    """Its expected version, if its header has been read."""

    @property
    def where(self) -> str:
        """Its name in messages."""
        return self.folder.location(self.name)

    @property
    def path(self) -> Path | None:
        """See `Store.path`."""
        return self.folder.path(self.name)

    def open(self, access: Access) -> ReadableFile:
        """Open it; for errors see `Store.open`. Where no version can be told, all bytes are proven when they are read.

        Raises:
            FormatError: no version can be told, and there is no proof.
        """
        opened = self.folder.open(self.name, self.nbytes, access=access, version=self.version)
        if opened.version:
            return opened
        if self.proof is None:
            raise unversioned(self.where)
        return Proven(opened, self.proof, self.where)


def cost_of(files: Sequence[StoredFile]) -> RequestCost:
    """The cost of requests for files, which are all of one store."""
    return files[0].folder.cost if files else LOCAL_COST


@dataclass(frozen=True, slots=True)
class ProvenFile(StoredFile):
    """A file of which whole chunks are read, and proven, whatever is asked for.

    It has no path and no descriptor, so that all its bytes come by `read`.
    """

    @property
    def path(self) -> Path | None:
        """See `StoredFile.path`."""
        return None

    def open(self, access: Access) -> ReadableFile:
        """Open it; for errors see `Store.open`."""
        assert self.proof is not None
        opened = self.folder.open(self.name, self.nbytes, access=Access.BUFFERED, version=self.version)
        try:
            return Proven(opened, self.proof, self.where)
        except BaseException:
            opened.close()
            raise


def proven(file: StoredFile) -> StoredFile:
    """The same file, whose bytes are proven when they are read."""
    return ProvenFile(file.folder, file.name, file.nbytes, file.proof, file.version)


def check_hole(file: StoredFile, hole: Extent) -> None:
    """Check that zeros belong where nothing was ever written to a file: its copy may be unfinished.

    Raises:
        FormatError: the digest of a chunk differs.
        OSError: a read failed.
    """
    with proven(file).open(Access.BUFFERED) as opened:
        for piece in split(hole, _PIECE_NBYTES):
            try:
                opened.read(piece.offset, memoryview(bytearray(piece.nbytes)))
            except FormatError as error:
                if error.code == "digest" and error.path == file.where:
                    error.what = f"bytes {hole.offset} to {hole.end} were never written: an unfinished copy?"
                raise


@dataclass(frozen=True, slots=True)
class Contents:
    """Tensors of one rank, in columns of equal length, in file order."""

    files: tuple[StoredFile, ...]
    names: Sequence[str]
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]]
    """Of the slices, in elements."""
    reads: Sequence[tuple[Read, ...]]
    """Targets are relative to the tensor's first byte; an empty tensor has no reads."""
    digests: Sequence[str] | None
    """Of the stored bytes; None for a plain checkpoint, which has none."""

    def sizes(self) -> list[int]:
        """Bytes of each tensor."""
        return [sum(one.transfer.total_nbytes for one in reads) for reads in self.reads]

    def rows(self, rows: Sequence[int]) -> Contents:
        """Some of the tensors, and only the files that they need."""
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
    """The files of a rank, or of another holder, after a check of their lengths.

    Raises:
        FormatError: one is missing, leads out of the folder, or has another length than the manifest says.
        OSError: `stat` failed.
    """
    files = files_of(folder, manifest, manifest.holders[rank].files)

    def check(file: StoredFile) -> None:
        status = folder.stat(file.name)
        if status is None:
            raise FormatError("is missing", path=file.where, code="missing")
        status.check(file.where, file.nbytes)  # Before memory is reserved: an arena is not larger than its files.

    each(check, files, folder.cost.num_opens)
    return files


def files_of(folder: Store, manifest: Manifest, numbers: Iterable[int]) -> tuple[StoredFile, ...]:
    """Files by their numbers, as the manifest lists them, not checked."""

    def stored(number: int) -> StoredFile:
        file = manifest.files[number]
        digests = partial(read_chunk_digests, folder, manifest, number)
        proof = FileProof(file.content, file.data_start, manifest.chunk_nbytes, digests)
        return StoredFile(folder, file.name, file.nbytes, proof)

    return tuple(map(stored, numbers))


def contents_of(files: tuple[StoredFile, ...], table: RankTable, shared: Sequence[bool]) -> Contents:
    """All tensors of a rank of a converted checkpoint, stored in `files`; `shared` are those of whole tensors."""
    parts = [one.in_whole if any(shared) else () for one in table.kinds]
    reads: list[tuple[Read, ...]] = []
    for kind, dtype, shape, file, offset in zip(
        table.kind_of, table.dtypes, table.shapes, table.files, table.offsets, strict=True
    ):
        nbytes = num_bytes(dtype, shape)
        assert nbytes is not None  # The table was checked.
        if not nbytes:
            reads.append(())
        elif shared[file]:
            shift = offset - parts[kind][0].source
            reads.append(tuple(Read(file, one.shifted(source=shift)) for one in parts[kind]))
        else:
            reads.append((Read(file, Transfer(offset, 0, nbytes)),))
    return Contents(files, table.names, table.dtypes, table.shapes, reads, table.digests)


def select(names: Sequence[str], patterns: Sequence[str]) -> list[int]:
    """The rows of the names that match, or equal, at least one of the patterns (see `core.patterns`).

    Raises:
        PlanError: a pattern is invalid, or matches no name.
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
                else f"names: no tensor matches {pattern!r} (there are {len(names)}){hint}",
                code="option",
            )
        wanted.update(found)
    return sorted(wanted)
