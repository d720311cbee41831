"""`save`: write tensors in memory as a folder of rank files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, Unpack
from weakref import WeakKeyDictionary

import numpy as np

from relayout.checkpoint.converted import CONVERTED
from relayout.checkpoint.folder import CONFIG_NAME
from relayout.checkpoint.shards import (
    DEFAULT_SHARD_NBYTES,
    MemoryShard,
    in_stored_order,
    lay_out_shards,
    model_order,
    share_out,
)
from relayout.checkpoint.source import identity_of
from relayout.conversion.layout import Conversion
from relayout.conversion.planning import ConvertOptions, PlanOptions
from relayout.conversion.resume import fingerprint_of
from relayout.conversion.run import Summary, carry_out, share_memory
from relayout.core.arguments import integer, size, takes
from relayout.core.digests import xxh3_hex
from relayout.core.extents import Extent
from relayout.core.slices import NOT_HELD, Cut, CutTensor, Slice, TensorHead
from relayout.errors import PlanError, shown
from relayout.format.index import HUB_INDEX_NAME
from relayout.format.safetensors import METADATA_KEY
from relayout.loader.group.all_to_all import round_nbytes
from relayout.loader.group.collectives import Alone, Group
from relayout.loader.held import HeldTensor
from relayout.publish.publishers import StoreDestination
from relayout.reporting import Progress
from relayout.storage.stores import find_store
from relayout.train.group_save import CopyMaker, Exchange, GroupSave, MemberParts, PlannedSave
from relayout.train.memory_folder import (
    MemoryFolder,
    check_names,
    checkpoint_of,
    files_of,
    second_names,
)

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

DEFAULT_THREADS = 4
DEFAULT_MEMORY = 2**27
_running = threading.local()
"""`is_inside` is true in a thread that carries out a save."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """The grouping of tensors into the shards of the checkpoint that `restore` writes."""

    shards: Sequence[Sequence[str]]
    """Names of the tensors of each shard."""
    metadata: Mapping[str, int]
    """The `metadata` of the index.json, which exists if there are several shards."""


def holding(
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | str | os.PathLike[str] | None,
    dtype: torch.dtype | None,
) -> Callable[[bool], HeldTensors]:
    """Return a function that returns the tensors, given by name, that a process contributes to a save, see `start`."""
    check_floating(dtype)
    if not isinstance(tensors, Mapping):
        advice = ", such as its state_dict()" if hasattr(tensors, "state_dict") else ""
        raise PlanError(f"tensors is a {type(tensors).__name__}, expected tensors by name{advice}", code="option")

    def hold(is_first: bool) -> HeldTensors:
        files = files_of(config) if is_first and config is not None else {}
        held = {name: HeldTensor.of(name, tensor, dtype) for name, tensor in tensors.items()}
        content = files.get(CONFIG_NAME, b"{}")
        check_names(held, content, config)
        return HeldTensors(held, files, left_out=second_names(held, content, config))

    return hold


def check_floating(dtype: object) -> None:
    """Raise PlanError unless a dtype to save as is None, or a floating-point dtype of torch."""
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise PlanError(f"dtype is {dtype!r}, expected a floating-point dtype of torch", code="option")


@dataclass(frozen=True, slots=True)
class HeldTensors:
    """The tensors and small files that a process gives to a save."""

    tensors: Mapping[str, HeldTensor]
    files: Mapping[str, bytes]
    """Small files next to the weights; in a group, those of the first member are used."""
    index: Sharding | None = None
    """The grouping of tensors into shards; None: by their order, and `max_shard_size`."""
    left_out: frozenset[str] = frozenset()
    """Names that are not saved, because another name has the same tensor; in a group, those of the first member are
    used."""

    def on_host(self) -> HeldTensors:
        """Copy the tensors to host memory. Tensors that share memory also share their copy."""
        copies: dict[tuple[object, ...], HeldTensor] = {}
        for one in self.tensors.values():
            if one.memory not in copies:
                copies[one.memory] = one.on_host()
        on_host = {name: replace(copies[one.memory], head=one.head) for name, one in self.tensors.items()}
        return replace(self, tensors=on_host)


class SaveOptions(ConvertOptions, total=False):
    """The options that must be equal in a whole group; `relayout.save` and `relayout.convert` explain them."""

    max_shard_size: int | str
    force: bool
    threads: int
    memory: int | str
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest(PlanOptions):
    """A save: the checked values of `SaveOptions`, and its output. Sizes are numbers of bytes."""

    output: str | os.PathLike[str]
    max_shard_size: int | str = DEFAULT_SHARD_NBYTES
    force: bool = False
    threads: int = DEFAULT_THREADS
    memory: int | str = DEFAULT_MEMORY
    progress: Progress = None
    instead: Callable[[PlannedSave], Summary] | None = None
    """Carries out the planned save, instead of a save to `output`."""
    what: str = "a save"
    """A description for messages if members of a group do different things."""

    def __post_init__(self) -> None:
        PlanOptions.__post_init__(self)  # By name: a class with slots is not the one that super() looks for.
        for name, parse in (("max_shard_size", size), ("threads", integer), ("memory", size)):
            object.__setattr__(self, name, parse(getattr(self, name), name))

    def run(self, hold: Callable[[bool], HeldTensors], group: Group | None) -> Summary:
        """Save the result of `hold`, which is called with True on the first member of the group."""
        return self._alone(hold(True)) if group is None else self._together(hold, group)

    def _alone(self, held: HeldTensors) -> Summary:
        saved = [one for name, one in held.tensors.items() if name not in held.left_out]
        heads, shards, index = self._shards([one.head for one in saved], held.index)
        tensors = [held.tensors[head.name] for head in heads]
        holders = MemberParts(heads, _cut(heads, [[one.part for one in tensors]]))
        holders.check()

        def fill(file: str, extent: Extent, view: memoryview) -> None:
            memory = np.frombuffer(view, np.uint8)
            for t, part, position in shards[file].parts(extent):
                tensors[t].read(part, memory[position : position + part.nbytes])

        planned = self._planned(MemoryFolder({**held.files, **index}, shards, fill, os.urandom(16).hex()), heads)
        if self.instead is not None:
            return self.instead(PlannedSave(planned, Alone(), holders, dict(enumerate(tensors))))
        return carry_out(
            planned,
            force=self.force,
            threads=self.threads,
            memory=self.memory,
            progress=self.progress,
            resumable=False,
        )

    def _together(self, hold: Callable[[bool], HeldTensors], group: Group) -> Summary:
        given = hold(group.index == 0)
        first = group.all_gather((self._called, os.urandom(16).hex(), given.files, given.left_out))
        _check_same([called for called, *_ in first])
        _, token, files, left_out = first[0]
        held = {name: one for name, one in given.tensors.items() if name not in left_out}
        union = _union(held, group)
        if given.index is not None:
            _check_whole(held, union, group)
        heads, shards, index = self._shards(union, given.index)
        holders = MemberParts(heads, _cut(heads, _parts(held, heads, group)))
        holders.check()
        threads, chunk_nbytes = share_memory(self.threads, self.memory)
        mine = {t: held[head.name] for t, head in enumerate(heads) if head.name in held}
        exchange = Exchange(group, holders, mine, shards, round_nbytes(group.num_members))
        planned = self._planned(MemoryFolder({**files, **index}, shards, exchange.fill, token), heads)
        _check_equal(planned, self._chosen(), group)
        holders.check_replicas(group.all_gather(holders.digests(group.index, mine, threads)))
        save = PlannedSave(planned, group, holders, mine)
        if self.instead is not None:
            return self.instead(save)
        step_nbytes = min(chunk_nbytes, round_nbytes(group.num_members) // threads)
        make = partial(CopyMaker, save, exchange, threads, step_nbytes)
        return GroupSave(save, StoreDestination(planned.output, CONVERTED, self.force), make).carry_out(self.progress)

    @property
    def _called(self) -> str:
        return f"{self.what} to {find_store(self.output)}"

    def _chosen(self) -> dict[str, str]:
        """Return the options that determine the output, as the caller gave them."""
        names = [*(one.name for one in fields(PlanOptions)), "max_shard_size"]
        return {name: shown(getattr(self, name)) for name in names}

    def _shards(
        self, heads: Sequence[TensorHead], groups: Sharding | None
    ) -> tuple[list[TensorHead], dict[str, MemoryShard], dict[str, bytes]]:
        """Return the tensors in model order; the shards by name; the index.json by name, if there is one.

        Args:
            heads: in the order in which shards are filled.
            groups: None: in that order, each up to `max_shard_size`.
        """
        if not heads:
            raise PlanError("no tensors to save", code="missing")
        if any(head.name == METADATA_KEY for head in heads):
            raise PlanError("safetensors has its metadata by this name", tensor=METADATA_KEY, code="option")
        if groups is None:
            shared_out = share_out([head.nbytes for head in heads], int(self.max_shard_size))
            names = [[heads[t].name for t in tensors] for tensors in shared_out]
            num_parameters = sum(prod(head.shape) for head in heads)
            totals = {"total_parameters": num_parameters, "total_size": sum(head.nbytes for head in heads)}
        else:
            names, totals = list(map(list, groups.shards)), dict(groups.metadata)
        ordered = sorted(heads, key=lambda head: (model_order(head.name), head.name))
        position = {head.name: t for t, head in enumerate(ordered)}
        stored = [in_stored_order(ordered, [position[name] for name in group]) for group in names]
        shards, index = lay_out_shards(ordered, stored, totals)
        return ordered, {shard.name: shard for shard in shards}, {} if index is None else {HUB_INDEX_NAME: index}

    def _planned(self, folder: MemoryFolder, heads: Sequence[TensorHead]) -> Conversion:
        return self.lay_out(checkpoint_of(folder, heads), find_store(self.output))


@takes(SaveOptions, SaveRequest)
def save(
    tensors: Mapping[str, torch.Tensor],
    output: str | os.PathLike[str],
    *,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    group: ProcessGroup | None = None,
    background: bool = False,
    **options: Unpack[SaveOptions],
) -> Summary | Future[Summary]:
    """Write tensors in memory, such as a model in training, as the folder that `convert` makes of their checkpoint.

    The weight files are byte for byte those that `convert` writes, and `restore` writes a checkpoint with these tensors
    and names. If config.json has `tie_word_embeddings`, and two names are one embedding in memory, the first is saved.
    Models of transformers 5 may have other names than their checkpoints, such as those of merged experts. These names
    are refused: `relayout.transformers.save_pretrained` writes the names of the checkpoint. Nothing is gathered: no
    process needs more than 512 MiB in addition to the tensors.

    Args:
        tensors: by name, on any device. For a DTensor (FSDP2, tensor-parallel, or both), this process gives its shard.
            They must not change before the save has ended; with `background`, before this function returns.
        output: the folder to create, or its URL. It appears complete or not at all. All processes must reach it.
        config: the content of config.json, or the path of that file; or the path of a folder with small files to copy,
            such as config.json and those of the tokenizer. In a group, that of the first member is used.
        dtype: the floating-point dtype to write, to which tensors are cast while they are copied. Default: their own.
        group: a process group; all members save together, each with the tensors that it holds, and with equal options.
            Default: this process alone, which holds everything.
        background: copy the tensors to host memory, and return at once.
        max_shard_size: bytes of a shard of the checkpoint that `restore` writes.
        options: as for `convert`.

    Returns:
        A summary of the output; with `background`, a future of it, which raises the errors of this function.

    Raises:
        FormatError: config.json is damaged.
        PlanError: the tensors cannot be saved like this; elements are missing; experts are merged.
        OSError: writing failed, or a member of the group is gone.

    If it fails, the output is deleted, not resumed: a later process has other tensors.

    Example:
        >>> import relayout, torch
        >>> tensors = {"model.norm.weight": torch.ones(64)}
        >>> relayout.save(tensors, "saved", config={"model_type": "llama"}, tp=2).num_files
        2
    """

    def prepare() -> tuple[SaveRequest, Callable[[bool], HeldTensors]]:
        return SaveRequest(output=output, **options), holding(tensors, config, dtype)

    return start(prepare, group, background)


Hold = Callable[[bool], HeldTensors]
"""Returns the tensors that a process gives to a save; its argument is True on the first member of the group."""


def start(
    prepare: Callable[[], tuple[SaveRequest, Hold]], group: ProcessGroup | None, background: bool
) -> Summary | Future[Summary]:
    """Save the tensors of this process, after the earlier saves in the queue of its group; otherwise as `save`.

    An error of `prepare`, or of the function that it returns, is raised by all members.
    """
    if getattr(_running, "is_inside", False):
        what = "save: called by the progress function of a save, which would wait for itself"
        raise PlanError(what, code="unsupported")
    line = _line_of_process(os.getpid()) if group is None else _line_of(group)
    if not background:
        return line.run(lambda group: _saved(prepare, group))
    try:
        saving, hold = prepare()
        copied = hold(line.is_first).on_host()
    except BaseException as error:
        future = line.begin(partial(_raise, error))  # The other members are notified, in their line.
        if isinstance(error, Exception):
            return future
        raise
    return line.begin(lambda group: saving.run(lambda _: copied, group))


def _saved(prepare: Callable[[], tuple[SaveRequest, Hold]], group: Group | None) -> Summary:
    saving, hold = prepare()
    return saving.run(hold, group)


def _raise(error: BaseException, _: Group | None) -> NoReturn:
    raise error


_SIGNAL_SECONDS = 0.5
"""Seconds that a wait may take to notice Ctrl-C."""

SaveFunction = Callable[[Group | None], Summary]
"""A save, given its group; None: it has none."""


class _Turn:
    """The turn of a save in a line."""

    def __init__(self) -> None:
        self.earlier: _Turn | None = None
        """The previous turn in the line, until it has ended."""
        self._is_over = threading.Event()

    def wait(self) -> None:
        """Wait until the previous save has ended, which waits for earlier ones. Several threads may wait at once."""
        earlier = self.earlier
        if earlier is not None:
            # In a loop: Python handles a signal that comes just before a wait only after the wait.
            while not earlier._is_over.wait(_SIGNAL_SECONDS):
                pass
            self.earlier = None

    def end(self) -> None:
        """Let the next save begin."""
        self._is_over.set()


class _Line:
    """Saves that run one after the other, in the order in which they were begun.

    A save waits for its turn before it sends messages in the group of its line or does related work.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._process_group = group
        """A group of the same processes as the caller's, for messages from host memory, separate from all other
        messages."""
        self.is_first = group is None or Group(group).index == 0
        self._lock = threading.Lock()
        self._last: _Turn | None = None

    def begin(self, work: SaveFunction) -> Future[Summary]:
        """Carry out a save in its turn, in a thread that ends with it."""
        turn = _Turn()
        self._join(turn)
        return self._begin(work, turn)

    def run(self, work: SaveFunction) -> Summary:
        """Carry out a save in its turn, in this thread."""
        group, turn, has_come = self._group(), _Turn(), False
        try:
            self._join(turn)
            turn.wait()
            has_come = True
            return self._carry_out(work, group)
        except BaseException as error:
            if has_come:
                group.fail(error)
            else:  # The turn comes all the same, and the other members are notified then.
                self._join(turn)
                self._begin(partial(_raise, error), turn)
            raise
        finally:
            if has_come:
                turn.end()

    def _join(self, turn: _Turn) -> None:
        """Put an unfinished turn at the end of the line, unless it is in the line already (after a Ctrl-C)."""
        with self._lock:
            known = self._last
            while known is not None and known is not turn:
                known = known.earlier
            if known is None:
                turn.earlier = self._last
                self._last = turn

    def _group(self) -> Group:
        return Alone() if self._process_group is None else Group(self._process_group)

    def _begin(self, work: SaveFunction, turn: _Turn) -> Future[Summary]:
        done = Future[Summary]()
        done.set_running_or_notify_cancel()  # The other members begin it, so that it cannot be cancelled.

        def carry_out() -> None:
            try:
                turn.wait()
                group = self._group()
                with group.sharing_errors():
                    result = self._carry_out(work, group)
            except BaseException as error:
                turn.end()
                done.set_exception(error)
            else:
                turn.end()
                done.set_result(result)

        try:
            threading.Thread(target=carry_out, name="relayout-save").start()
        except RuntimeError:  # Too many threads.
            carry_out()
        return done

    def _carry_out(self, work: SaveFunction, group: Group) -> Summary:
        _running.is_inside = True
        try:
            return work(None if self._process_group is None else group)
        finally:
            _running.is_inside = False


