"""A conversion as jobs for any number of processes and machines: each job converts a unit, in the end one commits.

A job says all that a process needs to know; it can be sent as JSON. It reads the source bytes of its unit once, writes
the unit's files completely, and then its record: the journal of just this unit. A job may be carried out any number of
times, at the same time even: the files are the same. What a lost process leaves is not taken for done. `commit_units`
reads the records, and publishes the output when every unit has one. Nothing here knows what runs the jobs.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from relayout.checkpoint.converted import CONVERTED
from relayout.checkpoint.source import read_source
from relayout.conversion.copy import DEFAULT_MEMORY, DEFAULT_THREADS, run_unit, share_memory
from relayout.conversion.journal import Claims, Journal, TensorDigests, Undertaking, read_journal
from relayout.conversion.layout import Conversion, lay_out
from relayout.conversion.resume import undertaking_of
from relayout.conversion.run import ConversionPlan, Summary, num_readers_of, summary_of
from relayout.conversion.side_files import output_modes
from relayout.conversion.sidecar import HeaderWriter, write_sidecar
from relayout.conversion.steps import CopyPlan
from relayout.core.arguments import integer, size
from relayout.core.extents import BLOCK, align_up
from relayout.errors import FormatError, PlanError, shown
from relayout.format.source_record import ConversionOptions
from relayout.plans.plan import Plan
from relayout.progress import Progress, reporting
from relayout.results import Result
from relayout.storage.buffers import Buffer
from relayout.storage.memory import peak_nbytes
from relayout.storage.protocols import Staging
from relayout.storage.stores import find_input, find_store, scheme_of


@dataclass(frozen=True, slots=True)
class UnitJob:
    """One unit of a conversion, to be converted by any process that reaches source and output."""

    source: str
    """An absolute path, or a URL. Never with secrets: a process has its own."""
    output: str
    plan: Plan
    """Who carries out the job plans nothing, and needs nothing that found the plan."""
    options: ConversionOptions
    undertaking: Undertaking
    """What the conversion was of when the job was made."""
    unit: int
    num_units: int
    source_nbytes: int
    """Bytes of the unit's source tensors."""
    force: bool = False
    """Whether an existing output will be replaced."""

    def as_json(self) -> dict[str, Any]:
        """What `from_json` takes."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {"options": asdict(self.options), "undertaking": asdict(self.undertaking)}
        return {**plain, "plan": self.plan.as_json(), **values}

    @staticmethod
    def from_json(job: Mapping[str, Any]) -> UnitJob:
        """The job of what `as_json` returned.

        Raises:
            FormatError: its plan is none.
        """
        parsed = {
            "plan": Plan.from_json(job["plan"]),
            "options": ConversionOptions(**job["options"]),
            "undertaking": Undertaking(**job["undertaking"]),
        }
        return UnitJob(**{**job, **parsed})

    def planned(self) -> ConversionPlan:
        """The conversion: the layout is made again, from the source's headers and the plan.

        Raises:
            FormatError: the source has changed since the job was made.
            PlanError: another version of relayout has made the job, and would convert otherwise.
        """
        checkpoint, plan, options = read_source(find_input(self.source)), self.plan, self.options
        if len(checkpoint.tensors) != len(plan.cut_of):
            raise FormatError("has changed since the job was made", path=self.source, code="mismatch")
        layout = (options.alignment, options.max_part_nbytes, options.dcp, options.layout)
        planned = ConversionPlan.of(lay_out(find_store(self.output), checkpoint, plan, *layout))
        found = undertaking_of(planned)
        if found.source != self.undertaking.source:
            raise FormatError("has changed since the job was made", path=self.source, code="mismatch")
        if found != self.undertaking:
            raise PlanError(f"unit {self.unit}: this version of relayout plans another conversion", code="unsupported")
        return planned


@dataclass(frozen=True, slots=True)
class UnitRecord(Result):
    """What a process that has converted a unit tells. What counts is the record that it has left beside the files."""

    unit: int
    source_nbytes: int
    """Bytes of the unit's source tensors."""
    read_nbytes: int
    """Of them, those that were read now: none if the unit was done before."""
    seconds: float
    peak_nbytes: int
    """The most memory that the process ever held (resident)."""


