"""Carries out a planned conversion, unit by unit: each is a part of the output."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from relayout.checkpoint.converted import CONVERTED
from relayout.checkpoint.source import SourceIdentity, identity_of
from relayout.conversion.copy_plan import (
    CHUNK_NBYTES,
    CopyPlan,
    CopyStep,
    Target,
    TensorDigests,
    WrittenDigests,
    run_copy_steps,
)
from relayout.conversion.hashing import SourceHashing
from relayout.conversion.layout import Conversion, check_planned
from relayout.conversion.resume import (
    Fingerprint,
    changed_shards,
    check_unchanged,
    differences_from_conversion,
    dump_notes,
    fingerprint_of,
    is_unchanged_since,
    parse_notes,
)
from relayout.conversion.sidecar import HeaderWriter, other_names, output_modes, write_sidecar
from relayout.core.arguments import at_least_one, folder_text, size
from relayout.core.digests import OrderedDigests, new_blake3
from relayout.core.extents import BLOCK, Extent, align_down
from relayout.core.workers import Stop
from relayout.errors import PlanError, shown
from relayout.format.index import DIGESTED_NBYTES, chunks_over
from relayout.format.source_record import FileDigest
from relayout.publish.output import Output, OutputSpec
from relayout.publish.publishers import Destination, StoreDestination
from relayout.reporting import Progress, Result, reporting
from relayout.storage.reading import READ_NBYTES as REHASH_NBYTES
from relayout.storage.reading import OpenFiles
from relayout.storage.stores import Store, WritableFile, scheme_of
from relayout.storage.system import available_nbytes, peak_nbytes

DEFAULT_THREADS = 8
"""Threads that read, copy, hash and write."""

DEFAULT_MEMORY = 2 * DEFAULT_THREADS * CHUNK_NBYTES
"""Bytes for copying: each thread holds the source bytes it read, and the bytes to write that it assembles from them."""

_MIN_CHUNK_NBYTES = 2**20
_SHARE_OF_AVAILABLE = 0.75
"""Share of the available memory for buffers; the rest is for uncounted memory, such as headers and digests."""

_SIDECAR_NBYTES_PER_TENSOR = 300


@dataclass(frozen=True, slots=True, repr=False)
class Summary(Result):
    """The result of a conversion."""

    output: str
    num_ranks: int
    """The tensor-parallel degree."""
    ranks: tuple[int, ...]
    """The ranks that were converted."""
    num_tensors: int
    num_files: int
    """Rank files written."""
    source_nbytes: int
    """Bytes of the source's tensors that a full run reads, including those of resumed units."""
    written_nbytes: int
    """Bytes of all rank files."""
    rank_nbytes: tuple[int, ...]
    """Bytes of the tensors of each rank in `ranks`."""
    replicated_nbytes: int | None
    """Bytes stored more than once, counted once for each copy beyond the first; None: not all ranks were converted."""
    resumed_nbytes: int
    """Source bytes of units that an interrupted conversion had finished and that were reused."""
    seconds: float
    peak_nbytes: int
    """Peak resident memory of the process, in bytes."""
    left_out: tuple[str, ...]
    """Files of the source that were not copied, and why."""
    unmatched: tuple[str, ...]
    """Tensors that no rule of the plan names, and that every rank therefore holds whole."""
    unused: tuple[str, ...]
    """Tensors that the engine does not load, if the plan was observed from an engine."""
    is_private: bool
    """True if only its owner can read the local output, because a shard of the source has such permissions."""
    verified: tuple[FileDigest, ...] = ()
    """The digests with which whole shards of the source were compared; empty: none were known."""
    num_shards: int = 0
    """Number of files with the source's tensors."""


