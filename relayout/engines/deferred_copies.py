"""Slices are read straight into an engine's parameters, where its weight loader copies them as they are.

The loader is given probes. Its copies of these into parameters are not made but noted; when it has seen all,
each slice that would fill one piece of contiguous memory is read right there. While copies are outstanding, an
operation on memory that they go to has to wait until they are made, so that the loader finds what it has copied. What
of a probe is more than a view or a copy gets the slice's own bytes, which are read at once.

The first tensor of each kind, such as `model.layers.#.mlp.up_proj.weight`, shows whether this pays: the others of kinds
that the loader rearranges, converts, skips or collects are streamed, and copied at once. All come in the order of the
checkpoint, so that of two that go to one place the same stays. Needs torch at import time.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from relayout.engines.global_tensor import SHAPED, GlobalTensor, aten, geometry_of, is_view, name_of, row_major
from relayout.engines.probes import Memory, Probe, Watcher
from relayout.loader.disjoint import Strided
from relayout.loader.into import address_of, load_into, memory_of, view_of
from relayout.loader.loading import Options, load_arena
from relayout.loader.pack import pack
from relayout.loader.sources.columns import TensorColumns
from relayout.loader.stream import stream
from relayout.loader.tensors import torch_dtype, torch_shape
from relayout.progress import Progress, reporting

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, eq=False, slots=True)
class _Copy:
    """Of a view of a slice, to a tensor of its shape, or one that it is broadcast to."""

    target: torch.Tensor
    source: Probe
    memory: Strided
    """Of the target."""

    @property
    def name(self) -> str:
        """Of the tensor that it is a slice of."""
        return self.source.memory.name


class DeferredCopies(Watcher):
    """Gives an engine's weight loader the slices of one load; see the module.

    The engine loads in one thread; what it does with probes in others is done at once.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device | str) -> None:
        """Look at no bytes yet.

        Args:
            tensors: the engine's parameters and buffers; slices are read straight into their memory only.
            device: whose memory is meant.
        """
        self._device = torch.device(device)
        self._storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for tensor in tensors
            if tensor.device == self._device
        }
        """By address. They are kept alive, so that no other memory has one of these."""
        self._storages.pop(0, None)
        self._row_of: dict[str, int] = {}
        self._copies: defaultdict[str, list[_Copy]] = defaultdict(list)
        """Outstanding, of each slice, in their order."""
        self._by_address: list[_Copy] = []
        """The same, sorted; no two overlap."""
        self._others: set[str] = set()
        """Kinds of tensors of which the engine has made more, or less, than copies to contiguous memory."""
        self._is_paused = False
        self._lock = threading.RLock()
        self._thread = threading.get_ident()
        self.nbytes = 0
        """That were read straight into parameters."""

    def tensors(self, contents: TensorColumns, options: Options) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, slice) of all slices, as probes or as tensors, in the order of `contents`.

        Raises:
            FormatError, PlanError, OSError, MemoryError: as `relayout.iter_load`.
        """
        self._contents, self._options = contents, replace(options, progress=None)
        self._row_of = {name: row for row, name in enumerate(contents.names)}
        kinds = [_NUMBER.sub("#", name) for name in contents.names]
        first: dict[str, str] = {}
        """The first tensor of each kind; empty once it has been seen what the engine has done with it."""
        streams: dict[str, Iterator[tuple[str, torch.Tensor]]] = {}
        done = 0
        with reporting(options.progress, "loading", sum(contents.sizes())) as report:
            for row, (name, kind) in enumerate(zip(contents.names, kinds, strict=True)):
                if kind not in first:
                    first[kind] = name
                elif first[kind]:
                    if _place(self._copies[first[kind]]) is None:
                        self._others.add(kind)
                    first[kind] = ""
                if kind not in self._others:
                    yield name, self._probe(row)
                    continue
                if kind not in streams:  # Begin anew, with this kind.
                    rows = [later for later in range(row, len(kinds)) if kinds[later] in self._others]
                    streams = dict.fromkeys(self._others, stream(contents.rows(rows), self._options))
                with self._pause():
                    next_name, tensor = next(streams[kind])
                assert next_name == name
                done += tensor.nbytes
                report(done)
                yield name, tensor
                del tensor
            self._settle(self._row_of, lambda more, total: report(done + more))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the engine's weight loader runs: see what it does with its memory; at the end, make all copies."""
        with _Watching(self):
            yield
        self._settle(self._row_of)

    def copied(self, target: torch.Tensor, source: Probe) -> bool:
        # The copy is outstanding from now on, if it can be.
        if not source.numel():
            return True
        is_ours = target.device == self._device and address_of(target.untyped_storage()) in self._storages
        if not is_ours or source.memory.backing is not None or threading.get_ident() != self._thread:
            return False
        with self._lock:
            copy = _Copy(target.detach(), source, memory_of(target))
            for other in self._overlapping(copy.memory):
                if view_of(other.target) == view_of(copy.target):
                    self._copies[other.name].remove(other)
                    self._by_address.remove(other)
                else:
                    self._settle_early(other.name)
            insort(self._by_address, copy, key=lambda one: one.memory.address)
            self._copies[copy.name].append(copy)
        return True

    def compute(self, func: Any, args: Any, kwargs: Any, probes: Sequence[Probe]) -> Any:
        # Of the slices' own bytes.
        self.touch(tree_leaves((args, kwargs)))
        operation = name_of(func)
        args, kwargs = tree_map_only(Probe, lambda probe: self.values(probe, operation), (args, kwargs))
        return func(*args, **kwargs)

    def values(self, probe: Probe, operation: str) -> torch.Tensor:
        memory = probe.memory
        with self._lock:
            if memory.backing is None:
                self._others.add(_NUMBER.sub("#", memory.name))
                with self._pause():
                    slices = self._contents.rows([self._row_of[memory.name]])
                    memory.backing = load_arena(pack(slices), self._options)[memory.name]
        return _as(memory.backing, probe)

    def touch(self, arguments: Iterable[Any]) -> None:
        """Make the outstanding copies that go to the memory of tensors, before these are used."""
        for tensor in arguments:
            if not isinstance(tensor, torch.Tensor) or isinstance(tensor, GlobalTensor | Probe):
                continue
            if self._by_address and tensor.numel() and tensor.device == self._device and address_of(tensor):
                with self._lock:
                    for copy in self._overlapping(memory_of(tensor)):
                        self._settle_early(copy.name)

    @property
    def is_idle(self) -> bool:
        """Whether nothing has to be seen: no copy is outstanding, or this itself is at work."""
        return self._is_paused or not self._by_address

    def _probe(self, row: int) -> Probe:
        name, dtype = self._contents.names[row], self._contents.dtypes[row]
        shape = torch_shape(name, dtype, self._contents.shapes[row])
        return Probe.of(Memory(name, shape, torch_dtype(name, dtype), self._device, self))

    def _overlapping(self, memory: Strided) -> list[_Copy]:
        copies = []
        at = bisect_left(self._by_address, memory.end, key=lambda copy: copy.memory.address)
        while at and self._by_address[at - 1].memory.end > memory.address:
            at -= 1
            copies.append(self._by_address[at])
        return copies

    def _settle_early(self, name: str) -> None:
        """Make the copies of a slice, because their target is used; its kind is better streamed."""
        self._others.add(_NUMBER.sub("#", name))
        self._settle([name])

    def _settle(self, names: Iterable[str], progress: Progress = None) -> None:
        """Make the outstanding copies of these slices."""
        with self._lock, self._pause():
            outstanding = {name: copies for name in names if (copies := self._copies.get(name))}
            if not outstanding:
                return
            places = {name: _place(copies) for name, copies in outstanding.items()}
            into = {name: place for name, place in places.items() if place is not None}
            if into:
                straight = self._contents.rows(sorted(self._row_of[name] for name in into))
                load_into(straight, into, None, replace(self._options, progress=progress))
                self.nbytes += sum(place.nbytes for place in into.values())
            rows = sorted(self._row_of[name] for name in outstanding.keys() - into.keys())
            for name, tensor in stream(self._contents.rows(rows), self._options) if rows else ():
                for copy in outstanding[name]:
                    copy.target.copy_(_as(tensor, copy.source))
            # What has failed stays outstanding: if the engine passes over the error, it comes again.
            self._by_address = [copy for copy in self._by_address if copy.name not in outstanding]
            for name in outstanding:
                del self._copies[name]

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """What this thread does meanwhile is not the engine's."""
        before = self._is_paused
        self._is_paused = before or threading.get_ident() == self._thread
        try:
            yield
        finally:
            self._is_paused = before


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees all operations of a thread."""

    def __init__(self, copies: DeferredCopies) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copies = copies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        uses_memory = func not in SHAPED and not is_view(func)
        # The target of a copy of a probe is looked at where the copy is noted.
        is_noted = func is aten.copy_.default and isinstance(args[1], Probe)
        if uses_memory and not is_noted and not self._copies.is_idle:
            self._copies.touch(tree_leaves((args, kwargs)))
        return func(*args, **kwargs or {})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not: nothing is compiled here, and to skip that for each operation would take longer than all else."""
        return False


