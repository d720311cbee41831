"""Record which engine memory each slice of a checkpoint is copied to during a load.

**Problem.** An update of a live engine should change only the bytes that differ. That requires, for each slice, the
elements of engine memory that hold it. Engines copy, join, transpose, pack and quantize weights in model-specific code,
which relayout neither imports nor imitates.

**Idea.** `Recording` is a torch dispatch mode, active from the first slice to the end of the engine's post-processing.
It sees every torch operation of the thread. A copy of a view of a slice into a parameter is kept as a `View`
(`views.py`). Any other operation on a slice, or later on memory that holds one, leaves no view. Such a slice is marked
as lost. When it changes, the engine itself loads it again, together with all other slices of the same modules. No
knowledge of architectures is needed.

**Invariants.**
- A slice is in `SliceLocations.views` only if every use of it was a plain copy, no other write overlapped the copies,
  and its modules own no transformed storage.
- Every other slice that the engine used is in `SliceLocations.reloaded`, with the modules that received it, or with no
  module if these are not known.
- Storages are identified by number (`_cdata`). A weak reference is held, so that no other storage gets the same number.
- Operations of relayout itself run under `inspection()` and are not recorded.

**What can go wrong.** Code that bypasses torch's dispatcher writes unseen. Therefore `_seen_around` intercepts calls
that hand out addresses and calls of custom operators, and `_without_threads` runs work for thread pools in the recorded
thread. If another thread is started (`has_unseen`), no slice gets a view, and every update is a full reload. A missed
write would corrupt an update, so every doubtful case is recorded as lost. Writes after the load are the subject of
`LiveWeights.check` (`staging.py`). Needs torch at import time.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from threading import Thread, get_ident
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode
from torch.utils._pytree import tree_leaves

from relayout.core.aten import SHAPED, aten, geometry_of, is_view
from relayout.engines.global_tensor import GlobalTensor
from relayout.engines.unwritten import inspection, is_inspecting
from relayout.live.views import View, view_of

_UNREAD = SHAPED | {aten.view.dtype}
"""Operations that read no element, in addition to those that return views of the same dtype."""
_COPY = aten.copy_.default
_WIDTHS = (1, 2, 4, 8)
"""Element sizes in bytes that can be changed by XOR."""
_KINDS = (OpOverload, OpOverloadPacket)
_CALL = OpOverload.__call__
_ADDRESSES = ("data_ptr", "numpy", "__dlpack__", "__array__")
"""Methods that hand memory to code that torch's dispatcher does not see."""


@dataclass(frozen=True, slots=True)
class SliceLocations:
    """The locations of a rank's slices in an engine."""

    views: Mapping[str, tuple[View, ...]]
    """All copies of each slice that lies unchanged in parameters, and in no other form."""
    reloaded: Mapping[str, frozenset[str]]
    """The names of the modules that use each other slice given to the engine. Empty if the modules are not known."""
    memories: Mapping[int, StorageWeakRef]
    """The storage that views refer to, by its number."""
    fixed: frozenset[str] = frozenset()
    """The names of modules that the engine's own reload would skip, or load only in part."""
    modules: Mapping[str, ReferenceType[torch.nn.Module]] = field(default_factory=dict)
    """The modules at the end of the load, by name. An engine may later replace them by wrappers, as for LoRA."""

    def modules_of(self, changed: Collection[str]) -> frozenset[str] | None:
        """Return the modules to load again if these slices change; None: all modules.

        A slice that is given to the engine again reaches every module that uses it, so these modules are included.
        """
        modules: set[str] = set()
        wanted = [self.reloaded[name] for name in changed if name in self.reloaded]
        while wanted:
            if not all(wanted):
                return None
            modules.update(*wanted)
            wanted = [of for of in self.reloaded.values() if not modules.isdisjoint(of) and not modules.issuperset(of)]
        return frozenset(modules)

    def slices_of(self, modules: frozenset[str] | None) -> frozenset[str]:
        """Return the slices that the engine needs to load these modules again."""
        if modules is None:
            return frozenset((*self.views, *self.reloaded))
        return frozenset(name for name, of in self.reloaded.items() if not modules.isdisjoint(of))


