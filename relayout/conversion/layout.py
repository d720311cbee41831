"""The layout: for each slice of each rank, the file and the offset where it is stored. Pure.

A unit is a group of neighboring tensors, in model order: part P of every rank holds exactly their slices. So a unit can
be converted alone. The order of tensors within a unit is the same in all its files. The tensors of a table that is read
by rows (`Plan.tables`) are a unit of their own, in the order of its rows: a rank's rows are then one run, from the data
start of a file to its end.

A holder owns files: each rank is one, and the `whole` layout has, after the ranks, one more that holds every tensor
whole. In that layout a rank's own files contain only the slices that are not contiguous in the whole tensors.

Alignment comes only from a padded header and from the order of the tensors in a unit: falling, by the largest power of
two that divides all slices of a tensor (up to the alignment). Every slice then starts at a multiple of its tensor's
power, because the lengths before it are such multiples. So tensors with only slices of lengths that are multiples of
the alignment come first, in model order, all aligned. The rest is one packed tail, in which each slice is still aligned
to its element type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd
from typing import Self

import numpy as np

from relayout.checkpoint.source import SourceCheckpoint, SourceTensor
from relayout.core.arguments import ranks as parse_ranks
from relayout.core.extents import Extent, natural_alignment
from relayout.core.slices import WHOLE, Cut, CutTensor
from relayout.errors import PlanError, shown
from relayout.format.index import (
    ARENA_ALIGNMENT,
    DIGESTED_NBYTES,
    MAX_ALIGNMENT,
    MIN_ALIGNMENT,
    RANKS,
    WHOLE_TENSORS,
    num_chunks,
    rank_file_name,
)
from relayout.format.manifest import digest_of_tensors, relayout_entry, tensor_head
from relayout.format.safetensors import (
    LENGTH_NBYTES,
    data_start_after,
    entries_text,
    entry_head,
    join_header,
    json_text,
)
from relayout.format.source_record import ConversionOptions
from relayout.plans.plan import Plan
from relayout.publish.output import with_suffix
from relayout.storage.stores import Store

DEFAULT_ALIGNMENT = 4096

DEFAULT_MAX_PART_NBYTES = 4 * 10**9
"""The default size of a part. An interruption costs at most one unit, a part of each rank; hubs write files of 5 GB."""

MAX_PART_HEADER_NBYTES = 20 * 10**6
"""Limit of a part's header: the Hugging Face hub client refuses to parse headers of 25 MB."""

_NOT_IN_DCP = {"F4", "F6_E2M3", "F6_E3M2", "F8_E8M0"}
"""Dtypes that stop the reader of PyTorch DCP (torch 2.13, by safetensors 0.8 `torch.py`, `_TYPES`)."""

_ANY_CONTENT = "0" * 32
"""Placeholder with the length of a file's `tensors_digest`, to compute the length of the metadata."""


@dataclass(frozen=True, slots=True)
class RankFile:
    """One file: the slices of one unit that one holder stores. Its position in the layout's files is its number."""

    name: str
    holder: int
    """The rank, or num_ranks for whole tensors."""
    tensors: tuple[int, ...]
    """Positions in the source, in file order."""
    data_offsets: tuple[int, ...]
    """Offset of each slice in the data section. Ranks with equal slices share this tuple and `tensors`."""
    data_start: int
    nbytes: int
    """Length of the whole file."""

    @property
    def offsets(self) -> list[int]:
        """Absolute file offset of each slice."""
        return [self.data_start + offset for offset in self.data_offsets]

    @property
    def num_chunks(self) -> int:
        """Number of the file's chunks that are hashed."""
        return num_chunks(self.data_start, self.nbytes, DIGESTED_NBYTES)


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of a conversion, and the tensors in each."""

    files: tuple[RankFile, ...]
    """All files, ordered by unit, then by holder."""
    holders: tuple[tuple[int, ...], ...]
    """The numbers of each holder's own files, part 0 first."""
    units: tuple[tuple[int, ...], ...]
    """The tensors of each unit (positions in the source), in the order of its files. Units of tables are last."""
    files_of_unit: tuple[range, ...]
    """The numbers of each unit's files."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    @property
    def data_nbytes(self) -> int:
        """Bytes of the data sections of all files."""
        return sum(file.nbytes - file.data_start for file in self.files)

    def files_of(self, holder: int) -> list[RankFile]:
        """Return the files of a holder."""
        return [self.files[index] for index in self.holders[holder]]

    def only(self, holders: Container[int]) -> Layout:
        """Return the layout with the files of only these holders."""
        files, files_of_unit = list[RankFile](), list[range]()
        for numbers in self.files_of_unit:
            first = len(files)
            files += [self.files[number] for number in numbers if self.files[number].holder in holders]
            files_of_unit.append(range(first, len(files)))
        return Layout(tuple(files), by_holder(files, len(self.holders)), self.units, tuple(files_of_unit))


def by_holder(files: Sequence[RankFile], num_holders: int) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of each holder's files."""
    numbers: list[list[int]] = [[] for _ in range(num_holders)]
    for number, file in enumerate(files):
        numbers[file.holder].append(number)
    return tuple(map(tuple, numbers))


