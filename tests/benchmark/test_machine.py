"""The page cache is in the state that is said, and the drive's limit is measured past it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.page_cache import drop, write_cold

from relayout.benchmark import machine
from relayout.benchmark.machine import direct_gb_per_s


def test_files_are_made_cold_and_warm_and_that_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, other = tmp_path / "a", tmp_path / "b"
    write_cold(file, 1 << 20)
    write_cold(other, 1 << 20)
    machine.prepare([file], [file, other], cold=False, needed_nbytes=0)
    assert machine.resident_share([file]) == 1
    assert machine.resident_share([other]) == 0, "files that are not read were brought in"
    machine.prepare([other], [file, other], cold=True, needed_nbytes=0)
    assert machine.resident_share([file, other]) == 0
    monkeypatch.setattr(machine, "forget", lambda files: None)
    machine.remember([file])
    with pytest.raises(machine.NotPrepared, match=r"50\.0 % of the files are in the page cache after three attempts"):
        machine.prepare([file], [file, other], cold=True, needed_nbytes=0)
    monkeypatch.setattr(machine, "resident_nbytes", lambda fd, offset, nbytes: None)
    with pytest.raises(machine.NotPrepared, match="does not report"):
        machine.prepare([file], [file, other], cold=True, needed_nbytes=0)


def test_the_drive_is_read_directly_and_the_page_cache_stays_as_it_is(tmp_path: Path) -> None:
    write_cold(tmp_path / "file", 5 << 20)
    drop(tmp_path / "file")
    speed = direct_gb_per_s([tmp_path / "file"])
    assert speed is None or speed > 0
    if speed is not None:
        assert machine.resident_share([tmp_path / "file"]) == 0


def test_where_the_system_has_no_call_for_it_pages_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"x" * 4096)
    for name in ("posix_fadvise", "fdatasync"):  # As on macOS.
        monkeypatch.delattr(os, name, raising=False)
    machine.forget([tmp_path / "file"])
    assert machine.resident_share([tmp_path / "file"]) in (1, None)
