"""Checks that a converted folder is consistent: compares copies of facts in headers, tables, record and small files.

Reads no weights. FORMAT.md defines which copy of each fact is authoritative. A check yields the differences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise, takewhile
from typing import Any, Literal, TypeAlias

from relayout.checkpoint.converted import check_file, read_digests, read_record, read_source_digests, read_table
from relayout.checkpoint.folder import CONFIG_NAME, find_config
from relayout.checkpoint.shards import model_order
from relayout.checkpoint.source import MAX_INDEX_NBYTES, SourceCheckpoint, read_shard
from relayout.conversion.layout import file_metadata, not_for_dcp_because
from relayout.conversion.sidecar import read_side_file, recorded_source, rows_of_files
from relayout.core.digests import blake3_hex
from relayout.core.extents import BLOCK, Extent, align_down, align_up
from relayout.core.slices import WHOLE, num_bytes
from relayout.errors import FormatError, PlanError, shown
from relayout.format.fields import Fields, dump_slice, parse_object
from relayout.format.index import (
    ARENA_ALIGNMENT,
    DIGESTS_NAME,
    HUB_INDEX_NAME,
    MANIFEST_NAME,
    SLICES_ONLY,
    WHOLE_TENSORS,
    IndexedFile,
    Manifest,
    RankTable,
    missing_shard_name,
)
from relayout.format.manifest import SOURCE_RECORD_NAME, digest_of_tensors, tensor_head
from relayout.format.safetensors import Header, json_text
from relayout.format.source_record import SideFile, SourceRecord, conversion_digest
from relayout.plans.family import ENGINES
from relayout.plans.plan import Plan, check_all_held
from relayout.plans.planner import verified_rules
from relayout.reporting import Result
from relayout.storage.stores import Store, nowhere

_OTHER = "is not part of this conversion"
_ANY_LENGTH = -1
"""Stands in place of the length of a file for which only the digest is recorded."""
Culprit: TypeAlias = Literal["folder", "source", "either", "side files", "ranks", "others"]
"""The faulty party of a difference.

- folder: the converted folder.
- source: the given source; the folder agrees with its own digests and with its record of the conversion's source.
- either: the folder or the source; too little was read to decide.
- side files: only the small files of the source; all slices are equal.
- ranks: files of some ranks were not copied.
- others: files that do not belong to the folder.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """One error that `verify` found."""

    file: str
    tensor: str | None
    start: int | None
    """Absolute file offset of the first affected byte; None if unknown."""
    end: int | None
    """Absolute file offset after the last affected byte."""
    what: str
    culprit: Culprit = "folder"

    def __str__(self) -> str:
        place = "" if self.start is None else f", bytes {self.start} to {self.end}"
        tensor = "" if self.tensor is None else f": tensor {self.tensor!r}"
        return f"{self.file}{tensor}{place}: {self.what}"


