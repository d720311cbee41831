"""The global tensor: it has the whole tensor's shape and holds one rank's slice of it.

An engine's weight loaders receive whole tensors and cut out the part that their rank needs. A global tensor can be cut
in the same way. Each view (narrow, index, chunk, transpose, reshape ...) within the slice is a plain view of the slice:
nothing is copied. An operation that needs other elements is computed from the whole tensor, which is then read from the
files of all ranks. That is correct but slow, so it is counted and a warning is issued. Needs torch at import time.
"""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from math import prod
from typing import Any

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
from relayout.core.slices import Range, merged, positions
from relayout.errors import PlanError


class Usage:
    """Records how a load's global tensors are used. Any number of threads may use it at once."""

    def __init__(self, *, strict: bool = False, is_expected: bool = False) -> None:
        self.strict = strict
        """True if reading elements outside the slices is an error."""
        self.is_expected = is_expected
        """True if such reads are expected: the tensors hold no slice."""
        self.used: set[str] = set()
        """Names of the tensors that were used in any way."""
        self.whole: set[str] = set()
        """Names of the tensors that were read whole."""
        self.count = 0
        """Number of reads of tensors or parts of tensors."""
        self.nbytes = 0
        """Bytes of these reads."""
        self.lock = threading.RLock()

    def note(self, name: str, operation: str, nbytes: int) -> None:
        """Count a read of a tensor; warn of the first unexpected one. Raise PlanError if `strict`."""
        what = f"{operation} needs elements that this rank's slice does not hold"
        if self.strict:
            raise PlanError(what, tensor=name, code="unsupported")
        if not self.count and not self.is_expected:
            warnings.warn(f"tensor {name!r}: {what}: they are read from all ranks' files, which is slow", stacklevel=2)
        self.count += 1
        self.nbytes += nbytes


