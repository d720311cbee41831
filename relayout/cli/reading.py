"""The commands that only read checkpoints: inspect, verify, files, doctor, warm, bench, report."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

import relayout
from relayout.cli.command import (
    EXIT_DIFFERENCE,
    ConvertedArgument,
    JsonOption,
    MemoryOption,
    PathArgument,
    PlanOption,
    Printing,
    QuietOption,
    RankOption,
    RanksOption,
    ThreadsOption,
    TrustOption,
    VerboseOption,
    examples,
    filled,
    output,
)

if TYPE_CHECKING:
    from relayout.benchmark.measure import Bench

commands = typer.Typer()


@commands.command(
    epilog=examples("inspect llama-3.1-8b", "inspect llama-3.1-8b --tp 8", "inspect llama-3.1-8b-tp8 --rank 3")
)
def inspect(
    path: PathArgument,
    rank: RankOption = None,
    tp: Annotated[
        int | None,
        typer.Option(
            "--tp", "-tp", metavar="N", help="For a plain checkpoint: only this degree. Default: 2, 4, 8 and 16."
        ),
    ] = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what a rank reads, now and after a conversion.

    Also shows tensors and ranks. Reads headers only.
    """
    with output(quiet, verbose, as_json) as out:
        from relayout.cli import render

        out.show(relayout.inspect(path, rank=rank, tp=tp), render.inspection)


@commands.command(epilog=examples("verify llama-3.1-8b-tp8", "verify llama-3.1-8b-tp8 --source llama-3.1-8b"))
def verify(
    path: ConvertedArgument,
    source: Annotated[
        str | None,
        typer.Option(metavar="SRC", help="Also compare every slice with this source, by 128-bit digests."),
    ] = None,
    ranks: RanksOption = None,
    trust: TrustOption = None,
    threads: ThreadsOption = 8,
    memory: MemoryOption = "512MiB",
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Check every byte of a converted folder.

    Checks structure, manifest, and the digest of every slice; with --source, each slice against the source. Only
    --source and `relayout restore` prove that the slices of all ranks make the tensors of the source.
    """
    with output(quiet, verbose, as_json) as out:
        from relayout.cli import render

        report = relayout.verify(
            path,
            source=source,
            ranks=ranks,
            trust=trust,
            threads=threads,
            memory=memory,
            progress=out.work("verifying"),
        )
        printing = out if report.ok else replace(out, quiet=False)  # Differences are errors.
        printing.show(report, partial(render.verification, has_source=source is not None))
        if not report.ok:
            raise typer.Exit(EXIT_DIFFERENCE)


@commands.command(
    epilog=examples("files llama-3.1-8b-tp8 --ranks 0-3", "files llama-3.1-8b-tp8 --ranks 0-3 > names.txt")
)
def files(
    path: ConvertedArgument,
    ranks: RanksOption = None,
    null: Annotated[bool, typer.Option("--null", "-0", help="End each name with NUL instead of a line end.")] = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print the names of the files that ranks need.

    For tools that copy files. relayout.json is the last. A name that begins with - has ./ in front, so that no tool
    takes it for an option.
    """
    with output(quiet, verbose, as_json) as out:
        needed = relayout.files(path, ranks=ranks)
        names = (f"./{file.name}" if file.name.startswith("-") else file.name for file in needed.files)
        out.print("".join(f"{name}{chr(0) if null else chr(10)}" for name in names), needed.as_json())


@commands.command(epilog=examples("doctor llama-3.1-8b-tp8", "doctor llama-3.1-8b-tp8 --rank 0 --device cuda:0"))
def doctor(
    path: PathArgument,
    rank: RankOption = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Destination of the tensors. Default: cuda if available.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", "-tp", metavar="N", help="Tensor-parallel ranks. Default: as converted, or 1.")
    ] = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show which backend a load would use, and why.

    Shows file system, direct I/O, page cache and GPU. Reads headers only.
    """
    with output(quiet, verbose, as_json) as out:
        from relayout.cli import render
        from relayout.loader import diagnose as diagnosis

        out.show(diagnosis.diagnose(path, rank=rank, device=device, tp=tp), render.diagnosis)


@commands.command(epilog=examples("warm llama-3.1-8b-tp8", "warm llama-3.1-8b-tp8 --rank 0 --memory 16GB"))
def warm(
    path: PathArgument,
    rank: RankOption = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Maximum bytes to cache. Default: half of the free memory."),
    ] = None,
    threads: Annotated[int, typer.Option(metavar="N", help="Requests in flight.")] = 4,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Read files into the page cache before a load."""
    with output(quiet, verbose, as_json) as out:
        from relayout.cli import render

        done = relayout.warm(path, rank=rank, memory=memory, threads=threads, progress=out.work("warming"))
        out.show(done, render.warmed)


@commands.command(epilog=examples("bench llama-3.1-8b-tp8", "bench /fast --size 4GB --tp 8"))
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
        typer.Option(metavar="FOLDER", help="The same checkpoint, converted or plain. Default: found beside PATH."),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Measure a temporary checkpoint of this size below PATH, such as 4GB."),
    ] = None,
    runs: Annotated[
        int | None,
        typer.Option(metavar="N", help="Loads per loader; medians count. Default: as many of 3 as 2 minutes allow."),
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
    from relayout.cli import render

    out.show(result, render.bench)


def _made(out: Printing, path: str, size: str, tp: int | None, runs: int | None) -> Bench:
    """Measure a checkpoint that is made for it, and deleted afterwards."""
    from relayout.benchmark import measure

    with measure.made_checkpoint(path, size, tp, out.tell) as source:
        plan = measure.plan_bench(source, tp=tp, runs=runs)
        result = plan.run(drop_caches=True, tell=out.tell, partly=partial(_show_bench, out))
    return replace(result, source=None, converted=None)


def _measured(
    out: Printing, path: str, tp: int | None, against: str | None, runs: int | None, yes: bool | None
) -> Bench:
    """Measure a checkpoint that is there."""
    from relayout.benchmark import measure

    plan = measure.plan_bench(path, tp=tp, against=against, runs=runs)
    may_drop = may_drop_caches(len(plan.folders.every_file), plan.droppable_nbytes) if yes is None else yes
    return plan.run(drop_caches=may_drop, tell=out.tell, partly=partial(_show_bench, out))


def may_drop_caches(num_files: int, nbytes: int) -> bool:
    """Ask whether files may be dropped from the page cache; no if nobody can answer."""
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


@commands.command(epilog=examples("report llama-3.1-8b-tp8 -o llama.html", "report llama-3.1-8b --tp 8"))
def report(
    path: PathArgument,
    page: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The page to write; replaces an older page. Default: NAME-report.html.",
        ),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option("--tp", "-tp", metavar="N", help="For a plain checkpoint: forecast a conversion to N ranks."),
    ] = None,
    plan: PlanOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write an HTML page that shows every file and tensor.

    It has bars to scale, tables and a search for each rank, and works offline.
    """
    with output(quiet, verbose, as_json) as out:
        from relayout.cli import render

        out.show(relayout.report(path, page, tp=tp, plan=plan), render.page)
