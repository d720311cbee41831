"""Text tables that fit a width: no word is broken, names are shortened in the middle, and columns are dropped. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

_GAP = "  "
_ELLIPSIS = "..."
_MIN_NAME = 32
"""Names are shortened to this many characters before a column is dropped."""
_GOOD_NAME = 36
"""Names are shortened to this many characters before words are wrapped."""
_MIN_WORDS = 12
"""Columns of words are at least this wide."""
UNBROKEN_SPACE = "\u00a0"
"""A space at which no line is broken; printed as an ordinary one."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column, and what may happen to it where there is little room."""

    heading: str
    kind: Literal["text", "number", "name", "words"] = "text"
    """Numbers are aligned to the right, names may be shortened, and words may continue on the next line."""
    drop: int = 0
    """Columns with 1 are dropped first, then those with 2, and so on; with 0 never."""


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Lines of a table, at most `width` cells wide if that is possible: headings, a rule, and the rows."""
    kept, widths = _fit(columns, rows, width)
    shown = [columns[i] for i in kept]
    headings = _lines(shown, [column.heading for column in shown], widths)
    rule = _GAP.join("-" * column_width for column_width in widths)
    return [*headings, rule, *(line for row in rows for line in _lines(shown, [row[i] for i in kept], widths))]


def shortened(name: str, width: int) -> str:
    """The name, or its start and its end: a third and two thirds, as names of tensors differ at the end."""
    if _cells(name) <= width:
        return name
    room = max(0, width - len(_ELLIPSIS))
    start, end = name, name
    while _cells(start) > room // 3:
        start = start[:-1]
    while _cells(end) > room - room // 3:
        end = end[1:]
    return f"{start}{_ELLIPSIS}{end}"


def unbroken(text: str) -> str:
    """The text as one word: no line is broken at its spaces."""
    return text.replace(" ", UNBROKEN_SPACE)


def _fit(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> tuple[list[int], list[int]]:
    """The columns that are kept, and their widths."""
    for dropped in sorted({0, *(column.drop for column in columns)}):
        kept = [i for i, column in enumerate(columns) if not 0 < column.drop <= dropped]
        cells = [[columns[i].heading, *(row[i] for row in rows)] for i in kept]
        widths = [max(map(_cells, column)) for column in cells]
        for kind, least in (("name", _GOOD_NAME), ("words", _MIN_WORDS), ("name", _MIN_NAME)):
            for position, i in enumerate(kept):
                excess = sum(widths) + len(_GAP) * (len(widths) - 1) - width
                if excess > 0 and columns[i].kind == kind:
                    floor = _longest_word(cells[position]) if kind == "words" else len(columns[i].heading)
                    widths[position] = min(widths[position], max(widths[position] - excess, floor, least))
        if sum(widths) + len(_GAP) * (len(widths) - 1) <= width:
            break
    return kept, widths


def _longest_word(cells: Sequence[str]) -> int:
    return max(_cells(word) for cell in cells for word in cell.split(" "))


def _lines(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """One row, which takes several lines if words are wrapped."""
    parts = []
    for column, cell, width in zip(columns, cells, widths, strict=True):
        text = shortened(cell, width) if column.kind == "name" else cell
        fits = _cells(text) <= width
        parts.append([text] if fits else textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False))
    return [_GAP.join(map(_padded, line, widths, columns)).rstrip() for line in zip_longest(*parts, fillvalue="")]


def _padded(cell: str, width: int, column: Column) -> str:
    space = " " * (width - _cells(cell))
    text = cell.replace(UNBROKEN_SPACE, " ")
    return space + text if column.kind == "number" else text + space


def _cells(text: str) -> int:
    """How wide a terminal shows the text."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # Slow to import.

    return cell_len(text)
