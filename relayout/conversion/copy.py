"""Carries out copy steps: reads source ranges, puts spans together, hashes and writes them."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Self

from relayout.checkpoint.source import SourceCheckpoint, SourceTensor
from relayout.conversion.journal import TensorDigests, Written
from relayout.conversion.layout import Conversion
from relayout.conversion.steps import CHUNK_NBYTES, CopyPlan, SourceRange, Span, Step, Target
from relayout.core.arguments import at_least_one, size
from relayout.core.digests import EMPTY_DIGEST, OrderedDigests
from relayout.core.extents import BLOCK, Extent, align_down, align_up, copy_runs
from relayout.core.slices import CutTensor
from relayout.core.workers import Stop, Workers
from relayout.errors import PlanError
from relayout.format.index import DIGESTED_NBYTES, chunks_of, chunks_over
from relayout.publish.output import LocalOutput, Output
from relayout.storage.reading import HashedFile, OpenFiles, hash_files
from relayout.storage.stores import Access, ReadableFile, Store, WritableFile
from relayout.storage.system import Buffer, available_nbytes

DEFAULT_THREADS = 8
"""Threads that read, copy, hash and write."""

DEFAULT_MEMORY = 2 * DEFAULT_THREADS * CHUNK_NBYTES
"""Bytes for copying: each thread holds what it has read, and what it puts together of it."""

_MIN_CHUNK_NBYTES = 2**20
_SHARE_OF_AVAILABLE = 0.75
"""The share that buffers take of the memory that the system could give; the rest is for what is not counted, such as
headers and the journal."""

SOURCE = -1
"""Stands in place of a slice for the whole tensor, as stored in the source."""


class FileSink:
    """Writes to the files of a layout, of which only some are open at a time, and hashes their chunks.

    Each file is written from front to back, except for writes that are under way at the same time.
    """

    def __init__(self, output: Output, conversion: Conversion, hashed: Iterable[int], stop: Stop) -> None:
        """Files that are there already must have their full length; `hashed` are those whose chunks are hashed."""
        self._output = output
        self._layout = conversion.layout
        self._files = OpenFiles(self._open_file, num_descriptors=2)
        self._ordered = OrderedDigests(stop, conversion.digest)
        self._chunks = {index: [b""] * self._layout.files[index].num_chunks for index in hashed}
        """For each file the digests of its chunks, empty if they are not known."""

    def put(self, target: Target, view: memoryview, address: int) -> None:
        """Write the bytes for one place. Their memory, at `address` modulo a block, is reused after the call."""
        with self._files.use(target.file) as file:
            file.write(target.offset, view, address)
        if target.file in self._chunks:
            self._hash(target, view)

    def _hash(self, target: Target, view: memoryview) -> None:
        file, written = self._layout.files[target.file], Extent(target.offset, view.nbytes)
        for index, chunk, part in chunks_over(written, file.data_start, file.nbytes, DIGESTED_NBYTES):
            piece = view[part.offset - written.offset : part.end - written.offset]
            digest = self._ordered.update((target.file, index), part.offset - chunk.offset, piece, chunk.nbytes)
            if digest is not None:
                self._chunks[target.file][index] = bytes.fromhex(digest)

    def chunks(self) -> dict[int, bytes]:
        """The digests of the chunks of each file that is complete."""
        return {index: b"".join(digests) for index, digests in self._chunks.items() if all(digests)}

    def _open_file(self, index: int) -> WritableFile:
        file = self._layout.files[index]
        return self._output.write(file.name, file.nbytes)

    def close(self) -> None:
        """Return when all that was put is on the drive, and close what is open.

        Raises:
            OSError: it could not all be written.
        """
        self._files.close()


@dataclass(frozen=True, slots=True)
class Loaded:
    """Source ranges, or the memory for them."""

    memory: memoryview
    starts: list[tuple[int, int]]
    """(file, file offset) of each range, sorted."""
    positions: list[int]
    """Where each range lies in the memory."""

    @classmethod
    def place(cls, ranges: Sequence[SourceRange], buffer: Buffer) -> Self:
        """Give the ranges, which are in order, their memory."""
        positions = list(accumulate((source.extent.nbytes for source in ranges), initial=0))
        memory = buffer.reserve(positions.pop())
        return cls(memory, [(source.file, source.extent.offset) for source in ranges], positions)

    def position(self, file: int, offset: int) -> int:
        """Position in the memory of the byte at a file's offset."""
        index = bisect_right(self.starts, (file, offset)) - 1
        return self.positions[index] + offset - self.starts[index][1]

    def tensor_position(self, tensor: SourceTensor, offset: int) -> int:
        """Position of the tensor's byte 0, extrapolated from that of its byte at `offset`."""
        return self.position(tensor.file, tensor.extent.offset + offset) - offset


