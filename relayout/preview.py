"""What a planned conversion will do, in sums that a person can check. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from relayout.conversion import Conversion
from relayout.globs import collapse_numbers
from relayout.slicing import Slice, slice_nbytes


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """Tensors whose names differ in numbers only, of one dtype and shape, cut alike."""

    pattern: str
    count: int
    dtype: str
    shape: tuple[int, ...]
    cut: str
    """In words."""
    rank_shapes: tuple[tuple[int, ...], ...]
    """The different shapes that ranks hold, in rank order."""
    rank_nbytes: int
    """Bytes of the whole group in the rank that holds most."""


@dataclass(frozen=True, slots=True)
class Preview:
    """A planned conversion."""

    source: str
    output: str
    plan: str
    num_ranks: int
    alignment: int
    num_tensors: int
    source_nbytes: int
    written_nbytes: int
    rank_nbytes: tuple[int, ...]
    replicated_nbytes: int
    """Bytes stored more than once, counted once for each copy beyond the first."""
    tail_nbytes: int
    """Bytes, over all ranks, in slices whose size is not a multiple of the alignment."""
    num_files: int
    groups: tuple[PlannedGroup, ...]
    left_out: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        return asdict(self)


def preview(conversion: Conversion) -> Preview:
    """Sum up a planned conversion."""
    catalogue, plan, layout = conversion.catalogue, conversion.plan, conversion.layout
    rank_nbytes = [0] * plan.num_ranks
    tail = 0
    sums: dict[tuple[str, str, tuple[int, ...], tuple[Slice, ...]], tuple[int, int]] = {}
    for tensor, slices in zip(catalogue.tensors, plan.slices, strict=True):
        sizes = [slice_nbytes(tensor.dtype, tensor.shape, part) for part in slices]
        for rank, nbytes in enumerate(sizes):
            rank_nbytes[rank] += nbytes
        tail += sum(nbytes for nbytes in sizes if nbytes % layout.alignment)
        key = (collapse_numbers(tensor.name), tensor.dtype, tensor.shape, slices)
        count, total = sums.get(key, (0, 0))
        sums[key] = (count + 1, total + max(sizes))
    return Preview(
        source=str(conversion.source),
        output=str(conversion.output),
        plan=plan.name,
        num_ranks=plan.num_ranks,
        alignment=layout.alignment,
        num_tensors=len(catalogue.tensors),
        source_nbytes=catalogue.nbytes,
        written_nbytes=layout.nbytes,
        rank_nbytes=tuple(rank_nbytes),
        replicated_nbytes=sum(rank_nbytes) - catalogue.nbytes,
        tail_nbytes=tail,
        num_files=sum(map(len, layout.ranks)),
        groups=tuple(
            PlannedGroup(
                pattern,
                count,
                dtype,
                shape,
                _cut_in_words(slices),
                tuple(dict.fromkeys(part.shape(shape) for part in slices)),
                nbytes,
            )
            for (pattern, dtype, shape, slices), (count, nbytes) in sums.items()
        ),
        left_out=catalogue.left_out,
    )


def _cut_in_words(slices: tuple[Slice, ...]) -> str:
    if all(part.is_whole for part in slices):
        return "whole"
    axis = {0: "rows", 1: "columns"}.get(slices[0].axis, f"axis {slices[0].axis}")
    shared = len(slices) // len(set(slices))
    return axis if shared == 1 else f"{axis}, each part in {shared} ranks"