class _Partial(ABC):
    """Memory with the layout of a whole tensor that holds some of its elements."""

    def __init__(
        self,
        local: torch.Tensor,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        read: Callable[[str], torch.Tensor],
        usage: Usage,
    ) -> None:
        """Create the memory: `local` holds the available elements; `read` reads all, for the given operation."""
        self.local = local
        self.geometry: Geometry = (shape, strides, 0)
        self._read = read
        self.usage = usage
        self._whole: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.geometry[0]

    @abstractmethod
    def held(self, size: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor | None:
        """Return a view, if all of its elements are available; None otherwise."""

    @abstractmethod
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the whole tensor, with arbitrary values where none are available, and a CPU mask of available ones."""

    @abstractmethod
    def _renew(self, whole: torch.Tensor) -> None:
        """Copy the available elements, which may have changed, to the whole tensor."""

    def whole(self, operation: str) -> torch.Tensor:
        """Return all elements, read once, in memory of their own."""
        with self.usage.lock:
            if self._whole is None:
                self._whole = self._read(operation)
            self._renew(self._whole)
            return self._whole

    def plain(self, operation: str, geometry: Geometry) -> torch.Tensor:
        """Return a view with all of its elements."""
        return self.whole(operation).as_strided(*geometry)


class _Slice(_Partial):
    """A dense row-major tensor that holds one rank's slice."""

    def __init__(
        self,
        name: str,
        local: torch.Tensor,
        shape: tuple[int, ...],
        axis: int,
        ranges: Sequence[Range],
        read: Callable[[str], torch.Tensor],
        usage: Usage,
        read_part: Callable[[str, int, Range], torch.Tensor] | None = None,
    ) -> None:
        """Create the slice. `read_part` reads a range along an axis; None: only the whole tensor can be read."""
        super().__init__(local, shape, row_major(shape), read, usage)
        self.name = name
        self.axis = axis
        self.ranges = ranges
        self._read_part = read_part

    def held(self, size: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor | None:
        """Return a view, if all of its elements are available; None otherwise.

        An element's address is `outer * run + within`, where a run is the block of elements below one index of the axes
        before the cut axis. Steps along the outer axes are whole runs; all other steps must stay within a range of the
        slice.
        """
        if 0 in size:
            return self.local.new_empty(size)
        inner = prod(self.shape[self.axis + 1 :])
        run, local_run = self.shape[self.axis] * inner, self.local.shape[self.axis] * inner
        outer, lowest = divmod(offset, run)
        highest = _highest(size, strides, lowest, run)
        local_strides = [
            stride if length > 1 and stride % run else stride // run * local_run
            for length, stride in zip(size, strides, strict=True)
        ]
        for start, length, at in positions(self.ranges):
            if start * inner <= lowest and highest < (start + length) * inner:
                first = self.local.storage_offset() + outer * local_run + lowest + (at - start) * inner
                return self.local.as_strided(size, local_strides, first)
        return None

    def plain(self, operation: str, geometry: Geometry) -> torch.Tensor:
        """Read only the range of an axis that covers a view, unless it overlaps the slice, which may have changed."""
        if 0 in self.shape:
            return super().plain(operation, geometry)
        axis, (start, length) = self._least(geometry)
        is_apart = not any(begin < start + length and start < begin + count for begin, count in self.ranges)
        with self.usage.lock:
            is_read = self._whole is not None
        if self._read_part is None or is_read or not is_apart or length >= self.shape[axis]:
            return super().plain(operation, geometry)
        part = self._read_part(operation, axis, (start, length))
        view = _Slice(self.name, part, self.shape, axis, [(start, length)], self._read, self.usage).held(*geometry)
        assert view is not None
        return view

    def _least(self, geometry: Geometry) -> tuple[int, Range]:
        """Return the range of the cut axis that covers a view; if the slice is empty, the smallest of any axis."""
        axes = [self.axis] if self.ranges else range(len(self.shape))
        found = {axis: self._covered(geometry, axis) for axis in axes}
        axis = min(found, key=lambda axis: found[axis][1] / self.shape[axis])
        return axis, found[axis]

    def _covered(self, geometry: Geometry, axis: int) -> Range:
        """Return the range of an axis that a view lies in; the whole axis, if the view extends into its next run."""
        size, strides, offset = geometry
        inner = prod(self.shape[axis + 1 :])
        run = self.shape[axis] * inner
        lowest = offset % run
        highest = _highest(size, strides, lowest, run)
        return (0, self.shape[axis]) if highest >= run else (lowest // inner, highest // inner + 1 - lowest // inner)

    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        filled = self.local.new_zeros(self.shape)
        self._renew(filled)
        mask = torch.zeros(self.shape, dtype=torch.bool)
        for start, length in self.ranges:
            mask.narrow(self.axis, start, length).fill_(True)
        return filled, mask

    def alike(self, function: Callable[[torch.Tensor], torch.Tensor], order: Sequence[int]) -> _Slice | None:
        """Return the slice of an elementwise function's result on the whole tensor, after a permutation of its axes."""
        local = function(self.local.permute(tuple(order)))
        shape = tuple(self.shape[axis] for axis in order)
        axis = list(order).index(self.axis)
        if local.shape != (*shape[:axis], self.local.shape[self.axis], *shape[axis + 1 :]) or not local.is_contiguous():
            return None
        read = lambda operation: function(self.whole(operation).permute(tuple(order)))  # noqa: E731
        return _Slice(self.name, local, shape, axis, self.ranges, read, self.usage)

    def viewed(self, dtype: torch.dtype) -> _Slice | None:
        """View the memory as elements of another dtype; None if a cut would lie within a new element."""
        old, new, last = self.local.itemsize, dtype.itemsize, len(self.shape) - 1
        is_cut = self.axis == last
        if any(count * old % new for count in (self.shape[-1], *chain(*(self.ranges if is_cut else ())))):
            return None
        shape = (*self.shape[:-1], self.shape[-1] * old // new)
        ranges = [(start * old // new, length * old // new) for start, length in self.ranges] if is_cut else self.ranges
        read = lambda operation: self.whole(operation).view(dtype)  # noqa: E731
        return _Slice(self.name, self.local.view(dtype), shape, self.axis, ranges, read, self.usage)

    def _renew(self, whole: torch.Tensor) -> None:
        for start, length, at in positions(self.ranges):
            whole.narrow(self.axis, start, length).copy_(self.local.narrow(self.axis, at, length))


def _highest(size: Sequence[int], strides: Sequence[int], lowest: int, run: int) -> int:
    """Return a view's highest position in a run; its steps along outer axes are whole runs."""
    return lowest + sum((length - 1) * stride for length, stride in zip(size, strides, strict=True) if stride % run)


class _Rearranged(_Partial):
    """The result of an operation that only moves elements of global tensors; a mask marks the available elements."""

    def __init__(
        self, moved: torch.Tensor, mask: torch.Tensor, read: Callable[[str], torch.Tensor], usage: Usage
    ) -> None:
        super().__init__(moved, tuple(moved.shape), moved.stride(), read, usage)
        self._mask = mask
        """The mask, on the CPU, so that reading it waits for no device."""

    def held(self, size: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor | None:
        is_held = bool(self._mask.as_strided(size, strides, offset).all())
        return self.local.as_strided(size, strides, offset) if is_held else None

    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.local, self._mask

    def _renew(self, whole: torch.Tensor) -> None:
        whole.copy_(torch.where(self._mask.to(whole.device), self.local, whole))


class GlobalTensor(torch.Tensor):
    """A tensor of the whole shape that holds one rank's slice; see the module.

    A view is a plain tensor as soon as the slice holds all of it; its strides are those of the slice. It is private to
    the process and can be written to; a global tensor cannot. Threads may share global tensors as they share tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _memory: _Partial
    _is_base: bool
    """True if this tensor covers the whole memory in its original layout."""

    @staticmethod
    def of(
        name: str,
        local: torch.Tensor,
        shape: Sequence[int],
        axis: int,
        ranges: Sequence[Range],
        read: Callable[[Any], torch.Tensor],
        usage: Usage,
    ) -> torch.Tensor:
        """Return a global tensor; `local` itself, if it is the whole tensor.

        Args:
            name: for messages.
            local: the slice, contiguous.
            shape: of the whole tensor.
            axis: the cut axis.
            ranges: the slice's (start, length) ranges along `axis`, in its order.
            read: reads the part of the whole tensor that an index selects, if it is needed: all, or a range along an
                axis.
            usage: shared by the tensors of a load.
        """
        shape = tuple(shape)
        expected = (*shape[:axis], sum(length for _, length in ranges), *shape[axis + 1 :])
        if local.shape != expected or not local.is_contiguous():
            what = f"slice has shape {list(local.shape)}, expected {list(expected)}, dense"
            raise PlanError(what, tensor=name)
        joined = merged(ranges)
        if len(joined) == 1 and joined[0][1] == shape[axis]:
            return local

        def read_some(operation: str, size: tuple[int, ...], index: Any) -> torch.Tensor:
            with usage.lock:
                usage.note(name, operation, prod(size) * local.itemsize)
            found = read(index).to(local.device)
            if found.shape != size or found.dtype != local.dtype:
                raise PlanError(f"read as {list(found.shape)} {found.dtype}, expected {list(size)}", tensor=name)
            return found.contiguous()

        def read_whole(operation: str) -> torch.Tensor:
            usage.whole.add(name)
            return read_some(operation, shape, ...)

        def read_part(operation: str, along: int, part: Range) -> torch.Tensor:
            start, length = part
            index = (*(slice(None),) * along, slice(start, start + length))
            return read_some(operation, (*shape[:along], length, *shape[along + 1 :]), index)

        return GlobalTensor._of(_Slice(name, local, shape, axis, joined, read_whole, usage, read_part))

    @staticmethod
    def _of(memory: _Partial, geometry: Geometry | None = None) -> GlobalTensor:
        """Return a view of memory; all of it without a geometry."""
        size, strides, offset = geometry or memory.geometry
        local = memory.local
        self: GlobalTensor = torch.Tensor._make_wrapper_subclass(
            GlobalTensor, size, strides=strides, storage_offset=offset, dtype=local.dtype, device=local.device
        )
        self._memory = memory
        self._is_base = geometry is None
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        memory, what = self._memory, "rearranged"
        if isinstance(memory, _Slice):
            what = f"{memory.name!r}, axis {memory.axis}: {list(memory.ranges)}"
        return f"GlobalTensor({what}, {list(self.shape)} of {list(memory.shape)}, {self.dtype})"

    def narrow(self, dim: int, start: Any, length: Any) -> torch.Tensor:
        """Implement `torch.narrow` without torch's dispatcher: weight loaders call this first."""
        memory = self._memory
        if self._is_base and type(memory) is _Slice and memory.axis in (dim, dim + self.ndim) and type(start) is int:
            memory.usage.used.add(memory.name)
            for begin, count, at in positions(memory.ranges):
                if begin <= start and start + length <= begin + count:
                    return memory.local.narrow(dim, at + start - begin, length)
        return torch.Tensor.narrow(self, dim, start, length)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Implement indexing; slices, which lazily reading loaders use, bypass torch's dispatcher."""
        memory = self._memory
        if self._is_base and type(memory) is _Slice:
            keys = index if type(index) is tuple else (index,)
            axis = memory.axis
            if axis < len(keys) <= len(memory.shape) and all(type(key) is slice for key in keys):
                start, stop, step = keys[axis].indices(memory.shape[axis])
                if step == 1 and start <= stop:
                    part = self.narrow(axis, start, stop - start)
                    return torch.Tensor.__getitem__(part, (*keys[:axis], slice(None), *keys[axis + 1 :]))
        return torch.Tensor.__getitem__(self, index)

    def unsqueeze(self, dim: int) -> torch.Tensor:
        """Implement `torch.unsqueeze` without torch's dispatcher: loaders of experts call it for each expert."""
        return self._seen(self._geometrically(torch.Tensor.unsqueeze, dim))

    def unbind(self, dim: int = 0) -> tuple[torch.Tensor, ...]:
        """Implement `torch.unbind`; see `unsqueeze`."""
        return tuple(map(self._seen, self._geometrically(torch.Tensor.unbind, dim)))

    def _geometrically(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return a function's result on a tensor of this geometry, without being seen by torch's dispatch modes."""
        self._note_use()
        unseen = torch._C._DisableTorchDispatch()
        try:
            return function(without_memory(self), *args)
        finally:
            del unseen

    def tolist(self) -> Any:
        """Return the elements of the whole tensor, as lists."""
        return self._plain("tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return a copy of the whole tensor as an array: writes to it do not change this tensor's memory."""
        return self._plain("numpy").clone().numpy(force=force)

    def data_ptr(self) -> int:
        """Raise PlanError: no memory holds all of the tensor."""
        raise PlanError(f"{self!r}: has no address: its memory is not contiguous")

    def _plain(self, operation: str) -> torch.Tensor:
        """Return this view of the whole tensor, as an ordinary tensor."""
        return self._memory.plain(operation, geometry_of(self))

    def _order(self) -> list[int] | None:
        """Return the order in which this view has the axes of the whole memory; None if it is not such a view."""
        (size, strides, offset), (whole_size, whole_strides, _) = geometry_of(self), self._memory.geometry
        base, mine = list(zip(whole_size, whole_strides, strict=True)), list(zip(size, strides, strict=True))
        if offset or sorted(base) != sorted(mine):
            return None
        order: list[int] = []
        for axis in mine:
            order.append(next(i for i, other in enumerate(base) if other == axis and i not in order))
        return order

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, GlobalTensor):
            first._note_use()
            if is_view(func):
                views = func(without_memory(first), *args[1:], **kwargs)
                return first._seen(views) if isinstance(views, torch.Tensor) else type(views)(map(first._seen, views))
            if func in SHAPED:
                return made_like(first, func, args[1:], kwargs)
            if func is aten.view.dtype and first._is_base and isinstance(first._memory, _Slice):
                viewed = first._memory.viewed(*args[1:])
                if viewed is not None:
                    return GlobalTensor._of(viewed)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GlobalTensor)]
        for tensor in tensors:
            tensor._note_use()
        operation = name_of(func)
        _check_written(func, args, kwargs)
        done: torch.Tensor | None = None
        if len(tensors) == 1 and tensors[0] is first:
            done = _elementwise(func, first, args[1:], kwargs)
        if done is None and func in MOVES:
            done = _move(func, args, kwargs, tensors[0]._memory.usage)
        if done is not None:
            return done
        return call_with(GlobalTensor, lambda tensor: tensor._plain(operation), func, args, kwargs)

    def _note_use(self) -> None:
        if isinstance(self._memory, _Slice):
            self._memory.usage.used.add(self._memory.name)

    def _seen(self, view: torch.Tensor) -> torch.Tensor:
        """Return a meta tensor's view as a view of the memory: a plain one, if all of its elements are available."""
        geometry = geometry_of(view)
        held = self._memory.held(*geometry)
        if held is not None:
            return held
        return GlobalTensor._of(self._memory, None if geometry == self._memory.geometry else geometry)


def _check_written(func: Any, args: Any, kwargs: Any) -> None:
    """Check that an operation writes to no global tensor: elements of a slice must be written through plain views."""
    if names := written_by(func):
        values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        for target in tree_leaves([values.get(name) for name in names]):
            if isinstance(target, GlobalTensor):
                what = f"{name_of(func)} writes to elements that this rank's slice does not hold"
                raise PlanError(f"{target!r}: {what}", code="unsupported")


def _elementwise(func: Any, tensor: GlobalTensor, rest: Any, kwargs: Any) -> GlobalTensor | None:
    """Return an elementwise operation's result on a whole slice, computed on the slice; None: not possible."""
    memory, order = tensor._memory, tensor._order()
    others = [leaf for leaf in tree_leaves((rest, kwargs)) if isinstance(leaf, torch.Tensor)]
    pointwise = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
    if not isinstance(memory, _Slice) or order is None or any(other.ndim for other in others):
        return None
    if not pointwise and func not in (aten.clone.default, aten._to_copy.default):
        return None
    # Unless it has to be contiguous, the result has the strides of its operand.
    is_dense = kwargs.get("memory_format") is torch.contiguous_format
    done = memory.alike(lambda whole: func(whole, *rest, **kwargs), order if is_dense else range(len(order)))
    if done is None:
        return None
    return GlobalTensor._of(done, None if is_dense or tensor._is_base else geometry_of(tensor))


def _move(func: Any, args: Any, kwargs: Any, usage: Usage) -> torch.Tensor | None:
    """Carry out an operation that moves elements unchanged, on the elements and on the mask of available ones."""

    def mask(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, GlobalTensor):
            return parts[id(tensor)][1]
        return tensor.cpu() if func in BY_INDEX else torch.ones_like(tensor, dtype=torch.bool, device="cpu")

    parts = {
        id(leaf): [part.as_strided(*geometry_of(leaf)) for part in leaf._memory.parts()]
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, GlobalTensor)
    }
    moved = call_with(GlobalTensor, lambda tensor: parts[id(tensor)][0], func, args, kwargs)
    masks = func(*tree_map_only(torch.Tensor, mask, args), **kwargs)
    if moved.stride() != masks.stride():
        return None

    def read(operation: str) -> torch.Tensor:
        whole: torch.Tensor = call_with(GlobalTensor, lambda tensor: tensor._plain(operation), func, args, kwargs)
        if whole.stride() == moved.stride():
            return whole
        return whole.new_empty_strided(moved.shape, moved.stride()).copy_(whole)  # Only a part was read, elsewhere.

    memory = _Rearranged(moved, masks, read, usage)
    held = memory.held(*memory.geometry)
    return GlobalTensor._of(memory) if held is None else held