def unit_jobs(planned: ConversionPlan, *, force: bool = False) -> list[UnitJob]:
    """Make a job of each unit of a conversion.

    `max_part_nbytes` decides how many there are: each holds about so many bytes of every rank.

    Args:
        planned: by `relayout.plan_conversion`. Paths must mean the same on every machine.
        force: as for `convert`.

    Raises:
        PlanError: the output exists.
    """
    planned.output.check_output(planned.source.root, CONVERTED, force=force)
    undertaking, num_units = undertaking_of(planned), len(planned.layout.units)
    where = _absolute(str(planned.source.root)), _absolute(str(planned.output))
    plan = planned.plan
    return [
        UnitJob(*where, plan, planned.options, undertaking, unit, num_units, _source_nbytes(planned, unit), force)
        for unit in range(num_units)
    ]


def run_job(
    job: UnitJob,
    *,
    threads: int = DEFAULT_THREADS,
    memory: int | str = DEFAULT_MEMORY,
    progress: Progress = None,
) -> UnitRecord:
    """Convert the unit of a job; see `convert_unit`.

    Raises:
        FormatError, PlanError, OSError: as `convert`; or as `UnitJob.planned`.
    """
    return convert_unit(job.planned(), job.unit, force=job.force, threads=threads, memory=memory, progress=progress)


def convert_unit(
    planned: ConversionPlan,
    unit: int,
    *,
    force: bool = False,
    threads: int = DEFAULT_THREADS,
    memory: int | str = DEFAULT_MEMORY,
    progress: Progress = None,
) -> UnitRecord:
    """Convert one unit, unless that was done before, and leave its record. The output appears by `commit_units`.

    Args:
        force, threads, memory, progress: as for `convert`.

    Raises:
        FormatError: the source is damaged, or has changed meanwhile.
        PlanError: there is no such unit, or the output exists.
        OSError: reading or writing failed.
    """
    started = time.monotonic()
    threads, chunk_nbytes = share_memory(integer(threads, "threads"), size(memory, "memory"), planned.output)
    layout, source, undertaking = planned.layout, planned.source, undertaking_of(planned)
    if not 0 <= unit < len(layout.units):
        raise PlanError(f"unit {unit}, expected 0 to {len(layout.units) - 1}", code="option")
    nbytes = _source_nbytes(planned, unit)
    planned.output.check_output(source.root, CONVERTED, force=force)
    with _part(planned, undertaking, unit, force) as staging:
        is_done = _record(staging, planned, undertaking, unit) is not None
        if not is_done:
            staging.check_space(sum(layout.files[number].nbytes for number in layout.files_of_unit[unit]))
            with (
                Journal(staging, undertaking, append=False, name=_part_name(unit)) as journal,
                reporting(progress, f"unit {unit} of {len(layout.units)}", nbytes) as report,
            ):
                plan = CopyPlan(planned, chunk_nbytes=chunk_nbytes)
                written = run_unit(plan, unit, staging, threads=threads, on_progress=report)
                journal.add(written.tensors)
                journal.add_files(written.chunks)
            HeaderWriter(staging, planned).write(unit, written.tensors, written.chunks)
            if undertaking_of(planned) != undertaking:
                raise FormatError("has changed while it was read", path=str(source.root), code="mismatch")
        elif callable(progress):
            progress(nbytes, nbytes)
    return UnitRecord(unit, nbytes, 0 if is_done else nbytes, time.monotonic() - started, peak_nbytes())


@dataclass(frozen=True, slots=True)
class ConvertedUnits(Result):
    """What a process that has converted a share of the units tells."""

    output: str
    num_units: int
    """Of the whole conversion."""
    units: tuple[UnitRecord, ...]


def convert_share(planned: ConversionPlan, share: str, **options: Any) -> ConvertedUnits:
    """Convert a share of the units, such as a task of an array of processes does.

    Args:
        share: "K/N", K from 0: the units K, K + N, K + 2 N ... With N units, that is unit K; with fewer, there may be
            nothing to do.
        options: as for `convert_unit`.

    Raises:
        FormatError, PlanError, OSError: as `convert_unit`; or `share` is invalid.
    """
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", share)
    if found is None or int(found[1]) >= int(found[2]):
        raise PlanError(f"unit {shown(share)}, expected K/N with K from 0 to N - 1, such as 7/31", code="option")
    num_units = len(planned.layout.units)
    units = range(int(found[1]), num_units, int(found[2]))
    return ConvertedUnits(
        str(planned.output), num_units, tuple(convert_unit(planned, unit, **options) for unit in units)
    )


