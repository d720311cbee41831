"""Checkpoints for the planner, of which nothing is stored anywhere, and what a plan says of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from relayout.checkpoint.source import SourceCheckpoint, SourceTensor
from relayout.conversion.layout import Conversion
from relayout.core.extents import Extent
from relayout.core.slices import BITS, Cut, Slice, number_cuts
from relayout.errors import PlanError
from relayout.plans.plan import Plan
from relayout.plans.planner import plan_for
from relayout.storage.local.store import LocalStore

Shapes = Mapping[str, tuple[int, ...]]
Ranges = tuple[tuple[int, int], ...]


def make_source(shapes: Shapes, *, stored_as: str = "BF16", **config: Any) -> SourceCheckpoint:
    """A checkpoint of tensors of these shapes, in this order."""
    tensors = tuple(SourceTensor(name, stored_as, shape, 0, Extent(0, 0)) for name, shape in shapes.items())
    return SourceCheckpoint(LocalStore(Path("checkpoint")), (), tensors, config=config)


def try_plan(source: SourceCheckpoint, num_ranks: int) -> Plan | PlanError:
    """The plan of a checkpoint, or why there is none."""
    try:
        return plan_for(source, num_ranks)
    except PlanError as error:
        return error


def plan_of(name: str, num_ranks: int, slices: Iterable[tuple[Slice, ...]], **more: Any) -> Plan:
    """A plan by which tensors are cut so: for each the slice of each rank."""
    return Plan(name, num_ranks, *number_cuts(map(Cut, slices)), **more)


def conversion_of(source: SourceCheckpoint, plan: Plan, alignment: int, **options: Any) -> Conversion:
    """What converts a checkpoint by a plan; options as for `Conversion.lay_out`."""
    return Conversion.lay_out(LocalStore(Path("out")), source, plan, alignment=alignment, **options)


def all_slices(plan: Plan) -> tuple[tuple[Slice, ...], ...]:
    """For each tensor the slice of each rank."""
    return tuple(plan.cuts[cut].slices for cut in plan.cut_of)


def slices_of(plan: Plan, shapes: Shapes) -> dict[str, tuple[Slice, ...]]:
    """The slice of each rank, by name."""
    return dict(zip(shapes, all_slices(plan), strict=True))


def shapes_of(plan: Plan, shapes: Shapes, rank: int) -> dict[str, tuple[int, ...]]:
    """The shapes of what a rank holds, by name."""
    return {name: slices[rank].shape(shapes[name]) for name, slices in slices_of(plan, shapes).items()}


def ranges_of(plan: Plan, tensor: int = 0) -> list[Ranges]:
    """The ranges of each rank, of a tensor that is cut."""
    found = [part.ranges for part in plan.cut(tensor).slices]
    return [ranges for ranges in found if ranges is not None]


def slice_nbytes(dtype: str, shape: tuple[int, ...], part: Slice) -> int:
    """Stored bytes of a slice."""
    return prod(part.shape(shape)) * BITS[dtype] // 8
