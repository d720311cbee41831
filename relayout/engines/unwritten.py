"""Detect memory of a model that was never written: it is marked when it is allocated, and checked after the load.

An engine creates parameters without values, or with random ones, and its loader fills them. Code that sets a value on
purpose (ones, zeros, a table) overwrites the marks, and so does the loader, however it writes. A mark that remains
after the load therefore proves that these bytes were never written. That is an error, unless the engine may leave them
unwritten: then their values before marking are restored. So no mark outlives a load. Marks are few, as each touches a
page, and spread evenly: any contiguous 1/33 of a parameter has one (so has each part of fused layers), and half of an
expert has one. A parameter of at most 512 KiB is full of them. Needs torch at import time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import init
from torch.overrides import TorchFunctionMode

from relayout.engines.rank_weights import listed
from relayout.errors import PlanError
from relayout.loader.tensors import memory_of

_WITHOUT_VALUE = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}
_RANDOM = {torch.Tensor.uniform_, torch.Tensor.normal_, init.uniform_, init.normal_, init.kaiming_uniform_}
"""Functions that torch's own layers fill their parameters with."""
_SENTINEL = 0x7FA57FA57FA57FA5
"""A number that is, as a float of 2, 4 or 8 bytes, a NaN that no computation produces."""
_NUMBERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtypes that marks are compared in: the element width of floats, otherwise 8 bytes, since each byte may be a
weight."""
_MAX_FULL_NBYTES = 2**19
"""The most bytes of memory that is full of marks."""
_NUM_SENTINELS, _NUM_ENTRY_SENTINELS = 2**6, 4
"""Marks in larger memory: in all, and in each entry along the first of three dimensions (an expert) if that is more."""
_GOLDEN = (5**0.5 - 1) / 2
"""The golden section: `n` multiples of it, modulo 1, leave no gap that is larger than 1.9 / `n`."""


_is_inspecting: ContextVar[bool] = ContextVar("relayout_is_inspecting", default=False)


@contextmanager
def inspection() -> Iterator[None]:
    """Let this thread read or write memory within the block without loading weights; see `is_inspecting`."""
    before = _is_inspecting.set(True)
    try:
        yield
    finally:
        _is_inspecting.reset(before)


def is_inspecting() -> bool:
    """Return True if this thread is within `inspection`: its memory accesses are relayout's own."""
    return _is_inspecting.get()


