"""What an index selects, axis by axis, of a tensor of which only that is to be read. Pure."""

from __future__ import annotations

from typing import Any, TypeAlias

from relayout.core.slices import Range
from relayout.errors import PlanError

Selection: TypeAlias = list[int | slice]
"""An integer or slice for each axis."""


def selection(index: Any, shape: tuple[int, ...]) -> Selection | None:
    """What an index of integers, slices and `...` selects; None for an index of another kind."""
    given = list(index) if isinstance(index, tuple) else [index]
    if not any(one is Ellipsis for one in given):
        given.append(Ellipsis)
    place = next(i for i, one in enumerate(given) if one is Ellipsis)
    given[place : place + 1] = [slice(None)] * (len(shape) - len(given) + 1)
    return given if all(type(one) is int or isinstance(one, slice) for one in given) else None


def check_pairs(name: str, dtype: str, selected: Selection | None) -> None:
    """Refuse to cut what torch has in pairs only.

    Raises:
        PlanError: the tensor's dtype is F4, and not all of its last axis is selected.
    """
    if dtype == "F4" and (selected is None or (selected and selected[-1] != slice(None))):
        raise PlanError(f"tensor {name!r}: torch has F4 in pairs, which cannot be cut along the last axis")


def bounds(part: int | slice, size: int) -> Range:
    """(start, length) of the elements along an axis from the first to the last that is selected."""
    if isinstance(part, int):
        return part % size, 1
    selected = range(size)[part]
    return (selected.start, selected[-1] + 1 - selected.start) if selected else (0, 0)


def within(part: int | slice, length: int) -> int | slice:
    """The same selection among the `length` elements between its bounds."""
    return 0 if isinstance(part, int) else slice(0, length, part.step)
