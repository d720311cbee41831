"""What a load asks of a checkpoint: the protocol of its sources."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from relayout.core.slices import Slice
from relayout.loader.reads import ArenaPlan, pack
from relayout.loader.sources.columns import Names, TensorColumns
from relayout.loader.sources.stored import StoredFile
from relayout.storage.protocols import Store


class Pieces(Protocol):
    """Tensors of which any part can be read. Thread-safe."""

    @property
    def columns(self) -> TensorColumns:
        """The tensors, with their parts and the shapes of the whole tensors, in the order of the source's files."""

    def axes(self, row: int) -> set[int]:
        """The axes along which a part of a tensor can be read alone, besides axis 0."""

    def piece(self, row: int, wanted: Slice) -> TensorColumns:
        """A slice of one whole tensor.

        Raises:
            FormatError: a rank table is damaged.
            PlanError: the ranks do not hold all of the piece.
        """

    def metadata(self) -> Mapping[str, str]:
        """The entries of `__metadata__` that all files share.

        Raises:
            FormatError: a header is damaged.
        """


@dataclass(frozen=True, slots=True)
class RankSource(ABC):
    """One rank of a checkpoint."""

    store: Store
    """The folder, prefix or file."""
    rank: int
    num_ranks: int

    @property
    def slow_because(self) -> str | None:
        """Why loading is slow, and how to make it fast, for a person; None if it is fast."""
        return None

    @property
    def is_plain(self) -> bool:
        """Whether the checkpoint was not converted: this is a `PlainRank`."""
        return False

    @property
    def is_as_stored(self) -> bool:
        """Whether the bytes of every tensor are contiguous in a file."""
        return False

    @abstractmethod
    def contents(self, names: Names = None) -> TensorColumns:
        """The tensors whose names match, with what to read.

        Raises:
            FormatError: the manifest's other files, or the plain checkpoint, are damaged.
            PlanError: a pattern matches nothing.
        """

    @abstractmethod
    def pieces(self, names: Names = None) -> Pieces:
        """The same tensors, of which any part can be read; for errors see `contents`."""

    def arena(self, names: Names = None) -> ArenaPlan:
        """The same tensors, in one allocation; for errors see `contents`."""
        return pack(self.contents(names))

    def columns(self) -> TensorColumns:
        """What all of the rank's tensors are; for errors see `contents`."""
        return self.pieces().columns

    def used_files(self) -> tuple[StoredFile, ...]:
        """The files that have the rank's bytes; for errors see `contents`."""
        return self.contents().files
