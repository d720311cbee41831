"""Notes which elements of tensors reach the memory of a model that an engine's own weight loaders fill.

Needs torch at import time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch

from relayout.core.slices import NOT_HELD, WHOLE, Slice
from relayout.engines.global_tensor import geometry_of
from relayout.engines.probes import NOTHING, Probe, Tracer
from relayout.errors import PlanError
from relayout.observe.elements import Box, View, box_of, joined, slice_of


class Observer(Tracer):
    """Records which elements of each tensor are copied into a model. For one thread.

    A copy into memory that is not the model's is a PlanError: the elements cannot be followed from there.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model
        self._memory = set(_storages(model))
        self._boxes: defaultdict[str, set[Box]] = defaultdict(set)
        self._touched: set[str] = set()
        self._joined: set[str] = set()
        """Tensors that have been joined with others."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._known: dict[tuple[tuple[int, ...], View], Box | None] = {}
        self._slices: dict[tuple[tuple[int, ...], frozenset[Box]], Slice] = {}

    def probe(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: str | torch.device = "cpu") -> Probe:
        self._shapes[name] = tuple(shape)
        return super().probe(name, shape, dtype, device)

    def copied(self, target: torch.Tensor, source: Probe) -> bool:
        if _storage(target) not in self._memory:
            self._memory = set(_storages(self._model))  # Some loaders make parameters.
            if _storage(target) not in self._memory:
                raise PlanError("is copied into memory that is not the model's", tensor=source.memory.name)
        self._record(source)
        return True

    def compute(self, func: Any, args: Any, kwargs: Any, probes: Sequence[Probe]) -> Any:
        if len(probes) > 1:
            self._joined.update(probe.memory.name for probe in probes)
        return super().compute(func, args, kwargs, probes)

    def loaded(self, name: str) -> Slice:
        """What has been copied of a tensor. All, if only constants that have replaced its elements have been: the
        loader works on the tensor. No elements, if none has been copied of what it has been joined to: the loader wants
        to see the tensor. `NOT_HELD`: the loader has not used it."""
        if name not in self._boxes:
            empty = Slice.along(0, ()) if name in self._joined and self._shapes[name] else NOT_HELD
            return WHOLE if name in self._touched else empty
        key = self._shapes[name], frozenset(self._boxes[name])
        if key not in self._slices:
            self._slices[key] = slice_of(*key)
        return self._slices[key]

    def finish(self) -> None:
        """Record what has not been copied into the model, but put there."""
        for parameter in (*self._model.parameters(), *self._model.buffers()):
            for tensor in (parameter, parameter.data):
                if isinstance(tensor, Probe):
                    self._record(tensor)

    def _record(self, source: Probe) -> None:
        memory = source.memory
        self._touched.add(memory.name)
        if memory.backing is None and source.dtype.itemsize == memory.dtype.itemsize:
            key = memory.shape, geometry_of(source)
            if key not in self._known:
                self._known[key] = box_of(*key)
            if (box := self._known[key]) is not None:
                self._boxes[memory.name].add(box)
                return
        # By the numbers of elements, ascending, which may be of several tensors.
        numbers = torch.unique(self.numbers(source))
        numbers = numbers[numbers != NOTHING]
        while numbers.numel():
            ends = ((name, self.first(name) + prod(shape)) for name, shape in self._shapes.items())
            name, end = next((name, end) for name, end in ends if int(numbers[0]) < end)
            count = int(torch.searchsorted(numbers, end))
            self._boxes[name].add(_hull(numbers[:count] - self.first(name), self._shapes[name]))
            numbers = numbers[count:]


def _hull(numbers: torch.Tensor, shape: Sequence[int]) -> Box:
    """The smallest product of ranges that has the elements at these positions, dense and row-major."""
    box = []
    for axis, size in enumerate(shape):
        inner = prod(shape[axis + 1 :])
        places = torch.unique(torch.div(numbers, inner, rounding_mode="floor") % size)
        breaks = (torch.nonzero(places.diff() != 1).flatten() + 1).tolist()
        bounds = zip([0, *breaks], [*breaks, places.numel()], strict=True)
        box.append(joined((int(places[start]), end - start) for start, end in bounds))
    return tuple(box)


def _storages(model: torch.nn.Module) -> Iterator[int]:
    """The memory of parameters, buffers, and tensors that modules have beside them."""
    for module in model.modules():
        values = [*module._parameters.values(), *module._buffers.values()]
        for value in vars(module).values():
            values += (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
        yield from (
            _storage(value) for value in values if isinstance(value, torch.Tensor) and not isinstance(value, Probe)
        )


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
