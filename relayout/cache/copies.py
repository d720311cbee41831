"""Copies of a remote converted checkpoint: its files are fetched on first use, and then read from the drive.

An entry of the cache is a converted checkpoint of the loaded ranks. Every byte of a weight file is compared with the
digest of its chunk before the file gets its name. Bytes that another entry contains, such as an older version of the
model, are read from there instead of from the remote store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from relayout.cache.folder import Cache, HeldEntry
from relayout.checkpoint.converted import (
    VerifiedFile,
    check_file,
    check_head,
    digests_of_small,
    file_digests_of,
    find_manifest,
    read_small,
    sizes_of_packed,
)
from relayout.checkpoint.reuse import Contents, Reuse
from relayout.core.digests import xxh3_hex
from relayout.core.extents import Extent, split
from relayout.core.workers import Workers
from relayout.errors import FormatError
from relayout.format.index import DIGESTS_NAME, MANIFEST_NAME, Manifest
from relayout.format.manifest import MAX_RECORD_NBYTES
from relayout.reporting import Progress, reporting
from relayout.storage.local.descriptors import OpenFolder
from relayout.storage.local.store import LocalStore, OutputFile
from relayout.storage.stores import (
    LOCAL_COST,
    Access,
    Enter,
    Entry,
    FileStat,
    ReadableFile,
    ReadOnlyStore,
    RequestCost,
    Store,
    everywhere,
    if_there,
)
from relayout.storage.system import Buffer

_REQUEST_NBYTES = 4 * 2**20
"""Bytes that a thread fetches by one request, or one chunk if that is longer. They stay in memory until verified."""
_LIMIT_SECONDS = 60.0
"""Seconds without a write after which a wait for another process's fetch fails: it may be repeating a request."""