def check_planned(conversion: object) -> None:
    """Raise PlanError unless this is a planned conversion."""
    if not isinstance(conversion, Conversion):
        raise PlanError(f"conversion: {shown(conversion)}, expected what plan_conversion returns", code="option")


@dataclass(frozen=True, slots=True)
class Conversion:
    """A planned conversion: everything that is known before a byte moves.

    `relayout.preview` summarizes it, `relayout.carry_out` executes it.
    """

    output: Store
    """The folder to write, or that was written."""
    source: SourceCheckpoint
    plan: Plan
    cut: Sequence[CutTensor]
    """Each source tensor with the slices of its holders: by rank as the plan cuts it, and whole.

    Equal tensors share one object.
    """
    layout: Layout
    options: ConversionOptions
    ranks: tuple[int, ...]
    """The ranks that are converted, rising. Other ranks hold nothing in `cut`, and have no files in `layout`."""

    def __repr__(self) -> str:
        ranks = f"{self.plan.num_ranks} ranks"
        return f"<Conversion {str(self.source.root)!r} to {str(self.output)!r}: {ranks}; see relayout.preview>"

    @classmethod
    def lay_out(
        cls,
        output: Store,
        source: SourceCheckpoint,
        plan: Plan,
        *,
        alignment: int = DEFAULT_ALIGNMENT,
        max_part_nbytes: int = DEFAULT_MAX_PART_NBYTES,
        layout: str = RANKS,
        ranks: str | Iterable[int] | None = None,
    ) -> Self:
        """Choose order, files and offsets; `layout` and `ranks` as for `convert`.

        Raises:
            PlanError: the alignment, the part size or a rank is invalid.
        """
        check_alignment(alignment)
        if max_part_nbytes < 1:
            raise PlanError(f"a part size of {max_part_nbytes} bytes, expected a positive one", code="option")
        has_dcp = not_for_dcp_because(source, plan, layout) is None
        options = ConversionOptions(
            plan.num_ranks, plan.name, plan.expert_parallel, alignment, max_part_nbytes, has_dcp, layout
        )
        tensors = cut_tensors(source, plan, layout)
        order_key = {tensor: _order_key(tensor, alignment) for tensor in set(tensors)}
        headers = HeaderBuilder(source, tensors, options)
        files: list[RankFile] = []
        units, files_of_unit = [], []
        in_tables = frozenset(t for table in plan.tables for t in table)
        others = [t for t in range(len(tensors)) if t not in in_tables]
        units_of_others = _units(source, tensors, others, plan.num_ranks, max_part_nbytes)
        groups = [*(units_of_others if others or not plan.tables else ()), *plan.tables]
        for part, group in enumerate(groups):
            is_table = group in plan.tables
            units.append(group if is_table else tuple(sorted(group, key=lambda t: order_key[tensors[t]])))
            first = len(files)
            files += _files(units[-1], tensors, headers, part, len(groups))
            files_of_unit.append(range(first, len(files)))
        holders = by_holder(files, plan.num_ranks + (layout == WHOLE_TENSORS))
        where = Layout(tuple(files), holders, tuple(units), tuple(files_of_unit))
        all_ranks = tuple(range(plan.num_ranks))
        planned = cls(output, source, plan, tensors, where, options, all_ranks)
        return planned if ranks is None else planned.only(ranks)

    def only(self, ranks: str | Iterable[int]) -> Self:
        """Return the part of this conversion for the files of these ranks, and of whole tensors.

        Raises:
            PlanError: such a rank does not exist.
        """
        some = parse_ranks(ranks, self.plan.num_ranks)
        assert set(some) <= set(self.ranks)
        if some == self.ranks:
            return self
        holders = {*some, *([self.plan.num_ranks] if self.has_whole else [])}
        cut = cut_tensors(self.source, self.plan, self.options.layout, holders)
        return replace(self, cut=cut, layout=self.layout.only(holders), ranks=some)

    def named(self, names: Sequence[str]) -> Self:
        """Return the conversion with these file names, one for each file of the layout."""
        if names == [file.name for file in self.layout.files]:
            return self
        files = tuple(replace(file, name=name) for file, name in zip(self.layout.files, names, strict=True))
        return replace(self, layout=replace(self.layout, files=files))

    def with_suffix(self, suffix: str) -> Self:
        """Return the conversion with file names that carry a mark."""
        return self.named([with_suffix(file.name, suffix) for file in self.layout.files])

    @property
    def rank_nbytes(self) -> tuple[int, ...]:
        """Bytes of the tensors of each rank that is converted."""
        counts = Counter(self.cut).items()
        return tuple(sum(tensor.rank_nbytes(rank) * n for tensor, n in counts) for rank in self.ranks)

    @property
    def replicated_nbytes(self) -> int | None:
        """Bytes that are stored more than once, counted once for each further copy; None: some ranks are left out."""
        return self.layout.data_nbytes - self.source.nbytes if self.has_all else None

    @property
    def has_all(self) -> bool:
        """True if all ranks are converted."""
        return len(self.ranks) == self.plan.num_ranks

    def extents_of(self, t: int) -> tuple[Extent, ...]:
        """Return the extents of a source tensor that the ranks need and that are read, relative to its first byte."""
        nbytes = self.source.tensors[t].extent.nbytes
        if self.has_all:  # Plans leave nothing out.
            return (Extent(0, nbytes),) if nbytes else ()
        return self.cut[t].extents

    def reads_whole(self, t: int) -> bool:
        """Return True if all bytes of a source tensor are read; otherwise its digest remains unknown."""
        return (
            self.has_all or sum(extent.nbytes for extent in self.extents_of(t)) == self.source.tensors[t].extent.nbytes
        )

    def nbytes_of(self, tensors: Iterable[int] | None = None) -> int:
        """Return the number of bytes to read of these source tensors, or of all."""
        wanted = range(len(self.source.tensors)) if tensors is None else tensors
        return sum(extent.nbytes for t in wanted for extent in self.extents_of(t))

    @property
    def has_whole(self) -> bool:
        """True if the last holder has whole tensors."""
        return self.options.layout == WHOLE_TENSORS


