"""Times of `relayout bench --json`, as the page shows them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from relayout.core.arguments import path_text
from relayout.errors import FormatError, PlanError
from relayout.format.fields import Fields, parse_object

_MAX_NBYTES = 16_000_000
"""Largest size of a result of `bench`, in bytes: about a thousand times the usual size."""


def read_bench(path: str | os.PathLike[str], checkpoints: Sequence[Path]) -> dict[str, Any]:
    """Return the verdict, the warnings and the medians of a file with the output of `relayout bench --json`.

    Args:
        path: the file.
        checkpoints: the folders that the page is about. `bench` must have measured one of them.

    Raises:
        FormatError: the file is not such an output.
        PlanError: `bench` measured another checkpoint, or a temporary one.
        OSError: the file cannot be read.
    """
    where = path_text(path, "bench", "the path of a file")
    with open(where, "rb") as file:
        blob = file.read(_MAX_NBYTES + 1)
    if len(blob) > _MAX_NBYTES:
        raise FormatError(f"longer than {_MAX_NBYTES} bytes, expected the output of bench --json", path=where)
    top = Fields(parse_object(blob, where), where)
    named = [name for name in (top.text_or_null("converted"), top.text_or_null("source")) if name is not None]
    if not {Path(name).resolve() for name in named} & {one.resolve() for one in checkpoints}:
        of = named[0] if named else "a temporary checkpoint (--size)"
        raise PlanError(f"measured {of}, expected {checkpoints[0]}", path=where, code="option")
    groups = [Fields(group, where) for group in top.column("loads", dict)]
    return {
        "verdict": top.text("verdict"),
        "warnings": top.column("warnings", str),
        "loads": [
            {"title": f"{group.text('title')}, {group.text('state')}", "rows": _rows(group, where)} for group in groups
        ],
    }


def _rows(group: Fields, where: str) -> list[dict[str, Any]]:
    """Return the loaders of one group of loads that were measured, the fastest first."""
    timings = [Fields(timing, where) for timing in group.column("timings", dict)]
    rows: list[dict[str, Any]] = [
        {"title": timing.text("title"), "is_ours": timing.text("family") == "relayout"} | _medians(runs)
        for timing in timings
        if (runs := [Fields(run, where) for run in timing.column("runs", dict)])
    ]
    ours = next((row["seconds"] for row in rows if row["is_ours"]), None)
    for row in rows:
        row["ratio"] = None if ours is None else row["seconds"] / ours
    return sorted(rows, key=lambda row: float(row["seconds"]))


def _medians(runs: Sequence[Fields]) -> dict[str, float]:
    seconds = median(_numbers(runs, "seconds", positive=True))
    return {
        "seconds": seconds,
        "gb_per_s": runs[0].size("nbytes") / seconds / 1e9,
        "cpu_seconds": median(_numbers(runs, "cpu_seconds", positive=False)),
    }


def _numbers(runs: Sequence[Fields], name: str, *, positive: bool) -> Iterator[float]:
    for run in runs:
        value = run.top.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value < 0 or (positive and not value):
            raise FormatError(f"{name!r} is missing or not a number of seconds", path=run.where, code="field")
        yield float(value)
