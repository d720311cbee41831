"""The layout: in which file, and where in it, each slice of each rank is stored. Pure.

Alignment comes from a padded header and from the order alone. In falling order of the largest power of two that
divides a slice's size (up to the alignment), every slice starts at a multiple of its own power: what is in front of
it is a sum of multiples. So the slices whose size is a multiple of the alignment come first, in model order, all
aligned; the rest is one packed tail, in which each slice is still aligned to its element type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from relayout.checkpoint.source import Catalogue, SourceTensor
from relayout.core.extents import natural_alignment
from relayout.core.slices import Slice, slice_nbytes
from relayout.errors import FormatError, PlanError
from relayout.format.index import ARENA_ALIGNMENT, MAX_ALIGNMENT, MIN_ALIGNMENT, Manifest, RankTable
from relayout.format.manifest import relayout_entry
from relayout.format.safetensors import TensorEntry, build_header, entries_text, join_header, json_text
from relayout.plans.planner import Plan

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
    data_offsets: tuple[int, ...]
    """Offset of each slice in the data section. Files of ranks that are alike share these two."""
    data_start: int
    nbytes: int
    """Length of the whole file."""

    @property
    def offsets(self) -> list[int]:
        """Absolute file offset of each slice."""
        return [self.data_start + offset for offset in self.data_offsets]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything goes."""

    alignment: int
    ranks: tuple[tuple[RankFile, ...], ...]
    """The parts of each rank."""
    dcp: bool
    """Whether rank files say what PyTorch DCP needs to read them as one model."""

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
    catalogue: Catalogue,
    plan: Plan,
    alignment: int,
    max_part_nbytes: int = DEFAULT_MAX_PART_NBYTES,
    dcp: bool | None = None,
) -> Layout:
    """Choose order, files and offsets; `dcp` as for `convert`.

    Raises:
        PlanError: the alignment, the part size, or what DCP needs, cannot be had.
    """
    check_alignment(alignment)
    if max_part_nbytes < 1:
        raise PlanError(f"a part size of {max_part_nbytes} bytes, expected a positive one")
    slots = _slots(catalogue, plan)
    parts_of: dict[tuple[int, ...], list[_Part]] = {}
    dcp = _dcp(catalogue, plan, dcp)
    ranks = []
    for rank in range(plan.num_ranks):
        column = [of_ranks[rank] for of_ranks in slots]
        alike = tuple(map(id, column))  # Equal slots are one object.
        if alike not in parts_of:
            parts_of[alike] = _parts(catalogue, column, alignment, max_part_nbytes)
        ranks.append(tuple(_rank_file(catalogue, plan, rank, part, alignment, dcp) for part in parts_of[alike]))
    return Layout(alignment, tuple(ranks), dcp)


def _dcp(catalogue: Catalogue, plan: Plan, wanted: bool | None) -> bool:
    """Whether DCP can read the ranks as one model, and shall."""
    if wanted is False:
        return False
    unfit = {slices for slices in set(plan.slices) if not all(part.is_box for part in slices)}
    if wanted and unfit:
        names = (tensor.name for tensor, slices in zip(catalogue.tensors, plan.slices, strict=True) if slices in unfit)
        raise PlanError(f"tensor {next(names)!r}: slices of a fused tensor are no single box, which PyTorch DCP needs")
    return not unfit


def rank_header(catalogue: Catalogue, plan: Plan, layout: Layout, file: RankFile, conversion: str) -> bytes:
    """The header bytes of a rank file."""
    entries = []
    for t, offset in zip(file.tensors, file.data_offsets, strict=True):
        tensor, part = catalogue.tensors[t], plan.slices[t][file.rank]
        nbytes = slice_nbytes(tensor.dtype, tensor.shape, part)
        entries.append(TensorEntry(tensor.name, tensor.dtype, part.shape(tensor.shape), offset, nbytes))
    metadata = _metadata(catalogue, plan, file.rank, file.part, file.tensors, conversion, layout.dcp)
    blob = build_header(entries, metadata, layout.alignment)
    assert len(blob) == file.data_start
    return blob


