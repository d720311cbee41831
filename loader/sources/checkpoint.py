"""The source of a load: one rank of a converted checkpoint, as stored or at another degree, or of a plain one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

from relayout.checkpoint.converted import check_rank, is_converted, read_manifest, read_table
from relayout.core.arguments import integer
from relayout.errors import PlanError
from relayout.format.index import MANIFEST_NAME, Manifest, RankTable
from relayout.loader.placement import ArenaPlan, PlacedTensors, pack
from relayout.loader.sources.contents import Contents, StoredFile, contents_of, rank_files, select
from relayout.loader.sources.pieces import Columns, Pieces, StoredPieces
from relayout.loader.sources.reshard import Holder
from relayout.storage.protocols import Kind, Store
from relayout.storage.stores import find_store


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

    @property
    def no_digests(self) -> str | None:
        """Why its tensors have no digests to verify, for a message; None if they have."""

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
    """One rank of a folder that `relayout convert` wrote."""

    store: Store
    manifest: Manifest
    rank: int
    table: Callable[[], RankTable]
    """Reads the rank's table, once. FormatError: it is damaged, or of another rank or conversion."""

    no_digests = None
    slow_because = None
    is_as_stored = True

    @property
    def num_ranks(self) -> int:
        """See `RankSource.num_ranks`."""
        return self.manifest.num_ranks

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """The rank's files; for errors see `rank_files`."""
        return rank_files(self.store, self.manifest, self.rank)

    def contents(self, patterns: Sequence[str] | None) -> Contents:
        """See `RankSource.contents`."""
        return _selected(contents_of(self.files, self.table()), patterns)

    def arena(self, patterns: Sequence[str] | None) -> ArenaPlan:
        """See `RankSource.arena`: the manifest has the reads of a whole rank, so that the table is not needed yet."""
        entry, files = self.manifest.ranks[self.rank], self.files
        table = None if patterns is None else self.table()
        if table is not None and patterns is not None:
            rows = select(table.names, patterns)
            if len(rows) < len(table.names):
                return pack(contents_of(files, table).rows(rows))

        def tensors() -> PlacedTensors:
            found = table or self.table()
            return PlacedTensors(found.names, found.dtypes, found.shapes, found.arena_offsets, found.digests)

        return ArenaPlan(files, entry.reads, entry.arena_nbytes, entry.nbytes, tensors)

    def pieces(self, patterns: Sequence[str] | None) -> Pieces:
        """See `RankSource.pieces`."""
        table = self.table()
        holders = [Holder(*one) for one in zip(table.slices, table.files, table.offsets, strict=True)]
        rows = range(len(table.names)) if patterns is None else select(table.names, patterns)
        return StoredPieces(self.columns().rows(rows), self.files, [holders[row] for row in rows], self._metadata)

    def columns(self) -> Columns:
        """See `RankSource.columns`."""
        table = self.table()
        return Columns(table.names, table.dtypes, table.source_shapes, table.slices)

    def _metadata(self) -> Mapping[str, str] | None:
        # Imported here, as no load needs it.
        from relayout.checkpoint.source import read_shard

        return read_shard(self.store, self.files[0].name)[1].metadata


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

    @property
    def no_digests(self) -> str:
        """See `RankSource.no_digests`."""
        return (
            f"nothing to verify by at tp={self.num_ranks}: digests are of the slices of"
            f" {self.manifest.num_ranks} ranks; `relayout verify` checks them"
        )


@dataclass(frozen=True, slots=True)
class PlainRank(_PlannedRank):
    """One rank of a checkpoint that was not converted."""

    @property
    def no_digests(self) -> str:
        """See `RankSource.no_digests`."""
        return "nothing to verify by: only converted checkpoints have digests"

    @property
    def slow_because(self) -> str | None:
        """See `RankSource.slow_because`."""
        if self.num_ranks == 1:
            return None
        return (
            f"{self.store}: a plain checkpoint, sliced while it is loaded; `relayout convert {self.store}"
            f" --tp {self.num_ranks}` once makes every later load faster"
        )


def find_rank(path: str | os.PathLike[str], rank: int, tp: int | None) -> RankSource:
    """The rank of the checkpoint at a path or URL.

    Raises:
        FormatError: relayout.json is damaged.
        PlanError: the path or the rank does not exist; `tp` is needed for a plain checkpoint; or `rank` or `tp` is not
            an integer.
    """
    rank = integer(rank, "rank")
    if tp is not None:
        tp = integer(tp, "tp")
        if tp < 1:
            raise PlanError(f"tp={tp}, expected 1 or more", code="option")
    store = find_store(path)
    if is_converted(store):
        manifest = read_manifest(store)
        check_rank(rank, manifest.num_ranks if tp is None else tp)
        if tp is not None and tp != manifest.num_ranks:
            return ReshardedRank(store, rank, tp, cache(partial(_resharded, store, manifest, rank, tp)), manifest)
        return ConvertedRank(store, manifest, rank, cache(partial(read_table, store, manifest, rank)))
    if store.kind() is Kind.NOTHING:
        raise PlanError(store.absence(), path=str(store), code="missing")
    if tp is None:
        raise PlanError(
            f"not converted ({MANIFEST_NAME} is missing); say tp=N to slice it while loading",
            path=str(store),
            code="option",
        )
    check_rank(rank, tp)
    return PlainRank(store, rank, tp, cache(partial(_plain, store, rank, tp)))


def find_whole(path: str | os.PathLike[str]) -> Pieces:
    """The whole tensors of a converted checkpoint, assembled from all ranks.

    Raises:
        FormatError: the manifest or the source record is damaged.
        PlanError: `path` does not exist, or was not converted.
    """
    store = find_store(path)
    if store.kind() is Kind.NOTHING:
        raise PlanError(store.absence(), path=str(store), code="missing")
    if not is_converted(store):
        raise PlanError(
            f"not converted ({MANIFEST_NAME} is missing): safetensors.safe_open reads its files",
            path=str(store),
            code="missing",
        )
    from relayout.loader.sources.resharded import whole_pieces

    return whole_pieces(store, read_manifest(store))


def _selected(contents: Contents, patterns: Sequence[str] | None) -> Contents:
    return contents if patterns is None else contents.rows(select(contents.names, patterns))


# Imported in these, as only they need the planner.


def _resharded(store: Store, manifest: Manifest, rank: int, num_ranks: int) -> _Slices:
    from relayout.loader.sources.resharded import resharded_slices

    return resharded_slices(store, manifest, rank, num_ranks)


def _plain(store: Store, rank: int, num_ranks: int) -> _Slices:
    from relayout.loader.sources.plain import plain_slices

    return plain_slices(store, rank, num_ranks)
