"""Finds the source of a load: one rank of a converted checkpoint, as stored or at another degree, or of a plain one.

Modules that a load of a rank as stored does not need are imported where they are used.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache as once
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from relayout.checkpoint.converted import (
    StoreOver,
    check_present,
    check_rank,
    find_manifest,
    find_manifest_blob,
    read_digests,
    read_manifest,
    read_table,
)
from relayout.checkpoint.folder import check_exists
from relayout.checkpoint.trust import TrustedStore, policy_over, trusted
from relayout.core.arguments import at_least_one, integer, size
from relayout.core.digests import xxh3_hex
from relayout.core.extents import Transfer
from relayout.core.slices import WHOLE
from relayout.errors import FormatError, PlanError, RelayoutError, warn
from relayout.format.index import MANIFEST_NAME, Manifest, RankTable, Read
from relayout.format.manifest import parse_manifest
from relayout.loader.backends.base import Options, resolve_device
from relayout.loader.backends.files import no_torch
from relayout.loader.requests import HOST_BUFFERS, plan_budget
from relayout.loader.sources.rank import (
    ArenaPlan,
    Names,
    Pieces,
    RankSource,
    StoredFile,
    TensorColumns,
    pack,
    rank_files,
    select,
)
from relayout.reporting import Progress
from relayout.storage.stores import Store, find_input, scheme_of

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from relayout.cache.folder import Cache, CacheOption, HeldEntry
    from relayout.checkpoint.delta import Paths
    from relayout.checkpoint.source import SourceCheckpoint
    from relayout.checkpoint.trust import Trust


@dataclass(frozen=True, slots=True)
class ConvertedRank(RankSource):
    """One rank of a folder that `relayout convert` wrote, or its whole tensors as the one rank of degree 1."""

    manifest: Manifest
    holder: int
    """Position of the rank in the manifest's holders."""
    table: Callable[[], RankTable]
    """Reads the holder's table, once. Raises FormatError if it is damaged, or of another rank or conversion."""
    digests: Callable[[], Mapping[str, str]]
    """Reads the digests of the rank's tensors, by name, once. Raises FormatError if they are damaged."""
    files: Callable[[], tuple[StoredFile, ...]]
    """The rank's files, found once; for errors see `rank_files`."""

    @staticmethod
    def of(store: Store, manifest: Manifest, rank: int, holder: int) -> ConvertedRank:
        """Return the rank at position `holder` in the manifest's holders. No table is read yet."""
        table = once(partial(read_table, store, manifest, holder))
        files = once(partial(rank_files, store, manifest, holder))
        digests = once(lambda: dict(zip(table().names, read_digests(store, manifest, holder), strict=True)))
        num_ranks = manifest.num_ranks if holder == rank else 1
        return ConvertedRank(store, rank, num_ranks, manifest, holder, table, digests, files)

    @property
    def is_as_stored(self) -> bool:
        # A slice of whole tensors may consist of several pieces.
        return self.manifest.whole is None or self.holder == self.manifest.num_ranks

    def used_files(self) -> tuple[StoredFile, ...]:
        return self.files()

    def columns(self) -> TensorColumns:
        table = self.table()
        return TensorColumns(
            table.names,
            table.dtypes,
            table.shapes,
            digests=self.digests,
            offsets=table.arena_offsets,
            parts=table.slices,
            source_shapes=table.source_shapes,
        )

    def contents(self, names: Names = None) -> TensorColumns:
        contents = contents_of(self.files(), self.table(), self._shared)
        return replace(contents, digests=self.digests).matching(names)

    def arena(self, names: Names = None) -> ArenaPlan:
        # The manifest contains the reads of a whole rank, so the table is not needed yet.
        entry, files = self.manifest.holders[self.holder], self.files()
        if names is not None:
            rows = select(self.table().names, names)
            if len(rows) < len(self.table().names):
                return pack(self.contents().rows(rows))
        return ArenaPlan(files, entry.reads, entry.arena_nbytes, entry.nbytes, self.columns)

    def pieces(self, names: Names = None) -> Pieces:
        from relayout.loader.sources.reshard import StoredPieces, StoredSlice

        table, shared = self.table(), self._shared
        in_whole = [kind.in_whole if any(shared) else () for kind in table.kinds]
        rows = range(len(table.names)) if names is None else select(table.names, names)
        stored = []
        for row in rows:
            file, offset, runs = table.files[row], table.offsets[row], in_whole[table.kind_of[row]]
            if shared[file] and runs:
                stored.append(StoredSlice(WHOLE, file, offset - runs[0].source))
            else:
                stored.append(StoredSlice(table.slices[row], file, offset))
        return StoredPieces(self.columns().rows(rows), self.files(), stored, self._metadata)

    @property
    def _shared(self) -> list[bool]:
        """True for each file that stores whole tensors while the rank has parts of them."""
        shared = frozenset() if self.is_as_stored else self.manifest.shared
        return [index in shared for index in self.manifest.holders[self.holder].files]

    def _metadata(self) -> Mapping[str, str]:
        from relayout.checkpoint.source import read_shard

        return read_shard(self.store, self.files()[0].name)[1].metadata


