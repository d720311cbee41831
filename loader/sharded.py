"""`load(into=...)` without a rank: fills the whole tensors and DTensor shards of a model that this process holds.

The bytes to read of a tensor follow from its DTensor's placement (`held.py`). A process that loads alone reads only
these bytes. The members of a group exchange lists of their parts, read each byte once, and exchange bytes that several
need. Members on one machine share its page cache: each reads its own parts of a folder, so that no byte is read twice
and nothing is exchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import numpy as np

from relayout.checkpoint.trust import policy_over
from relayout.core.digests import xxh3_hex
from relayout.core.extents import Transfer
from relayout.core.slices import BITS, NOT_HELD, Slice
from relayout.errors import PlanError, did_you_mean, shown
from relayout.loader.backends.base import Allocation, Memory, Options, resolve_device
from relayout.loader.group.collectives import Group
from relayout.loader.group.exchange import ExchangePlan, RunningExchange
from relayout.loader.group.plan import DividedTensor, Division
from relayout.loader.group.sharing import check_same
from relayout.loader.held import HeldTensor, unwrapped
from relayout.loader.in_place import check_into, is_as_stored, load_into
from relayout.loader.models import check_model, read_by, storage_of
from relayout.loader.requests import MAX_IN_FLIGHT, NODE_IN_FLIGHT, local_world_size
from relayout.loader.sources.checkpoint import LoadRequest, WholeTensors, find_tensors
from relayout.loader.sources.rank import StoredFile, TensorColumns, batches, cost_of, pack, parts_of, select
from relayout.loader.stream import stream
from relayout.loader.tensors import bump_versions, bytes_of, make_views, why_not_plain
from relayout.reporting import Reporter, reporting
from relayout.storage.local.store import LocalStore

if TYPE_CHECKING:
    import torch

    from relayout.storage.stores import Store

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MAX_NAMED = 4
"""Limit of the tensors that a message names."""
_BY_STATE_DICT = "load the tensors by relayout.load(path), and call model.load_state_dict() with them"


@dataclass(frozen=True, slots=True, eq=False)
class LocalStateDict:
    """The part of a model or state dict that this process holds."""

    tensors: Mapping[str, HeldTensor]
    """The held part of each tensor, by the model's names."""
    given: Mapping[str, torch.Tensor]
    """The tensors themselves, by the same names."""
    memory: frozenset[int]
    """The storages of the model's parameters and buffers. Tensors to fill must be in one of them."""
    model: Any = None
    """The model, if it is one of transformers: its checkpoints may have other names."""

    @staticmethod
    def of(into: Mapping[str, torch.Tensor] | torch.nn.Module) -> LocalStateDict:
        """Return the part of a state dict or model that this process holds."""
        from torch.nn import Module

        if isinstance(into, Mapping):
            _check_memory(into)
            held = {name: HeldTensor.of(name, tensor) for name, tensor in into.items()}
            return LocalStateDict(held, into, frozenset(storage_of(one.data) for one in held.values()))
        model, name_of = unwrapped(into)
        if not isinstance(model, Module):
            what = f"into is a {type(into).__name__}, expected tensors by name, or a torch.nn.Module"
            raise PlanError(what, code="option")
        _check_loads(model)
        # Checkpoints do not contain extra state that is not a tensor.
        state = {name: one for name, one in model.state_dict().items() if not _is_extra(name, one)}
        state = {name_of(name): tensor for name, tensor in state.items()}
        _check_memory(state)
        held = {name: HeldTensor.of(name, tensor) for name, tensor in state.items()}
        own = (one.to_local() if hasattr(one, "to_local") else one for one in (*model.parameters(), *model.buffers()))
        memory = frozenset(storage_of(one) for one in own if why_not_plain(one) is None)
        transformers = sys.modules.get("transformers")
        if transformers is None or not isinstance(model, transformers.PreTrainedModel):
            return LocalStateDict(held, state, memory)
        check_model(model)
        return LocalStateDict(held, state, memory, model)

    def read_by(self, names: Sequence[str]) -> tuple[dict[str, HeldTensor], list[HeldTensor], frozenset[str]]:
        """Find the tensors of a checkpoint among the held ones.

        Returns:
            The held part of each tensor, by the checkpoint's names; the missing tensors, with the names that the
            checkpoint should have; and additional names that it may have.
        """
        if self.model is None:
            known = set(names)
            found = {name: self.tensors[name] for name in names if name in self.tensors}
            return found, [one for name, one in self.tensors.items() if name not in known], frozenset()
        read = read_by(self.model, [one.head for one in self.tensors.values()], names)
        found, lacking = (
            {name: view.of(name, self.tensors[view.origin]) for name, view in views.items()}
            for views in (read.views, read.lacking)
        )
        return found, list(lacking.values()), read.ignored

    @property
    def device(self) -> torch.device | str:
        """The single device of all tensors."""
        devices = {one.data.device: name for name, one in self.tensors.items() if one.data.numel()}
        if len(devices) > 1:
            (one, name), (other, second), *_ = devices.items()
            raise PlanError(f"into: {name!r} is on {one}, {second!r} on {other}, expected one device", code="option")
        return next(iter(devices), "cpu")


