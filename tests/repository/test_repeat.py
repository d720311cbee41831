"""Repeated tests: one that depends on the order is found, with the seed that shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import repeat

SUITE = """
seen = []

def test_a():
    seen.append(1)

def test_b():
    assert seen, "test_a has not run"
"""
ORDER = """
def pytest_addoption(parser):
    parser.addoption("--randomly-seed", type=int)

def pytest_collection_modifyitems(config, items):
    if config.getoption("--randomly-seed") % 2:
        items.reverse()
"""
"""A stub of pytest-randomly, which is not in the extra `test`: odd seeds reverse the order."""


@pytest.fixture
def suite(tmp_path: Path) -> list[str]:
    """The arguments for pytest that run a suite in which one test needs another to run first."""
    (tmp_path / "test_some.py").write_text(SUITE)
    (tmp_path / "order.py").write_text(ORDER)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {tmp_path}\n")
    return ["-q", "-p", "order", "-c", str(tmp_path / "pytest.ini"), "--rootdir", str(tmp_path), str(tmp_path)]


def test_a_test_that_depends_on_the_order_is_named_with_its_seeds(
    suite: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["repeat", "--runs", "3", "--load", "1", "--", *suite])
    assert repeat.main() == 1
    printed = capsys.readouterr().out
    assert "test_some::test_b: failed in 2 of 3 runs, seeds 1, 3" in printed
    assert "3 runs, 1 tests failed" in printed


def test_a_run_without_a_report_is_no_success(suite: list[str], tmp_path: Path) -> None:
    without = [word for word in suite if word not in ("-p", "order")]
    with pytest.raises(SystemExit, match="seed 5: pytest ended with 4"):
        repeat.run(5, without, 60, tmp_path / "report.xml")
    (tmp_path / "report.xml").write_text("<testsuites/>")  # Of another run.
    with pytest.raises(SystemExit, match="seed 5: pytest ended with 4"):
        repeat.run(5, without, 60, tmp_path / "report.xml")


def test_the_load_ends_with_the_run(tmp_path: Path) -> None:
    with repeat.load(tmp_path, 2):
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(os.getpid())], capture_output=True, text=True)
        pids = [int(pid) for pid in listed.stdout.split()]
        assert len(pids) >= 2
    left = [pid for pid in pids if Path(f"/proc/{pid}/cmdline").exists() and "load-" in _command(pid)]
    assert left == []


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()
