"""Locations of a slice's elements in an engine's memory, computed from the views that an engine's loaders copied. Pure.

An engine's loader copies views of a slice into views of its parameters. Both have a torch geometry: size, strides and
offset. The two geometries determine, for any element of the slice, its location in the parameter's storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from relayout.core.aten import Geometry

Indices: TypeAlias = npt.NDArray[np.int64]
"""Indices of elements: in a dense row-major slice, or in a storage, from its start."""

_Axis: TypeAlias = tuple[int, int, int]
"""Number of elements, step in the slice, and step in the storage, all in elements."""


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a slice that were copied to a storage, each to one location. Created by `view_of`."""

    memory: int
    """The number of the storage."""
    axes: tuple[_Axis, ...]
    """The axes by descending step in the slice. Each step exceeds the extent of all following axes."""
    source: int
    """The index of the first element in the slice."""
    target: int
    """The index of the first element in the storage."""
    itemsize: int
    """Bytes of an element, in the slice and in the storage."""

    @property
    def size(self) -> tuple[int, ...]:
        """The number of elements along each axis."""
        return tuple(count for count, _, _ in self.axes)

    @property
    def of_slice(self) -> Geometry:
        """The geometry of the view in the slice."""
        return self.size, tuple(step for _, step, _ in self.axes), self.source

    @property
    def of_memory(self) -> Geometry:
        """The geometry of the view in the storage."""
        return self.size, tuple(step for _, _, step in self.axes), self.target

    @property
    def num_elements(self) -> int:
        """The number of elements."""
        return prod(self.size)

    @property
    def end(self) -> int:
        """The index after the view's last element in the slice."""
        return self.source + 1 + sum((count - 1) * step for count, step, _ in self.axes)

    @property
    def target_end(self) -> int:
        """The index after the view's last element in the storage."""
        return self.target + 1 + sum((count - 1) * step for count, _, step in self.axes)

    def indices(self, elements: Indices) -> tuple[npt.NDArray[np.bool_] | slice, Indices]:
        """Return a mask (or range) of those elements of the slice that the view has, and their indices in the storage.

        Args:
            elements: ascending indices in the slice.
        """
        if len(self.axes) == 1 and self.axes[0][1:] == (1, 1):  # True of most views.
            first, last = np.searchsorted(elements, (self.source, self.end))
            return slice(int(first), int(last)), elements[first:last] + (self.target - self.source)
        rest = elements - self.source
        has = rest >= 0
        indices = np.full(len(elements), self.target, np.int64)
        for count, step, target_step in self.axes:
            index, rest = np.divmod(rest, step)
            has &= index < count
            indices += index * target_step
        has &= rest == 0
        return has, indices[has]

    def place(self, index: int) -> int:
        """Return the storage index of one element of the view; elements are counted in the order of the slice."""
        place = self.target
        for count, _, step in reversed(self.axes):
            index, at = divmod(index, count)
            place += at * step
        return place


def view_of(memory: int, source: Geometry, target: Geometry, itemsize: int) -> View | None:
    """Return the view that was copied; None: slice indices do not identify its elements, or some share a location.

    Args:
        memory: the number of the storage.
        source: the geometry in a slice, from its first element. It lies within the slice.
        target: the geometry in the storage, with the same size.
    """
    axes = _axes(source[0], source[1], target[1])
    return None if axes is None else View(memory, axes, source[2], target[2], itemsize)


@lru_cache(maxsize=1024)  # Layers are alike.
def _axes(size: tuple[int, ...], steps: tuple[int, ...], target_steps: tuple[int, ...]) -> tuple[_Axis, ...] | None:
    """Return the axes of a view, as few as possible."""
    if 0 in size:
        return None
    axes: list[_Axis] = []
    for count, step, target_step in sorted(zip(size, steps, target_steps, strict=True), key=lambda axis: -axis[1]):
        if axes and count > 1 and axes[-1][1:] == (count * step, count * target_step):
            axes[-1] = axes[-1][0] * count, step, target_step
        elif count > 1:
            axes.append((count, step, target_step))
    is_told = _is_nested([(count, step) for count, step, _ in axes])
    is_apart = _is_nested(sorted(((count, step) for count, _, step in axes), key=lambda axis: -axis[1]))
    return (tuple(axes) or ((1, 1, 1),)) if is_told and is_apart else None


def _is_nested(axes: list[tuple[int, int]]) -> bool:
    """Return True if each step exceeds the extent of the following axes: then no two elements share an index."""
    reached = 0
    for count, step in reversed(axes):
        if step <= reached:
            return False
        reached += (count - 1) * step
    return True
