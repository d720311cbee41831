"""`delta`: writes the changes between two converted checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np

from relayout.checkpoint.converted import (
    MAX_SIGNATURE_NBYTES,
    check_chunk,
    check_header,
    digests_of_small,
    find_signature,
    read_chunk_digests,
    read_manifest_blob,
    read_packed_digests,
    read_record,
    read_small,
)
from relayout.checkpoint.delta import DELTA_OUTPUT
from relayout.checkpoint.source import read_shard
from relayout.conversion.changes import EncodedPiece, widths_in, write_pieces
from relayout.conversion.run import DEFAULT_MEMORY, DEFAULT_THREADS, share_memory
from relayout.conversion.sidecar import copy_side_file, modes_of
from relayout.core.arguments import folder_text
from relayout.core.digests import BLAKE3_NBYTES, blake3_hex, xxh3_hex
from relayout.core.extents import Extent
from relayout.core.workers import each
from relayout.errors import PlanError
from relayout.format.delta import (
    CHANGED_DIGESTS_NAME,
    NEW,
    NEW_MANIFEST_NAME,
    ChangedDigests,
    DeltaFile,
    DeltaManifest,
    delta_name,
    dump_changed_digests,
    dump_delta,
    encode,
    layout_difference,
    piece_of,
)
from relayout.format.index import MANIFEST_NAME, SIGNATURE_NAME, VERSION, Manifest
from relayout.format.manifest import MAX_MANIFEST_NBYTES, compress, content_of, parse_manifest
from relayout.format.safetensors import Header
from relayout.format.source_record import SideFile, SourceRecord
from relayout.publish.output import Output, OutputSpec
from relayout.publish.publishers import StoreDestination
from relayout.reporting import Progress, Result, reporting
from relayout.storage.stores import Access, ReadableFile, Store, find_input, find_store
from relayout.storage.system import Buffer, peak_nbytes

_READ_AT_ONCE = 4
"""Number of chunks that a thread reads in one request."""
_AHEAD = 2
"""Number of reads per thread with changes held in memory before they are written."""


@dataclass(frozen=True, slots=True, repr=False)
class DeltaResult(Result):
    """Result of `delta`."""

    output: str
    num_files: int
    """Number of weight files."""
    nbytes: int
    """Bytes of all weight files of the new checkpoint."""
    delta_nbytes: int
    """Bytes that the delta stores for changes in weight files."""
    seconds: float
    peak_nbytes: int
    """Peak resident memory of the process, in bytes."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two converted checkpoints that are compared."""

    store: Store
    blob: bytes
    """The manifest as stored, in bytes."""
    manifest: Manifest
    record: SourceRecord

    @staticmethod
    def read(path: str | os.PathLike[str]) -> _Side:
        store = find_input(path).snapshot()
        blob = read_manifest_blob(store)
        manifest = parse_manifest(blob, store.location(MANIFEST_NAME))
        return _Side(store, blob, manifest, read_record(store, manifest))

    def header(self, index: int) -> tuple[bytes, Header]:
        """Return the header of a weight file, as stored and parsed."""
        file = self.manifest.files[index]
        shard, header = read_shard(self.store, file.name)
        check_header(shard.header, file.header_digest, self.store.location(file.name))
        return shard.header, header


