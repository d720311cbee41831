"""Compares digests while bytes arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relayout.core.digests import ExtentDigests
from relayout.core.extents import Extent
from relayout.core.workers import Stop
from relayout.errors import FormatError
from relayout.format.index import Read
from relayout.loader.sources.columns import TensorColumns
from relayout.loader.sources.stored import StoredFile


class Checks:
    """Compares the digests of tensors. For thread safety, see `core.digests.ExtentDigests`."""

    def __init__(self, tensors: TensorColumns, file_at: Callable[[int], str | None], stop: Stop) -> None:
        """Tensors that have digests, in an arena; `file_at` is the file that an offset of it is read from.

        Raises:
            FormatError: the digest of a tensor without bytes is wrong.
        """
        assert tensors.digests is not None
        self._names = tensors.names
        self._offsets = tensors.offsets
        self._file_at = file_at
        self._expected = tensors.digests
        self._sizes = tensors.sizes()
        extents = (Extent(offset, nbytes) for offset, nbytes in zip(tensors.offsets, self._sizes, strict=True))
        self._hashed = ExtentDigests(list(extents), stop)
        for row, nbytes in enumerate(self._sizes):
            if not nbytes:
                self._compare(row)

    def update(self, offset: int, view: memoryview) -> None:
        """Hash the arena's bytes from `offset` on; some may be outside all tensors.

        Raises:
            FormatError: a tensor is complete and its digest differs.
            Stopped: the job was cancelled.
        """
        for row in self._hashed.update(offset, view):
            self._compare(row)

    def finish(self) -> None:
        """Check that all tensors have been compared; call it when all bytes have arrived.

        Raises:
            FormatError: a tensor was not compared, as its bytes did not arrive in order.
        """
        if left := self._hashed.num_left:
            path = self._file_at(self._offsets[self._hashed.digests.index("")])
            what = f"{left} tensors could not be checked: their bytes did not arrive in order"
            raise FormatError(what, path=path, code="digest")

    def _compare(self, row: int) -> None:
        digest = self._hashed.digests[row]
        if digest != self._expected[row]:
            raise FormatError(
                f"its bytes have digest {digest}, expected {self._expected[row]}: damaged",
                path=self._file_at(self._offsets[row]) if self._sizes[row] else None,
                tensor=self._names[row],
                code="digest",
            )


def checks_of(tensors: TensorColumns, files: Sequence[StoredFile], reads: Sequence[Read], stop: Stop) -> Checks | None:
    """Checks for the digests of tensors in an arena, if they have any; files, reads and `stop` are the job's."""

    def file_at(offset: int) -> str | None:
        places = ((read.transfer.target, read.transfer.target_end, read.file) for read in reads)
        return next((files[file].where for start, end, file in places if start <= offset < end), None)

    return None if tensors.digests is None else Checks(tensors, file_at, stop)
