"""Slices a plain checkpoint while it is loaded, which is slower than loading a converted one."""

from __future__ import annotations

from collections.abc import Sequence

from relayout.checkpoint.source import SourceCheckpoint, SourceTensor, read_source
from relayout.core.slices import WHOLE, Cut
from relayout.format.index import Read
from relayout.loader.sources.contents import Contents, StoredFile, select
from relayout.loader.sources.pieces import Columns, StoredPieces
from relayout.loader.sources.reshard import Holder
from relayout.plans.planner import plan_by, plan_for
from relayout.storage.protocols import Store


def _held(source: Store, rank: int, num_ranks: int) -> tuple[SourceCheckpoint, list[tuple[SourceTensor, Cut]]]:
    """A checkpoint, and the tensors that `rank` holds with their cuts, by the built-in plan for its model type."""
    checkpoint = read_source(source)
    plan = plan_for(checkpoint, num_ranks) if num_ranks > 1 else plan_by(checkpoint, num_ranks, None)
    cuts = [plan.cuts[cut] for cut in plan.cut_of]
    return checkpoint, [
        (tensor, cut) for tensor, cut in zip(checkpoint.tensors, cuts, strict=True) if cut.slices[rank].is_held
    ]


def plain_contents(source: Store, rank: int, num_ranks: int) -> Contents:
    """The tensors that `rank` holds, by the built-in plan for the checkpoint's model type.

    Raises:
        FormatError: the checkpoint is damaged.
        PlanError: there is no plan for it, or it cannot be cut at this degree.
    """
    checkpoint, tensors = _held(source, rank, num_ranks)
    held = [(tensor, cut.tensor(tensor.dtype, tensor.shape)) for tensor, cut in tensors]
    reads: Sequence[tuple[Read, ...]] = [
        tuple(
            Read(tensor.file, transfer.shifted(source=tensor.extent.offset)) for transfer in part.rank_transfers(rank)
        )
        for tensor, part in held
    ]
    return Contents(
        files=_files(checkpoint),
        names=[tensor.name for tensor, _ in held],
        dtypes=[tensor.dtype for tensor, _ in held],
        shapes=[part.rank_shape(rank) for _, part in held],
        reads=reads,
        digests=None,
    )


def _files(source: SourceCheckpoint) -> tuple[StoredFile, ...]:
    return tuple(StoredFile(source.folder, file.name, file.nbytes, version=file.version) for file in source.files)


def plain_pieces(source: Store, rank: int, num_ranks: int, patterns: Sequence[str] | None) -> StoredPieces:
    """The same tensors, readable in part: those whose names match, all if `patterns` is None.

    Raises:
        FormatError, PlanError: as `plain_contents`; or a pattern matches nothing.
    """
    checkpoint, held = _held(source, rank, num_ranks)
    if patterns is not None:
        held = [held[row] for row in select([tensor.name for tensor, _ in held], patterns)]
    return StoredPieces(
        Columns(
            [tensor.name for tensor, _ in held],
            [tensor.dtype for tensor, _ in held],
            [tensor.shape for tensor, _ in held],
            [cut.slices[rank] for _, cut in held],
        ),
        _files(checkpoint),
        [Holder(WHOLE, tensor.file, tensor.extent.offset) for tensor, _ in held],
        lambda: checkpoint.metadata or None,
    )