def rank_file_name(rank: int, part: int) -> str:
    """The name pattern that vLLM and SGLang use for sharded state."""
    return f"model-rank-{rank}-part-{part}.safetensors"


@dataclass(frozen=True, slots=True)
class _Slot:
    """What a slice takes in a rank file."""

    nbytes: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """What the files of all ranks that are alike have in common."""

    number: int
    tensors: tuple[int, ...]
    data_offsets: tuple[int, ...]
    nbytes: int
    """Of the data section."""
    entries: str
    """Of the header."""


def _slots(catalogue: Catalogue, plan: Plan) -> list[tuple[_Slot | None, ...]]:
    """For each tensor: what it takes in each rank; None where the rank does not hold it. Equal slots are one object."""
    known: dict[_Slot, _Slot] = {}
    of_cut: dict[tuple[str, tuple[int, ...], int], tuple[_Slot | None, ...]] = {}
    column = []
    for tensor, slices in zip(catalogue.tensors, plan.slices, strict=True):
        # Tensors that are cut alike share one tuple of slices, which the plan keeps alive.
        key = (tensor.dtype, tensor.shape, id(slices))
        if key not in of_cut:
            slots = (_Slot(slice_nbytes(tensor.dtype, tensor.shape, part), part.shape(tensor.shape)) for part in slices)
            of_cut[key] = tuple(
                known.setdefault(slot, slot) if part.is_held else None for slot, part in zip(slots, slices, strict=True)
            )
        column.append(of_cut[key])
    return column


def _parts(catalogue: Catalogue, slots: Sequence[_Slot | None], alignment: int, max_part_nbytes: int) -> list[_Part]:
    """Order and place the slices of a rank."""
    held = [(t, slot) for t, slot in enumerate(slots) if slot is not None]
    held.sort(key=lambda item: order_key(item[1].nbytes, alignment))
    parts = []
    for number, chosen in enumerate(_split(catalogue, held, max_part_nbytes)):
        *offsets, end = accumulate((slot.nbytes for _, slot in chosen), initial=0)
        entries = entries_text(
            TensorEntry(catalogue.tensors[t].name, catalogue.tensors[t].dtype, slot.shape, offset, slot.nbytes)
            for (t, slot), offset in zip(chosen, offsets, strict=True)
        )
        parts.append(_Part(number, tuple(t for t, _ in chosen), tuple(offsets), end, entries))
    return parts


def _rank_file(catalogue: Catalogue, plan: Plan, rank: int, part: _Part, alignment: int, dcp: bool) -> RankFile:
    # The true id has the same length, so the header has its final size already.
    metadata = _metadata(catalogue, plan, rank, part.number, part.tensors, "0" * CONVERSION_ID_LENGTH, dcp)
    data_start = len(join_header(part.entries, metadata, alignment))
    name = rank_file_name(rank, part.number)
    return RankFile(name, rank, part.number, part.tensors, part.data_offsets, data_start, data_start + part.nbytes)


def order_key(nbytes: int, alignment: int) -> tuple[int, int]:
    """Sort key of a slice in its rank; equal keys stay in model order.

    Slices that memory cannot hold as they lie (not a multiple of 16 bytes) are grouped by size, so that a loader
    spreads each group with one strided read.
    """
    power = natural_alignment(nbytes, alignment)
    return (-power, -nbytes if power < ARENA_ALIGNMENT else 0)


def _entry_nbytes(tensor: SourceTensor) -> int:
    """Upper bound of what a tensor adds to a header: its entry, and DCP's, whose name is escaped twice."""
    name = json_text(json_text(tensor.name))
    return 2 * len(name.encode()) + 45 * len(tensor.shape) + 150


