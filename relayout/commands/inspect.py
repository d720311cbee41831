"""`inspect`: summarizes a safetensors file or a checkpoint, plain or converted, and what a rank reads of it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from relayout.checkpoint.converted import check_present, check_rank, is_converted, read_manifest, read_table
from relayout.checkpoint.source import SourceCheckpoint, read_source
from relayout.core.arguments import at_least_one, integer
from relayout.core.dtypes import num_bytes
from relayout.core.extents import Extent
from relayout.core.patterns import collapse_numbers
from relayout.errors import PlanError, RelayoutError
from relayout.format.index import Manifest, RankTable
from relayout.plans.planner import plan_for, refusal
from relayout.results import Result
from relayout.storage.protocols import Store
from relayout.storage.stores import find_input

ALIGNMENTS = (512, 4096, 65536, 2 * 2**20)
DEGREES = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors of one dtype, shape and cut whose names differ only in numbers."""

    pattern: str
    count: int
    dtype: str
    shape: tuple[int, ...]
    """As stored: the slice's shape in a converted checkpoint."""
    nbytes: int
    """Of all tensors of the group."""
    cut: str | None
    """The stored part of the whole tensor, as text; None: all of it."""


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank of a converted checkpoint."""

    rank: int
    num_tensors: int
    nbytes: int
    num_files: int
    num_reads: int
    """Contiguous or strided pieces that a load reads."""


@dataclass(frozen=True, slots=True)
class Amplification:
    """Bytes that the largest rank would read of a plain checkpoint, at one tensor-parallel degree."""

    tp: int
    needed_nbytes: int | None
    """Bytes of the rank's slices; None if the checkpoint cannot be cut at this degree."""
    row_reader_nbytes: int | None
    """Bytes read by a loader that can slice dim 0 of a tensor, but no other dim."""
    whole_nbytes: int
    """Bytes read by a loader that reads whole shards."""
    ranks_layout_nbytes: int | None
    """Bytes of all tensors that a conversion to this degree stores."""
    whole_layout_nbytes: int | None
    """The same with `layout="whole"`."""
    reason: str | None
    """Why it cannot be cut; None if it can."""


@dataclass(frozen=True, slots=True)
class Inspection(Result):
    """What `inspect` found."""

    path: str
    converted: bool
    model_type: str | None
    plan: str | None
    """Full name of the plan that cut it, ORIGIN:NAME, or "none"; None for a plain checkpoint."""
    num_ranks: int | None
    """The tensor-parallel degree; None for a plain checkpoint."""
    present: tuple[int, ...]
    """The ranks that the folder has; empty for a plain checkpoint."""
    num_files: int
    num_tensors: int
    """Tensors of the whole model."""
    nbytes: int
    """Stored bytes of all tensors shown: of all ranks, one rank, or the plain checkpoint."""
    aligned_nbytes: dict[int, int]
    """Alignment -> bytes of the tensors whose offset is a multiple of it."""
    groups: tuple[TensorGroup, ...]
    """In a converted checkpoint: groups of the requested rank, or of the first."""
    ranks: tuple[RankSummary, ...]
    """Empty for a plain checkpoint."""
    amplification: tuple[Amplification, ...]
    """Empty for a converted checkpoint."""
    left_out: tuple[str, ...]
    """Files that a conversion would not copy, each with the reason."""
    dcp: bool | None
    """Whether PyTorch DCP reads the rank files as one model. None for a plain checkpoint, or if ranks are missing."""


