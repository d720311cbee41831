"""The command `report`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from relayout.cli.command import (
    Block,
    JsonOption,
    Line,
    PathArgument,
    PlanOption,
    QuietOption,
    VerboseOption,
    examples,
    output,
)

if TYPE_CHECKING:
    from relayout.html_report.page import ReportResult


commands = typer.Typer()
GROUP = ""
"""The group that the commands are added to; empty: the top level."""


@commands.command(
    rich_help_panel="Inspect", epilog=examples("report llama-3.1-8b-tp8 -o llama.html", "report llama-3.1-8b --tp 8")
)
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
    bench: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Show the times in this output of 'relayout bench PATH --json'."),
    ] = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write an HTML page that shows every file and tensor.

    It has bars to scale, tables and a search for each rank, and works offline.
    """
    with output(quiet, verbose, as_json) as out:
        from relayout.html_report import page as pages

        out.show(pages.report(path, page, tp=tp, plan=plan, bench=bench), _shown)


def _shown(done: ReportResult) -> Iterator[Block]:
    """Yield the output of the command."""
    from rich.filesize import decimal

    from relayout.cli.render import counted

    what = "forecast of a conversion" if done.is_forecast else "converted checkpoint"
    counts = f"{counted(done.num_tensors, 'tensor')}, {counted(done.num_ranks, 'rank')}"
    yield Line(f"{done.output} ({decimal(done.nbytes)}): {what}, {counts}; open it in a browser", "wrote", "bold green")
