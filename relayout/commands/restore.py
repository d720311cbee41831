"""`restore`: the source's shards, index and side files, byte for byte, from a converted folder alone.

The conversion's own copy steps are carried out the other way: what a step wrote to rank files is read from them, put
back to where it came from, hashed, and written to the shards.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import chain

from relayout.checkpoint.converted import read_manifest, read_record, read_table
from relayout.checkpoint.source import Catalogue, SourceFile, SourceTensor
from relayout.conversion.copy import DEFAULT_MEMORY, DEFAULT_THREADS, Loaded, share_memory
from relayout.conversion.journal import read_journal
from relayout.conversion.layout import stored_conversion
from relayout.conversion.side_files import copy_side_file, modes_of
from relayout.conversion.steps import CopyPlan, SourceRange, Span, Step, join_ranges
from relayout.core.arguments import integer, size
from relayout.core.digests import OrderedDigests
from relayout.core.dtypes import num_bytes
from relayout.core.extents import BLOCK, Extent, align_down, align_up
from relayout.core.strided import copy_runs
from relayout.core.workers import Stop, Workers
from relayout.errors import FormatError, PlanError
from relayout.format.index import MANIFEST_NAME, Manifest
from relayout.format.safetensors import parse_header
from relayout.format.source_record import SourceRecord
from relayout.progress import Progress, reporting
from relayout.storage.buffers import Buffer
from relayout.storage.file_pool import OpenFiles
from relayout.storage.memory import peak_nbytes
from relayout.storage.protocols import Access, ReadableFile, Staging, Store, WritableFile
from relayout.storage.stores import find_store


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restoration did."""

    output: str
    num_files: int
    """Shards written."""
    num_tensors: int
    written_nbytes: int
    """Bytes of all shards."""
    seconds: float
    peak_nbytes: int
    """The most memory that the process ever held (resident)."""

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        return asdict(self)


def restore(
    path: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    force: bool = False,
    threads: int = DEFAULT_THREADS,
    memory: int | str = DEFAULT_MEMORY,
    progress: Progress = None,
) -> Restored:
    """Write the checkpoint that a folder was converted from: its shards, index and side files, byte for byte.

    What the conversion left out (it said so) is not there to be given back.

    Args:
        path: a folder that `convert` wrote.
        output: the folder to make. It appears complete, with every digest right, or not at all.
        force: replace an output folder that relayout converted.
        threads: threads that read, copy and write.
        memory: bytes that they may use for copying, also as text, such as "512MiB".
        progress: True for a bar on stderr, or a function that is called now and then with (bytes done, bytes in all).

    Raises:
        FormatError: the folder is damaged, or lacks what the source had.
        PlanError: it cannot be restored to `output`.
        OSError: reading or writing failed; nothing is left behind.
    """
    started = time.monotonic()
    threads, chunk_nbytes = share_memory(integer(threads, "threads"), size(memory, "memory"))
    folder, target = find_store(path), find_store(output)
    manifest = read_manifest(folder)
    record = read_record(folder, manifest)
    target.check_output(folder, MANIFEST_NAME, force=force)
    written = sum(file.nbytes for file in record.files)
    modes = modes_of(folder, [file.name for file in manifest.files])
    with target.stage(MANIFEST_NAME, replace=force, modes=modes) as staging:
        found = read_journal(staging)
        if found is not None and found[1] and not force:
            staging.is_kept = True
            raise PlanError(f"{staging.where}: holds an interrupted conversion; --force discards it")
        staging.clear()
        staging.check_space(written + sum(side.nbytes for side in record.side_files))
        catalogue = source_catalogue(folder, record)
        with reporting(progress, "restoring", catalogue.nbytes) as report:
            _restore_tensors(folder, manifest, record, catalogue, staging, threads, chunk_nbytes, report)
        for file in catalogue.files:
            staging.write_head(file.name, file.header, file.nbytes)
        if record.index is not None:
            staging.put(record.index[0], [record.index[1]])
        for side in record.side_files:
            copy_side_file(folder, staging, side.name, side)
    return Restored(
        output=str(target),
        num_files=len(record.files),
        num_tensors=len(record.names),
        written_nbytes=written,
        seconds=time.monotonic() - started,
        peak_nbytes=peak_nbytes(),
    )


