"""The changes that deltas make to one rank's tensors: which bytes, where they are stored, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from relayout.checkpoint.delta import Changes, Delta, RankState
from relayout.core.workers import Workers
from relayout.format.delta import Elements
from relayout.format.index import Manifest, RankTable
from relayout.loader.sources.checkpoint import contents_of
from relayout.reporting import Progress, reporting
from relayout.storage.system import Buffer

Indices: TypeAlias = npt.NDArray[np.int64]
"""Element numbers in ascending order."""

_BATCH_NBYTES = 4 * 2**20
"""Bytes of deltas that a thread reads at once, unless a single piece is larger."""


@dataclass(frozen=True, slots=True)
class ChangedPart:
    """A byte range of a tensor that lies in one piece of a weight file."""

    name: str
    offset: int
    """Offset in the tensor, in bytes."""
    place: int
    """Offset in the piece, in bytes."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class PieceBatch:
    """Neighboring pieces of a weight file, which are read at once."""

    file: int
    pieces: range


@dataclass(frozen=True, slots=True)
class ChangedPiece:
    """The verified stored changes of one piece of a weight file, from each delta that changes it."""

    nbytes: int
    """Bytes of the piece itself."""
    parts: Sequence[ChangedPart]
    """The parts of tensors that lie in the piece."""
    stored: Sequence[tuple[Changes, memoryview]]

    def changes(self, widths: Sequence[int | None], buffer: Buffer) -> Iterator[tuple[Indices, npt.NDArray[Any]]]:
        """Yield the changes of each part: the ascending positions of the changed elements, and the XOR of each.

        Args:
            widths: the number of bytes of an element, for each part; None: the width that the delta contains.
        """
        runs = self._runs()
        change = None if runs is not None else self.decode(buffer)
        for part, width in zip(self.parts, widths, strict=True):
            found = None if runs is None else _within(runs, part, width)
            if found is None:
                change = self.decode(buffer) if change is None else change
                width = width or 1
                elements = np.frombuffer(change, f"<u{width}", part.nbytes // width, part.place)
                indices = np.flatnonzero(elements)
                found = indices, elements[indices]
            yield found

    def _runs(self) -> list[Elements] | None:
        """Return the changed elements, if only one delta changes the piece and it stores few of them; else None."""
        if len(self.stored) > 1:
            return None
        ((changes, stored),) = self.stored
        found = changes.decode(stored, self.nbytes)
        return None if any(one.indices is None for one in found) else found

    def apply(self, target: memoryview) -> None:
        """Apply the changes of all deltas to the bytes of the piece."""
        for changes, stored in self.stored:
            changes.apply(stored, target)

    def decode(self, buffer: Buffer) -> memoryview:
        """Return the XOR of the piece before the first delta and after the last one."""
        change = buffer.reserve(self.nbytes)
        np.frombuffer(change, np.uint8)[:] = 0
        self.apply(change)
        return change


def _within(runs: Sequence[Elements], part: ChangedPart, width: int | None) -> tuple[Indices, npt.NDArray[Any]] | None:
    """Return the changed elements of a part; None if the part is not inside a single run of elements."""
    end = part.place + part.nbytes
    touched = [run for run in runs if run.offset < end and part.place < run.offset + run.nbytes]
    if not touched:
        return np.empty(0, np.int64), np.empty(0, f"<u{width or 1}")
    if len(touched) > 1 or part.place < touched[0].offset or touched[0].offset + touched[0].nbytes < end:
        return None
    return touched[0].within(part.place, end, width or touched[0].values.itemsize)


@dataclass(frozen=True, slots=True)
class RankChanges:
    """The changes that a chain of deltas makes to the tensors of one rank."""

    changes: Mapping[int, Sequence[Changes]]
    """The deltas' changes of each weight file of the rank that changes, by file."""
    parts: Mapping[int, Mapping[int, Sequence[ChangedPart]]]
    """The parts of tensors in each piece that changes, by file and piece."""
    state: RankState
    """The rank's tensors after the last delta."""

    @staticmethod
    def of(deltas: Sequence[Delta], before: RankState, what: str, names: Container[str] | None = None) -> RankChanges:
        """Return the changes of tensors.

        Args:
            before: the rank's tensors before the first delta.
            what: name of the checkpoint that has the tensors, for messages.
            names: of the tensors; None: of all.
        """
        state = before.after(deltas, what)
        table, manifest = state.table, state.manifest
        found = {index: [delta.changes(index) for delta in deltas] for index in manifest.holders[table.rank].files}
        changes = {index: [one for one in of_file if one is not None] for index, of_file in found.items()}
        changes = {index: of_file for index, of_file in changes.items() if of_file}
        parts = _parts(manifest, table, changes, table.names if names is None else names)
        return RankChanges(changes, parts, state)

    def batches(self) -> list[PieceBatch]:
        """Return the batches of all pieces that change."""
        return [batch for index in self.changes for batch in self._batches(index)]

    def stored_nbytes(self, batch: PieceBatch) -> int:
        """Return the number of bytes that deltas store for a batch."""
        pieces, indexes = batch.pieces, [changes.index for changes in self.changes[batch.file]]
        return sum(index.place(index.rows(pieces.start, pieces.stop)).nbytes for index in indexes)

    def run(
        self,
        batches: Collection[PieceBatch],
        use: Callable[[ChangedPiece, Buffer], object] | None,
        threads: int,
        *,
        phase: str = "",
        progress: Progress = None,
    ) -> None:
        """Read the changes, verify their digests, and call `use` with each piece and scratch memory of the thread."""

        def work(buffer: Buffer, batch: PieceBatch) -> int:
            for piece in self._read(batch):
                if use is not None:
                    use(piece, buffer)
            return self.stored_nbytes(batch)

        total = sum(map(self.stored_nbytes, batches))
        with reporting(progress, phase, total) as report:
            Workers(threads, list(batches), Buffer, work).run(report)

    def _read(self, batch: PieceBatch) -> Iterator[ChangedPiece]:
        of_file, pieces = self.changes[batch.file], batch.pieces
        stored: dict[int, list[tuple[Changes, memoryview]]] = {}
        for changes in of_file:
            for piece, view in changes.read(pieces.start, pieces.stop):
                stored.setdefault(piece, []).append((changes, view))
        for piece, found in stored.items():
            yield ChangedPiece(of_file[0].extent(piece).nbytes, self.parts[batch.file][piece], found)

    def _batches(self, index: int) -> Iterator[PieceBatch]:
        wanted = sorted(self.parts[index])
        first = 0
        for end in range(1, len(wanted) + 1):
            batch = PieceBatch(index, range(wanted[first], wanted[end - 1] + 1))
            is_last = end == len(wanted) or wanted[end] != batch.pieces.stop
            if is_last or self.stored_nbytes(batch) >= _BATCH_NBYTES:
                yield batch
                first = end


def _parts(
    manifest: Manifest, table: RankTable, changes: Mapping[int, Sequence[Changes]], names: Container[str]
) -> dict[int, dict[int, list[ChangedPart]]]:
    """Return the parts of the named tensors that lie in each piece that changes, by file and piece."""
    numbers = manifest.holders[table.rank].files
    parts: dict[int, dict[int, list[ChangedPart]]] = {index: {} for index in changes}
    changed = {
        index: np.unique(np.concatenate([one.index.numbers for one in found])) for index, found in changes.items()
    }
    contents = contents_of((), table, [index in manifest.shared for index in numbers])
    for name, reads in zip(contents.names, contents.reads, strict=True):
        for read in reads if name in names else ():
            index, start = numbers[read.file], manifest.files[numbers[read.file]].data_start
            for run in read.transfer.runs() if index in changes else ():
                first, last = ((place - start) // manifest.chunk_nbytes for place in (run.source, run.source_end - 1))
                low, high = np.searchsorted(changed[index], (1 + first, 2 + last))
                for piece in changed[index][low:high].tolist():
                    extent = changes[index][0].extent(piece)
                    begin, end = max(run.source, extent.offset), min(run.source_end, extent.end)
                    part = ChangedPart(name, run.target + begin - run.source, begin - extent.offset, end - begin)
                    parts[index].setdefault(piece, []).append(part)
    return parts
