"""Loads by the real libcufile, of PyPI's `nvidia-cufile`, in compat mode: on a CPU, by a fake driver of CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.fake_driver import fake_driver, load_by_cufile, machine_at
from support.loader_fixtures import assert_equal, mlp_model
from support.page_cache import write_cold

import relayout

__all__ = ["fake_driver"]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A plain checkpoint, and its conversion, on a drive."""
    write_cold(tmp_path / "probe", 4096)
    source, converted = mlp_model(tmp_path / "source"), tmp_path / "converted"
    relayout.convert(source, converted)
    return source, converted


def test_the_tensors_are_those_of_the_source_and_nobody_calls_it_gpudirect_storage(
    fake_driver: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    source, converted = folders
    machine = machine_at(tmp_path / "machine")
    asked = ["cufile-compat", "gds"]
    told, refused = load_by_cufile(fake_driver, machine, converted, tmp_path, asked)
    assert (told["backend"], told["gds"], told["in_place"]) == ("cufile-compat", None, 0)
    assert told["reason"].startswith("requested: cuFile, compat mode is asked for: cuFile reads files on ")
    assert " in compat mode, through host memory; experimental: never tested on a GPU; " in told["reason"]
    assert "GDS" not in told["reason"]
    assert told["registered"] == 1
    expected, loaded = load_file(source / "model.safetensors"), load_file(tmp_path / "cufile-compat.safetensors")
    assert_equal(loaded, expected)
    # The rest lies in blocks that cuFile does not read whole.
    assert told["cufile"] > 0.9 * sum(tensor.nbytes for tensor in expected.values())
    # The driver stays open for the whole process, and reads through host memory.
    assert refused["refused"].startswith("backend 'gds': GPUDirect Storage is not available: ")
    assert "cuFile may read through host memory: force_compat_mode is on" in refused["refused"]


def test_gpudirect_storage_is_refused_where_only_compat_mode_works(
    fake_driver: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    source, converted = folders
    machine = machine_at(tmp_path / "machine")
    refused, told = load_by_cufile(fake_driver, machine, converted, tmp_path, ["gds", "cufile-compat"])
    assert "cuFile: DRIVER_NOT_INITIALIZED (5001): " in refused["refused"]
    # The driver did not open, so its settings can still be made.
    assert (told["backend"], told["gds"]) == ("cufile-compat", None)
    assert_equal(load_file(tmp_path / "cufile-compat.safetensors"), load_file(source / "model.safetensors"))


def test_a_drive_that_udev_does_not_know_is_named(
    fake_driver: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    machine = machine_at(tmp_path / "machine", udev=False)
    [refused] = load_by_cufile(fake_driver, machine, folders[1], tmp_path, ["cufile-compat"])
    assert refused["refused"].startswith("backend 'cufile-compat': cuFile, compat mode is not available: ")
    assert "cuFile: HANDLE_NOT_REGISTERED (5027)" in refused["refused"]
    assert f": udev has no entry of its drive ({machine / 'run/udev/data'}/b" in refused["refused"]
