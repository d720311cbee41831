"""Integers that callers give."""

from __future__ import annotations

import operator

from relayout.errors import PlanError, shown


def integer(value: object, what: str) -> int:
    """The integer that a caller gave, also one of numpy.

    Raises:
        PlanError: it is a bool, or no integer.
    """
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise PlanError(f"{what}: {shown(value)} is not an integer", code="option")
