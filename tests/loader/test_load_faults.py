"""Loads from files that fail, are cut, replaced or removed meanwhile: one clear error, nothing left, and loads go on.

Most of it happens in one process under `faults.c`, see faulty.py.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import faulty
from support.fake_cuda import FakeCuFile, FakeHandle
from support.faulty import CUT, PART
from support.loader_fixtures import (
    WAYS,
    assert_equal,
    fake_device,
    nothing_left_behind,
)
from support.patience import PATIENCE
from support.tools import PYTHONPATH

import relayout
from relayout.errors import FormatError
from relayout.storage.local import store
from relayout.storage.local.store import InputFile

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="takes Linux's dynamic linker and /proc"),
    pytest.mark.xdist_group("load_faults"),  # One child makes all the faults.
]

NOTHING = [0, 0, 0, 0]
"""More descriptors, threads, mappings of rank files, bytes of large mappings; while the error is at hand."""


@pytest.fixture
def folder(place: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(place / "out", tmp_path / "out"))


@pytest.fixture(scope="module")
def outcomes(place: Path, shim: Path) -> dict[str, dict[str, Any]]:
    """What came of each trial, by "way: call: fault"."""
    done = subprocess.run(
        [sys.executable, "-m", "support.faulty", str(place / "out"), str(place / "foreign")],
        env={**os.environ, "LD_PRELOAD": str(shim), "PYTHONPATH": PYTHONPATH, **faulty.QUIET},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.fixture(params=faulty.TRIALS, ids=": ".join)
def trial(request: pytest.FixtureRequest, outcomes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What came of each fault, for one way and call."""
    start = ": ".join(request.param) + ": "
    found = {name.removeprefix(start): outcome for name, outcome in outcomes.items() if name.startswith(start)}
    assert found
    return found | {"call": request.param[1]}


def test_a_range_that_cannot_be_read_is_told_with_file_and_offset(trial: dict[str, Any]) -> None:
    for what in ("an error in whole blocks", "an error in the last block"):
        outcome = trial[what]
        assert outcome["left"] == NOTHING
        assert outcome["same"]  # As far as anything was yielded.
        if trial["call"] == "open" and what == "an error in whole blocks":  # They are mapped, and nobody looks at them.
            assert "error" not in outcome
            continue
        assert (outcome["error"], outcome["errno"], Path(outcome["filename"]).name) == ("OSError", errno.EIO, PART)
        (offset,) = re.findall(r"Input/output error at byte (\d+); ", outcome["text"])  # Where the request began.
        assert int(offset) <= outcome["fails at"]
        assert outcome["text"].count("the drive or file system failed: see dmesg") == 1
        if trial["call"] not in ("iter_load", "safe_open"):
            assert outcome["num"] == 0


def test_short_and_interrupted_reads_are_none_of_the_callers_business(trial: dict[str, Any]) -> None:
    outcome = trial["short and interrupted reads"]
    assert "error" not in outcome
    assert outcome["same"]
    assert outcome["num"] >= 30
    assert outcome["left"] == NOTHING


def test_a_file_that_is_cut_while_it_is_read_is_named(trial: dict[str, Any]) -> None:
    """A read that the cut overtakes finds zeros behind it: only a digest can tell these from bytes of the file."""
    outcome = trial["cut"]
    assert outcome["error"] == "FormatError"
    wrong = re.search(rf"{PART}: bytes \d+ to (\d+) do not match digest", outcome["text"])
    if trial["call"] == "load verify" and wrong:
        assert int(wrong[1]) > CUT
    else:
        assert re.search(rf"{PART}: ends at byte \d+, expected \d+ bytes$", outcome["text"])
    assert outcome["left"] == NOTHING
    assert outcome["same"]
    kind, text = trial["cut, once more"]["again"]
    assert kind == "FormatError"
    assert re.search(rf"{PART}: {CUT} bytes long, expected \d+$", text)


