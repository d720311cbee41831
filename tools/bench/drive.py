"""The drive, the page cache, and the machine: what a measurement must control, and what it is compared with."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = (
    "torch",
    "safetensors",
    "fastsafetensors",
    "runai-model-streamer",
    "instanttensor",
    "flashpack",
    "numpy",
    "xxhash",
    "safetensors-relayout",
)


def total_nbytes(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())


def meminfo(field: str) -> int:
    """A field of /proc/meminfo, in bytes."""
    found = re.search(rf"^{field}:\s*(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def touch_memory(nbytes: int) -> None:
    """Write to memory and free it, so that it is the machine's when the measured process asks for it.

    A virtual machine that gives free memory back to its host pays for getting it again, in host page faults, as much
    as for reading a drive. Whoever runs after a process that has just freed memory would win. What the page cache holds
    is the machine's already, and is left there.
    """
    nbytes = min(nbytes, meminfo("MemFree") * 8 // 10)
    with mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        pages = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
        pages[:] = 1
        del pages


def forget(folders: Iterable[Path]) -> None:
    """Drop the folders' pages from the cache."""
    os.sync()
    for path in _files(folders):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def remember(folders: Iterable[Path]) -> None:
    """Read the folders' files into the cache."""
    for path in _files(folders):
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(16 * 2**20)
            while file.readinto(buffer):
                pass


def cached_share(folders: Iterable[Path]) -> float:
    """How much of the folders' bytes is in the page cache."""
    paths = _files(folders)
    return sum(_cached_nbytes(path) for path in paths) / sum(path.stat().st_size for path in paths)


def check_cold(folders: Iterable[Path]) -> None:
    """Make sure that nothing of the folders is in the page cache."""
    share = cached_share(folders)
    if share > 0.001:
        raise SystemExit(f"{100 * share:.1f} % of the files still in the page cache")


def _cached_nbytes(path: Path) -> int:
    """Of a file's pages in the page cache, as mincore(2) sees them."""
    nbytes = path.stat().st_size
    if nbytes == 0:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        pages = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
        start = np.frombuffer(mapped, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        result = libc.mincore(ctypes.c_void_p(start.ctypes.data), ctypes.c_size_t(nbytes), pages.ctypes)
        del start
        if result:
            raise OSError(ctypes.get_errno(), "mincore")
        return int((pages & 1).sum()) * mmap.PAGESIZE


def _files(folders: Iterable[Path]) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.iterdir())]


def need_fio() -> None:
    """Stop where the drive's own limit cannot be measured."""
    if shutil.which("fio") is None:
        raise SystemExit("fio is needed to know the drive's own limit: install it (apt install fio)")


def _fio(*options: str) -> dict[str, Any]:
    command = ["fio", "--name=limit", "--direct=1", "--ioengine=libaio", "--iodepth=8", "--bs=8M", *options]
    # Its buffers in huge pages, or else a request falls apart into as many as a drive takes segments of 4 KiB: on the
    # virtual machines where this was written, that was a third of what the drive gives.
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    command += ["--group_reporting", "--output-format=json"]
    run = subprocess.run(command, capture_output=True, check=True, env=environment)
    job: dict[str, Any] = json.loads(run.stdout[run.stdout.index(b"{") :])["jobs"][0]
    return job


def fio_read(files: Iterable[Path]) -> float:
    """GB/s of direct reads of these files."""
    result = _fio(
        f"--filename={':'.join(map(str, files))}", "--file_service_type=sequential", "--rw=read", "--readonly"
    )["read"]
    return float(result["bw_bytes"]) / 1e9


def fio_mixed(folder: Path) -> float:
    """GB/s of direct reads while as many bytes are written."""
    path = folder / "fio"
    result = _fio(f"--filename={path}", "--rw=rw", "--rwmixread=50", "--size=4G", "--overwrite=1")
    path.unlink()
    return float(result["read"]["bw_bytes"]) / 1e9


def machine(folder: Path | None = None) -> dict[str, object]:
    """What was measured on: hardware, system and versions; no names of hosts, nor paths."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    described: dict[str, object] = {
        "cpu": cpu[1] if cpu else platform.processor(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_gb": round(meminfo("MemTotal") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
    }
    if folder is not None:
        described |= {"file_system": _file_system(folder), "drive": _drive(folder)}
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


def _file_system(folder: Path) -> str:
    kinds = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        kinds[Path(point)] = kind
    return next(kinds[parent] for parent in [folder.resolve(), *folder.resolve().parents] if parent in kinds)


def _drive(folder: Path) -> str | None:
    """Model of the drive that the folder lies on, else its kind ("vda"); None: it is on no block device."""
    number = folder.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        return None
    whole = device.resolve()
    if (whole / "partition").exists():
        whole = whole.parent
    model = whole / "device/model"
    return model.read_text().strip() if model.exists() else whole.name
