"""`cache`: lists the entries of a cache, adds a conversion, and removes entries."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from relayout.cache.conversions import cached_conversion, plan_in
from relayout.cache.folder import Cache, CacheEntry, cache_of
from relayout.checkpoint.source import SourceCheckpoint
from relayout.core.arguments import integer
from relayout.core.arguments import ranks as ranks_of
from relayout.errors import PlanError, RelayoutError, shown
from relayout.plans.family import ENGINES
from relayout.plans.plan import Plan
from relayout.reporting import Progress, Result
from relayout.storage.stores import find_input


@dataclass(frozen=True, slots=True, repr=False)
class CacheListing(Result):
    """The entries of a cache, after removals."""

    folder: str
    exists: bool
    """True if a cache exists in the folder."""
    entries: tuple[CacheEntry, ...]
    """The entries, least recently used first."""
    nbytes: int
    """Bytes of all entries."""
    removed: tuple[CacheEntry, ...]
    """Entries that were removed, on request or to make room for an added entry."""
    removed_nbytes: int
    """Bytes of the removed entries."""
    in_use: tuple[str, ...] = ()
    """Names of entries that were not removed, although requested, because a process uses them."""


def cache(
    folder: str | os.PathLike[str] | None = None, *, remove: Sequence[str] = (), clear: bool = False
) -> CacheListing:
    """List the entries of a cache; remove some or all, except entries that a process uses.

    Args:
        folder: the cache folder; default RELAYOUT_CACHE.
        remove: names of entries, or beginnings of names.
        clear: remove all entries.

    Raises:
        PlanError: `folder` is not a folder; or no entry, or more than one, has such a name.
        OSError: an entry cannot be removed. All other requested entries are removed.
    """
    kept = _cache(folder)
    folder = kept.folder
    if os.path.lexists(folder) and not os.path.isdir(folder):  # noqa: PTH112 (it never raises)
        raise PlanError("is not a folder", path=str(folder), code="missing")
    entries = kept.entries()
    names = [entry.name for entry in entries] if clear else [_name(entries, start, folder) for start in remove]
    in_use, failed = list[str](), list[RelayoutError | OSError]()
    for name in names:
        try:
            if not kept.remove(name):
                in_use.append(name)
        except (RelayoutError, OSError) as error:
            failed.append(error)
    if failed:
        raise failed[0]
    return _listing(kept, entries, tuple(in_use))


def _listing(kept: Cache, before: Sequence[CacheEntry], in_use: tuple[str, ...] = ()) -> CacheListing:
    """Return a listing of the cache; its removed entries are those in `before` that the cache has no longer."""
    entries = kept.entries()
    names = {entry.name for entry in entries}
    removed = tuple(entry for entry in before if entry.name not in names)
    nbytes, removed_nbytes = (sum(entry.nbytes for entry in each) for each in (entries, removed))
    return CacheListing(str(kept.folder), kept.exists, tuple(entries), nbytes, removed, removed_nbytes, in_use)


def add(
    source: str | os.PathLike[str],
    tp: int,
    folder: str | os.PathLike[str] | None = None,
    *,
    ranks: str | None = None,
    limit: int | str | None = None,
    expert_parallel: bool = False,
    observe: str | None = None,
    progress: Progress = None,
    behind_loads: bool = False,
) -> CacheListing:
    """Convert a plain checkpoint into a cache, as the first start of an engine does. An existing entry is unchanged.

    Args:
        source: a folder or URL.
        tp: the tensor-parallel degree.
        folder: the cache folder; default RELAYOUT_CACHE.
        ranks: convert only these ranks, such as "0-3", for a node that runs no others.
        limit: largest size of the cache in bytes; default RELAYOUT_CACHE_LIMIT.
        expert_parallel: True if each expert is held whole by one rank.
        observe: an installed engine, "vllm" or "sglang". If the model has no built-in plan, observe the slices that the
            engine uses, and store the plan in the cache. None: do not observe.
        progress: True for a bar on stderr, or a function that is called with (bytes done, total bytes).
        behind_loads: wait, for at most 10 minutes, while an engine on this machine loads a model that it would then
            convert into this cache.

    Returns:
        The entries of the cache afterwards, and the entries that were removed to make room.
    """
    found = _cache(folder)
    kept = found if limit is None else Cache(found.folder, limit)
    kept.limit_nbytes()  # An invalid limit is an error, even if the entry exists already.
    before = kept.entries()

    def plan_of(checkpoint: SourceCheckpoint, num_ranks: int) -> Plan:
        return plan_in(kept, checkpoint, num_ranks, expert_parallel=expert_parallel, observe=observe)

    if observe not in (None, *ENGINES):
        raise PlanError(f"observe: {shown(observe)}, expected {' or '.join(ENGINES)}", code="option")
    degree = integer(tp, "tp")
    some = None if ranks is None else ranks_of(ranks, degree)
    store = find_input(source).snapshot()
    try:
        cached_conversion(
            store, degree, kept, plan_of, ranks=some, progress=progress, behind_loads=behind_loads
        ).entry.close()
    except OSError as error:
        for entry in _listing(kept, before).removed:
            error.add_note(f"the cache removed {entry.name} to make room: {entry.source}, {entry.nbytes:,} bytes")
        raise
    return _listing(kept, before)


def _cache(folder: str | os.PathLike[str] | None) -> Cache:
    found = cache_of(folder or None)
    if found is None:
        raise PlanError("no cache: give its folder, or set RELAYOUT_CACHE", code="option")
    return found


def _name(entries: Sequence[CacheEntry], start: str, folder: str | os.PathLike[str]) -> str:
    matching = [entry.name for entry in entries if start and entry.name.startswith(start)]
    if len(matching) != 1:
        what = f"{len(matching)} entries begin with {shown(start)}" if matching else f"has no entry {shown(start)}"
        raise PlanError(what, path=str(folder), code="missing")
    return matching[0]
