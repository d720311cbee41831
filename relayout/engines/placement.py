"""Placement: slices are read straight into an engine's parameters, where its weight loader copies them as they are.

The engine's loader is given probes. Its copies of these into parameters are not made but noted; when it has seen all,
each slice that would fill one piece of contiguous memory is read right there. While copies are outstanding, an
operation on memory that they go to has to wait until they are made, so that the loader finds what it has copied. What
of a probe is more than a view or a copy gets the slice's own bytes, which are read at once.

One tensor of each kind, such as `model.layers.#.mlp.up_proj.weight`, shows first whether this pays: kinds that the
loader rearranges, converts, skips or collects are streamed, as without placement. Needs torch at import time.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from relayout.engines.global_tensor import SHAPED, GlobalTensor, aten, geometry_of, is_view, name_of
from relayout.engines.probes import Copy, Memory, Probe, Watcher, row_major
from relayout.loader.into import load_into
from relayout.loader.loading import Options, load_arena
from relayout.loader.placement import pack
from relayout.loader.sources.contents import Contents
from relayout.loader.stream import stream
from relayout.loader.tensors import torch_dtype, torch_shape

_NUMBER = re.compile(r"\d+")


@dataclass(slots=True)
class _Slice:
    """A slice that the engine has a probe of."""

    row: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    copies: list[Copy] = field(default_factory=list)
    """That are to be made."""


@dataclass(frozen=True, slots=True, order=True)
class _Piece:
    """Bytes of an engine's memory, from the first to the last of a view, and whose copy goes there."""

    start: int
    end: int
    name: str = field(compare=False)
    copy: Copy | None = field(compare=False)


