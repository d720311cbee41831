"""Chooses the publisher of a store: local folders are renamed, prefixes of buckets are filled."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from relayout.errors import PlanError
from relayout.publish.output import Output, Replaceable, Work
from relayout.storage.local.store import LocalStore
from relayout.storage.stores import Store

if TYPE_CHECKING:
    from relayout.publish.claim import Prefix

# The publishers are imported where they are used: most outputs need one.


def check_output(store: Store, source: Store, older: Replaceable, *, force: bool) -> None:
    """Check that an output would not destroy other files; delete what a killed process of this user left there.

    Args:
        older: what `force` replaces.

    Raises:
        PlanError: the output is the source, contains it or is inside it; is not empty; or cannot be written.
    """
    if isinstance(store, LocalStore):
        from relayout.publish import folder

        folder.check_output(store.folder, source.path(""), older, force=force)
    else:
        from relayout.publish import bucket

        bucket.check_output(_prefix(store), source, older, force=force)


def begin(
    store: Store, older: Replaceable, work: Work, *, force: bool = False, gathers: bool = False
) -> AbstractContextManager[Output]:
    """Begin an output, which is published when the block ends.

    Args:
        older: what `force` replaces. Only files that the records of the older output name are deleted.
        gathers: whether all parts are made by other processes, or by other blocks of this one (`begin_part`).

    Raises:
        PlanError: other work is under way or kept here, or the existing output cannot be replaced.
        OSError: something else has been created here meanwhile.
    """
    if isinstance(store, LocalStore):
        from relayout.publish import folder

        replaced = partial(folder.replaceable, older, True) if force else None
        return folder.staging_folder(store.folder, work, replaced, gathers=gathers)
    from relayout.publish import bucket

    return bucket.begin(_prefix(store), older, work, force=force, gathers=gathers)


def begin_part(store: Store, older: Replaceable, work: Work, *, force: bool = False) -> AbstractContextManager[Output]:
    """Begin parts of an output that several processes make, to be published by `begin`. Errors as for that."""
    if isinstance(store, LocalStore):
        from relayout.publish import folder

        return folder.staging_part(store.folder, older.marker, work, replace=force)
    from relayout.publish import bucket

    return bucket.begin(_prefix(store), older, work, force=force, publishes=False)


class Destination(Protocol):
    """Where an output is published. Errors are those of the functions above."""

    def check(self, source: Store) -> None:
        """Check that an output would not destroy other files, see `check_output`."""

    def begin(self, work: Work, *, gathers: bool = False) -> AbstractContextManager[Output]:
        """Begin an output, see `begin`."""

    def begin_part(self, work: Work) -> AbstractContextManager[Output]:
        """Begin parts of an output, see `begin_part`."""


@dataclass(frozen=True, slots=True)
class Place:
    """A store as a destination."""

    store: Store
    older: Replaceable
    force: bool = False
    """Whether an older output there is replaced."""

    def check(self, source: Store) -> None:
        check_output(self.store, source, self.older, force=self.force)

    def begin(self, work: Work, *, gathers: bool = False) -> AbstractContextManager[Output]:
        return begin(self.store, self.older, work, force=self.force, gathers=gathers)

    def begin_part(self, work: Work) -> AbstractContextManager[Output]:
        # Parts may be made again while an older output is there: whoever publishes replaces it.
        return begin_part(self.store, self.older, work, force=True)


def replace(store: Store, name: str, expected: bytes | None, content: bytes) -> None:
    """Replace a small file by another, if its content is the expected one; None: if there is none.

    One of several processes that replace the same content succeeds. In a folder they take turns by a lock file, which
    every machine must honor; in a bucket, the request has the object's version as its condition.

    Raises:
        FileExistsError: the content is another one.
        PlanError: the store is read-only.
    """
    if isinstance(store, LocalStore):
        from relayout.publish import folder

        folder.replace_file(store.folder / name, expected, content)
    else:
        _prefix(store).replace(name, expected, content)


def remove(store: Store, older: Replaceable) -> None:
    """Delete an output, and what a killed process has left of one. If it is killed, the same call goes on.

    Only files are deleted that the output's own records name, or of which relayout's own notes say that they are parts
    of one that was not finished.

    Raises:
        PlanError: there are other files, or a link, a mount point or the working directory, which stay; or another
            process is writing there.
    """
    if isinstance(store, LocalStore):
        from relayout.publish import folder

        folder.remove_output(store.folder, older)
    else:
        from relayout.publish import bucket

        bucket.remove_output(_prefix(store), older)


def add(store: Store, name: str, content: bytes) -> None:
    """Write a small file beside what is published, in place of an older one. PlanError: the store is read-only."""
    if isinstance(store, LocalStore):
        from relayout.storage.local.descriptors import write_file

        write_file(store.folder / name, content)
    else:
        _prefix(store).put(name, content, replaced=True)


def _prefix(store: Store) -> Prefix:
    """A store as the place of an output. PlanError: it can only be read, or is a whole bucket."""
    from relayout.publish.claim import Prefix
    from relayout.storage.cloud.store import CloudStore, WritableClient

    if not isinstance(store, CloudStore) or not isinstance(store.client, WritableClient):
        raise PlanError(
            "relayout cannot write to this store: choose another output", path=str(store), code="unsupported"
        )
    if not store.prefix:
        what = f"the whole bucket cannot be an output: name a prefix in it, such as {store}/model"
        raise PlanError(what, path=str(store), code="option")
    return Prefix(store.client, store.prefix, store)
