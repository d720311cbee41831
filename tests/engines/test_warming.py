"""RELAYOUT_WARM: one process of an engine starts `relayout warm`, and a load ends it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.patience import PATIENCE

import relayout
from relayout.engines import warming
from relayout.engines.rank_weights import EngineOptions, RankWeights

SLEEPER = "import time; time.sleep(60)"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RELAYOUT_WARM", "RELAYOUT_WARM_PID"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(warming, "_started", [])


def test_nothing_is_started_unless_asked_for() -> None:
    warming.start()
    warming.end()
    assert warming._started == []


def test_the_first_process_starts_it_and_its_children_do_not(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relayout.convert(llama, tmp_path / "model", tp=2)
    monkeypatch.setenv("RELAYOUT_WARM", str(tmp_path / "model"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    warming.start()
    warming.start()
    [started] = warming._started
    assert started.args == [sys.executable, "-P", "-m", "relayout", "warm", str(tmp_path / "model")]
    assert "RELAYOUT_WARM" not in os.environ
    assert os.environ["RELAYOUT_WARM_PID"] == str(started.pid)
    assert started.wait(PATIENCE) == 0
    warming.end()


def test_a_load_ends_it(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    relayout.convert(llama, tmp_path / "model", tp=2)
    (tmp_path / "relayout.py").write_text(SLEEPER)
    running = subprocess.Popen([sys.executable, "-m", "relayout", "warm", "x"], cwd=tmp_path)
    monkeypatch.setenv("RELAYOUT_WARM_PID", str(running.pid))
    wait_for_name(running.pid)
    assert dict(RankWeights(str(tmp_path / "model"), 0, 2, EngineOptions()))
    assert running.wait(PATIENCE) == -15
    assert "RELAYOUT_WARM_PID" not in os.environ


def test_another_process_that_has_the_number_by_now_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    running = subprocess.Popen([sys.executable, "-c", SLEEPER])
    try:
        wait_for_name(running.pid)
        monkeypatch.setenv("RELAYOUT_WARM_PID", str(running.pid))
        warming.end()
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(0.2)
    finally:
        running.kill()
        running.wait()


def wait_for_name(pid: int) -> None:
    """Until the child has become another program."""
    end = time.monotonic() + PATIENCE
    while Path(f"/proc/{pid}/cmdline").read_bytes().count(b"\0") < 2:
        assert time.monotonic() < end
        time.sleep(0.01)
