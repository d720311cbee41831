"""Sizes as people write them."""

from __future__ import annotations

import re

from relayout.errors import PlanError

_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", 1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}


def parse_size(text: str) -> int:
    """Bytes of "4096", "64K", "64KiB" (powers of 1024) or "48GB" (powers of 1000).

    Raises:
        PlanError: it is no size.
    """
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    units = {name.upper(): factor for name, factor in _UNITS.items()}
    factor = units.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise PlanError(f"{text!r} is not a size; write bytes, or a number with K, KiB, MB, GiB ...")
    return int(match[1]) * factor
