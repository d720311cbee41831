"""Writes rules as the text of a plan file. Pure."""

from __future__ import annotations

import json
from textwrap import wrap
from typing import Any

from relayout.plans.family import Family, dump_rules

_WIDTH = 120
"""Of a line."""


def as_toml(family: Family, *comments: str, extends: str = "") -> str:
    """The text of a plan file.

    Args:
        comments: the first lines.
        extends: the built-in plan whose rules come behind these.
    """
    rules = dump_rules(family)
    lines = [f"# {line}" for comment in comments for line in wrap(comment, _WIDTH - 2)]
    top = {"model_types": rules.get("model_types"), "extends": extends}
    top["language_prefixes"] = rules.get("language_prefixes")
    lines += [f"{key} = {_toml(value)}" for key, value in top.items() if value]
    for table in ("sizes", "cut", "experts"):
        entries = rules.get(table, {})
        if entries:
            lines += ["", f"[{table}]"]
        for key, value in entries.items():
            lines.append(_short_lines(f"{_toml(key) if table == 'cut' else key} = ", _toml(_short(value))))
    return "\n".join(lines) + "\n"


def _short_lines(before: str, value: str) -> str:
    """The value behind what comes before; if that is too long for a line, the value's list on lines of its own."""
    opening, bracket, rest = value.rpartition("[") if len(before + value) > _WIDTH else (value, "", "")
    values, _, closing = rest.rpartition("]")
    if not bracket or "=" in values:
        return before + value
    # Words that belong together are kept so: no break in a string.
    inside = wrap(f"{values},".replace(", ", ",\n").replace(" ", "\0").replace("\n", " "), _WIDTH - 4)
    return f"{before}{opening}[\n" + "".join(f"    {part}\n".replace("\0", " ") for part in inside) + f"]{closing}"


def _short(value: Any) -> Any:
    """Lists of one element as that element."""
    if isinstance(value, list) and len(value) == 1:
        return _short(value[0])
    return {key: _short(item) for key, item in value.items()} if isinstance(value, dict) else value


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    # JSON's, but for a character that TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