def inspect(path: str | os.PathLike[str], *, rank: int | None = None, tp: int | None = None) -> Inspection:
    """Summarize a .safetensors file, a plain checkpoint or a converted one. Reads headers and tables only.

    Args:
        path: the file or folder.
        rank: show only this rank of a converted checkpoint; None: sums over its ranks, and the tensors of the first.
        tp: what a conversion of a plain checkpoint to this degree would change; None: to 2, 4, 8 and 16.

    Returns:
        What was found.

    Raises:
        FormatError: a file is damaged.
        PlanError: `path` is not a checkpoint, or has no such rank, or `tp` is not a degree or `path` converted already.

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
    if is_converted(store):
        if tp is not None:
            raise PlanError("already converted: omit --tp", path=str(store), code="option")
        return _inspect_converted(store, read_manifest(store), rank)
    if rank is not None:
        raise PlanError("not converted, so it has no ranks: omit --rank", path=str(store), code="option")
    return _inspect_plain(store, read_source(store), degrees)


def _inspect_converted(folder: Store, manifest: Manifest, rank: int | None) -> Inspection:
    if rank is not None:
        check_rank(folder, rank, manifest.num_ranks)
        check_present(folder, manifest, [rank])
    shown = manifest.present if rank is None else [rank]
    tables = [read_table(folder, manifest, shown_rank) for shown_rank in shown]
    extents = [extent for table in tables for extent in _extents(table)]
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
        nbytes=sum(extent.nbytes for extent in extents),
        aligned_nbytes=_aligned(extents),
        groups=_groups(_table_rows(tables[0])),
        ranks=tuple(
            RankSummary(shown_rank, entry.num_tensors, entry.nbytes, len(entry.files), len(entry.reads))
            for shown_rank, entry in entries
        ),
        amplification=(),
        left_out=(),
        dcp=manifest.whole is not None or (manifest.dcp or manifest.num_ranks == 1 if manifest.has_all else None),
    )


def _inspect_plain(store: Store, source: SourceCheckpoint, degrees: Sequence[int]) -> Inspection:
    return Inspection(
        path=str(store),
        converted=False,
        model_type=source.model_type,
        plan=None,
        num_ranks=None,
        present=(),
        num_files=len(source.files),
        num_tensors=len(source.tensors),
        nbytes=source.nbytes,
        aligned_nbytes=_aligned(tensor.extent for tensor in source.tensors),
        groups=_groups(
            (tensor.name, tensor.dtype, tensor.shape, tensor.extent.nbytes, None) for tensor in source.tensors
        ),
        ranks=(),
        amplification=tuple(_amplification(source, tp) for tp in degrees),
        left_out=source.left_out,
        dcp=None,
    )


def _amplification(source: SourceCheckpoint, tp: int) -> Amplification:
    whole = sum(file.nbytes - file.data_start for file in source.files)
    try:
        plan = plan_for(source, tp)
    except RelayoutError as error:
        return Amplification(tp, None, None, whole, None, None, refusal(error))
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


def _aligned(extents: Iterable[Extent]) -> dict[int, int]:
    extents = list(extents)
    return {
        alignment: sum(extent.nbytes for extent in extents if extent.offset % alignment == 0)
        for alignment in ALIGNMENTS
    }


def _extents(table: RankTable) -> list[Extent]:
    return [
        Extent(offset, num_bytes(dtype, shape) or 0)
        for dtype, shape, offset in zip(table.dtypes, table.shapes, table.offsets, strict=True)
    ]


def _table_rows(table: RankTable) -> Iterator[tuple[str, str, tuple[int, ...], int, str | None]]:
    for row, extent in enumerate(_extents(table)):
        part, source = table.slices[row], table.source_shapes[row]
        cut = None if part.is_whole else part.in_words(source)
        yield table.names[row], table.dtypes[row], table.shapes[row], extent.nbytes, cut


def _groups(rows: Iterable[tuple[str, str, tuple[int, ...], int, str | None]]) -> tuple[TensorGroup, ...]:
    sums: dict[tuple[str, str, tuple[int, ...], str | None], tuple[int, int]] = {}
    for name, dtype, shape, nbytes, cut in rows:
        key = (collapse_numbers(name), dtype, shape, cut)
        count, total = sums.get(key, (0, 0))
        sums[key] = (count + 1, total + nbytes)
    return tuple(
        TensorGroup(pattern, count, dtype, shape, total, cut)
        for (pattern, dtype, shape, cut), (count, total) in sums.items()
    )
