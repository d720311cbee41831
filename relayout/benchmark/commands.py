"""The command `bench`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relayout.cli.command import (
    EXIT_DIFFERENCE,
    Block,
    Column,
    JsonOption,
    Line,
    Listing,
    Printing,
    QuietOption,
    Table,
    VerboseOption,
    examples,
    filled,
    output,
)
from relayout.errors import PlanError

if TYPE_CHECKING:
    from relayout.benchmark.measure import Bench
    from relayout.benchmark.verdict import RankLoads


commands = typer.Typer()
GROUP = ""
"""The group that the commands are added to; empty: the top level."""


@commands.command(rich_help_panel="Inspect", epilog=examples("bench llama-3.1-8b-tp8", "bench /fast --size 4GB --tp 8"))
def bench(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="A checkpoint, plain or converted; with --size, a folder on the drive."),
    ],
    tp: Annotated[
        int | None, typer.Option("--tp", "-tp", metavar="N", help="Tensor-parallel ranks. Default: as converted.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="The same checkpoint, converted or plain. Default: found next to PATH."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Measure a temporary checkpoint of this size below PATH, such as 4GB."),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(metavar="N", help="Loads per loader; the median is reported. Default: up to 3, within 2 minutes."),
    ] = None,
    device: Annotated[
        str,
        typer.Option(metavar="DEVICE", help="Where to load to: cpu, cuda (all CUDA devices in turn), or cuda:N."),
    ] = "cpu",
    chart: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw the drive's bandwidth during cold loads, as a new SVG file."),
    ] = None,
    yes: Annotated[
        bool | None,
        typer.Option(
            "--yes/--no",
            "-y/-n",
            help="Drop the checkpoint's files from the page cache before cold loads. With --no, only warm loads are"
            " measured. Default: ask.",
        ),
    ] = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure what relayout gains on this machine.

    Loads one rank, and all ranks at once, by relayout and by other loaders, from a cold and from a warm page cache.
    Each load runs in fresh processes; bytes are compared; the drive's limit is measured. No file at PATH is changed. If
    the command is stopped, it prints the results so far.
    """
    with output(quiet, verbose, as_json) as out:
        out.begin(f"reading the headers of {path}")
        out.work("measuring")
        drawing = None if chart is None else new_chart(chart)
        show = partial(_show_bench, out, drawing)
        options = {"tp": tp, "runs": runs, "device": device}
        if size is None:
            result = _measured(out, show, path, {**options, "against": against}, yes)
        else:
            result = _made(out, show, path, size, options)
        show(result)
        if result.wrong:
            raise typer.Exit(EXIT_DIFFERENCE)


def _show_bench(out: Printing, drawing: Path | None, result: Bench) -> None:
    out.show(result, shown)
    if drawing is not None:
        _draw(result, drawing, out.log_line)


def new_chart(chart: str) -> Path:
    """Return the path of a chart to write, before anything is measured.

    Raises:
        PlanError: it is not an SVG file; it exists; or its folder does not.
    """
    path = Path(chart)
    if path.suffix.lower() != ".svg":
        raise PlanError("--chart: expected a file name that ends in .svg", path=chart, code="option")
    if path.exists() or path.is_symlink():
        raise PlanError("--chart: the file exists, and is not replaced: name another one", path=chart, code="exists")
    if not path.parent.is_dir():
        raise PlanError("--chart: its folder does not exist", path=chart, code="missing")
    return path


def _draw(result: Bench, path: Path, log_line: Callable[[str], None]) -> None:
    from relayout.benchmark.chart import bandwidth_chart

    drawn = bandwidth_chart(result.loads, result.drive_gb_per_s)
    if drawn is None:
        log_line("no chart: no cold load was measured, or the system does not count the reads of this drive")
        return
    with path.open("x", encoding="utf-8") as file:
        file.write(drawn)
    log_line(f"wrote {path}")


def _made(out: Printing, show: Callable[[Bench], None], path: str, size: str, options: dict[str, Any]) -> Bench:
    """Measure a checkpoint that is created for this purpose and deleted afterwards."""
    from relayout.benchmark import measure
    from relayout.benchmark.machine import devices_of

    devices_of(options["device"])  # Checked before gigabytes are written.
    with measure.made_checkpoint(path, size, options["tp"], out.log_line) as source:
        plan = measure.plan_bench(source, **options)
        result = plan.run(drop_caches=True, log_line=out.log_line, partly=show)
    return replace(result, source=None, converted=None)


def _measured(
    out: Printing, show: Callable[[Bench], None], path: str, options: dict[str, Any], yes: bool | None
) -> Bench:
    """Measure an existing checkpoint."""
    from relayout.benchmark import measure

    plan = measure.plan_bench(path, **options)
    may_drop = may_drop_caches(len(plan.folders.every_file), plan.droppable_nbytes) if yes is None else yes
    return plan.run(drop_caches=may_drop, log_line=out.log_line, partly=show)


