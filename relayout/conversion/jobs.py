"""A conversion as jobs for any number of processes and machines: each job converts a unit, then one process commits.

A job is self-contained and can be sent as JSON. It reads the source bytes of its unit once, writes the unit's files
completely, and then its record. A job may be carried out any number of times, even at the same time: the files are the
same. The leftovers of a lost process have no record. `commit_units` reads the records, and publishes the output when
every unit has one. This module is independent of the system that runs the jobs.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from relayout.checkpoint.converted import CONVERTED
from relayout.checkpoint.source import identity_of, read_source
from relayout.conversion.copy_plan import CopyPlan, WrittenDigests
from relayout.conversion.layout import Conversion
from relayout.conversion.resume import Fingerprint, changed_shards, check_unchanged, fingerprint_of
from relayout.conversion.run import (
    DEFAULT_MEMORY,
    DEFAULT_THREADS,
    Summary,
    make_unit,
    merged,
    needed_for,
    output_spec_of,
    read_unit,
    share_memory,
    summary_of,
)
from relayout.conversion.sidecar import HeaderWriter, write_sidecar
from relayout.errors import FormatError, PlanError, shown
from relayout.format.source_record import ConversionOptions
from relayout.plans.plan import Plan
from relayout.publish.output import Output
from relayout.publish.publishers import StoreDestination
from relayout.reporting import Progress, Result, reporting
from relayout.storage.stores import find_input, find_store, scheme_of
from relayout.storage.system import peak_nbytes


@dataclass(frozen=True, slots=True)
class UnitJob:
    """One unit of a conversion, to be converted by any process that reaches source and output."""

    source: str
    """An absolute path, or a URL. It contains no secrets: each process has its own."""
    output: str
    plan: Plan
    """The resolved plan: a process that carries out the job needs no planner."""
    options: ConversionOptions
    ranks: tuple[int, ...]
    """The ranks that are converted."""
    fingerprint: Fingerprint
    """The fingerprint of the conversion when the job was made."""
    unit: int
    num_units: int
    source_nbytes: int
    """Bytes of the unit's source tensors that are read."""
    force: bool = False
    """True if an existing output will be replaced."""

    def as_json(self) -> dict[str, Any]:
        """Return the job as a JSON object, for `from_json`."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        values = {"options": asdict(self.options), "fingerprint": asdict(self.fingerprint)}
        return {**plain, "plan": self.plan.as_json(), **values}

    @staticmethod
    def from_json(job: Mapping[str, Any]) -> UnitJob:
        """Return the job that `as_json` serialized."""
        parsed = {
            "plan": Plan.from_json(job["plan"]),
            "options": ConversionOptions(**job["options"]),
            "ranks": tuple(job["ranks"]),
            "fingerprint": Fingerprint(**job["fingerprint"]),
        }
        return UnitJob(**{**job, **parsed})

    def planned(self) -> Conversion:
        """Rebuild the conversion: its layout is computed again from the source's headers and the plan."""
        checkpoint, plan, options = read_source(find_input(self.source)), self.plan, self.options
        source_changed = FormatError("has changed since the job was made", path=self.source, code="mismatch")
        if len(checkpoint.tensors) != len(plan.cut_of):
            raise source_changed
        planned = Conversion.lay_out(
            find_store(self.output),
            checkpoint,
            plan,
            alignment=options.alignment,
            max_part_nbytes=options.max_part_nbytes,
            layout=options.layout,
            ranks=self.ranks,
        )
        fingerprint = fingerprint_of(planned, identity_of(checkpoint).content)
        if fingerprint.source != self.fingerprint.source:
            raise source_changed
        if fingerprint != self.fingerprint:
            raise PlanError(f"unit {self.unit}: this version of relayout would convert differently", code="unsupported")
        return planned


@dataclass(frozen=True, slots=True, repr=False)
class UnitRecord(Result):
    """The result of converting one unit. The authoritative record is the one stored next to the unit's files."""

    unit: int
    source_nbytes: int
    """Bytes of the unit's source tensors."""
    read_nbytes: int
    """Source bytes that were read by this call: 0 if the unit was done before."""
    seconds: float
    peak_nbytes: int
    """Peak resident memory of the process, in bytes."""


def unit_jobs(planned: Conversion, *, force: bool = False) -> list[UnitJob]:
    """Make a job of each unit of a conversion.

    `max_part_nbytes` decides the number of jobs: each converts about that many bytes of every rank.

    Args:
        planned: by `relayout.plan_conversion`. Paths must mean the same on every machine.
        force: as for `convert`.
    """
    StoreDestination(planned.output, CONVERTED, force).check(planned.source.root)
    units = planned.layout.units
    first = UnitJob(
        source=absolute(str(planned.source.root)),
        output=absolute(str(planned.output)),
        plan=planned.plan,
        options=planned.options,
        ranks=planned.ranks,
        fingerprint=fingerprint_of(planned, identity_of(planned.source).content),
        unit=0,
        num_units=len(units),
        source_nbytes=0,
        force=force,
    )
    return [replace(first, unit=unit, source_nbytes=planned.nbytes_of(units[unit])) for unit in range(len(units))]


