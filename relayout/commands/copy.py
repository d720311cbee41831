"""`copy`: the files of some ranks, or of all, from one folder or store to another. `files`: which these are.

`apply` copies a folder as deltas change it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
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
from relayout.checkpoint.reuse import Contents, Reuse, read_into
from relayout.checkpoint.trust import Trust, policy_over, trusted
from relayout.conversion.resume import other_option
from relayout.conversion.run import DEFAULT_MEMORY, DEFAULT_THREADS, share_memory
from relayout.conversion.sidecar import find_other_files, modes_of, put_index
from relayout.core.arguments import folder_text, ranks_text
from relayout.core.arguments import ranks as parse_ranks
from relayout.core.digests import OrderedDigests, digest_hex, new_proof
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
from relayout.publish.output import Output, Work
from relayout.publish.publishers import StoreDestination
from relayout.reporting import Progress, Result, reporting
from relayout.storage.reading import OpenFiles
from relayout.storage.stores import Access, ReadableFile, Store, WritableFile, find_input, find_store, scheme_of
from relayout.storage.system import Buffer, peak_nbytes

Ranks = str | Iterable[int] | None
"""Ranks, such as range(4) or "0-3"; None: all that the folder has."""


@dataclass(frozen=True, slots=True)
class NeededFile:
    """A file of a converted folder."""

    name: str
    """Relative to the folder."""
    nbytes: int


@dataclass(frozen=True, slots=True, repr=False)
class NeededFiles(Result):
    """What ranks need of a converted folder."""

    path: str
    num_ranks: int
    """The tensor-parallel degree."""
    ranks: tuple[int, ...]
    nbytes: int
    """Bytes of all these files."""
    files: tuple[NeededFile, ...]
    """relayout.json last, so that a copy in this order is complete when it has that."""
    unneeded: tuple[str, ...]
    """Names of the other files of the folder's records: those of other ranks."""


@dataclass(frozen=True, slots=True, repr=False)
class Copied(Result):
    """What `copy` did."""

    output: str
    num_ranks: int
    """The tensor-parallel degree."""
    ranks: tuple[int, ...]
    """The ranks that the output has."""
    num_files: int
    """Rank files."""
    nbytes: int
    """Bytes of the rank files."""
    resumed_nbytes: int
    """Bytes of the files that an interrupted copy had finished: these were not copied again."""
    reused_nbytes: int
    """Bytes of the rank files that came from an older folder instead of the source."""
    seconds: float
    peak_nbytes: int
    """The most memory that the process ever held (resident)."""


@dataclass(frozen=True, slots=True, repr=False)
class AlreadyThere(Result):
    """Nothing was done, because the output is what would be made."""

    output: str
    already_there: bool = True


def already_there(output: str) -> AlreadyThere:
    """Say that nothing is to be done, and delete what a replacement left that was killed at its end."""
    if scheme_of(output) is None:
        remove_leftovers(Path(output))
    return AlreadyThere(output)


