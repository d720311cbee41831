"""The source of a load: one rank of a converted checkpoint, as stored or at another degree, or of a plain one."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache as once
from functools import partial
from typing import TYPE_CHECKING, Protocol

from relayout.checkpoint.converted import check_rank, find_manifest, find_manifest_blob, read_table
from relayout.core.arguments import integer
from relayout.core.slices import WHOLE
from relayout.errors import PlanError
from relayout.format.index import MANIFEST_NAME, Manifest, RankTable
from relayout.format.manifest import parse_manifest
from relayout.loader.placement import ArenaPlan, PlacedTensors, pack
from relayout.loader.sources.contents import Contents, StoredFile, contents_of, rank_files, select
from relayout.progress import Progress
from relayout.storage.protocols import Kind, Store
from relayout.storage.stores import check_exists, find_input

if TYPE_CHECKING:
    from relayout.loader.sources.cached import CacheOption
    from relayout.loader.sources.pieces import Columns, Pieces

# What a load of a rank as stored does not need is imported where it is used.


class RankSource(Protocol):
    """One rank of a checkpoint."""

    @property
    def store(self) -> Store:
        """The folder, prefix or file."""

    @property
    def rank(self) -> int:
        """From 0."""

    @property
    def num_ranks(self) -> int:
        """The tensor-parallel degree."""

    def verified(self) -> RankSource:
        """The same, whose bytes are compared with digests when they are loaded with `verify`.

        Raises:
            PlanError: there are no digests.
        """

    @property
    def slow_because(self) -> str | None:
        """Why loading is slow, and how to make it fast, for a person; None if it is fast."""

    @property
    def is_as_stored(self) -> bool:
        """Whether the bytes of every tensor are contiguous in a file."""

    def contents(self, patterns: Sequence[str] | None) -> Contents:
        """The tensors whose names match, all if `patterns` is None.

        Raises:
            FormatError: the manifest's other files, or the plain checkpoint, are damaged.
            PlanError: the model cannot be cut at this degree, has no plan, or a pattern matches nothing.
        """

    def arena(self, patterns: Sequence[str] | None) -> ArenaPlan:
        """The same tensors, in one allocation; for errors see `contents`."""

    def pieces(self, patterns: Sequence[str] | None) -> Pieces:
        """The same tensors, of which any part can be read; for errors see `contents`."""

    def columns(self) -> Columns:
        """What all of the rank's tensors are; for errors see `contents`."""


@dataclass(frozen=True, slots=True)
class ConvertedRank:
    """One rank of a folder that `relayout convert` wrote, or its whole tensors as the one rank of degree 1."""

    store: Store
    manifest: Manifest
    rank: int
    holder: int
    """Position in the manifest's holders."""
    table: Callable[[], RankTable]
    """Reads the holder's table, once. FormatError: it is damaged, or of another rank or conversion."""
    files: Callable[[], tuple[StoredFile, ...]]
    """The rank's files, found once; for errors see `rank_files`."""

    slow_because = None

    @staticmethod
    def of(store: Store, manifest: Manifest, rank: int, holder: int) -> ConvertedRank:
        """Read no table yet."""
        table = once(partial(read_table, store, manifest, holder))
        return ConvertedRank(store, manifest, rank, holder, table, once(partial(rank_files, store, manifest, holder)))

    @property
    def num_ranks(self) -> int:
        """See `RankSource.num_ranks`."""
        return self.manifest.num_ranks if self.holder == self.rank else 1

    @property
    def is_as_stored(self) -> bool:
        """See `RankSource.is_as_stored`: a slice of whole tensors may be of several pieces."""
        return self.manifest.whole is None or self.holder == self.manifest.num_ranks

    @property
    def _shared(self) -> list[bool]:
        """Of each file: whether it has whole tensors, of which the rank has parts."""
        shared = frozenset() if self.is_as_stored else self.manifest.shared
        return [number in shared for number in self.manifest.holders[self.holder].files]

    def verified(self) -> RankSource:
        """See `RankSource.verified`: the table has the digest of each slice."""
        return self

    def stored_files(self) -> tuple[StoredFile, ...]:
        """The files that have the rank's bytes; for errors see `rank_files`."""
        return self.files()

    def contents(self, patterns: Sequence[str] | None) -> Contents:
        """See `RankSource.contents`."""
        return _selected(contents_of(self.files(), self.table(), self._shared), patterns)

    def arena(self, patterns: Sequence[str] | None) -> ArenaPlan:
        """See `RankSource.arena`: the manifest has the reads of a whole rank, so that the table is not needed yet."""
        entry, files = self.manifest.holders[self.holder], self.files()
        table = None if patterns is None else self.table()
        if table is not None and patterns is not None:
            rows = select(table.names, patterns)
            if len(rows) < len(table.names):
                return pack(contents_of(files, table, self._shared).rows(rows))

        def tensors() -> PlacedTensors:
            found = table or self.table()
            return PlacedTensors(found.names, found.dtypes, found.shapes, found.arena_offsets, found.digests)

        return ArenaPlan(files, entry.reads, entry.arena_nbytes, entry.nbytes, tensors)

    def pieces(self, patterns: Sequence[str] | None) -> Pieces:
        """See `RankSource.pieces`."""
        from relayout.loader.sources.pieces import StoredPieces
        from relayout.loader.sources.reshard import Holder

        table, shared = self.table(), self._shared
        parts = [one.in_whole if any(shared) else () for one in table.kinds]
        holders = [
            Holder(WHOLE, file, offset - parts[kind][0].source)
            if shared[file] and parts[kind]
            else Holder(part, file, offset)
            for kind, part, file, offset in zip(table.kind_of, table.slices, table.files, table.offsets, strict=True)
        ]
        rows = range(len(table.names)) if patterns is None else select(table.names, patterns)
        return StoredPieces(self.columns().rows(rows), self.files(), [holders[row] for row in rows], self._metadata)

    def columns(self) -> Columns:
        """See `RankSource.columns`."""
        from relayout.loader.sources.pieces import Columns

        table = self.table()
        return Columns(table.names, table.dtypes, table.source_shapes, table.slices)

    def _metadata(self) -> Mapping[str, str] | None:
        from relayout.checkpoint.source import read_shard

        return read_shard(self.store, self.files()[0].name)[1].metadata