@cache
def _line_of_process(process: int) -> _Line:
    """Return the line of saves without a group. A fork has its own: it waits for no save of its parent."""
    return _Line()


_groups: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()
"""The groups in which lines send their messages.

They are not destroyed: torch 2.13 gives the next group of these ranks the same name, and it finds dead addresses.
"""
_lines: WeakKeyDictionary[ProcessGroup, _Line] = WeakKeyDictionary()
_connecting: WeakKeyDictionary[ProcessGroup, threading.Lock] = WeakKeyDictionary()
"""A lock for each group: two threads must not create two lines for it."""
_lines_lock = threading.Lock()


def _line_of(group: ProcessGroup) -> _Line:
    """Return the line of saves of a group, which all members begin in the same order."""
    if group not in _groups:
        Group(group)  # Raises, unless it is a group.
    with _lines_lock:
        connecting = _connecting.setdefault(group, threading.Lock())
    with connecting:  # Other groups need not wait.
        try:
            made = Group(group).apart(_groups)
        except BaseException as error:
            if group in _groups:  # The other members have begun.
                _lines.setdefault(group, _Line(_groups[group])).begin(partial(_raise, error))
            raise
        return _lines.setdefault(group, _Line(made))


def _check_same(called: Sequence[str]) -> None:
    """Check that all members have begun the same save."""
    other = next((member for member, one in enumerate(called) if one != called[0]), None)
    if other is not None:
        what = f"group: member 0 makes {called[0]}, member {other} {called[other]}"
        raise PlanError(f"{what}; all members begin the same, in the same order", code="option")


