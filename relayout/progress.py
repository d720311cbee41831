"""Progress of long work in bytes: a bar or lines on stderr, or calls of a function."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TextIO, TypeAlias, cast, runtime_checkable

from relayout.errors import PlanError, shown

Progress: TypeAlias = bool | Callable[[int, int], None] | None
"""True: a bar on stderr, or lines where that is no terminal. A function: called with (bytes done, total bytes). False
or None: no progress."""

_SECONDS_BETWEEN_LINES = 5.0


@runtime_checkable
class Display(Protocol):
    """A function for `Progress` that also wants to know the phase of the work."""

    def begin(self, phase: str) -> None:
        """The work has come to this phase, such as "converting"."""

    def __call__(self, done: int, total: int) -> None:
        """So many bytes of the phase are done."""


class Reporter:
    """What reports how far one piece of work is."""

    def __init__(self, show: Callable[[int, int], None], phase: str, total: int) -> None:
        self._show = show
        self._total = total
        self.begin(phase)

    def begin(self, phase: str) -> None:
        """From now on the work is in this phase. The bytes done go on counting."""
        if isinstance(self._show, Display):
            self._show.begin(phase)

    def __call__(self, done: int) -> None:
        """So many bytes of all are done."""
        self._show(done, self._total)


@contextmanager
def reporting(progress: Progress, phase: str, total: int) -> Iterator[Reporter | None]:
    """Yield what to call with the bytes done so far, or None if progress is off."""
    if progress is True:
        with progress_bar(total) if _is_terminal() else progress_lines() as display:
            yield Reporter(display, phase, total)
    elif callable(progress):
        yield Reporter(progress, phase, total)
    elif progress in (None, False):
        yield None
    else:
        raise PlanError(f"progress={shown(progress)}, expected True, False, None or a function", code="option")


@contextmanager
def progress_lines() -> Iterator[Display]:
    """Print a line on stderr now and then, and at the end: for logs and notebooks."""
    lines = _Lines()
    try:
        yield lines
    finally:
        lines.end()


@contextmanager
def progress_bar(total: int) -> Iterator[Display]:
    """Show a bar on stderr, which fits 80 columns."""
    from rich import progress  # Slow to import.
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=16),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    stream = None if sys.stderr is None else cast(TextIO, _Lenient(sys.stderr))
    console = Console(stderr=True, file=stream)
    # No refresh thread: a forked child would wait for locks that the thread held.
    with progress.Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        yield _Bar(bar, bar.add_task("", total=total))


class _Bar:
    """A bar of rich."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar = bar
        self._task = task

    def begin(self, phase: str) -> None:
        """See `Display.begin`."""
        self._bar.update(self._task, description=phase, refresh=True)

    def __call__(self, done: int, total: int) -> None:
        """See `Display.__call__`."""
        self._bar.update(self._task, completed=done, total=total, refresh=True)


class _Lines:
    """Lines of text."""

    def __init__(self) -> None:
        self._phase = ""
        self._started = self._printed = time.monotonic()
        self._state = 0, 0
        self._stream = None if sys.stderr is None else _Lenient(sys.stderr)

    def begin(self, phase: str) -> None:
        """See `Display.begin`."""
        self._phase = phase

    def __call__(self, done: int, total: int) -> None:
        """See `Display.__call__`."""
        self._state = done, total
        if time.monotonic() - self._printed >= _SECONDS_BETWEEN_LINES:
            self.end()

    def end(self) -> None:
        """Print the state now."""
        done, total = self._state
        self._printed = time.monotonic()
        if self._stream is not None:
            amount = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB in " if total else ""
            self._stream.write(f"{self._phase}: {amount}{self._printed - self._started:.0f} s\n")
            self._stream.flush()


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()  # rich would count FORCE_COLOR as a terminal.


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
