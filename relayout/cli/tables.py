"""Tables that fit the terminal: no word is broken. Names are shortened in the middle, and columns are dropped.

Pure: lines of text in, lines of text out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len

_GAP = "  "
_MIN_NAME = 32
"""Characters to which names are shortened before a column is dropped."""
_GOOD_NAME = 36
"""Characters to which names are shortened before other cells are put on several lines."""
_MIN_WORDS = 12
"""Characters to which cells that wrap are narrowed before a column is dropped."""
_ELLIPSIS = "..."
UNBROKEN_SPACE = "\u00a0"
"""Stands for a space inside a word, until it is printed."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column, and what may happen to it where the terminal is narrow."""

    heading: str
    is_number: bool = False
    """Aligned to the right."""
    is_name: bool = False
    """Cells may be shortened in the middle."""
    wraps: bool = False
    """Cells may go on in the next line, after a space."""
    drop: int = 0
    """Columns with 1 are dropped first, then those with 2, and so on; with 0 never."""


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Lines of a table, at most `width` cells wide if that is possible: headings, a rule, and the rows."""
    kept, widths = _fit(columns, rows, width)
    shown = [columns[i] for i in kept]
    headings = _lines(shown, [column.heading for column in shown], widths)
    rule = _GAP.join("-" * one for one in widths)
    return [*headings, rule, *(line for row in rows for line in _lines(shown, [row[i] for i in kept], widths))]


def shortened(name: str, width: int) -> str:
    """The name, or its start and its end: a third and two thirds, as names of tensors differ at the end."""
    if cell_len(name) <= width:
        return name
    room = max(0, width - len(_ELLIPSIS))
    head, tail = room // 3, room - room // 3
    start = end = ""
    for character in name:
        if cell_len(start + character) > head:
            break
        start += character
    for character in reversed(name):
        if cell_len(character + end) > tail:
            break
        end = character + end
    return f"{start}{_ELLIPSIS}{end}"


def _fit(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> tuple[list[int], list[int]]:
    """The columns that are kept, and their widths."""
    steps = [0, *sorted({column.drop for column in columns if column.drop})]
    for dropped in steps:
        kept = [i for i, column in enumerate(columns) if not 0 < column.drop <= dropped]
        cells = [[columns[i].heading, *(row[i] for row in rows)] for i in kept]
        widths = [max(map(cell_len, column)) for column in cells]
        floors = [
            max(_MIN_WORDS, *(cell_len(word) for cell in column for word in cell.split(" ")))
            if columns[i].wraps
            else len(columns[i].heading)
            for i, column in zip(kept, cells, strict=True)
        ]
        for may_shrink, least in (("is_name", _GOOD_NAME), ("wraps", 0), ("is_name", _MIN_NAME)):
            for position, i in enumerate(kept):
                excess = sum(widths) + len(_GAP) * (len(widths) - 1) - width
                if excess > 0 and getattr(columns[i], may_shrink):
                    widths[position] = min(widths[position], max(widths[position] - excess, floors[position], least))
        if sum(widths) + len(_GAP) * (len(widths) - 1) <= width:
            break
    return kept, widths


def _lines(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """One row, which takes several lines if a cell wraps."""
    parts = []
    for column, cell, width in zip(columns, cells, widths, strict=True):
        if column.is_name:
            cell = shortened(cell, width)
        fits = cell_len(cell) <= width
        parts.append([cell] if fits else textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False))
    lines = []
    for number in range(max(map(len, parts))):
        padded = (
            _padded(part[number] if number < len(part) else "", width, column)
            for part, width, column in zip(parts, widths, columns, strict=True)
        )
        lines.append(_GAP.join(padded).rstrip())
    return lines


def _padded(cell: str, width: int, column: Column) -> str:
    space = " " * (width - cell_len(cell))
    text = cell.replace(UNBROKEN_SPACE, " ")
    return space + text if column.is_number else text + space


def number(heading: str, *, drop: int = 0) -> Column:
    """A column of numbers."""
    return Column(heading, is_number=True, drop=drop)


def name(heading: str) -> Column:
    """A column of names, which may be shortened."""
    return Column(heading, is_name=True)


def words(heading: str, *, drop: int = 0) -> Column:
    """A column of words, which may go on in the next line."""
    return replace(Column(heading, wraps=True), drop=drop)


def unbroken(text: str) -> str:
    """The text as one word of a cell: its spaces are no places for a new line."""
    return text.replace(" ", UNBROKEN_SPACE)
