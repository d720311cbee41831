"""What all results have in common: an object for JSON, and text for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from html import escape
from typing import Any, cast

from rich.filesize import decimal

from relayout.tables import Column, table

_MAX_ROWS = 20
_WIDTH = 140


class Result:
    """Base of the dataclasses that functions of relayout return."""

    __slots__ = ()

    def as_json(self) -> dict[str, object]:
        """For `--json`: fields, nested ones as objects and lists."""
        return asdict(cast(Any, self))

    def _repr_html_(self) -> str:
        """For notebooks: all fields, and a table for each sequence of records."""
        values, tables = [], []
        for field in fields(cast(Any, self)):
            value = getattr(self, field.name)
            if value is None or value == ():  # As for another kind of folder.
                continue
            if isinstance(value, tuple | list) and value and is_dataclass(value[0]):
                names = [column.name for column in fields(value[0])]
                rows = [[_text(name, getattr(record, name)) for name in names] for record in value]
                tables.append(f"<p>{_heading(field.name)}</p>{html_table(rows, list(map(_heading, names)))}")
            else:
                values.append([_heading(field.name), _text(field.name, value)])
        return html_table(values, [type(self).__name__, ""]) + "".join(tables)


def html_table(rows: Sequence[Sequence[str]], headings: Sequence[str]) -> str:
    """The first rows of a table of texts, for a notebook."""
    lines = table([Column(heading, "words") for heading in headings], rows[:_MAX_ROWS], _WIDTH)
    if len(rows) > _MAX_ROWS:
        lines.append(f"... and {len(rows) - _MAX_ROWS:,} more")
    text = "\n".join(lines)
    return f"<pre>{escape(text)}</pre>"


def _heading(name: str) -> str:
    return name.removesuffix("_nbytes").removeprefix("num_").replace("_", " ")


def _text(name: str, value: object) -> str:
    """A value in words; what counts bytes by its name has a unit."""
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_text(name, item)}" for key, item in value.items())
    if name.endswith("shape") and value is not None:
        return " x ".join(map(str, cast(Any, value)))
    if is_dataclass(value):
        return ", ".join(f"{_heading(one.name)} {_text(one.name, getattr(value, one.name))}" for one in fields(value))
    if isinstance(value, tuple | list):
        shown = ", ".join(_text(name, item) for item in value[:_MAX_ROWS])
        return shown + (f", ... and {len(value) - _MAX_ROWS:,} more" if len(value) > _MAX_ROWS else "")
    if isinstance(value, int) and not isinstance(value, bool):
        return decimal(value) if name.endswith("nbytes") or name == "memory" else f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)