def is_stored(tensor: CutTensor, holder: int, num_ranks: int) -> bool:
    """Return True if a holder has its slice of a tensor in a file of its own."""
    if holder == num_ranks:
        return True
    if len(tensor.cut.slices) == num_ranks:
        return tensor.cut.slices[holder].is_held
    return any(transfer.count > 1 for transfer in tensor.rank_transfers(holder))


def check_alignment(alignment: int) -> None:
    """Raise PlanError unless an alignment is a power of two in the supported range."""
    if alignment & (alignment - 1) or not MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT:
        what = f"align: {alignment} bytes, expected a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}"
        raise PlanError(what, code="option")


def cut_tensors(
    source: SourceCheckpoint, plan: Plan, layout: str, holders: Container[int] | None = None
) -> list[CutTensor]:
    """Return each source tensor with the slices of its holders, or only of `holders`; equal ones share an object."""
    cuts = plan.cuts if layout == RANKS else [Cut((*cut.slices, WHOLE)) for cut in plan.cuts]
    if holders is not None:
        cuts = [cut.only(holders) for cut in cuts]
    return [
        cuts[cut].tensor(tensor.dtype, tensor.shape) for tensor, cut in zip(source.tensors, plan.cut_of, strict=True)
    ]


def not_for_dcp_because(source: SourceCheckpoint, plan: Plan, layout: str) -> str | None:
    """Return why headers lack the metadata by which PyTorch DCP reads the ranks as one model; None: they have it."""
    if plan.num_ranks == 1 or layout == WHOLE_TENSORS:
        return "tensors are stored whole, and PyTorch DCP reads them without it"
    if _NOT_IN_DCP.intersection(tensor.dtype for tensor in source.tensors):
        return f"PyTorch DCP does not read {', '.join(sorted(_NOT_IN_DCP))}"
    fused = {index for index, cut in enumerate(plan.cuts) if not cut.is_box}
    names = (tensor.name for tensor, cut in zip(source.tensors, plan.cut_of, strict=True) if cut in fused)
    name = next(names, None)
    return None if name is None else f"a slice of {name!r} is several ranges, and PyTorch DCP needs a single box"


