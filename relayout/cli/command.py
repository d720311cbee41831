"""Shared parts of all commands: options of several commands, and printing.

Results go to standard output as lines, and as tables that fit the terminal. Progress, warnings and errors go to stderr.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Protocol, TypeAlias, TypeVar

import typer

from relayout.cli import signals
from relayout.errors import RelayoutError, escape_controls

if TYPE_CHECKING:  # rich is imported only when it prints something; --help and errors do not need it.
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    from relayout.reporting import Progress

EXIT_DIFFERENCE = 1
EXIT_BAD_INPUT = 2
EXIT_IO = 3

_MAX_MESSAGE_LENGTH = 2000
"""Longest message, in characters."""
_MAX_ROWS, _MAX_LINES = 60, 20
"""Number of rows of a table, and of lines of a listing, that are printed without --verbose."""
_SECONDS_BETWEEN_EVENTS = 1.0
_PIPE_WIDTH = 100_000
_RULE = "    \n    \n -  \n" + 5 * "    \n"
"""A box style for rich tables: only a line below the headings."""
_ELLIPSIS = "..."
_NAME_WIDTHS = (10_000, 72, 48, 36, 32)
"""Widths of names to try, in cells, for a table that is too wide. After these, columns are dropped."""
_LEAST_WORDS = 12
"""Smallest width of a column of words, in cells."""

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
        " package; or 'vllm' or 'sglang' to observe that engine, which must be installed. "
        "Default: the built-in plan for model_type in config.json.",
    ),
]
TrustRemoteCodeOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Allow the observed engine to run the Python files of SRC.")
]
TrustOption = Annotated[
    str | None,
    typer.Option(
        "--trust",
        metavar="FILE",
        help="Trust policy (TOML) that lists accepted signers. Unsigned data is rejected. Default: RELAYOUT_TRUST.",
    ),
]
ForceOption = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Replace an older output that relayout wrote; discard an interrupted attempt of another command.",
    ),
]
IfMissingOption = Annotated[
    bool,
    typer.Option(
        "--if-missing", help="Exit with 0 if an identical, complete output exists. A different one is still an error."
    ),
]
ThreadsOption = Annotated[int, typer.Option(metavar="N", help="Threads that read, copy, hash and write.")]
MemoryOption = Annotated[str, typer.Option(metavar="SIZE", help="Memory limit of these threads.")]
ScratchOption = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Local folder for files before their upload to a bucket. Default: TMPDIR."),
]
DegreeOption = Annotated[
    int, typer.Option("--tp", "-tp", metavar="N", help="Number of tensor-parallel ranks; 1 keeps tensors whole.")
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
        "--expert-parallel", help="Assign whole experts to ranks, in contiguous blocks, instead of slicing each expert."
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print all rows, and progress even if stderr is not a terminal.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object; progress and errors are JSON lines on stderr.")
]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text that may begin with a styled label."""

    text: str
    label: str = ""
    style: str = "bold"


@dataclass(frozen=True, slots=True)
class Listing:
    """Lines with the same label. Without --verbose, only the first ones may be printed."""

    texts: Sequence[str]
    what: str
    label: str
    style: str = "yellow"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table, and the ways to shrink it on a narrow terminal."""

    heading: str
    kind: Literal["text", "number", "name", "words"] = "text"
    """Numbers are aligned to the right, names may be shortened, and words may wrap to the next line."""
    drop: int = 0
    """Order in which columns are dropped: first those with 1, then those with 2, etc. 0: never dropped."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table. Without --verbose, only its first rows may be printed."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    what: str


Block: TypeAlias = Line | Listing | Table


class _Shown(Protocol):
    def as_json(self) -> dict[str, object]: ...


R = TypeVar("R", bound=_Shown)


@dataclass(frozen=True, slots=True)
class Printing:
    """Prints the result and the progress of a command, as set by the options that all commands have."""

    quiet: bool
    verbose: bool
    as_json: bool

    def work(self, what: str) -> Progress:
        """Begin work, and return the form in which its progress is reported.

        From now on, a signal raises an exception, for cleanup, and a closed stdout does not end the process. Call this
        in the argument list of the call that does the work: a signal during the import of that function then still ends
        the process at once.
        """
        signals.raise_on_signal()
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        return _Events(what) if self.as_json else self._shows_progress

    @property
    def _shows_progress(self) -> bool:
        """True if progress is shown to a person on stderr: as a bar on a terminal, otherwise as lines."""
        return not self.quiet and sys.stderr is not None and (self.verbose or sys.stderr.isatty())

    def log_line(self, line: str) -> None:
        """Print a line of progress on stderr."""
        if not self.quiet:
            log_line(line)

    def begin(self, line: str) -> None:
        """Announce work on stderr, if a person waits for it: on a terminal, or with `verbose`."""
        if not self.as_json and self._shows_progress:
            log_line(line)

    def show(self, result: R, text: Callable[[R], Iterable[Block]]) -> None:
        """Print a result. A closed stdout does not change the exit code, which is about the work."""
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
        """Print a text for other programs, or with --json the data that it was built from."""
        if self.as_json:
            print(json.dumps(result), flush=True)
        elif not self.quiet:
            print(text, end="", flush=True)


