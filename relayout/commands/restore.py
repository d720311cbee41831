"""`restore`: rebuilds the source's shards, index and side files, byte for byte, from a converted checkpoint.

The copy steps of the conversion run in reverse: the bytes of a step are read from the rank files, rearranged to their
order in the source, hashed, and written to the shards.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

from relayout.checkpoint.converted import (
    CONVERTED,
    check_present,
    read_digests,
    read_manifest,
    read_record,
    read_source_digests,
    read_table,
)
from relayout.checkpoint.trust import Trust, trusted
from relayout.conversion.copy_plan import CopyPlan, CopyStep, LoadedRanges, SourceRange, Span, join_ranges
from relayout.conversion.layout import Conversion
from relayout.conversion.run import DEFAULT_MEMORY, DEFAULT_THREADS, share_memory
from relayout.conversion.sidecar import as_one_rank, copy_side_file, modes_of, recorded_source, stored_conversion
from relayout.core.arguments import folder_text
from relayout.core.digests import OrderedDigests, xxh3_hex
from relayout.core.extents import Extent, copy_runs
from relayout.core.slices import num_bytes
from relayout.core.workers import Stop, Workers
from relayout.errors import FormatError
from relayout.format.index import Manifest, RankTable
from relayout.publish.output import Output, OutputSpec
from relayout.publish.publishers import StoreDestination
from relayout.reporting import Progress, Result, reporting
from relayout.storage.reading import HashedFile, OpenFiles, hash_files
from relayout.storage.stores import Access, ReadableFile, Store, WritableFile, find_input, find_store
from relayout.storage.system import Buffer, peak_nbytes


@dataclass(frozen=True, slots=True, repr=False)
class RestoreResult(Result):
    """Result of `restore`."""

    output: str
    num_files: int
    """Number of shards that were written."""
    num_tensors: int
    written_nbytes: int
    """Bytes of all shards."""
    seconds: float
    peak_nbytes: int
    """Peak resident memory of the process, in bytes."""


def restore(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    force: bool = False,
    trust: Trust = None,
    threads: int = DEFAULT_THREADS,
    memory: int | str = DEFAULT_MEMORY,
    scratch: str | os.PathLike[str] | None = None,
    progress: Progress = None,
) -> RestoreResult:
    """Rebuild the source of a converted checkpoint: its shards, index and side files, byte for byte.

    Files that the conversion did not copy cannot be restored. The conversion listed these files.

    Args:
        path: the converted folder.
        output: the folder to create. It appears complete, with every digest verified, or not at all.
        force: replace an output folder that relayout wrote.
        trust: policy of accepted signers, as for `load`.
        threads: threads that read, copy and write.
        memory: bytes that these threads may use, or text such as "512MiB".
        scratch: folder for files before their upload to a bucket; default is the system's temporary folder (TMPDIR).
        progress: True for a bar on stderr, or a function that is called with (bytes done, total bytes).

    Returns:
        Counts of files, tensors and bytes that were written, and the time.

    Raises:
        FormatError: the folder is damaged, or bytes of the source are missing.
        PlanError: `output` cannot be written or replaced, or the folder lacks ranks.
        OSError: reading or writing failed; the output is deleted.

    Example:
        >>> import relayout
        >>> relayout.restore("llama-3.1-8b-tp8", "restored").output
        'restored'
    """
    started = time.monotonic()
    folder, target = trusted(find_input(path), trust), find_store(output)
    threads, chunk_nbytes = share_memory(threads, memory, target)
    manifest = read_manifest(folder)
    if manifest.whole is None:
        check_present(folder, manifest, range(manifest.num_ranks))
    record = read_record(folder, manifest)
    place = StoreDestination(target, CONVERTED, force)
    place.check(folder)
    sizes = [file.nbytes for file in record.files]
    written, index = sum(sizes), [] if record.index is None else [record.index[0]]
    work = OutputSpec(
        what=f"the source of {folder}",
        fingerprint=xxh3_hex(f"restored {manifest.record_digest}".encode()),
        others=[*(file.name for file in record.files), *index, *(side.name for side in record.side_files)],
        modes=modes_of([folder], [file.name for file in manifest.files]),
        is_resumable=False,
        scratch=folder_text(scratch, "scratch"),
    )
    with place.begin(work) as made:
        # Each thread may have a complete shard that waits for its upload.
        made.check_space(written + sum(side.nbytes for side in record.side_files), threads * max(sizes, default=0))
        source = recorded_source(folder, record)
        stored, of_stored = as_one_rank(manifest, record)
        tables = {rank: read_table(folder, stored, rank) for rank in range(stored.num_ranks)}
        holders = range(manifest.num_ranks) if manifest.whole is None else [manifest.num_ranks]
        digests = [read_digests(folder, manifest, holder) for holder in holders]
        of_source = read_source_digests(folder, manifest)
        conversion = stored_conversion(folder, stored, tables, of_stored, source)
        with reporting(progress, "restoring", source.nbytes) as on_progress:
            _TensorWriter(folder, of_source, conversion, made, stored, tables, digests).run(
                threads, chunk_nbytes, on_progress
            )
        if record.index is not None:
            made.put(record.index[0], [record.index[1]])
        for side in record.side_files:
            copy_side_file(folder, made, side.name, side)
    return RestoreResult(
        output=str(target),
        num_files=len(record.files),
        num_tensors=len(record.names),
        written_nbytes=written,
        seconds=time.monotonic() - started,
        peak_nbytes=peak_nbytes(),
    )


class _TensorWriter:
    """Reads the rank files and writes the shards. Only a few shards are incomplete at a time."""

    def __init__(
        self,
        folder: Store,
        of_source: Sequence[str | None],
        conversion: Conversion,
        output: Output,
        manifest: Manifest,
        tables: Mapping[int, RankTable],
        digests: Sequence[Sequence[str]],
    ) -> None:
        """Initialize the writer with the digests of the source's tensors, and of each table's slices."""
        self._folder = folder
        self._of_source = of_source
        self._digests = digests
        self._conversion = conversion
        self._output = output
        self._manifest = manifest
        self._tables = tables
        self._tensors = conversion.source.tensors
        self._stop = Stop()
        self._hashes = OrderedDigests(self._stop)
        self._checked: set[int] = set()
        """Positions of the tensors with a verified digest."""
        self._num_left = [file.nbytes - len(file.header) for file in conversion.source.files]
        """Bytes that are still missing after the header of each shard."""
        self._lock = threading.Lock()
        self._inputs = OpenFiles(self._open_input)
        self._outputs = OpenFiles(self._open_output, num_descriptors=2)

    def run(self, threads: int, chunk_nbytes: int, on_progress: Callable[[int], None]) -> None:
        """Write all tensors. Can be called once."""
        for index, num_left in enumerate(self._num_left):
            if not num_left:
                self._complete(index)
        plan = CopyPlan(self._conversion, chunk_nbytes=chunk_nbytes, by_source=True)
        steps = chain.from_iterable(map(plan.steps, range(len(self._conversion.layout.units))))
        with self._inputs, self._outputs:
            Workers(threads, steps, lambda: (Buffer(), Buffer()), self._work, self._stop).run(on_progress)
        for t, tensor in enumerate(self._tensors):
            if tensor.extent.nbytes and t not in self._checked:  # Steps exist only for slices that some rank holds.
                what = "no rank holds it, so the file cannot be restored"
                raise FormatError(what, path=str(self._folder), tensor=tensor.name, code="missing")

    def _open_input(self, index: int) -> ReadableFile:
        file = self._conversion.layout.files[index]
        return self._folder.open(file.name, file.nbytes, access=Access.ONCE)

    def _open_output(self, index: int) -> WritableFile:
        shard = self._conversion.source.files[index]
        return self._output.write(shard.name, shard.nbytes)

    def _work(self, memory: tuple[Buffer, Buffer], step: CopyStep) -> int:
        """Read the spans of a step, rearrange their bytes, write them, and verify digests."""
        loaded = LoadedRanges.place(step.ranges, memory[0])
        for span in step.spans:
            self._read_span(span, loaded, memory[1])
        for joined in join_ranges(SourceRange(self._tensors[t].file, extent) for t, extent in step.tensors):
            file, extent = joined.file, joined.extent
            position = loaded.position(file, extent.offset)
            with self._outputs.use(file) as output:
                output.write(extent.offset, loaded.memory[position : position + extent.nbytes], position)
            with self._lock:
                self._num_left[file] -= extent.nbytes
                is_complete = not self._num_left[file]
            if is_complete:
                self._complete(file)
        for t, extent in step.tensors:
            position = loaded.position(self._tensors[t].file, extent.offset)
            self._check(t, extent, loaded.memory[position : position + extent.nbytes])
        return step.nbytes

    def _complete(self, index: int) -> None:
        file = self._conversion.source.files[index]
        self._output.head(file.name, file.header, file.nbytes)
        self._output.keep(f"shard-{index}", b"")

    def _read_span(self, span: Span, loaded: LoadedRanges, buffer: Buffer) -> None:
        """Read a span from the first of its locations, and copy its pieces to their positions in the source."""
        place = span.targets[0]
        stored = Extent(place.offset, span.nbytes).aligned()
        blocks = buffer.reserve(stored.nbytes)
        with self._inputs.use(place.file) as stored_file:
            stored_file.read(stored.offset, blocks)
        for piece in span.pieces:
            tensor = self._tensors[piece.tensor]
            position = place.offset - stored.offset + piece.position - piece.offset
            for transfer in piece.transfers:
                target = loaded.tensor_position(tensor, transfer.source)
                copy_runs(blocks, loaded.memory, transfer.inverted(), position, target)

    def _check(self, t: int, extent: Extent, view: memoryview) -> None:
        """Hash bytes of a tensor; after the last byte, compare the digest."""
        tensor = self._tensors[t]
        digest = self._hashes.update(t, extent.offset - tensor.extent.offset, view, tensor.extent.nbytes)
        if digest is None:
            return
        if digest != self._of_source[t]:
            raise self._damage(tensor.name)
        self._checked.add(t)

    def _damage(self, name: str) -> FormatError:
        """Return the error for a tensor with a wrong digest. It names the first damaged slice, found by its digest."""
        for rank, table in self._tables.items():
            if name not in table.names:
                continue
            row = table.names.index(name)
            file = self._manifest.holder_files(rank)[table.files[row]]
            extent = Extent(table.offsets[row], num_bytes(table.dtypes[row], table.shapes[row]) or 0)
            opener = partial(self._folder.open, file.name, file.nbytes, access=Access.ONCE)
            [[digest]] = hash_files([HashedFile(opener, [extent])], 1)
            if digest != self._digests[rank][row]:
                whose = f" of rank {rank}" if len(self._tables) > 1 else ""
                what = f"bytes {extent.offset} to {extent.end}{whose}: the stored bytes are damaged"
                path = self._folder.location(file.name)
                return FormatError(what, path=path, tensor=name, offset=extent.offset, code="digest")
        what = "its slices, which have the digests that are stored, do not make the tensor of the source record"
        return FormatError(what, path=str(self._folder), tensor=name, code="digest")
