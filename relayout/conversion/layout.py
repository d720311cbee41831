"""The layout: in which file, and where in it, each slice of each rank is stored. Pure.

Alignment comes from a padded header and from the order alone. In falling order of the largest power of two that
divides a slice's size (up to the alignment), every slice starts at a multiple of its own power: what is in front of
it is a sum of multiples. So the slices whose size is a multiple of the alignment come first, in model order, all
aligned; the rest is one packed tail, in which each slice is still aligned to its element type.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from relayout.checkpoint.source import Catalogue, SourceTensor
from relayout.core.extents import natural_alignment
from relayout.core.slices import CutTensor
from relayout.errors import FormatError, PlanError
from relayout.format.index import ARENA_ALIGNMENT, MAX_ALIGNMENT, MIN_ALIGNMENT, Manifest, RankTable
from relayout.format.manifest import relayout_entry
from relayout.format.safetensors import TensorEntry, entries_text, join_header, json_text
from relayout.format.source_record import ConversionOptions, SourceRecord
from relayout.plans.planner import Plan
from relayout.storage.protocols import Store

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

    ranks: tuple[tuple[RankFile, ...], ...]
    """The parts of each rank."""

    @property
    def nbytes(self) -> int:
        """Bytes of all rank files."""
        return sum(file.nbytes for files in self.ranks for file in files)


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion that was planned: everything that is known before a byte moves."""

    output: Store
    """The folder that it makes, or has made."""
    catalogue: Catalogue
    plan: Plan
    layout: Layout
    options: ConversionOptions

    @property
    def source(self) -> Store:
        """The checkpoint that is converted."""
        return self.catalogue.root


def check_alignment(alignment: int) -> None:
    """Refuse an alignment that is no power of two in the supported range.

    Raises:
        PlanError: it is not.
    """
    if alignment & (alignment - 1) or not MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT:
        raise PlanError(
            f"alignment {alignment} is not a power of two between {MIN_ALIGNMENT} and {MAX_ALIGNMENT} bytes"
        )


def lay_out(
    output: Store,
    catalogue: Catalogue,
    plan: Plan,
    alignment: int,
    max_part_nbytes: int = DEFAULT_MAX_PART_NBYTES,
    dcp: bool | None = None,
) -> Conversion:
    """Choose order, files and offsets; `dcp` as for `convert`.

    Raises:
        PlanError: the alignment, the part size, or what DCP needs, cannot be had.
    """
    check_alignment(alignment)
    if max_part_nbytes < 1:
        raise PlanError(f"a part size of {max_part_nbytes} bytes, expected a positive one")
    tensors = cut_tensors(catalogue, plan)
    different = list(dict.fromkeys(tensors))
    parts_of: dict[tuple[_Slot | None, ...], list[_Part]] = {}
    options = ConversionOptions(
        num_ranks=plan.num_ranks,
        plan=plan.name,
        expert_parallel=plan.expert_parallel,
        alignment=alignment,
        max_part_nbytes=max_part_nbytes,
        dcp=_dcp(catalogue, plan, dcp),
    )
    metadata = _Metadata(catalogue, plan, options)
    ranks = []
    for rank in range(plan.num_ranks):
        slots = {tensor: _slot(tensor, rank) for tensor in different}
        alike = tuple(slots.values())
        if alike not in parts_of:
            parts_of[alike] = _parts(catalogue, [slots[tensor] for tensor in tensors], alignment, max_part_nbytes)
        ranks.append(tuple(_rank_file(metadata, rank, part, alignment) for part in parts_of[alike]))
    return Conversion(output, catalogue, plan, Layout(tuple(ranks)), options)


def cut_tensors(catalogue: Catalogue, plan: Plan) -> list[CutTensor]:
    """Each tensor of the catalogue as the plan cuts it; one object for those that are alike."""
    return [
        plan.cuts[cut].tensor(tensor.dtype, tensor.shape)
        for tensor, cut in zip(catalogue.tensors, plan.cut_of, strict=True)
    ]


def _dcp(catalogue: Catalogue, plan: Plan, wanted: bool | None) -> bool:
    """Whether DCP can read the ranks as one model, and shall."""
    if wanted is False:
        return False
    unfit = {number for number, cut in enumerate(plan.cuts) if not cut.is_box}
    if wanted and unfit:
        names = (tensor.name for tensor, cut in zip(catalogue.tensors, plan.cut_of, strict=True) if cut in unfit)
        raise PlanError(f"tensor {next(names)!r}: slices of a fused tensor are no single box, which PyTorch DCP needs")
    return not unfit


