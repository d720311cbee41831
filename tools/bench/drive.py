"""The drive, the page cache, and the machine: what a measurement must control, and what it is compared with."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from relayout.benchmark.machine import describe, drive_limit, fio
from relayout.benchmark.machine import total_nbytes as files_nbytes

PACKAGES = (
    "torch",
    "safetensors",
    "fastsafetensors",
    "runai-model-streamer",
    "instanttensor",
    "numpy",
    "xxhash",
    "safetensors-relayout",
)


def files_of(folders: Iterable[Path]) -> list[Path]:
    """The files in the folders."""
    return [path for folder in folders for path in sorted(folder.iterdir())]


def total_nbytes(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return files_nbytes(files_of([folder]))


def need_fio() -> None:
    """Stop where the drive's own limit cannot be measured."""
    if shutil.which("fio") is None:
        raise SystemExit("fio is needed to know the drive's own limit: install it (apt install fio)")


def limit_by() -> str:
    """By what `direct_read` finds the drive's limit."""
    return "fio" if shutil.which("fio") else "threads of direct reads"


def direct_read(files: Sequence[Path]) -> float:
    """GB/s of direct reads of these files; without fio, by reads of our own."""
    found = drive_limit(files)
    assert found is not None, "the file system refuses direct reads"
    return found.gb_per_s


def fio_mixed(folder: Path) -> float:
    """GB/s of direct reads while as many bytes are written."""
    path = folder / "fio"
    result = fio(f"--filename={path}", "--rw=rw", "--rwmixread=50", "--size=4G", "--overwrite=1")
    path.unlink()
    return float(result["read"]["bw_bytes"]) / 1e9


def machine(folder: Path) -> dict[str, Any]:
    """What was measured on: hardware, system and versions; no names of hosts, nor paths."""
    described = asdict(describe(folder)) | {"versions": {package: version(package) for package in PACKAGES}}
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        described["gpus"] = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    return described


def version(package: str) -> str | None:
    """Installed version of a package; None: not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def num_gpus() -> int:
    """CUDA devices that processes started here see."""
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return len(visible.split(",")) if visible else len(listed.stdout.splitlines())
