"""`relayout steps`: list the steps of a repository, verify the chains to them, and delete unneeded files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from relayout.checkpoint.converted import (
    PACKED,
    check_head,
    check_intact,
    digests_of_side_files,
    digests_of_small,
    names_of,
    parts_of_packed,
    read_head,
    read_manifest,
    read_manifest_blob,
    read_record,
    read_small,
    sizes_of_packed,
)
from relayout.checkpoint.delta import Changes, Delta, change_digests, check_applies, read_delta
from relayout.checkpoint.step_chain import no_steps
from relayout.core.digests import blake3_hex
from relayout.errors import FormatError, PlanError
from relayout.format.delta import NEW
from relayout.format.index import (
    SIGNATURE_NAME,
    IndexedFile,
    Manifest,
)
from relayout.format.manifest import SOURCE_RECORD_NAME, content_of
from relayout.format.source_record import SourceRecord
from relayout.format.steps_index import PublishedStep, RetiredName, StepsIndex, Stored
from relayout.reporting import Result
from relayout.storage.stores import Store, find_store, read_whole
from relayout.train.repository import StepRepository


@dataclass(frozen=True, slots=True, repr=False)
class StepsListing(Result):
    """The contents of a step repository."""

    root: str
    steps: tuple[PublishedStep, ...]
    """All steps that can be read, in the order in which they were published."""
    pending: tuple[str, ...]
    """Names of folders and deltas that are being written, or that a killed publisher left unfinished."""
    retired: tuple[RetiredName, ...]
    """Folders and deltas that no step needs any more, and that are not deleted yet."""
    deleted: tuple[str, ...]
    """Names of the folders and deltas that this call has deleted."""
    differences: tuple[str, ...] | None
    """Deviations from the index; None: nothing was checked."""

    @property
    def nbytes(self) -> int:
        """Bytes of all folders and deltas that lead to a step."""
        return sum(one.nbytes for step in self.steps for one in step.stored)


def list_steps(
    root: str | os.PathLike[str], *, check: bool = False, prune: bool = False, grace_seconds: int | None = None
) -> StepsListing:
    """List the steps of a repository.

    Args:
        root: a folder, or the URL of a prefix of a bucket.
        check: verify that a folder or a chain of deltas produces each step. Its relayout.json must have the digest that
            the index records, and all files that relayout.json lists must exist. Weight files are checked by their
            lengths and headers. All other files, such as tables, digests of chunks, the source record and indexes of
            changes, are checked by digests. Each delta must apply to the step before it. Weights, their changes, and
            the content of side files are not read: readers verify weights when they read them (`relayout verify` reads
            those of a folder).
        prune: delete retired folders and deltas, see `relayout.Steps.prune`.
        grace_seconds: as for `relayout.Steps.prune`.
    """
    place = StepRepository.at(root)
    deleted = place.prune(grace_seconds) if prune else []
    index = place.read()
    if not (index.entries or index.pending or index.retired):
        raise no_steps(find_store(place.location))
    differences = tuple(_differences(place, index)) if check else None
    return StepsListing(place.location, index.entries, index.pending, index.retired, tuple(deleted), differences)


def _differences(root: StepRepository, index: StepsIndex) -> Iterator[str]:
    before: _VerifiedStep | None = None
    for entry in index.entries:
        after: _VerifiedStep | None = None
        for stored, check in ((entry.full, _check_folder), (entry.delta, _check_delta)):
            try:
                if stored is not None:
                    after = check(root, entry, stored, before) or after
            except (FormatError, PlanError) as error:
                yield f"step {entry.step}: {error}"
        before = after


@dataclass(frozen=True, slots=True)
class _VerifiedStep:
    """The verified state of a step, which the next delta applies to."""

    content: str
    manifest: Manifest
    record: SourceRecord
    packed: Mapping[str, npt.NDArray[np.uint8]]
    """The files that have digests in binary form, by name."""
    heads: Sequence[bytes]
    """The first bytes of each weight file."""

    def check(self, where: str) -> None:
        """Compare the lists of digests with their digests in the manifest. Raise FormatError if they differ."""
        for name in PACKED:
            for place, proof in parts_of_packed(self.manifest, name):
                if blake3_hex(self.packed[name][place.offset : place.end].data) != proof:
                    what = f"the part of {name} at {place.offset} differs from the manifest"
                    raise FormatError(what, path=where, code="digest")


def _check_folder(
    root: StepRepository, entry: PublishedStep, stored: Stored, before: _VerifiedStep | None
) -> _VerifiedStep:
    store = find_store(root.path(stored.name))
    _check_digest("relayout.json", content_of(read_manifest_blob(store)), entry.content, str(store))
    check_intact(store)
    manifest = read_manifest(store)
    packed = {
        name: np.frombuffer(read_whole(store.open(name, nbytes), store.location(name), nbytes), np.uint8)
        for name, nbytes in sizes_of_packed(manifest).items()
    }
    heads = [_head_of(store, file) for file in manifest.files]
    known = _VerifiedStep(entry.content, manifest, read_record(store, manifest), packed, heads)
    known.check(str(store))
    for side in known.record.side_files:
        _check_is_there(store, side.name)
    return known


def _check_delta(
    root: StepRepository, entry: PublishedStep, stored: Stored, before: _VerifiedStep | None
) -> _VerifiedStep | None:
    """Check a delta, and the step that results from applying it to the previous one. No weights are read.

    Digests of unchanged parts are taken from the previous step, so the manifest of the result also verifies that no
    other part has changed.
    """
    delta = read_delta(find_store(root.path(stored.name)))
    where = str(delta.store)
    _check_digest("what it makes", delta.manifest.makes, entry.content, where)
    if before is None:  # An error of the previous step was reported already.
        return None
    check_applies(delta, before.manifest, before.content, "the step before")
    heads = []
    for index, (old, new) in enumerate(zip(before.manifest.files, delta.new.files, strict=True)):
        changes, head = delta.changes(index), before.heads[index]
        if changes is not None and changes.header_digest is not None:
            head = _changed_head(changes, head)
        else:
            _check_digest(f"the header of {new.name}", old.header_digest, new.header_digest, where)
        check_head(memoryview(head), new.tensors_digest, new.data_start, f"{where}: {new.name}")
        heads.append(head)
    packed = {name: content.copy() for name, content in before.packed.items()}
    for name, content in packed.items():
        change_digests(delta, name, content)
    known = _VerifiedStep(entry.content, delta.new, _record_of(delta, before), packed, heads)
    known.check(where)
    return known


def _head_of(store: Store, file: IndexedFile) -> bytes:
    with store.open(file.name, file.nbytes) as opened:
        return read_head(store, file, opened)


def _changed_head(changes: Changes, head: bytes) -> bytes:
    """Return the first bytes of a weight file with a header that a delta changes."""
    [(_, stored)] = changes.read(0, 1)
    change = np.zeros(changes.extent(0).nbytes, np.uint8)
    changes.apply(stored, change.data)
    return (np.frombuffer(head, np.uint8, min(len(head), len(change))) ^ change[: len(head)]).tobytes()


def _record_of(delta: Delta, before: _VerifiedStep) -> SourceRecord:
    """Return the source record after a delta. Raise FormatError unless all small files match it."""
    old, others = digests_of_small(before.manifest), set(delta.manifest.others)
    side = digests_of_side_files(before.record)
    for name, proof in digests_of_small(delta.new).items():
        if name in others:
            read_small(delta.store, NEW + name, proof)
        else:
            _check_digest(name, old.get(name, "none"), proof, str(delta.store))
    record = before.record
    if SOURCE_RECORD_NAME in others:
        record = read_record(delta.store, delta.new, NEW)
    for one in record.side_files:
        if one.name in others:
            _check_is_there(delta.store, NEW + one.name)
        else:
            where = delta.store.location(NEW + one.name)
            _check_digest(one.name, side.get(one.name, "none"), one.digest, where)
    if unknown := others - names_of(delta.new, record) - {SIGNATURE_NAME}:
        what = f"has {min(unknown)}, which is not a file of the result"
        raise FormatError(what, path=str(delta.store), code="mismatch")
    return record


def _check_is_there(store: Store, name: str) -> None:
    if store.stat(name) is None:
        raise FormatError("is missing", path=store.location(name), code="missing")


def _check_digest(what: str, found: str, expected: str, where: str) -> None:
    if found != expected:
        raise FormatError(f"{what} has digest {found}, expected {expected}", path=where, code="digest")
