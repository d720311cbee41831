"""Carries out copy steps: reads source ranges, puts spans together, hashes, and hands spans to a sink."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, Self

from relayout.checkpoint.source import Catalogue
from relayout.conversion.journal import TensorDigests
from relayout.conversion.layout import Conversion, Layout, cut_tensors
from relayout.conversion.steps import CHUNK_NBYTES, SourceRange, Span, Step, Target
from relayout.core.digests import EMPTY_DIGEST, OrderedDigests
from relayout.core.extents import BLOCK, align_down, align_up
from relayout.core.strided import copy_runs
from relayout.core.workers import Stop, Workers
from relayout.errors import PlanError
from relayout.storage.buffers import Buffer
from relayout.storage.file_pool import OpenFiles
from relayout.storage.protocols import Access, ReadableFile, Staging, WritableFile

DEFAULT_JOBS = 8
"""Threads."""

DEFAULT_MEMORY = 2 * DEFAULT_JOBS * CHUNK_NBYTES
"""Bytes for copying: each thread holds what it has read, and what it puts together of it."""

_MIN_CHUNK_NBYTES = 2**20

_SOURCE = -1
"""In place of a slice: the whole tensor, as stored in the source."""


class Sink(Protocol):
    """What becomes of finished spans. Called by several threads, never twice for the same bytes."""

    def put(self, span: Span, target: Target, view: memoryview, address: int) -> None:
        """Take the span's bytes for one target. The memory is reused after the call."""


def digests_of_all(conversion: Conversion, passed: Mapping[int, TensorDigests]) -> dict[int, TensorDigests]:
    """The digests of those tensors that have passed, and of those without bytes, which no step deals with."""
    digests = {}
    for t, tensor in enumerate(conversion.catalogue.tensors):
        assert t in passed or not tensor.extent.nbytes, f"tensor {tensor.name!r}: was not hashed to its end"
        digests[t] = passed[t] if t in passed else _of_nothing(conversion, t)
    return digests


def _of_nothing(conversion: Conversion, t: int) -> TensorDigests:
    return TensorDigests(EMPTY_DIGEST, (EMPTY_DIGEST,) * len(conversion.plan.cut(t).distinct))


class NoSink:
    """Lets spans go: for their digests only."""

    def put(self, span: Span, target: Target, view: memoryview, address: int) -> None:
        """Do nothing."""


class RankFileSink:
    """Writes spans to rank files, of which only some are open at a time."""

    def __init__(self, staging: Staging, layout: Layout) -> None:
        """Files that are there already must have their full length."""
        self._staging = staging
        self._layout = layout
        names = set(staging.names())
        self._existing = {(file.rank, file.part) for files in layout.ranks for file in files if file.name in names}
        self._files = OpenFiles(self._open_file, num_descriptors=2)

    def put(self, span: Span, target: Target, view: memoryview, address: int) -> None:
        """Write the span."""
        with self._files.use((target.rank, target.part)) as file:
            file.write(target.offset, view, address)

    def _open_file(self, key: tuple[int, int]) -> WritableFile:
        rank, part = key
        file = self._layout.ranks[rank][part]
        opened = self._staging.write_file(file.name, file.nbytes, is_new=key not in self._existing)
        self._existing.add(key)
        return opened

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
        positions = list(accumulate((one.extent.nbytes for one in ranges), initial=0))
        memory = buffer.reserve(positions.pop())
        return cls(memory, [(one.file, one.extent.offset) for one in ranges], positions)

    def position(self, file: int, offset: int) -> int:
        """Where the byte at a file's offset lies in the memory."""
        which = bisect_right(self.starts, (file, offset)) - 1
        return self.positions[which] + offset - self.starts[which][1]


@dataclass(frozen=True, slots=True)
class _Staged:
    """A span put together in memory."""

    span: Span
    view: memoryview
    position: int
    """Where the view starts in page-aligned memory."""


class _Memory:
    """What one worker owns."""

    def __init__(self) -> None:
        self.read = Buffer()
        self.staged = Buffer()


class TensorHashes:
    """Digests of tensors and their slices, from the pieces in which they pass; see `OrderedDigests` for threads."""

    def __init__(self, conversion: Conversion, stop: Stop, on_tensor: Callable[[int, TensorDigests], None]) -> None:
        """`on_tensor` is called when all bytes of a tensor and of its slices have passed."""
        self._tensors = cut_tensors(conversion.catalogue, conversion.plan)
        self._source_nbytes = [tensor.extent.nbytes for tensor in conversion.catalogue.tensors]
        self._num_streams = {
            tensor: 1
            + sum(
                1
                for part, nbytes in zip(tensor.cut.distinct, tensor.sizes, strict=True)
                if nbytes and not part.is_whole
            )
            for tensor in set(self._tensors)
        }
        """How many digests there are of a tensor of each kind: its source's, and those of slices with bytes."""
        self._on_tensor = on_tensor
        self._ordered = OrderedDigests(stop)
        self._lock = threading.Lock()
        self._found: dict[int, dict[int, str]] = {}
        """Of each tensor in work: digests of its source (`_SOURCE`) and of its distinct slices, as far as known."""

    def update_source(self, t: int, start: int, view: memoryview) -> None:
        """Hash the bytes of a tensor from `start` on."""
        self._update(t, _SOURCE, start, view, self._source_nbytes[t])

    def update_slice(self, t: int, which: int, start: int, view: memoryview) -> None:
        """Hash the bytes of one of a tensor's distinct slices from `start` on."""
        self._update(t, which, start, view, self._tensors[t].sizes[which])

    def _update(self, t: int, which: int, start: int, view: memoryview, nbytes: int) -> None:
        digest = self._ordered.update((t, which), start, view, nbytes)
        if digest is None:
            return
        with self._lock:
            found = self._found.setdefault(t, {})
            found[which] = digest
            if len(found) < self._num_streams[self._tensors[t]]:
                return
            del self._found[t]
        source = found[_SOURCE]
        distinct = self._tensors[t].cut.distinct
        slices = (source if part.is_whole else found.get(n, EMPTY_DIGEST) for n, part in enumerate(distinct))
        self._on_tensor(t, TensorDigests(source, tuple(slices)))


