"""Standard output and the progress on stderr: lines, tables that fit the terminal, and JSON events."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from relayout.cli.signals import abandon
from relayout.errors import escape_controls
from relayout.progress import Progress

_MAX_ROWS, _MAX_LINES = 60, 20
"""Rows of a table, and lines of a listing, that are printed without --verbose."""
_SECONDS_BETWEEN_EVENTS = 1.0
_PIPE_WIDTH = 100_000
_RULE = box.Box("    \n    \n -  \n" + 5 * "    \n", ascii=True)
"""A line below the headings, and no others."""
_GAP = 2
"""Cells between two columns."""
_ELLIPSIS = "..."
_SHORT_NAME, _LEAST_NAME = 36, 32
"""Cells to which names are shortened before words are wrapped, and before a column is dropped."""
_LEAST_WORDS = 12
"""Cells that a column of words has at least."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text, with a label in front of it that is styled."""

    text: str
    label: str = ""
    style: str = "bold"


@dataclass(frozen=True, slots=True)
class Listing:
    """Lines with the same label. Perhaps only the first ones are printed."""

    texts: Sequence[str]
    what: str
    label: str
    style: str = "yellow"


@dataclass(frozen=True, slots=True)
class Column:
    """A column, and what may happen to it where there is little room."""

    heading: str
    kind: Literal["text", "number", "name", "words"] = "text"
    """Numbers are aligned to the right, names may be shortened, and words may continue on the next line."""
    drop: int = 0
    """Columns with 1 are dropped first, then those with 2, and so on; with 0 never."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table. Perhaps only its first rows are printed."""

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
            cells = [list(map(escape_controls, row)) for row in block.rows[:limit]]
            console.print(table(block.columns, cells, console.width))
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


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> RichTable:
    """A table of at most `width` cells, if possible: names are shortened, words wrapped, then columns dropped."""
    for dropped in sorted({0, *(column.drop for column in columns)}):
        kept = [i for i, column in enumerate(columns) if not 0 < column.drop <= dropped]
        cells = {i: [columns[i].heading, *(row[i] for row in rows)] for i in kept}
        name_width = _name_width([(columns[i].kind, cells[i]) for i in kept], width)
        if name_width is not None:
            break
    shown = RichTable(box=_RULE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i in kept:
        kind = columns[i].kind
        shown.add_column(
            Text(columns[i].heading),
            justify="right" if kind == "number" else "left",
            no_wrap=kind != "words",
            min_width=_least_width(cells[i]) if kind == "words" else None,
        )
    for n in range(1, len(rows) + 1):
        shown.add_row(
            *(
                Text(shortened(cells[i][n], name_width or _LEAST_NAME) if columns[i].kind == "name" else cells[i][n])
                for i in kept
            )
        )
    return shown


def _name_width(columns: Sequence[tuple[str, Sequence[str]]], width: int) -> int | None:
    """How many cells names may have, so that columns, given as kinds and cells, fit; None: they cannot."""
    natural = [(kind, max(map(cell_len, cells))) for kind, cells in columns]
    room = width - _GAP * (len(columns) - 1) - sum(cells for kind, cells in natural if kind in ("text", "number"))
    names = [cells for kind, cells in natural if kind == "name"]
    words = sum(cells for kind, cells in natural if kind == "words")
    least_words = sum(_least_width(cells) for kind, cells in columns if kind == "words")
    if sum(names) + words <= room:
        return width
    if not names:
        return width if least_words <= room else None
    share = max((room - words) // len(names), min(_SHORT_NAME, (room - least_words) // len(names)))
    return share if share >= min(_LEAST_NAME, max(names)) else None


def _least_width(cells: Sequence[str]) -> int:
    """Cells that a column of words needs: no word is broken."""
    longest = max((cell_len(word) for cell in cells for word in cell.split()), default=0)
    return min(max(map(cell_len, cells)), max(_LEAST_WORDS, longest))


def shortened(name: str, width: int) -> str:
    """The name, or its start and its end: a third and two thirds, as names of tensors differ at the end."""
    if cell_len(name) <= width:
        return name
    room = max(0, width - len(_ELLIPSIS))
    start, end = name, name
    while cell_len(start) > room // 3:
        start = start[:-1]
    while cell_len(end) > room - room // 3:
        end = end[1:]
    return f"{start}{_ELLIPSIS}{end}"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich would exit with code 1, which means that verification found a difference.
        raise BrokenPipeError


def _console() -> Console:
    """A console in which lines end between words. A pipe has no width, unless COLUMNS says one."""
    console = _Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH
    if isinstance(sys.stdout, io.TextIOWrapper):  # A tensor name may have characters that the encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    return console
