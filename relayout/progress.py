"""Progress of long work in bytes: a bar on stderr, or calls of a function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, TypeAlias, cast

Progress: TypeAlias = bool | Callable[[int, int], None] | None
"""True: a bar on stderr. A function: called with (bytes done, total bytes). False or None: no progress."""


@contextmanager
def reporting(progress: Progress, what: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """Yield a function to call with the bytes done so far, or None if progress is off."""
    if progress is True:
        with progress_bar(what) as show:
            yield lambda done: show(done, total)
    elif callable(progress):
        report = progress
        yield lambda done: report(done, total)
    else:
        yield None


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr; yield a function to call with (bytes done, total bytes)."""
    from rich import progress  # Slow to import.
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    stream = None if sys.stderr is None else cast(TextIO, _Lenient(sys.stderr))
    console = Console(stderr=True, file=stream)
    # No refresh thread: a forked child would wait for locks that the thread held.
    with progress.Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total, refresh=True)


class _Lenient:
    """A stream whose failed writes are ignored: a closed terminal must not stop the work."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
