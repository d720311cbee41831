"""`copy`: copies the files of some or all ranks from one folder or store to another. `files` lists these files.

`apply_deltas` writes the result of applying deltas to a folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from relayout.checkpoint.converted import (
    CONVERTED,
    check_chunk,
    check_header,
    check_present,
    find_faults,
    find_manifest,
    find_manifest_blob,
    find_signature,
    names_of,
    read_chunk_digests,
    read_manifest,
    read_manifest_blob,
    read_record,
    sizes_of,
)
from relayout.checkpoint.delta import DeltaStore, Paths, read_deltas, with_deltas
from relayout.checkpoint.reuse import Contents, Reuse, ReusedRange, read_into
from relayout.checkpoint.trust import Trust, policy_over, trusted
from relayout.conversion.resume import other_option
from relayout.conversion.run import DEFAULT_MEMORY, DEFAULT_THREADS, share_memory
from relayout.conversion.sidecar import find_other_files, modes_of, put_index
from relayout.core.arguments import folder_text, ranks_text
from relayout.core.arguments import ranks as parse_ranks
from relayout.core.digests import OrderedDigests, new_blake3, xxh3_hex
from relayout.core.extents import Extent, split
from relayout.core.workers import Stop, Workers
from relayout.errors import FormatError, PlanError
from relayout.format.index import (
    MANIFEST_NAME,
    SIGNATURE_NAME,
    IndexedFile,
    Manifest,
    chunks_of,
    chunks_over,
)
from relayout.format.manifest import (
    compact_json,
    dump_manifest,
    parse_manifest,
)
from relayout.publish.folder import remove_leftovers
from relayout.publish.output import Output, OutputSpec
from relayout.publish.publishers import StoreDestination
from relayout.reporting import Progress, Result, reporting
from relayout.storage.cloud.part_copies import CopySource, PartCopies, is_possible, versions_in
from relayout.storage.reading import OpenFiles
from relayout.storage.stores import Access, ReadableFile, Store, WritableFile, find_input, find_store, scheme_of
from relayout.storage.system import Buffer, peak_nbytes

Ranks = str | Iterable[int] | None
"""Ranks, such as range(4) or "0-3". None: all that the folder has."""


@dataclass(frozen=True, slots=True)
class NeededFile:
    """A file of a converted folder."""

    name: str
    """Path relative to the folder."""
    nbytes: int


@dataclass(frozen=True, slots=True, repr=False)
class NeededFiles(Result):
    """The files of a converted folder that some ranks need."""

    path: str
    num_ranks: int
    """The tensor-parallel degree."""
    ranks: tuple[int, ...]
    nbytes: int
    """Bytes of all these files."""
    files: tuple[NeededFile, ...]
    """The files. relayout.json is last, so a copy in this order is complete once it has relayout.json."""
    unneeded: tuple[str, ...]
    """Names of the other files in the folder's records, which only other ranks need."""


@dataclass(frozen=True, slots=True, repr=False)
class CopyResult(Result):
    """Result of `copy`."""

    output: str
    num_ranks: int
    """The tensor-parallel degree."""
    ranks: tuple[int, ...]
    """The ranks that the output has."""
    num_files: int
    """Number of rank files."""
    nbytes: int
    """Bytes of the rank files."""
    resumed_nbytes: int
    """Bytes of files that an earlier, interrupted copy had finished. They were not copied again."""
    reused_nbytes: int
    """Bytes of the rank files that were read from an older folder instead of the source."""
    shared_nbytes: int
    """Bytes of `reused_nbytes` that were not written: the output shares blocks with the older folder (reflinks)."""
    copied_nbytes: int
    """Bytes of the rank files that the server of a bucket copied from an older folder, so that they were not sent."""
    seconds: float
    peak_nbytes: int
    """Peak resident memory of the process, in bytes."""


@dataclass(frozen=True, slots=True, repr=False)
class AlreadyThere(Result):
    """Result of a command that did nothing, because an identical output exists."""

    output: str
    already_there: bool = True


def already_there(output: str) -> AlreadyThere:
    """Return the result for an identical existing output; delete leftovers of an interrupted replacement first."""
    if scheme_of(output) is None:
        remove_leftovers(Path(output))
    return AlreadyThere(output)


