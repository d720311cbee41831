"""A read-through cache: a store whose files are fetched to a local folder when they are first used, and read there.

It keeps a converted checkpoint of the ranks that were loaded. Every byte of a weight file is compared with the
digest of its chunk before the file gets its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from relayout.checkpoint.converted import (
    check_file,
    check_head,
    check_small,
    chunks_nbytes,
    digests_of_small,
    read_chunk_digests,
)
from relayout.core.digests import digest_hex
from relayout.core.extents import Extent, split
from relayout.core.workers import Workers
from relayout.errors import FormatError
from relayout.format.index import CHUNKS_NAME, MANIFEST_NAME, Manifest
from relayout.format.manifest import MAX_TABLE_NBYTES
from relayout.loader.budgets import HOST_BUFFERS, plan_budget
from relayout.loader.sources.rank import StoredFile, files_of
from relayout.progress import Progress, reporting
from relayout.storage.buffers import Buffer
from relayout.storage.cache_folder import Cache, Lease
from relayout.storage.local.files import InputFile, OutputFile
from relayout.storage.local.open_folder import OpenFolder
from relayout.storage.local.store import LocalStore
from relayout.storage.protocols import Access, FileStat, Store

_REQUEST_NBYTES = 4 * 2**20
"""What a thread fetches at once, or one chunk: it is held in memory until its digest is known."""
_LIMIT_SECONDS = 60.0
"""How long another process may fetch a file without writing anything: it may repeat a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedStore(LocalStore):
    """Read-through cache entry over a remote store. Thread-safe."""

    remote: Store
    files: dict[str, StoredFile]
    """The weight files of the checkpoint, in the remote store."""
    lease: Lease

    def __str__(self) -> str:
        return str(self.remote)

    def has(self, name: str) -> bool:
        """Whether a weight file is kept, with its length."""
        return self.lease.has(name, self.files[name].nbytes)

    def stat(self, name: str) -> FileStat | None:
        if name in self.files and not self.has(name):
            return self.remote.stat(name)  # A weight file is not fetched for this.
        self._fetch(name)
        return LocalStore.stat(self, name)

    def read(self, name: str, limit: int) -> bytes:
        self._fetch(name)
        return LocalStore.read(self, name, limit)

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> InputFile:
        self._fetch(name)
        return LocalStore.open(self, name, nbytes, access=access, version=version)

    def _fetch(self, name: str) -> None:
        """Keep a file, unless it is there or the remote store lacks it."""
        if name in self.files:
            self.fetch([name])
        elif "/" not in name and not self.lease.has(name):
            try:
                blob = self.remote.read(name, MAX_TABLE_NBYTES)
            except FormatError as error:
                if error.code != "missing":
                    raise
            else:
                self.lease.keep_small(name, lambda: blob)

    def fetch(self, names: Sequence[str], progress: Progress = None) -> None:
        """Keep weight files.

        Raises:
            FormatError: a file is missing in the remote store, or damaged.
            OSError: a request failed, or the cache cannot be written.
        """
        missing = [self.files[name] for name in names if not self.has(name)]
        if not missing:
            return
        self.lease.was_filled = True
        with reporting(progress, "fetching", sum(file.nbytes for file in missing)) as report:
            done = 0
            for file in missing:
                fetch = partial(_fetch_file, self.folder, file, report.after(done))
                self.lease.keep(file.name, fetch, file.nbytes, limit_seconds=_LIMIT_SECONDS)
                done += file.nbytes
            report(done)


def cached(remote: Store, manifest: Manifest, blob: bytes, cache: Cache) -> CachedStore:
    """The entry of a checkpoint; `blob` is its manifest as stored, which names the entry.

    Raises:
        OSError: the cache cannot be written.
    """
    lease = cache.lease(digest_hex(blob))
    if lease.is_doubted:
        cache.put_aside(lease, "was damaged when it was read")
        lease = cache.lease(digest_hex(blob))
    _forget_damaged(lease, manifest, blob)
    lease.keep_small(MANIFEST_NAME, lambda: blob)
    lease.describe(str(remote), manifest.num_ranks)
    small = CachedStore(folder=lease.folder, remote=remote, files={}, lease=lease)
    files = {}
    for index, file in enumerate(files_of(remote, manifest, range(len(manifest.files)))):
        assert file.proof is not None
        # Digests are kept, too: the entry can be verified as any other folder.
        proof = replace(file.proof, chunk_digests=partial(read_chunk_digests, small, manifest, index))
        files[file.name] = replace(file, proof=proof)
    return replace(small, files=files)


def _forget_damaged(lease: Lease, manifest: Manifest, blob: bytes) -> None:
    """Delete what is kept and is not what the manifest says, by digest, length or head: it is fetched again."""
    kept = LocalStore(folder=lease.folder)

    def check(name: str) -> None:
        if name == MANIFEST_NAME and kept.read(name, MAX_TABLE_NBYTES) != blob:
            raise FormatError("is another", path=name)
        if name in small:
            check_small(kept, manifest, name, small[name])
        if name == CHUNKS_NAME:
            kept.open(name, chunks_nbytes(manifest)).close()
        if name in indices:
            check_file(kept, manifest, indices[name])

    small, indices = digests_of_small(manifest), {file.name: index for index, file in enumerate(manifest.files)}
    for name in {*small, *indices, CHUNKS_NAME, MANIFEST_NAME}.intersection(
        path.name for path in lease.folder.iterdir()
    ):
        lease.forget_damaged(name, partial(check, name))


def keep(store: CachedStore, cache: Cache, names: Sequence[str], progress: Progress) -> bool:
    """Keep weight files, if there is room for them; other entries are removed for it.

    Returns:
        Whether there was room.

    Raises:
        PlanError: the cache's limit is no size.
        FormatError, OSError: as `CachedStore.fetch`.
    """
    missing = {name: store.files[name].nbytes for name in names if not store.has(name)}
    if missing:
        reservation = cache.reserve(store.lease, missing)
        if reservation is None:
            return False
        with reservation:
            store.fetch(names, progress)
    return True


def _fetch_file(folder: Path, file: StoredFile, on_progress: Callable[[int], None], name: str) -> None:
    """Fetch a weight file to the drive, by several requests at a time, and prove its bytes."""
    assert file.proof is not None
    proof = file.proof
    threads = plan_budget(None, None, HOST_BUFFERS, file.folder.cost).threads
    piece_nbytes = max(_REQUEST_NBYTES // proof.chunk_nbytes, 1) * proof.chunk_nbytes
    body = Extent(proof.data_start, file.nbytes - proof.data_start)
    with (
        file.proven().open(Access.BUFFERED) as source,
        OpenFolder(folder) as opened,
        OutputFile(opened, name, file.nbytes) as output,
    ):
        head = memoryview(bytearray(proof.data_start))
        source.read(0, head)
        check_head(head, proof.content, proof.data_start, file.where)
        output.write(0, head)

        def fetch(buffer: Buffer, piece: Extent) -> int:
            view = buffer.reserve(piece.nbytes)
            source.read(piece.offset, view)
            output.write(piece.offset, view)
            return piece.nbytes

        Workers(threads, list(split(body, piece_nbytes)), Buffer, fetch).run(on_progress)