def _union(held: Mapping[str, HeldTensor], group: Group) -> list[TensorHead]:
    """Return all tensors of the group, those of the first member first."""
    own = [one.head for one in held.values()]
    if len(set(group.all_gather(xxh3_hex(repr(own).encode())))) == 1:
        return own
    heads: dict[str, TensorHead] = {}  # Different ones, such as in pipeline parallelism.
    for member, others in enumerate(group.all_gather(own)):
        for head in others:
            known = heads.setdefault(head.name, head)
            if known != head:
                what = f"member {member} has {head.dtype} {list(head.shape)}"
                expected = f"expected {known.dtype} {list(known.shape)}, as another member has"
                raise PlanError(f"{what}, {expected}", tensor=head.name, code="mismatch")
    return list(heads.values())


def _check_whole(held: Mapping[str, HeldTensor], union: Sequence[TensorHead], group: Group) -> None:
    """Check that this member gives a whole model, with every tensor of the group."""
    lacking = next((head.name for head in union if head.name not in held), None)
    if lacking is not None:
        what = f"member {group.index} has a model without it: pass the tensors of a pipeline stage to relayout.save"
        raise PlanError(
            f"{what}; give its tensors, by their names in the checkpoint, to `relayout.save`",
            tensor=lacking,
            code="unsupported",
        )