class _Source(NamedTuple):
    """A slice and its location in one storage."""

    name: str
    start: int
    """Offset of its first byte."""
    end: int
    itemsize: int


class _Sources:
    """The slices in one storage, ascending. Kept as lists of numbers: objects would slow down garbage collection."""

    def __init__(self, ref: StorageWeakRef) -> None:
        self._ref = ref
        """Keeps the storage's number from being reused."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._names: list[str] = []
        self._itemsizes: list[int] = []

    def add(self, source: _Source) -> None:
        """Add a slice."""
        at = bisect_right(self._starts, source.start)
        self._names.insert(at, source.name)
        self._starts.insert(at, source.start)
        self._ends.insert(at, source.end)
        self._itemsizes.insert(at, source.itemsize)

    @property
    def names(self) -> Sequence[str]:
        """The names of the slices."""
        return self._names

    def within(self, tensor: torch.Tensor) -> list[_Source]:
        """Return the slices that share elements with a tensor in this storage."""
        first, end = (at * tensor.itemsize for at in _bounds(tensor))
        rows = range(max(bisect_right(self._starts, first) - 1, 0), bisect_left(self._starts, end))
        return [self._row(row) for row in rows if first < self._ends[row]]

    def _row(self, row: int) -> _Source:
        return _Source(self._names[row], self._starts[row], self._ends[row], self._itemsizes[row])


@dataclass(slots=True)
class _Memory:
    """A storage that was copied to."""

    ref: StorageWeakRef
    """Keeps the storage's number from being reused."""
    owners: set[str]
    """The names of the modules that have it, or had it, as a parameter or buffer."""
    views: list[tuple[str, View]]
    """Slices that were copied there unchanged."""
    loaders: set[CodeType]
    """The code that writes to it when the engine loads again; see `Recording`."""
    is_changed: bool = False
    """True once the storage was transformed (packed, quantized) or overwritten by something other than a slice."""
    is_fixed: bool = False
    """True if code outside `loaders` copied to it."""


