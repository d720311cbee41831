"""Publishers: each publishes outputs in one kind of store.

Folders are renamed, prefixes of buckets are filled, and tags of registries are written last.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from relayout.publish.output import Output, Replaceable, Work
from relayout.storage.local.store import LocalStore
from relayout.storage.stores import Store


class StorePublisher(Protocol):
    """Publishes in one place: a folder, or a prefix of a bucket."""

    def check(self, source: Store, older: Replaceable, *, force: bool) -> None:
        """Check that an output would not destroy other files; delete what a killed process of this user left here.

        Args:
            older: what `force` replaces.

        Raises:
            PlanError: the output is the source, contains it or is inside it; is not empty; or cannot be written.
        """

    def begin(
        self, older: Replaceable, work: Work, *, force: bool, gathers: bool = False
    ) -> AbstractContextManager[Output]:
        """Begin an output, which is published when the block ends.

        Args:
            older: what `force` replaces. Only files that the records of the older output name are deleted.
            gathers: whether all parts are made by other processes, or by other blocks of this one (`begin_part`).

        Raises:
            PlanError: other work is under way or kept here, or the existing output cannot be replaced.
            OSError: something else has been created here meanwhile.
        """

    def begin_part(self, older: Replaceable, work: Work, *, force: bool) -> AbstractContextManager[Output]:
        """Begin parts of an output that several processes make, to be published by `begin`. Errors as for that."""

    def replace(self, name: str, expected: bytes | None, content: bytes) -> None:
        """Replace a small file by another, if its content is the expected one; None: if there is none.

        One of several processes that replace the same content succeeds. In a folder they take turns by a lock file,
        which every machine must honor; in a bucket, the request has the object's version as its condition.

        Raises:
            FileExistsError: the content is another one.
        """

    def add(self, name: str, content: bytes) -> None:
        """Write a small file beside what is published, in place of an older one."""

    def remove(self, older: Replaceable) -> None:
        """Delete an output, and what a killed process has left of one. If it is killed, the same call goes on.

        Only files are deleted that the output's own records name, or of which relayout's own notes say that they are
        parts of one that was not finished.

        Raises:
            PlanError: there are other files, or a link, a mount point or the working directory, which stay; or another
                process is writing there.
        """


def publisher_of(store: Store) -> StorePublisher:
    """The publisher of a store. PlanError: it can only be read, or is a whole bucket."""
    # Imported where they are used: most outputs need one.
    if isinstance(store, LocalStore):
        from relayout.publish.folder import FolderPublisher

        return FolderPublisher(store.folder)
    from relayout.storage.web.oci import OciStore

    if isinstance(store, OciStore):
        from relayout.publish.registry import RegistryPublisher

        return RegistryPublisher.of(store)
    from relayout.publish.bucket import BucketPublisher

    return BucketPublisher.of(store)


class Destination(Protocol):
    """Where an output is published. Errors are those of `StorePublisher`."""

    def check(self, source: Store) -> None:
        """Check that an output would not destroy other files, see `StorePublisher.check`."""

    def begin(self, work: Work, *, gathers: bool = False) -> AbstractContextManager[Output]:
        """Begin an output, see `StorePublisher.begin`."""

    def begin_part(self, work: Work) -> AbstractContextManager[Output]:
        """Begin parts of an output, see `StorePublisher.begin_part`."""


@dataclass(frozen=True, slots=True)
class StoreDestination:
    """A store as a destination."""

    store: Store
    older: Replaceable
    force: bool = False
    """Whether an older output there is replaced."""

    def check(self, source: Store) -> None:
        publisher_of(self.store).check(source, self.older, force=self.force)

    def begin(self, work: Work, *, gathers: bool = False) -> AbstractContextManager[Output]:
        return publisher_of(self.store).begin(self.older, work, force=self.force, gathers=gathers)

    def begin_part(self, work: Work) -> AbstractContextManager[Output]:
        # Of work that is not resumable, who publishes has begun the output, and checked what is there.
        force = self.force or not work.is_resumable
        return publisher_of(self.store).begin_part(self.older, work, force=force)
