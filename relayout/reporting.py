"""Reporting to callers: the progress of long work in bytes, and results.

Progress is a bar or lines on stderr, or calls of a function. A result is convertible to JSON, and has a short `repr`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from reprlib import Repr
from typing import Any, TextIO, TypeAlias, cast

from relayout.errors import PlanError, shown

Progress: TypeAlias = bool | Callable[[int, int], None] | None
"""True: a bar on stderr, or lines if stderr is not a terminal. A function: called with (bytes done, total bytes).
Its method `begin`, if it has one, is called with the phase of the work, such as "converting". False or None:
progress is off."""

_SECONDS_BETWEEN_LINES = 5.0
_RATED = "loading"
"""The phase whose lines include a rate. Other phases also count bytes that were finished before they began."""
_SHORT = Repr()
_SHORT.maxtuple = _SHORT.maxlist = _SHORT.maxdict = 3
_SHORT.maxstring = _SHORT.maxother = 160


class Result:
    """Base of the dataclasses that relayout's functions return. Their `repr=False` selects the `repr` of this class."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return all fields as text, with long values shortened."""
        named = (f"{field.name}={_SHORT.repr(getattr(self, field.name))}" for field in fields(cast(Any, self)))
        return f"{type(self).__name__}({', '.join(named)})"

    def as_json(self) -> dict[str, object]:
        """Return the fields as `--json` prints them, nested dataclasses as objects and lists."""
        return asdict(cast(Any, self))


class Reporter:
    """Reports the progress of one piece of work."""

    def __init__(self, show: Callable[[int, int], None], phase: str, total: int) -> None:
        self._show = show
        self._total = total
        self.begin(phase)

    def begin(self, phase: str) -> None:
        """Begin a phase of the work. The number of bytes done is not reset."""
        if hasattr(self._show, "begin"):
            self._show.begin(phase)

    def __call__(self, done: int) -> None:
        """Report the bytes done in all phases."""
        self._show(done, self._total)

    def after(self, before: int) -> Callable[[int], None]:
        """Return a callback for one part of the work that adds `before` to the bytes it reports."""
        return lambda done: self(before + done)


@contextmanager
def reporting(progress: Progress, phase: str, total: int) -> Iterator[Reporter]:
    """Yield the callback for the number of bytes done so far. If progress is off, it does nothing."""
    if progress is True:
        # Not detected by rich, which would count FORCE_COLOR as a terminal.
        display = _bar(total) if sys.stderr is not None and sys.stderr.isatty() else _lines()
        with display as show:
            yield Reporter(show, phase, total)
    elif callable(progress):
        yield Reporter(progress, phase, total)
    elif progress in (None, False):
        yield Reporter(lambda done, total: None, phase, total)
    else:
        raise PlanError(f"progress: {shown(progress)}, expected True, False, None or a function", code="option")


class _Bar:
    """A progress bar of rich."""

    def __init__(self, bar: Any, task: Any) -> None:
        self._bar = bar
        self._task = task

    def begin(self, phase: str) -> None:
        self._bar.update(self._task, description=phase, refresh=True)

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total, refresh=True)


@contextmanager
def _bar(total: int) -> Iterator[_Bar]:
    """Show a bar on stderr that fits 80 columns."""
    from rich import progress  # Slow to import.
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=16),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    console = Console(stderr=True, file=cast(TextIO, _Lenient(sys.stderr)))
    # No refresh thread: a forked child would wait for locks that the thread held.
    with progress.Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        yield _Bar(bar, bar.add_task("", total=total))


class _Lines:
    """Progress as lines for logs: one every `_SECONDS_BETWEEN_LINES`, and one at the end."""

    def __init__(self) -> None:
        self._phase = ""
        self._started = self._printed = time.monotonic()
        self._state = 0, 0

    def begin(self, phase: str) -> None:
        self._phase = phase

    def __call__(self, done: int, total: int) -> None:
        self._state = done, total
        if time.monotonic() - self._printed >= _SECONDS_BETWEEN_LINES:
            self.print()

    def print(self) -> None:
        """Print the current state."""
        done, total = self._state
        self._printed = time.monotonic()
        amount = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB in " if total else ""
        seconds = self._printed - self._started
        rate = f", {done / seconds / 1e9:.2f} GB/s" if self._phase == _RATED and seconds > 0 else ""
        if sys.stderr is not None:
            print(f"{self._phase}: {amount}{seconds:.0f} s{rate}", file=_Lenient(sys.stderr), flush=True)


@contextmanager
def _lines() -> Iterator[_Lines]:
    lines = _Lines()
    try:
        yield lines
    finally:
        lines.print()


class _Lenient:
    """A stream that ignores failed writes: a closed terminal must not stop the work."""

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