class Sentinels(TorchFunctionMode):
    """Marks memory that gets no values, and parameters that get random ones, while a model is created in its block."""

    def __init__(self) -> None:
        super().__init__()
        self._replaced: dict[int, tuple[StorageWeakRef, torch.Tensor | None, torch.Tensor, int]] = {}
        """The memory, the positions of marks, the values replaced by them, and the unit in bytes, by the memory's
        number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _WITHOUT_VALUE or (func in _RANDOM and isinstance(result, torch.nn.Parameter)):
            self._write_sentinels(result)
        return result

    def _write_sentinels(self, tensor: torch.Tensor) -> None:
        # Only memory that one tensor has for itself: a view may share memory that has a value.
        if not _has_memory(tensor) or tensor.untyped_storage().nbytes() != tensor.nbytes:
            return
        memory = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        numbers, positions = _sentinel_positions(tensor)
        if positions is None:
            numbers = numbers[: tensor.nbytes // _unit(tensor) * _unit(tensor) // 2]  # A partial unit is not checked.
            self._replaced[memory.cdata] = memory, None, numbers.clone(), _unit(tensor)
            numbers.fill_(_SENTINEL >> 48)
        else:
            self._replaced[memory.cdata] = memory, positions, numbers[positions], 8
            numbers.index_fill_(0, positions, _SENTINEL)

    @inspection()
    def restore(self, model: torch.nn.Module) -> None:
        """Restore all unwritten memory to its values before marking: the load is over.

        Args:
            model: the model that was created; its parameters may read the memory in another dtype than it was created
                with.
        """
        units: dict[int, int] = {}
        for tensor in filter(_has_memory, (*model.parameters(), *model.buffers())):
            key = StorageWeakRef(tensor.untyped_storage()).cdata  # type: ignore[no-untyped-call]
            units[key] = max(units.get(key, 2), _unit(tensor))
        for key, (memory, positions, before, unit) in self._replaced.items():
            # None: it was freed.
            storage = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)
            if storage is not None:
                _restore(storage, positions, before, max(unit, units.get(key, 2)))
        self._replaced.clear()


def check_written(model: torch.nn.Module, path: str, engine: str, exempt: Collection[str] = ()) -> None:
    """Check that all memory of a model that was created within `Sentinels` has been written.

    Args:
        path: of the checkpoint, for messages.
        exempt: names of modules, or of parameters.
    """
    missing = [name for name in unwritten(model) if set(exempt).isdisjoint((name, *name.split(".")))]
    if missing:
        what = f"nothing was loaded into {listed(missing)}: the checkpoint lacks what {engine}'s"
        raise PlanError(f"{what} {type(model).__name__} needs, or was converted without it", path=path, code="missing")


@inspection()
def unwritten(model: torch.nn.Module) -> list[str]:
    """Return the names of the parameters, and of the buffers that a checkpoint can have, where a mark is left."""
    samples: dict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in {id(tensor): (name, tensor) for name, tensor in _stored(model)}.values():
        if _has_memory(tensor):
            sample = _sample(tensor)
            samples.setdefault((sample.device, sample.dtype), []).append((name, sample))
    names = []
    for (_, dtype), of_dtype in samples.items():
        is_sentinel = torch.cat([sample for _, sample in of_dtype]) == _SENTINEL >> (64 - 8 * dtype.itemsize)
        if is_sentinel.any():  # The only wait for a device.
            parts = is_sentinel.split_with_sizes([len(sample) for _, sample in of_dtype])
            names += [name for (name, _), part in zip(of_dtype, parts, strict=True) if part.any()]
    return names


def _stored(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def _restore(storage: torch.UntypedStorage, positions: torch.Tensor | None, before: torch.Tensor, unit: int) -> None:
    itemsize = before.itemsize
    if storage.nbytes() < itemsize * len(before):  # It was freed, or made smaller.
        return
    numbers = torch.empty(0, dtype=before.dtype, device=before.device)
    numbers.set_(storage, 0, (storage.nbytes() // itemsize,), (1,))
    if positions is not None:
        now = numbers[positions]
        numbers.index_copy_(0, positions, torch.where(now == _SENTINEL, before, now))
        return
    count = 2 * len(before) // unit * unit // 2
    now, before = (part[:count].view(_NUMBERS[unit]) for part in (numbers, before))
    now.copy_(torch.where(now == _SENTINEL >> (64 - 8 * unit), before, now))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values at the marked positions of its memory, as integers to compare with a mark."""
    numbers, positions = _sentinel_positions(tensor)
    if tensor.untyped_storage().nbytes() != tensor.nbytes:  # Marks outside the tensor are not its own.
        memory, base = memory_of(tensor), tensor.untyped_storage().data_ptr()
        start, end = memory.address - base, memory.end - base
        if positions is None:
            numbers = numbers[-(-start // 2) : end // 2]
        else:
            positions = positions[(positions * 8 >= start) & ((positions + 1) * 8 <= end)]
    sample = numbers if positions is None else numbers[positions].view(torch.int16)
    unit = _unit(tensor)
    return sample[: sample.numel() * 2 // unit * unit // 2].view(_NUMBERS[unit])


def _unit(tensor: torch.Tensor) -> int:
    """Return the number of bytes that are compared with a mark at once."""
    return tensor.itemsize if tensor.is_floating_point() and tensor.itemsize > 1 else 8


def _has_memory(tensor: torch.Tensor) -> bool:
    # Other tensor classes stand for memory that is not theirs.
    is_plain = isinstance(tensor, torch.nn.Parameter) or type(tensor) is torch.Tensor
    return is_plain and tensor.layout == torch.strided and not tensor.is_meta and tensor.nbytes > 0


def _sentinel_positions(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a tensor's whole storage, as integers, and the positions of marks; None: it is full of them.

    The integers have 8 bytes, or 2 if the memory is full of marks.
    """
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    # A parameter's shape may differ from its allocation's. The marks of both are prefixes of one sequence, so the marks
    # of the shorter prefix are found.
    num_sentinels = max(_NUM_SENTINELS, _NUM_ENTRY_SENTINELS * tensor.shape[0] if tensor.dim() > 2 else 0)
    is_full = nbytes <= max(_MAX_FULL_NBYTES, 8 * num_sentinels)
    itemsize = 2 if is_full else 8
    numbers = torch.empty(0, dtype=_NUMBERS[itemsize], device=tensor.device)
    numbers.set_(storage, 0, (nbytes // itemsize,), (1,))
    return numbers, None if is_full else _positions(num_sentinels, nbytes // 8, tensor.device)


@lru_cache(maxsize=64)  # Layers have the same sizes.
def _positions(num_sentinels: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the indices of marks among `count` numbers: multiples of the golden section, which spread evenly."""
    return torch.arange(num_sentinels, dtype=torch.float64).mul_(_GOLDEN).frac_().mul_(count).long().to(device)