def files(path: str | os.PathLike[str], *, ranks: Ranks = None) -> NeededFiles:
    """List the files of a converted folder that ranks need, for tools that copy files.

    Reads the manifest and the source record.

    Args:
        path: the converted folder, or its URL.
        ranks: ranks, such as range(4) or "0-3". None: all that the folder has.

    Raises:
        FormatError: the folder is damaged, or a file is missing.
        PlanError: a rank is not in the folder.
        OSError: a request failed.

    Example:
        >>> import relayout
        >>> [file.name for file in relayout.files("llama-3.1-8b-tp8", ranks=[3]).files][-1]
        'relayout.json'
    """
    folder = find_input(path)
    blob, manifest, kept = _kept(folder, ranks)
    weights = {file.name: file.nbytes for file in kept.files}
    record = read_record(folder, manifest)
    signature = [] if find_signature(folder, blob) is None else [SIGNATURE_NAME]
    others = names_of(kept, record).union(signature) - weights.keys()
    sizes = weights | sizes_of(folder, others)
    in_order = sorted(sizes, key=lambda name: (name == MANIFEST_NAME, name))
    named = tuple(NeededFile(name, sizes[name]) for name in in_order)
    unneeded = tuple(sorted(names_of(manifest, record) - sizes.keys()))
    return NeededFiles(str(path), manifest.num_ranks, kept.present, sum(sizes.values()), named, unneeded)


def copy(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    ranks: Ranks = None,
    reuse: str | os.PathLike[str] | None = None,
    force: bool = False,
    trust: Trust = None,
    threads: int = DEFAULT_THREADS,
    memory: int | str = DEFAULT_MEMORY,
    scratch: str | os.PathLike[str] | None = None,
    progress: Progress = None,
) -> CopyResult:
    """Copy the files of a converted folder that ranks need. Every byte is compared with its digest during the copy.

    Args:
        path: the converted folder, or its URL. Never written to.
        output: the folder or prefix to create. It appears complete or not at all; its manifest lists its ranks.
        ranks: ranks, such as range(4) or "0-3". None: all that the folder has.
        reuse: an older version of the converted folder, or its URL, near the output. Bytes that it contains are read
            from there instead of from `path`, and compared with the digests of `path`; if only `path` is local, they
            are read there. If both this folder and the output are in S3, the server copies them, and they are not
            sent. Never written to. None: with `force`, the output that is replaced; otherwise nothing is reused.
        force: replace an output that relayout wrote, or discard an interrupted copy with other contents.
        trust: policy of accepted signers, as for `load`.
        threads: threads that read, hash and write.
        memory: bytes that they may use, or text such as "512MiB".
        scratch: folder for files before their upload to a bucket; default is the system's temporary folder (TMPDIR).
        progress: True for a bar on stderr, or a function that is called with (bytes done, total bytes).

    Raises:
        FormatError: the folder is damaged.
        PlanError: a rank is not in the folder, or the output cannot be written or replaced.
        OSError: reading or writing failed.

    If the copy fails or is interrupted, complete files are kept: in a hidden folder next to the output, or in the
    object store. The same call resumes with the remaining files.

    Example:
        >>> import relayout
        >>> relayout.copy("llama-3.1-8b-tp8", "of-this-node", ranks="0-3").ranks
        (0, 1, 2, 3)
    """
    source = trusted(find_input(path).snapshot(), trust)
    older = _find_older(source, reuse, output, force=force)
    return copy_from(source, [source], output, ranks, force, threads, memory, progress, scratch, older)


@dataclass(frozen=True, slots=True)
class Older:
    """An older folder to reuse bytes of."""

    store: Store
    contents: Contents
    versions: Mapping[str, str] | None
    """ETags of its objects by name, for the output's server to copy from. None: that server cannot."""
    is_read: bool
    """True if bytes are read from it instead of from the source."""

    def copy_source(self, taken: ReusedRange, name: str) -> CopySource | None:
        """Return a range in the older file `name` for the server to copy; None if the file's version is unknown."""
        version = None if self.versions is None else self.versions.get(name)
        return None if version is None else CopySource(taken.extent, self.store.location(name), taken.offset, version)


def _find_older(
    source: Store, reuse: str | os.PathLike[str] | None, output: str | os.PathLike[str], *, force: bool
) -> Older | None:
    """Return the older folder to reuse bytes from; None if no folder can be used."""
    target = find_store(output)
    if reuse is not None:
        store = find_input(reuse).snapshot()
        contents = _contents_of(store, read_manifest(store))
        versions = versions_in(store) if is_possible(store, target) else None
        return Older(store, contents, versions, source.cost.is_remote or not store.cost.is_remote)
    if not force or (target.cost.is_remote and not is_possible(target, target)):
        return None
    try:  # A damaged output is not an error here: it will be replaced.
        store = target.snapshot()
        found = find_manifest(store)
        if found is None:
            return None
        contents = _contents_of(store, found)
        # Reading objects that are replaced meanwhile would gain nothing over reading the source.
        return Older(store, contents, versions_in(store) if target.cost.is_remote else None, not target.cost.is_remote)
    except (FormatError, OSError):
        return None


