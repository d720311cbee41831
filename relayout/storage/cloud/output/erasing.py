"""The only place where something of an output is deleted or aborted in a bucket.

**The rule.** Nothing is deleted, aborted or replaced that does not carry our mark and is not named by our own record.
Who does so holds the lease of the output, or has itself made what goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from relayout.storage.cloud import connect
from relayout.storage.cloud.output import lease as leases
from relayout.storage.cloud.output import records
from relayout.storage.cloud.output.place import Place, in_parallel
from relayout.storage.cloud.output.records import Begun


class Eraser:
    """All that deletes objects or aborts uploads of an output."""

    def __init__(self, place: Place, abort: Callable[[str, str], None], check: Callable[[], None]) -> None:
        """`check` raises if another process has the lease now; it is asked before each request."""
        self._place = place
        self._abort = abort
        self._check = check

    def objects(self, versions: Mapping[str, str]) -> None:
        """Delete objects of the output that still have the version at which they were proven to be ours."""
        there = self._place.objects() if versions else {}
        began = leases.monotonic()
        self._delete([self._place.full(name) for name, version in versions.items() if there.get(name) == version])
        if leases.monotonic() - began > connect.STALL_SECONDS:
            # A first request may still be under way, and would delete what takes the names next.
            leases.sleep(leases.REQUEST_SECONDS)

    def records(self, names: Iterable[str]) -> None:
        """Delete records that were read or written by this process."""
        self._delete([self._place.hidden + name for name in names])

    def uploads(self, begun: Iterable[Begun]) -> None:
        """Abort uploads that our records name, or that this process has begun."""
        in_parallel(self._abort_one, begun)

    def _abort_one(self, one: Begun) -> None:
        self._check()
        self._abort(self._place.full(one.name), one.upload)

    def attempt(self, *, published: bool) -> None:
        """Discard all that is recorded, first what claims that something is done; with `published`, also of publishing.

        Raises:
            FormatError: an object has the name of a record, and is none. Nothing was changed.
        """
        place = self._place
        found = {}
        for name in place.record_names():
            kind = records.kind_of(name)
            if name != records.LEASE and kind is not None and (published or name != records.PUBLISHING):
                found[name] = kind
        read: dict[str, Any] = dict(
            zip(found, in_parallel(lambda name: place.read(name, found[name]), found), strict=True)
        )
        begun = {name: one for name, one in read.items() if isinstance(one, Begun)}
        self.records(read.keys() - begun.keys())
        self.uploads(begun.values())
        self.records(begun)

    def _delete(self, full: list[str]) -> None:
        if full:
            self._check()
            self._place.client.delete(full)
