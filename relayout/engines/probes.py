"""Probes: tensors with a shape and no bytes, which show what an engine's weight loader does with a tensor.

Views of a probe are followed by torch's own strides. A copy of one into memory of the engine is told to a `Watcher`,
and everything else that is asked of it, too. `Tracer` writes down which elements of a tensor are copied to where, also
through operations that rearrange them. Needs torch at import time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from relayout.engines.global_tensor import (
    BY_INDEX,
    MOVES,
    SHAPED,
    Geometry,
    aten,
    geometry_of,
    is_view,
    made_like,
    name_of,
    without_memory,
    written_by,
)
from relayout.errors import PlanError

NOTHING = -1
"""The number of an element that is of no tensor: a constant, such as padding."""


@dataclass(eq=False, slots=True)
class Memory:
    """What a probe, and all views of it, would lie in: dense and row-major, if it is a tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    watcher: Watcher
    backing: torch.Tensor | None = None
    """What stands for the elements, once the watcher needs something that does: these themselves, or their numbers."""


class Watcher(ABC):
    """What is told of probes. Any number of threads may use probes."""

    @abstractmethod
    def copied(self, target: torch.Tensor, source: Probe) -> bool:
        """Whether this takes care of a copy into a tensor that is no probe. Otherwise it is computed."""

    @abstractmethod
    def compute(self, func: Any, args: Any, kwargs: Any, probes: Sequence[Probe]) -> Any:
        """The result of an operation that is more than a view; `found` are the probes among its arguments."""

    @abstractmethod
    def values(self, probe: Probe, operation: str) -> torch.Tensor:
        """A probe's elements, as a tensor that has them.

        Raises:
            PlanError: this watcher has none.
        """


class Probe(torch.Tensor):
    """A tensor without bytes; see the module. Strides and offset are in its elements, from its memory's start."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    memory: Memory

    @staticmethod
    def of(memory: Memory, geometry: Geometry | None = None, dtype: torch.dtype | None = None) -> Probe:
        """A view of memory; all of it, as a tensor of a checkpoint lies, without a geometry."""
        size, strides, offset = geometry or (memory.shape, row_major(memory.shape), 0)
        self: Probe = torch.Tensor._make_wrapper_subclass(
            Probe, size, strides=strides, storage_offset=offset, dtype=dtype or memory.dtype, device=memory.device
        )
        self.memory = memory
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Probe({self.memory.name!r}, {list(self.shape)} of {list(self.memory.shape)}, {self.dtype})"

    def narrow(self, dim: int, start: Any, length: Any) -> torch.Tensor:
        """As `torch.narrow`; what weight loaders call most, so without torch's dispatcher."""
        size, strides, offset = geometry_of(self)
        if type(start) is int and 0 <= start <= start + length <= size[dim]:
            axis = dim % len(size)
            size = (*size[:axis], length, *size[axis + 1 :])
            return Probe.of(self.memory, (size, strides, offset + start * strides[axis]), self.dtype)
        return torch.Tensor.narrow(self, dim, start, length)

    def tolist(self) -> Any:
        """As of the tensor."""
        return self._elements("tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """As of the tensor."""
        return self._elements("numpy").numpy(force=force)

    def data_ptr(self) -> int:
        """Of the tensor's elements."""
        return self._elements("data_ptr").data_ptr()

    def _elements(self, operation: str) -> torch.Tensor:
        return self.memory.watcher.values(self, operation)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Probe):
            if is_view(func) or func is aten.view.dtype:
                views = func(without_memory(first), *args[1:], **kwargs)
                return tree_map_only(
                    torch.Tensor, lambda view: Probe.of(first.memory, geometry_of(view), view.dtype), views
                )
            if func in SHAPED:
                return made_like(first, func, args[1:], kwargs)
        elif func is aten.copy_.default and args[1].memory.watcher.copied(first, args[1]):
            return first
        probes = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Probe)]
        return probes[0].memory.watcher.compute(func, args, kwargs, probes)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor, in elements."""
    return tuple(prod(shape[axis + 1 :]) or 1 for axis in range(len(shape)))


@dataclass(frozen=True, eq=False, slots=True)
class Copy:
    """Elements of tensors, in the order in which they were copied into a tensor."""

    target: torch.Tensor
    """A view of memory that is no probe's."""
    source: Probe
    """Of the target's shape, or one that is broadcast to it."""

    @property
    def is_view(self) -> bool:
        """Whether the source is a view of one tensor as it is stored: its strides say which elements it has."""
        return self.source.memory.backing is None


