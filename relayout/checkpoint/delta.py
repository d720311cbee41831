"""A converted checkpoint that is a base and deltas: a store like any other, which makes its files as they are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache as once
from itertools import chain
from typing import TypeAlias

from relayout.checkpoint.converted import (
    Proven,
    StoreOver,
    check_header,
    find_manifest_blob,
    index_of,
    names_of_index,
    names_of_output,
    proof_of,
    read_manifest,
)
from relayout.checkpoint.folder import check_exists
from relayout.core.digests import digest_hex
from relayout.core.extents import Extent
from relayout.errors import FormatError, PlanError, about, shown
from relayout.format.delta import (
    NEW,
    OLD,
    DeltaFile,
    DeltaManifest,
    Elements,
    decode,
    delta_name,
    layout_difference,
    num_pieces,
    parse_delta,
    parse_index,
    pieces_of,
    place_of_index,
    xor_into,
)
from relayout.format.fields import parse_object
from relayout.format.index import MANIFEST_NAME, IndexedFile, Manifest, RankTable
from relayout.format.manifest import DELTA, MAX_MANIFEST_NBYTES, MAX_TABLE_NBYTES, content_of, parse_manifest
from relayout.format.rank_table import parse_table
from relayout.publish.output import Replaceable
from relayout.storage.stores import (
    Access,
    Closable,
    Enter,
    Entry,
    FileStat,
    ReadableFile,
    Store,
    entered,
    everywhere,
    find_input,
)

Paths: TypeAlias = Sequence[str | os.PathLike[str]] | str | os.PathLike[str]
"""Deltas in the order in which they apply, or a single one: folders, or their URLs."""


@dataclass(frozen=True, slots=True)
class Link:
    """A delta in a chain. Methods raise FormatError if a file of the delta is missing or damaged."""

    store: Store
    manifest: DeltaManifest
    position: int
    """Position in the chain, from 1, which errors name; 0: the delta is alone."""

    def changes(
        self, index: int, file: IndexedFile, num_pieces: int, pieces: Callable[[], Sequence[Extent]]
    ) -> Changes | None:
        """What changed in a weight file, by its position in the manifests; None: nothing.

        Args:
            num_pieces: of the file.
            pieces: lists them. It is called when the delta has proven that there are so many.
        """
        stored = self.manifest.files[index]
        return Changes(self, file, stored, num_pieces, pieces) if stored.nbytes else None


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta whose manifests were read. Methods raise FormatError if a file of it is missing or damaged."""

    link: Link
    old: Manifest
    """The manifest of the base."""
    new: Manifest
    """The manifest of what the delta makes."""

    def table(self, side: str, rank: int) -> RankTable:
        """The table of a rank or of another holder, `OLD` or `NEW`."""
        manifest = self.old if side == OLD else self.new
        name, store = side + manifest.holders[rank].table, self.link.store
        return parse_table(store.read(name, MAX_TABLE_NBYTES), manifest, rank, store.location(name))

    def changes(self, index: int) -> Changes | None:
        """What changed in a weight file, by its position in the manifests; None: nothing."""
        return self.link.changes(index, self.new.files[index], *_pieces_of(self.new, index))


def _pieces_of(manifest: Manifest, index: int) -> tuple[int, Callable[[], Sequence[Extent]]]:
    """The pieces of a weight file: how many there are, and what lists them, once."""
    file, chunk_nbytes = manifest.files[index], manifest.chunk_nbytes
    return num_pieces(file, chunk_nbytes), once(lambda: pieces_of(file, chunk_nbytes))


