"""Slices a plain checkpoint while it is loaded: right, but slower than loading a converted one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from relayout.catalogue import read_catalogue
from relayout.extents import BLOCK, align_up
from relayout.index import ARENA_ALIGNMENT, Read
from relayout.loader.backends import StoredFile
from relayout.plan import plan_for
from relayout.slicing import slice_nbytes, slice_transfers

_DIRECT_NBYTES = 2**20
"""A slice of at least this many bytes is placed so that direct I/O can go straight to it, at most a block wasted."""


@dataclass(frozen=True, slots=True)
class PlainRank:
    """One rank of a plain checkpoint: what to read, and the tensors it makes."""

    files: tuple[StoredFile, ...]
    reads: tuple[Read, ...]
    arena_nbytes: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    arena_offsets: tuple[int, ...]


def plan_plain_rank(source: Path, rank: int, num_ranks: int) -> PlainRank:
    """Plan what `rank` needs, with the built-in plan for the checkpoint's model type.

    Raises:
        FormatError: the checkpoint is damaged.
        PlanError: there is no plan for it, or it cannot be cut at this degree.
    """
    catalogue = read_catalogue(source)
    plan = plan_for(catalogue, num_ranks)
    reads = []
    shapes = []
    arena_offsets = []
    end = 0
    for tensor, slices in zip(catalogue.tensors, plan.slices, strict=True):
        part = slices[rank]
        transfers = slice_transfers(tensor.dtype, tensor.shape, part)
        start = align_up(end, ARENA_ALIGNMENT)
        if len(transfers) == 1 and transfers[0].count == 1 and transfers[0].nbytes >= _DIRECT_NBYTES:
            phase = (tensor.extent.offset + transfers[0].source) % BLOCK
            if phase % ARENA_ALIGNMENT == 0:
                start = align_up(end, BLOCK) + phase
        reads += [Read(tensor.file, one.shifted(source=tensor.extent.offset, target=start)) for one in transfers]
        shapes.append(part.shape(tensor.shape))
        arena_offsets.append(start)
        end = start + slice_nbytes(tensor.dtype, tensor.shape, part)
    return PlainRank(
        files=tuple(StoredFile(file.path, file.nbytes) for file in catalogue.files),
        reads=tuple(reads),
        arena_nbytes=align_up(end, BLOCK),
        names=tuple(tensor.name for tensor in catalogue.tensors),
        dtypes=tuple(tensor.dtype for tensor in catalogue.tensors),
        shapes=tuple(shapes),
        arena_offsets=tuple(arena_offsets),
    )
