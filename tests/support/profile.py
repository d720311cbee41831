"""How much the tests do: the everyday profile, or with HYPOTHESIS_PROFILE=long more cases of the same laws."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "everyday")
IS_LONG = PROFILE == "long"

Case = TypeVar("Case")


def sample(cases: Iterable[Case], everyday: Iterable[Case]) -> list[Case]:
    """All cases in the long profile, else those for every day."""
    chosen, everyday = list(cases), list(everyday)
    assert everyday, "no case is tested"
    assert not (unknown := [case for case in everyday if case not in chosen]), f"there are no cases {unknown}"
    return chosen if IS_LONG else everyday
