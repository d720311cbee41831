"""Makes torch tensors that are views of an arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from relayout.dtypes import BITS
from relayout.errors import PlanError
from relayout.loader.arena import HostArena

if TYPE_CHECKING:
    import torch

_TORCH_NAMES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
"""As the stock safetensors package maps them; torch has no 6-bit types."""


def arena_tensor(arena: HostArena) -> torch.Tensor:
    """The arena as one uint8 tensor, which keeps the memory alive."""
    import torch

    return torch.frombuffer(arena.memory, dtype=torch.uint8, offset=arena.start, count=max(arena.nbytes, 1))


def check_device(device: str | torch.device) -> None:
    """Refuse a device that cannot be used.

    Raises:
        PlanError: torch says why.
    """
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise PlanError(f"device {str(device)!r}: {str(error).splitlines()[0]}") from None


def is_cpu(device: str | torch.device) -> bool:
    """Whether tensors of this device lie in host memory."""
    import torch

    return torch.device(device).type == "cpu"


def make_views(
    base: torch.Tensor,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    offsets: Sequence[int],
) -> dict[str, torch.Tensor]:
    """Tensors at byte `offsets` (multiples of 16) of the arena, dense and row-major.

    Raises:
        PlanError: torch has no such dtype.
    """
    import torch

    whole = base[: base.numel() // 16 * 16]
    typed: dict[str, torch.Tensor] = {}
    views = {}
    for name, dtype, shape, offset in zip(names, dtypes, shapes, offsets, strict=True):
        parent = typed.get(dtype)
        if parent is None:
            torch_dtype = getattr(torch, _TORCH_NAMES.get(dtype, ""), None)
            if torch_dtype is None:
                raise PlanError(f"tensor {name!r}: this torch ({torch.__version__}) has no type for {dtype}")
            parent = typed[dtype] = whole.view(torch_dtype)
        if dtype == "F4":  # Two elements in one of torch's.
            if not shape or shape[-1] % 2:
                raise PlanError(f"tensor {name!r}: torch has no F4 tensor of shape {list(shape)}: its last axis is odd")
            shape = (*shape[:-1], shape[-1] // 2)
        # as_strided on a typed view costs a third of slicing and viewing for each tensor.
        start = offset // max(1, BITS[dtype] // 8)
        views[name] = parent.as_strided(shape, _row_major(shape), start if 0 not in shape else 0)
    return views


def _row_major(shape: tuple[int, ...]) -> list[int]:
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * max(1, shape[axis])
    return strides
