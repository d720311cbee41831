"""What a planned conversion will do, in sums that a person can check. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass

from relayout.conversion.run import Conversion
from relayout.core.patterns import collapse_numbers
from relayout.core.slices import Slice, slice_nbytes


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
    expert_parallel: bool
    num_ranks: int
    alignment: int
    num_tensors: int
    source_nbytes: int
    written_nbytes: int
    rank_nbytes: tuple[int, ...]
    rank_tensors: tuple[int, ...]
    """How many tensors each rank holds."""
    balance: float
    """Bytes of the average rank over those of the largest: 1.0 where all hold as much."""
    replicated_nbytes: int
    """Bytes stored more than once, counted once for each copy beyond the first."""
    tail_nbytes: int
    """Bytes, over all ranks, in slices whose size is not a multiple of the alignment."""
    num_files: int
    groups: tuple[PlannedGroup, ...]
    unmatched: tuple[str, ...]
    """Tensors that no rule of the plan names, and that every rank therefore holds whole."""
    left_out: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        return asdict(self)


def preview(conversion: Conversion) -> Preview:
    """Sum up a planned conversion."""
    catalogue, plan, layout = conversion.catalogue, conversion.plan, conversion.layout
    # Tensors that are cut alike share one tuple of slices: what follows is needed once for each such tuple and shape.
    alike: dict[tuple[str, tuple[int, ...], int], _Sum] = {}
    groups: dict[tuple[str, str, tuple[int, ...], str], list[tuple[_Sum, int]]] = {}
    named: Counter[tuple[str, tuple[str, tuple[int, ...], int]]] = Counter()
    for tensor, slices in zip(catalogue.tensors, plan.slices, strict=True):
        key = (tensor.dtype, tensor.shape, id(slices))
        if key not in alike:
            alike[key] = _Sum(tensor.dtype, tensor.shape, slices)
        alike[key].count += 1
        named[collapse_numbers(tensor.name), key] += 1
    for (pattern, key), count in named.items():
        one = alike[key]
        groups.setdefault((pattern, one.dtype, one.shape, one.cut), []).append((one, count))
    sums = alike.values()
    rank_nbytes = [sum(one.nbytes[rank] * one.count for one in sums) for rank in range(plan.num_ranks)]
    return Preview(
        source=str(conversion.source),
        output=str(conversion.output),
        plan=plan.name,
        expert_parallel=plan.expert_parallel,
        num_ranks=plan.num_ranks,
        alignment=layout.alignment,
        num_tensors=len(catalogue.tensors),
        source_nbytes=catalogue.nbytes,
        written_nbytes=layout.nbytes,
        rank_nbytes=tuple(rank_nbytes),
        rank_tensors=tuple(sum(len(file.tensors) for file in files) for files in layout.ranks),
        balance=sum(rank_nbytes) / max(1, max(rank_nbytes) * plan.num_ranks),
        replicated_nbytes=sum(rank_nbytes) - catalogue.nbytes,
        tail_nbytes=sum(one.count * sum(n for n in one.nbytes if n % layout.alignment) for one in sums),
        num_files=sum(map(len, layout.ranks)),
        groups=tuple(_group(*key, members) for key, members in groups.items()),
        unmatched=plan.unmatched,
        left_out=catalogue.left_out,
    )


class _Sum:
    """Tensors of one dtype and shape that are cut alike."""

    def __init__(self, dtype: str, shape: tuple[int, ...], slices: tuple[Slice, ...]) -> None:
        self.dtype = dtype
        self.shape = shape
        self.slices = slices
        self.count = 0
        self.nbytes = [slice_nbytes(dtype, shape, part) for part in slices]
        """Of one tensor, in each rank."""
        self.cut = _cut_in_words(slices)


def _group(pattern: str, dtype: str, shape: tuple[int, ...], cut: str, members: list[tuple[_Sum, int]]) -> PlannedGroup:
    num_ranks = len(members[0][0].slices)
    held = [part for one, _ in members for part in one.slices if part.is_held]
    return PlannedGroup(
        pattern,
        sum(count for _, count in members),
        dtype,
        shape,
        cut,
        tuple(dict.fromkeys(part.shape(shape) for part in held)),
        max(sum(one.nbytes[rank] * count for one, count in members) for rank in range(num_ranks)),
    )


def _cut_in_words(slices: tuple[Slice, ...]) -> str:
    if all(part.is_whole for part in slices):
        return "whole"
    if not all(part.is_held for part in slices):
        return "whole, in one rank"
    axis = {0: "rows", 1: "columns"}.get(slices[0].axis, f"axis {slices[0].axis}")
    num_ranges = max(len(part.ranges or ()) for part in slices)
    fused = f", {num_ranges} ranges" if num_ranges > 1 else ""
    parts = Counter(part for part in slices if any(length for _, length in part.ranges or ()))
    shared = max(parts.values(), default=1)
    return f"{axis}{fused}" if shared == 1 else f"{axis}{fused}, each part in {shared} ranks"
