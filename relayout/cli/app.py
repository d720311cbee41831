"""The command `relayout`: its commands in groups, and the handling of signals and errors around each command."""

from __future__ import annotations

import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from relayout import extensions
from relayout.cli import reading, signals, writing
from relayout.cli.command import (
    EXIT_DIFFERENCE,
    DegreeOption,
    ExpertParallelOption,
    JsonOption,
    PlanOption,
    QuietOption,
    RanksOption,
    SourceArgument,
    VerboseOption,
    errors,
    examples,
    output,
    require_command,
    show,
)
from relayout.errors import PlanError


class _Root(TyperGroup):
    """The group of all commands. Its plain help has panels, which typer supports only in its rich help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command. For a folder, or a path with a slash, that is `inspect`."""
        first = args[0]
        is_path = first not in self.commands and not first.startswith("-") and ("/" in first or Path(first).is_dir())
        return super().resolve_command(ctx, ["inspect", *args] if is_path else args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, Any]]] = {}
        for name, command in self.commands.items():
            panels.setdefault(getattr(command, "rich_help_panel", None) or "Commands", []).append((name, command))
        longest = max(map(len, self.commands))
        for panel, commands in panels.items():
            with formatter.section(panel):
                limit = formatter.width - longest - 6
                formatter.write_dl([(name.ljust(longest), one.get_short_help_str(limit)) for name, one in commands])


app = typer.Typer(
    name="relayout",
    cls=_Root,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Plain help: wide columns, correct on any terminal, and fast.
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Rewrite safetensors checkpoints so that each tensor-parallel rank reads only its own bytes, "
    "contiguous and aligned.",
    epilog="""\b
First steps:
  relayout MODEL                     describe it, and name the next command
  relayout convert MODEL --tp 8      writes MODEL-tp8 next to it
  vllm serve MODEL-tp8 -tp 8 --load-format relayout
  relayout.load('MODEL-tp8', rank)   in Python

\b
Exit codes: 0 done, 1 a check failed, 2 bad input or usage,
3 I/O failure, 130 interrupted, 143 terminated.""",
)
plans = typer.Typer(
    help="List, print, make or check plans, the rules of slicing.",
    callback=require_command,
    invoke_without_command=True,
)
cache = typer.Typer(
    help="List the entries of a cache, add to it, or remove from it.\n\nA cache keeps conversions of plain checkpoints,"
    " and files of remote ones.",
    callback=require_command,
    invoke_without_command=True,
)
app.add_typer(writing.commands)
app.add_typer(reading.commands)
app.add_typer(plans, name="plans", rich_help_panel="Convert")
app.add_typer(cache, name="cache", rich_help_panel="Distribute")
for extension in extensions.with_commands():
    {"": app, "plans": plans}[extension.GROUP].add_typer(extension.commands)

_FolderOption = Annotated[
    str | None, typer.Option("--folder", metavar="FOLDER", help="The cache's folder. Default: RELAYOUT_CACHE.")
]


def main() -> None:
    """Parse the command line, run the command, and raise SystemExit with the exit code."""
    with signals.restored():
        signals.exit_on_signal()
        # A command that only prints is ended by SIGPIPE when its reader is closed, like other programs.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        try:
            with errors(as_json="--json" in sys.argv[1:]):
                try:
                    code = app(prog_name="relayout", standalone_mode=False)
                except typer.TyperException as error:  # All usage errors.
                    raise PlanError(_in_one_line(error.format_message()), code="option") from None
        except typer.Exit as end:
            code = end.exit_code
        sys.exit(code)


def _in_one_line(usage: str) -> str:
    """Return the text of a usage error as one sentence that begins like all other errors."""
    text = " ".join(usage.split()).rstrip(".").replace(". Did", "; did")
    for said, instead in _SAID.items():
        text = re.sub(said, instead, text)
    return f"{text[:1].lower()}{text[1:]}"


_SAID = {
    r"^Invalid value for |Value error, ": "",
    r"Input should be a valid integer.*": "expected a whole number, such as 8",
    r"('.*') is not a valid int(eger)?": r"\1, expected a whole number, such as 8",
    r"^(Missing option '--tp'.*)": r"\1; `relayout inspect SRC` lists what a rank reads at each degree",
}
"""Replacements for the wording of typer, and of pydantic if that is installed."""


def _show_version(wanted: bool) -> None:
    if wanted:
        from relayout.format.index import FORMAT_VERSION, VERSION

        print(f"relayout {VERSION}, format {FORMAT_VERSION}", flush=True)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    require_command(context)


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
        from relayout.conversion import planning

        checked = planning.check_plan(source, plan=plan)
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
        str | None, typer.Option(metavar="SIZE", help="Limit of the cache's size. Default: RELAYOUT_CACHE_LIMIT.")
    ] = None,
    expert_parallel: ExpertParallelOption = False,
    observe: Annotated[
        str | None,
        typer.Option(metavar="ENGINE", help="Observe this engine, vllm or sglang, if the model has no built-in plan."),
    ] = None,
    background: Annotated[
        bool,
        typer.Option(
            "--background",
            help="Work at low priority, and only while no engine on this machine loads. End when stdin is closed or the"
            " parent process ends.",
        ),
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
            behind_loads=background,
        )
        out.show(listing, render.cache)


@cache.command("remove", epilog=examples("cache remove 3f2a"))
def remove_from_cache(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="The name of an entry, or its beginning.")],
    folder: _FolderOption = None,
    quiet: QuietOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove entries, except those that a process uses."""
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
    """Remove all entries, except those that a process uses."""
    with output(quiet, verbose, as_json) as out:
        from relayout.cli import render
        from relayout.commands import cache as caching

        out.show(caching.cache(folder, clear=True), render.cache)
