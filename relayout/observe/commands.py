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
"""The group that the commands are added to."""


@commands.command(
    "observe",
    epilog=examples("plans observe my-model -o my-plan.toml", "plans observe my-model --engine sglang"),
)
def observe_plan(
    source: SourceArgument,
    plan_file: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="The plan file to write.")
    ] = "plan.toml",
    engine: Annotated[str, typer.Option(metavar="ENGINE", help="The engine to observe: vllm or sglang.")] = "vllm",
    trust_remote_code: TrustRemoteCodeOption = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a plan from observing an installed engine."""
    with output(quiet, verbose, as_json) as out:
        from relayout.observe import observation as observing

        written = observing.observe_plan(source, plan_file, engine=engine, trust_remote_code=trust_remote_code)
        out.show(written, _shown)


def _shown(done: ObservedPlan) -> Iterator[Block]:
    """Yield the output of the command."""
    from relayout.cli.render import counted

    degrees = ", ".join(map(str, done.degrees))
    rules = counted(done.num_rules, "rule")
    yield Line(f"{done.output}: {rules}, observed from {done.engine} at {degrees} ranks", "wrote", "bold green")
    yield Listing(done.unmatched, "patterns", "no rule")