@dataclass(slots=True, repr=False)
class Verification(Result):
    """The result of `verify`."""

    num_ranks: int
    """The tensor-parallel degree."""
    ranks: tuple[int, ...]
    """The ranks that were checked: all in the folder, or the requested ones."""
    num_tensors: int = 0
    """Slices of the checked ranks with hashed bytes."""
    nbytes: int = 0
    """Bytes of files that were read and hashed."""
    compared_with_source: bool = False
    signer: str | None = None
    """The verified signer, as named in the trust policy; None: no policy was given."""
    has_signature: bool = False
    """True if the folder has a signature, verified or not."""
    differences: list[Difference] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if nothing differs."""
        return not self.differences

    @property
    def culprit(self) -> Culprit | None:
        """The faulty party; None if nothing differs. "source" outranks "either", because it is the cause."""
        found = {difference.culprit for difference in self.differences}
        order: tuple[Culprit, ...] = ("folder", "source", "either", "side files", "ranks", "others")
        return next((culprit for culprit in order if culprit in found), None)

    def as_json(self) -> dict[str, object]:
        return Result.as_json(self) | {"ok": self.ok, "culprit": self.culprit}


def difference(
    file: str, what: str, tensor: str | None = None, extent: Extent | None = None, culprit: Culprit = "folder"
) -> Difference:
    """Return a difference in a file, or in an extent of the file."""
    start, end = (None, None) if extent is None else (extent.offset, extent.end)
    return Difference(file, tensor, start, end, what, culprit)


def difference_of(file: str, error: Exception, culprit: Culprit = "folder") -> Difference:
    """Return an error as a difference of the file, without naming the file twice."""
    if isinstance(error, FormatError) and f"/{error.path}".endswith(f"/{file}"):
        return difference(file, error.what, error.tensor, culprit=culprit)
    return difference(file, str(error), culprit=culprit)


def _with_error(file: str, found: Iterator[Difference], culprit: Culprit = "folder") -> Iterator[Difference]:
    """Yield the differences that a check of a file finds; a read error counts as a difference."""
    try:
        yield from found
    except FormatError as error:
        yield difference_of(file, error, culprit)


def check_small_file(folder: Store, expected: SideFile, what: str, culprit: Culprit = "folder") -> Iterator[Difference]:
    """Yield the difference `what` if a file does not have the expected length and digest."""

    def check() -> Iterator[Difference]:
        side = read_side_file(folder, expected.name)
        if side.digest != expected.digest or expected.nbytes not in (_ANY_LENGTH, side.nbytes):
            yield difference(expected.name, what, culprit=culprit)

    return _with_error(expected.name, check(), culprit)


def absent_ranks(folder: Store, manifest: Manifest) -> tuple[int, ...]:
    """Return the ranks without any file in the folder, if some other rank has files: only some ranks were copied.

    A rank counts as present as soon as one of its files exists; the rest are not looked up.
    """

    def is_here(name: str) -> bool:
        with suppress(FormatError):
            return folder.stat(name) is not None
        return True  # Exists, but is not a regular file: a later read raises the error.

    def is_absent(rank: int) -> bool:
        weights = [manifest.files[index].name for index in own_files(manifest, rank)]
        return bool(weights) and not any(map(is_here, [*weights, manifest.holders[rank].table]))

    absent = tuple(rank for rank in manifest.present if is_absent(rank))
    return absent if len(absent) < len(manifest.present) else ()


def own_files(manifest: Manifest, holder: int) -> list[int]:
    """Return the indices of a holder's own files: for a rank, its files except those of whole tensors."""
    is_rank = holder < manifest.num_ranks
    return [index for index in manifest.holders[holder].files if not (is_rank and index in manifest.shared)]


@dataclass(frozen=True, slots=True)
class FolderDigests:
    """The readable digests of the tensors in a folder."""

    holders: Mapping[int, Sequence[str]]
    """Digests of the tensors of ranks and other holders, in the order of their tables."""
    source: Sequence[str | None] | None
    """Digests of the source's tensors, in the order of the record; None: they cannot be read."""


def check_digests(folder: Store, manifest: Manifest, holders: Iterable[int]) -> tuple[FolderDigests, list[Difference]]:
    """Read the tensor digests of holders and of the source; return them with the differences for unreadable ones."""
    found, of_holders, of_source = list[Difference](), dict[int, Sequence[str]](), None
    for holder in holders:
        try:
            of_holders[holder] = read_digests(folder, manifest, holder)
        except FormatError as error:
            found.append(difference_of(DIGESTS_NAME, error))
    try:
        of_source = read_source_digests(folder, manifest)
    except FormatError as error:
        found.append(difference_of(DIGESTS_NAME, error))
    return FolderDigests(of_holders, of_source), found


