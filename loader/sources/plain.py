"""Slices a plain checkpoint while it is loaded, which is slower than loading a converted one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from relayout.checkpoint.source import SourceCheckpoint, SourceTensor, read_source
from relayout.core.slices import WHOLE, Cut
from relayout.format.index import Read
from relayout.loader.sources.rank import Names, RankSource, StoredFile, TensorColumns
from relayout.loader.sources.reshard import StoredPieces, StoredSlice
from relayout.plans.planner import plan_by, plan_for
from relayout.storage.stores import Store


@dataclass(frozen=True, slots=True)
class PlainRank(RankSource):
    """One rank of a checkpoint that was not converted, by the built-in plan for its model type."""

    checkpoint: SourceCheckpoint
    cuts: Sequence[Cut]
    """The cut of each of its tensors."""

    @property
    def tensors(self) -> list[tuple[SourceTensor, Cut]]:
        """The tensors that the rank holds, with their cuts."""
        pairs = zip(self.checkpoint.tensors, self.cuts, strict=True)
        return [(tensor, cut) for tensor, cut in pairs if cut.slices[self.rank].is_held]

    @property
    def is_plain(self) -> bool:
        return True

    @property
    def slow_because(self) -> str | None:
        if self.num_ranks == 1:
            return None
        return (
            f"{self.store}: a plain checkpoint, sliced while it is loaded; `relayout convert {self.store}"
            f" --tp {self.num_ranks}` once makes every later load faster"
        )

    def contents(self, names: Names = None) -> TensorColumns:
        tensors = self.tensors
        parts = [cut.tensor(tensor.dtype, tensor.shape) for tensor, cut in tensors]
        columns = TensorColumns(
            names=[tensor.name for tensor, _ in tensors],
            dtypes=[tensor.dtype for tensor, _ in tensors],
            shapes=[part.rank_shape(self.rank) for part in parts],
            files=self.files,
            reads=[
                tuple(
                    Read(tensor.file, transfer.shifted(source=tensor.extent.offset))
                    for transfer in part.rank_transfers(self.rank)
                )
                for (tensor, _), part in zip(tensors, parts, strict=True)
            ],
        )
        return columns.matching(names)

    def pieces(self, names: Names = None) -> StoredPieces:
        tensors = self.tensors
        by_name = {tensor.name: tensor for tensor, _ in tensors}
        slices = [cut.slices[self.rank] for _, cut in tensors]
        columns = TensorColumns(
            names=list(by_name),
            dtypes=[tensor.dtype for tensor in by_name.values()],
            shapes=[part.shape(tensor.shape) for part, tensor in zip(slices, by_name.values(), strict=True)],
            parts=slices,
            source_shapes=[tensor.shape for tensor in by_name.values()],
        ).matching(names)
        stored = [StoredSlice(WHOLE, by_name[name].file, by_name[name].extent.offset) for name in columns.names]
        return StoredPieces(columns, self.files, stored, lambda: self.checkpoint.metadata)

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """All files of the checkpoint."""
        folder = self.checkpoint.folder
        return tuple(StoredFile(folder, file.name, file.nbytes, version=file.version) for file in self.checkpoint.files)


def plain_rank(store: Store, rank: int, num_ranks: int) -> PlainRank:
    """Read the headers, and plan.

    Raises:
        FormatError: the checkpoint is damaged.
        PlanError: there is no plan for it, or it cannot be cut at this degree.
    """
    checkpoint = read_source(store)
    plan = plan_for(checkpoint, num_ranks) if num_ranks > 1 else plan_by(checkpoint, num_ranks, None)
    return PlainRank(store, rank, num_ranks, checkpoint, [plan.cuts[cut] for cut in plan.cut_of])
