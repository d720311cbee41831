"""Tables that are read by rows: the tensors that store one, and the order of their rows. Pure.

A table of n-grams may be stored as one tensor, or as numbered shards of rows, from 0 on. A rule for such
shards has a `#` in its pattern, in the place of the number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from relayout.core.arguments import compile_glob
from relayout.errors import PlanError


class PlannedTensor(Protocol):
    """The properties of a tensor that plans and tables use."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class RowTable:
    """The tensors that store a table."""

    members: tuple[int, ...]
    """Positions of the table's tensors in the checkpoint, in the order of the rows."""
    starts: tuple[int, ...]
    """The number of rows of the table before each tensor."""
    num_rows: int


def tables_of(tensors: Sequence[PlannedTensor], pattern_of: Callable[[str], str | None]) -> list[RowTable]:
    """Return the tables of a checkpoint, in the order of their first tensors.

    Args:
        tensors: all tensors of the checkpoint.
        pattern_of: returns the pattern by which a tensor belongs to a table; None: it belongs to no table.

    Raises:
        PlanError: a shard is missing or occurs twice, or shards differ in dtype or in the length of rows.
    """
    groups: dict[tuple[str, str], dict[int, int]] = {}
    for t, tensor in enumerate(tensors):
        pattern = pattern_of(tensor.name)
        if pattern is None:
            continue
        before, number, after = _split_at_number(pattern, tensor.name)
        if groups.setdefault((before, after), {}).setdefault(number, t) != t:
            raise PlanError(f"the table has two shards {number}", tensor=tensor.name, code="no_rule")
    return [_table(tensors, shards) for shards in groups.values()]


def _split_at_number(pattern: str, name: str) -> tuple[str, int, str]:
    """Return the name before the number at `#`, the number, and the name after it.

    If the pattern has no `#`, the number is 0 and follows the whole name.
    """
    if "#" not in pattern:
        return name, 0, ""
    found = next(filter(None, (compile_glob(pattern).match(name, start) for start in _part_starts(name))))
    return name[: found.start(1)], int(found[1]), name[found.end(1) :]


def _part_starts(name: str) -> list[int]:
    """Return the starts of a name's parts. A pattern may match from any of them, if a prefix was removed before."""
    return [0, *(index + 1 for index, character in enumerate(name) if character == ".")]


def _table(tensors: Sequence[PlannedTensor], shards: dict[int, int]) -> RowTable:
    members = tuple(shards[number] for number in sorted(shards))
    first = tensors[members[0]]
    if max(shards) != len(members) - 1:
        what = f"{len(members)} shards of a table, numbered up to {max(shards)}: expected 0 to {len(members) - 1}"
        raise PlanError(what, tensor=first.name, code="no_rule")
    for t in members:
        tensor = tensors[t]
        if not tensor.shape or (tensor.dtype, tensor.shape[1:]) != (first.dtype, first.shape[1:]):
            kinds = f"{tensor.dtype} {list(tensor.shape)}, but {first.name!r} is {first.dtype} {list(first.shape)}"
            raise PlanError(f"{kinds}: rows of a table are alike", tensor=tensor.name, code="no_rule")
    *starts, num_rows = accumulate((tensors[t].shape[0] for t in members), initial=0)
    return RowTable(members, tuple(starts), num_rows)
