"""What a planned conversion will do, in sums that a person can check. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from relayout.conversion.layout import Conversion
from relayout.core.arguments import collapse_numbers
from relayout.core.slices import Cut, CutTensor
from relayout.reporting import Result


@dataclass(frozen=True, slots=True)
class PlannedGroup:
    """Tensors whose names differ in numbers only, of one dtype and shape, cut alike."""

    pattern: str
    count: int
    dtype: str
    shape: tuple[int, ...]
    cut: str
    """How the tensors are cut, in words."""
    rank_shapes: tuple[tuple[int, ...], ...]
    """The different shapes that ranks hold, in rank order."""
    rank_nbytes: int
    """Bytes of the whole group in the rank that holds most."""


@dataclass(frozen=True, slots=True, repr=False)
class Preview(Result):
    """A planned conversion."""

    source: str
    output: str
    plan: str
    expert_parallel: bool
    num_ranks: int
    """The tensor-parallel degree."""
    ranks: tuple[int, ...]
    """The ranks that are converted."""
    alignment: int
    num_tensors: int
    source_nbytes: int
    """Bytes that are read of the source's tensors."""
    written_nbytes: int
    rank_nbytes: tuple[int, ...]
    """Bytes of the tensors of each of these ranks."""
    rank_tensors: tuple[int, ...]
    """How many tensors each of them holds."""
    balance: float
    """Bytes of the average rank over those of the largest: 1.0 where all hold as much."""
    replicated_nbytes: int | None
    """Bytes stored more than once, counted once for each copy beyond the first; None: not all ranks are converted."""
    tail_nbytes: int
    """Bytes, over all ranks, of tensors of which a slice's size is not a multiple of the alignment."""
    num_files: int
    num_units: int
    """How many parts can be converted apart, see `--unit`."""
    groups: tuple[PlannedGroup, ...]
    unmatched: tuple[str, ...]
    """Tensors that no rule of the plan names, and that every rank therefore holds whole."""
    unused: tuple[str, ...]
    """Tensors that the engine does not take, from which the plan was observed."""
    left_out: tuple[str, ...]


def preview(conversion: Conversion) -> Preview:
    """Sum up a planned conversion.

    Args:
        conversion: what `plan_conversion` has planned.

    Example:
        >>> import relayout
        >>> relayout.preview(relayout.plan_conversion("llama-3.1-8b", tp=4)).num_files
        4
    """
    source, plan, layout = conversion.source, conversion.plan, conversion.layout
    options, rank_nbytes = conversion.options, conversion.rank_nbytes
    counts = Counter(conversion.cut)
    words = {
        tensor.cut: _cut_in_words(plan.cuts[cut]) for tensor, cut in set(zip(conversion.cut, plan.cut_of, strict=True))
    }
    groups: dict[tuple[str, str, tuple[int, ...], str], list[tuple[CutTensor, int]]] = {}
    named = Counter(zip((collapse_numbers(tensor.name) for tensor in source.tensors), conversion.cut, strict=True))
    for (pattern, tensor), count in named.items():
        groups.setdefault((pattern, tensor.dtype, tensor.shape, words[tensor.cut]), []).append((tensor, count))
    return Preview(
        source=str(conversion.source.root),
        output=str(conversion.output),
        plan=options.plan,
        expert_parallel=options.expert_parallel,
        num_ranks=options.num_ranks,
        ranks=conversion.ranks,
        alignment=options.alignment,
        num_tensors=len(source.tensors),
        source_nbytes=conversion.nbytes_of(),
        written_nbytes=layout.nbytes,
        rank_nbytes=rank_nbytes,
        rank_tensors=tuple(
            sum(count for tensor, count in counts.items() if tensor.cut.slices[rank].is_held)
            for rank in conversion.ranks
        ),
        balance=sum(rank_nbytes) / max(1, max(rank_nbytes) * len(rank_nbytes)),
        replicated_nbytes=conversion.replicated_nbytes,
        tail_nbytes=sum(count * _tail_nbytes(tensor, options.alignment) for tensor, count in counts.items()),
        num_files=len(layout.files),
        num_units=len(layout.units),
        groups=tuple(_group(*key, members, plan.num_ranks) for key, members in groups.items()),
        unmatched=plan.unmatched,
        unused=plan.unused,
        left_out=source.left_out,
    )


def _tail_nbytes(tensor: CutTensor, alignment: int) -> int:
    """Bytes, over all ranks, of a tensor that does not lie in the aligned front of its files."""
    if not any(nbytes % alignment for nbytes in tensor.sizes):
        return 0
    return sum(nbytes * len(ranks) for nbytes, ranks in zip(tensor.sizes, tensor.cut.holders, strict=True))


def _group(
    pattern: str, dtype: str, shape: tuple[int, ...], cut: str, members: list[tuple[CutTensor, int]], num_ranks: int
) -> PlannedGroup:
    ranks = range(num_ranks)
    shapes = (tensor.rank_shape(rank) for tensor, _ in members for rank in ranks if tensor.cut.slices[rank].is_held)
    rank_nbytes = max(sum(tensor.rank_nbytes(rank) * count for tensor, count in members) for rank in ranks)
    count = sum(count for _, count in members)
    return PlannedGroup(pattern, count, dtype, shape, cut, tuple(dict.fromkeys(shapes)), rank_nbytes)


def _cut_in_words(cut: Cut) -> str:
    if cut.is_whole:
        return "whole"
    if not all(part.is_held for part in cut.distinct):
        return "whole, in one rank"
    by_axis = [axis_ranges for part in cut.distinct for axis_ranges in part.by_axis or ()]
    dims = ", ".join(f"dim {axis}" for axis in sorted({axis for axis, _ in by_axis}))
    num_ranges = max(len(ranges) for _, ranges in by_axis)
    fused = f", {num_ranges} ranges" if num_ranges > 1 else ""
    holders = zip(cut.distinct, cut.holders, strict=True)
    shared = max((len(ranks) for part, ranks in holders if all(ranges for _, ranges in part.by_axis or ())), default=1)
    return f"{dims}{fused}" if shared == 1 else f"{dims}{fused}, each part in {shared} ranks"
