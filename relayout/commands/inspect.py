"""`inspect`: summarizes a safetensors file or a checkpoint, plain or converted, and the reads of a rank."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from relayout.checkpoint.converted import (
    check_lengths,
    check_present,
    check_rank,
    is_converted,
    read_manifest,
    read_table,
)
from relayout.checkpoint.source import SourceCheckpoint, read_source
from relayout.core.arguments import at_least_one, collapse_numbers, integer
from relayout.core.slices import num_bytes
from relayout.errors import PlanError, RelayoutError
from relayout.format.index import Manifest
from relayout.plans.planner import check_degree, plan_for
from relayout.reporting import Result
from relayout.storage.stores import Store, find_input

DEGREES = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors with one dtype, shape and cut, and with names that differ only in numbers."""

    pattern: str
    count: int
    dtype: str
    shape: tuple[int, ...]
    """The stored shape. In a converted checkpoint this is the shape of the slice."""
    nbytes: int
    """Bytes of all tensors of the group."""
    cut: str | None
    """The stored part of the whole tensor, as text. None: the whole tensor is stored."""


@dataclass(frozen=True, slots=True)
class RankSummary:
    """Summary of one rank of a converted checkpoint."""

    rank: int
    num_tensors: int
    nbytes: int
    num_files: int
    num_reads: int
    """Number of contiguous or strided pieces that a load reads."""


@dataclass(frozen=True, slots=True)
class Amplification:
    """Bytes that the largest rank would read of a plain checkpoint, at one tensor-parallel degree."""

    tp: int
    needed_nbytes: int | None
    """Bytes of the rank's slices. None: the checkpoint cannot be cut at this degree."""
    row_reader_nbytes: int | None
    """Bytes read by a loader that can slice only dim 0 of a tensor."""
    whole_nbytes: int
    """Bytes read by a loader that reads whole shards."""
    ranks_layout_nbytes: int | None
    """Bytes of all tensors that a conversion to this degree would store."""
    whole_layout_nbytes: int | None
    """Bytes that a conversion with `layout="whole"` would store."""
    reason: str | None
    """The reason why it cannot be cut, usually with the degrees that are possible. None: it can be cut."""


@dataclass(frozen=True, slots=True, repr=False)
class Inspection(Result):
    """Result of `inspect`."""

    path: str
    converted: bool
    model_type: str | None
    num_files: int
    num_tensors: int
    """Number of tensors in the whole model."""
    nbytes: int
    """Stored bytes of all tensors shown: of all ranks, one rank, or the plain checkpoint."""
    groups: tuple[TensorGroup, ...]
    """The groups of all tensors. For a converted checkpoint: groups of the requested rank, or of the first rank."""
    plan: str | None = None
    """Full name of the plan that cut the checkpoint, ORIGIN:NAME, or "none". None: a plain checkpoint."""
    num_ranks: int | None = None
    """The tensor-parallel degree. None: a plain checkpoint."""
    present: tuple[int, ...] = ()
    """Ranks that the folder has; empty for a plain checkpoint."""
    ranks: tuple[RankSummary, ...] = ()
    """Summaries of the ranks; empty for a plain checkpoint."""
    dcp: bool | None = None
    """True if PyTorch DCP can read the rank files as one model. None: a plain checkpoint, or ranks are missing."""
    amplification: tuple[Amplification, ...] = ()
    """Read amplification by degree; empty for a converted checkpoint."""
    left_out: tuple[str, ...] = ()
    """Weight files at the top level that are not part of the model, each with the reason. `convert --dry-run` lists all
    files that a conversion would not copy."""


def inspect(path: str | os.PathLike[str], *, rank: int | None = None, tp: int | None = None) -> Inspection:
    """Summarize a .safetensors file, a plain checkpoint or a converted one. Reads headers and tables only.

    Args:
        path: the file or folder.
        rank: show only this rank of a converted checkpoint. None: totals over its ranks, and tensors of the first rank.
        tp: for a plain checkpoint, show the effect of a conversion to this degree. None: to 2, 4, 8 and 16.

    Returns:
        The summary.

    Raises:
        FormatError: a file is damaged, missing or truncated.
        PlanError: `path` is not a checkpoint; or the rank does not exist; or `tp` is not a valid degree, or was given
            for a converted checkpoint.

    Example:
        >>> import relayout
        >>> relayout.inspect("llama-3.1-8b").converted
        False
        >>> len(relayout.inspect("llama-3.1-8b-tp8").ranks)
        8
    """
    store = find_input(path)
    rank = None if rank is None else integer(rank, "rank")
    degrees = DEGREES if tp is None else (at_least_one(tp, "tp"),)
    for degree in degrees:
        check_degree(degree)
    if is_converted(store):
        if tp is not None:
            raise PlanError("already converted: omit --tp", path=str(store), code="option")
        return _inspect_converted(store, read_manifest(store), rank)
    source = read_source(store)
    if rank is not None:
        raise PlanError("not converted, so it has no ranks: omit --rank", path=str(store), code="option")
    return _inspect_unconverted(store, source, degrees)