def files(path: str | os.PathLike[str], *, ranks: Ranks = None) -> NeededFiles:
    """The files that ranks need of a converted folder, for tools that copy files. Reads manifest and source record.

    Args:
        path: the converted folder, or its URL.
        ranks: such as range(4) or "0-3"; None: all that the folder has.

    Raises:
        FormatError: the folder is damaged, or a file is missing.
        PlanError: the folder lacks a rank.
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
) -> Copied:
    """Copy what ranks need of a converted folder. Every byte is compared with its digest while it passes.

    Args:
        path: the converted folder, or its URL. Never written to.
        output: the folder or prefix to make. It appears complete or not at all, and says which ranks it has.
        ranks: such as range(4) or "0-3"; None: all that the folder has.
        reuse: an older version of the converted folder, or its URL, near the output. Bytes that it has are read from
            there instead of from `path`, and compared with the digests of `path`. Never written to. None: with `force`,
            the local output that is replaced; else nothing is reused.
        force: replace an output that relayout wrote, or discard an interrupted attempt at another.
        trust: whose signature is wanted, as for `load`.
        threads: threads that read, hash and write.
        memory: bytes that they may use, also as text, such as "512MiB".
        scratch: the folder for files on their way to a bucket; default is that of temporary files (TMPDIR).
        progress: True for a bar on stderr, or a function that is called with (bytes done, total bytes).

    Raises:
        FormatError: the folder is damaged.
        PlanError: the folder lacks a rank, or the output cannot be written or replaced.
        OSError: reading or writing failed.

    If it fails or is interrupted, the files that are complete stay: in a hidden folder beside the output, or in the
    object store. The same call resumes, and copies the others.

    Example:
        >>> import relayout
        >>> relayout.copy("llama-3.1-8b-tp8", "of-this-node", ranks="0-3").ranks
        (0, 1, 2, 3)
    """
    source = trusted(find_input(path).snapshot(), trust)
    older = _find_older(reuse, output, force=force)
    return copy_from(source, [source], output, ranks, force, threads, memory, progress, scratch, older)


def _find_older(
    reuse: str | os.PathLike[str] | None, output: str | os.PathLike[str], *, force: bool
) -> tuple[Store, Contents] | None:
    """Return the older folder that bytes are taken from, and its index; None: there is none."""
    if reuse is not None:
        store = find_input(reuse).snapshot()
        manifest = read_manifest(store)
        return store, Contents.read(store, manifest, manifest.holders)
    store = find_store(output)
    if not force or store.cost.is_remote:
        return None
    try:  # What is wrong with it is no error: it is to be replaced.
        found = find_manifest(store)
        return None if found is None else (store, Contents.read(store, found, found.holders))
    except (FormatError, OSError):
        return None


def differences_from_copy(
    path: str | os.PathLike[str], output: str | os.PathLike[str], *, ranks: Ranks = None, trust: Trust = None
) -> list[str] | None:
    """How the output differs from what `copy` with these arguments would make; None: it is not there, or damaged.

    If there are no differences, this proves that: its manifest, which has the digests of all else, and its signature
    are those of the copy byte for byte; and what they name is there (`find_faults`), side files with their digests.
    Weights are not read: `verify` does.
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
    except FormatError:  # As below.
        return None
    if find_faults(target, other):  # Whoever is to replace it says so, see `describe_output`.
        return None
    if found != wanted:
        return _other_fields(other, kept)
    differences = find_other_files(target, read_record(target, kept).side_files)
    if find_signature(target, wanted) != signature:
        differences.append(f"{target.location(SIGNATURE_NAME)}: is not the signature that the source has")
    return differences


_FIELDS = ("model_type", "num_ranks", "plan", "expert_parallel", "alignment", "dcp", "chunk_nbytes", "source_nbytes")


def _other_fields(found: Manifest, wanted: Manifest) -> list[str]:
    """How a manifest differs from another one: what a person decides, weight files, and only then what follows."""
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
) -> Copied:
    """Write the folder that deltas make of a converted checkpoint: byte for byte the one that they were made from.

    Args:
        base: the converted folder, or its URL, that the first delta applies to.
        deltas: folders that `delta` wrote, or their URLs; each applies to what those before it make.
        output: the folder to create. It is complete, with every digest compared, or absent.
        force: replace an output folder that relayout converted, or discard an interrupted attempt at another.
        threads: threads that read, change and write: some 8 MiB for each.
        scratch: as for `copy`.
        progress: True for a bar on stderr, or a function that is called with (bytes done, total bytes).

    Raises:
        FormatError: the base or a delta is damaged.
        PlanError: a delta applies to another checkpoint; or `output` cannot be written or replaced.
        OSError: reading or writing failed.

    If it fails or is interrupted, the same call resumes, as of `copy`.

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
    older: tuple[Store, Contents] | None = None,
) -> Copied:
    """Copy from a store of which no file changes, as `copy` does; `inputs` are those that its bytes come from.

    Args:
        older: a folder whose bytes are taken where they are the same, and its index.
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
    work = Work(
        what=f"a copy of {source}",
        fingerprint=digest_hex(compact_json(["copy", digest_hex(blob), kept.present])),
        others=[*names_of(kept, record), SIGNATURE_NAME],
        modes=modes_of(inputs, [file.name for file in kept.files]),
        scratch=folder_text(scratch, "scratch"),
    )
    with place.begin(work) as made:
        reuse = None if older is None else Reuse(Contents.read(source, manifest, kept.holders), *older)
        copying = _Copying(source, manifest, kept, made, reuse)
        others_nbytes = sum(side.nbytes for side in record.side_files) + len(blob)
        resumed_nbytes = copying.copy_parts(
            threads, min(piece_nbytes, source.cost.request_nbytes), others_nbytes, progress
        )
        put_index(source, made, manifest, kept, record, copying.digests)
        signature = find_signature(source, blob) if kept is manifest else None  # Of another manifest it is none.
        if signature is not None:
            made.put(SIGNATURE_NAME, [signature])
        made.put(MANIFEST_NAME, [blob if kept is manifest else dump_manifest(kept)])
    return Copied(
        output=str(target),
        num_ranks=manifest.num_ranks,
        ranks=kept.present,
        num_files=len(kept.files),
        nbytes=nbytes,
        resumed_nbytes=resumed_nbytes,
        reused_nbytes=0 if reuse is None else reuse.nbytes,
        seconds=time.monotonic() - started,
        peak_nbytes=peak_nbytes(),
    )


