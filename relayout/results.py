"""What all results have in common: an object for JSON, and a small table for notebooks."""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass
from html import escape
from typing import Any, cast

_MAX_ROWS = 20
_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


class Result:
    """Base of the dataclasses that functions of relayout return."""

    __slots__ = ()

    def as_json(self) -> dict[str, object]:
        """For `--json`: fields, nested ones as objects and lists."""
        return asdict(cast(Any, self))

    def _repr_html_(self) -> str:
        """For notebooks: a table of all fields, complete in itself."""
        rows = [(field.name, getattr(self, field.name)) for field in fields(cast(Any, self))]
        return _table([[_heading(name), _cell(name, value)] for name, value in rows], caption=type(self).__name__)


def html_table(rows: list[list[str]], headings: list[str]) -> str:
    """A table of texts, of which the first rows are shown. The texts are escaped."""
    more = [[f"... and {len(rows) - _MAX_ROWS:,} more"]] if len(rows) > _MAX_ROWS else []
    cells = [[escape(cell) for cell in row] for row in rows[:_MAX_ROWS] + more]
    return _table(cells, headings=[escape(heading) for heading in headings])


def _table(rows: list[list[str]], *, caption: str = "", headings: list[str] | None = None) -> str:
    parts = [f"<caption><b>{escape(caption)}</b></caption>"] if caption else []
    if headings is not None:
        parts.append("<tr>" + "".join(f"<th>{heading}</th>" for heading in headings) + "</tr>")
    for row in rows:
        cells = "".join(f'<td style="text-align:left;vertical-align:top">{cell}</td>' for cell in row)
        parts.append(f"<tr>{cells}</tr>")
    return f"<table>{''.join(parts)}</table>"


def _heading(name: str) -> str:
    return f"<b>{escape(name.removesuffix('_nbytes').removeprefix('num_').replace('_', ' '))}</b>"


def _cell(name: str, value: object) -> str:
    if isinstance(value, dict):
        return html_table([[str(key), _text(name, one)] for key, one in value.items()], [])
    if isinstance(value, tuple | list) and value and is_dataclass(value[0]):
        names = [field.name for field in fields(value[0])]
        rows = [[_text(one, getattr(item, one)) for one in names] for item in value]
        return html_table(rows, [one.replace("_", " ") for one in names])
    return escape(_text(name, value))


def _text(name: str, value: object) -> str:
    """A value in words; what counts bytes by its name has a unit."""
    if isinstance(value, tuple | list):
        shown = ", ".join(_text(name, one) for one in value[:_MAX_ROWS])
        return shown + (f", ... and {len(value) - _MAX_ROWS:,} more" if len(value) > _MAX_ROWS else "")
    if isinstance(value, int) and not isinstance(value, bool):
        return _amount(value) if name.endswith("nbytes") or name == "memory" else f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)


def _amount(nbytes: int) -> str:
    """Bytes, in powers of 1000."""
    scaled, unit = float(nbytes), 0
    while scaled >= 1000 and unit < len(_UNITS) - 1:
        scaled, unit = scaled / 1000, unit + 1
    return f"{nbytes:,} bytes" if unit == 0 else f"{scaled:.1f} {_UNITS[unit]}"