def check_holder(
    folder: Store,
    manifest: Manifest,
    holder: int,
    source: SourceCheckpoint | None,
    digests: Sequence[str] | None,
) -> tuple[RankTable | None, list[Difference]]:
    """Return the table of a holder and all differences between the table and the headers of its own files.

    The table is None if the table itself or one of these headers cannot be read.

    Args:
        digests: of the holder's tensors; None: they cannot be read.
    """
    entry = manifest.holders[holder]
    try:
        table = read_table(folder, manifest, holder)
        rows = rows_of_files(table, len(entry.files))
    except FormatError as error:
        return None, [difference_of(entry.table, error)]
    found: list[Difference] = []
    is_usable, own = True, set(own_files(manifest, holder))
    for index, column in zip(entry.files, rows, strict=True):
        if index not in own:
            continue
        file = _FileRows(manifest.files[index], table, column, digests)
        try:
            blob, header = _read_header(folder, file.indexed)
        except FormatError as error:
            found.append(difference_of(file.indexed.name, error))
            is_usable = False
            continue
        found += _check_header(manifest, file, blob, header, source)
        try:
            check_file(folder, manifest, index)
        except (FormatError, OSError) as error:
            found.append(difference_of(file.indexed.name, error))
    return table if is_usable else None, found


@dataclass(frozen=True, slots=True)
class _FileRows:
    """Manifest entry and rank table rows of one file."""

    indexed: IndexedFile
    table: RankTable
    rows: Sequence[int]
    """The rows of the table for this file, in file order."""
    digests: Sequence[str] | None
    """Digests of all rows of the table; None: they cannot be read."""


def _read_header(folder: Store, file: IndexedFile) -> tuple[bytes, Header]:
    """Return the header of a file, stored and parsed, or raise FormatError if its sizes differ from the manifest."""
    where = folder.location(file.name)
    shard, header = read_shard(folder, file.name)
    if shard.nbytes != file.nbytes:
        raise FormatError(f"{shard.nbytes} bytes long, expected {file.nbytes}", path=where, code="mismatch")
    if header.data_start != file.data_start:
        what = f"its data section starts at {header.data_start}, {MANIFEST_NAME} says {file.data_start}"
        raise FormatError(what, path=where, code="mismatch")
    return shard.header, header


def _check_header(
    manifest: Manifest, file: _FileRows, blob: bytes, header: Header, source: SourceCheckpoint | None
) -> Iterator[Difference]:
    """Check a header against the rows of the table, and against the metadata of the source if that is given."""
    table, rows, name = file.table, file.rows, file.indexed.name
    if blake3_hex(blob) != file.indexed.header_digest:
        yield difference(name, "its header differs from what was written", None, Extent(0, len(blob)))
    if file.indexed.data_start % manifest.alignment:
        what = f"its data section starts at {file.indexed.data_start}, alignment {manifest.alignment}"
        yield difference(name, what)
    if not header.is_in_order:
        yield difference(name, "its header does not name the tensors in file order")
    stored = [(header.data_start + tensor.offset, tensor.name, tensor.dtype, tensor.shape) for tensor in header.tensors]
    dtypes, shapes = table.dtypes, table.shapes
    indexed = [(table.offsets[row], table.names[row], dtypes[row], shapes[row]) for row in rows]
    for actual, expected in zip(stored, indexed, strict=False):
        if actual != expected:
            yield difference(name, f"header has {actual}, the rank table {expected}", actual[1])
    if len(stored) != len(indexed):
        yield difference(name, f"{len(stored)} tensors, the rank table has {len(indexed)}")
    if file.digests is not None:
        heads = [tensor_head(kind.dtype, kind.source_shape, kind.part) for kind in table.kinds]
        entries = ((json_text(table.names[row]), heads[table.kind_of[row]], file.digests[row]) for row in rows)
        tensors_digest = digest_of_tensors(entries)
        if tensors_digest != file.indexed.tensors_digest:
            what = f"its tensors_digest is {tensors_digest}, {MANIFEST_NAME} says {file.indexed.tensors_digest}"
            yield difference(name, what)
    sharding_info = None
    if manifest.dcp:
        wrong, sharding_info = _sharding_info(file, header.metadata)
        yield from wrong
    if source is not None:
        metadata = file_metadata(file.indexed.tensors_digest, source.metadata, sharding_info)
        yield from _check_metadata(name, header.metadata, metadata)