def _split(
    catalogue: Catalogue, order: Sequence[tuple[int, _Slot]], max_part_nbytes: int
) -> list[list[tuple[int, _Slot]]]:
    """Cut the order into parts that keep to both limits; a tensor larger than a part gets one of its own."""
    parts: list[list[tuple[int, _Slot]]] = [[]]
    data_nbytes = header_nbytes = 0
    for t, slot in order:
        entry_nbytes = _entry_nbytes(catalogue.tensors[t])
        data_nbytes += slot.nbytes
        header_nbytes += entry_nbytes
        if parts[-1] and (data_nbytes > max_part_nbytes or header_nbytes > MAX_PART_HEADER_NBYTES):
            parts.append([])
            data_nbytes, header_nbytes = slot.nbytes, entry_nbytes
        parts[-1].append((t, slot))
    return parts


@lru_cache(maxsize=65536)
def _saved_offsets(part: Slice, num_axes: int) -> str:
    return json_text({"saved_offsets": part.starts(num_axes)})


def _metadata(
    catalogue: Catalogue,
    plan: Plan,
    rank: int,
    part: int,
    tensors: Sequence[int],
    conversion: str,
    dcp: bool,
) -> Mapping[str, str]:
    metadata = {"relayout": relayout_entry(rank, plan.num_ranks, part, conversion), "format": "pt"}
    if plan.num_ranks > 1 and dcp:
        # PyTorch 2.9 to 2.15, torch/distributed/checkpoint/_hf_utils.py and filesystem.py.
        boxes = ((catalogue.tensors[t], plan.slices[t][rank]) for t in tensors)
        offsets = (f"{json_text(one.name)}:{_saved_offsets(held, len(one.shape))}" for one, held in boxes)
        metadata["DCP_SHARDING_INFO"] = f"{{{','.join(offsets)}}}"
        metadata["DCP_VERSION"] = "1.0"
    reserved = {"relayout", "DCP_SHARDING_INFO", "DCP_VERSION"}
    return metadata | {key: value for key, value in catalogue.metadata.items() if key not in reserved}


def stored_layout(manifest: Manifest, tables: list[RankTable], catalogue: Catalogue, plan: Plan) -> Layout:
    """The layout that the sidecar describes."""
    position = {tensor.name: t for t, tensor in enumerate(catalogue.tensors)}
    agreeing: set[tuple[int, int]] = set()
    """Slices that are equal, by identity: many tensors have the same ones, and these may be long."""

    def agree(one: Slice, other: Slice) -> bool:
        if (id(one), id(other)) not in agreeing:
            if one != other:
                return False
            agreeing.add((id(one), id(other)))
        return True

    held = [{t for t, slices in enumerate(plan.slices) if slices[rank].is_held} for rank in range(plan.num_ranks)]
    for rank, table in enumerate(tables):
        for row, name in enumerate(table.names):
            t = position.get(name)
            if t is None or t not in held[rank] or not agree(table.slices[row], plan.slices[t][rank]):
                raise FormatError(f"rank table {rank}: tensor {name!r} is not what the source record says")
        if len(table.names) != len(held[rank]):
            raise FormatError(f"rank table {rank}: {len(table.names)} tensors, the source record has {len(held[rank])}")
    ranks = []
    for rank, (entry, table) in enumerate(zip(manifest.ranks, tables, strict=True)):
        rows = rows_of_files(table, len(entry.files))
        files = (
            RankFile(
                file.name,
                rank,
                part,
                tuple(position[table.names[row]] for row in rows[part]),
                tuple(table.offsets[row] - file.data_start for row in rows[part]),
                file.data_start,
                file.nbytes,
            )
            for part, file in enumerate(entry.files)
        )
        ranks.append(tuple(files))
    return Layout(manifest.alignment, tuple(ranks), manifest.dcp)


def rows_of_files(table: RankTable, num_files: int) -> list[list[int]]:
    """For each file of the rank: its rows in the table, in order."""
    rows: list[list[int]] = [[] for _ in range(num_files)]
    for row, number in enumerate(table.files):
        rows[number].append(row)
    return rows
