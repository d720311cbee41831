"""Carries out a conversion that was planned."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from relayout.checkpoint.converted import CONVERTED
from relayout.conversion import preview
from relayout.conversion.copy import DEFAULT_MEMORY, DEFAULT_THREADS, hash_chunks, run_unit, share_memory
from relayout.conversion.journal import Claims, Journal, TensorDigests
from relayout.conversion.layout import Conversion
from relayout.conversion.resume import claims_of, still_true, undertaking_of
from relayout.conversion.side_files import output_modes
from relayout.conversion.sidecar import HeaderWriter, write_sidecar
from relayout.conversion.steps import CopyPlan
from relayout.core.arguments import integer, size
from relayout.errors import FormatError, PlanError
from relayout.progress import Progress, reporting
from relayout.results import Result
from relayout.storage.hashing import CHUNK_NBYTES as REHASH_NBYTES
from relayout.storage.memory import peak_nbytes
from relayout.storage.protocols import Staging

_SIDECAR_NBYTES_PER_TENSOR = 300


@dataclass(frozen=True, slots=True)
class Summary(Result):
    """What a conversion did."""

    output: str
    num_ranks: int
    num_tensors: int
    num_files: int
    """Rank files written."""
    source_nbytes: int
    """Bytes of all source tensors."""
    written_nbytes: int
    """Bytes of all rank files."""
    rank_nbytes: tuple[int, ...]
    """Bytes of each rank's tensors."""
    replicated_nbytes: int
    """Bytes that are stored more than once, counted once for each copy beyond the first."""
    resumed_nbytes: int
    """Source bytes of tensors that an interrupted conversion had written: checked, and not written again."""
    seconds: float
    peak_nbytes: int
    """The most memory that the process ever held (resident)."""
    left_out: tuple[str, ...]
    """What of the source did not go along, and why."""
    unmatched: tuple[str, ...]
    """Tensors that no rule of the plan names, and that every rank therefore holds whole."""
    untaken: tuple[str, ...]
    """Tensors that the engine does not take, from which the plan was observed."""


@dataclass(frozen=True, slots=True)
class ConversionPlan(Conversion):
    """A conversion that was planned, to be looked at and to be carried out. May be used by any number of threads."""

    @staticmethod
    def of(conversion: Conversion) -> ConversionPlan:
        """The same, to be carried out."""
        return ConversionPlan(*(getattr(conversion, field.name) for field in fields(conversion)))

    def __repr__(self) -> str:
        ranks = f"{self.plan.num_ranks} ranks"
        return f"<ConversionPlan {str(self.source.root)!r} to {str(self.output)!r}: {ranks}; see preview()>"

    def _repr_html_(self) -> str:
        """For notebooks: the preview."""
        return self.preview()._repr_html_()

    def preview(self) -> preview.Preview:
        """What it will do, in sums that a person can check."""
        return preview.preview(self)

    def run(
        self,
        *,
        force: bool = False,
        sha256: bool = False,
        threads: int = DEFAULT_THREADS,
        memory: int | str = DEFAULT_MEMORY,
        progress: Progress = None,
    ) -> Summary:
        """Do what was planned; arguments, result and errors as for `convert`."""
        shared = share_memory(integer(threads, "threads"), size(memory, "memory"), self.output)
        return _run(self, force, sha256, *shared, progress)