def carry_out(
    conversion: Conversion,
    *,
    force: bool = False,
    threads: int = DEFAULT_THREADS,
    memory: int | str = DEFAULT_MEMORY,
    scratch: str | os.PathLike[str] | None = None,
    progress: Progress = None,
    resumable: bool = True,
    destination: Destination | None = None,
) -> Summary:
    """Carry out a conversion that `plan_conversion` has planned; result and errors as for `convert`.

    Args:
        conversion: the planned conversion. Any number of threads may share it.
        force, threads, memory, scratch, progress: as for `convert`.
        resumable: True if finished work is kept when the conversion fails.
        destination: where the output is published. Default: the planned location.

    Example:
        >>> import relayout
        >>> plan = relayout.plan_conversion("llama-3.1-8b", "planned", tp=4)
        >>> relayout.carry_out(plan).num_ranks
        4
    """
    started = time.monotonic()
    check_planned(conversion)
    threads, chunk_nbytes = share_memory(threads, memory, conversion.output)
    if destination is not None and not hasattr(destination, "begin_part"):
        raise PlanError(f"destination: {shown(destination)}, expected one of relayout.publish", code="option")
    to = StoreDestination(conversion.output, CONVERTED, force) if destination is None else destination
    to.check(conversion.source.root)
    identity = identity_of(conversion.source)
    fingerprint = fingerprint_of(conversion, identity.content)
    work = output_spec_of(conversion, fingerprint, scratch=scratch, is_resumable=resumable)
    what = "converting" if resumable else "saving"
    hashing = SourceHashing(conversion, num_readers_of(threads, chunk_nbytes))
    with to.begin(work) as output, hashing:
        making = _UnitMaker(
            conversion.with_suffix(output.suffix), output, identity, threads, chunk_nbytes, what, progress
        )
        making.make_units(fingerprint, hashing.check)
        verified = hashing.finish(making.tensors)
        write_sidecar(output, making.conversion, making.written, making.headers.files, verified)
        check_unchanged(conversion, identity)
    return replace(summary_of(conversion, work, making.resumed_nbytes, time.monotonic() - started), verified=verified)


def output_spec_of(
    conversion: Conversion,
    fingerprint: Fingerprint,
    *,
    scratch: str | os.PathLike[str] | None = None,
    is_resumable: bool = True,
) -> OutputSpec:
    """Return the description of a conversion for its output.

    Args:
        fingerprint: of the source's content, equal on all machines.
    """
    return OutputSpec(
        what=f"a conversion of {conversion.source.root} at TP {conversion.plan.num_ranks}",
        fingerprint=f"{fingerprint.source[:16]}{fingerprint.options[:16]}",
        weights=[file.name for file in conversion.layout.files],
        others=other_names(conversion),
        modes=output_modes(conversion.source),
        is_resumable=is_resumable,
        scratch=folder_text(scratch, "scratch"),
    )


def is_carried_out(
    conversion: Conversion, *, threads: int = DEFAULT_THREADS, memory: int | str = DEFAULT_MEMORY
) -> bool:
    """Return True if the output of a conversion exists, is complete, and is of this source and these options.

    Headers, small files and samples of all tensors are compared, not every byte: `verify` does that.

    Args:
        conversion: the result of `plan_conversion`.
        threads, memory: as for `convert`.

    Raises:
        FormatError, OSError: the source cannot be read.

    Example:
        >>> import relayout
        >>> plan = relayout.plan_conversion("llama-3.1-8b", "not-there", tp=4)
        >>> relayout.is_carried_out(plan)
        False
    """
    check_planned(conversion)
    return differences(conversion, threads=threads, memory=memory) == []


def differences(conversion: Conversion, *, threads: int, memory: int | str) -> list[str] | None:
    """Return the differences between the output and a conversion, see `differences_from_conversion`."""
    return differences_from_conversion(conversion, num_readers_of(*share_memory(threads, memory, conversion.output)))


def summary_of(conversion: Conversion, work: OutputSpec, resumed_nbytes: int, seconds: float) -> Summary:
    """Return the summary of a conversion that was published as `work`, without looking at the source again."""
    source, layout = conversion.source, conversion.layout
    return Summary(
        output=str(conversion.output),
        num_ranks=conversion.plan.num_ranks,
        ranks=conversion.ranks,
        num_tensors=len(source.tensors),
        num_files=len(layout.files),
        source_nbytes=conversion.nbytes_of(),
        written_nbytes=layout.nbytes,
        rank_nbytes=conversion.rank_nbytes,
        replicated_nbytes=conversion.replicated_nbytes,
        resumed_nbytes=resumed_nbytes,
        seconds=seconds,
        peak_nbytes=peak_nbytes(),
        left_out=source.left_out,
        unmatched=conversion.plan.unmatched,
        unused=conversion.plan.unused,
        is_private=scheme_of(str(conversion.output)) is None and not work.modes.file & 0o044,
        num_shards=len(source.files),
    )


