"""Times in the page: those of `bench --json` for the same checkpoint, and of nothing else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from relayout.benchmark.machine import describe
from relayout.benchmark.measure import Bench
from relayout.benchmark.verdict import Measurement, RankLoads, Timing
from relayout.errors import FormatError, PlanError
from relayout.html_report.measured import read_bench


def timing(title: str, family: str, *seconds: float) -> Timing:
    runs = tuple(Measurement(one, one / 2, 2 * 10**9, 0, 0, 0.0, ("a",)) for one in seconds)
    return Timing(title, title, family, runs, None if runs else "not installed")


@pytest.fixture
def result(tmp_path: Path) -> Bench:
    """A result of `bench` for the folder `out` of tmp_path, with three loaders, of which one failed."""
    timings = (
        timing("safetensors", "safetensors", 4.0, 9.0, 5.0),
        timing("relayout", "relayout", 1.0, 2.0, 3.0),
        timing("Run:ai streamer", "runai"),
    )
    return Bench(
        source=str(tmp_path / "model"),
        converted=str(tmp_path / "out"),
        tp=8,
        runs=3,
        machine=describe(tmp_path),
        devices=("cpu",),
        drive_gb_per_s=None,
        drive_by=None,
        loads=(RankLoads("one rank of 8", 1, "cold", timings, None),),
        left_out=(),
        warnings=("other processes were busy",),
        wrong=(),
        verdict="relayout is 2.5 times as fast",
    )


def written(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_the_medians_are_those_of_bench(result: Bench, tmp_path: Path) -> None:
    shown = read_bench(written(tmp_path / "bench.json", result.as_json()), [tmp_path / "." / "out"])
    assert (shown["verdict"], shown["warnings"]) == (result.verdict, list(result.warnings))
    [group] = shown["loads"]
    assert group["title"] == "one rank of 8, cold"
    assert group["rows"] == [
        {
            "title": one.title,
            "is_ours": one.family == "relayout",
            "seconds": one.median("seconds"),
            "gb_per_s": one.gb_per_s,
            "cpu_seconds": one.median("cpu_seconds"),
            "ratio": one.median("seconds") / 2.0,
        }
        for one in result.loads[0].done
    ]
    assert read_bench(tmp_path / "bench.json", [tmp_path / "model"]) == shown


@pytest.mark.parametrize("source", ["another", None])
def test_times_of_another_checkpoint_are_refused(source: str | None, result: Bench, tmp_path: Path) -> None:
    other = dataclasses.replace(result, source=source, converted=None)
    with pytest.raises(PlanError, match=r"measured (another|a temporary checkpoint).*, expected .*out"):
        read_bench(written(tmp_path / "bench.json", other.as_json()), [tmp_path / "out"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"loads": None}, "'loads' is missing or not a list"),
        ({"verdict": 3}, "'verdict' is missing or not a string"),
        ({"converted": ["out"]}, "'converted' is missing or not a string or null"),
        ({"seconds": 0}, "'seconds' is missing or not a number"),
        ({"seconds": True}, "'seconds' is missing or not a number"),
        ({"cpu_seconds": -1}, "'cpu_seconds' is missing or not a number"),
        ({"nbytes": 1.5}, "'nbytes' is missing or not a size"),
    ],
)
def test_a_file_of_another_form_is_refused(change: dict[str, Any], says: str, result: Bench, tmp_path: Path) -> None:
    content: dict[str, Any] = json.loads(json.dumps(result.as_json()))
    [name] = change
    (content if name in content else content["loads"][0]["timings"][0]["runs"][0]).update(change)
    with pytest.raises(FormatError, match=says):
        read_bench(written(tmp_path / "bench.json", content), [tmp_path / "out"])


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    for blob in (b"[]", b"relayout is faster", b" " * 16_000_001):
        (tmp_path / "bench.json").write_bytes(blob)
        with pytest.raises(FormatError, match=r"bench\.json"):
            read_bench(tmp_path / "bench.json", [tmp_path / "out"])
    with pytest.raises(FileNotFoundError):
        read_bench(tmp_path / "nothing.json", [tmp_path / "out"])
