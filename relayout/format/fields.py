"""Strict parsing of foreign JSON and TOML: typed access to fields, slices and names. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isinf
from typing import Any, NoReturn, TypeVar

from relayout.core.slices import NOT_HELD, Slice
from relayout.errors import FormatError, PlanError, about, shown

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
"""The start of the text that git-lfs leaves in place of a file that it has not downloaded."""

MAX_DEPTH = 127
"""Levels of nested JSON, the outermost counted (serde_json's limit)."""
_FEW_BRACKETS = 2**22
_CHARACTERS_PER_BRACKET = 16
"""The shortest entry of a header has three in 51."""
_AS_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(sorted(set(range(256)) - set(b'[]{}"')))
_STRING, _ESCAPE = re.compile(rb'"[^"]*"'), re.compile(rb"\\.", re.DOTALL)
_DIGITS_AS_0 = bytes.maketrans(b"123456789", b"000000000")
_OUT_OF_RANGE = b"0" * 309
"""Minimum digits of an integer that is out of the range of a double."""

MAX_NAME_LENGTH = 4096
"""Maximum characters of a tensor's name."""

MAX_AXES = 64
"""numpy's and PyTorch's limit."""


def parse_object(blob: bytes, where: str) -> dict[str, Any]:
    """Parse one JSON object in UTF-8. FormatError: it is invalid."""
    with about(path=where):
        top = strict_json(decode(blob))
        if not isinstance(top, dict):
            raise FormatError(f"a JSON {type(top).__name__}, expected an object", code="field")
        return top


def strict_json(text: str) -> Any:
    """Parse JSON as the reference reader's parser (serde_json) does, and refuse duplicate names.

    Python's own reader is laxer. It accepts NaN, -0 as an integer, the last of two equal names, numbers beyond the
    range of a double, lone surrogates, and any depth that fits the stack. JSON that consists mostly of brackets is
    refused, too: each bracket would become 70 bytes of memory.
    """
    brackets = text.count("[") + text.count("{")
    if brackets > _FEW_BRACKETS + len(text) // _CHARACTERS_PER_BRACKET:
        raise FormatError(f"{brackets} brackets in {len(text)} characters of JSON", code="limit")
    check_depth(text)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    raise FormatError(f"name {shown(name)} occurs twice", code="syntax")
                seen.add(name)
        return result

    def refuse(constant: str) -> NoReturn:
        raise FormatError(f"{constant} is not a JSON number", code="syntax")

    def integer(digits: str) -> int | float:
        # serde_json reads "-0" as a float, and integers beyond 64 bits as floats.
        if digits == "-0" or len(digits) > 20:
            return floating(digits)
        return int(digits)

    def floating(digits: str) -> float:
        value = float(digits)
        if isinf(value):
            raise FormatError(f"a number is out of range: {digits[:20]}...", code="syntax")
        return value

    # Columns have millions of integers. Python parses them in a third of the time if none can be special.
    is_plain = "-" not in text and _OUT_OF_RANGE not in text.encode("utf-8", "replace").translate(_DIGITS_AS_0)
    try:
        parsed = json.loads(
            text,
            object_pairs_hook=unique,
            parse_constant=refuse,
            parse_int=None if is_plain else integer,
            parse_float=floating,
        )
    except json.JSONDecodeError as error:
        raise FormatError(f"not valid JSON: {error.msg} at character {error.pos}", code="syntax") from None
    refuse_surrogates(text, parsed)
    return parsed


def check_depth(text: str) -> None:
    """Refuse JSON of more than MAX_DEPTH levels, independently of the free space on the caller's stack.

    For invalid JSON, only the levels that a parser enters before the first error count.
    """
    blob = text.encode("utf-8", "replace")
    if b"\\" in blob:
        blob = _ESCAPE.sub(b"", blob)
    left = _STRING.sub(b"", blob.translate(_AS_BRACKETS, _NO_BRACKETS).replace(b'""', b""))
    for _ in range(MAX_DEPTH):
        # Removes the innermost level of each branch.
        left, before = left.replace(b"[]", b""), left
        if len(left) == len(before):
            break
    if b"[]" in left or left.count(b"[") > MAX_DEPTH:
        raise FormatError("JSON nested too deeply", code="syntax")


def refuse_surrogates(text: str, parsed: Any) -> None:
    """Raise FormatError if a string of the JSON is not Unicode text, but contains half of a surrogate pair."""
    if "\\u" in text:  # Half of a surrogate pair can only come from an escape.
        try:
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise FormatError("a string holds half of a surrogate pair", code="syntax") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML, in a time that is limited by its length. FormatError: it is invalid."""
    import tomllib  # Most loads read no TOML.

    if any(line.count(".") > _MAX_DOTS for line in text.split("\n")):
        raise FormatError(f"a line with more than {_MAX_DOTS} dots", code="limit")
    try:
        top = tomllib.loads(text)
        _check_integers(top)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not valid TOML: {error}", code="syntax") from None
    return top


def _check_integers(value: object) -> None:
    """Check that all integers are of 64 bits, as TOML's are: Python does not even print larger ones."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("an integer of more than 64 bits")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_integers(item)


def decode(blob: bytes) -> str:
    """Decode UTF-8; json.loads, given bytes, would also accept UTF-16. FormatError: it is invalid."""
    refuse_lfs_pointer(blob)
    try:
        return blob.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"not UTF-8 at byte {error.start}", code="syntax") from None