def _contents_of(store: Store, manifest: Manifest) -> Contents:
    return Contents.read(store, manifest, manifest.holders)


def differences_from_copy(
    path: str | os.PathLike[str], output: str | os.PathLike[str], *, ranks: Ranks = None, trust: Trust = None
) -> list[str] | None:
    """Return how the output differs from the result of `copy` with these arguments; None if it is missing or damaged.

    An empty list means: the manifest, which has the digests of all other files, and the signature equal those of the
    copy byte for byte; all files that they name exist (`find_faults`); and side files have their digests. Weights are
    not read: `verify` reads them.
    """
    source, target = trusted(find_input(path).snapshot(), trust), find_store(output)
    blob, manifest, kept = _kept(source, ranks)
    wanted = blob if kept is manifest else dump_manifest(kept)
    signature = find_signature(source, blob) if kept is manifest else None
    try:
        found = find_manifest_blob(target)
        if found is None:
            return None
        other = parse_manifest(found, target.location(MANIFEST_NAME))
    except FormatError:  # Damaged, as below.
        return None
    if find_faults(target, other):  # Replacing the output reports the faults, see `describe_output`.
        return None
    if found != wanted:
        return _other_fields(other, kept)
    differences = find_other_files(target, read_record(target, kept).side_files)
    if find_signature(target, wanted) != signature:
        differences.append(f"{target.location(SIGNATURE_NAME)}: is not the signature that the source has")
    return differences


_FIELDS = ("model_type", "num_ranks", "plan", "expert_parallel", "alignment", "dcp", "chunk_nbytes", "source_nbytes")


def _other_fields(found: Manifest, wanted: Manifest) -> list[str]:
    """Return the differences between two manifests: first the options, then ranks and weight files."""
    differences = [
        other_option(name, getattr(found, name), getattr(wanted, name))
        for name in _FIELDS
        if getattr(found, name) != getattr(wanted, name)
    ]
    if found.num_ranks == wanted.num_ranks and found.present != wanted.present:
        differences.append(f"it has ranks {ranks_text(found.present)}, expected ranks {ranks_text(wanted.present)}")
    there = {file.name: file for file in found.files}
    for file in wanted.files:
        other = there.pop(file.name, None)
        if other is None:
            differences.append(f"it lacks {file.name}")
        elif other.tensors_digest != file.tensors_digest:
            differences.append(f"{file.name} has other tensors")
    differences += [f"it has {name}" for name in there]
    return differences or [f"{MANIFEST_NAME}: differs"]


def apply_deltas(
    base: str | os.PathLike[str],
    deltas: Paths,
    output: str | os.PathLike[str],
    *,
    force: bool = False,
    threads: int = DEFAULT_THREADS,
    scratch: str | os.PathLike[str] | None = None,
    progress: Progress = None,
) -> CopyResult:
    """Write the result of applying deltas to a converted checkpoint.

    It equals, byte for byte, the newer folder that the last delta was generated from.

    Args:
        base: the converted folder, or its URL, that the first delta applies to.
        deltas: folders that `delta` wrote, or their URLs. Each applies to the result of the previous ones.
        output: the folder to create. It appears complete, with every digest verified, or not at all.
        force: replace an output folder that relayout converted, or discard an interrupted output with other contents.
        threads: threads that read, change and write; each uses about 8 MiB.
        scratch: folder for files before their upload, as for `copy`.
        progress: True for a bar on stderr, or a function that is called with (bytes done, total bytes).

    Raises:
        FormatError: the base or a delta is damaged.
        PlanError: a delta applies to another checkpoint; or `output` cannot be written or replaced.
        OSError: reading or writing failed.

    If it fails or is interrupted, the same call resumes, as with `copy`.

    Example:
        >>> import relayout
        >>> relayout.apply_deltas("step-1", ["step-1-to-2"], "made").ranks
        (0, 1, 2, 3, 4, 5, 6, 7)
    """
    found = trusted(find_input(base).snapshot(), None)
    made = with_deltas(found, read_deltas(deltas, policy_over(found)))
    if not isinstance(made, DeltaStore):
        raise PlanError("no delta to apply", code="option")
    inputs = [found, *(one.store for one in made.deltas)]
    return copy_from(made, inputs, output, None, force, threads, DEFAULT_MEMORY, progress, scratch)