def _parts(held: Mapping[str, HeldTensor], heads: Sequence[TensorHead], group: Group) -> list[list[Slice]]:
    """Return the part of each tensor that each member holds."""
    same: dict[Slice, Slice] = {}  # Equal ones are sent once.
    parts = [held[head.name].part if head.name in held else NOT_HELD for head in heads]
    return group.all_gather([same.setdefault(part, part) for part in parts])


def _cut(heads: Sequence[TensorHead], parts: Sequence[Sequence[Slice]]) -> list[CutTensor]:
    """Return the members' cut of each tensor. Equal cuts share one object."""
    cut_of = cache(Cut)
    rows = zip(*parts, strict=True)
    return [cut_of(row).tensor(head.dtype, head.shape) for head, row in zip(heads, rows, strict=True)]


def _check_equal(planned: Conversion, options: Mapping[str, str], group: Group) -> None:
    """Check that all members have planned the same save."""
    fingerprint = fingerprint_of(planned, identity_of(planned.source).content)
    (first, given), *others = group.all_gather((fingerprint, options))
    for member, (other, values) in enumerate(others, 1):
        if other != first:
            names = [name for name in given if values[name] != given[name]]
            here, there = (", ".join(f"{name}={one[name]}" for name in names) for one in (given, values))
            how = f": member 0 with {here}, member {member} with {there}" if names else f": members 0 and {member}"
            raise PlanError(f"the members of the group save with different options{how}", code="option")
