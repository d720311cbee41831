"""The files that a load reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from relayout.checkpoint.converted import FileProof, Proven, proof_of
from relayout.core.arguments import ranks_text
from relayout.core.extents import Extent, split
from relayout.core.workers import each
from relayout.errors import FormatError
from relayout.format.index import Manifest
from relayout.storage.local.page_cache import resident_nbytes
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
    is_proven: bool = False
    """Whether all bytes are proven when they are read. It shows no descriptor: all its bytes come by `read`."""

    @property
    def where(self) -> str:
        """Its name in messages."""
        return self.folder.location(self.name)

    @property
    def path(self) -> Path | None:
        """Its path; None if its store has no file descriptors."""
        return self.folder.path(self.name)

    def proven(self) -> StoredFile:
        """The same file, whose bytes are proven when they are read."""
        assert self.proof is not None
        return replace(self, is_proven=True)

    def open(self, access: Access) -> ReadableFile:
        """Open it; for errors see `Store.open`. A file without a version is proven, too.

        Raises:
            FormatError: the file has neither a version nor a proof.
        """
        opened = self.open_unproven(access)
        try:
            return self.proving(opened)
        except BaseException:
            opened.close()
            raise

    def open_unproven(self, access: Access) -> ReadableFile:
        """Open it; for errors see `Store.open`. Its bytes are for `proving`."""
        return self.folder.open(self.name, self.nbytes, access=access, version=self.version)

    def proving(self, opened: ReadableFile) -> ReadableFile:
        """The open file, which proves its bytes if that is wanted, or if it has no version.

        Raises:
            FormatError: it has neither a version nor a proof; or the digests are damaged.
        """
        if (opened.version and not self.is_proven) or isinstance(opened, Proven):  # By the store, already.
            return opened
        if self.proof is None:
            raise unversioned(self.where)
        return Proven(opened, self.proof, self.where)


def cached_nbytes(files: Iterable[StoredFile]) -> int | None:
    """Bytes of the files in the page cache; None where the system does not tell, or one cannot be opened."""
    total = 0
    for file in files:
        path = file.folder.path(file.name)
        if path is None:  # What comes from a server passes by the page cache.
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
                    error.amend(what=f"bytes {hole.offset} to {hole.end} were never written: an unfinished copy?")
                raise


def cost_of(files: Sequence[StoredFile]) -> RequestCost:
    """The cost of requests for files, which are all of one store."""
    return files[0].folder.cost if files else LOCAL_COST


def files_of(folder: Store, manifest: Manifest, indices: Iterable[int]) -> tuple[StoredFile, ...]:
    """Files by their positions in the manifest, not checked."""

    def stored(index: int) -> StoredFile:
        file = manifest.files[index]
        return StoredFile(folder, file.name, file.nbytes, proof_of(folder, manifest, index))

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