def contents_of(files: tuple[StoredFile, ...], table: RankTable, shared: Sequence[bool]) -> TensorColumns:
    """Return all tensors of a rank of a converted checkpoint, stored in `files`.

    `shared` is True for each file that stores whole tensors.
    """
    in_whole = [kind.in_whole if any(shared) else () for kind in table.kinds]
    reads: list[tuple[Read, ...]] = []
    for kind, nbytes, file, offset in zip(table.kind_of, table.sizes, table.files, table.offsets, strict=True):
        if not nbytes:
            reads.append(())
        elif shared[file]:
            shift = offset - in_whole[kind][0].source
            reads.append(tuple(Read(file, run.shifted(source=shift)) for run in in_whole[kind]))
        else:
            reads.append((Read(file, Transfer(offset, 0, nbytes)),))
    return TensorColumns(table.names, table.dtypes, table.shapes, files, reads)


class LoadOptions(TypedDict, total=False):
    """The options that `relayout.load` and `iter_load` share; `relayout.load` explains each."""

    device: str | torch.device
    backend: str
    names: Sequence[str] | str | None
    experts: str | Iterable[int] | None
    verify: bool
    threads: int | None
    memory: int | str | None
    progress: Progress
    tp: int | None
    group: ProcessGroup | None
    cache: CacheOption
    deltas: Paths
    trust: Trust


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """The arguments of a load before they are checked or anything is read. `relayout.load` explains the fields."""

    path: str | os.PathLike[str] | Store
    rank: int | None = None
    device: str | torch.device = "cpu"
    backend: str = "auto"
    names: Sequence[str] | str | None = None
    experts: str | Iterable[int] | None = None
    verify: bool = False
    threads: int | None = None
    memory: int | str | None = None
    progress: Progress = None
    into: Mapping[str, torch.Tensor] | torch.nn.Module | None = None
    tp: int | None = None
    group: ProcessGroup | None = None
    cache: CacheOption = None
    deltas: Paths = ()
    trust: Trust = None

    def options(self) -> Options:
        """Return the checked options of the load."""
        if self.group is not None and self.into is not None and self.rank is not None:
            what = "group cannot be combined with into and a rank: a group loads a rank into new memory"
            raise PlanError(what, code="option")
        if self.group is not None and self.cache:
            what = "group cannot be combined with cache: members share the reads of a rank, a cache fetches all of it"
            raise PlanError(what, code="option")
        if find_spec("torch") is None:  # Before anything is read.
            raise no_torch()
        options = Options(
            device=resolve_device(self.device),
            backend=self.backend,
            verify=self.verify,
            threads=None if self.threads is None else integer(self.threads, "threads"),
            memory=None if self.memory is None else size(self.memory, "memory"),
            progress=self.progress,
        )
        if options.kind == "meta":
            raise PlanError("device 'meta': its tensors have no memory to load into", code="option")
        return options

    def source(self) -> RankSource:
        """Find the rank; files that a cache does not have are fetched now.

        Raises:
            FormatError, OSError: as `find_rank`, and `changed_rank` with deltas.
            PlanError: as both; or `verify` is set and the checkpoint is a plain one.
        """
        rank, tp = self.rank, self.tp
        if rank is None:  # Whole tensors are those of the single rank of degree 1.
            if tp is not None and (num_ranks := at_least_one(tp, "tp")) > 1:
                raise PlanError(f"rank: missing, expected 0 to {num_ranks - 1}, as tp is given", code="option")
            rank, tp = 0, 1
        cache = self.cache if self.group is None else ""
        found = find_rank(
            self.path, rank, tp=tp, experts=self.experts, cache=cache, progress=self.progress, trust=self.trust
        )
        if self.deltas:
            found = changed_rank(found, tp, self.deltas, self.experts)
        self.check_verified(found.store, is_unconverted=found.is_unconverted)
        return found

    def check_verified(self, store: Store, *, is_unconverted: bool) -> None:
        """Raise PlanError if digests of a plain checkpoint are to be compared."""
        if self.verify and is_unconverted:
            what = "cannot be verified: only converted checkpoints have digests"
            raise PlanError(what, path=str(store), code="unsupported")


def warn_if_slow(source: RankSource) -> None:
    """Warn, at the line that called relayout, if a faster way to load exists."""
    if source.slow_because is not None:
        warn(source.slow_because)


