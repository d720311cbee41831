"""The page cache is in the state that is said, and the drive's limit is measured past it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from support.page_cache import drop, write_cold

from relayout.benchmark import machine
from relayout.benchmark.machine import direct_gb_per_s
from relayout.errors import PlanError


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


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("meta", "device 'meta', expected cpu, cuda or cuda:N"),
        ("nothing", "device 'nothing': "),
        *(("cuda", "device 'cuda': .*(CUDA|NVIDIA)"), ("cuda:1", "device 'cuda:1': .*(CUDA|NVIDIA)")),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_torch_cannot_use_is_refused_in_a_sentence(device: str, reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        machine.devices_of(device)


def test_ranks_go_to_all_devices_or_to_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert machine.devices_of("cpu") == ("cpu",)
    assert machine.devices_of("cuda") == ("cuda:0", "cuda:1")
    assert machine.devices_of("cuda:1") == ("cuda:1",)
    with pytest.raises(PlanError, match="device 'cuda:2': torch sees cuda:0, cuda:1"):
        machine.devices_of("cuda:2")


def test_the_limit_is_measured_by_fio_or_else_by_reads_of_our_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "with:colon"
    write_cold(file, 16 << 20)
    if shutil.which("fio") is not None:
        found = machine.drive_limit([file])
        assert found is not None
        assert (found.by, found.gb_per_s > 0) == ("fio", True)
    monkeypatch.setattr(machine, "direct_gb_per_s", lambda files: 2.5)
    broken = tmp_path / "fio"
    broken.write_text("#!/bin/sh\necho 'fio: engine libaio not loadable' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert machine.drive_limit([file]) == machine.DriveLimit(2.5, "threads of direct reads")
    monkeypatch.setattr(machine, "direct_gb_per_s", lambda files: None)
    assert machine.drive_limit([file]) is None
