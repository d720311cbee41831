"""Shows how far a load is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Progress: TypeAlias = bool | Callable[[int, int], None] | None
"""True: a bar on stderr. A function: called with (bytes that have arrived, bytes in all)."""


@contextmanager
def reporting(progress: Progress, total: int) -> Iterator[Callable[[int], None] | None]:
    """Yields what to call with the bytes that have arrived, or None if nobody wants to know."""
    if progress is True:
        from relayout.progressbar import progress_bar

        with progress_bar("loading") as show:
            yield lambda done: show(done, total)
    elif callable(progress):
        report = progress
        yield lambda done: report(done, total)
    else:
        yield None