@contextmanager
def output(quiet: bool, verbose: bool, as_json: bool) -> Iterator[Printing]:
    """Yield a `Printing` for the command in the block; print the command's warnings and its error."""
    with errors(as_json=as_json), _warnings(quiet, as_json):
        yield Printing(quiet, verbose, as_json)


def examples(*lines: str) -> str:
    """Return the examples at the end of a command's help."""
    return "\b\nExamples:\n" + "\n".join(f"  relayout {line}" for line in lines)


def require_command(context: typer.Context) -> None:
    """Show the help of a group and exit, unless one of its commands was given."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(EXIT_BAD_INPUT)


@contextmanager
def errors(as_json: bool = False) -> Iterator[None]:
    """Print an error and the next command as a line each, or one JSON object; exit with the code of its family."""
    try:
        yield
    except RelayoutError as error:
        _fail(str(error), EXIT_BAD_INPUT, error, as_json)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{_reason(error)}", EXIT_IO, error, as_json)
    except MemoryError as error:
        _fail(f"out of memory: {error}", EXIT_IO, error, as_json)
    except ModuleNotFoundError as error:  # A package from an extra, such as torch.
        _fail(str(error), EXIT_BAD_INPUT, error, as_json)
    except signals.SignalReceived as error:
        signals.ignore()
        _fail(str(error), error.exit_code, error, as_json, label="")


def log_line(line: str) -> None:
    """Print a line to stderr. A closed stderr does not stop the work."""
    try:
        print_error(escape_controls(line))
    except OSError:
        signals.abandon(sys.stderr)


def print_error(line: str) -> None:
    """Print a line to stderr; on a terminal, wrap it to the width of the terminal."""
    typer.echo(filled(line) if sys.stderr is not None and sys.stderr.isatty() else line, err=True)


def filled(text: str) -> str:
    """Wrap the text between words to the width of the terminal."""
    width = shutil.get_terminal_size().columns
    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


@contextmanager
def _warnings(quiet: bool, as_json: bool) -> Iterator[None]:
    """Print warnings as one line, or one JSON object, without the source location."""

    def show(message: Warning | str, *where: object, **more: object) -> None:
        if as_json:
            log_line(json.dumps({"event": "warning", "message": str(message)}))
        elif not quiet:
            log_line(f"relayout: warning: {_one_line(str(message))}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _fail(message: str, code: int, error: BaseException, as_json: bool, label: str = "error: ") -> NoReturn:
    from relayout.cli.advice import next_step

    notes = getattr(error, "__notes__", [])
    following = next_step(error, sys.argv[1:])
    try:
        if as_json:
            event = _error_event(message, code, error) | {"next": following}
            typer.echo(json.dumps(event | ({"notes": notes} if notes else {})), err=True)
        else:
            print_error(f"relayout: {label}{_one_line(message)}")
            for note in notes:
                print_error(f"relayout: note: {_one_line(note)}")
            print_error(f"relayout: next: {_one_line(following)}")
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
    reason = str(error.strerror or error)
    if error.errno != errno.EMFILE:
        return reason
    from relayout.storage.system import advice_on_limit

    advice = advice_on_limit()
    return reason if reason.endswith(advice) else f"{reason}; {advice}"


def _one_line(message: str) -> str:
    """Shorten the message, and escape it for a terminal, because names from files are untrusted."""
    middle = len(message) - _MAX_MESSAGE_LENGTH
    if middle > 0:
        half = _MAX_MESSAGE_LENGTH // 2
        message = f"{message[:half]} ... {message[-half:]}"
    return escape_controls(message)


def show(blocks: Iterable[Block], *, verbose: bool = False) -> None:
    """Print blocks to standard output, with empty lines around tables. All text is escaped."""
    console = _console()
    previous: Block | None = None
    for block in blocks:
        if isinstance(block, Listing) and not block.texts:
            continue
        if isinstance(previous, Table) or (previous is not None and isinstance(block, Table)):
            console.print()
        previous = block
        if isinstance(block, Line):
            _print_line(console, block.label, block.style, block.text)
            continue
        num_lines = len(block.rows) if isinstance(block, Table) else len(block.texts)
        limit = num_lines if verbose else _MAX_ROWS if isinstance(block, Table) else _MAX_LINES
        if isinstance(block, Table):
            cells = [list(map(escape_controls, row)) for row in block.rows[:limit]]
            drawn = table(block.columns, cells, console)
            for line in [drawn] if drawn is not None else _lines_of(block.columns, cells):
                console.print(line)
        else:
            for text in block.texts[:limit]:
                _print_line(console, block.label, block.style, text)
        if num_lines > limit:
            console.print(f"... and {num_lines - limit} more {block.what}; --verbose prints all")


class _Events:
    """Reports progress as JSON lines on stderr, at most one line per second in each phase."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._phase: str | None = None
        self._started = self._reported = time.monotonic()

    def begin(self, phase: str) -> None:
        if self._phase is not None:  # Report a new phase at once.
            self._reported = -_SECONDS_BETWEEN_EVENTS
        self._phase = phase

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._reported < _SECONDS_BETWEEN_EVENTS:
            return
        self._reported = now
        event = {
            "event": self._what,
            "phase": self._phase,
            "done_nbytes": done,
            "total_nbytes": total,
            "seconds": round(now - self._started, 3),
        }
        try:
            print(json.dumps(event), file=sys.stderr, flush=True)
        except OSError:  # A closed stderr must not stop the work.
            signals.abandon(sys.stderr)


