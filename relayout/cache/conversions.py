"""Conversions of plain checkpoints that a cache keeps: the first load makes one, and later loads read it.

The processes of a machine that load at the same time convert together. Each takes units whose lock it gets, so that
every byte of the source is read once. The system releases the locks of a process that ends, however it ends, and
another process converts its unit again. The entry is published as any output is: as a whole, or not at all. An entry
in which something is missing is made again. Where others hold what is left and do nothing, this is an error, and
whoever loads reads the source.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from relayout.cache.folder import Cache, HeldEntry
from relayout.checkpoint.converted import check_intact
from relayout.checkpoint.source import SourceCheckpoint, identity_of, read_source
from relayout.conversion.jobs import commit_units, convert_unit
from relayout.conversion.layout import DEFAULT_MAX_PART_NBYTES, Conversion
from relayout.conversion.resume import fingerprint_of
from relayout.conversion.run import needed_for
from relayout.core.arguments import ranks_text
from relayout.core.digests import digest_hex
from relayout.errors import PlanError
from relayout.format.fields import parse_object
from relayout.format.index import MANIFEST_NAME
from relayout.format.manifest import compact_json
from relayout.plans.plan import Plan
from relayout.plans.planner import plan_for
from relayout.reporting import Progress, reporting
from relayout.storage.local.descriptors import Waiting, holder_in
from relayout.storage.local.store import LocalStore
from relayout.storage.stores import Kind, Store

MODEL = "model"
"""The converted checkpoint in an entry."""
_PLAN = "plan.json"
_NUM_UNITS = 16
"""About how many parts the processes share. Each has a file for each rank."""
_MIN_PART_NBYTES = 64 * 2**20
_MEMORY = 128 * 2**20
"""Bytes of buffers of one process: all ranks of a node may take part."""
_REMOTE_LIMIT_SECONDS = 60.0
"""How long others may write nothing of what they read from a server: some buffers, or a request that is repeated."""
_LOADS_LIMIT_SECONDS = 600.0
"""How long a conversion waits for engines that load, all in all."""
_LOOK_SECONDS = 0.1
"""How often it looks whether they do."""
_PLAN_LIMIT_SECONDS = 300.0
"""How long another process may observe a plan."""
_OBSERVED = frozenset({"no_plan", "no_rule", "unsupported"})
"""Codes of errors that an observed plan avoids: no rules for the model type, for a tensor, or for a quantized form. An
observed slice is what the engine's own loader has read, so it needs no rules. Where the engine refuses, so does it."""

FindPlan = Callable[[SourceCheckpoint, int], Plan]
"""Finds the plan of a checkpoint for so many ranks. Raises PlanError: there is none."""


