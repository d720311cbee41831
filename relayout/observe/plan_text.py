"""Writes rules that were derived from observations as the text of a plan file. Pure."""

from __future__ import annotations

import json
from textwrap import wrap
from typing import Any

from relayout.observe.fitting import Fitted
from relayout.plans.family import dump_rules

_WIDTH = 120
"""Of a line."""


def as_toml(fitted: Fitted, *comments: str, extends: str = "") -> str:
    """The text of a plan file.

    Args:
        fitted: the rules.
        comments: the first lines.
        extends: the built-in plan whose rules come behind these.
    """
    rules = dump_rules(fitted.family)
    lines = [f"# {line}" for comment in comments for line in wrap(comment, _WIDTH - 2)]
    if fitted.unmatched:
        lines.append("# No rule was found for these, whose slices are listed:")
        lines += [f"#   {pattern}: {why}" for pattern, why in fitted.unmatched.items()]
    top = {"model_types": rules.get("model_types"), "extends": extends}
    top["language_prefixes"] = rules.get("language_prefixes")
    lines += [f"{key} = {_toml(value)}" for key, value in top.items() if value]
    for table in ("sizes", "cut", "experts"):
        entries = rules.get(table, {})
        if entries:
            lines += ["", f"[{table}]"]
            lines += [
                _short_lines(f"{key if table != 'cut' else _toml(key)} = {_toml(_short(value))}")
                for key, value in entries.items()
            ]
    return "\n".join(lines) + "\n"


def _short_lines(line: str) -> str:
    """The line, or if it is too long its list on lines of its own."""
    before, bracket, rest = line.rpartition("[") if len(line) > _WIDTH else (line, "", "")
    values, _, after = rest.rpartition("]")
    if not bracket or "=" in values:
        return line
    # Words that belong together are kept so: no break in a string.
    inside = wrap(f"{values},".replace(", ", ",\n").replace(" ", "\0").replace("\n", " "), _WIDTH - 4)
    return f"{before}[\n" + "".join(f"    {part}\n".replace("\0", " ") for part in inside) + f"]{after}"


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
    return json.dumps(value, ensure_ascii=False)