class FileSink:
    """Writes to the files of a layout, with a limited number open at a time, and hashes their chunks.

    Each file is written from front to back, except for concurrent writes.
    """

    def __init__(self, output: Output, conversion: Conversion, hashed: Iterable[int], stop: Stop) -> None:
        """Hash the chunks of the files in `hashed`. Files that already exist must have their full length."""
        self._output = output
        self._layout = conversion.layout
        self._files = OpenFiles(self._open_file, num_descriptors=2)
        self._ordered = OrderedDigests(stop, new_blake3)
        self._chunks = {index: [b""] * self._layout.files[index].num_chunks for index in hashed}
        """The digests of the chunks of each file; empty bytes for those not yet known."""

    def put(self, target: Target, view: memoryview, address: int) -> None:
        """Write the bytes for one target. The caller reuses their memory, which is at `address` modulo a block."""
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
        """Return the digests of the chunks of each file that is complete."""
        return {index: b"".join(digests) for index, digests in self._chunks.items() if all(digests)}

    def _open_file(self, index: int) -> WritableFile:
        file = self._layout.files[index]
        return self._output.write(file.name, file.nbytes)

    def close(self) -> None:
        """Flush everything that was put to the drive, and close all files."""
        self._files.close()


def run_unit(
    plan: CopyPlan,
    unit: int,
    output: Output,
    *,
    threads: int = DEFAULT_THREADS,
    on_progress: Callable[[int], None] | None = None,
    deliver: Callable[[Iterator[CopyStep]], Iterator[CopyStep]] = lambda steps: steps,
) -> WrittenDigests:
    """Write the data sections of a unit's files, and return the digests of the written tensors and chunks.

    Bytes of other units are neither read nor written. When the call returns, all data is on the drive.

    Args:
        output: receives the files. Files that already exist must have their full length.
        deliver: makes the input of each step available before the step is carried out.
    """
    stop = Stop()
    sink = FileSink(output, plan.conversion, plan.conversion.layout.files_of_unit[unit], stop)
    try:
        tensors = run_copy_steps(
            plan.conversion,
            deliver(plan.steps(unit)),
            sink.put,
            threads=threads,
            on_progress=on_progress,
            stop=stop,
        )
    finally:
        sink.close()
    return WrittenDigests(tensors, sink.chunks())


