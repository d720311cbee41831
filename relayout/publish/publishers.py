"""Publishers: each publishes outputs in one kind of store.

Folders are renamed, prefixes of buckets are filled, and tags of registries are written last.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from relayout.publish.output import Output, OutputKind, OutputSpec
from relayout.storage.local.store import LocalStore
from relayout.storage.stores import Store


class StorePublisher(Protocol):
    """Publishes at one location: a folder, or a prefix of a bucket."""

    def check(self, source: Store, older: OutputKind, *, force: bool) -> None:
        """Check that an output would not destroy other files; delete remains of killed processes of this user.

        Args:
            older: the output that `force` replaces.

        Raises:
            PlanError: the output is the source, contains it or is inside it; is not empty; or cannot be written.
        """

    def begin(
        self, older: OutputKind, work: OutputSpec, *, force: bool, gathers: bool = False
    ) -> AbstractContextManager[Output]:
        """Begin an output, which is published when the block ends.

        Args:
            older: the output that `force` replaces. Only files in its records are deleted.
            gathers: True if all parts are written by other processes, or by other blocks of this one (`begin_part`).

        Raises:
            PlanError: other work is running or kept here, or the existing output cannot be replaced.
            OSError: another file or folder was created here meanwhile.
        """

    def begin_part(self, older: OutputKind, work: OutputSpec, *, force: bool) -> AbstractContextManager[Output]:
        """Begin parts of an output that several processes write, to be published by `begin`. Raises its errors."""

    def replace(self, name: str, expected: bytes | None, content: bytes) -> None:
        """Replace a small file if its content is `expected`; None: create it if it does not exist.

        If several processes replace the same content, one succeeds. In a folder they take turns by a lock file, which
        every machine must honor. In a bucket, the request is a compare-and-swap on the object's version.

        Raises:
            FileExistsError: the file has other content.
        """

    def add(self, name: str, content: bytes) -> None:
        """Write a small file next to the files of a published output, replacing an older one."""

    def remove(self, older: OutputKind) -> None:
        """Delete an output, or the remains of a killed process. If this call is killed, the same call resumes it.

        Only files are deleted that are in the output's own records, or that relayout's own notes list as parts of an
        unfinished output.

        Raises:
            PlanError: the output has other files, or is a link, a mount point or the working directory, which are kept;
                or another process is writing there.
        """


def publisher_of(store: Store) -> StorePublisher:
    """Return the publisher of a store. PlanError: the store is read-only, or is a whole bucket."""
    # Imported on use: most outputs need only one publisher.
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
    """The location where an output is published. Errors are those of `StorePublisher`."""

    def check(self, source: Store) -> None:
        """Check that an output would not destroy other files, see `StorePublisher.check`."""

    def begin(self, work: OutputSpec, *, gathers: bool = False) -> AbstractContextManager[Output]:
        """Begin an output, see `StorePublisher.begin`."""

    def begin_part(self, work: OutputSpec) -> AbstractContextManager[Output]:
        """Begin parts of an output, see `StorePublisher.begin_part`."""


@dataclass(frozen=True, slots=True)
class StoreDestination:
    """A store as a destination."""

    store: Store
    older: OutputKind
    force: bool = False
    """True if an older output there is replaced."""

    def check(self, source: Store) -> None:
        publisher_of(self.store).check(source, self.older, force=self.force)

    def begin(self, work: OutputSpec, *, gathers: bool = False) -> AbstractContextManager[Output]:
        return publisher_of(self.store).begin(self.older, work, force=self.force, gathers=gathers)

    def begin_part(self, work: OutputSpec) -> AbstractContextManager[Output]:
        # If the work is not resumable, the publishing process has begun the output, and checked the existing files.
        force = self.force or not work.is_resumable
        return publisher_of(self.store).begin_part(self.older, work, force=force)
