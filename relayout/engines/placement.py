"""Placement: slices are read straight into an engine's parameters, where its weight loader copies them as they are.

The engine's loader is given probes. Its copies of these into parameters are not made but noted; when it has seen all,
each slice that would fill one piece of contiguous memory is read right there. While copies are outstanding, an
operation on memory that they go to has to wait until they are made, so that the loader finds what it has copied. What
of a probe is more than a view or a copy gets the slice's own bytes, which are read at once.

The first tensor of each kind, such as `model.layers.#.mlp.up_proj.weight`, shows whether this pays: the others of kinds
that the loader rearranges, converts, skips or collects are streamed, as without placement. All come in the order in
which they would come without it, so that of two that go to one place the same stays. Needs torch at import time.
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
from relayout.loader.pack import pack
from relayout.loader.sources.columns import TensorColumns
from relayout.loader.stream import stream
from relayout.loader.tensors import torch_dtype, torch_shape
from relayout.progress import Progress, reporting

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
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage()
            for tensor in tensors
            if tensor.device == self._device
        }
        """By address. They are kept alive, so that no other memory has one of these."""
        self._storages.pop(0, None)
        self._slices: dict[str, _Slice] = {}
        self._others: set[str] = set()
        """Kinds of tensors of which the engine has made more, or less, than copies to contiguous memory."""
        self._pieces: list[_Piece] = []
        """Outstanding, sorted; no two overlap."""
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
        kinds = [_kind(name) for name in contents.names]
        first: dict[str, str] = {}
        seen: set[str] = set()
        """Kinds of which the engine has got the first tensor, and has asked for the second."""
        streams: dict[str, Iterator[tuple[str, torch.Tensor]]] = {}
        done = 0
        with reporting(options.progress, "loading", sum(contents.sizes())) as report:
            for row, (name, kind) in enumerate(zip(contents.names, kinds, strict=True)):
                if kind not in first:
                    first[kind] = name
                elif kind not in seen:
                    seen.add(kind)
                    if _place(self._slices[first[kind]]) is None:
                        self._others.add(kind)
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
                if report is not None:
                    report(done)
                yield name, tensor
                del tensor
            progress = None if report is None else lambda more, total: report(done + more)
            self._settle(list(self._slices.values()), progress)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While the engine's weight loader runs: see what it does with its memory; at the end, make all copies."""
        with _Watching(self):
            yield
        self.settle()

    def settle(self) -> None:
        """Make all outstanding copies."""
        self._settle(list(self._slices.values()))

    def copied(self, target: torch.Tensor, source: Probe) -> bool:
        # The copy is outstanding from now on, if it can be.
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
                self._others.add(_kind(memory.name))
                rows = self._contents.rows([self._slices[memory.name].row])
                with self._pause():
                    memory.backing = load_arena(pack(rows), self._options)[memory.name]
        return _as(memory.backing, probe)

    def touch(self, arguments: Iterable[Any]) -> None:
        """Make the outstanding copies that go to the memory of tensors, before these are used."""
        for tensor in arguments:
            if not isinstance(tensor, torch.Tensor) or isinstance(tensor, GlobalTensor | Probe):
                continue
            if self._pieces and tensor.numel() and tensor.device == self._device and _address(tensor):
                with self._lock:
                    for piece in self._overlapping(_piece(tensor, "", None)):
                        self._settle_early(piece.name)

    @property
    def is_idle(self) -> bool:
        """Whether nothing has to be seen: no copy is outstanding, or this itself is at work."""
        return self._is_paused or not self._pieces

    def _probe(self, row: int) -> Probe:
        contents = self._contents
        name, dtype = contents.names[row], contents.dtypes[row]
        mine = _Slice(row, torch_shape(name, dtype, contents.shapes[row]), torch_dtype(name, dtype))
        self._slices[name] = mine
        return Probe.of(Memory(name, mine.shape, mine.dtype, self._device, self))

    def _overlapping(self, piece: _Piece) -> list[_Piece]:
        pieces = []
        at = bisect_left(self._pieces, piece.end, key=lambda other: other.start)
        while at and self._pieces[at - 1].end > piece.start:
            at -= 1
            pieces.append(self._pieces[at])
        return pieces

    def _settle_early(self, name: str) -> None:
        """Make the copies of a slice, because their target is used; its kind is better streamed."""
        self._others.add(_kind(name))
        self._settle([self._slices[name]])

    def _settle(self, slices: Sequence[_Slice], progress: Progress = None) -> None:
        """Make the outstanding copies of these slices."""
        with self._lock, self._pause():
            outstanding = {self._contents.names[part.row]: part for part in slices if part.copies}
            if not outstanding:
                return
            places = {name: _place(part) for name, part in outstanding.items()}
            into = {name: place for name, place in places.items() if place is not None}
            if into:
                straight = self._contents.rows(sorted(outstanding[name].row for name in into))
                load_into(straight, into, None, replace(self._options, progress=progress))
                self.nbytes += sum(place.nbytes for place in into.values())
            rows = sorted(part.row for name, part in outstanding.items() if name not in into)
            for name, tensor in stream(self._contents.rows(rows), self._options) if rows else ():
                for copy in outstanding[name].copies:
                    copy.target.copy_(_as(tensor, copy.source))
            self._pieces = [piece for piece in self._pieces if piece.name not in outstanding]
            for part in outstanding.values():
                part.copies.clear()

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

    def __init__(self, placement: Placement) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._placement = placement

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        uses_memory = func not in SHAPED and not is_view(func)
        # The target of a copy of a probe is looked at where the copy is noted.
        is_noted = func is aten.copy_.default and isinstance(args[1], Probe)
        if uses_memory and not is_noted and not self._placement.is_idle:
            self._placement.touch(tree_leaves((args, kwargs)))
        return func(*args, **kwargs or {})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not: nothing is compiled here, and to skip that for each operation would take longer than all else."""
        return False


def _kind(name: str) -> str:
    return _NUMBER.sub("#", name)


def _as(tensor: torch.Tensor, probe: Probe) -> torch.Tensor:
    """The view of a slice that a probe of it is."""
    size, strides, offset = geometry_of(probe)
    elements = tensor.view(-1).view(probe.dtype)
    return elements.as_strided(size, strides, elements.storage_offset() + offset)


def _address(memory: torch.Tensor | torch.UntypedStorage) -> int:
    try:
        return memory.data_ptr()
    except RuntimeError:  # Some kinds of tensors have no memory, and torch has no other test for them.
        return 0


def _piece(tensor: torch.Tensor, name: str, copy: Copy | None) -> _Piece:
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return _Piece(start, start + (last + 1) * tensor.itemsize, name, copy)


def _is_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same bytes."""
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) == (
        other.data_ptr(), other.dtype, other.shape, other.stride()
    )  # fmt: skip


def _place(part: _Slice) -> torch.Tensor | None:
    """Where the copies of a slice put all of its bytes in a row: a tensor of its dtype and shape, or None."""
    runs = []
    for copy in part.copies:
        start = _run(copy)
        if start is None:
            return None
        runs.append((start, copy.target.nbytes, copy.target.data_ptr()))
    runs.sort()
    nbytes = prod(part.shape) * part.dtype.itemsize
    expected = 0
    for start, length, address in runs:
        if start != expected or address - start != runs[0][2]:
            return None
        expected += length
    if not runs or expected != nbytes:
        return None
    target = part.copies[0].target
    storage = target.untyped_storage()
    first = runs[0][2] - storage.data_ptr()
    if first % part.dtype.itemsize or first + nbytes > storage.nbytes():
        return None
    place = torch.empty(0, dtype=part.dtype, device=target.device)
    return place.set_(storage, first // part.dtype.itemsize, part.shape, row_major(part.shape))


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