def may_drop_caches(num_files: int, nbytes: int) -> bool:
    """Ask for permission to drop files from the page cache; return False if stdin is not a terminal."""
    if not sys.stdin.isatty():
        return False
    question = (
        f"Before each cold load, {num_files} files ({nbytes / 1e9:.1f} GB) are dropped from the page cache. Other"
        " processes that use them will wait for the drive. If not, only warm loads are measured. Drop them?"
    )
    try:
        return typer.confirm(filled(question), err=True)
    except typer.Abort:  # The end of input; Ctrl-C is handled elsewhere.
        return False


def shown(result: Bench) -> Iterator[Block]:
    """Yield the output of the command: the verdict, then the figures."""
    yield Line(result.verdict)
    yield Listing(result.warnings, "warnings", "warning:")
    yield Listing(result.wrong, "loaders", "WRONG BYTES:", "bold red")
    yield loads(result.loads, result.drive_gb_per_s)
    yield Listing(list(failures(result.loads)), "failures", "failed:")
    if result.drive_gb_per_s is not None:
        by = f"direct reads of the same files ({result.drive_by})"
        yield Line(f"{result.drive_gb_per_s:.2f} GB/s by {by}", "drive:")
    if (activity := drive_activity(result.loads)) is not None:
        yield activity
    machine = result.machine
    system = f"{machine.file_system}{'' if machine.drive is None else f' on {machine.drive}'}"
    yield Line(
        f"{machine.num_cpus} processors, {machine.memory_nbytes / 1e9:.0f} GB of memory, {system},"
        f" load average {machine.load_average:.1f} at the start; loads go to {', '.join(result.devices)}",
        "machine:",
    )
    yield Listing(result.left_out, "reasons", "not measured:", "bold")
    counts = {len(timing.runs) for group in result.loads for timing in group.done if timing.failure is None}
    runs = f"up to {result.runs}" if min(counts, default=result.runs) < result.runs else str(result.runs)
    same = "not all" if result.wrong else "all"
    yield Line(
        f"medians of {runs} runs, each in a fresh process; {same} loaders loaded the same bytes (compared after"
        " the clock stopped); +MB is a process's peak memory beyond its tensors"
    )


def loads(groups: Iterable[RankLoads], drive: float | None) -> Table:
    """Return the table of figures: the loaders of each group of loads, the fastest first."""
    from relayout.cli.render import of_numbers

    rows: list[Sequence[str]] = []
    for group in groups:
        rows.append((f"{group.title}, {group.state}", *[""] * 6))
        ours = None if group.is_too_short() else group.ours()
        for timing in group.done:
            share = "" if drive is None or group.state != "cold" else f"{100 * timing.gb_per_s / drive:.0f} %"
            rows.append(
                (
                    f"  {timing.title}",
                    f"{timing.median('seconds'):.2f}",
                    f"{timing.gb_per_s:.2f}",
                    share,
                    f"{timing.median('cpu_seconds'):.2f}",
                    f"{timing.median('peak_minus_needed_nbytes') / 1e6:.0f}",
                    "" if ours is None else f"{timing.median('seconds') / ours.median('seconds'):.1f}x",
                )
            )
    return Table([Column(""), *of_numbers("s", "GB/s", "drive", "CPU s", "+MB", "as long as relayout")], rows, "")


def drive_activity(groups: Iterable[RankLoads]) -> Table | None:
    """Return a table of what the drive did during cold loads, by all processes; None: nothing was sampled."""
    from relayout.benchmark.samples import mean_queue, mean_request_nbytes
    from relayout.cli.render import of_numbers

    rows: list[Sequence[str]] = []
    for group in groups:
        sampled = [(timing, samples) for timing in group.done if (samples := timing.median_run().drive)]
        if sampled:
            rows.append((f"drive during {group.title}, {group.state}", *[""] * 4))
        for timing, samples in sampled:
            request = mean_request_nbytes(samples)
            nbytes, seconds = (sum(getattr(one, name) for one in samples) for name in ("nbytes", "seconds"))
            rows.append(
                (
                    f"  {timing.title}",
                    f"{nbytes / seconds / 1e9:.2f}",
                    f"{max(one.gb_per_s for one in samples):.2f}",
                    "" if request is None else f"{request / 1024:.0f}",
                    f"{mean_queue(samples):.1f}",
                )
            )
    return Table([Column(""), *of_numbers("GB/s", "peak", "KiB/request", "queue")], rows, "") if rows else None


def failures(groups: Iterable[RankLoads]) -> Iterator[str]:
    """Yield a line for each loader that failed."""
    for group in groups:
        for timing in group.timings:
            if timing.failure is not None:
                yield f"{group.title}, {group.state}: {timing.title}: {timing.failure}"
