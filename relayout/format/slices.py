"""Slices as JSON: an object from axes to ranges. Pure; FORMAT.md is normative."""

from __future__ import annotations

from typing import Any

from relayout.core.slices import NOT_HELD, Slice
from relayout.errors import FormatError, PlanError, shown
from relayout.format.fields import MAX_SIZE
from relayout.format.safetensors import MAX_AXES

MAX_RANGES = 2**16
"""Of a slice, along one axis."""


def dump_slice(part: Slice) -> dict[str, list[list[int]]] | None:
    """A slice as axis -> ranges: `{}` for the whole tensor, None for what the rank does not hold.

    Raises:
        PlanError: it has too many ranges to be read again.
    """
    if part.by_axis is None:
        return None
    most = max((len(ranges) for _, ranges in part.by_axis), default=0)
    if most > MAX_RANGES:
        raise PlanError(f"a slice of {most} ranges along one dim, limit {MAX_RANGES}", code="limit")
    return {str(axis): list(map(list, ranges)) for axis, ranges in part.by_axis}


def parse_slice(value: Any) -> Slice:
    """The inverse of `dump_slice`.

    Raises:
        FormatError: it is not a slice.
    """
    if value is None:
        return NOT_HELD
    if not isinstance(value, dict) or not all(isinstance(ranges, list) for ranges in value.values()):
        raise FormatError(f"{shown(value)} is not a slice", code="field")
    axes = [int(axis) if axis.isdecimal() and len(axis) <= 2 else MAX_AXES for axis in value]
    # Rising, and each as it is written: "0", not "00" or another script's digit.
    if [str(axis) for axis in sorted(set(axes))] != list(value) or any(axis >= MAX_AXES for axis in axes):
        raise FormatError(f"{shown(list(value))} are not dims in rising order, below {MAX_AXES}", code="field")
    longest = max(map(len, value.values()), default=0)
    if longest > MAX_RANGES:
        raise FormatError(f"a slice of {longest} ranges along one dim, limit {MAX_RANGES}", code="limit")
    for item in (item for ranges in value.values() for item in ranges):
        is_pair = isinstance(item, list) and len(item) == 2 and type(item[0]) is type(item[1]) is int
        if not (is_pair and item[0] >= 0 and item[1] > 0 and sum(item) <= MAX_SIZE):
            raise FormatError(f"{shown(item)} in {shown(value)} is not a range", code="field")
    ranges = (tuple((start, length) for start, length in ranges) for ranges in value.values())
    return Slice(tuple(zip(axes, ranges, strict=True)))