def _inspect_converted(folder: Store, manifest: Manifest, rank: int | None) -> Inspection:
    if rank is not None:
        check_rank(folder, rank, manifest.num_ranks)
        check_present(folder, manifest, [rank])
    shown = manifest.present if rank is None else [rank]
    check_lengths(folder, manifest, shown)
    tables = [read_table(folder, manifest, shown_rank) for shown_rank in shown]
    first = tables[0]
    cuts = (
        None if part.is_whole else part.in_words(whole)
        for part, whole in zip(first.slices, first.source_shapes, strict=True)
    )
    entries = [(shown_rank, manifest.holders[shown_rank]) for shown_rank in shown]
    return Inspection(
        path=str(folder),
        converted=True,
        model_type=manifest.model_type,
        plan=manifest.plan,
        num_ranks=manifest.num_ranks,
        present=manifest.present,
        num_files=len({index for _, entry in entries for index in entry.files}),
        num_tensors=len({name for table in tables for name in table.names}),
        nbytes=sum(entry.nbytes for _, entry in entries),
        groups=_groups(zip(first.names, first.dtypes, first.shapes, cuts, strict=True)),
        ranks=tuple(
            RankSummary(shown_rank, entry.num_tensors, entry.nbytes, len(entry.files), len(entry.reads))
            for shown_rank, entry in entries
        ),
        dcp=manifest.whole is not None or (manifest.dcp or manifest.num_ranks == 1 if manifest.has_all else None),
    )


def _inspect_unconverted(store: Store, source: SourceCheckpoint, degrees: Sequence[int]) -> Inspection:
    return Inspection(
        path=str(store),
        converted=False,
        model_type=source.model_type,
        num_files=len(source.files),
        num_tensors=len(source.tensors),
        nbytes=source.nbytes,
        groups=_groups((tensor.name, tensor.dtype, tensor.shape, None) for tensor in source.tensors),
        amplification=tuple(_amplification(source, tp) for tp in degrees),
        left_out=source.skipped,
    )


def _amplification(source: SourceCheckpoint, tp: int) -> Amplification:
    whole = sum(file.nbytes - file.data_start for file in source.files)
    try:
        plan = plan_for(source, tp)
    except RelayoutError as error:
        why = error.text if isinstance(error, PlanError) else str(error)  # str() includes the path of a damaged file.
        return Amplification(tp, None, None, whole, None, None, why)
    needed, by_rows, apart = [0] * tp, [0] * tp, 0
    alike = Counter(
        (plan.cuts[cut].tensor(tensor.dtype, tensor.shape), tensor.extent.nbytes)
        for tensor, cut in zip(source.tensors, plan.cut_of, strict=True)
    )
    for (cut_tensor, source_nbytes), count in alike.items():
        for rank in range(tp):
            nbytes = cut_tensor.rank_nbytes(rank)
            needed[rank] += nbytes * count
            strided = any(transfer.count > 1 for transfer in cut_tensor.rank_transfers(rank))
            by_rows[rank] += (source_nbytes if strided else nbytes) * count
            apart += nbytes * count if strided else 0
    return Amplification(tp, max(needed), max(by_rows), whole, sum(needed), source.nbytes + apart, None)


def _groups(tensors: Iterable[tuple[str, str, tuple[int, ...], str | None]]) -> tuple[TensorGroup, ...]:
    """Group tensors that are given by name, dtype, shape and cut."""
    counts = Counter((collapse_numbers(name), dtype, shape, cut) for name, dtype, shape, cut in tensors)
    return tuple(
        TensorGroup(pattern, count, dtype, shape, count * (num_bytes(dtype, shape) or 0), cut)
        for (pattern, dtype, shape, cut), count in counts.items()
    )