def refuse_lfs_pointer(blob: bytes) -> None:
    """Raise FormatError if the bytes are the pointer that git-lfs leaves in place of a file."""
    if blob.startswith(LFS_POINTER):
        raise FormatError("this is a git-lfs pointer, not the file itself: run `git lfs pull`")


_MAX_DOTS = 256
"""Maximum dots in a line: the time of tomllib for a dotted key grows with their square."""
MAX_SIZE = 2**53 - 1
"""Maximum value of a size: every reader of JSON represents such numbers exactly (RFC 8259, section 6)."""

_ITEMS = {int: "sizes", str: "strings", list: "lists", dict: "objects", type(None): "nulls"}
"""The names of list items in messages, by their type."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to a parsed JSON object; methods raise FormatError if a field does not have the requested type."""

    top: Mapping[str, Any]
    where: str | None = None
    """Path in errors; None: the caller adds it, see `errors.about`."""

    def text(self, name: str) -> str:
        """Return a string."""
        return self._of(str, name, "a string")

    def size(self, name: str, default: int | None = None) -> int:
        """Return a whole number, 0 to MAX_SIZE."""
        value = self.top.get(name, default)
        if type(value) is not int or not 0 <= value <= MAX_SIZE:
            self._refuse(name, "a size")
        return value

    def text_or_null(self, name: str) -> str | None:
        """Return a string, or None for null."""
        return None if self._is_null(name) else self._of(str, name, "a string or null")

    def flag(self, name: str) -> bool:
        """Return True or False."""
        return self._of(bool, name, "true or false")

    def object(self, name: str) -> Mapping[str, Any]:
        """Return an object."""
        return self._of(dict, name, "an object")

    def object_or_null(self, name: str) -> Mapping[str, Any] | None:
        """Return an object, or None for null."""
        return None if self._is_null(name) else self._of(dict, name, "an object or null")

    def column(self, name: str, kind: type | tuple[type, ...], count: int | None = None) -> list[Any]:
        """Return a list of items of one kind or of several, with `count` items if given; whole numbers are sizes."""
        kinds = kind if isinstance(kind, tuple) else (kind,)
        number = "" if count is None else f"{count} "
        expected = f"a list of {number}{' or '.join(_ITEMS[one] for one in kinds)}"
        value: list[Any] = self._of(list, name, expected)
        is_right = set(map(type, value)) <= set(kinds) and count in (None, len(value))
        if kind is int and is_right and value:
            is_right = min(value) >= 0 and max(value) <= MAX_SIZE
        return value if is_right else self._refuse(name, expected)

    def positions(self, name: str, count: int, limit: int) -> list[int]:
        """Return a column of positions in another list, which has `limit` items."""
        column = self.column(name, int, count)
        if column and max(column) >= limit:
            raise FormatError(f"{name} {max(column)} of {limit}", path=self.where, code="field")
        return column

    def _is_null(self, name: str) -> bool:
        return name in self.top and self.top[name] is None

    def _of(self, kind: type[Value], name: str, expected: str) -> Value:
        value = self.top.get(name)
        return value if isinstance(value, kind) else self._refuse(name, expected)

    def _refuse(self, name: str, expected: str) -> NoReturn:
        raise FormatError(f"{name!r} is missing or not {expected}", path=self.where, code="field")


