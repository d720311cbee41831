"""What all commands have: how they print results, warnings and errors, and the options that several of them share."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Protocol, TypeVar

import typer

from relayout.cli import signals
from relayout.errors import RelayoutError, escape_controls
from relayout.storage.system import advice_on_limit

if TYPE_CHECKING:
    from relayout.cli.console import Block
    from relayout.progress import Progress

EXIT_DIFFERENCE = 1
EXIT_BAD_INPUT = 2
EXIT_IO = 3

_MAX_MESSAGE_LENGTH = 2000
"""Characters."""

# Arguments and options of several commands. Paths are `str`: each may be the URL of a store.
SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="A checkpoint folder, a snapshot, a .safetensors file, the URL of a store, or ORG/MODEL on the hub.",
    ),
]
PathArgument = Annotated[
    str,
    typer.Argument(metavar="PATH", help="A .safetensors file, a checkpoint folder, plain or converted, or its URL."),
]
ConvertedArgument = Annotated[
    str, typer.Argument(metavar="CONVERTED", help="A folder that `relayout convert` wrote, or its URL.")
]
PlanOption = Annotated[
    str | None,
    typer.Option(
        metavar="PLAN",
        help="A plan file (TOML); the name of a built-in plan, such as llama; 'transformers' for the plan of that"
        " package; or 'vllm' to observe the installed vLLM. "
        "Default: the built-in plan for model_type in config.json.",
    ),
]
TrustRemoteCodeOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Allow vLLM to run the Python files of SRC.")
]
TrustOption = Annotated[
    str | None,
    typer.Option(
        "--trust", metavar="FILE", help="Whose signatures count (TOML): all else is refused. Default: RELAYOUT_TRUST."
    ),
]
ForceOption = Annotated[
    bool,
    typer.Option(
        "--force", help="Replace an older output that relayout wrote; discard an interrupted attempt at another."
    ),
]
IfMissingOption = Annotated[
    bool,
    typer.Option(
        "--if-missing", help="If the output is there, complete, and the same, exit with 0. Another is still an error."
    ),
]
ThreadsOption = Annotated[int, typer.Option(metavar="N", help="Threads that read, copy, hash and write.")]
MemoryOption = Annotated[str, typer.Option(metavar="SIZE", help="Memory limit of these threads.")]
ScratchOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="Folder for files on their way to a bucket. Default: that of temporary files (TMPDIR)."
    ),
]
DegreeOption = Annotated[
    int, typer.Option("--tp", "-tp", metavar="N", help="Number of tensor-parallel ranks; 1 cuts no tensor.")
]
RankOption = Annotated[
    int | None, typer.Option(metavar="R", help="Only this rank of a converted checkpoint. Default: all.")
]
RanksOption = Annotated[
    str | None, typer.Option(metavar="LIST", help="Only these ranks, such as 0-3 or 0,8. Default: all.")
]
ExpertParallelOption = Annotated[
    bool,
    typer.Option(
        "--expert-parallel", help="Assign whole experts to ranks, in contiguous blocks, instead of cutting them."
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print all rows, and progress even if stderr is not a terminal.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object; progress and errors are JSON lines on stderr.")
]


class _Shown(Protocol):
    def as_json(self) -> dict[str, object]: ...


R = TypeVar("R", bound=_Shown)


@dataclass(frozen=True, slots=True)
class Printing:
    """How a command prints, by the options that all commands have."""

    quiet: bool
    verbose: bool
    as_json: bool

    def work(self, what: str) -> Progress:
        """Begin work, and return how its progress is shown.

        From now on, a signal raises an exception, for cleanup, and a closed stdout does not end the process. Called
        among the arguments of the work: a signal while that is imported then still ends the process at once.
        """
        from relayout.cli.console import progress

        signals.raise_when_asked()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        return progress(what, as_json=self.as_json, quiet=self.quiet, verbose=self.verbose)

    def show(self, result: R, text: Callable[[R], Iterable[Block]]) -> None:
        """Print a result. A closed stdout does not change the exit code, which reports the work."""
        from relayout.cli.console import show

        try:
            if self.as_json:
                self.print("", result.as_json())
            elif not self.quiet:
                show(text(result), verbose=self.verbose)
        except BrokenPipeError:
            signals.abandon(sys.stdout)
        except OSError as error:
            error.filename = "standard output"
            raise

    def print(self, text: str, result: object) -> None:
        """Print a text for other programs, or with --json what it is made of."""
        if self.as_json:
            print(json.dumps(result), flush=True)
        elif not self.quiet:
            print(text, end="", flush=True)


@contextmanager
def output(quiet: bool, verbose: bool, as_json: bool) -> Iterator[Printing]:
    """Yield how the command in the block prints, and print its warnings and its error."""
    with errors(as_json=as_json), _warnings(quiet, as_json):
        yield Printing(quiet, verbose, as_json)


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\b\nExamples:\n" + "\n".join(f"  relayout {line}" for line in lines)


def require_command(context: typer.Context) -> None:
    """Show the help of a group of commands if none of them is given, and exit."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(EXIT_BAD_INPUT)