class Changes:
    """What changed in a weight file, by one delta. Thread-safe.

    The delta's file is open only while it is read: a chain may have more deltas than a process may open files. What a
    replaced file has in its place is found, because the index has the digest of each piece.
    """

    def __init__(
        self, link: Link, file: IndexedFile, stored: DeltaFile, num_pieces: int, pieces: Callable[[], Sequence[Extent]]
    ) -> None:
        """Open the changes of a file, see `Link.changes`. FormatError: their index is damaged."""
        self._link, self._nbytes = link, stored.nbytes
        self._name = delta_name(file.name)
        self._where = link.store.location(self._name)
        with about(path=self._where, part=_part(link.position)):
            # Before they are listed: the manifest may say any number.
            place = place_of_index(stored, num_pieces)
            self.index = parse_index(bytes(self._read(place)), stored, pieces())

    def read(self, first: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """Read the pieces from `first` to before `end` at once. Yield those that changed, as stored.

        Raises:
            FormatError: one is damaged.
        """
        whole = self.index.place(first, end)
        stored = memoryview(self._read(whole)) if whole.nbytes else memoryview(b"")
        for piece in range(first, end):
            place = self.index.place(piece, piece + 1)
            if place.nbytes:
                view = stored[place.offset - whole.offset : place.end - whole.offset]
                with about(path=self._where, part=_part(self._link.position)):
                    if digest_hex(view) != self.index.digest(piece):
                        raise FormatError(f"piece {piece} does not match its digest: damaged", code="digest")
                yield piece, view

    def apply(self, stored: memoryview, target: memoryview) -> None:
        """Change the bytes of a piece by what is stored of it. FormatError: it cannot be decoded."""
        with about(path=self._where, part=_part(self._link.position)):
            xor_into(stored, target)

    def decode(self, stored: memoryview, nbytes: int) -> list[Elements]:
        """The elements of a piece of so many bytes that change. FormatError: it cannot be decoded."""
        with about(path=self._where, part=_part(self._link.position)):
            return list(decode(stored, nbytes))

    def _read(self, place: Extent) -> bytearray:
        content = bytearray(place.nbytes)
        with self._link.store.open(self._name, self._nbytes) as file:
            file.read(place.offset, memoryview(content))
        return content


def is_delta(path: str | os.PathLike[str]) -> bool:
    """Whether a folder, or what a URL names, is a delta."""
    store = find_input(path)
    blob = find_manifest_blob(store)
    requires = None if blob is None else parse_object(blob, store.location(MANIFEST_NAME)).get("requires")
    return isinstance(requires, list) and DELTA in requires


def read_deltas(paths: Paths) -> Iterator[Delta]:
    """Read the manifests of deltas, one after the other."""
    found = [paths] if isinstance(paths, str | os.PathLike) else list(paths) if isinstance(paths, Iterable) else None
    if found is None:
        raise PlanError(f"deltas: {shown(paths)}, expected the path of a delta, or a list of paths", code="option")
    before = None
    for number, path in enumerate(found, 1):
        position = number if len(found) > 1 else 0
        with about(part=_part(position)):
            before = read_delta(find_input(path).snapshot(), position, before)
        yield before


def _part(position: int) -> str | None:
    """What errors name beside the path of a delta in a chain."""
    return f"delta {position}" if position else None


def read_delta(store: Store, position: int = 0, before: Delta | None = None) -> Delta:
    """Read the manifest of a delta, and those of the checkpoints that it is between.

    Args:
        position: in a chain; see `Link`.
        before: the delta in front of it in the chain. What that makes is not read again.
    """
    blob = find_manifest_blob(store)
    if blob is None:
        check_exists(store)
        what = f"not a delta ({MANIFEST_NAME} is missing); relayout delta makes one"
        raise FormatError(what, path=str(store), code="missing")
    link = Link(store, parse_delta(blob, store.location(MANIFEST_NAME)), position)
    manifest = link.manifest
    is_next = before is not None and before.link.manifest.makes == manifest.base
    old = before.new if before is not None and is_next else _read_side(store, OLD, manifest.base)
    new = _read_side(store, NEW, manifest.makes)
    difference = layout_difference(old, new)
    if difference is not None or len(manifest.files) != len(new.files):
        what = f"not between checkpoints of one layout: {difference or 'the files differ'}"
        raise FormatError(what, path=str(store), code="mismatch")
    return Delta(link, old, new)


def _read_side(store: Store, side: str, content: str) -> Manifest:
    """The manifest of the base of a delta, or of what it makes, which is of this content."""
    blob, where = store.read(side + MANIFEST_NAME, MAX_MANIFEST_NBYTES), store.location(side + MANIFEST_NAME)
    if content_of(blob) != content:
        raise FormatError("digest differs from the one in the delta's manifest", path=where, code="digest")
    return parse_manifest(blob, where)


def names_of_delta(folder: Store) -> frozenset[str]:
    """Names of all files of a delta, as its manifests name them."""
    delta = read_delta(folder)
    manifest = delta.link.manifest
    changed = [file.name for file, stored in zip(delta.new.files, manifest.files, strict=True) if stored.nbytes]
    older = [MANIFEST_NAME, *(holder.table for holder in delta.old.holders.values())]
    newer = [*names_of_index(delta.new), *manifest.side_files]
    return frozenset(
        [MANIFEST_NAME, *map(delta_name, changed), *(OLD + name for name in older), *(NEW + name for name in newer)]
    )


def describe_delta(folder: Store) -> str:
    """What a delta is, by its manifest, which is written last."""
    return f"a complete delta of {len(read_delta(folder).new.files)} files"


DELTA_OUTPUT = Replaceable(MANIFEST_NAME, describe_delta, names_of_delta)
"""An output of `delta`."""


def with_deltas(base: Store, deltas: Iterable[Delta]) -> Store:
    """What deltas, one after the other, make of a converted checkpoint: the base itself if there are none."""
    found = iter(deltas)
    first = next(found, None)
    if first is None:
        return base
    blob = find_manifest_blob(base)
    if blob is None:
        read_manifest(base)  # Says what is there instead.
    content = "" if blob is None else content_of(blob)
    links, new = [], first.new
    for delta in chained(chain([first], found), content, str(base)):
        links.append(delta.link)
        new = delta.new
    return DeltaStore(base, tuple(links), first.old, new)


def chained(deltas: Iterable[Delta], content: str, before: str) -> Iterator[Delta]:
    """Yield deltas, each of which applies to what the one before makes.

    Args:
        content: the digest of the manifest that the first one applies to.
        before: what that is, for messages.
    """
    for delta in deltas:
        link = delta.link
        if link.manifest.base != content:
            found = f" of content {content}" if content else ""
            what = f"applies to content {link.manifest.base}, not to {before}{found}: another base, or another order?"
            with about(part=_part(link.position)):
                raise PlanError(what, path=str(link.store), code="option")
        yield delta
        before, content = f"what delta {link.position} makes", link.manifest.makes


@dataclass(frozen=True, slots=True)
class DeltaStore(StoreOver):
    """What deltas make of their base. Thread-safe. All bytes of weight files are proven when they are read."""

    links: tuple[Link, ...]
    """The deltas. The last has all small files, but for side files that only others have."""
    old: Manifest
    """The manifest of the base."""
    new: Manifest
    """The manifest of what the last delta makes. All between them have the same layout."""

    def __str__(self) -> str:
        last = self.links[-1].store
        return f"{self.base} + {last}" if len(self.links) == 1 else f"{self.base} + {len(self.links)} deltas to {last}"

    def location(self, name: str) -> str:
        store, there = self._place(name)
        return store.location(there)

    def walk(self, enter: Enter = everywhere) -> Iterator[Entry]:
        return entered(names_of_output(self), enter)

    def stat(self, name: str) -> FileStat | None:
        store, there = self._place(name)
        status, index = store.stat(there), index_of(self.new, name)
        if status is None or index is None:
            return status
        file = self.new.files[index]
        return FileStat(file.nbytes, file.content, status.mode)

    def read(self, name: str, limit: int) -> bytes:
        store, there = self._place(name)
        blob = store.read(there, limit)
        if name == MANIFEST_NAME and content_of(blob) != self.links[-1].manifest.makes:
            what = "digest differs from the one in the delta's manifest"
            raise FormatError(what, path=self.location(name), code="digest")
        return blob

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> ReadableFile:
        index = index_of(self.new, name)
        if index is None:
            store, there = self._place(name)
            return store.open(there, nbytes, access=access, version=version)
        file = self.new.files[index]
        FileStat(file.nbytes, file.content).check(self.location(name), nbytes, version)
        changed = _Changed(self, index)
        try:
            return Proven(changed, proof_of(self, self.new, index), f"{self}: {name}")
        except BaseException:
            changed.close()
            raise

    def is_of_delta(self, error: FormatError) -> bool:
        """Whether an error is of a file of a delta: then nothing says that the base is damaged."""
        return any(str(error.path).startswith(f"{link.store}/") for link in self.links)

    def _place(self, name: str) -> tuple[Store, str]:
        """Where a file is; of a weight file, its oldest version."""
        if name in names_of_index(self.new):
            return self.links[-1].store, NEW + name
        has = (link.store for link in reversed(self.links) if name in link.manifest.side_files)
        store = next(has, None)
        return (self.base, name) if store is None else (store, NEW + name)


class _Changed(Closable):
    """A weight file of the base, changed as it is read. Thread-safe. Reads are of whole chunks, or in the header."""

    alignment = 1

    def __init__(self, made: DeltaStore, index: int) -> None:
        """Open it, and make its header. FormatError: that is damaged, or of another file; or a delta is."""
        self._file, new = made.new.files[index], made.new
        self._chunk_nbytes = new.chunk_nbytes
        pieces = _pieces_of(new, index)
        found = (link.changes(index, self._file, *pieces) for link in made.links)
        with ExitStack() as stack:
            self._base = stack.enter_context(made.base.open(self._file.name, self._file.nbytes))
            self._changes = [changes for changes in found if changes is not None]
            self._head = memoryview(bytearray(self._file.data_start))
            self._base.read(0, self._head)
            where = made.base.location(self._file.name)
            check_header(self._head, made.old.files[index].header_digest, where)
            self._change(0, 1, 0, self._head)
            what = f"{where}, changed by {made.links[-1].store}"
            check_header(self._head, self._file.header_digest, what)
            stack.pop_all()

    @property
    def nbytes(self) -> int:
        return self._file.nbytes

    @property
    def version(self) -> str:
        return self._file.content

    def fileno(self) -> None:
        return

    def read(self, offset: int, view: memoryview) -> None:
        """Fill `view`; for errors see `ReadableFile.read`. FormatError: also if a delta is damaged."""
        start = self._file.data_start
        if offset < start:
            view[:] = self._head[offset : offset + view.nbytes]
            return
        self._base.read(offset, view)
        first = 1 + (offset - start) // self._chunk_nbytes
        self._change(first, 1 - (start - offset - view.nbytes) // self._chunk_nbytes, offset, view)

    def _change(self, first: int, end: int, offset: int, view: memoryview) -> None:
        """Change the pieces from `first` to before `end`; `view` is at `offset` of the file."""
        for changes in self._changes:
            for piece, stored in changes.read(first, end):
                extent = changes.index.extents[piece]
                changes.apply(stored, view[extent.offset - offset : extent.end - offset])

    def close(self) -> None:
        self._base.close()