def _units(
    source: SourceCheckpoint, tensors: Sequence[CutTensor], order: Sequence[int], num_ranks: int, max_part_nbytes: int
) -> Iterator[tuple[int, ...]]:
    """Cut the model order into units with files within the limits of size and header; a larger tensor is its own unit.

    Args:
        order: the positions of the tensors that are in units, in model order. If empty, there is one empty unit.
    """
    num_holders = len(tensors[0].cut.slices) if tensors else num_ranks
    limits = np.array([*[min(max_part_nbytes, 2**62)] * num_holders, MAX_PART_HEADER_NBYTES])
    stored_sizes = {
        tensor: [tensor.rank_nbytes(holder) * is_stored(tensor, holder, num_ranks) for holder in range(num_holders)]
        for tensor in set(tensors)
    }
    rows = [[*stored_sizes[tensors[t]], _entry_nbytes(source.tensors[t])] for t in order]
    ends = np.cumsum(np.array(rows, np.int64).reshape(-1, num_holders + 1), axis=0)
    start, before = 0, np.zeros(num_holders + 1, np.int64)
    while start < len(order) or start == 0:
        fitting = [
            int(np.searchsorted(column, limit, "right")) for column, limit in zip(ends.T, before + limits, strict=True)
        ]
        end = max(min(fitting), min(start + 1, len(order)))
        yield tuple(order[start:end])
        if end == len(order):
            return
        start, before = end, ends[end - 1]


def _files(
    unit: tuple[int, ...], tensors: Sequence[CutTensor], headers: HeaderBuilder, part: int, num_parts: int
) -> Iterator[RankFile]:
    """Yield the files of a unit: one per holder, even if empty; in the `whole` layout ranks have no empty files."""
    different = list(dict.fromkeys(tensors[t] for t in unit))
    known: dict[Hashable, tuple[tuple[int, ...], tuple[int, ...], int]] = {}
    num_ranks, has_whole = headers.options.num_ranks, headers.options.layout == WHOLE_TENSORS
    for holder in range(num_ranks + has_whole):
        sizes = {tensor: tensor.rank_nbytes(holder) for tensor in different}
        held = {tensor for tensor in different if is_stored(tensor, holder, num_ranks)}
        if has_whole and not held and holder < num_ranks:
            continue
        alike = (tuple(sizes.values()), frozenset(held))
        if alike not in known:
            order = unit if len(held) == len(different) else tuple(t for t in unit if tensors[t] in held)
            *offsets, end = accumulate((sizes[tensors[t]] for t in order), initial=0)
            known[alike] = (order, tuple(offsets), end)
        order, data_offsets, nbytes = known[alike]
        if holder == num_ranks:
            name = f"model-{part + 1:05}-of-{num_parts:05}.safetensors"
        else:
            name = rank_file_name(holder, part, next_to_whole=has_whole)
        data_start = headers.data_start(RankFile(name, holder, order, data_offsets, 0, nbytes))
        yield RankFile(name, holder, order, data_offsets, data_start, data_start + nbytes)


def _order_key(tensor: CutTensor, alignment: int) -> tuple[int, ...]:
    """Return a sort key of a tensor in its unit; equal keys stay in model order.

    Slices with a size that is not a multiple of 16 bytes cannot be used in memory at their file offsets. They are
    grouped by size, so that a loader spreads each group with one strided read.
    """
    power = natural_alignment(gcd(*tensor.sizes), alignment)
    return (-power, *(-tensor.rank_nbytes(rank) for rank in range(len(tensor.cut.which)) if power < ARENA_ALIGNMENT))


def _entry_nbytes(tensor: SourceTensor) -> int:
    """Return an upper bound of a tensor's header bytes: its entry, and DCP's, in which the name is escaped twice."""
    name = json_text(json_text(tensor.name))
    return 2 * len(name.encode()) + 45 * len(tensor.shape) + 150


def file_metadata(tensors_digest: str, source: Mapping[str, str], sharding_info: str | None) -> dict[str, str]:
    """Return the entries of a file's `__metadata__`, in their order.

    Args:
        tensors_digest: of the tensors in the file.
        source: entries on which all shards agree.
        sharding_info: the slice offsets for PyTorch DCP; None: no DCP entries.
    """
    dcp = {} if sharding_info is None else {"DCP_SHARDING_INFO": sharding_info, "DCP_VERSION": "1.0"}
    reserved = {"relayout", "DCP_SHARDING_INFO", "DCP_VERSION"}
    own = {key: value for key, value in source.items() if key not in reserved}
    return {"relayout": relayout_entry(tensors_digest), "format": "pt"} | dcp | own


