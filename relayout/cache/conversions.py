"""Conversions of plain checkpoints in a cache: the first load creates one, and later loads read it.

Processes of one machine that load at the same time convert together. Each process converts the units that it can lock,
so every byte of the source is read once. The system releases the locks of a process that ends in any way, and another
process converts its unit again. The entry is published as any output is: as a whole, or not at all. An entry with
missing files is rebuilt. If other processes hold the locks of the remaining units and make no progress, this is an
error, and the caller loads from the source.
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
from relayout.core.digests import xxh3_hex
from relayout.errors import PlanError
from relayout.format.fields import parse_object
from relayout.format.index import MANIFEST_NAME
from relayout.format.manifest import compact_json
from relayout.plans.plan import Plan
from relayout.plans.planner import plan_for
from relayout.reporting import Progress, reporting
from relayout.storage.local.descriptors import LockWait, holder_in
from relayout.storage.local.store import LocalStore
from relayout.storage.stores import Kind, Store

MODEL = "model"
"""Name of the converted checkpoint in an entry."""
_PLAN = "plan.json"
_NUM_UNITS = 16
"""Approximate number of units that the processes share. Each unit has a file for each rank."""
_MIN_PART_NBYTES = 64 * 2**20
_MEMORY = 128 * 2**20
"""Bytes of buffers in one process: all ranks of a node may convert at the same time."""
_REMOTE_LIMIT_SECONDS = 60.0
"""Seconds without a write after which a wait fails if the source is remote: time for some buffers, or a repeated
request."""
_LOADS_LIMIT_SECONDS = 600.0
"""Seconds that a conversion waits for loading engines, in total."""
_LOOK_SECONDS = 0.1
"""Seconds between two checks for loading engines."""
_PLAN_LIMIT_SECONDS = 300.0
"""Maximum seconds of waiting for another process that observes a plan."""
_OBSERVED = frozenset({"no_plan", "no_rule", "unsupported"})
"""Codes of errors that an observed plan avoids: no rules for the model type, for a tensor, or for a quantized form.
An observed slice is read by the engine's own loader, so it needs no rules. If the engine rejects the model,
observing it fails, too."""

FindPlan = Callable[[SourceCheckpoint, int], Plan]
"""Finds the plan of a checkpoint for a number of ranks. Raises PlanError if no plan exists."""


class NoCachedPlan(Exception):
    """The cache contains no plan, and observing one is not allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedConversion(LocalStore):
    """A converted checkpoint in a cache. Its entry is not removed while this object lives."""

    entry: HeldEntry


def cached_conversion(
    source: Store,
    num_ranks: int,
    cache: Cache,
    find_plan: FindPlan = plan_for,
    *,
    ranks: Collection[int] | None = None,
    on_miss: Callable[[Conversion], None] | None = None,
    progress: Progress = None,
    behind_loads: bool = False,
) -> CachedConversion:
    """Return the conversion of a plain checkpoint in a cache. If it does not exist, create it now.

    An entry belongs to one source (`checkpoint.source`), plan, degree, set of ranks, and version of the format. Other
    processes that call this function at the same time take part in the conversion.

    Args:
        source: a folder, file or prefix, read by this process and by other processes that take part.
        ranks: the ranks to convert, such as those of this machine. Only their bytes are read. None: all ranks.
        on_miss: called before this process converts anything.
        progress: progress of the units that this process converts.
        behind_loads: True to convert only while no engine of this machine loads; see `_Loads`.
    """
    planned, entry = _entry(source, num_ranks, cache, find_plan, ranks)
    if not _is_published(planned):
        if on_miss is not None:
            on_miss(planned)
        _convert_together(planned, cache, entry, progress, _Loads(cache, _LOADS_LIMIT_SECONDS if behind_loads else 0.0))
    return CachedConversion(folder=entry.folder / MODEL, entry=entry)


def find_conversion(
    source: Store, num_ranks: int, cache: Cache, find_plan: FindPlan = plan_for, *, ranks: Collection[int] | None = None
) -> CachedConversion | None:
    """Return the conversion like `cached_conversion`, or None if it does not exist. Damaged entries are removed."""
    planned, entry = _entry(source, num_ranks, cache, find_plan, ranks)
    return CachedConversion(folder=entry.folder / MODEL, entry=entry) if _is_published(planned) else None