class Placement(Watcher):
    """Gives an engine's weight loader the slices of one load; see the module.

    The engine loads in one thread; what it does with probes in others is done at once.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device | str) -> None:
        """Look at no bytes yet.

        Args:
            tensors: the engine's parameters and buffers; slices are placed in their memory only.
            device: on which slices are placed.
        """
        self._device = torch.device(device)
        self._storages = {
            one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors if one.device == self._device
        }
        """By address. They are kept alive, so that no other memory has one of these."""
        self._storages.pop(0, None)
        self._slices: dict[str, _Slice] = {}
        self._placed: set[str] = set()
        """Kinds of tensors of which the engine has made nothing but copies to contiguous memory."""
        self._pieces: list[_Piece] = []
        """Outstanding, sorted; no two overlap."""
        self._is_paused = False
        self._lock = threading.RLock()
        self._thread = threading.get_ident()
        self.nbytes = 0
        """That were read straight into parameters."""

    def tensors(self, contents: Contents, options: Options) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, slice) of all slices, as probes or as tensors; in the order of `contents`, kind after kind.

        Raises:
            FormatError, PlanError, OSError, MemoryError: as `relayout.iter_load`.
        """
        self._contents, self._options = contents, options
        kinds = [_NUMBER.sub("#", name) for name in contents.names]
        first: dict[str, int] = {}
        for row, kind in enumerate(kinds):
            first.setdefault(kind, row)
        self._placed = set(kinds)
        for row in first.values():
            yield self._probe(row)
        for kind, row in first.items():
            if _place(self._slices[contents.names[row]]) is None:
                self._placed.discard(kind)
        streamed = []
        for row, kind in enumerate(kinds):
            if kind not in self._placed:
                streamed.append(row)
            elif row != first[kind]:
                yield self._probe(row)
        with self._lock:
            self._settle(list(self._slices.values()), options)
        yield from self._streamed([row for row in streamed if row != first[kinds[row]]])

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the engine's weight loader runs: see what it does with its memory; at the end, make all copies."""
        with _Watching(self):
            yield
        self.settle()

    def settle(self) -> None:
        """Make all outstanding copies."""
        with self._lock:
            self._settle(list(self._slices.values()), self._quiet)

    def copied(self, target: torch.Tensor, source: Probe) -> bool:
        """See `Watcher.copied`: the copy is outstanding from now on, if it can be."""
        if not source.numel():
            return True
        is_ours = target.device == self._device and _address(target.untyped_storage()) in self._storages
        if not is_ours or source.memory.backing is not None or threading.get_ident() != self._thread:
            return False
        with self._lock:
            copy = Copy(target.detach(), source)
            piece = _piece(copy.target, source.memory.name, copy)
            for other in self._overlapping(piece):
                if other.copy is not None and _is_same(other.copy.target, copy.target):
                    self._slices[other.name].copies.remove(other.copy)
                    self._pieces.remove(other)
                else:
                    self._settle_early(other.name)
            insort(self._pieces, piece)
            self._slices[source.memory.name].copies.append(copy)
        return True

    def compute(self, func: Any, args: Any, kwargs: Any, found: Sequence[Probe]) -> Any:
        """See `Watcher.compute`: of the slices' own bytes."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, GlobalTensor | Probe):
                self.touch(leaf)
        operation = name_of(func)
        args, kwargs = tree_map_only(Probe, lambda one: self.values(one, operation), (args, kwargs))
        return func(*args, **kwargs)

    def values(self, probe: Probe, operation: str) -> torch.Tensor:
        """See `Watcher.values`.

        Raises:
            FormatError, PlanError, OSError, MemoryError: as `relayout.load`.
        """
        memory = probe.memory
        with self._lock:
            if memory.backing is None:
                self._placed.discard(_NUMBER.sub("#", memory.name))
                rows = self._contents.rows([self._slices[memory.name].row])
                with self._pause():
                    memory.backing = load_arena(pack(rows), self._quiet)[memory.name]
        return _as(memory.backing, probe)

    def touch(self, tensor: torch.Tensor) -> None:
        """Make the outstanding copies that go to a tensor's memory, before it is used."""
        if self._pieces and tensor.numel() and tensor.device == self._device and _address(tensor):
            with self._lock:
                for one in self._overlapping(_piece(tensor, "", None)):
                    self._settle_early(one.name)

    @property
    def is_idle(self) -> bool:
        """Whether nothing has to be seen: no copy is outstanding, or this itself is at work."""
        return self._is_paused or not self._pieces

    @property
    def _quiet(self) -> Options:
        return replace(self._options, progress=None)

    def _probe(self, row: int) -> tuple[str, torch.Tensor]:
        contents = self._contents
        name, dtype = contents.names[row], contents.dtypes[row]
        mine = _Slice(row, torch_shape(name, dtype, contents.shapes[row]), torch_dtype(name, dtype))
        self._slices[name] = mine
        return name, Probe.of(Memory(name, mine.shape, mine.dtype, self._device, self))

    def _streamed(self, rows: Sequence[int]) -> Iterator[tuple[str, torch.Tensor]]:
        if not rows:
            return
        tensors = stream(self._contents.rows(rows), self._options)
        while True:
            with self._pause():
                one = next(tensors, None)
            if one is None:
                return
            yield one

    def _overlapping(self, piece: _Piece) -> list[_Piece]:
        found = []
        at = bisect_left(self._pieces, piece.end, key=lambda one: one.start)
        while at and self._pieces[at - 1].end > piece.start:
            at -= 1
            found.append(self._pieces[at])
        return found

    def _settle_early(self, name: str) -> None:
        """Make the copies of a slice, because their target is used; its kind is better streamed."""
        self._placed.discard(_NUMBER.sub("#", name))
        self._settle([self._slices[name]], self._quiet)

    def _settle(self, slices: Sequence[_Slice], options: Options) -> None:
        """Make the outstanding copies of these slices."""
        names = self._contents.names if slices else ()
        outstanding = {names[one.row]: one for one in slices if one.copies}
        if not outstanding:
            return
        self._pieces = [one for one in self._pieces if one.name not in outstanding]
        places = {name: _place(one) for name, one in outstanding.items()}
        into = {name: place for name, place in places.items() if place is not None}
        straight = self._contents.rows(sorted(outstanding[name].row for name in into))
        others = self._contents.rows(sorted(one.row for name, one in outstanding.items() if name not in into))
        with self._pause():
            if into:
                load_into(straight, into, None, options)
                self.nbytes += sum(place.nbytes for place in into.values())
            for name, tensor in stream(others, self._quiet) if others.names else ():
                for copy in outstanding[name].copies:
                    copy.target.copy_(_as(tensor, copy.source))
        for one in outstanding.values():
            one.copies.clear()

    @contextmanager
    def _pause(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees all operations of a thread."""

    def __init__(self, placement: Placement) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._placement = placement

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not (self._placement.is_idle or is_view(func) or func in SHAPED):
            # The target of a copy of a probe is looked at where the copy is noted.
            is_noted = func is aten.copy_.default and isinstance(args[1], Probe)
            for leaf in () if is_noted else tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and not isinstance(leaf, GlobalTensor | Probe):
                    self._placement.touch(leaf)
        return func(*args, **kwargs)


def _as(tensor: torch.Tensor, probe: Probe) -> torch.Tensor:
    """The view of a slice that a probe of it is."""
    return tensor.view(-1).view(probe.dtype).as_strided(*geometry_of(probe))


def _address(memory: torch.Tensor | torch.UntypedStorage) -> int:
    try:
        return memory.data_ptr()
    except RuntimeError:  # Some kinds of tensors have no memory, and torch has no other test for them.
        return 0


def _piece(tensor: torch.Tensor, name: str, copy: Copy | None) -> _Piece:
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return _Piece(start, start + (last + 1) * tensor.itemsize, name, copy)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same bytes."""
    return (one.data_ptr(), one.dtype, one.shape, one.stride()) == (
        other.data_ptr(), other.dtype, other.shape, other.stride()
    )  # fmt: skip


def _place(one: _Slice) -> torch.Tensor | None:
    """Where the copies of a slice put all of its bytes in a row: a tensor of its dtype and shape, or None."""
    runs = []
    for copy in one.copies:
        start = _run(copy)
        if start is None:
            return None
        runs.append((start, copy.target.nbytes, copy.target.data_ptr()))
    runs.sort()
    nbytes = prod(one.shape) * one.dtype.itemsize
    expected = 0
    for start, length, address in runs:
        if start != expected or address - start != runs[0][2]:
            return None
        expected += length
    if not runs or expected != nbytes:
        return None
    target = one.copies[0].target
    storage = target.untyped_storage()
    first = runs[0][2] - storage.data_ptr()
    if first % one.dtype.itemsize or first + nbytes > storage.nbytes():
        return None
    made = torch.empty(0, dtype=one.dtype, device=target.device)
    return made.set_(storage, first // one.dtype.itemsize, one.shape, row_major(one.shape))


def _run(copy: Copy) -> int | None:
    """The first byte, in a slice, of a copy of contiguous bytes to contiguous memory, in the same order; or None."""
    target, source = copy.target, copy.source
    if target.dtype != source.dtype or target.shape != source.shape:
        return None
    step = 1
    axes = zip(source.stride(), target.stride(), source.shape, strict=True)
    for stride, other, length in sorted(axes):
        if length != 1:
            if not stride == other == step:
                return None
            step *= length
    return int(source.storage_offset()) * source.itemsize