class _Slices(Protocol):
    """What a rank holds by a plan that is made for this load."""

    def contents(self) -> Contents:
        """All of the tensors."""

    def pieces(self, patterns: Sequence[str] | None) -> Pieces:
        """Those whose names match, readable in part."""


@dataclass(frozen=True, slots=True)
class _PlannedRank:
    """A rank whose slices are put together from what is stored."""

    store: Store
    rank: int
    num_ranks: int
    slices: Callable[[], _Slices]
    """Reads what is stored, and plans, once; for errors see `RankSource.contents`."""

    is_as_stored = False

    def stored_files(self) -> tuple[StoredFile, ...]:
        """The files that have the rank's bytes; for errors see `RankSource.contents`."""
        return self.contents(None).files

    def contents(self, patterns: Sequence[str] | None) -> Contents:
        """See `RankSource.contents`."""
        return _selected(self.slices().contents(), patterns)

    def arena(self, patterns: Sequence[str] | None) -> ArenaPlan:
        """See `RankSource.arena`."""
        return pack(self.contents(patterns))

    def pieces(self, patterns: Sequence[str] | None) -> Pieces:
        """See `RankSource.pieces`."""
        return self.slices().pieces(patterns)

    def columns(self) -> Columns:
        """See `RankSource.columns`."""
        return self.pieces(None).columns


@dataclass(frozen=True, slots=True)
class ReshardedRank(_PlannedRank):
    """One rank of a converted folder, at another degree than that of the conversion."""

    manifest: Manifest

    slow_because = None

    def verified(self) -> RankSource:
        """See `RankSource.verified`: digests of slices are of another degree's, so it goes by chunks."""
        read = partial(_resharded, self.store, self.manifest, self.rank, self.num_ranks, is_proven=True)
        return replace(self, slices=once(read))


@dataclass(frozen=True, slots=True)
class PlainRank(_PlannedRank):
    """One rank of a checkpoint that was not converted."""

    def verified(self) -> RankSource:
        """See `RankSource.verified`."""
        raise PlanError(
            "nothing to verify by: only converted checkpoints have digests", path=str(self.store), code="unsupported"
        )

    @property
    def slow_because(self) -> str | None:
        """See `RankSource.slow_because`."""
        if self.num_ranks == 1:
            return None
        return (
            f"{self.store}: a plain checkpoint, sliced while it is loaded; `relayout convert {self.store}"
            f" --tp {self.num_ranks}` once makes every later load faster"
        )


