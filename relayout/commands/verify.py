"""`verify`: checks a converted checkpoint on its own, or against its source."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain

from relayout.checkpoint.converted import check_present, names_of, read_chunk_digests, read_manifest, read_record
from relayout.checkpoint.shards import model_order
from relayout.checkpoint.source import SourceCheckpoint, SourceFile, SourceTensor, read_source
from relayout.checkpoint.trust import SignedFolder, Trust, policy_of, verify_signature
from relayout.conversion.consistency import (
    Culprit,
    Difference,
    FolderDigests,
    Verification,
    absent_ranks,
    check_arenas,
    check_digests,
    check_holder,
    check_other_files,
    check_record,
    check_slices,
    check_small_file,
    difference,
    difference_of,
    own_files,
)
from relayout.conversion.copy_plan import CopyPlan, TensorDigests, run_copy_steps
from relayout.conversion.layout import Conversion
from relayout.conversion.run import DEFAULT_MEMORY, DEFAULT_THREADS, num_readers_of, share_memory
from relayout.conversion.sidecar import digests_of_all, stored_conversion
from relayout.core.arguments import ranks as parse_ranks
from relayout.core.arguments import ranks_text
from relayout.core.digests import BLAKE3_NBYTES
from relayout.core.extents import Extent
from relayout.core.slices import num_bytes
from relayout.core.workers import each
from relayout.errors import FormatError
from relayout.format.index import CHUNKS_NAME, MANIFEST_NAME, SIGNATURE_NAME, Manifest, RankTable, chunks_of
from relayout.format.source_record import SourceRecord
from relayout.reporting import Progress, reporting
from relayout.storage.reading import HashedFile, hash_files, sha256_hex
from relayout.storage.stores import Access, Store, find_input

_CHANGED = "has changed in the source since the conversion"


def verify(
    path: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    ranks: str | Iterable[int] | None = None,
    trust: Trust = None,
    threads: int = DEFAULT_THREADS,
    memory: int | str = DEFAULT_MEMORY,
    progress: Progress = None,
) -> Verification:
    """Check a converted checkpoint: its structure, its sidecar files, and the digest of every slice.

    This verifies the bytes that were written. It does not join the slices of several ranks: only `source` and `restore`
    check that the slices make up the tensors of the source.

    Args:
        path: the converted folder.
        source: the source checkpoint. Every slice is cut from it again and compared.
        ranks: check only these ranks, such as range(4) or "0-3"; their files must exist. None: all that the manifest
            lists. Ranks without any file are reported as one difference, and the other ranks are checked.
        trust: policy of accepted signers, as for `load`. All signed files are then compared, and unsigned files are
            differences, as in `model_signing verify`. This reads the files again.
        threads: threads that read and hash.
        memory: bytes that these threads may use, or text such as "512MiB".
        progress: True for a bar on stderr, or a function that is called with (bytes done, total bytes).

    Returns:
        The differences found; `ok` if there are none.

    Raises:
        FormatError: `path` has no valid manifest, or the source is damaged.
        PlanError: `source` is not a checkpoint, or the folder lacks a rank.
        OSError: reading failed.

    Example:
        >>> import relayout
        >>> relayout.verify("llama-3.1-8b-tp8", source="llama-3.1-8b").ok
        True
    """
    threads, chunk_nbytes = share_memory(threads, memory)
    num_readers = num_readers_of(threads, chunk_nbytes)
    folder, policy = find_input(path), policy_of(trust)
    signed = None if policy is None else verify_signature(folder, policy)
    manifest = read_manifest(folder) if signed is None else signed.manifest
    absent = absent_ranks(folder, manifest) if ranks is None else ()
    here = tuple(rank for rank in manifest.present if rank not in absent)
    wanted = here if ranks is None else parse_ranks(ranks, manifest.num_ranks)
    check_present(folder, manifest, wanted)
    holders = [holder for holder in manifest.holders if holder in wanted or holder == manifest.num_ranks]
    signer = None if signed is None else signed.signer
    has_signature = signed is not None or folder.stat(SIGNATURE_NAME) is not None
    report = Verification(manifest.num_ranks, wanted, signer=signer, has_signature=has_signature)
    found = report.differences
    if absent:
        what = f"lists ranks {ranks_text(manifest.present)}, but there is no file of {ranks_text(absent)}"
        found.append(difference(MANIFEST_NAME, what, culprit="ranks"))
    record, usable, digests = _check_small_files(folder, manifest, holders, found)
    report.num_tensors = sum(len(table.names) for table in usable.values())
    original = None if source is None else read_source(find_input(source))
    hash_nbytes = sum(manifest.files[index].nbytes for holder in usable for index in own_files(manifest, holder))
    is_cut_again = original is not None or manifest.whole is not None
    total = hash_nbytes + (manifest.source_nbytes if is_cut_again else 0)
    with reporting(progress, "verifying", total) as report_nbytes:
        for holder, table in usable.items():
            on_progress = report_nbytes.after(report.nbytes)
            found += _check_stored(
                folder, manifest, holder, table, digests.holders.get(holder), num_readers, on_progress
            )
            report.nbytes += sum(manifest.files[index].nbytes for index in own_files(manifest, holder))
        if signed is not None:
            report_nbytes.begin("checking what is signed")
            needed = {file.name for holder in holders for file in manifest.holder_files(holder)}
            found += _check_signed(folder, signed, needed, {each.file for each in found}, num_readers)
        # After errors the layout cannot be trusted: skip the comparison.
        if is_cut_again and record is not None and report.culprit in (None, "ranks"):
            report_nbytes.begin("comparing with the source" if original is not None else "comparing the copies")
            compared = _Compared(folder, manifest.only(wanted), usable, digests, record, original)
            found += compared.differences(threads, chunk_nbytes, report_nbytes.after(hash_nbytes))
            report.compared_with_source = original is not None and compared.has_same_tensors
    found[:] = dict.fromkeys(found)  # The same difference in a file may be found once per rank.
    return report


def _check_small_files(
    folder: Store, manifest: Manifest, holders: Iterable[int], found: list[Difference]
) -> tuple[SourceRecord | None, dict[int, RankTable], FolderDigests]:
    """Check all files other than the weights, and append differences to `found`.

    Returns:
        The source record, or None if it cannot be read; the tables of all holders with intact headers; and all intact
        digests.
    """
    digests, differences = check_digests(folder, manifest, holders)
    checked = check_record(folder, manifest, digests.source)
    found += [*differences, *checked.differences]
    usable: dict[int, RankTable] = {}
    for holder in holders:
        table, differences = check_holder(folder, manifest, holder, checked.source, digests.holders.get(holder))
        found += differences
        if table is not None:
            usable[holder] = table
    found += [] if checked.record is None else check_slices(manifest, usable, checked.record, digests)
    found += check_arenas(manifest, usable)
    found += check_other_files(folder, manifest, usable)
    return checked.record, usable, digests


def _check_signed(
    folder: Store, signed: SignedFolder, needed: Container[str], differing: Container[str], threads: int
) -> Iterator[Difference]:
    """Yield differences between the signed SHA-256 of files and the actual one, and files that are not signed.

    Weight files outside `needed` and files in `differing` are not compared.
    """
    known: Container[str] | None = signed.digests
    if not signed.lists_all:
        try:
            known = names_of(signed.manifest, read_record(folder, signed.manifest))
        except FormatError:  # Already reported. Without the record, the side files that belong here are unknown.
            known = None
    for entry in folder.walk():
        is_ours = entry.is_folder or known is None or entry.name in known or entry.name == SIGNATURE_NAME
        if not is_ours and entry.name not in differing:
            what = "is not signed; if it belongs there, relayout sign signs the folder again"
            yield difference(entry.name, what, culprit="others")
    weights = {file.name for file in signed.manifest.files}
    names = [name for name in signed.digests if name not in differing and (name in needed or name not in weights)]

    def compare(name: str) -> Difference | None:
        try:
            digest = sha256_hex(folder.open(name, access=Access.ONCE))
        except (FormatError, OSError) as error:
            return difference_of(name, error)
        wanted = signed.digests[name]
        return None if digest == wanted else difference(name, f"SHA-256 is {digest}, {wanted} is signed")

    yield from (found for found in each(compare, names, threads) if found is not None)


def _check_stored(
    folder: Store,
    manifest: Manifest,
    holder: int,
    table: RankTable,
    digests: Sequence[str] | None,
    threads: int,
    on_progress: Callable[[int], None],
) -> Iterator[Difference]:
    """Read a holder's own files once; yield slices and chunks with a digest that differs from the stored one.

    Digests of slices are compared if they are known.
    """
    slices: dict[int, list[tuple[Extent, str, str]]] = {index: [] for index in own_files(manifest, holder)}
    for name, nbytes, position, offset, digest in zip(
        table.names, table.sizes, table.files, table.offsets, digests or [""] * len(table.names), strict=True
    ):
        index = manifest.holders[holder].files[position]
        if digest and index in slices:
            slices[index].append((Extent(offset, nbytes), name, digest))
    to_hash = []
    for index, column in slices.items():
        column.sort()
        file = manifest.files[index]
        opener = partial(folder.open, file.name, file.nbytes, access=Access.ONCE)
        chunks = chunks_of(file.data_start, file.nbytes, manifest.chunk_nbytes)
        to_hash.append(HashedFile(opener, [extent for extent, *_ in column], chunks))
    hashed = hash_files(to_hash, threads, on_progress)
    for (index, column), read, of_file in zip(slices.items(), to_hash, hashed, strict=True):
        name, is_damaged = manifest.files[index].name, False
        for (extent, tensor, expected), actual in zip(column, of_file, strict=False):
            if actual != expected:
                is_damaged = True
                yield difference(name, "digest differs: the stored bytes are damaged", tensor, extent)
        try:
            stored = _chunk_digests(folder, manifest, index)
        except FormatError as error:
            yield difference_of(CHUNKS_NAME, error)
            continue
        for extent, expected, actual in zip(read.chunks, stored, of_file[len(column) :], strict=False):
            if actual != expected and not is_damaged:
                yield difference(name, f"the digest of a chunk differs from {CHUNKS_NAME}", None, extent)


def _chunk_digests(folder: Store, manifest: Manifest, index: int) -> list[str]:
    """Return the digests of a file's chunks in hex; raise FormatError if they cannot be read."""
    digests = read_chunk_digests(folder, manifest, index)
    return [digests[start : start + BLAKE3_NBYTES].hex() for start in range(0, len(digests), BLAKE3_NBYTES)]


