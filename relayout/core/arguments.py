"""Parses text that a person writes: integers, sizes such as "48GB", ranks such as "0-3", and patterns of tensor names.

Patterns are those of plans and of `load(names=...)`: `*` matches one or more characters except dots, `**` any text,
`{a,b}` one of the words, `#` a number of at most 9 digits. All other characters match themselves. A pattern matches
whole names.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, wraps
from inspect import Parameter, signature
from itertools import groupby, pairwise, zip_longest
from typing import Any, TypeVar, cast

from relayout.errors import PlanError, shown

_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}
_MAX_NBYTES = 2**63 - 1
"""The largest file offset (`off_t`)."""
Function = TypeVar("Function", bound=Callable[..., Any])


def takes(options: type[Any], parsed: type[Any]) -> Callable[[Function], Function]:
    """Return a decorator for functions with `**options: Unpack[...]`: they show each option, and reject all others.

    Args:
        options: the TypedDict with the names and types of the options.
        parsed: the dataclass with a field for each option, which has its default and checks its value.
    """
    fields = [one for name, one in signature(parsed).parameters.items() if name in options.__optional_keys__]

    def decorate(function: Function) -> Function:
        own = [one for one in signature(function).parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
        shown = sorted([*fields, *own], key=lambda one: one.kind)
        known = frozenset(one.name for one in shown)

        @wraps(function)
        def checked(*args: Any, **given: Any) -> Any:
            for name in given:
                if name not in known:
                    raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {name!r}")
            return function(*args, **given)

        checked.__signature__ = signature(function).replace(parameters=shown)  # type: ignore[attr-defined]
        return cast("Function", checked)

    return decorate


def size(value: int | str, what: str) -> int:
    """Return bytes, from an integer or from text: "4096", "64K", "64KiB" (powers of 1024), "48GB" (of 1000).

    Raises:
        PlanError: the value is not a size, or a text of more than 2**63 - 1 bytes. The message contains `what`.
    """
    if not isinstance(value, str):
        return integer(value, what)
    match = re.fullmatch(r"([0-9]+)\s*([A-Za-z]*)", value.strip())
    units = {name.upper(): factor for name, factor in _UNITS.items()}
    factor = units.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise PlanError(
            f"{what}: {shown(value)} is not a size; write bytes, or a number with K, KiB, MB, GiB ...", code="option"
        )
    digits = match[1].lstrip("0")
    nbytes = int(digits or "0") * factor if len(digits) <= len(str(_MAX_NBYTES)) else _MAX_NBYTES + 1
    if nbytes > _MAX_NBYTES:
        raise PlanError(f"{what}: {shown(value)} is too large, expected at most {_MAX_NBYTES} bytes", code="option")
    return nbytes


def integer(value: object, what: str) -> int:
    """Return the value as an `int`; numpy integers are accepted.

    Raises:
        PlanError: the value is a bool or not an integer. The message contains `what`.
    """
    # In numpy 1, bools are indices too.
    if not isinstance(value, bool) and getattr(getattr(value, "dtype", None), "kind", "i") != "b":
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise PlanError(f"{what}: {shown(value)} is not an integer", code="option")


def at_least_one(value: object, what: str) -> int:
    """Return the value as an `int` of at least 1; for other errors see `integer`."""
    number = integer(value, what)
    if number < 1:
        raise PlanError(f"{what}: {number}, expected 1 or more", code="option")
    return number


def path_text(path: str | os.PathLike[str], what: str = "path", expected: str = "") -> str:
    """Return a path or URL as `str`.

    Raises:
        PlanError: the value is empty, or neither text nor a path. The message contains `what` and `expected`.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        expected = expected or "the path of a folder, or a URL as text"
        raise PlanError(f"{what}: {shown(path)}, expected {expected}", code="option")
    return os.fspath(path)


def folder_text(path: str | os.PathLike[str] | None, what: str) -> str | None:
    """Return the path of a folder as `str`, or None.

    Raises:
        PlanError: the value is empty, or neither text nor a path. The message contains `what`.
    """
    return None if path is None else path_text(path, what, "the path of a folder")


def check_named(value: object, what: str) -> None:
    """Raise PlanError unless the value is a mapping by names. The message contains `what`."""
    if not isinstance(value, Mapping):
        raise PlanError(f"{what} is a {type(value).__name__}, expected tensors by name", code="option")
    if odd := [name for name in value if not isinstance(name, str)]:
        raise PlanError(f"{what}: {shown(odd[0])}, expected the name of a tensor", code="option")


def ranks(value: str | Iterable[int], num_ranks: int) -> tuple[int, ...]:
    """Return ranks from 0 to `num_ranks` - 1; see `numbers`."""
    return numbers(value, num_ranks, "ranks", f"tensor-parallel degree {num_ranks}")


