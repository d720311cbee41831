"""A drive is sampled by the kernel's counters while it is read, and nothing is made up where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.page_cache import write_cold

from relayout.benchmark import samples
from relayout.benchmark.samples import (
    DriveCounters,
    DriveSample,
    drive_number,
    mean_queue,
    mean_request_nbytes,
    sampling,
)

TEXT = """\
   7       0 loop0 1 0 2 3 0 0 0 0 0 0 0 0 0 0 0 0 0
 259       0 nvme0n1 1000 5 40000 2500 7 0 56 9 0 100 2509 0 0 0 0 3 4
 259       1 nvme0n1p1 10 0 80 5 0 0 0 0 0 5 5
"""
"""As of `Documentation/admin-guide/iostats.rst`; a kernel before 4.18 has fewer columns."""


def test_counters_are_those_of_the_drive_in_bytes_and_seconds() -> None:
    assert DriveCounters.parse(TEXT, "259:0", 4.0) == DriveCounters(4.0, 1000, 40000 * 512, 2.5)
    assert DriveCounters.parse(TEXT, "259:1", 4.0) == DriveCounters(4.0, 10, 80 * 512, 0.005)
    assert DriveCounters.parse(TEXT, "0:43", 4.0) is None


def test_a_sample_is_what_was_counted_in_an_interval() -> None:
    before, after = DriveCounters(10.0, 100, 10**9, 1.0), DriveCounters(10.5, 300, 2 * 10**9, 5.0)
    sample = after.since(before, 8.0)
    assert sample == DriveSample(2.0, 0.5, 10**9, 200, 8.0)
    assert sample.gb_per_s == 2.0
    others = DriveSample(2.5, 1.5, 2 * 10**9, 100, 0.0)
    assert mean_request_nbytes([sample, others]) == 10**7
    assert mean_queue([sample, others]) == 2.0
    assert (mean_request_nbytes([]), mean_queue([])) == (None, 0.0)


def test_bytes_that_a_drive_reads_are_counted(tmp_path: Path) -> None:
    write_cold(tmp_path / "file", 8 << 20)  # Skips where the page cache cannot be emptied.
    with sampling(drive_number(tmp_path / "file")) as found:
        (tmp_path / "file").read_bytes()
    if not found:
        pytest.skip("the file system is on no single drive")
    assert sum(sample.nbytes for sample in found) >= 8 << 20
    assert [sample.start for sample in found] == sorted(sample.start for sample in found)
    assert found[0].start == 0


@pytest.mark.parametrize("number", [None, "0:999"])
def test_a_drive_without_counters_has_no_samples(number: str | None) -> None:
    with sampling(number) as found:
        pass
    assert found == []


def test_a_system_without_the_file_has_no_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (None, "text that no kernel writes\n"):
        monkeypatch.setattr(samples, "_COUNTERS", tmp_path / "diskstats")
        if text is not None:
            (tmp_path / "diskstats").write_text(text)
        with sampling("259:0") as found:
            pass
        assert found == []
