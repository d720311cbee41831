"""The layout: in which file, and where in it, each slice of each rank is stored. Pure.

Alignment comes from a padded header and from the order alone. In falling order of the largest power of two that
divides a slice's size (up to the alignment), every slice starts at a multiple of its own power: what is in front of
it is a sum of multiples. So the slices whose size is a multiple of the alignment come first, in model order, all
aligned; the rest is one packed tail, in which each slice is still aligned to its element type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relayout.catalogue import Catalogue, SourceTensor
from relayout.errors import PlanError
from relayout.extents import natural_alignment
from relayout.header import TensorEntry, build_header
from relayout.index import ARENA_ALIGNMENT
from relayout.plan import Plan
from relayout.sidecar import relayout_entry
from relayout.slicing import slice_nbytes

MIN_ALIGNMENT = 512
MAX_ALIGNMENT = 16 * 2**20
DEFAULT_ALIGNMENT = 4096

DEFAULT_MAX_PART_NBYTES = 48 * 10**9
"""Below the 50 GB that hubs take as one file."""

MAX_PART_HEADER_NBYTES = 20 * 10**6
"""A part ends before its header grows past this: the Hugging Face hub client refuses to parse 25 MB."""

CONVERSION_ID_LENGTH = 32
"""Hex digits of the digest that names a conversion."""


@dataclass(frozen=True, slots=True)
class RankFile:
    """One part of one rank."""

    name: str
    rank: int
    part: int
    tensors: tuple[int, ...]
    """Positions in the catalogue, in file order."""
    offsets: tuple[int, ...]
    """Absolute file offset of each slice."""
    data_start: int
    nbytes: int
    """Length of the whole file."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything goes."""

    alignment: int
    ranks: tuple[tuple[RankFile, ...], ...]
    """The parts of each rank."""
    is_boxes: bool
    """Whether every slice is one box, so that PyTorch DCP can read the files as one model."""

    @property
    def nbytes(self) -> int:
        """Bytes of all rank files."""
        return sum(file.nbytes for files in self.ranks for file in files)


def check_alignment(alignment: int) -> None:
    """Refuse an alignment that is no power of two in the supported range.

    Raises:
        PlanError: it is not.
    """
    if alignment & (alignment - 1) or not MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT:
        raise PlanError(
            f"alignment {alignment} is not a power of two between {MIN_ALIGNMENT} and {MAX_ALIGNMENT} bytes"
        )


def make_layout(
    catalogue: Catalogue, plan: Plan, alignment: int, max_part_nbytes: int = DEFAULT_MAX_PART_NBYTES
) -> Layout:
    """Choose order, files and offsets.

    Raises:
        PlanError: the alignment or the part size cannot be had.
    """
    check_alignment(alignment)
    if max_part_nbytes < 1:
        raise PlanError(f"a part size of {max_part_nbytes} bytes, expected a positive one")
    entry_nbytes = [_entry_nbytes(tensor) for tensor in catalogue.tensors]
    is_boxes = all(part.is_box for slices in set(plan.slices) for part in slices)
    return Layout(
        alignment,
        tuple(
            _rank_files(catalogue, plan, rank, alignment, max_part_nbytes, entry_nbytes, is_boxes)
            for rank in range(plan.num_ranks)
        ),
        is_boxes,
    )


def rank_header(catalogue: Catalogue, plan: Plan, layout: Layout, file: RankFile, conversion: str) -> bytes:
    """The header bytes of a rank file."""
    entries = _entries(catalogue, plan, file.rank, file.tensors)
    metadata = _metadata(catalogue, plan, file.rank, file.part, file.tensors, conversion, layout.is_boxes)
    blob = build_header(entries, metadata, layout.alignment)
    assert len(blob) == file.data_start
    return blob


def rank_file_name(rank: int, part: int) -> str:
    """The name pattern that vLLM and SGLang use for sharded state."""
    return f"model-rank-{rank}-part-{part}.safetensors"


