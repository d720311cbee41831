"""The command `bench`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

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
    yes: Annotated[
        bool | None,
        typer.Option(
            "--yes/--no",
            "-y/-n",
            help="Drop these files from the page cache; without that, only warm loads are measured. Default: ask.",
        ),
    ] = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure what relayout gains on this machine.

    Loads one rank, and all ranks at once, by relayout and by other loaders, from a cold and from a warm page cache.
    Each load runs in fresh processes; bytes are compared; the drive's limit is measured. PATH is only read. If it is
    stopped, it prints what was measured by then.
    """
    with output(quiet, verbose, as_json) as out:
        out.work("measuring")
        result = _measured(out, path, tp, against, runs, yes) if size is None else _made(out, path, size, tp, runs)
        _show_bench(out, result)
        if result.wrong:
            raise typer.Exit(EXIT_DIFFERENCE)


def _show_bench(out: Printing, result: Bench) -> None:
    out.show(result, shown)


def _made(out: Printing, path: str, size: str, tp: int | None, runs: int | None) -> Bench:
    """Measure a checkpoint that is created for this purpose and deleted afterwards."""
    from relayout.benchmark import measure

    with measure.made_checkpoint(path, size, tp, out.tell) as source:
        plan = measure.plan_bench(source, tp=tp, runs=runs)
        result = plan.run(drop_caches=True, tell=out.tell, partly=partial(_show_bench, out))
    return replace(result, source=None, converted=None)


def _measured(
    out: Printing, path: str, tp: int | None, against: str | None, runs: int | None, yes: bool | None
) -> Bench:
    """Measure an existing checkpoint."""
    from relayout.benchmark import measure

    plan = measure.plan_bench(path, tp=tp, against=against, runs=runs)
    may_drop = may_drop_caches(len(plan.folders.every_file), plan.droppable_nbytes) if yes is None else yes
    return plan.run(drop_caches=may_drop, tell=out.tell, partly=partial(_show_bench, out))


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
        yield Line(f"{result.drive_gb_per_s:.2f} GB/s by direct reads of the same files", "drive:")
    machine = result.machine
    system = f"{machine.file_system}{'' if machine.drive is None else f' on {machine.drive}'}"
    yield Line(
        f"{machine.num_cpus} processors, {machine.memory_nbytes / 1e9:.0f} GB of memory, {system},"
        f" load average {machine.load_average:.1f} at the start",
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


def failures(groups: Iterable[RankLoads]) -> Iterator[str]:
    """Yield a line for each loader that failed."""
    for group in groups:
        for timing in group.timings:
            if timing.failure is not None:
                yield f"{group.title}, {group.state}: {timing.title}: {timing.failure}"
