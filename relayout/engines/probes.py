"""Probes: tensors with a shape and no bytes, which show what an engine's weight loader does with a tensor.

Views of a probe are followed by torch's own strides. A copy of one into memory of the engine is told to a `Watcher`,
and everything else that is asked of it, too. Needs torch at import time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from relayout.engines.global_tensor import (
    SHAPED,
    Geometry,
    aten,
    geometry_of,
    is_view,
    made_like,
    row_major,
    without_memory,
)


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
        """The result of an operation that is more than a view; `probes` are those among its arguments."""

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