def _print_line(console: Console, label: str, style: str, text: str) -> None:
    from rich.text import Text

    line = Text().append(escape_controls(label), style)
    console.print(line.append(" " if label and text else "").append(escape_controls(text)))


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], console: Console) -> RichTable | None:
    """Return a table that fits the console, or None. Names are shortened and words wrapped before columns are dropped.

    Numbers are never shortened.
    """
    from rich.box import Box
    from rich.cells import cell_len
    from rich.table import Table as RichTable
    from rich.text import Text

    for dropped, most in product(sorted({0, *(column.drop for column in columns)}), _NAME_WIDTHS):
        shown = RichTable(box=Box(_RULE, ascii=True), show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        kept = [i for i, column in enumerate(columns) if not 0 < column.drop <= dropped]
        for i in kept:
            heading, kind = columns[i].heading, columns[i].kind
            natural = max(cell_len(cell) for cell in (heading, *(row[i] for row in rows)))
            least = min(natural, {"name": most, "words": _LEAST_WORDS}.get(kind, natural))
            justify: Literal["left", "right"] = "right" if kind == "number" else "left"
            shown.add_column(Text(heading), justify=justify, overflow="fold", no_wrap=kind != "words", min_width=least)
        for row in rows:
            shown.add_row(*(Text(shortened(row[i], most) if columns[i].kind == "name" else row[i]) for i in kept))
        # `console.measure` cannot be used: it limits its result to the width.
        if shown.__rich_measure__(console, console.options).minimum <= console.width:
            return shown
    return None


def _lines_of(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> Iterator[Text]:
    """Yield each row as one line that wraps between words, for a terminal that is too narrow for the table."""
    from rich.text import Text

    for row in rows:
        cells = [f"{column.heading} {cell}".strip() for column, cell in zip(columns, row, strict=True) if cell]
        yield Text(", ".join(cells))


def shortened(name: str, width: int) -> str:
    """Return the name, shortened in the middle: tensor names differ at the end, so two thirds are from the end."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(name) <= width:
        return name
    room = max(0, width - len(_ELLIPSIS))
    start = set_cell_size(name, room // 3).rstrip()
    end = set_cell_size(name[::-1], room - room // 3)[::-1].lstrip()
    return f"{start}{_ELLIPSIS}{end}"


def _console() -> Console:
    """Return a console that wraps lines between words. A pipe has an unlimited width, unless COLUMNS is set."""
    from rich.console import Console

    class OfCommand(Console):
        def on_broken_pipe(self) -> None:
            # rich would exit with code 1, which means that a check failed.
            raise BrokenPipeError

    console = OfCommand(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH
    if isinstance(sys.stdout, io.TextIOWrapper):  # A tensor name may contain characters that the encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    return console
