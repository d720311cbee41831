"""The command `bench`: what it asks, prints and returns."""

from __future__ import annotations

import io
import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from relayout.benchmark.commands import may_drop_caches
from relayout.benchmark.run import Folders, RankGroup
from relayout.benchmark.samples import DriveSample
from relayout.benchmark.verdict import Measurement, RankLoads
from relayout.cli import signals
from relayout.cli.app import app


def test_the_command_drops_no_cache_unasked_and_fits_80_columns(
    folders: Folders, not_measured: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = CliRunner().invoke(app, ["bench", str(folders.source)])
    assert done.exit_code == 0, done.output
    assert not_measured == [False]
    # One rank and all ranks, warm, by three loaders or more.
    loads = re.findall(r"(\d+) loads, each in fresh processes: ", done.stderr)[0]
    assert int(loads) % (2 * 3) == 0
    assert int(loads) >= 18
    assert f"\n{loads}/{loads} all 4 ranks at once, warm: " in done.stderr
    assert "not measured: cold loads: dropping the files" in done.stdout
    assert done.stdout.startswith("No clear gain here")
    allowed = CliRunner().invoke(app, ["bench", str(folders.source), "--yes", "--runs", "2"])
    assert not_measured == [False, True]
    assert "one rank of 4, cold" in allowed.stdout
    assert "drive: 2.00 GB/s" in allowed.stdout
    assert all(len(line) <= 80 for line in (done.stdout + allowed.stdout).splitlines())
    monkeypatch.setattr("relayout.benchmark.commands.may_drop_caches", lambda *about: pytest.fail("was asked"))
    assert CliRunner().invoke(app, ["bench", str(folders.source), "--no"]).exit_code == 0
    assert not_measured == [False, True, False]


@pytest.mark.parametrize("done", [1, 7])
def test_what_was_measured_before_a_signal_is_printed(
    folders: Folders, not_measured: list[bool], monkeypatch: pytest.MonkeyPatch, done: int
) -> None:
    load, left = RankGroup._load, [None] * done

    def stopped(group: RankGroup, name: str) -> Measurement:
        if not left:
            raise signals.SignalReceived(signal.SIGTERM)
        left.pop()
        return load(group, name)

    monkeypatch.setattr(RankGroup, "_load", stopped)
    ended = CliRunner().invoke(app, ["bench", str(folders.source), "--yes"])
    assert ended.exit_code == 128 + signal.SIGTERM
    assert f"not measured: stopped after {done} of " in ended.stdout
    assert "one rank of 4, cold" in ended.stdout
    assert "  relayout, converted" in ended.stdout


def test_a_person_is_asked_before_caches_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def confirm(question: str, *, err: bool) -> bool:
        asked.append(question)
        assert err, "the question must not come into what is piped"
        return len(asked) > 1

    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert not may_drop_caches(3, 10**9)
    assert asked == []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("typer.confirm", confirm)
    assert not may_drop_caches(3, 10**9)
    assert may_drop_caches(3, 10**9)
    assert "3 files (1.0 GB) are dropped" in " ".join(asked[0].split())


def test_the_command_prints_one_json_object(folders: Folders, not_measured: list[bool]) -> None:
    done = CliRunner().invoke(app, ["bench", str(folders.source), "--yes", "--json"])
    found = json.loads(done.stdout)
    assert found["tp"] == 4
    assert [(one["title"], one["state"]) for one in found["loads"]] == [
        ("one rank of 4", "cold"),
        ("all 4 ranks at once", "cold"),
        ("one rank of 4", "warm"),
        ("all 4 ranks at once", "warm"),
    ]


def test_other_bytes_end_the_command_with_a_difference(
    folders: Folders, not_measured: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankLoads, "wrong", lambda one: ["rank 1 differs"])
    done = CliRunner().invoke(app, ["bench", str(folders.source)])
    assert done.exit_code == 1
    assert "WRONG BYTES: rank 1 differs" in done.stdout
    quiet = CliRunner().invoke(app, ["bench", str(folders.source), "-q"])
    assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (1, "", "")


@pytest.fixture
def sampled(not_measured: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """The drive reads 1 GB/s in each load: 2,048 requests of 512 KiB, 8 at a time."""
    load = RankGroup._load
    samples = (DriveSample(0.0, 0.5, 2**29, 1024, 8.0), DriveSample(0.5, 0.5, 2**29, 1024, 8.0))
    monkeypatch.setattr(RankGroup, "_load", lambda group, name: replace(load(group, name), drive=samples))


@pytest.mark.usefixtures("sampled")
def test_the_drive_is_shown_under_its_loads_and_drawn_into_a_new_file(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    chart = tmp_path / "chart.svg"
    done = CliRunner().invoke(app, ["bench", str(folders.source), "--yes", "--runs", "2", "--chart", str(chart)])
    assert done.exit_code == 0, done.output
    assert re.search(r"drive during one rank of 4, cold *\n *relayout, converted +1\.07 +1\.07 +512 +8\.0", done.stdout)
    assert "loads go to host memory" in " ".join(done.stdout.split())
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert chart.read_text().startswith("<svg ")
    again = CliRunner().invoke(app, ["bench", str(folders.source), "--yes", "--chart", str(chart)])
    assert again.exit_code == 2
    assert "the file exists, and is not replaced" in " ".join(again.stderr.split())


@pytest.mark.usefixtures("not_measured")
def test_without_samples_there_is_no_chart(folders: Folders, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", str(folders.source), "--no", "--chart", str(tmp_path / "chart.svg")])
    assert done.exit_code == 0
    assert "no chart: " in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "reason"), [("chart.png", "ends in .svg"), ("no/chart.svg", "folder does not exist")])
def test_a_chart_that_cannot_be_written_is_refused_before_anything_is_measured(
    folders: Folders, not_measured: list[bool], tmp_path: Path, name: str, reason: str
) -> None:
    done = CliRunner().invoke(app, ["bench", str(folders.source), "--yes", "--chart", str(tmp_path / name)])
    assert (done.exit_code, not_measured) == (2, [])
    assert reason in " ".join(done.stderr.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_before_anything_is_written(
    folders: Folders, not_measured: list[bool], tmp_path: Path
) -> None:
    for arguments in ([str(folders.source)], [str(tmp_path), "--size", "4GB"]):
        done = CliRunner().invoke(app, ["bench", *arguments, "--device", "cuda"])
        assert (done.exit_code, not_measured) == (2, [])
        assert "device 'cuda': " in done.stderr
    assert not list(tmp_path.iterdir())