def _check_memory(tensors: Mapping[str, Any]) -> None:
    """Raise PlanError if a tensor has no memory yet, as in a model that was created on the device "meta"."""
    without = [
        name for name, tensor in tensors.items() if getattr(getattr(tensor, "device", None), "type", "") == "meta"
    ]
    if without:
        what = f"into: on the device meta, without memory: {_listed(without)}"
        advice = "call model.to_empty(device=...), and init_weights() for buffers that no checkpoint has, before"
        raise PlanError(f"{what}; {advice}", code="option")


def _check_loads(model: torch.nn.Module) -> None:
    """Raise PlanError if a module runs code of its own after a state dict was loaded into it.

    Such a module may compute with other data than its parameters, such as packed weights. Modules of torch and
    transformers do not.
    """
    for path, module in model.named_modules():
        own = [type(module)._load_from_state_dict, *module._load_state_dict_post_hooks.values()]
        if module is model:
            own.append(type(module).load_state_dict)
        for one in own:
            if getattr(one, "__module__", "").partition(".")[0] not in ("torch", "transformers"):
                what = f"the {type(module).__name__} {path!r}" if path else f"a {type(module).__name__}"
                what = f"into: {what} runs code of its own in load_state_dict"
                raise PlanError(f"{what}: {_BY_STATE_DICT}", code="unsupported")


def _is_extra(name: str, tensor: object) -> bool:
    """Return True if a state dict's entry was returned by a module's `get_extra_state` and is not a tensor."""
    import torch

    return name.rpartition(".")[2] == "_extra_state" and not isinstance(tensor, torch.Tensor)


def _listed(names: Iterable[str]) -> str:
    """Return names for a message: the first few, and the number of the others."""
    first, more = list(names)[:_MAX_NAMED], len(list(names)) - _MAX_NAMED
    return ", ".join(map(repr, first)) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True, eq=False)
class WantedTensors:
    """The tensors of a checkpoint that this process loads."""

    whole: WholeTensors
    held: LocalStateDict
    chosen: frozenset[int]
    """The rows of the checkpoint's tensors with names that match."""
    mine: Mapping[int, HeldTensor]
    """The held part of each chosen tensor, with or without elements, in the order of the rows."""
    again: frozenset[int]
    """The rows of tensors in the same memory as an earlier one, such as tied ones. They are compared with it."""
    ignored: frozenset[str]
    """Names of additional tensors that the checkpoint may have."""

    @staticmethod
    def of(request: LoadRequest, held: LocalStateDict) -> WantedTensors:
        """Find the tensors."""
        whole = find_tensors(request.path, request.deltas, request.trust, by_transformers=held.model is not None)
        request.check_verified(whole.store, is_unconverted=whole.unconverted is not None)
        columns = whole.pieces.columns
        names = list(columns.names)
        chosen = range(len(names)) if request.names is None else select(names, request.names)
        found, lacking, ignored = held.read_by(names)
        mine = {row: found[names[row]] for row in chosen if names[row] in found}
        memory: set[tuple[object, ...]] = set()
        again = set()
        for row, one in mine.items():
            if one.data.numel() and one.memory in memory:
                again.add(row)
            memory.add(one.memory)
        wanted = WantedTensors(whole, held, frozenset(chosen), mine, frozenset(again), ignored)
        if request.names is None:
            wanted._check_all([one.head.name for one in lacking if one.memory not in memory])
        wanted._check_each()
        return wanted

    def _check_all(self, lacking: Sequence[str]) -> None:
        if lacking:
            what = f"the checkpoint has no {_listed(lacking)}{_hint(lacking[0], self.whole.pieces.columns.names)}"
            what = f"{what}; names='**' loads what it has"
            raise PlanError(what, path=str(self.whole.store), code="missing")

    def _check_each(self) -> None:
        columns = self.whole.pieces.columns
        for row, one in self.mine.items():
            found, shape = (columns.dtypes[row], tuple(columns.source_shapes[row])), one.head.shape
            if found[1] != shape:
                what = f"into has shape {list(shape)}, the checkpoint {list(found[1])}"
                raise PlanError(what, path=str(self.whole.store), tensor=one.head.name, code="mismatch")
            if one.data.numel() and storage_of(one.data) not in self.held.memory:
                what = f"into: state_dict() has a copy, and not the memory of the model: {_BY_STATE_DICT}"
                raise PlanError(what, tensor=one.head.name, code="unsupported")

    def check_unexpected(self, held_by_any: Iterable[int]) -> None:
        """Check that at least one member holds each chosen tensor of the checkpoint."""
        names = self.whole.pieces.columns.names
        beside = [names[row] for row in sorted(self.chosen.difference(held_by_any)) if names[row] not in self.ignored]
        if beside:
            what = f"the checkpoint has {_listed(beside)}, which the model lacks; `names` chooses what is loaded"
            raise PlanError(what, path=str(self.whole.store), code="mismatch")

    def columns(self, rows: Sequence[int]) -> TensorColumns:
        """Return this process's parts of some tensors."""
        return parts_of(self.whole.pieces, {row: self.mine[row].part for row in rows})

    @property
    def filled(self) -> list[int]:
        """The rows of tensors with elements that this process holds."""
        return [row for row, one in self.mine.items() if one.part.is_held and one.data.numel()]

    def take(self, row: int, loaded: torch.Tensor) -> None:
        """Copy a tensor from temporary memory into place, or compare it if its memory is shared."""
        import torch

        one = self.mine[row]
        with torch.no_grad():
            if row not in self.again:
                one.data.copy_(loaded)
            elif not torch.equal(bytes_of(loaded.to(one.data.dtype).to(one.data.device).contiguous()), _bytes(one)):
                what = "the model has another tensor in the same memory, the checkpoint other values for it: untie them"
                raise PlanError(what, path=str(self.whole.store), tensor=one.head.name, code="mismatch")


