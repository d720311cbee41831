"""A file that is uploaded while it is written: parts are sent when they are full, in any order."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, Iterator

from relayout.core.digests import digest_hex
from relayout.core.extents import align_up
from relayout.storage.buffers import Buffer
from relayout.storage.cloud.client import Uploads
from relayout.storage.protocols import Closable

PART_NBYTES = 8 * 2**20
"""The size of parts, of files of up to `_MAX_PARTS` of them; providers want 5 MiB at least."""
_MAX_PARTS = 9000
"""Providers take 10,000 and more."""


class Upload(Closable):
    """A `protocols.WritableFile` that is sent by parts.

    What does not fill a part is kept in memory until the part is full. A write that fills parts returns when they are
    sent. The part with the first bytes stays in memory until these are written, as the last.
    """

    def __init__(self, uploads: Uploads, name: str, location: str, nbytes: int | None = None) -> None:
        """Begin an upload.

        Args:
            name: the object's full name.
            location: its name in messages.
            nbytes: the file's length; None if it is written from front to back, by `append`.
        """
        self.name = name
        self.nbytes = nbytes
        self.part_nbytes = align_up(max(PART_NBYTES, -(-(nbytes or 0) // _MAX_PARTS)), 2**20)
        self.id = uploads.begin(name)
        self.proof = ""
        """Digest of the first part, by which the object can be recognized."""
        self._uploads = uploads
        self._location = location
        self._lock = threading.Lock()
        self._parts: dict[int, _Part] = {}
        """Parts that are neither empty nor sent."""
        self._tags: dict[int, str] = {}

    @property
    def proof_nbytes(self) -> int:
        """Length of the first part."""
        return min(self.part_nbytes, self.nbytes or 0)

    def write(self, offset: int, view: memoryview, address: int = 0) -> None:
        for index, start, piece in self._pieces(offset, view):
            part_nbytes = self._size(index)
            if piece.nbytes == part_nbytes:
                self._send(index, piece)
                continue
            with self._lock:
                part = self._parts.get(index) or self._parts.setdefault(index, _Part(part_nbytes))
                part.fill(start, piece)
                if part.num_left:
                    continue
                del self._parts[index]
            self._send(index, part.memory)

    def append(self, pieces: Iterable[bytes]) -> None:
        """Write a file of unknown length from front to back, and end it."""
        assert self.nbytes is None
        end = 0
        for piece in pieces:
            self.write(end, memoryview(piece))
            end += len(piece)
        self.nbytes = end
        for index in list(self._parts):
            self._send(index, self._parts.pop(index).memory[: self._size(index)])

    def tags(self) -> list[str]:
        """What completes the upload, after all bytes were written. OSError: some were not."""
        assert self.nbytes is not None
        num_parts = -(-self.nbytes // self.part_nbytes)
        missing = [index for index in range(num_parts) if index not in self._tags]
        if missing:
            what = f"not all bytes from {missing[0] * self.part_nbytes} on were written"
            raise OSError(errno.EIO, what, self._location)
        return [self._tags[index] for index in range(num_parts)]

    def close(self) -> None:
        """Do nothing: what is not sent stays in memory, for further writes."""

    def _size(self, index: int) -> int:
        if self.nbytes is None:
            return self.part_nbytes
        return min(self.part_nbytes, self.nbytes - index * self.part_nbytes)

    def _pieces(self, offset: int, view: memoryview) -> Iterator[tuple[int, int, memoryview]]:
        """The part, the offset in it, and the bytes of each part that a write touches."""
        end = offset + view.nbytes
        while offset < end:
            index, start = divmod(offset, self.part_nbytes)
            piece = view[: self.part_nbytes - start]
            yield index, start, piece
            view, offset = view[piece.nbytes :], offset + piece.nbytes

    def _send(self, index: int, body: memoryview) -> None:
        if index == 0:
            self.proof = digest_hex(body)
        tag = self._uploads.send(self.name, self.id, index, body)
        with self._lock:
            self._tags[index] = tag


class _Part:
    """Memory of a part, with pages only where it was written."""

    def __init__(self, nbytes: int) -> None:
        self.memory = Buffer().reserve(nbytes)
        self.num_left = nbytes

    def fill(self, start: int, piece: memoryview) -> None:
        """Take bytes, each once."""
        assert piece.nbytes <= self.num_left
        self.memory[start : start + piece.nbytes] = piece
        self.num_left -= piece.nbytes
