"""A step repository: a folder or bucket prefix with an index that is updated by compare-and-swap."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from relayout.checkpoint.converted import CONVERTED
from relayout.checkpoint.delta import DELTA_OUTPUT
from relayout.checkpoint.folder import CONFIG_NAME, SINGLE_NAME
from relayout.checkpoint.step_chain import follow, no_steps, read_steps
from relayout.core.arguments import path_text
from relayout.errors import PlanError, RelayoutError
from relayout.format.index import HUB_INDEX_NAME, MANIFEST_NAME
from relayout.format.steps_index import (
    FULL,
    MAX_STEPS_NBYTES,
    STEPS_NAME,
    Chain,
    StepsIndex,
)
from relayout.publish.publishers import publisher_of
from relayout.storage.stores import Kind, Store, find_store

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class StepRepository:
    """The location of a step repository."""

    location: str
    """Path or URL."""
    _seen: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """When this process first saw names as retired, by its monotonic clock, in seconds."""

    @staticmethod
    def at(path: str | os.PathLike[str]) -> StepRepository:
        """Return the repository at a path or URL, without a slash at the end."""
        text = path_text(path, "root")
        return StepRepository(text.rstrip("/") or text)

    def __str__(self) -> str:
        return self.location

    def path(self, name: str) -> str:
        """Return the path or URL of a folder or a delta."""
        return f"{self.location}/{name}"

    def _store(self) -> Store:
        return find_store(self.location)

    def make(self) -> None:
        """Create the folder of a local repository if needed. Raise PlanError if it is a file or a checkpoint."""
        store = self._store()
        path = store.path("")
        if path is not None:
            if store.kind() in (Kind.FILE, Kind.OTHER):
                raise PlanError("is not a folder, expected a step repository", path=self.location, code="exists")
            path.mkdir(exist_ok=True)
        if store.stat(STEPS_NAME) is None:
            for name in (CONFIG_NAME, MANIFEST_NAME, HUB_INDEX_NAME, SINGLE_NAME):
                if store.stat(name) is not None:
                    what = f"is a checkpoint, as {name} is in it: give steps a folder of their own"
                    raise PlanError(what, path=self.location, code="exists")

    def read(self) -> StepsIndex:
        """Return the current index; an empty one if the repository has none.

        Raises:
            FormatError: it is damaged.
        """
        return self._read(self._store())[0]

    def _read(self, store: Store) -> tuple[StepsIndex, bytes | None]:
        return read_steps(store) or (StepsIndex(), None)

    def move(self, change: Callable[[StepsIndex], StepsIndex], reserved_nbytes: int = 0) -> StepsIndex:
        """Replace the index by the result of `change`, and return it. Updates by other processes are not lost.

        Args:
            reserved_nbytes: bytes that must be left below the readers' size limit, unless the index becomes shorter.
        """
        store = self._store()
        for _ in range(_NUM_CONFLICTS):
            before, blob = self._read(store)
            after = change(before)
            if after == before:
                return after
            content = after.dump()
            if len(content) > max(MAX_STEPS_NBYTES - reserved_nbytes, min(len(blob or b""), MAX_STEPS_NBYTES)):
                what = f"an index of {len(content):,} bytes, and readers accept {MAX_STEPS_NBYTES:,}; nothing is lost: "
                what += "keep fewer steps (keep, keep_seconds), or delete what is retired (relayout steps --prune)"
                raise PlanError(what, path=store.location(STEPS_NAME), code="limit")
            with suppress(FileExistsError):
                publisher_of(store).replace(STEPS_NAME, blob, content)
                return after
        raise PlanError("other processes replace its index again and again", path=self.location, code="busy")

    def chain(self, have: int | str | None = None, step: int | str | None = None) -> Chain | None:
        """Return the shortest chain to a step; see `StepsIndex.chain`."""
        return self.read().chain(have, step)

    def with_chain(
        self, use: Callable[[Chain], Result], have: int | str | None, step: int | str | None = None
    ) -> Result:
        """Use the chain to a step. If one of its files is deleted meanwhile, use the chain of the newer index."""
        return follow(lambda has: self._some_chain(have if has else None, step), use, self.location)

    def _some_chain(self, have: int | str | None, step: int | str | None) -> Chain:
        chain = self.chain(have, step)
        if chain is None:
            raise no_steps(self._store())
        return chain

    def prune(self, grace_seconds: int | None = None) -> list[str]:
        """Delete the folders and deltas with an expired grace period; return their names.

        Deletion is safe: the index lists a name as retired, so a publisher of this repository wrote it, and no entry
        needs it. Only files in the folder's or delta's own records are deleted.
        """
        gone, failed = list[str](), list[RelayoutError | OSError]()
        try:
            for name in self._due(grace_seconds):
                try:
                    older = CONVERTED if name.startswith(FULL) else DELTA_OUTPUT
                    publisher_of(find_store(self.path(name))).remove(older)
                    gone.append(name)
                except (RelayoutError, OSError) as error:
                    failed.append(error)
        finally:
            if gone:
                self.move(lambda index: index.without(gone))
        if failed:
            raise failed[0]
        return gone

    def _due(self, grace_seconds: int | None) -> list[str]:
        """Return the names with an expired grace period, independently of the clocks of other machines.

        One clock suffices: this object has seen the name retired for the whole period. For names that other processes
        have retired, and that this object sees for the first time, clocks must agree to within a day.
        """
        index, now, seconds = self.read(), time.time(), time.monotonic()
        retired, grace = index.retired, index.grace_seconds if grace_seconds is None else grace_seconds
        seen = {one.name: self._seen.get(one.name, seconds) for one in retired}
        self._seen.clear()
        self._seen.update(seen)
        if grace <= 0:
            return list(seen)
        long_ago = now - grace - _CLOCKS_DIFFER_SECONDS
        return [one.name for one in retired if seconds - seen[one.name] >= grace or one.since <= long_ago]


_NUM_CONFLICTS = 8
_CLOCKS_DIFFER_SECONDS = 24 * 3600
"""The most by which clocks of two machines are expected to differ, in seconds."""
