"""The real libcufile without a GPU: it finds the driver `fake_driver.c`, whose device memory is the host's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from support.patience import PATIENCE
from support.tools import PYTHONPATH

_ENTRY = "I:1\nE:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=ext4\n"
"""The part of udev's entry of a drive that libcufile reads."""


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled `fake_driver.c`."""
    for package in ("nvidia-cufile", "cuda-bindings"):
        if not list(distributions(name=package)):  # This process does not import them: it would have libcufile, too.
            pytest.skip(f"{package} is not installed")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc)")
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = Path(__file__).with_suffix(".c")
    options = ("-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    subprocess.run([compiler, *options, "-o", library, source, "-ldl"], check=True)
    return library


def machine_at(folder: Path, *, udev: bool = True) -> Path:
    """Make the files that libcufile reads of a machine; `udev`: with an entry of the drive that `folder` is on."""
    for path in ("proc", "run/udev/data"):
        (folder / path).mkdir(parents=True)
    (folder / "proc/modules").write_text("nvidia 1 0 - Live 0x0\n")
    if udev:
        device = folder.stat().st_dev
        (folder / f"run/udev/data/b{os.major(device)}:{os.minor(device)}").write_text(_ENTRY)
    return folder


def load_by_cufile(driver: Path, machine: Path, source: Path, out: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """Load a folder with each of these backends in one process, and return what `cufile_worker` says of each."""
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "LD_PRELOAD": str(driver), "FAKE_MACHINE": str(machine)}
    command = [sys.executable, "-m", "support.cufile_worker", *map(str, (source, machine, out)), *names]
    done = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    # libcufile prints, too.
    return [json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
