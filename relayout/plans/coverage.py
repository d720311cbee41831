"""Which element of a tensor no slice has. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from relayout.core.slices import Slice
from relayout.errors import PlanError

_MAX_WORK = 2**27
"""Cells of the grid times slices: bytes to write."""


def check_all_held(shape: tuple[int, ...], slices: Iterable[Slice]) -> None:
    """Check that the slices of all ranks together have every element of a tensor.

    Raises:
        PlanError: they do not, or it takes long to tell.
    """
    held = [part for part in slices if part.is_held]
    if not held:
        raise PlanError("no rank holds the tensor", code="missing")
    element = None if any(part.is_whole for part in held) else missing_element(shape, held)
    if element is not None:
        raise PlanError(f"no rank holds element {list(element)} of {list(shape)}", code="missing")


def missing_element(shape: tuple[int, ...], slices: Sequence[Slice]) -> tuple[int, ...] | None:
    """Index of the first element, in row-major order, that no slice has; None if there is none.

    The borders of all ranges cut the tensor into cells, of which a slice has all elements or none.

    Raises:
        PlanError: there are too many cells and slices to compare.
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
    """Whether a slice has the elements between two borders, of all that follow each other along an axis."""
    ranges = part.ranges_along(axis)
    if ranges is None:
        return np.ones(len(borders) - 1, bool)
    changes = np.zeros(len(borders), np.int64)
    bounds = np.array([(start, start + length) for start, length in ranges], np.int64).reshape(-1, 2)
    np.add.at(changes, np.searchsorted(borders, bounds[:, 0]), 1)
    np.add.at(changes, np.searchsorted(borders, bounds[:, 1]), -1)
    return np.cumsum(changes[:-1]) > 0
