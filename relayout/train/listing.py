"""`relayout steps`: lists the steps of a root, proves what leads to them, and deletes what none of them needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from relayout.checkpoint.converted import (
    check_intact,
    check_small,
    digests_of_small,
    read_chunk_digests,
    read_manifest,
    read_manifest_blob,
)
from relayout.checkpoint.delta import read_delta
from relayout.checkpoint.steps import no_steps
from relayout.errors import FormatError, PlanError
from relayout.format.delta import NEW, OLD
from relayout.format.index import Manifest
from relayout.format.manifest import content_of
from relayout.format.steps import PublishedStep, Retired, StepsIndex, Stored
from relayout.reporting import Result
from relayout.storage.stores import Store, find_store
from relayout.train.root import GRACE_SECONDS, Root


@dataclass(frozen=True, slots=True, repr=False)
class StepsListing(Result):
    """What a root has."""

    root: str
    steps: tuple[PublishedStep, ...]
    """All that can be read, in the order in which they were published."""
    pending: tuple[str, ...]
    """Names of what is being written, or was when its publisher was killed."""
    retired: tuple[Retired, ...]
    """What no step needs any more, and is not deleted yet."""
    deleted: tuple[str, ...]
    """Names of what was deleted now."""
    differences: tuple[str, ...] | None
    """What is not as the index says; None: nothing was checked."""

    @property
    def nbytes(self) -> int:
        """Bytes of all that leads to a step."""
        return sum(one.nbytes for step in self.steps for one in step.stored)


def list_steps(
    root: str | os.PathLike[str], *, check: bool = False, prune: bool = False, grace_seconds: int = GRACE_SECONDS
) -> StepsListing:
    """List the steps of a root.

    Args:
        root: a folder, or the URL of a prefix of a bucket.
        check: prove that a folder or a chain of deltas makes each step: that it has the relayout.json of which the
            index has the digest, and all files that this lists: weights by their lengths and heads, all else, such as
            tables, digests of chunks, the source record and indexes of changes, by digests; and that each delta leads
            from the step before it. Not read are weights, what changed in them, and the content of side files: readers
            prove weights when they do (`relayout verify` reads those of a folder).
        prune: delete what is retired, see `relayout.Steps.prune`.
        grace_seconds: of that.
    """
    place = Root.at(root)
    deleted = place.prune(grace_seconds) if prune else []
    index = place.read()
    if index == StepsIndex():
        raise no_steps(find_store(place.location))
    differences = tuple(_differences(place, index)) if check else None
    return StepsListing(place.location, index.entries, index.pending, index.retired, tuple(deleted), differences)


def _differences(root: Root, index: StepsIndex) -> Iterator[str]:
    before: str | None = None
    for entry in index.entries:
        for stored, check in ((entry.full, _check_folder), (entry.delta, _check_delta)):
            try:
                if stored is not None:
                    check(root, entry, stored, before)
            except (FormatError, PlanError) as error:
                yield f"step {entry.step}: {error}"
        before = entry.content


def _check_folder(root: Root, entry: PublishedStep, stored: Stored, before: str | None) -> None:
    store = find_store(root.path(stored.name))
    _check_digest("relayout.json", content_of(read_manifest_blob(store)), entry.content, str(store))
    check_intact(store)
    _check_chunks(store, read_manifest(store))


def _check_delta(root: Root, entry: PublishedStep, stored: Stored, before: str | None) -> None:
    store = find_store(root.path(stored.name))
    delta = read_delta(store)
    if before is not None:  # Nobody needs a delta that leads to the first step.
        _check_digest("what it applies to", delta.link.manifest.base, before, str(store))
    _check_digest("what it makes", delta.link.manifest.makes, entry.content, str(store))
    for file, was, becomes in zip(delta.link.manifest.files, delta.old.files, delta.new.files, strict=True):
        if not file.nbytes and was != becomes:
            what = f"says that {becomes.name} does not change, and its manifests differ in it"
            raise FormatError(what, path=str(store), code="mismatch")
    for index in range(len(delta.new.files)):
        delta.changes(index)
    old, new = (find_store(root.path(f"{stored.name}/{side.rstrip('/')}")) for side in (OLD, NEW))
    for table in delta.old.holders.values():
        check_small(old, delta.old, table.table, table.table_digest)
    for name, digest in digests_of_small(delta.new).items():
        check_small(new, delta.new, name, digest)
    for name in delta.link.manifest.side_files:
        if new.stat(name) is None:
            raise FormatError("is missing", path=new.location(name), code="missing")
    _check_chunks(new, delta.new)


def _check_chunks(folder: Store, manifest: Manifest) -> None:
    """Raise FormatError unless relayout.chunks has the digests of all chunks that the manifest proves."""
    for index in range(len(manifest.files)):
        read_chunk_digests(folder, manifest, index)


def _check_digest(what: str, found: str, expected: str, where: str) -> None:
    if found != expected:
        raise FormatError(f"{what} has digest {found}, expected {expected}", path=where, code="digest")
