"""What the product does with a store, for tests that have a path of the file system."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from relayout.checkpoint import converted, source
from relayout.checkpoint.source import SourceCheckpoint
from relayout.core.extents import Extent
from relayout.format.index import Manifest, RankTable
from relayout.format.source_record import SourceRecord
from relayout.loader.sources.rank import StoredFile
from relayout.publish import folder
from relayout.publish.output import LocalOutput, OutputSpec
from relayout.publish.publishers import StoreDestination
from relayout.storage import reading
from relayout.storage.local.store import LocalStore
from relayout.storage.stores import Access


def read_source(path: Path) -> SourceCheckpoint:
    return source.read_source(LocalStore(path))


def read_manifest(path: Path) -> Manifest:
    return converted.read_manifest(LocalStore(path))


def read_table(path: Path, manifest: Manifest, rank: int) -> RankTable:
    return converted.read_table(LocalStore(path), manifest, rank)


def read_record(path: Path, manifest: Manifest) -> SourceRecord:
    return converted.read_record(LocalStore(path), manifest)


def stored_file(path: Path, nbytes: int) -> StoredFile:
    return StoredFile(LocalStore(path.parent), path.name, nbytes)


def hashed_file(path: Path, nbytes: int, extents: Sequence[Extent]) -> reading.HashedFile:
    opened = partial(LocalStore(path.parent).open, path.name, nbytes, access=Access.ONCE)
    return reading.HashedFile(opened, extents)


def staging_folder(place: Path) -> AbstractContextManager[LocalOutput]:
    return folder.staging_folder(place, OutputSpec(what="a test", fingerprint="of-a-test"))


def check_output(given: Path, place: Path, *, force: bool) -> None:
    StoreDestination(LocalStore(place), converted.CONVERTED, force).check(LocalStore(given))