MAX_RANGES = 2**16
"""Maximum ranges of a slice along one axis."""


def dump_slice(part: Slice) -> dict[str, list[list[int]]] | None:
    """Return a slice as axis -> ranges: `{}` for the whole tensor, None for a tensor that the rank does not hold."""
    if part.by_axis is None:
        return None
    most = max((len(ranges) for _, ranges in part.by_axis), default=0)
    if most > MAX_RANGES:
        raise PlanError(f"a slice of {most} ranges along one dim, limit {MAX_RANGES}", code="limit")
    return {str(axis): list(map(list, ranges)) for axis, ranges in part.by_axis}


def parse_slice(value: Any) -> Slice:
    """Parse the result of `dump_slice`. FormatError: it is not a slice."""
    if value is None:
        return NOT_HELD
    if not isinstance(value, dict) or not all(isinstance(ranges, list) for ranges in value.values()):
        raise FormatError(f"{shown(value)} is not a slice", code="field")
    axes = [int(axis) if axis.isdecimal() and len(axis) <= 2 else MAX_AXES for axis in value]
    # Rising, and in canonical digits: "0", not "00" or another script's digit.
    if [str(axis) for axis in sorted(set(axes))] != list(value) or any(axis >= MAX_AXES for axis in axes):
        raise FormatError(f"{shown(list(value))} are not dims in rising order, below {MAX_AXES}", code="field")
    longest = max(map(len, value.values()), default=0)
    if longest > MAX_RANGES:
        raise FormatError(f"a slice of {longest} ranges along one dim, limit {MAX_RANGES}", code="limit")
    for item in (item for ranges in value.values() for item in ranges):
        is_pair = isinstance(item, list) and len(item) == 2 and type(item[0]) is type(item[1]) is int
        if not (is_pair and item[0] >= 0 and item[1] > 0 and sum(item) <= MAX_SIZE):
            raise FormatError(f"{shown(item)} in {shown(value)} is not a range", code="field")
    ranges = (tuple((start, length) for start, length in ranges) for ranges in value.values())
    return Slice(tuple(zip(axes, ranges, strict=True)))


def check_name(name: str) -> None:
    """Refuse a tensor name that is too long for rules that match its parts."""
    if len(name) > MAX_NAME_LENGTH:
        raise FormatError(
            f"tensor {name[:64]!r}...: a name of {len(name)} characters, limit {MAX_NAME_LENGTH}", code="limit"
        )


_MAX_PATH_LENGTH, _MAX_PART_NBYTES = 4095, 255
"""Maximum characters of a path on Linux, and maximum bytes of a name in file systems."""


def is_plain_path(name: str) -> bool:
    """Return True if a name, with "/" between its parts, is valid for a file in a folder on every system."""
    parts = name.split("/")
    return not (
        {"", ".", ".."} & set(parts)
        or any(character < " " or "\x7f" <= character < "\xa0" for character in name)
        or len(name) > _MAX_PATH_LENGTH
        or max(len(part.encode(errors="surrogateescape")) for part in parts) > _MAX_PART_NBYTES
    )


def check_path(name: str) -> None:
    """Check that a name is the path of a file inside the folder."""
    # Hidden files are refused, too: they may configure other programs. A conversion does not copy them either.
    if not is_plain_path(name) or any(part.startswith(".") for part in name.split("/")):
        raise FormatError(f"{shown(name)} is not the name of a file inside the checkpoint", code="unsafe")


def check_apart(names: Iterable[str]) -> None:
    """Raise FormatError if two files have the same path, or one file's path is a folder in another's."""
    for path, next_path in pairwise(sorted(f"{name}/" for name in names)):
        if next_path.startswith(path):
            raise FormatError(f"{shown(path[:-1])} is used for two files or folders", code="field")
