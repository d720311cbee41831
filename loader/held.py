"""The parts of plain or distributed tensors that a process holds, and their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from relayout.core.extents import Bytes, Extent, Transfer, align_down, align_up, copy_runs, split
from relayout.core.slices import NOT_HELD, WHOLE, Range, Slice, TensorHead, merged, positions
from relayout.errors import PlanError
from relayout.loader.tensors import bytes_of, dtype_name, torch_dtype, view_of, why_not_plain

if TYPE_CHECKING:
    import torch

_HASHED_NBYTES = 2**24
_COMPILED, _CHECKPOINTED = "_orig_mod", "_checkpoint_wrapped_module"
"""The attributes in which torch.compile and activation checkpointing keep the module that they wrap."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """The part of one tensor that this process holds."""

    head: TensorHead
    part: Slice
    """The part that this process holds: one or more ranges along each axis that is cut."""
    data: torch.Tensor
    """The elements of the part, on any device. They are cast to the dtype of `head` while they are read."""

    @staticmethod
    def of(name: str, tensor: torch.Tensor, floating: torch.dtype | None = None) -> HeldTensor:
        """Return the held part of a tensor: all of a plain tensor, this process's shard of a DTensor.

        Args:
            floating: the dtype to save floating-point tensors as. Default: their own.
        """
        _check_name(name)
        is_distributed = hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")
        part, local = _shard_of(name, tensor) if is_distributed else (WHOLE, tensor)
        if (why := why_not_plain(local)) is not None:
            raise PlanError(why, tensor=name, code="unsupported")
        dtype = dtype_name(floating if floating is not None and tensor.is_floating_point() else tensor.dtype)
        if dtype is None:
            raise PlanError(
                f"{tensor.dtype}, which safetensors does not have: cast it before", tensor=name, code="unsupported"
            )
        shape = tuple(tensor.shape)
        if "F4" in (dtype, dtype_name(tensor.dtype)):
            if dtype != dtype_name(tensor.dtype):
                what = f"cannot be cast from {tensor.dtype} to {floating}: save it without dtype"
                raise PlanError(what, tensor=name, code="unsupported")
            part, shape = _as_numbers(name, part, shape)
        return HeldTensor(TensorHead(name, dtype, shape), part, local.detach())

    @property
    def memory(self) -> tuple[object, ...]:
        """A key that is equal for tensors with the same bytes in the same memory (tied weights); see `view_of`."""
        return (view_of(self.data), self.head.dtype, self.head.shape, self.part)

    def on_host(self) -> HeldTensor:
        """Return a copy in host memory, pinned if it comes from a device."""
        import torch

        is_cpu = self.data.device.type == "cpu"
        copied = torch.empty(self.data.shape, dtype=self._dtype, pin_memory=not is_cpu)
        return HeldTensor(self.head, self.part, copied.copy_(self.data))

    def digest(self) -> bytes:
        """Return the XXH3-128 of the part's bytes in dense order, copying at most `_HASHED_NBYTES` at a time."""
        running = xxhash.xxh3_128()
        for piece in split(Extent(0, self.data.numel() * self._dtype.itemsize), _HASHED_NBYTES):
            running.update(self.bytes_of(piece).data)
        return running.digest()

    def bytes_of(self, extent: Extent) -> Bytes:
        """Return a range of the part's bytes, in dense order: a view of dense memory, else a copy on the host."""
        dense = self._dense()
        if dense is not None:
            return dense[extent.offset : extent.end]
        copied = np.empty(extent.nbytes, np.uint8)
        self.read(extent, copied)
        return copied

    def read(self, extent: Extent, memory: Bytes) -> None:
        """Copy a range of the part's bytes, in dense order, to memory on the host, and copy no other bytes."""
        import torch

        dense = self._dense()
        if dense is not None:
            memory[:] = dense[extent.offset : extent.end]
            return
        item, target = self._dtype.itemsize, torch.from_numpy(memory)
        low, high = align_up(extent.offset, item), align_down(extent.end, item)
        if low < high:
            inside = torch.from_numpy(memory[low - extent.offset : high - extent.offset]).view(self._dtype)
            _copy_elements(self.data, low // item, inside)
        for start, end in ((extent.offset, min(low, extent.end)), (max(low, high), extent.end)):
            if start < end:  # A part of one element.
                element = torch.empty(1, dtype=self._dtype)
                _copy_elements(self.data, start // item, element)
                part = element.view(torch.uint8)[start % item : start % item + end - start]
                target[start - extent.offset : end - extent.offset] = part

    @property
    def _dtype(self) -> torch.dtype:
        return torch_dtype(self.head.name, self.head.dtype)

    def _dense(self) -> Bytes | None:
        """Return the bytes as a view of host memory; None if they are not dense there."""
        data = self.data
        is_plain = data.device.type == "cpu" and data.dtype == self._dtype
        if not is_plain or not data.is_contiguous() or data.is_conj() or data.is_neg():
            return None
        found: Bytes = bytes_of(data).numpy()
        return found

    def copy(self, memory: Bytes, part: Transfer) -> None:
        """Copy the runs of a transfer from the part's bytes, in dense order, to memory on the host."""
        extent = Extent(part.source, part.source_end - part.source)
        if part.count == 1:
            self.read(extent, memory[part.target : part.target_end])
        else:
            copy_runs(self.bytes_of(extent), memory, part, -extent.offset)


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise PlanError(f"the name of a tensor is {name!r}, expected text", code="option")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise PlanError(f"the name of a tensor is {name!r}, which is not valid Unicode", code="option") from None


def _as_numbers(name: str, part: Slice, shape: tuple[int, ...]) -> tuple[Slice, tuple[int, ...]]:
    """Return the part and shape of an F4 tensor in 4-bit numbers, as in file headers; a torch element holds two."""
    if not shape:
        raise PlanError("F4 without a dim, expected an even number of elements", tensor=name, code="unsupported")
    last = len(shape) - 1
    axes = {
        axis: [(2 * start, 2 * length) for start, length in ranges] if axis == last else ranges
        for axis, ranges in part.by_axis or ()
    }
    return Slice.of(axes) if part.is_held else part, (*shape[:-1], 2 * shape[-1])


def _copy_elements(data: torch.Tensor, start: int, target: torch.Tensor) -> None:
    """Copy elements in dense order, from position `start` on, to one-dimensional memory on the host.

    Recurses where the range begins or ends inside an index of the first axis, so that no other elements are copied.
    """
    if data.dim() < 2:
        target.copy_(data.reshape(-1)[start : start + target.numel()])
        return
    row, end = prod(data.shape[1:]), start + target.numel()
    first, last = -(-start // row), end // row
    if first < last:
        target[first * row - start : last * row - start].view(last - first, *data.shape[1:]).copy_(data[first:last])
    for low, high in ((start, min(first * row, end)), (max(first, last) * row, end)):
        if low < high:
            _copy_elements(data[low // row], low % row, target[low - start : high - start])


def _shard_of(name: str, tensor: Any) -> tuple[Slice, torch.Tensor]:
    """Return the part of a DTensor that this process holds, and its elements."""
    local, coordinate = tensor.detach().to_local(), tensor.device_mesh.get_coordinate()
    if any(placement.is_partial() for placement in tensor.placements):
        raise PlanError(f"a DTensor with partial sums ({tensor.placements})", tensor=name, code="unsupported")
    order = getattr(tensor._spec, "shard_order", None)
    if order and not tensor._spec.is_default_device_order(order):
        raise PlanError(
            f"a DTensor that is sharded in a different order than its mesh dims: {order}",
            tensor=name,
            code="unsupported",
        )
    if coordinate is None:
        return NOT_HELD, local
    sizes = tuple(tensor.device_mesh.shape)
    part = part_of(name, tuple(tensor.shape), sizes, coordinate, tensor.placements)
    expected = part.shape(tuple(tensor.shape))
    if tuple(local.shape) != expected:
        what = f"a DTensor whose shard has shape {list(local.shape)}, expected {list(expected)}: {tensor.placements}"
        raise PlanError(what, tensor=name, code="unsupported")
    return part, local


def part_of(
    name: str, shape: tuple[int, ...], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> Slice:
    """Return the part of a DTensor that a process at a coordinate of the device mesh holds.

    The cuts are those of PyTorch 2.13 (`tensor/placement_types.py`, `_split_tensor`). PyTorch's
    `compute_local_shape_and_global_offset` creates an index for each element; this function does not.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    held: dict[int, tuple[Range, ...]] = {}
    for placement, count, index in zip(placements, mesh, coordinate, strict=True):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | _StridedShard):
            raise PlanError(f"a DTensor placed by {placement}", tensor=name, code="unsupported")
        axis = placement.dim
        ranges = held.get(axis, ((0, shape[axis]),))
        held_length = sum(length for _, length in ranges)
        pieces = []  # One for each piece that earlier placements cut the axis into.
        for start, length in _torch_pieces(held_length, int(getattr(placement, "split_factor", 1))):
            first, taken = _torch_pieces(length, count)[index]
            pieces += _taken(ranges, start + first, taken)
        held[axis] = merged(pieces)
    return Slice.of(held).canonical(shape)


def _torch_pieces(length: int, count: int) -> list[Range]:
    """Return the ranges of `torch.chunk`, followed by empty ones up to `count`."""
    size = -(-length // count)
    starts = [min(index * size, length) for index in range(count + 1)]
    return [(start, end - start) for start, end in pairwise(starts)]


def _taken(ranges: Sequence[Range], first: int, length: int) -> list[Range]:
    """Return the ranges of `length` elements from position `first` on, counted among all elements of the ranges."""
    found = []
    for start, size, position in positions(ranges):
        low, high = max(position, first), min(position + size, first + length)
        if low < high:
            found.append((start + low - position, high - low))
    return found


def unwrapped(model: Any) -> tuple[Any, Callable[[str], str]]:
    """Return the module inside DistributedDataParallel or torch.compile, and a function that strips its names.

    Modules inside the model may be wrapped, too, such as layers that are compiled one by one. From a name of the
    module's parameters, buffers or state, the function removes the parts that wrappers add, as
    `torch.distributed.checkpoint` does (PyTorch 2.13, `state_dict.py`, `_get_fqns`).
    """
    while inside := _wrapped_in(model):
        model = getattr(model, inside)
    modules = model.named_modules(remove_duplicate=False) if hasattr(model, "named_modules") else ()
    wrappers = [(path, inside) for path, module in modules if (inside := _wrapped_in(module))]
    # An inner wrapper comes before the outer one: at that point, the name still contains the outer wrapper's part.
    prefixes = [(f"{path}.{inside}.", f"{path}.") for path, inside in reversed(wrappers) if inside != _CHECKPOINTED]
    # State dicts have names without the checkpoint wrapper's part, parameters with it.
    prefixes = [(_not_checkpointed(prefix), _not_checkpointed(plain)) for prefix, plain in prefixes]

    def name_of(name: str) -> str:
        name = _not_checkpointed(name)
        for prefix, plain in prefixes:
            if name.startswith(prefix):
                name = plain + name[len(prefix) :]
        return name

    return model, name_of


def _wrapped_in(module: Any) -> str | None:
    """Return the attribute in which a wrapper stores the wrapped module; None if the module is not a wrapper."""
    from torch.nn import DataParallel
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    children = getattr(module, "_modules", ())
    return next((attribute for attribute in (_COMPILED, _CHECKPOINTED) if attribute in children), None)


def _not_checkpointed(name: str) -> str:
    return name.replace(f"{_CHECKPOINTED}.", "")
