"""The effect of torch's operations on the geometry of a tensor: size, strides and offset. Needs torch at import time.

Tensor subclasses without memory of their own use it to follow views: global tensors, which engines load, and probes,
which observe how engines load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_map_only

Geometry: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, strides and offset of a view, in elements of the memory that it is a view of."""

aten = torch.ops.aten

BY_INDEX = {aten.index.Tensor, aten.index_select.default}
"""Operations that select elements by other arguments, such as an engine's list of its experts."""

MOVES = BY_INDEX | {
    aten.cat.default,
    aten.clone.default,
    aten.flip.default,
    aten.repeat.default,
    aten.repeat_interleave.self_int,
    aten.roll.default,
    aten.stack.default,
    aten._unsafe_view.default,
}
"""Operations with results that consist only of elements of their arguments."""

SHAPED = {
    aten.empty_like.default,
    aten.full_like.default,
    aten.is_pinned.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.new_full.default,
    aten.new_ones.default,
    aten.new_zeros.default,
    aten.ones_like.default,
    aten.zeros_like.default,
}
"""Operations that use only shape, dtype and device."""


@cache
def is_view(func: Any) -> bool:
    """Return True if an operation returns views of its first argument, of the same dtype."""
    alias = func._schema.returns[0].alias_info if func._schema.returns else None
    return alias is not None and not alias.is_write and func is not aten.view.dtype


@cache
def written_by(func: Any) -> tuple[str, ...]:
    """Return the names of the arguments that an operation writes to."""
    arguments = func._schema.arguments
    return tuple(item.name for item in arguments if item.alias_info is not None and item.alias_info.is_write)


def name_of(func: Any) -> str:
    """Return the name of an operation, for messages."""
    return str(func._schema.name).removeprefix("aten::")


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Return the geometry of a view."""
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a dense tensor, in elements."""
    return tuple(prod(dim or 1 for dim in shape[axis + 1 :]) for axis in range(len(shape)))


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same dtype and geometry on the meta device.

    A view of it has the same geometry as the corresponding view of the given tensor.
    """
    return _meta(tensor.dtype).as_strided(*geometry_of(tensor))


def made_like(tensor: torch.Tensor, func: Any, rest: Any, kwargs: Any) -> Any:
    """Return the result of one of the operations `SHAPED`, on the tensor's device."""
    device = {} if func is aten.is_pinned.default else {"device": tensor.device}
    return func(without_memory(tensor), *rest, **device | kwargs)


def call_with(
    kind: type[torch.Tensor], replacement: Callable[[Any], torch.Tensor], func: Any, args: Any, kwargs: Any
) -> Any:
    """Call an operation, with each tensor of a kind among its arguments replaced by the result of `replacement`."""
    return func(*tree_map_only(kind, replacement, args), **tree_map_only(kind, replacement, kwargs))


@cache
def _meta(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="meta")
