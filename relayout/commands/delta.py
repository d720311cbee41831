"""`delta`: what changed between two converted checkpoints."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from relayout.checkpoint.converted import (
    check_chunk,
    check_header,
    names_of_index,
    read_chunk_digests,
    read_manifest_blob,
    read_record,
    read_table,
)
from relayout.checkpoint.delta import DELTA_OUTPUT
from relayout.checkpoint.source import read_shard
from relayout.conversion.changes import UNCHANGED, widths_in, write_pieces
from relayout.conversion.run import DEFAULT_MEMORY, DEFAULT_THREADS, share_memory
from relayout.conversion.sidecar import modes_of, put_index, put_tables
from relayout.core.arguments import folder_text
from relayout.core.digests import PROOF_NBYTES, digest_hex, proof_hex
from relayout.core.extents import Extent
from relayout.core.workers import each
from relayout.errors import PlanError
from relayout.format.delta import (
    NEW,
    OLD,
    DeltaFile,
    DeltaManifest,
    are_alike,
    delta_name,
    dump_delta,
    encode,
    layout_difference,
    pieces_of,
)
from relayout.format.index import MANIFEST_NAME, VERSION, Manifest
from relayout.format.manifest import content_of, parse_manifest
from relayout.format.safetensors import Header
from relayout.format.source_record import SourceRecord
from relayout.publish.output import Output, Work
from relayout.publish.publishers import StoreDestination
from relayout.reporting import Progress, Result, reporting
from relayout.storage.stores import Access, ReadableFile, Store, find_input, find_store
from relayout.storage.system import Buffer, peak_nbytes

_READ_AT_ONCE = 4
"""Chunks of a file that a thread reads at once."""
_AHEAD = 2
"""Reads of each thread whose changes are in memory before they are written."""


@dataclass(frozen=True, slots=True, repr=False)
class DeltaDone(Result):
    """What `delta` did."""

    output: str
    num_files: int
    """Weight files."""
    nbytes: int
    """Bytes of all weight files."""
    delta_nbytes: int
    """Bytes that the delta stores of what changed in them."""
    seconds: float
    peak_nbytes: int
    """Peak resident memory of the process."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two converted checkpoints."""

    store: Store
    blob: bytes
    """The manifest as stored."""
    manifest: Manifest
    record: SourceRecord

    @staticmethod
    def read(path: str | os.PathLike[str]) -> _Side:
        store = find_input(path).snapshot()
        blob = read_manifest_blob(store)
        manifest = parse_manifest(blob, store.location(MANIFEST_NAME))
        return _Side(store, blob, manifest, read_record(store, manifest))

    def header(self, index: int) -> tuple[bytes, Header]:
        """The header of a weight file, as stored and parsed."""
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
) -> DeltaDone:
    """Write what changed between two converted checkpoints of one layout, such as two steps of a training.

    An element that did not change costs nearly nothing, wherever it is. Memory: some 12 MiB for each thread.

    Args:
        old, new: converted folders, or their URLs: equal tensors, cut and stored alike.
        output: the folder to create. It is complete, or absent.
        force: replace an output folder that this function wrote.
        threads: threads that read, compare and compress.
        scratch: the folder for files on their way to a bucket; default is that of temporary files (TMPDIR).
        progress: True for a bar on stderr, or a function that is called with (bytes done, total bytes).

    Raises:
        FormatError: one of the folders is damaged.
        PlanError: they have different layouts; or `output` cannot be written or replaced.
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
    known = {(side.name, side.nbytes, side.digest) for side in before.record.side_files}
    changed = tuple(side for side in after.record.side_files if (side.name, side.nbytes, side.digest) not in known)
    tables = [entry.table for entry in before.manifest.holders.values()]
    work = Work(
        what=f"what changed from {before.store} to {after.store}",
        fingerprint=digest_hex(b"delta" + before.blob + after.blob),
        others=[
            *(delta_name(file.name) for file in files),
            *(OLD + name for name in (*tables, MANIFEST_NAME)),
            *(NEW + name for name in (*names_of_index(after.manifest), *(side.name for side in changed))),
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
        put_tables(before.store, made, before.manifest, OLD)
        digests = (read_chunk_digests(after.store, after.manifest, index) for index in range(len(files)))
        put_index(after.store, made, after.manifest, replace(after.record, side_files=changed), digests, NEW)
        made.put(OLD + MANIFEST_NAME, [before.blob])
        made.put(NEW + MANIFEST_NAME, [after.blob])
        manifest = DeltaManifest(
            generator=f"relayout {VERSION}",
            base=content_of(before.blob),
            makes=content_of(after.blob),
            files=tuple(written),
            side_files=tuple(side_file.name for side_file in changed),
        )
        made.put(MANIFEST_NAME, [dump_delta(manifest)])
    return DeltaDone(
        output=str(target),
        num_files=len(files),
        nbytes=total,
        delta_nbytes=sum(file.nbytes for file in written),
        seconds=time.monotonic() - started,
        peak_nbytes=peak_nbytes(),
    )


def _check_layout(before: _Side, after: _Side) -> None:
    difference = layout_difference(before.manifest, after.manifest)
    for holder in before.manifest.holders if difference is None else ():
        if not are_alike(*(read_table(side.store, side.manifest, holder) for side in (before, after))):
            difference = f"the slices in {before.manifest.holders[holder].table} differ"
    if difference is not None:
        what = f"a delta needs the layout of {before.store}: {difference}"
        raise PlanError(what, path=str(after.store), code="option")


def _write_changes(
    before: _Side, after: _Side, index: int, made: Output, threads: int, report: Callable[[int], None]
) -> DeltaFile:
    """Compare two versions of a weight file, and write what differs."""
    file, sides = after.manifest.files[index], (before, after)
    digests = [read_chunk_digests(side.store, side.manifest, index) for side in sides]
    rows = [np.frombuffer(each_side, np.uint8).reshape(-1, PROOF_NBYTES) for each_side in digests]
    differing = np.flatnonzero((rows[0] != rows[1]).any(axis=1)).tolist()
    if not differing and before.manifest.files[index].header_digest == file.header_digest:
        return UNCHANGED
    headers, parsed = zip(*(side.header(index) for side in sides), strict=True)
    if parsed[0].tensors != parsed[1].tensors:
        what = f"has other tensors than {before.store.location(file.name)}"
        raise PlanError(what, path=after.store.location(file.name), code="option")

    pieces, widths = pieces_of(file, after.manifest.chunk_nbytes), widths_in(parsed[1])
    where = [side.store.location(file.name) for side in sides]
    idle = [(Buffer(), Buffer(), Buffer()) for _ in range(threads)]
    """Fresh memory for each run would take longer than to read it."""

    def compare(run: range) -> list[tuple[int, bytes]]:
        """What changed in some chunks that are neighbors."""
        first, last = pieces[1 + run[0]], pieces[1 + run[-1]]
        *buffers, scratch = taken = idle.pop()
        views = [
            _read(opened, Extent(first.offset, last.end - first.offset), buffer)
            for opened, buffer in zip(files, buffers, strict=True)
        ]
        found = []
        for chunk in run:
            extent = pieces[1 + chunk]
            versions = [view[extent.offset - first.offset : extent.end - first.offset] for view in views]
            for version, stored, path in zip(versions, digests, where, strict=True):
                check_chunk(proof_hex(version), stored, chunk, extent, path)
            change = np.frombuffer(scratch.reserve(extent.nbytes), np.uint8)
            old, new = (np.frombuffer(version, np.uint8) for version in versions)
            np.bitwise_xor(old, new, out=change)
            found.append((1 + chunk, encode(change, widths.of(extent))))
        idle.append(taken)
        return found

    def changes() -> Iterator[tuple[int, bytes]]:
        head = np.bitwise_xor(*(np.frombuffer(header, np.uint8) for header in headers))
        yield 0, encode(head, [(head.nbytes, 1)])
        runs = _runs(differing)
        for at in range(0, len(runs), _AHEAD * threads):
            group = runs[at : at + _AHEAD * threads]
            yield from chain.from_iterable(each(compare, group, threads))
            report(pieces[1 + group[-1][-1]].end)

    with ExitStack() as stack:
        files = [stack.enter_context(side.store.open(file.name, file.nbytes, access=Access.ONCE)) for side in sides]
        return write_pieces(made, file.name, len(pieces), changes())


def _runs(chunks: Sequence[int]) -> list[range]:
    """Chunks, rising, in runs of neighbors that are read at once."""
    runs: list[range] = []
    for chunk in chunks:
        if runs and runs[-1].stop == chunk and len(runs[-1]) < _READ_AT_ONCE:
            runs[-1] = range(runs[-1].start, chunk + 1)
        else:
            runs.append(range(chunk, chunk + 1))
    return runs


def _read(file: ReadableFile, extent: Extent, buffer: Buffer) -> memoryview:
    """Bytes of a file, as direct I/O wants to read them."""
    blocks = extent.aligned()
    view = buffer.reserve(blocks.nbytes)
    file.read(blocks.offset, view)
    return view[extent.offset - blocks.offset : extent.end - blocks.offset]
