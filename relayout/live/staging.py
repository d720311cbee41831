"""The weights of one worker of a live engine: staged while it serves, committed in a pause, verified on request.

**Problem.** A serving engine can pause only briefly, but new weights must be read, decompressed and verified. All
workers must change or none, and a failed change leaves a mixture of old and new weights.

**Idea.** An update has two phases. `LiveWeights.stage` runs while the engine serves. It reads and verifies all new
bytes and holds the changes in host memory, up to a limit. `LiveWeights.commit` runs in a pause and only applies them. A
slice that lies unchanged in parameters (`recording.py`) is held as indices and XOR masks of its changed elements
(`Flips`). The commit then takes time proportional to the changed elements. Other slices are held whole and pass through
the engine's own reload, with all slices of the same modules. Changes over the memory limit are verified now and read
again in the commit.

**Invariants.**
- `stage` does not write to engine memory. Any error in it leaves the engine unchanged.
- XOR masks apply only to the weights that they were computed from. `StagedUpdate.base` is the digest of these weights,
  and `check_base` compares it before the first commit.
- `content` is None whenever the weights are not known: during a commit, after a failed one, and after a reload by
  another loader.
- The flips of one update have no element in common, so threads may apply them in any order.

**What can go wrong.** Between two updates an engine may free or move its memory (sleep modes), or receive weights in
another way. `check` therefore compares storages and sampled elements before a commit; `attest` compares the digests of
whole slices. A store may become unreadable before changes over the limit are read again. The engine's own reload may
fail or skip a module, so `rehearse` runs it without writing. An error in `commit` leaves a mixture, and the caller must
stop the engine or load it again. Needs torch at import time.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from relayout.checkpoint.converted import read_manifest_blob
from relayout.checkpoint.delta import RankState, is_delta, read_deltas
from relayout.checkpoint.step_chain import chain_to, follow
from relayout.checkpoint.trust import check_signers, policy_of
from relayout.core.digests import Hash, new_xxh3
from relayout.core.workers import check_stop, current_stop, each
from relayout.engines.load import EngineRank, WeightsLocation, open_converted, source_url
from relayout.engines.rank_weights import EngineOptions, RankWeights, listed
from relayout.errors import PlanError, about
from relayout.format.manifest import content_of
from relayout.format.steps_index import step_of
from relayout.live.recording import SliceLocations
from relayout.live.views import View
from relayout.loader.backends.base import kind_of
from relayout.loader.backends.cuda import pin
from relayout.loader.changes import ChangedPiece, PieceBatch, RankChanges
from relayout.loader.requests import num_cpus
from relayout.loader.sources.checkpoint import ConvertedRank
from relayout.storage.stores import scheme_of
from relayout.storage.system import Buffer

if TYPE_CHECKING:
    from relayout.loader.sources.rank import TensorColumns

Modules: TypeAlias = Sequence[torch.nn.Module] | None
"""Modules of an engine's model; None: all."""
Reload: TypeAlias = Callable[[Modules, Iterator[tuple[str, torch.Tensor]]], None]
"""The engine's own way to load modules again, from all tensors of these modules."""

_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE_NBYTES = 8 * 2**20
"""Bytes that are copied from a device at once for comparison."""
_NUM_SAMPLES = 64
"""Elements of each storage that are compared to detect other writers."""
_AT_ONCE = 2**14
"""Elements that are changed at once: few enough that the elements read are still in a core's cache when written."""
_SHARE = 2**18
"""Elements that one thread changes per task."""
_TRAVELLING = 4 * 2**20
"""Elements whose changes are in a device's memory at once, in addition to the weights: 72 MiB at two bytes each."""