def delta(
    old: str | os.PathLike[str],
    new: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    force: bool = False,
    threads: int = DEFAULT_THREADS,
    scratch: str | os.PathLike[str] | None = None,
    progress: Progress = None,
) -> DeltaResult:
    """Write the changes between two converted checkpoints of one layout, such as two training steps.

    Unchanged elements take almost no space, wherever they are. Memory: about 12 MiB per thread.

    Args:
        old, new: converted folders, or their URLs, with equal tensors and the same layout.
        output: the folder to create. It appears complete or not at all.
        force: replace an output folder that this function wrote.
        threads: threads that read, compare and compress.
        scratch: folder for files before their upload to a bucket; default is the system's temporary folder (TMPDIR).
        progress: True for a bar on stderr, or a function that is called with (bytes done, total bytes).

    Raises:
        FormatError: one of the folders is damaged.
        PlanError: the folders have different layouts, or `output` cannot be written or replaced.
        OSError: reading or writing failed; the output is deleted.

    Example:
        >>> import relayout
        >>> relayout.delta("step-1", "step-2", "changes").num_files
        8
    """
    started = time.monotonic()
    threads, _ = share_memory(threads, DEFAULT_MEMORY)
    before, after, target = _Side.read(old), _Side.read(new), find_store(output)
    _check_layout(before, after)
    files = after.manifest.files
    total = sum(file.nbytes for file in files)
    place = StoreDestination(target, DELTA_OUTPUT, force)
    for side in (before, after):
        place.check(side.store)
    others = _others(before, after)
    work = OutputSpec(
        what=f"what changed from {before.store} to {after.store}",
        fingerprint=xxh3_hex(b"delta" + before.blob + after.blob),
        others=[
            *(delta_name(file.name) for file in files),
            *(NEW + name for name in others),
            CHANGED_DIGESTS_NAME,
            NEW_MANIFEST_NAME,
            MANIFEST_NAME,
        ],
        modes=modes_of([before.store, after.store], [file.name for file in files]),
        is_resumable=False,
        scratch=folder_text(scratch, "scratch"),
    )
    with place.begin(work) as made:
        written, done = [], 0
        with reporting(progress, "comparing", total) as report:
            for index, file in enumerate(files):
                written.append(_write_changes(before, after, index, made, threads, report.after(done)))
                done += file.nbytes
                report(done)
        _put_others(after, others, made)
        manifest = DeltaManifest(
            generator=f"relayout {VERSION}",
            base=content_of(before.blob),
            makes=content_of(after.blob),
            files=tuple(one for one in written if one is not None),
            digests=_put_digests(before, after, made),
            others=tuple(others),
        )
        made.put(NEW_MANIFEST_NAME, [compress(after.blob, MAX_MANIFEST_NBYTES)])
        made.put(MANIFEST_NAME, [dump_delta(manifest)])
    return DeltaResult(
        output=str(target),
        num_files=len(files),
        nbytes=total,
        delta_nbytes=sum(file.nbytes for file in manifest.files),
        seconds=time.monotonic() - started,
        peak_nbytes=peak_nbytes(),
    )


def _check_layout(before: _Side, after: _Side) -> None:
    difference = layout_difference(before.manifest, after.manifest)
    if difference is not None:
        what = f"a delta needs the layout of {before.store}: {difference}"
        raise PlanError(what, path=str(after.store), code="option")


def _others(before: _Side, after: _Side) -> dict[str, SideFile | None]:
    """Return the new and changed files next to the weights: side files with their record entry, others with None.

    The others are files with a digest in the manifest, and the signature.
    """
    known, proofs = (digests_of_small(side.manifest) for side in (before, after))
    others: dict[str, SideFile | None] = {name: None for name, proof in proofs.items() if known.get(name) != proof}
    sides = {(side.name, side.nbytes, side.digest) for side in before.record.side_files}
    others |= {
        side.name: side for side in after.record.side_files if (side.name, side.nbytes, side.digest) not in sides
    }
    if find_signature(after.store, after.blob) is not None:  # So that the folder that `apply` writes has it, too.
        others[SIGNATURE_NAME] = None
    return others


def _put_others(after: _Side, others: Mapping[str, SideFile | None], made: Output) -> None:
    proofs = digests_of_small(after.manifest)
    for name, side in others.items():
        if side is not None:
            copy_side_file(after.store, made, name, side, NEW)
        elif name == SIGNATURE_NAME:
            made.put(NEW + name, [after.store.read(name, MAX_SIGNATURE_NBYTES)])
        else:
            made.put(NEW + name, [read_small(after.store, name, proofs[name])])


def _put_digests(before: _Side, after: _Side, made: Output) -> tuple[ChangedDigests, ...]:
    """Write the digests of changed tensors, and return the manifest entries for each holder and for the source."""
    found = [
        dump_changed_digests(*(read_packed_digests(side.store, side.manifest, holder) for side in (before, after)))
        for holder in (*after.manifest.holders, None)
    ]
    if any(stored for stored, _ in found):
        made.put(CHANGED_DIGESTS_NAME, [stored for stored, _ in found])
    return tuple(part for _, part in found)


