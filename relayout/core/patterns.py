"""Patterns for tensor names, in plans and in `load(names=...)`.

`*` matches one or more characters except dots, `**` any text, `{a,b}` one of the words, `#` a number of at most 9
digits. All other characters match themselves. A pattern matches whole names.
"""

from __future__ import annotations

import re
from functools import lru_cache

_TOKEN = re.compile(r"\*\*|\*|#|\{[^{}]*\}|[^*#{]+|\{")
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_NAMED_NUMBER = re.compile(r"(?<![A-Za-z0-9_])[0-9]+(?![A-Za-z0-9_])|#")
_VALID = re.compile(r"(?:[^{}]|\{[^{}*#]*\})*\Z")


def invalid_because(pattern: str) -> str | None:
    """Why the pattern is invalid, for a message; None if it is valid."""
    return None if _VALID.match(pattern) else "braces must be paired, contain only words, and cannot be nested"


@lru_cache(maxsize=4096)
def compile_glob(pattern: str) -> re.Pattern[str]:
    """The regular expression for `pattern`; each `#` is a group."""
    parts = []
    for token in _TOKEN.findall(pattern):
        if token == "**":
            parts.append(".*")
        elif token == "*":
            parts.append(r"[^.]+")
        elif token == "#":
            parts.append("([0-9]{1,9})")
        elif token.startswith("{") and token.endswith("}"):
            parts.append("(?:" + "|".join(re.escape(choice) for choice in token[1:-1].split(",")) + ")")
        else:
            parts.append(re.escape(token))
    return re.compile("".join(parts) + r"\Z", re.DOTALL)


def collapse_numbers(name: str) -> str:
    """The name with each all-digit part replaced by `*`: the same text for all layers and experts."""
    return _NUMBER.sub("*", name)


def depends_on_numbers(pattern: str) -> bool:
    """Whether the pattern can match only some of the names that `collapse_numbers` makes equal."""
    return _NAMED_NUMBER.search(pattern) is not None