def _as(tensor: torch.Tensor, probe: Probe) -> torch.Tensor:
    """The view of a slice that a probe of it is."""
    size, strides, offset = geometry_of(probe)
    elements = tensor.view(-1).view(probe.dtype)
    return elements.as_strided(size, strides, elements.storage_offset() + offset)


def _place(copies: Sequence[_Copy]) -> torch.Tensor | None:
    """Where the copies of a slice put all of its bytes in a row: a tensor of its dtype and shape, or None."""
    runs = [run for copy in copies if (run := _run(copy)) is not None]
    if not copies or len(runs) < len(copies):
        return None
    memory, expected = copies[0].source.memory, 0
    runs.sort()
    for start, length, address in runs:
        if start != expected or address - start != runs[0][2]:
            return None
        expected += length
    nbytes = prod(memory.shape) * memory.dtype.itemsize
    storage = copies[0].target.untyped_storage()
    first, rest = divmod(runs[0][2] - storage.data_ptr(), memory.dtype.itemsize)
    if expected != nbytes or rest or first * memory.dtype.itemsize + nbytes > storage.nbytes():
        return None
    place = torch.empty(0, dtype=memory.dtype, device=memory.device)
    return place.set_(storage, first, memory.shape, row_major(memory.shape))


def _run(copy: _Copy) -> tuple[int, int, int] | None:
    """A copy of contiguous bytes to contiguous memory, in the same order: the first byte in the slice, how many, and
    their address; or None."""
    target, source = copy.target, copy.source
    if target.dtype != source.dtype or target.shape != source.shape:
        return None
    step = 1
    for stride, other, length in sorted(zip(source.stride(), target.stride(), source.shape, strict=True)):
        if length != 1:
            if not stride == other == step:
                return None
            step *= length
    return int(source.storage_offset()) * source.itemsize, target.nbytes, copy.memory.address