@dataclass(frozen=True, slots=True)
class Content:
    """The identity of the weights that an engine has."""

    path: str
    """The path or URL of a converted folder."""
    deltas: tuple[str, ...]
    """The deltas that were applied to the folder, in this order."""
    digest: str
    """The digest of relayout.json of the result."""
    columns: TensorColumns
    """The rank's slices, without those of tensors that the engine takes whole."""
    state: RankState | None
    """The table and digests of these slices, which deltas apply to; None: the slices are assembled from those of other
    ranks."""

    @staticmethod
    def of(weights: RankWeights) -> Content:
        """Return the content that a rank's weights belong to."""
        deltas, source = weights.deltas or (), weights.opened.source
        paths = tuple(map(str, [deltas] if isinstance(deltas, str | os.PathLike) else deltas))
        content = content_of(read_manifest_blob(source.store))
        state = RankState.of(source.store, source.holder) if isinstance(source, ConvertedRank) else None
        columns, is_placed = source.columns(), weights.is_placed
        if is_placed is not None:
            parts = zip(columns.names, columns.parts, strict=True)
            columns = columns.rows(
                [row for row, (name, part) in enumerate(parts) if part.is_whole or not is_placed(name)]
            )
        return Content(weights.path, paths, content, columns, state)

    @property
    def digests(self) -> dict[str, str]:
        """The digests of the slices, by name. Empty if the slices are assembled from those of other ranks."""
        return {} if self.state is None else self.state.by_name

    def check_same_layout(self, new: Content, source: str) -> None:
        """Check that the rank has the same slices in other weights."""
        before, after = self._layout(), new._layout()
        if differing := [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]:
            count = len(differing)
            what = f"{count} tensors have another dtype, shape or slice than those of the engine, or are missing"
            raise PlanError(what, path=source, tensor=differing[0], code="mismatch")

    def _layout(self) -> dict[str, tuple[object, ...]]:
        columns = self.columns
        rows = zip(columns.dtypes, map(tuple, columns.source_shapes), columns.parts, strict=True)
        return dict(zip(columns.names, rows, strict=True))


@dataclass(frozen=True, slots=True)
class Flips:
    """The non-zero elements of an XOR delta for one storage: indices and XOR masks."""

    memory: int
    """The number of the storage."""
    indices: npt.NDArray[np.integer]
    """The indices of the elements, counted from the start of the storage. None occurs twice."""
    bits: npt.NDArray[np.unsignedinteger]
    """The XOR mask of each element."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self.indices.nbytes + self.bits.nbytes

    def shares(self) -> Iterator[Flips]:
        """Yield the parts that threads apply at the same time."""
        for first in range(0, len(self.bits), _SHARE):
            part = slice(first, first + _SHARE)
            yield replace(self, indices=self.indices[part], bits=self.bits[part])

    def apply(self, numbers: torch.Tensor) -> None:
        """Apply the masks to a storage, given as integers of the elements' width. A device receives them in parts."""
        if numbers.device.type == "cpu":
            memory = numbers.numpy().view(self.bits.dtype)
            for first in range(0, len(self.bits), _AT_ONCE):
                part = slice(first, first + _AT_ONCE)
                memory[self.indices[part].astype(np.intp)] ^= self.bits[part]
            return
        signed = self.bits.view(f"i{self.bits.itemsize}" if self.bits.itemsize > 1 else "u1")
        for first in range(0, len(signed), _TRAVELLING):
            part = slice(first, first + _TRAVELLING)
            indices = torch.from_numpy(self.indices[part]).to(numbers.device).long()
            bits = torch.from_numpy(signed[part]).to(numbers.device)
            numbers.index_put_((indices,), numbers[indices] ^ bits)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class StagedUpdate:
    """New weights for an engine, read and verified."""

    base: str | None
    """The digest of relayout.json of the weights that the engine must have for this; None: any weights."""
    content: Content
    """The content of the engine after the commit."""
    flips: Sequence[Flips]
    """The changes of parameters, as far as they are held in memory."""
    changes: RankChanges | None
    """The changes that deltas contain; None: the new weights do not come as deltas."""
    left: Sequence[PieceBatch]
    """Batches of `changes` that exceeded the memory limit and are read again in the commit."""
    modules: frozenset[str] | None
    """The names of the modules that the engine loads again; None: all."""
    tensors: RankWeights | None
    """The slices that are taken whole: those of `modules`, or all."""
    held: Sequence[tuple[str, torch.Tensor]] | None
    """The slices of `tensors`, if they are held in memory; None: they are read again in the commit."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return sum(one.nbytes for one in self.flips) + sum(tensor.nbytes for _, tensor in self.held or ())

    def pin(self, device: torch.device) -> bool:
        """Pin the held memory for copies to a CUDA device; return True if all of it is pinned."""
        memory = [(array.ctypes.data, array.nbytes) for one in self.flips for array in (one.indices, one.bits)]
        of_storage: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        for _, tensor in self.held or ():
            local = _local(tensor)
            of_storage[local.untyped_storage().data_ptr()].append(local)
        for tensors in of_storage.values():  # CUDA refuses memory that is partly pinned already: neighbors share pages.
            start = min(tensor.data_ptr() for tensor in tensors)
            memory.append((start, max(tensor.data_ptr() + tensor.nbytes for tensor in tensors) - start))
        return pin(self, memory, device)

    @property
    def left_nbytes(self) -> int:
        """Bytes that are read in the commit, because they are not held."""
        of_deltas = 0 if self.changes is None else sum(map(self.changes.stored_nbytes, self.left))
        is_read = self.tensors is not None and self.held is None
        return of_deltas + (sum(self.tensors.opened.contents.sizes()) if is_read and self.tensors is not None else 0)


@dataclass(frozen=True, slots=True)
class Attestation:
    """The result of comparing a worker's parameters with digests."""

    content: str
    """The digest of relayout.json of the worker's weights."""
    verified: int
    """Number of slices whose elements in the parameters have the slice's digest."""
    unverified: tuple[str, ...]
    """Slices that the engine has transformed, or whose digest is not known."""
    difference: str | None
    """The first slice that differs; None: no slice differs."""