@pytest.mark.parametrize(
    ("what", "later"),
    [("replaced", "tensors_digest in its header differs from"), ("unlinked", "is missing")],
)
def test_a_file_that_leaves_its_place_is_read_to_its_end_or_named(trial: dict[str, Any], what: str, later: str) -> None:
    """Never are bytes of two files mixed, or taken from the wrong one."""
    outcome = trial[what]
    assert outcome["left"] == NOTHING
    assert outcome["same"]
    if trial["call"] == "safe_open":  # It opens the file again for each tensor.
        assert outcome["error"] == "FormatError"
    if "error" in outcome:
        assert outcome["error"] == "FormatError"
        assert re.search(rf"{PART}: (was replaced while|{later})", outcome["text"])
    kind, text = trial[f"{what}, once more"]["again"]
    assert kind == "FormatError"
    assert re.search(rf"{PART}: {later}", text)


def test_afterwards_the_same_process_loads_what_has_been_repaired(trial: dict[str, Any]) -> None:
    assert trial["repaired"]["again"] == [True]


def test_many_iterations_that_nobody_ends_leave_nothing(outcomes: dict[str, dict[str, Any]]) -> None:
    abandoned = [outcome["left"] for name, outcome in outcomes.items() if name.endswith(": abandoned")]
    assert abandoned == [NOTHING] * sum(call == "iter_load" for _, call in faulty.TRIALS)


@pytest.fixture
def replace(place: Path, folder: Path) -> Callable[[], None]:
    """Puts another conversion's file in the place of one that is loaded from."""
    return partial(faulty.replace, folder, place / "foreign")


NOT_ITS_OWN = (
    rf"{PART}: tensors_digest in its header differs from [0-9a-f]+: not the file that relayout.json describes$"
)


@pytest.mark.parametrize(
    ("way", "call"),
    [*((way, "load") for way in WAYS), *(("auto", call) for call in ("iter_load", "load tp", "open", "safe_open"))],
    indirect=["way"],
)
@pytest.mark.parametrize("when", ["before", "behind"])
def test_a_file_that_is_replaced_while_it_is_opened_is_not_taken_for_another(
    way: str, call: str, when: str, folder: Path, replace: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is opened is looked at, not what lies at its path before or behind that."""
    faulty.stored(folder, "model-rank-0-*")
    own = shutil.copy(folder / PART, folder / "own")

    def open_file(path: Path, *given: Any, **options: Any) -> InputFile:
        if path.name != PART:
            return InputFile(path, *given, **options)
        replace()
        opened = InputFile(path, *given, **options)
        if when == "behind":
            Path(shutil.copy(own, folder / "beside")).replace(folder / PART)
        return opened

    monkeypatch.setattr(store, "InputFile", open_file)
    kept: dict[str, torch.Tensor] = {}
    with nothing_left_behind(), pytest.raises(FormatError, match=f"{NOT_ITS_OWN}|was replaced while it was opened"):
        faulty.CALLS[call](folder, way, kept)
    assert kept == {} or call == "safe_open", "which gives one tensor after another"


def test_a_file_that_was_only_touched_or_copied_is_the_same(folder: Path) -> None:
    with relayout.safe_open(folder) as opened:
        before = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
        os.utime(folder / PART)
        assert_equal({name: opened.get_tensor(name) for name in before}, before)
        Path(shutil.copy(folder / PART, folder / "beside")).rename(folder / PART)
        assert_equal({name: opened.get_tensor(name) for name in before}, before)


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_file_that_is_replaced_between_two_ways_of_opening_it_is_refused(
    is_gone: bool, folder: Path, replace: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    cufile = FakeCuFile()
    true_open = cufile.open

    def open_it(path: Path) -> FakeHandle:
        if path.name == PART:
            replace()
        handle = true_open(path)
        if path.name == PART and is_gone:
            path.unlink()
        return handle

    for _ in fake_device(monkeypatch, "gds", cufile=cufile):
        monkeypatch.setattr(cufile, "open", open_it)
        with nothing_left_behind(), pytest.raises(FormatError, match=rf"{PART}: was replaced while it was opened$"):
            relayout.load(folder, 0)
