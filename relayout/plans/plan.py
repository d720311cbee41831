"""Plans as values: the slice of each tensor that each rank holds, independent of how the plan was found.

A plan can be sent as JSON. `check_all_held` checks that the slices of all ranks together cover each tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from relayout.core.slices import Cut, Slice
from relayout.core.tables import PlannedTensor
from relayout.errors import FormatError, PlanError
from relayout.format.fields import dump_slice, parse_slice
from relayout.plans.family import ENGINES, Family, dump_rules, parse_rules


class PlannedCheckpoint(Protocol):
    """The properties of a checkpoint that planning needs. `TensorList` is the smallest implementation."""

    @property
    def root(self) -> Any:
        """The path of the checkpoint, for error messages."""

    @property
    def tensors(self) -> Sequence[PlannedTensor]: ...
    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json; empty if the file does not exist."""

    @property
    def model_type(self) -> str | None:
        """`model_type` of config.json, or None."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, dtype and shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorList:
    """The tensors of a checkpoint that is not on this machine: only names, dtypes and shapes."""

    root: str
    tensors: Sequence[PlannedTensor]
    config: Mapping[str, Any]

    @property
    def model_type(self) -> str | None:
        """`model_type` of config.json."""
        value = self.config.get("model_type")
        return value if isinstance(value, str) else None


@dataclass(frozen=True, slots=True)
class Plan:
    """An assignment of slices of all tensors to ranks."""

    name: str
    """Full name of the family, or "none" without rules. Only a plan for one rank can be without rules."""
    num_ranks: int
    cuts: tuple[Cut, ...]
    """The distinct cuts, in the order of the first tensor that uses each one."""
    cut_of: tuple[int, ...]
    """For each tensor of the checkpoint, in order: its position in `cuts`."""
    expert_parallel: bool = False
    """True if each expert is held whole by one rank."""
    unmatched: tuple[str, ...] = ()
    """Names of tensors that no rule matches. Every rank holds them whole."""
    unused: tuple[str, ...] = ()
    """Names of tensors that the observed engine does not load. Each rank holds a block of rows of a large tensor, and
    small tensors whole."""
    family: Family | None = None
    """The rules, which other degrees can be cut by as well. None: no rules."""
    tables: tuple[tuple[int, ...], ...] = ()
    """For each table, the positions of its tensors in the checkpoint, in the order of rows. A rank's slices of these
    tensors are stored as one run."""

    def cut(self, t: int) -> Cut:
        """Return the cut of the tensor at position `t`."""
        return self.cuts[self.cut_of[t]]

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON, for `from_json`."""
        family = self.family
        return {
            "name": self.name,
            "num_ranks": self.num_ranks,
            "cuts": [list(map(dump_slice, cut.slices)) for cut in self.cuts],
            "cut_of": list(self.cut_of),
            "expert_parallel": self.expert_parallel,
            "unmatched": list(self.unmatched),
            "unused": list(self.unused),
            "rules": None if family is None else dump_rules(family),
            "tables": list(map(list, self.tables)),
        }

    @staticmethod
    def from_json(plan: Mapping[str, Any]) -> Plan:
        """Return the plan that `as_json` returned as JSON.

        Raises:
            FormatError: the JSON is invalid.
        """
        where = "plan"
        try:
            origin, _, name = plan["name"].partition(":")
            cuts = tuple(Cut(tuple(parse_slice(part) for part in cut)) for cut in plan["cuts"])
            cut_of = tuple(plan["cut_of"])
            if not all(type(index) is int and 0 <= index < len(cuts) for index in cut_of):
                raise FormatError("cut_of is not a list of positions in cuts", path=where, code="field")
            tables = tuple(map(tuple, plan["tables"]))
            members = [member for table in tables for member in table]
            if len(set(members)) < len(members) or not all(
                type(member) is int and 0 <= member < len(cut_of) for member in members
            ):
                raise FormatError("tables are not lists of positions in cut_of, no two alike", path=where, code="field")
            rules = plan["rules"]
            # Slices that were observed have no rules.
            family = Family(name, origin) if origin in ENGINES else rules and parse_rules(rules, where, name, origin)
            return Plan(
                plan["name"],
                plan["num_ranks"],
                cuts,
                cut_of,
                plan["expert_parallel"],
                tuple(plan["unmatched"]),
                tuple(plan["unused"]),
                family,
                tables,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"is not the JSON of a plan: {error!r}", path=where, code="field") from None


_MAX_WORK = 2**27
"""Limit for the number of grid cells times the number of slices, which is the number of bytes to write."""


def check_all_held(shape: tuple[int, ...], slices: Iterable[Slice]) -> None:
    """Raise PlanError unless the slices of all ranks cover the tensor, or if the check would take too long."""
    held = [part for part in slices if part.is_held]
    if not held:
        raise PlanError("no rank holds the tensor", code="missing")
    element = None if any(part.is_whole for part in held) else missing_element(shape, held)
    if element is not None:
        raise PlanError(f"no rank holds element {list(element)} of {list(shape)}", code="missing")


def missing_element(shape: tuple[int, ...], slices: Sequence[Slice]) -> tuple[int, ...] | None:
    """Return the index of the first element, in row-major order, that is in no slice; None if all are covered.

    The borders of all ranges divide the tensor into cells. A slice contains either all elements of a cell or none.
    """
    if 0 in shape:
        return None
    axes = sorted({axis for part in slices for axis in part.axes})
    borders = [_borders(shape[axis], axis, slices) for axis in axes]
    num_cells = prod(len(edges) - 1 for edges in borders)
    if num_cells * len(slices) > _MAX_WORK:
        raise PlanError(
            f"{len(slices)} slices along dims {axes} with {num_cells} cells between them are too many to compare",
            code="limit",
        )
    is_missing = np.ones(num_cells, bool)
    for part in slices:
        held = np.ones(1, bool)
        for axis, edges in zip(axes, borders, strict=True):
            held = np.logical_and.outer(held, _held(part, axis, edges)).reshape(-1)
        is_missing &= ~held
    if not is_missing.any():
        return None
    element = [0] * len(shape)
    cell = int(is_missing.argmax())
    for axis, edges in zip(reversed(axes), reversed(borders), strict=True):
        cell, place = divmod(cell, len(edges) - 1)
        element[axis] = int(edges[place])
    return tuple(element)


def _borders(size: int, axis: int, slices: Sequence[Slice]) -> npt.NDArray[np.int64]:
    ranges = [piece for part in slices for piece in part.ranges_along(axis) or ()]
    return np.unique(np.array([0, size, *(border for start, length in ranges for border in (start, start + length))]))


def _held(part: Slice, axis: int, borders: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return, for each interval between successive borders along an axis, True if the slice contains it."""
    ranges = part.ranges_along(axis)
    if ranges is None:
        return np.ones(len(borders) - 1, bool)
    changes = np.zeros(len(borders), np.int64)
    bounds = np.array([(start, start + length) for start, length in ranges], np.int64).reshape(-1, 2)
    np.add.at(changes, np.searchsorted(borders, bounds[:, 0]), 1)
    np.add.at(changes, np.searchsorted(borders, bounds[:, 1]), -1)
    return np.cumsum(changes[:-1]) > 0