class Tracer(Watcher):
    """Writes down which elements of tensors are copied into memory that is no probe's, in `copies`.

    An element of a tensor has a number: its position in the tensor, dense and row-major, beyond the numbers of all
    tensors before. Where operations rearrange elements, their numbers are rearranged in the same way. What needs values
    is an error.
    """

    def __init__(self) -> None:
        self.copies: list[Copy] = []
        """In the order in which they were made."""
        self._firsts: dict[str, int] = {}
        self._end = 0

    def probe(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: str | torch.device = "cpu") -> Probe:
        """A probe of a whole tensor.

        Args:
            name: not that of another probe of this tracer.
        """
        assert name not in self._firsts, name
        self._firsts[name] = self._end
        self._end += prod(shape)
        return Probe.of(Memory(name, tuple(shape), dtype, torch.device(device), self))

    def first(self, name: str) -> int:
        """The number of a tensor's first element; its others follow."""
        return self._firsts[name]

    def numbers(self, probe: Probe) -> torch.Tensor:
        """The number of each element of a probe, int64, on the CPU; `NOTHING` where it has a constant.

        Raises:
            PlanError: its elements are parts of those that are stored, or several of them.
        """
        memory, geometry = probe.memory, geometry_of(probe)
        if probe.dtype.itemsize != memory.dtype.itemsize:
            raise PlanError(
                f"is used as {probe.dtype}, stored as {memory.dtype}", tensor=memory.name, code="unsupported"
            )
        if memory.backing is not None:
            return memory.backing.as_strided(*geometry)
        size, strides, offset = geometry
        numbers = torch.full(size, self._firsts[memory.name] + offset)
        for axis, (length, stride) in enumerate(zip(size, strides, strict=True)):
            shape = [length if axis == other else 1 for other in range(len(size))]
            numbers += (torch.arange(length) * stride).view(shape)
        return numbers

    def copied(self, target: torch.Tensor, source: Probe) -> bool:
        memory = source.memory
        if memory.backing is None:
            # As it is now: the tensor may be written to later.
            kept = Probe.of(replace(memory), geometry_of(source), source.dtype)
        else:
            kept = Probe.of(
                self._moved(memory.name, self.numbers(source).clone(memory_format=torch.contiguous_format), source)
            )
        self.copies.append(Copy(target, kept))
        return True

    def values(self, probe: Probe, operation: str) -> torch.Tensor:
        raise PlanError(f"{operation} needs its values", tensor=probe.memory.name, code="unsupported")

    def compute(self, func: Any, args: Any, kwargs: Any, probes: Sequence[Probe]) -> Any:
        if written_by(func):
            return self._write(func, args, probes)
        if func in MOVES or func is aten.constant_pad_nd.default:
            numbers = _call(func, args, kwargs, lambda tensor: self._number_of(func, tensor))
        elif len(probes) == 1 and (torch.Tag.pointwise in func.tags or func is aten._to_copy.default):
            numbers = self.numbers(probes[0])
        else:
            self.values(probes[0], name_of(func))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("meta")}
        if func is aten.constant_pad_nd.default:
            numbers = numbers.masked_fill(func(torch.ones_like(self.numbers(args[0])), args[1], 0) == 0, NOTHING)
        shaped = _call(
            func,
            args,
            kwargs,
            lambda tensor: without_memory(tensor) if isinstance(tensor, Probe) else tensor.to("meta"),
        )
        if numbers.shape != shaped.shape:
            numbers = numbers.expand(shaped.shape)
        return Probe.of(self._moved(probes[0].memory.name, numbers.contiguous(), shaped, probes[0].device))

    def _number_of(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, Probe):
            return self.numbers(tensor)
        return tensor.cpu() if func in BY_INDEX else torch.full(tensor.shape, NOTHING)

    def _moved(
        self, name: str, numbers: torch.Tensor, like: torch.Tensor, device: torch.device | None = None
    ) -> Memory:
        return Memory(name, tuple(numbers.shape), like.dtype, device or like.device, self, numbers)

    def _write(self, func: Any, args: Any, probes: Sequence[Probe]) -> Any:
        """An operation that writes to its first argument: to the numbers of that."""
        target = args[0]
        if not isinstance(target, Probe):
            self.values(probes[0], name_of(func))
        memory = target.memory
        if memory.backing is None:
            memory.backing = self.numbers(Probe.of(memory))
        numbers = self.numbers(target)
        if func is aten.copy_.default:
            numbers.copy_(self._number_of(func, args[1]))
        elif name_of(func) in ("zero_", "fill_"):
            numbers.fill_(NOTHING)
        elif torch.Tag.pointwise not in func.tags or len(probes) > 1:
            self.values(target, name_of(func))
        return target


def _call(func: Any, args: Any, kwargs: Any, replacement: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Call an operation with what is made of each tensor."""
    return func(*tree_map_only(torch.Tensor, replacement, args), **tree_map_only(torch.Tensor, replacement, kwargs))
