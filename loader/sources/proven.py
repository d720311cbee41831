"""What proves the bytes of a file: they are compared with the digests of their chunks before anybody sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from relayout.core.digests import DIGEST_NBYTES, digest_hex
from relayout.core.extents import Extent
from relayout.errors import FormatError
from relayout.format.chunks import chunks_over
from relayout.storage.protocols import Closable, ReadableFile


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


def check_chunk(view: memoryview, digests: bytes, number: int, chunk: Extent, where: str) -> None:
    """Compare the digest of a chunk.

    Args:
        digests: of all chunks of the file, one after the other.
        number: of the chunk.
        where: the file's name in messages.

    Raises:
        FormatError: it differs.
    """
    expected = digests[DIGEST_NBYTES * number : DIGEST_NBYTES * (number + 1)].hex()
    if digest_hex(view) != expected:
        raise FormatError(
            f"bytes {chunk.offset} to {chunk.end} have another digest than {expected}: damaged",
            path=where,
            offset=chunk.offset,
            code="digest",
        )


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
        """See `ReadableFile.nbytes`."""
        return self._file.nbytes

    @property
    def version(self) -> str:
        """See `ReadableFile.version`."""
        return self._file.version

    def fileno(self) -> None:
        """See `ReadableFile.fileno`."""
        return

    def read(self, offset: int, view: memoryview) -> None:
        """See `ReadableFile.read`.

        Raises:
            FormatError: the digest of a chunk differs.
        """
        start, end = self._proof.data_start, min(offset + view.nbytes, self.nbytes)
        if offset < start:  # The header, which the manifest's other digests are of.
            self._file.read(offset, view[: min(start, end) - offset])
        first = max(offset, start)
        asked = Extent(first, max(0, end - first))
        touched = list(chunks_over(asked, start, self.nbytes, self._proof.chunk_nbytes))
        complete = [chunk for _, chunk, part in touched if part == chunk]
        if complete:  # All in one request: a store may be remote.
            self._file.read(complete[0].offset, view[complete[0].offset - offset : complete[-1].end - offset])
        for number, chunk, part in touched:
            whole = target = view[part.offset - offset : part.end - offset]
            if part != chunk:
                whole = memoryview(bytearray(chunk.nbytes))
                self._file.read(chunk.offset, whole)
            check_chunk(whole, self._digests, number, chunk, self._where)
            if part != chunk:
                target[:] = whole[part.offset - chunk.offset : part.end - chunk.offset]

    def close(self) -> None:
        """Close the file."""
        self._file.close()