def share_memory(jobs: int, memory: int) -> tuple[int, int]:
    """How many threads, `jobs` at most, share so many bytes, and how many source bytes each of them copies at once.

    Raises:
        PlanError: there are no threads, or not enough bytes for one.
    """
    if jobs < 1:
        raise PlanError(f"{jobs} jobs, expected at least one")
    if memory < 2 * _MIN_CHUNK_NBYTES:
        raise PlanError(f"a memory of {memory} bytes, expected at least {2 * _MIN_CHUNK_NBYTES}")
    jobs = min(jobs, memory // (2 * _MIN_CHUNK_NBYTES))
    return jobs, align_down(memory // (2 * jobs), BLOCK)


def run_steps(
    conversion: Conversion,
    steps: Iterable[Step],
    sink: Sink,
    *,
    num_threads: int = DEFAULT_JOBS,
    on_tensor: Callable[[int, TensorDigests], None] = lambda t, digests: None,
    on_progress: Callable[[int], None] | None = None,
) -> dict[int, TensorDigests]:
    """Carry out all steps, and return the digests of each tensor that passed.

    `on_tensor` is called by several threads, when a tensor's last byte has gone to the sink.

    Raises:
        FormatError: a source file has changed its length.
        OSError: a read or a write failed.
    """
    catalogue = conversion.catalogue
    stop = Stop()
    done: dict[int, TensorDigests] = {}

    def complete(t: int, digests: TensorDigests) -> None:
        done[t] = digests
        on_tensor(t, digests)

    hashes = TensorHashes(conversion, stop, complete)

    def work(memory: _Memory, step: Step) -> int:
        loaded = _read(step.ranges, inputs, memory.read)
        staged = _stage(step.spans, catalogue, loaded, memory.staged)
        for one in staged:
            for target in one.span.targets:
                sink.put(one.span, target, one.view, one.position)
        _hash(step, catalogue, loaded, staged, hashes)
        return step.nbytes

    def open_input(number: int) -> ReadableFile:
        file = catalogue.files[number]
        return catalogue.folder.open(file.name, file.nbytes, access=Access.ONCE, version=file.version)

    with OpenFiles(open_input) as inputs:
        Workers(num_threads, steps, _Memory, work, stop).run(on_progress)
    return done


def _read(ranges: Sequence[SourceRange], inputs: OpenFiles[int, ReadableFile], buffer: Buffer) -> Loaded:
    loaded = Loaded.place(ranges, buffer)
    for one, position in zip(ranges, loaded.positions, strict=True):
        with inputs.use(one.file) as file:
            file.read(one.extent.offset, loaded.memory[position : position + one.extent.nbytes])
    return loaded


def _stage(spans: Sequence[Span], catalogue: Catalogue, loaded: Loaded, buffer: Buffer) -> list[_Staged]:
    """Put the spans together, each at the address, modulo a block, that its first target wants."""
    positions = []
    end = 0
    for span in spans:
        positions.append(align_up(end, BLOCK) + (span.targets[0].offset % BLOCK if span.targets else 0))
        end = positions[-1] + span.nbytes
    memory = buffer.reserve(end)
    staged = []
    for span, position in zip(spans, positions, strict=True):
        view = memory[position : position + span.nbytes]
        for piece in span.pieces:
            file = catalogue.tensors[piece.tensor].file
            source = loaded.position(file, piece.transfer.source) - piece.transfer.source
            copy_runs(loaded.memory, view, piece.transfer, source)
        staged.append(_Staged(span, view, position))
    return staged


def _hash(step: Step, catalogue: Catalogue, loaded: Loaded, staged: Sequence[_Staged], hashes: TensorHashes) -> None:
    for one in staged:
        for part in one.span.slices:
            view = one.view[part.position : part.position + part.nbytes]
            hashes.update_slice(part.tensor, part.slice, part.offset, view)
    for t, extent in step.tensors:
        tensor = catalogue.tensors[t]
        position = loaded.position(tensor.file, extent.offset)
        view = loaded.memory[position : position + extent.nbytes]
        hashes.update_source(t, extent.offset - tensor.extent.offset, view)
