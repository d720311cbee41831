"""Carries out a conversion that was planned."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from relayout.checkpoint.converted import CONVERTED
from relayout.checkpoint.source import identity_of
from relayout.conversion.copy import DEFAULT_MEMORY, DEFAULT_THREADS, hash_chunks, run_unit, share_memory
from relayout.conversion.journal import Journal, TensorDigests, Written
from relayout.conversion.layout import Conversion
from relayout.conversion.resume import (
    check_unchanged,
    fingerprint_of,
    is_done,
    read_progress,
    source_agrees,
    verified_progress,
)
from relayout.conversion.side_files import output_modes
from relayout.conversion.sidecar import HeaderWriter, write_sidecar
from relayout.conversion.steps import CopyPlan
from relayout.errors import FormatError
from relayout.progress import Progress, reporting
from relayout.results import Result
from relayout.storage.hashing import READ_NBYTES as REHASH_NBYTES
from relayout.storage.memory import peak_nbytes
from relayout.storage.protocols import Staging
from relayout.storage.stores import scheme_of

_SIDECAR_NBYTES_PER_TENSOR = 300


@dataclass(frozen=True, slots=True, repr=False)
class Summary(Result):
    """What a conversion did."""

    output: str
    num_ranks: int
    """The tensor-parallel degree."""
    ranks: tuple[int, ...]
    """That were converted."""
    num_tensors: int
    num_files: int
    """Rank files written."""
    source_nbytes: int
    """Bytes that were to be read of the source's tensors."""
    written_nbytes: int
    """Bytes of all rank files."""
    rank_nbytes: tuple[int, ...]
    """Bytes of the tensors of each of these ranks."""
    replicated_nbytes: int | None
    """Bytes that are stored more than once, counted once for each copy beyond the first; None: not all ranks were
    converted."""
    resumed_nbytes: int
    """Source bytes of tensors that an interrupted conversion had written: checked, and not written again."""
    seconds: float
    peak_nbytes: int
    """The most memory that the process ever held (resident)."""
    left_out: tuple[str, ...]
    """Files of the source that were not copied, and why."""
    unmatched: tuple[str, ...]
    """Tensors that no rule of the plan names, and that every rank therefore holds whole."""
    unused: tuple[str, ...]
    """Tensors that the engine does not take, from which the plan was observed."""
    is_private: bool
    """Whether only its owner can read the local output, as it is with a shard of the source."""


def carry_out(
    conversion: Conversion,
    *,
    force: bool = False,
    threads: int = DEFAULT_THREADS,
    memory: int | str = DEFAULT_MEMORY,
    progress: Progress = None,
    resumable: bool = True,
) -> Summary:
    """Carry out a conversion that `plan_conversion` has planned; result and errors as for `convert`.

    Args:
        conversion: what to do. Any number of threads may share it.
        force, threads, memory, progress: as for `convert`.
        resumable: whether finished work is kept if it fails.

    Example:
        >>> import relayout
        >>> plan = relayout.plan_conversion("llama-3.1-8b", "planned", tp=4)
        >>> relayout.carry_out(plan).num_ranks
        4
    """
    started = time.monotonic()
    threads, chunk_nbytes = share_memory(threads, memory, conversion.output)
    num_readers = num_readers_of(threads, chunk_nbytes)
    source, output = conversion.source, conversion.output
    output.check_output(source.root, CONVERTED, force=force)
    identity = identity_of(source)
    fingerprint = fingerprint_of(conversion, identity.here)
    with output.stage(CONVERTED, replace=force, modes=output_modes(source)) as staging:
        agrees = partial(source_agrees, conversion, threads=num_readers)
        noted = read_progress(staging, fingerprint, force=force, agrees=agrees)
        staging.check_space(needed_nbytes(conversion))
        with reporting(progress if noted.tensors else None, "checking finished work", conversion.nbytes_of()):
            done = verified_progress(staging, noted, conversion, num_readers)
        headers = HeaderWriter(staging, conversion)
        with (
            Journal(staging, fingerprint, append=bool(noted.tensors)) if resumable else nullcontext() as journal,
            reporting(progress, "converting" if resumable else "saving", conversion.nbytes_of()) as report,
        ):
            written = _run_units(conversion, staging, journal, headers, done, threads, chunk_nbytes, report)
        write_sidecar(staging, conversion, written, headers.files)
        try:
            check_unchanged(conversion, identity)
        except FormatError:
            staging.clear()
            raise
    return summary_of(conversion, conversion.nbytes_of(done.tensors), time.monotonic() - started)