def _run(
    conversion: Conversion, force: bool, sha256: bool, threads: int, chunk_nbytes: int, progress: Progress
) -> Summary:
    started = time.monotonic()
    source = conversion.source
    conversion.output.check_output(conversion.source.root, CONVERTED, force=force)
    undertaking = undertaking_of(conversion)
    with conversion.output.stage(CONVERTED, replace=force, modes=output_modes(source)) as staging:
        if sha256 and not staging.can_read:
            what = "cannot read files before they are published: convert to a local folder, or without sha256"
            raise PlanError(what, path=str(conversion.output), code="option")
        claims = claims_of(staging, undertaking, force=force)
        staging.check_space(_needed_nbytes(conversion))
        num_readers = num_readers_of(threads, chunk_nbytes)
        with reporting(progress if claims.tensors else None, "checking what is done", source.nbytes):
            done = still_true(staging, claims, conversion, num_readers)
        resumed_nbytes = sum(source.tensors[t].extent.nbytes for t in done.tensors)
        headers = HeaderWriter(staging, conversion)
        with (
            Journal(staging, undertaking, append=bool(claims.tensors)) as journal,
            reporting(progress, "converting", source.nbytes) as report,
        ):
            digests, chunks = _run_units(conversion, staging, journal, headers, done, threads, chunk_nbytes, report)
        write_sidecar(staging, conversion, digests, chunks, headers.files, threads=num_readers, sha256=sha256)
        if undertaking_of(conversion) != undertaking:
            staging.clear()
            raise FormatError("has changed while it was read", path=str(conversion.source.root), code="mismatch")
    return summary_of(conversion, resumed_nbytes, time.monotonic() - started)


def summary_of(conversion: Conversion, resumed_nbytes: int, seconds: float) -> Summary:
    """The summary of a conversion that is done."""
    source, layout = conversion.source, conversion.layout
    rank_nbytes = conversion.rank_nbytes
    return Summary(
        output=str(conversion.output),
        num_ranks=conversion.plan.num_ranks,
        num_tensors=len(source.tensors),
        num_files=len(layout.files),
        source_nbytes=source.nbytes,
        written_nbytes=layout.nbytes,
        rank_nbytes=rank_nbytes,
        replicated_nbytes=layout.data_nbytes - source.nbytes,
        resumed_nbytes=resumed_nbytes,
        seconds=seconds,
        peak_nbytes=peak_nbytes(),
        left_out=source.left_out,
        unmatched=conversion.plan.unmatched,
        untaken=conversion.plan.untaken,
    )


def _run_units(
    conversion: Conversion,
    staging: Staging,
    journal: Journal,
    headers: HeaderWriter,
    done: Claims,
    threads: int,
    chunk_nbytes: int,
    report: Callable[[int], None] | None,
) -> tuple[dict[int, TensorDigests], dict[int, bytes]]:
    """Convert one unit after the other, but for tensors that are done.

    Returns:
        The digests of all tensors, and of the chunks of all files.
    """
    layout, tensors = conversion.layout, conversion.source.tensors
    digests = dict(done.tensors)
    chunks = dict(done.chunks)
    num_readers = num_readers_of(threads, chunk_nbytes)
    passed = 0

    def note(written: Mapping[int, TensorDigests]) -> None:
        if written:
            journal.add(written)

    def tell(nbytes: int) -> None:
        if report is not None:
            report(passed + resumed + nbytes)

    plan = CopyPlan(conversion, chunk_nbytes=chunk_nbytes)
    for number, unit in enumerate(layout.units):
        resumed = sum(tensors[t].extent.nbytes for t in unit if t in done.tensors)
        written = run_unit(
            plan, number, staging, done=done.tensors.keys(), threads=threads, on_tensors=note, on_progress=tell
        )
        digests |= written.tensors
        unknown = [file for file in layout.files_of_unit[number] if file not in {**chunks, **written.chunks}]
        added = {**written.chunks, **hash_chunks(staging, layout, unknown, num_readers)}
        journal.add_files(added)
        chunks |= added
        headers.write(number, digests, chunks)
        passed += sum(tensors[t].extent.nbytes for t in unit)
    return digests, chunks


def num_readers_of(threads: int, chunk_nbytes: int) -> int:
    """How many of the threads may read files again: they need memory of another size."""
    return max(1, min(threads, 2 * threads * chunk_nbytes // REHASH_NBYTES))


def _needed_nbytes(conversion: Conversion) -> int:
    source = conversion.source
    side = sum(status.nbytes for name in source.side_files if (status := source.folder.stat(name)))
    sidecar = _SIDECAR_NBYTES_PER_TENSOR * len(source.tensors) * (conversion.plan.num_ranks + 1)
    return conversion.layout.nbytes + conversion.layout.nbytes // 2**16 + side + sidecar