class TensorHashes:
    """Digests of tensors and their slices, from the pieces in which they pass. Thread-safe."""

    def __init__(self, conversion: Conversion, stop: Stop) -> None:
        self._tensors = conversion.source.tensors
        self._cut = conversion.cut
        self._reads_whole = conversion.reads_whole
        self._num_streams: dict[CutTensor, int] = {}
        self._ordered = OrderedDigests(stop)
        self._lock = threading.Lock()
        self._partial: dict[int, dict[int, str]] = {}
        """The digests that are known of tensors that pass in several steps."""

    def add(self, pieces: Iterable[tuple[int, int, int, memoryview]]) -> dict[int, TensorDigests]:
        """Hash pieces: tensor, distinct slice or `SOURCE`, offset in that, and the bytes from there on.

        Returns:
            The digests of tensors of which these were the last bytes, in the source and in slices.

        Raises:
            Stopped: the work was given up.
        """
        ended: dict[int, dict[int, str]] = {}
        for t, which, start, view in pieces:
            nbytes = self._tensors[t].extent.nbytes if which == SOURCE else self._cut[t].sizes[which]
            digest = self._ordered.update((t, which), start, view, nbytes)
            if digest is not None:
                ended.setdefault(t, {})[which] = digest
        complete = {}
        with self._lock:
            for t, digests in ended.items():
                digests |= self._partial.pop(t, {})
                cut = self._cut[t]
                if cut not in self._num_streams:
                    self._num_streams[cut] = len(_streams(cut, with_source=self._reads_whole(t)))
                if len(digests) < self._num_streams[cut]:
                    self._partial[t] = digests
                else:
                    slices = (
                        digests.get(SOURCE if part.is_whole else which, EMPTY_DIGEST)
                        for which, part in enumerate(cut.cut.distinct)
                    )
                    complete[t] = TensorDigests(digests.get(SOURCE), tuple(slices))
        return complete


def _streams(tensor: CutTensor, *, with_source: bool) -> set[int]:
    """What is hashed of a tensor: its different slices that have bytes, and the source if all of that is read."""
    parts = zip(tensor.cut.distinct, tensor.sizes, strict=True)
    slices = {SOURCE if part.is_whole else which for which, (part, nbytes) in enumerate(parts) if nbytes}
    return slices | {SOURCE} if with_source else slices