def find_rank(
    path: str | os.PathLike[str],
    rank: int,
    tp: int | None,
    cache: CacheOption = None,
    progress: Progress = None,
) -> RankSource:
    """The rank of the checkpoint at a path or URL.

    Args:
        cache: keeps what is in a remote store; what it lacks is fetched now.
        progress: of that.

    Raises:
        FormatError: relayout.json is damaged; or as `CachedStore.fetch`.
        PlanError: the path or the rank does not exist; `tp` is needed for a plain checkpoint, which a cache does not
            keep; or `rank` or `tp` is not an integer.
        OSError: as `CachedStore.fetch`.
    """
    rank = integer(rank, "rank")
    if tp is not None:
        tp = integer(tp, "tp")
        if tp < 1:
            raise PlanError(f"tp={tp}, expected 1 or more", code="option")
    store = find_input(path).snapshot()
    blob = find_manifest_blob(store)
    if blob is not None:
        manifest = parse_manifest(blob, store.location(MANIFEST_NAME))
        check_rank(store, rank, manifest.num_ranks if tp is None else tp)
        if store.cost.is_remote and (kept := _kept(store, manifest, blob, rank, tp, cache, progress)) is not None:
            return kept
        return _rank_of(store, manifest, rank, tp)
    check_exists(store)
    if tp is None and store.kind() is Kind.FILE and find_manifest_blob(parent := store.parent()[0]) is not None:
        raise PlanError(f"is a file of a converted folder: give the folder, {parent}", path=str(store), code="option")
    if cache and store.cost.is_remote:
        raise PlanError("a plain checkpoint, which cache= does not keep", path=str(store), code="unsupported")
    if tp is None:
        raise PlanError(
            f"not converted ({MANIFEST_NAME} is missing); say tp=N to slice it while loading",
            path=str(store),
            code="option",
        )
    check_rank(store, rank, tp)
    return PlainRank(store, rank, tp, once(partial(_plain, store, rank, tp)))


def _rank_of(store: Store, manifest: Manifest, rank: int, tp: int | None) -> ConvertedRank | ReshardedRank:
    """A rank that exists, of a converted checkpoint."""
    if tp is None or tp == manifest.num_ranks:
        return ConvertedRank.of(store, manifest, rank, rank)
    if tp == 1 and manifest.whole is not None:
        return ConvertedRank.of(store, manifest, rank, manifest.num_ranks)
    return ReshardedRank(store, rank, tp, once(partial(_resharded, store, manifest, rank, tp)), manifest)


def _kept(
    store: Store,
    manifest: Manifest,
    blob: bytes,
    rank: int,
    tp: int | None,
    option: CacheOption,
    progress: Progress,
) -> RankSource | None:
    """The same rank as `_rank_of`, in a cache; None if there is no cache, or no room in it."""
    from relayout.loader.sources.cached import cache_of, cached, keep

    cache = cache_of(option)
    if cache is None:
        return None
    try:
        kept = cached(store, manifest, blob, cache)
        found = _rank_of(kept, manifest, rank, tp)
        if keep(kept, cache, [file.name for file in found.stored_files()], progress):
            return found
    except OSError as error:
        # Others may fill the drive, whatever was reserved.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
    warnings.warn(f"{store}: the cache {cache.folder} has no room for it: reading from the store", stacklevel=5)
    return None


def find_whole(path: str | os.PathLike[str]) -> Pieces:
    """The whole tensors of a converted checkpoint, assembled from all ranks.

    Raises:
        FormatError: the manifest or the source record is damaged.
        PlanError: `path` does not exist, or was not converted.
    """
    store = find_input(path).snapshot()
    manifest = find_manifest(store)
    if manifest is None:
        check_exists(store)
        raise PlanError(
            f"not converted ({MANIFEST_NAME} is missing): safetensors.safe_open reads its files",
            path=str(store),
            code="missing",
        )
    from relayout.loader.sources.resharded import whole_pieces

    return whole_pieces(store, manifest)


def _selected(contents: Contents, patterns: Sequence[str] | None) -> Contents:
    return contents if patterns is None else contents.rows(select(contents.names, patterns))


# Imported in these, as only they need the planner.


def _resharded(store: Store, manifest: Manifest, rank: int, num_ranks: int, *, is_proven: bool = False) -> _Slices:
    from relayout.loader.sources.resharded import resharded_slices

    return resharded_slices(store, manifest, rank, num_ranks, is_proven=is_proven)


def _plain(store: Store, rank: int, num_ranks: int) -> _Slices:
    from relayout.loader.sources.plain import plain_slices

    return plain_slices(store, rank, num_ranks)
