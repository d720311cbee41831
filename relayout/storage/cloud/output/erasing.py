"""The only code that deletes objects of an output or aborts uploads in a bucket.

**The rule.** Nothing is deleted, aborted or replaced that does not carry our mark and is not named by our own record.
Whoever does so holds the lease of the output, or has created the object itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from relayout.storage.cloud import connect
from relayout.storage.cloud.output import lease as leases
from relayout.storage.cloud.output import records
from relayout.storage.cloud.output.prefix import OutputPrefix, in_parallel
from relayout.storage.cloud.output.records import Begun


class Eraser:
    """Deletes objects and aborts uploads of an output."""

    def __init__(self, output: OutputPrefix, abort: Callable[[str, str], None], check: Callable[[], None]) -> None:
        """`check` is called before each request, and raises if another process has the lease now."""
        self._output = output
        self._abort = abort
        self._check = check

    def objects(self, versions: Mapping[str, str]) -> None:
        """Delete objects of the output that still have the version at which they were proven to be ours."""
        there = self._output.objects() if versions else {}
        began = leases.monotonic()
        self._delete([self._output.full(name) for name, version in versions.items() if there.get(name) == version])
        if leases.monotonic() - began > connect.STALL_SECONDS:
            # A first request may still be on its way, and would delete the next object of the same name.
            leases.sleep(leases.REQUEST_SECONDS)

    def records(self, names: Iterable[str]) -> None:
        """Delete records that were read or written by this process."""
        self._delete([self._output.hidden + name for name in names])

    def uploads(self, uploads: Collection[Begun]) -> None:
        """Abort uploads that our records name, or that this process has begun."""
        in_parallel(self._abort_upload, uploads)

    def _abort_upload(self, upload: Begun) -> None:
        self._check()
        self._abort(self._output.full(upload.name), upload.upload)

    def attempt(self, *, published: bool) -> None:
        """Discard all that is recorded, first what claims that something is done; with `published`, also of publishing.

        Raises:
            FormatError: an object has the name of a record, and is none. Nothing was changed.
        """
        kinds: dict[str, Any] = {}
        for name in self._output.record_names():
            kind = records.kind_of(name)
            if name != records.LEASE and kind is not None and (published or name != records.PUBLISHING):
                kinds[name] = kind
        recorded = self._output.read_each(kinds)
        begun = {name: record for name, record in recorded.items() if isinstance(record, Begun)}
        self.records(recorded.keys() - begun.keys())
        self.uploads(begun.values())
        self.records(begun)

    def _delete(self, full: list[str]) -> None:
        if full:
            self._check()
            self._output.client.delete(full)
