"""Typed access to JSON that others wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from relayout.errors import FormatError, about
from relayout.format.safetensors import refuse_lfs_pointer, strict_json


def parse_object(blob: bytes, where: str) -> dict[str, Any]:
    """Parse one JSON object in UTF-8.

    Raises:
        FormatError: it is invalid.
    """
    with about(path=where):
        top = strict_json(decode(blob))
        if not isinstance(top, dict):
            raise FormatError(f"a JSON {type(top).__name__}, expected an object", code="field")
        return top


def decode(blob: bytes) -> str:
    """Text in UTF-8; json.loads, given bytes, would also accept UTF-16.

    Raises:
        FormatError: it is invalid.
    """
    refuse_lfs_pointer(blob)
    try:
        return blob.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"not UTF-8 at byte {error.start}", code="syntax") from None


MAX_SIZE = 2**53 - 1
"""Sizes are not larger, so that every reader of JSON has them exactly (RFC 8259, section 6)."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to a parsed JSON object; every method raises FormatError where the field is not as asked."""

    top: Mapping[str, Any]
    where: str | None = None
    """Path in errors; None: who calls adds it, see `errors.about`."""

    def text(self, name: str) -> str:
        """A string."""
        value = self.top.get(name)
        if not isinstance(value, str):
            self._refuse(name, "a string")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number, 0 to MAX_SIZE."""
        value = self.top.get(name, default)
        if type(value) is not int or not 0 <= value <= MAX_SIZE:
            self._refuse(name, "a size")
        return value

    def text_or_null(self, name: str) -> str | None:
        """A string, or null."""
        value = self.top.get(name, 0)
        if not isinstance(value, str | None):
            self._refuse(name, "a string or null")
        return value

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self.top.get(name)
        if not isinstance(value, bool):
            self._refuse(name, "true or false")
        return value

    def object(self, name: str) -> Mapping[str, Any]:
        """An object."""
        value = self.top.get(name)
        if not isinstance(value, dict):
            self._refuse(name, "an object")
        return value

    def object_or_null(self, name: str) -> Mapping[str, Any] | None:
        """An object, or null."""
        value = self.top.get(name, 0)
        if not isinstance(value, dict | None):
            self._refuse(name, "an object or null")
        return value

    def objects(self, name: str) -> list[Mapping[str, Any]]:
        """A list of objects."""
        value = self.top.get(name)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self._refuse(name, "a list of objects")
        return value

    def objects_or_nulls(self, name: str) -> list[Mapping[str, Any] | None]:
        """A list of objects and nulls."""
        value = self.top.get(name)
        if not isinstance(value, list) or not all(isinstance(item, dict | None) for item in value):
            self._refuse(name, "a list of objects")
        return value

    def items(self, name: str) -> list[Any]:
        """A list."""
        value = self.top.get(name)
        if not isinstance(value, list):
            self._refuse(name, "a list")
        return value

    def column(self, name: str, kind: type | tuple[type, ...], count: int | None = None) -> list[Any]:
        """A list of items of one kind, `count` of them if that is given; whole numbers are sizes."""
        value = self.top.get(name)
        if not isinstance(value, list) or len(value) != (len(value) if count is None else count):
            self._refuse(name, "a list" if count is None else f"a list of {count} items")
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not set(map(type, value)) <= set(kinds):
            self._refuse(name, f"a list of {' or '.join(accepted.__name__ for accepted in kinds)}")
        if kind is int and value and not (min(value) >= 0 and max(value) <= MAX_SIZE):
            self._refuse(name, "a list of sizes")
        return value

    def _refuse(self, name: str, expected: str) -> NoReturn:
        raise FormatError(f"{name!r} is missing or not {expected}", path=self.where, code="field")
