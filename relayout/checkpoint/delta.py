"""A converted checkpoint that consists of a base and deltas: a store that computes its files as they are read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from relayout.checkpoint.converted import (
    PACKED,
    StoreOver,
    VerifiedFile,
    check_header,
    check_present,
    check_rank,
    digests_of_side_files,
    file_digests_of,
    find_manifest_blob,
    find_signature,
    index_of,
    names_of_index,
    names_of_output,
    parts_of_packed,
    read_manifest_blob,
    read_packed_digests,
    read_record,
    read_table,
    sizes_of_packed,
)
from relayout.checkpoint.folder import check_exists
from relayout.checkpoint.trust import Policy, policy_over, verify_statement
from relayout.core.digests import BLAKE3_NBYTES, XXH3_NBYTES, blake3_hex, unpack_digests
from relayout.core.extents import Extent
from relayout.errors import FormatError, PlanError, about, shown
from relayout.format.delta import (
    CHANGED_DIGESTS_NAME,
    NEW,
    NEW_MANIFEST_NAME,
    DeltaFile,
    DeltaManifest,
    Elements,
    decode,
    delta_name,
    layout_difference,
    parse_changed_digests,
    parse_delta,
    parse_index,
    piece_of,
    xor_into,
)
from relayout.format.fields import parse_object
from relayout.format.index import (
    CHUNKS_NAME,
    MANIFEST_NAME,
    SIGNATURE_NAME,
    Manifest,
    RankTable,
    chunk_digest_extents,
    digest_extents,
)
from relayout.format.manifest import (
    MAX_MANIFEST_NBYTES,
    MAX_RECORD_NBYTES,
    REQUIRES_DELTA,
    content_of,
    decompress,
    parse_manifest,
)
from relayout.publish.output import OutputKind
from relayout.storage.stores import (
    Access,
    Closable,
    Enter,
    Entry,
    FileStat,
    HeadFile,
    ReadableFile,
    Store,
    entered,
    everywhere,
    find_input,
    read_whole,
)

_NUM_RECENT = 4
"""Number of files for which a delta keeps the index in memory."""

Paths: TypeAlias = Sequence[str | os.PathLike[str]] | str | os.PathLike[str]
"""Deltas in the order in which they apply, or a single one: folders, or their URLs."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta with its manifests. Methods raise FormatError if a file of the delta is missing or damaged."""

    store: Store
    manifest: DeltaManifest
    blob: bytes
    """relayout.json of the result, as stored in the delta."""
    new: Manifest
    """Manifest of the result, parsed from `blob`."""
    position: int = 0
    """Position in a chain, from 1, for errors; 0: the delta is alone."""
    _recent: dict[int, Changes] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def part(self) -> str | None:
        """Name of the delta in a chain, which errors contain in addition to the path; None: the delta is alone."""
        return _part(self.position)

    def changes(self, index: int) -> Changes | None:
        """Return the changes of a weight file, by its number; None if it is unchanged. The last few are kept."""
        stored = self.manifest.by_number.get(index)
        if stored is None:
            return None
        found = self._recent.get(index) or Changes(self, index, stored)
        self._recent[index] = found
        for older in list(self._recent)[:-_NUM_RECENT]:
            self._recent.pop(older, None)
        return found

    def changed_digests(self, position: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Return the changed digests of one holder's tensors: rising rows, and each digest in binary form.

        Args:
            position: of the holder in the manifest; the position after the last holder stands for the source.
        """
        part, place = self.manifest.digests[position], self.manifest.digest_extents[position]
        count = digest_extents(self.new)[position].nbytes // XXH3_NBYTES
        content = b""
        if place.nbytes:
            with self.store.open(CHANGED_DIGESTS_NAME, self.manifest.digest_extents[-1].end) as file:
                content = _read_extent(file, place)
        with about(path=self.store.location(CHANGED_DIGESTS_NAME), part=self.part):
            return parse_changed_digests(content, part, count)


class Changes:
    """The changes of a weight file in one delta. Thread-safe.

    The delta's file is open only while it is read: a chain may have more deltas than a process may open files. If the
    file is replaced meanwhile, that is detected: the index has a digest of each piece.
    """

    def __init__(self, delta: Delta, index: int, stored: DeltaFile) -> None:
        """Read the index of the changes of a file, see `Delta.changes`. FormatError: it is damaged."""
        self._delta, self._nbytes, self._file = delta, stored.nbytes, delta.new.files[index]
        self._name = delta_name(self._file.name)
        self._where = delta.store.location(self._name)
        with about(path=self._where, part=delta.part):
            blob = self._read(stored.index_extent)
            self.index = parse_index(blob, stored, self._file, delta.new.chunk_nbytes)

    @property
    def header_digest(self) -> str | None:
        """BLAKE3 digest of the weight file's new header; None: the header does not change."""
        return bytes(self.index.contents[0]).hex() if self.index.numbers[:1].tolist() == [0] else None

    def extent(self, piece: int) -> Extent:
        """Return the extent of a piece in the weight file."""
        return piece_of(self._file, self._delta.new.chunk_nbytes, piece)

    def read(self, first: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """Read the pieces from `first` to before `end` in one request; yield each changed piece, as stored.

        Raises:
            FormatError: one is damaged.
        """
        rows = self.index.rows(first, end)
        whole = self.index.place(rows)
        stored = memoryview(self._read(whole)) if whole.nbytes else memoryview(b"")
        for row in rows:
            place, piece = self.index.place(range(row, row + 1)), int(self.index.numbers[row])
            view = stored[place.offset - whole.offset : place.end - whole.offset]
            if blake3_hex(view) != bytes(self.index.stored[row]).hex():
                with about(path=self._where, part=self._delta.part):
                    raise FormatError(f"piece {piece} does not match its digest: damaged", code="digest")
            yield piece, view

    def apply(self, stored: memoryview, target: memoryview) -> None:
        """Apply a stored change to the bytes of a piece. FormatError: it cannot be decoded."""
        with about(path=self._where, part=self._delta.part):
            xor_into(stored, target)

    def decode(self, stored: memoryview, nbytes: int) -> list[Elements]:
        """Return the elements that change in a piece of `nbytes` bytes. FormatError: the piece cannot be decoded."""
        with about(path=self._where, part=self._delta.part):
            return list(decode(stored, nbytes))

    def _read(self, place: Extent) -> bytes:
        with self._delta.store.open(self._name, self._nbytes) as file:
            return _read_extent(file, place)


def _read_extent(file: ReadableFile, place: Extent) -> bytes:
    """Read an extent of a file with a checked length: the length bounds the memory that is allocated."""
    content = bytearray(place.nbytes)
    file.read(place.offset, memoryview(content))
    return bytes(content)


def is_delta(path: str | os.PathLike[str]) -> bool:
    """Return True if the folder at a path or URL is a delta."""
    store = find_input(path)
    blob = find_manifest_blob(store)
    requires = None if blob is None else parse_object(blob, store.location(MANIFEST_NAME)).get("requires")
    return isinstance(requires, list) and REQUIRES_DELTA in requires


def read_deltas(paths: Paths, policy: Policy | None = None) -> Iterator[Delta]:
    """Read the manifests of deltas, one after the other.

    Args:
        policy: requires signatures of its signers; None: no signature is required.
    """
    found = [paths] if isinstance(paths, str | os.PathLike) else list(paths) if isinstance(paths, Iterable) else None
    if found is None:
        raise PlanError(f"deltas: {shown(paths)}, expected the path of a delta, or a list of paths", code="option")
    for number, path in enumerate(found, 1):
        position = number if len(found) > 1 else 0
        with about(part=_part(position)):
            delta = read_delta(find_input(path).snapshot(), position, policy)
        yield delta


def _part(position: int) -> str | None:
    return f"delta {position}" if position else None


def read_delta(store: Store, position: int = 0, policy: Policy | None = None) -> Delta:
    """Read the manifest of a delta, and that of the resulting checkpoint.

    Args:
        position: in a chain; see `Delta`.
        policy: requires a signature of the delta's manifest by its signers; None: no signature is required. The
            manifest proves everything else: the base, the result, and every piece.
    """
    where = store.location(MANIFEST_NAME)
    if policy is None:
        stored = find_manifest_blob(store)
    else:
        stored = verify_statement(store, policy, lambda blob: parse_delta(blob, where).makes).blob
    if stored is None:
        check_exists(store)
        what = f"not a delta ({MANIFEST_NAME} is missing); relayout delta makes one"
        raise FormatError(what, path=str(store), code="missing")
    manifest, where = parse_delta(stored, where), store.location(NEW_MANIFEST_NAME)
    blob = decompress(store.read(NEW_MANIFEST_NAME, MAX_MANIFEST_NBYTES), where, MAX_MANIFEST_NBYTES)
    if content_of(blob) != manifest.makes:
        raise FormatError("digest differs from the one in the delta's manifest", path=where, code="digest")
    new = parse_manifest(blob, where)
    if len(manifest.digests) != len(new.holders) + 1:
        what = f"digests of {len(manifest.digests)} parts, {len(new.holders)} holders and the source have some"
        raise FormatError(what, path=store.location(MANIFEST_NAME), code="mismatch")
    own = {MANIFEST_NAME, *PACKED, *(file.name for file in new.files)}
    own.update(entry.table for entry in new.holders.values())
    if taken := own.intersection(manifest.others):
        what = f"has {min(taken)} among other files, which is made of the base and of what changed"
        raise FormatError(what, path=store.location(MANIFEST_NAME), code="unsafe")
    if manifest.files and manifest.files[-1].number >= len(new.files):
        what = f"changes of file {manifest.files[-1].number}, there are {len(new.files)}"
        raise FormatError(what, path=store.location(MANIFEST_NAME), code="mismatch")
    return Delta(store, manifest, blob, new, position)


def signed_content(path: str, policy: Policy) -> str:
    """Return the content of a signed folder, or of the result of a signed delta. Errors as of `verify_statement`."""
    if is_delta(path):
        return read_delta(find_input(path), policy=policy).manifest.makes
    return content_of(verify_statement(find_input(path), policy).blob)


def names_of_delta(folder: Store) -> frozenset[str]:
    """Return the names of all files of a delta, from its manifests."""
    delta = read_delta(folder)
    manifest = delta.manifest
    digests = [CHANGED_DIGESTS_NAME] if manifest.digest_extents[-1].end else []
    changed = [delta_name(delta.new.files[file.number].name) for file in manifest.files]
    others = [NEW_MANIFEST_NAME, *(NEW + name for name in manifest.others)]
    if find_signature(folder, read_manifest_blob(folder)) is not None:
        others.append(SIGNATURE_NAME)
    return frozenset([MANIFEST_NAME, *digests, *changed, *others])


def describe_delta(folder: Store) -> str:
    """Describe a delta by its manifest, which is written last."""
    return f"a complete delta of {len(read_delta(folder).new.files)} files"


DELTA_OUTPUT = OutputKind(MANIFEST_NAME, describe_delta, names_of_delta)
"""An output of `delta`."""


def with_deltas(base: Store, deltas: Iterable[Delta]) -> Store:
    """Return a converted checkpoint with deltas applied one after the other; the base itself if there are none."""
    found = iter(deltas)
    first = next(found, None)
    if first is None:
        return base
    blob = read_manifest_blob(base)
    old = parse_manifest(blob, base.location(MANIFEST_NAME))
    return DeltaStore(base, old, tuple(chained(chain([first], found), old, content_of(blob), str(base))))


def chained(deltas: Iterable[Delta], old: Manifest, content: str, before: str) -> Iterator[Delta]:
    """Yield deltas, checking that each applies to the result of the previous one, and keeps its layout.

    Args:
        old, content: the manifest of the first delta's base, and its content.
        before: description of this base, for messages.
    """
    for delta in deltas:
        check_applies(delta, old, content, before)
        yield delta
        before, content = f"what delta {delta.position} makes", delta.manifest.makes


def check_applies(delta: Delta, old: Manifest, content: str, before: str) -> None:
    """Check that a delta applies to a content, and keeps its layout. Arguments as of `chained`."""
    where = str(delta.store)
    with about(part=delta.part):
        if delta.manifest.base != content:
            what = f"applies to content {delta.manifest.base}, not to {before} of content {content}"
            raise PlanError(f"{what}: another base, or another order?", path=where, code="option")
        if (difference := layout_difference(old, delta.new)) is not None:
            what = f"does not keep the layout of {before}: {difference}"
            raise FormatError(what, path=where, code="mismatch")


@dataclass(frozen=True, slots=True)
class RankState:
    """The known state of one rank's tensors, to which deltas are applied."""

    content: str
    """Content of the checkpoint with these tensors."""
    manifest: Manifest
    table: RankTable
    digests: bytes
    """Digests of the tensors in the order of the table, in binary form."""

    @staticmethod
    def of(store: Store, holder: int) -> RankState:
        """Return the state of a rank, or of another holder, in a folder, with or without deltas.

        Raises:
            FormatError: the folder is damaged.
            PlanError: such a rank does not exist.
        """
        blob = read_manifest_blob(store)
        manifest = parse_manifest(blob, store.location(MANIFEST_NAME))
        if holder not in manifest.holders:
            check_rank(store, holder, manifest.num_ranks)
            check_present(store, manifest, [holder])
        table, digests = read_table(store, manifest, holder), read_packed_digests(store, manifest, holder)
        return RankState(content_of(blob), manifest, table, digests)

    @property
    def by_name(self) -> dict[str, str]:
        """Digest of each tensor, by its name."""
        return dict(zip(self.table.names, unpack_digests(self.digests), strict=True))

    def after(self, deltas: Sequence[Delta], before: str) -> RankState:
        """Return the state after deltas, with all digests verified.

        Args:
            before: description of the checkpoint of this state, for messages.

        Raises:
            FormatError: a delta is damaged.
            PlanError: a delta applies to another checkpoint.
        """
        state, position = self, list(self.manifest.holders).index(self.table.rank)
        for delta in chained(deltas, self.manifest, self.content, before):
            rows, found = delta.changed_digests(position)
            digests = np.frombuffer(state.digests, np.uint8).reshape(-1, XXH3_NBYTES).copy()
            digests[rows] = found
            packed = digests.tobytes()
            if blake3_hex(packed) != delta.new.holders[self.table.rank].digests_digest:
                what = f"its digests of the tensors of rank {self.table.rank} do not make those of the result"
                raise FormatError(what, path=delta.store.location(CHANGED_DIGESTS_NAME), code="digest")
            state = RankState(delta.manifest.makes, delta.new, self.table, packed)
        return state


@dataclass(frozen=True, slots=True)
class DeltaStore(StoreOver):
    """A base with deltas applied. Thread-safe. All bytes of weight files are verified when they are read."""

    old: Manifest
    """The manifest of the base."""
    deltas: tuple[Delta, ...]

    @property
    def new(self) -> Manifest:
        """The manifest of the last delta's result. All intermediate results have the same layout."""
        return self.deltas[-1].new

    def __str__(self) -> str:
        last = self.deltas[-1].store
        return (
            f"{self.base} + {last}" if len(self.deltas) == 1 else f"{self.base} + {len(self.deltas)} deltas to {last}"
        )

    def location(self, name: str) -> str:
        if name in PACKED:  # Faults in these files come from a delta: the base is verified first.
            return f"{self.deltas[-1].store}: {name} of the result"
        store, there = self._location(name)
        return store.location(there)

    def walk(self, enter: Enter = everywhere) -> Iterator[Entry]:
        return entered(names_of_output(self), enter)

    def stat(self, name: str) -> FileStat | None:
        store, there = self._location(name)
        status = store.stat(there)
        nbytes = self._nbytes_of(name)
        if status is None or nbytes is None:
            return status
        return FileStat(nbytes, self._version_of(name), status.mode)

    def read(self, name: str, limit: int) -> bytes:
        if self._nbytes_of(name) is not None:
            return read_whole(self.open(name), self.location(name), limit)
        store, there = self._location(name)
        blob = store.read(there, limit)
        if policy_over(self.base) is not None and store is not self.base and name not in names_of_index(self.new):
            self._check_side_file(name, blob)
        return blob

    def _check_side_file(self, name: str, blob: bytes) -> None:
        """Compare a side file with its digest in the source record, for a policy that requires proof of all bytes."""
        sides = digests_of_side_files(read_record(self, self.new))
        if name != SIGNATURE_NAME and sides.get(name) != blake3_hex(blob):
            raise FormatError("is not the file of the result", path=self.location(name), code="digest")

    def open(
        self, name: str, nbytes: int | None = None, *, access: Access = Access.BUFFERED, version: str | None = None
    ) -> ReadableFile:
        made = self._nbytes_of(name)
        if made is None:
            store, there = self._location(name)
            if policy_over(self.base) is None or store is self.base:
                return store.open(there, nbytes, access=access, version=version)
            blob = self.read(name, MAX_RECORD_NBYTES)
            return HeadFile(blob, FileStat(len(blob), self._version_of(name)))
        status = FileStat(made, self._version_of(name))
        status.check(self.location(name), nbytes, version)
        if name == MANIFEST_NAME:
            return HeadFile(self.deltas[-1].blob, status)
        index = index_of(self.new, name)
        if index is None:
            return HeadFile(b"", status, partial(self._fill_packed, name))
        changed = _Changed(self, index)
        try:
            return VerifiedFile(changed, file_digests_of(self, self.new, index), f"{self}: {name}")
        except BaseException:
            changed.close()
            raise

    def _fill_packed(self, name: str, offset: int, view: memoryview) -> None:
        """Fill memory with bytes of a file of digests: those of the base, changed by the deltas."""
        nbytes = self._nbytes_of(name) or 0
        wanted = Extent(offset, view.nbytes).aligned(BLAKE3_NBYTES)
        whole = Extent(wanted.offset, min(wanted.end, nbytes) - wanted.offset)
        content = np.empty(whole.nbytes, np.uint8)
        with self.base.open(name, nbytes) as base:
            base.read(whole.offset, content.data)
        # Parts that are read whole are compared with the base's digests: the error then locates the damage.
        for place, proof in parts_of_packed(self.old, name):
            if whole.offset <= place.offset and place.end <= whole.end:
                part = content[place.offset - whole.offset : place.end - whole.offset]
                if blake3_hex(part.data) != proof:
                    what = f"its part at {place.offset} differs from the manifest"
                    raise FormatError(what, path=self.base.location(name), code="digest")
        for delta in self.deltas:
            change_digests(delta, name, content, whole.offset)
        view[:] = content[offset - whole.offset :][: view.nbytes].data

    def is_of_delta(self, error: FormatError) -> bool:
        """Return True if an error is about a file of a delta: it is then no evidence of a damaged base."""
        return any(str(error.path).startswith((f"{delta.store}/", f"{delta.store}:")) for delta in self.deltas)

    def _nbytes_of(self, name: str) -> int | None:
        """Return the length of a file that is computed from base and deltas; None: it is stored."""
        if name == MANIFEST_NAME:
            return len(self.deltas[-1].blob)
        if name in PACKED:
            return sizes_of_packed(self.new)[name]
        index = index_of(self.new, name)
        return None if index is None else self.new.files[index].nbytes

    def _version_of(self, name: str) -> str:
        index = index_of(self.new, name)
        return self.deltas[-1].manifest.makes if index is None else self.new.files[index].tensors_digest

    def _location(self, name: str) -> tuple[Store, str]:
        """Return the store and name of a file; for a computed file, those of its first stored component."""
        if name == MANIFEST_NAME:
            return self.deltas[-1].store, NEW_MANIFEST_NAME
        has = (delta.store for delta in reversed(self.deltas) if name in delta.manifest.others)
        store = next(has, None)
        return (self.base, name) if store is None else (store, NEW + name)


def change_digests(delta: Delta, name: str, content: npt.NDArray[np.uint8], start: int = 0) -> None:
    """Apply a delta to bytes of relayout.chunks or relayout.digests.

    Args:
        content: bytes from `start` on; they begin and end at borders of digests.
    """
    is_chunks, new = name == CHUNKS_NAME, delta.new
    places = chunk_digest_extents(new.files, new.chunk_nbytes) if is_chunks else digest_extents(new)
    for position, place in enumerate(places):
        if place.end <= start or start + len(content) <= place.offset:
            continue
        if not is_chunks:
            numbers, rows = delta.changed_digests(position)
        elif (changes := delta.changes(position)) is None:
            continue
        else:
            is_chunk = changes.index.numbers > 0
            numbers, rows = changes.index.numbers[is_chunk] - 1, changes.index.contents[is_chunk]
        width = rows.shape[1]
        starts = place.offset + width * numbers - start
        inside = (starts >= 0) & (starts < len(content))
        content[starts[inside, None] + np.arange(width)] = rows[inside]


class _Changed(Closable):
    """A weight file of the base, changed as it is read. Thread-safe. Reads are of whole chunks, or in the header."""

    alignment = 1

    def __init__(self, made: DeltaStore, index: int) -> None:
        """Open the base file, compute the new header. FormatError: a header or a delta is damaged or does not match."""
        self._file, self._chunk_nbytes = made.new.files[index], made.new.chunk_nbytes
        found = (delta.changes(index) for delta in made.deltas)
        with ExitStack() as stack:
            self._base = stack.enter_context(made.base.open(self._file.name, self._file.nbytes))
            self._changes = [changes for changes in found if changes is not None]
            self._head = memoryview(bytearray(self._file.data_start))
            self._base.read(0, self._head)
            where = made.base.location(self._file.name)
            check_header(self._head, made.old.files[index].header_digest, where)
            self._change(0, 1, 0, self._head)
            what = f"{where}, changed by {made.deltas[-1].store}"
            check_header(self._head, self._file.header_digest, what)
            stack.pop_all()

    @property
    def nbytes(self) -> int:
        return self._file.nbytes

    @property
    def version(self) -> str:
        return self._file.tensors_digest

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
                extent = changes.extent(piece)
                changes.apply(stored, view[extent.offset - offset : extent.end - offset])

    def close(self) -> None:
        self._base.close()
