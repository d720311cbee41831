"""Standard output and the progress on stderr: lines, tables that fit the terminal, and JSON events."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Console
from rich.text import Text

from relayout.cli.streams import abandon
from relayout.cli.tables import UNBROKEN_SPACE, Column, table
from relayout.errors import escape_controls
from relayout.progress import Progress

_MAX_ROWS, _MAX_LINES = 60, 20
"""Rows of a table, and lines of a listing, that are printed without --verbose."""
_SECONDS_BETWEEN_EVENTS = 1.0
_PIPE_WIDTH = 100_000


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text, with a label in front of it that is styled."""

    text: str
    label: str = ""
    style: str = "bold"


@dataclass(frozen=True, slots=True)
class Listing:
    """Lines with the same label, of which only the first may be printed."""

    texts: Sequence[str]
    what: str
    label: str
    style: str = "yellow"


@dataclass(frozen=True, slots=True)
class Table:
    """A table, of which only the first rows may be printed."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    what: str


Block: TypeAlias = Line | Listing | Table


def show(blocks: Iterable[Block], *, verbose: bool = False) -> None:
    """Print to standard output: an empty line separates tables from other text. All text is escaped."""
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
            headings, *lines = table(
                block.columns, [list(map(_safe, row)) for row in block.rows[:limit]], console.width
            )
            console.print(Text(headings, "bold"), soft_wrap=True)
            console.print(Text("\n".join(lines)), soft_wrap=True)
        else:
            for text in block.texts[:limit]:
                _print_line(console, block.label, block.style, text)
        if num_lines > limit:
            console.print(f"... and {num_lines - limit} more {block.what}; --verbose prints all")


def progress(what: str, *, as_json: bool = False, quiet: bool = False, verbose: bool = False) -> Progress:
    """How progress is shown on stderr: as JSON events; as a bar in a terminal; elsewhere as lines with `verbose`."""
    if as_json:
        return _Events(what)
    return not quiet and sys.stderr is not None and (verbose or sys.stderr.isatty())


class _Events:
    """Reports progress as JSON on stderr, at most one line per second in each phase."""

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
            abandon(sys.stderr)


def _print_line(console: Console, label: str, style: str, text: str) -> None:
    line = Text().append(escape_controls(label), style)
    console.print(line.append(" " if label and text else "").append(escape_controls(text)))


def _safe(cell: str) -> str:
    return UNBROKEN_SPACE.join(map(escape_controls, cell.split(UNBROKEN_SPACE)))


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would exit with code 1, which means that verification found a difference.
        raise BrokenPipeError


def _console() -> Console:
    """In a terminal lines end between words. A pipe has no width, unless COLUMNS says one."""
    console = _Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH
    if isinstance(sys.stdout, io.TextIOWrapper):  # A tensor name may have characters that the encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    return console