def source_catalogue(folder: Store, record: SourceRecord) -> Catalogue:
    """The source's catalogue, of files that are still to be written.

    Raises:
        FormatError: the shards had bytes that the record does not tell of.
    """
    files = []
    tensors = []
    stored: list[dict[str, tuple[str, tuple[int, ...], int]]] = [{} for _ in record.files]
    for name, dtype, shape, file, offset in zip(
        record.names, record.dtypes, record.shapes, record.file_of, record.offsets, strict=True
    ):
        stored[file][name] = (dtype, shape, offset)
        tensors.append(SourceTensor(name, dtype, shape, file, Extent(offset, num_bytes(dtype, shape) or 0)))
    for shard, expected in zip(record.files, stored, strict=True):
        header = parse_header(shard.header, shard.nbytes, f"{folder}: header of {shard.name}")
        for entry in header.tensors:
            if expected.pop(entry.name, None) != (entry.dtype, entry.shape, header.data_start + entry.offset):
                raise FormatError(
                    f"{folder}: {shard.name} cannot be restored: its tensor {entry.name!r} was not converted"
                )
        if expected:
            raise FormatError(f"{folder}: header of {shard.name}: tensor {min(expected)!r} is not in it")
        files.append(SourceFile(shard.name, shard.nbytes, header.data_start, shard.header))
    return Catalogue(folder, tuple(files), tuple(tensors), {}, {}, record.index, (), ())


def _restore_tensors(
    folder: Store,
    manifest: Manifest,
    record: SourceRecord,
    catalogue: Catalogue,
    staging: Staging,
    threads: int,
    chunk_nbytes: int,
    on_progress: Callable[[int], None] | None,
) -> None:
    """Read all rank files, and write the bytes of all tensors.

    Raises:
        FormatError: a tensor's bytes are not what the source's were.
        OSError: a read or a write failed.
    """
    tables = [read_table(folder, manifest, rank) for rank in range(manifest.num_ranks)]
    conversion = stored_conversion(folder, manifest, tables, record, catalogue)
    stop = Stop()
    hashes = OrderedDigests(stop)
    checked: set[int] = set()

    def check(t: int, extent: Extent, view: memoryview) -> None:
        tensor = catalogue.tensors[t]
        digest = hashes.update(t, extent.offset - tensor.extent.offset, view, tensor.extent.nbytes)
        if digest is None:
            return
        if digest != record.digests[t]:
            raise FormatError(f"{folder}: tensor {tensor.name!r}: the stored bytes are damaged")
        checked.add(t)

    def open_input(number: int) -> ReadableFile:
        file = conversion.layout.files[number]
        return folder.open(file.name, file.nbytes, access=Access.ONCE)

    created: set[int] = set()

    def open_output(number: int) -> WritableFile:
        shard = catalogue.files[number]
        opened = staging.write_file(shard.name, shard.nbytes, is_new=number not in created)
        created.add(number)
        return opened

    def work(memory: tuple[Buffer, Buffer], step: Step) -> int:
        loaded = Loaded.place(step.ranges, memory[0])
        for span in step.spans:
            _put_back(span, loaded, catalogue, inputs, memory[1])
        for one in join_ranges(SourceRange(catalogue.tensors[t].file, extent) for t, extent in step.tensors):
            position = loaded.position(one.file, one.extent.offset)
            view = loaded.memory[position : position + one.extent.nbytes]
            with outputs.use(one.file) as output:
                output.write(one.extent.offset, view, position)
        for t, extent in step.tensors:
            position = loaded.position(catalogue.tensors[t].file, extent.offset)
            check(t, extent, loaded.memory[position : position + extent.nbytes])
        return step.nbytes

    plan = CopyPlan(conversion, chunk_nbytes=chunk_nbytes, by_source=True)
    steps = chain.from_iterable(map(plan.steps, range(len(conversion.layout.units))))
    with OpenFiles(open_input) as inputs, OpenFiles(open_output, num_descriptors=2) as outputs:
        Workers(threads, steps, lambda: (Buffer(), Buffer()), work, stop).run(on_progress)
    assert checked == {t for t, tensor in enumerate(catalogue.tensors) if tensor.extent.nbytes}


def _put_back(
    span: Span, loaded: Loaded, catalogue: Catalogue, inputs: OpenFiles[int, ReadableFile], buffer: Buffer
) -> None:
    """Read a span from the first of its targets, and spread its pieces to where they came from."""
    place = span.targets[0]
    start = align_down(place.offset, BLOCK)
    blocks = buffer.reserve(align_up(place.offset + span.nbytes, BLOCK) - start)
    with inputs.use(place.file) as stored_file:
        stored_file.read(start, blocks)
    for piece in span.pieces:
        tensor = catalogue.tensors[piece.tensor]
        position = place.offset - start + piece.position - piece.offset
        for one in piece.transfers:
            copy_runs(blocks, loaded.memory, one.inverted(), position, loaded.tensor_position(tensor, one.source))