def copy_from(
    source: Store,
    inputs: Sequence[Store],
    output: str | os.PathLike[str],
    ranks: Ranks,
    force: bool,
    threads: int,
    memory: int | str,
    progress: Progress,
    scratch: str | os.PathLike[str] | None = None,
    older: Older | None = None,
) -> CopyResult:
    """Copy, like `copy`, from a store with files that do not change.

    Args:
        inputs: the stores that the bytes of `source` come from.
        older: an older folder to reuse equal bytes from.
    """
    started = time.monotonic()
    target = find_store(output)
    threads, piece_nbytes = share_memory(threads, memory, target)
    blob, manifest, kept = _kept(source, ranks)
    record = read_record(source, manifest)
    place = StoreDestination(target, CONVERTED, force)
    for store in inputs:
        place.check(store)
    nbytes = sum(file.nbytes for file in kept.files)
    reuse = copies = None
    if older is not None:
        reuse = Reuse(Contents.read(source, manifest, kept.holders), older.store, older.contents)
        copies = None if older.versions is None else PartCopies(partial(_copy_sources, older, reuse))
    work = OutputSpec(
        what=f"a copy of {source}",
        fingerprint=xxh3_hex(compact_json(["copy", xxh3_hex(blob), kept.present])),
        others=[*names_of(kept, record), SIGNATURE_NAME],
        modes=modes_of(inputs, [file.name for file in kept.files]),
        scratch=folder_text(scratch, "scratch"),
        copies=copies,
    )
    with place.begin(work) as made:
        copying = _RankFileCopier(source, manifest, kept, made, reuse if older is not None and older.is_read else None)
        others_nbytes = sum(side.nbytes for side in record.side_files) + len(blob)
        resumed_nbytes = copying.copy_parts(
            threads, min(piece_nbytes, source.cost.request_nbytes), others_nbytes, progress
        )
        put_index(source, made, manifest, kept, record, copying.digests)
        signature = find_signature(source, blob) if kept is manifest else None  # It does not fit another manifest.
        if signature is not None:
            made.put(SIGNATURE_NAME, [signature])
        made.put(MANIFEST_NAME, [blob if kept is manifest else dump_manifest(kept)])
    return CopyResult(
        output=str(target),
        num_ranks=manifest.num_ranks,
        ranks=kept.present,
        num_files=len(kept.files),
        nbytes=nbytes,
        resumed_nbytes=resumed_nbytes,
        reused_nbytes=0 if reuse is None else reuse.nbytes,
        shared_nbytes=0 if reuse is None else reuse.shared_nbytes,
        copied_nbytes=0 if copies is None else copies.nbytes,
        seconds=time.monotonic() - started,
        peak_nbytes=peak_nbytes(),
    )


def _copy_sources(older: Older, reuse: Reuse, name: str) -> list[CopySource]:
    """Return the ranges of a file that a server may copy; see `PartCopies`."""
    found = (older.copy_source(taken, older_name) for taken, older_name in reuse.taken(name))
    return [source for source in found if source is not None]


def _kept(folder: Store, ranks: Ranks) -> tuple[bytes, Manifest, Manifest]:
    """Return the manifest of a folder, as stored and parsed, and the manifest of a copy of these ranks."""
    blob = read_manifest_blob(folder)
    manifest = parse_manifest(blob, folder.location(MANIFEST_NAME))
    if ranks is None:
        return blob, manifest, manifest
    wanted = parse_ranks(ranks, manifest.num_ranks)
    check_present(folder, manifest, wanted)
    return blob, manifest, manifest if wanted == manifest.present else manifest.only(wanted)


