"""relayout.reporting: what callers are told of progress, and results as text and JSON."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from relayout import reporting as module
from relayout.errors import PlanError
from relayout.reporting import Result, reporting


@dataclass(frozen=True, slots=True, repr=False)
class Part(Result):
    name: str


@dataclass(frozen=True, slots=True, repr=False)
class Whole(Result):
    parts: tuple[Part, ...]
    number: int
    text: str = ""


def test_a_result_is_short_as_text_and_whole_as_json() -> None:
    whole = Whole(tuple(Part(str(number)) for number in range(5)), 3, "x" * 500)
    assert repr(whole).startswith("Whole(parts=(Part(name='0'), Part(name='1'), Part(name='2'), ...), number=3, text=")
    assert len(repr(whole)) < 300
    assert whole.as_json() == {"parts": tuple({"name": str(n)} for n in range(5)), "number": 3, "text": "x" * 500}


def test_a_function_is_called_with_the_bytes_done_and_all_bytes() -> None:
    seen: list[tuple[int, int]] = []
    with reporting(lambda *state: seen.append(state), "converting", 10) as report:
        report(1)
        report.after(4)(3)
        report.begin("another phase")
        report(10)
    assert seen == [(1, 10), (7, 10), (10, 10)]


def test_a_function_that_has_begin_is_told_the_phases() -> None:
    class Shown:
        def __init__(self) -> None:
            self.seen: list[object] = []

        def begin(self, phase: str) -> None:
            self.seen.append(phase)

        def __call__(self, done: int, total: int) -> None:
            self.seen.append((done, total))

    shown = Shown()
    with reporting(shown, "checking", 5) as report:
        report(2)
        report.begin("converting")
        report(5)
    assert shown.seen == ["checking", (2, 5), "converting", (5, 5)]


@pytest.mark.parametrize("progress", [None, False])
def test_nobody_sees_progress_that_is_off(progress: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with reporting(progress, "converting", 10) as report:
        report(10)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("progress", [1, "yes", object()])
def test_any_other_value_is_refused(progress: Any) -> None:
    refused = pytest.raises(PlanError, match=r"^progress: .*, expected True, False, None or a function$")
    with refused, reporting(progress, "converting", 10):
        pytest.fail("it was accepted")


def test_in_a_log_a_line_is_printed_now_and_then_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with reporting(True, "converting", 4_000_000) as report:
        for second, done in ((1, 1_000_000), (5.5, 2_000_000), (6, 3_000_000), (7, 4_000_000)):
            now[0] = 100 + second
            report(done)
    assert stream.getvalue().splitlines() == ["converting: 2 of 4 MB in 6 s", "converting: 4 of 4 MB in 7 s"]


def test_a_log_of_a_load_has_its_rate_and_no_other_work_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with reporting(True, "loading", 30_000_000_000) as report:
        now[0] = 106.0
        report(15_000_000_000)
        now[0] = 108.0
        report(30_000_000_000)
    with reporting(True, "loading", 0):  # No time passes.
        pass
    assert stream.getvalue().splitlines() == [
        "loading: 15,000 of 30,000 MB in 6 s, 2.50 GB/s",
        "loading: 30,000 of 30,000 MB in 8 s, 3.75 GB/s",
        "loading: 0 s",
    ]


def test_a_stream_that_is_closed_or_missing_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("closed")

        def flush(self) -> None:
            raise OSError("closed")

    for stream in (Closed(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        with reporting(True, "converting", 10) as report:
            report(10)


def test_in_a_terminal_a_bar_has_the_phase_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with reporting(True, "converting", 2_000_000) as report:
        report(1_000_000)
        report.begin("checking")
        report(2_000_000)
    shown = terminal.getvalue()
    assert "converting" in shown
    assert "checking" in shown
    assert "1.0/2.0 MB" in shown
    assert shown.rstrip().endswith("\x1b[2K")
