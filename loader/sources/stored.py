"""The files that a load reads, and the proof of their bytes: digests of chunks, compared before anybody sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from relayout.checkpoint.converted import check_chunk, read_chunk_digests
from relayout.core.arguments import ranks_text
from relayout.core.coalesce import split
from relayout.core.digests import digest_hex
from relayout.core.extents import Extent
from relayout.core.workers import each
from relayout.errors import FormatError
from relayout.format.chunks import chunks_over
from relayout.format.index import Manifest
from relayout.storage.protocols import LOCAL_COST, Access, Closable, ReadableFile, RequestCost, Store, unversioned

_PIECE_NBYTES = 2**24


@dataclass(frozen=True, slots=True)
class FileProof:
    """What proves that a file holds what the manifest says."""

    content: str
    """The digest that its first bytes name."""
    data_start: int
    """Absolute offset of its data section."""
    chunk_nbytes: int
    chunk_digests: Callable[[], bytes]
    """Reads the digests of the chunks of its data section. FormatError: they are damaged."""


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
    is_proven: bool = False
    """Whether all bytes are proven when they are read. Such a file shows no path or descriptor: all its bytes come by
    `read`."""

    @property
    def where(self) -> str:
        """Its name in messages."""
        return self.folder.location(self.name)

    @property
    def path(self) -> Path | None:
        """Its path, if other code may read it there."""
        return None if self.is_proven else self.folder.path(self.name)

    def proven(self) -> StoredFile:
        """The same file, whose bytes are proven when they are read."""
        assert self.proof is not None
        return replace(self, is_proven=True)

    def open(self, access: Access) -> ReadableFile:
        """Open it; for errors see `Store.open`. A file without a version is proven, too.

        Raises:
            FormatError: the file has neither a version nor a proof.
        """
        access = Access.BUFFERED if self.is_proven else access
        opened = self.folder.open(self.name, self.nbytes, access=access, version=self.version)
        if opened.version and not self.is_proven:
            return opened
        try:
            if self.proof is None:
                raise unversioned(self.where)
            return Proven(opened, self.proof, self.where)
        except BaseException:
            opened.close()
            raise


class Proven(Closable):
    """Reads whole chunks, and compares their digests. Thread-safe."""

    alignment = 1

    def __init__(self, file: ReadableFile, proof: FileProof, where: str) -> None:
        """`where` names the file in messages."""
        self._file = file
        self._proof = proof
        self._where = where
        self._digests = proof.chunk_digests()

    @property
    def nbytes(self) -> int:
        return self._file.nbytes

    @property
    def version(self) -> str:
        return self._file.version

    def fileno(self) -> None:
        return

    def read(self, offset: int, view: memoryview) -> None:
        """Fill `view`; for other errors see `ReadableFile.read`.

        Raises:
            FormatError: the digest of a chunk differs.
        """
        start, end = self._proof.data_start, min(offset + view.nbytes, self.nbytes)
        if offset < start:  # The header, which the manifest's other digests are of.
            self._file.read(offset, view[: min(start, end) - offset])
        first = max(offset, start)
        wanted = Extent(first, max(0, end - first))
        touched = list(chunks_over(wanted, start, self.nbytes, self._proof.chunk_nbytes))
        complete = [chunk for _, chunk, part in touched if part == chunk]
        if complete:  # All in one request: a store may be remote.
            self._file.read(complete[0].offset, view[complete[0].offset - offset : complete[-1].end - offset])
        for index, chunk, part in touched:
            whole = target = view[part.offset - offset : part.end - offset]
            if part != chunk:
                whole = memoryview(bytearray(chunk.nbytes))
                self._file.read(chunk.offset, whole)
            check_chunk(digest_hex(whole), self._digests, index, chunk, self._where)
            if part != chunk:
                target[:] = whole[part.offset - chunk.offset : part.end - chunk.offset]

    def close(self) -> None:
        self._file.close()


def check_hole(file: StoredFile, hole: Extent) -> None:
    """Check that zeros belong where nothing was ever written to a file: its copy may be unfinished.

    Raises:
        FormatError: the digest of a chunk differs.
        OSError: a read failed.
    """
    with file.proven().open(Access.BUFFERED) as opened:
        for piece in split(hole, _PIECE_NBYTES):
            try:
                opened.read(piece.offset, memoryview(bytearray(piece.nbytes)))
            except FormatError as error:
                if error.code == "digest" and error.path == file.where:
                    error.what = f"bytes {hole.offset} to {hole.end} were never written: an unfinished copy?"
                raise


def cost_of(files: Sequence[StoredFile]) -> RequestCost:
    """The cost of requests for files, which are all of one store."""
    return files[0].folder.cost if files else LOCAL_COST


def files_of(folder: Store, manifest: Manifest, indices: Iterable[int]) -> tuple[StoredFile, ...]:
    """Files by their positions in the manifest, not checked."""

    def stored(index: int) -> StoredFile:
        file = manifest.files[index]
        digests = partial(read_chunk_digests, folder, manifest, index)
        proof = FileProof(file.content, file.data_start, manifest.chunk_nbytes, digests)
        return StoredFile(folder, file.name, file.nbytes, proof)

    return tuple(map(stored, indices))


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
            complete = ranks_text(_complete_ranks(folder, manifest))
            others = f"; of {manifest.num_ranks} ranks these are complete here: {complete}" if complete else ""
            raise FormatError(f"is missing{others}", path=file.where, code="missing")
        status.check(file.where, file.nbytes)  # Before memory is reserved: an arena is not larger than its files.

    each(check, files, folder.cost.num_opens)
    return files


def _complete_ranks(folder: Store, manifest: Manifest) -> Iterator[int]:
    """The ranks of which all files are in a local folder: a tool may have copied the files of some ranks only."""
    if not folder.cost.is_remote:
        there = {index for index, file in enumerate(manifest.files) if folder.stat(file.name) is not None}
        yield from (rank for rank in manifest.present if there.issuperset(manifest.holders[rank].files))
