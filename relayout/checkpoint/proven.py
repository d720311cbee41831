"""The proof of a file's bytes: digests of chunks, compared before anybody sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from relayout.checkpoint.converted import read_chunk_digests
from relayout.core.digests import DIGEST_NBYTES, digest_hex
from relayout.core.extents import Extent
from relayout.errors import FormatError
from relayout.format.chunks import chunks_over
from relayout.format.index import Manifest
from relayout.storage.protocols import Closable, ReadableFile, Store


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


def proof_of(folder: Store, manifest: Manifest, index: int) -> FileProof:
    """The proof of a file of a converted checkpoint, by its position in the manifest."""
    file = manifest.files[index]
    digests = partial(read_chunk_digests, folder, manifest, index)
    return FileProof(file.content, file.data_start, manifest.chunk_nbytes, digests)


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


def check_chunk(digest: str, digests: bytes, index: int, chunk: Extent, where: str) -> None:
    """Compare the digest of a chunk.

    Args:
        digest: of the chunk's bytes.
        digests: of all chunks of the file, one after the other.
        index: of the chunk.
        where: the file's name in messages.

    Raises:
        FormatError: it differs.
    """
    expected = digests[DIGEST_NBYTES * index : DIGEST_NBYTES * (index + 1)].hex()
    if digest != expected:
        raise FormatError(
            f"bytes {chunk.offset} to {chunk.end} do not match digest {expected}: damaged",
            path=where,
            offset=chunk.offset,
            code="digest",
        )


def check_header(header: bytes | memoryview, digest: str, where: str) -> None:
    """Compare the digest of a file's header with that of the manifest.

    Args:
        where: the file's name in messages.

    Raises:
        FormatError: it differs.
    """
    if digest_hex(header) != digest:
        raise FormatError("its header does not match the manifest: damaged", path=where, code="digest")