def find_rank(
    path: str | os.PathLike[str] | Store,
    rank: int,
    *,
    tp: int | None = None,
    experts: str | Iterable[int] | None = None,
    cache: CacheOption = None,
    progress: Progress = None,
    trust: Trust = None,
) -> RankSource:
    """Return the rank of the checkpoint at a path or URL, or in a store.

    Args:
        experts: as for `load`.
        cache: keeps files of a remote store; files that it does not have are fetched now.
        progress: of the files that are fetched.
        trust: the required signers; see `trust.trusted`, also for errors.

    Raises:
        FormatError: relayout.json is damaged; or as `CopyingStore.keep`.
        PlanError: the path or the rank does not exist; `tp` is missing, which a plain checkpoint requires; or `rank` or
            `tp` is not an integer.
        OSError: as `CopyingStore.keep`.
    """
    rank = integer(rank, "rank")
    if tp is not None:
        tp = at_least_one(tp, "tp")
    store = _store_of(path, trust)
    blob = find_manifest_blob(store)
    if blob is None:
        if experts is not None:
            what = f"experts cannot be selected: not converted ({MANIFEST_NAME} is missing); relayout convert makes one"
            raise PlanError(what, path=str(store), code="unsupported")
        return _unconverted(store, rank, tp, cache)
    manifest = parse_manifest(blob, store.location(MANIFEST_NAME))
    check_rank(store, rank, manifest.num_ranks if tp is None else tp)
    rank_of = partial(_rank_of, manifest=manifest, rank=rank, tp=tp, experts=experts)
    if store.cost.is_remote and (kept := _kept(store, manifest, blob, rank_of, cache, progress)) is not None:
        return kept
    return rank_of(store)


def _store_of(path: str | os.PathLike[str] | Store, trust: Trust) -> Store:
    """Return the store of a path or URL, or the given one, as a snapshot for one load."""
    given = path if hasattr(path, "snapshot") else find_input(path)
    return trusted(given.snapshot(), trust)


def _unconverted(store: Store, rank: int, tp: int | None, option: CacheOption) -> RankSource:
    """Return the rank of a plain checkpoint: in a conversion that a cache keeps, or sliced while it is loaded."""
    check_exists(store)
    if tp is None:
        _check_source(store)
        raise PlanError(
            f"not converted ({MANIFEST_NAME} is missing); set tp=N to slice it while loading",
            path=str(store),
            code="option",
        )
    check_rank(store, rank, tp)
    if (tp > 1 or store.cost.is_remote) and (kept := _converted(store, rank, tp, option)) is not None:
        return kept
    from relayout.loader.sources.reshard import unconverted_rank

    return unconverted_rank(store, rank, tp)


def _check_source(store: Store) -> None:
    """Raise the errors of `read_source`, which take precedence over the error that the checkpoint is not converted."""
    from relayout.checkpoint.source import read_source

    read_source(store)


def changed_rank(
    base: RankSource, tp: int | None, deltas: Paths, experts: str | Iterable[int] | None = None
) -> RankSource:
    """Return the rank of the result of deltas, instead of the rank of their base.

    Raises:
        FormatError: a delta is damaged, or the base is not a converted checkpoint.
        PlanError: a delta does not exist, or applies to another checkpoint.
    """
    store = _changed(base.store, deltas)
    return _rank_of(store, read_manifest(store), base.rank, tp, experts)


def _changed(base: Store, deltas: Paths) -> Store:
    """Return a store of the result of deltas."""
    from relayout.checkpoint.delta import read_deltas, with_deltas

    return with_deltas(base, read_deltas(deltas, policy_over(base)))


def _rank_of(
    store: Store, manifest: Manifest, rank: int, tp: int | None, experts: str | Iterable[int] | None = None
) -> RankSource:
    """Return a rank of a converted checkpoint."""
    num_ranks = manifest.num_ranks if tp is None else tp
    if num_ranks == manifest.num_ranks:
        check_present(store, manifest, [rank])
    if experts is None and num_ranks == manifest.num_ranks:
        return ConvertedRank.of(store, manifest, rank, rank)
    if experts is None and num_ranks == 1 and manifest.whole is not None:
        return ConvertedRank.of(store, manifest, rank, manifest.num_ranks)
    from relayout.loader.sources.reshard import resharded_rank

    return resharded_rank(store, manifest, rank, num_ranks, experts)