def run_job(job: UnitJob, **options: Any) -> UnitRecord:
    """Convert the unit of a job; options and result as for `convert_unit`."""
    return convert_unit(job.planned(), job.unit, force=job.force, **options)


def convert_unit(
    planned: Conversion,
    unit: int,
    *,
    force: bool = False,
    threads: int = DEFAULT_THREADS,
    memory: int | str = DEFAULT_MEMORY,
    scratch: str | os.PathLike[str] | None = None,
    progress: Progress = None,
) -> UnitRecord:
    """Convert one unit, unless it is done, and store its record. `commit_units` publishes the output.

    Args:
        force, threads, memory, scratch, progress: as for `convert`.
    """
    started = time.monotonic()
    threads, chunk_nbytes = share_memory(threads, memory, planned.output)
    units, identity = planned.layout.units, identity_of(planned.source)
    fingerprint = fingerprint_of(planned, identity.content)
    if not 0 <= unit < len(units):
        raise PlanError(f"unit {unit}, expected 0 to {len(units) - 1}", code="option")
    nbytes = planned.nbytes_of(units[unit])
    place = StoreDestination(planned.output, CONVERTED, force)
    place.check(planned.source.root)
    work = output_spec_of(planned, fingerprint, scratch=scratch)
    with place.begin_part(work) as output:
        conversion = planned.with_suffix(output.suffix)
        is_finished = read_unit(output, conversion, fingerprint, unit) is not None
        if not is_finished:
            output.check_space(needed_for(conversion, [unit])[0])
            plan, headers = CopyPlan(conversion, chunk_nbytes=chunk_nbytes), HeaderWriter(output, conversion)
            with reporting(progress, f"unit {unit} of {len(units)}", nbytes) as report:
                make_unit(plan, unit, output, headers, identity, fingerprint, threads=threads, on_progress=report)
        elif callable(progress):
            progress(nbytes, nbytes)
    return UnitRecord(unit, nbytes, 0 if is_finished else nbytes, time.monotonic() - started, peak_nbytes())


@dataclass(frozen=True, slots=True, repr=False)
class ConvertedUnits(Result):
    """The result of converting a share of the units in one process."""

    output: str
    num_units: int
    """Number of units of the whole conversion."""
    units: tuple[UnitRecord, ...]


def convert_share(planned: Conversion, share: str, **options: Any) -> ConvertedUnits:
    """Convert a share of the units, such as one task of a job array.

    Args:
        share: "K/N", K from 0: the units K, K + N, K + 2 N ... With N units, that is unit K; with fewer, the share may
            be empty.
        options: as for `convert_unit`.
    """
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", share)
    if match is None or int(match[1]) >= int(match[2]):
        raise PlanError(f"unit {shown(share)}, expected K/N with K from 0 to N - 1, such as 7/31", code="option")
    num_units = len(planned.layout.units)
    records = tuple(convert_unit(planned, unit, **options) for unit in range(int(match[1]), num_units, int(match[2])))
    return ConvertedUnits(str(planned.output), num_units, records)


def commit_jobs(jobs: list[UnitJob]) -> Summary:
    """Publish the output of jobs of one conversion; the result is that of `commit_units`."""
    return commit_units(jobs[0].planned(), force=jobs[0].force)


def commit_units(
    planned: Conversion,
    *,
    force: bool = False,
) -> Summary:
    """Publish the output, if all units are done.

    Reads the units' records, which prove that their files are unchanged. Writes the sidecar, the manifest last. Deletes
    leftovers of this conversion from lost processes and interrupted commits.

    Args:
        force: as for `convert`.
    """
    started = time.monotonic()
    source, layout, identity = planned.source, planned.layout, identity_of(planned.source)
    fingerprint = fingerprint_of(planned, identity.content)
    place = StoreDestination(planned.output, CONVERTED, force)
    place.check(source.root)
    work = output_spec_of(planned, fingerprint)
    with place.begin(work, gathers=True) as output:
        conversion, units = planned.with_suffix(output.suffix), range(len(layout.units))
        written = {
            unit: done[1] for unit in units if (done := read_unit(output, conversion, fingerprint, unit)) is not None
        }
        if missing := [str(unit) for unit in units if unit not in written]:
            names = ", ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
            what = f"{len(missing)} of {len(units)} units are not done: {names}"
            raise PlanError(what, path=str(planned.output), code="missing")
        whole = merged(written.values())
        if changed_shards(planned, whole, DEFAULT_THREADS):
            raise FormatError("has changed since its units were converted", path=str(source.root), code="mismatch")
        complete_parts(output, conversion, whole)
        check_unchanged(planned, identity)
    return summary_of(planned, work, 0, time.monotonic() - started)


def complete_parts(output: Output, conversion: Conversion, written: WrittenDigests) -> None:
    """Write the sidecar, such as tables and manifest, for the weight files that are in finished parts.

    Args:
        written: all tensors with bytes, and all files.
    """
    headers = HeaderWriter(output, conversion)
    for unit in range(len(conversion.layout.units)):
        deque(headers.headers(unit, written), 0)
    write_sidecar(output, conversion, written, headers.files)


def absolute(path: str | os.PathLike[str]) -> str:
    """Return the path or URL in a form that is valid in another working directory."""
    return os.fspath(path) if scheme_of(path) else str(Path(path).absolute())