def _check_metadata(name: str, actual: Mapping[str, str], expected: Mapping[str, str]) -> Iterator[Difference]:
    """Check that a header has exactly the expected metadata entries, in their order."""
    keys = [key for key in {**expected, **actual} if actual.get(key) != expected.get(key)]
    for key in keys:
        what = f"__metadata__ has {key} {shown(actual.get(key))}, expected {shown(expected.get(key))}"
        yield difference(name, what)
    if not keys and list(actual) != list(expected):
        what = f"__metadata__ has {', '.join(map(shown, actual))}, expected {', '.join(map(shown, expected))}"
        yield difference(name, what)


def _sharding_info(file: _FileRows, metadata: Mapping[str, str]) -> tuple[list[Difference], str]:
    """Check the slice offsets for PyTorch DCP; return differences, and the expected (on errors: stored) text."""
    name, table = file.indexed.name, file.table
    kinds, kind_of = table.kinds, table.kind_of
    starts = [kind.part.starts(len(kind.source_shape)) if kind.part.is_box else None for kind in kinds]
    expected = {table.names[row]: {"saved_offsets": starts[kind_of[row]]} for row in file.rows}
    text = metadata.get("DCP_SHARDING_INFO")
    try:
        actual = expected if text is None else parse_object(text.encode(), f"{name}: DCP_SHARDING_INFO")
    except FormatError as error:
        return [difference(name, str(error))], text or ""
    wrong = sorted(tensor for tensor in actual.keys() | expected.keys() if actual.get(tensor) != expected.get(tensor))
    texts = [f"DCP_SHARDING_INFO has {actual.get(tensor)}, the slice is at {expected.get(tensor)}" for tensor in wrong]
    found = [difference(name, what, tensor) for what, tensor in zip(texts, wrong, strict=True)]
    return found, text if wrong and text is not None else json_text(expected)


def check_arenas(manifest: Manifest, tables: Mapping[int, RankTable]) -> Iterator[Difference]:
    """Check the location of each rank's bytes: inside whole tensors, or where direct reads can be used."""
    whole = tables.get(manifest.num_ranks)
    for rank in tables.keys() & set(manifest.present):
        if manifest.whole is None:
            yield from _check_bulk(manifest, rank, tables[rank])
        elif whole is not None:
            yield from _check_offsets(manifest, rank, tables[rank], whole)


def _check_bulk(manifest: Manifest, rank: int, table: RankTable) -> Iterator[Difference]:
    """Check that one direct read can put the bulk of each file at its arena offset, in blocks of its own."""
    entry = manifest.holders[rank]
    sizes = list(table.sizes)
    reads = [read.transfer for read in entry.reads]
    for position, rows in enumerate(rows_of_files(table, len(entry.files))):
        bulk = list(takewhile(lambda row: sizes[row] % ARENA_ALIGNMENT == 0, rows))
        start = manifest.holder_files(rank)[position].data_start
        end = table.offsets[bulk[-1]] + sizes[bulk[-1]] if bulk else start
        actual = [n for n, read in enumerate(entry.reads) if read.file == position and read.transfer.source < end]
        what = f"rank {rank}: bytes {start} to {end} of {manifest.holder_files(rank)[position].name}"
        if start == end:
            continue
        if [(reads[n].source, reads[n].source_end, reads[n].count) for n in actual] != [(start, end, 1)]:
            yield difference(MANIFEST_NAME, f"{what} must be one read")
            continue
        [n] = actual
        first, last = align_down(reads[n].target, BLOCK), align_up(reads[n].target_end, BLOCK)
        before, after = (reads[n - 1].target_end if n else 0), (reads[n + 1].target if n + 1 < len(reads) else last)
        if (reads[n].target - start) % BLOCK or before > first or after < last:
            yield difference(MANIFEST_NAME, f"{what} cannot be read directly to byte {reads[n].target} of the arena")