@contextmanager
def errors(as_json: bool = False) -> Iterator[None]:
    """Print an error as one line, or one JSON object, and exit with the code of its family."""
    try:
        yield
    except RelayoutError as error:
        _fail(str(error), EXIT_BAD_INPUT, error, as_json)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{_reason(error)}", EXIT_IO, error, as_json)
    except MemoryError as error:
        _fail(f"out of memory: {error}", EXIT_IO, error, as_json)
    except ModuleNotFoundError as error:  # A package that an extra brings, such as torch.
        _fail(str(error), EXIT_BAD_INPUT, error, as_json)
    except signals.Signalled as error:
        signals.ignore()
        _fail(str(error), error.exit_code, error, as_json)


def tell(line: str) -> None:
    """Print a line to stderr. A closed stderr does not stop the work."""
    try:
        print_error(escape_controls(line))
    except OSError:
        signals.abandon(sys.stderr)


def print_error(line: str) -> None:
    """Print a line to stderr, on a terminal in lines that fit it."""
    typer.echo(filled(line) if sys.stderr is not None and sys.stderr.isatty() else line, err=True)


def filled(text: str) -> str:
    """The text in lines that fit the terminal and end between words."""
    width = shutil.get_terminal_size().columns
    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


@contextmanager
def _warnings(quiet: bool, as_json: bool) -> Iterator[None]:
    """Print a warning as one line, or one JSON object, without the place in the program that gave it."""

    def show(message: Warning | str, *where: object, **more: object) -> None:
        if as_json:
            tell(json.dumps({"event": "warning", "message": str(message)}))
        elif not quiet:
            tell(f"relayout: warning: {_one_line(str(message))}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _fail(message: str, code: int, error: BaseException, as_json: bool) -> NoReturn:
    notes = getattr(error, "__notes__", [])
    try:
        if as_json:
            typer.echo(json.dumps(_error_event(message, code, error) | ({"notes": notes} if notes else {})), err=True)
        else:
            print_error(f"relayout: error: {_one_line(message)}")
            for note in notes:
                print_error(f"relayout: note: {_one_line(note)}")
    except OSError:
        signals.abandon(sys.stderr)
    raise typer.Exit(code) from None


def _error_event(message: str, code: int, error: BaseException) -> dict[str, Any]:
    event: dict[str, Any] = {"event": "error", "message": message, "exit_code": code}
    if isinstance(error, RelayoutError):
        path = None if error.path is None else str(error.path)
        event |= {"code": error.code, "path": path, "tensor": error.tensor, "offset": error.offset}
    return event


def _reason(error: OSError) -> str:
    reason, advice = str(error.strerror or error), advice_on_limit()
    return reason if error.errno != errno.EMFILE or reason.endswith(advice) else f"{reason}; {advice}"


def _one_line(message: str) -> str:
    """The message shortened and escaped for a terminal, because names from files are untrusted."""
    middle = len(message) - _MAX_MESSAGE_LENGTH
    if middle > 0:
        half = _MAX_MESSAGE_LENGTH // 2
        message = f"{message[:half]} ... {message[-half:]}"
    return escape_controls(message)
