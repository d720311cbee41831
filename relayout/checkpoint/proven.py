"""The proof of a file's bytes: digests of chunks, compared before anybody sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from relayout.checkpoint.converted import read_chunk_digests
from relayout.core.digests import DigestAlgorithm
from relayout.core.extents import BLOCK, Extent, align_up
from relayout.errors import FormatError
from relayout.format.chunks import chunks_over
from relayout.format.index import Manifest
from relayout.storage.buffers import Buffer
from relayout.storage.protocols import Closable, Entry, ReadableFile, RequestCost, Store
from relayout.storage.read_only import ReadOnlyStore

_NUM_KEPT, _MAX_KEPT_NBYTES = 4, 2**20
"""Chunks that an open file keeps, and how large they may be."""


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
    digest: DigestAlgorithm
    header_digest: str | None = None
    """Of the bytes before the data section, where these are to be proven, too."""


def proof_of(folder: Store, manifest: Manifest, index: int, *, with_header: bool = False) -> FileProof:
    """The proof of a file of a converted checkpoint, by its position in the manifest; of its header, too, if asked."""
    file = manifest.files[index]
    digests = partial(read_chunk_digests, folder, manifest, index)
    header_digest = file.header_digest if with_header else None
    return FileProof(file.content, file.data_start, manifest.chunk_nbytes, digests, manifest.digest, header_digest)


def index_of(manifest: Manifest, name: str) -> int | None:
    """The position of a weight file in a manifest; None: it is another file."""
    return next((index for index, file in enumerate(manifest.files) if file.name == name), None)


class Proven(Closable):
    """Reads whole chunks, and compares their digests. Thread-safe."""

    def __init__(self, file: ReadableFile, proof: FileProof, where: str) -> None:
        """`where` names the file in messages. Where its alignment is a block, its data section starts at one."""
        self._file = file
        self._proof = proof
        self._where = where
        self._digests = proof.chunk_digests()
        self._recent: tuple[tuple[int, memoryview], ...] = ()
        """Chunks of which parts were read, with their numbers."""
        self._head: memoryview | None = None
        """The header, if it is proven."""

    @property
    def nbytes(self) -> int:
        return self._file.nbytes

    @property
    def version(self) -> str:
        return self._file.version

    @property
    def alignment(self) -> int:
        return self._file.alignment

    def fileno(self) -> None:
        return

    def read(self, offset: int, view: memoryview) -> None:
        """Fill `view`; for errors see `ReadableFile.read`. FormatError: also if a digest differs."""
        start, end = self._proof.data_start, min(offset + view.nbytes, self.nbytes)
        if offset < start:
            self._read_head(offset, view[: min(start, end) - offset])
        first = max(offset, start)
        wanted = Extent(first, max(0, end - first))
        touched = list(chunks_over(wanted, start, self.nbytes, self._proof.chunk_nbytes))
        complete = [chunk for _, chunk, part in touched if part == chunk]
        if complete:  # All in one request: a store may be remote.
            until = align_up(complete[-1].end, self.alignment)
            self._file.read(complete[0].offset, view[complete[0].offset - offset : until - offset])
        for index, chunk, part in touched:
            target = view[part.offset - offset : part.end - offset]
            if part == chunk:
                check_chunk(self._proof.digest.hex(target), self._digests, index, chunk, self._where)
            else:
                target[:] = self._whole(index, chunk)[part.offset - chunk.offset : part.end - chunk.offset]

    def _whole(self, index: int, chunk: Extent) -> memoryview:
        """A chunk, proven, of which only a part is wanted: its other parts are often wanted next."""
        whole = next((kept for number, kept in self._recent if number == index), None)
        if whole is None:
            whole = self._read_alone(chunk)
            check_chunk(self._proof.digest.hex(whole), self._digests, index, chunk, self._where)
            if chunk.nbytes <= _MAX_KEPT_NBYTES:  # Threads replace the tuple: one that is lost is read again.
                self._recent = (*self._recent[1 - _NUM_KEPT :], (index, whole))
        return whole

    def _read_head(self, offset: int, view: memoryview) -> None:
        """Fill `view` with a part of the header: as it is, if the manifest's other digests are enough."""
        if self._proof.header_digest is None:
            self._file.read(offset, view)
            return
        head = self._head
        if head is None:
            head = self._read_alone(Extent(0, self._proof.data_start))
            check_header(head, self._proof.header_digest, self._proof.digest, self._where)
            self._head = head
        view[:] = head[offset : offset + view.nbytes]

    def _read_alone(self, extent: Extent) -> memoryview:
        """An extent in memory of its own, as direct I/O wants it."""
        blocks = Buffer().reserve(align_up(extent.nbytes, BLOCK))
        view = blocks[: extent.nbytes]
        self._file.read(extent.offset, view if self.alignment == 1 else blocks)
        return view

    def close(self) -> None:
        self._file.close()


def check_chunk(digest: str, digests: bytes, index: int, chunk: Extent, where: str) -> None:
    """Raise FormatError unless the digest of a chunk, by its index, is among those of all chunks of its file.

    Args:
        digests: of all chunks, one after the other, in binary form.
        where: the file's name in messages.
    """
    nbytes = len(digest) // 2
    expected = digests[nbytes * index : nbytes * (index + 1)].hex()
    if digest != expected:
        raise FormatError(
            f"bytes {chunk.offset} to {chunk.end} do not match digest {expected}: damaged",
            path=where,
            offset=chunk.offset,
            code="digest",
        )


def check_header(header: bytes | memoryview, digest: str, algorithm: DigestAlgorithm, where: str) -> None:
    """Raise FormatError unless a file's header has the digest of the manifest. `where` names the file in messages."""
    if algorithm.hex(header) != digest:
        raise FormatError("its header does not match the manifest: damaged", path=where, code="digest")


@dataclass(frozen=True, slots=True)
class StoreOver(ReadOnlyStore):
    """What stores over another one have in common."""

    base: Store

    @property
    def cost(self) -> RequestCost:
        return self.base.cost

    def __str__(self) -> str:
        return str(self.base)

    def location(self, name: str) -> str:
        return self.base.location(name)

    def not_found_message(self) -> str:
        return self.base.not_found_message()

    def parent(self) -> tuple[Store, str]:
        return self.base.parent()

    def walk(self) -> Iterator[Entry]:
        return self.base.walk()