@dataclass(frozen=True, slots=True)
class _Compared:
    """A comparison of the folder with slices that are cut again, from the source or from the folder's whole tensors."""

    folder: Store
    manifest: Manifest
    """The manifest, restricted to the ranks that are checked."""
    tables: Mapping[int, RankTable]
    digests: FolderDigests
    record: SourceRecord
    original: SourceCheckpoint | None
    """The source that the caller named. None: the folder's own whole tensors are cut again."""

    @property
    def source(self) -> SourceCheckpoint:
        """The checkpoint that is cut again."""
        if self.original is not None:
            return self.original
        return _whole_source(self.folder, self.manifest, self.tables[self.manifest.num_ranks])

    @property
    def has_same_tensors(self) -> bool:
        """True if the source's tensors have the recorded names, dtypes and shapes, in the same order."""
        return _heads_of(self.source) == _recorded_heads(self.record)

    def differences(self, threads: int, chunk_nbytes: int, on_progress: Callable[[int], None]) -> Iterator[Difference]:
        """Cut the source with the conversion's copy plan, and yield the digests that differ."""
        source, original = self.source, self.original
        actual, expected = _heads_of(source), _recorded_heads(self.record)
        if actual != expected:
            different = sorted({name for name, *_ in set(actual) ^ set(expected)}) or ["the order"]
            what = f"is not the source: {len(different)} tensors differ, such as {different[0]!r}"
            yield difference(str(source.root), what, culprit="folder" if original is None else "source")
            return
        conversion = stored_conversion(self.folder, self.manifest, self.tables, self.record, source)
        plan = CopyPlan(conversion, chunk_nbytes=chunk_nbytes)
        steps = chain.from_iterable(map(plan.steps, range(len(conversion.layout.units))))
        passed = run_copy_steps(conversion, steps, None, threads=threads, on_progress=on_progress)
        on_progress(self.manifest.source_nbytes)  # Some ranks may not need all bytes of the source.
        digests = digests_of_all(conversion, passed)
        rows = {holder: {name: row for row, name in enumerate(table.names)} for holder, table in self.tables.items()}
        for t, digests_of_tensor in enumerate(digests):
            yield from self._compare_tensor(conversion, t, digests_of_tensor, rows)
        if original is not None:
            yield from _compare_files(self.record, original)

    def _compare_tensor(
        self, conversion: Conversion, t: int, digests: TensorDigests, rows: Mapping[int, Mapping[str, int]]
    ) -> Iterator[Difference]:
        """Yield differences in the digests of a tensor and its slices; `rows`: holder -> tensor name -> table row."""
        assert self.digests.source is not None  # Otherwise a difference was found before.
        name, recorded, held = self.record.names[t], self.digests.source[t], conversion.cut[t].cut.which
        culprit = "folder" if self.original is None else _culprit(digests.source, recorded)
        for holder, table in self.tables.items():
            row = rows[holder].get(name)
            if row is not None and self.digests.holders[holder][row] != digests.slices[held[holder]]:
                file = self.manifest.holder_files(holder)[table.files[row]]
                extent = Extent(table.offsets[row], conversion.cut[t].rank_nbytes(holder))
                yield difference(file.name, "differs from the source", name, extent, culprit)
        if None not in (digests.source, recorded) and digests.source != recorded:
            yield difference(str(conversion.source.root), _CHANGED, name, culprit=culprit)


