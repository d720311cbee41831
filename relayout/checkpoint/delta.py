"""A converted checkpoint that is a base and deltas: a store like any other, whose files are made as they are read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeAlias

from relayout.checkpoint.converted import find_manifest_blob, names_of_index, names_of_output, read_manifest
from relayout.checkpoint.proven import Proven, StoreOver, check_header, index_of, proof_of
from relayout.core.digests import digest_hex
from relayout.errors import FormatError, PlanError, about
from relayout.format.delta import (
    NEW,
    OLD,
    DeltaManifest,
    delta_name,
    layout_difference,
    num_pieces,
    parse_delta,
    parse_index,
    pieces_of,
    place_of_index,
)
from relayout.format.fields import parse_object
from relayout.format.index import MANIFEST_NAME, Manifest, RankTable
from relayout.format.manifest import DELTA, MAX_MANIFEST_NBYTES, MAX_TABLE_NBYTES, parse_manifest
from relayout.format.rank_table import parse_table
from relayout.format.sparse import xor_into
from relayout.storage.protocols import (
    Access,
    Closable,
    Entry,
    FileStat,
    ReadableFile,
    Replaceable,
    Store,
)
from relayout.storage.stores import check_exists, find_input

Paths: TypeAlias = Sequence[str | os.PathLike[str]] | str | os.PathLike[str]
"""Deltas in the order in which they apply, or a single one: folders, or their URLs."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta whose manifests were read. Methods raise FormatError if a file of it is missing or damaged."""

    store: Store
    manifest: DeltaManifest
    old: Manifest
    """Of the base."""
    new: Manifest
    """Of what it makes."""

    def table(self, side: str, rank: int) -> RankTable:
        """The table of a rank or of another holder, `OLD` or `NEW`."""
        manifest = self.old if side == OLD else self.new
        name = side + manifest.holders[rank].table
        return parse_table(self.store.read(name, MAX_TABLE_NBYTES), manifest, rank, self.store.location(name))

    def open(self, index: int) -> Changes | None:
        """Open what changed in a weight file, by its position in the manifests; None: nothing."""
        return Changes(self, index) if self.manifest.files[index].nbytes else None


