"""The command `plans observe`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from relayout.cli.command import (
    Block,
    JsonOption,
    Line,
    Listing,
    QuietOption,
    SourceArgument,
    TrustRemoteCodeOption,
    VerboseOption,
    examples,
    output,
)

if TYPE_CHECKING:
    from relayout.observe.observation import ObservedPlan


commands = typer.Typer()
GROUP = "plans"
"""The group of the commands."""


@commands.command("observe", epilog=examples("plans observe my-model -o my-plan.toml"))
def observe_plan(
    source: SourceArgument,
    plan_file: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="The plan file to write.")
    ] = "plan.toml",
    trust_remote_code: TrustRemoteCodeOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Observe how the installed vLLM shards a checkpoint, and write a plan file."""
    with output(quiet, verbose, as_json) as out:
        from relayout.observe import observation as observing

        written = observing.observe_plan(source, plan_file, trust_remote_code=trust_remote_code)
        out.show(written, _shown)


def _shown(done: ObservedPlan) -> Iterator[Block]:
    """Yield what the command prints."""
    from relayout.cli.render import counted

    degrees = ", ".join(map(str, done.degrees))
    rules = counted(done.num_rules, "rule")
    yield Line(f"{done.output}: {rules}, observed from vLLM {done.engine} at {degrees} ranks", "wrote", "bold green")
    yield Listing(done.unmatched, "patterns", "no rule")