def _heads_of(source: SourceCheckpoint) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return the name, dtype and shape of each tensor."""
    return [(tensor.name, tensor.dtype, tensor.shape) for tensor in source.tensors]


def _recorded_heads(record: SourceRecord) -> list[tuple[str, str, tuple[int, ...]]]:
    return list(zip(record.names, record.dtypes, record.shapes, strict=True))


def _culprit(actual: str | None, recorded: str | None) -> Culprit:
    """Return the culprit for a slice that differs from the source.

    Args:
        actual: digest of the source tensor now; None if the tensor was not read whole.
        recorded: digest of the source tensor at conversion; None if it was not read whole.
    """
    if actual is None or recorded is None:
        return "either"
    return "folder" if actual == recorded else "source"


def _compare_files(record: SourceRecord, source: SourceCheckpoint) -> Iterator[Difference]:
    """Yield differences in what else a restore writes: names, lengths and headers of shards, index, side files."""
    expected = {file.name: (file.nbytes, file.header) for file in record.files}
    actual = {file.name: (file.nbytes, file.header) for file in source.files}
    for name in sorted(name for name in actual.keys() | expected.keys() if actual.get(name) != expected.get(name)):
        yield difference(name, _CHANGED, culprit="source")
    if source.index != record.index:
        yield difference(str(source.root), f"its index {_CHANGED}", culprit="source")
    for side in record.side_files:
        is_missing = False
        with suppress(FormatError):  # Not a regular file: `check_small_file` reports it.
            is_missing = source.folder.stat(side.name) is None
        if is_missing:
            where = source.folder.location(side.name)
            yield difference(where, "is missing in the source, the folder has it", culprit="side files")
        else:
            yield from check_small_file(source.folder, side, _CHANGED, "side files")


def _whole_source(folder: Store, manifest: Manifest, table: RankTable) -> SourceCheckpoint:
    """Return the whole tensors of a folder as a checkpoint, in model order like the source."""
    files = manifest.holder_files(manifest.num_ranks)
    shards = tuple(SourceFile(file.name, file.nbytes, file.data_start, b"") for file in files)
    columns = (table.names, table.dtypes, table.shapes, table.files, table.offsets)
    tensors = (
        SourceTensor(name, dtype, shape, file, Extent(offset, num_bytes(dtype, shape) or 0))
        for name, dtype, shape, file, offset in zip(*columns, strict=True)
    )
    in_order = tuple(sorted(tensors, key=lambda tensor: model_order(tensor.name)))
    return SourceCheckpoint(folder, shards, in_order)