def _bytes(one: HeldTensor) -> torch.Tensor:
    return bytes_of(one.data.contiguous())


def _hint(name: str, known: Iterable[str]) -> str:
    """Return why a checkpoint may lack a name."""
    if ".experts." in name:
        return "; of a model of transformers, give the model: it fuses experts that a checkpoint may have one by one"
    return did_you_mean(name, known)


def load_held(request: LoadRequest) -> dict[str, torch.Tensor]:
    """Fill the parts of `request.into` that this process holds; with a group, all members call this together."""
    if request.group is None:
        held, options = _prepared(request)
        wanted = WantedTensors.of(request, held)
        wanted.check_unexpected(wanted.mine)
        _fill_alone(wanted, options)
    else:
        held = _fill_together(request, Group.on_host(request.group))
    return dict(held.given)


def _prepared(request: LoadRequest) -> tuple[LocalStateDict, Options]:
    """Return the part that this process holds, and the options to load to its device."""
    assert request.into is not None
    for option, value in {"tp": request.tp, "cache": request.cache, "experts": request.experts is not None}.items():
        if value:
            what = f"{option} cannot be combined with into and no rank: the model's own slices are read as stored"
            raise PlanError(what, code="option")
    options, held = request.options(), LocalStateDict.of(request.into)
    device = resolve_device(held.device)
    if str(options.device) not in ("cpu", str(device)):
        raise PlanError(f"into is on {device}, device is {options.device}", code="option")
    return held, replace(options, device=device)


def _fill_alone(wanted: WantedTensors, options: Options) -> None:
    """Read this process's parts."""
    names = wanted.whole.pieces.columns.names
    first = [row for row in wanted.filled if row not in wanted.again]
    if first:
        load_into(wanted.columns(first), {names[row]: wanted.mine[row].data for row in first}, None, options)
    if wanted.again:
        again = sorted(wanted.again)
        row_of = {names[row]: row for row in again}
        for name, loaded in stream(wanted.columns(again), replace(options, progress=None)):
            wanted.take(row_of[name], loaded)


