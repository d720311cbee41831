"""Compares the source of a conversion with the known digests of its files, while it is converted.

The conversion copies tensors in the order of the model, several at once; a SHA-256 needs a file from front to back. So
other threads read each shard a second time, concurrently. To prove that both reads returned the same bytes, both take
the XXH3-128 digest of each tensor; the digests are compared at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from relayout.checkpoint.recorded_digests import NUM_STREAMS, differs, grouped, hex_of, recorded_digests, to_hash
from relayout.conversion.copy_plan import TensorDigests
from relayout.conversion.layout import Conversion
from relayout.core.workers import Stop
from relayout.errors import FormatError
from relayout.format.source_record import FileDigest
from relayout.storage.reading import hash_files


class SourceHashing:
    """Hashes the shards of a source that have known digests, in its own threads, in a `with` block.

    Nothing is hashed if the source is not in a local folder, or if only some ranks are converted: bytes that the
    conversion does not read are not read for a comparison either.
    """

    def __init__(self, conversion: Conversion, threads: int) -> None:
        self._source = conversion.source
        self._threads = threads
        self._known = _known(conversion)
        self._stop = Stop()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._hashed: dict[int, str] | None = None
        """XXH3-128 of each tensor of the hashed shards, by its position in the source; None: not yet hashed."""

    def __enter__(self) -> Self:
        if self._known:
            self._thread = threading.Thread(target=self._run, name="relayout-source", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.request()
        if self._thread is not None:
            self._thread.join()

    def check(self) -> None:
        """Raise the error of the hashing, if it has failed by now."""
        if self._error is not None:
            raise self._error

    def finish(self, written: Mapping[int, TensorDigests]) -> tuple[FileDigest, ...]:
        """Wait until all shards are hashed, and return their digests; empty if none were known.

        Args:
            written: the digests of the tensors, as they were converted.

        Raises:
            FormatError: a shard differs from its known digest, or the hashed and the converted bytes differ.
        """
        if self._thread is None:
            return ()
        self._thread.join()
        self.check()
        assert self._hashed is not None
        for t, digest in self._hashed.items():
            if t in written and written[t].source not in (None, digest):
                tensor = self._source.tensors[t]
                what = "two reads of it differ: the drive or the memory is not reliable"
                where = self._source.folder.location(self._source.files[tensor.file].name)
                raise FormatError(what, path=where, tensor=tensor.name, code="digest")
        return tuple(one for same in self._known for one in same)

    def _run(self) -> None:
        try:
            self._hashed = self._compare()
        except BaseException as error:
            self._error = error

    def _compare(self) -> dict[int, str]:
        """Hash each shard, and raise FormatError if one differs from its known digest."""
        source = self._source
        tensors: dict[str, list[int]] = {file.name: [] for file in source.files}
        for t in sorted(range(len(source.tensors)), key=lambda t: source.tensors[t].extent):
            tensors[source.files[source.tensors[t].file].name].append(t)
        files = {file.name: file for file in source.files}
        to_read = []
        for first, *_ in self._known:
            extents = [source.tensors[t].extent for t in tensors[first.name]]
            file = files[first.name]
            to_read.append(to_hash(source.folder, first, file.nbytes, extents=extents, version=file.version))
        hashed, found = hash_files(to_read, self._threads, num_streams=NUM_STREAMS, stop=self._stop), dict[int, str]()
        for (first, *_), (*digests, whole) in zip(self._known, hashed, strict=True):
            if whole != hex_of(first):
                raise FormatError(differs(first, whole), path=source.folder.location(first.name), code="digest")
            found |= zip(tensors[first.name], digests, strict=True)
        return found


def _known(conversion: Conversion) -> list[list[FileDigest]]:
    """Return the known digests of shards, in one list for each hash to compute."""
    source = conversion.source
    shards = [file.name for file in source.files]
    is_local = source.folder.path("") is not None and all(file.version is not None for file in source.files)
    if not is_local or not conversion.has_all:
        return []
    return grouped(one for one in recorded_digests(source.folder, shards) if one.name in set(shards))