def commit_jobs(jobs: list[UnitJob], **options: Any) -> Summary:
    """Publish the output of jobs that are all of one conversion; arguments, result and errors as for `commit_units`."""
    return commit_units(jobs[0].planned(), force=jobs[0].force, **options)


def commit_units(
    planned: ConversionPlan,
    *,
    force: bool = False,
    sha256: bool = False,
    threads: int = DEFAULT_THREADS,
    memory: int | str = DEFAULT_MEMORY,
) -> Summary:
    """Publish the output, if all units are done.

    Reads the units' records, compares the length and the header of every file, and writes what belongs beside them, the
    manifest last. What lost processes have left goes.

    Args:
        force, sha256, threads, memory: as for `convert`.

    Raises:
        FormatError: the source has changed since the units were converted, or a file of a unit is not what its record
            says.
        PlanError: units are missing, or the output exists.
        OSError: reading or writing failed.
    """
    started = time.monotonic()
    shared = share_memory(integer(threads, "threads"), size(memory, "memory"), planned.output)
    source, layout, undertaking = planned.source, planned.layout, undertaking_of(planned)
    planned.output.check_output(source.root, CONVERTED, force=force)
    with planned.output.stage(
        CONVERTED, replace=force, modes=output_modes(planned.source), shared=_shared_name(undertaking)
    ) as staging:
        headers = HeaderWriter(staging, planned)
        tensors: dict[int, TensorDigests] = {}
        chunks: dict[int, bytes] = {}
        records = [_record(staging, planned, undertaking, unit) for unit in range(len(layout.units))]
        if missing := [str(unit) for unit, record in enumerate(records) if record is None]:
            shown = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
            raise PlanError(
                f"{len(missing)} of {len(records)} units are not done: {shown}", path=staging.location, code="missing"
            )
        for name in set(staging.names()) - {file.name for file in layout.files}:
            staging.remove(name)  # Of a commit that was interrupted.
        for unit, record in enumerate(records):
            assert record is not None
            tensors |= record.tensors
            chunks |= record.chunks
            for file, header in headers.headers(unit, record.tensors, record.chunks):
                if staging.can_read:
                    _check_head(staging, file.name, file.nbytes, header)
        write_sidecar(staging, planned, tensors, chunks, headers.files, threads=num_readers_of(*shared), sha256=sha256)
        if undertaking_of(planned) != undertaking:
            raise FormatError("has changed while it was read", path=str(source.root), code="mismatch")
    return summary_of(planned, 0, time.monotonic() - started)


@contextmanager
def _part(conversion: Conversion, undertaking: Undertaking, unit: int, force: bool) -> Iterator[Staging]:
    shared, modes = _shared_name(undertaking), output_modes(conversion.source)
    output = conversion.output
    with output.stage_part(CONVERTED, shared, _part_name(unit), replace=force, modes=modes) as staging:
        yield staging


def _source_nbytes(conversion: Conversion, unit: int) -> int:
    return sum(conversion.source.tensors[t].extent.nbytes for t in conversion.layout.units[unit])


def _absolute(path: str | os.PathLike[str]) -> str:
    """The path or URL for a process in another folder."""
    return os.fspath(path) if scheme_of(path) else str(Path(path).absolute())


def _shared_name(undertaking: Undertaking) -> str:
    """What parts of one conversion of one source have in common, and no others."""
    return f"{undertaking.source[:16]}{undertaking.options[:16]}"


def _part_name(unit: int) -> str:
    return f"unit-{unit}"


def _record(staging: Staging, conversion: Conversion, undertaking: Undertaking, unit: int) -> Claims | None:
    """The record of a unit; None if there is none of this conversion, or it lacks something."""
    found = read_journal(staging, _part_name(unit))
    if found is None or found[0] != undertaking:
        return None
    tensors = (t for t in conversion.layout.units[unit] if conversion.source.tensors[t].extent.nbytes)
    is_whole = all(t in found[1].tensors for t in tensors) and all(
        number in found[1].chunks for number in conversion.layout.files_of_unit[unit]
    )
    return found[1] if is_whole else None


def _check_head(staging: Staging, name: str, nbytes: int, header: bytes) -> None:
    """Check that a file has its length and header, which was written last.

    Raises:
        FormatError: it has another.
    """
    with staging.open(name, nbytes) as file:
        view = Buffer().reserve(align_up(len(header), BLOCK))
        file.read(0, view)
    if view[: len(header)] != header:
        raise FormatError("is not the file that its unit's record describes", path=name, code="mismatch")
