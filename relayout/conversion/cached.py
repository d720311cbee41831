"""Conversions that a cache keeps: the first load of a plain checkpoint leaves one, later loads read it.

The processes of a machine that load at the same time convert together. Each takes units whose lock it gets, so that
every byte of the source is read once. The system releases the locks of a process that ends, however it ends, and
another process converts its unit again. The entry is published as any output is: as a whole, or not at all. An entry
in which something is missing is made again. Where others hold what is left and do nothing, this is an error, and
whoever loads reads the source.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from relayout.checkpoint.converted import check_intact
from relayout.checkpoint.source import SourceCheckpoint, identity_of, read_source
from relayout.conversion.jobs import commit_units, convert_unit
from relayout.conversion.layout import DEFAULT_MAX_PART_NBYTES, Conversion
from relayout.conversion.resume import fingerprint_of
from relayout.conversion.run import needed_nbytes
from relayout.core.arguments import ranks_text
from relayout.core.digests import digest_hex
from relayout.errors import FormatError, PlanError
from relayout.format.fields import parse_object
from relayout.format.index import MANIFEST_NAME
from relayout.format.manifest import compact_json
from relayout.plans.plan import Plan
from relayout.plans.planner import plan_for
from relayout.progress import Progress, reporting
from relayout.storage.cache_folder import Cache, Lease
from relayout.storage.local.lock_file import Waiting, holder_in
from relayout.storage.local.store import LocalStore
from relayout.storage.protocols import Kind, Store

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
_PLAN_LIMIT_SECONDS = 300.0
"""How long another process may observe a plan."""

FindPlan = Callable[[SourceCheckpoint, int], Plan]
"""Finds the plan of a checkpoint for so many ranks. Raises PlanError: there is none."""
Observer = tuple[str, FindPlan]
"""What an observed plan depends on beside checkpoint and degree, such as the engine's version; and what observes it."""


