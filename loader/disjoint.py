"""Finds strided tensors that share memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

MAX_WORK = 100_000
"""Of one comparison, as numpy counts it; tensors that need more count as sharing memory."""


@dataclass(frozen=True, slots=True)
class Strided:
    """Where the elements of a tensor lie; it has one or more."""

    address: int
    """Not 0."""
    item_nbytes: int
    strides: tuple[int, ...]
    """In elements."""
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """Address after the last byte."""
        last = sum(stride * (size - 1) for stride, size in zip(self.strides, self.shape, strict=True))
        return self.address + (last + 1) * self.item_nbytes

    @property
    def is_simple(self) -> bool:
        """Whether each stride is larger than all that the inner axes span, as in every view of a dense tensor.

        Then no byte belongs to two elements.
        """
        reach = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size > 1 and stride < reach:
                return False
            reach += stride * (size - 1)
        return True

    @property
    def array(self) -> npt.NDArray[np.void]:
        """The elements. They must not be used: the memory may be a device's."""
        interface = {
            "version": 3,
            "data": (self.address, True),
            "shape": self.shape,
            "strides": tuple(stride * self.item_nbytes for stride in self.strides),
            "typestr": f"|V{self.item_nbytes}",
        }
        return np.asarray(SimpleNamespace(__array_interface__=interface))


def sharing(tensors: Sequence[Strided]) -> Iterator[tuple[int, int]]:
    """The positions of all pairs that share a byte.

    Only pairs whose address ranges overlap are compared: as a rule none, or the parts of one fused parameter.
    """
    order = sorted(range(len(tensors)), key=lambda index: tensors[index].address)
    reaching: list[int] = []
    for index in order:
        reaching = [other for other in reaching if tensors[other].end > tensors[index].address]
        for other in reaching:
            if share(tensors[other], tensors[index]):
                yield min(other, index), max(other, index)
        reaching.append(index)


def share(first: Strided, second: Strided) -> bool:
    """Whether two tensors have a byte in common; also True where that takes too long to find out."""
    try:
        # numpy's stubs know no limit but none and zero.
        return np.shares_memory(first.array, second.array, max_work=MAX_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