class Changes(Closable):
    """What changed in a weight file. Thread-safe. Methods raise FormatError if it is damaged."""

    def __init__(self, delta: Delta, index: int) -> None:
        """As `Delta.open`, of a file that has changed."""
        file, stored = delta.new.files[index], delta.manifest.files[index]
        self._where = delta.store.location(delta_name(file.name))
        self._file = delta.store.open(delta_name(file.name), stored.nbytes)
        try:
            with about(path=self._where):
                # Before they are listed: the manifest may say any number.
                place = place_of_index(stored, num_pieces(file, delta.new.chunk_nbytes))
                blob = bytearray(place.nbytes)
                self._file.read(place.offset, memoryview(blob))
                self.index = parse_index(bytes(blob), stored, pieces_of(file, delta.new.chunk_nbytes))
        except BaseException:
            self.close()
            raise

    def read(self, first: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """Read the pieces from `first` to before `end` at once. Yield those that changed, as stored."""
        places = self.index.stored[first:end]
        begin = places[0].offset
        stored = memoryview(bytearray(places[-1].end - begin))
        self._file.read(begin, stored)
        for piece, place in enumerate(places, first):
            if place.nbytes:
                view = stored[place.offset - begin : place.end - begin]
                if digest_hex(view) != self.index.digests[piece]:
                    raise FormatError(
                        f"piece {piece} does not match its digest: damaged", path=self._where, code="digest"
                    )
                yield piece, view

    def apply(self, stored: memoryview, target: memoryview) -> None:
        """Change the bytes of a piece by what is stored of it."""
        with about(path=self._where):
            xor_into(stored, target)

    def close(self) -> None:
        self._file.close()


def is_delta(path: str | os.PathLike[str]) -> bool:
    """Whether a folder, or what a URL names, is a delta.

    Raises:
        FormatError: relayout.json is damaged.
        PlanError: as `find_input`.
    """
    store = find_input(path)
    blob = find_manifest_blob(store)
    requires = None if blob is None else parse_object(blob, store.location(MANIFEST_NAME)).get("requires")
    return isinstance(requires, list) and DELTA in requires


def read_deltas(paths: Paths) -> list[Delta]:
    """Read the manifests of deltas; for errors see `read_delta`."""
    found = [paths] if isinstance(paths, str | os.PathLike) else paths
    return [read_delta(find_input(path).snapshot()) for path in found]


def read_delta(store: Store) -> Delta:
    """Read the manifest of a delta, and those of the checkpoints that it is between.

    Raises:
        FormatError: not a delta, or damaged.
        PlanError: there is nothing.
    """
    blob = find_manifest_blob(store)
    if blob is None:
        check_exists(store)
        what = f"not a delta ({MANIFEST_NAME} is missing); relayout delta makes one"
        raise FormatError(what, path=str(store), code="missing")
    manifest = parse_delta(blob, store.location(MANIFEST_NAME))
    sides = []
    for side, digest in ((OLD, manifest.base), (NEW, manifest.makes)):
        blob, where = store.read(side + MANIFEST_NAME, MAX_MANIFEST_NBYTES), store.location(side + MANIFEST_NAME)
        if digest_hex(blob) != digest:
            raise FormatError("digest differs from the one in the delta's manifest", path=where, code="digest")
        sides.append(parse_manifest(blob, where))
    difference = layout_difference(*sides)
    if difference is not None or len(manifest.files) != len(sides[1].files):
        what = f"not between checkpoints of one layout: {difference or 'the files differ'}"
        raise FormatError(what, path=str(store), code="mismatch")
    return Delta(store, manifest, *sides)


def names_of_delta(folder: Store) -> frozenset[str]:
    """Names of all files of a delta, as its manifests name them; for errors see `read_delta`."""
    delta = read_delta(folder)
    changed = [file.name for file, stored in zip(delta.new.files, delta.manifest.files, strict=True) if stored.nbytes]
    older = [MANIFEST_NAME, *(holder.table for holder in delta.old.holders.values())]
    newer = [*names_of_index(delta.new), *delta.manifest.side_files]
    return frozenset(
        [MANIFEST_NAME, *map(delta_name, changed), *(OLD + name for name in older), *(NEW + name for name in newer)]
    )


def describe_delta(folder: Store) -> str:
    """What a delta is, by its manifest, which is written last; for errors see `read_delta`."""
    return f"a complete delta of {len(read_delta(folder).manifest.files)} files"


DELTA_OUTPUT = Replaceable(MANIFEST_NAME, describe_delta, names_of_delta)
"""An output of `delta`."""


def with_deltas(base: Store, deltas: Sequence[Delta]) -> Store:
    """What deltas, one after the other, make of a converted checkpoint.

    Raises:
        FormatError: the base is not a converted checkpoint, or damaged.
        PlanError: a delta applies to another one.
    """
    store = base
    for delta in deltas:
        blob = find_manifest_blob(store)
        if blob is None:
            read_manifest(store)  # Says what is there instead.
        if blob is None or digest_hex(blob) != delta.manifest.base:
            found = "" if blob is None else f" of content {digest_hex(blob)}"
            what = f"applies to content {delta.manifest.base}, not to {store}{found}: another base, or another order?"
            raise PlanError(what, path=str(delta.store), code="option")
        store = DeltaStore(store, delta)
    return store


@dataclass(frozen=True, slots=True)
class DeltaStore(StoreOver):
    """What a delta makes of its base. Thread-safe. All bytes of weight files are proven when they are read."""

    delta: Delta

    def __str__(self) -> str:
        return f"{self.base} + {self.delta.store}"

    def location(self, name: str) -> str:
        store, there = self._place(name)
        return store.location(there)

    def walk(self) -> Iterator[Entry]:
        return map(Entry, names_of_output(self))

    def stat(self, name: str) -> FileStat | None:
        store, there = self._place(name)
        status, index = store.stat(there), index_of(self.delta.new, name)
        if status is None or index is None:
            return status
        file = self.delta.new.files[index]
        return FileStat(file.nbytes, file.content, status.mode)

    def read(self, name: str, limit: int) -> bytes:
        store, there = self._place(name)
        blob = store.read(there, limit)
        if name == MANIFEST_NAME and digest_hex(blob) != self.delta.manifest.makes:
            what = "digest differs from the one in the delta's manifest"
            raise FormatError(what, path=self.location(name), code="digest")
        return blob

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> ReadableFile:
        index = index_of(self.delta.new, name)
        if index is None:
            store, there = self._place(name)
            return store.open(there, nbytes, access=access, version=version)
        file = self.delta.new.files[index]
        FileStat(file.nbytes, file.content).check(self.location(name), nbytes, version)
        changed = _Changed(self.base, self.delta, index)
        try:
            return Proven(changed, proof_of(self, self.delta.new, index), f"{self}: {name}")
        except BaseException:
            changed.close()
            raise

    def _place(self, name: str) -> tuple[Store, str]:
        """Where a file is; of a weight file, its older version."""
        if name in names_of_index(self.delta.new) or name in self.delta.manifest.side_files:
            return self.delta.store, NEW + name
        return self.base, name


class _Changed(Closable):
    """A weight file of the base, changed as it is read. Thread-safe. Reads are of whole chunks, or in the header."""

    alignment = 1

    def __init__(self, base: Store, delta: Delta, index: int) -> None:
        """Open it, and make its header. FormatError: that is damaged, or of another file; or the delta is."""
        self._file = delta.new.files[index]
        self._chunk_nbytes = delta.new.chunk_nbytes
        with ExitStack() as stack:
            self._base = stack.enter_context(base.open(self._file.name, self._file.nbytes))
            self._changes = delta.open(index)
            if self._changes is not None:
                stack.enter_context(self._changes)
            self._head = memoryview(bytearray(self._file.data_start))
            self._base.read(0, self._head)
            where = base.location(self._file.name)
            check_header(self._head, delta.old.files[index].header_digest, delta.old.digest, where)
            self._change(0, 1, 0, self._head)
            check_header(self._head, self._file.header_digest, delta.new.digest, f"{where}, changed by {delta.store}")
            self._stack = stack.pop_all()

    @property
    def nbytes(self) -> int:
        return self._file.nbytes

    @property
    def version(self) -> str:
        return self._file.content

    def fileno(self) -> None:
        return

    def read(self, offset: int, view: memoryview) -> None:
        """Fill `view`; for errors see `ReadableFile.read`. FormatError: also if the delta is damaged."""
        start = self._file.data_start
        if offset < start:
            view[:] = self._head[offset : offset + view.nbytes]
            return
        self._base.read(offset, view)
        first = 1 + (offset - start) // self._chunk_nbytes
        self._change(first, 1 - (start - offset - view.nbytes) // self._chunk_nbytes, offset, view)

    def _change(self, first: int, end: int, offset: int, view: memoryview) -> None:
        """Change the pieces from `first` to before `end`; `view` is at `offset` of the file."""
        if self._changes is not None:
            for piece, stored in self._changes.read(first, end):
                extent = self._changes.index.extents[piece]
                self._changes.apply(stored, view[extent.offset - offset : extent.end - offset])

    def close(self) -> None:
        self._stack.close()