class RankHeaders:
    """Builds the headers of rank files."""

    def __init__(self, conversion: Conversion) -> None:
        catalogue, plan = conversion.catalogue, conversion.plan
        self._catalogue = catalogue
        self._tensors = cut_tensors(catalogue, plan)
        self._different = list(dict.fromkeys(self._tensors))
        self._entries: dict[Hashable, str] = {}
        """Entries that files of several ranks have in common."""
        self._metadata = _Metadata(catalogue, plan, conversion.options)
        self._alignment = conversion.options.alignment

    def build(self, file: RankFile, conversion: str) -> bytes:
        """The header bytes of a rank file."""
        shapes = tuple(tensor.rank_shape(file.rank) for tensor in self._different)
        alike = (file.tensors, file.data_offsets, shapes)
        if alike not in self._entries:
            self._entries[alike] = entries_text(self._entry(file.rank, *one) for one in zip(*alike[:2], strict=True))
        metadata = self._metadata.of(file.rank, file.part, file.tensors, conversion)
        blob = join_header(self._entries[alike], metadata, self._alignment)
        assert len(blob) == file.data_start
        return blob

    def _entry(self, rank: int, t: int, offset: int) -> TensorEntry:
        tensor, cut = self._catalogue.tensors[t], self._tensors[t]
        return TensorEntry(tensor.name, tensor.dtype, cut.rank_shape(rank), offset, cut.rank_nbytes(rank))


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


def _slot(tensor: CutTensor, rank: int) -> _Slot | None:
    """What a tensor takes in a rank; None where the rank does not hold it."""
    if not tensor.cut.slices[rank].is_held:
        return None
    return _Slot(tensor.rank_nbytes(rank), tensor.rank_shape(rank))


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


def _rank_file(metadata: _Metadata, rank: int, part: _Part, alignment: int) -> RankFile:
    # The true id has the same length, so the header has its final size already.
    entries = metadata.of(rank, part.number, part.tensors, "0" * CONVERSION_ID_LENGTH)
    data_start = len(join_header(part.entries, entries, alignment))
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


class _Metadata:
    """Writes the `__metadata__` of rank files."""

    def __init__(self, catalogue: Catalogue, plan: Plan, options: ConversionOptions) -> None:
        self._num_ranks = options.num_ranks
        self._with_dcp = options.dcp and options.num_ranks > 1
        reserved = {"relayout", "DCP_SHARDING_INFO", "DCP_VERSION"}
        self._source = {key: value for key, value in catalogue.metadata.items() if key not in reserved}
        self._names = [json_text(tensor.name) for tensor in catalogue.tensors] if self._with_dcp else []
        self._tensors = cut_tensors(catalogue, plan)

    def of(self, rank: int, part: int, tensors: Sequence[int], conversion: str) -> Mapping[str, str]:
        """The entries of one file."""
        metadata = {"relayout": relayout_entry(rank, self._num_ranks, part, conversion), "format": "pt"}
        if self._with_dcp:
            # PyTorch 2.9 to 2.15, torch/distributed/checkpoint/_hf_utils.py and filesystem.py.
            starts = {
                tensor: json_text({"saved_offsets": tensor.cut.slices[rank].starts(len(tensor.shape))})
                for tensor in {self._tensors[t] for t in tensors}
            }
            offsets = ",".join([f"{self._names[t]}:{starts[self._tensors[t]]}" for t in tensors])
            metadata["DCP_SHARDING_INFO"] = f"{{{offsets}}}"
            metadata["DCP_VERSION"] = "1.0"
        return metadata | self._source


def stored_conversion(
    folder: Store, manifest: Manifest, tables: Sequence[RankTable], record: SourceRecord, catalogue: Catalogue
) -> Conversion:
    """The conversion that the sidecar describes.

    Raises:
        FormatError: rank tables and source record contradict each other.
    """
    options = record.options
    plan = Plan(options.plan, options.num_ranks, record.cuts, record.cut_of, options.expert_parallel)
    position = {tensor.name: t for t, tensor in enumerate(catalogue.tensors)}
    held = [
        {t for t, cut in enumerate(plan.cut_of) if plan.cuts[cut].slices[rank].is_held}
        for rank in range(plan.num_ranks)
    ]
    for rank, table in enumerate(tables):
        for row, name in enumerate(table.names):
            t = position.get(name)
            if t is None or t not in held[rank] or table.slices[row] != plan.cut(t).slices[rank]:
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
    return Conversion(folder, catalogue, plan, Layout(tuple(ranks)), options)


def rows_of_files(table: RankTable, num_files: int) -> list[list[int]]:
    """For each file of the rank: its rows in the table, in order."""
    rows: list[list[int]] = [[] for _ in range(num_files)]
    for row, number in enumerate(table.files):
        rows[number].append(row)
    return rows
