"""Patterns for tensor names, in plans and in `load(names=...)`.

`*` matches one or more characters except dots, `**` any text, `{a,b}` one of the words, `#` a number of at most 9
digits. All other characters match themselves. A pattern matches whole names.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise, zip_longest

MAX_PATTERNS = 4096
"""How many compiled patterns are kept."""

_MAX_OPEN_WILDCARDS, _MAX_WORD_TRIES, _MAX_LENGTH = 2, 64, 512
"""Of a pattern, see `slow_because`."""

_TOKEN = re.compile(r"\*\*|\*|#|\{[^{}]*\}|[^*#{]+|\{")
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_NAMED_NUMBER = re.compile(r"(?<![A-Za-z0-9_])[0-9]+(?![A-Za-z0-9_])|#")
_VALID = re.compile(r"(?:[^{}]|\{[^{}*#]*\})*\Z")


def invalid_because(pattern: str) -> str | None:
    """Why the pattern is invalid, for a message; None if it is valid."""
    return None if _VALID.match(pattern) else "braces must be paired, contain only words, and cannot be nested"


def slow_because(pattern: str) -> str | None:
    """Why matching a name might take long, for a message; None if it takes at most some square of the name's length.

    What fails to match is tried again with each other end of a wildcard, unless only one end can be right: at the next
    dot, or at the name's end. If one of the words in braces begins with another, each of them is tried.
    """
    num_tries, num_open, is_scanned = 1, 0, False
    tokens = _TOKEN.findall(pattern)
    for token, following in zip_longest(tokens, tokens[1:], fillvalue=""):
        if token.startswith("{"):
            words = sorted(token[1:-1].split(","))
            num_tries *= len(words) if any(other.startswith(word) for word, other in pairwise(words)) else 1
        elif following and (token == "**" or (token in ("*", "#") and not following.startswith("."))):
            num_open, is_scanned = num_open + 1, False
        elif token in ("*", "#"):
            is_scanned = num_open > 0
    if num_open + is_scanned > _MAX_OPEN_WILDCARDS:
        return f"more than {_MAX_OPEN_WILDCARDS} wildcards that may end in many places"
    if num_tries > _MAX_WORD_TRIES:
        return f"more than {_MAX_WORD_TRIES} ways to choose between words of which one begins with another"
    return None if len(pattern) <= _MAX_LENGTH else f"more than {_MAX_LENGTH} characters"


@lru_cache(maxsize=MAX_PATTERNS)
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