def _kept(folder: Store, ranks: Ranks) -> tuple[bytes, Manifest, Manifest]:
    """The manifest of a folder, as stored and parsed, and that of a copy of these ranks."""
    blob = read_manifest_blob(folder)
    manifest = parse_manifest(blob, folder.location(MANIFEST_NAME))
    if ranks is None:
        return blob, manifest, manifest
    wanted = parse_ranks(ranks, manifest.num_ranks)
    check_present(folder, manifest, wanted)
    return blob, manifest, manifest if wanted == manifest.present else manifest.only(wanted)


class _Copying:
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
        """The number of each file in the source's manifest."""
        self.digests = [read_chunk_digests(source, manifest, number) for number in self._numbers]
        """The digests of the chunks of each file."""
        self._hashes = OrderedDigests(Stop(), new_proof)
        self._inputs = OpenFiles(self._open_input)
        self._outputs = OpenFiles(self._open_output, num_descriptors=2)

    def copy_parts(self, threads: int, piece_nbytes: int, others_nbytes: int, progress: Progress) -> int:
        """Copy each file as a part of the output, but for those that are there; returns how many bytes were.

        Args:
            others_nbytes: bytes of what is written beside these files.
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
                self._hashes = OrderedDigests(stop, new_proof)
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
        blocks = piece.aligned()  # As the output is written.
        there = memory.bytes.reserve(blocks.nbytes)
        view = there[piece.offset - blocks.offset : piece.end - blocks.offset]
        is_proven = self._reused(index, piece, view, memory.scratch)
        if not is_proven:
            with self._inputs.use(index) as opened:
                wanted = piece.aligned(opened.alignment)
                opened.read(wanted.offset, there[wanted.offset - blocks.offset : wanted.end - blocks.offset])
        with self._outputs.use(index) as output:
            output.write(piece.offset, view, piece.offset - blocks.offset)
        if is_proven:
            return piece.nbytes
        for number, chunk, part in chunks_over(piece, file.data_start, file.nbytes, self._chunk_nbytes):
            inside = view[part.offset - piece.offset : part.end - piece.offset]
            digest = self._hashes.update((index, number), part.offset - chunk.offset, inside, chunk.nbytes)
            if digest is not None:
                check_chunk(digest, self.digests[index], number, chunk, self._source.location(file.name))
        return piece.nbytes

    def _reused(self, index: int, piece: Extent, view: memoryview, scratch: Buffer) -> bool:
        """Fill memory with a chunk, or the header, as far as an older folder has it. False: it must be read whole."""
        if self._reuse is None:
            return False

        def rest(extent: Extent, part: memoryview) -> None:
            with self._inputs.use(index) as opened:
                read_into(opened, extent, part, scratch)

        return self._reuse.fill(self._numbers[index], piece, view, scratch, rest)

    def _complete(self, index: int) -> None:
        """Copy the header of a file, of which all else is copied."""
        file = self._files[index]
        head = memoryview(bytearray(file.data_start))
        if not self._reused(index, Extent(0, file.data_start), head, scratch := Buffer()):
            with self._inputs.use(index) as opened:
                read_into(opened, Extent(0, file.data_start), head, scratch)
        check_header(head, file.header_digest, self._source.location(file.name))
        self._output.head(file.name, bytes(head), file.nbytes)


class _Buffers:
    """Memory of one thread."""

    def __init__(self) -> None:
        self.bytes = Buffer()
        """For what is copied."""
        self.scratch = Buffer()
        """For reads that direct I/O cannot place there."""


def _part_name(index: int) -> str:
    """The name of a file as a part of an output."""
    return f"file-{index}"
