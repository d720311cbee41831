"""Records which elements of tensors an engine's own weight loaders copy into the memory of a model.

The loaders receive probes: tensors with a shape and no bytes. Views of a probe are tracked by torch's own strides; all
other operations on probes are passed to a `LoadRecorder`. Needs torch at import time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import nan, prod
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from relayout.core.aten import (
    BY_INDEX,
    MOVES,
    SHAPED,
    Geometry,
    aten,
    call_with,
    geometry_of,
    is_view,
    made_like,
    name_of,
    row_major,
    without_memory,
    written_by,
)
from relayout.core.slices import NOT_HELD, WHOLE, Range, Slice, joined
from relayout.errors import PlanError

Box = tuple[tuple[Range, ...], ...]
"""Ranges along each axis, ascending and not adjacent. The box contains the elements of their product."""


NOTHING = -1
"""Number for an element that comes from no tensor: a constant, such as padding."""
_CPU = torch.device("cpu")
_COPIES = frozenset({aten.copy_.default, aten.fill_.Tensor})
"""Operations that copy their second argument to the first one. `fill_` copies a tensor without axes."""
_PADDING = frozenset({aten.cat.default, aten.constant_pad_nd.default})
"""Operations that join elements with other elements or with padding."""
_MAX_RANGES = 2**16


class LoadRecorder:
    """Records which elements of each tensor are copied into a model. For use by one thread.

    Each element of each probed tensor has a unique number: its dense, row-major position in the tensor, plus the number
    of elements in all earlier tensors. Operations that rearrange elements rearrange their numbers in the same way.

    A copy into memory outside the model raises PlanError, because elements cannot be tracked from there. Operations
    that need values raise PlanError, too.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._memory = set(_storages(model))
        self._firsts: dict[str, int] = {}
        """Number of the first element of each tensor. The tensor's other elements have the numbers that follow."""
        self._end = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._boxes: defaultdict[str, set[Box]] = defaultdict(set)
        self._touched: set[str] = set()
        self._joined: set[str] = set()
        """Tensors that were joined with other tensors, and padded tensors if only their padding was copied."""

    def probe(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Probe:
        """Return a probe of a whole tensor; each name can be probed once."""
        assert name not in self._firsts, name
        self._firsts[name], self._shapes[name] = self._end, tuple(shape)
        self._end += prod(shape)
        return Probe.of(_ProbeMemory(name, tuple(shape), dtype, self))

    def loaded(self, name: str) -> Slice:
        """Return the slice of a tensor that was copied.

        - `WHOLE` also if its elements had been replaced by constants before the copy: the loader uses the tensor.
        - No elements if only padding, or only other tensors that it was joined with, were copied: the loader needs the
          tensor to exist.
        - `NOT_HELD` if the loader did not use the tensor.
        """
        if name in self._boxes:
            return slice_of(self._shapes[name], frozenset(self._boxes[name]))
        empty = Slice.along(0, ()) if name in self._joined and self._shapes[name] else NOT_HELD
        return WHOLE if name in self._touched else empty

    def finish(self) -> None:
        """Record probes that were assigned to parameters of the model instead of copied."""
        for parameter in (*self._model.parameters(), *self._model.buffers()):
            for tensor in (parameter, parameter.data):
                if isinstance(tensor, Probe):
                    self._record(tensor)

    def numbers(self, probe: Probe) -> torch.Tensor:
        """Return the number of each element of a probe, as int64; `NOTHING` for constants."""
        memory, (size, strides, offset) = probe.memory, geometry_of(probe)
        if probe.dtype.itemsize != memory.dtype.itemsize:
            what = f"is used as {probe.dtype}, stored as {memory.dtype}"
            raise PlanError(what, tensor=memory.name, code="unsupported")
        if memory.numbers is not None:
            return memory.numbers.as_strided(size, strides, offset)
        numbers = torch.full(size, self._firsts[memory.name] + offset)
        for axis, (length, stride) in enumerate(zip(size, strides, strict=True)):
            shape = [length if axis == other else 1 for other in range(len(size))]
            numbers += (torch.arange(length) * stride).view(shape)
        return numbers

    def copied(self, target: torch.Tensor, source: Probe) -> None:
        """Record a copy into a tensor that is not a probe."""
        if _storage(target) not in self._memory:
            self._memory = set(_storages(self._model))  # Some loaders create parameters.
            if _storage(target) not in self._memory:
                raise PlanError("is copied into memory that is not the model's", tensor=source.memory.name)
        self._record(source)

    def value(self, probe: Probe) -> float:
        """Record the use of a tensor's only element, and return a placeholder for its value: NaN, or 0 for integers.

        Raises:
            PlanError: the tensor has several elements. Which one is used could depend on values.
        """
        if prod(self._shapes[probe.memory.name]) != 1:
            _refuse(probe, "item")
        self._record(probe)
        return nan if probe.dtype.is_floating_point else 0

    def compute(self, func: Any, args: Any, kwargs: Any, probes: Sequence[Probe]) -> Any:
        """Return the result of an operation that is not a view; `probes` are the probes among its arguments."""
        if len(probes) > 1:
            self._joined.update(probe.memory.name for probe in probes)
        if written_by(func):
            return self._write(func, args, probes)
        if func is aten.mean.default:
            # Sarvam's loader subtracts the mean of a router's biases, so a rank needs all biases.
            self._record(probes[0])
            return torch.zeros((), dtype=probes[0].dtype)
        if func is aten.constant_pad_nd.default:
            numbers = func(self.numbers(args[0]), args[1], NOTHING)
        elif func in MOVES:
            numbers = call_with(torch.Tensor, lambda tensor: self._number_of(func, tensor), func, args, kwargs)
        elif len(probes) == 1 and (torch.Tag.pointwise in func.tags or func is aten._to_copy.default):
            numbers = self.numbers(probes[0])
        else:
            _refuse(probes[0], name_of(func))
        on_meta = {"device": torch.device("meta")} if "device" in kwargs else {}
        made = call_with(torch.Tensor, without_memory, func, args, {**kwargs, **on_meta})
        memory = probes[0].memory
        numbers = numbers.expand(made.shape).clone(memory_format=torch.contiguous_format)
        is_padded = func in _PADDING or memory.is_padded
        return Probe.of(_ProbeMemory(memory.name, tuple(made.shape), made.dtype, self, numbers, is_padded))

    def _write(self, func: Any, args: Any, probes: Sequence[Probe]) -> Any:
        """Perform an operation that writes to its first argument, by changing the numbers of its elements."""
        target = args[0]
        if not isinstance(target, Probe):
            _refuse(probes[0], name_of(func))
        memory = target.memory
        memory.is_padded = False
        if memory.numbers is None:
            memory.numbers = self.numbers(Probe.of(memory))
        numbers = self.numbers(target)
        if func is aten.copy_.default:
            numbers.copy_(self._number_of(func, args[1]))
        elif func is aten.fill_.Tensor:
            numbers.fill_(self._number_of(func, args[1]))
        elif name_of(func) in ("zero_", "fill_"):
            numbers.fill_(NOTHING)
        elif torch.Tag.pointwise not in func.tags or len(probes) > 1:
            _refuse(target, name_of(func))
        return target

    def _number_of(self, func: Any, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, Probe):
            return self.numbers(tensor)
        return tensor if func in BY_INDEX else torch.full(tensor.shape, NOTHING)

    def _record(self, source: Probe) -> None:
        memory = source.memory
        is_as_stored = memory.numbers is None and source.dtype.itemsize == memory.dtype.itemsize
        if is_as_stored and (box := box_of(memory.shape, geometry_of(source))) is not None:
            self._touched.add(memory.name)
            self._boxes[memory.name].add(box)
            return
        # By the numbers of elements, ascending; they may belong to several tensors.
        numbers = torch.unique(self.numbers(source))
        numbers = numbers[numbers != NOTHING]
        (self._touched if numbers.numel() or not memory.is_padded else self._joined).add(memory.name)
        while numbers.numel():
            ends = ((name, self._firsts[name] + prod(shape)) for name, shape in self._shapes.items())
            name, end = next((name, end) for name, end in ends if int(numbers[0]) < end)
            count = int(torch.searchsorted(numbers, end))
            self._boxes[name].add(_hull(numbers[:count] - self._firsts[name], self._shapes[name]))
            numbers = numbers[count:]


@dataclass(eq=False, slots=True)
class _ProbeMemory:
    """The notional memory of a probe and its views: dense and row-major."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    recorder: LoadRecorder
    numbers: torch.Tensor | None = None
    """Numbers of the elements. None: the elements are those of the stored tensor, in order."""
    is_padded: bool = False
    """True if constants were added next to the tensor's elements without replacing any of them."""


class Probe(torch.Tensor):
    """A tensor without bytes (see the module). Strides and offset count elements from the start of its memory."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    memory: _ProbeMemory

    @staticmethod
    def of(memory: _ProbeMemory, geometry: Geometry | None = None, dtype: torch.dtype | None = None) -> Probe:
        """Return a view of memory. Without a geometry: all of it, with the layout of a tensor in a checkpoint."""
        size, strides, offset = geometry or (memory.shape, row_major(memory.shape), 0)
        self: Probe = torch.Tensor._make_wrapper_subclass(
            Probe, size, strides=strides, storage_offset=offset, dtype=dtype or memory.dtype, device=_CPU
        )
        self.memory = memory
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Probe({self.memory.name!r}, {list(self.shape)} of {list(self.memory.shape)}, {self.dtype})"

    def narrow(self, dim: int, start: Any, length: Any) -> torch.Tensor:
        """Do the same as `torch.narrow`, without torch's dispatcher, because weight loaders call it most often."""
        size, strides, offset = geometry_of(self)
        if type(start) is int and 0 <= start <= start + length <= size[dim]:
            axis = dim % len(size)
            size = (*size[:axis], length, *size[axis + 1 :])
            return Probe.of(self.memory, (size, strides, offset + start * strides[axis]), self.dtype)
        return torch.Tensor.narrow(self, dim, start, length)

    def item(self) -> float:
        """Return a placeholder number (see `LoadRecorder.value`), which SGLang's `default_weight_loader` fills in.

        Raises:
            PlanError: the tensor has several elements.
        """
        return self.memory.recorder.value(self)

    def tolist(self) -> NoReturn:
        """Raise PlanError: a probe has no values."""
        _refuse(self, "tolist")

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raise PlanError: a probe has no values."""
        _refuse(self, "numpy")

    def data_ptr(self) -> NoReturn:
        """Raise PlanError: a probe has no memory."""
        _refuse(self, "data_ptr")

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
        elif first is not None and func in _COPIES and isinstance(args[1], Probe):
            args[1].memory.recorder.copied(first, args[1])
            return first
        probes = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Probe)]
        return probes[0].memory.recorder.compute(func, args, kwargs, probes)


@cache  # Layers have equal shapes and boxes.
def slice_of(shape: tuple[int, ...], boxes: frozenset[Box]) -> Slice:
    """Return the smallest product of ranges that contains all boxes, ascending along each axis.

    If boxes differ along several axes, the product may also contain elements outside all boxes.
    """
    if not boxes:
        return NOT_HELD
    axes = {axis: joined(part for box in boxes for part in box[axis]) for axis in range(len(shape))}
    empty = [axis for axis, ranges in axes.items() if not ranges and shape[axis]]
    return Slice.along(empty[0], ()) if empty else Slice.of(axes).canonical(shape)


@cache
def box_of(shape: tuple[int, ...], view: Geometry) -> Box | None:
    """Return the box of the elements in a view of a tensor; None if it is not a box, or takes too long to find."""
    size, strides, offset = view
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if 0 in size:  # No elements: empty along the axis that has the step of the empty dimension, or along the first.
        empty = steps.index(strides[size.index(0)]) if strides[size.index(0)] in steps else 0
        return tuple(() if axis == empty else ((0, length),) for axis, length in enumerate(shape))
    starts = [offset // step % length for step, length in zip(steps, shape, strict=True)]
    along: list[list[tuple[int, int]]] = [[] for _ in shape]
    pending = [(stride, length) for length, stride in zip(size, strides, strict=True) if length > 1 and stride]
    while pending:
        stride, length = pending.pop()
        axis = next((a for a, step in enumerate(steps) if step <= stride and shape[a] > 1), None)
        if axis is None or stride % steps[axis]:
            return None
        step = stride // steps[axis]
        if starts[axis] + (length - 1) * step >= shape[axis]:
            # The dimension continues along the previous axis.
            count, rest = divmod(shape[axis], step)
            if rest or length % count or starts[axis] >= step:
                return None
            pending.append((stride * count, length // count))
            length = count
        along[axis].append((step, length))
    box = []
    for start, dims, bound in zip(starts, along, shape, strict=True):
        ranges = _sums(start, dims)
        if ranges is None or sum(ranges[-1]) > bound:
            return None
        box.append(ranges)
    return tuple(box)


def _sums(start: int, dims: list[tuple[int, int]]) -> tuple[Range, ...] | None:
    """Return the numbers `start + sum(i * step)`, for each `i < length` of each (step, length), as ranges."""
    ranges: tuple[Range, ...] = ((start, 1),)
    for step, length in sorted(dims):
        if len(ranges) == 1 and step <= ranges[0][1]:
            ranges = ((ranges[0][0], ranges[0][1] + (length - 1) * step),)
        elif len(ranges) * length > _MAX_RANGES:
            return None
        else:
            ranges = joined((first + i * step, count) for first, count in ranges for i in range(length))
    return ranges


def _refuse(probe: Probe, operation: str) -> NoReturn:
    raise PlanError(f"{operation} needs its values", tensor=probe.memory.name, code="unsupported")


def _hull(numbers: torch.Tensor, shape: Sequence[int]) -> Box:
    """Return the smallest box that contains the elements at these dense, row-major positions."""
    box = []
    for axis, size in enumerate(shape):
        inner = prod(shape[axis + 1 :])
        places = torch.unique(torch.div(numbers, inner, rounding_mode="floor") % size)
        breaks = (torch.nonzero(places.diff() != 1).flatten() + 1).tolist()
        bounds = zip([0, *breaks], [*breaks, places.numel()], strict=True)
        box.append(joined((int(places[start]), end - start) for start, end in bounds))
    return tuple(box)


def _storages(model: torch.nn.Module) -> Iterator[int]:
    """Yield the storages of parameters, buffers, and other tensor attributes of modules."""
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
