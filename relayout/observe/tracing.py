"""Notes which elements of tensors reach the memory of a model that an engine's own weight loaders fill.

The loaders get probes: tensors with a shape and no bytes. Views of a probe are followed by torch's own strides; what
else is done with one is told to a `LoadRecorder`. Needs torch at import time.
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
"""The ranges of a product along each axis, ascending and not adjacent."""


NOTHING = -1
"""The number of an element that is of no tensor: a constant, such as padding."""
_CPU = torch.device("cpu")
_COPIES = frozenset({aten.copy_.default, aten.fill_.Tensor})
"""Operations that copy their second argument into the first one: `fill_` copies a tensor without axes."""
_PADDING = frozenset({aten.cat.default, aten.constant_pad_nd.default})
"""Operations that put elements beside others."""
_MAX_RANGES = 2**16


class LoadRecorder:
    """Records which elements of each tensor are copied into a model. For one thread.

    An element of a tensor has a number: its position in the tensor, dense and row-major, beyond the numbers of all
    tensors before. Where operations rearrange elements, their numbers are rearranged in the same way.

    A copy into memory that is not the model's is a PlanError, as the elements cannot be followed from there; so is what
    needs values.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._memory = set(_storages(model))
        self._firsts: dict[str, int] = {}
        """The number of each tensor's first element; its others follow."""
        self._end = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._boxes: defaultdict[str, set[Box]] = defaultdict(set)
        self._touched: set[str] = set()
        self._joined: set[str] = set()
        """Tensors that have been joined with others, or padded, and only the padding has been copied."""

    def probe(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Probe:
        """A probe of a whole tensor, of another name than those before."""
        assert name not in self._firsts, name
        self._firsts[name], self._shapes[name] = self._end, tuple(shape)
        self._end += prod(shape)
        return Probe.of(_ProbeMemory(name, tuple(shape), dtype, self))

    def loaded(self, name: str) -> Slice:
        """What has been copied of a tensor.

        All, if only constants that have replaced its elements have been: the loader works on the tensor. No elements,
        if none has been copied of what it has been joined to, or only padding: the loader wants to see the tensor.
        `NOT_HELD`: the loader has not used it.
        """
        if name in self._boxes:
            return slice_of(self._shapes[name], frozenset(self._boxes[name]))
        empty = Slice.along(0, ()) if name in self._joined and self._shapes[name] else NOT_HELD
        return WHOLE if name in self._touched else empty

    def finish(self) -> None:
        """Record what has not been copied into the model, but put there."""
        for parameter in (*self._model.parameters(), *self._model.buffers()):
            for tensor in (parameter, parameter.data):
                if isinstance(tensor, Probe):
                    self._record(tensor)

    def numbers(self, probe: Probe) -> torch.Tensor:
        """The number of each element of a probe, int64; `NOTHING` where it has a constant."""
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
        """Record a copy into a tensor that is no probe."""
        if _storage(target) not in self._memory:
            self._memory = set(_storages(self._model))  # Some loaders make parameters.
            if _storage(target) not in self._memory:
                raise PlanError("is copied into memory that is not the model's", tensor=source.memory.name)
        self._record(source)

    def value(self, probe: Probe) -> float:
        """Record that the model uses the only element of a tensor, and return what stands for its value: NaN, or 0.

        Raises:
            PlanError: the tensor has several elements; which one is used might depend on values.
        """
        if prod(self._shapes[probe.memory.name]) != 1:
            _refuse(probe, "item")
        self._record(probe)
        return nan if probe.dtype.is_floating_point else 0

    def compute(self, func: Any, args: Any, kwargs: Any, probes: Sequence[Probe]) -> Any:
        """The result of an operation that is more than a view; `probes` are those among its arguments."""
        if len(probes) > 1:
            self._joined.update(probe.memory.name for probe in probes)
        if written_by(func):
            return self._write(func, args, probes)
        if func is aten.mean.default:
            # Sarvam's loader subtracts the mean of a router's biases: a rank needs all of them.
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
        """An operation that writes to its first argument: to the numbers of that."""
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
        # By the numbers of elements, ascending, which may be of several tensors.
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
    """What a probe, and all views of it, would lie in: dense and row-major."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    recorder: LoadRecorder
    numbers: torch.Tensor | None = None
    """The numbers of the elements, if they are not those of the tensor as it is stored."""
    is_padded: bool = False
    """Whether constants in it stand beside the elements of the tensor, and not in their place."""


class Probe(torch.Tensor):
    """A tensor without bytes; see the module. Strides and offset are in its elements, from its memory's start."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    memory: _ProbeMemory

    @staticmethod
    def of(memory: _ProbeMemory, geometry: Geometry | None = None, dtype: torch.dtype | None = None) -> Probe:
        """A view of memory; all of it, as a tensor of a checkpoint lies, without a geometry."""
        size, strides, offset = geometry or (memory.shape, row_major(memory.shape), 0)
        self: Probe = torch.Tensor._make_wrapper_subclass(
            Probe, size, strides=strides, storage_offset=offset, dtype=dtype or memory.dtype, device=_CPU
        )
        self.memory = memory
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Probe({self.memory.name!r}, {list(self.shape)} of {list(self.memory.shape)}, {self.dtype})"

    def narrow(self, dim: int, start: Any, length: Any) -> torch.Tensor:
        """Do what `torch.narrow` does; weight loaders call this most, so it goes without torch's dispatcher."""
        size, strides, offset = geometry_of(self)
        if type(start) is int and 0 <= start <= start + length <= size[dim]:
            axis = dim % len(size)
            size = (*size[:axis], length, *size[axis + 1 :])
            return Probe.of(self.memory, (size, strides, offset + start * strides[axis]), self.dtype)
        return torch.Tensor.narrow(self, dim, start, length)

    def item(self) -> float:
        """Return a number, see `LoadRecorder.value`: SGLang's `default_weight_loader` fills parameters with it.

        Raises:
            PlanError: the tensor has several elements.
        """
        return self.memory.recorder.value(self)

    def tolist(self) -> NoReturn:
        """Refused. Raises: PlanError."""
        _refuse(self, "tolist")

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refused. Raises: PlanError."""
        _refuse(self, "numpy")

    def data_ptr(self) -> NoReturn:
        """Refused. Raises: PlanError."""
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


@cache  # Layers are alike.
def slice_of(shape: tuple[int, ...], boxes: frozenset[Box]) -> Slice:
    """The smallest product of ranges that contains all boxes, ascending along each axis.

    Boxes that differ along several axes may leave elements between them; these belong to it too.
    """
    if not boxes:
        return NOT_HELD
    axes = {axis: joined(part for box in boxes for part in box[axis]) for axis in range(len(shape))}
    empty = [axis for axis, ranges in axes.items() if not ranges and shape[axis]]
    return Slice.along(empty[0], ()) if empty else Slice.of(axes).canonical(shape)


@cache
def box_of(shape: tuple[int, ...], view: Geometry) -> Box | None:
    """The elements that a view of a tensor has; None if they are no product of ranges, or it takes long to tell."""
    size, strides, offset = view
    steps = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if 0 in size:  # No elements: along the axis whose step the empty dimension has, or else along the first.
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
            # It goes on along the axis before.
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
    """The numbers `start + sum(i * step)`, for `i < length` of each (step, length)."""
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