def _rank_files(
    catalogue: Catalogue,
    plan: Plan,
    rank: int,
    alignment: int,
    max_part_nbytes: int,
    entry_nbytes: Sequence[int],
    is_boxes: bool,
) -> tuple[RankFile, ...]:
    sizes = [
        slice_nbytes(tensor.dtype, tensor.shape, slices[rank])
        for tensor, slices in zip(catalogue.tensors, plan.slices, strict=True)
    ]
    order = sorted(range(len(sizes)), key=lambda t: order_key(sizes[t], alignment))
    files = []
    for part, tensors in enumerate(_split(order, sizes, entry_nbytes, max_part_nbytes)):
        entries = _entries(catalogue, plan, rank, tensors)
        # The true id has the same length, so the header has its final size already.
        metadata = _metadata(catalogue, plan, rank, part, tensors, "0" * CONVERSION_ID_LENGTH, is_boxes)
        data_start = len(build_header(entries, metadata, alignment))
        offsets = tuple(data_start + entry.offset for entry in entries)
        nbytes = data_start + sum(entry.nbytes for entry in entries)
        files.append(RankFile(rank_file_name(rank, part), rank, part, tuple(tensors), offsets, data_start, nbytes))
    return tuple(files)


def order_key(nbytes: int, alignment: int) -> tuple[int, int]:
    """Sort key of a slice in its rank; equal keys stay in model order.

    Slices that memory cannot hold as they lie (not a multiple of 16 bytes) are grouped by size, so that a loader
    spreads each group with one strided read.
    """
    power = natural_alignment(nbytes, alignment)
    return (-power, -nbytes if power < ARENA_ALIGNMENT else 0)


def _entry_nbytes(tensor: SourceTensor) -> int:
    """Upper bound of what a tensor adds to a header: its entry, and DCP's, whose name is escaped twice."""
    name = json.dumps(json.dumps(tensor.name, ensure_ascii=False), ensure_ascii=False)
    return 2 * len(name.encode()) + 45 * len(tensor.shape) + 150


def _split(
    order: Sequence[int], sizes: Sequence[int], entry_nbytes: Sequence[int], max_part_nbytes: int
) -> list[list[int]]:
    """Cut the order into parts that keep to both limits; a tensor larger than a part gets one of its own."""
    parts: list[list[int]] = [[]]
    data_nbytes = header_nbytes = 0
    for tensor in order:
        data_nbytes += sizes[tensor]
        header_nbytes += entry_nbytes[tensor]
        if parts[-1] and (data_nbytes > max_part_nbytes or header_nbytes > MAX_PART_HEADER_NBYTES):
            parts.append([])
            data_nbytes, header_nbytes = sizes[tensor], entry_nbytes[tensor]
        parts[-1].append(tensor)
    return parts


def _entries(catalogue: Catalogue, plan: Plan, rank: int, tensors: Sequence[int]) -> list[TensorEntry]:
    entries = []
    offset = 0
    for t in tensors:
        tensor, part = catalogue.tensors[t], plan.slices[t][rank]
        nbytes = slice_nbytes(tensor.dtype, tensor.shape, part)
        entries.append(TensorEntry(tensor.name, tensor.dtype, part.shape(tensor.shape), offset, nbytes))
        offset += nbytes
    return entries


def _metadata(
    catalogue: Catalogue,
    plan: Plan,
    rank: int,
    part: int,
    tensors: Sequence[int],
    conversion: str,
    is_boxes: bool,
) -> Mapping[str, str]:
    metadata = {"relayout": relayout_entry(rank, plan.num_ranks, part, conversion), "format": "pt"}
    if plan.num_ranks > 1 and is_boxes:
        # PyTorch 2.9 to 2.15, torch/distributed/checkpoint/_hf_utils.py and filesystem.py.
        offsets = {
            catalogue.tensors[t].name: {"saved_offsets": plan.slices[t][rank].starts(len(catalogue.tensors[t].shape))}
            for t in tensors
        }
        metadata["DCP_SHARDING_INFO"] = json.dumps(offsets, ensure_ascii=False, separators=(",", ":"))
        metadata["DCP_VERSION"] = "1.0"
    reserved = {"relayout", "DCP_SHARDING_INFO", "DCP_VERSION"}
    return metadata | {key: value for key, value in catalogue.metadata.items() if key not in reserved}