def _entry(
    source: Store, num_ranks: int, cache: Cache, find_plan: FindPlan, ranks: Collection[int] | None
) -> tuple[Conversion, HeldEntry]:
    """Plan the conversion of an entry, and hold the entry after `_check_published` has checked it."""
    checkpoint = read_source(source)
    plan = find_plan(checkpoint, num_ranks)
    part_nbytes = checkpoint.nbytes // (num_ranks * _NUM_UNITS)
    part_nbytes = min(max(part_nbytes, _MIN_PART_NBYTES), DEFAULT_MAX_PART_NBYTES)
    nowhere = LocalStore(folder=Path(cache.folder))
    conversion = Conversion.lay_out(nowhere, checkpoint, plan, max_part_nbytes=part_nbytes, ranks=ranks)
    fingerprint = fingerprint_of(conversion, identity_of(checkpoint).here)
    entry = cache.hold(xxh3_hex(compact_json([fingerprint.source, fingerprint.options])), _check_published)
    return replace(conversion, output=LocalStore(entry.folder / MODEL)), entry


def _check_published(entry: HeldEntry) -> None:
    """Raise FormatError if an output exists that lacks files of its manifest, or has other lengths or heads."""
    output = LocalStore(entry.folder / MODEL)
    if output.kind() is not Kind.NOTHING:
        check_intact(output)


class _Loads:
    """Delays a conversion while engines of this machine load: they share its drive and processors.

    A wait ends when no engine loads any more. An engine that ends in any way releases its lock. For engines that hang,
    all waits together have a time limit; then the conversion continues while they load.
    """

    def __init__(self, cache: Cache, limit_seconds: float) -> None:
        """Limit all waits together to `limit_seconds`."""
        self._cache = cache
        self._left = limit_seconds

    def wait(self) -> bool:
        """Wait, and return True if an engine was loading."""
        begun = time.monotonic()
        end = begun + self._left
        has_waited = False
        while time.monotonic() < end and self._cache.is_loading():
            has_waited = True
            time.sleep(_LOOK_SECONDS)
        self._left -= time.monotonic() - begun
        return has_waited


def _convert_together(planned: Conversion, cache: Cache, entry: HeldEntry, progress: Progress, loads: _Loads) -> None:
    """Convert the units that no other process is converting, until the output is published."""
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
        waiting = LockWait(entry.folder, lambda: holder_in(*_locks(entry, left)), entry.growth, limit_seconds)
        while not _is_published(planned):
            if loads.wait():  # Before each unit, without a lock that another process could wait for.
                waiting.moved()
            if not _step(planned, entry, left):
                waiting.pause()
            else:
                waiting.moved()
                report(sum(planned.nbytes_of(unit) for index, unit in enumerate(units) if index not in left))


def _step(planned: Conversion, entry: HeldEntry, left: set[int]) -> bool:
    """Convert one of the remaining units, or publish if none remains.

    No process converts a unit while another one publishes: the unit's files would be left over.

    Returns:
        True if a unit was converted or the output published. False: other processes hold the locks.
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
    """Return the lock files that a process may wait for."""
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
    """Return the built-in plan of a checkpoint; if there is none, a plan that is observed once and then cached.

    Args:
        expert_parallel: True if each rank owns whole experts. Such a plan is not observed.
        observe: the engine to observe, a key of `plans.family.ENGINES`. None: no plan is observed.
        only_kept: True to return only a cached plan, because observing one takes long.
    """
    try:
        return plan_for(checkpoint, num_ranks, expert_parallel=expert_parallel)
    except PlanError as error:
        if observe is None or expert_parallel or error.code not in _OBSERVED:
            raise
    # Imported on use: planning by an engine is rare, and engines import this module when they start.
    from relayout.conversion.planning import observer

    name, find = observer(observe)
    headers = [xxh3_hex(file.header) for file in checkpoint.files]
    key = compact_json([name, num_ranks, checkpoint.config, headers])
    with cache.hold(xxh3_hex(key), _check_plan) as entry:
        if only_kept and not entry.has(_PLAN):
            raise NoCachedPlan

        def observed() -> bytes:
            return compact_json(find(checkpoint, num_ranks).as_json())

        entry.keep_small(_PLAN, observed, limit_seconds=_PLAN_LIMIT_SECONDS)  # Only one process at a time observes.
        return _read_plan(entry)


def _check_plan(entry: HeldEntry) -> None:
    """Delete a cached plan that does not parse."""
    if entry.has(_PLAN):
        entry.forget_damaged(_PLAN, lambda: _read_plan(entry))


def _read_plan(entry: HeldEntry) -> Plan:
    path = entry.folder / _PLAN
    return Plan.from_json(parse_object(path.read_bytes(), str(path)))