def numbers(value: str | Iterable[int], count: int, what: str, because: str) -> tuple[int, ...]:
    """Return numbers, ascending and without duplicates, given as integers or as text such as "0-3,8" (ends included).

    Args:
        value: the numbers.
        count: numbers are from 0 to `count` - 1.
        what: their name in messages.
        because: the reason for the limit `count`, in messages.

    Raises:
        PlanError: the value has no numbers, or one that is out of range.
    """
    if isinstance(value, str):
        bounds = [re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", part) for part in value.split(",")]
        pairs = [(int(match[1]), int(match[2] or match[1])) for match in bounds if match]
        if len(pairs) < len(bounds) or any(first > last for first, last in pairs):
            raise PlanError(f"{what}: {shown(value)}, expected a list such as 0-3,8", code="option")
    elif not isinstance(value, Iterable):
        raise PlanError(f"{what}: {shown(value)}, expected numbers, or a list such as 0-3,8", code="option")
    else:
        pairs = [(number, number) for number in (integer(item, what) for item in value)]
    # Checked before they are listed, because the text may contain any number.
    if not pairs or min(min(pairs)) < 0 or max(last for _, last in pairs) >= count:
        raise PlanError(f"{what}: {shown(value)}, expected some of 0 to {count - 1} ({because})", code="option")
    return tuple(sorted({number for first, last in pairs for number in range(first, last + 1)}))


def ranks_text(ranks: Iterable[int]) -> str:
    """Return ascending ranks in the form that `ranks` reads: "0-3,8"."""
    groups = [[rank for _, rank in group] for _, group in groupby(enumerate(ranks), lambda item: item[1] - item[0])]
    return ",".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)


MAX_PATTERNS = 4096
"""Number of compiled patterns that are cached."""

_MAX_OPEN_WILDCARDS, _MAX_WORD_TRIES, _MAX_LENGTH = 2, 64, 512
"""Limits of a pattern, see `slow_because`."""

_TOKEN = re.compile(r"\*\*|\*|#|\{[^{}]*\}|[^*#{]+|\{")
_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")
_NAMED_NUMBER = re.compile(r"(?<![A-Za-z0-9_])[0-9]+(?![A-Za-z0-9_])|(?<![A-Za-z_])#(?![A-Za-z_])")
"""A number in a pattern that may be a whole part of a name. Other numbers, as in `shard_#`, are never collapsed."""
_VALID = re.compile(r"(?:[^{}]|\{[^{}*#]*\})*\Z")


def invalid_because(pattern: str) -> str | None:
    """Return why the pattern is invalid, for a message; None if it is valid."""
    return None if _VALID.match(pattern) else "braces must be paired, contain only words, and cannot be nested"


def slow_because(pattern: str) -> str | None:
    """Return why matching a name might be slow, for a message; None if it takes quadratic time at most.

    After a failed match, each other end of a wildcard is tried, unless only one end is possible: at the next dot, or at
    the name's end. If one of the words in braces begins with another, each of them is tried.
    """
    num_tries, num_open, is_scanned = 1, 0, False
    tokens = _TOKEN.findall(pattern)
    for token, following in zip_longest(tokens, tokens[1:], fillvalue=""):
        if token.startswith("{"):
            words = sorted(_words(token))
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


def _words(token: str) -> list[str]:
    """Return the words of a token in braces, or the token alone."""
    return token[1:-1].split(",") if token.startswith("{") else [token]


@lru_cache(maxsize=MAX_PATTERNS)
def compile_glob(pattern: str) -> re.Pattern[str]:
    """Return the regular expression for `pattern`; each `#` is a group."""
    parts = []
    for token in _TOKEN.findall(pattern):
        if token == "**":
            parts.append(".*")
        elif token == "*":
            parts.append(r"[^.]+")
        elif token == "#":
            parts.append("([0-9]{1,9})")
        elif token.startswith("{") and token.endswith("}"):
            parts.append("(?:" + "|".join(map(re.escape, _words(token))) + ")")
        else:
            parts.append(re.escape(token))
    return re.compile("".join(parts) + r"\Z", re.DOTALL)


def collapse_numbers(name: str) -> str:
    """Return the name with each all-digit part replaced by `*`: the same text for all layers and experts."""
    return _NUMBER.sub("*", name)


def collapse_later_numbers(name: str) -> str:
    """Return the name with each all-digit part except the first replaced by `*`.

    The result is the same text for all experts of a layer.
    """
    first = _NUMBER.search(name)
    return name if first is None else name[: first.end()] + collapse_numbers(name[first.end() :])


def depends_on_numbers(pattern: str) -> bool:
    """Return True if the pattern can match only some of the names that `collapse_numbers` makes equal."""
    return _NAMED_NUMBER.search(pattern) is not None


def depends_on_later_numbers(pattern: str) -> bool:
    """Return True if the pattern can match only some of the names that `collapse_later_numbers` makes equal."""
    tokens = _TOKEN.findall(pattern)
    first = next((index for index, token in enumerate(tokens) if depends_on_numbers(token)), None)
    if first is None:
        return False
    is_only = all(len(_NAMED_NUMBER.findall(word)) < 2 for word in _words(tokens[first]))
    return (
        any("*" in token for token in tokens[:first])
        or tokens[first] == "#"
        or not is_only
        or any(map(depends_on_numbers, tokens[first + 1 :]))
    )
