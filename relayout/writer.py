"""Carries out copy steps: reads source ranges, puts spans together, hashes, and hands spans to a sink."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
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

MAX_OPEN_FILES = 64
"""Rank files; each takes two descriptors."""


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


class NoSink:
    """Lets spans go: for their digests only."""

    def put(self, span: Span, target: Target, view: memoryview, address: int) -> None:
        """Do nothing."""


class RankFileSink:
    """Writes spans to rank files, of which only some are open at a time."""

    def __init__(self, folder: Path, layout: Layout) -> None:
        self._folder = folder
        self._layout = layout
        self._lock = threading.Lock()
        self._created: set[tuple[int, int]] = set()
        self._open: dict[tuple[int, int], OutputFile] = {}
        """Least recently used first."""
        self._users: Counter[tuple[int, int]] = Counter()

    def put(self, span: Span, target: Target, view: memoryview, address: int) -> None:
        """Write the span."""
        key = (target.rank, target.part)
        with self._lock:
            file = self._open.pop(key, None) or self._open_file(key)
            self._open[key] = file
            self._users[key] += 1
        try:
            file.write(target.offset, view, address)
        finally:
            with self._lock:
                self._users[key] -= 1

    def _open_file(self, key: tuple[int, int]) -> OutputFile:
        if len(self._open) >= MAX_OPEN_FILES:
            idle = next((other for other in self._open if not self._users[other]), None)
            if idle is not None:
                self._open.pop(idle).close()
        rank, part = key
        file = self._layout.ranks[rank][part]
        opened = OutputFile(self._folder / file.name, file.nbytes, create=key not in self._created)
        self._created.add(key)
        return opened

    def close(self) -> None:
        """Close what is open."""
        while self._open:
            self._open.popitem()[1].close()


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

    def work(memory: _Memory, step: Step) -> int:
        loaded = _read(step.ranges, inputs, memory.read)
        staged = _stage(step.spans, catalogue, loaded, memory.staged)
        for one in staged:
            for target in one.span.targets:
                sink.put(one.span, target, one.view, one.position)
        if step.turn is None:
            _hash(step, catalogue, loaded, staged, hashes)
            return step.nbytes
        hashed, turn = step.turn
        turns.wait(hashed, turn)
        _hash(step, catalogue, loaded, staged, hashes)
        turns.done(hashed)
        return step.nbytes

    with ExitStack() as stack:
        inputs = [stack.enter_context(InputFile(file.path, file.nbytes)) for file in catalogue.files]
        Workers(num_threads, steps, _Memory, work, stop).run(on_progress)
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
        positions.append(align_up(end, BLOCK) + (span.targets[0].offset % BLOCK if span.targets else 0))
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
