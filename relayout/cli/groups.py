"""The commands about what conversions go by, `relayout plans ...`, and about what loads keep, `relayout cache ...`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from relayout.cli import signals
from relayout.cli.command import (
    EXIT_DIFFERENCE,
    DegreeOption,
    ExpertParallelOption,
    JsonOption,
    PlanOption,
    QuietOption,
    RanksOption,
    SourceArgument,
    TrustRemoteCodeOption,
    VerboseOption,
    examples,
    output,
    require_command,
)

plans = typer.Typer(
    help="List, print, make or check plans of which rank holds what.",
    callback=require_command,
    invoke_without_command=True,
)
cache = typer.Typer(
    help="List what a cache keeps, add to it, or remove from it.\n\nA cache keeps conversions of plain checkpoints, and"
    " files of remote ones.",
    callback=require_command,
    invoke_without_command=True,
)

_FolderOption = Annotated[
    str | None, typer.Option("--folder", metavar="FOLDER", help="The cache's folder. Default: RELAYOUT_CACHE.")
]


@plans.command("list", epilog=examples("plans list"))
def list_plans(quiet: QuietOption = False, verbose: VerboseOption = False, as_json: JsonOption = False) -> None:
    """List the built-in plans."""
    with output(quiet, verbose, as_json) as out:
        from relayout.plans.family import builtin_families

        families = builtin_families()
        if as_json:
            out.print("", {plan.name: plan.model_types for plan in families})
        elif not quiet:
            from relayout.cli import render
            from relayout.cli.console import show

            show(render.families(families), verbose=True)


@plans.command("show", epilog=examples("plans show llama", "plans show llama > my-plan.toml"))
def show_plan(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of a built-in plan.")],
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Print a built-in plan."""
    with output(quiet, verbose, as_json) as out:
        from relayout.plans.family import builtin_text

        text = builtin_text(name)
        out.print(text, {"name": name, "text": text})


@plans.command("observe", epilog=examples("plans observe my-model -o my-plan.toml"))
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
        from relayout.cli import render
        from relayout.observe import observation as observing

        written = observing.observe_plan(source, plan_file, trust_remote_code=trust_remote_code)
        out.show(written, render.observed)


@plans.command("check", epilog=examples("plans check my-model", "plans check my-model --plan my-plan.toml"))
def check_plan(
    source: SourceArgument,
    plan: PlanOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the tensors of a checkpoint that no rule matches.

    Exits with 1 if there are any.
    """
    with output(quiet, verbose, as_json) as out:
        from relayout.cli import render
        from relayout.commands import plan_check

        checked = plan_check.check_plan(source, plan=plan)
        out.show(checked, render.plan_check)
        if not checked.ok:
            raise typer.Exit(EXIT_DIFFERENCE)


@cache.command("list", epilog=examples("cache list", "cache list --folder /nvme/relayout"))
def list_cache(
    folder: _FolderOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """List the entries of a cache."""
    with output(quiet, verbose, as_json) as out:
        from relayout.cli import render
        from relayout.commands import cache as caching

        out.show(caching.cache(folder), render.cache)


@cache.command(
    "add", epilog=examples("cache add llama-3.1-8b --tp 8", "cache add s3://bucket/llama --tp 8 --limit 1TB")
)
def add_to_cache(
    source: SourceArgument,
    tp: DegreeOption,
    folder: _FolderOption = None,
    ranks: RanksOption = None,
    limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The most bytes to keep. Default: RELAYOUT_CACHE_LIMIT.")
    ] = None,
    expert_parallel: ExpertParallelOption = False,
    observe: Annotated[
        bool, typer.Option("--observe", help="Observe vLLM if no built-in plan is for the model.")
    ] = False,
    background: Annotated[
        bool,
        typer.Option("--background", help="Work at low priority, until stdin is closed or the parent process ends."),
    ] = False,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert a checkpoint into a cache.

    An engine's first start then finds it there.
    """
    with output(quiet, verbose, as_json) as out:
        from relayout.cli import render
        from relayout.commands import cache as caching

        progress = replace(out, quiet=quiet or background).work("converting")
        if background:
            signals.end_with_stdin()
        listing = caching.add(
            source,
            tp,
            folder,
            ranks=ranks,
            limit=limit,
            expert_parallel=expert_parallel,
            observe=observe,
            progress=progress,
        )
        out.show(listing, render.cache)


@cache.command("remove", epilog=examples("cache remove 3f2a"))
def remove_from_cache(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="The name of an entry, or how it begins.")],
    folder: _FolderOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove entries, but for those that a process uses."""
    with output(quiet, verbose, as_json) as out:
        from relayout.cli import render
        from relayout.commands import cache as caching

        out.show(caching.cache(folder, remove=names), render.cache)


@cache.command("clear", epilog=examples("cache clear"))
def clear_cache(
    folder: _FolderOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove all entries, but for those that a process uses."""
    with output(quiet, verbose, as_json) as out:
        from relayout.cli import render
        from relayout.commands import cache as caching

        out.show(caching.cache(folder, clear=True), render.cache)