def share_memory(threads: int, memory: int | str, output: Store | None = None) -> tuple[int, int]:
    """Share memory for copying among threads: at most `memory`, or three quarters of what the system could give.

    A third is for what is sent meanwhile, if the output is in a remote store.

    Returns:
        The number of threads, `threads` at most, and how many source bytes each copies at once.

    Raises:
        PlanError: there are no threads, or not enough bytes for one.
    """
    threads, memory = at_least_one(threads, "threads"), size(memory, "memory")
    num_copies = 3 if output is not None and output.cost.is_remote else 2
    if memory < num_copies * _MIN_CHUNK_NBYTES:
        what = f"memory: {memory} bytes, expected {num_copies * _MIN_CHUNK_NBYTES} or more"
        raise PlanError(what, code="option")
    memory = max(num_copies * _MIN_CHUNK_NBYTES, min(memory, int(available_nbytes() * _SHARE_OF_AVAILABLE)))
    threads = min(threads, memory // (num_copies * _MIN_CHUNK_NBYTES))
    return threads, align_down(memory // (num_copies * threads), BLOCK)


def run_unit(
    plan: CopyPlan,
    unit: int,
    output: Output,
    *,
    done: Set[int] = frozenset(),
    threads: int = DEFAULT_THREADS,
    on_tensors: Callable[[Mapping[int, TensorDigests]], None] = lambda complete: None,
    on_progress: Callable[[int], None] | None = None,
    deliver: Callable[[Iterator[Step]], Iterator[Step]] = lambda steps: steps,
) -> Written:
    """Write the data sections of a unit's files, and return the digests of what was written.

    Nothing of other units is read or written. When it returns, all is on the drive.

    Args:
        output: where the files go. Those that are there already must have their full length.
        done: tensors that are written already.
        deliver: makes each step possible, before it is carried out.

    Raises:
        FormatError: a source file has changed its length.
        OSError: a read or a write failed.
    """
    layout, stop = plan.conversion.layout, Stop()
    # What is done is not hashed again here, so that chunks of these files would never be complete.
    hashed = [file for file in layout.files_of_unit[unit] if done.isdisjoint(layout.files[file].tensors)]
    sink = FileSink(output, plan.conversion, hashed, stop)
    try:
        tensors = run_steps(
            plan.conversion,
            deliver(plan.steps(unit, done=done)),
            sink.put,
            threads=threads,
            on_tensors=on_tensors,
            on_progress=on_progress,
            stop=stop,
        )
    finally:
        sink.close()
    return Written(tensors, sink.chunks())


def hash_chunks(folder: LocalOutput, conversion: Conversion, indices: Sequence[int], threads: int) -> dict[int, bytes]:
    """The digests of the chunks of files that are written, from what is stored. Those without data need not be there.

    Raises:
        FormatError, OSError: a read failed.
    """
    files = {index: conversion.layout.files[index] for index in indices}
    with_data = {index: file for index, file in files.items() if file.nbytes > file.data_start}
    stored = [
        HashedFile(
            partial(folder.open, file.name, file.nbytes),
            (),
            chunks_of(file.data_start, file.nbytes, DIGESTED_NBYTES),
            conversion.digest,
        )
        for file in with_data.values()
    ]
    hashed = zip(with_data, hash_files(stored, threads), strict=True)
    return dict.fromkeys(indices, b"") | {index: b"".join(map(bytes.fromhex, digests)) for index, digests in hashed}


def run_steps(
    conversion: Conversion,
    steps: Iterable[Step],
    put: Callable[[Target, memoryview, int], None] | None,
    *,
    threads: int = DEFAULT_THREADS,
    on_tensors: Callable[[Mapping[int, TensorDigests]], None] = lambda complete: None,
    on_progress: Callable[[int], None] | None = None,
    stop: Stop | None = None,
) -> dict[int, TensorDigests]:
    """Carry out all steps, and return the digests of each tensor that passed.

    Args:
        put: takes the bytes of a span for each place, as `FileSink.put`; called by several threads. None: digests only.
        on_tensors: called by several threads, when the last bytes of tensors were put.
        stop: requested when a step fails.

    Raises:
        FormatError: a source file has changed its length.
        OSError: a read or a write failed.
    """
    source = conversion.source
    stop = stop or Stop()
    done: dict[int, TensorDigests] = {}
    hashes = TensorHashes(conversion, stop)

    def work(buffers: tuple[Buffer, Buffer], step: Step) -> int:
        loaded = _read(step.ranges, inputs, buffers[0])
        staged = _stage(step.spans, source, loaded, buffers[1])
        if put is not None:
            for span, view, address in staged:
                for target in span.targets:
                    put(target, view, address)
        complete = hashes.add(_hashed(step, conversion, loaded, staged))
        done.update(complete)
        on_tensors(complete)
        return step.nbytes

    def open_input(index: int) -> ReadableFile:
        file = source.files[index]
        return source.folder.open(file.name, file.nbytes, access=Access.ONCE, version=file.version)

    with OpenFiles(open_input) as inputs:
        Workers(threads, steps, lambda: (Buffer(), Buffer()), work, stop).run(on_progress)
    return done


def _read(ranges: Sequence[SourceRange], inputs: OpenFiles[int, ReadableFile], buffer: Buffer) -> Loaded:
    loaded = Loaded.place(ranges, buffer)
    for source, position in zip(ranges, loaded.positions, strict=True):
        with inputs.use(source.file) as file:
            file.read(source.extent.offset, loaded.memory[position : position + source.extent.nbytes])
    return loaded


_Staged = tuple[Span, memoryview, int]
"""A span put together in memory, and where in page-aligned memory it starts."""


def _stage(spans: Sequence[Span], source: SourceCheckpoint, loaded: Loaded, buffer: Buffer) -> list[_Staged]:
    """Put the spans together, each at the address, modulo a block, that its first target wants."""
    positions = []
    end = 0
    for span in spans:
        positions.append(align_up(end, BLOCK) + (span.targets[0].offset % BLOCK if span.targets else 0))
        end = positions[-1] + span.nbytes
    memory = buffer.reserve(end)
    for span, position in zip(spans, positions, strict=True):
        for piece in span.pieces:
            tensor = source.tensors[piece.tensor]
            for transfer in piece.transfers:
                origin = loaded.tensor_position(tensor, transfer.source)
                copy_runs(loaded.memory, memory, transfer, origin, position + piece.position - piece.offset)
    return [
        (span, memory[position : position + span.nbytes], position)
        for span, position in zip(spans, positions, strict=True)
    ]


def _hashed(
    step: Step, conversion: Conversion, loaded: Loaded, staged: Iterable[_Staged]
) -> Iterator[tuple[int, int, int, memoryview]]:
    """The bytes of a step that are hashed, for `TensorHashes.add`."""
    source = conversion.source
    for span, view, _ in staged:
        for t, which, offset, position, nbytes, _, is_hashed in span.pieces:
            if is_hashed:
                yield t, which, offset, view[position : position + nbytes]
    for t, extent in step.tensors:
        if not conversion.reads_whole(t):
            continue
        tensor = source.tensors[t]
        position = loaded.position(tensor.file, extent.offset)
        yield t, SOURCE, extent.offset - tensor.extent.offset, loaded.memory[position : position + extent.nbytes]