def _write_changes(
    before: _Side, after: _Side, index: int, made: Output, threads: int, report: Callable[[int], None]
) -> DeltaFile | None:
    """Compare two versions of a weight file, and write the changes; None if the versions are equal."""
    file, sides = after.manifest.files[index], (before, after)
    digests = [read_chunk_digests(side.store, side.manifest, index) for side in sides]
    rows = [np.frombuffer(each_side, np.uint8).reshape(-1, BLAKE3_NBYTES) for each_side in digests]
    differing = np.flatnonzero((rows[0] != rows[1]).any(axis=1)).tolist()
    if not differing and before.manifest.files[index].header_digest == file.header_digest:
        return None
    headers, parsed = zip(*(side.header(index) for side in sides), strict=True)
    if parsed[0].tensors != parsed[1].tensors:
        what = f"has other tensors than {before.store.location(file.name)}"
        raise PlanError(what, path=after.store.location(file.name), code="option")

    piece, widths = partial(piece_of, file, after.manifest.chunk_nbytes), widths_in(parsed[1])
    where = [side.store.location(file.name) for side in sides]
    idle = [(Buffer(), Buffer(), Buffer()) for _ in range(threads)]
    """Buffers that are reused: allocating memory for each run would take longer than reading the run."""

    def compare(run: range) -> list[EncodedPiece]:
        """Return the changes in a run of neighboring chunks."""
        first, last = piece(1 + run[0]), piece(1 + run[-1])
        *buffers, scratch = taken = idle.pop()
        views = [
            _read(opened, Extent(first.offset, last.end - first.offset), buffer)
            for opened, buffer in zip(files, buffers, strict=True)
        ]
        found = []
        for chunk in run:
            extent = piece(1 + chunk)
            versions = [view[extent.offset - first.offset : extent.end - first.offset] for view in views]
            for version, stored, path in zip(versions, digests, where, strict=True):
                check_chunk(blake3_hex(version), stored, chunk, extent, path)
            change = np.frombuffer(scratch.reserve(extent.nbytes), np.uint8)
            old, new = (np.frombuffer(version, np.uint8) for version in versions)
            np.bitwise_xor(old, new, out=change)
            proof = digests[1][BLAKE3_NBYTES * chunk :][:BLAKE3_NBYTES].hex()
            found.append(EncodedPiece(1 + chunk, encode(change, widths.of(extent)), proof))
        idle.append(taken)
        return found

    def changes() -> Iterator[EncodedPiece]:
        head = np.bitwise_xor(*(np.frombuffer(header, np.uint8) for header in headers))
        yield EncodedPiece(0, encode(head, [(head.nbytes, 1)]), file.header_digest)
        runs = _runs(differing)
        for at in range(0, len(runs), _AHEAD * threads):
            group = runs[at : at + _AHEAD * threads]
            yield from chain.from_iterable(each(compare, group, threads))
            report(piece(1 + group[-1][-1]).end)

    with ExitStack() as stack:
        files = [stack.enter_context(side.store.open(file.name, file.nbytes, access=Access.ONCE)) for side in sides]
        return write_pieces(made, file.name, index, changes())


def _runs(chunks: Sequence[int]) -> list[range]:
    """Group chunks, in ascending order, into runs of neighbors that are read in one request."""
    runs: list[range] = []
    for chunk in chunks:
        if runs and runs[-1].stop == chunk and len(runs[-1]) < _READ_AT_ONCE:
            runs[-1] = range(runs[-1].start, chunk + 1)
        else:
            runs.append(range(chunk, chunk + 1))
    return runs


def _read(file: ReadableFile, extent: Extent, buffer: Buffer) -> memoryview:
    """Read bytes of a file into a buffer, at offsets and lengths that are aligned for direct I/O."""
    blocks = extent.aligned()
    view = buffer.reserve(blocks.nbytes)
    file.read(blocks.offset, view)
    return view[extent.offset - blocks.offset : extent.end - blocks.offset]
