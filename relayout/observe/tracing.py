"""Notes which elements of tensors reach the memory of a model that an engine's own weight loaders fill.

Needs torch at import time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch

from relayout.core.slices import NOT_HELD, WHOLE, Slice
from relayout.engines.global_tensor import geometry_of
from relayout.engines.probes import NOTHING, Probe, Tracer
from relayout.errors import PlanError
from relayout.observe.taken import Box, View, box_of, joined, slice_of


class Observer(Tracer):
    """Tells of each tensor which elements have been copied into a model. For one thread."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self._model = model
        self._memory = _storages(model)
        self._boxes: defaultdict[str, set[Box]] = defaultdict(set)
        self._touched: set[str] = set()
        self._joined: set[str] = set()
        """Those that have been joined with others."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._known: dict[tuple[tuple[int, ...], View], Box | None] = {}
        self._slices: dict[tuple[tuple[int, ...], frozenset[Box]], Slice] = {}

    def probe(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: str | torch.device = "cpu") -> Probe:
        """See `Tracer.probe`."""
        self._shapes[name] = tuple(shape)
        return super().probe(name, shape, dtype, device)

    def copied(self, target: torch.Tensor, source: Probe) -> bool:
        """See `Watcher.copied`.

        Raises:
            PlanError: to memory that is not the model's, where the elements cannot be followed.
        """
        if _storage(target) not in self._memory:
            self._memory = _storages(self._model)  # Some loaders make parameters.
            if _storage(target) not in self._memory:
                raise PlanError("is copied into memory that is not the model's", tensor=source.memory.name)
        self._take(source)
        return True

    def compute(self, func: Any, args: Any, kwargs: Any, found: Sequence[Probe]) -> Any:
        """See `Tracer.compute`."""
        if len(found) > 1:
            self._joined.update(one.memory.name for one in found)
        return super().compute(func, args, kwargs, found)

    def taken(self, name: str) -> Slice:
        """What has been copied of a tensor. All, if only constants that have taken the place of its elements have been:
        the loader works on the tensor. No elements, if none has been copied of what it has been joined to: the loader
        wants to see the tensor. `NOT_HELD`: nothing has been asked of it."""
        if name not in self._boxes:
            empty = Slice.along(0, ()) if name in self._joined and self._shapes[name] else NOT_HELD
            return WHOLE if name in self._touched else empty
        key = self._shapes[name], frozenset(self._boxes[name])
        if key not in self._slices:
            self._slices[key] = slice_of(*key)
        return self._slices[key]

    def finish(self) -> None:
        """Take what has not been copied into the model, but put there."""
        for held in (*self._model.parameters(), *self._model.buffers()):
            for tensor in (held, held.data):
                if isinstance(tensor, Probe):
                    self._take(tensor)

    def _take(self, source: Probe) -> None:
        memory = source.memory
        self._touched.add(memory.name)
        if memory.backing is None and source.dtype.itemsize == memory.dtype.itemsize:
            key = memory.shape, geometry_of(source)
            if key not in self._known:
                self._known[key] = box_of(*key)
            if (box := self._known[key]) is not None:
                self._boxes[memory.name].add(box)
                return
        self._take_numbers(self.numbers(source))

    def _take_numbers(self, numbers: torch.Tensor) -> None:
        """Elements by their numbers, which may be of several tensors."""
        numbers = torch.unique(numbers)
        numbers = numbers[numbers != NOTHING]
        while numbers.numel():
            name = self._name_of(int(numbers[0]))
            shape, first = self._shapes[name], self.first(name)
            mine = int(torch.searchsorted(numbers, first + prod(shape)))
            self._boxes[name].add(_hull(numbers[:mine] - first, shape))
            numbers = numbers[mine:]

    def _name_of(self, number: int) -> str:
        return next(name for name, shape in self._shapes.items() if 0 <= number - self.first(name) < prod(shape))


def _hull(numbers: torch.Tensor, shape: Sequence[int]) -> Box:
    """The smallest product of ranges that has the elements at these positions, dense and row-major."""
    box = []
    for axis, size in enumerate(shape):
        inner = prod(shape[axis + 1 :])
        places = torch.unique(torch.div(numbers, inner, rounding_mode="floor") % size)
        breaks = torch.nonzero(places.diff() != 1).flatten() + 1
        firsts = [0, *breaks.tolist()]
        ends = [*breaks.tolist(), places.numel()]
        box.append(joined((int(places[i]), j - i) for i, j in zip(firsts, ends, strict=True)))
    return tuple(box)


def _storages(model: torch.nn.Module) -> set[int]:
    """The memory of parameters, buffers, and tensors that modules have beside them."""
    found: set[int] = set()
    for module in model.modules():
        found.update(
            map(_storage, _tensors([*module._parameters.values(), *module._buffers.values(), *vars(module).values()]))
        )
    return found


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor) and not isinstance(value, Probe):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            inside = value.values() if isinstance(value, dict) else value
            yield from (one for one in inside if isinstance(one, torch.Tensor) and not isinstance(one, Probe))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
