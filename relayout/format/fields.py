"""Typed access to JSON and TOML that others wrote, and to the slices and file names in it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

from relayout.core.slices import NOT_HELD, Slice
from relayout.errors import FormatError, PlanError, about, shown
from relayout.format.safetensors import MAX_AXES, refuse_lfs_pointer, strict_json


def parse_object(blob: bytes, where: str) -> dict[str, Any]:
    """Parse one JSON object in UTF-8. FormatError: it is invalid."""
    with about(path=where):
        top = strict_json(decode(blob))
        if not isinstance(top, dict):
            raise FormatError(f"a JSON {type(top).__name__}, expected an object", code="field")
        return top


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML, in a time that is limited by its length. FormatError: it is invalid."""
    import tomllib  # Most loads read none.

    if any(line.count(".") > _MAX_DOTS for line in text.split("\n")):
        raise FormatError(f"a line with more than {_MAX_DOTS} dots", code="limit")
    try:
        top = tomllib.loads(text)
        _check_integers(top)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not valid TOML: {error}", code="syntax") from None
    return top


def _check_integers(value: object) -> None:
    """Check that all integers are of 64 bits, as TOML's are: Python does not even print larger ones.

    Raises:
        ValueError: one is not.
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("an integer of more than 64 bits")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_integers(item)


def decode(blob: bytes) -> str:
    """Text in UTF-8; json.loads, given bytes, would also accept UTF-16. FormatError: it is invalid."""
    refuse_lfs_pointer(blob)
    try:
        return blob.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"not UTF-8 at byte {error.start}", code="syntax") from None


_MAX_DOTS = 256
"""The most dots in a line: the time that tomllib takes for a dotted key grows with their square."""
MAX_SIZE = 2**53 - 1
"""Sizes are not larger, so that every reader of JSON has them exactly (RFC 8259, section 6)."""

_ITEMS = {int: "sizes", str: "strings", list: "lists", dict: "objects", type(None): "nulls"}
"""What messages call the items of a list, by their type."""

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to a parsed JSON object; every method raises FormatError where the field is not as asked."""

    top: Mapping[str, Any]
    where: str | None = None
    """Path in errors; None: who calls adds it, see `errors.about`."""

    def text(self, name: str) -> str:
        """A string."""
        return self._of(str, name, "a string")

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number, 0 to MAX_SIZE."""
        value = self.top.get(name, default)
        if type(value) is not int or not 0 <= value <= MAX_SIZE:
            self._refuse(name, "a size")
        return value

    def text_or_null(self, name: str) -> str | None:
        """A string, or null."""
        return None if self._is_null(name) else self._of(str, name, "a string or null")

    def flag(self, name: str) -> bool:
        """True or false."""
        return self._of(bool, name, "true or false")

    def object(self, name: str) -> Mapping[str, Any]:
        """An object."""
        return self._of(dict, name, "an object")

    def object_or_null(self, name: str) -> Mapping[str, Any] | None:
        """An object, or null."""
        return None if self._is_null(name) else self._of(dict, name, "an object or null")

    def column(self, name: str, kind: type | tuple[type, ...], count: int | None = None) -> list[Any]:
        """A list of items of one kind or of several, `count` of them if that is given; whole numbers are sizes."""
        kinds = kind if isinstance(kind, tuple) else (kind,)
        number = "" if count is None else f"{count} "
        expected = f"a list of {number}{' or '.join(_ITEMS[one] for one in kinds)}"
        value: list[Any] = self._of(list, name, expected)
        is_right = set(map(type, value)) <= set(kinds) and count in (None, len(value))
        if kind is int and is_right and value:
            is_right = min(value) >= 0 and max(value) <= MAX_SIZE
        return value if is_right else self._refuse(name, expected)

    def positions(self, name: str, count: int, limit: int) -> list[int]:
        """A column of positions in another list, which has `limit` items."""
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
"""The most ranges of a slice along one axis."""


def dump_slice(part: Slice) -> dict[str, list[list[int]]] | None:
    """A slice as axis -> ranges: `{}` for the whole tensor, None for what the rank does not hold.

    Raises:
        PlanError: it has too many ranges to be read again.
    """
    if part.by_axis is None:
        return None
    most = max((len(ranges) for _, ranges in part.by_axis), default=0)
    if most > MAX_RANGES:
        raise PlanError(f"a slice of {most} ranges along one dim, limit {MAX_RANGES}", code="limit")
    return {str(axis): list(map(list, ranges)) for axis, ranges in part.by_axis}


def parse_slice(value: Any) -> Slice:
    """The inverse of `dump_slice`. FormatError: it is not a slice."""
    if value is None:
        return NOT_HELD
    if not isinstance(value, dict) or not all(isinstance(ranges, list) for ranges in value.values()):
        raise FormatError(f"{shown(value)} is not a slice", code="field")
    axes = [int(axis) if axis.isdecimal() and len(axis) <= 2 else MAX_AXES for axis in value]
    # Rising, and each as it is written: "0", not "00" or another script's digit.
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


_MAX_PATH_LENGTH, _MAX_PART_NBYTES = 4095, 255
"""Linux has no longer paths, and file systems no longer names."""


def is_plain_path(name: str) -> bool:
    """Whether a name, with "/" between its parts, can be that of a file in a folder, everywhere."""
    parts = name.split("/")
    return not (
        {"", ".", ".."} & set(parts)
        or any(character < " " or "\x7f" <= character < "\xa0" for character in name)
        or len(name) > _MAX_PATH_LENGTH
        or max(len(part.encode(errors="surrogateescape")) for part in parts) > _MAX_PART_NBYTES
    )


def check_path(name: str) -> None:
    """Check that a name leads to a place in the folder.

    Raises:
        FormatError: it leads elsewhere, or nowhere.
    """
    # No hidden ones, which a conversion does not take along either: they may steer other programs.
    if not is_plain_path(name) or any(part.startswith(".") for part in name.split("/")):
        raise FormatError(f"{shown(name)} is not the name of a file inside the checkpoint", code="unsafe")


def check_apart(names: Iterable[str]) -> None:
    """Check that no two files want one place, as files or as folders. FormatError: two do."""
    for path, next_path in pairwise(sorted(f"{name}/" for name in names)):
        if next_path.startswith(path):
            raise FormatError(f"{shown(path[:-1])} is used for two files or folders", code="field")
