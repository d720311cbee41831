"""Reasons of skipped tests, as the summary of a run groups them."""

from __future__ import annotations

import re

_PATH = re.compile(r"(?<![\w.])/[^\s:,;)]+")


def reason_of(skipped: str) -> str:
    """The reason that pytest reports, without the paths by which equal reasons differ."""
    return _PATH.sub("PATH", " ".join(skipped.removeprefix("Skipped: ").split()))
