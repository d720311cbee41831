"""Slices a plain checkpoint while it is loaded, which is slower than loading a converted one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relayout.checkpoint.source import SourceCheckpoint, SourceTensor, read_source
from relayout.core.slices import WHOLE, Cut
from relayout.format.index import Read
from relayout.loader.sources.contents import Contents, StoredFile, select
from relayout.loader.sources.pieces import Columns, StoredPieces
from relayout.loader.sources.reshard import Holder
from relayout.plans.planner import plan_by, plan_for
from relayout.storage.cache_folder import Cache
from relayout.storage.protocols import Store

if TYPE_CHECKING:
    from relayout.conversion.cached import CachedConversion


@dataclass(frozen=True, slots=True)
class PlainSlices:
    """What a rank holds of a plain checkpoint, by the built-in plan for its model type."""

    checkpoint: SourceCheckpoint
    rank: int
    tensors: Sequence[tuple[SourceTensor, Cut]]
    """That the rank holds, with their cuts."""

    def contents(self) -> Contents:
        """See `RankSource.contents`: all of the tensors."""
        held = [(tensor, cut.tensor(tensor.dtype, tensor.shape)) for tensor, cut in self.tensors]
        reads: Sequence[tuple[Read, ...]] = [
            tuple(
                Read(tensor.file, transfer.shifted(source=tensor.extent.offset))
                for transfer in part.rank_transfers(self.rank)
            )
            for tensor, part in held
        ]
        return Contents(
            files=self._files,
            names=[tensor.name for tensor, _ in held],
            dtypes=[tensor.dtype for tensor, _ in held],
            shapes=[part.rank_shape(self.rank) for _, part in held],
            reads=reads,
            digests=None,
        )

    def pieces(self, patterns: Sequence[str] | None) -> StoredPieces:
        """See `RankSource.pieces`.

        Raises:
            PlanError: a pattern matches nothing.
        """
        held = self.tensors
        if patterns is not None:
            held = [held[row] for row in select([tensor.name for tensor, _ in held], patterns)]
        return StoredPieces(
            Columns(
                [tensor.name for tensor, _ in held],
                [tensor.dtype for tensor, _ in held],
                [tensor.shape for tensor, _ in held],
                [cut.slices[self.rank] for _, cut in held],
            ),
            self._files,
            [Holder(WHOLE, tensor.file, tensor.extent.offset) for tensor, _ in held],
            lambda: self.checkpoint.metadata or None,
        )

    @property
    def _files(self) -> tuple[StoredFile, ...]:
        source = self.checkpoint
        return tuple(StoredFile(source.folder, file.name, file.nbytes, version=file.version) for file in source.files)


def kept_conversion(source: Store, num_ranks: int, cache: Cache) -> CachedConversion:
    """The checkpoint's conversion in a cache; errors as for `cached_conversion`."""
    from relayout.conversion.cached import cached_conversion

    return cached_conversion(source, num_ranks, cache)


def plain_slices(source: Store, rank: int, num_ranks: int) -> PlainSlices:
    """Read the headers, and plan.

    Raises:
        FormatError: the checkpoint is damaged.
        PlanError: there is no plan for it, or it cannot be cut at this degree.
    """
    checkpoint = read_source(source)
    plan = plan_for(checkpoint, num_ranks) if num_ranks > 1 else plan_by(checkpoint, num_ranks, None)
    cuts = [plan.cuts[cut] for cut in plan.cut_of]
    pairs = zip(checkpoint.tensors, cuts, strict=True)
    return PlainSlices(checkpoint, rank, [(tensor, cut) for tensor, cut in pairs if cut.slices[rank].is_held])
