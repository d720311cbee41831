"""The command when it is asked to end: early, late, twice, or by a signal that it was told to ignore."""

from __future__ import annotations

import json
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
from support.halfway import NBYTES, NUM_TENSORS, PARTIAL, converting
from support.interruptions import claims_in
from support.patience import PATIENCE
from support.prestarted import heed_all_signals
from support.trees import tree

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


def test_a_signal_while_modules_are_imported_is_one_line(work: Path) -> None:
    words = ["convert", "model", "--tp", "1", "--dry-run"]
    num_imports = int(python(AT_AN_IMPORT, "0", "0", *words, cwd=work).stdout.splitlines()[-1])
    assert num_imports > 50
    for which in (1, 2, num_imports // 3, num_imports):
        interrupts = which in (1, num_imports)
        number, code, word = (signal.SIGINT, 130, "interrupted") if interrupts else (signal.SIGTERM, 143, "terminated")
        done = python(AT_AN_IMPORT, str(which), str(int(number)), *words, cwd=work)
        assert (done.returncode, done.stderr) == (code, f"relayout: {word}\n"), which


@pytest.mark.parametrize(
    ("number", "args", "code"),
    [
        (signal.SIGINT, "convert model --tp 1", 0),
        (signal.SIGHUP, "convert model --tp 1 --dry-run", 0),
        (signal.SIGTERM, "verify model --ranks 0", 2),
    ],
)
def test_a_signal_while_the_process_ends_changes_nothing(
    work: Path, number: signal.Signals, args: str, code: int
) -> None:
    done = prestarted.run(int(number), *args.split(), script=AT_THE_END, cwd=work)
    assert done.returncode == code
    assert done.stderr.count("\n") == (2 if code else 0), done.stderr


ALL = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM]


def ignore_all_signals() -> None:
    for number in ALL:
        signal.signal(number, signal.SIG_IGN)


def test_signals_that_were_ignored_from_the_beginning_stay_ignored_and_the_terminal_may_go_away(big: Path) -> None:
    """As under nohup, or in the background of a script."""
    ours, theirs = pty.openpty()
    with converting(big, ignore_all_signals, stderr=theirs) as child:
        os.close(theirs)
        os.close(ours)
        for number in ALL:
            child.send_signal(number)
        stdout, _ = child.communicate(timeout=PATIENCE)
    assert child.returncode == 0
    assert stdout.startswith("done big-tp1: ")
    assert relayout.inspect(big / "big-tp1").nbytes == NBYTES


def test_several_signals_stop_a_conversion_as_one_and_keep_what_is_done(big: Path) -> None:
    """timeout(1) sends SIGTERM to its child, and to the group that it is in; a terminal that goes away, SIGHUP."""
    before = tree(big)
    with converting(big) as child:
        for number in 4 * [signal.SIGHUP, signal.SIGTERM]:
            child.send_signal(number)
        stdout, stderr = child.communicate(timeout=PATIENCE)
    assert child.returncode in (128 + signal.SIGHUP, 128 + signal.SIGTERM)
    assert stdout == ""
    note = f"relayout: note: finished work is kept in {big / PARTIAL}; the same command resumes it"
    assert stderr.splitlines() == ["relayout: terminated", note, "relayout: next: run the same command again"]
    assert {name: entry for name, entry in tree(big).items() if not name.startswith(PARTIAL)} == before
    kept = kept_nbytes(big)
    assert 0 < kept < NBYTES
    assert resumed_nbytes(big) == kept


def resumed_nbytes(big: Path) -> int:
    """How much the same command takes over; nothing is left beside its output, which is right."""
    done = prestarted.run("convert", "big", "--tp", "1", "--max-part-size", "4M", "--json", cwd=big)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in big.iterdir()) == ["big", "big-tp1"]
    found = relayout.verify(big / "big-tp1", source=big / "big")
    assert (found.ok, found.num_tensors) == (True, NUM_TENSORS)
    return int(json.loads(done.stdout)["resumed_nbytes"])


def kept_nbytes(big: Path) -> int:
    """Bytes of the tensors that a stopped conversion has done."""
    return len(claims_in(big / PARTIAL)) * (NBYTES // NUM_TENSORS)
