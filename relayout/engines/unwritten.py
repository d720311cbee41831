"""Memory of a model that nobody has written: it is marked where it is allocated, and looked at after the load.

An engine makes parameters without values, or with random ones, and its loader fills them. What gives a value on purpose
(ones, zeros, a table) writes over the marks, and so does the loader, in whatever way. So a mark that is still there
after the load proves that nobody has written these bytes. Marks are few, as each touches a page, and spread evenly:
consecutive memory of a 60th of a parameter has one (so has each part of fused layers), and half of an expert has one.
A parameter of at most 512 KiB is full of them. Needs torch at import time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.nn import init
from torch.overrides import TorchFunctionMode

from relayout.engines.rank_weights import listed
from relayout.errors import PlanError

_WITHOUT_VALUE = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}
_RANDOM = {torch.Tensor.uniform_, torch.Tensor.normal_, init.uniform_, init.normal_, init.kaiming_uniform_}
"""What torch's own layers fill their parameters with."""
_MARK = bytes.fromhex("a57f") * 8
"""As a float of 2 or 4 bytes it is a NaN that no computation makes."""
_NUMBERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPARED_NBYTES = 8
"""Of a mark, together, where each of its bytes may be that of a weight: in all but floats."""
_MAX_FULL_NBYTES = 2**19
"""Of memory that is full of marks."""
_NUM_MARKS, _NUM_ENTRY_MARKS = 2**7, 4
"""In more memory: of all, and for each entry along the first of three dimensions (an expert) if these are more."""
_GOLDEN = (5**0.5 - 1) / 2
"""Of a whole, `number` multiples of it leave no gap that is larger than 1.9 / `number`."""


class Marks(TorchFunctionMode):
    """Around the making of a model: marks memory that gets no value, and parameters that get random ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _WITHOUT_VALUE or (func in _RANDOM and isinstance(made, torch.nn.Parameter)):
            _mark(made)
        return made


def check_written(model: torch.nn.Module, path: str, engine: str, but: Collection[str] = ()) -> None:
    """Check that all memory of a model that was made within `Marks` has been written.

    Args:
        path: of the checkpoint, for messages.
        but: names of modules that are exempt.

    Raises:
        PlanError: some was not.
    """
    left = [name for name in unwritten(model) if set(but).isdisjoint(name.split("."))]
    if left:
        what = f"nothing was loaded into {listed(left)}: the checkpoint lacks what {engine}'s"
        raise PlanError(f"{what} {type(model).__name__} needs, or was converted without it", path=path, code="missing")


def unwritten(model: torch.nn.Module) -> list[str]:
    """Names of the parameters, and of the buffers that a checkpoint can have, where a mark is left."""
    found: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in {id(one): (name, one) for name, one in _stored(model)}.values():
        if (flag := _is_marked(tensor)) is not None:
            found.setdefault(tensor.device, []).append((name, flag))
    names = []
    for flags in found.values():  # One wait for a device, not one for each tensor.
        are_marked = torch.stack([flag for _, flag in flags]).tolist()
        names += [name for (name, _), is_marked in zip(flags, are_marked, strict=True) if is_marked]
    return names


def _stored(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _mark(tensor: torch.Tensor) -> None:
    # Of memory that a tensor has for itself: a view may share it with what has a value.
    if _has_memory(tensor) and tensor.untyped_storage().nbytes() == tensor.nbytes:
        blocks = _blocks(tensor)
        blocks[_chosen(*_num_marks(tensor, blocks), blocks.device)] = _pattern(blocks.shape[1], blocks.device)


def _is_marked(tensor: torch.Tensor) -> torch.Tensor | None:
    """Whether a mark is left in a tensor, as a tensor of one element; None: it has no memory that could be marked."""
    if not _has_memory(tensor):
        return None
    blocks = _blocks(tensor)
    chosen, length = _chosen(*_num_marks(tensor, blocks), blocks.device), blocks.shape[1]
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        last = sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))
        start, end = (at * tensor.itemsize for at in (tensor.storage_offset(), tensor.storage_offset() + last + 1))
        chosen = chosen[(chosen * length >= start) & ((chosen + 1) * length <= end)]
    unit = min(length, tensor.itemsize if tensor.is_floating_point() and tensor.itemsize > 1 else _COMPARED_NBYTES)
    compared, number = length // unit * unit, _NUMBERS[unit]
    left = blocks[chosen][:, :compared].reshape(-1).view(number).view(-1, compared // unit)
    return (left == _pattern(length, blocks.device)[:compared].view(number)).any()


def _has_memory(tensor: torch.Tensor) -> bool:
    # Other classes of tensors stand for memory that is not theirs.
    is_plain = isinstance(tensor, torch.nn.Parameter) or type(tensor) is torch.Tensor
    is_number = tensor.is_floating_point() and tensor.itemsize > 1
    least = 2 if is_number else _COMPARED_NBYTES
    return is_plain and tensor.layout == torch.strided and not tensor.is_meta and tensor.nbytes >= least


def _blocks(tensor: torch.Tensor) -> torch.Tensor:
    """The memory that a tensor is a view of, in rows of as many bytes as a mark has, or one row if it has fewer."""
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    length = min(len(_MARK), memory.numel() // 2 * 2)
    return memory[: memory.numel() // length * length].view(-1, length)


def _num_marks(tensor: torch.Tensor, blocks: torch.Tensor) -> tuple[int, int]:
    """Of how many blocks are marked, and of all."""
    # A parameter may have another shape than its memory was made with: of two numbers, the marks of the less are found.
    num_entries = tensor.shape[0] if tensor.dim() > 2 else 0
    is_full = blocks.numel() <= _MAX_FULL_NBYTES
    return len(blocks) if is_full else min(len(blocks), max(_NUM_MARKS, _NUM_ENTRY_MARKS * num_entries)), len(blocks)


@lru_cache(maxsize=64)  # Layers have the same sizes.
def _chosen(number: int, count: int, device: torch.device) -> torch.Tensor:
    """Numbers of the blocks that are marked: multiples of the golden section, which are near to each other nowhere."""
    if number == count:
        return torch.arange(count, device=device)
    return torch.arange(number, dtype=torch.float64).mul_(_GOLDEN).frac_().mul_(count).long().to(device)


@lru_cache(maxsize=64)
def _pattern(length: int, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(_MARK[:length]), dtype=torch.uint8).to(device)
