"""A root of steps: a folder, or a prefix of a bucket, with an index that moves on condition of what it was."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from relayout.checkpoint.converted import CONVERTED, read_manifest_blob
from relayout.checkpoint.delta import DELTA_OUTPUT
from relayout.checkpoint.folder import CONFIG_NAME, SINGLE_NAME
from relayout.checkpoint.steps import no_steps
from relayout.core.arguments import path_text
from relayout.core.digests import digest_hex
from relayout.errors import FormatError, PlanError
from relayout.format.delta import parse_delta
from relayout.format.index import HUB_INDEX_NAME, MANIFEST_NAME
from relayout.format.steps import (
    FULL,
    MAX_STEPS_NBYTES,
    STEPS_NAME,
    Chain,
    StepsIndex,
    parse_steps,
)
from relayout.publish.publishers import remove, replace
from relayout.storage.stores import Kind, Store, find_store, if_there

Result = TypeVar("Result")

GRACE_SECONDS = 3600
"""How long what is retired stays: a reader of an older index has so long to read it."""


@dataclass(frozen=True, slots=True)
class Root:
    """The place where steps are."""

    location: str
    """Path or URL."""

    @staticmethod
    def at(path: str | os.PathLike[str]) -> Root:
        """A path or URL, without a slash at the end."""
        text = path_text(path, "root")
        return Root(text.rstrip("/") or text)

    def __str__(self) -> str:
        return self.location

    def path(self, name: str) -> str:
        """The path or URL of a folder or a delta."""
        return f"{self.location}/{name}"

    def _store(self) -> Store:
        return find_store(self.location)

    def make(self) -> None:
        """Make the folder of a local root, if it is not there.

        Raises:
            PlanError: a file is there, or a checkpoint.
        """
        store = self._store()
        path = store.path("")
        if path is not None:
            if store.kind() in (Kind.FILE, Kind.OTHER):
                raise PlanError("is no folder: a root of steps is one", path=self.location, code="exists")
            path.mkdir(exist_ok=True)
        if store.stat(STEPS_NAME) is None:
            for name in (CONFIG_NAME, MANIFEST_NAME, HUB_INDEX_NAME, SINGLE_NAME):
                if store.stat(name) is not None:
                    what = f"is a checkpoint, as {name} is in it: give steps a folder of their own"
                    raise PlanError(what, path=self.location, code="exists")

    def read(self) -> StepsIndex:
        """The index as it is now; that of a root without one is empty.

        Raises:
            FormatError: it is damaged.
        """
        return self._read(self._store())[0]

    def _read(self, store: Store) -> tuple[StepsIndex, bytes | None]:
        blob = if_there(lambda: store.read(STEPS_NAME, MAX_STEPS_NBYTES))
        return (StepsIndex() if blob is None else parse_steps(blob, store.location(STEPS_NAME))), blob

    def move(self, change: Callable[[StepsIndex], StepsIndex]) -> StepsIndex:
        """Replace the index by what a change makes of it, and return that. What others write meanwhile is not lost.

        Raises:
            what `change` raises: nothing is written.
            PlanError: others replace it again and again.
        """
        store = self._store()
        for _ in range(_NUM_CONFLICTS):
            before, blob = self._read(store)
            after = change(before)
            if after == before:
                return after
            with suppress(FileExistsError):
                replace(store, STEPS_NAME, blob, after.dump())
                return after
        raise PlanError("other processes replace its index again and again", path=self.location, code="busy")

    def chain(self, have: int | str | None = None, step: int | str | None = None) -> Chain | None:
        """The shortest way to a step; see `StepsIndex.chain`."""
        return self.read().chain(have, step)

    def with_chain(
        self, use: Callable[[Chain], Result], have: int | str | None, step: int | str | None = None
    ) -> Result:
        """Use the way to a step. If a file of it is gone meanwhile, go on by what the index then says.

        Raises:
            what `use` raises, if the index says the same as before.
            PlanError: there is no step, or not this one.
        """
        chain = self._some_chain(have, step)
        for _ in range(_NUM_CONFLICTS):
            try:
                return use(chain)
            except (FormatError, PlanError, OSError):
                # It may have been too slow for what was retired: that is no error while there is another way.
                again = self._some_chain(None, step)
                if again == chain:
                    raise
                chain = again
        raise PlanError("its steps are deleted faster than they are read", path=self.location, code="busy")

    def _some_chain(self, have: int | str | None, step: int | str | None) -> Chain:
        chain = self.chain(have, step)
        if chain is None:
            raise no_steps(self._store())
        return chain

    def check(self, chain: Chain) -> None:
        """Check that the last folder or delta of a way makes what the index says, of which it has the digest.

        Raises:
            FormatError: it makes something else, or is missing or damaged.
        """
        last = chain.deltas[-1] if chain.deltas else chain.full
        assert last is not None
        store = find_store(self.path(last))
        blob, where = read_manifest_blob(store), store.location(MANIFEST_NAME)
        content = parse_delta(blob, where).makes if chain.deltas else digest_hex(blob)
        if content != chain.content:
            what = f"makes content {content}, the index of steps says {chain.content} for step {chain.step}"
            raise FormatError(what, path=where, code="mismatch")

    def prune(self, grace_seconds: int = GRACE_SECONDS, now: int | None = None) -> list[str]:
        """Delete what was retired longer ago; return its names.

        The proof that it may be deleted: the index names it as retired, so a publisher of this root wrote it, and no
        entry needs it. Of it only those files are deleted that its own records name.

        Raises:
            PlanError: one of them has files of somebody else, which stay. All others are deleted.
        """
        limit = (int(time.time()) if now is None else now) - grace_seconds
        gone, refused = [], []
        for one in self.read().retired:
            if one.since > limit:
                continue
            try:
                remove(find_store(self.path(one.name)), CONVERTED if one.name.startswith(FULL) else DELTA_OUTPUT)
                gone.append(one.name)
            except (PlanError, FormatError) as error:
                refused.append(error)
        if gone:
            self.move(lambda index: index.without(gone))
        if refused:
            raise refused[0]
        return gone


_NUM_CONFLICTS = 8