class NotKept(Exception):
    """No plan is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedConversion(LocalStore):
    """A converted checkpoint in a cache, which is not removed while this object lives."""

    lease: Lease


def cached_conversion(
    source: Store,
    num_ranks: int,
    cache: Cache,
    find_plan: FindPlan = plan_for,
    *,
    ranks: Collection[int] | None = None,
    on_miss: Callable[[Conversion], None] | None = None,
    progress: Progress = None,
) -> CachedConversion:
    """The conversion of a plain checkpoint in a cache, made now if it is not there.

    An entry is of one source (`checkpoint.identity`), one plan and degree, the same ranks, and one version of the
    format. Other processes that call this at the same time take part in making it.

    Args:
        source: a folder, file or prefix, read by this process and by others that take part.
        ranks: convert only these, such as those of this machine, and read only what they need; None: all.
        on_miss: called before this process converts anything.
        progress: of what this process converts.

    Raises:
        FormatError: the source is damaged, or has changed while it was read.
        PlanError: it has no plan for this degree, or the cache's folder is not relayout's.
        OSError: reading or writing failed, or the cache has no room for it.
    """
    planned, lease = _entry(source, num_ranks, cache, find_plan, ranks)
    lease = _without_damage(planned, cache, lease)
    if not _is_published(planned):
        if on_miss is not None:
            on_miss(planned)
        _convert_together(planned, cache, lease, progress)
    return CachedConversion(folder=lease.folder / MODEL, lease=lease)


def find_conversion(
    source: Store, num_ranks: int, cache: Cache, find_plan: FindPlan = plan_for, *, ranks: Collection[int] | None = None
) -> CachedConversion | None:
    """The same, if it is there. What is damaged is removed. Errors as of `cached_conversion`."""
    planned, lease = _entry(source, num_ranks, cache, find_plan, ranks)
    lease = _without_damage(planned, cache, lease)
    return CachedConversion(folder=lease.folder / MODEL, lease=lease) if _is_published(planned) else None


def _without_damage(planned: Conversion, cache: Cache, lease: Lease) -> Lease:
    """The entry, or a new one if something is wrong with what was published there.

    The proof: a file that its manifest lists is missing, or has another length, head or digest than that says; or a
    process that read it has found damage.

    Raises:
        PlanError: a process uses the entry, which therefore stays.
        OSError: the cache cannot be read or written.
    """
    if planned.output.kind() is Kind.NOTHING:
        return lease
    try:
        if not lease.is_doubted:
            check_intact(planned.output)
            return lease
        why = "was damaged when it was read"
    except FormatError as error:
        why = str(error)
    folder = lease.folder
    cache.put_aside(lease, why)
    return cache.lease(folder.name)


def _entry(
    source: Store, num_ranks: int, cache: Cache, find_plan: FindPlan, ranks: Collection[int] | None
) -> tuple[Conversion, Lease]:
    """What is to be done for an entry, and the entry."""
    checkpoint = read_source(source)
    plan = find_plan(checkpoint, num_ranks)
    part_nbytes = checkpoint.nbytes // (num_ranks * _NUM_UNITS)
    part_nbytes = min(max(part_nbytes, _MIN_PART_NBYTES), DEFAULT_MAX_PART_NBYTES)
    nowhere = LocalStore(folder=Path(cache.folder))
    conversion = Conversion.lay_out(nowhere, checkpoint, plan, max_part_nbytes=part_nbytes, ranks=ranks)
    fingerprint = fingerprint_of(conversion, identity_of(checkpoint).here)
    lease = cache.lease(digest_hex(compact_json([fingerprint.source, fingerprint.options])))
    return replace(conversion, output=LocalStore(folder=lease.folder / MODEL)), lease


def _convert_together(planned: Conversion, cache: Cache, lease: Lease, progress: Progress) -> None:
    """Convert what no other process is converting, until the output is there.

    Raises:
        FormatError, PlanError, OSError: as `cached_conversion`.
    """
    lease.was_filled = True
    files = {f"{MODEL}/{file.name}": file.nbytes for file in planned.layout.files}
    others_nbytes = needed_nbytes(planned) - planned.layout.nbytes
    reservation = cache.reserve(lease, files | {f"{MODEL}/{MANIFEST_NAME}": others_nbytes})
    if reservation is None:
        what = f"the cache has no room for {sum(files.values())} bytes"
        raise OSError(errno.ENOSPC, what, os.fspath(cache.folder))
    units = planned.layout.units
    with reservation, reporting(progress, "converting", sum(map(planned.nbytes_of, units))) as report:
        some = "" if planned.has_all else ranks_text(planned.ranks)
        lease.describe(str(planned.source.root), planned.plan.num_ranks, some)
        left = set(range(len(units)))
        limit_seconds = _REMOTE_LIMIT_SECONDS if planned.source.folder.cost.is_remote else None
        waiting = Waiting(lease.folder, lambda: holder_in(*_locks(lease, left)), lease.growth, limit_seconds)
        while not _is_published(planned):
            if not _step(planned, lease, left):
                waiting.pause()
            else:
                waiting.moved()
                report(sum(planned.nbytes_of(unit) for index, unit in enumerate(units) if index not in left))


def _step(planned: Conversion, lease: Lease, left: set[int]) -> bool:
    """Convert one unit of those that are left, or publish when there are none.

    Nobody converts while another publishes: what it wrote would be left over.

    Returns:
        Whether anything was done: else other processes hold the locks.
    """
    with lease.try_lock("publish", shared=True) as nobody_publishes:
        if not nobody_publishes or _is_published(planned):
            return False
        for unit in sorted(left):
            with lease.try_lock(f"unit-{unit}", what=f"converting unit {unit}") as is_locked:
                if is_locked:
                    convert_unit(planned, unit, memory=_MEMORY)
                    left.discard(unit)
                    return True
    with lease.try_lock("publish", what="publishing the conversion") as nobody_converts:
        if left or not nobody_converts or _is_published(planned):
            return False
        commit_units(planned)
        return True


def _locks(lease: Lease, left: Collection[int]) -> list[Path]:
    """The locks that a process may wait for."""
    return [lease.lock_file("publish"), *(lease.lock_file(f"unit-{unit}") for unit in sorted(left))]


def _is_published(planned: Conversion) -> bool:
    return planned.output.stat(MANIFEST_NAME) is not None


def plan_in(
    cache: Cache,
    checkpoint: SourceCheckpoint,
    num_ranks: int,
    *,
    expert_parallel: bool,
    observe: Callable[[], Observer] | None,
    only_kept: bool = False,
) -> Plan:
    """The plan of an entry: the built-in one, else one that is observed once and kept in the cache.

    Args:
        expert_parallel: each rank owns whole experts; such a plan is not observed.
        observe: returns what observes a plan; None: nothing does.
        only_kept: do not observe one, which takes long.

    Raises:
        NotKept: `only_kept`, and none is kept.
        PlanError, OSError: there is no plan, or as the observer, or the cache cannot be written.
    """
    try:
        return plan_for(checkpoint, num_ranks, expert_parallel=expert_parallel)
    except PlanError as error:
        if observe is None or expert_parallel or error.code != "no_plan":
            raise
    name, find = observe()
    headers = [digest_hex(file.header) for file in checkpoint.files]
    key = compact_json([name, num_ranks, checkpoint.config, headers])
    with cache.lease(digest_hex(key)) as lease:  # One process at a time observes.
        if (kept := _kept_plan(lease)) is not None:
            return kept
        if only_kept:
            raise NotKept

        def observed() -> bytes:
            return compact_json(find(checkpoint, num_ranks).as_json())

        lease.keep_small(_PLAN, observed, limit_seconds=_PLAN_LIMIT_SECONDS)
        return Plan.from_json(parse_object((lease.folder / _PLAN).read_bytes(), _PLAN))


def _kept_plan(lease: Lease) -> Plan | None:
    """The plan in an entry; None: there is none. What is no plan is deleted."""
    path = lease.folder / _PLAN

    def read() -> Plan:
        return Plan.from_json(parse_object(path.read_bytes(), str(path)))

    if lease.has(_PLAN):
        lease.forget_damaged(_PLAN, read)
    return read() if lease.has(_PLAN) else None