def _check_offsets(manifest: Manifest, rank: int, table: RankTable, whole: RankTable) -> Iterator[Difference]:
    """Check that slices in files of whole tensors are inside their own tensors."""
    assert manifest.whole is not None
    entry = manifest.holders[rank]
    places = {
        name: (manifest.whole.files[file], offset)
        for name, file, offset in zip(whole.names, whole.files, whole.offsets, strict=True)
    }
    starts = [kind.in_whole[0].source if kind.in_whole else 0 for kind in table.kinds]
    shared = manifest.shared
    for name, kind, file, offset in zip(table.names, table.kind_of, table.files, table.offsets, strict=True):
        index = entry.files[file]
        if index in shared and places.get(name) != (index, offset - starts[kind]):
            what = f"is at {offset} of {manifest.files[index].name}, not in its whole tensor"
            yield difference(entry.table, what, name)


@dataclass(frozen=True, slots=True)
class CheckedRecord:
    """The source record of a folder, with the differences to its copies in the manifest and the side files."""

    differences: list[Difference]
    record: SourceRecord | None = None
    """The source record; None: it cannot be read."""
    source: SourceCheckpoint | None = None
    """The checkpoint that the record describes; None: the record cannot be read, or its headers are damaged."""


def check_record(folder: Store, manifest: Manifest, digests: Sequence[str | None] | None) -> CheckedRecord:
    """Check the source record by itself, its copies in the manifest, and the side files.

    Args:
        digests: of the source's tensors; None: they cannot be read.
    """
    try:
        record = read_record(folder, manifest)
    except FormatError as error:
        return CheckedRecord([difference_of(SOURCE_RECORD_NAME, error)])
    found = [*_check_side_files(folder, manifest, record)]
    # If config.json differs from the copied file, everything derived from it would differ, too.
    config = None if any(each.file == CONFIG_NAME for each in found) else _config(folder, found)
    found += _check_facts(manifest, record, config)
    found += [] if digests is None else _check_names_of_content(manifest, record, digests)
    found += _check_cuts(record)
    found += _check_order(record)
    try:
        source = recorded_source(folder, record, is_whole=False)
    except FormatError as error:
        return CheckedRecord([*found, difference_of(SOURCE_RECORD_NAME, error)], record)
    plan = Plan(record.options.plan, record.options.num_ranks, record.cuts, record.cut_of)
    reason = not_for_dcp_because(source, plan, record.options.layout)
    if record.options.dcp and reason is not None:
        found.append(difference(SOURCE_RECORD_NAME, f"dcp is true: {reason}"))
    if config is not None:
        found += _check_rules(record, replace(source, config=config))
    return CheckedRecord(found, record, source)


def _config(folder: Store, found: list[Difference]) -> Mapping[str, Any] | None:
    """Return the content of config.json, or None after adding its error to `found`."""
    try:
        return find_config(folder).content
    except FormatError as error:
        found.append(difference_of(CONFIG_NAME, error))
        return None


def _check_side_files(folder: Store, manifest: Manifest, record: SourceRecord) -> Iterator[Difference]:
    own = {HUB_INDEX_NAME, *(file.name for file in manifest.files)}
    for side in record.side_files:
        if side.name in own or side.name.startswith("relayout."):
            what = f"side file {shown(side.name)} has the name of a file that relayout writes"
            yield difference(SOURCE_RECORD_NAME, what)
        yield from check_small_file(folder, side, "differs from the file that was copied")


