"""The steps of `tools/run gpu`: a limit of time interrupts them, and the next call goes on."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from gpu import steps as stepping
from gpu.results import Results
from gpu.steps import Run, Step

pytestmark = pytest.mark.documents

LONG = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); time.sleep(600)"


def carry_out(out: Path, steps: list[Step], seconds: float = 60, free_gb: float = 100) -> tuple[bool, list[str]]:
    said: list[str] = []
    done = Run(out).carry_out(
        steps, time.monotonic() + seconds, free_gb=lambda: free_gb, environment={}, tell=said.append
    )
    return done, said


def step(name: str, code: str, **more: object) -> Step:
    return Step(name, (sys.executable, "-c", code), 1, **more)  # type: ignore[arg-type]


def test_what_has_ended_is_not_done_again_and_a_failure_is_kept(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    mark = f"open({str(marks)!r}, 'a').write('x')"
    steps = [step("one", mark), step("bad", f"{mark}; raise SystemExit('no such device')"), step("two", mark)]
    done, said = carry_out(tmp_path / "out", steps)
    assert done
    assert marks.read_text() == "xxx"
    assert any("bad: exit code 1" in line and "no such device" in line for line in said)
    assert carry_out(tmp_path / "out", steps) == (True, [])
    assert marks.read_text() == "xxx"
    assert Run(tmp_path / "out").outcomes["bad"].code == 1


def test_a_step_is_stopped_in_time_with_all_that_it_started_and_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepping, "GRACE_S", 1.0)
    done, said = carry_out(tmp_path, [step("long", LONG)], seconds=6)
    assert not done
    assert "long: stopped, to be continued" in said[0]
    child = Path("/proc", (tmp_path / "long.log").read_text().split()[0])
    deadline = time.monotonic() + 20
    while child.exists() and "Z" not in (child / "stat").read_text().rpartition(")")[2] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or "Z" in (child / "stat").read_text().rpartition(")")[2]
    assert carry_out(tmp_path, [step("long", "pass")])[0]


def test_a_step_without_time_or_disk_is_not_begun(tmp_path: Path) -> None:
    assert not carry_out(tmp_path, [step("large", "pass", disk_gb=200)])[0]
    assert not carry_out(tmp_path, [step("late", "pass")], seconds=0.5)[0]
    outcomes = Run(tmp_path).outcomes
    assert outcomes["large"].why == "not begun: 100.0 GB free, needs 200.0 GB"
    assert outcomes["late"].code is None


def test_results_go_on_after_a_line_that_was_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    Results(file).measure("a", lambda: {"seconds": 1})
    with file.open("a") as stream:
        stream.write('{"key": "b", "sec')
    again = Results(file)
    calls: list[str] = []
    for key in "ab":
        again.measure(key, lambda key=key: calls.append(key) or {"seconds": 2})  # type: ignore[misc]
    assert calls == ["b"]
    assert Results(file).rows["a"]["seconds"] == 1
    assert Results(file).rows["b"]["seconds"] == 2
