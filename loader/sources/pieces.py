"""Tensors of which any part can be read: as a rank stores them, put together from several, or of a plain checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from relayout.core.slices import Range, Slice
from relayout.loader.sources.contents import Contents, StoredFile
from relayout.loader.sources.reshard import Holder, gather


@dataclass(frozen=True, slots=True)
class Columns:
    """What tensors are, in columns of equal length, in the order of the source's files."""

    names: Sequence[str]
    dtypes: Sequence[str]
    whole_shapes: Sequence[tuple[int, ...]]
    """Of the whole tensors, in elements."""
    parts: Sequence[Slice]
    """Of them, what is shown here."""

    def rows(self, rows: Sequence[int]) -> Columns:
        """Some of the tensors."""
        return Columns(
            [self.names[row] for row in rows],
            [self.dtypes[row] for row in rows],
            [self.whole_shapes[row] for row in rows],
            [self.parts[row] for row in rows],
        )

    def shape(self, row: int) -> tuple[int, ...]:
        """Of what is shown of a tensor, in elements."""
        return self.parts[row].shape(tuple(self.whole_shapes[row]))


class Pieces(Protocol):
    """Tensors of which any part can be read; by any number of threads at once."""

    @property
    def columns(self) -> Columns:
        """What they are."""

    def axis(self, row: int) -> int:
        """The axis along which reading a part of a tensor asks for less; axis 0 does so always."""

    def piece(self, row: int, wanted: Slice, rows: Range | None, shape: tuple[int, ...]) -> Contents:
        """A piece of one tensor: a slice of the whole along `axis`, and of that some rows (see `gather`).

        Args:
            shape: of the piece.

        Raises:
            FormatError: what tells where it is, is damaged.
            PlanError: it cannot be put together.
        """

    def metadata(self) -> Mapping[str, str] | None:
        """The entries of `__metadata__` on which the files agree; None if there are none.

        Raises:
            FormatError: a header is damaged.
        """


def agreed(entries: Sequence[Mapping[str, str] | None]) -> dict[str, str] | None:
    """What all the `__metadata__` of several files say; None if that is nothing."""
    first, *others = [{} if one is None else one for one in entries] or [{}]
    return {key: text for key, text in first.items() if all(one.get(key) == text for one in others)} or None


@dataclass(frozen=True, slots=True)
class StoredPieces:
    """Tensors each of which lies in one file: those of a rank as stored, or of a plain checkpoint."""

    columns: Columns
    files: tuple[StoredFile, ...]
    holders: Sequence[Holder]
    """Where each tensor lies, and what of it is there."""
    read_metadata: Callable[[], Mapping[str, str] | None]

    def axis(self, row: int) -> int:
        """See `Pieces.axis`."""
        cut = (part.axis for part in (self.columns.parts[row], self.holders[row].part) if part.ranges is not None)
        return next(cut, 0)

    def piece(self, row: int, wanted: Slice, rows: Range | None, shape: tuple[int, ...]) -> Contents:
        """See `Pieces.piece`."""
        name, dtype = self.columns.names[row], self.columns.dtypes[row]
        reads = gather(dtype, tuple(self.columns.whole_shapes[row]), wanted, [self.holders[row]], rows)
        return Contents(self.files, [name], [dtype], [shape], [reads], None).rows([0])

    def metadata(self) -> Mapping[str, str] | None:
        """See `Pieces.metadata`."""
        return self.read_metadata()