def _check_cuts(record: SourceRecord) -> Iterator[Difference]:
    """Check that the ranks together hold every element of each tensor, and that slices are in canonical form."""
    first = dict(zip(zip(record.cut_of, record.shapes, strict=True), record.names, strict=True))
    for (cut, shape), name in first.items():
        slices = record.cuts[cut].distinct
        try:
            check_all_held(shape, slices)
        except PlanError as error:
            yield difference(SOURCE_RECORD_NAME, str(error), name)
        for part in slices:
            if (canonical := part.canonical(shape)) != part:
                what = f"slice {dump_slice(part)} of {list(shape)}, canonical form is {dump_slice(canonical)}"
                yield difference(SOURCE_RECORD_NAME, what, name)


def _check_order(record: SourceRecord) -> Iterator[Difference]:
    in_order = sorted(record.names, key=lambda name: (model_order(name), name))
    for name, expected in zip(record.names, in_order, strict=True):
        if name != expected:
            yield difference(SOURCE_RECORD_NAME, f"is not in model order: {shown(expected)} comes before it", name)
            return


def _check_facts(manifest: Manifest, record: SourceRecord, config: Mapping[str, Any] | None) -> Iterator[Difference]:
    """Check the manifest's copies of facts in the source record; model_type only if config.json can be read."""
    options = record.options
    model_type = manifest.model_type if config is None else config.get("model_type")
    sizes = (num_bytes(dtype, shape) or 0 for dtype, shape in zip(record.dtypes, record.shapes, strict=True))
    expected = {
        "model_type": model_type if isinstance(model_type, str) else None,
        "plan": options.plan,
        "expert_parallel": options.expert_parallel,
        "alignment": options.alignment,
        "dcp": options.dcp,
        "source_nbytes": sum(sizes),
    }
    if (options.layout == WHOLE_TENSORS) != (manifest.whole is not None):
        yield difference(MANIFEST_NAME, f"'whole' contradicts the layout {options.layout!r} of the source record")
    for name, value in expected.items():
        if getattr(manifest, name) != value:
            known = "source.nbytes" if name == "source_nbytes" else name
            yield difference(MANIFEST_NAME, f"{known} is {getattr(manifest, name)}, by the source record {value}")


def _check_names_of_content(
    manifest: Manifest, record: SourceRecord, digests: Sequence[str | None]
) -> Iterator[Difference]:
    """Check that the digests of the source's tensors exist, and that the conversion's name is derived from them."""
    if None in digests and manifest.has_all:
        yield difference(DIGESTS_NAME, "digests of source tensors are unknown, and the folder has all ranks")
    if (named := conversion_digest(record, digests)) != manifest.conversion:
        yield difference(MANIFEST_NAME, f"conversion is {manifest.conversion}, by the source record {named}")


def _check_rules(record: SourceRecord, source: SourceCheckpoint) -> Iterator[Difference]:
    """Check that the rules, if there are any, give the recorded cuts: loads at other degrees need that."""
    if record.plan is not None and record.plan.origin not in ENGINES:
        try:
            verified_rules(source, record)
        except (FormatError, PlanError) as error:
            yield difference(SOURCE_RECORD_NAME, f"cannot be loaded at another degree: {error}")


def check_slices(
    manifest: Manifest,
    tables: Mapping[int, RankTable],
    record: SourceRecord,
    digests: FolderDigests,
) -> Iterator[Difference]:
    """Check that holders have the recorded slices, and that equal slices have equal digests, as far as known."""
    of_holders, of_source = digests.holders, digests.source
    shared: dict[tuple[int, int], str] = {}  # Digests of slices that several ranks hold, by tensor and slice.
    for rank, table in tables.items():
        name, rows = manifest.holders[rank].table, {tensor: row for row, tensor in enumerate(table.names)}
        for t, tensor in enumerate(record.names):
            row = rows.pop(tensor, None)
            cut = record.cut(t)
            is_rank = rank < len(cut.slices)
            part = cut.slices[rank] if is_rank else WHOLE
            if row is None:
                if part.is_held:
                    yield difference(name, "is missing", tensor)
                continue
            expected = (record.dtypes[t], record.shapes[t], part, part.shape(record.shapes[t]))
            kind, digest = table.kinds[table.kind_of[row]], of_holders[rank][row] if rank in of_holders else None
            if (kind.dtype, kind.source_shape, kind.part, kind.shape) != expected:
                yield difference(name, f"is not the slice in the source record: {expected}", tensor)
            if digest is None or of_source is None:
                continue
            if part.is_whole and digest != of_source[t]:
                yield difference(name, "its digest differs from the source tensor's", tensor)
            elif is_rank and len(cut.holders[cut.which[rank]]) > 1:
                other = shared.setdefault((t, cut.which[rank]), digest)
                if other != digest:
                    what = f"its digest is {digest}, but {other} for the same slice of another rank"
                    yield difference(name, what, tensor)
        for tensor in rows:
            yield difference(name, "is not in the source record", tensor)