def is_carried_out(
    conversion: Conversion, *, threads: int = DEFAULT_THREADS, memory: int | str = DEFAULT_MEMORY
) -> bool:
    """Whether the output of a conversion is there, complete, of this source and these options.

    Headers, small files and samples of all tensors are compared, not every byte: `verify` does that.

    Args:
        conversion: what `plan_conversion` has planned.
        threads, memory: as for `convert`.

    Raises:
        FormatError, OSError: the source cannot be read.

    Example:
        >>> import relayout
        >>> plan = relayout.plan_conversion("llama-3.1-8b", "not-there", tp=4)
        >>> relayout.is_carried_out(plan)
        False
    """
    return is_done(conversion, num_readers_of(*share_memory(threads, memory, conversion.output)))


def summary_of(conversion: Conversion, resumed_nbytes: int, seconds: float) -> Summary:
    """The summary of a conversion that is done."""
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
        is_private=scheme_of(str(conversion.output)) is None and not output_modes(source).file & 0o044,
    )


def _run_units(
    conversion: Conversion,
    staging: Staging,
    journal: Journal | None,
    headers: HeaderWriter,
    done: Written,
    threads: int,
    chunk_nbytes: int,
    report: Callable[[int], None],
) -> Written:
    """Convert one unit after the other, but for tensors that are done. Returns the digests of all tensors and files."""
    layout = conversion.layout
    tensors, chunks = dict(done.tensors), dict(done.chunks)
    num_readers = num_readers_of(threads, chunk_nbytes)

    def note(complete: Mapping[int, TensorDigests]) -> None:
        if complete and journal is not None:
            journal.add(Written(complete))

    def on_progress(nbytes: int) -> None:
        report(passed + resumed + nbytes)

    plan = CopyPlan(conversion, chunk_nbytes=chunk_nbytes)
    passed = 0
    for index, unit in enumerate(layout.units):
        resumed = conversion.nbytes_of(t for t in unit if t in done.tensors)
        written = run_unit(
            plan, index, staging, done=done.tensors.keys(), threads=threads, on_tensors=note, on_progress=on_progress
        )
        tensors |= written.tensors
        unhashed = [file for file in layout.files_of_unit[index] if file not in {**chunks, **written.chunks}]
        added = {**written.chunks, **hash_chunks(staging, conversion, unhashed, num_readers)}
        if journal is not None:
            journal.add(Written(chunks=added))
        chunks |= added
        headers.write(index, Written(tensors, chunks))
        passed += conversion.nbytes_of(unit)
    return Written(tensors, chunks)


def num_readers_of(threads: int, chunk_nbytes: int) -> int:
    """How many of the threads may read files again: that takes memory of another size."""
    return max(1, min(threads, 2 * threads * chunk_nbytes // REHASH_NBYTES))


def needed_nbytes(conversion: Conversion) -> int:
    """About how many bytes an output takes."""
    source = conversion.source
    side = sum(status.nbytes for name in source.side_files if (status := source.folder.stat(name)))
    sidecar = _SIDECAR_NBYTES_PER_TENSOR * len(source.tensors) * (conversion.plan.num_ranks + 1)
    return conversion.layout.nbytes + conversion.layout.nbytes // 2**16 + side + sidecar
