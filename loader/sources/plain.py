"""Slices a plain checkpoint while it is loaded: right, but slower than loading a converted one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from relayout.checkpoint.source import read_catalogue
from relayout.format.index import Read
from relayout.loader.sources.contents import Contents, StoredFile
from relayout.plans.planner import plan_for


def plain_contents(source: Path, rank: int, num_ranks: int) -> Contents:
    """What `rank` holds, by the built-in plan for the checkpoint's model type.

    Raises:
        FormatError: the checkpoint is damaged.
        PlanError: there is no plan for it, or it cannot be cut at this degree.
    """
    catalogue = read_catalogue(source)
    plan = plan_for(catalogue, num_ranks)
    held = [
        (tensor, plan.cuts[cut].tensor(tensor.dtype, tensor.shape))
        for tensor, cut in zip(catalogue.tensors, plan.cut_of, strict=True)
        if plan.cuts[cut].slices[rank].is_held
    ]
    reads: Sequence[tuple[Read, ...]] = [
        tuple(
            Read(tensor.file, transfer.shifted(source=tensor.extent.offset)) for transfer in part.rank_transfers(rank)
        )
        for tensor, part in held
    ]
    return Contents(
        files=tuple(StoredFile(file.path, file.nbytes) for file in catalogue.files),
        names=[tensor.name for tensor, _ in held],
        dtypes=[tensor.dtype for tensor, _ in held],
        shapes=[part.rank_shape(rank) for _, part in held],
        reads=reads,
        digests=None,
        source_shapes=[tensor.shape for tensor, _ in held],
        slices=[part.cut.slices[rank] for _, part in held],
    )