def _kept(
    store: Store,
    manifest: Manifest,
    blob: bytes,
    rank_of: Callable[[Store], RankSource],
    option: CacheOption,
    progress: Progress,
) -> RankSource | None:
    """Return the rank from a cache's copy of a remote store; None without a cache, or if it cannot be used."""
    from relayout.cache.copies import copied
    from relayout.cache.folder import cache_of

    cache = cache_of(option)
    if cache is None:
        return None
    try:
        # Other processes may write to a cache, too: signed files are verified when they are read from it.
        signed = store if isinstance(store, TrustedStore) else None
        threads = plan_budget(None, None, HOST_BUFFERS, store.cost).threads
        kept = copied(store if signed is None else signed.base, manifest, blob, cache, threads)
        source = rank_of(kept if signed is None else signed.over(kept))
        if kept.keep([file.name for file in source.used_files()], cache, progress):
            return source
        why = "has no room for it"
    except (RelayoutError, OSError) as error:
        if not _is_of_cache(error, cache):
            raise
        why = "has no room for it" if _is_full(error) else f"cannot be used: {error}"
    advice = f"`relayout cache list --folder {cache.folder}` lists what it holds"
    warn(f"{store}: the cache {cache.folder} {why}: reading from the store; {advice}")
    return None


def _is_of_cache(error: RelayoutError | OSError, cache: Cache) -> bool:
    """Return True if the cache has failed, not the store behind it; the store's errors also occur without a cache."""
    path = error.filename if isinstance(error, OSError) else error.path
    if _is_full(error) or path is None or scheme_of(path) is not None:
        return _is_full(error)
    return Path(path).resolve().is_relative_to(Path(cache.folder).resolve())


def _is_full(error: RelayoutError | OSError) -> bool:
    """Return True if the drive is full: other processes may fill it even after space was reserved."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def held_entry(source: RankSource) -> HeldEntry | None:
    """Return the cache entry that a rank, or the base of deltas, is read from; None if it is not from a cache."""
    store = source.store
    while isinstance(store, StoreOver):
        store = store.base
    return getattr(store, "entry", None)


def invalidate_cache_entry(source: RankSource, error: FormatError) -> bool:
    """Invalidate the cache entry in which a load has found damage, and add to the error that the next load rebuilds it.

    Returns:
        True if the entry was invalidated. False: the damage is in another store.
    """
    from relayout.checkpoint.delta import DeltaStore

    entry, store = held_entry(source), source.store
    if entry is None or (isinstance(store, DeltaStore) and store.is_of_delta(error)):
        return False
    entry.invalidate()
    again = "the next load makes this entry of the cache again (`relayout cache list` lists them)"
    error.amend(what=f"{error.what}; {again}")
    return True


def invalidating(tensors: Iterator[tuple[str, torch.Tensor]], source: RankSource) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a source; for damage that they reveal in a cache, see `invalidate_cache_entry`."""
    try:
        yield from tensors
    except FormatError as error:
        invalidate_cache_entry(source, error)
        raise


def _converted(store: Store, rank: int, tp: int, option: CacheOption) -> RankSource | None:
    """Return the rank in a conversion that a cache keeps; None without a cache, or if it cannot keep one."""
    from relayout.cache.folder import cache_of

    cache = cache_of(option)
    if cache is None:
        return None
    from relayout.cache.conversions import cached_conversion

    try:
        kept = cached_conversion(store, tp, cache)
        return _rank_of(kept, read_manifest(kept), rank, tp)
    except (RelayoutError, OSError) as error:
        what = f"{store}: read as it is; it is not kept in the cache {cache.folder}: {error}"
        warn(f"{what}; `relayout cache list --folder {cache.folder}` lists what it holds")
    return None


@dataclass(frozen=True, slots=True)
class WholeTensors:
    """All tensors of a checkpoint, converted or plain, as they were before any conversion."""

    store: Store
    pieces: Pieces
    unconverted: SourceCheckpoint | None = None
    """The plain checkpoint; None: it was converted."""

    def content(self) -> str:
        """Return a text that is equal for checkpoints of the same content."""
        from relayout.checkpoint.source import identity_of

        if self.unconverted is not None:
            return identity_of(self.unconverted).content
        named = [(file.name, file.nbytes, file.digests and file.digests.tensors_digest) for file in self.pieces.files]
        return xxh3_hex(repr(named).encode())


def find_tensors(
    path: str | os.PathLike[str] | Store, deltas: Paths = (), trust: Trust = None, *, by_transformers: bool = False
) -> WholeTensors:
    """Return the whole tensors of a checkpoint; those of a converted one are assembled from all ranks.

    Args:
        by_transformers: of several models in a plain folder, select the one that transformers loads.
    """
    from relayout.loader.sources.reshard import unconverted_rank, whole_pieces

    store = _store_of(path, trust)
    if deltas:
        store = _changed(store, deltas)
    manifest = find_manifest(store)
    if manifest is not None:
        return WholeTensors(store, whole_pieces(store, manifest))
    source = unconverted_rank(store, 0, 1, by_transformers=by_transformers)
    return WholeTensors(store, source.pieces(), source.checkpoint)
