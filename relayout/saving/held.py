"""The tensors that a process gives to a save: what part of each it holds, and the bytes of that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from relayout.core.extents import Extent, Transfer
from relayout.core.slices import NOT_HELD, WHOLE, Slice
from relayout.core.strided import Bytes, copy_runs
from relayout.errors import PlanError
from relayout.format.safetensors import LENGTH_NBYTES
from relayout.loader.tensors import dtype_name, torch_dtype
from relayout.saving.shards import TensorHead

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensor:
    """What this process holds of a tensor."""

    head: TensorHead
    part: Slice
    """A box of it."""
    data: torch.Tensor
    """That box, on any device."""

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> HeldTensor:
        """What a plain tensor holds, or this process's shard of a DTensor.

        Raises:
            PlanError: it is no dense tensor, has a dtype that safetensors lacks, or is a DTensor with partial sums.
        """
        import torch

        if not isinstance(tensor, torch.Tensor):
            raise PlanError(f"a {type(tensor).__name__}, expected a tensor", tensor=name, code="unsupported")
        shape = tuple(tensor.shape)
        dtype = dtype_name(tensor.dtype)
        if dtype is None or dtype == "F4":
            raise PlanError(f"{tensor.dtype} cannot be saved", tensor=name, code="unsupported")
        is_distributed = hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")
        part, local = _shard_of(name, tensor) if is_distributed else (WHOLE, tensor.detach())
        if local.layout != torch.strided or local.device.type == "meta":
            what = f"a tensor of layout {local.layout} on device {local.device.type}, expected one with memory"
            raise PlanError(what, tensor=name, code="unsupported")
        return HeldTensor(TensorHead(name, dtype, shape), part, local)

    def on_host(self) -> HeldTensor:
        """A copy in host memory, pinned if it comes from a device."""
        import torch

        is_cpu = self.data.device.type == "cpu"
        copied = torch.empty(self.data.shape, dtype=self.data.dtype, pin_memory=not is_cpu)
        return HeldTensor(self.head, self.part, copied.copy_(self.data))

    def bytes_of(self, extent: Extent) -> Bytes:
        """Some of the box's bytes, in dense order. Those on another device are copied to the host, rounded to rows."""
        import torch

        data = self.data.reshape(1) if self.data.dim() == 0 else self.data
        while data.dim() > 1 and data.shape[0] == 1:
            data = data[0]
        row = prod(data.shape[1:]) * data.element_size()
        first, end = extent.offset // row, -(-extent.end // row)
        rows = data[first:end].to("cpu").resolve_conj().contiguous().view(torch.uint8).reshape(-1)
        low = extent.offset - first * row
        found: Bytes = rows.numpy()[low : low + extent.nbytes]
        return found

    def copy(self, part: Transfer, memory: memoryview | Bytes, target: int, stride: int) -> None:
        """Copy bytes of the box, given as a transfer from the whole tensor to it, to memory: runs `stride` apart."""
        local = self.bytes_of(Extent(part.target, part.target_end - part.target))
        copy_runs(local, memory, Transfer(0, target, part.nbytes, part.count, part.target_stride, stride))


def _shard_of(name: str, tensor: Any) -> tuple[Slice, torch.Tensor]:
    """The box of a DTensor that this process holds, and its elements.

    As PyTorch DCP does (2.13, `checkpoint/planner_helpers.py`, `_create_write_items_for_dtensor`).
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise PlanError(f"a DTensor with partial sums ({tensor.placements})", tensor=name, code="unsupported")
    if tensor.device_mesh.get_coordinate() is None:
        return NOT_HELD, tensor.detach().to_local()
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.detach().to_local()
    if tuple(local.shape) != tuple(sizes):
        what = f"a DTensor whose shard has shape {list(local.shape)}, expected {list(sizes)}: {tensor.placements}"
        raise PlanError(what, tensor=name, code="unsupported")
    cut = {
        axis: [(offset, size)]
        for axis, (offset, size, whole) in enumerate(zip(offsets, sizes, tensor.shape, strict=True))
        if size != whole
    }
    return Slice.of(cut), local


def in_stored_order(heads: Sequence[TensorHead], tensors: Sequence[int]) -> list[int]:
    """Tensors in the order in which the stock safetensors writes them: asked of it, with tensors of no bytes."""
    import torch
    from safetensors.torch import save

    by_name = {heads[t].name: t for t in tensors}
    blob = save({name: torch.empty(0, dtype=torch_dtype(name, heads[t].dtype)) for name, t in by_name.items()})
    length = int.from_bytes(blob[:LENGTH_NBYTES], "little")
    return [by_name[name] for name in json.loads(blob[LENGTH_NBYTES : LENGTH_NBYTES + length])]
