"""The command `steps`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from relayout.cli.command import (
    EXIT_DIFFERENCE,
    Block,
    Column,
    JsonOption,
    Line,
    Listing,
    QuietOption,
    Table,
    VerboseOption,
    examples,
    output,
)

if TYPE_CHECKING:
    from relayout.train.listing import StepsListing


commands = typer.Typer()
GROUP = ""
"""The group of the commands; empty: the command itself."""


@commands.command(
    rich_help_panel="Update",
    epilog=examples("steps s3://bucket/run-7", "steps s3://bucket/run-7 --check", "steps /shared/run-7 --prune"),
)
def steps(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="Where a trainer publishes its steps, or its URL.")],
    check: Annotated[
        bool,
        typer.Option("--check", help="Check that each step can be read from a folder and deltas; exit with 1 if not."),
    ] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Delete folders and deltas that no step needs.")] = False,
    grace: Annotated[
        int | None,
        typer.Option(
            "--grace",
            metavar="SECONDS",
            help="With --prune: keep retired steps for this many seconds, for readers of an older index. Default: the"
            " value that the publisher set.",
        ),
    ] = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the steps that a trainer has published.

    --check reads manifests, tables, headers, and the indexes of changes, and compares their digests along every chain.
    It does not read weights: readers verify those when they load them.
    """
    with output(quiet, verbose, as_json) as out:
        from relayout.train import listing

        listed = listing.list_steps(root, check=check, prune=prune, grace_seconds=grace)
        out.show(listed, _shown)
        if listed.differences:
            raise typer.Exit(EXIT_DIFFERENCE)


def _shown(listing: StepsListing) -> Iterator[Block]:
    """Yield the blocks that the command prints."""
    from rich.filesize import decimal

    from relayout.cli.render import counted, of_numbers

    if listing.differences is not None:
        if listing.differences:
            yield Line(listing.root, f"{counted(len(listing.differences), 'difference')}:", "bold red")
        else:
            what = "every chain leads to what the index says; weights were not read: readers prove them"
            yield Line(f"{listing.root}: {what}", "checked", "bold green")
        yield Listing(listing.differences, "differences", "differs", "red")
    yield Line(f"{listing.root}: {counted(len(listing.steps), 'step')}, {decimal(listing.nbytes)}")
    for names, label in ((listing.deleted, "deleted"), (listing.pending, "being written")):
        if names:
            yield Line(", ".join(names), label, "yellow")
    if listing.retired:
        yield Line(f"{len(listing.retired)}, which --prune deletes when readers have had time", "retired")
    rows = [
        (
            str(step.step),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(step.time)),
            "-" if step.full is None else decimal(step.full.nbytes),
            "-" if step.delta is None else decimal(step.delta.nbytes),
            step.stored[0].name,
        )
        for step in listing.steps
    ]
    if rows:
        columns = [
            *of_numbers("step"),
            Column("published"),
            *of_numbers("full", "delta"),
            Column("name", "name", 1),
        ]
        yield Table(columns, rows, "steps")