class Recording(TorchDispatchMode):
    """Records one load, from the first slice to the engine's post-processing after the last. For one thread."""

    def __init__(
        self, model: torch.nn.Module, loader_of: Callable[[torch.Tensor], CodeType | None] | None = None
    ) -> None:
        """Begin to record.

        Args:
            loader_of: returns the code that fills a parameter when the engine loads again. The same code must have
                filled it in this load. None: the code that fills a parameter now is assumed to do so again.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._model, self._loader_of = model, loader_of
        self._sources: dict[int, _Sources] = {}
        """The slices in each storage, by its number."""
        self._memories: dict[int, _Memory] = {}
        self._lost: defaultdict[str, set[int]] = defaultdict(set)
        """Slices that were transformed instead of copied, mapped to the storages that received the result."""
        self._current: str | None = None
        """The slice most recently yielded to the engine. Writes of unknown origin are attributed to it."""
        self.has_unseen = False
        """True if another thread may have written weights, or a parameter was loaded with values computed from other
        tensors."""
        self._around = ExitStack()

    def given(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors given to the engine (whole tensors and global tensors), and note each."""
        left = iter(tensors)
        while (one := self._next(left)) is not None:
            self._current = one[0]
            yield one
        self._current = None

    def _next(self, left: Iterator[tuple[str, torch.Tensor]]) -> tuple[str, torch.Tensor] | None:
        """Return the next tensor, produced without being recorded; None: none is left."""
        is_inmost = _get_current_dispatch_mode() is self
        if is_inmost:  # Each operation that torch's dispatcher need not show saves some microseconds.
            _pop_mode()
        try:
            with inspection():
                if (one := next(left, None)) is not None:
                    self._note(*one)
            return one
        finally:
            if is_inmost:
                _push_mode(self)

    def _note(self, name: str, tensor: torch.Tensor) -> None:
        """Note the location of a slice."""
        local = tensor._memory.local if isinstance(tensor, GlobalTensor) else tensor
        if local.numel():
            assert local.is_contiguous()
            sources = self._sources.get(_number(local))
            if sources is None:
                sources = self._sources[_number(local)] = _Sources(_ref(local))
            start = int(local.storage_offset()) * local.itemsize
            sources.add(_Source(name, start, start + local.nbytes, local.itemsize))

    def __enter__(self) -> Recording:
        self._around.enter_context(_seen_around(self))
        self._around.enter_context(_without_threads(self))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._around.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (is_inspecting() or _reads_nothing(func)):
            if func is _COPY and isinstance(args[1], torch.Tensor):
                self._copied(args[0], args[1])
            else:
                for leaf in tree_leaves((args, kwargs)):
                    if isinstance(leaf, torch.Tensor):
                        self.touched(leaf)
        return _CALL(func, *args, **(kwargs or {}))

    def touched(self, tensor: torch.Tensor) -> None:
        """Note that a tensor is read or written by an operation other than a copy of a slice."""
        for name in self._names_in(tensor):
            self._lost[name]  # Creates the entry: an unknown result depends on this slice.
        if isinstance(tensor, GlobalTensor) or tensor.layout is not torch.strided or tensor.is_meta:
            return
        memory = self._memories.get(_number(tensor))
        if memory is None:
            current = self._current
            if current is not None and current in self._lost and (memory := self._memory(tensor)).owners:
                self._follow([current], memory)
        elif _overlaps(memory, tensor):
            memory.is_changed = True

    def finish(self) -> SliceLocations:
        """Return the recorded locations. Call after the load, including the engine's post-processing."""
        if self.has_unseen:
            given = {name for sources in self._sources.values() for name in sources.names}
            return SliceLocations({}, dict.fromkeys(sorted(given), frozenset()), {})
        there = self._find_owners()
        self._find_adopted()
        views: defaultdict[str, list[View]] = defaultdict(list)
        for number, memory in self._memories.items():
            memory.is_changed |= number not in there or _targets_overlap([view for _, view in memory.views])
            for name, view in memory.views:
                views[name].append(view)
        bad = {owner for memory in self._memories.values() if memory.is_changed for owner in memory.owners}
        bad.update(owner for numbers in self._lost.values() for n in numbers for owner in self._memories[n].owners)
        direct: dict[str, tuple[View, ...]] = {}
        reloaded: dict[str, frozenset[str]] = {}
        for name in {*views, *self._lost}:
            memories = [self._memories[view.memory] for view in views[name]]
            followed = [self._memories[number] for number in self._lost.get(name, ())]
            owners = frozenset(owner for memory in (*memories, *followed) for owner in memory.owners)
            is_known = all(memory.owners for memory in (*memories, *followed)) and (name not in self._lost or followed)
            if name in self._lost or not bad.isdisjoint(owners) or any(memory.is_changed for memory in memories):
                reloaded[name] = owners if is_known else frozenset()
            else:
                direct[name] = tuple(views[name])
        refs = {view.memory: self._memories[view.memory].ref for of_slice in direct.values() for view in of_slice}
        fixed = frozenset(owner for memory in self._memories.values() if memory.is_fixed for owner in memory.owners)
        modules = {name: ref(one) for name, one in self._model.named_modules(remove_duplicate=False)}
        return SliceLocations(direct, reloaded, refs, fixed, modules)

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Note a copy."""
        if target.is_meta or _is_same(target, source):  # The engine counts elements to load, or nothing changes.
            return
        slices = self._slices_in(source)
        names = [one.name for one in slices] or self._names_in(source)
        if isinstance(target, GlobalTensor) or target.layout is not torch.strided or self._slices_in(target):
            self.touched(target)
            self.touched(source)
            return
        memory = self._memory(target)
        if self._loader_of is not None and memory.owners and self._current is not None:
            memory.is_fixed |= not _is_called(memory.loaders)
        if self._loader_of is not None and memory.owners and self._current is None and not names:
            # After the last slice: for example a reranker's score, which is computed from rows of lm_head.
            self.has_unseen |= _is_called(memory.loaders)
        if len(slices) == 1 and (view := _view(target, source, slices[0])) is not None:
            memory.views.append((names[0], view))
            if names[0] in self._lost:  # It was changed in the storage that it arrived in.
                self._follow(names, memory)
            return
        if self._current is not None and not names:
            names = [self._current]
        if not isinstance(source, GlobalTensor) and (before := self._memories.get(_number(source))) is not None:
            names += [name for name, _ in before.views]
            self.touched(source)
        self._follow(names, memory)

    def _follow(self, names: Iterable[str], memory: _Memory) -> None:
        """Mark a storage as holding an unknown function of these slices."""
        for name in names:
            self._lost[name].add(memory.ref.cdata)
        memory.is_changed = True

    def _names_in(self, tensor: torch.Tensor) -> list[str]:
        """Return the slices that share elements with a tensor, if it lies in a storage that slices arrived in."""
        if isinstance(tensor, GlobalTensor):
            name = getattr(tensor._memory, "name", None)  # Rearranged tensors were noted when they were rearranged.
            return [] if name is None else [name]
        return [one.name for one in self._slices_in(tensor)]

    def _slices_in(self, tensor: torch.Tensor) -> Sequence[_Source]:
        if isinstance(tensor, GlobalTensor) or tensor.layout is not torch.strided or tensor.is_meta:
            return ()
        sources = self._sources.get(_number(tensor))
        return () if sources is None else sources.within(tensor)

    def _memory(self, tensor: torch.Tensor) -> _Memory:
        """Return the record of a tensor's storage; create it if needed."""
        known = self._memories.get(_number(tensor))
        if known is None:
            ref = _ref(tensor)
            known = self._memories[ref.cdata] = _Memory(ref, set(), [], set())
            self._find_owners()  # Some loaders create parameters.
        return known

    def _find_owners(self) -> set[int]:
        """Note which modules own which storage; return the numbers of all storages of the model."""
        there = set()
        for module, tensor in _tensors(self._model):
            if tensor.layout is torch.strided and not tensor.is_meta and tensor.numel():
                number = _number(tensor)
                there.add(number)
                if number not in self._memories:
                    self._memories[number] = _Memory(_ref(tensor), set(), [], set())
                self._memories[number].owners.add(module)
                if self._loader_of is not None and (loader := self._loader_of(tensor)) is not None:
                    self._memories[number].loaders.add(loader)
        return there

    def _find_adopted(self) -> None:
        """Note slices that became parameters without a copy."""
        for _, tensor in _tensors(self._model):
            for one in self._slices_in(tensor):
                memory = self._memories[_number(tensor)]
                start, rest = divmod(one.start, one.itemsize)
                count = (one.end - one.start) // one.itemsize
                whole: tuple[Any, ...] = (count,), (1,)
                if rest or one.itemsize not in _WIDTHS:
                    self._lost[one.name].add(memory.ref.cdata)
                elif all(name != one.name for name, _ in memory.views):
                    view = view_of(memory.ref.cdata, (*whole, 0), (*whole, start), one.itemsize)
                    assert view is not None
                    memory.views.append((one.name, view))


