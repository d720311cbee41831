"""The command when it is asked to end: early, late, twice, or by a signal that it was told to ignore."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import prestarted
from support.halfway import NBYTES, converting, heed_all_signals
from support.patience import PATIENCE

import relayout

AT_AN_IMPORT = """
import os, sys
which, number = int(sys.argv.pop(1)), int(sys.argv.pop(1))
seen = 0

def hook(event, args):
    global seen
    if event == "import":
        seen += 1
        if seen == which:
            os.kill(os.getpid(), number)

from relayout.__main__ import main
sys.addaudithook(hook)
try:
    main()
finally:
    if not which:
        print(seen)
"""
"""Sends itself a signal when it is about to import a module for the so manieth time."""

AT_THE_END = """
import atexit, os, sys
number = int(sys.argv.pop(1))
atexit.register(lambda: os.kill(os.getpid(), number))
import threading
threading._register_atexit(lambda: os.kill(os.getpid(), number))
from relayout.__main__ import main
main()
"""
"""Sends itself signals while Python ends."""


def python(script: str, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        preexec_fn=heed_all_signals,
    )


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder to work in, with a small model in it."""
    (tmp_path / "model").mkdir()
    save_file({"w": np.arange(1, 100, dtype=np.uint8)}, tmp_path / "model" / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("args", "number", "code", "word"),
    [
        ("inspect model", signal.SIGTERM, 143, "terminated"),
        ("convert model --dry-run", signal.SIGINT, 130, "interrupted"),
    ],
)
def test_a_signal_while_modules_are_imported_is_one_line(
    work: Path, args: str, number: signal.Signals, code: int, word: str
) -> None:
    done = python(AT_AN_IMPORT, "0", str(int(number)), *args.split(), cwd=work)
    num_imports = int(done.stdout.splitlines()[-1])
    assert num_imports > 50
    for which in (1, 2, *range(3, num_imports, num_imports // 6), num_imports):
        done = python(AT_AN_IMPORT, str(which), str(int(number)), *args.split(), cwd=work)
        assert (done.returncode, done.stderr) == (code, f"relayout: error: {word}\n"), which


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(("args", "code"), [("convert model", 0), ("convert nothing", 2), ("verify model", 2)])
def test_a_signal_while_the_process_ends_changes_nothing(
    work: Path, number: signal.Signals, args: str, code: int
) -> None:
    done = prestarted.run(int(number), *args.split(), script=AT_THE_END, cwd=work)
    assert done.returncode == code
    assert done.stderr.count("\n") == (1 if code else 0), done.stderr


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_was_ignored_from_the_beginning_stays_ignored(big: Path, number: signal.Signals) -> None:
    """As under nohup, or in the background of a script."""
    with converting(big, lambda: signal.signal(number, signal.SIG_IGN)) as child:
        child.send_signal(number)
        stdout, stderr = child.communicate(timeout=PATIENCE)
    assert (child.returncode, stderr) == (0, "")
    assert stdout.startswith("done big-tp1: ")
    assert relayout.inspect(big / "big-tp1").nbytes == NBYTES


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_that_come_together_are_one(big: Path, number: signal.Signals) -> None:
    """timeout(1) sends SIGTERM to its child, and to the group that it is in."""
    with converting(big) as child:
        for _ in range(8):
            child.send_signal(number)
        stdout, stderr = child.communicate(timeout=PATIENCE)
    assert (child.returncode, stdout) == (128 + number, "")
    word = "interrupted" if number == signal.SIGINT else "terminated"
    first, *rest = stderr.splitlines()
    assert first == f"relayout: error: {word}"
    assert all(line.startswith("relayout: note: ") for line in rest), stderr
    assert not (big / "big-tp1").exists()


def test_a_terminal_that_goes_away_stops_no_conversion_that_ignores_it(big: Path) -> None:
    ours, theirs = pty.openpty()
    with converting(big, lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN), stderr=theirs) as child:
        os.close(theirs)
        os.close(ours)
        stdout, _ = child.communicate(timeout=PATIENCE)
    assert child.returncode == 0
    assert stdout.startswith("done big-tp1: ")