class HeaderBuilder:
    """Builds each file's header once the digest of its tensors is known; computes the header's length before."""

    def __init__(self, source: SourceCheckpoint, tensors: Sequence[CutTensor], options: ConversionOptions) -> None:
        """Take the cut `tensors` of the source."""
        self.options = options
        self._tensors = tensors
        self._names = [json_text(tensor.name) for tensor in source.tensors]
        self._name_nbytes = [len(name.encode()) for name in self._names]
        self._dcp_nbytes = [_in_string(name) for name in self._names] if options.dcp else []
        self._source_metadata = source.metadata
        metadata = file_metadata(_ANY_CONTENT, source.metadata, "" if options.dcp else None)
        self._metadata_nbytes = len(join_header("", metadata, 1)) - LENGTH_NBYTES
        self._entries: dict[Hashable, str] = {}
        """Header entries that files of several ranks share."""

    def data_start(self, file: RankFile) -> int:
        """Return the length of a file's header in bytes: the sum of all texts that `build` joins."""
        bounds = [len(str(bound)) for bound in (*file.data_offsets, file.nbytes - file.data_start)]
        counts = Counter(self._tensors[t] for t in file.tensors)
        heads = sum(n * len(entry_head(one.dtype, one.rank_shape(file.holder))) for one, n in counts.items())
        # Each entry has its name, its head, two offsets and ":,]}"; a comma is in front of each.
        names, nbytes = [self._name_nbytes[t] for t in file.tensors], self._metadata_nbytes
        nbytes += sum(names) + heads + 2 * sum(bounds[1:-1]) + 5 * len(names)
        nbytes += bounds[0] + bounds[-1] if names else 0
        if self.options.dcp:  # A string of an object, which has a colon in each entry and a comma between two.
            starts = sum(n * _in_string(_dcp_start(one, file.holder)) for one, n in counts.items())
            nbytes += 2 + starts + sum(self._dcp_nbytes[t] for t in file.tensors) + max(0, 2 * len(names) - 1)
        return data_start_after(nbytes, self.options.alignment)

    def build(self, file: RankFile, tensors_digest: str) -> bytes:
        """Return the header bytes of a file."""
        sharding_info = self._sharding_info(file) if self.options.dcp else None
        metadata = file_metadata(tensors_digest, self._source_metadata, sharding_info)
        return join_header(self._entries_of(file), metadata, self.options.alignment)

    def tensors_digest(self, file: RankFile, digests: Mapping[int, Sequence[str]]) -> str:
        """Return the digest of a file's tensors; `digests` must contain those of the distinct slices of its tensors."""
        holder, cut = file.holder, self._tensors
        different = {cut[t] for t in file.tensors}
        heads = {tensor: tensor_head(tensor.dtype, tensor.shape, tensor.cut.slices[holder]) for tensor in different}
        which = {tensor: tensor.cut.which[holder] for tensor in different}
        return digest_of_tensors((self._names[t], heads[cut[t]], digests[t][which[cut[t]]]) for t in file.tensors)

    def _entries_of(self, file: RankFile) -> str:
        kinds = {
            tensor: tensor.rank_shape(file.holder) for tensor in dict.fromkeys(self._tensors[t] for t in file.tensors)
        }
        alike = (file.tensors, file.data_offsets, tuple(kinds.values()))
        if alike not in self._entries:
            heads = {tensor: entry_head(tensor.dtype, shape) for tensor, shape in kinds.items()}
            ends = [*file.data_offsets[1:], file.nbytes - file.data_start] if file.tensors else []
            self._entries[alike] = entries_text(
                (self._names[t], heads[self._tensors[t]], start, end)
                for t, start, end in zip(file.tensors, file.data_offsets, ends, strict=True)
            )
        return self._entries[alike]

    def _sharding_info(self, file: RankFile) -> str:
        # PyTorch 2.9 to 2.15, torch/distributed/checkpoint/_hf_utils.py and filesystem.py.
        starts = {tensor: _dcp_start(tensor, file.holder) for tensor in {self._tensors[t] for t in file.tensors}}
        return f"{{{','.join([f'{self._names[t]}:{starts[self._tensors[t]]}' for t in file.tensors])}}}"


def _dcp_start(tensor: CutTensor, holder: int) -> str:
    """Return the start of a holder's slice in the whole tensor, as JSON for PyTorch DCP."""
    return json_text({"saved_offsets": tensor.cut.slices[holder].starts(len(tensor.shape))})


def _in_string(text: str) -> int:
    """Return the UTF-8 bytes of a text inside a JSON string; the text has no control characters."""
    return len(text.encode()) + text.count('"') + text.count("\\")