class _PartsMessage(NamedTuple):
    """The message of a member to all others about its parts."""

    parts: list[Slice]
    """The distinct parts that the member holds of tensors."""
    part_of: dict[int, int]
    """The position in `parts` of the part of each tensor that it holds, by the tensor's row."""
    copied: frozenset[int]
    """The rows of tensors that are loaded into temporary memory, and then copied or compared."""
    most_nbytes: int
    """Limit of the temporary memory, in bytes."""
    page_cache: str
    """Identity of the page cache through which the member can read: equal for members that share one, else unique."""
    kind: str
    """The kind of the device that has the member's parts; "cpu" if it holds nothing."""

    @staticmethod
    def of(wanted: WantedTensors, options: Options) -> _PartsMessage:
        """Return this member's message."""
        dtypes, parts = wanted.whole.pieces.columns.dtypes, dict[Slice, int]()
        part_of = {row: parts.setdefault(one.part, len(parts)) for row, one in wanted.mine.items() if one.part.is_held}
        copied = {
            row
            for row in wanted.filled
            if row in wanted.again
            or not is_as_stored(wanted.mine[row].data, dtypes[row])
            or wanted.mine[row].data.device.type != "cpu"
        }
        most_nbytes = min(MAX_IN_FLIGHT, NODE_IN_FLIGHT // local_world_size())
        page_cache = page_cache_of(wanted.whole.store)
        return _PartsMessage(list(parts), part_of, frozenset(copied), most_nbytes, page_cache, options.kind)

    def part(self, row: int) -> Slice:
        """Return the part of a tensor that the member holds."""
        which = self.part_of.get(row)
        return NOT_HELD if which is None else self.parts[which]


def _fill_together(request: LoadRequest, group: Group) -> LocalStateDict:
    """Read this member's share of what all members need, and exchange it."""
    with group.sharing_errors():
        with group.collective():
            held, options = _prepared(request)
            wanted = WantedTensors.of(request, held)
            identity = _identity(request, wanted, options)
        check_same(group, identity)
        messages = group.all_gather(_PartsMessage.of(wanted, options))
        # These are equal in all members, as they were exchanged or compared.
        is_verified = policy_over(wanted.whole.store) is not None  # Bytes that other members read are not verified.
        backend = options.backend if is_verified else _backend_beside(messages, options.backend)
        with group.collective(is_last=backend is not None):
            wanted.check_unexpected({row for one in messages for row in one.part_of})
            names, first = wanted.whole.pieces.columns.names, [row for row in wanted.filled if row not in wanted.again]
            into = {names[row]: wanted.mine[row].data for row in first}
            check_into(into, wanted.columns(first), options.device)
            if backend is not None:
                _fill_alone(wanted, replace(options, backend=backend))
        if backend is None:
            _Together(group, wanted, messages, replace(options, device="cpu")).fill()
        return held


def page_cache_of(store: Store) -> str:
    """Return the identity of this machine's page cache if a store is read through it; else a unique text.

    Containers of one machine share the page cache. If they see one folder through several file systems, they read it
    several times.
    """
    with suppress(OSError):
        if isinstance(store, LocalStore):
            return _BOOT_ID.read_text().strip()
    return str(uuid4())


def _backend_beside(messages: Sequence[_PartsMessage], backend: str) -> str | None:
    """Return the backend by which each member reads its own parts; None: members exchange what they read.

    Members of one machine read their own parts. Bytes that several need come from the drive once, through the page
    cache. Loads to a device bypass the page cache, so their bytes are exchanged.
    """
    if len({one.page_cache for one in messages}) > 1:
        return None
    rows = {row for one in messages for row in one.part_of}
    if all(_are_apart([one.part(row) for one in messages]) for row in rows):
        return backend
    if any(one.kind != "cpu" for one in messages):
        return None
    return "buffered" if backend in ("auto", "buffered") else None


def _are_apart(parts: Sequence[Slice]) -> bool:
    """Return True if the parts of a tensor are disjoint ranges of rows, each held by one member."""
    held = [part for part in dict.fromkeys(parts) if part.is_held]
    if len(held) < 2:
        return sum(part.is_held for part in parts) < 2
    if len(held) < sum(part.is_held for part in parts) or any(part.axes != (0,) or not part.is_box for part in held):
        return False
    ranges = sorted(one for part in held for one in part.ranges or ())
    return all(start + length <= following for (start, length), (following, _) in pairwise(ranges))


def _identity(request: LoadRequest, wanted: WantedTensors, options: Options) -> tuple[str, str]:
    """Return a description of the load, and a digest of everything that members must agree on.

    All of this determines their messages.
    """
    files, is_signed = wanted.whole.pieces.files, policy_over(wanted.whole.store) is not None
    how = (options.backend, options.verify, is_signed)
    what = f"the model of {wanted.whole.store}, with backend={options.backend!r}"
    what += ", verified" if options.verify else ""
    what += ", signed" if is_signed else ""
    what += "" if request.names is None else f", names={shown(request.names)}"
    common = (wanted.whole.content(), sorted(wanted.chosen), how, cost_of(files).max_gap_nbytes)
    return what, xxh3_hex(repr(common).encode())


@dataclass(frozen=True, slots=True)
class _Together:
    """A load of the members' parts by all members of a group. In each step, some tensors are filled."""

    group: Group
    wanted: WantedTensors
    messages: Sequence[_PartsMessage]
    options: Options
    """The options of loads to the host."""

    def fill(self) -> None:
        """Fill the tensors in steps: first all that are filled in place, then the others, a few at a time."""
        rows = sorted({row for one in self.messages for row in one.part_of})
        copied = {row for one in self.messages for row in one.copied}
        direct, others = [row for row in rows if row not in copied], [row for row in rows if row in copied]
        sizes = [max(self._nbytes(row, one.part(row)) for one in self.messages) for row in others]
        most = min(one.most_nbytes for one in self.messages)
        total = sum(self._nbytes(row, self.wanted.mine[row].part) for row in self.wanted.filled)
        steps = [(direct, False)] if direct else []
        steps += [(others[batch.start : batch.stop], True) for batch in batches(sizes, most)]
        self.group.is_over, done = not steps, 0
        with reporting(self.options.progress, "loading", total) as report:
            for index, (tensors, is_copied) in enumerate(steps, 1):
                done = self._fill_step(tensors, report, done, is_copied=is_copied, is_last=index == len(steps))

    def _nbytes(self, row: int, part: Slice) -> int:
        columns = self.wanted.whole.pieces.columns
        return prod(part.shape(tuple(columns.source_shapes[row]))) * BITS[columns.dtypes[row]] // 8

    def _fill_step(self, rows: Sequence[int], report: Reporter, done: int, *, is_copied: bool, is_last: bool) -> int:
        """Fill some tensors, and return the number of bytes filled so far; `done` is the number before."""
        group, wanted, running = self.group, self.wanted, None
        arena: Allocation[Any] | None = None
        mine = [row for row in rows if row in wanted.mine and wanted.mine[row].data.numel()]
        try:
            with group.collective():
                files, row_of, divided = self._divided(rows)
                backend, budget = self.options.choose(files)
                columns = wanted.columns(mine)
                memory: Memory[Any]
                if is_copied:
                    plan = pack(columns)
                    columns = plan.tensors()
                    memory = arena = backend.allocate(plan.arena_nbytes)
                    base, starts = arena.tensor().numpy(), columns.offsets
                    bytes_of_row = {row: base[start:] for row, start in zip(mine, starts, strict=True)}
                else:
                    targets = {row: bytes_of(wanted.mine[row].data) for row in mine}
                    bump_versions([wanted.mine[row].data for row in mine])
                    memory = existing = backend.wrap(list(targets.values()))
                    starts = existing.offsets
                    bytes_of_row = {row: target.numpy() for row, target in targets.items()}
                offset_of, nothing = dict(zip(mine, starts, strict=True)), np.empty(0, np.uint8)
                offsets = [offset_of.get(row, 0) for row in row_of]
                slices = [bytes_of_row.get(row, nothing) for row in row_of]
                exchange = ExchangePlan.of(group, files, divided)
                running = RunningExchange(group, exchange, backend, budget, memory, offsets, slices)
            running.run(report.after(done))
            with group.collective(is_last=is_last):
                running.finish(report.after(done))
                if arena is not None:
                    loaded = make_views(arena.tensor(), columns)
                    for row, name in zip(mine, columns.names, strict=True):
                        wanted.take(row, loaded.pop(name))
        finally:
            if running is not None:
                running.cancel()
            if arena is not None:
                arena.discard()
        return done + sum(columns.sizes())

    def _divided(self, rows: Sequence[int]) -> tuple[tuple[StoredFile, ...], list[int], list[DividedTensor]]:
        """Return the files of tensors, and the row and division among the members of each tensor in each file.

        A tensor of a converted checkpoint may be stored in several files: it has one division for each.
        """
        pieces = self.wanted.whole.pieces
        files = self.options.verified_files(pieces.files)
        max_gap_nbytes = cost_of(files).max_gap_nbytes
        divisions: dict[tuple[tuple[Transfer, ...], ...], Division] = {}
        row_of, divided = [], []
        for row in rows:
            reads = {part: pieces.reads(row, part) for part in {one.part(row) for one in self.messages} if part.is_held}
            for file in sorted({read.file for part in reads.values() for read in part}):
                mine = {part: [read.transfer for read in found if read.file == file] for part, found in reads.items()}
                start = min(transfer.source for found in mine.values() for transfer in found)
                slices = tuple(
                    tuple(transfer.shifted(source=-start) for transfer in mine.get(one.part(row), ()))
                    for one in self.messages
                )
                if slices not in divisions:
                    divisions[slices] = Division.of(slices, max_gap_nbytes)
                row_of.append(row)
                divided.append(DividedTensor(file, start, divisions[slices]))
        return files, row_of, divided