def check_other_files(folder: Store, manifest: Manifest, tables: Mapping[int, RankTable]) -> Iterator[Difference]:
    """Check file names and the index for stock loaders, and that no other safetensors files exist."""
    known = {file.name for file in manifest.files}
    for name, next_name in pairwise(sorted(known, key=str.lower)):
        if name.lower() == next_name.lower():
            yield difference(MANIFEST_NAME, f"{name} and {next_name} differ in case only")
    for name in sorted(entry.name for entry in folder.walk(nowhere)):
        if name.endswith(".safetensors") and name not in known:
            yield difference(name, _OTHER, culprit="others")
    if manifest.hub_index_digest is None:
        if folder.stat(HUB_INDEX_NAME) is not None:
            yield difference(HUB_INDEX_NAME, _OTHER, culprit="others")
        return
    expected = SideFile(HUB_INDEX_NAME, _ANY_LENGTH, manifest.hub_index_digest, 0)
    yield from check_small_file(folder, expected, "differs from what was written")
    holder = max(manifest.holders)
    if manifest.whole is None and manifest.num_ranks > 1:
        yield from _with_error(HUB_INDEX_NAME, _check_refusal(folder, manifest))
    elif holder in tables:  # This holder has whole tensors.
        yield from _with_error(HUB_INDEX_NAME, _check_hub_index(folder, manifest, holder, tables[holder]))


def _read_hub_index(folder: Store) -> Fields:
    blob = folder.read(HUB_INDEX_NAME, MAX_INDEX_NBYTES)
    return Fields(parse_object(blob, folder.location(HUB_INDEX_NAME)), HUB_INDEX_NAME)


def _check_refusal(folder: Store, manifest: Manifest) -> Iterator[Difference]:
    """Check that the index of a folder with only slices stops stock loaders."""
    expected = missing_shard_name(manifest.num_ranks)
    if _read_hub_index(folder).object("weight_map").get(SLICES_ONLY) != expected:
        what = f"does not name {expected}, by which other loaders see that this has slices only"
        yield difference(HUB_INDEX_NAME, what)


def _check_hub_index(folder: Store, manifest: Manifest, holder: int, table: RankTable) -> Iterator[Difference]:
    """Check that the index names the file of each whole tensor."""
    files = manifest.holder_files(holder)
    expected = {name: files[file].name for name, file in zip(table.names, table.files, strict=True)}
    top = _read_hub_index(folder)
    named, total = top.object("weight_map"), Fields(top.object("metadata"), HUB_INDEX_NAME).size("total_size")
    for name in sorted({**named, **expected}):
        if named.get(name) != expected.get(name):
            yield difference(HUB_INDEX_NAME, f"names {named.get(name)}, it is in {expected.get(name)}", name)
    if named == expected and list(named) != sorted(named, key=lambda name: (model_order(name), name)):
        yield difference(HUB_INDEX_NAME, "weight_map is not in model order")
    if total != manifest.source_nbytes:
        yield difference(HUB_INDEX_NAME, f"total_size {total}, expected {manifest.source_nbytes}")
