"""Parses numeric arguments: integers, and sizes such as "48GB"."""

from __future__ import annotations

import operator
import re

from relayout.errors import PlanError, shown

_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}
_MAX_NBYTES = 2**63 - 1
"""The largest file offset (`off_t`)."""


def parse_size(text: str) -> int:
    """Bytes of "4096", "64K", "64KiB" (powers of 1024) or "48GB" (powers of 1000).

    Raises:
        PlanError: the text is not a size, or the size exceeds 2**63 - 1 bytes.
    """
    match = re.fullmatch(r"([0-9]+)\s*([A-Za-z]*)", text.strip())
    units = {name.upper(): factor for name, factor in _UNITS.items()}
    factor = units.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise PlanError(
            f"{shown(text)} is not a size; write bytes, or a number with K, KiB, MB, GiB ...", code="option"
        )
    digits = match[1].lstrip("0")
    nbytes = int(digits or "0") * factor if len(digits) <= len(str(_MAX_NBYTES)) else _MAX_NBYTES + 1
    if nbytes > _MAX_NBYTES:
        raise PlanError(f"{shown(text)} is too large, expected at most {_MAX_NBYTES} bytes", code="option")
    return nbytes


def size(value: int | str, what: str) -> int:
    """A number of bytes, given as an integer or as text (see `parse_size`).

    Raises:
        PlanError: the value is not a size. The message calls it `what`.
    """
    return parse_size(value) if isinstance(value, str) else integer(value, what)


def integer(value: object, what: str) -> int:
    """The value as an `int`; numpy integers are accepted.

    Raises:
        PlanError: the value is a bool or not an integer. The message calls it `what`.
    """
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise PlanError(f"{what}: {shown(value)} is not an integer", code="option")