class LiveWeights:
    """The weights of one worker of an engine. One thread may stage at a time; nothing else runs during a commit."""

    def __init__(self, recorded: SliceLocations, engine: EngineRank, options: EngineOptions, content: Content) -> None:
        self.recorded = recorded
        self._engine, self._options = engine, options
        self.first = content
        """The content at the start, which defines the slices that the worker takes."""
        self.content: Content | None = content
        """The current content; None: another loader has written since, or a commit has begun and has not ended."""
        self._samples = _samples_of(recorded)
        self._left = self._look()
        """Sampled parameter bytes after relayout's last write. None: another writer has written since, or a storage was
        freed."""

    def loaded_again(self, content: Content | None) -> None:
        """Note that another loader has loaded the engine again, and the content that it then has."""
        self.content, self._left = content, None

    def _look(self) -> bytes | None:
        """Return the sampled bytes; None: a storage was freed."""
        if any(memory.expired() for memory in self.recorded.memories.values()):  # type: ignore[no-untyped-call]
            return None
        numbers = _Numbers(self.recorded)
        found = [numbers.of(memory, width)[indices].view(torch.uint8) for (memory, width), indices in self._samples]
        return torch.cat(found).cpu().numpy().tobytes() if found else b""

    def known_content(self) -> Content:
        """Return the current content. Raise PlanError if it is not known."""
        if self.content is None:
            what = "the engine's weights were loaded again by others, or in part: give it a converted folder"
            raise PlanError(what, code="unsupported")
        return self.content

    def stage(
        self,
        sources: Sequence[str],
        before: Content | None,
        memory: int,
        *,
        step: int | None = None,
        threads: int = 1,
    ) -> StagedUpdate:
        """Read and verify new weights; `core.workers.heeding` lets another thread stop it.

        Args:
            sources: deltas in the order in which they apply; or a converted folder, and deltas for it; or one step
                repository, to which a `relayout.Publisher` publishes.
            before: the content that the engine will have before this commit; None: unknown.
            memory: the most bytes of host memory that may be held afterwards.
            step: the step of a step repository; None: the newest.
        """
        staged = self._stage_chain(sources, before, memory, step, threads)
        device = torch.device(self._engine.device)
        if kind_of(device) == "cuda" and not staged.pin(device):
            self._engine.logger.warning("relayout: staged bytes cannot be pinned: the commit takes longer")
        return staged

    def _stage_chain(
        self, sources: Sequence[str], before: Content | None, memory: int, step: int | None, threads: int
    ) -> StagedUpdate:
        """Stage the chain from the engine's content, or another chain if files of the first were deleted meanwhile."""
        have = None if before is None else before.digest

        def find(has: bool) -> Sequence[str] | None:
            is_place = len(sources) == 1 and scheme_of(source_url(sources[0], None)) != "hf"
            return chain_to(sources[0], have if has else None, step) if is_place else None

        def stage(way: Sequence[str] | None) -> StagedUpdate:
            if way and step is None:
                self._check_goes_on(way[-1])
            return self._stage(sources if way is None else way, before, memory, threads)

        return follow(find, stage, ", ".join(sources))

    def _check_goes_on(self, newest: str) -> None:
        """Check, under a policy, that the newest step of a repository is not older than the engine's step."""
        has = self.content
        if policy_of(None) is None or has is None:
            return
        old, new = (step_of(path.rstrip("/").rpartition("/")[2]) for path in ((has.path, *has.deltas)[-1], newest))
        if old is not None and new is not None and new < old:
            what = f"its newest step is {new}, and the engine has step {old}: name the step to go back to"
            raise PlanError(what, path=newest, code="mismatch")

    def _stage(self, sources: Sequence[str], before: Content | None, memory: int, threads: int) -> StagedUpdate:
        for source in sources:  # Before the first request to it.
            check_signers(source)
        # This rank's table determines the changes, and has no entry for slices of other ranks.
        if others := set(self.recorded.views).difference(self.first.columns.names):
            what = f"{self._engine.name} uses parts of {listed(sorted(others))} that its rank does not hold"
            raise PlanError(f"{what}, which cannot be updated: start it again", code="unsupported")
        if not sources:  # The engine has this step.
            has = before or self.known_content()
            return StagedUpdate(has.digest, has, (), None, (), frozenset(), None, None)
        folders = [number for number, source in enumerate(sources) if not is_delta(source)]
        for number in folders:
            WeightsLocation(source_url(sources[number], None)).check_policy()
        if folders:
            path, deltas = sources[folders[-1]], tuple(sources[folders[-1] + 1 :])
            return self._stage_whole(path, deltas, before, memory)
        before = before or self.known_content()
        if before.state is None:
            return self._stage_whole(before.path, (*before.deltas, *sources), before, memory)
        return self._stage_deltas(sources, before, before.state, memory, threads)

    def _stage_deltas(
        self, sources: Sequence[str], before: Content, state: RankState, memory: int, threads: int
    ) -> StagedUpdate:
        recorded, found = self.recorded, list(read_deltas(sources, policy_of(None)))
        names = {*recorded.views, *recorded.reloaded}
        changes = RankChanges.of(found, state, "what the engine has", names)
        decoded, batches = _Decoded(recorded, memory), changes.batches()
        changes.run(batches, decoded.hold, threads)
        # Slices of other ranks are not among this rank's changes: treat them as changed.
        modules = recorded.modules_of(decoded.changed.union(set(recorded.reloaded).difference(before.columns.names)))
        self._check_loaded_again(modules)
        whole = recorded.slices_of(modules)
        deltas = (*before.deltas, *sources)
        tensors = self._weights(before.path, deltas, whole) if whole else None
        if modules is None:  # All slices are taken whole.
            flips, left = [], []
        else:
            flips, left = decoded.flips(), [] if decoded.is_complete else batches
        held = None if tensors is None else _held(tensors, memory - sum(one.nbytes for one in flips))
        content = replace(before, deltas=deltas, digest=changes.state.content, state=changes.state)
        return StagedUpdate(before.digest, content, flips, changes, left, modules, tensors, held)

    def _stage_whole(self, path: str, deltas: tuple[str, ...], before: Content | None, memory: int) -> StagedUpdate:
        weights, recorded = open_converted(WeightsLocation(path), deltas, self._options, self._engine), self.recorded
        content = Content.of(weights)
        self.first.check_same_layout(content, path)
        used = {*recorded.views, *recorded.reloaded}
        old, new = {} if before is None else before.digests, content.digests
        # Equal digests of one algorithm mean unchanged; a missing digest or another algorithm counts as changed.
        changed = frozenset(name for name in used if name not in new or old.get(name) != new[name])
        modules = recorded.modules_of(changed)
        self._check_loaded_again(modules)
        tensors = self._weights(path, deltas, changed.intersection(recorded.views) | recorded.slices_of(modules))
        base = None if before is None else before.digest
        return StagedUpdate(base, content, (), None, (), modules, tensors, _held(tensors, memory))

    def _check_loaded_again(self, modules: frozenset[str] | None) -> None:
        """Check that the engine can load modules again."""
        fixed = self.recorded.fixed
        if stuck := sorted(fixed if modules is None else fixed & modules):
            who = f"{self._engine.name}'s own reload"
            what = f"{who} passes over {listed(stuck)}, which it has made something else of: start the engine again"
            raise PlanError(what, code="unsupported")

    def _weights(self, path: str, deltas: tuple[str, ...], names: frozenset[str]) -> RankWeights:
        """Return these slices of a folder with deltas applied, with every byte verified."""
        engine = self._engine
        only = replace(engine, is_skipped=lambda name: name not in names or engine.is_skipped(name))
        return replace(
            open_converted(WeightsLocation(path), deltas, self._options, only), device="cpu", small_first=True
        )

    def rehearse(self, staged: StagedUpdate, model: torch.nn.Module, rehearse: Reload) -> None:
        """Call `rehearse` with the modules and slices that `commit` would let the engine load again, if any.

        Slices that are not held come without values.
        """
        modules, there = self._modules(staged), set(model.modules())
        if not there.issuperset(modules or ()):
            what = "the engine has replaced a module since it was loaded: restart it"
            raise PlanError(what, code="unsupported")
        again = self.recorded.slices_of(staged.modules)
        if again and staged.tensors is not None:
            held = staged.tensors.without_values() if staged.held is None else staged.held
            rehearse(modules, (one for one in staged.tensors.deliver(held) if one[0] in again))

    def _modules(self, staged: StagedUpdate) -> Modules:
        """Return the modules that the engine loads again, without modules that existed only during the load."""
        if staged.modules is None:
            return None
        found = [self.recorded.modules[name]() for name in sorted(staged.modules) if name in self.recorded.modules]
        modules = [one for one in found if one is not None]
        if len(modules) < len(found):
            what = "the engine has removed a module that it was loaded with: start it again"
            raise PlanError(what, code="unsupported")
        return modules

    def check(self, model: torch.nn.Module) -> None:
        """Check that recorded parameters have not moved, and forget the content if sampled elements have changed.

        Engines free memory and allocate other memory instead (their sleep modes), and receive weights in other ways.
        Only some elements of each storage are compared: `attest` is needed to find a few elements changed by hand.

        Raises:
            PlanError: the engine has moved parameters since.
        """
        there = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        for name, views in self.recorded.views.items():
            if not there.issuperset(view.memory for view in views):
                what = "the engine has moved the parameter since it was loaded: start it again"
                raise PlanError(what, tensor=name, code="unsupported")
        if self.content is not None and self._left not in (None, self._look()):
            self._engine.logger.warning("relayout: the engine's memory has other weights than were put there")
            self.content = None

    def check_base(self, staged: Sequence[StagedUpdate]) -> None:
        """Check, before the first commit, that the engine has the content that each update was staged for."""
        has = None if self.content is None else self.content.digest
        for one in staged:
            if one.base not in (None, has):
                what = f"is for an engine with content {one.base}, which has {has or 'unknown content'} now"
                raise PlanError(f"the staged update {what}: stage it again", code="mismatch")
            has = one.content.digest

    def commit(self, staged: StagedUpdate, reload: Reload) -> None:
        """Write the new weights to the engine. After an error its weights are a mixture."""
        numbers, self.content = _Numbers(self.recorded), None
        targets = [(flips, numbers.of(flips.memory, flips.bits.itemsize)) for flips in staged.flips]
        for flips, target in targets:
            if target.device.type != "cpu":
                flips.apply(target)
        # No element occurs twice; other workers of the machine commit at the same time.
        shares = [(one, target) for flips, target in targets if target.device.type == "cpu" for one in flips.shares()]
        each(lambda share: share[0].apply(share[1]), shares, max(1, num_cpus() // self._engine.num_ranks))
        if staged.changes is not None and staged.left:
            lock = threading.Lock()

            def change(piece: ChangedPiece, buffer: Buffer) -> None:
                for _, flips in _flips_of(piece, buffer, self.recorded):
                    if flips is None:
                        continue
                    with lock:
                        flips.apply(numbers.of(flips.memory, flips.bits.itemsize))

            staged.changes.run(staged.left, change, threads=2)
        if staged.tensors is not None:
            self._take(staged, numbers, reload)
        self._left = self._look()
        self.content = staged.content

    def _take(self, staged: StagedUpdate, numbers: _Numbers, reload: Reload) -> None:
        """Give whole slices to the engine; copy those that lie unchanged in parameters directly to the parameters."""
        assert staged.tensors is not None
        views, again = self.recorded.views, self.recorded.slices_of(staged.modules)
        delivery = staged.tensors.deliver(staged.held)

        def others() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in delivery:
                if name in again:
                    yield name, tensor
                elif name in views:
                    local = _local(tensor).view(-1).view(_NUMBERS[views[name][0].itemsize])
                    for view in views[name]:
                        target = numbers.of(view.memory, view.itemsize).as_strided(*view.of_memory)
                        size, steps, start = view.of_slice
                        target.copy_(local.as_strided(size, steps, start + local.storage_offset()))

        if again:
            reload(self._modules(staged), others())
        else:
            for _ in others():
                raise AssertionError("nothing is loaded again")

    def attest(self) -> Attestation:
        """Compare the parameters with the digests of the weights that the worker should have."""
        content, recorded = self.known_content(), self.recorded
        digests = content.digests
        unverified = list(recorded.reloaded)
        verified, difference = 0, None
        numbers = _Numbers(recorded)
        sizes = dict(zip(content.columns.names, content.columns.sizes(), strict=True))
        for name, views in recorded.views.items():
            digest = digests.get(name)
            is_same = None if digest is None else _has_digest(views, sizes[name], numbers, content, digest)
            if is_same is None:
                unverified.append(name)
            elif is_same:
                verified += 1
            else:
                difference = difference or name
        return Attestation(content.digest, verified, tuple(sorted(unverified)), difference)


class _Decoded:
    """Decoded deltas, held until they exceed a limit. Several threads may call `hold`."""

    def __init__(self, recorded: SliceLocations, limit: int) -> None:
        self._recorded, self._limit, self._lock = recorded, limit, threading.Lock()
        self._flips: defaultdict[tuple[int, object, object], list[Flips]] = defaultdict(list)
        """The held changes, by storage and by the dtypes of indices and masks."""
        self.changed: set[str] = set()
        """Slices that change and are loaded again."""
        self.is_complete = True
        self._nbytes = 0
        self._stop = current_stop()

    def hold(self, piece: ChangedPiece, buffer: Buffer) -> None:
        """Decode a piece and hold its changes. The piece is verified even if it is not held."""
        check_stop(self._stop)
        for name, flips in _flips_of(piece, buffer, self._recorded):
            with self._lock:
                if flips is None:
                    self.changed.add(name)
                    continue
                self._nbytes += flips.nbytes
                self.is_complete &= self._nbytes <= self._limit
                if self.is_complete:
                    self._flips[flips.memory, flips.indices.dtype, flips.bits.dtype].append(flips)
                else:
                    self._flips.clear()

    def flips(self) -> list[Flips]:
        """Return the held changes, joined: a commit on a device takes as long for a few elements as for many.

        Pieces have no element in common, since each piece contains the changes of all deltas to it.
        """
        joined = []
        while self._flips:
            (memory, *_), parts = self._flips.popitem()
            indices, bits = ([getattr(one, of) for one in parts] for of in ("indices", "bits"))
            joined.append(Flips(memory, np.concatenate(indices), np.concatenate(bits)))
        return joined


class _Numbers:
    """The storages of views, as writable integer tensors."""

    def __init__(self, recorded: SliceLocations) -> None:
        self._recorded = recorded
        self._found: dict[tuple[int, int], torch.Tensor] = {}
        self._pinned: torch.Tensor | None = None

    def of(self, memory: int, itemsize: int) -> torch.Tensor:
        """Return a whole storage, as integers of this width."""
        found = self._found.get((memory, itemsize))
        if found is None:
            storage = torch.UntypedStorage._new_with_weak_ptr(self._recorded.memories[memory].cdata)
            assert storage is not None  # `check` came before.
            found = torch.empty(0, dtype=_NUMBERS[itemsize], device=storage.device)
            found.set_(storage, 0, (storage.nbytes() // itemsize,), (1,))
            self._found[memory, itemsize] = found
        return found

    def on_host(self, piece: torch.Tensor) -> memoryview:
        """Return the bytes of a piece, in dense order, valid until the next call."""
        if piece.device.type != "cpu" and piece.nbytes <= _PIECE_NBYTES:
            if self._pinned is None:
                self._pinned = torch.empty(_PIECE_NBYTES, dtype=torch.uint8, pin_memory=True)
            piece = self._pinned[: piece.nbytes].view(piece.dtype).view(piece.shape).copy_(piece)
        return piece.contiguous().cpu().numpy().data.cast("B")


def _samples_of(recorded: SliceLocations) -> list[tuple[tuple[int, int], torch.Tensor]]:
    """Return sample indices spread over the views of each storage, with its number and the bytes of an element."""
    of_memory: defaultdict[tuple[int, int], list[View]] = defaultdict(list)
    for view in chain.from_iterable(recorded.views.values()):
        of_memory[view.memory, view.itemsize].append(view)
    samples = []
    for key, views in of_memory.items():
        chosen = views[:: -(-len(views) // _NUM_SAMPLES)]
        count = _NUM_SAMPLES // len(chosen)
        indices = [view.place(at * view.num_elements // count) for view in chosen for at in range(count)]
        samples.append((key, torch.tensor(indices)))
    return samples


def _flips_of(piece: ChangedPiece, buffer: Buffer, recorded: SliceLocations) -> Iterator[tuple[str, Flips | None]]:
    """Yield the changes of each slice in a piece; None in place of the changes: the slice is loaded again."""
    views_of = [recorded.views.get(part.name) for part in piece.parts]
    widths = [None if views is None else views[0].itemsize for views in views_of]
    found = piece.changes(widths, buffer)
    for part, views, (changed, bits) in zip(piece.parts, views_of, found, strict=True):
        if views is None:
            if len(changed):
                yield part.name, None
            continue
        numbers = changed + part.offset // views[0].itemsize
        for view in views:
            if len(numbers) and view.source <= numbers[-1] and numbers[0] < view.end:
                has, indices = view.indices(numbers)
                if len(indices):
                    is_short = view.target_end < 2**31
                    yield part.name, Flips(view.memory, indices.astype(np.int32) if is_short else indices, bits[has])


def _held(tensors: RankWeights, memory: int) -> list[tuple[str, torch.Tensor]] | None:
    """Return the slices if they fit in `memory` bytes, else None; verify them in either case."""
    fits = sum(tensors.opened.contents.sizes()) <= memory
    held = []
    with about(path=tensors.path):
        for name, tensor in tensors.stream():
            check_stop(current_stop())
            if fits:
                held.append((name, tensor))
    return held if fits else None


def _has_digest(views: Sequence[View], nbytes: int, numbers: _Numbers, content: Content, digest: str) -> bool | None:
    """Return True if a slice's elements in memory, in slice order, have a digest; None: views do not cover the slice.

    A slice that lies in several locations is compared in each.
    """
    count = nbytes // views[0].itemsize
    left = sorted(views, key=lambda view: view.source)
    while left:
        found, end = new_xxh3(), 0
        for view in tuple(left):
            if view.source == end and view.num_elements == view.end - view.source:
                left.remove(view)
                end = view.end
                _update(found, view, numbers)
        if end != count:
            return None
        if found.hexdigest() != digest:
            return False
    return True


def _update(digest: Hash, view: View, numbers: _Numbers) -> None:
    """Hash the elements of a view, piece by piece."""
    (count, *inner), steps, start = view.size, view.of_memory[1], view.target
    length = max(1, _PIECE_NBYTES // (view.itemsize * prod(inner)))
    memory = numbers.of(view.memory, view.itemsize)
    for first in range(0, count, length):
        size = (min(length, count - first), *inner)
        digest.update(numbers.on_host(memory.as_strided(size, steps, start + first * steps[0])))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    from relayout.engines.global_tensor import GlobalTensor

    return tensor._memory.local if isinstance(tensor, GlobalTensor) else tensor