class _RankFileCopier:
    """Copies rank files, and compares the digest of every chunk."""

    def __init__(
        self, source: Store, manifest: Manifest, kept: Manifest, output: Output, reuse: Reuse | None = None
    ) -> None:
        self._source = source
        self._output = output
        self._chunk_nbytes = manifest.chunk_nbytes
        self._files: tuple[IndexedFile, ...] = kept.files
        self._reuse = reuse
        by_name = {file.name: index for index, file in enumerate(manifest.files)}
        self._numbers = [by_name[file.name] for file in kept.files]
        """The number of each copied file in the source's manifest."""
        self.digests = [read_chunk_digests(source, manifest, number) for number in self._numbers]
        """For each file, the digests of its chunks."""
        self._hashes = OrderedDigests(Stop(), new_blake3)
        self._inputs = OpenFiles(self._open_input)
        self._outputs = OpenFiles(self._open_output, num_descriptors=2)

    def copy_parts(self, threads: int, piece_nbytes: int, others_nbytes: int, progress: Progress) -> int:
        """Copy each file that the output does not have yet; return the number of bytes that it had before.

        Args:
            others_nbytes: bytes that are written in addition to these files.
        """
        sizes = [file.nbytes - file.data_start for file in self._files]
        kept = {index for index in range(len(sizes)) if self._output.kept(_part_name(index)) is not None}
        left = [self._files[index].nbytes for index in range(len(sizes)) if index not in kept]
        self._output.check_space(sum(left) + sum(left) // 2**16 + others_nbytes, max(left, default=0))
        done = resumed_nbytes = sum(sizes[index] for index in kept)
        reused = nullcontext() if self._reuse is None else self._reuse
        with reporting(progress, "copying", sum(sizes)) as report, self._inputs, self._outputs, reused:
            report(done)
            for index in sorted(set(range(len(sizes))) - kept):
                file = self._files[index]
                chunks = chunks_of(file.data_start, file.nbytes, self._chunk_nbytes)
                pieces = ((index, piece) for chunk in chunks for piece in split(chunk, piece_nbytes))
                stop = Stop()
                self._hashes = OrderedDigests(stop, new_blake3)
                Workers(threads, pieces, _Buffers, self._copy, stop).run(report.after(done))
                self._complete(index)
                self._output.keep(_part_name(index), b"")
                done += sizes[index]
        return resumed_nbytes

    def _open_input(self, index: int) -> ReadableFile:
        file = self._files[index]
        return self._source.open(file.name, file.nbytes, access=Access.ONCE)

    def _open_output(self, index: int) -> WritableFile:
        file = self._files[index]
        return self._output.write(file.name, file.nbytes)

    def _copy(self, memory: _Buffers, item: tuple[int, Extent]) -> int:
        index, piece = item
        file = self._files[index]
        blocks = piece.aligned()  # The output is written in aligned blocks.
        there = memory.bytes.reserve(blocks.nbytes)
        view = there[piece.offset - blocks.offset : piece.end - blocks.offset]
        if self._reuse is not None:
            with self._outputs.use(index) as output:
                if self._reuse.clone(self._numbers[index], piece, output, view):
                    return piece.nbytes
        is_verified = self._reused(index, piece, view, memory.scratch)
        if not is_verified:
            with self._inputs.use(index) as opened:
                wanted = piece.aligned(opened.alignment)
                opened.read(wanted.offset, there[wanted.offset - blocks.offset : wanted.end - blocks.offset])
        with self._outputs.use(index) as output:
            output.write(piece.offset, view, piece.offset - blocks.offset)
        if is_verified:
            return piece.nbytes
        for number, chunk, part in chunks_over(piece, file.data_start, file.nbytes, self._chunk_nbytes):
            inside = view[part.offset - piece.offset : part.end - piece.offset]
            digest = self._hashes.update((index, number), part.offset - chunk.offset, inside, chunk.nbytes)
            if digest is not None:
                check_chunk(digest, self.digests[index], number, chunk, self._source.location(file.name))
        return piece.nbytes

    def _reused(self, index: int, piece: Extent, view: memoryview, scratch: Buffer) -> bool:
        """Fill `view` with a chunk or the header, as far as an older folder has it; return False if there is none."""
        if self._reuse is None:
            return False

        def rest(extent: Extent, part: memoryview) -> None:
            with self._inputs.use(index) as opened:
                read_into(opened, extent, part, scratch)

        return self._reuse.fill(self._numbers[index], piece, view, scratch, rest)

    def _complete(self, index: int) -> None:
        """Copy the header of a file, after all other bytes were copied."""
        file = self._files[index]
        head = memoryview(bytearray(file.data_start))
        if not self._reused(index, Extent(0, file.data_start), head, scratch := Buffer()):
            with self._inputs.use(index) as opened:
                read_into(opened, Extent(0, file.data_start), head, scratch)
        check_header(head, file.header_digest, self._source.location(file.name))
        self._output.head(file.name, bytes(head), file.nbytes)


class _Buffers:
    """Buffers of one thread."""

    def __init__(self) -> None:
        self.bytes = Buffer()
        """For the bytes that are copied."""
        self.scratch = Buffer()
        """For reads that direct I/O cannot place in `bytes`."""


def _part_name(index: int) -> str:
    """Return the name of a file as a part of an output."""
    return f"file-{index}"
