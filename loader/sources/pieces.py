"""Tensors of which any part can be read: stored in one file, or assembled from the slices of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from relayout.core.slices import Slice
from relayout.loader.sources.contents import Contents, StoredFile
from relayout.loader.sources.reshard import Holder, gather


@dataclass(frozen=True, slots=True)
class Columns:
    """Names, dtypes, shapes and parts of tensors, in columns of equal length, in the order of the source's files."""

    names: Sequence[str]
    dtypes: Sequence[str]
    whole_shapes: Sequence[tuple[int, ...]]
    """Of the whole tensors, in elements."""
    parts: Sequence[Slice]
    """The slice of each that is shown."""

    def rows(self, rows: Sequence[int]) -> Columns:
        """Some of the tensors."""
        return Columns(
            [self.names[row] for row in rows],
            [self.dtypes[row] for row in rows],
            [self.whole_shapes[row] for row in rows],
            [self.parts[row] for row in rows],
        )

    def shape(self, row: int) -> tuple[int, ...]:
        """Shape of the slice of a tensor that is shown, in elements."""
        return self.parts[row].shape(tuple(self.whole_shapes[row]))


class Pieces(Protocol):
    """Tensors of which any part can be read. Thread-safe."""

    @property
    def columns(self) -> Columns:
        """The tensors."""

    def axes(self, row: int) -> set[int]:
        """The axes along which a part of a tensor can be read alone, besides axis 0."""

    def piece(self, row: int, wanted: Slice) -> Contents:
        """A slice of one whole tensor.

        Raises:
            FormatError: a rank table is damaged.
            PlanError: the ranks do not hold all of the piece.
        """

    def metadata(self) -> Mapping[str, str] | None:
        """The entries of `__metadata__` that all files share; None if there are none.

        Raises:
            FormatError: a header is damaged.
        """


def agreed(entries: Sequence[Mapping[str, str] | None]) -> dict[str, str] | None:
    """The entries that the `__metadata__` of all files share; None if there are none."""
    first, *others = [{} if one is None else one for one in entries] or [{}]
    return {key: text for key, text in first.items() if all(one.get(key) == text for one in others)} or None


@dataclass(frozen=True, slots=True)
class StoredPieces:
    """Tensors that are each stored in one file: those of a rank as stored, or of a plain checkpoint."""

    columns: Columns
    files: tuple[StoredFile, ...]
    holders: Sequence[Holder]
    """Where each tensor is stored, and which slice of it."""
    read_metadata: Callable[[], Mapping[str, str] | None]

    def axes(self, row: int) -> set[int]:
        """See `Pieces.axes`."""
        return {*self.columns.parts[row].axes, *self.holders[row].part.axes}

    def piece(self, row: int, wanted: Slice) -> Contents:
        """See `Pieces.piece`."""
        name, dtype, whole = self.columns.names[row], self.columns.dtypes[row], tuple(self.columns.whole_shapes[row])
        reads = gather(dtype, whole, wanted, [self.holders[row]])
        return Contents(self.files, [name], [dtype], [wanted.shape(whole)], [reads], None).rows([0])

    def metadata(self) -> Mapping[str, str] | None:
        """See `Pieces.metadata`."""
        return self.read_metadata()