class NotKept(Exception):
    """No plan is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptConversion(LocalStore):
    """A converted checkpoint in a cache, which is not removed while this object lives."""

    entry: HeldEntry


def kept_conversion(
    source: Store,
    num_ranks: int,
    cache: Cache,
    find_plan: FindPlan = plan_for,
    *,
    ranks: Collection[int] | None = None,
    on_miss: Callable[[Conversion], None] | None = None,
    progress: Progress = None,
    behind_loads: bool = False,
) -> KeptConversion:
    """Return the conversion of a plain checkpoint in a cache. If it is not there, make it now.

    An entry is of one source (`checkpoint.source`), one plan and degree, the same ranks, and one version of the
    format. Other processes that call this at the same time take part in making it.

    Args:
        source: a folder, file or prefix, read by this process and by others that take part.
        ranks: convert only these, such as those of this machine, and read only what they need; None: all.
        on_miss: called before this process converts anything.
        progress: of what this process converts.
        behind_loads: convert while no engine of this machine loads; see `_Loads`.
    """
    planned, entry = _entry(source, num_ranks, cache, find_plan, ranks)
    if not _is_published(planned):
        if on_miss is not None:
            on_miss(planned)
        _convert_together(planned, cache, entry, progress, _Loads(cache, _LOADS_LIMIT_SECONDS if behind_loads else 0.0))
    return KeptConversion(folder=entry.folder / MODEL, entry=entry)


def find_conversion(
    source: Store, num_ranks: int, cache: Cache, find_plan: FindPlan = plan_for, *, ranks: Collection[int] | None = None
) -> KeptConversion | None:
    """Return the same if it is there, else None. What is damaged is removed."""
    planned, entry = _entry(source, num_ranks, cache, find_plan, ranks)
    return KeptConversion(folder=entry.folder / MODEL, entry=entry) if _is_published(planned) else None


def _entry(
    source: Store, num_ranks: int, cache: Cache, find_plan: FindPlan, ranks: Collection[int] | None
) -> tuple[Conversion, HeldEntry]:
    """Plan what an entry has, and hold it. What was published there is as its manifest says: see `check_intact`."""
    checkpoint = read_source(source)
    plan = find_plan(checkpoint, num_ranks)
    part_nbytes = checkpoint.nbytes // (num_ranks * _NUM_UNITS)
    part_nbytes = min(max(part_nbytes, _MIN_PART_NBYTES), DEFAULT_MAX_PART_NBYTES)
    nowhere = LocalStore(folder=Path(cache.folder))
    conversion = Conversion.lay_out(nowhere, checkpoint, plan, max_part_nbytes=part_nbytes, ranks=ranks)
    fingerprint = fingerprint_of(conversion, identity_of(checkpoint).here)
    entry = cache.hold(digest_hex(compact_json([fingerprint.source, fingerprint.options])), _check_published)
    return replace(conversion, output=LocalStore(entry.folder / MODEL)), entry


def _check_published(entry: HeldEntry) -> None:
    """Raise FormatError if there is something, and not all that its manifest lists, with the same lengths and heads."""
    output = LocalStore(entry.folder / MODEL)
    if output.kind() is not Kind.NOTHING:
        check_intact(output)


class _Loads:
    """Lets the engines of this machine load first, which share its drive and processors with a conversion.

    A wait ends when none loads any more, and none can keep it up: an engine that ends, however it ends, has given up
    its lock; for those that hang all waits together have a limit, after which the conversion goes on beside them.
    """

    def __init__(self, cache: Cache, limit_seconds: float) -> None:
        """`limit_seconds` is for all waits together."""
        self._cache = cache
        self._left = limit_seconds

    def wait(self) -> bool:
        """Wait; return whether there was anything to wait for."""
        begun = time.monotonic()
        end = begun + self._left
        has_waited = False
        while time.monotonic() < end and self._cache.is_loading():
            has_waited = True
            time.sleep(_LOOK_SECONDS)
        self._left -= time.monotonic() - begun
        return has_waited


def _convert_together(planned: Conversion, cache: Cache, entry: HeldEntry, progress: Progress, loads: _Loads) -> None:
    """Convert what no other process is converting, until the output is there."""
    entry.was_filled = True
    files = {f"{MODEL}/{file.name}": file.nbytes for file in planned.layout.files}
    others_nbytes = needed_for(planned)[0] - planned.layout.nbytes
    reservation = cache.reserve(entry, files | {f"{MODEL}/{MANIFEST_NAME}": others_nbytes})
    if reservation is None:
        what = f"the cache has no room for {sum(files.values()) / 1e9:.3f} GB, by its limit or that of the drive"
        raise OSError(errno.ENOSPC, what, os.fspath(cache.folder))
    units = planned.layout.units
    with reservation, reporting(progress, "converting", sum(map(planned.nbytes_of, units))) as report:
        some = "" if planned.has_all else ranks_text(planned.ranks)
        entry.describe(str(planned.source.root), planned.plan.num_ranks, some)
        left = set(range(len(units)))
        limit_seconds = _REMOTE_LIMIT_SECONDS if planned.source.folder.cost.is_remote else None
        waiting = Waiting(entry.folder, lambda: holder_in(*_locks(entry, left)), entry.growth, limit_seconds)
        while not _is_published(planned):
            if loads.wait():  # Before each unit, with no lock that another process could wait for.
                waiting.moved()
            if not _step(planned, entry, left):
                waiting.pause()
            else:
                waiting.moved()
                report(sum(planned.nbytes_of(unit) for index, unit in enumerate(units) if index not in left))


def _step(planned: Conversion, entry: HeldEntry, left: set[int]) -> bool:
    """Convert one unit of those that are left, or publish when there are none.

    Nobody converts while another publishes: what it wrote would be left over.

    Returns:
        Whether anything was done: else other processes hold the locks.
    """
    with entry.try_lock("publish", shared=True) as nobody_publishes:
        if not nobody_publishes or _is_published(planned):
            return False
        for unit in sorted(left):
            with entry.try_lock(f"unit-{unit}", what=f"converting unit {unit}") as is_locked:
                if is_locked:
                    convert_unit(planned, unit, memory=_MEMORY)
                    left.discard(unit)
                    return True
    with entry.try_lock("publish", what="publishing the conversion") as nobody_converts:
        if left or not nobody_converts or _is_published(planned):
            return False
        commit_units(planned)
        return True


def _locks(entry: HeldEntry, left: Collection[int]) -> list[Path]:
    """The locks that a process may wait for."""
    return [entry.lock_file("publish"), *(entry.lock_file(f"unit-{unit}") for unit in sorted(left))]


def _is_published(planned: Conversion) -> bool:
    return planned.output.stat(MANIFEST_NAME) is not None


def plan_in(
    cache: Cache,
    checkpoint: SourceCheckpoint,
    num_ranks: int,
    *,
    expert_parallel: bool,
    observe: str | None,
    only_kept: bool = False,
) -> Plan:
    """Return the built-in plan of a checkpoint; if it has none, one that is observed once and kept in the cache.

    Args:
        expert_parallel: each rank owns whole experts; such a plan is not observed.
        observe: the engine that it is observed from, a key of `plans.family.ENGINES`; None: it is not observed.
        only_kept: do not observe one, which takes long.
    """
    try:
        return plan_for(checkpoint, num_ranks, expert_parallel=expert_parallel)
    except PlanError as error:
        if observe is None or expert_parallel or error.code not in _OBSERVED:
            raise
    # Imported here: planning by an engine is rare, and starts of engines import this module.
    from relayout.conversion.planning import observer

    name, find = observer(observe)
    headers = [digest_hex(file.header) for file in checkpoint.files]
    key = compact_json([name, num_ranks, checkpoint.config, headers])
    with cache.hold(digest_hex(key), _check_plan) as entry:
        if only_kept and not entry.has(_PLAN):
            raise NotKept

        def observed() -> bytes:
            return compact_json(find(checkpoint, num_ranks).as_json())

        entry.keep_small(_PLAN, observed, limit_seconds=_PLAN_LIMIT_SECONDS)  # One process at a time observes.
        return _read_plan(entry)


def _check_plan(entry: HeldEntry) -> None:
    """Delete what is kept in the place of a plan, and is none."""
    if entry.has(_PLAN):
        entry.forget_damaged(_PLAN, lambda: _read_plan(entry))


def _read_plan(entry: HeldEntry) -> Plan:
    path = entry.folder / _PLAN
    return Plan.from_json(parse_object(path.read_bytes(), str(path)))
