"""Carries out copy steps: reads source ranges, puts spans together, hashes, and hands spans to a sink."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import xxhash

from relayout.catalogue import Catalogue
from relayout.copyplan import SourceRange, Span, Step, Target
from relayout.extents import BLOCK, align_up
from relayout.files import Buffer, InputFile, OutputFile
from relayout.layout import Layout
from relayout.plan import Plan
from relayout.slicing import distinct_slices
from relayout.strided import copy_runs
from relayout.workers import Stop, Turns, Workers

DEFAULT_THREADS = 4


class Sink(Protocol):
    """What becomes of finished spans. Called by several threads, never twice for the same bytes."""

    def put(self, span: Span, target: Target, view: memoryview, address: int) -> None:
        """Take the span's bytes for one target. The memory is reused after the call."""


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests taken while the bytes passed, in hex."""

    sources: tuple[str, ...]
    """Of each tensor of the catalogue, as stored in the source."""
    slices: tuple[tuple[str, ...], ...]
    """Of each tensor: the slice of each rank."""


class RankFileSink:
    """Writes spans to rank files, which exist while bytes for them are outstanding."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._folder = folder
        self._layout = layout
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], OutputFile] = {}
        self._missing = {
            (file.rank, file.part): file.nbytes - file.data_start for files in layout.ranks for file in files
        }

    def put(self, span: Span, target: Target, view: memoryview, address: int) -> None:
        key = (target.rank, target.part)
        with self._lock:
            file = self._open.get(key)
            if file is None:
                file = self._open[key] = self.create(*key)
        file.write(target.offset, view, address)
        with self._lock:
            self._missing[key] -= span.nbytes
            complete = self._missing[key] == 0
            if complete:
                del self._open[key]
        if complete:
            file.sync()
            file.close()

    def create(self, rank: int, part: int) -> OutputFile:
        """Create a rank file at its full size."""
        file = self._layout.ranks[rank][part]
        return OutputFile(self._folder / file.name, file.nbytes)

    def close(self) -> None:
        """Close what is still open, after a failure."""
        for file in self._open.values():
            file.close()
        self._open.clear()


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Source ranges in memory."""

    memory: memoryview
    starts: list[tuple[int, int]]
    """(file, file offset) of each range, sorted."""
    positions: list[int]
    """Where each range lies in the memory."""

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


class _Hashes:
    """Running digests. One tensor is never updated by two threads at once."""

    def __init__(self) -> None:
        self.sources: dict[int, xxhash.xxh3_128] = {}
        self.slices: dict[tuple[int, int], xxhash.xxh3_128] = {}

    def result(self, plan: Plan) -> Digests:
        empty = xxhash.xxh3_128().hexdigest()
        sources, slices = [], []
        for t, parts in enumerate(plan.slices):
            source = self.sources[t].hexdigest() if t in self.sources else empty
            distinct, held = distinct_slices(parts)
            digests = [
                source if part.is_whole else self.slices[t, s].hexdigest() if (t, s) in self.slices else empty
                for s, part in enumerate(distinct)
            ]
            sources.append(source)
            slices.append(tuple(digests[s] for s in held))
        return Digests(tuple(sources), tuple(slices))


def run_steps(
    catalogue: Catalogue,
    plan: Plan,
    steps: Iterable[Step],
    sink: Sink,
    *,
    num_threads: int = DEFAULT_THREADS,
    on_progress: Callable[[int], None] | None = None,
) -> Digests:
    """Carry out all steps, and return the digests of everything that passed.

    Raises:
        FormatError: a source file has changed its length.
        OSError: a read or a write failed.
    """
    stop = Stop()
    turns = Turns(stop)
    hashes = _Hashes()
    inputs = [InputFile(file.path, file.nbytes) for file in catalogue.files]

    def work(memory: _Memory, step: Step) -> int:
        loaded = _read(step.ranges, inputs, memory.read)
        staged = _stage(step.spans, catalogue, loaded, memory.staged)
        for one in staged:
            for target in one.span.targets:
                sink.put(one.span, target, one.view, one.position)
        for t, _ in step.tensors:
            turns.wait(t, step.turn)
        _hash(step, catalogue, loaded, staged, hashes)
        for t, _ in step.tensors:
            turns.done(t)
        return step.nbytes

    try:
        workers = Workers(num_threads, steps, _Memory, work, stop)
        workers.start()
        workers.join(on_progress)
    finally:
        for file in inputs:
            file.close()
    return hashes.result(plan)


def _read(ranges: Sequence[SourceRange], inputs: Sequence[InputFile], buffer: Buffer) -> _Loaded:
    positions = list(accumulate((one.extent.nbytes for one in ranges), initial=0))
    memory = buffer.reserve(positions.pop())
    for one, position in zip(ranges, positions, strict=True):
        inputs[one.file].read(one.extent.offset, memory[position : position + one.extent.nbytes])
    return _Loaded(memory, [(one.file, one.extent.offset) for one in ranges], positions)


def _stage(spans: Sequence[Span], catalogue: Catalogue, loaded: _Loaded, buffer: Buffer) -> list[_Staged]:
    """Put the spans together, each at the address, modulo a block, that its first target wants."""
    positions = []
    end = 0
    for span in spans:
        positions.append(align_up(end, BLOCK) + span.targets[0].offset % BLOCK)
        end = positions[-1] + span.nbytes
    memory = buffer.reserve(end)
    staged = []
    for span, position in zip(spans, positions, strict=True):
        view = memory[position : position + span.nbytes]
        for piece in span.pieces:
            file = catalogue.tensors[piece.tensor].file
            source = loaded.position(file, piece.transfer.source) - piece.transfer.source
            copy_runs(loaded.memory, view, piece.transfer.shifted(source=source))
        staged.append(_Staged(span, view, position))
    return staged


def _hash(step: Step, catalogue: Catalogue, loaded: _Loaded, staged: Sequence[_Staged], hashes: _Hashes) -> None:
    for t, extent in step.tensors:
        position = loaded.position(catalogue.tensors[t].file, extent.offset)
        hashes.sources.setdefault(t, xxhash.xxh3_128()).update(loaded.memory[position : position + extent.nbytes])
    for one in staged:
        for part in one.span.slices:
            digest = hashes.slices.setdefault((part.tensor, part.slice), xxhash.xxh3_128())
            digest.update(one.view[part.start : part.start + part.nbytes])
