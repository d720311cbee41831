"""Where elements of a slice lie in an engine's memory: views that an engine's loaders copied, as arithmetic. Pure.

An engine's loader copies views of a slice into views of its parameters. Both are geometries of torch: size, strides and
offset. From them follows, for any element of the slice, its place in the parameter's memory.
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

Places: TypeAlias = npt.NDArray[np.int64]
"""Numbers of elements: of a dense row-major slice, or of memory, from its start."""

_Axis: TypeAlias = tuple[int, int, int]
"""Number of elements, and the step of each in the slice and in the memory."""


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a slice that were copied to memory, each to one place. Made by `view_of`."""

    memory: int
    """The number of the memory."""
    axes: tuple[_Axis, ...]
    """The one with the largest step in the slice comes first; each step is larger than all that follows reaches."""
    source: int
    """The number of the first element in the slice."""
    target: int
    """Its place in the memory."""
    itemsize: int
    """Bytes of an element, here and there."""

    @property
    def size(self) -> tuple[int, ...]:
        """How many elements the view has along each axis."""
        return tuple(count for count, _, _ in self.axes)

    @property
    def of_slice(self) -> Geometry:
        """The view as one of the slice."""
        return self.size, tuple(step for _, step, _ in self.axes), self.source

    @property
    def of_memory(self) -> Geometry:
        """The view as one of the memory."""
        return self.size, tuple(step for _, _, step in self.axes), self.target

    @property
    def num_elements(self) -> int:
        """How many elements it has."""
        return prod(self.size)

    @property
    def end(self) -> int:
        """The number behind its last element in the slice."""
        return self.source + 1 + sum((count - 1) * step for count, step, _ in self.axes)

    @property
    def target_end(self) -> int:
        """The place behind its last element in the memory."""
        return self.target + 1 + sum((count - 1) * step for count, _, step in self.axes)

    def places(self, elements: Places) -> tuple[npt.NDArray[np.bool_] | slice, Places]:
        """Which of the elements of a slice the view has, and where each of these is in the memory.

        Args:
            elements: ascending.
        """
        if len(self.axes) == 1 and self.axes[0][1:] == (1, 1):  # Most are.
            first, last = np.searchsorted(elements, (self.source, self.end))
            return slice(int(first), int(last)), elements[first:last] + (self.target - self.source)
        rest = elements - self.source
        has = rest >= 0
        places = np.full(len(elements), self.target, np.int64)
        for count, step, target_step in self.axes:
            index, rest = np.divmod(rest, step)
            has &= index < count
            places += index * target_step
        has &= rest == 0
        return has, places[has]

    def place(self, index: int) -> int:
        """Where one of its elements is in the memory; they are counted in the order of their numbers in the slice."""
        place = self.target
        for count, _, step in reversed(self.axes):
            index, at = divmod(index, count)
            place += at * step
        return place


def view_of(memory: int, source: Geometry, target: Geometry, itemsize: int) -> View | None:
    """The view that was copied; None: its elements cannot be told from their numbers, or several share a place.

    Args:
        memory: its number.
        source: of a slice, counted from its first element. All of it is inside.
        target: of the memory, with the same size.
    """
    axes = _axes(source[0], source[1], target[1])
    return None if axes is None else View(memory, axes, source[2], target[2], itemsize)


@lru_cache(maxsize=1024)  # Layers are alike.
def _axes(size: tuple[int, ...], steps: tuple[int, ...], target_steps: tuple[int, ...]) -> tuple[_Axis, ...] | None:
    """The axes of a view: as few as possible."""
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
    """Whether each step is larger than all that the following axes reach: then no two elements have one number."""
    reached = 0
    for count, step in reversed(axes):
        if step <= reached:
            return False
        reached += (count - 1) * step
    return True