@dataclass(frozen=True, slots=True)
class CopyingStore(ReadOnlyStore):
    """A remote store that is read through copies on the drive. Thread-safe.

    It has the name of the remote store, and the paths and costs of the copies. A missing file is fetched when it is
    opened or read.
    """

    cost: ClassVar[RequestCost] = LOCAL_COST

    remote: Store
    cache: Cache
    """The cache. Its other entries may contain equal bytes, for example of an older version of the model."""
    entry: HeldEntry
    """The entry with the copies. It is not removed while this object lives."""
    manifest: Manifest
    weights: Mapping[str, int]
    """Positions of the weight files in the manifest, by name."""
    threads: int
    """Number of requests in flight."""

    def __str__(self) -> str:
        return str(self.remote)

    @property
    def copies(self) -> LocalStore:
        """The store of the files that were fetched."""
        return LocalStore(self.entry.folder)

    def location(self, name: str) -> str:
        return self.copies.location(name)

    def path(self, name: str) -> Path:
        return self.copies.path(name)

    def parent(self) -> tuple[Store, str]:
        return self.remote.parent()

    def walk(self, enter: Enter = everywhere) -> Iterator[Entry]:
        return self.copies.walk(enter)

    def stat(self, name: str) -> FileStat | None:
        if name in self.weights and not self._has(name):
            return self.remote.stat(name)  # A weight file is not fetched for this.
        self._fetch(name)
        return self.copies.stat(name)

    def read(self, name: str, limit: int) -> bytes:
        self._fetch(name)
        return self.copies.read(name, limit)

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> ReadableFile:
        self._fetch(name)
        return self.copies.open(name, nbytes, access=access, version=version)

    def _has(self, name: str) -> bool:
        """Return True if a weight file exists with its length."""
        return self.entry.has(name, self.manifest.files[self.weights[name]].nbytes)

    def _fetch(self, name: str) -> None:
        """Fetch a file, unless it exists already or the remote store lacks it."""
        if name in self.weights:
            self._fetch_weights([name], None)
        elif "/" not in name and not self.entry.has(name):
            blob = if_there(lambda: self.remote.read(name, MAX_RECORD_NBYTES))
            if blob is not None:
                self.entry.keep_small(name, lambda: blob)

    def keep(self, names: Sequence[str], cache: Cache, progress: Progress) -> bool:
        """Fetch weight files if the cache has room for them. Other entries are removed to make room.

        Returns:
            True if the cache had room.

        Raises:
            PlanError: the cache's limit is not a valid size.
            FormatError: a file is missing in the remote store, or damaged.
            OSError: a request failed, or the cache cannot be written.
        """
        missing = {name: self.manifest.files[self.weights[name]].nbytes for name in names if not self._has(name)}
        if missing:
            reservation = cache.reserve(self.entry, missing)
            if reservation is None:
                return False
            with reservation:
                self._fetch_weights(list(missing), progress)
        return True

    def _fetch_weights(self, names: Sequence[str], progress: Progress) -> None:
        """Fetch the weight files that do not exist yet."""
        missing = [self.weights[name] for name in names if not self._has(name)]
        if not missing:
            return
        self.entry.was_filled = True
        files, total = self.manifest.files, sum(self.manifest.files[index].nbytes for index in missing)
        with reporting(progress, "fetching", total) as report, self._find_reuse(missing) or nullcontext() as reuse:
            done = 0
            for index in missing:
                file, write = files[index], partial(self._write, index, reuse, report.after(done))
                self.entry.keep(file.name, write, file.nbytes, limit_seconds=_LIMIT_SECONDS)
                done += file.nbytes
            report(done)

    def _find_reuse(self, missing: Collection[int]) -> Reuse | None:
        """Return a reader of another entry's bytes for missing files; None if no suitable entry exists."""
        if (older := self._find_older()) is None:
            return None
        every = self.manifest.holders.items()
        holders = [one for one, entry in every if not set(entry.files).isdisjoint(missing)]
        return Reuse(Contents.read(self, self.manifest, holders), *older)

    def _find_older(self) -> tuple[Store, Contents] | None:
        """Return the last used entry of the same model type, and the index of its contents.

        The entry may be removed or changed at any time: bytes that it then lacks are fetched.
        """
        for folder in self.cache.others(self.entry):
            with suppress(FormatError, OSError):
                older = LocalStore(folder)
                manifest = find_manifest(older)
                if manifest is not None and manifest.model_type == self.manifest.model_type:
                    holders = manifest.holders.items()
                    there = [one for one, entry in holders if older.stat(entry.table) is not None]
                    return older, Contents.read(older, manifest, there)
        return None

    def _write(self, index: int, reuse: Reuse | None, on_progress: Callable[[int], None], name: str) -> None:
        """Write a weight file to the drive under this name, by several requests at a time, and verify its bytes."""
        file = self.manifest.files[index]
        where = self.remote.location(file.name)
        # The digests are kept, too: the entry can be verified as any other folder, and reused by another version.
        digests = file_digests_of(self, self.manifest, index)
        self._fetch(DIGESTS_NAME)
        piece_nbytes = max(_REQUEST_NBYTES // digests.chunk_nbytes, 1) * digests.chunk_nbytes
        body = Extent(digests.data_start, file.nbytes - digests.data_start)
        with (
            self.remote.open(file.name, file.nbytes) as opened,
            OpenFolder(self.entry.folder) as folder,
            OutputFile(folder, name, file.nbytes) as output,
        ):
            source = VerifiedFile(opened, digests, where)
            head = memoryview(bytearray(digests.data_start))
            source.read(0, head)
            check_head(head, digests.tensors_digest, digests.data_start, where)
            output.write(0, head)

            def read(extent: Extent, view: memoryview) -> None:
                opened.read(extent.offset, view)

            def fetch(buffers: tuple[Buffer, Buffer], piece: Extent) -> int:
                view = buffers[0].reserve(piece.nbytes)
                left = [piece] if reuse is None else reuse.fill_chunks(index, piece, view, buffers[1], read)
                for extent in left:
                    source.read(extent.offset, view[extent.offset - piece.offset :][: extent.nbytes])
                output.write(piece.offset, view)
                return piece.nbytes

            pieces = list(split(body, piece_nbytes))
            Workers(self.threads, pieces, lambda: (Buffer(), Buffer()), fetch).run(on_progress)


def copied(remote: Store, manifest: Manifest, blob: bytes, cache: Cache, threads: int) -> CopyingStore:
    """Return a remote converted checkpoint, read through copies in a cache. Damaged copies are fetched again.

    Args:
        blob: its manifest as stored. The entry's name is a digest of it.
        threads: the number of requests in flight while files are fetched.
    """
    entry = cache.hold(xxh3_hex(blob), lambda entry: _forget_damaged(entry, manifest, blob))
    entry.keep_small(MANIFEST_NAME, lambda: blob)
    entry.describe(str(remote), manifest.num_ranks)
    weights = {file.name: index for index, file in enumerate(manifest.files)}
    return CopyingStore(remote, cache, entry, manifest, weights, threads)


def _forget_damaged(entry: HeldEntry, manifest: Manifest, blob: bytes) -> None:
    """Delete copies that contradict the manifest by digest, length or head, so that they are fetched again."""
    copies = LocalStore(entry.folder)

    def check(name: str) -> None:
        if name == MANIFEST_NAME and copies.read(name, MAX_RECORD_NBYTES) != blob:
            raise FormatError("differs from the manifest that was read before", path=name, code="mismatch")
        if name in small:
            read_small(copies, name, small[name])
        if name in packed:
            copies.open(name, packed[name]).close()
        if name in weights:
            check_file(copies, manifest, weights[name])

    small, packed = digests_of_small(manifest), sizes_of_packed(manifest)
    weights = {file.name: index for index, file in enumerate(manifest.files)}
    for name in {*small, *packed, *weights, MANIFEST_NAME}.intersection(path.name for path in entry.folder.iterdir()):
        entry.forget_damaged(name, partial(check, name))
