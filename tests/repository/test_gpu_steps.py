"""The steps of `tools/run gpu`: a limit of time interrupts them, and the next call goes on."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from gpu import steps as stepping
from gpu.results import Results
from gpu.steps import Step

pytestmark = pytest.mark.documents

LONG = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); time.sleep(600)"


def step(name: str, code: str) -> Step:
    return Step(name, (sys.executable, "-c", code))


def carry_out(out: Path, steps: list[Step], seconds: float = 100) -> bool:
    return stepping.carry_out(out, steps, time.monotonic() + seconds, {})


def test_what_has_ended_is_not_done_again_and_a_failure_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    marks = tmp_path / "marks"
    mark = f"open({str(marks)!r}, 'a').write('x')"
    steps = [step("one", mark), step("bad", f"{mark}; raise SystemExit('no such device')"), step("two", mark)]
    assert carry_out(tmp_path / "out", steps)
    assert marks.read_text() == "xxx"
    assert "bad: exit code 1 no such device\n" in capsys.readouterr().out
    assert carry_out(tmp_path / "out", steps)
    assert marks.read_text() == "xxx"
    assert (tmp_path / "out" / "bad.code").read_text() == "1\n"


def test_a_step_is_stopped_in_time_with_all_that_it_started_and_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stepping, "GRACE_S", 0.5)
    monkeypatch.setattr(stepping, "LEAST_S", 0.0)
    assert not carry_out(tmp_path, [step("long", LONG), step("next", "pass")], seconds=2.5)
    assert capsys.readouterr().out == "long: stopped, to be continued\n"
    child = Path("/proc", (tmp_path / "long.log").read_text().split()[0])
    deadline = time.monotonic() + 20
    while child.exists() and "Z" not in (child / "stat").read_text().rpartition(")")[2] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.exists() or "Z" in (child / "stat").read_text().rpartition(")")[2]
    assert carry_out(tmp_path, [step("long", "pass")])


def test_a_step_that_hangs_ends_at_its_own_limit_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stepping, "GRACE_S", 0.5)
    long = Step("long", (sys.executable, "-c", LONG), 1.5)
    assert carry_out(tmp_path, [long, step("next", "pass")])
    assert capsys.readouterr().out.startswith("long: exit code none, stopped after 2 s ")
    assert (tmp_path / "next.code").read_text() == "0\n"
    assert (tmp_path / "long.code").exists()


def test_a_step_without_time_is_not_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not carry_out(tmp_path, [step("late", "pass")], seconds=30.5)
    assert capsys.readouterr().out == "late: not begun, 30 s left\n"
    assert list(tmp_path.iterdir()) == []


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


def test_a_step_may_start_children_that_import_from_the_folder_in_which_it_was_called(tmp_path, monkeypatch):
    sources, code = tmp_path / "sources", "from relayout.core.workers import start_child; "
    sources.mkdir()
    (sources / "lies_here.py").write_text("")
    monkeypatch.chdir(sources)
    environment = {"PYTHONPATH": str(sources)}
    steps = [step("children", code + "raise SystemExit(start_child('lies_here').wait())")]
    assert stepping.carry_out(tmp_path / "out", steps, time.monotonic() + 100, environment)
    assert (tmp_path / "out" / "children.code").read_text() == "0\n"