def share_memory(threads: int, memory: int | str, output: Store | None = None) -> tuple[int, int]:
    """Share memory for copying among threads: at most `memory`, or three quarters of the available system memory.

    If the output is in a remote store, a third is reserved for uploads in flight.

    Returns:
        The number of threads, `threads` at most, and the number of source bytes that each copies at once.
    """
    threads, memory = at_least_one(threads, "threads"), size(memory, "memory")
    num_copies = 3 if output is not None and output.cost.is_remote else 2
    if memory < num_copies * _MIN_CHUNK_NBYTES:
        what = f"memory: {memory} bytes, expected {num_copies * _MIN_CHUNK_NBYTES} or more"
        raise PlanError(what, code="option")
    memory = max(num_copies * _MIN_CHUNK_NBYTES, min(memory, int(available_nbytes() * _SHARE_OF_AVAILABLE)))
    threads = min(threads, memory // (num_copies * _MIN_CHUNK_NBYTES))
    return threads, align_down(memory // (num_copies * threads), BLOCK)


@dataclass(slots=True)
class _UnitMaker:
    """State of one process that writes all files of a conversion."""

    conversion: Conversion
    output: Output
    identity: SourceIdentity
    threads: int
    chunk_nbytes: int
    what: str
    """The activity, for the progress bar."""
    progress: Progress
    headers: HeaderWriter = field(init=False)
    tensors: dict[int, TensorDigests] = field(default_factory=dict)
    chunks: dict[int, bytes] = field(default_factory=dict)
    resumed_nbytes: int = 0

    def __post_init__(self) -> None:
        self.headers = HeaderWriter(self.output, self.conversion)

    @property
    def written(self) -> WrittenDigests:
        """All tensors and files; complete at the end."""
        return WrittenDigests(self.tensors, self.chunks)

    def make_units(self, fingerprint: Fingerprint, check: Callable[[], None]) -> None:
        """Write each unfinished unit as a part of the output; call `check` before each unit."""
        conversion = self.conversion
        units = conversion.layout.units
        kept = self._kept(fingerprint)
        self.resumed_nbytes = sum(conversion.nbytes_of(units[unit]) for unit in kept)
        self.output.check_space(*needed_for(conversion, set(range(len(units))) - kept.keys()))
        plan, passed = CopyPlan(conversion, chunk_nbytes=self.chunk_nbytes), self.resumed_nbytes
        with reporting(self.progress, self.what, conversion.nbytes_of()) as report:
            report(passed)
            for unit, tensors in enumerate(units):
                check()
                if unit in kept:
                    done = kept[unit]
                    deque(self.headers.headers(unit, done), 0)
                else:
                    done = make_unit(
                        plan,
                        unit,
                        self.output,
                        self.headers,
                        self.identity,
                        fingerprint,
                        threads=self.threads,
                        on_progress=report.after(passed),
                    )
                    passed += conversion.nbytes_of(tensors)
                    report(passed)
                self.tensors |= done.tensors
                self.chunks |= done.chunks

    def _kept(self, fingerprint: Fingerprint) -> dict[int, WrittenDigests]:
        """Return the finished units; none unless the source is proven to be the one that they were converted from."""
        conversion, units = self.conversion, self.conversion.layout.units
        found = {
            unit: done
            for unit in range(len(units))
            if (done := read_unit(self.output, conversion, fingerprint, unit)) is not None
        }
        kept = merged(written for _, written in found.values())
        num_readers = num_readers_of(self.threads, self.chunk_nbytes)
        if all(here == self.identity.here for here, _ in found.values()):
            is_verified = not changed_shards(conversion, kept, num_readers)
        else:
            nbytes = sum(conversion.nbytes_of(units[unit]) for unit in found)
            with reporting(self.progress, "comparing the source", nbytes):
                is_verified = is_unchanged_since(conversion, kept, num_readers)
        return {unit: written for unit, (_, written) in found.items()} if is_verified else {}


def make_unit(
    plan: CopyPlan,
    unit: int,
    output: Output,
    headers: HeaderWriter,
    identity: SourceIdentity,
    fingerprint: Fingerprint,
    *,
    threads: int,
    on_progress: Callable[[int], None],
) -> WrittenDigests:
    """Convert one unit, and keep it as a part of the output.

    Args:
        identity: of the source, before it was read.
        fingerprint: of the conversion; it contains the content digest of that identity.
    """
    conversion = plan.conversion
    written = run_unit(plan, unit, output, threads=threads, on_progress=on_progress)
    headers.write(unit, written)
    check_unchanged(conversion, identity)
    output.keep(part_name(unit), dump_notes(fingerprint, identity.here, written))
    return written


def read_unit(
    output: Output, conversion: Conversion, fingerprint: Fingerprint, unit: int
) -> tuple[str, WrittenDigests] | None:
    """Return the `SourceIdentity.here` and the digests in a unit's notes; None if the unit is not finished."""
    kept = output.kept(part_name(unit))
    notes = None if kept is None else parse_notes(kept)
    if notes is None or notes[0] != fingerprint:
        return None
    layout, (_, here, written) = conversion.layout, notes
    tensors = set(layout.units[unit])
    with_bytes = {t for t in tensors if conversion.extents_of(t)}
    is_complete = with_bytes <= written.tensors.keys() and written.chunks.keys() == set(layout.files_of_unit[unit])
    return (here, written) if is_complete and written.tensors.keys() <= tensors else None


def part_name(unit: int) -> str:
    """Return the name of a unit as a part of an output."""
    return f"unit-{unit}"


def merged(written: Iterable[WrittenDigests]) -> WrittenDigests:
    """Return the union of all tensors and files."""
    tensors, chunks = dict[int, TensorDigests](), dict[int, bytes]()
    for one in written:
        tensors |= one.tensors
        chunks |= one.chunks
    return WrittenDigests(tensors, chunks)


def num_readers_of(threads: int, chunk_nbytes: int) -> int:
    """Return the number of threads that may read files again: rereading needs buffers of another size than copying."""
    return max(1, min(threads, 2 * threads * chunk_nbytes // REHASH_NBYTES))


def needed_for(conversion: Conversion, units: Iterable[int] | None = None) -> tuple[int, int]:
    """Return about how many bytes an output with these units takes, and the bytes of the largest unit."""
    layout, source = conversion.layout, conversion.source
    chosen = range(len(layout.units)) if units is None else units
    sizes = [sum(layout.files[index].nbytes for index in layout.files_of_unit[unit]) for unit in chosen]
    side = sum(status.nbytes for name in source.side_files if (status := source.folder.stat(name)))
    sidecar = _SIDECAR_NBYTES_PER_TENSOR * len(source.tensors) * (conversion.plan.num_ranks + 1)
    return sum(sizes) + layout.nbytes // 2**16 + side + sidecar, max(sizes, default=0)
