"""`cache`: what a cache keeps, and removing it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from relayout.errors import PlanError, shown
from relayout.results import Result
from relayout.storage.cache_folder import Cache, CacheEntry


@dataclass(frozen=True, slots=True)
class CacheListing(Result):
    """What a cache keeps, after what was to be removed."""

    folder: str
    entries: tuple[CacheEntry, ...]
    """The least recently used first."""
    nbytes: int
    """Of all entries."""
    removed_nbytes: int
    in_use: tuple[str, ...]
    """Names of entries that were to be removed, and are used by a process."""


def cache(
    folder: str | os.PathLike[str] | None = None, *, remove: Sequence[str] = (), clear: bool = False
) -> CacheListing:
    """List the entries of a cache; remove some or all, but for those that a process uses.

    Args:
        folder: of the cache; default RELAYOUT_CACHE.
        remove: names of entries, or how they begin.
        clear: remove all entries.

    Raises:
        PlanError: there is no such folder or entry, or a name is of several entries.
        OSError: an entry cannot be removed.
    """
    folder = folder or os.environ.get("RELAYOUT_CACHE")
    if not folder:
        raise PlanError("no cache: give its folder, or set RELAYOUT_CACHE", code="option")
    if not os.path.isdir(folder):  # noqa: PTH112 (it never raises)
        raise PlanError("is not a folder", path=str(folder), code="missing")
    kept = Cache(folder)
    entries = kept.entries()
    names = [entry.name for entry in entries] if clear else [_name(entries, start, folder) for start in remove]
    in_use = tuple(name for name in names if not kept.remove(name))
    left = kept.entries() if names else entries
    nbytes = sum(entry.nbytes for entry in left)
    removed_nbytes = max(sum(entry.nbytes for entry in entries) - nbytes, 0)  # Others may have filled it meanwhile.
    return CacheListing(str(folder), tuple(left), nbytes, removed_nbytes, in_use)


def _name(entries: Sequence[CacheEntry], start: str, folder: str | os.PathLike[str]) -> str:
    matching = [entry.name for entry in entries if start and entry.name.startswith(start)]
    if len(matching) != 1:
        what = f"{len(matching)} entries begin with {shown(start)}" if matching else f"has no entry {shown(start)}"
        raise PlanError(what, path=str(folder), code="missing")
    return matching[0]
