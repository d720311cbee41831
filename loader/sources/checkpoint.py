"""What a load reads from: one rank of a converted checkpoint, put together anew perhaps, or of a plain one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from relayout.checkpoint.converted import check_rank, read_manifest, read_table, waiting
from relayout.core.arguments import integer
from relayout.errors import PlanError
from relayout.format.index import MANIFEST_NAME, Manifest, RankEntry, RankTable
from relayout.loader.sources.contents import Contents, StoredFile, contents_of, rank_files, select


@dataclass(frozen=True, slots=True)
class ConvertedRank:
    """One rank of a folder that `relayout convert` wrote."""

    folder: Path
    manifest: Manifest
    rank: int

    @property
    def entry(self) -> RankEntry:
        """What the manifest says of the rank."""
        return self.manifest.ranks[self.rank]

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """The rank's files; for errors see `rank_files`."""
        return rank_files(self.folder, self.manifest, self.rank)

    def table(self) -> RankTable:
        """The rank's table.

        Raises:
            FormatError: it is damaged, or of another rank or conversion.
        """
        return read_table(self.folder, self.manifest, self.rank)

    def contents(self, patterns: Sequence[str] | None) -> Contents:
        """The tensors whose names match, all if `patterns` is None.

        Raises:
            FormatError: as `table`.
            PlanError: a pattern matches nothing.
        """
        return _selected(contents_of(self.files, self.table()), patterns)


@dataclass(frozen=True, slots=True)
class RegroupedRank:
    """One rank of another number of ranks than a folder was converted for."""

    folder: Path
    manifest: Manifest
    rank: int
    num_ranks: int

    def contents(self, patterns: Sequence[str] | None) -> Contents:
        """The tensors whose names match, all if `patterns` is None.

        Raises:
            FormatError: the sidecar is damaged.
            PlanError: the model cannot be cut so, or a pattern matches nothing.
        """
        # The planner is needed for this only.
        from relayout.loader.sources.resharded import regrouped_contents

        return _selected(regrouped_contents(self.folder, self.manifest, self.rank, self.num_ranks), patterns)


@dataclass(frozen=True, slots=True)
class PlainRank:
    """One rank of a checkpoint as it was published."""

    source: Path
    rank: int
    num_ranks: int

    def contents(self, patterns: Sequence[str] | None) -> Contents:
        """The tensors whose names match, all if `patterns` is None.

        Raises:
            FormatError: the checkpoint is damaged.
            PlanError: there is no plan for it, it cannot be cut at this degree, or a pattern matches nothing.
        """
        # The planner is needed for this only.
        from relayout.loader.sources.plain import plain_contents

        return _selected(plain_contents(self.source, self.rank, self.num_ranks), patterns)


Checkpoint: TypeAlias = ConvertedRank | RegroupedRank | PlainRank


def find_checkpoint(path: Path, rank: int, tp: int | None) -> Checkpoint:
    """What is at `path`.

    Raises:
        FormatError: relayout.json is damaged.
        PlanError: there is nothing, the rank does not exist, `tp` is missing, or one of them is no integer.
    """
    rank = integer(rank, "rank")
    if tp is not None:
        tp = integer(tp, "tp")
        if tp < 1:
            raise PlanError(f"tp={tp}, expected 1 or more")
    if (path / MANIFEST_NAME).exists():
        manifest = read_manifest(path)
        check_rank(rank, manifest.num_ranks if tp is None else tp)
        if tp is not None and tp != manifest.num_ranks:
            return RegroupedRank(path, manifest, rank, tp)
        return ConvertedRank(path, manifest, rank)
    if not path.exists():
        raise PlanError(f"{path}: no such file or folder{waiting(path)}")
    if tp is None:
        raise PlanError(f"{path}: not converted ({MANIFEST_NAME} is missing); say tp=N to slice it while loading")
    check_rank(rank, tp)
    return PlainRank(path, rank, tp)


def _selected(contents: Contents, patterns: Sequence[str] | None) -> Contents:
    return contents if patterns is None else contents.rows(select(contents.names, patterns))
