"""The command `relayout`: its sub-commands, and what happens around each of them."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer

from relayout.cli import groups, reading, signals, writing
from relayout.cli.command import errors, require_command
from relayout.errors import PlanError

app = typer.Typer(
    name="relayout",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Plain help: wide columns, right on any terminal, and quick.
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Rewrite safetensors checkpoints so that each tensor-parallel rank reads only its own bytes, "
    "contiguous and aligned.",
    epilog="""\b
First steps:
  relayout inspect MODEL             what a rank would read today
  relayout convert MODEL --tp 8      writes MODEL-tp8 beside it
  vllm serve MODEL-tp8 -tp 8 --load-format relayout
  relayout.load('MODEL-tp8', rank)   in Python

\b
Exit codes: 0 done, 1 verification found a difference, 2 bad input or usage,
3 I/O failure, 130 interrupted, 143 terminated.""",
)
app.add_typer(writing.commands)
app.add_typer(reading.commands)
app.add_typer(groups.plans, name="plans")
app.add_typer(groups.cache, name="cache")


def main() -> None:
    """Parse the command line, run the command, and raise SystemExit with the exit code."""
    with signals.restored():
        signals.leave_when_asked()
        # A command that only prints ends by SIGPIPE when its reader is gone, as other commands do.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        try:
            with errors(as_json="--json" in sys.argv[1:]):
                try:
                    code = app(prog_name="relayout", standalone_mode=False)
                except typer.TyperException as error:  # All errors of usage.
                    raise PlanError(_in_one_line(error.format_message()), code="option") from None
        except typer.Exit as end:
            code = end.exit_code
        sys.exit(code)


def _in_one_line(usage: str) -> str:
    """An error of usage as one sentence that begins as all other errors do."""
    text = " ".join(usage.split()).rstrip(".").replace(". Did", "; did")
    for said in ("Invalid value for ", "Value error, "):  # The latter where pydantic is installed.
        text = text.replace(said, "")
    return f"{text[:1].lower()}{text[1:]}"


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