@contextmanager
def _seen_around(recording: Recording) -> Iterator[None]:
    """Note each tensor that this thread hands to code that torch's dispatch modes do not see.

    This covers methods that return an address of memory, and custom operators that torch treats as compositions: torch
    calls their code directly. A torch function mode would see both, but would slow down every tensor operation of the
    engine.
    """
    thread = get_ident()

    def notes(tensors: Any) -> None:
        if get_ident() == thread and not is_inspecting():
            for leaf in tree_leaves(tensors):
                if isinstance(leaf, torch.Tensor):
                    recording.touched(leaf)

    def seeing(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def seen(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            notes(tensor)
            return original(tensor, *args, **options)

        return seen

    def calling(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def called(operation: Any, /, *args: Any, **options: Any) -> Any:
            if not _is_of_torch(operation):
                notes((args, options))
            return original(operation, *args, **options)

        return called

    with ExitStack() as replaced:
        for name in _ADDRESSES:
            replaced.enter_context(_replaced(torch.Tensor, name, seeing))
        for kind in _KINDS:
            replaced.enter_context(_replaced(kind, "__call__", calling))
        yield


@contextmanager
def _without_threads(recording: Recording) -> Iterator[None]:
    """Run work in this thread instead of a thread pool that it submits to, as SGLang's loaders of experts do.

    A dispatch mode does not see other threads. A thread that is started in another way sets `has_unseen`. Daemon
    threads are exempt: the process may end while they run, so required work is not left to them.
    """
    thread = get_ident()

    def carrying_out(submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
        @wraps(submit)
        def carried_out(pool: Any, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
            if get_ident() != thread or is_inspecting():
                return submit(pool, work, *args, **options)
            future = Future[Any]()
            future.set_running_or_notify_cancel()
            try:
                future.set_result(work(*args, **options))
            except Exception as error:
                future.set_exception(error)
            return future

        return carried_out

    def starting(start: Callable[[Thread], None]) -> Callable[[Thread], None]:
        @wraps(start)
        def started(other: Thread) -> None:
            recording.has_unseen |= get_ident() == thread and not is_inspecting() and not other.daemon
            start(other)

        return started

    with _replaced(ThreadPoolExecutor, "submit", carrying_out), _replaced(Thread, "start", starting):
        yield


@contextmanager
def _replaced(owner: type, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Wrap a method until the block ends."""
    is_own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, wrapped(before))
    try:
        yield
    finally:
        setattr(owner, name, before) if is_own else delattr(owner, name)


@cache
def _is_of_torch(operation: Any) -> bool:
    """Return True if an operation belongs to torch: dispatch modes see it, or the operations it is composed of."""
    name = operation._schema.name if isinstance(operation, OpOverload) else operation._qualified_op_name
    return str(name).partition("::")[0] in ("aten", "prim", "prims")


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each module's name with its parameters and buffers. A shared tensor is yielded once per module."""
    for name, module in model.named_modules(remove_duplicate=False):
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None and not isinstance(tensor, GlobalTensor):
                yield name, tensor


def _is_called(codes: Collection[CodeType]) -> bool:
    """Return True if some of this code is on the call stack of this function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


def _view(target: torch.Tensor, source: torch.Tensor, slice_: _Source) -> View | None:
    """Return the view that a copy makes of a slice; None: the copy is not element by element."""
    itemsize = source.itemsize
    if source.dtype != target.dtype or source.numel() != target.numel():
        return None
    size, steps, offset = geometry_of(source if source.shape == target.shape else source.expand(target.shape))
    start, rest = divmod(offset * itemsize - slice_.start, itemsize)
    if itemsize not in _WIDTHS or itemsize != slice_.itemsize or rest or start < 0:
        return None
    view = view_of(_number(target), (size, steps, start), geometry_of(target), itemsize)
    return view if view is not None and view.end * itemsize <= slice_.end - slice_.start else None


@cache
def _reads_nothing(func: Any) -> bool:
    """Return True if an operation neither reads nor writes an element."""
    return is_view(func) or func in _UNREAD


def _number(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_same(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Return True if a copy is from and to the same elements of one storage."""
    if GlobalTensor in (type(target), type(source)) or not target.layout == source.layout == torch.strided:
        return False
    if source.is_meta or _number(source) != _number(target):
        return False
    return source.dtype == target.dtype and geometry_of(source) == geometry_of(target)


def _ref(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the indices of a tensor's first element in its storage and of the end after its last."""
    size, steps, offset = geometry_of(tensor)
    if tensor.is_contiguous():
        return offset, offset + tensor.numel()
    return offset, offset + 1 + sum((count - 1) * step for count, step in zip(size, steps, strict=True) if count)


def _overlaps(memory: _Memory, tensor: torch.Tensor) -> bool:
    """Return True if a tensor may contain elements that were copied to its storage. False for padding."""
    first, end = _bounds(tensor)
    return any(first < view.target_end and view.target < end for _, view in memory.views)


def _targets_overlap(views: Sequence[View]) -> bool:
    """Return True if two views share an element of the storage: the second copy has overwritten the first."""
    in_order = sorted(views, key=lambda view: view.target)
    end, is_overlapping = 0, False
    for view in in_order:
        is_overlapping |= view.target < end
        end = max(end, view.target_end)
    if not is_overlapping:
        return False
    taken = torch.zeros(end, dtype=torch.bool)
    for view in in_order:
        indices = taken.as_strided(*view.of_memory)
        if bool(indices.any()):
            return True
        indices.fill_(True)
    return False
